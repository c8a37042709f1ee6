"""Checks that a loaded model computes the same as its source: a few random tokens through both, layer by layer.

Loading translates a config and a list of tensors. Anything that the translation does not cover (a field, a replaced module, a
hook, a buffer) would silently make it another model. So the residual streams and logits of both are compared, in float32 on
the CPU, and the first layer that differs is named.

Weights of other dtypes or on other devices are converted one block at a time, and restored afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from replaylens.engine.errors import BadRequest, ModelMismatch
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder, scaled_logits
from replaylens.engine.model.layers import inverse_frequencies
from replaylens.engine.model.ops import SequenceOps

if TYPE_CHECKING:
    from replaylens.weights.family import Sink

NUM_TOKENS = 32
USUAL, LARGEST = 1e-5, 1e-3
"""the largest relative errors that count as rounding: of the median row, and of any row. Measured in float32 against
transformers: median at most 2e-6 (products of 14,336 terms; 3e-7 on tiny models, 6e-7 on SmolLM2), largest at most 5e-5 (a
channel 3,000 times as large as the others). The smallest planted difference, one GELU for another, has a median of 1e-4"""
EMBEDDING, FINAL_NORM, UNEMBEDDING = "the embedding", "the final norm", "the final norm or the unembedding"
_ROWS = 1 << 14
"""rows of the unembedding that are converted together"""

ModelPart = Callable[[Tensor | None], Tensor]
"""a part of the loaded model: its output as a function of its input"""
Stages = dict[str, Tensor]
"""part of the model -> its output: the residual stream [tokens, d_model], or the logits [tokens, vocab]"""


@torch.no_grad()
def require_same(config: ModelConfig, fill: Callable[[Sink], None], source: nn.Module) -> None:
    """Raise ModelMismatch if the decoder of `config` does not compute the same as `source`.

    fill    sets the decoder's tensors, those of each block together and in order
    source  a transformers model, or one that a TransformerBridge wraps. It is not changed. BadRequest if it cannot run
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, (min(NUM_TOKENS, config.max_positions),), generator=generator)
    theirs = _their_stages(source, tokens, config.num_layers)
    _require_angles(config, source)
    comparison = _Comparison(config, tokens, theirs)
    fill(comparison)
    comparison.compare()


class _Comparison:
    """Takes the tensors of a decoder. A part is compared once it is whole, and a block is then released: joined weights (q, k
    and v; gate and up) are copies, which are two thirds of a Llama's blocks."""

    def __init__(self, config: ModelConfig, tokens: Tensor, theirs: Stages) -> None:
        self._model = Decoder.hollow(config)
        self._parts, self._theirs = _our_parts(self._model, tokens), theirs
        self._entered: Tensor | None = None
        self._held: dict[str, Tensor] = {}
        self._block = ""

    def __setitem__(self, name: str, x: Tensor) -> None:
        block = name.split(".")[1] if name.startswith("blocks.") else self._block
        if block != self._block:
            self.compare(1)
        self._block, self._held[name] = block, x

    def compare(self, count: int | None = None) -> None:
        """Run the next parts (None: all) on the input of the same part of theirs, and compare the rows of their outputs."""
        self._model.load_state_dict(self._held, strict=False, assign=True)
        self._held.clear()
        for stage, part in islice(self._parts, count):
            if (left := self._theirs.get(stage)) is None:
                continue
            _require_small(stage, _error(part(self._entered), left, self._entered), self._model.embed.dtype)
            self._entered = left


def _require_small(stage: str, error: Tensor, dtype: torch.dtype) -> None:
    """Raise ModelMismatch if the errors of a part's rows are more than rounding."""
    # a model in a narrow dtype may round the embedding's factor to it (Gemma-3)
    usual = max(USUAL, torch.finfo(dtype).eps) if stage == EMBEDDING else USUAL
    if not (error.median() <= usual and error.max() <= max(usual, LARGEST)):  # NaN counts as a difference
        raise ModelMismatch(stage, float(error.max()))


def _error(ours: Tensor, theirs: Tensor, entered: Tensor | None) -> Tensor:
    """The relative error of every row; infinite if the shapes differ.

    Relative to output plus input if both have the same shape, since a block may cancel its input.
    """
    if ours.shape != theirs.shape:
        return torch.tensor([float("inf")], dtype=torch.float64)
    length = theirs.double().norm(dim=-1)
    if entered is not None and entered.shape == theirs.shape:
        length += entered.double().norm(dim=-1)
    return (ours.double() - theirs.double()).norm(dim=-1) / length.clamp_min(1e-30)


def _require_angles(config: ModelConfig, source: nn.Module) -> None:
    """Raise ModelMismatch if a rotary frequency differs, which barely shows on a few tokens but does on many.

    `model.to(torch.bfloat16)` rounds the frequencies; `from_pretrained(..., dtype=torch.bfloat16)` does not.
    """
    turned = [layer for layer in range(config.num_layers) if config.rotates(layer)]
    ours = [inverse_frequencies(config.rope_of(layer), config.rotary_dim) for layer in turned]
    for name, theirs in source.named_buffers():
        if name.endswith("inv_freq") and "original" not in name and "vision" not in name and config.rotary_dim:
            found = theirs.detach().to("cpu", torch.float32)
            same_size = [each for each in ours if each.shape == found.shape]
            error = min((float(((found - each) / each).abs().max()) for each in same_size), default=float("inf"))
            if not error <= USUAL:
                raise ModelMismatch(f"the rotary frequencies ({name}, {theirs.dtype})", error)


# ---- ours ----------------------------------------------------------------------------------------------------------------


def _our_parts(model: Decoder, tokens: Tensor) -> Iterator[tuple[str, ModelPart]]:
    """The decoder's parts, in order. Only one part at a time is converted to float32."""
    yield EMBEDDING, lambda _: _embedding(model, tokens)
    for layer in range(model.config.num_layers):
        yield f"block {layer}", partial(_block, model, layer)
    yield FINAL_NORM, partial(_normed, model)
    yield UNEMBEDDING, partial(_logits, model)


def _embedding(model: Decoder, tokens: Tensor) -> Tensor:
    """As `Decoder.embedding`, but only the looked-up rows are converted."""
    x = model.embed[tokens].to("cpu", torch.float32) * model.config.embed_scale
    return x if model.pos_embed is None else x + model.pos_embed[: len(tokens)].to("cpu", torch.float32)


def _block(model: Decoder, layer: int, x: Tensor) -> Tensor:
    model.blocks[layer].to("cpu", torch.float32)
    x = model.run_blocks(x, torch.arange(len(x)), SequenceOps([len(x)]), None, layer, layer + 1)
    model.blocks[layer].to("meta")
    return x


def _normed(model: Decoder, x: Tensor) -> Tensor:
    return SequenceOps([len(x)]).norm(x, model.ln_final.to("cpu", torch.float32))


def _logits(model: Decoder, x: Tensor) -> Tensor:
    """As `Decoder.logits`, with the unembedding converted in pieces."""
    x = _normed(model, x)
    table, bias = model.unembedding, model.unembed_bias
    logits = torch.cat([x @ rows.to("cpu", torch.float32).t() for rows in table.split(_ROWS)], dim=-1)
    return scaled_logits(
        logits if bias is None else logits + bias.to("cpu", torch.float32), model.config, SequenceOps([len(x)])
    )


# ---- theirs --------------------------------------------------------------------------------------------------------------


def _their_stages(source: nn.Module, tokens: Tensor, num_layers: int) -> Stages:
    """What the source computes in float32: embedding, output of every block, logits (without a head: final norm)."""
    seen: Stages = {}

    def see(stage: str, value: Any) -> None:
        first = value[0] if isinstance(value, tuple) else value
        seen[stage] = first.detach().float().flatten(0, -2).clone()

    blocks = blocks_of(source, num_layers)
    hooks = [blocks[0].register_forward_pre_hook(lambda _, args: see(EMBEDDING, args))]
    for layer, block in enumerate(blocks):
        hooks.append(block.register_forward_hook(lambda _, __, out, layer=layer: see(f"block {layer}", out)))
    try:
        with _as_float32(source, blocks), as_defined(source):
            out = source(input_ids=tokens[None], use_cache=False)
    except Exception as e:
        raise BadRequest(
            f"transformers cannot run this {type(source).__name__}, so the loaded model cannot be compared with it: "
            f"{type(e).__name__}: {e}. Use check=False to load it unchecked."
        ) from e
    finally:
        for hook in hooks:
            hook.remove()
    if hasattr(out, "logits"):
        see(UNEMBEDDING, out.logits)
    else:  # a model without its head, which is then the embedding
        see(FINAL_NORM, out.last_hidden_state)
    return seen


def blocks_of(source: nn.Module, num_layers: int) -> nn.ModuleList:
    """The decoder's layers, not those of a vision part."""
    for name, module in source.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers and "vision" not in name:
            return module
    raise BadRequest(f"This {type(source).__name__} has no list of {num_layers} layers to compare with. Use check=False.")


@contextmanager
def as_defined(source: nn.Module) -> Iterator[None]:
    """Without dropout, with eager attention and experts: faster kernels omit what they lack, such as Gemma-2's softcap."""
    modes = {module: module.training for module in source.modules()}
    configs: list[Any] = [
        config for m in source.modules() if hasattr(config := getattr(m, "config", None), "_attn_implementation")
    ]
    before = [(config._attn_implementation, getattr(config, "_experts_implementation", None)) for config in configs]
    try:
        for config in configs:
            config._attn_implementation = config._experts_implementation = "eager"
        source.eval()
        yield
    finally:
        for config, kept in zip(reversed(configs), reversed(before), strict=True):  # many modules share one config
            config._attn_implementation, config._experts_implementation = kept
        for module, mode in modes.items():
            module.training = mode


@contextmanager
def _as_float32(source: nn.Module, blocks: nn.ModuleList) -> Iterator[None]:
    """Compute on the CPU in float32: the weights of each block, and of each other part, are converted while it runs."""
    held: list[tuple[Tensor, Tensor]] = []

    def convert(module: nn.Module, *_: Any) -> None:
        for x in (*module.parameters(), *module.buffers()):
            if x.is_floating_point() and (x.dtype, x.device.type) != (torch.float32, "cpu"):
                held.append((x, x.data))
                x.data = x.data.to("cpu", torch.float32)

    def put_back(*_: Any) -> None:
        while held:
            x, data = held.pop()
            x.data = data

    hooks = [part.register_forward_pre_hook(convert, prepend=True) for part in _parts(source, blocks)]
    hooks += [part.register_forward_hook(put_back) for part in _parts(source, blocks)]
    try:
        yield
    finally:
        put_back()
        for hook in hooks:
            hook.remove()


def _parts(module: nn.Module, blocks: nn.ModuleList) -> list[nn.Module]:
    """The blocks, and the largest modules that contain none of them."""
    inner = [child for child in module.children() if not any(each is blocks for each in child.modules())]
    outer = [child for child in module.children() if any(each is blocks for each in child.modules())]
    return inner + [part for child in outer for part in _parts(child, blocks)]
