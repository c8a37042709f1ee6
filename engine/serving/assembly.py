"""What an engine is made of: the sizes of its cache, its drafters, and the decode steps that a device takes on its own."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, TypedDict

import torch

from replaylens.engine.errors import BadRequest, NotEnoughMemory
from replaylens.engine.loop.drafters import (
    Drafter,
    ForcedDrafter,
    LensDrafter,
    ModelDrafter,
    NgramDrafter,
    SelfDrafter,
    TreeDrafter,
)
from replaylens.engine.loop.loop import Loop
from replaylens.engine.machine import require_gpu
from replaylens.engine.memory.cache import (
    PlacedCache,
    cache_bytes,
    chosen_tokens,
    free_on,
    kv_bytes,
    require_memory,
    require_page_size,
)
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.runner import Runner
from replaylens.engine.proof.certificates import certificate_for
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.request.values import as_int
from replaylens.kernels.definition import CHUNK
from replaylens.kernels.gpus import Gpu, gpu_of

# ---- sizes -----------------------------------------------------------------------------------------------------------

CPU_ROWS, CUDA_ROWS, CUDA_LONE_ROWS = 512, 1024, 8192
"""default of `max_rows`; a device needs more rows to be busy, and has them if nobody waits for a pass"""
_OPEN = 32
"""requests of a hybrid that run at once, each with the entries of two chunks: the open one, and the next"""
PAGE = 16
"""default of `page_size`"""
FEWEST_TOKENS = 512
"""positions of a GPU's cache below which an engine is refused"""


class Sizes(NamedTuple):
    """Of an engine's cache."""

    tokens: int
    """positions"""
    state_tokens: int
    """positions whose recurrent entries are kept"""
    why: str
    """why so many positions; empty: they were given"""
    lone_rows: int = 0
    """most rows of a pass over prompts for which nobody waits; 0: as many as of any pass"""
    memory: str = ""
    """of a GPU: what is held and reserved, in words"""

    @classmethod
    def of(
        cls,
        model: Decoder,
        tokens: int | None = None,
        page_size: int = PAGE,
        state_tokens: int | None = None,
        max_rows: int | None = None,
        draft_model: Decoder | None = None,
    ) -> Sizes:
        """The sizes that are given, or else those that this machine has room for now."""
        config, stages, on_cuda, lone_rows = model.config, model.stages, model.device.type == "cuda", 0
        free = free_on(model.device) if on_cuda else 0
        if on_cuda and max_rows is None:
            lone_rows = rows_for(config, model.dtype, free)
        max_rows = max_rows or (CUDA_ROWS if on_cuda else CPU_ROWS)
        least = max_rows + 4 * CHUNK  # a pass, the chunk before it and the tail of another
        if state_tokens is not None and config.mixer is None:
            raise BadRequest(f"This {config.family} model has no recurrent layers, so state_tokens is of no use. Leave it out.")
        if state_tokens is not None and stages:
            raise BadRequest("Over several devices, a hybrid keeps the states of all positions. Leave state_tokens out.")
        given = state_tokens if state_tokens is None else as_int("state_tokens", state_tokens, least)

        def states(tokens: int) -> int:
            return given or max(least, max_rows + min(tokens // 4, 2 * _OPEN * CHUNK))

        def needs(tokens: int) -> int:
            own = cache_bytes(config, tokens, page_size, model.dtype, None if stages else states(tokens))
            small = draft_model and cache_bytes(draft_model.config, tokens, page_size, draft_model.dtype, None)
            return own + (small or 0)

        why, beside = "", pass_bytes(config, model.dtype, max(max_rows, lone_rows)) if on_cuda else 0
        if tokens is None:
            places = {model.device: 1.0} if not stages else dict.fromkeys((stage.device for stage in stages), 0.0)
            for stage in stages:
                places[stage.device] += (stage.end - stage.first) / config.num_layers
            tokens, why = chosen_tokens(needs, page_size, places, beside)
        tokens = as_int("cache_tokens", tokens, page_size)
        devices = {stage.device for stage in stages} or {model.device}
        require_memory(config, tokens, page_size, model.dtype, devices, None if stages else states(tokens))
        if not on_cuda or stages:
            return cls(tokens, states(tokens), why, lone_rows)
        gpu, held = gpu_of(model.device), torch.cuda.memory_allocated(model.device)
        most, each = max(max_rows, lone_rows), kv_bytes(config, model.dtype)
        memory = divided(gpu, free, held, tokens, needs(tokens), most, beside, each, FEWEST_TOKENS if why else 1)
        return cls(tokens, states(tokens), why, lone_rows, memory)

    @classmethod
    def usual(cls, model: Decoder) -> Sizes:
        """Those of an engine that is made without options."""
        return cls.of(model, None, usual_page(model))


def pass_bytes(config: ModelConfig, dtype: torch.dtype, rows: int) -> int:
    """What a pass of so many rows takes besides weights and cache, about: the values between two products, of a layer."""
    width, mixture, mixer = config.d_model, config.mixture, config.mixer
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.d_head + config.num_heads * config.d_head
    mlp = 3 * config.d_mlp
    if mixture is not None:
        mlp = max(mlp, mixture.routing.top * (3 * mixture.d_expert + width))
    return rows * dtype.itemsize * (4 * width + heads + mlp + (2 * mixer.columns[-1] if mixer else 0))


def rows_for(config: ModelConfig, dtype: torch.dtype, free: int) -> int:
    """Rows of a pass that is over prompts alone: as many as take an eighth of a GPU's free memory, up to `CUDA_LONE_ROWS`."""
    rows = CUDA_LONE_ROWS
    while rows > CUDA_ROWS and pass_bytes(config, dtype, rows) > free // 8:
        rows //= 2
    return rows


def divided(gpu: Gpu, free: int, held: int, tokens: int, cache: int, rows: int, passes: int, each: int, fewest: int = 1) -> str:
    """What is held and reserved of a GPU's memory, in words. NotEnoughMemory if it does not fit.

    free    bytes after the weights are there, of which `cache` and `passes` are to be taken; held: those of the weights
    tokens  positions of the cache, of `each` bytes at least; fewer than `fewest` are of no use
    """
    unit = lambda count: f"{count / 2**30:,.1f} GiB"  # noqa: E731
    parts = f"weights {unit(held)}, KV of cache_tokens={tokens:,} {unit(cache)}, passes of up to {rows:,} rows {unit(passes)}"
    if cache + passes <= free and tokens >= fewest:
        return f"{unit(gpu.memory)} of {gpu.name}: {parts}; {unit(free - cache - passes)} stay free"
    most = max(0, free - passes) // max(1, each)
    fewer = f"Give cache_tokens={most // PAGE * PAGE} at most" if most >= FEWEST_TOKENS else "Give a smaller max_rows"
    raise NotEnoughMemory(
        f"{gpu.name} has {unit(gpu.memory)}, of which {unit(free)} are free after the weights: {parts}. {fewer}, or divide the "
        "layers over several GPUs with devices=[...]."
    )


def usual_page(model: Decoder) -> int:
    """Positions of a page, by default."""
    return PAGE if model.config.mixer is None else CHUNK


class EngineKeywords(TypedDict, total=False):
    """How an engine computes. `Engine` documents it."""

    cache_tokens: int | None
    page_size: int | None
    state_tokens: int | None
    max_rows: int | None
    lens_layer: int | None
    tree_width: int
    canary: bool
    record: bool
    capture_buffer: int


# ---- parts -----------------------------------------------------------------------------------------------------------


def make_drafters(runner: Runner, draft_model: Decoder | None, layer: int | None, width: int) -> dict[str, Drafter]:
    """All drafters of an engine by name; `model` only if there is a model to draft with.

    layer  where the early-exit drafters leave the model; None: in the middle
    width  sibling chains of the `tree` drafter
    """
    config = runner.model.config
    layer = max(1, config.num_layers // 2) if layer is None else layer
    drafters: dict[str, Drafter] = {
        "self": SelfDrafter(),
        "lens": LensDrafter(runner, layer),
        "ngram": NgramDrafter(),
        "tree": TreeDrafter(runner, layer, width),
        "forced": ForcedDrafter(),
    }
    if draft_model is not None:
        require_page_size(draft_model.config, runner.pool.page_size, "a hybrid draft model")
        certificate_for(draft_model)
        own = Runner(draft_model, runner.pool.num_pages, runner.pool.page_size)
        drafters["model"] = ModelDrafter(own, config.vocab_size, partial(weights_hash, draft_model))
    return drafters


def decode_on_device(loop: Loop) -> None:
    """Mutates: the loop decodes in bursts and its passes are CUDA graphs. Precondition: the model is on CUDA."""
    from replaylens.engine.passes import cuda as cuda_lens
    from replaylens.engine.passes.bursts import Bursts
    from replaylens.engine.passes.graphs import PassGraphs

    runner = loop.runner
    loop.bursts = Bursts(runner, partial(cuda_lens.lens_columns, runner.model))
    runner.graphs = PassGraphs(runner.model, runner.one_cache, loop.bursts.spare.pages[0], runner.vectors)


def replay_on_devices(runner: Runner) -> None:
    """Mutates: the passes of layers on several CUDA devices are graphs, one per device. Decode steps are passes, too."""
    from replaylens.engine.passes.edits_cuda import Vectors
    from replaylens.engine.passes.graphs import PassGraphs, PlacedGraphs

    model, spare = runner.model, PageTable()
    runner.pool.reserve(spare, 0, 1)
    assert isinstance(runner.cache, PlacedCache)
    runner.graphs = PlacedGraphs(
        [
            PassGraphs(model, part, spare.pages[0], Vectors(model.dtype, str(stage.device)), stage=stage)
            for stage, part in zip(model.stages, runner.cache.parts, strict=True)
        ],
        spare,
        model.device,
    )


def require_device(model: Decoder) -> None:
    """Raise BadRequest for a model on a device where no engine computes, UnsupportedModel for one that it does not support."""
    if model.device.type == "cuda":
        require_gpu(model.device)
    if model.device.type not in ("cpu", "cuda"):
        raise BadRequest(
            f"The weights are on the device {str(model.device)!r}, where no engine computes; 'meta' holds no numbers. Load "
            "the model on 'cpu' or 'cuda'."
        )
