"""Distributed alignment search (Geiger et al., arXiv 2303.02536) with TransformerLens; gives a probe for the causal tests."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import UnknownSite
from replaylens.probes.causal.stage import Stage
from replaylens.probes.data.rows import Cell
from replaylens.probes.data.sources import LETTERS
from replaylens.probes.errors import BadRows
from replaylens.probes.estimators.erasers import row_space
from replaylens.probes.fitting.probe import LinearProbe
from replaylens.tasks import Example


def find_direction(
    engine: Engine,
    bridge: Any,
    examples: Sequence[Example],
    label: str = "state",
    *,
    site: str = "S",
    layer: int,
    position: str = "query",
    rank: int = 1,
    epochs: int = 20,
    lr: float = 1e-2,
    seed: int = 0,
) -> LinearProbe:
    """Learn the subspace whose interchange makes the answer follow the source prompt, by gradient descent.

    The target of a pair is the model's answer to the source up to the position, followed by the rest of the base: at the
    query, its answer to the source.

    bridge    a `TransformerBridge` of the engine's model; TransformerLens does the search
    examples  prompts with the same number of tokens, since TransformerLens takes them as one tensor
    label     with at least two classes, for the probe's scores: nearest class mean within the subspace
    position  one row of each prompt, such as `query`, `query-1`, `step:2` or a number
    rank      number of dimensions to exchange
    """
    from transformer_lens.tools.analysis.interchange import fit_das

    name = _name(engine, site, layer)
    stage = Stage(engine, examples, name, label, position)
    tokens, places = _aligned(stage)
    width = stage.subjects[0].rows.shape[-1]
    if not 1 <= rank <= width:
        raise BadRows(f"rank={rank} is impossible. Rows of {name} have {width} dimensions: give 1 to {width}.")
    source = np.random.default_rng([seed, 0xDA5]).permutation(len(tokens))
    grafts = [tokens[s][: places[s] + 1].tolist() + tokens[b][places[b] + 1 :].tolist() for b, s in enumerate(source.tolist())]
    found = fit_das(
        bridge,
        name,
        tokens,
        tokens[torch.from_numpy(source)],
        torch.tensor(stage.answers_to(grafts)),
        lambda some: bridge(some)[:, -1, stage.answers],
        rank=rank,
        base_positions=places,
        source_positions=places[torch.from_numpy(source)],
        epochs=epochs,
        lr=lr,
        seed=seed,
    )
    about = {"task": examples[0].task, "fingerprint": engine.fingerprint.digest, "digest": ""}
    return _probe(stage, found.basis.double().cpu().numpy().T, Cell(site, layer), about)


def _aligned(stage: Stage) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [prompts, length], position of each prompt's row [prompts]). Raises BadRows if they are no tensors."""
    if len({len(subject.tokens) for subject in stage.subjects}) != 1:
        raise BadRows("The prompts have different lengths. Give prompts with the same number of tokens.")
    if any(len(subject.positions) != 1 for subject in stage.subjects):
        raise BadRows(f"Position {stage.position.spec!r} has several rows per prompt. Use one such as 'query' or 'step:2'.")
    tokens = torch.tensor([subject.tokens for subject in stage.subjects])
    return tokens, torch.tensor([subject.positions[0] for subject in stage.subjects])


def _probe(stage: Stage, basis: np.ndarray, cell: Cell, about: dict[str, Any]) -> LinearProbe:
    """The probe of a subspace [rank, d]: its scores compare a row with the class means within the subspace."""
    classes = np.array([subject.classes[-1] for subject in stage.subjects])
    names = tuple(str(each) for each in np.unique(classes))
    if len(names) < 2:
        raise BadRows(f"All prompts have the class {names[0]!r}. Give prompts of at least two classes.")
    rows = np.stack([subject.rows[-1].double().numpy() for subject in stage.subjects])
    means = np.stack([rows[classes == each].mean(0) for each in names])
    inside = means @ basis.T @ basis
    if len(names) == 2:
        weight = inside[1:] - inside[:1]
        bias = -weight @ means.mean(0)
    else:
        weight, bias = inside, -0.5 * (inside**2).sum(1)
    roots = tuple(np.unique(stage.roots).tolist())
    return LinearProbe(
        weight, bias, means, names, stage.label, stage.site, cell, stage.position.spec, "das", about, roots, row_space(basis)
    )


def _name(engine: Engine, site: str, layer: int) -> str:
    """The site's full name. Raises UnknownSite if the letter has no such layer."""
    if site not in LETTERS:
        return engine.sites.resolve(site)
    names = engine.sites.per_layer(site)
    if layer not in range(len(names)):
        raise UnknownSite(f"No layer {layer}. {site} has layers 0 to {len(names) - 1}.")
    return names[layer]
