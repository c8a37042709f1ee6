"""Bursts: several direct decode steps on a CUDA device without returning to the host in between.

If the decode step itself is canonical, a token needs no verification. The step is captured once as a CUDA graph per number of
requests and replayed. The chosen tokens feed the next step on the device. The host receives all of them at the end and
commits them like accepted drafts. A request that ends within the burst drops the tokens after its end.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from replaylens.engine.errors import EngineBug
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.passes.choice import seeds, temperatures
from replaylens.engine.passes.cuda import CanonicalCudaOps, FastCudaOps, page_numbers
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.sampling import Sampling
from replaylens.kernels.attention import PagedRows
from replaylens.kernels.launch import next_power_of_2
from replaylens.kernels.sample import sample_logits

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""numbers of requests that have their own graph; others are padded up"""


@dataclass
class Place:
    """One request in a burst: its last token with its position, a table with room for all steps, and its sampling."""

    token: int
    position: int
    table: PageTable
    sampling: Sampling
    """`bare`: the device does not apply penalties, biases or filters"""


class DecodeGraph:
    """One captured decode step of `size` requests. The step itself advances its input tensors."""

    def __init__(self, runner: Runner, size: int, max_pages: int, exact: bool, drawn: bool, spare: int) -> None:
        device = torch.device(runner.device)
        self.size, self.drawn, self.spare = size, drawn, spare
        self.tokens = torch.zeros(size, dtype=torch.int64, device=device)
        self.chosen = torch.zeros(size, dtype=torch.int64, device=device)
        """before clamping: a row of NaN draws a token beyond the vocabulary, which the next step must not look up"""
        self.positions = torch.zeros(size, dtype=torch.int64, device=device)
        self.short_positions = torch.zeros(size, dtype=torch.int32, device=device)
        self.seeds = torch.zeros(size, dtype=torch.int64, device=device)
        self.temperatures = torch.zeros(size, dtype=torch.float64, device=device)
        self.pages = torch.full((size, max_pages), spare, dtype=torch.int32, device=device)
        sequence = torch.arange(size, dtype=torch.int32, device=device)
        rows = PagedRows(sequence, self.short_positions, self.pages)
        self.ops = (CanonicalCudaOps if exact else FastCudaOps)(runner.cache, rows)
        self.runner = runner
        self.graph = torch.cuda.CUDAGraph()
        self._capture()

    @torch.inference_mode()
    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # the inputs are being written there
        with torch.cuda.stream(stream):
            for _ in range(2):  # compiles the kernels; writes go to the spare page
                self._step()
        stream.synchronize()
        with torch.cuda.graph(self.graph):
            self._step()

    def _step(self) -> None:
        model = self.runner.model
        self.short_positions.copy_(self.positions)
        residual = model(self.tokens, self.positions, self.ops)
        logits = model.logits(residual, self.ops)
        self.positions.add_(1)
        noise = (self.seeds, self.positions, self.temperatures) if self.drawn else ()
        self.chosen.copy_(sample_logits(logits, *noise)[0])
        self.tokens.copy_(self.chosen.clamp(max=model.config.vocab_size - 1))

    @torch.inference_mode()
    def run(self, places: list[Place], steps: int) -> Tensor:
        """Tokens chosen by `steps` steps: [steps, requests], on the device. NaN logits give a token beyond the vocabulary."""
        rest = self.size - len(places)
        self.tokens.copy_(torch.tensor([p.token for p in places] + [0] * rest))
        self.positions.copy_(torch.tensor([p.position for p in places] + [0] * rest))
        self.pages.copy_(page_numbers([p.table for p in places], (self.size, self.pages.shape[1]), self.spare))
        if self.drawn:
            samplings = [p.sampling for p in places] + [Sampling()] * rest
            self.seeds.copy_(seeds(samplings, self.seeds.device))
            self.temperatures.copy_(temperatures(samplings, self.seeds.device))
        out = torch.empty(steps, self.size, dtype=torch.int64, device=self.tokens.device)
        for step in range(steps):
            if rest:
                self.positions[len(places) :] = 0  # padding stays on the spare slot
            self.graph.replay()
            out[step] = self.chosen
        return out[:, : len(places)]


class Bursts:
    """Graphs by number of requests and pages, captured when first needed."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self._graphs: dict[tuple[int, int, bool, bool], DecodeGraph] = {}
        spare = PageTable()
        runner.pool.reserve(spare, 0, 1)
        self.spare = spare
        """the page that padding requests write to; never freed"""

    def run(self, places: list[Place], steps: int, exact: bool) -> list[list[int]]:
        """The next `steps` tokens of each request. Precondition: the tables have room for all their rows."""
        if not places or steps < 1:
            raise EngineBug(f"A burst has {len(places)} requests and {steps} steps. It needs at least one of each.")
        if len(places) > SIZES[-1]:
            return self.run(places[: SIZES[-1]], steps, exact) + self.run(places[SIZES[-1] :], steps, exact)
        size = next(s for s in SIZES if s >= len(places))
        room = next_power_of_2(max(len(place.table.pages) for place in places))
        key = (size, room, exact, any(place.sampling.temperature for place in places))
        if key not in self._graphs:
            self._graphs[key] = DecodeGraph(self.runner, *key, self.spare.pages[0])
        return self._graphs[key].run(places, steps).T.tolist()
