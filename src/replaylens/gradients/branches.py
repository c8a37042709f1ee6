"""The gradients of a branch: its path computed alone, forward as a tape and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from replaylens.engine.errors import BadRequest, ClosedBranch, NoGradient
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import BranchRecord, BranchStatus
from replaylens.engine.model.sites import CHOICE_SITE, STATE, SiteTable
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.values import as_list
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock
from replaylens.gradients.backward import Tape
from replaylens.gradients.gradients import AnyMetric, Divergence, Gradients, LogitsFunction, Named, function_of, named

SITES = "letters among S, T and C, a site name, or a list of these"


class GradientSource(Protocol):
    """What gradients need from the branch's engine."""

    sites: SiteTable
    forest: Forest
    lock: EngineLock

    def _target(self, target: str | int) -> int:
        """The id of a token, given as text or id."""
        ...


class Differentiable(Protocol):
    """A path with edits: what gradients need from a branch."""

    engine: Any
    lane: Lane

    @property
    def record(self) -> BranchRecord: ...

    def logits(self) -> Tensor:
        """Of the next token: [vocab]."""
        ...


def gradients(branch: Differentiable, metric: AnyMetric | Differentiable, sites: str | Sequence[str] | None) -> Gradients:
    """`Branch.gradients`."""
    if sites is None or (not isinstance(sites, str) and not as_list("sites", sites, SITES)):
        captured = () if branch.lane.capture is None else branch.lane.capture.sites
        without = branch.engine.sites.read_only  # these, choices and states have no gradient
        sites = tuple(site for site in captured if site not in without and not site.endswith((CHOICE_SITE, STATE)))
    names = differentiable(branch.engine, sites)
    function, promised = metric_of(branch.engine, metric)
    return tape(branch, names).gradients(function, branch.engine.sites.names, branch.lane.certified and promised)


def tape(branch: Differentiable, sites: tuple[str, ...], backward: bool = True) -> Tape:
    """The path computed alone, with the values that gradients at these sites need. Changes nothing. `backward`: see `Tape`."""
    lane, record = branch.lane, branch.record
    if record.status is BranchStatus.RELEASED:
        raise ClosedBranch(f"Branch {record.id} was released. Use a live branch, or prompt again.")
    if lane.carried is not None:
        raise NoGradient(f"Branch {record.id} thinks, and no gradient flows through thoughts. Use a plain model.")
    if lane.hooks:
        raise NoGradient(f"Branch {record.id} has hook functions, which have no gradient. Use edits instead.")
    return tape_of(branch.engine, record.tokens[:], lane.edits, sites, backward)


def tape_of(
    engine: GradientSource, tokens: list[int], edits: tuple[PlacedEdit, ...], sites: tuple[str, ...], backward: bool = True
) -> Tape:
    """A path computed alone, with the values of these sites, and those that their gradients need. Changes nothing."""
    engine.lock.refuse_within_step()
    return engine.lock.alone(lambda: Tape.of(engine.forest.runner, list(tokens), edits, sites, backward))


def metric_of(engine: GradientSource, metric: AnyMetric | Differentiable) -> tuple[LogitsFunction, bool]:
    """A metric in any of its forms as a function of the logits, and whether its bits are promised."""
    promised = True
    if isinstance(metric, Branch):
        promised, metric = metric.lane.certified, Divergence(metric.logits())  # its own edits and hooks need no gradient
    found = named(metric)
    return function_of(found, engine._target), promised and isinstance(found, Named)


def differentiable(engine: GradientSource, sites: str | Sequence[str]) -> tuple[str, ...]:
    """The names of sites that have a gradient; NoGradient if one has none, BadRequest if there are none."""
    sites = sites if isinstance(sites, str) else tuple(as_list("sites", sites, SITES))
    names, lens = engine.sites.select(sites)
    if lens:
        raise NoGradient("Z, the logit lens, is read from S and has no gradient of its own. Ask for S.")
    given = (sites,) if isinstance(sites, str) else sites
    if beside := [name for name in (*given, *names) if name in engine.sites.read_only]:
        raise NoGradient(f"{beside[0]} has no gradient of its own: nothing later is computed from it alone. Ask for another.")
    if choices := [name for name in names if name.endswith(CHOICE_SITE)]:
        raise NoGradient(
            f"{choices[0]} has no gradient: experts are chosen by comparing it, and a choice does not change by degrees. Ask "
            "for mlp.gate.hook_out or mlp.gate.hook_expert_weights."
        )
    if states := [name for name in names if name.endswith(STATE)]:
        raise NoGradient(f"{states[0]} has no gradient here: the walk back keeps no states. Ask for mixer.hook_read or hook_v.")
    if not names:
        raise BadRequest("No sites. Name some, e.g. sites='STC', or capture them on the branch.")
    return names
