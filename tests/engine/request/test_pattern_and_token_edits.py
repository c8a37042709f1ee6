"""Edits that set attention weights, and edits of the positions that hold a token: TransformerLens' numbers, same bits."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, Caveat
from replaylens.engine.model.config import MixtureConfig, Routing
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place
from replaylens.engine.serving.branch import Branch
from replaylens.weights.loading import load
from tests.devices import swept
from tests.engine.request.test_edits import LENGTH, SHORT, TOKEN, TOKENS, VECTOR, assert_one_result, engine
from tests.families import hugging_face
from tests.toy_model import engine as toy_engine
from tests.toy_model import random_model

PATTERN = "blocks.1.attn.hook_pattern"


def test_a_pattern_that_is_set_is_captured_to_the_bit_and_other_rows_keep_theirs() -> None:
    served, source = toy_engine(), toy_engine().prompt(SHORT[::-1], sites=["blocks.0.attn.hook_pattern"])
    site, at = "blocks.0.attn.hook_pattern", [4, 9]
    wanted = source.activations[site][at]
    plain = served.prompt(SHORT, sites=[site]).activations[site]
    edited = served.prompt(SHORT, sites=[site], edits=[Edit(site, "set", wanted, positions=at)]).activations[site]
    others = [i for i in range(len(SHORT)) if i not in at]
    assert torch.equal(edited[at], wanted) and torch.equal(edited[others], plain[others])
    assert not torch.equal(plain[at], wanted)
    one = Edit(site, "set", 0.5, positions=9, keys=2, heads=[3])
    row = served.prompt(SHORT, sites=[site], edits=[one]).activations[site][9]
    same = plain[9].clone()
    same[3, 2] = 0.5
    assert torch.equal(row, same), "other weights keep their bits"


def test_the_later_edit_of_an_edge_counts() -> None:
    served, site = toy_engine(), "blocks.0.attn.hook_pattern"
    put, zero = Edit(site, "set", 0.5, positions=9, keys=2), Edit(site, "zero", positions=9, keys=2)
    weights = [
        served.prompt(SHORT, sites=[site], edits=edits).activations[site][9, :, 2] for edits in ([put, zero], [zero, put])
    ]
    assert not weights[0].any() and (weights[1] == 0.5).all()


def edits() -> list[Edit]:
    rows = torch.rand(2, 2, 23, generator=torch.Generator().manual_seed(3)).tril(20)
    return [
        Edit("blocks.1.attn.hook_pattern", "set", rows, heads=[0, 2], positions=[21, 22]),
        Edit("blocks.2.attn.hook_pattern", "set", 0.125, positions=slice(18, None), keys=[17, 20]),
        Edit("blocks.0.hook_out", "add", VECTOR, factor=4.0, tokens=[TOKEN, TOKENS[20]]),
        Edit("blocks.2.attn.hook_pattern", "mask", keys=[16], positions=slice(17, None), tokens=TOKENS[21]),
    ]


@pytest.mark.parametrize("name", swept(["llama", "gemma2"], "gemma2"))
def test_bits_do_not_depend_on_the_code_path(name: str) -> None:
    assert_one_result(name, edits())


def test_an_edit_of_a_token_reaches_those_to_come() -> None:
    served = Engine.load("coin-plain")
    text, vector = "A coin's state is heads. Alice flips. What's the state? A:", torch.ones(served.config.d_model)
    plain = served.prompt(text).generate(3)
    first = plain.generated[0]
    late = Edit("S", "add", vector, layers=[1], factor=50.0, tokens=first)
    branch = served.prompt(text, edits=[late]).generate(3)
    assert branch.generated[0] == first and branch.certified
    assert torch.equal(branch.kv()[: plain.root_length], plain.kv()[: plain.root_length])
    assert not torch.equal(branch.kv()[plain.root_length], plain.kv()[plain.root_length])
    wanted = served.logits(text, edits=[Edit("S", "zero", layers=[1], positions=4)])
    for tokens in (" heads", [" heads"], served.token_ids_of([" heads"])):
        assert torch.equal(served.logits(text, edits=[Edit("S", "zero", layers=[1], tokens=tokens)]), wanted)


def test_gradients_pass_an_edit_of_a_token_as_one_of_its_positions() -> None:
    served = engine()
    at = [i for i, token in enumerate(TOKENS) if token == TOKEN]
    found = [
        served.prompt(TOKENS, edits=[edit]).gradients((3, 4), sites="S")
        for edit in (Edit("blocks.1.hook_in", "zero", tokens=TOKEN), Edit("blocks.1.hook_in", "zero", positions=at))
    ]
    assert all(torch.equal(found[0][site], found[1][site]) for site in found[0])


def test_hiding_or_setting_outside_a_window_is_refused() -> None:
    served = engine("gemma2")
    window = max(served.config.windows)
    layer = served.config.windows.index(window)
    assert 0 < window < LENGTH, "the model has a sliding window that is shorter than the prompt"
    site, last = f"blocks.{layer}.attn.hook_pattern", LENGTH - 1
    with pytest.raises(BadEdit, match="hide every key"):
        served.prompt(TOKENS, edits=[Edit(site, "mask", positions=last, keys=slice(last - window + 1, last + 1))])
    with pytest.raises(BadEdit, match="hide every key"):
        served.prompt(TOKENS, edits=[Edit(site, "mask", positions=1, keys=0), Edit(site, "mask", positions=1, keys=1)])
    before = last - window  # the last key that the position does not see any more
    hidden = [Edit(site, "set", 0.5, positions=last, keys=key) for key in (0, before)]
    for edit in (*hidden, Edit(site, "mask", positions=last, keys=before), Edit(site, "set", [0.1] * LENGTH, positions=last)):
        with pytest.raises(BadEdit, match="sliding window"):
            served.prompt(TOKENS, edits=[edit])
    served.prompt(TOKENS, edits=[Edit(site, "set", 0.5, positions=last, keys=before + 1)])
    served.prompt(TOKENS, edits=[Edit(site, "mask", positions=last, keys=slice(last - window + 2, last + 1))])
    served.check_integrity()


def test_no_weight_is_set_where_a_row_sees_no_key() -> None:
    """An edit of a range of positions reaches those that see the key: none before it, none whose window has left it."""
    served = engine("gemma2")
    window = max(served.config.windows)
    site = f"blocks.{served.config.windows.index(window)}.attn.hook_pattern"
    edit = Edit(site, "set", 0.25, positions=slice(0, None), keys=[4])
    plain, edited = (served.prompt(TOKENS, sites=[site], edits=edits).activations[site] for edits in ([], [edit]))
    sees = [4 <= query < 4 + window for query in range(LENGTH)]
    assert (edited[sees][:, :, 4] == 0.25).all() and 4 + window < LENGTH
    blind = [not each for each in sees]
    assert torch.equal(edited[blind], plain[blind]) and not edited[blind][:, :, 4].any()


@pytest.mark.parametrize(
    ("keys", "left"), [([0, 1, 2], True), ([1, 2, 3], True), ([0, 1, 2, 3], False), ([0, 1, 2, 3, 4], False), ([4], None)]
)
def test_a_mask_leaves_a_row_one_key(keys: list[int], left: bool | None) -> None:
    """Its own or an earlier one; later keys are not its own to hide. The row's weights are then all on what is left."""
    subject, site = toy_engine(), "blocks.0.attn.hook_pattern"
    edit = Edit(site, "mask", positions=[3], keys=keys)
    if left is None or not left:
        with pytest.raises(BadEdit, match="hides every key from position 3" if left is False else "changes nothing"):
            place(edit, subject.sites, 6)
        return
    pattern = subject.prompt([1, 2, 3, 4, 5, 6], sites=[site], edits=[edit]).activations[site]
    rest = [key for key in range(4) if key not in keys]
    assert torch.allclose(pattern[3][:, rest].sum(-1), torch.ones(pattern.shape[1])) and not pattern[3][:, keys].any()


def test_a_set_weight_outside_the_window_changes_nothing() -> None:
    """Rows whose sliding window hides the set key have no such edge, and keep their bits."""
    subject = Engine.load(hugging_face("mistral"), page_size=4, check=False)
    site, ids = "blocks.0.attn.hook_z", [2 + 7 * i % 90 for i in range(40)]
    edit = Edit("blocks.0.attn.hook_pattern", "set", [0.5], positions=slice(2, None), keys=[1])
    plain, edited = (subject.prompt(ids, sites=[site], edits=edits).activations[site] for edits in ((), [edit]))
    changed = (plain != edited).flatten(1).any(1).nonzero().flatten().tolist()
    assert changed == list(range(2, 1 + subject.config.windows[0]))


def test_tokens_that_match_nothing_are_warned_of() -> None:
    """Once for all layers of an edit. Where one of several texts holds the token, nothing is said."""
    served = toy_engine()
    absent = Edit("S", "add", torch.ones(32), tokens=[next(t for t in range(60) if t not in SHORT)])
    there = Edit("S", "add", torch.ones(32), tokens=[SHORT[2]])
    root = served.prompt(SHORT)
    for work in (
        lambda: served.prompt(SHORT, edits=[absent]),
        lambda: root.fork(edits=[absent]),
        lambda: served.logits(SHORT, edits=[absent]),
        lambda: served.logits_under(SHORT, [[there], [absent]]),
        lambda: served.prompts([SHORT[3:5], SHORT[6:8]], edits=[absent]),
    ):
        with pytest.warns(Caveat, match="Mind the leading space") as caught:
            work()
        assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        served.prompts([SHORT[3:], SHORT], edits=[there])
        root.fork(edits=[there])


# ---- routing edits ---------------------------------------------------------------------------------------------------
# Edits of routing: experts are forced, forbidden and reweighted, with the same bits alone and in company.

PROMPT = [3, 14, 15, 9, 26, 5, 35, 8, 97 - 1, 7]
LOGITS, CHOICE = "blocks.1.mlp.gate.hook_out", "blocks.1.mlp.gate.hook_choice"
CHOSEN, WEIGHTS = "blocks.1.mlp.hook_expert_indices", "blocks.1.mlp.hook_expert_weights"
EACH, MIXED = "blocks.1.mlp.experts.hook_expert_out", "blocks.1.mlp.experts.hook_out"
SITES = [LOGITS, CHOICE, CHOSEN, WEIGHTS, EACH, MIXED, "S", "C"]


@pytest.fixture(scope="module", params=["mixtral", "olmoe", "phimoe"])
def engine_of_routing_edits(request: pytest.FixtureRequest) -> Engine:
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


def test_a_forced_expert_is_chosen_with_its_own_weight(engine_of_routing_edits: Engine) -> None:
    plain = whole(engine_of_routing_edits)
    expert = rarest(plain)
    forced = whole(engine_of_routing_edits, Edit(LOGITS, "force", experts=[expert], positions=slice(3, None)))
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


def test_a_forbidden_expert_is_not_chosen(engine_of_routing_edits: Engine) -> None:
    plain = whole(engine_of_routing_edits)
    expert = int(rows(plain, CHOSEN).flatten().bincount().argmax())
    forbidden = whole(engine_of_routing_edits, Edit("blocks.*.mlp.gate.hook_out", "forbid", experts=[expert], layers=[1]))
    assert bool((rows(plain, CHOSEN) == expert).any()) and not bool((rows(forbidden, CHOSEN) == expert).any())
    untouched = ~(rows(plain, CHOSEN) == expert).any(-1)
    assert torch.equal(rows(forbidden, WEIGHTS)[untouched], rows(plain, WEIGHTS)[untouched])


def test_reweighting_multiplies_what_the_expert_adds(engine_of_routing_edits: Engine) -> None:
    plain = whole(engine_of_routing_edits)
    expert = int(rows(plain, CHOSEN).flatten().bincount().argmax())
    half = whole(engine_of_routing_edits, Edit(LOGITS, "reweight", experts=[expert], factor=0.5))
    weights = rows(plain, WEIGHTS).clone()
    weights[:, expert] *= 0.5
    assert torch.equal(rows(half, WEIGHTS), weights)
    assert torch.equal(rows(half, CHOSEN), rows(plain, CHOSEN)) and torch.equal(rows(half, EACH), rows(plain, EACH))
    own = weights.gather(-1, rows(plain, CHOSEN))
    mixed = sum(rows(plain, EACH)[:, slot] * own[:, slot, None] for slot in range(own.shape[1]))
    torch.testing.assert_close(rows(half, MIXED), mixed)
    same = whole(engine_of_routing_edits, Edit(LOGITS, "reweight", experts=[expert], factor=1.0))
    assert torch.equal(rows(same, "blocks.1.hook_out"), rows(plain, "blocks.1.hook_out"))


EDITS: dict[str, dict[str, Any]] = {
    "force": dict(op="force", experts=[2]),
    "forbid": dict(op="forbid", experts=[0]),
    "reweight": dict(op="reweight", experts=[1, 2], factor=-0.5),
}


@pytest.mark.parametrize("op", EDITS)
def test_bits_are_the_same_alone_in_company_and_token_by_token(engine_of_routing_edits: Engine, op: str) -> None:
    """Forks of one prompt, each with another edit, and one row at a time: every captured row has the same bits."""
    edit = Edit(LOGITS, **EDITS[op], positions=slice(2, None))
    alone, by_token = whole(engine_of_routing_edits, edit), edited(engine_of_routing_edits, edit)
    others = [Edit(LOGITS, "forbid", experts=[1]), edit, Edit(LOGITS, "force", experts=[0])]
    forks = [engine_of_routing_edits.prompt(PROMPT[:2], sites=SITES).fork(edits=[each])[0] for each in others]
    engine_of_routing_edits.force_all(forks, [PROMPT[2:], PROMPT[2:], PROMPT[2:6]])
    beside = forks[1]
    for branch in (by_token, beside):
        assert branch.certified
        assert [site for site in alone.activations if not torch.equal(rows(alone, site), rows(branch, site))] == []
        assert torch.equal(alone.kv(), branch.kv())


def test_the_choice_can_be_captured_without_changing_a_bit(engine_of_routing_edits: Engine) -> None:
    assert torch.equal(whole(engine_of_routing_edits).kv(), engine_of_routing_edits.prompt(PROMPT).kv())


def test_edits_of_the_logits_change_choice_and_weights(engine_of_routing_edits: Engine) -> None:
    """An ordinary edit of the router's logits."""
    value = torch.zeros(rows(whole(engine_of_routing_edits), LOGITS).shape[1])
    value[1] = 50.0
    branch = whole(engine_of_routing_edits, Edit(LOGITS, "add", value))
    assert bool((rows(branch, CHOSEN) == 1).any(-1).all())


def test_traces_and_plans_keep_routing_edits(engine_of_routing_edits: Engine, tmp_path: Path) -> None:
    edit = Edit(LOGITS, "reweight", experts=[1], factor=2.0)
    assert Edit.from_json(edit.to_json()).to_json() == edit.to_json()
    served, fresh = (
        Engine(engine_of_routing_edits.model, page_size=4, record=True),
        Engine(engine_of_routing_edits.model, page_size=16),
    )
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


def test_edits_together_may_leave_too_few_experts(engine_of_routing_edits: Engine) -> None:
    """All experts but one are forbidden: the second place goes to a forbidden one with weight 0. All: every weight is 0."""
    count = engine_of_routing_edits.config.mixture.num_experts  # type: ignore[union-attr]
    most = [Edit(LOGITS, "forbid", experts=[expert]) for expert in range(count - 1)]
    weights = rows(whole(engine_of_routing_edits, *most), WEIGHTS)
    assert bool((weights[:, -1] > 0).all()) and bool((weights[:, :-1] == 0).all())
    nothing = whole(engine_of_routing_edits, *most, Edit(LOGITS, "forbid", experts=[count - 1], positions=slice(3, None)))
    assert torch.equal(rows(nothing, WEIGHTS)[:3], weights[:3]) and bool((rows(nothing, WEIGHTS)[3:] == 0).all())
    assert bool((rows(nothing, MIXED)[3:] == 0).all()) and bool((rows(nothing, MIXED)[:3] != 0).any())


def test_of_edits_of_the_same_expert_the_last_one_counts(engine_of_routing_edits: Engine) -> None:
    expert = rarest(whole(engine_of_routing_edits))
    force, forbid = (Edit(LOGITS, op, experts=[expert]) for op in ("force", "forbid"))
    here = Edit(LOGITS, "force", experts=[expert], positions=4)
    for alone, together in (([force], [forbid, force]), ([forbid], [force, forbid]), ([force], [force, forbid, force])):
        want, got = whole(engine_of_routing_edits, *alone), whole(engine_of_routing_edits, *together)
        assert [site for site in SITES if site in got.activations and not torch.equal(rows(want, site), rows(got, site))] == []
        assert torch.equal(want.kv(), got.kv())
    chosen = (rows(whole(engine_of_routing_edits, forbid, here), CHOSEN) == expert).any(-1)
    assert chosen.nonzero().tolist() == [[4]]
    later = Edit(LOGITS, "force", experts=[expert], positions=slice(4, 5))
    (fork,) = engine_of_routing_edits.prompt(PROMPT[:3], sites=SITES, edits=[forbid]).fork(edits=[later])
    fork.force(PROMPT[3:])
    assert torch.equal((rows(fork, CHOSEN) == expert).any(-1), chosen)  # those of a fork come after inherited ones
