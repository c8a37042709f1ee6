"""`Family`: an architecture of transformers as a table: how its config names our fields, and how it names its tensors.

What a family computes is said by `ModelConfig`; which tensors it has follows from that. So a table holds names, the fixed
part of the wiring, and the few functions that rearrange a tensor.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from replaylens.engine.errors import UnsupportedModel
from replaylens.engine.model.config import Activation, ModelConfig
from replaylens.engine.model.decoder import Block
from replaylens.engine.model.expert_names import ExpertNames, respelled
from replaylens.engine.model.experts import Experts
from replaylens.engine.model.layers import HeadLinear, Linear, Norm

Raw = dict[str, Any]
"""a Hugging Face config"""
Get = Callable[[str], Tensor]
"""the source tensor of a Hugging Face name"""
Tensors = dict[str, Tensor]


class Sink(Protocol):
    """Where tensors go, by our names: a dictionary, or the decoder that they fill."""

    def __setitem__(self, name: str, x: Tensor, /) -> None: ...


Arrange = Callable[[ModelConfig, Tensor], Tensor]
"""a source tensor (weights: [outputs, inputs], biases: [outputs]) -> the same in our order of outputs. Of products by head:
[heads, inputs, outputs]"""

_REQUIRED = object()
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}
_FLAGS = frozenset(f.name for f in fields(ModelConfig) if isinstance(f.default, bool))


@dataclass(frozen=True)
class Field:
    """A field of a Hugging Face config."""

    name: str
    otherwise: Any = _REQUIRED
    """the value if the config lacks the field or holds None"""

    def read(self, raw: Raw) -> Any:
        value = raw[self.name] if self.otherwise is _REQUIRED else raw.get(self.name)
        return self.otherwise if value is None and self.otherwise is not _REQUIRED else value


ReadField = str | Field | Callable[[Raw], Any]
"""how a field of `ModelConfig` is read: a field that must be there, one that may be missing, or a function of the config"""


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of a family's tensors, without `.weight` and `.bias`."""

    embed: str
    final_norm: str
    """empty: the norm has no weights"""
    block: str
    """the beginning of all names of a layer, with {} for its number"""
    parts: Mapping[str, str | tuple[str, ...]]
    """our module within a block -> theirs, or theirs to be joined, in our order of outputs. Empty: a norm without weights.
    With {}: one norm for each head. A parameter of its own (attn.sinks) -> theirs"""
    pos_embed: str = ""
    pos_offset: int = 0
    """rows of the table of positions before that of position 0"""
    embed_norm: str = ""
    """a LayerNorm of the embedding, which is applied to the table once (BLOOM)"""
    head: str = "lm_head"
    transposed: bool = True
    """products are stored [outputs, inputs]; we store [inputs, outputs]"""
    experts: ExpertNames | None = None
    """the names of a mixture's experts"""
    spellings: tuple[tuple[str, str], ...] = ()
    """(part of a name, what stands there in files of older versions)"""


@dataclass(frozen=True, kw_only=True)
class Family:
    """One `model_type` of transformers."""

    names: Names
    reads: Mapping[str, ReadField]
    """field of `ModelConfig` -> where its value comes from"""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """field of `ModelConfig` -> its value in every model of the family"""
    uses: frozenset[str] = frozenset()
    """further config fields that the model computes with, beside those that `reads` names"""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """config fields that transformers computes with -> the values for which we compute the same"""
    same: Mapping[str, str] = field(default_factory=dict)
    """config fields that transformers computes with -> the field whose value they must have"""
    layer_types: bool = False
    """`layer_types` says which layers have a window"""
    nested_ropes: bool = False
    """`rope_parameters` may hold one rotary embedding for each kind of layer"""
    norm_offset: float = 0.0
    """what is added to stored norm weights"""
    arrange: Mapping[str, Arrange] = field(default_factory=dict)
    """our module -> how its source tensor is rearranged"""
    renamed: Callable[[ModelConfig], Mapping[str, str]] = lambda config: {}
    """names of parts that depend on the config"""
    later_layers: bool = False
    """checkpoints may hold layers after the last one, which guess further tokens and which transformers leaves out"""

    @property
    def used(self) -> frozenset[str]:
        """All config fields that the model computes with, as far as the table says."""
        named = {read if isinstance(read, str) else read.name for read in self.reads.values() if isinstance(read, str | Field)}
        return self.uses | named

    def config(self, raw: Raw) -> ModelConfig:
        """The config in our terms. KeyError names a missing field."""
        values: dict[str, Any] = {"family": raw["model_type"], **self.fixed}
        for name, read in self.reads.items():
            value = Field(read).read(raw) if isinstance(read, str) else read.read(raw) if isinstance(read, Field) else read(raw)
            values[name] = bool(value) if name in _FLAGS else activation(value) if name == "activation" else value
        return ModelConfig(**values)

    def tensors(self, config: ModelConfig, get: Get) -> Tensors:
        """All tensors that a decoder of `config` has, by our names."""
        out: Tensors = {}
        self.fill(config, get, out)
        return out

    def fill(self, config: ModelConfig, get: Get, out: Sink) -> None:
        """Mutates: set all tensors that a decoder of `config` has in `out`, by our names, one after the other."""
        names, parts = self.names, {**self.names.parts, **self.renamed(config)}
        get = respelled(get, names.spellings)
        embed = get(f"{names.embed}.weight")
        if names.embed_norm:
            weight, bias = (get(f"{names.embed_norm}.{end}").float() for end in ("weight", "bias"))
            embed = F.layer_norm(embed.float(), (config.d_model,), weight, bias, config.norm_eps)
        out["embed"] = embed
        del embed  # it may be a large part of all weights
        if config.learned_positions:
            out["pos_embed"] = get(f"{names.pos_embed}.weight")[names.pos_offset :]
        if not config.tied_embeddings:
            out["unembed.weight"] = get(f"{names.head}.weight").T
        if config.unembed_bias:
            out["unembed_bias"] = get(f"{names.head}.bias")
        with torch.device("meta"):
            blocks = [Block(config, layer) for layer in range(config.num_layers)]  # some may have a mixture
            final = Norm(config.d_model, config.norm, config.norm_eps, config.norm_bias)
        for end, like in final.named_parameters():
            out[f"ln_final.{end}"] = self._norm(names.final_norm, end, like, get)
        for layer, block in enumerate(blocks):
            begin = names.block.format(layer)
            for name, like in block.named_parameters():
                part, _, end = name.rpartition(".")
                module = block.get_submodule(part)
                if not isinstance(module, Linear | HeadLinear | Norm):
                    out[f"blocks.{layer}.{name}"] = self._single(block, name, begin, get)
                    continue
                theirs = parts[part]
                if isinstance(module, Linear | HeadLinear):
                    pieces = [get(f"{begin}{each}.{end}") for each in ((theirs,) if isinstance(theirs, str) else theirs)]
                    x = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                else:
                    assert isinstance(theirs, str)  # norms are not joined
                    x = self._norm(theirs and begin + theirs, end, like, get)
                if part in self.arrange:
                    x = self.arrange[part](config, x)
                is_weight = isinstance(module, Linear) and end == "weight"
                out[f"blocks.{layer}.{name}"] = x.T if is_weight and names.transposed else x

    def unused(self, num_layers: int, unread: list[str]) -> list[str]:
        """The names of tensors that were not read, and that the family does not leave out on purpose."""
        if not self.later_layers:
            return unread
        first, last = self.names.block.split("{}")
        later = re.compile(rf"{re.escape(first)}(\d+){re.escape(last)}")
        layer = lambda name: int(found[1]) if (found := later.match(name)) else -1  # noqa: E731
        return [name for name in unread if layer(name) < num_layers]

    def _single(self, block: Block, name: str, begin: str, get: Get) -> Tensor:
        """A parameter that is neither of a product nor of a norm."""
        part, _, end = name.rpartition(".")
        module = block.get_submodule(part)
        if isinstance(module, Experts):
            assert self.names.experts is not None  # a family with mixtures names them
            return self.names.experts.read(end, len(module.up), begin, get)
        theirs = self.names.parts[name]
        assert isinstance(theirs, str)  # it is not joined
        return get(begin + theirs)

    def _norm(self, theirs: str, end: str, like: Tensor, get: Get) -> Tensor:
        """The weights or biases of a norm, of the shape of `like`."""
        if not theirs:
            return (
                torch.ones(like.shape, dtype=torch.float32) if end == "weight" else torch.zeros(like.shape, dtype=torch.float32)
            )
        each = [theirs.format(head) for head in range(len(like))] if "{}" in theirs else [theirs]
        x = get(f"{theirs}.{end}") if each == [theirs] else torch.stack([get(f"{name}.{end}") for name in each])
        return self.norm_offset + x.float() if self.norm_offset and end == "weight" else x


def activation(name: str) -> Activation:
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(f"The activation {name!r} is not supported. Known: {', '.join(sorted(_ACTIVATIONS))}.")
    return _ACTIVATIONS[name]
