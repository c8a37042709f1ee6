"""`Dump`: reads a dump. Opening reads only the manifest; rows are memory-mapped, the index is read on first use.

dump = Dump.open("dumps/coin")
X, y, groups = dump.where(accepted=True).matrix("S", layer=2, label="face")
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from replaylens.dumps.content import CORE
from replaylens.dumps.files import (
    DumpFiles,
    Filter,
    Located,
    Predicate,
    RowNumbers,
    SiteArray,
    SiteStatistics,
    columns_needed,
    gather,
    make_filters,
    row_numbers,
    shard_starts,
    statistics,
    to_numpy,
)
from replaylens.dumps.manifest import MANIFEST, MAX_BYTES, PLAN, Manifest, SiteEntry, without_manifest
from replaylens.dumps.plan import named, to_rows
from replaylens.dumps.store import Store
from replaylens.engine.errors import BadDump, BadRequest, UnknownSite, no_such
from replaylens.engine.model.sites import BY_SLOT, at_layer, same_value, warn_of_mixed_experts
from replaylens.engine.records import Citation, Identifier
from replaylens.engine.request.values import as_bool, as_instance, as_int, as_list, hides, short_repr

if TYPE_CHECKING:
    import pandas as pd
    from datasets import Dataset
    from torch import Tensor

    from replaylens.dumps.feed import Feed
    from replaylens.engine.request.capture import Rows
    from replaylens.features.rows import FeatureRows


SiteName = str | tuple[str, int]
"""a stored name, an alias, a letter, or a letter (or a part of Z) with a layer"""
_SITES = "names, aliases, letters or pairs of a letter and a layer"


class Matrix(NamedTuple):
    """Arguments for scikit-learn: `estimator.fit(X, y)`, and groups for its splitters."""

    X: np.ndarray
    """[rows, features]"""
    y: np.ndarray | None
    groups: np.ndarray
    """the root of each row, so that all rows of a prompt stay in one fold"""


class _Choice(NamedTuple):
    """Rows selected by filters and a label."""

    rows: np.ndarray
    """numbers in the whole dump, ascending"""
    y: np.ndarray | None
    groups: np.ndarray


@hides("files", "filters", "resolve", "resolve_all")
class Dump:
    """A finished dump, or the rows of it selected by `where`. Immutable.

    >>> from replaylens import Engine, tasks
    >>> run = Engine.load("coin-plain").replay(tasks.get("coin")(flips=2).examples(4), sites="S")
    >>> dump = run.save("memory://doc-dump")
    >>> X, y, groups = Dump.open("memory://doc-dump").where(token=dump.index["token"][0]).matrix("S", layer=0, label="shuffled")
    >>> X.shape, len(set(groups))  # the first token of each of four prompts
    ((4, 128), 4)
    """

    def __init__(self, files: DumpFiles, filters: tuple[Filter, ...] = ()) -> None:
        self.files, self.manifest, self.filters = files, files.manifest, filters
        self._chosen: dict[str | None, _Choice] = {}

    @classmethod
    def open(cls, path: str | Path, check_files: bool = True, check: bool | None = None) -> Dump:
        """Check the manifest and the size of every file. Raises BadDump or UnfinishedDump.

        check  hash every shard when it is first opened and raise BadDump if it was changed; the result is kept in the
               cache folder, so that an unchanged file is hashed once. None: for local dumps only, because a remote shard
               has to be fetched whole to be hashed
        """
        store, check_files = Store(path), as_bool("check_files", check_files)
        check = store.local if check is None else as_bool("check", check)
        there = store.sizes()
        if MANIFEST not in there:
            if PLAN in there:
                raise without_manifest(store, str(path))
            store.require_folder()
            raise BadDump(f"{path} is not a dump: it has no {MANIFEST}.")
        files = DumpFiles(store, Manifest.from_bytes(store.read(MANIFEST, MAX_BYTES), str(path)), check)
        if check_files and (wrong := files.wrong_sizes(there)):
            raise BadDump(f"{path}: {wrong[0]}. Resume the dump to repair it.")
        return cls(files)

    # ---- description --------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        plan = self.manifest.plan
        some = " (filtered)" if self.filters else ""
        return f"Dump({self.url!r}, {plan.task}, {len(plan.examples)} examples, {self.manifest.rows} rows{some})"

    def __len__(self) -> int:
        """Number of rows. With filters, counting them reads the index."""
        return len(self._choose(None).rows) if self.filters else self.manifest.rows

    @property
    def url(self) -> str:
        return self.files.store.url

    @property
    def digest(self) -> str:
        """Digest of the whole content; identifies the dump in a paper."""
        return self.manifest.digest

    @property
    def accepted_digest(self) -> str:
        """Digest of the accepted rows; the same for every drafter."""
        return self.manifest.accepted_digest

    def cite(self, row: int | None = None) -> Citation:
        """How to cite the dump, or one row of it: text and BibTeX with an identifier that holds on every machine.

        row  its number in `index`, that of a view for a view. The row's own digest covers it at all sites, and its line there
        """
        plan, fingerprint = self.manifest.plan, self.manifest.fingerprint
        if self.filters and row is None:
            raise BadRequest("A view has no identifier of its own. Cite the dump that it was made from, or one of its rows.")
        what = f"activation dump of {plan.task}, {len(plan.examples)} examples, {self.manifest.rows} rows"
        found = Identifier(self.digest)
        if row is not None:
            found = self._row_identifier(as_int("row", row, -len(self), len(self) - 1))
            what = "example {}, branch {}, position {} of the ".format(*found.row or ()) + f"{what} {Identifier(self.digest)}"
        check = f"replaylens verify {found} --in {shlex.quote(self.url)}"
        check += "".join(f" --features {each.name}=FOLDER" for each in plan.features)
        if plan.place.kind == "custom":
            check = f"dumps.verify.verify({self.url!r}, engine, selector=...) in Python, with {plan.positions}"
        return Citation(str(found), what, check, fingerprint=fingerprint.digest, **fingerprint.cited)

    def _row_identifier(self, row: int) -> Identifier:
        chosen = self._selected()
        number = row % len(self) if chosen is None else int(chosen[row])
        located = Located.of(shard_starts(self.files), np.array([number]))
        return self.files.content(int(located.shards[0])).row_identifier(int(located.rows[0]))

    @property
    def sites(self) -> dict[str, SiteEntry]:
        return dict(self.manifest.sites)

    @property
    def labels(self) -> list[str]:
        return list(self.manifest.labels)

    @property
    def columns(self) -> list[str]:
        """Index columns. `where` also accepts `depth`."""
        return self.files.columns

    def resolve(self, site: str, layer: int | None = None) -> tuple[str, int | None]:
        """The stored name for a letter and layer, a name or an alias; for Z also the entry along its layers."""
        sites = self.manifest.sites
        site = as_instance("site", site, str, "a letter with a layer, a stored name or an alias", UnknownSite)
        layer = None if layer is None else as_int("layer", layer, error=UnknownSite)
        if stored := self.manifest.layers(site) if site in tuple("STC") else {}:
            return at_layer(site, stored, layer), None
        aliased = (name for name, entry in sites.items() if site in entry.aliases)
        name = next((name for name in (site, same_value(site)) if name in sites), None) or next(aliased, None)
        if name is None:
            raise UnknownSite(f"{site!r} is not in this dump. It holds {', '.join(sites)}.")
        if sites[name].letter == "Z":
            if layer is not None and not -sites[name].shape[0] <= layer < sites[name].shape[0]:
                raise UnknownSite(f"{name} has no layer {layer}. It is stored at layers 0 to {sites[name].shape[0] - 1}.")
            return name, layer
        if layer not in (None, sites[name].layer):
            raise UnknownSite(f"{name} is at layer {sites[name].layer}, not {layer}. Use a letter to choose a layer.")
        return name, None

    def resolve_all(self, sites: str | Sequence[SiteName] | None) -> dict[str, tuple[str, int | None]]:
        """Several sites: key -> what `resolve` gives. A key is the stored name; of one layer of Z, the name and the layer."""
        given = [sites] if isinstance(sites, str) else list(self.sites if sites is None else as_list("sites", sites, _SITES))
        found: dict[str, tuple[str, int | None]] = {}
        for each in given:
            layers: list[Any] = list(self.manifest.layers(each)) if each in tuple("STC") else []
            pairs: list[Any] = [each] if isinstance(each, tuple) and len(each) == 2 else [(each, at) for at in layers or [None]]
            for site, layer in pairs:
                name, entry = self.resolve(site, layer)
                found[name if entry is None else f"{name}.{entry}"] = name, entry
        if not found:
            raise BadRequest(f"No sites given. This dump holds {', '.join(self.sites)}.")
        return found

    # ---- selecting rows -----------------------------------------------------------------------------------------

    def where(self, predicate: Predicate | None = None, /, **conditions: Any) -> Dump:
        """The rows that meet all conditions. Calls can be chained.

        conditions  column=value: equal; =None: missing; =a set or list: one of them; =a range or slice: in [start, stop).
                    Columns are those of the index and `depth` (tokens since the path left the accepted one)
        predicate   a function from a shard's index, a pandas frame, to one boolean per row
        """
        return Dump(self.files, self.filters + make_filters(self.columns, predicate, conditions))

    def matrix(
        self,
        site: str,
        layer: int | None = None,
        *,
        where: Predicate | dict[str, Any] | None = None,
        label: str | None = None,
    ) -> Matrix:
        """Rows of one site with their labels and groups. Rows where the label is missing are left out.

        site   "S", "T" or "C" with a layer; a stored name or alias; or a part of Z, such as "Z.top_logprobs"
        where  as in `where`: a function, or a dict of conditions
        """
        if where is not None:
            if isinstance(where, dict) and not all(isinstance(name, str) for name in where):
                raise BadRequest(f"where={short_repr(where)}: the conditions go by the names of columns")
            narrowed = self.where(**where) if isinstance(where, dict) else self.where(where)
            return narrowed.matrix(site, layer, label=label)
        if label is not None and (not isinstance(label, str) or label not in (*self.manifest.labels, *CORE.names)):
            raise BadRequest(no_such("label", str(label)[:60], self.manifest.labels))
        chosen, (name, entry) = self._choose(label), self.resolve(site, layer)
        if name.endswith(BY_SLOT):  # the indices themselves are what one expert's rows are chosen by
            warn_of_mixed_experts(name, at_caller=True)
        x = SiteArray(self.files, name, entry, chosen.rows).read()
        X = to_numpy(x).reshape(len(x), math.prod(x.shape[1:]))
        y = None if chosen.y is None else chosen.y.copy()  # callers may modify the result, the cached arrays must not change
        return Matrix(X, y, chosen.groups.copy())

    def array(self, site: str, layer: int | None = None) -> SiteArray:
        """Rows of one site as an array on disk: [rows, ...]. Indexing reads the rows asked for; `pieces()` maps the shards."""
        return SiteArray(self.files, *self.resolve(site, layer), self._selected())

    def take(self, rows: RowNumbers, sites: str | Sequence[SiteName] | None = None) -> dict[str, Tensor]:
        """Rows of the index by number, in the order asked for, at several sites: name -> [rows, ...].

        rows   row numbers of `index`, negative ones from the end; or one boolean per row; or a slice
        sites  names, aliases, letters (all their layers) or pairs such as ("S", 2); None: every stored site
        """
        numbers, chosen = row_numbers(rows, len(self)), self._selected()
        located = Located.of(shard_starts(self.files), numbers if chosen is None else chosen[numbers])
        return {key: gather(self.files, *where, located) for key, where in self.resolve_all(sites).items()}

    def features(self, name: str) -> FeatureRows:
        """Stored sparse features: the strongest of each row. The site features.NAME.counts says how many were active in all."""
        stored = named(self.manifest.plan.features, name)
        indices, values, _ = stored.tensors
        return to_rows(stored, self.to_torch(indices), self.to_torch(values))

    def to_torch(self, site: str, layer: int | None = None) -> Tensor:
        """Rows of one site, in the stored dtype: [rows, ...]."""
        return self.array(site, layer).read()

    def to_numpy(self, site: str, layer: int | None = None) -> np.ndarray:
        """Rows of one site. bfloat16, which numpy lacks, becomes float32 without loss."""
        return to_numpy(self.to_torch(site, layer))

    def to_pandas(self) -> pd.DataFrame:
        """The index, with the column `depth`."""
        import pandas as pd

        frames = [self.files.frame(number)[self._mask(number)] for number in range(len(self.manifest.shards))]
        return pd.concat(frames, ignore_index=True)

    @property
    def index(self) -> pd.DataFrame:
        return self.to_pandas()

    def stream(self, site: str, layer: int | None = None, batch_rows: int = 4096) -> Iterator[tuple[Tensor, pd.DataFrame]]:
        """Rows of one site with their index, at most `batch_rows` at a time. Memory does not grow with the dump."""
        batch_rows = as_int("batch_rows", batch_rows, 1)
        name, entry = self.resolve(site, layer)
        for number in range(len(self.manifest.shards)):
            rows, frame = np.flatnonzero(self._mask(number)), self.files.frame(number)
            for first in range(0, len(rows), batch_rows):
                some = rows[first : first + batch_rows]
                x = gather(self.files, name, entry, Located(np.full(len(some), number), some))
                yield x, frame.iloc[some].reset_index(drop=True)

    def feed(
        self,
        sites: str | Sequence[SiteName],
        *,
        batch_size: int = 4096,
        seed: int = 0,
        shuffle: str | None = "rows",
        epochs: int | None = 1,
        drop_last: bool = False,
    ) -> Feed:
        """Rows of several sites in shuffled batches: a torch `IterableDataset` that can be resumed.

        sites      as in `take`
        seed       of the order, which depends on nothing else: neither batch size, workers nor shards
        shuffle    "rows": any row can come anywhere. "blocks": reads blocks of adjacent rows and mixes them within
                   pools, for remote dumps and those larger than memory. None: as stored
        epochs     passes over the rows in one iteration, each in an order of its own; None: without end. Batches run on from
                   one epoch into the next
        drop_last  leave out a last batch that is smaller than the others
        """
        from replaylens.dumps.feed import Feed, RowOrder

        order = RowOrder(len(self), seed, shuffle)
        return Feed(self.files, self.resolve_all(sites), self._selected(), order, batch_size, epochs, drop_last)

    def statistics(self, site: str, layer: int | None = None) -> SiteStatistics:
        """Mean, standard deviation and mean norm of a site's rows, in float64. The bits do not depend on shards or threads."""
        return statistics(self.array(site, layer))

    def to_dataset(self, sites: str | Sequence[SiteName] | None = None) -> Dataset:
        """A Hugging Face `Dataset` of the index columns and the sites. The sites of a local dump are mapped, not copied, unless
        rows are filtered or bfloat16. Raises MissingPackage without the package `datasets`."""
        from replaylens.dumps.feed import to_dataset

        return to_dataset(self.files, self.resolve_all(sites), self._selected())

    def to_activation_cache(self, example: int, branch: int = 0) -> Any:
        """TransformerLens's `ActivationCache` of one path of an example: [1, positions, ...] by stored name and alias.

        A rejected branch includes the accepted rows before its fork. The dump must hold all positions.
        """
        from transformer_lens import ActivationCache

        if self.manifest.plan.positions != "all":
            raise BadRequest(f"This dump holds positions {self.manifest.plan.positions!r}. A cache needs all positions.")
        rows = self._path_rows(as_int("example", example), as_int("branch", branch))
        cache: dict[str, Tensor] = {}
        for name, x in rows.items():
            for alias in (name, *self.manifest.sites[name].aliases):
                if alias == name or alias not in rows:  # a stored name comes before an alias
                    cache[alias] = x[None]
        return ActivationCache(cache, None)

    # ---- internals ----------------------------------------------------------------------------------------------

    def _mask(self, number: int) -> np.ndarray:
        frame, mask = self.files.frame(number), np.ones(self.manifest.shards[number].rows, dtype=bool)
        for each in self.filters:
            mask &= each.mask(frame)
        return mask

    def _choose(self, label: str | None) -> _Choice:
        """The selected rows that have the label; cached for the next site or layer."""
        if label not in self._chosen:
            wanted = list(dict.fromkeys([*columns_needed(self.filters, self.columns), "root", *([label] if label else [])]))
            rows, labels, roots = [], [], []
            for number, start in enumerate(shard_starts(self.files)[:-1]):
                frame = self.files.to_frame(self.files.lines(number, wanted))
                mask = np.array(frame[label].notna()) if label else np.ones(len(frame), dtype=bool)
                for each in self.filters:
                    mask &= each.mask(frame)
                rows.append(np.flatnonzero(mask) + start)
                roots.append(frame["root"].to_numpy(dtype=object)[mask])
                labels.append(frame[label].to_numpy(dtype=object)[mask] if label else roots[-1])
            y = _tidy(np.concatenate(labels)) if label else None
            self._chosen[label] = _Choice(np.concatenate(rows), y, np.concatenate(roots).astype(str))
        return self._chosen[label]

    def _selected(self) -> np.ndarray | None:
        """Numbers of the selected rows in the whole dump; None: all."""
        return self._choose(None).rows if self.filters else None

    def _path_rows(self, example: int, branch: int) -> Rows:
        number = self.files.shard_of(example)
        frame = self.files.frame(number)
        mine = frame["example"] == example
        own = frame[mine & (frame["branch"] == branch)]
        if not len(own):
            raise BadRequest(f"Example {example} has no branch {branch}. It has {sorted(set(frame[mine]['branch']))}.")
        before = frame[mine & (frame["branch"] == 0) & (frame["position"] < own["fork_position"].iloc[0])]
        rows = np.concatenate([before.index.to_numpy(), own.index.to_numpy()]).astype(np.int64)
        return {name: self.files.shard(number).rows(name, rows) for name in self.manifest.sites}


def _tidy(values: np.ndarray) -> np.ndarray:
    """Labels as an array of one type: strings, integers or booleans."""
    return np.array(values.tolist()) if len(values) else values
