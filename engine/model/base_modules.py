"""`BaseModules`: the modules of a base model under all names that an adapter may know them by."""

import re
from typing import Any

from replaylens.engine.model.adapter_config import AdapterConfig
from replaylens.engine.model.families import FAMILIES, family_of
from replaylens.engine.model.source import HEAD, Source

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
        stored beside adapters of a longer vocabulary."""
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
