"""`Paths`: a path and its branches as plain data, for the drawers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from unicodedata import category

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.palette import KINDS, ORDINARY, kind_of
from replaylens.engine.pictures.readings import LensLayer


@dataclass(frozen=True)
class Token:
    """One token of a path, with its readings and labels."""

    text: str
    position: int
    state: TokenState
    logprob: float | None = None
    """of this token, read off the row before"""
    entropy: float | None = None
    """of the next-token distribution"""
    lens: tuple[LensLayer, ...] = ()
    """each layer's next-token guesses at this row"""
    labels: tuple[tuple[str, str], ...] = ()
    """the task's labels here"""
    why: str = ""
    """why nothing is promised of it; empty: it is certified"""
    thought: tuple[str, ...] = ()
    """what a model that thinks thought after it, including <EOS>"""

    @property
    def kind(self) -> str:
        """Its look: that of its state, or that of an ordinary token."""
        return kind_of(self.state, self.why)

    @property
    def standing(self) -> str:
        """Its state in words."""
        return self.why if self.kind == ORDINARY else self.state.value

    @property
    def visible(self) -> str:
        """The text with invisible characters made visible, except spaces beside others."""
        return visible(self.text)


@dataclass(frozen=True)
class DrawnPath:
    """One branch, with its tokens from `fork_position` on."""

    branch: int
    parent: int | None
    fork_position: int
    status: str
    tokens: tuple[Token, ...]

    @property
    def end(self) -> int:
        """The position after its last token. A dump may hold only some of its tokens."""
        return self.tokens[-1].position + 1 if self.tokens else self.fork_position


@dataclass(frozen=True)
class Paths:
    """Paths with parents before children; the first is the trunk, whose tokens start at position 0."""

    paths: tuple[DrawnPath, ...]
    title: str = ""
    left_out: int = 0
    """number of branches not drawn"""

    @property
    def trunk(self) -> DrawnPath:
        return self.paths[0]

    @property
    def kinds(self) -> list[str]:
        """The kinds of tokens for a legend: all states, and ordinary tokens if there are any."""
        found = {token.kind for path in self.paths for token in path.tokens}
        return [kind for kind in KINDS if kind != ORDINARY or kind in found]

    @cached_property
    def children(self) -> dict[int, list[DrawnPath]]:
        """Children of each branch, latest fork first, so that no lines cross."""
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


_VISIBLE = {"\n": "⏎", "\t": "⇥", "\r": "␍", "": "∅", "\u00a0": "⍽"}


@lru_cache(1 << 16)
def visible(text: str) -> str:
    """The text with visible marks for line breaks, tabs, control characters, rare spaces and the empty string; for ordinary
    spaces if there is nothing else."""
    if not text:
        return _VISIBLE[""]
    if not text.strip(" "):
        return "␣" * len(text)
    return "".join(c if c.isprintable() else _VISIBLE.get(c, "␣" if category(c) == "Zs" else f"\\u{ord(c):04x}") for c in text)
