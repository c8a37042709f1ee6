"""The Thinking-States picture: chunks of input, the state added to each, and the thought after each.

    Z      Z1 tails <EOS> |  Z2 <EOS>    |  Z3 heads <EOS>   the thought of block T after the chunk
    L_out                 |              |                   the layer that T reads
    KV     shared by all chunks: each attends to those before it
    L_in   S0 = 0         |  |S1| = 4.1  |  S2 = 0           the layer where the state that block C made of the thought before
                          |              |                   is added
    X      Alice flips,   |  then Bob    |  flips. A:        the chunk's tokens

    S0 = 0      H_i = blocks(X_i + S_i)      Z_(i+1) = T(H_i)      S_(i+1) = C(Z_(i+1))

Colours are those of the paper's figure: T and C green, Z and the answer blue, S sand. The picture is plain data, which a live
run, a dump or a test can provide.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from markupsafe import Markup
from rich.table import Table
from rich.text import Text as Line

from replaylens.engine.display import visible, word
from replaylens.engine.memory.tree import BranchRecord, TokenState
from replaylens.engine.model.text import Text
from replaylens.views.data import Fill, Frame, Phase, Slot
from replaylens.views.html import LOOKS, fragment, join, tag
from replaylens.views.pictures import Timeline

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from replaylens.thinking.thoughts import Round, Thoughts

# ---- thoughts --------------------------------------------------------------------------------------------------------

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
    layers: tuple[int, int] | None = None
    """the blocks after which states are added (L_in) and which T reads (L_out); None: not known"""

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
            blue = LOOKS[TokenState.PROMPT].terminal
            thought = Line(_said(chunk), style=blue if chunk.thinks else "dim")
            tokens = Line(visible("".join(chunk.tokens)), style="" if chunk.thought else blue)
            table.add_row(str(number), tokens, _added(chunk, "{:.2f}", ""), thought)
        yield table
        for number, each in enumerate(self.rounds, 1):
            struck = [Line(_said(chunk), style=LOOKS[TokenState.REJECTED].terminal) for chunk in each.dropped]
            line = Line(f"round {number}: {_told(each, thoughts=False)}{', which had thought: ' if struck else ''}")
            yield line.append_text(Line(" | ").join(struck))

    def _repr_html_(self) -> str:
        return fragment(draw(self))


def step_facts(likely: Iterable[float]) -> tuple[str, ...]:
    """The probability of each token of a thought, as facts of a chunk."""
    return tuple(f"step {step}\tp {p:.3f}" for step, p in enumerate(likely))


def draw(picture: Thinking) -> Markup:
    """One column per chunk, from the tokens up: state added at L_in, KV cache, L_out, T and C, thought; below, one line per
    round with the KV that was kept."""
    count = len(picture.chunks)
    names = [tag("i", name, class_="rl-row", style=f"grid-row:{row}") for row, name in enumerate(_row_names(picture), 1)]
    columns = [_column(chunk, number) for number, chunk in enumerate(picture.chunks)]
    cache = tag(
        "div",
        *(tag("i", class_="rl-kv-cell") for _ in range(min(count, 12))),
        tag("span", "KV cache: every chunk attends to those before it; no thought is in it"),
        class_="rl-kv",
        style=f"grid-row:{_KV};grid-column:2/{count + 2}",
    )
    columns.append(cache)
    bars = [bar for n, each in enumerate(picture.rounds) for bar in _bars(each, n)]
    grid = tag("div", *names, *columns, *bars, class_="rl-thinking", style=f"--n:{count}")
    head = tag("div", tag("b", picture.title), tag("span", FORMULA, class_="rl-quiet"), class_="rl-head")
    return join([head, tag("div", grid, class_="rl-scroll")])


FORMULA = "S0 = 0,  Hᵢ = blocks(Xᵢ + Sᵢ),  Zᵢ₊₁ = T(Hᵢ),  Sᵢ₊₁ = C(Zᵢ₊₁)"
"""what the picture shows, with its numbers: chunks count from 0"""
_Z, _BLOCKS, _OUT, _KV, _IN, _UP, _X = range(1, 8)
"""rows of the picture, from the top"""


def _row_names(picture: Thinking) -> tuple[str, ...]:
    after = ("", "") if picture.layers is None else tuple(f", after block {layer}" for layer in picture.layers)
    return "Z, thought", "T, C", f"L_out{after[1]}", "KV", f"L_in{after[0]}", "", "X, input"


def _column(chunk: DrawnChunk, number: int) -> Markup:
    """Arrows go from the tokens (X) up to T, from T to the thought and to C, and from C to the state of the next chunk, which
    is added (+) to that chunk's stream."""

    def at(row: int) -> str:
        return f"grid-row:{row};grid-column:{number + 2}"

    title = "\n".join([f"chunk {number}", *chunk.facts])
    tokens = (tag("span", visible(token), class_=f"rl-token rl-{'x' if chunk.thought else 'z'}") for token in chunk.tokens)
    name = tag("span", _state(chunk, number), class_=f"rl-state{'' if chunk.state else ' rl-empty'}", data_tip=title)
    plus = tag("div", name, tag("i", "→", class_="rl-arrow"), tag("b", "+", class_="rl-plus"), class_="rl-adds", style=at(_IN))
    blocks = tag("div", tag("b", "T"), tag("i", "→"), tag("b", "C"), tag("i", f"↘ S{number + 1}"), class_="rl-blocks")
    return join(
        [
            *(
                [_thought(chunk, "z", at(_Z), title, f"Z{number + 1}"), tag("div", blocks, style=at(_BLOCKS))]
                if chunk.thought
                else []
            ),
            *([tag("i", f"{'KV → ' * (number > 0)}↑", class_="rl-up", style=at(_OUT))] if chunk.thought or number else []),
            plus,
            tag("i", "↑", class_="rl-up", style=at(_UP)),
            tag("div", *tokens, class_="rl-chunk", style=at(_X)),
        ]
    )


def _state(chunk: DrawnChunk, number: int) -> str:
    """The state and its norm. The norm is in bars, so that it does not read as a term of a sum."""
    if chunk.state is None:
        return f"S{number} not kept"
    return f"|S{number}| = {chunk.state:.2f}" if chunk.state else f"S{number} = 0"


def _thought(chunk: DrawnChunk, look: str, place: str, title: str, name: str) -> Markup:
    words = [tag("span", visible(word), class_=f"rl-token rl-{look}") for word in chunk.thought]
    return tag(
        "div",
        tag("b", name, class_="rl-name"),
        *words,
        class_=f"rl-thought{'' if chunk.thinks else ' rl-empty'}",
        style=place,
        data_tip=title,
    )


def _bars(each: DrawnRound, number: int) -> Sequence[Markup]:
    """The chunks of one round: kept ones in green, rolled-back ones in red, with their thoughts if known."""

    def at(start: int, end: int) -> str:
        return f"grid-row:{number + _X + 1};grid-column:{start + 2}/{end + 2}"

    made = [tag("i", f"round {number + 1}", class_="rl-row", style=f"grid-row:{number + _X + 1}")]
    if each.kept > each.first:
        made.append(tag("div", "KV kept", class_="rl-bar rl-accepted", style=at(each.first, each.kept)))
    for i, chunk in enumerate(each.dropped, each.kept):
        state = f"state added\t{_added(chunk, '{:.2f}', 'none')}"
        title = "\n".join([f"chunk {i}, rolled back in round {number + 1}", state, *chunk.facts])
        made.append(_thought(chunk, "rejected", at(i, i + 1), title, f"Z{i + 1}"))
    if each.last > each.kept and not each.dropped:
        made.append(tag("div", "rolled back", class_="rl-bar rl-rejected", style=at(each.kept, each.last)))
    return made


def _told(each: DrawnRound, thoughts: bool = True) -> str:
    dropped = f", chunks {each.kept} to {each.last - 1} rolled back" if each.last > each.kept else ""
    said = f", which had thought: {' | '.join(map(_said, each.dropped))}" if each.dropped and thoughts else ""
    return f"chunks {each.first} to {each.last - 1} at once, KV kept up to chunk {each.kept - 1}{dropped}{said}"


def _said(chunk: DrawnChunk) -> str:
    return " ".join(map(visible, chunk.thought))


def _added(chunk: DrawnChunk, some: str, none: str) -> str:
    """The state added to a chunk: `some` formatted with its norm, `none`, or "not kept"."""
    return "not kept" if chunk.state is None else some.format(chunk.state) if chunk.state else none


# ---- picture ---------------------------------------------------------------------------------------------------------
# Pictures of Thinking-States models: the Thinking-States picture, and the thoughts within trees and timelines.

ThoughtWords = tuple[str, ...]


def picture(text: Text, tokens: list[int], thoughts: "Thoughts", title: str = "Thinking States") -> Thinking:
    """All chunks with thoughts, and one more for the answer, which receives the last state and does not think."""
    c = thoughts.config.chunk

    def norm(chunk: int) -> float:
        state = thoughts.states.get(chunk)
        return 0.0 if state is None or state.value is None else float(state.value.norm())

    def tokens_of(chunk: int) -> ThoughtWords:
        return tuple(word(text, token) for token in tokens[chunk * c : (chunk + 1) * c])

    def dropped(each: "Round") -> tuple[DrawnChunk, ...]:
        said = enumerate(each.dropped, each.kept)
        return tuple(DrawnChunk(tokens_of(chunk), _words_of(text, thoughts, thought), None) for chunk, thought in said)

    chunks = []
    for number, thought in enumerate(thoughts.chunks):
        likely = thought.distribution["thinking.top_logprobs"][:, 0].exp().tolist()
        said = _words_of(text, thoughts, thought.tokens)
        chunks.append(DrawnChunk(tokens_of(number), said, norm(number), step_facts(likely)))
    if answer := tuple(word(text, token) for token in tokens[len(chunks) * c :]):
        chunks.append(DrawnChunk(answer, (), norm(len(chunks))))
    rounds = tuple(DrawnRound(r.first, r.kept, r.last, dropped(r)) for r in thoughts.rounds)
    return Thinking(tuple(chunks), rounds, title, thoughts.config.layers)


def thoughts_by_branch(text: Text, record: BranchRecord, thoughts: "Thoughts") -> dict[int, dict[int, ThoughtWords]]:
    """The words of thoughts by branch and position, the last of their chunk: those of the branch, and those of the suffixes of
    its prompt that were rolled back. Empty thoughts are left out."""
    c = thoughts.config.chunk
    found = {record.id: _by_position(text, thoughts, 0, [thought.tokens for thought in thoughts.chunks])}
    dropped = {each.kept * c: each for each in thoughts.rounds if each.dropped}
    for cut in record.cut:
        if (each := dropped.get(cut.fork_position)) is not None and cut.fork_position < record.root_length:
            found[cut.id] = _by_position(text, thoughts, each.kept, each.dropped)
    return found


def with_rounds(told: Timeline, text: Text, thoughts: "Thoughts") -> Timeline:
    """A timeline with the rounds of its prefill before the first frame."""
    beside = told.frames[0].others if told.frames else 0
    made = [frame for number, each in enumerate(thoughts.rounds, 1) for frame in _frames(number, each, text, thoughts)]
    return replace(told, frames=(*(replace(frame, others=beside) for frame in made), *told.frames))


def _frames(number: int, each: "Round", text: Text, thoughts: "Thoughts") -> Sequence[Frame]:
    """One round: the pass over all its chunks if some are rolled back, then what is left."""
    c = thoughts.config.chunk

    def slots(first: int, said: Sequence[tuple[int, ...]], state: TokenState) -> list[Slot]:
        words = [(i, _words_of(text, thoughts, thought)) for i, thought in enumerate(said, first)]
        return [Slot(" ".join(w), state, i, label=f"Z{i + 1}") for i, w in words if state is TokenState.REJECTED or len(w) > 1]

    def known(end: int) -> list[Slot]:
        return slots(0, [thought.tokens for thought in thoughts.chunks[:end]], TokenState.ACCEPTED)

    kept = f"round {number}: KV kept up to chunk {each.kept - 1}"
    if not each.dropped:
        return [Frame(Phase.ACCEPT, kept, Fill(each.kept * c), tuple(known(each.kept)))]
    ran = f"round {number}: chunks {each.first} to {each.last - 1} in one canonical pass, with guessed thoughts"
    fill = Fill(each.first * c, draft=(each.last - each.first) * c)
    gone = f"{kept}; chunks {each.kept} to {each.last - 1} rolled back with their thoughts"
    after = (*known(each.kept), *slots(each.kept, each.dropped, TokenState.REJECTED))
    return [
        Frame(Phase.PREFILL, ran, fill, tuple(known(each.first))),
        Frame(Phase.ROLLBACK, gone, Fill(each.kept * c), after),
    ]


def _by_position(text: Text, thoughts: "Thoughts", first: int, said: Sequence[tuple[int, ...]]) -> dict[int, ThoughtWords]:
    c = thoughts.config.chunk
    words = {(chunk + 1) * c - 1: _words_of(text, thoughts, thought) for chunk, thought in enumerate(said, first)}
    return {position: each for position, each in words.items() if len(each) > 1}


def _words_of(text: Text, thoughts: "Thoughts", tokens: Sequence[int]) -> ThoughtWords:
    return tuple(END if token == thoughts.config.eos_token else word(text, token) for token in tokens)
