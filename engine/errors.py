"""Every error the engine raises on purpose. The text says what to do about it."""

from collections.abc import Iterable
from difflib import get_close_matches


class EngineError(Exception):
    """Base of all errors of the engine."""


class BadConfig(EngineError, ValueError):
    """A model config that cannot be."""


class UnsupportedModel(EngineError, ValueError):
    """An architecture, or a feature of one, that the decoder does not have."""


class BadWeights(EngineError, ValueError):
    """A tensor is missing, unknown, of the wrong shape, or not finite."""


class OtherModel(EngineError, ValueError):
    """What was loaded computes something else than the model that it was loaded from. `stage` names the first part of the
    model that does, `difference` its largest relative error."""

    def __init__(self, stage: str, difference: float) -> None:
        super().__init__(
            f"the loaded model is not its source. First difference: {stage}, by {difference:.1e} (relative, on the same "
            "input), which is not rounding. Look there for what the weights do not show: a config field, a hook, an adapter, a "
            "replaced module, or a buffer (model.to(dtype) rounds rotary frequencies; from_pretrained(dtype=...) does not)"
        )
        self.stage = stage
        self.difference = difference


class UnknownSite(EngineError, KeyError):
    """A hook name that the model does not have."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class KVCorruption(EngineError):
    """The cache does not hold what a branch thinks it holds (found by the canary)."""


class EngineBug(EngineError, AssertionError):
    """The engine broke a rule of its own. Please report it with the trace."""


class NotCertified(EngineError, RuntimeError):
    """This device was not shown to give canonical bits; the engine will not claim them."""


class ModesChanged(EngineError, RuntimeError):
    """The number of threads, or another setting that moves bits, changed during a pass; nothing of it was committed."""


class IntegrityError(EngineError, RuntimeError):
    """`check_integrity` found a fault of our own: the text names the first one with its numbers. Please report it."""


class BadPoolSize(EngineError, ValueError):
    """A page pool without pages, or with pages without slots."""


class BadRange(EngineError, ValueError):
    """Positions that the table, branch or index does not have."""


class BadPage(EngineError, ValueError):
    """A page that is not in use (freed twice, never handed out) or is the null page."""


class ClosedTable(EngineError, RuntimeError):
    """A page table used, or released once more, after its release."""


class OutOfPages(EngineError, RuntimeError):
    """More pages are needed than are free. Nothing was changed; `needed` and `free` say how many are missing."""

    def __init__(self, needed: int, free: int, total: int, text: str = "") -> None:
        super().__init__(
            text
            or f"{needed} pages needed, {free} of {total} free: evict from the prefix index, roll back or release "
            f"branches, wait for others to finish, or make the pool larger"
        )
        self.needed = needed
        self.free = free

    @classmethod
    def for_ever(cls, needed: int, free: int, total: int, tokens: int, wanted: int, page_size: int) -> "OutOfPages":
        """A path of `tokens` that is larger than the cache, on its way to `wanted` tokens: waiting does not help."""
        text = (
            f"a path of {tokens} tokens can never fit: it takes {-(-tokens // page_size)} pages of {page_size}, and the cache "
            f"has {total}. Make the engine with cache_tokens={-(-wanted // page_size) * page_size} or more, or the path shorter"
        )
        return cls(needed, free, total, text)


class CannotCopy(EngineError, TypeError):
    """An engine, or a handle on one, asked to be copied or pickled."""


class UnknownBranch(EngineError, KeyError):
    """A branch id that was never given out, or was forgotten."""

    def __str__(self) -> str:  # KeyError would print the repr of the message
        return str(self.args[0])


class ClosedBranch(EngineError, RuntimeError):
    """A finished, rejected or released branch asked to change in a way that its status forbids."""


class BadTransition(EngineError, ValueError):
    """A token state that may not follow the present one, or may not stand at that place."""


class BadRollback(EngineError, ValueError):
    """A rollback into the prompt or beyond the tip."""


class BadRequest(EngineError, ValueError):
    """A prompt, a sampling parameter or an option that cannot be served; nothing was started."""


class NonFinite(EngineError, ArithmeticError):
    """A pass gave NaN or infinity; nothing of it was committed."""


class BadEdit(EngineError, ValueError):
    """An edit that cannot be: unknown operation, wrong shape, no positions."""


class BadTrace(EngineError, ValueError):
    """A trace file that is damaged, or of another format."""


class NotRecorded(EngineError, RuntimeError):
    """An engine was asked for its trace, but keeps none: recording is asked for when the engine is made."""


class OtherFingerprint(EngineError, ValueError):
    """Made by other weights, another device or another version: the bits cannot be compared."""


class ReplayMismatch(EngineError, RuntimeError):
    """A replay came to another result than the trace: the promise is broken. Run `replaylens doctor`."""


class BadDump(EngineError, ValueError):
    """A folder that is no dump, or a dump that is damaged, edited or of another format. Nothing of it was used."""


class UnfinishedDump(BadDump):
    """A dump that is still being written, or whose writing was cut short: resume it."""


class DumpExists(EngineError, FileExistsError):
    """The place already holds a dump, and nobody said to resume it."""


class DumpLocked(EngineError, RuntimeError):
    """Somebody else is writing the same shards of the same dump."""


class OtherPlan(EngineError, ValueError):
    """The unfinished dump was begun with other options: it can only be resumed with its own."""


class DumpWriteFailed(EngineError, OSError):
    """The store took no more (disk full, no permission). Whole shards are kept: resume once there is room."""


class ClusterFailed(EngineError, RuntimeError):
    """The Ray cluster could not be reached, or its workers died again and again on the same shard."""


def no_such(kind: str, name: str, known: Iterable[str]) -> str:
    """The text for a name that is none of the known ones: the nearest first, then all."""
    known = list(known)
    nearest = get_close_matches(name, known, n=1, cutoff=0.7)
    hint = f" (did you mean {nearest[0]!r}?)" if nearest else ""
    return f"no {kind} {name!r}{hint}; known: {', '.join(known)}"


class BadThought(BadRequest):
    """A thought longer than the config allows, or not in the tokenizer's words."""
