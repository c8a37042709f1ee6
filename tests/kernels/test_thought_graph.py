"""Steps of T as a CUDA graph takes them, in Triton's interpreter: `ThoughtGraph` without the graph, its steps one by one."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PageTable
from replaylens.thinking.blocks import ThinkingBlocks
from replaylens.thinking.core import ThinkingEngine
from replaylens.thinking.model import ChunkStates
from tests.thinking.reference import SHAPES, thinking_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU runs tests/gpu/test_thinking_cuda.py")


def by_kernels() -> ThinkingBlocks:
    """T and C in float32 whose arithmetic is that of the kernels."""
    engine = ThinkingEngine(thinking_model(SHAPES["rotary"]))
    blocks = engine.prefiller.blocks
    one_layer = replace(engine.config, num_layers=1, windows=engine.config.windows[:1], rotary_layers=())
    engine.runner.kernels, engine.runner.tile = True, 1
    blocks.cache = KVCache(one_layer, blocks.pool, torch.float32, kernels=True)
    return blocks


@pytest.mark.slow
@torch.inference_mode()
def test_steps_of_a_graph_have_the_bits_of_launched_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    from replaylens.thinking import graphs

    class Launched:
        """A step instead of its graph. Capturing leaves its traces in the buffers, too."""

        def __init__(self, step: Callable[[], None]) -> None:
            self.replay = step
            step()

    monkeypatch.setattr(graphs, "recorded", lambda step, runs: (Launched(step), None))
    blocks = by_kernels()
    shape = 2, blocks.config.chunk, blocks.model.config.d_model
    found: list[list[tuple[list[list[int]], list[torch.Tensor]]]] = []
    for graphed in (False, True):
        if graphed:
            blocks.pool.reserve(spare := PageTable(), 0, 1)
            graph = graphs.ThoughtGraph(blocks.model, blocks.cache, 4, spare.pages[0])
            monkeypatch.setattr(blocks, "_graph", lambda count, made=graph: made)
        found.append([])
        for seed in (0, 1):  # the second time, the buffers hold traces of the first
            rows, tables = torch.randn(shape, generator=torch.Generator().manual_seed(seed)), [PageTable(), PageTable()]
            found[-1].append(blocks._decode_ahead([ChunkStates(i, hidden) for i, hidden in enumerate(rows)], tables))
            for table in tables:
                blocks.pool.release(table)
    launched, replayed = found
    assert launched[0][0] != launched[1][0], "the chunks think differently"
    for (tokens, hidden), (others, its) in zip(launched, replayed, strict=True):
        assert others == tokens and all(torch.equal(a, b) for a, b in zip(hidden, its, strict=True))


def test_a_graph_is_captured_once_its_size_has_occurred_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    from replaylens.thinking import graphs

    blocks, sizes = by_kernels(), list[int]()
    monkeypatch.setattr(graphs, "ThoughtGraph", lambda model, cache, size, page: sizes.append(size) or (size, page))
    assert blocks._graph(3) is None and not blocks._decoded, "a CPU has none"
    monkeypatch.setattr(blocks.runner, "device", "cuda")
    found = [blocks._graph(count) for count in (8, 9, *[3] * graphs.WORTH)]
    assert found[:-2] == [None] * graphs.WORTH and found[-2] == found[-1] == (8, blocks._spare.pages[0]) and sizes == [8]
