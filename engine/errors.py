"""Every error the engine raises on purpose. The text says what to do about it."""


class EngineError(Exception):
    """Base of all errors of the engine."""


class BadConfig(EngineError, ValueError):
    """A model config that cannot be."""


class UnsupportedModel(EngineError, ValueError):
    """An architecture, or a feature of one, that the decoder does not have."""


class BadWeights(EngineError, ValueError):
    """A tensor is missing, unknown, of the wrong shape, or not finite."""


class UnknownSite(EngineError, KeyError):
    """A hook name that the model does not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])
