"""The workbench: five jobs of every week and attribution against TransformerLens on a CPU; `patch` and gradients on a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.harness import Line, Lines, case, finish, random_tokens, seconds
from bench.subjects import bridge, random_decoder, seeded, smollm2_or_shape, where
from replaylens import Edit, Engine, ablate, attribution_patching, lens, patch, steer
from replaylens.engine.request.capture import PassTap

Cell = tuple[int, int]


class Hooked:
    """A bridge, and prompts of equal length as its tokens."""

    def __init__(self, bridge: Any, engine: Engine, prompts: Sequence[str], answers: Sequence[tuple[str, str]]) -> None:
        """answers  of each prompt: the tokens whose logit difference is measured"""
        self.bridge, self.layers = bridge, engine.config.num_layers
        self.tokens = torch.tensor([engine.tokens_of(text) for text in prompts])  # [prompts, positions]
        self.answers = torch.tensor([engine.token_ids_of(pair) for pair in answers])  # [prompts, 2]

    @torch.no_grad()
    def lens(self) -> Tensor:
        """The log-probability of the first answer at every layer and position of the first prompt: [layers + 1, positions]."""
        names = [f"blocks.{layer}.hook_in" for layer in range(self.layers)] + [f"blocks.{self.layers - 1}.hook_out"]
        _, cache = self.bridge.run_with_cache(self.tokens[:1], names_filter=names)
        stacked = torch.cat([cache[name] for name in names])
        found = self.bridge.unembed(self.bridge.ln_final(stacked)).log_softmax(-1)
        found.topk(5, -1)
        (found.exp() * found).sum(-1)
        (found[-1].exp() * (found[-1] - found)).sum(-1)
        return found[..., self.answers[0, 0]]

    @torch.no_grad()
    def patched(self, cells: Sequence[Cell]) -> list[float]:
        """The first prompt's residual stream put into the second, at each (layer, position)."""
        cache, made = self._streams(), list[float]()
        for layer, at in cells:
            hook = lambda value, hook, at=at: _set(value, (slice(None), at), cache[hook.name][:, at])  # noqa: E731
            made += self._differences(self.tokens[1:2], self.answers[:1], f"blocks.{layer}.hook_in", hook)
        return made

    @torch.no_grad()
    def patched_together(self, layers: Sequence[int]) -> list[list[float]]:
        """The same grid, all positions of a layer in one batch: for each layer, one value per position."""
        cache, count = self._streams(), self.tokens.shape[1]
        tokens, answers, each = self.tokens[1:2].expand(count, -1), self.answers[:1].expand(count, -1), torch.arange(count)
        hook = lambda value, hook: _set(value, (each, each), cache[hook.name][0])  # noqa: E731
        return [self._differences(tokens, answers, f"blocks.{layer}.hook_in", hook) for layer in layers]

    @torch.no_grad()
    def ablated(self, cells: Sequence[Cell], together: bool = False) -> list[list[float]]:
        """For each (layer, head): every prompt without that head, one prompt at a time or in one batch."""
        made, size = list[list[float]](), len(self.tokens) if together else 1
        for layer, head in cells:
            hook = lambda value, hook, head=head: _set(value, (slice(None), slice(None), head), 0.0)  # noqa: E731
            pieces = zip(self.tokens.split(size), self.answers.split(size), strict=True)
            made.append([x for t, a in pieces for x in self._differences(t, a, f"blocks.{layer}.attn.hook_z", hook)])
        return made

    @torch.no_grad()
    def steered(self, layer: int, vector: Tensor, strengths: Sequence[float], n: int) -> list[float]:
        """Continuations of the first prompt under each strength, and their log-probabilities without steering."""
        made = []
        for strength in strengths:  # the prompt's last token, then each token that is generated
            hook = lambda value, hook, by=strength: _set(value, (slice(None), -1), value[:, -1] + by * vector)  # noqa: E731
            with self.bridge.hooks(fwd_hooks=[(f"blocks.{layer}.hook_in", hook)]):
                out = self._generated(self.tokens[:1], n, do_sample=False)
            logprobs = self.bridge(out)[0, :-1].log_softmax(-1)
            made.append(float(logprobs[torch.arange(out.shape[1] - 1), out[0, 1:]][-n:].sum()))
        return made

    @torch.no_grad()
    def resampled(self, count: int, n: int) -> Tensor:
        """Several sampled continuations of the first prompt, in one batch: [count, tokens]."""
        return self._generated(self.tokens[:1].repeat(count, 1), n, do_sample=True)

    def _streams(self) -> Any:
        return self.bridge.run_with_cache(self.tokens[:1], names_filter=lambda name: name.endswith("hook_in"))[1]

    def _generated(self, tokens: Tensor, n: int, do_sample: bool) -> Tensor:
        options = dict(stop_at_eos=False, do_sample=do_sample, prepend_bos=False, return_type="tokens", verbose=False)
        made: Tensor = self.bridge.generate(tokens, n, **options)
        return made

    def _differences(self, tokens: Tensor, answers: Tensor, site: str, change: Callable[[Tensor, Any], Tensor]) -> list[float]:
        logits = self.bridge.run_with_hooks(tokens, fwd_hooks=[(site, change)])[:, -1]
        right, wrong = logits.gather(1, answers).unbind(1)
        return [float(x) for x in right - wrong]


def _set(value: Tensor, index: Any, new: Any) -> Tensor:
    value = value.clone()
    value[index] = new
    return value


NAMES = ("Mary", "John", "James", "Robert", "David", "Sarah", "Karen", "Daniel", "Mark", "Paul", "Kevin")
PAIRS = [(a, b) for a in NAMES for b in NAMES if a != b][:100]
TEXT = "When {0} and {1} went to the store, {2} gave a drink to"
LAYERS = (0, 7, 15, 22, 29)
"""layers of the sample, evenly spread: a cell costs us more the lower its layer"""
PATCHED = [(layer, position) for layer in LAYERS for position in (2, 9, 13)]
ABLATED = [(layer, head) for layer in LAYERS for head in (0, 6)]
BATCH = COUNT = 16
"""prompts per pass where TransformerLens computes several together; continuations of one prompt"""
STRENGTHS, STEERED, NEW = (-4.0, -2.0, 2.0, 4.0), 15, 12
"""of the steered layer, and how many tokens are generated"""
CONTRAST = (["I love this", "What a great day"], ["I hate this", "What an awful day"])


def prompts(count: int) -> list[str]:
    return [TEXT.format(a, b, b) for a, b in PAIRS[:count]]


def answers(count: int) -> list[tuple[str, str]]:
    return [(f" {a}", f" {b}") for a, b in PAIRS[:count]]


class Jobs:
    """The five jobs on both sides."""

    def __init__(self, count: int) -> None:
        """count  prompts of the grid of ablations"""
        self.engine, self.count = Engine.load("smollm2"), count
        theirs = bridge(smollm2_or_shape()[0])
        self.many, self.batch = (Hooked(theirs, self.engine, prompts(n), answers(n)) for n in (count, BATCH))
        first, second = PAIRS[0]
        self.pair = TEXT.format(first, second, second), TEXT.format(first, second, first)
        self.two = Hooked(theirs, self.engine, self.pair, answers(1) * 2)

    def lens(self) -> Lines:
        (token, _), *_ = answers(1)
        arms = {"ours": lambda: lens(self.engine, self.pair[0], token=token).logprob, "hooks": self.two.lens}
        found = yield Line("lens: 31 layers x 14 positions, top 5, entropy, KL, one token", arms)
        found.note(largest_difference=float((found.results["ours"] - found.results["hooks"]).abs().max()))

    def patch(self) -> Lines:
        arms = {
            "ours": lambda: patch(self.engine, *self.pair, metric=answers(1)[0]).raw["S"],
            "hooks": lambda: self.two.patched(PATCHED),
            "batched": lambda: self.two.patched_together(LAYERS),
        }
        positions = self.two.tokens.shape[1]
        per = {"ours": 31 * positions, "hooks": len(PATCHED), "batched": len(LAYERS) * positions}
        found = yield Line("patch: 31 layers x 14 positions", arms, per=per, aim=">= 8x")
        grid, values, rows = (found.results[arm] for arm in arms)
        apart = max(abs(float(grid[cell]) - value) for cell, value in zip(PATCHED, values, strict=True))
        found.note(largest_difference=max(apart, float((grid[list(LAYERS)] - torch.tensor(rows)).abs().max())))

    def steer(self) -> Lines:
        text, layer = self.pair[0], STEERED
        ours = lambda: steer(self.engine, CONTRAST, [text], layers=[layer], strengths=STRENGTHS, n=NEW)  # noqa: E731
        vector, strengths = ours().vectors[layer], (0.0, *STRENGTHS)
        arms = {"ours": ours, "hooks": lambda: self.two.steered(layer, vector, strengths, NEW)}
        found = yield Line(f"steer: {len(strengths)} strengths, {NEW} tokens each", arms, per=len(strengths))
        sums = [-NEW * float(torch.tensor(x).log()) for x in found.results["ours"].frame["perplexity"]]
        found.note(largest_difference=max(abs(a - b) for a, b in zip(sums, found.results["hooks"], strict=True)))

    def resample(self) -> Lines:
        def ours() -> None:
            root = self.engine.prompt(self.pair[0])
            for branch in (*self.engine.generate(root.fork(COUNT), NEW, sampling=seeded(COUNT)), root):
                branch.release()

        arms = {"ours": ours, "hooks": lambda: self.two.resampled(COUNT, NEW)}
        yield Line(f"resample: {COUNT} continuations of {NEW} tokens", arms, per=COUNT)

    def ablate(self) -> Lines:
        count, heads = self.count, self.engine.config.num_heads
        asked, pairs = prompts(count), answers(count)
        arms = {
            "ours": lambda: ablate(self.engine, asked, metric=pairs, heads=True).ablated,
            "hooks": lambda: self.many.ablated(ABLATED),
            "batched": lambda: self.batch.ablated(ABLATED[::2], together=True),
        }
        per = {"ours": count * 30 * heads, "hooks": count * len(ABLATED), "batched": BATCH * len(ABLATED[::2])}
        what = f"ablate: 100 prompts x 30 layers x 9 heads, measured on {count} prompts"
        found = yield Line(what, arms, per=per, aim=">= 8x")
        grid, values = found.results["ours"], found.results["hooks"]
        assert grid.numel() == per["ours"]
        sample = torch.stack([grid[layer * heads + head] for layer, head in ABLATED])
        found.note(largest_difference=float((sample - torch.tensor(values)).abs().max()))


@case(
    "workbench-cpu", ours="ours", baseline="hooks", others=("batched",), needs="smollm2", best=True, rounds=2, warm=0,
    threads=1, quick={"jobs": ("lens",), "count": 1},
)  # fmt: skip
def workbench_cpu(jobs: tuple[str, ...] = ("lens", "patch", "steer", "resample", "ablate"), count: int = 4) -> Lines:
    """Five jobs on SmolLM2-135M by the workbench and by TransformerLens, CPU milliseconds per cell of a grid or per
    continuation. A round of ours is the whole verb. Where TransformerLens computes one hooked pass per cell, it runs an evenly
    spread sample of the cells. Of the 100 prompts of the ablations both sides run `count`. `batched`: TransformerLens with 16
    prompts of one length in a batch, and in the grid of patches with all positions of a layer in one."""
    made = Jobs(count)
    for job in jobs:
        yield from getattr(made, job)()


# Attribution

TOKENS = (1000, 2000)
"""the metric is the difference of these tokens' logits"""


def attributed_by_hooks(lens: Any, names: set[str], clean: Tensor, corrupt: Tensor) -> dict[str, Tensor]:
    """Attribution by hooks: site -> [positions]."""
    kept, slopes = dict[str, Tensor](), dict[str, Tensor]()
    keep = lambda into: lambda value, hook: into.__setitem__(hook.name, value.detach())  # noqa: E731
    hooks = {"fwd_hooks": [(name, keep(kept)) for name in names], "bwd_hooks": [(name, keep(slopes)) for name in names]}
    with torch.no_grad():
        _, cache = lens.run_with_cache(clean, names_filter=lambda name: name in names)
    with lens.hooks(**hooks):
        logits = lens(corrupt)
        (logits[0, -1, TOKENS[0]] - logits[0, -1, TOKENS[1]]).backward()
    lens.zero_grad()
    return {name: (slopes[name] * (cache[name] - kept[name])).sum(-1)[0] for name in names}


def attributed_by_autograd(model: Any, clean: Tensor, corrupt: Tensor) -> None:
    """S of both prompts, and the gradients at S of the corrupt one, with frozen weights."""
    with torch.no_grad():
        model(clean, output_hidden_states=True, logits_to_keep=1)
    embedded = model.get_input_embeddings()(corrupt).requires_grad_()
    out = model(inputs_embeds=embedded, output_hidden_states=True, logits_to_keep=1)
    torch.autograd.grad(out.logits[0, -1, TOKENS[0]] - out.logits[0, -1, TOKENS[1]], out.hidden_states)


@case(
    "gradients-cpu", ours="attribution", baseline="transformer lens", others=("forward", "gradients", "hugging face"),
    aim=">= 1.5", unit="s", best=True, rounds=3, threads=1, quick={"lengths": (6,)},
)  # fmt: skip
def gradients_cpu(lengths: tuple[int, ...] = (14, 64, 256)) -> Lines:
    """Gradients and attribution at S, T and C of SmolLM2-135M (or a random model of its shape), CPU seconds on one thread.
    TransformerLens runs as in its tutorial on attribution patching: a cached forward pass of the clean prompt, then a forward
    and a backward pass of the corrupt one with hooks. Hugging Face is what autograd costs at best: frozen weights, logits of
    the last row alone."""
    model, _ = smollm2_or_shape()
    lens, engine = bridge(model).requires_grad_(True), Engine.load(model, check=False)
    names = set(engine.sites.select("STC")[0])
    for length in lengths:
        (clean,) = random_tokens(1, length, 40000, first=100)
        corrupt = [*clean[:3], clean[3] + 1, *clean[4:]]
        a, b = torch.tensor([clean]), torch.tensor([corrupt])
        branch = engine.prompt(corrupt)
        ours = attribution_patching(engine, clean, corrupt, TOKENS)
        theirs = attributed_by_hooks(lens, names, a, b)
        expected = torch.stack([theirs[site] for site in ours.sites])
        arms = {
            "attribution": lambda: attribution_patching(engine, clean, corrupt, TOKENS),
            "transformer lens": lambda: attributed_by_hooks(lens, names, a, b),
            "forward": lambda: engine.runner.whole(corrupt, (), PassTap(frozenset())),
            "gradients": lambda: branch.gradients(TOKENS, "STC"),
            "hugging face": lambda: attributed_by_autograd(model, a, b),
        }
        found = yield Line(f"{length} tokens: TransformerLens over ours", arms)
        found.note(difference=float((ours.estimate - expected).norm() / expected.norm()))
        for what, above, below, aim in (
            ("gradients at S, T, C, in forward passes", "gradients", "forward", ""),
            ("attribution of S, T, C, in forward passes", "attribution", "forward", "<= 3.5"),
            ("Hugging Face's autograd over ours", "hugging face", "attribution", ""),
        ):
            yield Line(f"{length} tokens: {what}", ratio=found.values[above] / found.values[below], aim=aim)
        branch.release()


# On a GPU

METRIC = (5, 7)
"""tokens whose logit difference is measured"""
CHECKED = 8
"""cells that are computed again, alone"""


def differing_prompts(engine: Engine, positions: int) -> tuple[list[int], list[int]]:
    """Two prompts that differ in one token, at a third of their length."""
    (clean,) = random_tokens(1, positions, engine.config.vocab_size, seed=1, first=8)
    at = positions // 3
    return clean, [*clean[:at], (clean[at] + 1) % engine.config.vocab_size, *clean[at + 1 :]]


def grid(engine: Engine, clean: list[int], corrupt: list[int]) -> Tensor:
    """[layers, positions]: the streams that enter the blocks, and the one that leaves the last."""
    engine.prefix.clear()  # otherwise a later round would find the prompts' KV
    return patch(engine, clean, corrupt, metric=METRIC).raw["S"]


def differing(engine: Engine, clean: list[int], corrupt: list[int], found: Tensor) -> int:
    """The number of checked cells whose bits differ from the same edit made alone."""
    names = engine.sites.per_layer("S")
    branch = engine.prompt(clean, sites=names)
    cells = torch.randperm(found.numel(), generator=torch.Generator().manual_seed(2))[:CHECKED].tolist()
    count = 0
    for layer, position in (divmod(cell, found.shape[1]) for cell in cells):
        edit = Edit(names[layer], "set", branch.activations[names[layer]][position], positions=position)
        logits = engine.logits(corrupt, edits=[edit])
        count += not torch.equal((logits[METRIC[0]] - logits[METRIC[1]]).float(), found[layer, position])
    branch.release()
    return count


@case(
    "workbench-gpu", ours="gradients", baseline="forward", others=("attribution",), needs="gpu", clock="wall", cost=True,
    rounds=3, quick={"tiny": True, "positions": 6, "rounds": 1},
)  # fmt: skip
def workbench_gpu(tiny: bool = False, positions: int = 64, rounds: int = 3, max_rows: int = 2112) -> Lines:
    """`patch` on a GPU: a grid of 32 layers x 64 positions of the Llama-3.1-8B shape, both prompts and the metric included. The
    best round counts; the first two compile. Some cells are computed again, alone, and must have the same bits. Then gradients
    and attribution at all S, T and C of the same prompt, in units of its forward pass."""
    engine = Engine(random_decoder(*where(tiny)), cache_tokens=64 * 256, max_rows=max_rows)  # a layer's cells have 2,080 rows
    clean, corrupt = differing_prompts(engine, positions)
    best = host = float("inf")
    for number in range(rounds + 2):
        (busy, (taken, found)) = seconds(lambda: seconds(lambda: grid(engine, clean, corrupt), "wall"), "cpu")
        print(f"round {number}: {taken:.2f} s, of which the host computes {busy:.2f} s", flush=True)
        if number >= 2:
            best, host = min(best, taken), min(host, busy)
    numbers: dict[str, Any] = dict(seconds=best, host_seconds=host, cells=found.numel(), cells_per_s=found.numel() / best)
    what = f"patch: {engine.config.num_layers} layers x {positions} positions, and the stream that leaves the last layer"
    yield Line(what, aim="< 3 s", met=best < 3, numbers={**numbers, "rows_per_pass": engine.loop.max_rows})
    apart = differing(engine, clean, corrupt, found)
    aim = f"{CHECKED} of {CHECKED}"
    yield Line("cells with the bits of the same edit made alone", aim=aim, met=not apart, numbers={"apart": apart})
    branch = engine.prompt(corrupt)
    arms: dict[str, Callable[[], Any]] = {
        "gradients": lambda: branch.gradients(METRIC, "STC"),
        "forward": lambda: engine.runner.whole(corrupt, (), PassTap(frozenset())),
        "attribution": lambda: attribution_patching(engine, clean, corrupt, METRIC),
    }
    passes = f"{positions} tokens, S, T, C, in forward passes"
    line = yield Line(f"gradients: {passes}", arms, rounds=rounds)
    line.note(certified=branch.gradients(METRIC, "STC").certified)
    branch.release()
    finish()
    yield Line(f"attribution: {passes}", ratio=line.values["attribution"] / line.values["forward"])
