"""The splits of a sweep: by name, as in its settings, or by a caller's function."""

from collections.abc import Callable

from replaylens.engine.request.values import shown
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.design import splits
from replaylens.probes.design.splits import Split
from replaylens.probes.errors import ProbeError
from replaylens.probes.sweeps.settings import SweepSettings

MakeSplit = Callable[[ProbeRows], Split]
NEEDS_BOTH = ("accepted-rejected", "rejected-accepted", "depth")
"""splits that need accepted and rejected rows"""


def splitter(settings: SweepSettings) -> MakeSplit:
    """The split that the settings name."""
    name, _, rest = settings.split.partition(":")
    folds, seed = settings.folds, settings.seed
    made: dict[str, MakeSplit] = {
        "root": lambda rows: splits.by_root(rows, folds, seed),
        "length": lambda rows: splits.by_length(rows, int(rest)),
        "depth": lambda rows: splits.by_depth(rows, int(rest), folds, seed),
        "accepted-rejected": lambda rows: splits.by_acceptance(rows, "accepted", folds, seed),
        "rejected-accepted": lambda rows: splits.by_acceptance(rows, "rejected", folds, seed),
        "part": lambda rows: splits.by_part(rows, *rest.split(":", 1)),
    }
    if name not in made or (name in ("length", "depth") and not rest.isdigit()) or (name == "part" and ":" not in rest):
        known = "root, length:8, depth:2, accepted-rejected, rejected-accepted, part:A:B, or a function"
        raise ProbeError(f"Unknown split {settings.split!r}. Use {known}.")
    return made[name]


def own_split(split: MakeSplit, rows: ProbeRows) -> Split:
    """What a caller's function makes of the rows. Raises ProbeError unless it is a Split."""
    if not callable(split):
        raise ProbeError(f"Invalid split={shown(split)}. Give a name, such as 'root', or a function from rows to a Split.")
    made = split(rows)
    if not isinstance(made, Split):
        raise ProbeError(f"The function for split returned {shown(made)}. Return a Split, as splits.by_root and by_mask do.")
    return made
