"""The slow reference that the engine is compared with: every row of a path computed alone, in its own pass.

No batches, windows, drafts, rollbacks, or pages of more than one position: a row follows from its token and the rows before
it, and is stored by its path. However the engine gets there, what it commits must have these bits.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from unittest import mock

import torch
from torch import Tensor

from replaylens.engine.model import sites
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Linear
from replaylens.engine.passes import lens
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.cpu import Products
from replaylens.engine.passes.runner import Runner
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import PassTap, Rows
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.weights import loading
from tests.families import hugging_face

GREEDY = Sampling()
Path = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """The row of a path's last token."""

    page: int
    kv: Tensor
    """[layers, 2, kv_heads, d_head]"""
    mixed: Tensor
    """[recurrent layers, columns]: what a hybrid's cache holds besides"""
    sites: Rows
    """S, T and C: [1, d_model] each"""
    logits: Tensor
    """[vocab]"""


class Reference:
    """All rows of one model, computed on demand."""

    def __init__(self, model: Decoder, num_rows: int = 60_000) -> None:
        table = sites.table(model.config)
        self.runner = Runner(model, num_rows, page_size=1)
        self.sites, _ = table.select("STC")
        self.lens = LensSpec(tuple(table.letter("S")))
        self._rows: dict[Path, Row] = {}
        self._lenses: dict[tuple[Path, int], Rows] = {}
        self.kv = cache(self._kv)
        self.captured = cache(self._captured)

    def row(self, path: Path) -> Row:
        """The last row of a path."""
        if path not in self._rows:
            for end in range(1, len(path) + 1):
                if path[:end] not in self._rows:
                    self._rows[path[:end]] = self._compute(path[:end])
        return self._rows[path]

    def _compute(self, path: Path) -> Row:
        runner, last = self.runner, len(path) - 1
        table = runner.pool.share([self._rows[path[:end]].page for end in range(1, len(path))], last)
        runner.reserve(table, last, len(path))
        tap = PassTap(frozenset(self.sites))
        logits = runner.exact([Segment(table, last, [path[-1]], num_logits=1)], tap).logits[0]
        page = table.pages[-1]
        runner.pool.retain(page)
        runner.pool.release(table)
        kv, mixed = runner.cache.rows([page])[0].cpu(), runner.cache.mixed_rows([page])[0].cpu()
        return Row(page, kv, mixed, tap.rows(self.sites, 0, 1), logits.cpu())

    def _kv(self, path: Path) -> Tensor:
        """[positions, layers, 2, kv_heads, d_head]"""
        if not path:
            return self.runner.cache.rows([]).cpu()
        return torch.stack([self.row(path[:end]).kv for end in range(1, len(path) + 1)])

    def mixed(self, path: Path) -> Tensor:
        """[positions, recurrent layers, columns]"""
        rows = [self.row(path[:end]).mixed for end in range(1, len(path) + 1)]
        return torch.stack(rows) if rows else self.runner.cache.mixed_rows([]).cpu()

    def _captured(self, path: Path, start: int, end: int) -> Rows:
        """S, T, C and Z of positions [start, end). Z depends on the path's next token, if there is one."""
        rows = [self._lens(path[: p + 1], path[p + 1] if p + 1 < len(path) else -1) for p in range(start, end)]
        return {site: torch.cat([row[site] for row in rows]) for site in rows[0]} if rows else {}

    def _lens(self, path: Path, following: int) -> Rows:
        row = self.row(path)
        if (path, following) not in self._lenses:
            self._lenses[path, following] = lens.read(self.lens, self.runner, row.sites, [following])
        return row.sites | self._lenses[path, following]

    def continuation(
        self, path: Sequence[int], n: int, sampling: Sampling = GREEDY, num_prompt: int | None = None
    ) -> list[int]:
        """The next `n` tokens, one at a time, or fewer if a stop token comes."""
        path, new = list(path), []
        num_prompt = len(path) if num_prompt is None else num_prompt
        while len(new) < n and not (new and new[-1] in sampling.stop_tokens):
            new.append(sampling.choose(self.row((*path, *new)).logits.numpy(), path + new, num_prompt))
        return new


def same_bits(ours: Tensor, theirs: Tensor) -> bool:
    """Equal shapes, dtypes and bytes on any device: NaN equals itself, and the two zeros differ."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return False
    ours, theirs = (x.cpu().contiguous().view(torch.uint8) for x in (ours, theirs))
    return torch.equal(ours, theirs)


def differences(branch: Branch, reference: Reference) -> list[str]:
    """What differs on a branch from the rows of its path. Empty unless the promise is broken."""
    path, found = tuple(branch.tokens), []
    held = branch.engine.forest.held_kv(branch.lane)  # kv() would recompute missing rows, and other branches lose their pages
    if not same_bits(held, reference.kv(path[: branch.lane.computed])):
        found.append(f"KV of branch {branch.id}")
    runner, computed = branch.engine.runner, branch.lane.computed
    if runner.model.config.mixer is not None:
        slots, rooms = runner.pool.slots(branch.lane.table, 0, computed), runner.cache.rooms
        page = [slot // runner.pool.page_size for slot in slots]
        there = [i for i in range(computed) if rooms is None or (rooms.entries.of[page[i]] and rooms.whole[page[i]])]
        mixed = runner.cache.mixed_rows([slots[i] for i in there])
        if not same_bits(mixed, reference.mixed(path[:computed])[there]):
            found.append(f"recurrent rows of branch {branch.id}")
    recording = branch.lane.recording
    if recording is None:
        return found
    if recording.positions() != list(range(recording.base, recording.end)):
        return [*found, f"positions {recording.positions()} of branch {branch.id}"]
    truth = reference.captured(path, recording.base, recording.end)
    found += [f"sites of branch {branch.id}"] * (recording.sites() != list(truth))
    return found + [f"{site} of branch {branch.id}" for site, rows in truth.items() if not same_bits(recording[site], rows)]


@cache
def decoder(family: str, device: str = "cpu") -> Decoder:
    """The tiny random model of a family, in float32: rounded to bfloat16, models this small show no differences."""
    return loading.load(hugging_face(family), torch.float32).to(device)


@cache
def reference_of(family: str, device: str = "cpu") -> Reference:
    """Shared by all tests of a process, so that each row is computed once."""
    return Reference(decoder(family, device))


def perturbed(model: Decoder, size: float = 0.01) -> Decoder:
    """A model that mostly predicts the same tokens: a drafter whose drafts are sometimes right."""
    other, generator = deepcopy(model), torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_((torch.randn(parameter.shape, generator=generator) * size).to(parameter))
    return other


@contextmanager
def wrong_fast_path() -> Iterator[None]:
    """Within the block, products of a CPU's fast path are off by a thousandth, so that no test depends on whether it rounds as
    the canonical one does."""
    product = Products.linear

    def shifted(self: Products, x: Tensor, linear: Linear, residual: Tensor | None = None) -> Tensor:
        return product(self, x, linear, residual) * (1.001 if self.parts == 1 else 1.0)

    with mock.patch.object(Products, "linear", shifted):
        yield


def random_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A model of any shape in which every layer matters."""
    model, generator = Decoder(config), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.1 * noise if "ln" in name or "norm" in name else noise / parameter.shape[0] ** 0.5)
        model.embed.mul_(config.vocab_size**0.5)  # rows of unit size: an embedding is not summed over the vocabulary
    return model
