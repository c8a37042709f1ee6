"""Every error and warning that replaylens raises on purpose, of tasks, engine and probes, under one name: `rl.errors`.

Importing it loads neither torch nor a model.
"""

from replaylens.engine import errors as _engine
from replaylens.engine.errors import *  # noqa: F403
from replaylens.probes import errors as _probes
from replaylens.probes.errors import *  # noqa: F403
from replaylens.tasks import errors as _tasks
from replaylens.tasks.errors import *  # noqa: F403

__all__ = sorted(  # noqa: PLE0605
    {
        name
        for room in (_engine, _probes, _tasks)
        for name, kind in vars(room).items()
        if isinstance(kind, type) and issubclass(kind, Exception) and not name.startswith("_")
    }
)
