"""`Adapter`: a LoRA adapter in peft's format, merged into the weights of its base as they are read.

A weight W [outputs, inputs] with adapter A [rank, inputs], B [outputs, rank] becomes W + scale * B A. It is summed in float64
and rounded once to float32, so that the merged weights do not depend on the order in which a library adds.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from replaylens.engine.errors import BadWeights, UnsupportedModel
from replaylens.engine.model import modes
from replaylens.engine.model.adapter_config import ADAPTER_FILE, AdapterConfig
from replaylens.engine.model.base_modules import EXPERT, BaseModules
from replaylens.engine.model.families import FAMILIES, family_of
from replaylens.engine.model.shards import Shards
from replaylens.engine.model.source import FLOATS, HEAD, Source

__all__ = ["ADAPTER_FILE", "WEIGHTS_FILE", "Adapter", "Lora", "base_tensors", "is_adapted"]

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_PARTS = {".lora_A.weight": "a", ".lora_B.weight": "b", ".lora_embedding_A": "a", ".lora_embedding_B": "b"}
_UNTRAINED = ".original_module."
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
        out = torch.empty(weight.shape, dtype=torch.float32)
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
    """tensors that the adapter replaces: those of modules trained as a whole, and embeddings that peft saved beside them"""
    config: AdapterConfig

    @classmethod
    def read(cls, folder: Path) -> "Adapter":
        """An adapter from its folder. UnsupportedModel and BadConfig name a field of its config, BadWeights a tensor."""
        config = AdapterConfig.read(folder)
        shards = Shards(folder, [WEIGHTS_FILE])
        if not shards.names:
            raise BadWeights(f"{folder / WEIGHTS_FILE} holds no tensors. Copy it again, or save the adapter anew.")
        return cls._of(folder, config, shards.names, shards.read)

    @classmethod
    def of_model(cls, model: Any) -> "Adapter":
        """The active adapter of a model in memory, as peft would save it. UnsupportedModel: it computes something else."""
        from peft import get_peft_model_state_dict

        active = model.active_adapters() if callable(model.active_adapters) else model.active_adapters
        if len(active) != 1:
            raise _not_merged(model, f"has {len(active)} active adapters ({', '.join(active)}); one can be merged")
        given = model.peft_config[active[0]]
        where = Path(type(model).__name__)  # in the place of a folder, for errors
        fields = json.loads(json.dumps(given.to_dict(), default=lambda x: sorted(x) if isinstance(x, set) else str(x)))
        config = AdapterConfig.of(where, fields)
        tables = not {"embed_tokens", "lm_head"}.isdisjoint(config.modules)  # what peft saves beside, too
        state = get_peft_model_state_dict(model, adapter_name=active[0], save_embedding_layers=tables)
        tensors = {name: x.detach().cpu() for name, x in state.items()}
        adapter = cls._of(where, config, tensors, tensors.__getitem__)
        adapter._require_as_saved(model, active[0])
        return adapter

    @classmethod
    def _of(cls, folder: Path, config: AdapterConfig, tensors: Iterable[str], read: Callable[[str], Tensor]) -> "Adapter":
        parts: dict[str, dict[str, Tensor]] = {}
        whole, embeds = dict[str, Tensor](), set()
        names = {name: _module_name(name) for name in tensors}
        for name, ours in names.items():
            if _UNTRAINED in ours and ours.replace(_UNTRAINED, ".") in names.values():
                continue  # the base's own tensor beside the trained one: peft does not compute with it
            if end := next((end for end in _PARTS if ours.endswith(end)), ""):
                module = ours.removesuffix(end)
                parts.setdefault(module, {})[_PARTS[end]] = read(name)
                if "embedding" in end:
                    embeds.add(module)
            elif "lora_" in ours:
                raise UnsupportedModel(f"The adapter {folder} holds {name}, which is not supported.")
            else:
                x = read(name)
                if ours in whole and not torch.equal(whole[ours], x):
                    raise BadWeights(
                        f"{folder / WEIGHTS_FILE} holds {ours} twice, with different values. Save the adapter anew with peft."
                    )
                whole[ours] = x
        changes = {name: _lora(folder, name, parts[name], config, name in embeds) for name in sorted(parts)}
        return cls(folder, changes, whole, config)

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
        names = FAMILIES[family_of(raw)].names
        modules = BaseModules(source, raw)
        changes = {self._found(modules, f"{module}.weight"): lora for module, lora in self.changes.items()}
        whole = {self._found(modules, name): x for name, x in self.whole.items()}
        self._require_complete(modules, changes, whole)
        self._require_asked(modules, changes, whole)
        reads = {name: name for name in source.names}
        head, embed = source.find(HEAD), source.find(f"{names.embed}.weight")
        if head is None and embed is not None and raw.get("tie_word_embeddings"):
            own = embed in whole and names.embed.endswith(self.config.saved)
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

    def _require_as_saved(self, model: Any, name: str) -> None:
        """UnsupportedModel if a layer of the model does not add what its config says."""
        for path, layer in model.named_modules():
            if getattr(layer, "merged", False):
                raise _not_merged(model, f"has merged its adapter into {path} already (unmerge_adapter undoes it)")
            if getattr(layer, "disable_adapters", False) is True:
                raise UnsupportedModel(
                    f"This {type(model).__name__} has a disabled adapter at {path}, so that it computes its base. Load it "
                    "after disable_adapter(), or call model.enable_adapter_layers(); for the base alone, give model.unload()."
                )
            lora = self.changes.get(path.removeprefix(_PREFIX))
            if lora is not None and layer.scaling[name] != lora.scale:
                raise _not_merged(model, f"scales {path} by {layer.scaling[name]}, but by {lora.scale} in its config")

    def _found(self, modules: BaseModules, name: str) -> str:
        """The base's name of a tensor that the adapter changes."""
        found = modules.find(name)
        if found is None and EXPERT in name:
            raise UnsupportedModel(
                f"The adapter {self.folder} trains the experts {name} as a whole (modules_to_save), all in one tensor, but the "
                "base stores them one by one. Merge it into the base with peft (merge_and_unload), and load that."
            )
        if found is None:
            raise BadWeights(f"The adapter {self.folder} changes {name}, which the base lacks. Is it for another base?")
        return found

    def _require_complete(self, modules: BaseModules, changes: dict[str, Lora], whole: dict[str, Tensor]) -> None:
        """BadWeights if the config asks for a module of the base whose tensors the file lacks: a part would stay untrained."""
        with_experts = any(modules.is_expert(name) for name in changes)
        for name in modules.names:
            if modules.saved(name, self.config):
                missing, field = name not in whole, "modules_to_save"
            else:
                missing, field = modules.targeted(name, self.config, with_experts) and name not in changes, "target_modules"
            if missing:
                what = name if field == "modules_to_save" else name.removesuffix(".weight")
                raise BadWeights(
                    f"The config of the adapter {self.folder} asks for {what} ({field}), which {WEIGHTS_FILE} lacks. Copy both "
                    "files again, and check that they belong together and to this base."
                )

    def _require_asked(self, modules: BaseModules, changes: dict[str, Lora], whole: dict[str, Tensor]) -> None:
        """BadWeights if the file holds tensors that its config does not ask for: peft would leave them out."""
        extra = [name for name in changes if not modules.may_be_targeted(name, self.config)]
        extra += [name for name in whole if not modules.may_be_saved(name, self.config)]
        if extra:
            raise BadWeights(
                f"{self.folder / WEIGHTS_FILE} changes {min(extra)}, which its config does not ask for (target_modules = "
                f"{self.config.modules!r:.120}, modules_to_save = {list(self.config.saved)!r:.120}). Copy both files again, "
                "and check that they belong together."
            )


def is_adapted(model: Any) -> bool:
    """Whether a model in memory holds adapters beside its weights: peft's own, or a transformers model with adapters added."""
    parts = model.modules() if isinstance(model, nn.Module) and getattr(model, "peft_config", None) else ()
    return any(hasattr(part, "base_layer") or hasattr(part, "get_base_model") for part in parts)


def base_tensors(model: Any) -> dict[str, Tensor]:
    """The base's own tensors of an adapted model, by their names in transformers."""
    own = {name: x for name, x in model.state_dict().items() if ".lora_" not in name and ".modules_to_save." not in name}
    return {_module_name(name).replace(_UNTRAINED, "."): x for name, x in own.items()}


def _not_merged(model: Any, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"This {type(model).__name__} {why}. Give the result of model.merge_and_unload(), or the base and the folder of the "
        "saved adapter: Engine.load(base, adapter=folder)."
    )


def _module_name(name: str) -> str:
    """The base's name of a tensor in an adapter's file, without the parts that peft adds."""
    return name.removeprefix(_PREFIX).replace(".modules_to_save.", ".").replace(".base_layer.", ".")


def _lora(folder: Path, module: str, parts: dict[str, Tensor], config: AdapterConfig, embeds: bool) -> Lora:
    if missing := {"a", "b"} - parts.keys():
        raise BadWeights(f"The adapter {folder} lacks lora_{missing.pop().upper()} of {module}. Copy it again.")
    a, b = parts["a"], parts["b"]
    if other := [x.dtype for x in (a, b) if x.dtype not in FLOATS]:
        raise BadWeights(
            f"The adapter {folder} holds {other[0]} for {module}, which needs scales. Save it in float16, bfloat16 or float32."
        )
    rank, scale = config.scale(module)
    if a.dim() != 2 or b.dim() != 2 or len(a) != rank or b.shape[1] != rank:
        raise BadWeights(
            f"The adapter {folder} has lora_A {tuple(a.shape)} and lora_B {tuple(b.shape)} for {module}, but rank {rank} in "
            "its config. Do config and weights belong together?"
        )
    if not all(bool(torch.isfinite(x).all()) for x in (a, b)):
        raise BadWeights(f"The adapter {folder} holds NaN or infinity for {module}.")
    return Lora(a, b, scale, embeds)


def _update(digest: Any, *tensors: Tensor) -> None:
    for x in tensors:
        digest.update(f"{x.dtype} {tuple(x.shape)}\n".encode())
        digest.update(x.contiguous().view(-1).view(torch.uint8).numpy())
