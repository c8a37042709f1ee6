"""`steer` and `attention`: what they generate and show is what branches and captures give."""

import math

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure

from replaylens import Edit, Engine, Sampling, attention, steer
from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.model import loading
from tests.engine.replay.bridges import bridge
from tests.families import hugging_face

COIN = "A coin's state is {}. Alice flips. What's the state? A:"
HEADS, TAILS = COIN.format("heads"), COIN.format("tails")


def test_steering_is_generating_under_an_edit() -> None:
    served, alone = Engine.load("coin-plain"), Engine.load("coin-plain")
    result = steer(served, ([HEADS], [TAILS]), [HEADS, TAILS], layers=[1, 3], strengths=[-2, 2], n=3)
    streams = alone.sites.per_layer("S")
    rows = [alone.prompt(text, sites=[streams[3]]).activations[streams[3]][-1] for text in (HEADS, TAILS)]
    assert torch.equal(result.vectors[3], rows[0] - rows[1])
    length = len(alone.tokens_of(TAILS))
    edit = Edit(streams[3], "add", result.vectors[3], slice(length - 1, None), factor=2.0)
    line = result.frame.query("prompt == @TAILS and layer == 3 and strength == 2").iloc[0]
    branch = alone.prompt(TAILS, edits=[edit]).generate(3)
    assert line["text"] == alone.text.decode(branch.generated)
    log_p = alone.logits(branch.tokens, positions=slice(length - 1, -1)).log_softmax(-1)
    surprise = -float(log_p[range(len(branch.generated)), branch.generated].double().mean())
    assert line["perplexity"] == pytest.approx(math.exp(surprise), rel=1e-5)
    steered = branch.logits(slice(length - 1, -1)).double().log_softmax(-1)
    apart = (steered.exp() * (steered - log_p.double())).sum(-1).mean()
    assert line["effect"] == pytest.approx(float(apart), rel=1e-4) and line["effect"] > 0
    assert result.frame.query("strength == 0")["effect"].tolist() == [0.0, 0.0]
    plain = result.frame.query("strength == 0")
    assert len(plain) == 2 and plain.iloc[1]["text"] == alone.text.decode(alone.prompt(TAILS).generate(3).generated)
    assert line["text"].split()[0] == "tails." or line["text"] != plain.iloc[1]["text"], "the vector of the other answer wins"
    assert isinstance(result.plot(), Figure) and "continuation" in result._repr_html_()
    served.check_integrity()


def test_a_model_that_thinks_can_be_steered() -> None:
    """Continuations of any length; their perplexity is that of the tokens forced after the prompt."""
    served = Engine.load("coin-thinking")
    result = steer(served, torch.ones(served.config.d_model), [HEADS], layers=[1], strengths=[0.5], n=3)
    assert result.frame["perplexity"].notna().all() and len(result.frame) == 2
    root = served.prompt(HEADS)
    plain = root.fork()[0].generate(3)
    forced = root.fork()[0].force(plain.generated)
    log_p = forced.logits(slice(root.length - 1, -1)).log_softmax(-1)[range(len(plain.generated)), plain.generated]
    assert result.frame["perplexity"][0] == pytest.approx(math.exp(-float(log_p.double().mean())), rel=1e-5)


def test_prompts_given_twice_are_steered_twice() -> None:
    served = Engine.load("coin-plain")
    result = steer(served, torch.ones(128), [HEADS, HEADS], layers=[2], strengths=[1], n=2)
    assert len(result.frame) == 4 and result.frame["text"][0] == result.frame["text"][2]


def test_options_of_steering() -> None:
    served = Engine.load("coin-plain")
    vector = torch.randn(128, generator=torch.Generator().manual_seed(2))
    drawn = steer(served, vector, [HEADS], layers=[2], strengths=[4], n=4, sampling=Sampling(temperature=1.0, seed=3))
    kept = steer(served, vector, [HEADS], layers=[2], strengths=[4], n=4, keep_norm=True, whole_prompt=True)
    assert len(drawn.frame) == len(kept.frame) == 2 and torch.equal(drawn.vectors[2], vector)
    for bad, message in (
        (torch.zeros(3), "shape"),
        (([], [HEADS]), "one or more"),
        ("text", "Give a vector"),
        ((1, 2), "Give a vector"),
    ):
        with pytest.raises(BadRequest, match=message):
            steer(served, bad, [HEADS], layers=[2], strengths=[1])  # type: ignore[arg-type]
    for options, message in (
        (dict(layers=[]), "layers is empty"),
        (dict(layers=2), "Invalid layers"),
        (dict(strengths=[]), "nothing to steer"),
        (dict(prompts=[]), "nothing to steer"),
        (dict(prompts=[3]), "Invalid text=3"),
    ):
        with pytest.raises(BadRequest, match=message):
            steer(served, vector, **{"prompts": [HEADS], "layers": [2], "strengths": [1], **options})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="layers=9"):
        steer(served, vector, [HEADS], layers=[9], strengths=[1])


def test_refused_steering_leaves_no_branch() -> None:
    served = Engine.load("coin-plain")
    with pytest.raises(BadEdit, match="NaN"):
        steer(served, torch.full((128,), math.nan), [HEADS], layers=[2], strengths=[4], n=4)
    with pytest.raises(BadRequest, match="contrast"):
        steer(served, (HEADS, TAILS), [HEADS], layers=[2], strengths=[4], n=4)  # type: ignore[arg-type]
    assert not served.loop.lanes


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_patterns_are_those_of_transformer_lens(name: str) -> None:
    served = Engine(loading.load(hugging_face(name), torch.float32))
    path = torch.randint(3, 97, (9,), generator=torch.Generator().manual_seed(1)).tolist()
    with torch.no_grad():
        _, cache = bridge(name).run_with_cache(torch.tensor([path]))
    result = attention(served, path)
    for layer in range(3):
        torch.testing.assert_close(result.pattern[layer], cache[f"blocks.{layer}.attn.hook_pattern"][0], rtol=1e-4, atol=1e-5)


def test_summary_of_heads() -> None:
    served = Engine.load("coin-plain")
    result = attention(served, HEADS, layers=[1, 3])
    assert result.layers == (1, 3) and result.pattern.shape == (2, 4, 15, 15)
    frame, p = result.frame.set_index(["layer", "head"]), result.pattern[1, 2].double()
    assert frame.loc[(3, 2), "previous"] == pytest.approx(float(p.diagonal(-1).mean()))
    assert frame.loc[(3, 2), "first"] == pytest.approx(float(p[1:, 0].mean()))
    repeats = [(q, k + 1) for q in range(15) for k in range(q) if result.path[q] == result.path[k] and k + 1 < q]
    by_query = {q: sum(float(p[a, b]) for a, b in repeats if a == q) for q, _ in repeats}
    assert frame.loc[(3, 2), "induction"] == pytest.approx(np.mean(list(by_query.values())))
    assert attention(served, [5, 9, 6]).frame["induction"].isna().all()
    for figure in (result.plot(), result.plot(3), result.plot(3, 2)):
        assert isinstance(figure, Figure)
    assert "L3H2" in result._repr_html_()
    with pytest.raises(BadRequest, match="head=7"):
        result.plot(3, 7)
    with pytest.raises(BadRequest, match="has layers 1, 3"):
        result.plot(2, 0)
    with pytest.raises(BadRequest, match="layers is empty"):
        attention(served, HEADS, layers=[])
    single = attention(served, [5])
    with pytest.raises(BadRequest, match="longer text"):
        single.plot()
    assert isinstance(single.plot(0), Figure) and "L0H0" in single._repr_html_()
