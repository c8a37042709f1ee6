"""Edits: equal to another library's result of the same intervention, with the same bits on every code path."""

import random
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadFile, BadRequest, UnknownSite
from replaylens.engine.records import EditRecord, PlacedEditRecord
from replaylens.engine.request.capture import Chunk, Recording, picked
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import PlacedEdit, page_keys
from replaylens.engine.request.placing import place
from replaylens.tasks.texts import GivenTexts
from replaylens.weights import loading
from tests.devices import DEVICES, covering, swept
from tests.engine.coin_engine import PROMPT
from tests.families import hugging_face
from tests.replay.bridges import bridge
from tests.toy_model import engine as engine_of_placing
from tests.toy_model import engine as toy_engine
from tests.toy_model import random_model

LENGTH = 24
TOKENS = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(2))
ROWS = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))
HEAD = torch.randn(8, generator=torch.Generator().manual_seed(5))
ROW = torch.rand(10, generator=torch.Generator().manual_seed(4)).softmax(-1)
SHORT = [token % 60 for token in TOKENS[:12]]
TOKEN = TOKENS[5]
Z = "blocks.1.attn.hook_z"


def engine(name: str = "llama", device: str = "cpu", **options: Any) -> Engine:
    return Engine(loading.load(hugging_face(name), torch.float32).to(device), canary=True, **options)


def bits(x: Tensor) -> bytes:
    return x.contiguous().numpy().tobytes()


def edited_logits(served: Engine, edit: Edit) -> Tensor:
    branch = served.prompt(TOKENS, sites=["unembed.hook_out"], edits=[edit])
    return branch.activations["unembed.hook_out"]


def lens_logits(name: str, site: str, change: Any) -> Tensor:
    """The bridge's logits with the same change made by a hook function."""
    model = bridge(name)
    with torch.no_grad():
        logits = model(torch.tensor([TOKENS]))
        changed = model.run_with_hooks(torch.tensor([TOKENS]), fwd_hooks=[(site, change)])
    assert not torch.allclose(changed, logits, atol=1e-3), "the edit does nothing at this scale"
    return changed[0]


def add(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 5:9] += 2.5 * VECTOR
    return value


def put(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 5:9] = ROWS
    return value


def zero(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, [3, 7]] = 0
    return value


def erase(value: Tensor, hook: Any = None) -> Tensor:
    unit = VECTOR / VECTOR.norm()
    return value - (value @ unit)[..., None] * unit


def head_zero(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 4:, [1, 3]] = 0
    return value


def head_add(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 4:, 1] += 2 * HEAD
    return value


def head_scale(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 4:, [1, 3]] *= -0.4
    return value


def edge_zero(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 1, 9, 2:6] = 0
    return value


def edge_mask(value: Tensor, hook: Any = None) -> Tensor:
    value = edge_zero(value)
    return value / value.sum(-1, keepdim=True)


def longer(value: Tensor, hook: Any = None) -> Tensor:
    moved = value + 3 * VECTOR
    return moved * (value.norm(dim=-1, keepdim=True) / moved.norm(dim=-1, keepdim=True))


def matched(value: Tensor, hook: Any = None) -> Tensor:
    return value + 3 * VECTOR * (value.norm(dim=-1, keepdim=True) / VECTOR.norm())


ABOVE = 1.0


def far(value: Tensor, hook: Any = None) -> Tensor:
    chosen = value @ VECTOR > ABOVE
    assert 0 < chosen.sum() < (value @ VECTOR > 0).sum(), "the threshold leaves some rows out"
    return torch.where(chosen[..., None], value + 3 * VECTOR, value)


def where(value: Tensor, hook: Any = None) -> Tensor:
    return torch.where((value @ VECTOR > 0)[..., None], value + 3 * VECTOR, value)


def set_row(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 1, 9, :10] = ROW
    return value


def set_keys(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, :, 9:, 3], value[:, :, 9:, 7] = 0.25, 0.5
    return value


def at_token(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, [i for i, token in enumerate(TOKENS) if token == TOKEN]] += 3 * VECTOR
    return value


EDGES = "blocks.1.attn.hook_pattern"
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "add": ("blocks.1.hook_in", add, dict(op="add", value=VECTOR, positions=slice(5, 9), factor=2.5)),
    "set": ("blocks.1.attn.hook_out", put, dict(op="set", value=ROWS, positions=slice(5, 9))),
    "zero": ("blocks.2.mlp.hook_out", zero, dict(op="zero", positions=[3, 7])),
    "project out": ("blocks.1.hook_in", erase, dict(op="project_out", value=VECTOR)),
    "zero heads": (Z, head_zero, dict(op="zero", positions=slice(4, None), heads=[3, 1])),
    "add to a head": (
        "blocks.1.attn.hook_q",
        head_add,
        dict(op="add", value=2 * HEAD[None], positions=slice(4, None), heads=[1]),
    ),
    "scale heads": (Z, head_scale, dict(op="scale", factor=-0.4, positions=slice(4, None), heads=[3, 1])),
    "scale a site": ("blocks.1.hook_mlp_out", lambda value, hook: value * 2.5, dict(op="scale", factor=2.5)),
    "zero edges": (EDGES, edge_zero, dict(op="zero", positions=9, keys=slice(2, 6), heads=[1])),
    "mask edges": (EDGES, edge_mask, dict(op="mask", positions=9, keys=[2, 3, 4, 5], heads=[1])),
    "keep norm": ("blocks.1.hook_in", longer, dict(op="add", value=VECTOR, factor=3.0, keep_norm=True)),
    "match norm": ("blocks.1.hook_in", matched, dict(op="add", value=VECTOR, factor=3.0, match_norm=True)),
    "above": ("blocks.1.hook_in", far, dict(op="add", value=VECTOR, factor=3.0, when=VECTOR, above=ABOVE)),
    "when": ("blocks.1.hook_in", where, dict(op="add", value=VECTOR, factor=3.0, when=VECTOR)),
    "weights of a row": (EDGES, set_row, dict(op="set", value=ROW, positions=9, heads=[1])),
    "weights of keys": (EDGES, set_keys, dict(op="set", value=[0.25, 0.5], positions=slice(9, None), keys=[3, 7])),
    "weights of keys in another order": (
        EDGES,
        set_keys,
        dict(op="set", value=[0.5, 0.25], positions=slice(9, None), keys=[7, 3]),
    ),
    "a token": ("blocks.1.hook_in", at_token, dict(op="add", value=VECTOR, factor=3.0, tokens=TOKEN)),
}


@pytest.mark.parametrize("name, case", covering(["llama", "gpt2"], CASES))
def test_they_are_what_transformer_lens_hooks_do(name: str, case: str) -> None:
    site, change, options = CASES[case]
    ours = edited_logits(engine(name), Edit(site, **options))
    theirs = lens_logits(name, site, change)
    assert ((ours - theirs).norm() / theirs.norm()) < 2e-5


def test_hook_functions_work_and_are_not_certified() -> None:
    """A TransformerLens-style function gives the edit's result. It is not certified, shared or replayed."""
    served = engine(record=True)
    root = served.prompt(TOKENS, sites="S")
    (hooked,) = root.fork(hooks=[("blocks.1.hook_resid_pre", add)])
    (edited,) = root.fork(edits=[Edit("blocks.1.hook_in", **CASES["add"][2])])
    served.forest.compute([hooked.lane, edited.lane])
    assert not hooked.certified and edited.certified and root.certified
    assert torch.equal(hooked.activations["blocks.2.hook_out"], edited.activations["blocks.2.hook_out"])
    assert not set(hooked.lane.table.pages) & set(root.lane.table.pages)
    with pytest.raises(BadFile, match="hook functions"):
        engine().replay_trace(served.trace)


EDITS = [
    Edit("blocks.1.hook_in", "add", VECTOR, positions=slice(18, None), factor=3.0),
    Edit("T", "zero", layers=[2], positions=[5, 20]),
    Edit("blocks.0.hook_out", "project_out", ROWS[:2], positions=slice(10, 30)),
    Edit("blocks.2.mlp.hook_out", "resample", ROWS, positions=slice(22, None), seed=9),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", swept(["llama", "neox", "gemma2"], "gemma2"))
def test_edited_bits_do_not_depend_on_the_road(name: str, device: str) -> None:
    """Direct or verified with any drafter, forked or planted, alone or beside other requests: one result."""
    served = engine(name, device, lens_layer=2)
    (reference,) = served.prompt(TOKENS, sites="STCZ").fork(edits=EDITS)
    reference.generate(14, window=1, final=True)
    plain = served.prompt(TOKENS).generate(14)
    assert plain.tokens != reference.tokens, "the edits must matter"
    for drafter in ("self", "lens", "tree", "ngram"):
        other = served.prompt([9] * 7)
        branch = served.prompt(TOKENS, sites="STCZ", edits=EDITS)
        served.generate([other, branch], 14, drafter=drafter, window=5, final=True)
        assert branch.tokens == reference.tokens
        assert torch.equal(branch.kv(), reference.kv())
        for site in reference.activations.sites():
            assert bits(branch.activations[site]) == bits(reference.activations[site]), (drafter, site)
        served.check_integrity()


@pytest.mark.parametrize("device", DEVICES)
def test_unedited_neighbours_do_not_move(device: str) -> None:
    served = engine(device=device)
    alone = served.prompt(TOKENS, sites="S").activations["blocks.2.hook_out"]
    branches = [served.prompt(TOKENS, sites="S", edits=EDITS), served.prompt(TOKENS, sites="S")]
    served.generate(branches, 6)
    assert torch.equal(branches[1].activations["blocks.2.hook_out"][:LENGTH], alone)


@pytest.mark.parametrize("device", DEVICES)
def test_pages_are_shared_up_to_the_first_edited_position(device: str) -> None:
    served = engine(device=device, page_size=4)
    root = served.prompt(TOKENS)
    (child,) = root.fork(edits=[Edit("blocks.0.hook_out", "add", VECTOR, positions=slice(9, None))])
    served.forest.compute([child.lane])
    assert child.lane.table.pages[:2] == root.lane.table.pages[:2]
    assert not set(child.lane.table.pages[2:]) & set(root.lane.table.pages)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("place", [0, 2, 3])  # the first and the last position of a page, and one between them
def test_prefixes_are_shared_only_under_the_same_edits(place: int, device: str) -> None:
    """Two requests with one prompt share KV if and only if their edits of that part have equal content."""
    served = engine(device=device, page_size=4)
    early = Edit("blocks.0.hook_out", "add", VECTOR, positions=[place])
    same = Edit("blocks.0.hook_out", "add", VECTOR.clone(), positions=[place])
    other = Edit("blocks.0.hook_out", "add", VECTOR * 1.0001, positions=[place])
    first = served.prompt(TOKENS, edits=[early])
    assert served.prompt(TOKENS, edits=[same]).lane.table.pages[0] == first.lane.table.pages[0]
    for edits in ([other], []):
        branch = served.prompt(TOKENS, edits=edits)
        assert not set(branch.lane.table.pages) & set(first.lane.table.pages)
        assert not torch.equal(branch.kv(), first.kv())


@pytest.mark.parametrize("device", DEVICES)
def test_prefixes_of_different_draws_are_not_shared(device: str) -> None:
    """Two edits that differ only in their seed insert other rows: the second request has its own KV."""
    served = engine(device=device, page_size=4)
    drawn = [Edit("blocks.0.hook_out", "resample", ROWS, positions=slice(0, 20), seed=seed) for seed in (0, 1)]
    first, second = (served.prompt(TOKENS, edits=[edit]) for edit in drawn)
    assert not set(first.lane.table.pages) & set(second.lane.table.pages)
    assert torch.equal(second.kv(), engine(device=device).prompt(TOKENS, edits=[drawn[1]]).kv())
    assert not torch.equal(second.kv(), first.kv()), "the control: the seeds draw different rows"


@pytest.mark.parametrize("device", DEVICES)
def test_interchange_reproduces_the_source(device: str) -> None:
    """After the whole residual stream of another path is inserted, everything that follows is that path's."""
    served = engine(device=device)
    source = served.prompt(TOKENS[::-1], sites="S")
    site = "blocks.1.hook_in"
    target = served.prompt(TOKENS, sites="S", edits=[Edit.interchange(site, source.activations[site], slice(0, LENGTH))])
    for after in ("blocks.1.hook_in", "blocks.2.hook_in", "blocks.2.hook_out"):
        assert torch.equal(target.activations[after], source.activations[after])


# ---- more edits ------------------------------------------------------------------------------------------------------
# Edits of heads and of attention edges, by pattern, norm-preserving and conditional: TransformerLens' numbers, same bits.


def edits(d_head: int) -> list[Edit]:
    return [
        Edit("blocks.*.attn.hook_z", "zero", heads=[1], positions=slice(20, None)),
        Edit("blocks.0.attn.hook_v", "add", torch.ones(1, d_head), heads=[0], positions=[3, 21], factor=2.0),
        Edit("blocks.0.attn.hook_z", "scale", factor=0.7, heads=[2], positions=slice(17, None)),
        Edit("C", "scale", factor=-1.5, layers=[1], when=ROWS[1], positions=slice(21, None)),
        Edit("blocks.1.attn.hook_pattern", "mask", heads=[0, 2], positions=slice(18, None), keys=[1, 4]),
        Edit("blocks.2.attn.hook_pattern", "zero", positions=22, keys=slice(0, 30)),
        Edit("blocks.1.hook_out", "add", VECTOR, keep_norm=True, when=ROWS[0], positions=slice(19, None), factor=4.0),
        Edit("blocks.1.hook_out", "add", ROWS[1], match_norm=True, when=ROWS[0], above=0.3, positions=slice(20, None)),
    ]


def assert_one_result(name: str, made: list[Edit]) -> None:
    """Direct or verified, forked or planted, alone or beside others, as variants, from its own trace."""
    served = engine(name, record=True)
    (reference,) = served.prompt(TOKENS, sites="STC").fork(edits=made)
    reference.generate(8, window=1, final=True)
    other, branch = served.prompt([9] * 7), served.prompt(TOKENS, sites="STC", edits=made)
    served.generate([other, branch], 8, drafter="lens", window=5, final=True)
    replayed = engine(name).replay_trace(served.trace)[reference.id]
    for same in (branch, replayed):
        assert same.tokens == reference.tokens and torch.equal(same.kv(), reference.kv())
        assert all(bits(same.activations[s]) == bits(reference.activations[s]) for s in reference.activations.sites())
    for edit, logits in zip(made, served.logits_under(TOKENS, [[edit] for edit in made]), strict=True):
        assert torch.equal(logits, engine(name).logits(TOKENS, edits=[edit]))
    (unedited,) = served.prompt(TOKENS, sites="STC").fork()
    assert not torch.equal(unedited.generate(8, final=True).kv(), reference.kv()), "control: the edits do something"
    served.check_integrity()


@pytest.mark.parametrize("name", swept(["llama", "gemma2"], "gemma2"))
def test_bits_do_not_depend_on_the_code_path(name: str) -> None:
    assert_one_result(name, edits(engine(name).config.d_head))


@pytest.mark.parametrize("device", DEVICES)
def test_other_heads_keep_their_bits(device: str) -> None:
    served = engine(device=device)
    rows = served.prompt(TOKENS, sites=[Z]).activations[Z]
    edited = served.prompt(TOKENS, sites=[Z], edits=[Edit(Z, "zero", heads=[1])]).activations[Z]
    others = [head for head in range(rows.shape[1]) if head != 1]
    assert torch.equal(edited[:, others], rows[:, others]) and not edited[:, 1].any() and rows[:, 1].any()


@pytest.mark.parametrize("device", DEVICES)
def test_scaled_rows_are_the_product(device: str) -> None:
    """With the bits of the product, in the chosen heads and at the chosen positions alone. A factor of one changes no bit."""
    served = engine(device=device)
    rows = served.prompt(TOKENS, sites=[Z]).activations[Z]
    edit = Edit(Z, "scale", factor=0.3, heads=[1], positions=[2, 5])
    edited = served.prompt(TOKENS, sites=[Z], edits=[edit]).activations[Z]
    wanted = rows.clone()
    wanted[[2, 5], 1] = rows[[2, 5], 1] * torch.tensor(0.3, dtype=rows.dtype)
    assert torch.equal(edited[:, 1], wanted[:, 1]) and not torch.equal(edited, rows) and torch.equal(edited[0], rows[0])
    same = served.prompt(TOKENS, sites=[Z], edits=[Edit(Z, "scale")]).activations[Z]
    assert torch.equal(same, rows)


def test_a_value_of_all_heads_gives_the_chosen_ones() -> None:
    served = engine()
    source = served.prompt(TOKENS[::-1], sites=[Z]).activations[Z]
    whole = Edit(Z, "set", source, positions=range(LENGTH), heads=[2, 0])
    part = Edit(Z, "set", source[:, [2, 0]], positions=range(LENGTH), heads=[2, 0])
    keys = [place(edit, served.sites, LENGTH)[0].key for edit in (whole, part)]
    assert keys[0] == keys[1]
    assert torch.equal(served.prompt(TOKENS, sites=[Z], edits=[whole]).activations[Z][:, [0, 2]], source[:, [0, 2]])


def test_masked_edges_have_weight_zero_and_the_rest_sums_to_one() -> None:
    served, site = toy_engine(), "blocks.0.attn.hook_pattern"
    for op, total in (("mask", 1.0), ("zero", None)):
        branch = served.prompt(SHORT, sites=[site], edits=[Edit(site, op, positions=7, keys=[2, 5], heads=[3])])  # type: ignore[arg-type]
        row, plain = branch.activations[site][7, 3], served.prompt(SHORT, sites=[site]).activations[site][7, 3]
        assert not row[[2, 5]].any() and plain[[2, 5]].all()
        kept = 1 - plain[[2, 5]].sum() if total is None else 1.0
        assert torch.isclose(row.sum(), torch.as_tensor(kept))


def test_every_field_is_part_of_the_hash_and_survives_json() -> None:
    """Down to the last bit of a value. Equal edits have equal keys, under any name of their site."""
    table, site = engine().sites, "blocks.0.attn.hook_pattern"
    nudged = VECTOR.clone()
    nudged[0] = VECTOR[0].nextafter(torch.tensor(9.0))
    add, edge, scale = (
        partial(Edit, "blocks.0.hook_in", "add", VECTOR),
        partial(Edit, site),
        partial(Edit, "blocks.0.hook_in", "scale"),
    )
    resample = partial(Edit, "blocks.0.hook_in", "resample")
    variants = [
        add(),
        Edit("blocks.0.hook_in", "add", nudged),
        Edit("blocks.0.hook_in", "set", VECTOR),
        Edit("blocks.1.hook_in", "add", VECTOR),
        *(add(positions=positions) for positions in (slice(0, 5), [0, 1, 2, 3, 4])),
        *(
            add(**more)
            for more in ({"factor": 2.0}, {"keep_norm": True}, {"match_norm": True}, {"tokens": 4}, {"tokens": [4, 5]})
        ),
        *(add(**more) for more in ({"when": VECTOR}, {"when": VECTOR, "above": 0.25}, {"when": -VECTOR})),
        *(resample(rows, seed=seed) for rows, seed in ((ROWS, 0), (ROWS, 1), (ROWS.flip(0), 0))),
        *(scale(factor=factor) for factor in (2.0, 0.5)),
        Edit(Z, "scale", factor=0.5, heads=[0]),
        *(Edit(Z, "zero", heads=heads) for heads in ([0], [1], None)),
        *(edge("mask", positions=9, keys=key) for key in (3, 4)),
        *(edge("zero", positions=9, keys=4, heads=heads) for heads in (None, [0])),
        *(edge("set", ROW, positions=9, heads=heads) for heads in (None, [1])),
        *(edge("set", 0.5, positions=9, keys=key) for key in (3, 4)),
    ]
    keys = [place(edit, table, LENGTH)[0].key for edit in variants]
    assert len(set(keys)) == len(variants)
    assert [place(Edit.from_json(edit.to_json()), table, LENGTH)[0].key for edit in variants] == keys
    assert set(add().to_json()) == {"site", "op", "positions", "layers", "factor", "seed", "value"}, "old plans keep their form"
    assert place(Edit("blocks.0.hook_resid_pre", "add", VECTOR.clone()), table, 3)[0].key == keys[0]
    assert page_keys(place(variants[4], table, LENGTH), 3, 4) == [keys[4], keys[4], b""]


def test_the_hash_of_an_old_edit_has_not_moved() -> None:
    """Prefix sharing and traces of earlier versions rest on it."""
    (placed,) = place(Edit("blocks.0.hook_in", "add", torch.arange(32.0), positions=[3], factor=2.0), engine().sites, LENGTH)
    assert placed.key.hex() == "42a5b4f6fb7d059f28a10e4b995bb9dd"


def test_a_slice_may_name_tokens_to_come() -> None:
    served = engine()
    late = Edit("blocks.1.hook_in", "add", 9 * VECTOR, positions=slice(LENGTH, None))
    plain, steered = served.prompt(TOKENS).generate(4), served.prompt(TOKENS, edits=[late]).generate(4)
    assert plain.tokens != steered.tokens


def test_a_pattern_of_names_selects_sites() -> None:
    table = engine().sites
    names = [placed.site for placed in place(Edit("blocks.*.hook_resid_post", "zero"), table, LENGTH)]
    assert names == [f"blocks.{layer}.hook_out" for layer in range(3)]
    assert len(place(Edit("blocks.*.attn.hook_z", "zero", layers=[0, 2]), table, LENGTH)) == 2
    with pytest.raises(UnknownSite, match="No site matches"):
        place(Edit("blocks.*.hook_nothing", "zero"), table, LENGTH)


def test_files_know_every_field_of_an_edit() -> None:
    """Records are read strictly: a field that they lack would make a plan or a trace with such an edit unreadable."""
    names = lambda kind: {field.name for field in fields(kind)}  # noqa: E731
    assert names(EditRecord) == names(Edit) and names(PlacedEditRecord) == names(PlacedEdit) - {"key"}


# ---- bad edits -------------------------------------------------------------------------------------------------------
# Edits and hook functions that are refused.


@pytest.mark.parametrize("wrong", [lambda x, hook: x[:, :1], lambda x, hook: x[0], lambda x, hook: x.numpy()])
def test_a_hook_function_that_gives_something_else_is_refused(served: Engine, wrong: Any) -> None:
    """A single row must not be broadcast to all positions."""
    (child,) = served.prompt(PROMPT).fork(hooks=[("blocks.1.hook_in", wrong)])
    with pytest.raises(BadEdit, match=r"The hook function on blocks\.1\.hook_in returned a"):
        child.generate(2)
    served.check_integrity()


E = partial(partial, Edit)
"""an edit that may be refused when it is made, or when it is placed"""
AT, AT_HEADS = partial(E, "blocks.0.hook_in"), partial(E, Z)
ADD, EDGE = partial(AT, "add", VECTOR), partial(E, "blocks.0.attn.hook_pattern")
REFUSED: list[tuple[Any, str]] = [
    # values
    (AT("add"), "needs a value"),
    (AT("zero", VECTOR), "takes no value"),
    (E("C", "scale", 0.5), "takes no value. Give what to multiply by as factor"),
    (AT("add", VECTOR[:5]), r"expected \(32,\)"),
    (AT("set", ROWS, positions=slice(0, 3)), "expected"),
    (AT("add", VECTOR * float("nan")), "NaN"),
    (ADD(factor=float("inf")), "factor=inf. Give a finite number"),
    (E("C", "scale", factor=float("nan")), "Invalid factor=nan"),
    (AT("project_out", torch.stack([VECTOR, VECTOR])), "linearly dependent"),
    (AT("project_out", torch.zeros(32)), "are zero or linearly dependent"),
    (AT("project_out", VECTOR[:5]), r"has shape \(5,\); expected"),
    (AT("project_out", torch.eye(5)), r"has shape \(5, 5\); expected"),
    (AT("project_out", torch.tensor(1.0)), r"has shape \(\); expected"),
    (AT("project_out", ROWS[:0]), r"has shape \(0, \d+\); expected"),
    (E("blocks.0.attn.hook_z", "project_out", torch.ones(8)), "one vector per row"),
    (AT("resample", torch.tensor(1.0)), r"has shape \(\); expected \(rows, \d+\)"),
    (AT("resample", VECTOR), r"expected \(rows, \d+\)"),
    (E("S", "resample", torch.randn(0, 32)), "at least one of them"),
    # positions, layers and sites
    (ADD(positions=slice(5, 5)), "empty"),
    (ADD(positions=slice(-LENGTH - 1, None)), "start before 0"),
    (ADD(positions=slice(-LENGTH - 1, 4)), "start before 0"),
    (ADD(positions=slice(0, -LENGTH)), "empty"),
    (ADD(positions=slice(-2, -4)), "empty"),
    (ADD(positions=[]), "at least one"),
    (ADD(positions=-LENGTH - 1), "none before 0"),
    (ADD(positions=slice(0, 9, 2)), "step 1"),
    (ADD(positions=1.5), "positions=1.5. Give whole numbers"),
    (AT("set", torch.zeros(2, 32), positions=[3, 3]), "twice"),
    (AT("zero", positions=77), r"changes nothing: the branch has 24 tokens.*slice\(77, 78\)"),
    (AT("zero", positions=[30, 31]), "changes nothing"),
    (E("S", "add", VECTOR, layers=[9]), "layers 0 to"),
    (ADD(layers=[1]), "letters"),
    (E("blocks.*.hook_out", "zero", layers=[0, 99]), "layer 99"),
    (E("blocks.*.hook_out", "zero", layers=[-1, 0]), "layer -1"),
    (E("unembed.hook_out", "zero"), "not edited"),
    # heads
    (AT("zero", heads=[0]), "has no heads"),
    (AT_HEADS("zero", heads=[]), "at least one"),
    (AT_HEADS("zero", heads=[1, 1]), "each only once"),
    (AT_HEADS("zero", heads=[4]), "heads 0 to 3"),
    (AT_HEADS("set", torch.zeros(3, 8), heads=[0]), "must end with"),
    # edges and their weights
    (AT("mask", keys=[0]), "for attention patterns"),
    (EDGE("add", VECTOR), "takes the ops 'mask'"),
    (EDGE("scale", factor=2.0, keys=[1]), "takes the ops 'mask'"),
    (EDGE("mask", positions=5), "with keys"),
    (EDGE("mask", positions=5, keys=6), "changes nothing"),
    (EDGE("mask", positions=2, keys=[0, 1, 2]), "hides every key"),
    (EDGE("mask", positions=3, keys=slice(-LENGTH - 1, 2)), "before 0"),
    (EDGE("mask", positions=14, keys=slice(0, 3 * 10**7)), "shorter"),
    (EDGE("zero", positions=slice(5, None), keys=slice(5, None)), "no end"),
    (EDGE("set", positions=9), "needs a value"),
    (EDGE("set", ROW), "later positions see more"),
    (EDGE("set", ROW, positions=12), "position 12 sees 13"),
    (EDGE("set", ROW, positions=5), "come after their position"),
    (EDGE("set", torch.ones(3, 10), positions=9), "expected"),
    (EDGE("set", [0.5, 0.5], positions=9, keys=[3, 3]), "names a key twice"),
    (EDGE("set", [float("nan")], positions=9, keys=[3]), "NaN"),
    (EDGE("mask", ROW, positions=9, keys=[3]), "only 'set' takes a value"),
    # tokens
    (EDGE("zero", keys=[3], positions=9, tokens=[]), "tokens is empty"),
    (EDGE("zero", keys=[3], positions=9, tokens=2.5), "Invalid tokens"),
    (EDGE("zero", keys=[3], positions=9, tokens=97), "vocabulary"),
    (EDGE("set", torch.ones(2, 4, 1), keys=[3], positions=[5, 9], tokens=3), "one row for all"),
    # norms and conditions
    (AT("zero", keep_norm=True), "Only 'add'"),
    (E("C", "scale", factor=2.0, keep_norm=True), "Only 'add' takes it"),
    (AT("zero", match_norm=True), "match_norm was given with the op 'zero'"),
    (ADD(match_norm=True, keep_norm=True), "match_norm was given with keep_norm"),
    (AT("add", 0 * VECTOR, match_norm=True), "is zero, which no factor scales"),
    (ADD(above=0.5), "there is no direction"),
    (ADD(when=VECTOR, above=float("nan")), "Invalid above=nan"),
    (ADD(when=VECTOR[:3]), "one finite direction"),
    (E("S", "zeroo"), "Unknown op 'zeroo'"),
    (E("blocks.0.hook_inn", "zero"), "Unknown site"),
]


@pytest.fixture(scope="module")
def llama() -> Engine:
    return engine()


@pytest.mark.parametrize(("edit", "says"), REFUSED, ids=[f"{i} {says[:30]}" for i, (_, says) in enumerate(REFUSED)])
def test_refused(llama: Engine, edit: Any, says: str) -> None:
    for call in (lambda edits: llama.prompt(TOKENS, edits=edits), lambda edits: llama.logits(TOKENS, edits=edits)):
        with pytest.raises((BadEdit, UnknownSite), match=says):
            call([edit()])
    assert llama.loop.lanes == {} and llama.check_integrity()


# ---- placing ---------------------------------------------------------------------------------------------------------
# Edits that would silently change something else than was asked for.

TOKENS_OF_PLACING = list(range(1, 20))
ROWS_OF_PLACING, HEADS = "blocks.1.hook_in", "blocks.0.attn.hook_z"


@pytest.mark.parametrize("positions", [[3, 7], [7, 3], [-1, 0], [5, -2, 1]])
@pytest.mark.parametrize("site", [ROWS_OF_PLACING, HEADS])
def test_every_row_goes_to_its_position(site: str, positions: list[int]) -> None:
    """A branch's own rows change nothing, in whatever order positions are given. Rows of other positions do."""
    subject = engine_of_placing()
    own = subject.prompt(TOKENS_OF_PLACING, sites=[site]).activations[site]
    plain = subject.logits(TOKENS_OF_PLACING)
    assert torch.equal(subject.logits(TOKENS_OF_PLACING, edits=[Edit.interchange(site, own[positions], positions)]), plain)
    assert not torch.equal(
        subject.logits(TOKENS_OF_PLACING, edits=[Edit.interchange(site, own[positions[::-1]], positions)]), plain
    )


def test_edits_of_a_text_must_fit_the_model() -> None:
    """They come from another engine, or from a file."""
    deep, flat = engine_of_placing(random_model(0, num_layers=4)), engine_of_placing(random_model(0, num_layers=2))
    task = deep.texts([deep.prompt(TOKENS_OF_PLACING, edits=[Edit("blocks.3.hook_in", "zero")])])
    with pytest.raises((BadEdit, UnknownSite), match=r"blocks\.3"):
        flat.replay(task, sites="S")


@pytest.mark.parametrize("change", [{"op": "x"}, {"heads": [99]}, {"heads": [-1]}, {"start": "a"}, {"picks": [-1]}])
def test_damaged_edits_of_a_text(change: dict[str, object]) -> None:
    subject = engine_of_placing()
    task = subject.texts([subject.prompt(TOKENS_OF_PLACING, edits=[Edit(HEADS, "zero", positions=3, heads=[1])])])
    (given,) = [example.given for example in task.examples()]
    assert given is not None
    raw = {**given.to_json(), "edits": [{**given.edits[0], **change}]}
    with pytest.raises((BadEdit, BadRequest)):
        replayed(subject, raw)


def replayed(subject: Engine, raw: dict[str, object]) -> object:
    return subject.replay(GivenTexts(texts=[raw]), sites="S")


# ---- positions and rows ----------------------------------------------------------------------------------------------
# Which positions an edit or a capture has, and which rows a recording holds, against lists and sets.


@pytest.mark.parametrize("tokens", [(), (7,), (7, 9)])
@pytest.mark.parametrize("where", [(0, None, ()), (2, None, ()), (2, 5, ()), (3, 3, ()), (2, 7, (2, 6)), (4, 5, (4,))])
def test_positions_of_a_placed_edit(where: tuple[int, int | None, tuple[int, ...]], tokens: tuple[int, ...]) -> None:
    start, stop, picks = where
    edit = PlacedEdit("S", "zero", None, start, stop, picks, 1.0, 0, tokens=tokens)
    path = [7, 8, 9, 7, 9, 8, 7, 7]
    every = [at for at in range(8) if (at in picks if picks else at >= start and (stop is None or at < stop))]
    assert edit.first == (every[0] if every else start)
    for first in range(9):
        for end in range(first, 9):
            own = [at for at in every if first <= at < end]
            assert edit.positions(first, end) == own and (not own or edit.touches(first, end))
            assert edit.edited(first, path[first:end]) == [at for at in own if not tokens or path[at] in tokens]
            if first < end and start != stop:
                assert edit.touches(first, end) is bool(own)
    placed, held = edit.on_path(path), [at for at in every if not tokens or path[at] in tokens]
    if not tokens:
        assert placed is edit
    else:
        assert (placed is None) is (not held) and (placed is None or (placed.positions(0, 8), placed.tokens) == (held, ()))
    assert [edit.place(at) for at in every] == list(range(len(every)))


@pytest.mark.parametrize("seed", range(6))
def test_a_recording_holds_what_a_dictionary_would(seed: int) -> None:
    """Appended, replaced, cut back and forked at random; rows of some positions only, from a base on."""
    dice = random.Random(seed)
    base = dice.choice([0, 0, 3])
    made, model, end = Recording(base), dict[int, int](), base
    for step in range(60):
        match dice.choice(["add", "add", "add", "truncate", "fork"]):
            case "add":
                start = dice.randint(max(0, end - 4), end)
                stop = start + dice.randint(1, 5)
                kept = [at for at in range(start, stop) if dice.random() < 0.7]
                rows = torch.tensor([[float(at), float(step)] for at in kept]).view(-1, 2)
                made.add(Chunk(start, stop, kept, {"S": rows}))
                if stop > base:
                    model = {at: own for at, own in model.items() if at < start} | {at: step for at in kept if at >= base}
                    end = stop
            case "truncate":
                length = dice.randint(base, end + 1)
                made.truncate(length)
                model, end = {at: own for at, own in model.items() if at < length}, min(end, length)
            case "fork" if base == 0:
                length, kept_rows = dice.randint(0, end), made["S"].clone() if made.sites() else None
                fork = made.fork(length)
                assert fork.positions() == [at for at in model if at < length] and fork.end == min(end, length)
                if dice.random() < 0.3:
                    made, model, end = fork, {at: own for at, own in model.items() if at < length}, min(end, length)
                else:
                    fork.append(length, {"S": torch.full((2, 2), -1.0)})
                    assert kept_rows is None or torch.equal(made["S"], kept_rows), "a fork changes nothing of its parent"
        made.check_integrity()
        assert (
            made.positions() == list(model)
            and made.end == end
            and repr(made).startswith(f"Recording(positions {base} to {end - 1},")
        )
        if made.sites():
            wanted = torch.tensor([[float(at), float(own)] for at, own in model.items()]).view(-1, 2)
            assert torch.equal(made["S"], wanted) and torch.equal(made.peek("S"), wanted)
            chosen = dice.sample(list(model), min(len(model), 4))
            if chosen:
                assert torch.equal(
                    picked([made], [chosen])[0]["S"], torch.tensor([[float(at), float(model[at])] for at in chosen])
                )


def test_rows_that_wait_for_their_next_token_go_with_it() -> None:
    """Of a path that is cut to n tokens, n - lag rows stay; all, if the last was read without its next token."""
    made = Recording()
    made.append(0, {"S": torch.zeros(5, 1)}, open_end=True)
    assert [made.num_valid(n, 1) for n in (4, 5, 6)] == [3, 5, 6] and made.fork(5).open_end and not made.fork(4).open_end
    made.truncate(5)
    assert made.open_end
    made.truncate(4)
    assert not made.open_end and [made.num_valid(n, 1) for n in (3, 4, 5)] == [2, 3, 4]


def test_lengths_do_not_use_the_librarys_square_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not correctly rounded on x86-64, so that edits which keep a length had other bits there."""
    edit, rows, root = Edit("blocks.1.hook_in", "add", VECTOR, factor=3.0, keep_norm=True), [], torch.Tensor.sqrt
    for wrong in (False, True):
        if wrong:
            monkeypatch.setattr(torch.Tensor, "sqrt", lambda x: root(x).nextafter(torch.tensor(torch.inf)))
        branch = engine().prompt([3, 1, 4, 1, 5], sites=["blocks.1.hook_in"], edits=[edit])
        rows.append(branch.activations["blocks.1.hook_in"])
    assert torch.equal(*rows)
