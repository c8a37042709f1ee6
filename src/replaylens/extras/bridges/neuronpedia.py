"""Neuronpedia's JSON: attribution graphs, and features for its graph viewer.

Graphs follow Neuronpedia's graph schema (1.0.0, version 1 of circuit-tracer's node names), features the format that the
viewer loads from a `feature_json_base_url`. `read_graph` checks a file against the same records that `graph` writes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from replaylens import __version__
from replaylens.engine import records
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import as_float, as_instance, as_int, as_list, as_path, short_repr, verb
from replaylens.engine.serving.branch import Branch
from replaylens.features.features import SparseFeatures

# ---- graphs ----------------------------------------------------------------------------------------------------------

KINDS = {
    "feature": "cross layer transcoder",
    "error": "mlp reconstruction error",
    "embedding": "embedding",
    "logit": "logit",
}
"""kind of a node -> Neuronpedia's feature_type"""
_NEEDS = {
    "feature": {"layer", "position", "feature"},
    "error": {"layer", "position"},
    "embedding": {"position", "token"},
    "logit": {"position", "token"},
}
_MAY = {"activation", "influence", "probability", "label"}


@dataclass(frozen=True)
class _Metadata:
    slug: str
    scan: str
    prompt_tokens: list[str]
    prompt: str


@dataclass(frozen=True)
class _Node:
    node_id: str
    feature: int | None
    layer: str | int
    ctx_idx: int
    feature_type: str
    jsNodeId: str
    clerp: str


@dataclass(frozen=True)
class _Link:
    source: str
    target: str
    weight: float


@dataclass(frozen=True)
class _Graph:
    """What the schema requires; other fields are allowed everywhere."""

    metadata: _Metadata
    qParams: dict[str, Any]
    nodes: list[_Node]
    links: list[_Link]


@verb
def graph(
    nodes: Sequence[Mapping[str, Any]],
    links: Sequence[tuple[int, int, float]],
    *,
    tokens: Sequence[str],
    model: str,
    slug: str,
    num_layers: int,
    source_set: str | None = None,
    info: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """An attribution graph as Neuronpedia's JSON: plain values, for json.dump and Neuronpedia's upload.

    nodes       each {"kind": "feature", "layer", "position", "feature"}, {"kind": "error", "layer", "position"},
                {"kind": "embedding", "position", "token"} or {"kind": "logit", "position", "token"}, and optionally
                "activation", "influence", "probability" and "label"; tokens by id
    links       (source, target, weight), nodes by their number in `nodes`
    tokens      the prompt's, as text
    model       Neuronpedia's name of the model, such as gemma-2-2b
    slug        name of the graph in its address
    num_layers  of the model
    source_set  Neuronpedia's name of the transcoders, where it has their dashboards
    info        more metadata, such as generation_settings

    BadRequest for nodes that lack or repeat something, for links to nodes that do not exist and for numbers that are not
    finite.
    """
    words = [as_instance("token", each, str, "its text") for each in as_list("tokens", tokens, "the text of each token")]
    more, layers = as_instance("info", {} if info is None else info, dict, "a dict"), as_int("num_layers", num_layers, 1)
    made = [_node(number, each, len(words), layers) for number, each in enumerate(as_list("nodes", nodes, "a list of dicts"))]
    names = [each["node_id"] for each in made]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise BadRequest(f"Two nodes have the name {twice}. Give each node once.")
    for first in [each for each in made if each["feature_type"] == KINDS["logit"]][:1]:
        first["is_target_logit"] = True  # the one that the viewer opens with
    edges = []
    for link in as_list("links", links, "a list of (source, target, weight)"):
        if not isinstance(link, tuple | list) or len(link) != 3:
            raise BadRequest(f"Invalid link {short_repr(link)}. Give (source, target, weight).")
        source, target = (as_int("link", each, 0, len(made) - 1) for each in link[:2])
        edges.append({"source": names[source], "target": names[target], "weight": as_float("weight", link[2])})
    about: dict[str, Any] = {"slug": slug, "scan": model, "prompt_tokens": words, "prompt": "".join(words)}
    about |= {"schema_version": 1, "info": {"generator": {"name": "replaylens", "version": __version__}}}
    about |= {} if source_set is None else {"feature_details": {"neuronpedia_source_set": source_set}}
    whole = {"metadata": about | more, "qParams": {"pinnedIds": [], "supernodes": [], "linkType": "both"}}
    return _checked(whole | {"nodes": made, "links": edges}, "The graph")


def read_graph(path: str | Path) -> dict[str, Any]:
    """A graph from a file, checked as the schema says; BadRequest names what is wrong with another file."""
    try:
        content = as_path("path", path).read_bytes()
    except OSError as error:
        raise BadRequest(f"Cannot read {path}: {error}.") from error
    return _checked(records.parse(content, str(path), BadRequest), str(path))


def _checked(raw: Any, what: str) -> dict[str, Any]:
    try:
        found = msgspec.convert(raw, _Graph)
        names = {node.node_id for node in found.nodes}
        if lost := [link for link in found.links if not {link.source, link.target} <= names]:
            raise ValueError(f"the link from {lost[0].source} to {lost[0].target} has no such node")
        json.dumps(raw, allow_nan=False)
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise BadRequest(f"{what} is not a graph of Neuronpedia's schema: {str(error)[:300]}.") from None
    made: dict[str, Any] = raw
    return made


def _node(number: int, given: Any, length: int, num_layers: int) -> dict[str, Any]:
    """One node, by circuit-tracer's names."""
    what = f"node {number}"
    kind = given.get("kind") if isinstance(given, Mapping) else None
    if kind not in KINDS:
        raise BadRequest(f"Invalid {what}: {short_repr(given)}. Give a dict with a kind: {', '.join(KINDS)}.")
    if wrong := (_NEEDS[kind] - given.keys()) or (given.keys() - _NEEDS[kind] - _MAY - {"kind"}):
        raise BadRequest(
            f"Invalid {what}: a {kind} needs {', '.join(sorted(_NEEDS[kind]))}; {min(wrong)} is missing or unknown."
        )
    at = as_int(f"position of {what}", given["position"], 0, length - 1)
    if kind in ("feature", "error"):
        layer: int | str = as_int(f"layer of {what}", given["layer"], 0, num_layers - 1)
    else:
        layer = "E" if kind == "embedding" else num_layers + 1
    token = as_int(f"token of {what}", given["token"], 0) if "token" in given else 0
    if kind == "feature":
        own = as_int(f"feature of {what}", given["feature"], 0)
        pair = int(layer) + own
        names: dict[str, Any] = {"node_id": f"{layer}_{own}_{at}", "feature": pair * (pair + 1) // 2 + own}  # Cantor's pairing
        names["jsNodeId"] = f"{layer}_{own}-0"
    elif kind == "error":
        names = {"node_id": f"{layer}_-1_{at}", "feature": -1, "jsNodeId": f"{layer}_-1-{at}"}
    else:
        js = f"E_{token}-{at}" if kind == "embedding" else f"L_{token}-{at}"
        names = {"node_id": f"{layer}_{token}_{at}", "feature": at if kind == "embedding" else token, "jsNodeId": js}
    found = names | {"layer": str(layer), "ctx_idx": at, "feature_type": KINDS[kind], "clerp": str(given.get("label", ""))}
    numbers = {"activation": "activation", "influence": "influence", "probability": "token_prob"}
    found |= {name: as_float(f"{key} of {what}", given[key]) for key, name in numbers.items() if given.get(key) is not None}
    return found


# ---- features --------------------------------------------------------------------------------------------------------

_BINS, _QUANTILES = 50, (0.0, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


@verb
def feature(
    features: SparseFeatures, index: int, branches: Sequence[Branch], *, transcoder: str, examples: int = 20, logits: int = 10
) -> dict[str, Any]:
    """One feature, as the JSON that Neuronpedia's graph viewer loads: where it is strongest, how its activations are
    distributed, and which logits its decoder row raises and lowers most (through the unembedding, without the final norm).

    branches    paths whose rows of the features' site were captured; those of the strongest activations become examples
    transcoder  the name of the features
    examples    number of paths to show
    logits      number of tokens at either end
    """
    index = as_int("index", index, 0, len(features) - 1)
    given = as_list("branches", branches, "a list of branches, such as engine.prompts(..., sites='S')")
    if not given:
        raise BadRequest("No branches. Give at least one, with the features' site captured.")
    found = [features.of(branch) for branch in given]
    columns = [rows.columns([index])[:, 0] for rows in found]
    order = sorted(range(len(given)), key=lambda i: -float(columns[i].max()))
    values = torch.cat(columns).double().numpy()
    active = values[values > 0]
    shown = [
        {
            "tokens": [given[i].engine.text.token(given[i].tokens[at]) for at in found[i].positions or ()],
            "tokens_acts_list": columns[i].tolist(),
            "train_token_ind": int(columns[i].argmax()),
            "is_repeated_datapoint": False,
        }
        for i in order[: as_int("examples", examples, 1)]
        if float(columns[i].max()) > 0
    ]
    top, bottom = _extremes(features, given[0], index, as_int("logits", logits, 1))
    return {
        "transcoder_id": transcoder,
        "index": index,
        "examples_quantiles": [{"quantile_name": "Top activations", "examples": shown}],
        "top_logits": top,
        "bottom_logits": bottom,
        "act_min": float(values.min()),
        "act_max": float(values.max()),
        "quantile_values": [float(x) for x in np.quantile(active, _QUANTILES)] if len(active) else [0.0] * len(_QUANTILES),
        "histogram": [float(x) for x in np.histogram(active, bins=_BINS)[0]] if len(active) else [0.0] * _BINS,
        "activation_frequency": float((values > 0).mean()),
    }


def _extremes(features: SparseFeatures, branch: Branch, index: int, count: int) -> tuple[list[str], list[str]]:
    """Texts of the tokens whose logits a unit of the feature raises and lowers most."""
    engine = branch.engine
    if not isinstance(engine, Engine) or features.decoder.shape[1] != engine.config.d_model:
        return [], []  # it does not write to the residual stream
    effect = engine.model.unembedding.detach().float().cpu() @ features.decoder[index].float().cpu()
    count = min(count, len(effect))
    top, bottom = ((sign * effect).topk(count).indices.tolist() for sign in (1, -1))
    return [engine.text.token(each) for each in top], [engine.text.token(each) for each in bottom]
