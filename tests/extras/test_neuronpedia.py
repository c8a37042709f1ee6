"""Graphs and features have the form that Neuronpedia's schema asks for; what has not is refused by name."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import replaylens as rl
from replaylens.engine.errors import BadRequest
from replaylens.extras.bridges import neuronpedia
from tests.features import tiny

NODES: list[dict[str, Any]] = [
    {"kind": "embedding", "position": 0, "token": 11},
    {"kind": "feature", "layer": 0, "position": 1, "feature": 3, "activation": 2.5, "influence": 0.4, "label": "a"},
    {"kind": "feature", "layer": 2, "position": 1, "feature": 7},
    {"kind": "error", "layer": 3, "position": 1},
    {"kind": "logit", "position": 1, "token": 5, "probability": 0.75, "label": " tails"},
]
LINKS = [(0, 1, 1.5), (1, 2, -0.25), (3, 4, 0.5), (2, 4, 1.0)]
WHERE: dict[str, Any] = {"tokens": ["A", " coin"], "model": "coin-plain", "slug": "coin", "num_layers": 4}


def test_a_graph_names_its_nodes_as_the_viewer_does(tmp_path: Path) -> None:
    made = neuronpedia.graph(NODES, LINKS, source_set="ours", info={"node_threshold": 0.8}, **WHERE)
    assert [node["node_id"] for node in made["nodes"]] == ["E_11_0", "0_3_1", "2_7_1", "3_-1_1", "5_5_1"]
    assert [node["feature"] for node in made["nodes"]] == [0, 9, 52, -1, 5], "Cantor's pairing of layer and feature"
    assert (
        made["nodes"][1]["activation"] == 2.5 and made["nodes"][4]["token_prob"] == 0.75 and made["nodes"][4]["is_target_logit"]
    )
    assert made["links"][1] == {"source": "0_3_1", "target": "2_7_1", "weight": -0.25}
    assert made["metadata"]["prompt"] == "A coin" and made["metadata"]["node_threshold"] == 0.8
    file = tmp_path / "graph.json"
    file.write_text(json.dumps(made))
    assert neuronpedia.read_graph(file) == made


@pytest.mark.parametrize(
    "nodes, links, error",
    [
        ([*NODES, NODES[1]], [], "Two nodes have the name 0_3_1"),
        ([{"kind": "head", "position": 0}], [], "Invalid node 0"),
        ([{"kind": "feature", "position": 0, "layer": 1}], [], "feature is missing"),
        ([{**NODES[3], "colour": 1}], [], "colour is missing or unknown"),
        ([{**NODES[3], "layer": 4}], [], "layer of node 0"),
        ([{**NODES[3], "position": 2}], [], "position of node 0"),
        ([{**NODES[1], "activation": float("nan")}], [], "activation of node 0"),
        (NODES, [(0, 9, 1.0)], "link"),
        (NODES, [(0, 1, float("inf"))], "weight"),
        (NODES, [(0, 1)], "Invalid link"),
    ],
)
def test_a_graph_that_is_none_is_refused(nodes: Any, links: Any, error: str) -> None:
    with pytest.raises(BadRequest, match=error):
        neuronpedia.graph(nodes, links, **WHERE)


@pytest.mark.parametrize("where", [{"tokens": [1, 2]}, {"tokens": "A coin"}, {"num_layers": 0}, {"info": [1]}, {"slug": 5}])
def test_a_graph_of_nowhere_is_refused(where: dict[str, Any]) -> None:
    with pytest.raises(BadRequest, match=rf"{next(iter(where)).removesuffix('s')}"):
        neuronpedia.graph(NODES[:1], [], **WHERE | where)


def test_a_file_that_is_none_is_refused(tmp_path: Path) -> None:
    """Not JSON, a pickle, a truncated graph, a missing field, a link to nowhere."""
    made, file = neuronpedia.graph(NODES, LINKS, **WHERE), tmp_path / "graph.json"
    whole = json.dumps(made)
    lost = {**made, "links": [{"source": "E_11_0", "target": "nowhere", "weight": 1.0}]}
    nameless = {**made, "metadata": {"slug": "coin"}}
    for content in (
        b"",
        pickle.dumps(made),
        whole[: len(whole) // 2].encode(),
        *(json.dumps(x).encode() for x in (lost, nameless, 3)),
    ):
        file.write_bytes(content)
        with pytest.raises(BadRequest):
            neuronpedia.read_graph(file)
    with pytest.raises(BadRequest, match="Cannot read"):
        neuronpedia.read_graph(tmp_path / "none.json")


def test_a_feature_shows_where_it_is_strongest(tmp_path: Path) -> None:
    """Its examples and statistics are those of the rows; its logits those of its decoder row."""
    engine = rl.Engine.load("coin-plain")
    features = rl.SparseFeatures.load(tiny.write(tmp_path / "sae", "standard", d_in=128, hook="blocks.1.hook_resid_post"))
    texts = [
        "A coin's state is heads. Alice flips",
        "A coin's state is tails.",
        "A coin's state is heads. What's the state? A:",
    ]
    branches = list(engine.prompts(texts, sites="S"))
    dense = [features.of(branch).dense() for branch in branches]
    index = int(torch.cat(dense).max(0).values.argmax())
    made = neuronpedia.feature(features, index, branches, transcoder="ours", examples=2, logits=3)
    columns = [each[:, index] for each in dense]
    every = torch.cat(columns)
    (quantile,) = made["examples_quantiles"]
    shown, best = quantile["examples"], max(range(3), key=lambda i: float(columns[i].max()))
    assert len(shown) == 2 and shown[0]["tokens_acts_list"] == columns[best].tolist()
    assert "".join(shown[0]["tokens"]) == texts[best] and shown[0]["train_token_ind"] == int(columns[best].argmax())
    assert made["act_max"] == float(every.max()) and made["activation_frequency"] == float((every > 0).double().mean())
    assert sum(made["histogram"]) == int((every > 0).sum()) and made["quantile_values"][-1] == float(every.max())
    effect = engine.model.unembedding @ features.decoder[index]
    assert made["top_logits"][0] == engine.text.token(int(effect.argmax())) and len(made["bottom_logits"]) == 3
    json.dumps(made, allow_nan=False)
    silent = int(torch.cat(dense).max(0).values.argmin())
    quiet = neuronpedia.feature(features, silent, branches[1:2], transcoder="ours")
    assert quiet["act_max"] >= 0 and len(quiet["histogram"]) == 50
    for wrong in ({"index": 48}, {"branches": []}, {"branches": ["x"]}, {"examples": 0}):
        with pytest.raises(BadRequest):
            neuronpedia.feature(**({"features": features, "index": 0, "branches": branches, "transcoder": "ours"} | wrong))
