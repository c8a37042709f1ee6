"""`Runner`: one model with its cache on one device, and the two kinds of pass over packed rows."""

from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.batch import TILE, Batch, Segment
from replaylens.engine.capture import PassTap, Rows
from replaylens.engine.certificate import Certificate
from replaylens.engine.cpu import CanonicalCpuOps, FastCpuOps
from replaylens.engine.edits import EditTap
from replaylens.engine.errors import NonFinite
from replaylens.engine.kv_cache import KVCache
from replaylens.engine.model import Decoder, Tap
from replaylens.engine.pages import PagePool, PageTable

_ANY_SIZE = (1, 2, 4, 8, 16, 32, 64, 128)
LENS_ROWS = 256


@dataclass
class PassResult:
    """What a pass computed."""

    batch: Batch
    residual: Tensor
    """after the last block that ran: [padded rows, d_model]"""
    logits: Tensor
    """of `batch.logit_rows()`, in that order: [rows, vocab]"""


class Runner:
    """Passes of one decoder over its paged cache. Prefill, verify, forced tokens and direct decode are all `exact`."""

    def __init__(self, model: Decoder, certificate: Certificate, num_pages: int, page_size: int, canary: bool = False) -> None:
        self.model, self.certificate = model, certificate
        self.pool = PagePool(num_pages, page_size)
        self.cache = KVCache(model.config, self.pool, model.embed.dtype, canary=canary)

    def reserve(self, table: PageTable, start: int, end: int) -> None:
        """Make [start, end) of `table` writable, copying shared pages. Mutates table, pool and cache, or raises OutOfPages."""
        self.cache.copy(self.pool.reserve(table, start, end))

    @torch.inference_mode()
    def exact(self, segments: list[Segment], tap: Tap | None = None, stop_at_layer: int | None = None) -> PassResult:
        """The canonical pass: every row's bits depend on its own path alone. Mutates the cache at the segments' rows."""
        batch = Batch(segments, self.pool, self.certificate.query_rows)
        ops = CanonicalCpuOps(batch, self.cache, self.certificate.row_counts)
        residual = self.model(batch.tokens, batch.positions, ops, _edited(batch, tap), stop_at_layer)
        rows = batch.logit_rows()
        logits = self.logits(residual[rows]) if rows else residual.new_empty(0, self.model.config.vocab_size)
        return PassResult(batch, residual, _finite(logits))

    @torch.inference_mode()
    def fast(self, segments: list[Segment], tap: Tap | None = None) -> PassResult:
        """The same function in whatever arithmetic is quickest: for drafts and for requests that asked for no more."""
        batch = Batch(segments, self.pool, _ANY_SIZE, tile=1)
        ops = FastCpuOps(batch, self.cache)
        residual = self.model(batch.tokens, batch.positions, ops, _edited(batch, tap))
        rows = batch.logit_rows()
        logits = self.model.logits(residual[rows], ops) if rows else residual.new_empty(0, self.model.config.vocab_size)
        return PassResult(batch, residual, _finite(logits))

    def logits(self, residual: Tensor) -> Tensor:
        """Canonical logits of any residual rows [rows, d_model]: the model's own, or a layer's lens."""
        return self._head(residual, PassTap(frozenset()))

    def head(self, residual: Tensor, sites: list[str]) -> Rows:
        """The sites after the last block, of residual rows that left it: `ln_final.hook_out`, `unembed.hook_out`."""
        tap = PassTap(frozenset(sites))
        pieces: dict[str, list[Tensor]] = {site: [] for site in sites}
        for piece in residual.split(LENS_ROWS):
            self._head(piece, tap)
            for site in sites:
                pieces[site].append(tap.values[site][: len(piece)])
        return {site: torch.cat(values) for site, values in pieces.items()}

    @torch.inference_mode()
    def _head(self, residual: Tensor, tap: PassTap) -> Tensor:
        ops = _Stateless(self.certificate)
        out = []
        for piece in residual.split(LENS_ROWS):
            padded = torch.zeros(-(-len(piece) // TILE) * TILE, piece.shape[1], dtype=piece.dtype)
            padded[: len(piece)] = piece
            out.append(self.model.logits(padded, ops, tap)[: len(piece)])
        return torch.cat(out)


def _edited(batch: Batch, tap: Tap | None) -> Tap | None:
    return EditTap(batch, tap) if any(s.edits or s.hooks for s in batch.segments) else tap


class _Stateless(CanonicalCpuOps):
    """Canonical ops outside a pass: no rows, no cache."""

    def __init__(self, certificate: Certificate) -> None:
        self.counts = certificate.row_counts


def _finite(logits: Tensor) -> Tensor:
    """NaN in a row would reach its neighbours in the cache's blocks: refuse before anything is committed."""
    if not bool(torch.isfinite(logits).all()):
        raise NonFinite("the model gave NaN or infinite logits; nothing of this pass was committed. Check edits and weights.")
    return logits
