"""`Differentiable`: the gradients of a branch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from replaylens.engine.errors import BadRequest, ClosedBranch, NoGradient
from replaylens.engine.gradients.backward import Tape
from replaylens.engine.gradients.gradients import AnyMetric, Divergence, Gradients, LogitsFunction, Named, function_of, named
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import BranchRecord, BranchStatus
from replaylens.engine.model import modes
from replaylens.engine.model.sites import CHOICE_SITE, SiteTable
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.values import items
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock

SITES = "letters among S, T and C, a site name, or a list of these"


class GradientSource(Protocol):
    """What gradients need from the branch's engine."""

    sites: SiteTable
    forest: Forest
    lock: EngineLock

    def _target(self, target: str | int) -> int:
        """The id of a token, given as text or id."""
        ...


class Differentiable(ABC):
    """A path with edits, whose gradients can be computed."""

    engine: GradientSource
    lane: Lane
    lock: EngineLock
    record: BranchRecord

    @modes.plainly
    def gradients(self, metric: AnyMetric | Differentiable, sites: str | Sequence[str] | None = None) -> Gradients:
        """The gradient of a metric of the next token's logits, at every position of the path.

        metric  a pair of tokens (their logit difference), one token (its log-probability), another branch (the KL divergence
                from its distribution), or a function of the last row's logits [vocab] that returns a scalar tensor. With a
                function, the result is not certified
        sites   S, T and C, or site names; default: those that the branch captures

        The path is computed again, alone, in one canonical forward and one backward pass. So the bits depend on weights, path
        and edits only. Gradients are those of the values after edits: added vectors let them pass, replaced rows stop them.
        """
        names = self._differentiable(sites)
        function, promised = metric_of(self.engine, metric)
        return self.tape(names).gradients(function, self.engine.sites.names, self.lane.certified and promised)

    @abstractmethod
    def logits(self) -> Tensor:
        """Of the next token: [vocab]."""
        ...

    def tape(self, sites: tuple[str, ...]) -> Tape:
        """The path computed alone, with the values that gradients at these sites need. Changes nothing."""
        lane, record = self.lane, self.record
        if record.status is BranchStatus.RELEASED:
            raise ClosedBranch(f"Branch {record.id} was released. Use a live branch, or prompt again.")
        if lane.thoughts is not None:
            raise NoGradient(f"Branch {record.id} thinks, and no gradient flows through thoughts. Use a plain model.")
        if lane.hooks:
            raise NoGradient(f"Branch {record.id} has hook functions, which have no gradient. Use edits instead.")
        return tape_of(self.engine, record.tokens[:], lane.edits, sites)

    def _differentiable(self, sites: str | Sequence[str] | None) -> tuple[str, ...]:
        """The names of the sites; those that are captured if none are given."""
        if sites is None or (not isinstance(sites, str) and not items("sites", sites, SITES)):
            captured = () if self.lane.capture is None else self.lane.capture.sites
            without = self.engine.sites.read_only  # these and choices have no gradient
            sites = tuple(site for site in captured if site not in without and not site.endswith(CHOICE_SITE))
        return differentiable(self.engine, sites)


def tape_of(
    engine: GradientSource, tokens: list[int], edits: tuple[PlacedEdit, ...], sites: tuple[str, ...], backward: bool = True
) -> Tape:
    """A path computed alone, with the values of these sites, and those that their gradients need. Changes nothing."""
    engine.lock.refuse_within_step()
    return engine.lock.alone(lambda: Tape.of(engine.forest.runner, list(tokens), edits, sites, backward))


def metric_of(engine: GradientSource, metric: AnyMetric | Differentiable) -> tuple[LogitsFunction, bool]:
    """A metric in any of its forms as a function of the logits, and whether its bits are promised."""
    promised = True
    if isinstance(metric, Differentiable):
        promised, metric = metric.lane.certified, Divergence(metric.logits())  # its own edits and hooks need no gradient
    found = named(metric)
    return function_of(found, engine._target), promised and isinstance(found, Named)


def differentiable(engine: GradientSource, sites: str | Sequence[str]) -> tuple[str, ...]:
    """The names of sites that have a gradient; NoGradient if one has none, BadRequest if there are none."""
    sites = sites if isinstance(sites, str) else tuple(items("sites", sites, SITES))
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
    if not names:
        raise BadRequest("No sites. Name some, e.g. sites='STC', or capture them on the branch.")
    return names
