"""`Past`: facts about a branch's path that grow with it, token by token: no step of the loop reads the whole path again.

`Past.path` is the path as samplers and drafters read it: a view, not a copy. Every fact is computed at its first use and then
extended by the tokens that were added since. `BranchTree.rollback` calls `cut`, which forgets what a removed token may have
contributed.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import overload
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.memory.path import TokenPath

PathTokens = TokenPath | list[int]


class Past:
    """The tokens of one branch and what is known about them. Only `BranchTree` changes the tokens."""

    __slots__ = ("_distinct", "_marks", "_ngrams", "tokens")

    def __init__(self, tokens: PathTokens) -> None:
        self.tokens = tokens
        self._distinct: dict[int, Distinct] | None = None
        self._ngrams: dict[int, Ngrams] | None = None
        self._marks: WeakSet[Mark] | None = None

    def path(self, end: int, tail: Sequence[int] = ()) -> "Path":
        """The first `end` tokens, followed by `tail`. Valid until a rollback below `end`."""
        return Path(self, end, tail)

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


class Path(Sequence[int]):
    """A read-only path: the first tokens of a branch and a tail. Slices are lists, and cost what they hold."""

    __slots__ = ("end", "past", "tail")

    def __init__(self, past: Past, end: int, tail: Sequence[int] = ()) -> None:
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
        return list(self) == list(other) if isinstance(other, Path | list) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Path({self[:]})"

    def then(self, tokens: Sequence[int]) -> "Path":
        """This path, followed by `tokens`. Precondition: it has no tail yet."""
        return Path(self.past, self.end, tokens)

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

    def __init__(self, past: Past, length: int) -> None:
        self.past, self.length = past, length

    def common(self, path: Path) -> int:
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
        for first in range(max(0, self.end - self.size + 1), end - self.size + 1):
            self._latest[tuple(tokens[first : first + self.size])] = first
        self.end = end
        return self._latest
