"""The tables of docs/models.md, from what the tests find. `python -m tests.weights.models_page` writes them."""

import math
import re
from functools import cache
from pathlib import Path

import torch

from replaylens.weights.families import FAMILIES, REFUSED
from replaylens.weights.loading import load
from tests.engine.passes.packed import alone, logits, sequences, worst
from tests.families import BOTH_NAMES, LATENT_NAMES, MORE, NAMES, NEW_WIRINGS, hugging_face
from tests.mixtures import MIXTURES

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
ON_A_DEVICE = (*NAMES, *NEW_WIRINGS, *MIXTURES, *BOTH_NAMES, *LATENT_NAMES)
"""models that passed the contract on an H200, all but the second in bfloat16 and float32"""
NO_BRIDGE = {
    "ministral": "there is no adapter",
    "helium": "there is no adapter",
    "persimmon": "there is no adapter",
    "cwm": "there is no adapter",
    "minicpm3": "there is no adapter",
    "gpt-bigcode-heads": "the adapter refuses more than one key head",
    "gpt2-by-layer": "the bridge scales the scores of all layers alike",
    "phi": "the adapter refuses norms of queries and keys",
    "falcon-new": "the adapter splits q, k and v for one key head",
    "falcon-new-one-norm": "the adapter asks for two norms",
    "dots1": "there is no adapter",
    "granite-hybrid": "the bridge does not show what experts and shared MLP add together",
    "granite-hybrid-dense": "the bridge asks for a rotation",
    "falcon-h1": "the bridge shows outputs before their factors",
    "phimoe": "the adapter does not know the class by its name in transformers",
    "phimoe-plain": "the adapter does not know the class by its name in transformers",
}
"""models that TransformerLens 4.3 cannot bridge, with the reason"""


KINDS = ("contract suite on an H200", "Triton's interpreter", "no TransformerLens bridge", "logit lens on the host")
"""of families, as the page's first table has them: run on a GPU, or with a GPU's kernels on a CPU; without a peer to compare
with; and whose logit lens a GPU does not compute"""
BOUND = 2e-6
"""of the relative errors of all families, as the page says"""


@cache
def oracle_error(name: str) -> float:
    """The largest relative error of a tiny model's logits against Hugging Face; infinite if another token is the likeliest."""
    tokens, model = sequences(), hugging_face(name)
    ours, theirs = logits(load(model), tokens), alone(model, tokens)
    same = all(torch.equal(a.argmax(-1), b.argmax(-1)) for a, b in zip(ours, theirs, strict=True))
    return worst(ours, theirs) if same else math.inf


def by_family() -> dict[str, list[str]]:
    """The tiny models of every family."""
    found: dict[str, list[str]] = {}
    for name in (*NAMES, *MORE):
        found.setdefault(hugging_face(name).config.model_type, []).append(name)
    return found


def page(old: str) -> str:
    """The page with its tables as they are now."""
    for name, lines in {"families": families(), "refused": refused()}.items():
        block = "\n".join([f"<!-- {name} -->", *lines, f"<!-- end of {name} -->"])
        old = re.sub(rf"<!-- {name} -->.*?<!-- end of {name} -->", lambda _, text=block: text, old, flags=re.DOTALL)
    return old


def families() -> list[str]:
    """One line per property with the families that have it, then the values of fields that a family refuses."""
    of: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for family, names in sorted(by_family().items()):
        assert max(oracle_error(name) for name in names) < BOUND, family
        on_a_device = any(name in ON_A_DEVICE for name in names)
        of[KINDS[0] if on_a_device else KINDS[1]].append(family)
        if all(name in NO_BRIDGE for name in names):
            of[KINDS[2]].append(family)
        if not load(hugging_face(names[0])).config.plain_logits:
            of[KINDS[3]].append(family)
    rows = ["| | `model_type` |", "|---|---|", *(f"| {kind} | {', '.join(named)} |" for kind, named in of.items())]
    refusing: dict[str, list[str]] = {}
    for family in sorted(by_family()):
        refusing.setdefault(_limits(family), []).append(family)
    rows += ["", "| refused values | `model_type` |", "|---|---|"]
    return rows + [f"| {limits} | {', '.join(named)} |" for limits, named in refusing.items() if limits]


def _limits(family: str) -> str:
    """The values of fields that transformers computes with and we do not."""
    allowed = {field: [v for v in values if v is not None] or [None] for field, values in FAMILIES[family].only.items()}
    limits = [f"`{field}` not {' or '.join(map(str, values))}" for field, values in allowed.items()]
    limits += [f"`{field}` not `{other}`" for field, other in FAMILIES[family].same.items()]
    return ", ".join(limits)


def refused() -> list[str]:
    """One line per reason: what is missing, and the families that lack it, each with those closest to it."""
    lacking: dict[str, list[str]] = {}
    for name, (why, near) in sorted(REFUSED.items()):
        lacking.setdefault(why, []).append(f"{name} ({near.replace(' ', ', ')})")
    return ["| needs | `model_type` (closest) |", "|---|---|", *(f"| {why} | {', '.join(of)} |" for why, of in lacking.items())]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
