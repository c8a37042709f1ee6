"""Variants and logits: a text under many lists of edits has the bits of each list alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, BadRequest, OutOfPages
from replaylens.engine.request.edits import Edit
from tests.toy_model import engine, random_model, watch_passes

PATH = torch.randint(3, 60, (11,), generator=torch.Generator().manual_seed(4)).tolist()
OTHER = torch.randint(3, 60, (11,), generator=torch.Generator().manual_seed(5)).tolist()
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(6))


def grid(rows: dict[str, Tensor]) -> list[list[Edit]]:
    made = [[Edit(site, "set", rows[site][p], positions=p)] for site in rows for p in (0, 4, 10)]
    made += [[Edit("blocks.1.attn.hook_z", "zero", heads=[head], positions=slice(2, None))] for head in range(4)]
    made += [[Edit("embed.hook_out", "add", VECTOR, positions=3)], [], [Edit("S", "add", VECTOR, layers=[2])]]
    return [*made, [*made[1], *made[7]], [Edit("blocks.1.attn.hook_pattern", "mask", positions=9, keys=[1, 2])]]


@pytest.mark.parametrize("max_rows", [16, 512])
def test_a_variant_has_the_bits_of_its_edits_alone(max_rows: int) -> None:
    served, alone = engine(max_rows=max_rows), engine()
    sites = ["blocks.0.hook_in", "blocks.1.hook_in", "blocks.0.mlp.hook_out", "blocks.1.attn.hook_out"]
    source = served.prompt(OTHER, sites=sites).activations
    variants = grid({site: source[site] for site in sites})
    found = served.logits_under(PATH, variants, positions=None)
    for edits, logits in zip(variants, found, strict=True):
        branch = alone.prompt(PATH, sites=["unembed.hook_out"], edits=edits)
        assert torch.equal(logits, branch.activations["unembed.hook_out"])
        assert torch.equal(branch.logits(None), logits)
    plain = found[variants.index([])]
    changed = [not torch.equal(logits, plain) for logits in found]
    assert changed.count(False) == 1, "control: every list of edits but the empty one changes something"
    served.check_integrity()


LAST = ("attn.hook_z", "attn.hook_out", "ln2.hook_out", "mlp.hook_post", "mlp.hook_out", "hook_out")


@pytest.mark.parametrize("positions", [[-1], [6, 3], None])
@pytest.mark.parametrize("family", [{}, {"parallel_residual": True}, {"post_norms": True}], ids=str)
def test_only_the_rows_that_are_read_leave_the_last_block(family: dict[str, Any], positions: list[int] | None) -> None:
    """Edits in the last block, before and after its attention, alone and together; reads of some rows and of all."""
    model = random_model(seed=3, **family)
    served, alone = engine(model), engine(model)
    wanted = list(range(len(PATH))) if positions is None else positions
    made = {name: Edit(f"blocks.1.{name}", "zero", positions=slice(2, None)) for name in LAST}
    made["attn.hook_pattern"] = Edit("blocks.1.attn.hook_pattern", "zero", positions=slice(2, None), keys=[1])
    variants = [[], *([edit] for edit in made.values()), [made["attn.hook_z"], made["mlp.hook_post"]]]
    variants.append([Edit("blocks.0.hook_in", "zero", positions=9)])  # after some of the rows, and after all of [6, 3]
    found = served.logits_under(PATH, variants, positions=positions)
    for edits, logits in zip(variants, found, strict=True):
        branch = alone.prompt(PATH, sites=["unembed.hook_out"], edits=edits)
        assert torch.equal(logits, branch.activations["unembed.hook_out"][wanted])
    changed = [not torch.equal(logits, found[0]) for logits in found[1:]]
    assert all(changed[:-1]) and changed[-1] == (positions != [6, 3]), (
        "control: every edit before a row that is read changes it"
    )
    served.check_integrity()


def test_the_last_block_computes_the_rows_that_are_read() -> None:
    served = engine()
    rows: list[int] = []
    block = served.model.blocks[-1].mlp
    block.register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    variants = [[Edit("blocks.0.attn.hook_z", "zero", heads=[head])] for head in range(4)]
    served.logits_under(PATH, variants, positions=[-1])
    assert rows[1:] == [4], "four rows, after the prompt itself"
    served.logits_under(PATH, [[*edits, Edit("blocks.1.mlp.hook_out", "zero", positions=0)] for edits in variants])
    assert rows[-1] == 48, "control: 44 rows if one of them is edited after attention"


@pytest.mark.parametrize("base", ["blocks.1.hook_in", "blocks.0.hook_in", "blocks.0.attn.hook_out", "embed.hook_out"])
def test_edits_of_the_base_are_made_once(base: str) -> None:
    """A base edited at the stream where its variants start: the edit is not added twice."""
    served, first = engine(), Edit(base, "add", VECTOR)
    variants = [[Edit("blocks.1.hook_in", "add", VECTOR, positions=5)], [Edit("blocks.1.mlp.hook_out", "zero", positions=5)]]
    found = served.logits_under(PATH, variants, edits=[first])
    for edits, logits in zip(variants, found, strict=True):
        assert torch.equal(logits, engine().logits(PATH, edits=[first, *edits]))


def test_rows_and_layers_before_an_edit_are_not_computed() -> None:
    served = engine()
    rows: list[int] = []
    resumed = served.runner.resumed

    def watched(segments, entering, layer, tap=None, ends=()):  # type: ignore[no-untyped-def]
        rows.append(sum(len(s.tokens) for s in segments) * (2 - layer))
        return resumed(segments, entering, layer, tap, ends)

    served.runner.resumed = watched  # type: ignore[method-assign]
    passes = watch_passes(served)
    served.logits_under(PATH, [[Edit("blocks.1.hook_in", "zero", positions=p)] for p in range(len(PATH))])
    assert rows == [sum(range(1, len(PATH) + 1))] and len(passes) == 1


def test_variants_fit_into_a_small_cache() -> None:
    served, variants = engine(cache_tokens=24), [[Edit("blocks.0.hook_in", "zero", positions=p)] for p in range(11)]
    assert torch.equal(served.logits_under(PATH, variants), engine().logits_under(PATH, variants))
    crowded = engine(cache_tokens=40)
    others = [crowded.prompt([3 + i] * 9) for i in range(4)]  # idle branches give up their pages
    assert torch.equal(crowded.logits_under(PATH, variants), engine().logits_under(PATH, variants))
    assert torch.equal(others[0].kv(), engine().prompt([3] * 9).kv())
    crowded.check_integrity()
    with pytest.raises(OutOfPages):
        engine(cache_tokens=12).logits_under(PATH, variants)
    served.check_integrity()


def test_logits_of_a_branch() -> None:
    """Before and after generating, of a fork, of one token or all: always those of a capture."""
    served = engine()
    branch = served.prompt(PATH)
    branch.generate(3)
    whole = served.prompt(branch.tokens, sites=["unembed.hook_out"]).activations["unembed.hook_out"]
    assert torch.equal(branch.logits(), whole[-1]) and torch.equal(branch.logits(None), whole)
    assert torch.equal(branch.logits([2, -1]), whole[[2, -1]]) and torch.equal(branch.logits(slice(3, 5)), whole[3:5])
    assert torch.equal(branch.logits(4, tokens=[7, 9]), whole[4, [7, 9]])
    assert torch.equal(served.logits(PATH, positions=4, tokens=[7]), whole[4, [7]])
    assert branch.logits(10).argmax() == branch.tokens[11]
    (fork,) = branch.fork(edits=[Edit("blocks.0.hook_in", "zero", positions=5)])
    assert not torch.equal(fork.logits(), whole[-1])
    assert len(served.tree.roots()) == 1 and served.check_integrity(), "the other prompt is not held"
    with pytest.raises(BadRequest, match="positions=40"):
        branch.logits(40)
    with pytest.raises(BadRequest, match="chooses none"):
        branch.logits(slice(9, 3))


def test_a_bad_variant_leaves_nothing_behind() -> None:
    served = engine(random_model(seed=2))
    before = served.runner.pool.num_free
    with pytest.raises(ArithmeticError):
        served.logits_under(PATH, [[Edit("blocks.0.hook_in", "add", torch.full((32,), 3e38), positions=3)] * 2])
    served.prefix.clear()
    assert served.runner.pool.num_free == before


@pytest.mark.parametrize("variants", [[], 5])
def test_no_variants(variants: Any) -> None:
    with pytest.raises(BadEdit, match="variants"):
        engine().logits_under([1, 2, 3], variants)
