"""Pictures of models that think: the Thinking-States picture, and the thoughts within trees and timelines."""

from collections.abc import Sequence
from dataclasses import replace

from replaylens.engine.display import word
from replaylens.engine.memory.tree import BranchRecord, TokenState
from replaylens.engine.model.text import Text
from replaylens.engine.pictures.data import Fill, Frame, Phase, Slot
from replaylens.engine.pictures.pictures import Timeline
from replaylens.engine.pictures.thoughts import END, DrawnChunk, DrawnRound, Thinking, step_facts
from replaylens.engine.thinking.thoughts import Round, Thoughts

ThoughtWords = tuple[str, ...]


def picture(text: Text, tokens: list[int], thoughts: Thoughts, title: str = "Thinking States") -> Thinking:
    """All chunks with thoughts, and one more for the answer, which receives the last state and does not think."""
    c = thoughts.config.chunk

    def norm(chunk: int) -> float:
        state = thoughts.states.get(chunk)
        return 0.0 if state is None or state.value is None else float(state.value.norm())

    def tokens_of(chunk: int) -> ThoughtWords:
        return tuple(word(text, token) for token in tokens[chunk * c : (chunk + 1) * c])

    def dropped(each: Round) -> tuple[DrawnChunk, ...]:
        said = enumerate(each.dropped, each.kept)
        return tuple(DrawnChunk(tokens_of(chunk), _said(text, thoughts, thought), None) for chunk, thought in said)

    chunks = []
    for number, thought in enumerate(thoughts.chunks):
        likely = thought.distribution["thinking.top_logprobs"][:, 0].exp().tolist()
        said = _said(text, thoughts, thought.tokens)
        chunks.append(DrawnChunk(tokens_of(number), said, norm(number), step_facts(likely)))
    if answer := tuple(word(text, token) for token in tokens[len(chunks) * c :]):
        chunks.append(DrawnChunk(answer, (), norm(len(chunks))))
    rounds = tuple(DrawnRound(r.first, r.kept, r.last, dropped(r)) for r in thoughts.rounds)
    return Thinking(tuple(chunks), rounds, title, thoughts.config.layers)


def thoughts_by_branch(text: Text, record: BranchRecord, thoughts: Thoughts) -> dict[int, dict[int, ThoughtWords]]:
    """The words of thoughts by branch and position, the last of their chunk: those of the branch, and those of the suffixes of
    its prompt that were rolled back. Empty thoughts are left out."""
    c = thoughts.config.chunk
    found = {record.id: _by_position(text, thoughts, 0, [thought.tokens for thought in thoughts.chunks])}
    dropped = {each.kept * c: each for each in thoughts.rounds if each.dropped}
    for cut in record.cut:
        if (each := dropped.get(cut.fork_position)) is not None and cut.fork_position < record.root_length:
            found[cut.id] = _by_position(text, thoughts, each.kept, each.dropped)
    return found


def with_rounds(told: Timeline, text: Text, thoughts: Thoughts) -> Timeline:
    """A timeline with the rounds of its prefill before the first frame."""
    beside = told.frames[0].others if told.frames else 0
    made = [frame for number, each in enumerate(thoughts.rounds, 1) for frame in _frames(number, each, text, thoughts)]
    return replace(told, frames=(*(replace(frame, others=beside) for frame in made), *told.frames))


def _frames(number: int, each: Round, text: Text, thoughts: Thoughts) -> Sequence[Frame]:
    """One round: the pass over all its chunks if some are rolled back, then what is left."""
    c = thoughts.config.chunk

    def slots(first: int, said: Sequence[tuple[int, ...]], state: TokenState) -> list[Slot]:
        words = [(i, _said(text, thoughts, thought)) for i, thought in enumerate(said, first)]
        return [Slot(" ".join(w), state, i, label=f"Z{i}") for i, w in words if state is TokenState.REJECTED or len(w) > 1]

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


def _by_position(text: Text, thoughts: Thoughts, first: int, said: Sequence[tuple[int, ...]]) -> dict[int, ThoughtWords]:
    c = thoughts.config.chunk
    words = {(chunk + 1) * c - 1: _said(text, thoughts, thought) for chunk, thought in enumerate(said, first)}
    return {position: each for position, each in words.items() if len(each) > 1}


def _said(text: Text, thoughts: Thoughts, tokens: Sequence[int]) -> ThoughtWords:
    return tuple(END if token == thoughts.config.eos_token else word(text, token) for token in tokens)
