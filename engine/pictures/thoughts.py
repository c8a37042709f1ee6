"""The Thinking-States picture: chunks of input, the state added to each, and the thought after each.

    Z   tails <EOS>   |   <EOS>      |   heads <EOS>      the thought of block T after the chunk
    S   0             |   |S| = 4.1  |   0                the state that block C made of the thought before, added here
    X   Alice flips,  |   then Bob   |   flips. A:        the chunk's tokens

The picture is plain data, which a live run, a dump or a test can provide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from replaylens.engine.memory.tree import TokenState
from replaylens.engine.pictures.html import fragment, join, tag
from replaylens.engine.pictures.palette import LOOKS
from replaylens.engine.pictures.paths import visible

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

END = "<EOS>"
"""text of the token that ends every thought"""


@dataclass(frozen=True)
class DrawnChunk:
    """One chunk of the input."""

    tokens: tuple[str, ...]
    thought: tuple[str, ...]
    """T's thought after the chunk, including <EOS>; only <EOS>: an empty thought. No tokens: the chunk was generated, and
    generated chunks do not think"""
    state: float | None = 0.0
    """norm of the state added to it; 0: no state; None: not kept"""
    facts: tuple[str, ...] = ()
    """lines of its tooltip, with tabs between columns"""

    @property
    def thinks(self) -> bool:
        return len(self.thought) > 1


@dataclass(frozen=True)
class DrawnRound:
    """One round of a prefill: chunks [first, last) run in one pass, those before `kept` are kept, the rest is rolled back."""

    first: int
    kept: int
    last: int
    dropped: tuple[DrawnChunk, ...] = ()
    """chunks [kept, last) as computed in this round; empty if unknown"""


@dataclass(frozen=True)
class Thinking:
    """The picture of one input. Draws itself in a notebook and in a terminal."""

    chunks: tuple[DrawnChunk, ...]
    rounds: tuple[DrawnRound, ...] = ()
    title: str = "Thinking States"

    def __str__(self) -> str:
        lines = []
        for number, chunk in enumerate(self.chunks):
            state = _added(chunk, "|S| {:.2f}", "no state")
            said = f"->  {_said(chunk)}" if chunk.thought else "generated"
            lines.append(f"{number:>3}  {visible(''.join(chunk.tokens))}  [{state}]  {said}")
        return "\n".join(lines + [f"round {n}: {_told(each)}" for n, each in enumerate(self.rounds, 1)])

    __repr__ = __str__

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        table = Table("chunk", "tokens", "state added", "thought", title=self.title)
        for number, chunk in enumerate(self.chunks):
            thought = Text(_said(chunk), style="bold" if chunk.thinks else "dim")
            tokens = Text(visible("".join(chunk.tokens)), style=LOOKS[_origin(chunk)].terminal)
            table.add_row(str(number), tokens, _added(chunk, "{:.2f}", ""), thought)
        yield table
        yield from (f"round {n}: {_told(each)}" for n, each in enumerate(self.rounds, 1))

    def _repr_html_(self) -> str:
        return fragment(draw(self))


def step_facts(likely: Iterable[float]) -> tuple[str, ...]:
    """The probability of each token of a thought, as facts of a chunk."""
    return tuple(f"step {step}\tp {p:.3f}" for step, p in enumerate(likely))


def draw(picture: Thinking) -> Markup:
    """One column per chunk: thought, T and C, state, tokens; below, one line per round with the KV that was kept."""
    count = len(picture.chunks)
    names = [tag("i", name, class_="rl-row", style=f"grid-row:{row}") for row, name in enumerate(("Z", "T C", "S", "X"), 1)]
    columns = [_column(chunk, number) for number, chunk in enumerate(picture.chunks)]
    bars = [bar for n, each in enumerate(picture.rounds) for bar in _bars(each, n)]
    grid = tag("div", *names, *columns, *bars, class_="rl-thinking", style=f"--n:{count}")
    return join([tag("div", tag("b", picture.title), class_="rl-head"), tag("div", grid, class_="rl-scroll")])


def _column(chunk: DrawnChunk, number: int) -> Markup:
    def at(row: int) -> str:
        return f"grid-row:{row};grid-column:{number + 2}"

    title = "\n".join([f"chunk {number}", *chunk.facts])
    tokens = (tag("span", visible(token), class_=f"rl-token rl-{_origin(chunk).value}") for token in chunk.tokens)
    state = f"S{number} {_added(chunk, '+ {:.2f}', '= 0')}"
    blocks = tag("div", tag("b", "T"), tag("b", "C"), tag("i", "↘"), class_="rl-blocks", style=at(2))
    return join(
        [
            *([_thought(chunk, "prompt", at(1), title), blocks] if chunk.thought else []),
            tag("div", state, class_=f"rl-state{'' if chunk.state else ' rl-empty'}", style=at(3), data_tip=title),
            tag("div", *tokens, class_="rl-chunk", style=at(4)),
        ]
    )


def _thought(chunk: DrawnChunk, look: str, place: str, title: str) -> Markup:
    words = (tag("span", visible(word), class_=f"rl-token rl-{look}") for word in chunk.thought)
    return tag("div", *words, class_=f"rl-thought{'' if chunk.thinks else ' rl-empty'}", style=place, data_tip=title)


def _bars(each: DrawnRound, number: int) -> Sequence[Markup]:
    """The chunks of one round: kept ones in green, rolled-back ones in red, with their thoughts if known."""

    def at(start: int, end: int) -> str:
        return f"grid-row:{number + 5};grid-column:{start + 2}/{end + 2}"

    made = [tag("i", f"round {number + 1}", class_="rl-row", style=f"grid-row:{number + 5}")]
    if each.kept > each.first:
        made.append(tag("div", "KV kept", class_="rl-bar rl-accepted", style=at(each.first, each.kept)))
    for i, chunk in enumerate(each.dropped, each.kept):
        state = f"state added\t{_added(chunk, '{:.2f}', 'none')}"
        title = "\n".join([f"chunk {i}, rolled back in round {number + 1}", state, *chunk.facts])
        made.append(_thought(chunk, "rejected", at(i, i + 1), title))
    if each.last > each.kept and not each.dropped:
        made.append(tag("div", "rolled back", class_="rl-bar rl-rejected", style=at(each.kept, each.last)))
    return made


def _told(each: DrawnRound) -> str:
    dropped = f", chunks {each.kept} to {each.last - 1} rolled back" if each.last > each.kept else ""
    thoughts = f", which had thought: {' | '.join(map(_said, each.dropped))}" if each.dropped else ""
    return f"chunks {each.first} to {each.last - 1} at once, KV kept up to chunk {each.kept - 1}{dropped}{thoughts}"


def _origin(chunk: DrawnChunk) -> TokenState:
    """The state of its tokens: chunks with thoughts are prompt, the others are generated."""
    return TokenState.PROMPT if chunk.thought else TokenState.ACCEPTED


def _said(chunk: DrawnChunk) -> str:
    return " ".join(map(visible, chunk.thought))


def _added(chunk: DrawnChunk, some: str, none: str) -> str:
    """The state added to a chunk: `some` formatted with its norm, `none`, or "not kept"."""
    return "not kept" if chunk.state is None else some.format(chunk.state) if chunk.state else none
