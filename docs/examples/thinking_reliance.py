"""Why does one seed of Thinking States think on for ever, and another only as far as it was trained?

python docs/examples/thinking_reliance.py OUT [SEEDS] [STEPS] [CUT]

Trains small models on up to eight operations, seed after seed, and asks two things of each: how far do its thoughts stay right
beyond that, and does it use the state at all. For the second, the state that a chunk receives is exchanged for the other
face's: a model that updates its state thinks the other face from there on; one that counts the operations anew, by looking
back at the text, does not care.

CUT = 1 is a remedy to try: in every other step the rows lose their first chunks, but not the states that came of them, so
that the thoughts of a text whose beginning is gone can only come from its state.
"""

import json
import sys
from pathlib import Path

import numpy as np
from torch import Tensor

import replaylens as rl
from replaylens.engine import thinking_plain as plain
from replaylens.engine import thinking_train, thinking_zoo, zoo
from replaylens.engine import train as trainer
from replaylens.engine.config import ModelConfig
from replaylens.engine.thinking import ThinkingConfig, ThinkingDecoder
from replaylens.engine.thinking_engine import ThinkingEngine
from replaylens.engine.thinking_score import score
from replaylens.engine.thinking_texts import ChunkBatch
from replaylens.engine.thinking_train import ThinkingRecipe
from replaylens.engine.train import Part
from replaylens.tasks import WordTokenizer

PARITY = Part("coin", 1.0, (("rendering", "states"),))
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


def loss(model: ThinkingDecoder, batch: ChunkBatch, step: int) -> Tensor:
    """The training loss; in odd steps without the first chunks of every row."""
    first = int(np.random.default_rng(step).integers(1, batch.tokens.shape[1] // 2)) if step % 2 else 0
    received = plain.shifted(plain.states_of(model, batch.thoughts), batch.continues)[:, first:]
    rest = ChunkBatch(**{name: value[:, first:] for name, value in vars(batch).items()})
    hidden, last = plain.run(model, rest.tokens, received)
    return thinking_train.token_loss(model.backbone, last, rest) + thinking_train.thought_loss(model, hidden, rest)


def trained(made: ThinkingRecipe, cut: bool) -> ThinkingDecoder:
    model, texts = thinking_train.initial(made), thinking_train.texts_of(made, "cpu")
    assert isinstance(model, ThinkingDecoder)
    if cut:
        trainer.follow(made, model, lambda m, step: loss(m, texts.batch(step), step), "cpu", None, made.steps, None)
    else:
        thinking_train.follow(made, texts, model)
    return model.requires_grad_(False).eval()


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


def main(out: Path, seeds: int = 4, steps: int = 1500, cut: int = 0) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for seed in range(seeds):
        made = recipe(seed, steps)
        model = trained(made, bool(cut))
        line: dict[str, float] = {"seed": seed}
        for length in LENGTHS:
            found = score(model, "thinking", made.thinking, made.tokenizer(), zoo.held_out(PARITY, length, EXAMPLES))
            line[f"thoughts right at {length}"] = 100 * sum(s.thought for s in found) / EXAMPLES
        thinking_zoo.save(model, made.tokenizer(), out / f"seed-{seed}")
        line["turned by another state"] = reliance(model, made.tokenizer())
        print(json.dumps(line), flush=True)
        (out / f"seed-{seed}.json").write_text(json.dumps(line, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
