"""Random trees of branches, for tests that compare engines."""

import random

from replaylens.engine.engine import Engine
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch


def grow(served: Engine, seed: int, rounds: int = 6) -> list[Branch]:
    """A random tree: prompts, forks anywhere, forced and generated tokens; the same for the same seed."""
    chance = random.Random(seed)
    vocab, branches = served.config.vocab_size, list[Branch]()
    for length in (1300, 650) if served.config.max_positions > 256 else (150, 100):
        tokens = [chance.randrange(2, vocab) for _ in range(length)]
        branches.append(
            served.prompt(
                tokens, sites="S", edits=[Edit("S", "zero", positions=3, layers=[0])] if chance.random() < 0.3 else []
            )
        )
    for number in range(rounds):
        parent = chance.choice(branches)
        made = parent.fork(chance.randint(2, 9), at=chance.randint(1, parent.length))
        served.force_all(
            made,
            [
                [
                    chance.randrange(2, vocab)
                    for _ in range(chance.choice([1, 3, 40 if served.config.max_positions > 256 else 8]))
                ]
                for _ in made
            ],
        )
        some = made + chance.sample(branches, min(2, len(branches)))
        how = [Sampling(temperature=0.9, seed=100 * number + i, ignore_eos=True) for i in range(len(some))]
        served.generate(some, chance.randint(1, 12), sampling=how, window=chance.choice([None, 4]))
        branches += made
    return branches
