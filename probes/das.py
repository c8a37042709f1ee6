"""Distributed alignment search (Geiger et al., arXiv 2303.02536) with TransformerLens; gives a probe for the causal tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import UnknownSite
from replaylens.probes.errors import BadRows
from replaylens.probes.probe import LinearProbe
from replaylens.probes.rows import Cell
from replaylens.probes.sources import LETTERS
from replaylens.probes.stage import Stage
from replaylens.tasks import Example


def find_direction(
    engine: Engine,
    bridge: Any,
    examples: Sequence[Example],
    label: str = "state",
    *,
    site: str = "S",
    layer: int,
    epochs: int = 20,
    lr: float = 1e-2,
    seed: int = 0,
) -> LinearProbe:
    """Learn the direction at the query whose interchange makes the answer follow the source prompt, by gradient descent.

    bridge    a `TransformerBridge` of the engine's model; TransformerLens does the search
    examples  prompts of two classes with the same number of tokens, since TransformerLens takes them as one tensor
    """
    from transformer_lens.tools.analysis.interchange import fit_das

    name = _name(engine, site, layer)
    stage = Stage(engine, examples, name, label, "query")
    tokens = [subject.tokens for subject in stage.subjects]
    if len({len(path) for path in tokens}) != 1:
        raise BadRows("The prompts have different lengths. Give prompts with the same number of tokens.")
    classes = np.array([subject.classes[-1] for subject in stage.subjects])
    names = tuple(str(each) for each in np.unique(classes))
    if len(names) != 2:
        raise BadRows(f"The prompts have the classes {', '.join(names)}. Give prompts of exactly two classes.")
    source = np.random.default_rng([seed, 0xDA5]).permutation(len(tokens))
    base = torch.tensor(tokens)
    answers = torch.tensor([subject.answer for subject in stage.subjects])
    last = torch.full((len(base),), base.shape[1] - 1)
    found = fit_das(
        bridge,
        name,
        base,
        base[torch.from_numpy(source)],
        answers[torch.from_numpy(source)],
        lambda some: bridge(some)[:, -1, stage.answers],
        rank=1,
        base_positions=last,
        source_positions=last,
        epochs=epochs,
        lr=lr,
        seed=seed,
    )
    rows = np.stack([subject.rows[-1].double().numpy() for subject in stage.subjects])
    means = np.stack([rows[classes == each].mean(0) for each in names])
    way = found.basis[:, 0].double().cpu().numpy()
    way = way if way @ (means[1] - means[0]) > 0 else -way
    about = {"task": examples[0].task, "fingerprint": engine.fingerprint.digest, "digest": ""}
    cell = Cell(site, layer)
    roots = tuple(np.unique(stage.roots).tolist())
    bias = -way[None] @ means.mean(0)
    return LinearProbe(way[None], bias, means, names, label, name, cell, "query", "das", about, roots)


def _name(engine: Engine, site: str, layer: int) -> str:
    """The site's full name. Raises UnknownSite if the letter has no such layer."""
    if site not in LETTERS:
        return engine.sites.resolve(site)
    names = engine.sites.per_layer(site)
    if layer not in range(len(names)):
        raise UnknownSite(f"No layer {layer}. {site} has layers 0 to {len(names) - 1}.")
    return names[layer]
