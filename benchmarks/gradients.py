"""Gradients and attribution patching on one CPU thread: ours, TransformerLens with hooks, and autograd in Hugging Face's
model."""

from typing import Any

import torch

from benchmarks.generation import prompts
from benchmarks.harness import Line, Lines, case
from benchmarks.subjects import bridge, smollm2_or_shape
from replaylens import Engine, attribution_patching
from replaylens.engine.request.capture import PassTap

TOKENS = (1000, 2000)
"""the metric is the difference of these tokens' logits"""


def transformer_lens(lens: Any, names: set[str], clean: torch.Tensor, corrupt: torch.Tensor) -> dict[str, torch.Tensor]:
    """Attribution by hooks: site -> [positions]."""
    kept: dict[str, torch.Tensor] = {}
    slopes: dict[str, torch.Tensor] = {}

    def keep(value: torch.Tensor, hook: Any) -> None:
        kept[hook.name] = value.detach()

    def keep_slope(value: torch.Tensor, hook: Any) -> None:
        slopes[hook.name] = value.detach()

    with torch.no_grad():
        _, cache = lens.run_with_cache(clean, names_filter=lambda name: name in names)
    with lens.hooks(fwd_hooks=[(name, keep) for name in names], bwd_hooks=[(name, keep_slope) for name in names]):
        logits = lens(corrupt)
        (logits[0, -1, TOKENS[0]] - logits[0, -1, TOKENS[1]]).backward()
    lens.zero_grad()
    return {name: (slopes[name] * (cache[name] - kept[name])).sum(-1)[0] for name in names}


def hugging_face(model: Any, clean: torch.Tensor, corrupt: torch.Tensor) -> None:
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
    TransformerLens runs as its tutorial on attribution patching does: a cached forward pass of the clean prompt, then a forward
    and a backward pass of the corrupt one, with hooks that keep activations and gradients. The arm of Hugging Face is what
    autograd costs at best: weights are frozen, and only the last row has logits."""
    model, _ = smollm2_or_shape()
    lens, engine = bridge(model).requires_grad_(True), Engine.load(model, check=False)
    names = set(engine.sites.select("STC")[0])
    for length in lengths:
        (clean,) = prompts(1, length)
        corrupt = [*clean[:3], clean[3] + 1, *clean[4:]]
        a, b = torch.tensor([clean]), torch.tensor([corrupt])
        branch = engine.prompt(corrupt)
        ours = attribution_patching(engine, clean, corrupt, TOKENS)
        theirs = transformer_lens(lens, names, a, b)
        expected = torch.stack([theirs[site] for site in ours.sites])
        arms = {
            "attribution": lambda: attribution_patching(engine, clean, corrupt, TOKENS),
            "transformer lens": lambda: transformer_lens(lens, names, a, b),
            "forward": lambda: engine.runner.whole(corrupt, (), PassTap(frozenset())),
            "gradients": lambda: branch.gradients(TOKENS, "STC"),
            "hugging face": lambda: hugging_face(model, a, b),
        }
        found = yield Line(f"{length} tokens: TransformerLens over ours", arms)
        found.note(difference=float((ours.estimate - expected).norm() / expected.norm()))
        took = found.values
        yield Line(f"{length} tokens: gradients at S, T, C, in forward passes", ratio=took["gradients"] / took["forward"])
        passes = took["attribution"] / took["forward"]
        yield Line(f"{length} tokens: attribution of S, T, C, in forward passes", ratio=passes, aim="<= 3.5")
        autograd = took["hugging face"] / took["attribution"]
        yield Line(f"{length} tokens: Hugging Face's autograd over ours", ratio=autograd)
        branch.release()
