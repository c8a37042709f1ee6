"""`SweepSettings`: everything that determines a sweep's result, checked before anything is computed."""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import torch

from replaylens.engine.request.values import as_int, defines, short_repr
from replaylens.probes import registry, splits
from replaylens.probes.checks import as_draws, layer_list, names
from replaylens.probes.errors import ProbeError
from replaylens.probes.heldout import known_metric
from replaylens.probes.permutations import PERMUTATIONS
from replaylens.probes.positions import RowPosition
from replaylens.probes.rows import ProbeRows
from replaylens.probes.splits import Split

# ---- settings --------------------------------------------------------------------------------------------------------

BRANCHES = ("accepted", "rejected", "all")
PRECISIONS = ("double", "single")


class SweepKeywords(TypedDict, total=False):
    """How rows are probed. `SweepSettings` documents it."""

    layers: Sequence[int] | None
    folds: int
    branches: str
    controls: bool
    residualise: Sequence[str]
    code_length: bool
    seed: int
    metric: str
    permutations: int
    precision: str
    device: str


@defines(SweepKeywords)
@dataclass(frozen=True)
class SweepSettings:
    """Options of `sweep`."""

    labels: tuple[str, ...] = ("state",)
    """labels to probe for; `state` is the task's true state"""
    sites: tuple[str, ...] = ("S", "T", "C")
    """residual stream (S), attention output (T), MLP output (C), or stored site names"""
    layers: Sequence[int] | None = None
    """layers of the letters; None: all"""
    positions: tuple[str, ...] = ("step", "query")
    """see `positions`"""
    estimators: tuple[str, ...] = ("logistic",)
    """see `replaylens probe --list`"""
    split: str = "root"
    """root, length:N, depth:N, accepted-rejected, rejected-accepted, part:A:B; or the name of a split of your own"""
    folds: int = 5
    branches: str = "accepted"
    """branches whose rows are used: accepted, rejected or all"""
    controls: bool = True
    untrained: bool = False
    """whether an untrained model is run as a control"""
    residualise: Sequence[str] = ()
    """index columns (position, steps, ...) whose linear effect is first removed from the rows"""
    code_length: bool = False
    """also compute the online code of logistic probes"""
    seed: int = 0
    groups: str | None = None
    """what else keeps prompts together: a column of the index; values that were given are one too"""
    metric: str = "auto"
    """of classes, in score, interval, test and controls: accuracy, balanced_accuracy, auroc, or auto: AUROC where classes are
    unequal (the most frequent of two has 70 % or more), otherwise accuracy. Numbers have r2"""
    permutations: int = PERMUTATIONS
    """of the labels, with a new fit for each; 0: none, and so no p and nothing shown: scores and intervals of large grids"""
    precision: str = "double"
    """double: agrees with scikit-learn to rounding; single: half the memory, twice as fast"""
    device: str = "cpu"

    def __post_init__(self) -> None:
        object.__setattr__(self, "permutations", as_draws("permutations", self.permutations))
        for name, least in (("folds", 1), ("seed", 0)):
            object.__setattr__(self, name, as_int(name, getattr(self, name), least, error=ProbeError))
        object.__setattr__(self, "residualise", names("residualise", self.residualise))
        object.__setattr__(self, "layers", None if self.layers is None else layer_list(self.layers))
        known_metric(self.metric)
        checks = {
            f"Unknown branches {self.branches!r}. Use one of {', '.join(BRANCHES)}.": self.branches in BRANCHES,
            f"Unknown precision {self.precision!r}. Use one of {', '.join(PRECISIONS)}.": self.precision in PRECISIONS,
            f"{self.permutations} permutations are too few. Give at least 19, or 0 for none.": self.permutations >= 19
            or self.permutations == 0,
            f"Device {self.device!r} not found. Use cpu, or cuda if torch finds a GPU.": _is_there(self.device),
            "An option is empty. Give at least one label, site, position and estimator.": all(
                (self.labels, self.sites, self.positions, self.estimators)
            ),
        }
        for message, fine in checks.items():
            if not fine:
                raise ProbeError(message)
        if both := set(self.labels) & set(self.residualise):
            raise ProbeError(f"Label {min(both)!r} is both probed and residualised, which removes it. Leave it out of one.")
        for name in self.estimators:
            if registry.get(name).swept == "no":
                raise ProbeError(f"{name} does not take rows of one position. See docs/probes.md for its input.")
        for position in self.positions:
            RowPosition.parse(position)

    def to_json(self) -> dict[str, Any]:
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def key(self, rows_digest: str) -> str:
        """Hash of settings and rows: parts of a sweep can be reused only under the same key."""
        return hashlib.sha256(json.dumps([self.to_json(), rows_digest], sort_keys=True).encode()).hexdigest()


def _is_there(device: str) -> bool:
    try:
        torch.empty(0, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError):  # torch raises either, depending on what is missing
        return False
    return True


# ---- named splits ----------------------------------------------------------------------------------------------------
# The splits of a sweep: by name, as in its settings, or by a caller's function.

MakeSplit = Callable[[ProbeRows], Split]
NAMED_SPLITS = ("root", "length", "depth", "accepted-rejected", "rejected-accepted", "part")
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
        raise ProbeError(f"Invalid split={short_repr(split)}. Give a name, such as 'root', or a function from rows to a Split.")
    made = split(rows)
    if not isinstance(made, Split):
        raise ProbeError(
            f"The function for split returned {short_repr(made)}. Return a Split, as splits.by_root and by_mask do."
        )
    return made
