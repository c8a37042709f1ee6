"""`FromArrays`: the constructors of `ProbeRows` for activations computed elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
import torch

from replaylens.probes.data import tables
from replaylens.probes.data.arrays import ArraySource, read_arrays
from replaylens.probes.data.caches import read_cache
from replaylens.probes.data.columns import make_index

if TYPE_CHECKING:
    from datasets import Dataset


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

        Raises BadRows for arrays that do not fit together or are not finite, MissingGroups without groups.

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
        features: tables.Features,
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
        pick = lambda name: tables.columns(frame, name)  # noqa: E731
        more: dict[str, Any] = dict(prompts=pick(prompt), positions=pick(position), tokens=pick(token), keys=pick(key))
        tables.require_no_answers(features, labels, group, key)
        return cls.of_arrays(tables.activations(frame, features), pick(labels), pick(group), **more)

    @classmethod
    def of_dataset(
        cls,
        dataset: "Dataset",
        features: tables.Features,
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
        frame = tables.dataset_frame(dataset, features, [*names, *others])
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
