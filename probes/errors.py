"""Every error that probing raises on purpose. The text says what to do about it."""

from replaylens.engine.errors import EngineError


class ProbeError(EngineError, ValueError):
    """Base of all errors of the probes."""


class OneClass(ProbeError):
    """All rows to fit on have the same label: there is nothing to tell apart."""


class BadRows(ProbeError):
    """Rows that hold NaN or infinity, or of which none are left."""


class TooFewRoots(ProbeError):
    """Fewer root prompts than folds, or than a statistic needs."""


class MissingLabel(ProbeError, KeyError):
    """A label that the rows do not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class BadPosition(ProbeError):
    """A position that cannot be read, or that the rows cannot answer."""


class RootOnBothSides(ProbeError):
    """A split that would test on a prompt, or a branch of one, that it trained on."""


class UnknownEstimator(ProbeError):
    """No estimator has this name."""


class NotLinear(ProbeError):
    """The estimator has no single direction that could be steered, ablated or exchanged."""


class BadProbeFile(ProbeError):
    """A saved probe or report that is damaged, edited or of another format. Nothing of it was used."""


class OtherSweep(ProbeError):
    """The folder holds parts of a sweep with other settings, or of other rows."""
