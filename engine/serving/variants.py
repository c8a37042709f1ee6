"""`Variants`: one branch under many sets of edits at once, read at its final residual stream.

A variant is a fork under edits, without a branch of its own. It shares the base's KV up to its first edited position, and
starts at the first edited layer: the rows that enter this layer are those of the base, to the bit, so they are not computed
again. Nothing of a variant is committed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest, OutOfPages
from replaylens.engine.loop.lane import Lane
from replaylens.engine.model.sites import SiteTable, layer_of
from replaylens.engine.passes.batch import Segment, finite
from replaylens.engine.passes.runner import LENS_ROWS
from replaylens.engine.request.capture import CaptureSpec, PassTap
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.placing import require_places, warn_of_no_match
from replaylens.engine.serving.forest import Forest
from replaylens.engine.terminal import defer_interrupt, hidden

Read = Callable[[Tensor], Tensor]
"""logits [variants, positions, vocab] -> what is kept of them [variants, ...]"""
Placed = Callable[[Sequence[Edit], int], tuple[PlacedEdit, ...]]
"""edits, and the number of a branch's tokens -> the placed edits"""


@dataclass(frozen=True, eq=False)
class EditedCopy:
    """One set of edits of the base."""

    number: int
    """its place in the result"""
    edits: tuple[PlacedEdit, ...]
    start: int
    """the first edited position: its rows are computed from here on"""
    layer: int
    """the first block that is computed; -1: the embedding as well"""


class Variants:
    """A path with all its residual streams, ready to be computed under edits. Use it in a `with` block."""

    def __init__(
        self, forest: Forest, sites: SiteTable, placed: Placed, path: Sequence[int], edits: Sequence[Edit], keep: Sequence[str]
    ) -> None:
        """
        edits  of the base, which every variant has too
        keep   sites that `capture` can give
        """
        self.forest, self.runner, self.sites, self.path = forest, forest.runner, sites, list(path)
        self.placed, self.edits = placed, placed(edits, len(self.path))
        self.streams = tuple(sites.per_layer("S"))
        self.keep = tuple(sites.resolve(name) for name in keep)
        self._lane: Lane | None = None

    def __enter__(self) -> Variants:
        spec = CaptureSpec(tuple(dict.fromkeys(self.streams + self.keep)), last=self.streams[-1])
        with self.forest.made() as lanes, self.forest.quiet():
            with defer_interrupt():
                lanes.append(self.forest.plant(self.path, spec, self.edits))
            self.forest.compute(lanes)
            self._lane = lanes[0]
        return self

    def __exit__(self, *_: object) -> None:
        if self._lane is not None:
            self.forest.release(self._lane)
            self._lane = None

    @property
    def lane(self) -> Lane:
        if self._lane is None:
            raise BadRequest("These variants are closed. Use them within their `with` block.")
        return self._lane

    def stream(self, layer: int) -> Tensor:
        """The base's residual stream entering a block, or leaving the last: [positions, d_model]. Must not be changed."""
        return self.rows(self.streams[layer])

    def rows(self, site: str) -> Tensor:
        """The base's rows of a kept site: [positions, ...]. Must not be changed."""
        assert self.lane.recording is not None
        return self.lane.recording.peek(site)

    def read(self, variants: Sequence[Sequence[Edit]], positions: Sequence[int], read: Read, progress: bool = False) -> Tensor:
        """What `read` keeps of every variant's logits at `positions`: [variants, ...].

        variants  the edits of each, in addition to the base's own; an empty list is the base itself
        """
        placed = [self._variant(number, edits) for number, edits in enumerate(variants)]
        at = torch.tensor([position % len(self.path) for position in positions], dtype=torch.int64)
        last = self.stream(len(self.streams) - 1)[at]  # rows before the first edit are the base's
        final = last.repeat(len(placed), 1, 1)
        with tqdm(total=len(placed), unit="variant", disable=hidden(progress)) as bar:
            for chunk in self._chunks(placed):
                rows = last.repeat(len(chunk), 1, 1)
                self._compute(chunk, at, {self.streams[-1]: rows})
                final[[variant.number for variant in chunk]] = rows
                bar.update(len(chunk))
        kept = []
        for some in final.split(max(1, LENS_ROWS // len(at))):  # the unembedding is large: as many rows at once as it takes
            logits = _on_host(self.forest.lock.alone(self.runner.logits, some.flatten(0, 1)))
            found = read(logits.view(len(some), len(at), -1))
            if found.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr():
                found = found.clone()  # the memory of the logits is used again
            kept.append(found)
        return torch.cat(kept)

    def capture(self, variants: Sequence[Sequence[Edit]], progress: bool = False) -> dict[str, Tensor]:
        """The rows of every kept site under each list of edits: [variants, positions, ...]."""
        at = torch.arange(len(self.path))
        base = {site: self.rows(site) for site in self.keep}
        kept = {site: rows.new_empty(len(variants), *rows.shape) for site, rows in base.items()}
        with tqdm(total=len(variants), unit="variant", disable=hidden(progress)) as bar:
            for chunk in self._chunks([self._variant(number, edits) for number, edits in enumerate(variants)]):
                rows = {site: x.repeat(len(chunk), *(1 for _ in x.shape)) for site, x in base.items()}
                self._compute(chunk, at, rows)
                for site, found in rows.items():
                    kept[site][[variant.number for variant in chunk]] = found
                bar.update(len(chunk))
        return kept

    def _variant(self, number: int, edits: Sequence[Edit]) -> EditedCopy:
        own = self.placed(edits, len(self.path))
        require_places((*self.edits, *own), self.sites.config)
        warn_of_no_match([own], [self.path])
        start = min([len(self.path), *(edit.first for edit in own)])
        layer = min((-1 if (found := layer_of(edit.site)) is None else found for edit in own), default=0)
        edited = {edit.site for edit in self.edits}
        entries = self.runner.entries  # and the base's rows of an edited stream have its edit, which the pass makes again
        while layer >= 0 and (layer not in entries or self.streams[layer] in edited):
            layer -= 1
        return EditedCopy(number, self.edits + own, start, layer)

    def _chunks(self, variants: Sequence[EditedCopy]) -> Iterator[list[EditedCopy]]:
        """Variants with the same first block, as many as fit into one pass and into the free pages."""
        ordered = sorted(variants, key=lambda v: (v.layer, v.start, v.number))
        chunk: list[EditedCopy] = []
        rows = pages = 0
        for variant in ordered:
            more = len(self.path) - variant.start
            needed = -(-more // self.runner.pool.page_size) + 1
            full = rows + more > self.forest.loop.max_rows or pages + needed > self.runner.pool.num_free + len(
                self.forest.prefix
            )
            if chunk and (full or chunk[0].layer != variant.layer):
                yield chunk
                chunk, rows, pages = [], 0, 0
            chunk.append(variant)
            rows, pages = rows + more, pages + needed
        if chunk:
            yield chunk

    def _compute(self, chunk: list[EditedCopy], at: Tensor, out: dict[str, Tensor]) -> None:
        """Fill `out`, site -> [variants, positions, ...], where a variant's rows may differ from the base's."""
        lane = self.lane
        try:
            while not self.forest.lock.alone(self._pass, lane, chunk, at, out):
                self.forest.compute([lane])  # the base gave its pages to others in the meantime
        except OutOfPages:
            if len(chunk) == 1:
                raise
            half = len(chunk) // 2
            for some in (slice(None, half), slice(half, None)):
                self._compute(chunk[some], at, {site: rows[some] for site, rows in out.items()})

    def _make_room(self, lane: Lane, pages: int, alone: bool) -> None:
        """Free pages of cached prefixes, and for a single variant those of idle branches too, as for any request."""
        loop, pool = self.forest.loop, self.runner.pool
        if pages > pool.num_free:
            self.forest.prefix.evict(pages - pool.num_free)
        while alone and pages > pool.num_free and loop.reservations.reclaim(pages - pool.num_free, spare=lane):
            pass

    def _pass(self, lane: Lane, chunk: list[EditedCopy], at: Tensor, out: dict[str, Tensor]) -> bool:
        """False: the base lacks KV. Precondition: the lock is held."""
        pool, length = self.runner.pool, int(at.max()) + 1  # no row sees a later one
        if lane.computed < length:
            return False
        self.runner.cache.begin()
        starts = [self.runner.cache.known(lane.table, min(variant.start, length)) for variant in chunk]
        live = [replace(variant, start=start) for variant, start in zip(chunk, starts, strict=True) if variant.start < length]
        if not live:
            return True
        tables = [pool.fork(lane.table, v.start) for v in live]
        try:
            self._make_room(lane, sum(pool.num_needed(table, table.length, length) for table in tables), len(live) == 1)
            for i, table in enumerate(tables):  # the states that one goes on from may have been lost to those before it
                pool.truncate(table, self.runner.cache.known(table, table.length))
                live[i] = replace(live[i], start=table.length)
                self.runner.reserve(table, table.length, length)
            segments = [Segment(t, v.start, self.path[v.start : length], 0, v.edits) for t, v in zip(tables, live, strict=True)]
            first = live[0].layer
            stream = None if first < 0 else self.stream(first).to(self.runner.device)
            entering = None if stream is None else torch.cat([stream[v.start : length] for v in live])
            tap = PassTap(frozenset(out) - {self.streams[-1]})
            offsets = list(accumulate((length - v.start for v in live), initial=0))
            which, places, packed = _places(live, chunk, at, offsets)
            result = self.runner.resumed(segments, entering, max(first, 0), tap, packed.tolist())
            packed = packed.to(result.residual.device)
            found = {site: value[packed] for site, value in tap.values.items()}
            found[self.streams[-1]] = finite(result.residual, "activations")
            for site in out.keys() & found.keys():  # a site below the first block keeps the base's rows
                out[site][which, places] = found[site].to(out[site])
        finally:
            for table in tables:
                pool.release(table)
        return True


def _places(live: list[EditedCopy], chunk: list[EditedCopy], at: Tensor, offsets: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Of every computed row at the positions `at`: the variant's place in the chunk, its place in `at`, its packed row."""
    numbers = {variant.number: place for place, variant in enumerate(chunk)}
    starts = torch.tensor([variant.start for variant in live])
    index, places = (at[None, :] >= starts[:, None]).nonzero(as_tuple=True)
    packed = torch.tensor(offsets[:-1])[index] + at[places] - starts[index]
    return torch.tensor([numbers[variant.number] for variant in live])[index], places, packed


def _on_host(logits: Tensor) -> Tensor:
    """A copy on the host, in pinned memory: logits of a grid are many, and pinned memory is used again for the next ones."""
    if not logits.is_cuda:
        return logits
    return torch.empty(logits.shape, dtype=logits.dtype, pin_memory=True).copy_(logits)
