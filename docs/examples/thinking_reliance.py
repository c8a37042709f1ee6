"""Why does one seed of Thinking States think on for ever, and another only as far as it was trained?

python docs/examples/thinking_reliance.py OUT [SEEDS] [STEPS] [CUT]

Trains small models on up to eight operations, seed after seed, and asks three things of each: how far do its thoughts stay
right beyond that, are they right where all states before them are, and does it use the state at all. For the last, the state
that a chunk receives is exchanged for the other face's: a model that updates its state thinks the other face from there on;
one that counts the operations anew, by looking back at the text, does not care.

CUT = 1 trains with the remedy, `ThinkingRecipe.cut`.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

import replaylens as rl
from replaylens.engine.model.config import ModelConfig
from replaylens.tasks import WordTokenizer
from replaylens.thinking.core import ThinkingEngine
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.training import embedded as zoo
from replaylens.training import embedded_thinking as thinking_zoo
from replaylens.training import thinking
from replaylens.training import thinking as thinking_train
from replaylens.training.recipe import RecipePart
from replaylens.training.score import score
from replaylens.training.thinking import ChunkTable, ThinkingRecipe, chunked

PARITY = RecipePart("coin", 1.0, (("rendering", "states"),))
SHAPE = ModelConfig(
    num_layers=4, d_model=64, num_heads=2, num_kv_heads=2, d_head=32, d_mlp=192, vocab_size=106, max_positions=256,
    rotary_dim=32,
)  # fmt: skip
LONGEST, CHUNK, EXAMPLES, WIDTH = 8, 6, 40, 192
LENGTHS = (8, 12, 16, 24)


def recipe(seed: int, steps: int) -> ThinkingRecipe:
    """The parity table's own recipe, made small: rows of 192 tokens, so that all tested positions are trained."""
    thinks = ThinkingConfig.for_backbone(SHAPE, CHUNK, WordTokenizer.eos_id, WordTokenizer.pad_id, max_thought=4)
    return ThinkingRecipe(
        config=SHAPE, thinking=thinks, width=WIDTH, parts=(PARITY,), longest=LONGEST, steps=steps, batch=8, lr=1e-3, seed=seed,
        warmup=steps // 20, pool=2048,
    )  # fmt: skip


def reliance(model: ThinkingDecoder, tokenizer: WordTokenizer) -> float:
    """Percent of states whose exchange for the other face's turns the next thought, at lengths that were trained on."""
    engine = ThinkingEngine(model, tokenizer)
    blocks, turned, count = engine.prefiller.blocks, 0, 0
    other = {" heads": " tails", " tails": " heads"}
    for example in zoo.held_out(PARITY, LONGEST, EXAMPLES // 2):
        branch = engine.prompt(example.prompt)
        for chunk in list(branch.thoughts.states)[:-1]:
            before, after = branch.thoughts.chunks[chunk - 1], branch.thoughts.chunks[chunk]
            words = [tokenizer.token(t) for t in before.tokens[:-1]]
            if after.empty or words[-1] not in other:
                continue
            swapped = (*(tokenizer.id(other[w]) for w in words), tokenizer.eos_id)
            state = blocks.state(blocks.compressed(swapped))
            (fork,) = branch.fork(
                edits=[rl.Edit.interchange("thinking.state", state, slice(chunk * CHUNK, (chunk + 1) * CHUNK))]
            )
            said = [other[tokenizer.token(t)] for t in fork.thoughts.chunks[chunk].tokens[:-1]]
            turned += said == [tokenizer.token(t) for t in after.tokens[:-1]]
            count += 1
            fork.release()
        branch.release()
    return 100 * turned / max(1, count)


@torch.no_grad()
def with_true_states(model: ThinkingDecoder, tokenizer: WordTokenizer) -> tuple[float, float]:
    """Percent of thoughts that are right when all states are: after as many operations as were trained on, and after more."""
    right: dict[bool, list[bool]] = {False: [], True: []}
    for example in zoo.held_out(PARITY, LENGTHS[-1], EXAMPLES):
        text = chunked(example, tokenizer, model.thinking, "thinking")
        table = ChunkTable([text], model.thinking, 1.0, torch.device("cpu"))
        batch = table.batch(table.row(np.array([0]), int(table.sizes[0]))[None])
        hidden, _ = thinking.run(
            model, batch.tokens, thinking.shifted(thinking.states_of(model, batch.thoughts), batch.continues)
        )
        found, before = thinking.think(model, hidden[0], model.thinking.max_thought).tolist(), 0
        for thought, said in zip(text.thoughts, found, strict=False):
            right[before > LONGEST].append(tuple(said[: len(thought)]) == thought)
            before += len(thought) - 1
    return 100 * float(np.mean(right[False])), 100 * float(np.mean(right[True]))


def main(out: Path, seeds: int = 4, steps: int = 1500, cut: int = 0) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        made = replace(recipe(seed, steps), cut=bool(cut))
        model = thinking_train.train(made)
        assert isinstance(model, ThinkingDecoder)
        model.requires_grad_(False).eval()
        line: dict[str, float] = {"seed": seed}
        for length in LENGTHS:
            found = score(model, "thinking", made.thinking, made.tokenizer(), zoo.held_out(PARITY, length, EXAMPLES))
            line[f"thoughts right at {length}"] = 100 * sum(s.thought for s in found) / EXAMPLES
        thinking_zoo.save(model, made.tokenizer(), out / f"seed-{seed}")
        line["turned by another state"] = reliance(model, made.tokenizer())
        within, beyond = with_true_states(model, made.tokenizer())
        line |= {"right given the state, within": within, "right given the state, beyond": beyond}
        print(json.dumps(line), flush=True)
        (out / f"seed-{seed}.json").write_text(json.dumps(line, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
