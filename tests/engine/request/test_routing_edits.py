"""Edits of routing: experts are forced, forbidden and reweighted, with the same bits alone and in company."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.engine.model.loading import load
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.edits import Edit
from replaylens.engine.serving.branch import Branch
from tests.families import hugging_face
from tests.toy_model import random_model

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97 - 1, 7]
LOGITS, CHOICE = "blocks.1.mlp.gate.hook_out", "blocks.1.mlp.gate.hook_choice"
CHOSEN, WEIGHTS = "blocks.1.mlp.hook_expert_indices", "blocks.1.mlp.hook_expert_weights"
EACH, MIXED = "blocks.1.mlp.experts.hook_expert_out", "blocks.1.mlp.experts.hook_out"
SITES = [LOGITS, CHOICE, CHOSEN, WEIGHTS, EACH, MIXED, "S", "C"]


@pytest.fixture(scope="module", params=["mixtral", "olmoe", "phimoe"])
def engine(request: pytest.FixtureRequest) -> Engine:
    return Engine(load(hugging_face(request.param)), page_size=4)


def edited(engine: Engine, *edits: Edit) -> Branch:
    (fork,) = engine.prompt(PROMPT[:1], sites=SITES).fork(edits=list(edits))
    fork.force(PROMPT[1:])
    return fork


def whole(engine: Engine, *edits: Edit) -> Branch:
    return engine.prompt(PROMPT, sites=SITES, edits=list(edits))


def rows(branch: Branch, site: str) -> Tensor:
    return branch.activations[site]


def rarest(branch: Branch) -> int:
    """The expert that fewest rows go to."""
    return int(rows(branch, CHOSEN).flatten().bincount(minlength=rows(branch, LOGITS).shape[1]).argmin())


def test_a_forced_expert_is_chosen_with_its_own_weight(engine: Engine) -> None:
    plain = whole(engine)
    expert = rarest(plain)
    forced = whole(engine, Edit(LOGITS, "force", experts=[expert], positions=slice(3, None)))
    chosen, weights = rows(forced, CHOSEN), rows(forced, WEIGHTS)
    assert bool((chosen[3:] == expert).any(-1).all()) and torch.equal(chosen[:3], rows(plain, CHOSEN)[:3])
    assert torch.equal(rows(forced, LOGITS)[3], rows(plain, LOGITS)[3])  # nothing before the choice has changed there
    assert bool((weights[3:, expert] > 0).all()) and bool(((weights > 0).sum(-1) == chosen.shape[1]).all())
    top = rows(plain, CHOSEN)[3].tolist()
    assert expert in top or len(set(top) & set(chosen[3].tolist())) == len(top) - 1  # the others are the best of the rest


def test_a_forced_expert_brings_its_group() -> None:
    """Its group takes the place of another; the captured scores are those that the choice was made with."""
    routing = Routing(3, "sigmoid", groups=4, chosen_groups=2, group_best=2, correction=True)
    engine = Engine(random_model(vocab_size=97, mixture=MixtureConfig(8, 20, routing)))
    plain, forced = whole(engine), whole(engine, Edit(LOGITS, "force", experts=[6]))
    forbidden = whole(engine, Edit(LOGITS, "forbid", experts=[6]))
    scores, chosen = rows(plain, CHOICE), rows(forced, CHOSEN)
    for row, own, before in zip(scores, chosen.tolist(), rows(plain, CHOSEN).tolist(), strict=True):
        partner = int(row.view(4, 2).sum(-1)[:3].argmax())  # the best of the other groups
        rest = sorted([2 * partner, 2 * partner + 1, 7], key=lambda expert: -float(row[expert]))[:2]
        assert own == sorted([6, *rest]) and (own == before) == (6 in before)
    best = scores.index_fill(-1, torch.tensor([6]), 9.0).topk(3).indices.sort(-1).values
    assert not torch.equal(chosen, best)  # control: among all experts, others would be chosen
    for branch, score in ((forced, 1e30), (forbidden, -1e30)):
        expected = scores.clone()
        expected[:, 6] = score
        assert torch.equal(rows(branch, CHOICE), expected) and torch.equal(rows(branch, LOGITS), rows(plain, LOGITS))


def test_a_forbidden_expert_is_not_chosen(engine: Engine) -> None:
    plain = whole(engine)
    expert = int(rows(plain, CHOSEN).flatten().bincount().argmax())
    forbidden = whole(engine, Edit("blocks.*.mlp.gate.hook_out", "forbid", experts=[expert], layers=[1]))
    assert bool((rows(plain, CHOSEN) == expert).any()) and not bool((rows(forbidden, CHOSEN) == expert).any())
    untouched = ~(rows(plain, CHOSEN) == expert).any(-1)
    assert torch.equal(rows(forbidden, WEIGHTS)[untouched], rows(plain, WEIGHTS)[untouched])


def test_reweighting_multiplies_what_the_expert_adds(engine: Engine) -> None:
    plain = whole(engine)
    expert = int(rows(plain, CHOSEN).flatten().bincount().argmax())
    half = whole(engine, Edit(LOGITS, "reweight", experts=[expert], factor=0.5))
    weights = rows(plain, WEIGHTS).clone()
    weights[:, expert] *= 0.5
    assert torch.equal(rows(half, WEIGHTS), weights)
    assert torch.equal(rows(half, CHOSEN), rows(plain, CHOSEN)) and torch.equal(rows(half, EACH), rows(plain, EACH))
    own = weights.gather(-1, rows(plain, CHOSEN))
    mixed = sum(rows(plain, EACH)[:, slot] * own[:, slot, None] for slot in range(own.shape[1]))
    torch.testing.assert_close(rows(half, MIXED), mixed)
    same = whole(engine, Edit(LOGITS, "reweight", experts=[expert], factor=1.0))
    assert torch.equal(rows(same, "blocks.1.hook_out"), rows(plain, "blocks.1.hook_out"))


EDITS: dict[str, dict[str, Any]] = {
    "force": dict(op="force", experts=[2]),
    "forbid": dict(op="forbid", experts=[0]),
    "reweight": dict(op="reweight", experts=[1, 2], factor=-0.5),
}


@pytest.mark.parametrize("op", EDITS)
def test_bits_are_the_same_alone_in_company_and_token_by_token(engine: Engine, op: str) -> None:
    """Forks of one prompt, each with another edit, and one row at a time: every captured row has the same bits."""
    edit = Edit(LOGITS, **EDITS[op], positions=slice(2, None))
    alone, by_token = whole(engine, edit), edited(engine, edit)
    others = [Edit(LOGITS, "forbid", experts=[1]), edit, Edit(LOGITS, "force", experts=[0])]
    forks = [engine.prompt(PROMPT[:2], sites=SITES).fork(edits=[each])[0] for each in others]
    engine.force_all(forks, [PROMPT[2:], PROMPT[2:], PROMPT[2:6]])
    beside = forks[1]
    for branch in (by_token, beside):
        assert branch.certified
        assert [site for site in alone.activations if not torch.equal(rows(alone, site), rows(branch, site))] == []
        assert torch.equal(alone.kv(), branch.kv())


def test_the_choice_can_be_captured_without_changing_a_bit(engine: Engine) -> None:
    assert torch.equal(whole(engine).kv(), engine.prompt(PROMPT).kv())


def test_edits_of_the_logits_change_choice_and_weights(engine: Engine) -> None:
    """An ordinary edit of the router's logits."""
    value = torch.zeros(rows(whole(engine), LOGITS).shape[1])
    value[1] = 50.0
    branch = whole(engine, Edit(LOGITS, "add", value))
    assert bool((rows(branch, CHOSEN) == 1).any(-1).all())


def test_traces_and_plans_keep_routing_edits(engine: Engine, tmp_path: Path) -> None:
    edit = Edit(LOGITS, "reweight", experts=[1], factor=2.0)
    assert Edit.from_json(edit.to_json()).to_json() == edit.to_json()
    served, fresh = Engine(engine.model, page_size=4, record=True), Engine(engine.model, page_size=16)
    branch = whole(served, edit, Edit(LOGITS, "force", experts=[2], positions=[4]))
    branch.generate(3)
    served.trace.save(tmp_path / "trace.jsonl")
    again = fresh.replay_trace(Trace.load(tmp_path / "trace.jsonl"))[branch.id]
    assert again.tokens == branch.tokens and torch.equal(again.kv(), branch.kv())


# ---- errors ----------------------------------------------------------------------------------------------------------------

WRONG = {
    "no experts": (dict(op="force"), "needs experts"),
    "twice": (dict(op="forbid", experts=[1, 1]), "each only once"),
    "out of range": (dict(op="forbid", experts=[99]), "No expert 99"),
    "too many forced": (dict(op="force", experts=[0, 1, 2]), "but a row goes to 2"),
    "too many forbidden": (dict(op="forbid", experts=[0, 1, 2, 3]), "but a row goes to 2"),
    "a value": (dict(op="force", experts=[1], value=torch.zeros(5)), "takes no value"),
    "a factor": (dict(op="force", experts=[1], factor=2.0), "Only 'add', 'scale' and 'reweight'"),
    "experts of another op": (dict(op="zero", experts=[1]), "Only 'force', 'forbid' and 'reweight'"),
    "another site": (dict(op="force", experts=[1], site="blocks.1.hook_out"), "is for the router"),
    "the chosen experts": (
        dict(op="set", value=torch.zeros(2), site=CHOSEN),
        "can be captured but not edited",
    ),
    "heads of slots": (dict(op="zero", heads=[0], site=EACH), "has no heads"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_does_not_fit_is_refused(what: str) -> None:
    fields, text = WRONG[what]
    with pytest.raises(BadEdit, match=text):
        Engine(load(hugging_face("mixtral")), page_size=4).prompt(PROMPT, edits=[Edit(**{"site": LOGITS, **fields})])


def test_a_dense_model_has_no_router() -> None:
    with pytest.raises(BadEdit, match="is for the router"):
        Engine(load(hugging_face("llama"))).prompt(PROMPT, edits=[Edit(LOGITS, "force", experts=[1])])


def test_edits_together_may_leave_too_few_experts(engine: Engine) -> None:
    """All experts but one are forbidden: the second place goes to a forbidden one with weight 0. All: every weight is 0."""
    count = engine.config.mixture.num_experts  # type: ignore[union-attr]
    most = [Edit(LOGITS, "forbid", experts=[expert]) for expert in range(count - 1)]
    weights = rows(whole(engine, *most), WEIGHTS)
    assert bool((weights[:, -1] > 0).all()) and bool((weights[:, :-1] == 0).all())
    nothing = whole(engine, *most, Edit(LOGITS, "forbid", experts=[count - 1], positions=slice(3, None)))
    assert torch.equal(rows(nothing, WEIGHTS)[:3], weights[:3]) and bool((rows(nothing, WEIGHTS)[3:] == 0).all())
    assert bool((rows(nothing, MIXED)[3:] == 0).all()) and bool((rows(nothing, MIXED)[:3] != 0).any())


def test_of_edits_of_the_same_expert_the_last_one_counts(engine: Engine) -> None:
    expert = rarest(whole(engine))
    force, forbid = (Edit(LOGITS, op, experts=[expert]) for op in ("force", "forbid"))
    here = Edit(LOGITS, "force", experts=[expert], positions=4)
    for alone, together in (([force], [forbid, force]), ([forbid], [force, forbid]), ([force], [force, forbid, force])):
        want, got = whole(engine, *alone), whole(engine, *together)
        assert [site for site in SITES if site in got.activations and not torch.equal(rows(want, site), rows(got, site))] == []
        assert torch.equal(want.kv(), got.kv())
    chosen = (rows(whole(engine, forbid, here), CHOSEN) == expert).any(-1)
    assert chosen.nonzero().tolist() == [[4]]
    later = Edit(LOGITS, "force", experts=[expert], positions=slice(4, 5))
    (fork,) = engine.prompt(PROMPT[:3], sites=SITES, edits=[forbid]).fork(edits=[later])
    fork.force(PROMPT[3:])
    assert torch.equal((rows(fork, CHOSEN) == expert).any(-1), chosen)  # those of a fork come after inherited ones
