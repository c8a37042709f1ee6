"""Time from a prompt to its answer: a model that thinks against the same backbone that writes a chain of thought.

    PYTHONPATH=src:. python -m benchmarks.thinking_latency [--models FOLDER] [--device cpu --tiny]

Through the public API, one request at a time, deterministic, the arms in turns: `prompt` and `generate` up to the answer. Both
arms say the same words: thoughts beside the prompt, or written after it.

trained  the models of `benchmarks.thinking_texts`, with their share of right answers
made     larger shapes. Time does not depend on the values of weights, so these are made by hand: attention and MLP write
         nothing, and T's tables continue a trigger at the end of a chunk to a thought of the wanted length. So the model thinks
         at the chunks, and as many tokens, as the gold thoughts of the task's texts; the chain of thought has the same tokens
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.table import Table
from benchmarks.thinking_arms import TEXT_TASKS, TextTask
from replaylens.engine.engine import Engine, ThinkingEngine
from replaylens.engine.model import loading
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.thinking.core import ThinkingBranch
from replaylens.engine.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.engine.thinking.prefill import GUESSES, Guess
from replaylens.engine.training.thinking import ChunkedText, chunked
from replaylens.engine.zoo import coin as zoo
from replaylens.tasks import WordTokenizer

PUBLISHED = "2.66 (GSM8K)"
ENDLESS = Sampling(ignore_eos=True)
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
WARM = 6
"""rounds before the clock counts: kernels are compiled, and passes of a shape that recurs become graphs"""
VARIANTS = 8
"""thoughts of one length, so that a text does not think the same again and again: C is not computed twice for a thought"""
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
    """tokens that a model that thinks writes"""
    right: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """the completions (thinking, chain of thought) up to the answer; None: any"""


# ---- the clock --------------------------------------------------------------------------------------------------------


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


def timed(engine: Engine, load: Load, tokens: int, options: dict[str, Any]) -> tuple[float, list[int], int]:
    """Seconds of one answer, its tokens, and the rounds of its prefill. Leaves no pages behind."""
    if isinstance(engine, ThinkingEngine):
        engine.prefiller.blocks.forget()  # texts repeat here, but not in use
    begin = time.perf_counter()
    branch = engine.prompt(load.prompt, **options)
    branch.generate(tokens, sampling=ENDLESS)
    seconds = time.perf_counter() - begin
    rounds = len(branch.thoughts.rounds) if isinstance(branch, ThinkingBranch) else 1
    said = list(branch.generated)
    branch.release()
    engine.prefix.clear()
    return seconds, said, rounds


def compare(
    table: Table,
    what: str,
    thinker: ThinkingEngine,
    writer: Engine,
    loads: Sequence[Load],
    repeats: int,
    guesses: Sequence[Guess] = GUESSES,
) -> None:
    """One line per way of guessing thoughts: the median over repeats of the mean over prompts."""
    arms: dict[Guess | None, list[float]] = {guess: [] for guess in (*guesses, None)}
    right: dict[Guess | None, float] = {}
    rounds: dict[Guess | None, float] = {}
    parts, spent = Parts(thinker), {guess: dict[str, list[float]]() for guess in guesses}
    for repeat in range(-WARM, repeats):
        for guess, times in arms.items():
            engine: Engine = writer if guess is None else thinker
            options: dict[str, Any] = {} if guess is None else {"guess": guess}
            found = [timed(engine, load, load.written if guess is None else load.said, options) for load in loads]
            if repeat >= 0:
                times.append(mean(seconds for seconds, *_ in found))
            for part, seconds in parts.reset().items():
                if guess is not None and repeat >= 0:
                    spent[guess].setdefault(part, []).append(1e3 * seconds / len(loads))
            rounds[guess] = mean(rounds for *_, rounds in found)
            right[guess] = mean(_right(load, said, guess is None) for load, (_, said, _) in zip(loads, found, strict=True))
    theirs = median(arms[None])
    for guess in guesses:
        ours = median(arms[guess])
        table.add(
            f"{what}: {guess} guess against a chain of thought", ratio=theirs / ours, aim=PUBLISHED, ms=1e3 * ours,
            cot_ms=1e3 * theirs, rounds=rounds[guess], chunks=mean(len(load.thoughts) for load in loads),
            thoughts=mean(sum(len(t) > 1 for t in load.thoughts) for load in loads),
            prompt_tokens=mean(len(load.prompt) for load in loads), written=mean(load.written for load in loads),
            parts_ms={part: median(each) for part, each in spent[guess].items()}, right=right[guess], cot_right=right[None],
            all_ms=[1e3 * x for x in arms[guess]],
            all_cot_ms=[1e3 * x for x in arms[None]],
        )  # fmt: skip


def _right(load: Load, said: list[int], written: bool) -> float:
    return 1.0 if load.right is None else float(tuple(said) == load.right[written])


# ---- trained models ---------------------------------------------------------------------------------------------------


def trained(table: Table, models: Path, device: str, count: int, repeats: int) -> None:
    """The models in `models`: model-TASK-thinking and model-TASK-cot."""
    for name, task in TEXT_TASKS.items():
        folders = [models / f"model-{name}-{method}" for method in ("thinking", "cot")]
        if not all(folder.exists() for folder in folders):
            print(f"no models of {name}", flush=True)
            continue
        thinker, writer = (Engine.load(folder, device=device) for folder in folders)
        assert isinstance(thinker, ThinkingEngine)
        for steps in (2, task.longest):
            loads = [_own(*texts) for texts in _texts(task, thinker.thinking, steps, count)]
            compare(table, f"trained, {name}, {steps} steps", thinker, writer, loads, repeats)


def _texts(task: TextTask, config: ThinkingConfig, steps: int, count: int) -> list[tuple[ChunkedText, ChunkedText]]:
    """Held-out texts for both arms: thinking, chain of thought."""
    part, words = task.table.part, WordTokenizer(task.vocabulary)
    examples = zoo.held_out(part, steps, count)
    return [(chunked(e, words, config, "thinking"), chunked(e, words, config, "cot")) for e in examples]


def _own(thinks: ChunkedText, writes: ChunkedText) -> Load:
    right = thinks.completion[: thinks.answer], writes.completion[: writes.answer]
    return Load(list(thinks.prompt), thinks.thoughts, writes.answer, thinks.answer, right)


# ---- larger shapes ----------------------------------------------------------------------------------------------------


def made(table: Table, shapes: dict[str, ModelConfig], device: str, count: int, repeats: int) -> None:
    """Shapes with weights made by hand."""
    for shape, config in shapes.items():
        for name, chunk, steps in LOADS[shape]:
            _made(table, shape, config, name, chunk, steps, device, count, repeats)


def _made(
    table: Table,
    shape: str,
    config: ModelConfig,
    name: str,
    chunk: int,
    numbers: Sequence[int],
    device: str,
    count: int,
    repeats: int,
) -> None:
    begin, task = time.time(), TEXT_TASKS[name]
    thinks = ThinkingConfig.for_backbone(config, chunk, EOS, PAD, max_thought=task.max_thought(chunk))
    texts = {steps: _texts(task, thinks, steps, count) for steps in numbers}
    sizes = sorted({len(t) - 1 for pairs in texts.values() for text, _ in pairs for t in text.thoughts if len(t) > 1})
    model = by_hand(config, thinks, sizes, device)
    thinker, writer = ThinkingEngine(model), Engine(model.backbone)
    print(f"{shape}, chunks of {chunk}: made in {time.time() - begin:.1f} s", flush=True)
    for steps, pairs in texts.items():
        loads = [triggered(thinks, sizes, *pair) for pair in pairs]
        first = _thoughts(thinker, loads[0])
        found = [len(tokens) for tokens, _ in first]
        assert found == [len(thought) for thought in loads[0].thoughts], "the model made by hand thinks otherwise"
        compare(
            table, f"{shape}, {name}, {steps} steps, chunks of {chunk}", thinker, writer, loads, repeats, ("empty", "drafted")
        )
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
    """A model that thinks `size` words after a chunk that ends with the trigger of that size, and else nothing."""
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


# ---- the job ----------------------------------------------------------------------------------------------------------


def measure(models: Path | None, device: str, out: Path, tiny: bool = False) -> None:
    """Time all arms and write `out` after each line."""
    out.parent.mkdir(parents=True, exist_ok=True)
    on = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    table = Table(out.stem, f"milliseconds to the answer, batch 1, deterministic; {on}", out=out)
    count, repeats = (2, 1) if tiny else (4, 5)
    sections: list[tuple[str, Callable[[], None]]] = []
    if models is not None:
        sections.append(("trained", lambda: trained(table, models, device, count, repeats)))
    shapes = TINY_SHAPES if tiny else SHAPES
    sections.append(("made", lambda: made(table, shapes, device, count, repeats)))
    for name, section in sections:
        begin = time.time()
        section()
        print(f"{name}: {time.time() - begin:.0f} s", flush=True)


def main() -> None:
    """Parse and measure."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", type=Path, help="folder with model-TASK-thinking and model-TASK-cot")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/thinking-latency-gpu.json"))
    parser.add_argument("--tiny", action="store_true", help="small shapes, as a smoke test")
    options = parser.parse_args()
    measure(options.models, options.device, options.out, options.tiny)


if __name__ == "__main__":
    main()
