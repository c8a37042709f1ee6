"""What those who extend the package import: base classes, registers and `check`, which tries the promises of a part.

Each name is loaded when it is first used, and stays here wherever its module moves.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see the names themselves
    from replaylens.engine.model.config import ModelConfig as ModelConfig
    from replaylens.engine.model.decoder import Block as Block
    from replaylens.engine.model.decoder import Decoder as Decoder
    from replaylens.engine.model.layers import Linear as Linear
    from replaylens.engine.model.layers import Norm as Norm
    from replaylens.engine.model.layers import Part as Part
    from replaylens.engine.model.ops import tapped as tapped
    from replaylens.extend.checks import BrokenPromise as BrokenPromise
    from replaylens.extend.checks import check as check
    from replaylens.extend.checks import names as names
    from replaylens.probes.registry import ESTIMATORS as ESTIMATORS
    from replaylens.probes.registry import Estimator as Estimator
    from replaylens.tasks.reading import Event as Event
    from replaylens.tasks.reading import Scene as Scene
    from replaylens.tasks.registry import register as register
    from replaylens.tasks.task import Knobs as Knobs
    from replaylens.tasks.task import Story as Story
    from replaylens.tasks.task import Task as Task
    from replaylens.tasks.task import as_range as as_range
    from replaylens.tasks.task import check_range as check_range
    from replaylens.tasks.task import knob as knob
    from replaylens.tasks.tokenizer import vocabulary_of as vocabulary_of
    from replaylens.weights.families import FAMILIES as FAMILIES
    from replaylens.weights.family import Family as Family

_WHERE = {
    "Block": "engine.model.decoder",
    "BrokenPromise": "extend.checks",
    "Decoder": "engine.model.decoder",
    "ESTIMATORS": "probes.registry",
    "Estimator": "probes.registry",
    "Event": "tasks.reading",
    "FAMILIES": "weights.families",
    "Family": "weights.family",
    "Knobs": "tasks.task",
    "Linear": "engine.model.layers",
    "ModelConfig": "engine.model.config",
    "Norm": "engine.model.layers",
    "Part": "engine.model.layers",
    "Scene": "tasks.reading",
    "Story": "tasks.task",
    "Task": "tasks.task",
    "as_range": "tasks.task",
    "check": "extend.checks",
    "check_range": "tasks.task",
    "knob": "tasks.task",
    "names": "extend.checks",
    "register": "tasks.registry",
    "tapped": "engine.model.ops",
    "vocabulary_of": "tasks.tokenizer",
}
__all__ = list(_WHERE)


if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _WHERE:
            raise AttributeError(f"module 'replaylens.extend' has no attribute {name!r}. It has {', '.join(_WHERE)}.")
        return getattr(import_module(f"replaylens.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return sorted(_WHERE)
