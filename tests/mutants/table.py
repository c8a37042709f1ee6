"""All mutants."""

from tests.mutants.engine import ENGINE

MUTANTS = (*ENGINE,)
