"""replaylens: probe a language model on an engine whose every committed bit can be replayed.

Heavy parts load on first use: `import replaylens` brings in torch and nothing larger.
"""

from importlib import import_module
from typing import Any

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


def __getattr__(name: str) -> Any:
    """Load a public name where it lives, the first time it is asked for."""
    if name not in _WHERE:
        raise AttributeError(f"module 'replaylens' has no attribute {name!r}; it offers {', '.join(sorted(_WHERE))}")
    module, _, attribute = _WHERE[name].partition(":")
    loaded = import_module(module)
    return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted(__all__)
