"""`routing`: what it shows is what branches capture, with rejected drafts beside the path."""

import matplotlib
import pytest
import torch
from matplotlib.figure import Figure

from replaylens import Engine, routing
from replaylens.engine.errors import BadRequest, NotCaptured
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.views.sections import Reportable
from tests.toy_model import random_model

matplotlib.use("Agg")
PROMPT = [(5 * i * i + 2) % 61 for i in range(9)]
INDICES, WEIGHTS = "blocks.{}.mlp.hook_expert_indices", "blocks.{}.mlp.hook_expert_weights"
SITES = [name.format(layer) for layer in (0, 2) for name in (INDICES, WEIGHTS)]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return Engine(random_model(num_layers=3, mixture=MixtureConfig(6, 20, Routing(2), layers=(True, False, True))))


def test_the_path_is_what_a_branch_captures(engine: Engine) -> None:
    result = routing(engine, PROMPT)
    branch = engine.prompt(PROMPT, sites=SITES)
    assert result.layers == (0, 2) and result.drafts == () and isinstance(result, Reportable)
    for at, layer in enumerate(result.layers):
        chosen = branch.activations[INDICES.format(layer)]
        assert torch.equal(result.path.chosen[at], chosen)
        assert torch.equal(result.path.weights[at], branch.activations[WEIGHTS.format(layer)].gather(-1, chosen))
    frame = result.frame
    assert len(frame) == 2 * 9 * 2 and set(frame["draft"]) == {-1}
    assert frame.groupby(["layer", "position"])["weight"].sum().between(0.999, 1.001).all()
    load = result.load
    assert len(load) == 2 * 6 and (load.groupby("layer")["tokens"].sum() == 18).all()
    assert load["weight"].sum() == pytest.approx(18)


def test_rejected_drafts_stand_beside_the_accepted_tokens(engine: Engine) -> None:
    branch = engine.prompt(PROMPT, sites=SITES, keep_rejected=True)
    branch.generate(4, drafter="forced", drafts={9: [[1, 2]], 10: [[3]]}, final=True)
    result = routing(engine, branch)
    assert [(draft.start, len(draft.tokens)) for draft in result.drafts] == [(9, 2), (10, 1)]
    beside = result.beside
    assert len(beside) == 3 * 2 and set(beside["position"]) == {9, 10}
    line = beside[(beside["draft"] == 0) & (beside["position"] == 9) & (beside["layer"] == 2)].iloc[0]
    alone = engine.prompt([*PROMPT, 1], sites=SITES).activations[INDICES.format(2)][9].tolist()
    accepted = engine.prompt(branch.tokens[:10], sites=SITES).activations[INDICES.format(2)][9].tolist()
    assert list(line["rejected_experts"]) == alone and list(line["accepted_experts"]) == accepted
    assert line["shared"] == len(set(alone) & set(accepted))
    assert {0, 1} <= set(result.frame["draft"]) and "rejected at 9" in result._repr_html_()


def test_drafts_without_rows_are_not_left_out_silently(engine: Engine) -> None:
    branch = engine.prompt(PROMPT, sites=SITES)
    branch.generate(4, drafter="forced", drafts={9: [[1, 2]]}, final=True, keep_pages=True)
    assert branch.rejected
    with pytest.warns(NotCaptured, match="1 rejected drafts .* keep_rejected=True"):
        assert routing(engine, branch).drafts == ()


def test_it_draws_itself(engine: Engine) -> None:
    result = routing(engine, PROMPT, layers=[2])
    assert result.layers == (2,) and isinstance(result.plot(), Figure) and isinstance(result.plot_load(), Figure)
    assert "heaviest first" in result._repr_html_() and repr(result) == (
        "RoutingResult(1 layers, 6 experts, 9 tokens, 0 rejected drafts)"
    )


def test_what_cannot_be_shown_is_refused(engine: Engine) -> None:
    with pytest.raises(BadRequest, match=r"Layer 1 has an MLP. Give layers with a mixture of experts: 0, 2"):
        routing(engine, PROMPT, layers=[1])
    with pytest.raises(BadRequest, match="layers is empty"):
        routing(engine, PROMPT, layers=[])
    with pytest.raises(BadRequest, match=r"does not capture blocks.0.mlp.gate.hook_expert_indices"):
        routing(engine, engine.prompt(PROMPT, sites="S"))
    with pytest.raises(BadRequest, match="has no experts"):
        routing(Engine(random_model()), PROMPT)
