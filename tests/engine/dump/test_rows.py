"""The content of a row: kept positions, dtypes, probabilities, branch numbers, and labels of right and wrong paths."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from replaylens import tasks
from replaylens.engine.dump.maker import ShardMaker, make_plan, write_dump
from replaylens.engine.dump.plan import DumpPlan, compact
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnknownSite
from replaylens.engine.lens import lens
from replaylens.engine.lens.lens import TunedLens, unembed_hash
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.replay.run import Run
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from tests.engine.dump.conftest import EXAMPLES, NEW
from tests.toy_model import scripted_model

Planned = Callable[..., DumpPlan]


def written(engine: Engine, plan: DumpPlan, path: Any, **options: Any) -> Dump:
    dump = write_dump(engine, plan, path, **options)
    assert dump is not None
    return dump


# ---- positions ------------------------------------------------------------------------------------------------------


def test_positions(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Each selector keeps exactly its rows, bit for bit those of the full dump."""
    full = reference.index
    last = full.groupby(["example", "branch"])["position"].transform("max") == full["position"]
    prompt = full["token_state"] == "prompt"
    third = (full["position"] % 3 == 0).to_numpy()
    expected: dict[str, Any] = {"all": np.ones(len(full), bool), "generated": ~prompt, "last": last}
    for name, mask in expected.items():
        check_positions(written(engine, planned(positions=name), tmp_path / name), reference, np.asarray(mask))

    def every_third(path: Any) -> list[int]:
        return [position for position in range(len(path.tokens)) if position % 3 == 0]

    custom = written(engine, planned(positions=every_third), tmp_path / "custom")
    check_positions(custom, reference, third)
    assert custom.manifest.plan.positions.startswith("custom:") and "every_third" in custom.manifest.plan.positions


def check_positions(dump: Dump, reference: Dump, mask: np.ndarray) -> None:
    assert len(dump) == mask.sum() > 0
    keys = ["example", "branch", "position", "token", "logprob", "entropy", "face", "token_state"]
    ours, theirs = dump.index[keys], reference.index[mask][keys].reset_index(drop=True)
    assert ours.astype(object).fillna("none").equals(theirs.astype(object).fillna("none"))
    for site in reference.sites:
        assert torch.equal(dump.to_torch(site).nan_to_num(7), reference.to_torch(site)[mask.tolist()].nan_to_num(7))


def test_step_ends(engine: Engine, coin: AnyTask, planned: Planned, tmp_path: Path) -> None:
    """One row per event of the prompt: the token from which the event can be inferred. Labels give the state from there on."""
    dump = written(engine, planned(positions="steps", sites="S"), tmp_path)
    for number in range(EXAMPLES):
        example, rows = coin.example(number), dump.where(example=number, branch=0).index
        steps = [step for step in example.steps if step.end <= len(example.prompt)]
        assert rows["actions"].tolist() == list(range(1, len(steps) + 1))
        offsets = engine.text.tokenizer.encode_with_offsets(example.prompt)[1]
        assert rows["position"].tolist() == [next(i for i, (_, end) in enumerate(offsets) if end >= s.end) for s in steps]


def test_impossible_positions(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="positions 'some'"):
        planned(positions="some")
    with pytest.raises(BadRequest, match="chose position 999"):
        write_dump(engine, planned(positions=lambda path: [999]), tmp_path)


def test_no_rows_at_all(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """A selector that keeps no rows, in one shard or in all, gives a valid dump."""
    none = written(engine, planned(positions=lambda path: []), tmp_path / "none")
    assert len(none) == 0 and len(none.index) == 0 and none.to_torch("S", 0).shape == (0, 32)
    assert none.to_torch("Z.top_ids").shape == (0, 3, 8) and len(none.where(accepted=True).matrix("S", 0).X) == 0

    def middle(path: Any) -> list[int]:
        return [2, 3] if 4 <= path.example.index < 8 else []

    some = written(engine, planned(positions=middle), tmp_path / "some")
    assert [shard.rows for shard in some.manifest.shards] == [0, 8, 0]
    assert some.index["example"].tolist() == [4, 4, 5, 5, 6, 6, 7, 7] and len(some.to_torch("S", 0)) == 8
    assert [len(x) for x, _ in some.stream("S", 0)] == [8]


# ---- dtypes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, dtype: torch.dtype) -> None:
    """Sites are rounded to nearest even. bfloat16 stays bfloat16 on disk. Z and the index are not converted."""
    name = str(dtype).removeprefix("torch.")
    dump = written(engine, planned(dtype=name), tmp_path / "a")
    assert dump.digest == written(engine, planned(dtype=name), tmp_path / "b", batch=3).digest
    assert torch.equal(dump.to_torch("S", 1), reference.to_torch("S", 1).to(dtype))
    assert dump.to_torch("Z.kl").dtype is torch.float32 and dump.to_torch("Z.top_ids").dtype is torch.int32
    assert dump.index["entropy"].equals(reference.index["entropy"])
    x = dump.to_numpy("S", 1)
    assert x.dtype == (np.float32 if dtype is torch.bfloat16 else np.float16)
    assert (torch.from_numpy(x).to(dtype) == dump.to_torch("S", 1)).all()


def test_values_too_large_for_float16(model: Decoder, tokenizer: WordTokenizer, coin: AnyTask, tmp_path: Path) -> None:
    loud = Decoder(model.config).requires_grad_(False)
    loud.load_state_dict(model.state_dict())
    loud.embed.mul_(1e7)
    engine = Engine(loud, tokenizer)
    with pytest.raises(BadRequest, match=r"too large for float16\. Use bfloat16"):
        write_dump(engine, make_plan(engine, coin, 2, sites="S", dtype="float16", max_new=2), tmp_path)
    with pytest.raises(BadRequest, match="dtype 'float64'"):
        make_plan(engine, coin, 2, dtype="float64")


# ---- probabilities --------------------------------------------------------------------------------------------------


def test_probabilities_are_those_of_z(reference: Dump) -> None:
    """A token's log-probability is the last entry of Z one row earlier. The entropy is that of its own row."""
    rows = reference.where(branch=0)
    index, emitted = rows.index, rows.to_torch("Z.emitted")[:, -1].numpy()
    follows = index["position"].to_numpy()[1:] > 0
    assert (index["logprob"].to_numpy()[1:][follows] == emitted[:-1][follows]).all()
    assert index["logprob"].isna().equals(index["position"] == 0)
    assert (reference.index["entropy"].to_numpy() == reference.to_torch("Z.entropy")[:, -1].numpy()).all()


def test_probabilities_without_z(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    dump = written(engine, planned(sites="T"), tmp_path)
    assert dump.index["logprob"].equals(reference.index["logprob"]) and dump.index["entropy"].equals(reference.index["entropy"])


def test_without_probabilities(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Both columns are null, all else is the same, nothing is unembedded, and the dump verifies."""
    plan = planned(probabilities=False, sites="STC")
    made = ShardMaker(engine, plan).make(0)
    full = reference.files.content(0)
    for name in ("logprob", "entropy"):
        assert made.index.column(name).null_count == len(made) and full.index.column(name).null_count < len(full)
        assert made.index.schema.field(name).type == full.index.schema.field(name).type
    rest = [name for name in full.index.column_names if name not in ("logprob", "entropy")]
    assert made.index.select(rest).equals(full.index.select(rest))
    assert made.tensors and all(torch.equal(x, full.tensors[name]) for name, x in made.tensors.items())
    dump = written(engine, plan, tmp_path / "dump")
    assert verify(dump.url, engine, sample="all")
    assert DumpPlan.from_json(plan.to_json()) == dump.manifest.plan == plan
    assert plan.differences(planned(sites="STC")) == ["probabilities: False here, True there"]
    assert "probabilities" not in reference.manifest.plan.to_json() and reference.manifest.plan.probabilities
    with pytest.raises(BadRequest, match="probabilities"):
        planned(probabilities="no")


def test_without_probabilities_the_unembedding_is_not_run(
    engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("next_token was called")

    monkeypatch.setattr("replaylens.engine.lens.lens.next_token", refuse)
    maker = ShardMaker(engine, planned(probabilities=False, sites="T"))
    assert maker.wanted == list(engine.sites.per_layer("T"))
    assert len(maker.make(0)) and maker.make(0).index.column("entropy").null_count
    with pytest.raises(AssertionError, match="next_token"):
        ShardMaker(engine, planned(sites="T")).make(0)


def test_first_rejected_token_has_the_probability_that_the_model_gave_it(engine: Engine, reference: Dump) -> None:
    """The last accepted row before it judges the token: under greedy decoding it is less likely than the accepted token."""
    heads = reference.where(depth=1).index
    assert len(heads) and heads["logprob"].notna().all()
    accepted = reference.where(branch=0).index.set_index(["example", "position"])
    for line in heads.itertuples():
        if (line.example, line.position) in accepted.index:
            stood = accepted.loc[(line.example, line.position)]
            assert stood["token"] != line.token and stood["logprob"] >= line.logprob
    line = heads.iloc[0]
    path = accepted.loc[line["example"]].sort_index()["token"].tolist()[: int(line["fork_position"])]
    branch = engine.prompt(path, sites=["blocks.1.hook_out"])
    log_p = lens.log_softmax(engine.runner.logits(branch.activations["blocks.1.hook_out"][-1:]))
    assert np.float32(log_p[0, int(line["token"])]) == np.float32(line["logprob"])
    branch.release()


# ---- branches -------------------------------------------------------------------------------------------------------


def test_order_and_numbers_of_branches(reference: Dump) -> None:
    """Rows by (example, branch, position). The accepted path is branch 0. Rejected ones follow by fork position and tokens."""
    index = reference.index
    keys = list(zip(index["example"], index["branch"], index["position"], strict=True))
    assert keys == sorted(keys) and len(set(keys)) == len(keys)
    for _, rows in index.groupby("example"):
        branches = [
            (part["fork_position"].iloc[0], part["token"].tolist()) for _, part in rows[rows["branch"] > 0].groupby("branch")
        ]
        assert branches == sorted(branches) and sorted(set(rows["branch"])) == list(range(len(branches) + 1))
        assert rows[rows["branch"] == 0]["position"].tolist() == list(range((rows["branch"] == 0).sum()))
    assert (index["branch"] > 0).equals(~index["accepted"]) and (index["branch"] > 0).equals(index["parent"].notna())
    assert index["parent"].isna().equals(index["branch"] == 0)
    assert set(index["token_state"]) == {"prompt", "accepted", "rejected"}


def test_same_rejected_path_twice_is_one_branch(engine: Engine, coin: AnyTask, tmp_path: Path) -> None:
    run = engine.replay(coin.examples(3), sites="S", drafter="lens", max_new=NEW)
    assert isinstance(run, Run)
    once = run.save(tmp_path / "once")
    for result in run:
        result.rejected.extend(result.rejected[::-1])
    assert run.save(tmp_path / "twice").digest == once.digest


def test_labels_follow_each_branch(tokenizer: WordTokenizer, tmp_path: Path) -> None:
    """The model lies: the accepted path claims the wrong face, the rejected one the right face."""
    ids = tokenizer.id
    lie = {ids(" A"): ids(":"), ids(":"): ids(" tails"), ids(" tails"): ids("."), ids(" heads"): ids(".")}
    model = scripted_model(lie, vocab=tokenizer.vocab_size, d_model=128)
    task = tasks.get("coin")(flips=1, start="heads", p=0.0)
    assert task.example(0).completion.startswith(" heads")
    engine = Engine(model, tokenizer)
    branch = engine.prompt(task.example(0).prompt, sites="S", keep_rejected=True)
    right = [ids(" heads"), ids(".")]
    engine.generate([branch], 3, drafter="forced", drafts={branch.length: [right]}, window=4, final=True)
    assert engine.text.decode(branch.generated).startswith(" tails.")
    from replaylens.engine.replay.replayer import ReplayOptions, result_of

    run = Run(engine, [result_of(engine, task.example(0), branch)], ReplayOptions(sites="S", drafter="forced"))
    dump = run.save(tmp_path)
    said = dump.where(token_state="accepted").index.iloc[0]
    rejected = dump.where(token_state="rejected").index.iloc[0]
    assert (said["text"], said["face"], said["claimed"]) == (" tails", "heads", "tails")
    assert (rejected["text"], rejected["face"], rejected["claimed"]) == (" heads", "heads", "heads")
    assert not dump.index["correct"].any() and rejected["depth"] == 1


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_plans_that_cannot_be(engine: Engine, planned: Planned) -> None:
    for changes, complaint in (
        ({"examples": 0}, "no examples"),
        ({"examples": [1, 1]}, "occurs twice"),
        ({"examples": [-1]}, "whole number of at least 0"),
        ({"examples_per_shard": 0}, "examples_per_shard"),
        ({"drafter": "oracle"}, "Unknown drafter 'oracle'"),
        ({"sites": ["blocks.0.attn.hook_pattern"]}, "its width is the number of keys"),
    ):
        with pytest.raises(BadRequest, match=complaint):
            planned(**changes)
    with pytest.raises(UnknownSite):
        planned(sites="blocks.9.hook_in")


def test_compact() -> None:
    assert compact([3, 1, 2]) == range(1, 4) and compact([5, 1]) == (1, 5) and compact([]) == ()


def test_plan_spells_out_what_rejected_branches_depend_on(engine: Engine, planned: Planned) -> None:
    assert planned(drafter="tree").drafter_settings == {"layer": 1, "width": 3}
    assert set(planned(drafter="model").drafter_settings) == {"weights"}
    assert planned().window == 8 and planned(drafter="self").window is None
    assert planned().reproducible and not planned(drafter="self").reproducible


def test_other_sites(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    """Any site of the table, by its name or an alias. Per-head sites have their own shape."""
    plan = planned(sites=["blocks.0.hook_resid_mid", "blocks.1.attn.hook_q", "unembed.hook_out"], examples=3)
    dump = written(engine, plan, tmp_path)
    assert set(dump.sites) == {"blocks.0.ln2.hook_in", "blocks.1.attn.q.hook_out", "unembed.hook_out"}
    assert dump.to_torch("blocks.1.attn.hook_q").shape[1:] == (4, 8)
    assert dump.to_torch("unembed.hook_out").shape[1:] == (engine.config.vocab_size,)


def test_tuned_lens(model: Decoder, tokenizer: WordTokenizer, coin: AnyTask, tmp_path: Path) -> None:
    """Z through a tuned lens: the plan names the lens, the bits do not depend on the batch, other engines need it too."""
    made = torch.Generator().manual_seed(0)
    lens = TunedLens(torch.randn(2, 32, 32, generator=made) / 9, torch.randn(2, 32, generator=made), unembed_hash(model))
    engine = Engine(model, tokenizer)
    plan = make_plan(engine, coin, 4, sites="SZ", max_new=3, lens=lens)
    dump = written(engine, plan, tmp_path / "a", batch=1)
    assert dump.manifest.plan.lens is not None and dump.manifest.plan.lens.tuned == lens.digest
    assert dump.digest == written(engine, plan, tmp_path / "b", batch=4).digest
    plain = written(engine, make_plan(engine, coin, 4, sites="SZ", max_new=3), tmp_path / "c")
    assert torch.equal(plain.to_torch("S", 1), dump.to_torch("S", 1))
    assert torch.equal(plain.to_torch("Z.kl", -1), dump.to_torch("Z.kl", -1)), "the last entry is the model's own"
    assert not torch.equal(plain.to_torch("Z.entropy", 0), dump.to_torch("Z.entropy", 0))
    other = Engine(model, tokenizer)
    with pytest.raises(BadRequest, match=lens.digest[:16]):
        verify(tmp_path / "a", other)
    other.capture_spec("Z", lens=lens)
    assert verify(tmp_path / "a", other, sample="all")


def test_memory_does_not_grow_with_the_dump(model: Decoder, tokenizer: WordTokenizer, planned: Planned, tmp_path: Path) -> None:
    """After each shard the engine holds no branch, no lane and no trace of it."""
    engine = Engine(model, tokenizer, record=True)
    written(engine, planned(engine=engine, drafter="tree", sites="S"), tmp_path)
    assert (len(engine.tree), engine.loop.lanes, engine.trace.events) == (0, {}, [])
    engine.check_integrity()
