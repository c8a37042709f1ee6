"""`Adapter`: a LoRA adapter in peft's format, merged into the weights of its base as they are read.

A weight W [outputs, inputs] with adapter A [rank, inputs], B [outputs, rank] becomes W + scale * B A. It is summed in float64
and rounded once to float32, so that the merged weights do not depend on the order in which a library adds.
"""

import hashlib
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import BadConfig, BadWeights, UnsupportedModel
from replaylens.engine.model import modes
from replaylens.engine.model.families import FAMILIES, family_of
from replaylens.engine.model.shards import Shards
from replaylens.engine.model.source import HEAD, Source

ADAPTER_FILE = "adapter_config.json"
"""written by peft"""
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_embedding_A": "a", ".lora_embedding_B": "b"}
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})
_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal", None),  # others change the base's weights
}
"""fields whose other values make an adapter more than a sum of products -> the values that do not"""
_HARMLESS = frozenset(
    {
        "alpha_pattern",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "eva_config",
        "exclude_modules",
        "fan_in_fan_out",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "modules_to_save",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "runtime_config",
        "target_modules",
        "task_type",
        "use_rslora",
    }
)
"""fields that are read, that only training uses, or that say the same as the names and shapes of the tensors"""
_ROWS = 1024
"""rows of a weight that are merged together"""


@dataclass(frozen=True)
class Lora:
    """The change of one weight: scale * b @ a, transposed for an embedding."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scale: float
    embeds: bool
    """the weight is an embedding: [inputs, outputs]"""

    def merged(self, weight: Tensor, transposed: bool) -> Tensor:
        """The changed weight, in float32; `transposed`: it is stored [inputs, outputs]."""
        left, right = (self.a.T, self.b.T) if transposed else (self.b, self.a)
        if tuple(weight.shape) != (left.shape[0], right.shape[1]):
            raise ValueError(f"it changes a weight {(left.shape[0], right.shape[1])}, the base has {tuple(weight.shape)}")
        out = torch.empty(weight.shape)
        left, right = left.double(), right.double() * self.scale
        with modes.threads(1):
            for first in range(0, len(out), _ROWS):
                rows = slice(first, first + _ROWS)
                out[rows] = weight[rows].double() + left[rows] @ right
        return out


@dataclass(frozen=True)
class Adapter:
    """What an adapter changes, by the names of modules and tensors in transformers."""

    folder: Path
    changes: dict[str, Lora]
    whole: dict[str, Tensor]
    """tensors that the adapter replaces: those of `saved`, and embeddings that peft saved beside them"""
    saved: tuple[str, ...] = ()
    """ends of the names of modules that were trained as a whole (peft's `modules_to_save`)"""

    @classmethod
    def read(cls, folder: Path) -> "Adapter":
        """An adapter from its folder. UnsupportedModel names a field that is not supported, BadWeights a tensor."""
        config = _read_config(folder)
        for field, value in config.items():
            if field not in _HARMLESS and value not in (values := _SUPPORTED.get(field, _NEUTRAL)):
                raise UnsupportedModel(
                    f"The adapter {folder} has {field} = {value!r}, which is not supported. Supported: "
                    f"{', '.join(map(repr, values))}. Merge it into the base with peft (merge_and_unload), and load that."
                )
        shards = Shards(folder, [WEIGHTS_FILE])
        parts: dict[str, dict[str, Tensor]] = {}
        whole, embeds = {}, set()
        for name in shards.names:
            ours = name.removeprefix(_PREFIX).replace(".modules_to_save.", ".").replace(".base_layer.", ".")
            if end := next((end for end in _PARTS if ours.endswith(end)), ""):
                module = ours.removesuffix(end)
                parts.setdefault(module, {})[_PARTS[end]] = shards.read(name)
                if "embedding" in end:
                    embeds.add(module)
            elif "lora_" in ours:
                raise UnsupportedModel(f"The adapter {folder} holds {name}, which is not supported.")
            else:
                whole[ours] = shards.read(name)
        changes = {name: _lora(folder, name, parts[name], config, name in embeds) for name in sorted(parts)}
        return cls(folder, changes, whole, tuple(config.get("modules_to_save") or ()))

    @property
    def digest(self) -> str:
        """SHA-256 over everything that changes weights: names, scales and tensors."""
        digest = hashlib.sha256()
        for name, lora in sorted(self.changes.items()):
            digest.update(f"{name} {lora.scale!r} {lora.embeds}\n".encode())
            _update(digest, lora.a, lora.b)
        for name, x in sorted(self.whole.items()):
            digest.update(f"{name}\n".encode())
            _update(digest, x)
        return digest.hexdigest()

    def merged(self, source: Source, raw: dict[str, Any]) -> Source:
        """The base's tensors with the adapter's changes, computed as they are read.

        If the base's head is its embedding and the adapter changes one of them, the other stays as it is.
        """
        changes = {self._found(source, f"{module}.weight"): lora for module, lora in self.changes.items()}
        whole = {self._found(source, name): x for name, x in self.whole.items()}
        names = FAMILIES[family_of(raw)].names
        reads = {name: name for name in source.names}
        head, embed = source.find(HEAD), source.find(f"{names.embed}.weight")
        if head is None and embed is not None and raw.get("tie_word_embeddings"):
            own = embed in whole and names.embed.endswith(self.saved)
            if own or embed in changes or not {HEAD}.isdisjoint({*changes, *whole}):
                reads[HEAD] = embed

        def read(name: str) -> Tensor:
            x = source.read(reads[name]) if name not in whole else whole[name]
            lora = changes.get(name)
            if lora is None:
                return x
            try:
                return lora.merged(x, lora.embeds or (not names.transposed and name not in (HEAD, head)))
            except ValueError as e:
                raise BadWeights(f"The adapter {self.folder} does not fit {name}: {e}. Is it for another base?") from None

        return Source(reads, read)

    def _found(self, source: Source, name: str) -> str:
        """The base's name of a tensor that the adapter changes."""
        found = name if name in source.names else source.find(name)
        if found is None and name == HEAD:
            return HEAD  # the base is tied
        if found is None:
            raise BadWeights(f"The adapter {self.folder} changes {name}, which the base lacks. Is it for another base?")
        return found


def base_of(folder: Path) -> Path:
    """The folder of an adapter's base, if its config names one that exists."""
    named = _read_config(folder).get("base_model_name_or_path")
    if isinstance(named, str) and Path(named).is_dir() and Path(named).resolve() != folder.resolve():
        return Path(named)
    raise UnsupportedModel(
        f"{folder} holds an adapter ({ADAPTER_FILE}) of the base model {named!r}, which is not a folder here. Give both: "
        f"Engine.load(base, adapter={str(folder)!r})."
    )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / ADAPTER_FILE
    if not file.exists():
        raise UnsupportedModel(f"{folder} holds no adapter: {ADAPTER_FILE} is missing.")
    try:
        config = json.loads(file.read_text())
    except ValueError as e:
        raise BadConfig(f"{file} is not valid JSON: {e}. Copy it again.") from None
    if not isinstance(config, dict):
        raise BadConfig(f"{file} is not a JSON object. Copy it again.")
    return config


def _lora(folder: Path, module: str, parts: dict[str, Tensor], config: dict[str, Any], embeds: bool) -> Lora:
    if missing := {"a", "b"} - parts.keys():
        raise BadWeights(f"The adapter {folder} lacks lora_{missing.pop().upper()} of {module}. Copy it again.")
    a, b = parts["a"], parts["b"]
    try:
        rank = _by_module(config.get("rank_pattern"), module, config.get("r"))
        alpha = _by_module(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    except (re.error, AttributeError) as e:
        raise BadConfig(f"{folder / ADAPTER_FILE} has a rank_pattern or alpha_pattern that cannot be read: {e}.") from None
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        raise BadConfig(f"{folder / ADAPTER_FILE} gives {module} the rank {rank!r} and alpha {alpha!r}. Copy it again.")
    if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
        raise BadWeights(
            f"The adapter {folder} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} for {module}, but rank {rank} in "
            "its config. Do config and weights belong together?"
        )
    if not all(bool(torch.isfinite(x).all()) for x in (a, b)):
        raise BadWeights(f"The adapter {folder} holds NaN or infinity for {module}.")
    return Lora(a, b, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), embeds)


def _by_module(pattern: dict[str, Any] | None, module: str, otherwise: Any) -> Any:
    """The entry of a pattern whose key, a regular expression, matches the end of the module's name, as in peft."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", module):
            return value
    return otherwise


def _update(digest: Any, *tensors: Tensor) -> None:
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy())
