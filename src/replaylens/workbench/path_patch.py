"""`path_patch`: which heads act on a receiving head, or on the output, directly rather than through other heads?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.options import verb
from replaylens.engine.request.values import items, whole
from replaylens.engine.serving.core import Core
from replaylens.workbench.aligned import Align, Aligned, Direction
from replaylens.workbench.heads import pair_of
from replaylens.workbench.metric import Metric, RowMetric
from replaylens.workbench.patch import activations, of_source
from replaylens.workbench.patch_result import PatchResult

Into = Literal["q", "k", "v"]


@verb
def path_patch(
    engine: Core,
    clean: Prompt,
    corrupt: Prompt,
    *,
    metric: RowMetric,
    receivers: Sequence[tuple[int, int]] | Literal["logits"] = "logits",
    into: Into = "v",
    direction: Direction = "denoise",
    align: Align = None,
    progress: bool = False,
) -> PatchResult:
    """Patch the path from each head to the receivers: the sender's output changes, other heads in between stay as they are.

    receivers  (layer, head) pairs, or "logits": the direct path to the output
    into       what of the receivers takes the change: queries ("q"), keys ("k") or values ("v"); heads that share keys and
               values change together
    others     as in `patch`

    First each sender's output (hook_z) is taken from the source prompt, while the outputs of all heads in later layers are
    held at the base prompt's; MLPs are computed again. Then the receivers' q, k or v of that pass is put into the base
    prompt, where everything follows from it. The result is a grid of senders, layers x heads.

    >>> from replaylens import Engine, path_patch
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> result = path_patch(engine, text.format("heads"), text.format("tails"), metric=(" tails", " heads"), receivers=[(1, 3)])
    >>> result.raw["heads"].shape  # senders in layers below the receiver
    torch.Size([1, 4])
    """
    two, measure = Aligned.of(engine, clean, corrupt, direction, align), Metric.of(engine, metric)
    path, count, everywhere = two.base, engine.config.num_heads, range(len(two.base))
    ends = [] if isinstance(receivers, str) and receivers == "logits" else _receivers(engine, receivers, into)
    last = max((layer for layer, _, _ in ends), default=engine.config.num_layers)
    outputs = [engine.sites.resolve(f"blocks.{layer}.attn.hook_z") for layer in range(last)]
    changed, held = activations(engine, two.source, outputs), activations(engine, path, outputs)
    senders = [(layer, head) for layer in range(last) for head in range(count)]
    sent = [
        [
            Edit(outputs[layer], "set", changed[outputs[layer]][two.there], positions=two.at, heads=[head]),
            *(Edit(name, "set", held[name], positions=everywhere) for name in outputs[layer + 1 :]),
        ]
        for layer, head in senders
    ]
    with engine.variants(path, keep=list(dict.fromkeys(site for _, site, _ in ends))) as base:
        if ends:
            arrived = base.capture(sent, progress)
            sent = [_received(ends, arrived, number, everywhere) for number in range(len(senders))]
        found = base.read([[], *sent], [-1], lambda logits: measure(logits[:, 0]), progress)
    there = of_source(engine, two.source, measure, float(found[0]))
    raw, numbers = {"heads": found[1:].view(last, count)}, tuple(range(count))
    columns, rows = {"heads": tuple(map(str, numbers))}, {"heads": tuple(range(last))}
    return PatchResult(f"{measure.name}, by path", direction, float(found[0]), there, raw, columns, {"heads": numbers}, rows)


def _receivers(engine: Core, receivers: Sequence[tuple[int, int]], into: Into) -> list[tuple[int, str, int]]:
    """(layer, site, head of the site) of each receiver; key heads for keys and values."""
    config = engine.config
    if into not in ("q", "k", "v"):
        raise BadRequest(f"Unknown into={into!r}. Known: q, k, v.")
    if config.latent is not None and into != "q":
        raise BadRequest(f"into={into!r}: latent attention computes no keys and values of heads. Use into='q'.")
    group = 1 if into == "q" else config.num_heads // config.num_kv_heads
    made = []
    for pair in items("receivers", receivers, "(layer, head) pairs, or 'logits'"):
        layer, head = pair_of("receivers", pair, config.num_layers, config.num_heads)
        whole("receivers (layer)", layer, 1)
        made.append((layer, engine.sites.resolve(f"blocks.{layer}.attn.hook_{into}"), head // group))
    if not made:
        raise BadRequest("No receivers. Give (layer, head) pairs, or 'logits'.")
    return list(dict.fromkeys(made))


def _received(ends: list[tuple[int, str, int]], arrived: dict[str, Tensor], number: int, everywhere: range) -> list[Edit]:
    """The edits that give the receivers what arrived from one sender."""
    by_site: dict[str, list[int]] = {}
    for _, site, head in ends:
        by_site.setdefault(site, []).append(head)
    return [
        Edit(site, "set", torch.as_tensor(arrived[site][number]), positions=everywhere, heads=heads)
        for site, heads in by_site.items()
    ]
