"""`ThinkingDecoder`: a decoder that thinks in words between the chunks of its input (Thinking States, arXiv 2602.08332).

Chunk i is c tokens. Its state S_i, one vector per token, is added to the output of block `write_layer`; the output of block
`read_layer` is H_i. The thinking block T decodes a short thought Z_{i+1} from H_i, greedily, until <EOS>. The compression
block C turns the thought into S_{i+1}, for the next chunk:

    S_0 = 0      H_i = blocks(X_i + S_i)      Z_{i+1} = T(H_i)      S_{i+1} = C(Z_{i+1})

Chunks count from 0; the paper counts from 1. A thought of <EOS> alone is empty, and its state is exactly zero. The KV cache
of the backbone never holds a thought.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as safetensors_of
from torch import Tensor, nn

from replaylens.engine.errors import BadConfig, BadWeights
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Block, Decoder
from replaylens.engine.model.layers import Norm, Rotary, rotary_table
from replaylens.engine.model.ops import Ops, RowOps, Tap, tapped
from replaylens.engine.passes.batch import not_finite
from replaylens.engine.request.placed import PlacedEdit
from replaylens.weights import loading
from replaylens.weights.hub import THINKING_FILES

# ---- model -----------------------------------------------------------------------------------------------------------

CONFIG_FILE, WEIGHTS_FILE = THINKING_FILES
STATE_SITE = "thinking.state"
THINK_SITE = "thinking.hook_out"
COMPRESS_SITE = "compress.hook_out"


@dataclass(frozen=True)
class ThinkingConfig:
    """How a backbone thinks. Choices that the paper leaves open are fields here. Immutable; checked against its backbone."""

    chunk: int
    """tokens per chunk, c; the prompt is padded to a multiple of it, so that no chunk holds prompt and answer"""
    read_layer: int
    """L_out: the block whose output T reads; `for_backbone` takes the second to last"""
    eos_token: int
    """ends every thought; on its own it is the empty thought"""
    pad_token: int
    """fills the last chunk of a prompt"""
    write_layer: int = 0
    """L_in: the block to whose output the state is added. By default block 0, whose KV then depends on no state"""
    max_thought: int = 8
    """tokens of the longest thought, including <EOS>; longer thoughts are cut off with <EOS>"""

    @classmethod
    def for_backbone(
        cls,
        config: ModelConfig,
        chunk: int,
        eos_token: int,
        pad_token: int,
        *,
        write_layer: int = 0,
        max_thought: int = 8,
    ) -> "ThinkingConfig":
        """The default config for a backbone: T reads the second to last block."""
        return cls(chunk, config.num_layers - 2, eos_token, pad_token, write_layer, max_thought).check(config)

    def check(self, backbone: ModelConfig) -> "ThinkingConfig":
        """Returns self; BadConfig if it does not fit a backbone of this config."""
        if self.chunk < 1:
            raise BadConfig(f"chunk must be at least 1 token, not {self.chunk}.")
        if self.max_thought < 2:
            raise BadConfig(f"max_thought must be at least 2, a word and <EOS>, not {self.max_thought}.")
        if not 0 <= self.write_layer < self.read_layer < backbone.num_layers:
            raise BadConfig(
                f"write_layer {self.write_layer} must come before read_layer {self.read_layer}, and both must be among the "
                f"{backbone.num_layers} blocks. With the defaults a backbone needs at least 3 blocks."
            )
        for name in ("eos_token", "pad_token"):
            if not 0 <= getattr(self, name) < backbone.vocab_size:
                raise BadConfig(
                    f"{name} {getattr(self, name)} is not in the vocabulary of {backbone.vocab_size} tokens. A model that "
                    "thinks needs a tokenizer with an <EOS>."
                )
        return self

    @property
    def layers(self) -> tuple[int, int]:
        """(L_in, L_out)"""
        return self.write_layer, self.read_layer

    @property
    def write_site(self) -> str:
        """The site at which the state is added."""
        return f"blocks.{self.write_layer}.hook_out"

    @property
    def read_site(self) -> str:
        """The site that T reads."""
        return f"blocks.{self.read_layer}.hook_out"

    @property
    def compressed(self) -> int:
        """The number of rows that C runs over: the longest thought, or a chunk if that is longer."""
        return max(self.max_thought, self.chunk)

    def to_json(self) -> str:
        """A stable text form."""
        return json.dumps(asdict(self), sort_keys=True, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "ThinkingConfig":
        """Inverse of `to_json`; an unknown or missing field is an error."""
        try:
            raw = dict(json.loads(text))
            if unknown := set(raw) - {f.name for f in fields(cls)}:
                raise BadConfig(f"Unknown fields {sorted(unknown)} in {CONFIG_FILE}.")
            return cls(**raw)
        except (ValueError, TypeError) as e:
            raise BadConfig(f"{CONFIG_FILE} is not the config of a Thinking-States model: {e}.") from None


class ThinkingDecoder(nn.Module):
    """A backbone, the thinking block T with its own unembedding, and the compression block C.

    T is a causal block over [the chunk's c rows ; the thought so far], C is one over the thought. Both count positions from 0
    and embed thought tokens as the backbone does. Wiring only, like the decoder: the arithmetic is in `Ops`.
    """

    think_rotary: Tensor
    compress_rotary: Tensor

    def __init__(self, config: ModelConfig, thinking: ThinkingConfig) -> None:
        super().__init__()
        self.config, self.thinking = config, thinking.check(config)
        last = config.num_layers - 1
        self.backbone = Decoder(config)
        self.think, self.compress = _alone(Block(config, last)), _alone(Block(config, 0))
        self.think_norm = Norm(config.d_model, config.norm, config.norm_eps, config.norm_bias)
        self.think_unembed = nn.Parameter(torch.empty(config.vocab_size, config.d_model, dtype=torch.float32))
        for name, layer in (("think", last), ("compress", 0)):
            length = thinking.chunk + thinking.compressed
            table = (
                rotary_table(config.rope_of(layer), config.rotary_dim, length)
                if config.rotates(layer)
                else torch.empty(0, dtype=torch.float32)
            )
            self.register_buffer(f"{name}_rotary", table, persistent=False)

    @classmethod
    def around(cls, backbone: Decoder, thinking: ThinkingConfig) -> "ThinkingDecoder":
        """A model around a copy of `backbone`, trained or not: T starts as its last block, C as its first."""
        model = cls(backbone.config, thinking)
        with torch.no_grad():
            model.backbone.load_state_dict(backbone.state_dict())
            model.think.load_state_dict(backbone.blocks[backbone.config.holder(-1)].state_dict())
            model.compress.load_state_dict(backbone.blocks[0].state_dict())
            model.think_norm.load_state_dict(backbone.ln_final.state_dict())
            model.think_unembed.copy_(backbone.unembedding)
        return loading.in_dtype(model, backbone.embed.dtype)

    def forward(
        self, tokens: Tensor, positions: Tensor, states: Tensor, ops: Ops, tap: Tap | None = None
    ) -> tuple[Tensor, Tensor]:
        """tokens, positions [rows], states [rows, d_model] -> what T reads, the residual stream after the last block"""
        write, read = self.thinking.write_layer + 1, self.thinking.read_layer + 1
        run = self.backbone.run_blocks
        x = run(self.backbone.embedding(tokens, positions, tap), positions, ops, tap, 0, write)
        hidden = run(x + states, positions, ops, tap, write, read)
        return hidden, run(hidden, positions, ops, tap, read, self.config.num_layers)

    def thought_embedding(self, tokens: Tensor, places: Tensor) -> Tensor:
        """Thought tokens [rows] at their places within the thought, embedded for T and C: [rows, d_model]."""
        return self.backbone.embedding(tokens, places)

    def run_think(self, x: Tensor, positions: Tensor, ops: Ops, tap: Tap | None = None) -> Tensor:
        """T over rows x [rows, d_model]: a chunk's rows at positions 0 to c - 1, its thought from c on."""
        rotary = Rotary(self.think_rotary, positions) if self.think_rotary.numel() else None
        return tapped(tap, THINK_SITE, self.think(x, rotary, ops, None))

    def thought_logits(self, x: Tensor, ops: RowOps) -> Tensor:
        """T's output [rows, d_model] -> logits of the next thought token [rows, vocab]."""
        return ops.unembed(ops.norm(x, self.think_norm), self.think_unembed)

    def run_compress(self, tokens: Tensor, positions: Tensor, ops: Ops, tap: Tap | None = None) -> Tensor:
        """C over thought tokens [rows] at their positions within the thought: [rows, d_model]."""
        rotary = Rotary(self.compress_rotary, positions) if self.compress_rotary.numel() else None
        return tapped(tap, COMPRESS_SITE, self.compress(self.thought_embedding(tokens, positions), rotary, ops, None))


def _alone(block: Block) -> Block:
    """A block that is the only layer of its own cache."""
    assert block.attn is not None  # of a config without mixers
    block.attn.spec = replace(block.attn.spec, layer=0)
    return block


def save(model: ThinkingDecoder, folder: Path) -> None:
    """Write backbone, T and C; `load(folder)` restores identical bits. The backbone is also a checkpoint of its own. Raises as
    `loading.write_model`."""
    loading.write_model(folder, files_of(model))


def files_of(model: ThinkingDecoder) -> dict[str, bytes]:
    """The files of the model by name, the weights of the backbone last."""
    config, weights = loading.files_of(model.backbone).items()
    own = {CONFIG_FILE: f"{model.thinking.to_json()}\n".encode(), WEIGHTS_FILE: safetensors_of(_own(model))}
    return dict([config, *own.items(), weights])


def _own(model: ThinkingDecoder) -> dict[str, Tensor]:
    return {name: x.contiguous() for name, x in model.state_dict().items() if not name.startswith("backbone.")}


def load(folder: Path, dtype: torch.dtype = torch.float32, revision: str = "") -> ThinkingDecoder:
    """A model from a folder written by `save`, on the CPU and without gradients. BadWeights names the tensors at fault.

    revision  name@commit of a snapshot of the hub
    """
    if not (folder / CONFIG_FILE).exists():
        raise BadConfig(
            f"{folder} has no {CONFIG_FILE}, so it is a plain decoder. Load it with Engine.load, or train one that thinks."
        )
    backbone = loading.load(folder, dtype, revision=revision)
    model = ThinkingDecoder.around(backbone, ThinkingConfig.from_json((folder / CONFIG_FILE).read_text(encoding="utf-8")))
    wanted, found = _own(model), _read(folder / WEIGHTS_FILE)
    faults = [f"{name} is missing" for name in wanted if name not in found]
    faults += [f"{name} is not part of this model" for name in found if name not in wanted]
    for name in wanted.keys() & found.keys():
        if wanted[name].shape != found[name].shape:
            faults.append(f"{name} has shape {tuple(found[name].shape)}, not {tuple(wanted[name].shape)}")
        elif not bool(torch.isfinite(found[name].to(dtype)).all()):
            faults.append(f"{name} holds NaN or infinity")
    if faults:
        parts = {"think": "the thinking block T", "compress": "the compression block C"}
        absent = [words for part, words in parts.items() if not any(name.startswith(part + ".") for name in found)]
        whole = f" ({' and '.join(absent)} missing entirely)" if absent else ""
        raise BadWeights(f"{folder / WEIGHTS_FILE}{whole}: {'; '.join(sorted(faults)[:8])}.")
    model.load_state_dict({name: x.to(dtype) for name, x in found.items()}, strict=False)
    return model.requires_grad_(False).eval()


def _read(path: Path) -> dict[str, Tensor]:
    if not path.exists():
        raise BadWeights(f"{path} is missing. The checkpoint has a backbone, but neither T nor C.")
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    except SafetensorError as e:
        raise BadWeights(f"{path} is not a readable safetensors file: {e}") from e


def padded(ids: Sequence[int], config: ThinkingConfig) -> tuple[int, ...]:
    """A prompt, padded to a multiple of the chunk size."""
    return (*ids, *[config.pad_token] * (-len(ids) % config.chunk))


# ---- steps -----------------------------------------------------------------------------------------------------------
# `ChunkStates`, `ThoughtSteps`: what T reads of a chunk, and the decode steps of several thoughts.


@dataclass(frozen=True, eq=False)
class ChunkStates:
    """The rows of one chunk that T reads."""

    number: int
    hidden: Tensor
    """[c, d_model]"""
    edits: tuple[PlacedEdit, ...] = ()
    """on T and C, by chunk and step"""


class ThoughtSteps(NamedTuple):
    """Steps of several thoughts, on the device."""

    said: Tensor
    """the tokens: [steps, thoughts]"""
    hidden: Tensor
    """T's rows: [steps, thoughts, d_model]"""
    fine: Tensor
    """whether row and logits are finite: [steps, thoughts]"""

    def cut(self, steps: int, thoughts: int) -> "ThoughtSteps":
        """The first ones."""
        return ThoughtSteps(*(x[:steps, :thoughts] for x in self))


def all_ended(said: Tensor, eos: int) -> bool:
    """Whether every thought has an <EOS>: tokens [steps, thoughts]."""
    return bool((said == eos).any(0).all())


def ended(steps: ThoughtSteps, eos: int) -> tuple[list[list[int]], list[Tensor]]:
    """Tokens and T's rows [steps, d_model] of each thought up to <EOS>, on the CPU. NonFinite if one of these rows is not."""
    tokens, fine = steps.said.t().tolist(), steps.fine.t().tolist()
    hidden = steps.hidden.cpu()
    sizes = [words.index(eos) + 1 if eos in words else len(words) for words in tokens]
    if not all(all(each[:size]) for each, size in zip(fine, sizes, strict=True)):
        raise not_finite("thoughts")
    cut = [words[:size] for words, size in zip(tokens, sizes, strict=True)]
    return cut, [hidden[:size, i].clone() for i, size in enumerate(sizes)]


def largest(logits: Tensor) -> Tensor:
    """The likeliest token of each row [rows, vocab], the lowest id among equals: [rows]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    ids = torch.arange(logits.shape[-1], device=logits.device)
    return torch.where(logits == logits.amax(-1, keepdim=True), ids, logits.shape[-1] - 1).amin(-1)


def edited(row: Tensor, chunk: ChunkStates, step: int, room: int) -> Tensor:
    """One row of T [d_model] under the chunk's edits."""
    rows = row[None]
    for edit in (edit for edit in chunk.edits if edit.site == THINK_SITE):
        rows = applied(edit, rows, chunk.number * room + step)
    return rows[0]


def applied(edit: PlacedEdit, rows: Tensor, first: int) -> Tensor:
    """The edited rows [n, d_model], which are at places first, first + 1, ... of the edit's axis."""
    places = edit.positions(first, first + len(rows))
    if not places:
        return rows
    picks, out = [place - first for place in places], rows.clone()
    out[picks] = edit.apply(rows[picks], places)
    return out
