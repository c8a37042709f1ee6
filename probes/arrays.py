"""`FromArrays`: the constructors of `ProbeRows` for activations computed elsewhere."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from replaylens.dumps.content import CORE
from replaylens.engine.errors import MissingPackage, UnknownSite, no_such
from replaylens.engine.model.sites import by_letter
from replaylens.engine.request.values import short_repr
from replaylens.probes.errors import BadRows
from replaylens.probes.positions import PLACES
from replaylens.probes.sources import LETTERS, ArraySource, read_arrays

if TYPE_CHECKING:
    import datasets
    from datasets import Dataset

# ---- columns ---------------------------------------------------------------------------------------------------------
# The index of rows that come from arrays: labels, groups, and what else is known about each row.

LABEL = "label"
"""the name of a label that is given without one"""
OWN = (*CORE.names, *PLACES, "shard", "row", "depth", "part", "key", "group", "since_last")
"""columns of the index, which labels must not replace"""
GIVEN = ("correct", "steps")
"""of these, what a caller may know: whether the answer is right (`by_answer`), the prompt's length in steps (`by_length`)"""
_WHY = (
    "Rows of one prompt or document are not independent: they share tokens, so a probe fitted on some recognises the others. "
    "Folds, intervals and permutations keep groups together. Give groups=, one id per row, such as the number of its "
    "prompt; where every row has its own prompt, give range(len(X))."
)


def make_index(rows: int, labels: Any, groups: Any, *, prompts: Any, positions: Any, tokens: Any, keys: Any) -> pd.DataFrame:
    """One line per row, with the columns of a dump's index, missing where unknown. Arguments as in `ProbeRows.of_arrays`."""
    if groups is None:
        raise BadRows(f"No groups given. {_WHY}")
    own = read_labels(labels, rows)
    root = _ids("groups", groups, rows)
    prompt = root if prompts is None else _ids("prompts", prompts, rows)
    example = pd.factorize(prompt)[0]
    _check_prompts(root, prompt, example)
    place = np.full(rows, np.nan) if positions is None else _whole("positions", positions, rows)
    if positions is not None:
        _check_places(prompt, place)
    token, text = (np.full(rows, np.nan), None) if tokens is None else _tokens(tokens, rows)
    frame = pd.DataFrame(
        {
            "example": example,
            "root": root,
            "branch": 0,
            "parent": pd.NA,
            "fork_position": 0,
            "position": place,
            "token": token,
            "text": text,
            "token_state": "prompt",
            "accepted": True,
            "correct": None,
            "logprob": np.nan,
            "entropy": np.nan,
            "depth": 0,
            **dict.fromkeys(PLACES, np.nan),
        }
    )
    frame["since_last"] = frame["position"] - frame.groupby("example")["position"].transform("max")  # marks rows from arrays
    if keys is not None:
        frame["key"] = _ids("keys", keys, rows)
    return frame.assign(**own)


def read_labels(labels: Any, rows: int) -> dict[str, pd.Series]:
    """Label columns by name, from an array, a dict of arrays or a pandas object. Raises BadRows."""
    if isinstance(labels, pd.DataFrame):
        if not labels.columns.is_unique:
            twice = labels.columns[labels.columns.duplicated()][0]
            raise BadRows(f"Two label columns have the name {twice!r}. Give every label its own name.")
        given: dict[Any, Any] = {name: labels[name] for name in labels.columns}
    elif isinstance(labels, Mapping):
        given = dict(labels)
    else:
        name = labels.name if isinstance(labels, pd.Series) else None
        given = {LABEL if name is None else name: labels}
    if not given:
        raise BadRows("No labels given. Give an array, a dict of arrays, or a DataFrame.")
    for name in given:
        if not isinstance(name, str) or not name:
            raise BadRows(f"Label name {name!r} is no text. Give every label a name.")
        if name in OWN and name not in GIVEN:
            raise BadRows(f"Label name {name!r} is taken by the index. Give the label another name.")
    return {name: _label(name, values, rows) for name, values in given.items()}


def _label(name: str, values: Any, rows: int) -> pd.Series:
    """One label column. Whole numbers, booleans and text keep their kind if values are missing."""
    column = _column(f"label {name!r}", values, rows)
    if pd.api.types.is_float_dtype(column) and np.isinf(column.to_numpy(dtype=float, na_value=np.nan)).any():
        raise BadRows(f"Label {name!r} has infinite values. Leave them out, or give NaN where the label is missing.")
    if column.dtype != object:
        return column
    kinds = {_kind(value) for value in column[column.notna()]}
    if len(kinds) > 1:
        raise BadRows(f"Label {name!r} mixes {' and '.join(sorted(kinds))}. Give values of one kind.")
    kind = next(iter(kinds), "text")
    if kind not in ("text", "whole numbers", "booleans", "numbers"):
        raise BadRows(f"Label {name!r} has values of type {kind}. Give text, numbers or booleans.")
    wanted = {"text": object, "whole numbers": "Int64", "booleans": "boolean", "numbers": "float64"}[kind]
    return column.astype(wanted)


def _kind(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool | np.bool_):
        return "booleans"
    if isinstance(value, int | np.integer):
        return "whole numbers"
    return "numbers" if isinstance(value, float | np.floating) else type(value).__name__


def _column(what: str, values: Any, rows: int) -> pd.Series:
    """Values as a column of this many rows, whatever index they had."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = (values.double() if values.is_floating_point() else values).numpy()
    if isinstance(values, pd.Series):
        column = values.reset_index(drop=True)
    else:
        values = values if isinstance(values, np.ndarray) or pd.api.types.is_array_like(values) else _array(what, values)
        if values.ndim != 1:
            several = " Give several labels as a dict." if what.startswith("label") else ""
            raise BadRows(f"The {what} must have one value per row, but the shape is {list(values.shape)}.{several}")
        column = pd.Series(values)
    if len(column) != rows:
        has = "has" if what.startswith("label") else "have"
        raise BadRows(f"The {what} {has} {len(column)} values for {rows} rows. Give one per row, in the order of the rows.")
    return column


def _array(what: str, values: Any) -> np.ndarray:
    """A list, range or the like, without turning one kind of value into another."""
    if isinstance(values, str | bytes | Mapping) or not hasattr(values, "__iter__"):
        raise BadRows(f"The {what} must be an array or a list, but {values!r:.40} is neither. Give one value per row.")
    listed = list(values)
    out = np.empty(len(listed), dtype=object)
    out[:] = [value.item() if isinstance(value, Tensor) and value.ndim == 0 else value for value in listed]
    return out


def _ids(what: str, values: Any, rows: int) -> np.ndarray:
    """Ids as text. Raises BadRows if one is missing."""
    column = _column(what, values, rows)
    if column.isna().any():
        raise BadRows(f"The {what} lack a value at row {int(np.flatnonzero(column.isna())[0])}. Give an id for every row.")
    return column.map(str).to_numpy(dtype=object)


def _whole(what: str, values: Any, rows: int) -> np.ndarray:
    column = _column(what, values, rows)
    try:
        if any(isinstance(value, str | bytes) for value in column):
            raise TypeError  # "7" would become a number
        numbers = column.to_numpy(dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.full(rows, np.nan)
    bad = ~((numbers >= 0) & (numbers == np.floor(numbers)))
    if bad.any():
        row = int(np.flatnonzero(bad)[0])
        found = short_repr(column.tolist()[row])
        raise BadRows(f"The {what} must be whole numbers from 0 on, but row {row} has {found}. Count from 0.")
    return numbers.astype(np.int64)


def _tokens(tokens: Any, rows: int) -> tuple[np.ndarray, Any]:
    """(ids, text or None): of text, the ids are its rank."""
    column = _column("tokens", tokens, rows)
    if len(column) and all(isinstance(token, str) for token in column):
        return np.unique(column.to_numpy(dtype=str), return_inverse=True)[1], column.to_numpy(dtype=object)
    return _whole("tokens", tokens, rows), None


def _check_prompts(root: np.ndarray, prompt: np.ndarray, example: np.ndarray) -> None:
    first = np.unique(example, return_index=True)[1]
    wrong = np.flatnonzero(root != root[first][example])
    if len(wrong):
        row = int(wrong[0])
        raise BadRows(
            f"Prompt {prompt[row]!r} has rows in group {root[first[example[row]]]!r} and in group {root[row]!r} (row {row}). "
            f"Rows of one prompt are not independent: put them into one group."
        )


def _check_places(prompt: np.ndarray, place: np.ndarray) -> None:
    twice = pd.DataFrame({"prompt": prompt, "place": place}).duplicated().to_numpy()
    if twice.any():
        row = int(np.flatnonzero(twice)[0])
        other = int(np.flatnonzero((prompt == prompt[row]) & (place == place[row]))[0])
        raise BadRows(
            f"Rows {other} and {row} are both position {place[row]} of prompt {prompt[row]!r}. If a group has several prompts, "
            f"give prompts=, one id per row; otherwise correct or leave out the positions."
        )


# ---- tables ----------------------------------------------------------------------------------------------------------
# Rows from tables: the columns of a pandas frame or of a Hugging Face dataset, as the arguments of `ProbeRows.of_arrays`.

Features = str | Sequence[str] | Mapping[Any, str | Sequence[str]]
"""a column of vectors, several columns of numbers, or a dict of either by site"""


def activations(frame: pd.DataFrame, features: Features) -> Any:
    """X of `ProbeRows.of_arrays`: one array [rows, d], or several by site."""
    if isinstance(features, Mapping):
        return {site: _matrix(frame, columns) for site, columns in features.items()}
    return _matrix(frame, features)


def require_no_answers(features: Features, labels: str | Sequence[str], group: str | None, key: str | None) -> None:
    """Raise BadRows if a feature is a label, the group or the key: a probe would read its own answer."""
    sites = features.values() if isinstance(features, Mapping) else [features]
    given = {name for names in sites for name in ([names] if isinstance(names, str) else names)}
    roles = dict.fromkeys([labels] if isinstance(labels, str) else labels, "a label") | {group: "the group", key: "the key"}
    for name, role in roles.items():
        if name is not None and name in given:
            raise BadRows(f"Feature column {name!r} is {role}. Leave it out of the features: a probe would read it there.")


def columns(frame: pd.DataFrame, names: str | Sequence[str] | None) -> Any:
    """One column, several as a frame, or None. Raises BadRows for an unknown or repeated column."""
    if names is None:
        return None
    for name in [names] if isinstance(names, str) else names:
        if name not in frame:
            raise BadRows(no_such("column", str(name), map(str, frame.columns)))
        if isinstance(frame[name], pd.DataFrame):
            raise BadRows(f"Two columns have the name {name!r}. Rename one.")
    return frame[names] if isinstance(names, str) else frame[list(names)]


def _matrix(frame: pd.DataFrame, names: str | Sequence[str]) -> np.ndarray:
    if isinstance(names, str):
        return _stacked(names, columns(frame, names))
    if not len(names):
        raise BadRows("No feature columns given. Give their names, or the name of one column of vectors.")
    chosen = columns(frame, list(names))
    if not chosen.columns.is_unique:
        raise BadRows(f"Feature column {chosen.columns[chosen.columns.duplicated()][0]!r} is given twice. Give it once.")
    for name in chosen:
        if not pd.api.types.is_numeric_dtype(chosen[name]):
            raise BadRows(f"Feature column {name!r} holds {chosen[name].dtype}, not numbers. Leave it out.")
    return np.asarray(chosen.to_numpy(dtype=None if chosen.notna().all(axis=None) else np.float64, na_value=np.nan))


def _stacked(name: str, column: pd.Series) -> np.ndarray:
    """[rows, d] of a column whose cells are vectors."""
    cells = [np.asarray(cell) for cell in column]
    shapes = {cell.shape for cell in cells}
    if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
        raise BadRows(f"Column {name!r} holds shapes {sorted(shapes)[:3]}. Give vectors of one length, or several columns.")
    return np.stack(cells) if cells else np.empty((0, 0))


def dataset_frame(dataset: "datasets.Dataset", features: Features, names: Sequence[str]) -> pd.DataFrame:
    """The named columns of a dataset as pandas, with class labels as text. Raises MissingPackage without `datasets`."""
    try:
        import datasets
    except ImportError:
        raise MissingPackage("`of_dataset` needs the package datasets. Install it with: pip install datasets") from None
    if isinstance(dataset, datasets.DatasetDict):
        raise BadRows(f"This is a dict of datasets. Give one of them: {', '.join(map(repr, dataset))}.")
    if not isinstance(dataset, datasets.Dataset):
        raise BadRows(f"Cannot read a {type(dataset).__name__}. Give a datasets.Dataset, with all rows at hand.")
    parts = features.values() if isinstance(features, Mapping) else [features]
    wanted = list(dict.fromkeys([*names, *(n for part in parts for n in ([part] if isinstance(part, str) else part))]))
    for name in wanted:
        if name not in dataset.column_names:
            raise BadRows(no_such("column", name, dataset.column_names))
    chosen = dataset.select_columns(wanted)
    frame: pd.DataFrame = chosen.with_format("arrow")[:].to_pandas()  # by way of its NumPy format, float64 would become float32
    for name in names:
        if isinstance(kind := chosen.features[name], datasets.ClassLabel):
            frame[name] = [None if pd.isna(code) or code < 0 else kind.int2str(int(code)) for code in frame[name]]
    return frame


# ---- caches ----------------------------------------------------------------------------------------------------------
# Rows from a TransformerLens cache: activations [batch, positions, ...] by hook name, with the tokens they belong to.


def read_cache(
    cache: Any, tokens: Any, labels: Any, groups: Any, *, sites: str | Sequence[str] | None, mask: Any
) -> tuple[pd.DataFrame, ArraySource]:
    """(index, activations). Arguments as in `ProbeRows.of_cache`."""
    values = getattr(cache, "cache_dict", cache)
    if not isinstance(values, Mapping):
        raise BadRows(f"Cannot read a {type(cache).__name__}. Give an ActivationCache, or a dict of tensors by hook name.")
    ids = _grid("tokens", tokens)
    kept = np.ones(ids.shape, dtype=bool) if mask is None else _grid("mask", mask).astype(bool)
    if kept.shape != ids.shape:
        raise BadRows(f"The mask has shape {list(kept.shape)}, the tokens {list(ids.shape)}. Give one value per token.")
    if not kept.any():
        raise BadRows("The mask leaves out every token. Give True where a token counts.")
    post_norms = bool(_config(cache, "use_normalization_before_and_after"))
    names = _chosen(list(values), sites, post_norms)
    batched = bool(getattr(cache, "has_batch_dim", _is_batched(tokens)))
    arrays = {name: _rows(name, values[name], ids.shape, torch.from_numpy(kept), batched) for name in names}
    line, column = np.nonzero(kept)
    place = kept.cumsum(1)[line, column] - 1  # from the first token that counts
    one_per_row = {name: _spread(name, each, kept) for name, each in _named(labels).items()}
    group = _by_tokens(ids, kept)[line] if groups is None else _of_prompts(groups, kept)
    known: dict[str, Any] = dict(prompts=line, positions=place, tokens=ids[kept], keys=None)
    return make_index(len(line), one_per_row, group, **known), read_arrays(arrays, post_norms)


def _chosen(there: list[str], sites: str | Sequence[str] | None, post_norms: bool) -> list[str]:
    """Names in the cache: those of S, T and C, or those of the given letters and names."""
    letters = by_letter([name for name in there if isinstance(name, str)], post_norms)
    words = list(letters) if sites is None else re.split(r"[,\s]+", sites.strip()) if isinstance(sites, str) else list(sites)
    found: list[str] = []
    for word in words:
        if word in there:
            found.append(word)
            continue
        if not isinstance(word, str) or not word or not set(word) <= set(LETTERS):
            raise UnknownSite(no_such("site", str(word), there[:40]))
        for letter in word:
            if letter not in letters:
                raise UnknownSite(f"The cache has no site of {letter}. It has {', '.join(there[:40])}.")
            found += letters[letter].values()
    if not found:
        raise UnknownSite(
            f"The cache has no residual stream, attention or MLP output. Give sites=, of {', '.join(there[:40])}."
        )
    return list(dict.fromkeys(found))


def _rows(name: str, value: Any, shape: tuple[int, ...], kept: Tensor, batched: bool) -> Tensor:
    """[rows, d] of one site; more dimensions, such as heads, are laid side by side."""
    x = torch.as_tensor(value).detach()
    x = x if batched else x[None]
    if x.ndim < 3 or tuple(x.shape[:2]) != shape:
        raise BadRows(
            f"Site {name!r} has shape {list(x.shape)}, the tokens {list(shape)}. Give a site of [batch, positions, ...], and "
            f"the tokens of just these positions."
        )
    flat = x.reshape(shape[0] * shape[1], -1)
    return flat if bool(kept.all()) else flat[kept.reshape(-1).to(flat.device)]


def _named(labels: Any) -> dict[Any, Any]:
    if isinstance(labels, pd.DataFrame):
        return {name: labels[name] for name in labels.columns}
    if isinstance(labels, Mapping):
        return dict(labels)
    return {labels.name if isinstance(labels, pd.Series) and labels.name is not None else LABEL: labels}


def _spread(what: str, values: Any, kept: np.ndarray) -> np.ndarray:
    """One value per kept token, from [batch] (the same at every position) or [batch, positions]."""
    given = _grid(what, values, lines=False)
    if given.shape == kept.shape[:1]:
        given = np.repeat(given[:, None], kept.shape[1], axis=1)
    if given.shape != kept.shape:
        raise BadRows(
            f"{what!r} has shape {list(given.shape)}. Give one value per prompt {list(kept.shape[:1])}, or one per token "
            f"{list(kept.shape)}."
        )
    return given[kept]


def _of_prompts(groups: Any, kept: np.ndarray) -> np.ndarray:
    """The group of each kept token, from [batch]: tokens of one prompt are never independent."""
    given = _grid("groups", groups, lines=False)
    if given.shape != kept.shape[:1]:
        raise BadRows(
            f"The groups have shape {list(given.shape)}. Give one value per prompt {list(kept.shape[:1])}: the tokens of a "
            f"prompt are not independent."
        )
    return _spread("groups", given, kept)


def _by_tokens(ids: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """[batch] str: the group of each prompt is named after its tokens, so that it is the same one in every batch and part."""
    lines = (ids[i, kept[i]].astype(np.int64).tobytes() for i in range(len(ids)))
    return np.array([blake2b(line, digest_size=8).hexdigest() for line in lines], dtype=object)


def _grid(what: str, values: Any, lines: bool = True) -> np.ndarray:
    """An array; with `lines`, of [batch, positions], also from one line."""
    if isinstance(values, Tensor):
        values = values.detach().cpu()
        values = values.double() if values.is_floating_point() else values
    listed = isinstance(values, list | tuple)
    try:  # lists keep their kinds of values: None among whole numbers would make fractions of them
        array = np.array(values, dtype=object) if listed and not lines else np.asarray(values)
    except ValueError as error:
        raise BadRows(f"The {what} have lines of different lengths ({error}). Pad them, and give a mask.") from None
    array = array[None] if lines and array.ndim == 1 else array
    if lines and (array.ndim != 2 or array.dtype.kind not in "iub"):
        raise BadRows(
            f"The {what} have shape {list(array.shape)} and type {array.dtype}. Give whole numbers [batch, positions]."
        )
    return array


def _is_batched(tokens: Any) -> bool:
    return np.ndim(tokens.cpu() if isinstance(tokens, Tensor) else tokens) > 1


def _config(cache: Any, name: str) -> Any:
    """A setting of the model that a cache belongs to; None if it is unknown."""
    return getattr(getattr(getattr(cache, "model", None), "cfg", None), name, None)


# ---- from arrays -----------------------------------------------------------------------------------------------------


class FromArrays(ABC):
    """Constructors. Such rows have no task; docs/probes.md says what works without one."""

    @classmethod
    @abstractmethod
    def _from_arrays(cls, frame: pd.DataFrame, source: ArraySource) -> Self:
        """The rows of a checked index and source."""

    @classmethod
    def of_arrays(
        cls,
        X: np.ndarray | torch.Tensor | Mapping[Any, Any],
        labels: Any,
        groups: Any = None,
        *,
        prompts: Any = None,
        positions: Any = None,
        tokens: Any = None,
        keys: Any = None,
    ) -> Self:
        """From activations computed elsewhere. Such rows have no task; docs/probes.md says what works without one.

        X          NumPy array or tensor [rows, d] of any dtype and device, or a dict of these by site: a name, or (site,
                   layer). TransformerLens names are also S, T and C. Not copied: leave the arrays as they are
        labels     one array (its name is then `label`), a dict of arrays, or a DataFrame, in the order of the rows. None and
                   NaN are missing values. Text, booleans and few whole numbers are classes, fractions are numbers
        groups     one id per row: rows of one prompt or document, or of anything that makes rows alike. Required
        prompts    one id per row, if a group has several prompts; default: the groups
        positions  of each row's token in its prompt, from 0 on: for `at(7)`, `at("last")`, and token controls
        tokens     of each row, ids or text: for the controls by tokens
        keys       one id per row: rows with equal keys are the same observation

        Raises BadRows for arrays that do not fit together or are not finite, BadRows without groups.

        >>> import numpy as np
        >>> from replaylens.probes import ProbeRows
        >>> y = np.arange(60) % 2
        >>> X = np.random.default_rng(0).normal(size=(60, 8)) + 4 * y[:, None]
        >>> rows = ProbeRows.of_arrays(X, y, groups=np.arange(60) // 3)
        >>> rows, rows.source.sites()
        (ProbeRows(60 rows of 20 roots, no task), ['X'])
        """
        source = read_arrays(X)
        rows = len(next(iter(source.arrays.values())))
        frame = make_index(rows, labels, groups, prompts=prompts, positions=positions, tokens=tokens, keys=keys)
        return cls._from_arrays(frame, source)

    @classmethod
    def of_pandas(
        cls,
        frame: pd.DataFrame,
        features: Features,
        labels: str | Sequence[str],
        group: str | None = None,
        *,
        prompt: str | None = None,
        position: str | None = None,
        token: str | None = None,
        key: str | None = None,
    ) -> Self:
        """From the columns of a frame, one line per row; as `of_arrays`, with names of columns.

        features  one column of vectors, several columns of numbers, or a dict of either by site
        """
        pick = lambda name: columns(frame, name)  # noqa: E731
        more: dict[str, Any] = dict(prompts=pick(prompt), positions=pick(position), tokens=pick(token), keys=pick(key))
        require_no_answers(features, labels, group, key)
        return cls.of_arrays(activations(frame, features), pick(labels), pick(group), **more)

    @classmethod
    def of_dataset(
        cls,
        dataset: "Dataset",
        features: Features,
        labels: str | Sequence[str],
        group: str | None = None,
        *,
        prompt: str | None = None,
        position: str | None = None,
        token: str | None = None,
        key: str | None = None,
    ) -> Self:
        """From the columns of a Hugging Face dataset; as `of_pandas`. Class labels are read as their names.

        Raises MissingPackage without the package `datasets`.
        """
        names = [labels] if isinstance(labels, str) else list(labels)
        others = [name for name in (group, prompt, position, token, key) if name is not None]
        frame = dataset_frame(dataset, features, [*names, *others])
        return cls.of_pandas(frame, features, labels, group, prompt=prompt, position=position, token=token, key=key)

    @classmethod
    def of_cache(
        cls,
        cache: Any,
        tokens: Any,
        labels: Any,
        groups: Any = None,
        *,
        sites: str | Sequence[str] | None = None,
        mask: Any = None,
    ) -> Self:
        """From a TransformerLens `ActivationCache`, or a dict of tensors [batch, positions, ...] by hook name; a row per token.

        tokens  [batch, positions]
        labels  as in `of_arrays`; each [batch], the same at every position, or [batch, positions]
        groups  [batch], if prompts belong together; default: every prompt is a group of its own, named after its tokens
        sites   letters or hook names; default: S, T and C as far as the cache has them. Heads are laid side by side
        mask    [batch, positions], False for padding, which gives no rows; positions count from the first token that counts
        """
        frame, source = read_cache(cache, tokens, labels, groups, sites=sites, mask=mask)
        return cls._from_arrays(frame, source)
