"""`AdapterConfig`: the config of a LoRA adapter in peft's format, with every type checked, and which modules it asks for."""

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replaylens.engine.errors import BadConfig, UnsupportedModel

ADAPTER_FILE = "adapter_config.json"
"""written by peft"""
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
        config = json.loads(file.read_text())
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
