"""An engine that nobody holds gives its device memory back at once, graphs included."""

import gc

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.model import weights
from tests.families import hugging_face

pytestmark = pytest.mark.gpu


def test_a_dropped_engine_leaves_no_memory() -> None:
    gc.collect()
    gc.disable()
    try:
        torch.zeros(1, device="cuda")
        before = torch.cuda.memory_allocated()
        engine = Engine(weights.load(hugging_face("llama"), torch.bfloat16).to("cuda"), cache_tokens=1 << 16)
        engine.runner.graphs.worth = 1
        branches = engine.prompts([[1, 2, 3], [4, 5, 6, 7]], sites="STC")
        engine.generate(branches, 12, drafter="ngram", window=4)
        engine.generate(branches, 12)
        assert branches[0].activations["blocks.0.hook_out"].shape[0] == branches[0].length - 1
        assert engine.runner.graphs.graphs and torch.cuda.memory_allocated() > before + (1 << 20)
        del branches, engine
        torch._C._cuda_clearCublasWorkspaces()  # the library's own memory
        assert torch.cuda.memory_allocated() <= before + (1 << 16)
    finally:
        gc.enable()
