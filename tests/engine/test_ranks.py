"""One engine over several devices or processes has the bits of one: digests, random sessions, ranks that die or hang.

The short tests need one more process, the slow ones up to three. All connections are on the loopback device.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import replaylens as rl
from replaylens.engine.cluster import dump_on_cluster
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine, _owned, load_model
from replaylens.engine.errors import BadRequest, RankFailed, UnsupportedModel
from replaylens.engine.model import loading
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder, divided
from replaylens.engine.passes import ranks as ranks_file
from replaylens.engine.passes.ranks import Ranks, Split
from replaylens.engine.proof import doctor
from replaylens.engine.serving.branch import Branch
from tests import digests
from tests.engine import reference, test_machine, test_tree_machine
from tests.engine.test_machine import Sessions, some
from tests.test_digests import KNOWN

TEXT = "A coin's state is heads. Alice flips, then Bob does not flip. What's the state? A:"
SHORT = (
    "dump with rejected drafts",
    "edited",
    "gradients",
    "caps, windows and second norms",
    "layer norms, biases, learned positions",
    "sinks and clamped experts",
    "experts with a shared one",
    "latent attention",
    "a gated delta net",
    "Mamba-2",
)
THINKS = "dump of a model that thinks"
_models = count()


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    """A follower for all short tests: each model has numbers of its own there."""
    ranks = Ranks(2, "cpu", torch.float32, timeout=60)
    yield ranks
    ranks.close()


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny models are divided, too."""
    monkeypatch.setattr(ranks_file, "UNIT", 4)


def over(ranks: Ranks, model: Decoder) -> Decoder:
    """A copy of the model whose products are divided over ranks."""
    made, number = loading.load(model), next(_models)
    ranks.divide({f"{number}.{name}": found for name, found in ranks.packable(made).items()})
    return _owned(made)


class Elsewhere:
    """Stands in for `Engine` where tests make engines: each model goes through `place` first."""

    def __init__(self, place: Callable[[Decoder], Decoder]) -> None:
        self.place = place

    def __call__(self, model: Decoder, text: Any = None, **options: Any) -> Engine:
        return Engine(self.place(model), text, **options)

    def load(self, name: str, **_: Any) -> Engine:
        drafts = _owned(load_model("coin-draft", torch.float32, check=False)[0])
        return self(*load_model(name, torch.float32, check=False), draft_model=drafts)


def same(ours: Branch, theirs: Branch) -> bool:
    equal = ours.tokens == theirs.tokens and torch.equal(ours.kv(), theirs.kv())
    sites = set(ours.activations) == set(theirs.activations)
    return equal and sites and all(torch.equal(ours.activations[site], theirs.activations[site]) for site in theirs.activations)


# ---- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SHORT)
def test_layers_over_devices_have_the_digests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    placed: Callable[[Decoder], Decoder] = lambda model: _owned(loading.load(model, device=("cpu", "cpu")))
    monkeypatch.setattr(digests, "Engine", Elsewhere(placed))
    assert digests.cases()[name]() == KNOWN[name]


def test_the_keys_of_a_layer_are_with_its_weights() -> None:
    engine = Engine.load("coin-plain", devices=["cpu", "cpu", "cpu"], canary=True)
    assert [(stage.first, stage.end) for stage in engine.model.stages] == [(0, 1), (1, 3), (3, 4)]
    assert [len(part.index) for part in engine.runner.cache.parts] == [1, 2, 1]
    alone = Engine.load("coin-plain")
    assert engine.fingerprint == alone.fingerprint
    assert same(engine.prompt(TEXT, sites="STCZ").generate(3), alone.prompt(TEXT, sites="STCZ").generate(3))


def test_layers_go_where_there_is_room() -> None:
    here, there = torch.device("cpu"), torch.device("meta")
    stages = divided([1] * 8, [here, there], [6 << 30, 2 << 30])
    assert [(stage.first, stage.end, stage.device) for stage in stages] == [(0, 6, here), (6, 8, there)]
    assert [stage.end for stage in divided([1] * 8, [here] * 3, [1, 0, 0])] == [6, 7, 8], "at least one each"
    uneven = divided([10, 1, 1, 1, 1, 1, 1, 1], [here, there], [1, 1])
    assert uneven[0].end == 1, "sizes count, not layers"
    with pytest.raises(BadRequest, match="at most one device per layer"):
        divided([1], [here, there], [1, 1])


def test_devices_that_cannot_be_used_are_refused() -> None:
    with pytest.raises(BadRequest, match="Give a list of cpu"):
        Engine.load("coin-plain", devices=["cpu", "tpu"])
    with pytest.raises(BadRequest, match="torch.float32"):
        Engine.load("coin-plain", devices=["cpu", "cpu"], dtype=torch.bfloat16)
    for options in ({"devices": ["cpu", "cpu"]}, {"ranks": 2}):
        with pytest.raises(UnsupportedModel, match="a Thinking-States model over"):
            Engine.load("coin-thinking", **options)
    with pytest.raises(UnsupportedModel, match="a model over several ranks over devices"):
        Engine.load("coin-plain", devices=["cpu", "cpu"], ranks=2)
    with pytest.raises(BadRequest, match="ranks=0"):
        Engine.load("coin-plain", ranks=0)


# ---- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.slow) for name in KNOWN])
def test_two_ranks_have_the_digests(name: str, two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == THINKS:
        return  # refused: above
    monkeypatch.setattr(digests, "Engine", Elsewhere(lambda model: over(two, model)))
    before = two.answers
    assert digests.cases()[name]() == KNOWN[name]
    assert two.answers > before + 20, "control: the other rank took part"


@pytest.mark.parametrize("columns, ranks", [(1, 2), (16, 2), (100, 2), (100, 3), (1000, 4), (24, 8), (8192, 8)])
def test_every_column_belongs_to_one_rank(columns: int, ranks: int) -> None:
    owned = [range(columns)[ranks_file.share(columns, rank, ranks)] for rank in range(ranks)]
    assert [column for own in owned for column in own] == list(range(columns))
    weight = torch.randn(3, 5, 2 * columns)
    pieces = [ranks_file.cut(weight, 2, rank, ranks).unflatten(-1, (2, -1)) for rank in range(ranks)]
    assert torch.equal(torch.cat(pieces, -1).flatten(-2), weight)


def test_a_divided_weight_can_be_read_as_a_whole(two: Ranks) -> None:
    model = digests.model_of(ModelConfig(**{**digests._DENSE, **digests._MORE["sinks and clamped experts"]}))
    split = over(two, model)
    held = [x for module in split.modules() for x in getattr(module, "panels", {}).values() if isinstance(x, Split)]
    assert len(held) >= 6
    assert loading.weights_hash(split) == loading.weights_hash(_owned(loading.load(model)))
    ours, theirs = split.state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_doctor_knows_a_sum_over_ranks(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    found = doctor.examine_ranks(two)
    assert [(f.op, f.shape, f.equal, f.control) for f in found] == [
        ("product", "over 2 ranks", True, False),
        ("experts", "over 2 ranks", True, False),
        ("product", "over 2 ranks", False, True),
    ]
    monkeypatch.setattr(Split, "join", lambda self, parts, activated=False: _swapped(self, parts, activated))
    assert not doctor.Certificate(doctor.examine_ranks(two)).certified, "control: columns in another order are found"


def _swapped(split: Split, parts: dict[int, torch.Tensor], activated: bool, join: Any = Split.join) -> torch.Tensor:
    return join(split, parts, activated).roll(1, -1)


def test_ranks_that_die_or_hang_cost_no_token(tmp_path: Path) -> None:
    """Within a bound, by name; branches stay, and go on with new ranks. A dump goes on from its last shard."""
    alone, engine = Engine.load("coin-plain"), Engine.load("coin-plain", ranks=2, rank_timeout=1.5)
    assert engine.ranks is not None and engine.fingerprint == alone.fingerprint
    assert "over 2 ranks" in {finding.shape for finding in engine.certificate.findings} and engine.certificate.certified
    examples = rl.tasks.get("coin")(flips=(2, 4)).examples(4)
    whole = alone.replay(examples, sites="ST", drafter="ngram", progress=False).save(tmp_path / "whole").digest
    truth, branch = alone.prompt(TEXT, sites="STCZ"), engine.prompt(TEXT, sites="STCZ")
    fork = branch.fork(at=9)[0]
    tokens, kv = branch.tokens, engine.forest.held_kv(branch.lane).clone()  # `kv()` would compute what is pending
    _follower(engine).kill()
    for limit in (2.0, 0.5):  # the second time it is known
        began = time.monotonic()
        with pytest.raises(RankFailed, match=r"rank 1 of 2 ended with exit code -9.*committed.*engine\.ranks\.restart\(\)"):
            branch.generate(2, drafter="lens")
        assert time.monotonic() - began < limit
    with pytest.raises(RankFailed):
        engine.replay(examples, sites="ST", drafter="ngram", progress=False)
    held = engine.forest.held_kv(branch.lane)
    assert branch.tokens == tokens and branch.finish_reason is None
    assert len(held) >= len(kv) - 1 and torch.equal(held, kv[: len(held)])
    engine.check_integrity()
    engine.ranks.restart()
    assert same(branch.generate(2, drafter="lens"), truth.generate(2, drafter="lens"))
    assert engine.replay(examples, sites="ST", drafter="ngram", progress=False).save(tmp_path / "again").digest == whole
    os.kill(_follower(engine).pid, signal.SIGSTOP)
    began = time.monotonic()
    with pytest.raises(RankFailed, match="rank 1 of 2 did not answer within 1.5 s"):
        fork.force([3, 4])
    assert time.monotonic() - began < 5 and fork.length == 9
    assert _follower(engine).poll() is not None, "what hangs is ended"


def _follower(engine: Engine) -> "subprocess.Popen[bytes]":
    assert engine.ranks is not None
    return engine.ranks._followers.processes[0]


def test_followers_end_with_their_engine() -> None:
    ranks = Ranks(2, "cpu", torch.float32)
    process = ranks._followers.processes[0]
    assert process.poll() is None
    del ranks
    assert process.poll() is not None
