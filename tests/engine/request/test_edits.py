"""Edits: equal to another library's result of the same intervention, with the same bits on every code path."""

import struct
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadTrace, UnknownSite
from replaylens.engine.model import loading
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import page_keys
from replaylens.engine.request.placing import place
from tests.devices import DEVICES
from tests.engine.replay.bridges import bridge
from tests.families import hugging_face

LENGTH = 24
TOKENS = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(1)).tolist()
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(2))
ROWS = torch.randn(4, 32, generator=torch.Generator().manual_seed(3))


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


CASES = {
    "add": (add, dict(op="add", value=VECTOR, positions=slice(5, 9), factor=2.5)),
    "set": (put, dict(op="set", value=ROWS, positions=slice(5, 9))),
    "zero": (zero, dict(op="zero", positions=[3, 7])),
    "project_out": (erase, dict(op="project_out", value=VECTOR)),
}


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("site", ["blocks.1.hook_in", "blocks.1.attn.hook_out", "blocks.2.mlp.hook_out"])
def test_edits_are_what_transformer_lens_hooks_do(name: str, case: str, site: str) -> None:
    change, options = CASES[case]
    ours = edited_logits(engine(name), Edit(site, **options))
    theirs = lens_logits(name, site, change)
    assert ((ours - theirs).norm() / theirs.norm()) < 2e-5


def test_hook_functions_work_and_are_not_certified() -> None:
    """A TransformerLens-style function gives the edit's result. It is not certified, and nothing of it is shared."""
    served = engine()
    root = served.prompt(TOKENS, sites="S")
    (hooked,) = root.fork(hooks=[("blocks.1.hook_resid_pre", add)])
    (edited,) = root.fork(edits=[Edit("blocks.1.hook_in", **CASES["add"][1])])
    served.forest.compute([hooked.lane, edited.lane])
    assert not hooked.certified and edited.certified and root.certified
    assert torch.equal(hooked.activations["blocks.2.hook_out"], edited.activations["blocks.2.hook_out"])
    assert not set(hooked.lane.table.pages) & set(root.lane.table.pages)


EDITS = [
    Edit("blocks.1.hook_in", "add", VECTOR, positions=slice(18, None), factor=3.0),
    Edit("T", "zero", layers=[2], positions=[5, 20]),
    Edit("blocks.0.hook_out", "project_out", ROWS[:2], positions=slice(10, 30)),
    Edit("blocks.2.mlp.hook_out", "resample", ROWS, positions=slice(22, None), seed=9),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["llama", "neox", "gemma2"])
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


@pytest.mark.parametrize("device", DEVICES)
def test_edits_survive_a_trace(device: str) -> None:
    served, fresh = engine(device=device, record=True), engine(device=device)
    root = served.prompt(TOKENS, sites="STCZ")
    (child,) = root.fork(edits=EDITS)
    child.generate(8, final=True)
    replayed = fresh.replay_trace(served.trace)[child.id]
    assert replayed.tokens == child.tokens
    assert all(bits(replayed.activations[s]) == bits(child.activations[s]) for s in child.activations.sites())
    root.fork(hooks=[("blocks.0.hook_in", add)])
    with pytest.raises(BadTrace, match="hook functions"):
        engine(device=device).replay_trace(served.trace)


def test_content_hash_sees_every_part_of_an_edit() -> None:
    """Every field changes the key, down to the last bit of the value. Equal edits have equal keys."""
    table = engine().sites
    nudged = VECTOR.clone()
    nudged[0] = struct.unpack("f", struct.pack("I", struct.unpack("I", struct.pack("f", float(VECTOR[0])))[0] ^ 1))[0]
    variants = [
        Edit("blocks.0.hook_in", "add", VECTOR),
        Edit("blocks.0.hook_in", "add", nudged),
        Edit("blocks.0.hook_in", "set", VECTOR),
        Edit("blocks.1.hook_in", "add", VECTOR),
        Edit("blocks.0.hook_in", "add", VECTOR, positions=slice(0, 5)),
        Edit("blocks.0.hook_in", "add", VECTOR, positions=[0, 1, 2, 3, 4]),
        Edit("blocks.0.hook_in", "add", VECTOR, factor=2.0),
        Edit("blocks.0.hook_in", "resample", ROWS),
        Edit("blocks.0.hook_in", "resample", ROWS, seed=1),
        Edit("blocks.0.hook_in", "resample", ROWS.flip(0)),
    ]
    keys = [place(edit, table, LENGTH)[0].key for edit in variants]
    assert len(set(keys)) == len(variants)
    assert place(Edit("blocks.0.hook_resid_pre", "add", VECTOR.clone()), table, 3)[0].key == keys[0]
    assert page_keys(place(variants[4], table, LENGTH), 3, 4) == [keys[4], keys[4], b""]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (Edit("blocks.0.hook_in", "add"), "needs a value"),
        (Edit("blocks.0.hook_in", "zero", VECTOR), "takes no value"),
        (Edit("blocks.0.hook_in", "add", VECTOR[:5]), "expected"),
        (Edit("blocks.0.hook_in", "set", ROWS, positions=slice(0, 3)), "expected"),
        (Edit("blocks.0.hook_in", "add", VECTOR * float("nan")), "NaN"),
        (Edit("blocks.0.hook_in", "add", VECTOR, factor=float("inf")), "factor=inf. Give a finite number"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=slice(5, 5)), "empty"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=slice(-LENGTH - 1, None)), "start before 0"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=slice(-LENGTH - 1, 4)), "start before 0"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=slice(0, -LENGTH)), "empty"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=slice(-2, -4)), "empty"),
        (Edit("blocks.0.attn.hook_pattern", "mask", positions=3, keys=slice(-LENGTH - 1, 2)), "before 0"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=[]), "at least one"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=-LENGTH - 1), "none before 0"),
        (Edit("blocks.0.hook_in", "add", VECTOR, positions=slice(0, 9, 2)), "step 1"),
        (Edit("blocks.0.hook_in", "project_out", torch.stack([VECTOR, VECTOR])), "linearly dependent"),
        (Edit("S", "add", VECTOR, layers=[9]), "layers 0 to"),
        (Edit("blocks.0.hook_in", "add", VECTOR, layers=[1]), "letters"),
        (Edit("unembed.hook_out", "zero"), "not edited"),
    ],
)
def test_impossible_edits_are_refused(edit: Edit, message: str) -> None:
    served = engine()
    with pytest.raises(BadEdit, match=message):
        served.prompt(TOKENS, edits=[edit])
    with pytest.raises(UnknownSite):
        served.prompt(TOKENS, edits=[Edit("blocks.0.hook_inn", "zero")])
    assert served.prompt(TOKENS).generate(2).length == LENGTH + 2
    served.check_integrity()
