"""Engines whose passes run by our kernels: on a CUDA device, or without one in Triton's interpreter."""

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.memory.cache import KVCache
from replaylens.engine.model.decoder import Decoder
from tests.toy_model import random_model

DEVICES = (
    pytest.param("cpu", id="interpreter", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")),
    pytest.param("cuda", id="gpu", marks=pytest.mark.gpu),
)


def served(device: str, model: Decoder | None = None, tokens: int = 1024) -> Engine:
    """An engine in float32 whose arithmetic is that of the kernels."""
    made = Engine((model or random_model()).to(device), cache_tokens=tokens)
    runner = made.runner
    if device == "cpu":
        runner.kernels, runner.tile = True, 1
        runner.cache = KVCache(made.config, runner.pool, torch.float32, kernels=True)
    return made
