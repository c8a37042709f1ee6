"""`Adapter`: a LoRA adapter in peft's format, merged into the weights of its base as they are read.

A weight W [outputs, inputs] with adapter A [rank, inputs], B [outputs, rank] becomes W + scale * B A. It is summed in float64
and rounded once to float32, so that the merged weights do not depend on the order in which a library adds.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from replaylens.engine.errors import BadConfig, BadWeights, UnsupportedModel
from replaylens.engine.model import modes
from replaylens.weights.families import FAMILIES, family_of
from replaylens.weights.source import ADAPTER_FILE, FLOATS, HEAD, Shards, Source
from replaylens.weights.source import ADAPTER_WEIGHTS as WEIGHTS_FILE

# ---- adapter config --------------------------------------------------------------------------------------------------
# `AdapterConfig`: the config of a LoRA adapter in peft's format, with every type checked, and which modules it asks for.

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
_ALL_LINEAR = "all-linear"
_NAMES = "a list of names of modules"
_EXPRESSION = "a regular expression"


@dataclass(frozen=True)
class AdapterConfig:
    """Ranks and scales, and the modules that are adapted. Names of modules are those of transformers."""

    rank: int
    alpha: float
    ranks: dict[str, int]
    """regular expression of the end of a module's name -> its rank"""
    alphas: dict[str, float]
    rank_stabilised: bool
    modules: str | tuple[str, ...]
    """those with a sum of products: a regular expression of the whole name, or ends of names"""
    exclude: str | tuple[str, ...]
    layers: tuple[int, ...]
    """if `modules` are ends of names: only of these layers; empty: of all"""
    layers_pattern: tuple[str, ...]
    """names of the list of layers; empty: any"""
    saved: tuple[str, ...]
    """ends of the names of modules that were trained as a whole (peft's `modules_to_save`)"""

    @classmethod
    def read(cls, folder: Path) -> "AdapterConfig":
        """UnsupportedModel names a field that is not supported, BadConfig one that cannot be read."""
        return cls.of(folder, read_fields(folder))

    @classmethod
    def of(cls, folder: Path, values: dict[str, Any]) -> "AdapterConfig":
        """From the fields of a config in this folder."""
        fields = _Fields(folder / ADAPTER_FILE, values)
        fields.require_supported()
        layers = fields.values.get("layers_to_transform")
        return cls(
            rank=fields.number("r", fields.values.get("r"), whole=True),
            alpha=fields.number("lora_alpha", fields.values.get("lora_alpha"), whole=False),
            ranks=fields.pattern("rank_pattern", whole=True),
            alphas=fields.pattern("alpha_pattern", whole=False),
            rank_stabilised=fields.flag("use_rslora"),
            modules=fields.expression_or_names("target_modules", required=True),
            exclude=fields.expression_or_names("exclude_modules"),
            layers=fields.layers([layers] if type(layers) is int else layers),
            layers_pattern=fields.patterns("layers_pattern"),
            saved=fields.names("modules_to_save"),
        )

    def scale(self, module: str) -> tuple[int, float]:
        """The rank of a module, and the factor of its product."""
        rank, alpha = _by_module(self.ranks, module, self.rank), _by_module(self.alphas, module, self.alpha)
        return rank, alpha / (math.sqrt(rank) if self.rank_stabilised else rank)

    @property
    def all_linear(self) -> bool:
        """Every product of every layer is adapted. peft writes their names in place of this word."""
        return isinstance(self.modules, str) and self.modules.lower() == _ALL_LINEAR

    def targets(self, module: str) -> bool:
        """Whether a module of this name is adapted, as peft decides; not of `all_linear`."""
        if isinstance(self.modules, str):
            return re.fullmatch(self.modules, module) is not None
        return module in self.modules or (module.endswith(_ends(self.modules)) and self._has_layer(module))

    def excludes(self, module: str) -> bool:
        """Whether the module is never adapted: it is excluded, or trained as a whole."""
        if self.saves(module):
            return True
        if isinstance(self.exclude, str):
            return re.fullmatch(self.exclude, module) is not None
        return module in self.exclude or module.endswith(_ends(self.exclude))

    def saves(self, module: str) -> bool:
        """Whether the module, or one that contains it, was trained as a whole."""
        parts = module.split(".")
        return any(".".join(parts[: i + 1]).endswith(self.saved) for i in range(len(parts)))

    def _has_layer(self, module: str) -> bool:
        if not self.layers:
            return True
        begins = [rf"(?:^|.*?\.){each}" for each in self.layers_pattern] or [r".*?\.[^.]*"]
        found = (re.match(rf"{begin}\.(?P<layer>\d+)\.", module) for begin in begins)
        layer = next((int(match["layer"]) for match in found if match), None)
        return layer in self.layers


@dataclass(frozen=True)
class _Fields:
    """The fields of a config, read by type."""

    file: Path
    values: dict[str, Any]

    def require_supported(self) -> None:
        if "peft_type" not in self.values:
            raise self.bad("peft_type", None, "'LORA', the only method that is supported")
        for field, value in self.values.items():
            if field not in _HARMLESS and value not in (values := _SUPPORTED.get(field, _NEUTRAL)):
                raise UnsupportedModel(
                    f"The adapter {self.file.parent} has {field} = {value!r}, which is not supported. Supported: "
                    f"{', '.join(map(repr, values))}. Merge it into the base with peft (merge_and_unload), and load that."
                )

    def bad(self, field: str, value: Any, what: str) -> BadConfig:
        return BadConfig(
            f"{self.file} has {field} = {value!r:.120}. It must be {what}. Copy it again, or save the adapter anew."
        )

    def number(self, field: str, value: Any, whole: bool) -> Any:
        if whole and (type(value) is not int or value < 1):
            raise self.bad(field, value, "a whole number above 0")
        if type(value) not in (int, float) or not math.isfinite(value):
            raise self.bad(field, value, "a finite number")
        return value

    def flag(self, field: str) -> bool:
        value = self.values.get(field)
        if not isinstance(value, bool | None):
            raise self.bad(field, value, "true or false")
        return bool(value)

    def pattern(self, field: str, whole: bool) -> dict[str, Any]:
        given = self.values.get(field)
        if not isinstance(given, dict | None):
            raise self.bad(field, given, "an object: names of modules, and a number for each")
        for key, value in (given or {}).items():
            self.expression(field, key)
            self.number(f"{field}[{key!r}]", value, whole)
        return given or {}

    def names(self, field: str) -> tuple[str, ...]:
        given = self.values.get(field)
        if given is not None and not (isinstance(given, list) and all(isinstance(name, str) and name for name in given)):
            raise self.bad(field, given, _NAMES)
        return tuple(given or ())

    def expression_or_names(self, field: str, required: bool = False) -> str | tuple[str, ...]:
        given = self.values.get(field)
        if isinstance(given, str) and (given or not required):
            return self.expression(field, given) if given else ()
        if required and not isinstance(given, list):
            raise self.bad(field, given, f"{_NAMES}, or {_EXPRESSION}")
        return self.names(field)

    def patterns(self, field: str) -> tuple[str, ...]:
        given = self.values.get(field)
        names = (given,) if isinstance(given, str) and given else () if given == "" else self.names(field)
        return tuple(self.expression(field, name) for name in names)

    def expression(self, field: str, given: str) -> str:
        try:
            re.compile(given)
        except re.error as e:
            raise self.bad(field, given, f"{_EXPRESSION}, but cannot be read ({e})") from None
        return given

    def layers(self, given: Any) -> tuple[int, ...]:
        if given is not None and not (isinstance(given, list) and all(type(layer) is int for layer in given)):
            raise self.bad("layers_to_transform", given, "the number of a layer, or a list of them")
        return tuple(given or ())


def read_fields(folder: Path) -> dict[str, Any]:
    """The fields of a folder's config, as they are written."""
    file = folder / ADAPTER_FILE
    if not file.exists():
        raise UnsupportedModel(f"{folder} holds no adapter: {ADAPTER_FILE} is missing.")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as e:
        raise BadConfig(f"{file} is not valid JSON: {e}. Copy it again.") from None
    if not isinstance(config, dict):
        raise BadConfig(f"{file} is not a JSON object. Copy it again.")
    return config


def _by_module(pattern: dict[str, Any], module: str, otherwise: Any) -> Any:
    """The entry of a pattern whose key, a regular expression, matches the end of the module's name, as in peft."""
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), otherwise)


def _ends(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f".{name}" for name in names)


# ---- base modules ----------------------------------------------------------------------------------------------------
# `BaseModules`: the modules of a base model under all names that an adapter may know them by.

EXPERT = ".experts."
"""in the names of tensors of experts"""
_NO_PRODUCT = re.compile(r"norm|\bln_")
"""in the names of modules in a layer that have weights and are not linear"""


class BaseModules:
    """The tensors of a base. A file may name them otherwise than the model in memory, which is what peft sees."""

    def __init__(self, source: Source, raw: dict[str, Any]) -> None:
        self._source, family = source, FAMILIES[family_of(raw)]
        self._family = family.names
        named = source.text_names()
        kept = family.unused(raw.get("num_hidden_layers", 0), sorted(named))
        self._spellings = {named[name]: self._spelled(name, named[name]) for name in kept}
        if source.find(HEAD) is None and raw.get("tie_word_embeddings"):
            self._spellings[HEAD] = (HEAD,)  # the model in memory has one

    @property
    def names(self) -> list[str]:
        """The names of all tensors in the file, and of a head that is not stored because it is tied."""
        return sorted(self._spellings)

    def find(self, name: str) -> str | None:
        """The base's name of a tensor that an adapter changes; None: the base lacks it."""
        pairs = self._family.spellings
        others = [name.replace(old, new) for here, there in pairs for old, new in ((here, there), (there, here)) if old in name]
        for each in (name, *others):
            found = each if each in self._source.names else self._source.find(each)
            if found is not None:
                return found
        return HEAD if name == HEAD else None  # the base is tied

    def is_expert(self, name: str) -> bool:
        """Whether the tensor belongs to an expert. Files store experts one by one, the model holds them in one tensor."""
        return any(EXPERT in each for each in self._spellings.get(name, (name,)))

    def saved(self, name: str, config: AdapterConfig) -> bool:
        """Whether the adapter trains the module of this tensor as a whole."""
        return any(config.saves(each.rpartition(".")[0]) for each in self._spellings[name])

    def targeted(self, name: str, config: AdapterConfig, experts: bool) -> bool:
        """Whether the adapter has a sum of products for this tensor.

        experts  experts count too: the model that the adapter is of holds them one by one, as older versions do
        """
        if not name.endswith(".weight") or (self.is_expert(name) and not experts):
            return False
        modules = [each.removesuffix(".weight") for each in self._spellings[name]]
        if any(config.excludes(module) for module in modules):
            return False
        if config.all_linear:
            return any(self._is_product(module) for module in modules)
        return any(config.targets(module) for module in modules)

    def may_be_targeted(self, name: str, config: AdapterConfig) -> bool:
        """Whether peft could have a sum of products for this tensor. Of all linear modules, a router may be one."""
        if not config.all_linear or name not in self._spellings:
            return name not in self._spellings or self.targeted(name, config, experts=True)
        modules = [each.removesuffix(".weight") for each in self._spellings[name]]
        excluded = any(config.excludes(module) for module in modules)
        return not excluded and any(self._in_layer(module) and not _NO_PRODUCT.search(module) for module in modules)

    def may_be_saved(self, name: str, config: AdapterConfig) -> bool:
        """Whether peft could have stored this tensor as a whole: it was trained so, or is an embedding or a head, which are
        stored with adapters of a longer vocabulary."""
        tables = (HEAD, f"{self._family.embed}.weight")
        if name not in self._spellings or self.saved(name, config):
            return True
        return any(each == table or each.endswith("." + table) for each in self._spellings[name] for table in tables)

    def _is_product(self, module: str) -> bool:
        """Whether the module is a linear one of a layer. Routers are not: whether they are linear depends on the version."""
        router = str(self._family.parts.get("mlp.router", ""))
        return self._in_layer(module) and not _NO_PRODUCT.search(module) and not (router and module.endswith(f".{router}"))

    def _in_layer(self, module: str) -> bool:
        return module.startswith(self._family.block.split("{}")[0])

    def _spelled(self, text: str, here: str) -> tuple[str, ...]:
        """All names of a tensor: in the file, in a text model, and in memory.

        text  its name in a text model, in the file's spelling
        """
        root = self._family.block.partition(".")[0] + "."
        is_head = here == self._source.find(HEAD)
        now = HEAD if is_head else text if text.startswith(root) else root + text  # a transformer saved without its head
        for memory, file in self._family.spellings:
            if file in now:
                now = now.replace(file, memory)
                break
        return tuple(dict.fromkeys((here, text, now)))


# ---- adapter ---------------------------------------------------------------------------------------------------------

__all__ = ["ADAPTER_FILE", "WEIGHTS_FILE", "Adapter", "Lora", "base_tensors", "is_adapted"]

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
    """tensors that the adapter replaces: those of modules trained as a whole, and embeddings that peft saved with them"""
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
        tables = not {"embed_tokens", "lm_head"}.isdisjoint(config.modules)  # what peft also saves
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
                continue  # the base's own tensor next to the trained one: peft does not compute with it
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
                        f"{folder / WEIGHTS_FILE} holds {ours} twice, with different values. Save the adapter again with peft."
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
    """Whether a model in memory holds adapters: peft's own, or a transformers model with adapters added."""
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
