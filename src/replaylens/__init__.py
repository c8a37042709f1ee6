"""replaylens: mechanistic interpretability on a deterministic inference engine, which can replay every committed bit.

Modules load on first use, so `import replaylens` is fast.
"""

from typing import TYPE_CHECKING

from replaylens import boundary

if TYPE_CHECKING:  # type checkers and editors see the names themselves
    from replaylens import errors as errors
    from replaylens import probes as probes
    from replaylens import tasks as tasks
    from replaylens.dumps.reader import Dump as Dump
    from replaylens.engine.engine import Engine as Engine
    from replaylens.engine.proof.trace import Trace as Trace
    from replaylens.engine.request.edits import Edit as Edit
    from replaylens.engine.request.sampling import Sampling as Sampling
    from replaylens.engine.serving.branch import Branch as Branch
    from replaylens.engine.serving.conversation import Conversation as Conversation
    from replaylens.extras.attribution import attribution_graph as attribution_graph
    from replaylens.features.features import SparseFeatures as SparseFeatures
    from replaylens.gradients.attribution import attribution_patching as attribution_patching
    from replaylens.gradients.attribution import integrated_gradients as integrated_gradients
    from replaylens.living.explorer import explore as explore
    from replaylens.living.saved import replay_page as replay_page
    from replaylens.replay.run import Run as Run
    from replaylens.rollouts.plan import Answer as Answer
    from replaylens.rollouts.rollouts import Rollouts as Rollouts
    from replaylens.views.report import report as report
    from replaylens.workbench.ablate import ablate as ablate
    from replaylens.workbench.attention import attention as attention
    from replaylens.workbench.compare import compare as compare
    from replaylens.workbench.dla import dla as dla
    from replaylens.workbench.lens import lens as lens
    from replaylens.workbench.patch import patch as patch
    from replaylens.workbench.patch import path_patch as path_patch
    from replaylens.workbench.routing import routing as routing
    from replaylens.workbench.steer import steer as steer

__version__ = "0.1.0"
PUBLISHED = ""
"""where the project is published; README, pyproject.toml and CITATION.cff say the same, and nothing while this is empty"""

boundary.install()

_WHERE = {
    "Answer": "replaylens.rollouts.plan:Answer",
    "Branch": "replaylens.engine.serving.branch:Branch",
    "Conversation": "replaylens.engine.serving.conversation:Conversation",
    "Dump": "replaylens.dumps.reader:Dump",
    "Edit": "replaylens.engine.request.edits:Edit",
    "Engine": "replaylens.engine.engine:Engine",
    "Rollouts": "replaylens.rollouts.rollouts:Rollouts",
    "Run": "replaylens.replay.run:Run",
    "Sampling": "replaylens.engine.request.sampling:Sampling",
    "SparseFeatures": "replaylens.features.features:SparseFeatures",
    "Trace": "replaylens.engine.proof.trace:Trace",
    "ablate": "replaylens.workbench.ablate:ablate",
    "attention": "replaylens.workbench.attention:attention",
    "attribution_graph": "replaylens.extras.attribution:attribution_graph",
    "attribution_patching": "replaylens.gradients.attribution:attribution_patching",
    "compare": "replaylens.workbench.compare:compare",
    "dla": "replaylens.workbench.dla:dla",
    "errors": "replaylens.errors",
    "explore": "replaylens.living.explorer:explore",
    "integrated_gradients": "replaylens.gradients.attribution:integrated_gradients",
    "lens": "replaylens.workbench.lens:lens",
    "patch": "replaylens.workbench.patch:patch",
    "path_patch": "replaylens.workbench.patch:path_patch",
    "probes": "replaylens.probes",
    "replay_page": "replaylens.living.saved:replay_page",
    "report": "replaylens.views.report:report",
    "routing": "replaylens.workbench.routing:routing",
    "steer": "replaylens.workbench.steer:steer",
    "tasks": "replaylens.tasks",
}

__all__ = [
    "Answer",
    "Branch",
    "Conversation",
    "Dump",
    "Edit",
    "Engine",
    "Rollouts",
    "Run",
    "Sampling",
    "SparseFeatures",
    "Trace",
    "__version__",
    "ablate",
    "attention",
    "attribution_graph",
    "attribution_patching",
    "compare",
    "dla",
    "errors",
    "explore",
    "integrated_gradients",
    "lens",
    "patch",
    "path_patch",
    "probes",
    "replay_page",
    "report",
    "routing",
    "steer",
    "tasks",
]


if not TYPE_CHECKING:  # a type checker would take `__getattr__` to mean that every name exists

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _WHERE:
            raise AttributeError(f"module 'replaylens' has no attribute {name!r}. It has {', '.join(sorted(_WHERE))}.")
        from replaylens.engine.machine import optional

        module, _, attribute = _WHERE[name].partition(":")
        loaded = optional(module, f"replaylens.{name}")
        return getattr(loaded, attribute) if attribute else loaded


def __dir__() -> list[str]:
    return sorted(__all__)
