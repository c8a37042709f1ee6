"""`TokenPath` and `PathStates`: the tokens of a branch and their states, which forks copy in constant time.

A path is a chain of pieces that never change, shared with its forks, and the tokens that were added since. States follow one
order (prompt, accepted, pending, draft, rejected), so five numbers say all of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from enum import Enum
from typing import Any, overload

from replaylens.engine.errors import IntegrityError


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
