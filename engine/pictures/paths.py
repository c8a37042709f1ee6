"""`Paths`: a path with the branches that hang off it, as plain data. What draws it stands above."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.readings import LensLayer


@dataclass(frozen=True)
class Token:
    """One token of a path, with what is known about it."""

    text: str
    position: int
    state: TokenState
    logprob: float | None = None
    """that the model gave it, from the row before"""
    entropy: float | None = None
    """of what may follow it"""
    lens: tuple[LensLayer, ...] = ()
    """what each layer would say next, from this token's row"""
    labels: tuple[tuple[str, str], ...] = ()
    """what a task knows to hold here"""

    @property
    def visible(self) -> str:
        """Its text with everything invisible made visible, but for plain spaces."""
        return visible(self.text)


@dataclass(frozen=True)
class DrawnPath:
    """One branch: its own tokens, those from `fork_position` on."""

    branch: int
    parent: int | None
    fork_position: int
    status: str
    tokens: tuple[Token, ...]

    @property
    def end(self) -> int:
        """The position after its last token. A dump may hold some of its tokens only."""
        return self.tokens[-1].position + 1 if self.tokens else self.fork_position


@dataclass(frozen=True)
class Paths:
    """Paths with parents before children; the first is the trunk, whose tokens start at position 0."""

    paths: tuple[DrawnPath, ...]
    title: str = ""
    left_out: int = 0
    """branches that are not drawn"""

    @property
    def trunk(self) -> DrawnPath:
        return self.paths[0]

    @cached_property
    def children(self) -> dict[int, list[DrawnPath]]:
        """Of each branch, those that fork last first: so drawn, no line crosses another."""
        found: dict[int, list[DrawnPath]] = {path.branch: [] for path in self.paths}
        for path in self.paths[1:]:
            assert path.parent is not None
            found[path.parent].append(path)
        return {branch: sorted(paths, key=lambda p: -p.fork_position) for branch, paths in found.items()}

    def walk(self) -> Iterator[tuple[DrawnPath, int]]:
        """Paths with their depth, in order of creation, each before its children."""
        stack = [(self.trunk, 0)]
        while stack:
            path, depth = stack.pop()
            yield path, depth
            stack += [(child, depth + 1) for child in sorted(self.children[path.branch], key=lambda p: -p.branch)]


_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅"}


@lru_cache(1 << 16)
def visible(text: str) -> str:
    """Text for a box of its own: line breaks, tabs, control characters and nothing at all can be seen."""
    if not text:
        return _VISIBLE[""]
    return "".join(c if c.isprintable() else _VISIBLE.get(c, f"\\u{ord(c):04x}") for c in text)
