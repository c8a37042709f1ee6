"""The tables of docs/models.md, from what the tests find. `python -m tests.engine.model.models_page` writes them."""

import math
import re
from functools import cache
from pathlib import Path

import torch

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.families import FAMILIES, REFUSED
from replaylens.engine.model.loading import load
from replaylens.engine.model.sites import table
from tests.engine.passes.packed import alone, logits, sequences, worst
from tests.families import BOTH_NAMES, LATENT_NAMES, MORE, NAMES, NEW_WIRINGS, hugging_face
from tests.mixtures import MIXTURES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
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


BOUNDS = (2e-6, 2e-5)
"""of errors in the table: coarse, so that another machine's rounding does not change it"""


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
    rows = ["| `model_type` | error | sites per layer | TransformerLens | GPU | refused |", "|---|---|---|---|---|---|"]
    for family, names in sorted(by_family().items()):
        error = max(oracle_error(name) for name in names)
        bound = next((bound for bound in BOUNDS if error < bound), error)
        config = load(hugging_face(names[0])).config
        bridged = "no bridge" if all(name in NO_BRIDGE for name in names) else "S, T, C equal"
        device = "bits on an H200" if any(name in ON_A_DEVICE for name in names) else "interpreter"
        device = device if config.plain_logits else f"{device}, Z on the host"
        rows.append(f"| {family} | < {bound:.0e} | {_sites(config)} | {bridged} | {device} | {_limits(family)} |")
    return rows


def _sites(config: ModelConfig) -> int:
    sites = table(config).sites.values()
    return max(sum(site.layer == layer for site in sites) for layer in range(config.num_layers))


def _limits(family: str) -> str:
    """The values of fields that transformers computes with and we do not."""
    limits = [f"`{field}` other than {' or '.join(map(str, values))}" for field, values in FAMILIES[family].only.items()]
    limits += [f"`{field}` other than `{other}`" for field, other in FAMILIES[family].same.items()]
    return ", ".join(limits)


def refused() -> list[str]:
    rows = ["| `model_type` | needs | closest |", "|---|---|---|"]
    return rows + [f"| {name} | {why} | {near.replace(' ', ', ')} |" for name, (why, near) in sorted(REFUSED.items())]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
