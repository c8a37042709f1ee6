"""One engine over several devices or processes has the bits of one: digests, random sessions, ranks that die or hang.

The short tests need one more process, the slow ones up to three. All connections are on the loopback device.
"""

import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule, run_state_machine_as_test

import replaylens as rl
from replaylens.dumps.maker import ShardMaker, make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, EngineError, FingerprintMismatch, RankFailed, UnsupportedModel
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof import doctor
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.serving.branch import Branch
from replaylens.extras import ranks as ranks_file
from replaylens.extras.cluster import dump_on_cluster
from replaylens.extras.ranks import Ranks, SplitWeight
from replaylens.weights import loading
from replaylens.weights.opening import load_model, owned
from replaylens.weights.source import divided
from tests import digests
from tests.devices import swept
from tests.engine import reference, test_machine, test_tree_machine
from tests.engine.test_machine import AnyWindow, Sessions, some
from tests.engine.test_wiring import PAIR, PATH, WRITTEN, looped, written
from tests.processes import python_path
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
    return owned(made)


class Elsewhere:
    """Stands in for `Engine` where tests make engines: each model goes through `place` first."""

    def __init__(self, place: Callable[[Decoder], Decoder]) -> None:
        self.place = place

    def __call__(self, model: Decoder, text: Any = None, **options: Any) -> Engine:
        return Engine(self.place(model), text, **options)

    def load(self, name: str, **_: Any) -> Engine:
        drafts = owned(load_model("coin-draft", torch.float32, check=False)[0])
        return self(*load_model(name, torch.float32, check=False), draft_model=drafts)


def same(ours: Branch, theirs: Branch) -> bool:
    """Tokens, KV and captured rows. Z of an open end has no next token, NaN."""
    equal = ours.tokens == theirs.tokens and torch.equal(ours.kv(), theirs.kv())
    a, b = ours.activations, theirs.activations
    return equal and set(a) == set(b) and all(reference.same_bits(a[site], b[site]) for site in a)


# ---- devices -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", swept(SHORT[1:], "gradients", "edited", "latent attention"))
def test_layers_over_devices_have_the_digests(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "Engine", Elsewhere(lambda model: owned(loading.load(model, device=("cpu", "cpu")))))
    assert digests.cases()[name]() == KNOWN[name]


def test_the_keys_of_a_layer_are_with_its_weights() -> None:
    engine = Engine.load("coin-plain", devices=["cpu", "cpu", "cpu"], canary=True)
    assert [(stage.first, stage.end) for stage in engine.model.stages] == [(0, 1), (1, 3), (3, 4)]
    assert [len(part.index) for part in engine.runner.cache.parts] == [1, 2, 1]
    alone = Engine.load("coin-plain")
    assert engine.fingerprint == alone.fingerprint
    ours, theirs = (each.prompt(TEXT, sites="STCZ").generate(1) for each in (engine, alone))
    forks = [each.fork(at=10)[0].force([5, 6, 7]) for each in (ours, theirs)]  # copies a part of a page
    assert same(ours.generate(2), theirs.generate(2)) and same(*forks)


@pytest.mark.parametrize("what", ["looped", "a weight that is read"])
def test_any_wiring_has_the_bits_of_one(what: str, two: Ranks, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products are divided where they are computed; a weight that a wiring reads itself comes back from all ranks."""
    monkeypatch.setitem(WRITTEN, what, lambda x, ops: x * _last_mlp(models[-1]).weight[0])
    models = [looped(3) if what == "looped" else written(what)]
    theirs = Engine(models[0]).prompt(PATH, sites="STCZ").generate(5)
    models.append(deepcopy(models[0]))
    two.divide({f"{next(_models)}.{name}": found for name, found in two.packable(models[1]).items()})
    ours = Engine(models[1]).prompt(PATH, sites="STCZ").generate(5)
    assert any(isinstance(held, SplitWeight) for held in _last_mlp(models[1]).panels.values()) and same(ours, theirs)
    found = [each.gradients(PAIR, "S") for each in (ours, theirs)]
    assert all(torch.equal(found[0][site], found[1][site]) for site in found[0])


def _last_mlp(model: Any) -> Any:
    return model.blocks[-1].mlp.down


def test_one_device_is_no_division() -> None:
    assert Engine.load("coin-plain", devices=["cpu"]).model.stages == ()


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
    with pytest.raises(BadRequest, match="A CPU computes in float32 only"):
        Engine.load("coin-plain", devices=["cpu", "cpu"], dtype=torch.bfloat16)
    for options in ({"devices": ["cpu", "cpu"]}, {"ranks": 2}):
        with pytest.raises(UnsupportedModel, match="a Thinking-States model over"):
            Engine.load("coin-thinking", **options)
    for wrong, said in (({"devices": []}, "at least one of"), ({"ranks": 2, "rank_timeout": 0}, "more than 0")):
        with pytest.raises(BadRequest, match=said):
            Engine.load("coin-plain", **wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match=r"devices=\['cpu', 'cpu'\] and ranks=2 were given"):
        Engine.load("coin-plain", devices=["cpu", "cpu"], ranks=2)
    with pytest.raises(BadRequest, match="ranks=0"):
        Engine.load("coin-plain", ranks=0)


# ---- ranks -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", swept(KNOWN, "gradients", "edited", "sinks and clamped experts", "latent attention", "Mamba-2")
)
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
    held = [x for module in split.modules() for x in getattr(module, "panels", {}).values() if isinstance(x, SplitWeight)]
    assert len(held) >= 6
    assert weights_hash(split) == weights_hash(owned(loading.load(model)))
    ours, theirs = split.state_dict(), model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_the_doctor_knows_a_sum_over_ranks(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    found = ranks_file.examine_ranks(two)
    assert [(f.op, f.shape, f.equal, f.control) for f in found] == [
        ("product", "over 2 ranks", True, False),
        ("experts", "over 2 ranks", True, False),
        ("product", "over 2 ranks", False, True),
    ]
    monkeypatch.setattr(SplitWeight, "join", lambda self, parts, activated=False: _swapped(self, parts, activated))
    assert not doctor.Certificate(ranks_file.examine_ranks(two)).certified, "control: columns in another order are found"


def _swapped(split: SplitWeight, parts: dict[int, torch.Tensor], activated: bool, join: Any = SplitWeight.join) -> torch.Tensor:
    return join(split, parts, activated).roll(1, -1)


def test_ranks_that_die_or_hang_cost_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(RankFailed, match=r"rank 1 of 2 did not answer within 1\.5 s"):
        fork.force([3, 4])
    assert time.monotonic() - began < 5 and fork.length == 9
    assert _follower(engine).poll() is not None, "what hangs is ended"
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ranks_file.Followers, "_await_start", _interrupted)
        engine.ranks.restart()
    with pytest.raises(RankFailed, match=r"were closed.*restart\(\) to go on"):
        fork.force([3, 4])


@pytest.mark.slow
def test_an_engine_that_is_gone_leaves_no_followers() -> None:
    """Nobody closed them: a cell of a notebook that loads an engine again would keep those of the first."""
    engine = Engine.load("coin-plain", ranks=2)
    assert engine.ranks is not None
    engine.ranks.restart()
    follower, folder = _follower(engine), Path(engine.ranks._followers.folder.name)
    assert follower.poll() is None and folder.exists()
    del engine
    gc.collect()
    assert follower.poll() is not None and not folder.exists()


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def _follower(engine: Engine) -> "subprocess.Popen[bytes]":
    assert engine.ranks is not None
    return engine.ranks._followers.processes[0]


def test_a_fork_of_the_process_asks_no_rank(two: Ranks, narrow: None) -> None:
    """Its messages would mix with its parent's."""
    engine, alone = (Engine(model) for model in (over(two, reference.decoder("llama")), reference.decoder("llama")))
    if not (child := os.fork()):
        try:
            engine.prompt([1, 2, 3])
        except RankFailed as error:
            os._exit(0 if "a fork of it" in str(error) else 2)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(engine.prompt([1, 2, 3]).kv(), alone.prompt([1, 2, 3]).kv())


@pytest.mark.slow
def test_followers_end_with_their_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    started, spawn = list[Any](), subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda *args, **more: started.append(spawn(*args, **more)) or started[-1])
    ranks = Ranks(2, "cpu", torch.float32)
    assert started[0].poll() is None
    del ranks
    assert started[0].poll() is not None
    monkeypatch.setattr(ranks_file, "identity", lambda device, dtype: "0.0, torch.float32")
    with pytest.raises(FingerprintMismatch, match="Rank 1 would compute other bits"):
        Ranks(2, "cpu", torch.float32)
    assert started[1].poll() is not None


@pytest.mark.slow
def test_followers_end_if_rank_0_is_killed() -> None:
    code = "import time, torch\nfrom replaylens.extras.ranks import Ranks\n"
    code += "ranks = Ranks(2, 'cpu', torch.float32)\nprint(ranks._followers.processes[0].pid, flush=True)\ntime.sleep(99)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=env) as leader:
        assert leader.stdout is not None
        follower = int(leader.stdout.readline())
        assert _runs(follower)
        leader.kill()
    end = time.monotonic() + 20
    while _runs(follower) and time.monotonic() < end:
        time.sleep(0.1)
    assert not _runs(follower)


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_that_do_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    began = time.monotonic()
    with pytest.raises(RankFailed, match="The 3 ranks did not start: rank 1 ended with exit code 1"):
        Engine.load("coin-plain", ranks=3)
    assert time.monotonic() - began < 10


def test_torchrun_must_start_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("RANK", "1"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    with pytest.raises(BadRequest, match="Give ranks=4"):
        Engine.load("coin-plain", ranks=2)


# ---- slow: sessions, torchrun, Ray ---------------------------------------------------------------------------------------


class OverRanks(Sessions):
    """Random sessions of an engine whose products are divided; the reference is one process."""

    ranks: Ranks
    split: Decoder | None = None
    killed = 0

    def new_engine(self, page_size: int, max_rows: int, seed: int) -> Engine:
        """As the parent's, over ranks. Traces are replayed in one process."""
        cls = type(self)
        cls.split = cls.split or over(cls.ranks, self.model)
        sizes = {"cache_tokens": self.cache_tokens, "page_size": page_size, "max_rows": max_rows}
        engine = Engine(cls.split, draft_model=reference.perturbed(self.model, 0.02), canary=True, record=True, **sizes)
        engine.loop.admission.planner = AnyWindow(seed)
        engine.loop.listeners.append(self.count)
        return engine

    @rule(pick=st.integers(0, 99))
    @precondition(lambda self: self.open() and type(self).killed < 2)
    def kill_a_rank(self, pick: int) -> None:
        """A token is committed as a whole or not at all; the same branch goes on with new ranks."""
        cls, one = type(self), self.pick_open(pick)
        cls.killed += 1
        cls.ranks._followers.processes[pick % (cls.ranks.size - 1)].kill()
        with pytest.raises(RankFailed):
            one.branch.force([1, 2])
        assert one.branch.tokens == one.path
        cls.ranks.restart()
        one.branch.force([1, 2])
        one.path += [1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_ten_thousand_comparisons(ranks: int, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    compared, group = count(), Ranks(ranks, "cpu", torch.float32)
    truth = reference.same_bits
    monkeypatch.setattr(reference, "same_bits", lambda ours, theirs: (next(compared), truth(ours, theirs))[1])
    kinds = (Sessions, test_machine.Experts, test_machine.Latents, *test_machine.HYBRIDS)
    before = killed = 0
    for kind in kinds:
        own: Any = type(f"{kind.__name__}OverRanks", (OverRanks, kind), {"ranks": group, "reference": None, "split": None})
        group.ready(lambda ranks, own=own: _again(ranks, own))  # type: ignore[misc]
        run_state_machine_as_test(own, settings=some(4, 30))
        print(f"{own.__name__}: {group.answers - before} answers of {ranks - 1} ranks", flush=True)
        assert group.answers > before + 500, "control: ranks took part"
        before, killed = group.answers, killed + own.killed
    total = next(compared)
    print(f"{ranks} ranks: {total} comparisons, {group.answers} answers, {group.sent_bytes + group.received_bytes} bytes")
    assert total >= 10_000 and killed >= 3
    group.close()


def _again(group: Ranks, machine: Any) -> None:
    """Sends the weights of the machine's model to new ranks, under the numbers that it has."""
    fresh = loading.load(machine.reference.runner.model)
    first = min(held.number for held in _splits(machine.split))
    paths = {number: path for path, number in group._numbers.items()}
    scope = paths[first].split(".")[0]
    group.divide({f"{scope}.{name}": found for name, found in group.packable(fresh).items()})


def _splits(model: Decoder) -> list[SplitWeight]:
    return [x for module in model.modules() for x in getattr(module, "panels", {}).values() if isinstance(x, SplitWeight)]


@pytest.mark.slow
def test_random_trees_over_ranks(two: Ranks, narrow: None, monkeypatch: pytest.MonkeyPatch) -> None:
    known: dict[int, Decoder] = {}

    def make(model: Decoder, **options: Any) -> Engine:
        if id(model) not in known:  # the reference's
            known[id(model)] = model
            return Engine(model, **options)
        return Engine(over(two, model), **options)

    monkeypatch.setattr(test_tree_machine, "Engine", make)
    before = two.answers
    run_state_machine_as_test(test_tree_machine.Trees, settings=some(4, 30))
    assert two.answers > before + 300


@pytest.mark.slow
def test_a_dump_goes_on_from_its_last_shard(tmp_path: Path) -> None:
    coin = rl.tasks.get("coin")(flips=(2, 4))
    alone, engine = Engine.load("coin-plain"), Engine.load("coin-plain", ranks=2)
    plan = make_plan(engine, coin, 6, sites="ST", examples_per_shard=2)
    made, before = list[int](), ShardMaker.make

    def make(self: ShardMaker, number: int, *more: Any) -> Any:
        if number == 1 and not made:
            made.append(number)
            _follower(engine).kill()
        return before(self, number, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardMaker, "make", make)
        with pytest.raises(RankFailed, match="resume=True"):
            write_dump(engine, plan, tmp_path / "dump")
        assert engine.ranks is not None
        engine.ranks.restart()
        dump = write_dump(engine, plan, tmp_path / "dump", resume=True)
    whole = write_dump(alone, make_plan(alone, coin, 6, sites="ST", examples_per_shard=2), tmp_path / "whole")
    assert dump is not None and whole is not None and dump.digest == whole.digest


@pytest.mark.slow
def test_new_ranks_get_the_weights_that_were_loaded(tmp_path: Path) -> None:
    loading.save(load_model("coin-plain", torch.float32, check=False)[0], tmp_path)
    engine = Engine.load(tmp_path, ranks=2)
    assert engine.ranks is not None
    branch = engine.prompt([1, 2, 3], sites="ST")
    engine.ranks.restart()
    loading.save(load_model("coin-draft", torch.float32, check=False)[0], tmp_path)
    assert same(branch.generate(2), Engine.load("coin-plain").prompt([1, 2, 3], sites="ST").generate(2))
    with pytest.raises(EngineError):
        engine.ranks.restart()
    with pytest.raises(RankFailed):
        branch.generate(2)


@pytest.mark.slow
def test_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import replaylens as rl\n"
        "engine = rl.Engine.load('coin-plain', ranks=3)\n"
        f"print('tokens', engine.prompt({TEXT!r}).generate(3).tokens)\n"
    )
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", str(script)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(run, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    tokens = Engine.load("coin-plain").prompt(TEXT).generate(3).tokens
    assert [line for line in done.stdout.splitlines() if line.startswith("tokens")] == [f"tokens {tokens}"]


@pytest.mark.slow
def test_two_workers_of_two_ranks_write_the_dump_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", python_path(tmp_path / "hidden"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = Engine.load("coin-plain")
    whole = write_dump(alone, make_plan(alone, rl.tasks.get("coin")(), 8, examples_per_shard=2), tmp_path / "whole")
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        dump = dump_on_cluster(
            "coin-plain", tmp_path / "dump", "coin", 8, workers=2, engine_options={"ranks": 2}, examples_per_shard=2
        )
    finally:
        ray.shutdown()
    assert isinstance(dump, Dump) and whole is not None and dump.digest == whole.digest
