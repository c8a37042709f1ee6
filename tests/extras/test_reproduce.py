"""`reproduce`: figures have a claim, a source, a call in public names and a criterion; results, a digest of their bits."""

import json
import re
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import replaylens as rl
from replaylens.cli import app
from replaylens.engine.errors import BadRequest
from replaylens.extras import reproduce as module
from replaylens.extras.reproduce import CONTRASTS, FIGURES, Found, _digest, reproduce


def test_twelve_figures_with_sources_and_public_calls() -> None:
    """Each call names public attributes only: a name that is renamed or removed is found here."""
    assert len(FIGURES) == 12
    for figure in FIGURES.values():
        assert re.fullmatch(r"\d{4}\.\d{5}(, \d{4}\.\d{5})*", figure.source) and figure.claim.endswith(".")
        assert re.search(r"\d", figure.criterion), f"{figure.name}: a criterion is a number"
        names = re.findall(r"\b(rl(?:\.\w+)+|engine\.\w+|chain\.\w+)\(", figure.call)
        assert names
        for name in names:
            owner: Any = {"rl": rl, "engine": rl.Engine, "chain": rl.Branch}[name.split(".")[0]]
            for word in name.split(".")[1:]:
                owner = getattr(owner, word)


def test_contrast_sets_are_balanced_and_held_out() -> None:
    assert len(CONTRASTS) == 3
    for (positive, negative), prompts, words in CONTRASTS.values():
        assert len(positive) == len(negative) >= 4 and len(set(words)) == 2
        assert not set(prompts) & {*positive, *negative}
        for texts, own, other in ((positive, *words), (negative, *words[::-1])):  # steering towards texts favours their word
            assert not any(text.endswith(other) for text in texts)
            assert words == (" good", " bad") or all(text.endswith(own) for text in texts)


@pytest.mark.slow
def test_routing_twice_has_the_same_digest() -> None:
    """The cheapest figure, without pretrained weights: the same bits twice."""
    one, two = reproduce("routing"), reproduce("routing")
    assert one.digest == two.digest and one.measured == two.measured and one.hit is two.hit
    assert one.to_json()["source"] == "2401.04088"
    assert [*one.measured.values()] == pytest.approx([1.130986, 0.924896, 1.034532], abs=1e-5) and not one.hit


@pytest.mark.parametrize("other", [[torch.zeros(3)], [torch.zeros(3), 1], [np.zeros(3, dtype=np.float32) + 1e-7], ["a"]])
def test_a_digest_sees_every_bit(other: list[Any]) -> None:
    """Negative control: another value, shape or kind of evidence gives another digest."""
    assert _digest(Found({"x": 1.0}, True, other)) != _digest(Found({"x": 1.0}, True, [torch.zeros(3).double()]))


def test_command_lists_and_names_mistakes() -> None:
    listed = CliRunner().invoke(app, ["reproduce", "--list"])
    assert listed.exit_code == 0 and all(name in listed.output for name in FIGURES)
    wrong = CliRunner().invoke(app, ["reproduce", "rooting"])
    assert wrong.exit_code == 2
    with pytest.raises(BadRequest, match="did you mean 'routing'"):
        reproduce("rooting")


def test_command_says_hit_or_miss_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    for hit in (True, False):
        figure = FIGURES["routing"]
        fake = module.Figure(**{**vars(figure), "make": lambda load, hit=hit: Found({"ratio": 2.0}, hit, [])})
        monkeypatch.setitem(FIGURES, "routing", fake)
        said = CliRunner().invoke(app, ["reproduce", "routing", "--json"])
        assert said.exit_code == (not hit) and json.loads(said.output)["hit"] is hit
        assert ("hit" if hit else "miss") in CliRunner().invoke(app, ["reproduce", "routing"]).output


# ---- what the figures needed -----------------------------------------------------------------------------------------


def test_metric_of_steering_is_that_of_the_edit_made_alone() -> None:
    """`steer(metric=)`, bit for bit; a list has one metric for each prompt, and none adds no column."""
    engine = rl.Engine.load("coin-plain")
    texts = [f"A coin's state is {face}. Alice flips. What's the state? A:" for face in ("heads", "tails")]
    words = [(" tails", " heads"), (" heads", " tails")]
    vector = torch.linspace(-1, 1, engine.config.d_model)
    found = rl.steer(engine, vector, texts, layers=[2], strengths=[2], n=2, metric=words).frame
    for text, pair in zip(texts, words, strict=True):
        own = found[found["prompt"] == text].set_index("strength")["metric"]
        last = len(engine.tokens_of(text)) - 1
        edit = rl.Edit("blocks.2.hook_in", "add", vector, slice(last, None), factor=2.0)
        for strength, edits in ((0, []), (2, [edit])):
            one, other = engine.logits(text, tokens=list(pair), edits=edits)
            assert own[strength] == float(one - other)
    assert own[0] != own[2]
    assert "metric" not in rl.steer(engine, vector, texts[:1], layers=[2], strengths=[2], n=1).frame


def test_a_model_of_another_family_is_no_hugging_face_model() -> None:
    """`find_direction(engine, None, ...)` makes a bridge of Llama's wiring only, and says so."""
    from replaylens.weights.loading import hugging_face
    from tests.toy_model import random_model

    model = random_model()
    made = hugging_face(model)
    assert torch.equal(made.model.embed_tokens.weight, model.embed)
    object.__setattr__(model.config, "family", "gpt2")
    with pytest.raises(BadRequest, match="this one is gpt2"):
        hugging_face(model)


def test_a_bridge_that_lacks_something_is_refused() -> None:
    """Biases, say, which the translation does not know: the search would run on another model."""
    from replaylens.probes.causal import _require_peer
    from replaylens.weights.loading import hugging_face

    engine = rl.Engine.load("coin-plain")
    made = hugging_face(engine.model)
    _require_peer(engine, made)
    with torch.no_grad():
        made.model.layers[1].mlp.down_proj.weight *= 1.5
    with pytest.raises(BadRequest, match="computes other logits"):
        _require_peer(engine, made)
