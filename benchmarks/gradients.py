"""Gradients and attribution patching on one CPU thread: ours, TransformerLens with hooks, and autograd in Hugging Face's model.

    python -m benchmarks.gradients          # or: 14 64, lengths of prompts

Uses SmolLM2-135M if it is fetched, and a random model of the same shape otherwise. Arms take turns; the best CPU seconds count.
TransformerLens runs as its tutorial on attribution patching does: a cached forward pass of the clean prompt, then a forward and
a backward pass of the corrupt one, with hooks that keep activations and gradients of S, T and C. The arm of Hugging Face is
what autograd costs at best: weights are frozen, and only the last row has logits.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.dump import bridge
from benchmarks.engine import prompts, subject
from benchmarks.table import Table
from replaylens import Engine, attribution_patching
from replaylens.engine.request.capture import PassTap

TOKENS = (1000, 2000)
"""the metric is the difference of these tokens' logits"""


def best(works: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """CPU seconds of the fastest run of each, in turns, after a warm-up."""
    least = dict.fromkeys(works, float("inf"))
    for turn in range(rounds + 1):
        for name, work in works.items():
            begin = time.process_time()
            work()
            if turn:
                least[name] = min(least[name], time.process_time() - begin)
    return least


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


def main(lengths: list[int], rounds: int) -> None:
    torch.set_num_threads(1)
    model, about = subject()
    lens, engine = bridge(model), Engine.load(model, check=False)
    model.requires_grad_(False)
    names = set(engine.sites.select("STC")[0])
    table = Table("gradients-cpu", f"{about}. One thread, best CPU seconds of {rounds} rounds in turns")
    for length in lengths:
        (clean,) = prompts(1, length)
        corrupt = [*clean[:3], clean[3] + 1, *clean[4:]]
        a, b = torch.tensor([clean]), torch.tensor([corrupt])
        branch = engine.prompt(corrupt)
        ours = attribution_patching(engine, clean, corrupt, TOKENS)
        theirs = transformer_lens(lens, names, a, b)
        expected = torch.stack([theirs[site] for site in ours.sites])
        error = float((ours.estimate - expected).norm() / expected.norm())
        took = best(
            {
                "forward": lambda c=corrupt: engine.runner.whole(c, (), PassTap(frozenset())),
                "gradients": lambda branch=branch: branch.gradients(TOKENS, "STC"),
                "attribution": lambda c=clean, d=corrupt: attribution_patching(engine, c, d, TOKENS),
                "transformer_lens": lambda a=a, b=b: transformer_lens(lens, names, a, b),
                "hugging_face": lambda a=a, b=b: hugging_face(model, a, b),
            },
            rounds,
        )
        branch.release()
        passes, numbers = took["attribution"] / took["forward"], {f"{name}_cpu_s": value for name, value in took.items()}
        table.add(
            f"{length} tokens: gradients at S, T, C, in forward passes", ratio=took["gradients"] / took["forward"], **numbers
        )
        table.add(f"{length} tokens: attribution of S, T, C, in forward passes", ratio=passes, aim="<= 3.5", met=passes <= 3.5)
        speed = took["transformer_lens"] / took["attribution"]
        table.add(f"{length} tokens: TransformerLens over ours", ratio=speed, aim=">= 1.5", met=speed >= 1.5, difference=error)
        table.add(f"{length} tokens: Hugging Face's autograd over ours", ratio=took["hugging_face"] / took["attribution"])
    table.save(beside=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("lengths", type=int, nargs="*", default=[14, 64, 256])
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    main(given.lengths, given.rounds)
