"""replaylens: probe a language model on an engine whose every committed bit can be replayed.

Heavy parts load on first use: `import replaylens` brings in torch and nothing larger.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # type checkers and editors see the names themselves
    from replaylens import probes as probes
    from replaylens import tasks as tasks
    from replaylens.engine import errors as errors
    from replaylens.engine.dump.reader import Dump as Dump
    from replaylens.engine.engine import Engine as Engine
    from replaylens.engine.proof.trace import Trace as Trace
    from replaylens.engine.request.edits import Edit as Edit
    from replaylens.engine.request.sampling import Sampling as Sampling
    from replaylens.engine.run import Run as Run
    from replaylens.engine.serving.branch import Branch as Branch

__version__ = "0.1.0"

_WHERE = {
    "Branch": "replaylens.engine.serving.branch:Branch",
    "Dump": "replaylens.engine.dump.reader:Dump",
    "Edit": "replaylens.engine.request.edits:Edit",
    "Engine": "replaylens.engine.engine:Engine",
    "Run": "replaylens.engine.run:Run",
    "Sampling": "replaylens.engine.request.sampling:Sampling",
    "Trace": "replaylens.engine.proof.trace:Trace",
    "errors": "replaylens.engine.errors",
    "probes": "replaylens.probes",
    "tasks": "replaylens.tasks",
}

__all__ = ["Branch", "Dump", "Edit", "Engine", "Run", "Sampling", "Trace", "__version__", "errors", "probes", "tasks"]


if not TYPE_CHECKING:  # to a type checker, `__getattr__` would mean that every name exists and can be anything

    def __getattr__(name: str) -> object:
        """Load a public name where it lives, the first time it is asked for."""
        if name not in _WHERE:
            raise AttributeError(f"module 'replaylens' has no attribute {name!r}; it offers {', '.join(sorted(_WHERE))}")
        module, _, attribute = _WHERE[name].partition(":")
        loaded = import_module(module)
        return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted(__all__)
