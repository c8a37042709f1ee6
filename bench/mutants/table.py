"""All mutants."""

from bench.mutants.arrays import ARRAYS
from bench.mutants.device import DEVICE
from bench.mutants.dumps import DUMPS
from bench.mutants.engine import ENGINE
from bench.mutants.gradients import GRADIENTS
from bench.mutants.holes import HOLES
from bench.mutants.memory import MEMORY
from bench.mutants.models import MODELS
from bench.mutants.modes import MODES
from bench.mutants.probes import PROBES
from bench.mutants.questions import QUESTIONS
from bench.mutants.survivors import SURVIVORS
from bench.mutants.tasks import TASKS
from bench.mutants.thinking import THINKING
from bench.mutants.views import VIEWS
from bench.mutants.workbench import WORKBENCH

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
