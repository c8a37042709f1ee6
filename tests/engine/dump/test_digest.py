"""One plan gives one digest, whatever the batch, the order of arrival, the drafter, the engine's history or the store."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replaylens import tasks
from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.replay.run import Run
from replaylens.engine.request.sampling import Sampling
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from tests.engine.dump.conftest import EXAMPLES, NEW, PER_SHARD

Planned = Callable[..., DumpPlan]


def written(engine: Engine, plan: DumpPlan, path: Any, **options: Any) -> Dump:
    dump = write_dump(engine, plan, path, **options)
    assert dump is not None
    return dump


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_batch_changes_nothing(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, batch: int) -> None:
    """No byte of any file changes: shards are cut by example, not by arrival."""
    dump = written(engine, planned(), tmp_path / "d", batch=batch)
    assert (dump.digest, dump.accepted_digest) == (reference.digest, reference.accepted_digest)
    for name in reference.files.store.sizes():
        assert (tmp_path / "d" / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def test_arrival_order_changes_nothing(engine: Engine, coin: AnyTask, reference: Dump, tmp_path: Path) -> None:
    """A run whose examples arrive shuffled is saved as the same dump as one streamed in order."""
    examples = coin.examples(EXAMPLES)
    random.Random(5).shuffle(examples)
    run = engine.replay(examples, sites="STCZ", drafter="lens", max_new=NEW, batch=3)
    assert isinstance(run, Run)
    assert run.save(tmp_path / "d", examples_per_shard=PER_SHARD).digest == reference.digest


def test_engine_and_its_past_change_nothing(
    model: Decoder, tokenizer: WordTokenizer, planned: Planned, reference: Dump, tmp_path: Path
) -> None:
    """Other page sizes, a cache so small that requests are preempted, and live branches from earlier work."""
    engine = Engine(model, tokenizer, page_size=4, cache_tokens=160, max_rows=48, record=True)
    kept = engine.prompt("A coin's state is heads. Alice flips.", sites="S").fork(2)
    kept[0].generate(9, drafter="tree")
    dump = written(engine, planned(engine=engine), tmp_path / "d", batch=5)
    assert dump.digest == reference.digest
    assert len(kept[0].tokens) == len(kept[1].tokens) + 9, "earlier branches are not touched"
    ours = {event["branch"] for event in engine.trace.events}
    assert ours and ours <= {*engine.tree.roots(), *(branch.id for branch in kept)}, "nor is their trace"


@pytest.mark.parametrize("drafter", ["self", "ngram", "tree", "model", "forced"])
def test_accepted_rows_do_not_depend_on_the_drafter(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, drafter: str
) -> None:
    """Rejected branches depend on the drafter. Accepted rows, their labels and probabilities do not."""
    dump = written(engine, planned(drafter=drafter, window=5), tmp_path / "d")
    assert dump.accepted_digest == reference.accepted_digest
    assert dump.manifest.accepted_rows == reference.manifest.accepted_rows
    if drafter in ("tree", "model"):
        assert dump.digest != reference.digest, "another drafter was rejected otherwise"
    again = written(engine, planned(drafter=drafter, window=5), tmp_path / "again", batch=2)
    if drafter != "self":
        assert again.digest == dump.digest, "a reproducible drafter's rejected branches come out again"


def test_without_rejected_branches(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    dump = written(engine, planned(rejected=False), tmp_path / "d")
    assert dump.accepted_digest == reference.accepted_digest
    assert dump.manifest.rows == dump.manifest.accepted_rows == reference.manifest.accepted_rows


def test_sampled_paths(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Seeded draws are as reproducible as greedy decoding. Another seed gives another dump."""
    hot = {"sampling": Sampling(temperature=1.5, seed=4), "sites": "S"}
    one = written(engine, planned(**hot), tmp_path / "a", batch=1)
    two = written(engine, planned(**hot), tmp_path / "b", batch=9)
    other = written(engine, planned(sampling=Sampling(temperature=1.5, seed=5), sites="S"), tmp_path / "c")
    assert one.digest == two.digest != other.digest


def test_memory_store(engine: Engine, planned: Planned, reference: Dump) -> None:
    """Any fsspec store gives the same digest and the same bytes, and can be read."""
    dump = written(engine, planned(), "memory://dumps/digest")
    assert dump.digest == reference.digest
    assert dump.files.store.sizes() == reference.files.store.sizes()
    ours, theirs = (d.where(accepted=True).matrix("S", 1, label="face") for d in (dump, reference))
    assert (ours.X == theirs.X).all() and (ours.y == theirs.y).all()


def test_indices_need_not_be_a_range(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """Any set of examples in any order. Each example's rows equal those in a dump of all examples."""
    dump = written(engine, planned(examples=[8, 1, 5, 2, 9]), tmp_path / "d")
    assert list(dump.manifest.plan.examples) == [1, 2, 5, 8, 9]
    for site in reference.sites:
        assert torch.equal(
            dump.to_torch(site).nan_to_num(), reference.where(example={1, 2, 5, 8, 9}).to_torch(site).nan_to_num()
        )


def test_examples_per_shard_are_in_the_plan(engine: Engine, planned: Planned, reference: Dump, tmp_path: Path) -> None:
    """The shard size is part of the digest. The rows do not depend on it."""
    dump = written(engine, planned(examples_per_shard=3), tmp_path / "d")
    assert dump.digest != reference.digest and len(dump.manifest.shards) == 4
    assert torch.equal(dump.to_torch("S", 2), reference.to_torch("S", 2))


@pytest.mark.parametrize("name", tasks.names())
def test_every_task(tmp_path: Path, name: str) -> None:
    """The labels and knobs of each task survive a round trip through a dump."""
    from tests.toy_model import random_model

    task = tasks.get(name)()
    words = WordTokenizer(task.vocabulary())
    engine = Engine(random_model(vocab_size=words.vocab_size, max_positions=512), words)
    plan = make_plan(engine, task, 3, sites="S", max_new=3, drafter="ngram")
    dump = written(engine, plan, tmp_path / "d")
    assert DumpPlan.from_json(plan.to_json()) == plan and dump.manifest.plan == plan
    assert dump.manifest.plan.make_task() == task
    assert set(dump.labels) == set(task.label_names)
    index = dump.where(token_state="prompt", example=1).index
    expected = task.example(1).read("").labels_at(words.encode_with_offsets(task.example(1).prompt)[1])
    for label in set(task.label_names) - {"next_action"}:  # the label looks ahead, into the model's output
        found = [None if missing else value for value, missing in zip(index[label], index[label].isna(), strict=True)]
        assert found == expected[label], label


def test_fast_path_is_refused(engine: Engine, coin: AnyTask, tmp_path: Path) -> None:
    """Negative control: rows from non-canonical arithmetic never enter a dump."""
    run = engine.replay(coin.examples(2), sites="S", max_new=3, deterministic=False)
    assert isinstance(run, Run) and not any(result.certified for result in run)
    with pytest.raises(NotCertified, match="fast path"):
        run.save(tmp_path / "d")
    assert not list((tmp_path / "d").glob("shard-*"))


def test_runs_that_cannot_be_saved(engine: Engine, coin: AnyTask, tmp_path: Path) -> None:
    bare = engine.replay(coin.examples(2), max_new=2)
    assert isinstance(bare, Run)
    with pytest.raises(BadRequest, match="Nothing was captured"):
        bare.save(tmp_path / "a")
    mixed = engine.replay([*coin.examples(1), *coin.with_knobs(seed=3).examples(1)], sites="S", max_new=2)
    assert isinstance(mixed, Run)
    with pytest.raises(BadRequest, match="one task"):
        mixed.save(tmp_path / "b")


def test_run_that_kept_only_z(engine: Engine, planned: Planned, coin: AnyTask, tmp_path: Path) -> None:
    """What the index needs and the run lacks is recomputed, to the same bits."""
    run = engine.replay(coin.examples(4), sites="Z", drafter="lens", max_new=NEW)
    assert isinstance(run, Run)
    saved = run.save(tmp_path / "a")
    assert saved.digest == written(engine, planned(sites="Z", examples=4, examples_per_shard=128), tmp_path / "b").digest


def test_coin_plain(tmp_path: Path) -> None:
    """The embedded model: the same digest for two batch sizes, and for the accepted rows of every drafter."""
    engine = Engine.load("coin-plain")
    task = tasks.get("coin")()
    dumps = {
        drafter: written(engine, make_plan(engine, task, 6, drafter=drafter, examples_per_shard=4), tmp_path / drafter)
        for drafter in engine.loop.drafters
    }
    assert len({dump.accepted_digest for dump in dumps.values()}) == 1
    again = written(engine, make_plan(engine, task, 6, drafter="lens", examples_per_shard=4), tmp_path / "again", batch=1)
    assert again.digest == dumps["lens"].digest
