"""Errors of the probes. Each message says what happened, what was given and what to do."""

from replaylens.engine.errors import EngineError


class ProbeError(EngineError, ValueError):
    """Base of all errors of the probes."""


class OneClass(ProbeError):
    """All rows to fit on have the same class."""


class BadRows(ProbeError):
    """Rows are missing, not finite, or unsuitable for the question."""


class MissingGroups(BadRows):
    """Rows from arrays were given without the group of each row."""


class NoTask(ProbeError):
    """The question needs a task, and the rows have none: they come from arrays."""


class TooFewGroups(ProbeError):
    """There are fewer independent groups of prompts than folds, or than a statistic needs."""


class MissingLabel(ProbeError, KeyError):
    """The rows do not have this label."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class BadPosition(ProbeError):
    """The position cannot be parsed, or the rows cannot resolve it."""


class RootOnBothSides(ProbeError):
    """The split would test on a prompt, or a branch of one, that it fits on."""


class SharedRows(ProbeError):
    """The split would test on an activation that it fits on: two rows with the same path."""


class UnknownEstimator(ProbeError):
    """No estimator has this name."""


class NotLinear(ProbeError):
    """The estimator has no single direction to steer, ablate or interchange."""


class BadProbeFile(ProbeError):
    """A saved probe or report is damaged, edited or of another format. Nothing was loaded."""


class SweepMismatch(ProbeError):
    """The folder holds parts of a sweep with other settings or rows."""


class SeveralTasks(ProbeError):
    """The question needs one task, and the rows are of several."""


class CutFeatures(UserWarning):
    """A dump stores only the strongest features of some rows: the others read as 0, as if they were not active."""


# old names, until the next version
OtherSweep = SweepMismatch
