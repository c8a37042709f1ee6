"""Thinking States on a CPU: speculative against sequential prefill, answers against chain of thought, training against
back-propagation through time.

    PYTHONPATH=src:. python -m benchmarks.thinking                         # the first and the last
    PYTHONPATH=src:. python -m benchmarks.thinking --models FOLDER         # and answers, with model-thinking-N and model-cot-N
    PYTHONPATH=src:. python -m benchmarks.thinking --rounds                # only the rounds of coin-thinking's prefill

The contract tests check the bits; here the KV of all prefill modes is compared once more before they are timed. Times are
processor times on one thread, which other work on the machine hardly affects.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.table import Table
from benchmarks.thinking_tasks import PARITY
from replaylens.engine.engine import Engine, ThinkingEngine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Rotary
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, SequenceOps, TorchOps, visible
from replaylens.engine.request.edits import Edit
from replaylens.engine.thinking.model import THINK_SITE, ThinkingConfig, ThinkingDecoder, padded
from replaylens.engine.thinking.prefill import GUESSES, Guess
from replaylens.engine.training import thinking as plain
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.recipe import Part
from replaylens.engine.training.thinking import ChunkBatch
from replaylens.engine.zoo import coin as zoo

EOS, WORD = 1, 7
PREFILL = ModelConfig(
    num_layers=6, d_model=576, num_heads=9, num_kv_heads=3, d_head=64, d_mlp=1536, vocab_size=2048, max_positions=512,
    rotary_dim=64,
)  # fmt: skip
"""blocks of SmolLM2-135M's shape, a fifth as many, and a small vocabulary"""
TRAINED = ModelConfig(
    num_layers=4, d_model=64, num_heads=2, num_kv_heads=2, d_head=32, d_mlp=192, vocab_size=106, max_positions=1024,
    rotary_dim=32,
)  # fmt: skip
"""the shape of the parity table"""


def seconds(work: Callable[[], Any], repeats: int = 3) -> float:
    """Median processor time of `work`, after one warm-up run."""
    times = []
    for _ in range(1 + repeats):
        begin = time.process_time()
        work()
        times.append(time.process_time() - begin)
    return statistics.median(times[1:])


def random_thinker(config: ModelConfig, chunk: int) -> ThinkingDecoder:
    thinks = ThinkingConfig.for_backbone(config, chunk, EOS, 0, max_thought=4)
    return ThinkingDecoder.around(Decoder(config).initialize(0), thinks)


# ---- prefill ----------------------------------------------------------------------------------------------------------


def forced_thoughts(engine: ThinkingEngine, chunks: int, share: float) -> list[Edit]:
    """Edits on T that make every n-th chunk think one word, and the others nothing; the arithmetic is unchanged."""
    said, steps = engine.thinker.think_unembed, engine.thinking.max_thought
    thinking = {int(i / share) for i in range(round(chunks * share))} if share else set()
    words = [engine.thought_place(THINK_SITE, i) for i in sorted(thinking)]
    rest = [place for place in range(chunks * steps) if place not in set(words)]
    edits = [Edit(THINK_SITE, "set", said[EOS], positions=rest)]
    return edits + ([Edit(THINK_SITE, "set", said[WORD], positions=words)] if words else [])


def prefill(table: Table, chunks: int = 32, chunk: int = 8) -> None:
    engine = ThinkingEngine(random_thinker(PREFILL, chunk).requires_grad_(False))
    tokens = torch.randint(8, 2000, (chunks * chunk,), generator=torch.Generator().manual_seed(0)).tolist()
    for share in (0.0, 0.1, 0.5, 1.0):
        edits = forced_thoughts(engine, chunks, share)
        found = engine.prompt(tokens, edits=edits)
        thoughts = [thought.tokens for thought in found.thoughts.chunks]
        assert sum(len(t) > 1 for t in thoughts) == round(share * chunks)
        first, times, rounds = found.kv(), {}, {}
        modes: dict[str, dict[str, Any]] = {guess: {"guess": guess} for guess in GUESSES}
        modes["drafted right"] = {"guess": "drafted", "drafts": [thoughts]}
        for name, options in modes.items():
            branch = engine.prompt(tokens, edits=edits, **options)
            assert torch.equal(branch.kv(), first)
            rounds[name] = len(branch.thoughts.rounds)
            branch.release()
            times[name] = seconds(lambda o=options: engine.prompt(tokens, edits=edits, **o).release())  # type: ignore[misc]
        found.release()
        for name in list(modes)[1:]:
            numbers = {"rounds": rounds[name], "ms": 1000 * times[name], "sequential_rounds": rounds["sequential"]}
            numbers["sequential_ms"] = 1000 * times["sequential"]
            ratio = times["sequential"] / times[name]
            table.add(f"prefill, {share:.0%} of {chunks} chunks think: {name} against sequential", ratio=ratio, **numbers)


def rounds(count: int = 16, flips: int = 8) -> None:
    """How many rounds the prefill of coin-thinking takes with each guess; a count, so the same on every machine."""
    about = f"rounds of prefill, mean of {count} held-out prompts of {flips} actors, coin-thinking"
    table = Table("thinking-rounds-cpu", about)
    engine = Engine.load("coin-thinking")
    assert isinstance(engine, ThinkingEngine)
    examples = zoo.held_out(Part("coin", 1.0, (("rendering", "picture"),)), flips, count)
    for guess in GUESSES:
        taken = []
        for example in examples:
            branch = engine.prompt(example.prompt, guess=guess)
            taken.append(len(branch.thoughts.rounds))
            branch.release()
        table.add(f"{guess} guess", rounds=statistics.mean(taken), by_prompt=taken)
    table.save()


# ---- answers ----------------------------------------------------------------------------------------------------------


def answers(table: Table, folder: Path, n: int, lengths: tuple[int, ...], count: int = 8) -> None:
    """Time from a prompt to its answer, one example at a time, on lengths that both models were trained on."""
    thinker, writer = Engine.load(folder / f"model-thinking-{n}"), Engine.load(folder / f"model-cot-{n}")
    assert isinstance(thinker, ThinkingEngine)
    for length in lengths:
        examples = zoo.held_out(PARITY.part, length, count)
        for guess in GUESSES:
            ours, right = _answered(lambda e, g=guess: _thought(thinker, e.prompt, g), examples)  # type: ignore[misc]
            theirs, wrote = _answered(lambda e: _written(writer, thinker.thinking, e.prompt, length), examples)
            table.add(
                f"answer after {length} steps (N = {n}): {guess} guess against chain of thought", ratio=theirs / ours,
                aim="2.66 (GSM8K)", ms=1000 * ours, cot_ms=1000 * theirs, right=right, cot_right=wrote,
            )  # fmt: skip


def sentences(table: Table, flips: int = 8, count: int = 8) -> None:
    """The same against a chain of thought in whole sentences, as written by `coin-plain`, a model of another width."""
    thinker, writer = Engine.load("coin-thinking"), Engine.load("coin-plain")
    assert isinstance(thinker, ThinkingEngine)
    asked, told = (zoo.held_out(Part("coin", 1.0, (("rendering", form),)), flips, count) for form in ("picture", "steps"))
    theirs, wrote = _answered(lambda e: _steps(writer, e), told)
    for guess in GUESSES:
        ours, right = _answered(lambda e, g=guess: _thought(thinker, e.prompt, g), asked)  # type: ignore[misc]
        table.add(
            f"answer after {flips} steps (coin-thinking): {guess} guess against sentences", ratio=theirs / ours,
            aim="2.66 (GSM8K)", ms=1000 * ours, cot_ms=1000 * theirs, right=right, cot_right=wrote,
        )  # fmt: skip


def _steps(engine: Engine, example: Any) -> str:
    branch = engine.prompt(example.prompt)
    branch.generate(len(engine.text.encode(example.completion)) + 2)
    said = engine.text.decode(branch.generated)
    branch.release()
    return said


def _answered(answer: Callable[[Any], str], examples: list[Any]) -> tuple[float, float]:
    """Median seconds per example, and the share of right answers."""
    said = [answer(example) for example in examples]
    right = sum(text.strip(" .").endswith(e.answer.strip()) for text, e in zip(said, examples, strict=True))
    return seconds(lambda: [answer(example) for example in examples]) / len(examples), right / len(examples)


def _thought(engine: ThinkingEngine, prompt: str, guess: Guess) -> str:
    branch = engine.prompt(prompt, guess=guess)
    branch.generate(10)
    said = engine.text.decode(branch.generated)
    branch.release()
    return said


def _written(engine: Engine, thinking: ThinkingConfig, prompt: str, length: int) -> str:
    """A chain of thought, its <EOS>, and the answer."""
    branch = engine.prompt(list(padded(engine.text.encode(prompt), thinking)))
    branch.generate(2 * length + 16)
    if branch.finish_reason:  # the chain's end is not the end of the answer
        (more,) = branch.fork()
        branch.release()
        branch = more.generate(10)
    said = engine.text.decode(branch.generated)
    branch.release()
    return said


# ---- training ---------------------------------------------------------------------------------------------------------


class GrowingSequenceOps(TorchOps):
    """Sequential chunks, differentiable: keys and values of earlier chunks are kept with their graph."""

    def __init__(self, texts: int) -> None:
        self.texts, self.past = texts, dict[int, tuple[Tensor, Tensor]]()

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        q, k, v = self.turned(heads)
        q, k, v = (x.view(self.texts, -1, x.shape[1], x.shape[2]).transpose(1, 2) for x in (q, k, v))
        if spec.layer in self.past:
            k, v = (torch.cat([old, new], dim=2) for old, new in zip(self.past[spec.layer], (k, v), strict=True))
        self.past[spec.layer] = (k, v)
        rows = torch.arange(k.shape[2] - q.shape[2], k.shape[2])
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible(rows, k.shape[2], 0), scale=spec.scale)
        return out.transpose(1, 2).reshape(-1, q.shape[1], q.shape[3])


def recurrent_loss(model: ThinkingDecoder, batch: ChunkBatch) -> Tensor:
    """The same loss with states from the model's own thoughts, chunk by chunk; the gradient flows through all of them.

    A thought is passed on softly, as the expected embedding of each step, so that there is a gradient.
    """
    texts, chunks, c = batch.tokens.shape
    d, m, ops = model.config.d_model, batch.thoughts.shape[-1], GrowingSequenceOps(texts)
    state, hidden, last = torch.zeros(texts * c, d), [], []
    for i in range(chunks):
        positions = torch.arange(i * c, (i + 1) * c).repeat(texts)
        h, x = model(batch.tokens[:, i].flatten(), positions, state, ops)
        hidden.append(h.view(texts, 1, c, d))
        last.append(x.view(texts, 1, c, d))
        words = plain.thought_logits(model, hidden[-1][:, 0], batch.thoughts[:, i]).softmax(-1) @ model.backbone.embed
        filled = F.pad(words, (0, 0, 0, max(0, c - m))).flatten(0, 1)
        places = torch.arange(max(m, c)).repeat(texts)
        rotary = Rotary(model.compress_rotary, places)
        out = model.compress(filled, rotary, SequenceOps([max(m, c)] * texts), None).view(texts, -1, d)
        state = out[:, -c:].reshape(texts * c, d)
    tokens = thinking_train.token_loss(model.backbone, torch.cat(last, dim=1), batch)
    return tokens + thinking_train.thought_loss(model, torch.cat(hidden, dim=1), batch)


def training(table: Table, texts: int = 8, chunk: int = 6) -> None:
    model = random_thinker(TRAINED, chunk)
    generator, first = torch.Generator().manual_seed(0), {}
    for chunks in (8, 16, 32, 64):
        tokens = torch.randint(2, 100, (texts, chunks, chunk), generator=generator)
        thoughts = torch.randint(2, 100, (texts, chunks, 2), generator=generator)
        thoughts[..., -1] = EOS
        flags = torch.ones(texts, chunks, dtype=torch.bool)
        batch = ChunkBatch(
            tokens, torch.ones(tokens.shape), thoughts, flags, flags.clone().index_fill_(1, torch.tensor([0]), False)
        )
        times = {
            name: seconds(lambda f=loss: f(model, batch).backward())  # type: ignore[misc]
            for name, loss in (("parallel", thinking_train.loss), ("through time", recurrent_loss))
        }
        first = first or {name: each / chunks for name, each in times.items()}
        grown = {f"{name.replace(' ', '_')}_per_chunk": each / chunks / first[name] for name, each in times.items()}
        ms = {f"{name.replace(' ', '_')}_ms": 1000 * each for name, each in times.items()}
        table.add(f"training step, {chunks} chunks", ratio=times["through time"] / times["parallel"], **ms, **grown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, help="folder with model-thinking-N and model-cot-N, as thinking_gpu leaves them")
    parser.add_argument("--rounds", action="store_true", help="only count the rounds of coin-thinking's prefill")
    options = parser.parse_args()
    if options.rounds:
        rounds()
        return
    table = Table(
        "thinking-cpu", "one thread; random blocks of SmolLM2-135M's shape (prefill), the parity table's models (others)"
    )
    torch.set_num_threads(1)
    prefill(table)
    training(table)
    if options.models is not None:
        answers(table, options.models, 10, (4, 8))
    sentences(table)
    table.save()


if __name__ == "__main__":
    main()
