"""The Thinking-States picture of a live branch or a replayed example."""

from replaylens.engine.model.text import Text
from replaylens.engine.pictures.readings import word
from replaylens.engine.pictures.thoughts import END, DrawnChunk, DrawnRound, Thinking, step_facts
from replaylens.engine.thinking.thoughts import Thought, Thoughts


def picture(text: Text, tokens: list[int], thoughts: Thoughts, title: str = "Thinking States") -> Thinking:
    """All chunks with thoughts, and one more for the answer, which receives the last state and does not think."""
    c, eos = thoughts.config.chunk, thoughts.config.eos_token

    def said(thought: Thought) -> tuple[str, ...]:
        return tuple(END if token == eos else word(text, token) for token in thought.tokens)

    def norm(chunk: int) -> float:
        state = thoughts.states.get(chunk)
        return 0.0 if state is None or state.value is None else float(state.value.norm())

    chunks = []
    for number, thought in enumerate(thoughts.chunks):
        words = tuple(word(text, token) for token in tokens[number * c : (number + 1) * c])
        likely = thought.distribution["thinking.top_logprobs"][:, 0].exp().tolist()
        chunks.append(DrawnChunk(words, said(thought), norm(number), step_facts(likely)))
    if answer := tuple(word(text, token) for token in tokens[len(chunks) * c :]):
        chunks.append(DrawnChunk(answer, (), norm(len(chunks))))
    return Thinking(tuple(chunks), tuple(DrawnRound(r.first, r.kept, r.last) for r in thoughts.rounds), title)
