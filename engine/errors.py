"""Every error that the engine raises on purpose. The message says what happened, what was given and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

from replaylens.tasks import errors as tasks


class EngineError(Exception):
    """The base of all errors of the engine."""


class BadConfig(EngineError, ValueError):
    """An invalid model config."""


class UnsupportedModel(EngineError, ValueError):
    """A model, a sparse autoencoder, or a part of one, that is not known or not supported."""


class BadWeights(EngineError, ValueError):
    """A tensor is missing, unknown, not finite, or has the wrong shape; or the weights of an engine were changed."""


class MissingTensor(BadWeights):
    """A checkpoint lacks a tensor."""


class FetchFailed(EngineError, RuntimeError):
    """A model could not be fetched: no network, no access, or a part of it is missing. What was complete before still is."""


class ModelMismatch(EngineError, ValueError):
    """The loaded model computes something else than its source. `stage` names the first part that differs, `difference` is
    its largest relative error."""

    def __init__(self, stage: str, difference: float) -> None:
        super().__init__(
            f"The loaded model does not compute what its source does. First difference: {stage}, by {difference:.1e} "
            "(relative, on the same input), which is more than rounding. Look there for what the weights do not show: a config "
            "field, a hook, an adapter, a replaced module, or a buffer (model.to(dtype) rounds rotary frequencies; "
            "from_pretrained(dtype=...) does not)."
        )
        self.stage = stage
        self.difference = difference


class UnknownSite(EngineError, KeyError):
    """A site name that the model does not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class InternalError(EngineError, AssertionError):
    """The engine broke one of its own invariants, such as the order of a token's states. Please report it, with the trace."""


class NotCertified(EngineError, RuntimeError):
    """This device is not certified: it was not shown to give canonical bits."""


class ModesChanged(EngineError, RuntimeError):
    """A setting that changes bits changed during a pass, or cannot be set for it. Nothing of the pass was committed."""


class IntegrityError(EngineError, RuntimeError):
    """A fault in the engine's bookkeeping, found by `check_integrity`, or in its KV, found by the canary. Please report it."""


class NotEnoughMemory(EngineError, MemoryError):
    """A device has no room for the weights of a model."""


class BadRange(EngineError, ValueError):
    """Positions outside the table, branch or index."""


class OutOfPages(EngineError, RuntimeError):
    """More pages are needed than are free. Nothing was changed. `needed` and `free` count them."""

    def __init__(self, needed: int, free: int, total: int, text: str = "") -> None:
        super().__init__(
            text
            or f"{needed} pages needed, {free} of {total} free. Evict from the prefix index, roll back or release branches, "
            "wait for other requests to finish, or make the pool larger."
        )
        self.needed = needed
        self.free = free

    @classmethod
    def for_ever(cls, needed: int, free: int, total: int, tokens: int, wanted: int, page_size: int) -> "OutOfPages":
        """For a path of `tokens` tokens, growing to `wanted`, that is larger than the whole cache: waiting does not help."""
        text = (
            f"A path of {tokens} tokens can never fit: it takes {-(-tokens // page_size)} pages of {page_size}, and the cache "
            f"has {total}. Use an engine with cache_tokens={-(-wanted // page_size) * page_size} or more, or a shorter path."
        )
        return cls(needed, free, total, text)


class OutOfStates(OutOfPages):
    """The rows of a pass need more entries or states of a hybrid's recurrent layers than an engine keeps at once."""

    def __init__(self, what: str, needed: int, free: int, total: int) -> None:
        super().__init__(
            needed,
            free,
            total,
            f"{needed} {what} of recurrent layers needed, {free} of {total} free. Make the engine with a larger state_tokens, "
            "or compute fewer rows at once.",
        )


class CannotCopy(EngineError, TypeError):
    """An attempt to copy or pickle an engine, or a handle on one."""


class ClosedBranch(EngineError, RuntimeError):
    """A change that the branch's status (finished, rejected or released) forbids."""


class BadRequest(EngineError, ValueError):
    """A prompt, a sampling parameter or an option that cannot be served. Nothing was started."""


class Caveat(UserWarning):
    """A result says less, or something else, than it seems to: the message says how to read it."""


class SlowCluster(UserWarning):
    """A Ray cluster takes long: it says what it waits for, or that a start on this machine failed and is tried again."""


class Unsealed(UserWarning):
    """An older version wrote a file without a hash, so that a change of it would not be noticed."""


class BadTexts(BadRequest):
    """Texts, chats, labels or a table that cannot be replayed. The message names the text, turn, label or line."""


class UnknownOption(BadRequest, TypeError):
    """A call with an option that does not exist, with too many values, or without one that it needs."""


class MissingPackage(EngineError, ImportError):
    """A feature needs a package that is not installed. The message says how to install it."""


class NonFinite(EngineError, ArithmeticError):
    """A pass computed NaN or infinity. Nothing of it was committed."""


class BadEdit(EngineError, ValueError):
    """An invalid edit: unknown operation, wrong shape, no positions."""


class NoGradient(EngineError, ValueError):
    """A gradient that is not computed: through hook functions or thoughts, on a GPU, or at a site that has none."""


class FingerprintMismatch(EngineError, ValueError):
    """The fingerprints differ (weights, device or versions), so the bits cannot be compared."""


class ReplayMismatch(EngineError, RuntimeError):
    """A replay differs from its trace, so the determinism contract is broken. Run `replaylens doctor`."""


class BadFile(EngineError, ValueError):
    """A file or folder that is not the trace, certificate, probe, report or rollouts that it should be, or is damaged, edited,
    unfinished or of another format. Nothing of it was used."""


class BadDump(BadFile):
    """A folder that is not a dump, or a dump that is damaged, edited or of another format. Nothing of it was used."""


class UnfinishedDump(BadDump):
    """A dump that is still being written or was interrupted. Resume it."""


class FolderExists(EngineError, FileExistsError):
    """The folder already holds a dump, a trained model or an unfinished run, and `resume` was not given."""


class DumpLocked(EngineError, RuntimeError):
    """Another process is writing the same shards of the same dump."""


class PlanMismatch(EngineError, ValueError):
    """The unfinished dump, sweep or folder of rollouts was started with other options or rows. It can be resumed with those."""


class StoreFailed(EngineError, OSError):
    """The store of a dump cannot be used: unreachable, no credentials or permission, no such bucket, a package is missing.
    This says nothing about the dump."""


class DumpWriteFailed(StoreFailed):
    """A disk or a store refused a write (full, no permission). What was there before stays: complete shards, waves and parts of
    a sweep, from which to resume once there is room, and the older file of the name."""


class ClusterFailed(EngineError, RuntimeError):
    """The Ray cluster could not be reached, or its workers died repeatedly on the same shard."""


class RankFailed(EngineError, RuntimeError):
    """A process that computes a part of the products died, hangs or did not start. Nothing of the pass was committed."""


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known name that a misspelt one is nearest to; None: it is like none of them."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=0.7)), None)


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name: the nearest known name, then all of them."""
    known = list(known)
    near = nearest(name, known)
    hint = f" (did you mean {near!r}?)" if near else ""
    return f"Unknown {kind} {name!r}{hint}. Known: {', '.join(known)}."


class UnknownPromptWord(BadRequest, tasks.UnknownWord):
    """The tokenizer's vocabulary lacks a word of the text. `word` and `offset` say which."""


class BadRecipe(EngineError, ValueError):
    """A recipe that cannot be followed, or a saved run that belongs to another recipe."""


# old names, until the next version
OtherModel = ModelMismatch
OtherPlan = PlanMismatch
OtherFingerprint = FingerprintMismatch
EngineBug = BadPage = ClosedTable = BadTransition = InternalError
KVCorruption = IntegrityError
BadCertificate = BadTrace = BadRollouts = BadFile
DamagedShard = BadDump
BadChunks = BadThought = BadMetric = BadRollback = BadPoolSize = UnknownBranch = NotRecorded = BadRequest
NoChatTemplate = RewrittenTurn = BadTexts
DumpExists = RunExists = FolderExists
UnknownModel = UnsupportedModel
UnsealedRollouts = Unsealed
EqualDraws = NotCaptured = NothingEdited = NotFolded = MixedExperts = Caveat
