"""Every error that the engine raises on purpose. The message says what happened, what was given and what to do."""

from collections.abc import Iterable
from difflib import get_close_matches

from replaylens.tasks import errors as tasks


class EngineError(Exception):
    """The base of all errors of the engine."""


class BadConfig(EngineError, ValueError):
    """An invalid model config."""


class UnsupportedModel(EngineError, ValueError):
    """An architecture, of a model or of a sparse autoencoder, or a part of one that is not supported."""


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


class KVCorruption(EngineError):
    """The KV cache does not hold the KV of a branch's own tokens. Raised by the canary."""


class InternalError(EngineError, AssertionError):
    """The engine broke one of its own invariants. Please report it, with the trace."""


class NotCertified(EngineError, RuntimeError):
    """This device is not certified: it was not shown to give canonical bits."""


class BadCertificate(EngineError, ValueError):
    """A certificate file that is damaged or of another format."""


class ModesChanged(EngineError, RuntimeError):
    """A setting that changes bits changed during a pass, or cannot be set for it. Nothing of the pass was committed."""


class IntegrityError(EngineError, RuntimeError):
    """`check_integrity` found a fault in the engine's bookkeeping. The message names the first one. Please report it."""


class NotEnoughMemory(EngineError, MemoryError):
    """A device has no room for the weights of a model."""


class BadPoolSize(EngineError, ValueError):
    """A page pool with no pages, or pages with no slots."""


class BadRange(EngineError, ValueError):
    """Positions outside the table, branch or index."""


class BadPage(EngineError, ValueError):
    """A page that is not in use (freed twice, or never allocated), or the null page."""


class ClosedTable(EngineError, RuntimeError):
    """A page table was used or released after its release."""


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


class UnknownBranch(EngineError, KeyError):
    """A branch id that was never assigned, or whose branch is gone."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class ClosedBranch(EngineError, RuntimeError):
    """A change that the branch's status (finished, rejected or released) forbids."""


class BadTransition(EngineError, ValueError):
    """A token state that may not follow the current one, or is not allowed at that position."""


class BadRollback(EngineError, ValueError):
    """A rollback into the prompt or beyond the tip."""


class BadRequest(EngineError, ValueError):
    """A prompt, a sampling parameter or an option that cannot be served. Nothing was started."""


class EqualDraws(UserWarning):
    """Forks of one branch sample with the same seed, so that they get the same tokens."""


class NotCaptured(UserWarning):
    """Rows that a view would show were not captured, so that it shows less than it could; or a dump has no rows at all."""


class SlowCluster(UserWarning):
    """A Ray cluster takes long: it says what it waits for, or that a start on this machine failed and is tried again."""


class NothingEdited(UserWarning):
    """An edit is for tokens that none of the edited positions holds, so that it changes nothing so far."""


class NotFolded(UserWarning):
    """Attributions to logits leave out the weight of the final norm, so that they do not add up to logits."""


class MixedExperts(UserWarning):
    """The columns of a matrix belong to another expert in each row, so that a probe of them reads a mix of experts."""


class Unsealed(UserWarning):
    """An older version wrote a file without a hash, so that a change of it would not be noticed."""


class UnsealedRollouts(Unsealed):
    """The plan of a folder of rollouts has no hash."""


class BadTexts(BadRequest):
    """Texts, labels or a table that cannot be replayed. The message names the text, label or line."""


class NoChatTemplate(BadTexts):
    """A chat was given, but the tokenizer has no template to write it with."""


class RewrittenTurn(BadTexts):
    """A chat template writes an earlier turn differently once a later one follows, so that no path can hold both."""


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


class BadMetric(BadRequest):
    """A metric that is not a scalar of the last row's logits, or does not depend on them."""


class BadTrace(EngineError, ValueError):
    """A trace file that is damaged or of another format."""


class NotRecorded(EngineError, RuntimeError):
    """The engine keeps no trace, because it was not made with `record=True`."""


class FingerprintMismatch(EngineError, ValueError):
    """The fingerprints differ (weights, device or versions), so the bits cannot be compared."""


class ReplayMismatch(EngineError, RuntimeError):
    """A replay differs from its trace, so the determinism contract is broken. Run `replaylens doctor`."""


class BadDump(EngineError, ValueError):
    """A folder that is not a dump, or a dump that is damaged, edited or of another format. Nothing of it was used."""


class DamagedShard(BadDump):
    """A shard does not have the SHA-256 of its manifest, so its rows are not those that were written."""


class UnfinishedDump(BadDump):
    """A dump that is still being written or was interrupted. Resume it."""


class DumpExists(EngineError, FileExistsError):
    """The folder already holds a dump, and `resume` was not given."""


class DumpLocked(EngineError, RuntimeError):
    """Another process is writing the same shards of the same dump."""


class PlanMismatch(EngineError, ValueError):
    """The unfinished dump, or folder of rollouts, was started with other options, and can only be resumed with those."""


class StoreFailed(EngineError, OSError):
    """The store of a dump cannot be used: unreachable, no credentials or permission, no such bucket, a package is missing.
    This says nothing about the dump."""


class DumpWriteFailed(StoreFailed):
    """A disk or a store refused a write (full, no permission). What was there before stays: complete shards, waves and parts of
    a sweep, from which to resume once there is room, and the older file of the name."""


class BadRollouts(EngineError, ValueError):
    """A folder of rollouts that is unfinished, damaged, or none. Nothing of it was used."""


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


class BadThought(BadRequest):
    """A thought that is longer than the config allows, or has words that the tokenizer does not know."""


class BadRecipe(EngineError, ValueError):
    """A recipe that cannot be followed, or a saved run that belongs to another recipe."""


class RunExists(EngineError, FileExistsError):
    """The folder already holds a trained model, or an unfinished run, and `resume` was not given."""


class UnknownModel(EngineError, ValueError):
    """No embedded model has this name."""


class BadChunks(BadRequest):
    """A prompt that does not consist of whole chunks."""


# old names, until the next version
OtherModel = ModelMismatch
OtherPlan = PlanMismatch
OtherFingerprint = FingerprintMismatch
EngineBug = InternalError
