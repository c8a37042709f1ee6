"""Faults that once lived: single comparisons, constants and arguments that no test missed."""

from tests.mutants.mutant import Mutant


def _golden(group: str) -> tuple[str, ...]:
    """The answers of one group."""
    return (f"tests/test_golden.py::test_the_answers_are_the_known_ones[{group}]",)


SURVIVORS = (
    Mutant(
        "min-p-without-its-bound",
        "replaylens.engine.request.sampling",
        "keep &= probabilities >= self.min_p",
        "keep &= probabilities > self.min_p",
        "the likeliest token stays whatever min_p is",
        _golden("sampling with options"),
    ),
    Mutant(
        "classes-not-around-zero",
        "replaylens.probes.solvers",
        "found = _ridge(grams, 2 * y - 1, where",
        "found = _ridge(grams, 2 * y, where",
        "ridge has the classes -1 and 1",
        _golden("solvers"),
    ),
    Mutant(
        "no-examples-allowed",
        "replaylens.commands.replay",
        'typer.Option("--n", min=1,',
        'typer.Option("--n", min=0,',
        "a command says what its options accept",
        _golden("commands"),
    ),
    Mutant(
        "cost-without-its-fixed-part",
        "replaylens.engine.loop.admission",
        "* (_CLASS + size) / (_CLASS + nearest)",
        "* size / nearest",
        "the cost of a pass has a part that does not grow with its rows",
        _golden("planner"),
    ),
)
