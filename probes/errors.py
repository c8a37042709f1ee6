"""Errors of the probes. Each message says what happened, what was given and what to do."""

from replaylens.engine.errors import BadFile, Caveat, EngineError, PlanMismatch


class ProbeError(EngineError, ValueError):
    """A question that cannot be asked of these rows, or not with these options; the base of all errors of the probes."""


class OneClass(ProbeError):
    """All rows to fit on have the same class."""


class BadRows(ProbeError):
    """Rows, or their groups, are missing, not finite, or unsuitable for the question."""


class TooFewGroups(ProbeError):
    """There are fewer independent groups of prompts than folds, or than a statistic needs."""


class MissingLabel(ProbeError, KeyError):
    """The rows do not have this label."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class BadPosition(ProbeError):
    """The position cannot be parsed, or the rows cannot resolve it."""


class SharedRows(ProbeError):
    """The split would test on what it fits on: a prompt, a branch of one, or an activation, in two rows with the same path."""


# old names, until the next version
OtherSweep = SweepMismatch = PlanMismatch
MissingGroups = BadRows
RootOnBothSides = SharedRows
NoTask = SeveralTasks = NotLinear = UnknownEstimator = ProbeError
BadProbeFile = BadFile
CutFeatures = Caveat
