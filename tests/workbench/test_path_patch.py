"""`path_patch`: the numbers of TransformerLens' hooks, with frozen heads written out, and the bits of edits made alone."""

from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import Edit, Engine, path_patch
from replaylens.engine.errors import BadRequest
from replaylens.engine.model import loading
from tests.engine.replay.bridges import bridge
from tests.families import hugging_face
from tests.workbench.test_grids import CLEAN, COIN, CORRUPT, LONGER, PAIR, difference

CLEAN_TEXT, CORRUPT_TEXT = COIN.format("heads"), COIN.format("tails")


def z(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_z"


def put(rows: Tensor, head: int | None = None) -> Any:
    def change(value: Tensor, hook: Any) -> Tensor:
        value = value.clone()
        value[:, :, slice(None) if head is None else head] = rows[:, :, slice(None) if head is None else head]
        return value

    return change


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("into", ["q", "v"])
def test_paths_are_what_transformer_lens_hooks_do(name: str, into: Any) -> None:
    served, model = Engine(loading.load(hugging_face(name), torch.float32), page_size=4), bridge(name)
    result = path_patch(served, CLEAN, CORRUPT, metric=PAIR, receivers=[(2, 3)], into=into)
    direct = path_patch(served, CLEAN, CORRUPT, metric=PAIR)
    assert result.raw["heads"].shape == (2, 4) and direct.raw["heads"].shape == (3, 4)
    clean, corrupt = torch.tensor([CLEAN]), torch.tensor([CORRUPT])
    head = 3 if into == "q" else 3 // (served.config.num_heads // served.config.num_kv_heads)
    arrives = f"blocks.2.attn.hook_{into}"
    with torch.no_grad():
        _, source = model.run_with_cache(clean)
        _, base = model.run_with_cache(corrupt)
        source, base = ({z(l): each[z(l)].clone() for l in range(3)} for each in (source, base))
        for layer, sender in ((0, 1), (1, 2)):
            hooks = [(z(layer), put(source[z(layer)], sender)), *((z(l), put(base[z(l)])) for l in range(layer + 1, 3))]
            seen: dict[str, Tensor] = {}
            keep = (arrives, lambda value, hook, seen=seen: seen.update(there=value.clone()))
            logits = model.run_with_hooks(corrupt, fwd_hooks=[*hooks, keep])
            assert float(direct.raw["heads"][layer, sender]) == pytest.approx(difference(logits), rel=1e-4, abs=1e-4)
            logits = model.run_with_hooks(corrupt, fwd_hooks=[(arrives, put(seen["there"], head))])
            assert float(result.raw["heads"][layer, sender]) == pytest.approx(difference(logits), rel=1e-4, abs=1e-4)


def test_a_path_has_the_bits_of_its_edits_alone() -> None:
    served, alone = Engine.load("coin-plain"), Engine.load("coin-plain")
    clean, corrupt, tokens = CLEAN_TEXT, CORRUPT_TEXT, (" tails", " heads")
    result = path_patch(served, clean, corrupt, metric=tokens, receivers=[(2, 0), (3, 1)], into="k")
    keys = ["blocks.2.attn.k.hook_out", "blocks.3.attn.k.hook_out"]
    source, base = (alone.prompt(text, sites=[z(l) for l in range(3)]).activations for text in (clean, corrupt))
    where = range(15)
    sent = [Edit(z(0), "set", source[z(0)], where, heads=[3]), *(Edit(z(l), "set", base[z(l)], where) for l in (1, 2))]
    arrived = alone.prompt(corrupt, sites=keys, edits=sent).activations
    edits = [Edit(site, "set", arrived[site], where, heads=[head]) for site, head in zip(keys, (0, 1), strict=True)]
    logits = alone.logits(corrupt, edits=edits, tokens=tokens)
    assert torch.equal(result.raw["heads"][0, 3], logits[0] - logits[1])
    assert not torch.equal(result.raw["heads"][0, 3], result.raw["heads"][0, 0]), "control: another sender, another value"


@pytest.mark.parametrize("corrupt", [LONGER, CORRUPT_TEXT], ids=["longer", "as long"])
def test_the_sender_takes_the_rows_of_its_counterparts(corrupt: str) -> None:
    """Into the values of a later head, where every position counts. Control: each alignment gives another number."""
    served, tokens, arrives = Engine.load("coin-plain"), (" tails", " heads"), "blocks.2.attn.v.hook_out"
    base = served.prompt(corrupt, sites=[z(1)])
    rows = served.prompt(CLEAN_TEXT, sites=[z(0)]).activations[z(0)]
    short, long = len(rows), base.length
    aligned: dict[Any, list[tuple[int, int]]] = {"end": [(i, i + long - short) for i in range(short)]}
    aligned |= {"start": [(i, i) for i in range(short)]} if long > short else {}
    found = []
    for align, pairs in (*aligned.items(), ([(4, 6), (-1, -2)], [(4, 6), (short - 1, long - 2)])):
        result = path_patch(served, CLEAN_TEXT, corrupt, metric=tokens, receivers=[(2, 0)], align=align)
        here, there = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        sent = [Edit(z(0), "set", rows[here], there, heads=[3]), Edit(z(1), "set", base.activations[z(1)], range(long))]
        values = served.prompt(corrupt, sites=[arrives], edits=sent).activations[arrives]
        logits = served.logits(corrupt, edits=[Edit(arrives, "set", values, range(long), heads=[0])], tokens=tokens)
        found.append(float(result.raw["heads"][0, 3]))
        assert found[-1] == float(logits[0] - logits[1])
    assert len(set(found)) == len(found)


def test_paths_that_do_not_exist_are_refused() -> None:
    served = Engine.load("coin-plain")
    for receivers, into, message in (
        ([(0, 1)], "v", "layer"),
        ([(1, 9)], "v", "receivers=9"),
        ([], "v", "No receivers"),
        ([(1, 1)], "z", "q, k, v"),
    ):
        with pytest.raises(BadRequest, match=message):
            path_patch(served, CLEAN_TEXT, CORRUPT_TEXT, metric=" tails", receivers=receivers, into=into)  # type: ignore[arg-type]


@pytest.mark.parametrize("receivers", ["x", [(1,)], [5]])
def test_receivers_that_are_none(receivers: Any) -> None:
    with pytest.raises(BadRequest, match=r"receiver"):
        path_patch(Engine.load("coin-plain"), CLEAN_TEXT, CORRUPT_TEXT, metric=(" heads", " tails"), receivers=receivers)
