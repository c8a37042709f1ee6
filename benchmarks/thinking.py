"""Thinking States on a CPU: speculative against sequential prefill, answers against chain of thought, training against
back-propagation through time. Processor times on one thread, which other work on the machine hardly affects.

The contract tests check the bits; here the KV of all prefill modes is compared once more before they are timed.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import Line, Lines, case, random_tokens
from benchmarks.thinking_plans import TASKS
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Rotary
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, SequenceOps, TorchOps, visible
from replaylens.engine.request.edits import Edit
from replaylens.engine.thinking.core import ThinkingEngine
from replaylens.engine.thinking.model import THINK_SITE, ThinkingConfig, ThinkingDecoder, padded
from replaylens.engine.thinking.prefill import GUESSES, Guess
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training import thinking as plain
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.recipe import Part
from replaylens.engine.training.thinking import ChunkBatch

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


# Prefill


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


DECLARED: dict[str, Any] = dict(rounds=3, threads=1)


@case(
    "thinking-cpu.prefill", ours="drafted", baseline="sequential", others=("empty", "drafted right"), **DECLARED,
    quick={"chunks": 4, "shares": (0.5,)},
)  # fmt: skip
def prefill(chunks: int = 32, chunk: int = 8, shares: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)) -> Lines:
    """Prefill of 32 chunks with random blocks of SmolLM2-135M's shape, of which a share thinks: every mode against sequential
    chunks. Thoughts do not depend on states here."""
    engine = ThinkingEngine(random_thinker(PREFILL, chunk).requires_grad_(False))
    (tokens,) = random_tokens(1, chunks * chunk, 2000, first=8)
    for share in shares:
        edits = forced_thoughts(engine, chunks, share)
        found = engine.prompt(tokens, edits=edits)
        thoughts = [thought.tokens for thought in found.thoughts.chunks]
        assert sum(len(t) > 1 for t in thoughts) == round(share * chunks)
        first, rounds = found.kv(), {}
        modes: dict[str, dict[str, Any]] = {guess: {"guess": guess} for guess in GUESSES}
        modes["drafted right"] = {"guess": "drafted", "drafts": thoughts}
        for name, options in modes.items():
            branch = engine.prompt(tokens, edits=edits, **options)
            assert torch.equal(branch.kv(), first)
            rounds[name] = len(branch.thoughts.rounds)
            branch.release()
        found.release()
        arms = {name: lambda o=o: engine.prompt(tokens, edits=edits, **o).release() for name, o in modes.items()}
        what = f"prefill, {share:.0%} of {chunks} chunks think"
        line = yield Line(
            what, dict(arms), numbers={f"{name.replace(' ', '_')}_rounds": count for name, count in rounds.items()}
        )
        for name in set(modes) - {"sequential", "drafted"}:
            yield Line(f"{what}: {name} against sequential", ratio=line.values["sequential"] / line.values[name])


@case("thinking-rounds-cpu", quick={"count": 1})
def rounds(count: int = 16, flips: int = 8) -> Iterator[Line]:
    """How many rounds the prefill of coin-thinking takes with each guess, mean over held-out prompts of 8 actors; a count, so
    the same on every machine."""
    engine = Engine.load("coin-thinking")
    assert isinstance(engine, ThinkingEngine)
    examples = zoo.held_out(Part("coin", 1.0, (("rendering", "picture"),)), flips, count)
    for guess in GUESSES:
        taken = []
        for example in examples:
            branch = engine.prompt(example.prompt, guess=guess)
            taken.append(len(branch.thoughts.rounds))
            branch.release()
        yield Line(f"{guess} guess", numbers={"rounds": mean(taken), "by_prompt": taken})


# Answers

PUBLISHED = "2.66 (GSM8K)"
ANSWERS: dict[str, Any] = dict(ours="drafted", baseline="chain of thought", others=("sequential", "empty"), **DECLARED)


def answered(
    what: str, thinks: Callable[[Any, Guess], str], writes: Callable[[Any], str], asked: list[Any], told: list[Any]
) -> Lines:
    """Time from a prompt to its answer, one example at a time, of every guess against a chain of thought."""
    arms: dict[str, Callable[[], list[str]]] = {g: lambda g=g: [thinks(e, g) for e in asked] for g in GUESSES}
    arms["chain of thought"] = lambda: [writes(e) for e in told]
    line = yield Line(what, dict(arms), per=len(asked), aim=PUBLISHED)
    ends = lambda text, example: text.strip(" .").endswith(example.answer.strip())  # noqa: E731
    line.note(right={arm: mean(map(ends, said, asked)) for arm, said in line.results.items()})
    for guess in GUESSES:
        ratio = line.values["chain of thought"] / line.values[guess]
        yield Line(f"{what}: {guess} guess against a chain of thought", ratio=ratio, aim=PUBLISHED)


@case("thinking-cpu.answers", **ANSWERS)
def answers(models: str = "", n: int = 10, lengths: tuple[int, ...] = (4, 8), count: int = 8) -> Lines:
    """Time to the answer on lengths that both models were trained on: `--set models=FOLDER` has model-thinking-N-0 and
    model-cot-N-0, as `thinking-parity-gpu` keeps them."""
    if not models:
        print("not measured: give `--set models=FOLDER`, a folder that thinking-parity-gpu kept", flush=True)
        return
    thinker, writer = (Engine.load(Path(models) / f"model-{method}-{n}-0") for method in ("thinking", "cot"))
    assert isinstance(thinker, ThinkingEngine)
    for length in lengths:
        examples = zoo.held_out(TASKS["parity"].part, length, count)
        yield from answered(
            f"answer after {length} steps (N = {n})", lambda e, guess: _thought(thinker, e.prompt, guess),
            lambda e: _written(writer, thinker.thinking, e.prompt, length), examples, examples,
        )  # fmt: skip


@case("thinking-cpu.sentences", **ANSWERS, quick={"flips": 2, "count": 1})
def sentences(flips: int = 8, count: int = 8) -> Lines:
    """Time to the answer of coin-thinking against a chain of thought in whole sentences, as written by `coin-plain`, a model of
    another width."""
    thinker, writer = Engine.load("coin-thinking"), Engine.load("coin-plain")
    assert isinstance(thinker, ThinkingEngine)
    asked, told = (zoo.held_out(Part("coin", 1.0, (("rendering", form),)), flips, count) for form in ("picture", "steps"))
    what = f"answer after {flips} steps (coin-thinking), against sentences"
    yield from answered(what, lambda e, guess: _thought(thinker, e.prompt, guess), lambda e: _steps(writer, e), asked, told)


def _steps(engine: Engine, example: Any) -> str:
    branch = engine.prompt(example.prompt)
    branch.generate(len(engine.text.encode(example.completion)) + 2)
    said = engine.text.decode(branch.generated)
    branch.release()
    return said


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


# Training


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


@case("thinking-cpu.training", ours="parallel", baseline="through time", **DECLARED, quick={"lengths": (2, 4), "texts": 2})
def training(lengths: tuple[int, ...] = (8, 16, 32, 64), texts: int = 8, chunk: int = 6) -> Lines:
    """A training step with all chunks in parallel against back-propagation through time on the same model, the parity table's
    shape; and how both grow per chunk."""
    model = random_thinker(TRAINED, chunk)
    generator, first = torch.Generator().manual_seed(0), dict[str, float]()
    for chunks in lengths:
        tokens = torch.randint(2, 100, (texts, chunks, chunk), generator=generator)
        thoughts = torch.randint(2, 100, (texts, chunks, 2), generator=generator)
        thoughts[..., -1] = EOS
        flags = torch.ones(texts, chunks, dtype=torch.bool)
        continues = flags.clone().index_fill_(1, torch.tensor([0]), False)
        batch = ChunkBatch(tokens, torch.ones(tokens.shape), thoughts, flags, continues)
        losses = {"parallel": thinking_train.loss, "through time": recurrent_loss}
        arms = {name: lambda loss=loss: loss(model, batch).backward() for name, loss in losses.items()}
        found = yield Line(f"training step, {chunks} chunks", dict(arms))
        first = first or {name: each / chunks for name, each in found.values.items()}
        grown = {f"{name.replace(' ', '_')}_per_chunk": each / chunks / first[name] for name, each in found.values.items()}
        found.note(**grown)
