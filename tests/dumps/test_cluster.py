"""Dumps on a stand-in for Ray: the same digest on any number of workers, also when some die. `make cluster` starts Ray."""

import json
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from replaylens.dumps.lock import DumpLock
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.engine import machine
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, ClusterFailed, DumpLocked, FingerprintMismatch, SlowCluster
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.extras import cluster
from replaylens.extras.cluster import dump_on_cluster
from replaylens.tasks.task import AnyTask
from tests.devices import swept
from tests.dumps.conftest import EXAMPLES, NEW, PER_SHARD
from tests.dumps.fake_ray import FakeRay, RayError

OPTIONS: dict[str, Any] = {"knobs": {"flips": [1, 3]}, "max_new": NEW, "examples_per_shard": PER_SHARD}
Dies = Callable[[int, str, tuple[Any, ...]], bool]


def same_bytes(folder: Path, reference: Dump) -> bool:
    """Whether the files are exactly those of the reference."""
    names = reference.files.store.sizes()
    theirs = {name: Path(reference.url, name).read_bytes() for name in names}
    return {path.name: path.read_bytes() for path in folder.iterdir()} == theirs


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    """Replace Ray by a stand-in."""

    def install(dies: Dies = lambda *call: False, cpus: int = 2, **more: Any) -> FakeRay:
        ray = FakeRay(cpus, dies, **more)

        @contextmanager
        def connected(address: str) -> Iterator[FakeRay]:
            yield ray

        monkeypatch.setattr(cluster, "connected", connected)
        return ray

    return install


@pytest.mark.parametrize("workers", swept([None, 1, 3, 7], 7))
def test_any_number_of_workers(fake: Any, model_folder: Path, reference: Dump, tmp_path: Path, workers: int | None) -> None:
    """One worker per slot by default, and never more than there are shards."""
    ray = fake()
    dump = dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=workers, **OPTIONS)
    assert dump is not None and dump.digest == reference.digest and same_bytes(tmp_path, reference)
    assert ray.started == min(workers or 2, 3)


def test_more_workers_than_slots(fake: Any, model_folder: Path, reference: Dump, tmp_path: Path) -> None:
    """Workers without a slot get no shards: one worker writes all of them instead of waiting forever."""
    ray = fake(cpus=1, slots=1)
    dump = dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=3, **OPTIONS)
    assert dump is not None and same_bytes(tmp_path, reference) and ray.started == 3


def test_workers_that_never_get_ready(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    fake(lambda actor, method, args: (method == "ready" and actor > 1) or (method == "write" and actor == 1))
    with pytest.raises(ClusterFailed, match=f"before it was ready, {cluster.ATTEMPTS} times"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=1, **OPTIONS)
    assert not list(tmp_path.glob("lock-*"))


def test_dead_workers_are_replaced(fake: Any, model_folder: Path, reference: Dump, tmp_path: Path) -> None:
    """Every worker dies on its second shard."""
    written: dict[int, int] = {}

    def dies(actor: int, method: str, args: tuple[Any, ...]) -> bool:
        written[actor] = written.get(actor, 0) + (method == "write")
        return written[actor] > 1

    ray = fake(dies)
    dump = dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=1, **OPTIONS)
    assert dump is not None and same_bytes(tmp_path, reference) and ray.started == 3


def test_a_shard_that_kills_its_workers(fake: Any, model_folder: Path, reference: Dump, tmp_path: Path) -> None:
    """The shard is abandoned after a few attempts. The other shards are kept, and the dump can be resumed."""
    fake(lambda actor, method, args: method == "write" and args[2] == 1)
    with pytest.raises(ClusterFailed, match=f"Shard 1: its worker died, {cluster.ATTEMPTS} times"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=1, **OPTIONS)
    assert (tmp_path / "plan.json").exists() and not list(tmp_path.glob("lock-*"))
    ray = fake()
    dump = dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=1, resume=True, **OPTIONS)
    assert dump is not None and same_bytes(tmp_path, reference) and ray.started == 1


def test_an_error_of_rays_own_is_named(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    """No worker died and none raised: the cluster could not do its part."""

    def lost(actor: int, method: str, args: tuple[Any, ...]) -> bool:
        raise RayError("the object store is full")

    fake(lost)
    with pytest.raises(ClusterFailed, match="RayError: the object store is full"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, **OPTIONS)


def test_a_cluster_that_cannot_even_plan(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    fake(lambda actor, method, args: True)
    with pytest.raises(ClusterFailed, match="before it could plan"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, **OPTIONS)


@pytest.mark.parametrize(
    ("step", "what", "limit"),
    [
        ("started", "the process of the first worker, on a cluster with 2 CPUs", cluster.START_SECONDS),
        ("ready", "the first worker to load", cluster.LOAD_SECONDS),
    ],
)
def test_a_wait_says_for_what_and_ends(
    fake: Any, model_folder: Path, reference: Dump, tmp_path: Path, step: str, what: str, limit: int
) -> None:
    """A worker that starts slowly is announced and waited for; one that does not start in time is a named error."""
    fake(slow={step: 2})
    with pytest.warns(SlowCluster) as told:
        dump = dump_on_cluster(str(model_folder), tmp_path / "slow", "coin", EXAMPLES, **OPTIONS)
    assert dump is not None and same_bytes(tmp_path / "slow", reference)
    said = [str(each.message) for each in told]
    assert len(said) == 2 and all(text.startswith(f"Waiting for {what}") for text in said)
    assert said[0].endswith(f": 30 s of at most {limit} so far.") and said[1].endswith(f": 60 s of at most {limit} so far.")
    ray = fake(slow={step: 1000})
    with pytest.warns(SlowCluster) as told, pytest.raises(ClusterFailed, match=rf"Waited {limit} s for {what}.*fewer workers"):
        dump_on_cluster(str(model_folder), tmp_path / "never", "coin", EXAMPLES, **OPTIONS)
    assert len(told) == ray.waits - (step == "ready") == limit / cluster.SAY_SECONDS
    assert ray.killed == 1 and not (tmp_path / "never").exists(), "the worker is not left behind"


def test_work_is_waited_for_without_a_limit(fake: Any, model_folder: Path, reference: Dump, tmp_path: Path) -> None:
    """How long a shard takes depends on the model. Workers in the place of dead ones have the limit of the first."""
    fake(slow={"write": 20})
    with pytest.warns(SlowCluster, match=r"Waiting for shard 0: 600 s so far") as told:
        assert dump_on_cluster(str(model_folder), tmp_path / "slow", "coin", EXAMPLES, workers=1, **OPTIONS) is not None
    assert len(told) == 20 and same_bytes(tmp_path / "slow", reference)

    def dies(actor: int, method: str, args: tuple[Any, ...]) -> bool:
        if method == "write":
            ray.slow["ready"] = 1000
        return method == "write"

    ray = fake(dies)
    with pytest.warns(SlowCluster), pytest.raises(ClusterFailed, match="for other workers, after some have died"):
        dump_on_cluster(str(model_folder), tmp_path / "died", "coin", EXAMPLES, workers=1, **OPTIONS)


def test_a_start_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray does not say how far it is, so a thread does."""
    ray, said = pytest.importorskip("ray"), threading.Event()
    monkeypatch.setattr(ray, "init", lambda **options: said.wait(60))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "SAY_SECONDS", 0.001)
    monkeypatch.setattr(cluster, "_say", lambda what, waited: said.set() if what == "a Ray cluster to start" else None)
    with cluster.connected("local"):
        assert said.is_set() and not any(thread.name == "waiting" for thread in threading.enumerate())


def test_a_quick_cluster_says_nothing(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    """The control."""
    fake()
    with warnings.catch_warnings():
        warnings.simplefilter("error", SlowCluster)
        assert dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, **OPTIONS) is not None


def test_errors_come_out_as_they_are(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    fake()
    with pytest.raises(BadRequest, match="oracle"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, drafter="oracle", **OPTIONS)
    with pytest.raises(BadRequest, match="workers=0"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, workers=0, **OPTIONS)
    fake(cpus=0)
    with pytest.raises(BadRequest, match="has 0 CPUs"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, **OPTIONS)


def test_all_options_of_a_plan_reach_the_workers(
    fake: Any, engine: Engine, coin: AnyTask, model_folder: Path, tmp_path: Path
) -> None:
    """All options, including sampling and edits, give the same dump as without workers."""
    fake()
    options: dict[str, Any] = {
        "sampling": Sampling(temperature=0.7, seed=5, stop=("tails",), stop_tokens=(3,), logit_bias={4: 0.5}),
        "edits": [Edit("S", "add", torch.ones(engine.config.d_model), positions=slice(-3, None), layers=[1])],
        "top_k": 3,
        "max_new": NEW,
    }
    here = write_dump(engine, make_plan(engine, coin, 3, **options), tmp_path / "here")
    there = dump_on_cluster(str(model_folder), tmp_path / "there", "coin", 3, knobs={"flips": [1, 3]}, **options)
    assert here is not None and there is not None and (there.digest, there.manifest.plan) == (here.digest, here.manifest.plan)


@pytest.mark.parametrize(
    "options, complaint",
    [
        ({"knobs": {"flips": {1, 2}}}, "knobs cannot be sent"),
        ({"positions": len}, "positions cannot be sent"),
    ],
)
def test_what_cannot_be_sent_is_named(fake: Any, tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    ray = fake()
    with pytest.raises(BadRequest, match=complaint):
        dump_on_cluster("coin-plain", tmp_path, "coin", 2, **options)
    assert not ray.started


def test_a_worker_with_other_bits_is_refused(model_folder: Path, reference: Dump, tmp_path: Path) -> None:
    """On a mixed cluster, a machine that would give other bits is refused by name."""
    manifest = reference.manifest
    other = {**vars(manifest.fingerprint), "canonical": "another arithmetic"}
    worker = cluster.ShardWorker(str(model_folder), "{}")
    with pytest.raises(FingerprintMismatch, match="another arithmetic"):
        worker.write(str(tmp_path), json.dumps({"plan": manifest.plan.to_json(), "fingerprint": other}), 0, 4)
    assert not list(tmp_path.iterdir())


def test_the_folder_is_locked(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    fake()
    with DumpLock(Store(tmp_path), "lock-0-of-1"), pytest.raises(DumpLocked):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, workers=1, **OPTIONS)


def test_no_cluster_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address without a cluster is a named error, not a Ray traceback. So is an address other than the current cluster's."""
    ray = pytest.importorskip("ray")

    def nobody(**options: Any) -> None:
        raise ConnectionError("nobody answers")

    monkeypatch.setattr(ray, "init", nobody)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ClusterFailed, match="not found at auto: ConnectionError: nobody"), cluster.connected("auto"):
        pass

    def wrong(**options: Any) -> None:
        raise ValueError("no such option")

    monkeypatch.setattr(ray, "init", wrong)
    with (
        pytest.raises(ClusterFailed, match=r"could not be started on this machine: ValueError: no"),
        cluster.connected("local"),
    ):
        pass
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here:1"))
    with pytest.raises(ClusterFailed, match="already connected to the cluster at here:1"), cluster.connected("nowhere:1"):
        pass
    with cluster.connected("local") as found:
        assert found is ray


@pytest.mark.parametrize("failures", [0, 1, cluster.ATTEMPTS])
def test_a_cluster_that_starts_too_slowly_is_started_again(monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
    ray = pytest.importorskip("ray")
    started: list[str] = []

    def too_slow(address: str, **options: Any) -> None:
        started.append(address)
        if len(started) <= failures:
            raise Exception("The current node timed out during startup.")  # as Ray does

    monkeypatch.setattr(ray, "init", too_slow)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if failures < cluster.ATTEMPTS:
            with cluster.connected("local") as found:
                assert found is ray and len(started) == failures + 1
        else:
            with pytest.raises(ClusterFailed, match=r"in 3 attempts: .* timed out .* busy"), cluster.connected("local"):
                pass
            assert len(started) == cluster.ATTEMPTS
    again = [str(each.message) for each in told if each.category is SlowCluster]
    assert len(again) == len(started) - 1, "each further attempt is announced, the first one is not"
    assert all(text.startswith(f"Attempt {i} of 3") and "timed out" in text for i, text in enumerate(again, 1))


def test_an_address_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends before Ray is asked, which would wait for minutes. The control: an address that answers is Ray's to judge."""
    ray, asked = pytest.importorskip("ray"), list[str]()
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.append(address))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with socket.create_server(("127.0.0.1", 0)) as open_port:
        here = f"127.0.0.1:{open_port.getsockname()[1]}"
        for address in (here, f"ray://{here}"):
            with cluster.connected(address):
                pass
    assert asked == [here, f"ray://{here}"]
    for address in (here, f"ray://{here}", "nowhere.invalid:1"):
        with pytest.raises(ClusterFailed, match=f"not found at {address}: .*Check the address"), cluster.connected(address):
            pass
    assert len(asked) == 2


def test_too_many_workers_or_ranks(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    """Refused before a cluster is connected if it is of this machine alone, else once its size is known. The control: what
    the cluster has room for starts."""
    ray = fake(cpus=100)
    allowed = max(machine.FEWEST, machine.PER_CORE * machine.cores())
    with pytest.raises(BadRequest, match=f"workers={allowed + 1} asks for .* at most {allowed}"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, workers=allowed + 1, **OPTIONS)
    with pytest.raises(BadRequest, match="workers=401 asks for 401 processes, but there are 100 cores"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, address="there:1", workers=401, **OPTIONS)
    with pytest.raises(BadRequest, match="ranks=1000000000 asks"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", 2, engine_options={"ranks": 10**9}, **OPTIONS)
    assert not ray.started
    assert dump_on_cluster(str(model_folder), tmp_path, "coin", 2, address="there:1", workers=400, **OPTIONS) is not None


@pytest.mark.parametrize("gone", ["its machines", "the cluster"])
def test_a_cluster_that_dies_is_noticed(fake: Any, model_folder: Path, tmp_path: Path, gone: str) -> None:
    """Where no worker can come any more, nobody waits for the hour that one may take to load a model."""

    def dies(actor: int, method: str, args: tuple[Any, ...]) -> bool:
        if method == "write":
            ray.cpus, ray.slow["started"] = 0, 1000
            if gone == "the cluster":
                ray.cluster_resources = lambda: raised(RayError("the head does not answer"))
        return method == "write"

    ray = fake(dies)
    said = {"its machines": "0 CPUs are left, and a worker takes 1", "the cluster": "cluster is gone.*head does not answer"}
    with pytest.raises(ClusterFailed, match=f"{said[gone]}.*can be resumed"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=1, **OPTIONS)
    assert ray.slow["started"] == 999, "one silence was enough"


def raised(error: Exception) -> Any:
    raise error


def test_a_worker_that_cannot_start_again(fake: Any, model_folder: Path, tmp_path: Path) -> None:
    """The process of a worker in a dead one's place has the limit of the first process, not that of a model's loading."""

    def dies(actor: int, method: str, args: tuple[Any, ...]) -> bool:
        if method == "write":
            ray.slow["started"] = 1000
        return method == "write"

    ray = fake(dies)
    with pytest.warns(SlowCluster), pytest.raises(ClusterFailed, match=f"Waited {cluster.START_SECONDS} s for other workers"):
        dump_on_cluster(str(model_folder), tmp_path, "coin", EXAMPLES, workers=1, **OPTIONS)


def test_connecting_keeps_the_handler_of_sigterm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray puts one of its own there, which would end the process without giving back a lock."""
    ray = pytest.importorskip("ray")
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(ray, "init", lambda **options: signal.signal(signal.SIGTERM, lambda *given: None))
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with cluster.connected("local"):
        assert signal.getsignal(signal.SIGTERM) == before
