"""Edits of heads and of attention edges, by pattern, norm-preserving and conditional: TransformerLens' numbers, same bits."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, UnknownSite
from replaylens.engine.records import EditRecord, PlacedEditRecord
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.placing import place
from tests.devices import DEVICES
from tests.engine.request.test_edits import LENGTH, ROWS, TOKENS, VECTOR, bits, edited_logits, engine, lens_logits
from tests.toy_model import engine as toy_engine

Z = "blocks.1.attn.hook_z"
SHORT = [token % 60 for token in TOKENS[:12]]
HEAD = torch.randn(8, generator=torch.Generator().manual_seed(5))


def head_zero(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 4:, [1, 3]] = 0
    return value


def head_add(value: Tensor, hook: Any = None) -> Tensor:
    value = value.clone()
    value[:, 4:, 1] += 2 * HEAD[: value.shape[-1]]
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


def where(value: Tensor, hook: Any = None) -> Tensor:
    return torch.where((value @ VECTOR > 0)[..., None], value + 3 * VECTOR, value)


CASES: dict[str, tuple[str, Any, Any]] = {
    "zero heads": ("blocks.1.attn.hook_z", head_zero, lambda d: dict(op="zero", positions=slice(4, None), heads=[3, 1])),
    "add to a head": (
        "blocks.1.attn.hook_q",
        head_add,
        lambda d: dict(op="add", value=2 * HEAD[None, :d], positions=slice(4, None), heads=[1]),
    ),
    "scale heads": (
        "blocks.1.attn.hook_z",
        head_scale,
        lambda d: dict(op="scale", factor=-0.4, positions=slice(4, None), heads=[3, 1]),
    ),
    "scale a site": ("blocks.1.hook_mlp_out", lambda value, hook: value * 2.5, lambda d: dict(op="scale", factor=2.5)),
    "zero edges": (
        "blocks.1.attn.hook_pattern",
        edge_zero,
        lambda d: dict(op="zero", positions=9, keys=slice(2, 6), heads=[1]),
    ),
    "mask edges": (
        "blocks.1.attn.hook_pattern",
        edge_mask,
        lambda d: dict(op="mask", positions=9, keys=[2, 3, 4, 5], heads=[1]),
    ),
    "keep norm": ("blocks.1.hook_in", longer, lambda d: dict(op="add", value=VECTOR, factor=3.0, keep_norm=True)),
    "when": ("blocks.1.hook_in", where, lambda d: dict(op="add", value=VECTOR, factor=3.0, when=VECTOR)),
}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", CASES)
def test_they_are_what_transformer_lens_hooks_do(name: str, case: str) -> None:
    site, change, options = CASES[case]
    served = engine(name)
    ours = edited_logits(served, Edit(site, **options(served.config.d_head)))
    theirs = lens_logits(name, site, change)
    assert ((ours - theirs).norm() / theirs.norm()) < 2e-5


def edits(d_head: int) -> list[Edit]:
    return [
        Edit("blocks.*.attn.hook_z", "zero", heads=[1], positions=slice(20, None)),
        Edit("blocks.0.attn.hook_v", "add", torch.ones(1, d_head), heads=[0], positions=[3, 21], factor=2.0),
        Edit("blocks.0.attn.hook_z", "scale", factor=0.7, heads=[2], positions=slice(17, None)),
        Edit("C", "scale", factor=-1.5, layers=[1], when=ROWS[1], positions=slice(21, None)),
        Edit("blocks.1.attn.hook_pattern", "mask", heads=[0, 2], positions=slice(18, None), keys=[1, 4]),
        Edit("blocks.2.attn.hook_pattern", "zero", positions=22, keys=slice(0, 30)),
        Edit("blocks.1.hook_out", "add", VECTOR, keep_norm=True, when=ROWS[0], positions=slice(19, None), factor=4.0),
    ]


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_bits_do_not_depend_on_the_code_path(name: str) -> None:
    """Direct or verified, forked or planted, alone or beside others, from its own trace: one result."""
    served = engine(name, record=True)
    made = edits(served.config.d_head)
    (reference,) = served.prompt(TOKENS, sites="STC").fork(edits=made)
    reference.generate(8, window=1, final=True)
    other, branch = served.prompt([9] * 7), served.prompt(TOKENS, sites="STC", edits=made)
    served.generate([other, branch], 8, drafter="lens", window=5, final=True)
    replayed = engine(name).replay_trace(served.trace)[reference.id]
    for same in (branch, replayed):
        assert same.tokens == reference.tokens and torch.equal(same.kv(), reference.kv())
        assert all(bits(same.activations[s]) == bits(reference.activations[s]) for s in reference.activations.sites())
    (unedited,) = served.prompt(TOKENS, sites="STC").fork()
    assert not torch.equal(unedited.generate(8, final=True).kv(), reference.kv()), "control: the edits do something"
    served.check_integrity()


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


def test_new_fields_are_part_of_the_hash_and_survive_json() -> None:
    table = engine().sites
    base = Edit("blocks.0.hook_in", "add", VECTOR)
    site = "blocks.0.attn.hook_pattern"
    variants = [
        base,
        Edit("blocks.0.hook_in", "add", VECTOR, keep_norm=True),
        Edit("blocks.0.hook_in", "add", VECTOR, when=VECTOR),
        Edit("blocks.0.hook_in", "add", VECTOR, when=-VECTOR),
        Edit("blocks.0.hook_in", "scale", factor=2.0),
        Edit("blocks.0.hook_in", "scale", factor=0.5),
        Edit(Z, "scale", factor=0.5, heads=[0]),
        Edit(Z, "zero", heads=[0]),
        Edit(Z, "zero", heads=[1]),
        Edit(Z, "zero"),
        Edit(site, "mask", positions=9, keys=3),
        Edit(site, "mask", positions=9, keys=4),
        Edit(site, "zero", positions=9, keys=4),
        Edit(site, "zero", positions=9, keys=4, heads=[0]),
    ]
    keys = [place(edit, table, LENGTH)[0].key for edit in variants]
    assert len(set(keys)) == len(variants)
    read = [Edit.from_json(edit.to_json()) for edit in variants]
    assert [place(edit, table, LENGTH)[0].key for edit in read] == keys
    assert set(base.to_json()) == {"site", "op", "positions", "layers", "factor", "seed", "value"}, "old plans keep their form"


def test_the_hash_of_an_old_edit_has_not_moved() -> None:
    """Prefix sharing and traces of earlier versions rest on it."""
    (placed,) = place(Edit("blocks.0.hook_in", "add", torch.arange(32.0), positions=[3], factor=2.0), engine().sites, LENGTH)
    assert placed.key.hex() == "42a5b4f6fb7d059f28a10e4b995bb9dd"


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("blocks.0.hook_in", "zero", heads=[0]), "has no heads"),
        (Edit(Z, "zero", heads=[]), "at least one"),
        (Edit(Z, "zero", heads=[1, 1]), "each only once"),
        (Edit(Z, "zero", heads=[4]), "heads 0 to 3"),
        (Edit(Z, "set", torch.zeros(3, 8), heads=[0]), "must end with"),
        (Edit("blocks.0.hook_in", "mask", keys=[0]), "for attention patterns"),
        (Edit("blocks.0.attn.hook_pattern", "add", VECTOR), "takes the ops 'mask'"),
        (Edit("blocks.0.attn.hook_pattern", "mask", positions=5), "with keys"),
        (Edit("blocks.0.attn.hook_pattern", "mask", positions=5, keys=6), "changes nothing"),
        (Edit("blocks.0.attn.hook_pattern", "mask", positions=2, keys=[0, 1, 2]), "hides every key"),
        (Edit("blocks.0.hook_in", "zero", keep_norm=True), "Only 'add'"),
        (Edit("blocks.0.hook_in", "add", VECTOR, when=VECTOR[:3]), "one finite direction"),
        (Edit("blocks.0.hook_in", "zero", positions=77), r"changes nothing: the branch has 24 tokens.*slice\(77, 78\)"),
        (Edit("blocks.0.hook_in", "zero", positions=[30, 31]), "changes nothing"),
    ],
)
def test_edits_that_fit_nowhere_are_refused(edit: Edit, message: str) -> None:
    with pytest.raises(BadEdit, match=message):
        engine().prompt(TOKENS, edits=[edit])


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
