"""`TokenPath` and `PathStates`: the tokens of a branch and their states, which forks copy in constant time.

A path is a chain of pieces that never change, shared with its forks, and the tokens that were added since. States follow one
order (prompt, accepted, pending, draft, rejected), so five numbers say all of them.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from itertools import islice
from typing import Any, overload
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.errors import IntegrityError

# ---- path ------------------------------------------------------------------------------------------------------------


class TokenState(Enum):
    """What is promised about a token. The members are in the order in which they follow each other on a path."""

    PROMPT = "prompt"
    ACCEPTED = "accepted"
    PENDING = "pending"  # in the sequence, its KV not computed yet
    DRAFT = "draft"
    REJECTED = "rejected"

    __hash__ = object.__hash__  # members are singletons; Enum would hash their names, ten times slower


_ORDER = {state: order for order, state in enumerate(TokenState)}
_STATES = tuple(TokenState)


class TokenPiece:
    """Tokens [start, end) of all paths that share it, after those of `below`. It never changes."""

    __slots__ = ("below", "seal", "start", "tokens")

    def __init__(self, below: "TokenPiece | None", tokens: list[int]) -> None:
        self.below, self.tokens = below, tokens
        self.start: int = 0 if below is None else below.end
        self.seal = hash(tuple(tokens))

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class TokenPath(Sequence[int]):
    """The tokens of one branch. Slices are lists."""

    __slots__ = ("_parts",)

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._parts: tuple[TokenPiece | None, int, list[int]] = (None, 0, list(tokens))
        """the last piece; how many tokens are the pieces', of which the last may be longer; the tokens after them. Replaced as
        a whole, so that another thread never reads half of a change"""

    def __len__(self) -> int:
        _, cut, own = self._parts
        return cut + len(own)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        piece, cut, own = self._parts
        if isinstance(index, slice):
            first, last, step = index.indices(cut + len(own))
            if step != 1:
                return self[:][index]
            return own[first - cut : max(last, first) - cut] if first >= cut else _between(self._parts, first, last)
        position = index + cut + len(own) if index < 0 else index
        if position >= cut:
            return own[position - cut]
        while piece is not None and piece.start > position >= 0:
            piece = piece.below
        if piece is None or position < 0:
            raise IndexError(f"No position {index} on a path of {len(self)} tokens.")
        return piece.tokens[position - piece.start]

    def __iter__(self) -> Iterator[int]:
        return iter(self[:])

    def __eq__(self, other: object) -> bool:
        return self[:] == list(other) if isinstance(other, TokenPath | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TokenPath({self[:]})"

    def extend(self, tokens: Iterable[int]) -> None:
        """Mutates: adds tokens at the end."""
        self._parts[2].extend(tokens)

    def truncate(self, length: int) -> None:
        """Mutates: removes the tokens from `length` on."""
        piece, cut, own = self._parts
        if length >= cut:
            del own[length - cut :]
            return
        while piece is not None and piece.start >= length:
            piece = piece.below
        self._parts = (piece, length, [])

    def fork(self, length: int) -> "TokenPath":
        """The first `length` tokens as a path of its own. Mutates: this path's own tokens become a piece that both share."""
        if length > self._parts[1]:
            self._freeze()
        made = TokenPath()
        made._parts = (*self._parts[:2], [])
        made.truncate(length)
        return made

    def _freeze(self) -> None:
        """Mutates: no tokens of its own are left. Small pieces are joined, so that there are few: a token is copied about as
        often as the path doubles."""
        below, cut, tokens = self._parts
        while below is not None and (below.end > cut or cut - below.start < 2 * len(tokens)):
            tokens, cut = [*below.tokens[: cut - below.start], *tokens], below.start
            below = below.below
        piece = TokenPiece(below, tokens)
        self._parts = (piece, piece.end, [])

    def seal(self) -> int:
        """A number that changes, in all likelihood, if a token of the path does. Reads only those after its pieces."""
        piece, cut, own = self._parts
        return hash((tuple(own), cut, 0 if piece is None else piece.seal))

    def check_integrity(self, name: str) -> None:
        """Raise IntegrityError if a piece has changed, or does not continue the one below it."""
        piece, cut, _ = self._parts
        if not (0 if piece is None else piece.start + 1) <= cut <= (0 if piece is None else piece.end):
            raise IntegrityError(f"{name}: {cut} shared tokens, but its last piece does not end there.")
        while piece is not None:
            if piece.seal != hash(tuple(piece.tokens)) or piece.start != (0 if piece.below is None else piece.below.end):
                raise IntegrityError(f"{name}: its shared tokens {piece.start} to {piece.end - 1} changed.")
            piece = piece.below


def _between(parts: tuple[TokenPiece | None, int, list[int]], first: int, last: int) -> list[int]:
    """Tokens [first, last), of which at least the first is a piece's."""
    piece, cut, own = parts
    found, end = list[list[int]](), min(last, cut)
    while piece is not None and end > first:
        if piece.start < end:
            found.append(piece.tokens[max(0, first - piece.start) : end - piece.start])
            end = piece.start
        piece = piece.below
    joined = found.pop() if found else []
    for part in reversed(found):
        joined += part
    return joined + own[: last - cut] if last > cut else joined


class PathStates(Sequence[TokenState]):
    """The states of a path's tokens, as the number of tokens in each."""

    __slots__ = ("counts",)

    def __init__(self, counts: Iterable[int] = (0,) * len(_STATES)) -> None:
        self.counts = list(counts)
        """of each state, in their order"""

    def __len__(self) -> int:
        return sum(self.counts)

    @overload
    def __getitem__(self, index: int) -> TokenState: ...
    @overload
    def __getitem__(self, index: slice) -> list[TokenState]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return list(self)[index]
        position = index + sum(self.counts) if index < 0 else index
        if position >= 0:
            for order, count in enumerate(self.counts):
                if position < count:
                    return _STATES[order]
                position -= count
        raise IndexError(f"No position {index} on a path of {len(self)} tokens.")

    @property
    def last(self) -> TokenState:
        """The last token's; PROMPT if there is none."""
        for order in range(len(_STATES) - 1, 0, -1):
            if self.counts[order]:
                return _STATES[order]
        return TokenState.PROMPT

    def __iter__(self) -> Iterator[TokenState]:
        for state, count in zip(_STATES, self.counts, strict=True):
            yield from [state] * count

    def __contains__(self, state: object) -> bool:
        return isinstance(state, TokenState) and self.counts[_ORDER[state]] > 0

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, PathStates | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PathStates({[state.value for state in self]})"

    def count(self, state: TokenState) -> int:
        return self.counts[_ORDER[state]]

    def index(self, state: TokenState, start: int = 0, stop: int | None = None) -> int:
        """The first position in this state, of all positions."""
        if state not in self:
            raise ValueError(f"No token is {state.value}.")
        return sum(self.counts[: _ORDER[state]])

    @property
    def num_committed(self) -> int:
        """Prompt and accepted tokens, which come first."""
        return self.counts[0] + self.counts[1]

    def first(self, length: int) -> "PathStates":
        """The states of the first `length` tokens."""
        counts, left = [], length
        for count in self.counts:
            counts.append(min(count, left))
            left -= counts[-1]
        return PathStates(counts)

    def append(self, state: TokenState, count: int) -> None:
        """Mutates: `count` more tokens in this state. Precondition: none in a later state."""
        self.counts[_ORDER[state]] += count

    def truncate(self, length: int) -> None:
        """Mutates: removes those from `length` on."""
        self.counts = self.first(length).counts

    def accept(self, count: int) -> None:
        """Mutates: the first `count` tokens that are pending or drafts become accepted. Precondition: there are so many."""
        prompt, accepted, pending, draft, rejected = self.counts
        taken = min(count, pending)
        self.counts = [prompt, accepted + count, pending - taken, draft - (count - taken), rejected]

    def reopen_last(self) -> None:
        """Mutates: the last token is pending."""
        last = len(self) - 1
        self.truncate(last)
        self.append(TokenState.PENDING, 1)


# ---- path history ----------------------------------------------------------------------------------------------------
# `PathHistory`: facts about a branch's path that grow with it, token by token: no step of the loop reads the whole path again.
#
# `PathHistory.path` is the path as samplers and drafters read it: a view, not a copy. Every fact is computed at its first use
# and then extended by the tokens that were added since. `BranchTree.rollback` calls `cut`, which forgets what a removed token
# may have contributed.

PathTokens = TokenPath | list[int]


class PathHistory:
    """The tokens of one branch and what is known about them. Only `BranchTree` changes the tokens."""

    __slots__ = ("_distinct", "_marks", "_ngrams", "tokens")

    def __init__(self, tokens: PathTokens) -> None:
        self.tokens = tokens
        self._distinct: dict[int, Distinct] | None = None
        self._ngrams: dict[int, Ngrams] | None = None
        self._marks: WeakSet[Mark] | None = None

    def path(self, end: int, tail: Sequence[int] = ()) -> "PathView":
        """The first `end` tokens, followed by `tail`. Valid until a rollback below `end`."""
        return PathView(self, end, tail)

    def cut(self, length: int) -> None:
        """Mutates: the tokens from `length` on are removed."""
        for facts in (self._distinct, self._ngrams):
            for start in [start for start, fact in (facts or {}).items() if fact.end > length]:
                assert facts is not None
                del facts[start]
        for mark in self._marks or ():
            mark.length = min(mark.length, length)

    def distinct(self, start: int, end: int) -> NDArray[np.int64]:
        """The distinct tokens of positions [start, end), in any order. The caller must not change the array."""
        self._distinct = {} if self._distinct is None else self._distinct
        known = self._distinct.get(start)
        if known is None or known.end > end:
            known = self._distinct[start] = Distinct(start)
        return known.until(self.tokens, end)

    def latest(self, size: int, end: int) -> int | None:
        """Where the last `size` tokens of the first `end` occurred before, latest first position; None: nowhere."""
        if end <= size:
            return None
        self._ngrams = {} if self._ngrams is None else self._ngrams
        known = self._ngrams.get(size)
        if known is None or known.end > end - 1:
            known = self._ngrams[size] = Ngrams(size)
        return known.until(self.tokens, end - 1).get(tuple(self.tokens[end - size : end]))

    def mark(self, length: int) -> "Mark":
        """A mark of the first `length` tokens, which later rollbacks shorten."""
        self._marks = WeakSet() if self._marks is None else self._marks
        self._marks.add(mark := Mark(self, length))
        return mark


class PathView(Sequence[int]):
    """A read-only path: the first tokens of a branch and a tail. Slices are lists, and cost what they hold."""

    __slots__ = ("end", "past", "tail")

    def __init__(self, past: PathHistory, end: int, tail: Sequence[int] = ()) -> None:
        self.past, self.end, self.tail = past, end, tail

    def __len__(self) -> int:
        return self.end + len(self.tail)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            first, last, step = index.indices(len(self))
            if step != 1:
                return [self[i] for i in range(first, last, step)]
            own = self.past.tokens[first : min(last, self.end)]
            return own + list(self.tail[max(0, first - self.end) : last - self.end]) if last > self.end else own
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"No position {index} on a path of {len(self)} tokens.")
        return self.past.tokens[position] if position < self.end else self.tail[position - self.end]

    def __iter__(self) -> Iterator[int]:
        yield from islice(self.past.tokens, self.end)
        yield from self.tail

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, PathView | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Path({self[:]})"

    def then(self, tokens: Sequence[int]) -> "PathView":
        """This path, followed by `tokens`. Precondition: it has no tail yet."""
        return PathView(self.past, self.end, tokens)

    def distinct(self, start: int = 0) -> NDArray[np.int64]:
        """The tokens from `start` on, each at least once, in any order. The caller must not change the array."""
        if start >= self.end:
            return np.asarray(self.tail[start - self.end :], dtype=np.int64)
        known = self.past.distinct(start, self.end)
        return np.concatenate([known, np.asarray(self.tail, dtype=np.int64)]) if len(self.tail) else known

    def continuation(self, size: int, count: int) -> list[int] | None:
        """Up to `count` tokens after the latest earlier occurrence of the last `size` tokens; None: there is none.

        Precondition: the path has no tail.
        """
        at = self.past.latest(size, self.end)
        return None if at is None else self.past.tokens[at + size : min(at + size + count, self.end)]

    def repetition(self, size: int, count: int) -> list[int]:
        """As `continuation`, but `count` tokens: what follows the occurrence goes on in a circle. Empty if there is none."""
        found = self.continuation(size, count)
        return [found[i % len(found)] for i in range(count)] if found else []


class Mark:
    """The first `length` tokens of a path, as they are since the mark was made."""

    __slots__ = ("__weakref__", "length", "past")

    def __init__(self, past: PathHistory, length: int) -> None:
        self.past, self.length = past, length

    def common(self, path: PathView) -> int:
        """How many leading tokens `path` is known to share. Tokens are compared only if the path is another branch's."""
        if path.past is self.past:
            return min(self.length, path.end)
        pairs = enumerate(zip(islice(self.past.tokens, self.length), path, strict=False))
        return next((i for i, (a, b) in pairs if a != b), min(self.length, len(path)))


class Distinct:
    """The distinct tokens of positions [start, end), in an array with room to grow."""

    __slots__ = ("_ids", "_known", "end", "start")

    def __init__(self, start: int) -> None:
        self.start = self.end = start
        self._known: set[int] = set()
        self._ids = np.empty(64, dtype=np.int64)

    def until(self, tokens: PathTokens, end: int) -> NDArray[np.int64]:
        """Mutates: extends to positions [start, end), and returns their distinct tokens."""
        for token in tokens[self.end : end]:
            if token not in self._known:
                if len(self._known) == len(self._ids):
                    self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
                self._ids[len(self._known)] = token
                self._known.add(token)
        self.end = end
        return self._ids[: len(self._known)]


class Ngrams:
    """The latest first position of every run of `size` tokens that ends before `end`."""

    __slots__ = ("_latest", "end", "size")

    def __init__(self, size: int) -> None:
        self.size, self.end = size, 0
        self._latest: dict[tuple[int, ...], int] = {}

    def until(self, tokens: PathTokens, end: int) -> dict[tuple[int, ...], int]:
        """Mutates: extends to the runs within the first `end` tokens, and returns their positions."""
        start = max(0, self.end - self.size + 1)
        new = tokens[start:end]
        runs = zip(*(new[i:] for i in range(self.size)), strict=False)  # as many as the shortest piece has tokens
        self._latest.update(zip(runs, range(start, end), strict=False))
        self.end = end
        return self._latest


def path_digest(tokens: Sequence[int]) -> str:
    """A short hash of a token path."""
    return hashlib.blake2b(json.dumps(list(tokens)).encode(), digest_size=8).hexdigest()
