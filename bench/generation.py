"""Generation, prompts and branches on a CPU against Hugging Face: time, memory, threads, errors; latent and plain attention.

SmolLM2-135M (a random model of its shape where it is not fetched), float32. Rounds differ in their text and in what the engine
did before, because the planner and the drafts depend on both.
"""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from bench.harness import Line, Lines, case, in_process, memory_mb, random_tokens, seconds
from bench.subjects import ENDLESS, released, seeded, smollm2_or_shape
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import Latent, ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.serving.branch import Branch
from replaylens.kernels import threads as kernel_threads
from replaylens.weights import loading

OURS, HUGGING_FACE, DIRECT, DRAFTED = "ours", "hugging face", "direct", "drafted"
TEXTS = (
    "The history of the town begins with a small settlement on the banks of the river, where traders from the north met "
    "farmers of the valley twice a year. Nobody knows who built the first bridge, but the oldest map shows it already.",
    "def merge(left, right):\n    out, i, j = [], 0, 0\n    while i < len(left) and j < len(right):\n        if left[i] <= "
    "right[j]:\n            out.append(left[i])\n            i += 1\n        else:\n            out.append(right[j])\n",
    "one, two, three, four, five, six, seven, eight, one, two, three, four, five, six, seven, eight, one, two, three, four, "
    "five, six, seven, eight, one, two, three, four, five, six, seven, eight, one, two, three, four, five, six, seven,",
)
"""prose, code, and a text that repeats itself, whose drafts cost nothing"""


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    return random_tokens(count, length, 40000, seed, first=100)


@cache
def smollm2_engine() -> tuple[Engine, Any]:
    """SmolLM2-135M, or a random model of its shape, in the engine and in Hugging Face."""
    model, name = smollm2_or_shape()
    print(f"{name}, float32, {torch.get_num_threads()} threads")
    return (Engine.load("smollm2", cache_tokens=8192) if "random" not in name else Engine(loading.load(model))), model


def starts(engine: Engine, text: str, count: int, length: int) -> list[list[int]]:
    """`count` prompts of `length` tokens, each from another place of the text."""
    ids = engine.tokens_of(text) if engine.text.tokenizer is not None else random_tokens(1, 64, 40000, len(text))[0]
    return [(ids[first:] + ids[:first])[:length] for first in range(count)]


def written(model: Any, paths: list[list[int]], n: int, states: bool = False) -> list[list[int]]:
    """The new tokens of Hugging Face's greedy `generate`."""
    x = torch.tensor(paths)
    more = dict(min_new_tokens=n, max_new_tokens=n, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    with torch.inference_mode():
        made = model.generate(x, **more, output_hidden_states=states, return_dict_in_generate=True)
    found: list[list[int]] = made.sequences[:, x.shape[1] :].tolist()
    return found


def histories(engine: Engine) -> list[Callable[[], None]]:
    """What an engine may have done before: nothing but the last run, drafts of one request, or one step of many requests."""

    def run(count: int, n: int, **how: Any) -> None:
        released(engine, engine.generate(engine.prompts(prompts(count, 8, seed=count)), n, sampling=ENDLESS, **how))

    return [lambda: None, lambda: run(1, 16, window=8), lambda: run(24, 2, window=1)]


# ---- generation ------------------------------------------------------------------------------------------------------


class Rounds:
    """Every round of ours has the next text and the next history; the other arms have the text of their round."""

    def __init__(self, engine: Engine, count: int, n: int, sites: str | None = None) -> None:
        self.engine, self.count, self.n, self.sites = engine, count, n, sites
        self.pasts, self.turns = histories(engine), dict[str, int]()
        self.paths: list[list[int]] = []
        self.tokens = dict[tuple[int, str], list[list[int]]]()

    def before(self, arm: str) -> None:
        turn = self.turns[arm] = self.turns.get(arm, -1) + 1
        self.paths = starts(self.engine, TEXTS[turn % len(TEXTS)], self.count, 16)
        if arm == OURS:
            self.pasts[(turn + turn // len(TEXTS)) % len(self.pasts)]()

    def ours(self, window: int | None = None) -> list[Branch]:
        branches = self.engine.prompts(self.paths, sites=self.sites)
        return self.engine.generate(branches, self.n, sampling=ENDLESS, window=window)

    def after(self, arm: str, made: Any) -> None:
        if arm != HUGGING_FACE:
            released(self.engine, made)
            made = [branch.generated for branch in made]
        self.tokens[self.turns[arm], arm] = made

    def same(self, arm: str) -> str:
        """How many continuations are those of the other arm."""
        pairs = [(mine, self.tokens[turn, arm]) for (turn, name), mine in self.tokens.items() if name == OURS]
        return f"{sum(a == b for x, y in pairs for a, b in zip(x, y, strict=True))}/{sum(len(x) for x, _ in pairs)}"


@case(
    "generate-cpu.smollm2", ours=OURS, baseline=HUGGING_FACE, unit="s", rounds=3, warm=0, threads=1,
    quick={"requests": ((1, 3, ">= 1.1"),)},
)  # fmt: skip
def generate_smollm2(requests: tuple[tuple[int, int, str], ...] = ((1, 64, ">= 1.1"), (8, 32, ">= 1.3"))) -> Lines:
    """Greedy generation after 16-token prompts, prefill included, without capture and with S of all layers, against Hugging
    Face `generate` (with `output_hidden_states`): one thread, CPU seconds. The rounds have three texts and three histories in
    turn."""
    engine, model = smollm2_engine()
    for count, n, aim in requests:
        for sites in (None, "S"):
            rounds = Rounds(engine, count, n, sites)
            arms = {OURS: rounds.ours, HUGGING_FACE: lambda r=rounds: written(model, r.paths, r.n, r.sites is not None)}
            what = f"{count} prompt{'s' * (count > 1)}, {n} new tokens" + ", S captured" * (sites is not None)
            found = yield Line(what, arms, aim=aim, before=rounds.before, after=rounds.after)
            found.note(same_continuations=rounds.same(HUGGING_FACE))


@case(
    "generate-cpu.planner", ours=OURS, baseline=DIRECT, others=(DRAFTED,), aim="<= 1.1", unit="s", rounds=3, warm=0, threads=1,
    cost=True, quick={"requests": ((1, 3),)},
)  # fmt: skip
def planner(requests: tuple[tuple[int, int], ...] = ((1, 32), (8, 8))) -> Lines:
    """The planner's choice between direct decoding and drafts, against the better of the two in each round: three texts after
    three histories, one thread, CPU seconds, prefill included. The ratio is that of all rounds together."""
    engine, _ = smollm2_engine()
    for count, n in requests:
        rounds = Rounds(engine, count, n)
        arms = {OURS: rounds.ours, DIRECT: lambda r=rounds: r.ours(1), DRAFTED: lambda r=rounds: r.ours(8)}
        what = f"{count} prompt{'s' * (count > 1)}, {n} new tokens: chosen over the better of direct and drafted"
        found = yield Line(what, arms, before=rounds.before, after=rounds.after)
        every = len(rounds.tokens) // 3 * count
        assert rounds.same(DIRECT) == rounds.same(DRAFTED) == f"{every}/{every}"
        times = found.row["times_s"]
        better = [min(pair) for pair in zip(times[DIRECT], times[DRAFTED], strict=True)]
        found.judge(sum(times[OURS]) / sum(better))
        found.note(by_round=[a / b for a, b in zip(times[OURS], better, strict=True)])


@case(
    "generate-cpu.prompts", ours=OURS, baseline=HUGGING_FACE, aim=">= 1.1", unit="s", best=True, rounds=3, threads=1,
    quick={"sizes": ((2, 8),)},
)  # fmt: skip
def prompt_passes(sizes: tuple[tuple[int, int], ...] = ((16, 64),)) -> Lines:
    """Prompts with S, T and C of all layers captured against Hugging Face's forward with `output_hidden_states` (S alone,
    logits of the last token), and both without capture: one thread, CPU seconds."""
    engine, model = smollm2_engine()
    for count, length in sizes:
        some = prompts(count, length)
        x = torch.tensor(some)
        for sites in ("STC", None):
            theirs = torch.inference_mode()(lambda s=sites: model(x, logits_to_keep=1, output_hidden_states=s is not None))
            arms = {OURS: lambda s=sites: released(engine, engine.prompts(some, sites=s)), HUGGING_FACE: theirs}
            yield Line(f"prompts of {count} x {length} tokens" + (", S, T, C captured" if sites else ""), arms)


# ---- threads ---------------------------------------------------------------------------------------------------------


def our_times(threads: int, n: int, length: int, branches: int) -> dict[str, float]:
    """Wall seconds of each work, the best of three after two, in a process of its own. Nothing is drafted."""
    torch.set_num_threads(threads)
    engine, _ = smollm2_engine()

    def some(count: int, length: int, sites: str | None = None) -> list[Branch]:
        engine.prefix.clear()
        return engine.prompts(prompts(count, length), sites=sites)

    def forked() -> None:
        (root,) = some(1, 4 * length)
        released(engine, [*engine.generate(root.fork(branches), n // 4, sampling=ENDLESS, window=1), root])

    generate = lambda count: released(engine, engine.generate(some(count, 16), n, sampling=ENDLESS, window=1))  # noqa: E731
    return _best(
        threads, n, length, branches, generate, lambda: released(engine, some(16, length, "STC")),
        lambda: released(engine, some(1, 16 * length)), forked,
    )  # fmt: skip


@torch.inference_mode()
def their_times(threads: int, n: int, length: int, branches: int) -> dict[str, float]:
    """S, T and C are kept by hooks on the modules, as references."""
    torch.set_num_threads(threads)
    model, _ = smollm2_or_shape()
    seen: list[Any] = []

    def captured() -> None:
        parts = [part for block in model.model.layers for part in (block, block.self_attn, block.mlp)]
        handles = [part.register_forward_hook(lambda module, given, out: seen.append(out)) for part in parts]
        model(torch.tensor(prompts(16, length)), logits_to_keep=1)
        seen.clear()
        for handle in handles:
            handle.remove()

    def forked() -> None:
        cache = model(torch.tensor(prompts(1, 4 * length)), use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(branches)
        x = torch.full((branches, 1), 7)
        for _ in range(n // 4):
            x = model(x, past_key_values=cache).logits[:, -1].argmax(-1, keepdim=True)

    generate = lambda count: written(model, prompts(count, 16), n)  # noqa: E731
    return _best(
        threads, n, length, branches, generate, captured,
        lambda: model(torch.tensor(prompts(1, 16 * length)), logits_to_keep=1), forked,
    )  # fmt: skip


def _best(
    threads: int, n: int, length: int, branches: int, generate: Callable[[int], Any], *others: Callable[[], Any]
) -> dict[str, float]:
    names = (
        *(f"{count} x {n} tokens" for count in (1, 8)), f"prompts of 16 x {length} with S, T, C",
        f"a prompt of {16 * length}", f"{branches} branches x {n // 4} off {4 * length}",
    )  # fmt: skip
    works = (partial(generate, 1), partial(generate, 8), *others)
    found = {}
    for name, work in zip(names, works, strict=True):
        found[f"{name}, {threads} thread{'s' * (threads > 1)}"] = min([seconds(work, "wall")[0] for _ in range(5)][2:])
    return found


THREADS_AIMS = (">= 1.5", ">= 1.5", ">= 1.0", ">= 1.0", ">= 2.0")


@case(
    "threads-cpu", ours=OURS, baseline=HUGGING_FACE, clock="wall", unit="s", best=True,
    quick={"counts": (1,), "n": 4, "length": 2, "branches": 2},
)  # fmt: skip
def threads(counts: tuple[int, ...] = (1, 2, 4, 8, 16), n: int = 32, length: int = 64, branches: int = 64) -> Lines:
    """Both on 1 to 16 threads of one machine, as far as it has them: wall seconds of processes in turns, without drafts."""
    for count in counts:
        if count > kernel_threads.processors():
            continue
        ours, theirs = (in_process(work, count, n, length, branches) for work in (our_times, their_times))
        for (what, mine), other, aim in zip(ours.items(), theirs.values(), THREADS_AIMS, strict=True):
            yield Line(what, times={OURS: [mine], HUGGING_FACE: [other]}, aim=aim)


# ---- errors ----------------------------------------------------------------------------------------------------------


@case("generate-cpu.errors", aim="", threads=1, quick={"count": 1, "length": 4})
def errors(count: int = 3, length: int = 64) -> Lines:
    """Our error against that of Hugging Face in float32, both against the same model in float64: logits of the last token and S
    at all layers, largest and root mean square, over texts. Ratio: ours over theirs."""
    engine, model = smollm2_engine()
    paths, exact = [starts(engine, text, 1, length)[0] for text in TEXTS[:count]], _in_float64(model)
    names = engine.sites.per_layer("S")
    found: dict[str, list[tuple[Tensor, Tensor]]] = {"S at all layers": [], "logits": []}
    for path in paths:
        with engine.prompt(path, sites="S") as branch:
            ours = torch.stack([branch.activations[name] for name in names]), engine.logits(path)
        engine.prefix.clear()
        for what, mine, low, high in zip(found, ours, _states(model, path), _states(exact, path), strict=True):
            found[what].append(((mine.double() - high).flatten(), (low.double() - high).flatten()))
    for what, pairs in found.items():
        mine, theirs = (torch.cat(each) for each in zip(*pairs, strict=True))
        for named, size in (("largest", lambda x: x.abs().max()), ("root mean square", lambda x: x.square().mean().sqrt())):
            numbers = {"ours": float(size(mine)), "hugging_face": float(size(theirs))}
            ratio = numbers["ours"] / numbers["hugging_face"]
            yield Line(f"{what}, {named} error", ratio=ratio, aim="<= 1.0", numbers=numbers)


def _in_float64(model: Any) -> Any:
    """A copy that computes in float64 throughout. The library's own norms and rotary angles stay in float32 at any dtype."""
    found = copy.deepcopy(model).double()
    theta, width = model.config.rope_parameters["rope_theta"], model.config.hidden_size // model.config.num_attention_heads

    def norm(module: Any, x: Tensor) -> Tensor:
        scaled: Tensor = module.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + module.variance_epsilon))
        return scaled

    def rotary(x: Tensor, position_ids: Tensor, **_: Any) -> tuple[Tensor, Tensor]:
        steps = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.cat([position_ids[..., None].double() * steps] * 2, dim=-1)
        return angles.cos(), angles.sin()

    for module in found.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(norm, module)
    found.model.rotary_emb.forward = rotary
    return found


@torch.inference_mode()
def _states(model: Any, path: list[int]) -> tuple[Tensor, Tensor]:
    """(S at all layers, logits of the last token). The last hidden state of Hugging Face is normed; the hook sees it before."""
    last: list[Tensor] = []
    handle = model.model.layers[-1].register_forward_hook(
        lambda m, i, out: last.append(out[0] if isinstance(out, tuple) else out)
    )
    out = model(torch.tensor([path]), output_hidden_states=True)
    handle.remove()
    return torch.stack([*(x[0] for x in out.hidden_states[:-1]), last[0].reshape(len(path), -1)]), out.logits[0, -1]


# ---- branches --------------------------------------------------------------------------------------------------------


def our_branches(prefix: int, count: int, n: int) -> dict[str, float]:
    """CPU seconds and the peak memory in MB, in a process of its own."""
    engine = Engine.load("smollm2", cache_tokens=prefix + count * (n + 32))

    def work() -> None:
        root = engine.prompt(prompts(1, prefix)[0])
        released(engine, [*engine.generate(root.fork(count), n, sampling=seeded(count)), root])

    return {"seconds": seconds(work, "cpu")[0], "peak_mb": memory_mb("VmHWM")}


def their_branches(prefix: int, count: int, n: int) -> dict[str, float]:
    """The prompt's cache, computed once and repeated for all branches, then `generate` with sampling."""
    model, _ = smollm2_or_shape()
    x = torch.tensor(prompts(1, prefix))

    @torch.inference_mode()
    def work() -> None:
        cache = model(x[:, :-1], use_cache=True, logits_to_keep=1).past_key_values
        cache.batch_repeat_interleave(count)
        ids = x.expand(count, -1)
        more = dict(min_new_tokens=n, max_new_tokens=n, do_sample=True, pad_token_id=0, attention_mask=torch.ones_like(ids))
        assert model.generate(ids, past_key_values=cache, **more).shape == (count, prefix + n)

    return {"seconds": seconds(work, "cpu")[0], "peak_mb": memory_mb("VmHWM")}


@case(
    "branches-cpu", ours=OURS, baseline=HUGGING_FACE, aim=">= 1.5", unit="s", best=True, needs="smollm2",
    quick={"prefix": 8, "branches": 2, "n": 2, "turns": 1},
)  # fmt: skip
def branches(prefix: int = 256, branches: int = 256, n: int = 8, turns: int = 2) -> Lines:
    """Branches of one prompt at temperature 1, each with its own seed, prompt included, against Hugging Face, which repeats the
    prompt's cache for all of them. CPU seconds and peak memory of processes of one thread, in turns."""
    found = {OURS: list[dict[str, float]](), HUGGING_FACE: list[dict[str, float]]()}
    for _ in range(turns):
        for arm, work in ((OURS, our_branches), (HUGGING_FACE, their_branches)):
            found[arm].append(in_process(work, prefix, branches, n))
    times = {arm: [each["seconds"] for each in own] for arm, own in found.items()}
    ours, theirs = (max(each["peak_mb"] for each in found[arm]) for arm in (OURS, HUGGING_FACE))
    numbers = {"ours_peak_mb": ours, "hugging_face_peak_mb": theirs}
    yield Line(f"{branches} branches of {n} tokens off {prefix}", times=times, numbers=numbers)
    yield Line("peak memory, ours over theirs", ratio=ours / theirs, aim="<= 0.4")


@case("latent-cpu", ours="latent", baseline="plain", cost=True, best=True, threads=1, quick={"lengths": ((64, 1),)})
def latent_cpu(lengths: tuple[tuple[int, int], ...] = ((512, 3), (2048, 1)), new: int = 8) -> Lines:
    """Latent attention with the sizes of DeepSeek-V2-Lite against plain attention with as many heads of that width. Two layers
    of random weights with a small MLP and vocabulary, so that attention counts; float32, one thread, CPU time. Ratio: latent
    over plain; below 1, latent is faster."""
    plain = ModelConfig(2, 2048, 16, 16, 192, 256, vocab_size=256, max_positions=4096, rotary_dim=64)
    shapes = {"latent": replace(plain, latent=Latent(rank=512, d_value=128)), "plain": plain}
    models = {name: Decoder(shape).initialize(0).requires_grad_(False) for name, shape in shapes.items()}
    engines = {name: Engine(model, cache_tokens=3072) for name, model in models.items()}
    made: list[Branch] = []
    for length, rounds in lengths:
        path = [(i * i) % plain.vocab_size for i in range(length)]

        def after(arm: str, branch: Branch) -> None:
            made.clear()
            released(engines[arm], [branch])

        prompt = {name: lambda engine=engine: engine.prompt(path) for name, engine in engines.items()}
        yield Line(f"prefill of {length} tokens", dict(prompt), after=after, rounds=rounds)
        decode = dict.fromkeys(engines, lambda: made[0].generate(new, window=1))
        ready = lambda arm: made.append(engines[arm].prompt(path))  # noqa: E731
        yield Line(f"decoding a token after {length}", decode, per=new, before=ready, after=after, rounds=rounds)
