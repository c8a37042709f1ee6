"""All mutants."""

from tests.mutants.arrays import ARRAYS
from tests.mutants.device import DEVICE
from tests.mutants.dumps import DUMPS
from tests.mutants.engine import ENGINE
from tests.mutants.gradients import GRADIENTS
from tests.mutants.holes import HOLES
from tests.mutants.memory import MEMORY
from tests.mutants.models import MODELS
from tests.mutants.modes import MODES
from tests.mutants.probes import PROBES
from tests.mutants.questions import QUESTIONS
from tests.mutants.survivors import SURVIVORS
from tests.mutants.tasks import TASKS
from tests.mutants.thinking import THINKING
from tests.mutants.views import VIEWS
from tests.mutants.workbench import WORKBENCH

MUTANTS = (
    *ENGINE,
    *MEMORY,
    *MODES,
    *MODELS,
    *DUMPS,
    *PROBES,
    *ARRAYS,
    *QUESTIONS,
    *TASKS,
    *THINKING,
    *GRADIENTS,
    *DEVICE,
    *HOLES,
    *SURVIVORS,
    *VIEWS,
    *WORKBENCH,
)
