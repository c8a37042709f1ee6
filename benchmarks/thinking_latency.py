"""Time from a prompt to its answer: a Thinking-States model against the same backbone that writes a chain of thought.

Through the public API, one request at a time, deterministic: `prompt` and `generate` up to the answer. Both arms say the same
words: thoughts beside the prompt, or written after it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.harness import Line, Lines, case
from benchmarks.subjects import ENDLESS
from benchmarks.thinking_plans import TEXT_TASKS, TextTask
from replaylens.engine.engine import Engine
from replaylens.engine.model import loading
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.thinking.core import ThinkingBranch, ThinkingEngine
from replaylens.engine.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.engine.thinking.prefill import Guess
from replaylens.engine.training import embedded as zoo
from replaylens.engine.training.thinking import ChunkedText, chunked
from replaylens.tasks import WordTokenizer

PUBLISHED = "2.66 (GSM8K)"
SHAPES = {
    "Qwen2.5-0.5B shape": ModelConfig(
        num_layers=24, d_model=896, num_heads=14, num_kv_heads=2, d_head=64, d_mlp=4864, vocab_size=151936,
        max_positions=2048, rotary_dim=64, rope=Rope(theta=1e6),
    ),
    "Llama-3.2-1B shape": ModelConfig(
        num_layers=16, d_model=2048, num_heads=32, num_kv_heads=8, d_head=64, d_mlp=8192, vocab_size=128256,
        max_positions=2048, rotary_dim=64, rope=Rope(theta=5e5),
    ),
}  # fmt: skip
TINY_SHAPES = {
    "tiny shape": ModelConfig(
        num_layers=3, d_model=256, num_heads=2, num_kv_heads=1, d_head=32, d_mlp=64, vocab_size=900, max_positions=1024,
        rotary_dim=32,
    )
}  # fmt: skip
LOADS = {
    "Qwen2.5-0.5B shape": (("counts", 8, (4, 8, 16)), ("hops", 4, (2,))),
    "Llama-3.2-1B shape": (("counts", 8, (8, 16)),),
    "tiny shape": (("counts", 8, (4,)), ("hops", 4, (2,))),
}
"""task, chunk, and numbers of steps of the texts, for the larger shapes"""
VARIANTS = 8
"""thoughts of one length, so that a text does not think the same again and again: C is not computed twice for a thought"""
COT = "chain of thought"
PAD, EOS, FILLER = WordTokenizer.pad_id, WordTokenizer.eos_id, 2


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
    right: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """the completions (thinking, chain of thought) up to the answer; None: any"""


class Parts:
    """Where a prompt's time goes: the host's seconds in the parts of its rounds, since the last `reset`."""

    def __init__(self, engine: ThinkingEngine) -> None:
        """Mutates the engine: its methods are timed from now on."""
        prefiller = engine.prefiller
        self.seconds: dict[str, float] = {}
        prefiller.forest.compute = self._timed("pass", prefiller.forest.compute)  # type: ignore[method-assign]
        prefiller._chunks = self._timed("rows", prefiller._chunks)  # type: ignore[method-assign]
        prefiller.blocks._decode_ahead = self._timed("T", prefiller.blocks._decode_ahead)  # type: ignore[method-assign]
        prefiller.blocks._compress = self._timed("C", prefiller.blocks._compress)  # type: ignore[method-assign]

    def _timed(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        self.seconds[name] = 0.0

        def call(*given: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*given)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return call

    def reset(self) -> dict[str, float]:
        """The seconds by part. Mutates: starts again at 0."""
        found = dict(self.seconds)
        self.seconds |= dict.fromkeys(found, 0.0)
        return found


def answered(engine: Engine, load: Load, tokens: int, options: dict[str, Any]) -> tuple[list[int], int]:
    """The tokens of one answer, and the rounds of its prefill. Leaves no pages behind."""
    if isinstance(engine, ThinkingEngine):
        engine.prefiller.blocks.forget()  # texts repeat here, but not in use
    branch = engine.prompt(load.prompt, **options)
    branch.generate(tokens, sampling=ENDLESS)
    rounds = len(branch.thoughts.rounds) if isinstance(branch, ThinkingBranch) else 1
    said = list(branch.generated)
    branch.release()
    engine.prefix.clear()
    return said, rounds


def compared(what: str, thinker: ThinkingEngine, writer: Engine, loads: Sequence[Load], guesses: Sequence[Guess]) -> Lines:
    """One line of all arms, one per way of guessing thoughts; times are means over the prompts."""
    parts, spent = Parts(thinker), {guess: dict[str, list[float]]() for guess in guesses}

    def after(arm: str, result: Any) -> None:
        for part, seconds in parts.reset().items():
            if arm in spent:
                spent[arm].setdefault(part, []).append(1e3 * seconds / len(loads))

    arms: dict[str, Callable[[], Any]] = {
        guess: lambda guess=guess: [answered(thinker, load, load.said, {"guess": guess}) for load in loads] for guess in guesses
    }
    arms[COT] = lambda: [answered(writer, load, load.written, {}) for load in loads]
    told = dict(
        chunks=mean(len(load.thoughts) for load in loads),
        thoughts=mean(sum(len(t) > 1 for t in load.thoughts) for load in loads),
        prompt_tokens=mean(len(load.prompt) for load in loads),
        written=mean(load.written for load in loads),
    )
    found = yield Line(f"{what}: all guesses", arms, per=len(loads), after=after, numbers=told)
    right = {
        arm: mean(_right(load, said, arm == COT) for load, (said, _) in zip(loads, answers, strict=True))
        for arm, answers in found.results.items()
    }
    for guess in guesses:
        numbers = dict(
            ms=1e3 * found.values[guess], cot_ms=1e3 * found.values[COT], right=right[guess], cot_right=right[COT], **told
        )
        numbers |= {"rounds": mean(rounds for _, rounds in found.results[guess])}
        numbers |= {"parts_ms": {part: median(each) for part, each in spent[guess].items()}}
        ratio = found.values[COT] / found.values[guess]
        yield Line(f"{what}: {guess} guess against a chain of thought", ratio=ratio, aim=PUBLISHED, numbers=numbers)


def _right(load: Load, said: list[int], written: bool) -> float:
    return 1.0 if load.right is None else float(tuple(said) == load.right[written])


DECLARED: dict[str, Any] = dict(
    ours="drafted", baseline=COT, others=("empty", "sequential"), needs="gpu", clock="wall", rounds=5, warm=6
)  # kernels are compiled in the rounds that do not count, and passes of a shape that recurs become graphs


@case("thinking-latency-gpu.trained", **DECLARED)
def trained(models: str = "", device: str = "cuda", count: int = 4) -> Lines:
    """The models that `thinking-texts-gpu` kept (`--set models=FOLDER`), with their share of right answers."""
    for name, task in TEXT_TASKS.items():
        thinker, writer = (
            Engine.load(Path(models) / f"model-{name}-{method}", device=device) for method in ("thinking", "cot")
        )
        assert isinstance(thinker, ThinkingEngine)
        for steps in (2, task.longest):
            loads = [_own(*texts) for texts in _texts(task, thinker.thinking, steps, count)]
            yield from compared(f"trained, {name}, {steps} steps", thinker, writer, loads, ("sequential", "empty", "drafted"))


def _texts(task: TextTask, config: ThinkingConfig, steps: int, count: int) -> list[tuple[ChunkedText, ChunkedText]]:
    """Held-out texts for both arms: thinking, chain of thought."""
    part, words = task.table.part, WordTokenizer(task.vocabulary)
    examples = zoo.held_out(part, steps, count)
    return [(chunked(e, words, config, "thinking"), chunked(e, words, config, "cot")) for e in examples]


def _own(thinks: ChunkedText, writes: ChunkedText) -> Load:
    right = thinks.completion[: thinks.answer], writes.completion[: writes.answer]
    return Load(list(thinks.prompt), thinks.thoughts, writes.answer, thinks.answer, right)


@case("thinking-latency-gpu.made", **DECLARED, quick={"tiny": True, "count": 2})
def made(tiny: bool = False, count: int = 4) -> Lines:
    """Larger shapes. Time does not depend on the values of weights, so these are made by hand: attention and MLP write
    nothing, and T's tables continue a trigger at the end of a chunk to a thought of the wanted length. So the model thinks at
    the chunks, and as many tokens, as the gold thoughts of the task's texts; the chain of thought has the same tokens."""
    device = "cpu" if tiny else "cuda"
    for shape, config in (TINY_SHAPES if tiny else SHAPES).items():
        for name, chunk, numbers in LOADS[shape]:
            task = TEXT_TASKS[name]
            thinks = ThinkingConfig.for_backbone(config, chunk, EOS, PAD, max_thought=task.max_thought(chunk))
            texts = {steps: _texts(task, thinks, steps, count) for steps in numbers}
            sizes = sorted({len(t) - 1 for pairs in texts.values() for text, _ in pairs for t in text.thoughts if len(t) > 1})
            model = by_hand(config, thinks, sizes, device)
            thinker, writer = ThinkingEngine(model), Engine(model.backbone)
            for steps, pairs in texts.items():
                loads = [triggered(thinks, sizes, *pair) for pair in pairs]
                first = _thoughts(thinker, loads[0])
                found = [len(tokens) for tokens, _ in first]
                assert found == [len(thought) for thought in loads[0].thoughts], "the model made by hand thinks otherwise"
                what = f"{shape}, {name}, {steps} steps, chunks of {chunk}"
                yield from compared(what, thinker, writer, loads, ("empty", "drafted"))
                for (tokens, rows), (others, its) in zip(first, _thoughts(thinker, loads[0]), strict=True):
                    assert tokens == others and torch.equal(rows, its), "steps as graphs have other bits than launched ones"


def _thoughts(engine: ThinkingEngine, load: Load) -> list[tuple[tuple[int, ...], torch.Tensor]]:
    """Tokens and T's rows of every chunk. The first of a size are launched, later ones are graphs."""
    branch = engine.prompt(load.prompt)
    found = [(thought.tokens, thought.hidden.clone()) for thought in branch.thoughts.chunks]
    branch.release()
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
    """A Thinking-States model `size` words after a chunk that ends with the trigger of that size, and else nothing."""
    torch.manual_seed(0)
    with torch.device(device):
        model = ThinkingDecoder(config, thinks)
    for name, parameter in model.named_parameters():
        norm, silent = (
            ".ln" in name or "norm" in name or "ln_final" in name,
            name.endswith(("attn.o.weight", "mlp.down.weight")),
        )
        parameter.fill_(1.0) if norm else parameter.zero_() if silent else parameter.normal_(0.0, 0.02)
    rows, table = model.backbone.embed, model.think_unembed
    used = 1 + max((word for chains in _words(sizes).values() for chain in chains for word in chain), default=FILLER)
    torch.nn.init.orthogonal_(rows[:used])  # so that no word is taken for another
    table[EOS] = rows[EOS] + 2 * rows[FILLER]
    for chain in (chain for chains in _words(sizes).values() for chain in chains):
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
