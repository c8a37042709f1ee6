"""Thinking States: speculative against sequential prefill, answers against a chain of thought, training against
back-propagation through time. On a CPU, processor times on one thread, which other work on the machine hardly affects.

The contract tests check the bits; here the KV of all prefill modes is compared once more before they are timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.harness import Line, Lines, case, random_tokens
from bench.subjects import ENDLESS
from bench.thinking_tables import PARITY, TEXTS, Task
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Rotary
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, SequenceOps, TorchOps, visible
from replaylens.engine.request.edits import Edit
from replaylens.tasks import WordTokenizer
from replaylens.thinking.core import ThinkingEngine
from replaylens.thinking.model import THINK_SITE, ThinkingConfig, ThinkingDecoder, padded
from replaylens.training import embedded as zoo
from replaylens.training import thinking as thinking_train
from replaylens.training.recipe import RecipePart
from replaylens.training.thinking import ChunkBatch, ChunkedText, chunked
from replaylens.weights import loading
from replaylens.weights.opening import GUESSES

PAD, EOS, WORD = WordTokenizer.pad_id, WordTokenizer.eos_id, 7
PREFILL = ModelConfig(6, 576, 9, 3, 64, 1536, 2048, 512, rotary_dim=64)
"""blocks of SmolLM2-135M's shape, a fifth as many, and a small vocabulary"""
TRAINED = ModelConfig(4, 64, 2, 2, 32, 192, 106, 1024, rotary_dim=32)
"""the shape of the parity table"""
ON_CPU: dict[str, Any] = dict(rounds=3, threads=1)


def random_thinker(config: ModelConfig, chunk: int) -> ThinkingDecoder:
    thinks = ThinkingConfig.for_backbone(config, chunk, EOS, PAD, max_thought=4)
    return ThinkingDecoder.around(Decoder(config).initialize(0), thinks)


# Prefill


def forced_thoughts(engine: ThinkingEngine, chunks: int, share: float) -> list[Edit]:
    """Edits on T that make every n-th chunk think one word, and the others nothing; the arithmetic is unchanged."""
    said, steps = engine.thinker.think_unembed, engine.thinking.max_thought
    thinking = {int(i / share) for i in range(round(chunks * share))} if share else set()
    words = [engine.thought_place(THINK_SITE, i) for i in sorted(thinking)]
    rest = [place for place in range(chunks * steps) if place not in set(words)]
    edits = [Edit(THINK_SITE, "set", said[EOS], positions=rest)]
    return edits + ([Edit(THINK_SITE, "set", said[WORD], positions=words)] if words else [])


@case(
    "thinking-cpu.prefill", ours="drafted", baseline="sequential", others=("empty", "drafted right"), **ON_CPU,
    quick={"chunks": 4, "shares": (0.5,)},
)  # fmt: skip
def prefill(chunks: int = 32, chunk: int = 8, shares: tuple[float, ...] = (0.0, 0.1, 0.5, 1.0)) -> Lines:
    """Prefill of 32 chunks with random blocks of SmolLM2-135M's shape, of which a share thinks: every mode against sequential
    chunks. Thoughts do not depend on states here."""
    engine = ThinkingEngine(random_thinker(PREFILL, chunk).requires_grad_(False))
    (tokens,) = random_tokens(1, chunks * chunk, 2000, first=8)
    for share in shares:
        edits, rounds = forced_thoughts(engine, chunks, share), dict[str, int]()
        with engine.prompt(tokens, edits=edits) as branch:
            first, thoughts = branch.kv(), [thought.tokens for thought in branch.thoughts.chunks]
        assert sum(len(t) > 1 for t in thoughts) == round(share * chunks)
        modes: dict[str, dict[str, Any]] = {guess: {"guess": guess} for guess in GUESSES}
        modes["drafted right"] = {"guess": "drafted", "drafts": thoughts}
        for name, options in modes.items():
            with engine.prompt(tokens, edits=edits, **options) as branch:
                assert torch.equal(branch.kv(), first)
                rounds[f"{name.replace(' ', '_')}_rounds"] = len(branch.thoughts.rounds)
        arms = {name: lambda o=o: engine.prompt(tokens, edits=edits, **o).release() for name, o in modes.items()}
        what = f"prefill, {share:.0%} of {chunks} chunks think"
        line = yield Line(what, dict(arms), numbers=rounds)
        for name in set(modes) - {"sequential", "drafted"}:
            yield Line(f"{what}: {name} against sequential", ratio=line.values["sequential"] / line.values[name])


# Answers

COT, PUBLISHED = "chain of thought", "2.66 (GSM8K)"
Answer = tuple[bool, int]
"""is it right; the rounds of its prefill"""


def against_a_chain(what: str, arms: dict[str, Callable[[], list[Answer]]], per: int, **told: float) -> Lines:
    """All arms, each with `per` answers; then one line per way of guessing thoughts."""
    found = yield Line(f"{what}: all guesses", dict(arms), per=per, aim=PUBLISHED, numbers=told)
    right = {arm: mean(each for each, _ in answers) for arm, answers in found.results.items()}
    for guess in [arm for arm in arms if arm != COT]:
        numbers = dict(told, ms=1e3 * found.values[guess], cot_ms=1e3 * found.values[COT])
        numbers |= dict(right=right[guess], cot_right=right[COT], rounds=mean(rounds for _, rounds in found.results[guess]))
        ratio = found.values[COT] / found.values[guess]
        yield Line(f"{what}: {guess} guess against a chain of thought", ratio=ratio, aim=PUBLISHED, numbers=numbers)


def answer(engine: Engine, example: Any, n: int, **options: Any) -> Answer:
    """The model's answer, after its thoughts or its sentences."""
    with engine.prompt(example.prompt, **options) as branch:
        branch.generate(n)
        return ends(engine, branch, example), len(branch.thoughts.rounds) if isinstance(engine, ThinkingEngine) else 1


def ends(engine: Engine, branch: Any, example: Any) -> bool:
    return bool(engine.text.decode(branch.generated).strip(" .").endswith(example.answer.strip()))


def chain_answer(engine: Engine, thinking: ThinkingConfig, example: Any, length: int) -> Answer:
    """A chain of thought, its <EOS>, and the answer."""
    with engine.prompt(list(padded(engine.text.encode(example.prompt), thinking))) as branch:
        branch.generate(2 * length + 16)
        if not branch.finish_reason:
            return ends(engine, branch, example), 1
        with branch.fork()[0] as more:  # the chain's end is not the end of the answer
            return ends(engine, more.generate(10), example), 1


ANSWERS: dict[str, Any] = dict(ours="drafted", baseline=COT, others=("sequential", "empty"), **ON_CPU)


@case("thinking-cpu.answers", **ANSWERS)
def answers(models: str = "", n: int = 10, lengths: tuple[int, ...] = (4, 8), count: int = 8) -> Lines:
    """Time to the answer on lengths that both models were trained on: `--set models=FOLDER` has model-thinking-N-0 and
    model-cot-N-0, as `thinking-parity-gpu` keeps them."""
    if not models:
        print("not measured: give `--set models=FOLDER`, a folder that thinking-parity-gpu kept", flush=True)
        return
    thinker, writer = (Engine.load(Path(models) / f"model-{method}-{n}-0") for method in ("thinking", "cot"))
    for length in lengths:
        examples = zoo.held_out(PARITY.part, length, count)
        arms: dict[str, Any] = {g: lambda g=g: [answer(thinker, e, 10, guess=g) for e in examples] for g in GUESSES}
        arms[COT] = lambda: [chain_answer(writer, thinker.thinking, e, length) for e in examples]
        yield from against_a_chain(f"answer after {length} steps (N = {n})", arms, count)


@case("thinking-cpu.sentences", **ANSWERS, quick={"flips": 2, "count": 1})
def sentences(flips: int = 8, count: int = 8) -> Lines:
    """Time to the answer of coin-thinking against a chain of thought in whole sentences, as written by `coin-plain`, a model of
    another width."""
    thinker, writer = Engine.load("coin-thinking"), Engine.load("coin-plain")
    asked, told = (zoo.held_out(RecipePart("coin", 1.0, (("rendering", form),)), flips, count) for form in ("picture", "steps"))
    arms: dict[str, Any] = {g: lambda g=g: [answer(thinker, e, 10, guess=g) for e in asked] for g in GUESSES}
    arms[COT] = lambda: [answer(writer, e, len(writer.text.encode(e.completion)) + 2) for e in told]
    yield from against_a_chain(f"answer after {flips} steps (coin-thinking), against sentences", arms, count)


# Answers of larger shapes, on a GPU

SHAPES = {"Qwen2.5-0.5B shape": ModelConfig(24, 896, 14, 2, 64, 4864, 151936, 2048, rotary_dim=64, rope=Rope(theta=1e6))}
TINY_SHAPES = {"tiny shape": ModelConfig(3, 256, 2, 1, 32, 64, 900, 1024, rotary_dim=32)}
VARIANTS = 8
"""thoughts of one length, so that a text does not think the same again and again: C is not computed twice for a thought"""
FILLER = 2


@dataclass(frozen=True)
class Load:
    """One prompt for both arms."""

    prompt: list[int]
    """whole chunks"""
    thoughts: tuple[tuple[int, ...], ...]
    """of its chunks, with <EOS>"""
    written: int
    """tokens that a chain of thought writes, up to and including the answer"""
    said: int
    """tokens that a Thinking-States model writes"""


def answered(engine: Engine, load: Load, tokens: int, **options: Any) -> Answer:
    """One answer through the public API, deterministic. Leaves no pages behind."""
    if isinstance(engine, ThinkingEngine):
        engine.prefiller.blocks.forget()  # texts repeat here, but not in use
    with engine.prompt(load.prompt, **options) as branch:
        branch.generate(tokens, sampling=ENDLESS)
        rounds = len(branch.thoughts.rounds) if isinstance(engine, ThinkingEngine) else 1
    engine.prefix.clear()
    return True, rounds


@case(
    "thinking-latency-gpu.made", ours="drafted", baseline=COT, others=("empty",), needs="gpu", clock="wall", warm=6,
    quick={"tiny": True, "count": 2, "loads": (("counts", 8, (4,)), ("hops", 4, (2,)))},
)  # fmt: skip
def made(tiny: bool = False, count: int = 4, loads: tuple[Any, ...] = (("counts", 8, (4, 8, 16)), ("hops", 4, (2,)))) -> Lines:
    """A larger shape; loads: task, chunk, and numbers of steps of the texts. Time does not depend on the values of weights, so
    these are made by hand: attention and MLP write nothing, and T's tables continue a trigger at the end of a chunk to a
    thought of the wanted length. So the model thinks at the chunks, and as many tokens, as the gold thoughts of the task's
    texts; the chain of thought has the same tokens. Kernels are compiled in the rounds that do not count, and passes of a shape
    that recurs become graphs."""
    for shape, config in (TINY_SHAPES if tiny else SHAPES).items():
        for name, chunk, numbers in loads:
            thinks = ThinkingConfig.for_backbone(config, chunk, EOS, PAD, max_thought=TEXTS[name].thoughts[chunk])
            texts = {steps: _texts(TEXTS[name], thinks, steps, count) for steps in numbers}
            sizes = sorted({len(t) - 1 for pairs in texts.values() for text, _ in pairs for t in text.thoughts if len(t) > 1})
            model = by_hand(config, thinks, sizes, "cpu" if tiny else "cuda")
            thinker, writer = ThinkingEngine(model), Engine(model.backbone)
            for steps, pairs in texts.items():
                given = [triggered(thinks, sizes, *pair) for pair in pairs]
                first = _thoughts(thinker, given[0])
                found = [len(tokens) for tokens, _ in first]
                assert found == [len(thought) for thought in given[0].thoughts], "the model made by hand thinks otherwise"
                arms: dict[str, Any] = {
                    guess: lambda g=guess: [answered(thinker, load, load.said, guess=g) for load in given]
                    for guess in ("empty", "drafted")
                }
                arms[COT] = lambda: [answered(writer, load, load.written) for load in given]
                yield from against_a_chain(
                    f"{shape}, {name}, {steps} steps, chunks of {chunk}", arms, count,
                    chunks=mean(len(load.thoughts) for load in given),
                    thoughts=mean(sum(len(t) > 1 for t in load.thoughts) for load in given),
                    prompt_tokens=mean(len(load.prompt) for load in given), written=mean(load.written for load in given),
                )  # fmt: skip
                for (tokens, rows), (others, its) in zip(first, _thoughts(thinker, given[0]), strict=True):
                    assert tokens == others and torch.equal(rows, its), "steps as graphs have other bits than launched ones"


def _texts(task: Task, config: ThinkingConfig, steps: int, count: int) -> list[tuple[ChunkedText, ChunkedText]]:
    """Held-out texts for both arms: thinking, chain of thought."""
    words, examples = WordTokenizer(task.vocabulary), zoo.held_out(task.part, steps, count)
    return [(chunked(e, words, config, "thinking"), chunked(e, words, config, "cot")) for e in examples]


def _thoughts(engine: ThinkingEngine, load: Load) -> list[tuple[tuple[int, ...], Tensor]]:
    """Tokens and T's rows of every chunk. The first of a size are launched, later ones are graphs."""
    with engine.prompt(load.prompt) as branch:
        found = [(thought.tokens, thought.hidden.clone()) for thought in branch.thoughts.chunks]
    engine.prefix.clear()
    return found


def _words(sizes: Sequence[int]) -> dict[int, list[list[int]]]:
    """By length of the thought, some variants: a trigger, which ends a chunk, and the words after it."""
    first, out = FILLER + 1, {}
    for size in sizes:
        out[size] = [list(range(first + i * (size + 1), first + (i + 1) * (size + 1))) for i in range(VARIANTS)]
        first += VARIANTS * (size + 1)
    return out


@torch.no_grad()
def by_hand(config: ModelConfig, thinks: ThinkingConfig, sizes: Sequence[int], device: str) -> ThinkingDecoder:
    """A model that thinks `size` words after a chunk that ends with the trigger of that size, and else nothing."""
    torch.manual_seed(0)
    with torch.device(device):
        model = ThinkingDecoder(config, thinks)
    for name, parameter in model.named_parameters():
        norm = ".ln" in name or "norm" in name or "ln_final" in name
        silent = name.endswith(("attn.o.weight", "mlp.down.weight"))
        parameter.fill_(1.0) if norm else parameter.zero_() if silent else parameter.normal_(0.0, 0.02)
    rows, table = model.backbone.embed, model.think_unembed
    chains = [chain for variants in _words(sizes).values() for chain in variants]
    torch.nn.init.orthogonal_(rows[: 1 + max((max(chain) for chain in chains), default=FILLER)])  # no word is taken for another
    table[EOS] = rows[EOS] + 2 * rows[FILLER]
    for chain in chains:
        for before, word in pairwise(chain):
            table[word] = 2 * rows[before]
        table[EOS] += 2 * rows[chain[-1]]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    return loading.in_dtype(model, dtype).to(device).requires_grad_(False).eval()  # the rotary tables are made on the CPU


def triggered(config: ThinkingConfig, sizes: Sequence[int], thinks: ChunkedText, writes: ChunkedText) -> Load:
    """A prompt on which a model made by hand has thoughts of the same lengths, at the same chunks, as the text."""
    words, prompt = _words(sizes), [FILLER] * len(thinks.prompt)
    said = [(number, len(thought) - 1) for number, thought in enumerate(thinks.thoughts) if len(thought) > 1]
    for count, (number, size) in enumerate(said):
        prompt[(number + 1) * config.chunk - 1] = words[size][count % VARIANTS][0]
    return Load(prompt, thinks.thoughts, writes.answer, thinks.answer)


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
        words = thinking_train.thought_logits(model, hidden[-1][:, 0], batch.thoughts[:, i]).softmax(-1) @ model.backbone.embed
        filled = F.pad(words, (0, 0, 0, max(0, c - m))).flatten(0, 1)
        places = torch.arange(max(m, c)).repeat(texts)
        rotary = Rotary(model.compress_rotary, places)
        out = model.compress(filled, rotary, SequenceOps([max(m, c)] * texts), None).view(texts, -1, d)
        state = out[:, -c:].reshape(texts * c, d)
    tokens = thinking_train.token_loss(model.backbone, torch.cat(last, dim=1), batch)
    return tokens + thinking_train.thought_loss(model, torch.cat(hidden, dim=1), batch)


@case("thinking-cpu.training", ours="parallel", baseline="through time", **ON_CPU, quick={"lengths": (2, 4), "texts": 2})
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
