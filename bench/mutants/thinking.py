"""Faults in the recorded thoughts of a Thinking-States model."""

from bench.mutants.mutant import Mutant

THINKING = (
    Mutant(
        "wrong-guess-kept",
        "replaylens.thinking.prefill",
        "kept = next(wrong, count - 1) + 1",
        "kept = next(wrong, count - 2) + 2",
        "chunks after the first wrong guess are computed again",
        ("tests/thinking/test_replay.py::test_every_road_has_the_bits_of_one_row_at_a_time",),
    ),
    Mutant(
        "last-guess-not-compared",
        "replaylens.thinking.prefill",
        "(i for i in range(count - 1) if found[i].tokens != guessed[i])",
        "(i for i in range(count - 2) if found[i].tokens != guessed[i])",
        "a guessed thought is settled only where T says the same",
        ("tests/thinking/test_replay.py::test_every_road_has_the_bits_of_one_row_at_a_time",),
    ),
    Mutant(
        "state-not-handed-on",
        "replaylens.thinking.prefill",
        "p.thoughts[-1].state if p.thoughts else None",
        "p.thoughts[0].state if p.thoughts else None",
        "a chunk receives what the chunk before it thought",
        ("tests/thinking/test_replay.py::test_every_road_has_the_bits_of_one_row_at_a_time",),
    ),
    Mutant(
        "thought-one-position-early",
        "replaylens.thinking.thoughts",
        "(number + 1) * self.config.chunk - 1 - start",
        "(number + 1) * self.config.chunk - 2 - start",
        "a thought's rows stand where its chunk ends",
        ("tests/thinking/test_replay.py::test_thoughts_are_stored_by_chunk_and_step",),
    ),
    Mutant(
        "later-thoughts-in-a-fork",
        "replaylens.thinking.thoughts",
        "self.chunks[:whole]",
        "self.chunks",
        "a fork has the thoughts of its own tokens",
        ("tests/thinking/test_replay.py::test_any_past_leaves_the_bits_of_path_and_edits_alone",),
    ),
    Mutant(
        "first-rows-of-the-compression",
        "replaylens.thinking.blocks",
        "return compressed[-self.config.chunk :]",
        "return compressed[: self.config.chunk]",
        "a state is the last rows of the compressed thought",
        ("tests/thinking/test_replay.py::test_every_road_has_the_bits_of_one_row_at_a_time",),
    ),
    Mutant(
        "score-depends-on-company",
        "replaylens.training.score",
        "del ids[len(answer) + PATIENCE :]",
        "del ids[limit:]",
        "a score does not depend on the batch",
        ("tests/training/test_trainer.py::test_a_chain_of_thought_has_as_much_time_beside_longer_ones",),
    ),
)
