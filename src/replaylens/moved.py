"""Modules that stood elsewhere in 0.1: their old names lead to the new modules, with a warning, for one version."""

import warnings
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from types import ModuleType

MOVED = {
    **{f"engine.model.{name}": f"weights.{name}" for name in ("check", "family", "families", "gguf", "hub")},
    **{f"engine.model.{name}": f"weights.{name}" for name in ("loading", "lora", "quantised", "source")},
    **{f"engine.{name}": name for name in ("features", "gradients", "replay", "thinking", "training")},
    "engine.zoo": "weights.zoo",
    "engine.dump": "dumps",
    "engine.resampling": "rollouts",
    "engine.gradients.replacement": "extras.replacement",
    "engine.cluster": "extras.cluster",
    "engine.lens": "engine.passes",
    "engine.serving.core": "engine.engine",
    "engine.serving.generation": "engine.serving.verbs",
    "engine.transformer_lens": "engine.serving.transformer_lens",
    "engine.passes.products": "engine.passes.cpu",
    "engine.passes.ranks": "extras.ranks",
    "workbench.graph": "extras.graph",
    "workbench.attribution": "extras.attribution",
    "workbench.reproduce": "extras.reproduce",
    "bridges": "extras.bridges",
}
"""old name below `replaylens` -> new name; what stands below a folder moved with it"""


def new_name(name: str) -> str | None:
    """Where a module is now that was called `name`; None if it has not moved."""
    words = name.split(".")[1:]
    for kept in range(len(words), 0, -1):
        if found := MOVED.get(".".join(words[:kept])):
            return ".".join(["replaylens", found, *words[kept:]])
    return None


def found(name: str) -> ModuleSpec | None:
    """The module of an old name, with a warning; None for other names. `src/replaylens/boundary.py` asks for names without a
    file."""
    if (new := new_name(name)) is None:
        return None
    warnings.warn(f"{name} is {new} now; the old name goes with the next version.", DeprecationWarning, stacklevel=3)
    module = import_module(new)
    return ModuleSpec(name, _Same(module, module.__spec__))


class _Same(Loader):
    """Gives a module that is loaded already, as it is: there is one of each, under either name."""

    def __init__(self, module: ModuleType, spec: ModuleSpec | None) -> None:
        self.module, self.spec = module, spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self.spec  # the import system had set that of the old name
