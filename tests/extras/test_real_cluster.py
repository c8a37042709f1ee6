"""A real Ray cluster of two nodes on this machine: workers that are killed, a node that goes away. `make cluster` runs it.

The stand-in in tests/dumps/fake_ray.py covers the rest of the clusters' code, in milliseconds.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from replaylens.engine.engine import Engine
from replaylens.engine.request.sampling import Sampling
from replaylens.extras.cluster import dump_on_cluster, resample_on_cluster
from replaylens.rollouts.plan import Answer
from replaylens.rollouts.rollouts import Rollouts
from tests.processes import python_path

pytestmark = pytest.mark.slow

PROMPT, CHAIN, ROLLOUTS = "A coin's state is heads.", " Alice flips. Bob flips.", 40
SAMPLING = Sampling(temperature=1.0, seed=3)
OPTIONS: dict[str, Any] = {
    "at": "sentences",
    "max_new": 8,
    "answer": Answer.regex("heads|tails"),
    "sites": "S",
    "keep": ["fork", "last"],
}
WAVES = 2 * ROLLOUTS
"""of one rollout each, so that every worker has many"""
PATIENCE = 180
"""seconds to wait for anything; a worker takes 8 on a quiet machine, 40 where six others compete for a core"""
NODE: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False, "object_store_memory": 100 * 2**20}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory, own_certificates: None) -> Iterator[Any]:
    """Two nodes with room for one worker each. This process is connected to them."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("psutil")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", python_path(tmp_path_factory.mktemp("hidden")))
        patch.setenv("OMP_NUM_THREADS", "1")
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args=NODE)
        try:
            cluster.add_node(**NODE)
            ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


@pytest.fixture(scope="module")
def reference() -> Rollouts:
    """In this process, without waves."""
    with Engine.load("coin-plain").prompt(PROMPT).force(CHAIN) as chain:
        return chain.resample(ROLLOUTS, sampling=SAMPLING, **OPTIONS)


def drawn(folder: Path, workers: int) -> Rollouts:
    where: dict[str, Any] = {"workers": workers, "wave": 1, "sampling": SAMPLING}
    return resample_on_cluster("coin-plain", folder, PROMPT, ROLLOUTS, chain=CHAIN, **where, **OPTIONS)


def until(holds: Callable[[], Any], what: str) -> Any:
    """What the function returns as soon as it is true."""
    deadline = time.monotonic() + PATIENCE
    while not (found := holds()):
        assert time.monotonic() < deadline, f"Waited in vain for {what}."
        time.sleep(0.01)
    return found


def processes(kind: str) -> list[Any]:
    """The running worker processes of a class, oldest first."""
    import psutil

    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if f"ray::{kind}" in " ".join(process.cmdline()):
                found.append((process.create_time(), process))
        except psutil.NoSuchProcess:
            continue
    return [process for _, process in sorted(found, key=lambda each: each[0])]


class Watched:
    """A resampling that runs in a thread, and its workers, which can be stopped so that it is known who draws."""

    def __init__(self, folder: Path, workers: int) -> None:
        until(lambda: not processes("WaveWorker"), "the end of the workers of another test")
        self.folder, self._pool = folder, ThreadPoolExecutor(1)
        self._result = self._pool.submit(drawn, folder, workers)

    @property
    def num_waves(self) -> int:
        return len(list(self.folder.glob("wave-*.json")))

    def first(self) -> Any:
        """The worker that made the plan. It is stopped, with a wave in its hands."""
        until((self.folder / "plan.json").exists, "the plan")
        (first, *_) = processes("WaveWorker")
        first.suspend()
        return first

    def others_draw(self) -> None:
        """Return when workers that are not stopped have written a wave."""
        before = self.num_waves
        until(lambda: self.num_waves > before, "a wave")
        assert self.num_waves < WAVES, "all waves were drawn before anything could happen to them"

    def result(self) -> Rollouts:
        with self._pool:
            return self._result.result(timeout=PATIENCE)


@pytest.mark.usefixtures("nodes")
def test_one_worker(reference: Rollouts, tmp_path: Path) -> None:
    assert drawn(tmp_path, 1).digest == reference.digest
    with Engine.load("coin-plain").prompt(PROMPT).force(CHAIN) as chain:
        other = chain.resample(ROLLOUTS, sampling=Sampling(temperature=1.0, seed=4), **OPTIONS)
    assert other.digest != reference.digest, "the digest does not depend on what was drawn"


@pytest.mark.usefixtures("nodes")
def test_two_workers_on_two_nodes(reference: Rollouts, tmp_path: Path) -> None:
    """Each draws some waves while the other is stopped."""
    drawing = Watched(tmp_path, 2)
    first = drawing.first()
    drawing.others_draw()
    (second,) = [process for process in processes("WaveWorker") if process.pid != first.pid]
    second.suspend()
    assert first.ppid() != second.ppid(), "both are on one node"
    first.resume()
    drawing.others_draw()
    second.resume()
    assert drawing.result().digest == reference.digest


@pytest.mark.usefixtures("nodes")
def test_a_worker_is_killed_in_its_wave(reference: Rollouts, tmp_path: Path) -> None:
    drawing = Watched(tmp_path, 2)
    first = drawing.first()
    drawing.others_draw()
    first.kill()
    assert drawing.result().digest == reference.digest and not first.is_running()
    assert drawing.num_waves == WAVES


def test_a_node_goes_away(nodes: Any, reference: Rollouts, tmp_path: Path) -> None:
    """With everything on it, without notice, while its worker has a wave."""
    third = nodes.add_node(**NODE)
    (raylet,) = third.all_processes["raylet"]
    drawing = Watched(tmp_path, 3)
    drawing.first()

    def drawing_there() -> list[Any]:
        """The third node's worker, if it draws now. All others are stopped, so that waves are left for it."""
        for process in processes("WaveWorker"):
            (process.resume if process.ppid() == raylet.process.pid else process.suspend)()
        return [process for process in processes("WaveWorker.write") if process.ppid() == raylet.process.pid]

    (victim,) = until(drawing_there, "a worker on the third node that draws")
    victim.suspend()
    assert drawing.num_waves < WAVES
    nodes.remove_node(third, allow_graceful=False)
    victim.kill()  # a stopped process does not notice that its node is gone
    for process in processes("WaveWorker"):
        process.resume()
    assert drawing.result().digest == reference.digest


@pytest.mark.usefixtures("nodes")
def test_a_dump_whose_worker_is_killed(tmp_path: Path) -> None:
    """Two workers give the bytes of one; the killed worker's shard is written by the other."""

    def dumped(folder: Path, workers: int) -> Any:
        return dump_on_cluster("coin-plain", folder, "coin", 24, workers=workers, examples_per_shard=2, max_new=8)

    alone = dumped(tmp_path / "one", 1)
    until(lambda: not processes("ShardWorker"), "the end of the first dump's worker")
    with ThreadPoolExecutor(1) as pool:
        dumping = pool.submit(dumped, tmp_path / "two", 2)
        until((tmp_path / "two" / "plan.json").exists, "the plan")
        (first, *_) = processes("ShardWorker")
        os.kill(first.pid, signal.SIGKILL)
        both = dumping.result(timeout=PATIENCE)
    assert both.digest == alone.digest and not first.is_running()
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_the_command(reference: Rollouts, nodes: Any, tmp_path: Path) -> None:
    """`replaylens resample --ray ADDRESS`, from another process."""
    assert commanded(tmp_path, ["--ray", nodes.address, "--workers", "2"]) == reference.digest


@pytest.mark.usefixtures("nodes")
def test_a_start_that_takes_too_long(reference: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--ray local`: the agent of the first node sleeps for 20 s, so that Ray ends the node; the second start succeeds."""
    slept = tmp_path / "slept"
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys, time\n"
        "if any('dashboard/agent.py' in each for each in sys.orig_argv):\n"
        f"    if not os.path.exists({str(slept)!r}):\n"
        f"        open({str(slept)!r}, 'w').close()\n"
        "        time.sleep(20)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    assert commanded(tmp_path / "rollouts", ["--ray", "local", "--workers", "2"]) == reference.digest and slept.exists()


@pytest.mark.usefixtures("nodes")
def test_workers_that_start_late(reference: Rollouts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--ray local` on a busy machine: a worker's process takes 70 s. Ray would end it after 60 and start it anew, forever."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, time\nif any('default_worker.py' in each for each in sys.orig_argv):\n    time.sleep(70)\n"
    )
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ["PYTHONPATH"]]))
    assert commanded(tmp_path / "rollouts", ["--ray", "local", "--workers", "2"], told := []) == reference.digest
    assert "Waiting for the process of the first worker" in told[0]


@contextmanager
def competitors(count: int) -> Iterator[None]:
    """Processes that take all the time they get, of the priority of this one."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


@pytest.mark.usefixtures("nodes")
def test_competing_processes(reference: Rollouts, tmp_path: Path) -> None:
    """`--ray local` beside three busy processes for each core: the same digest, or a named error that says what to do, in
    bounded time. Which of them depends on Ray, which ends nodes that start too slowly."""
    with competitors(3 * (os.cpu_count() or 1)):
        done = resampled(tmp_path, ["--ray", "local", "--workers", "2"], timeout=3 * PATIENCE)
    if done.returncode == 0:
        assert json.loads(done.stdout.splitlines()[-1])["digest"] == reference.digest
    else:
        assert done.returncode == 3 and "ClusterFailed: " in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert commanded(tmp_path, []) == reference.digest, "what was drawn beside them is kept"


def resampled(folder: Path, where: list[str], timeout: float = 2 * PATIENCE) -> "subprocess.CompletedProcess[str]":
    """`replaylens resample` in a process of its own."""
    command = [sys.executable, "-m", "replaylens", "resample", "--prompt", PROMPT, "--chain", CHAIN, "--at", "sentences"]
    options = ["--n", str(ROLLOUTS), "--max-new", "8", "--seed", "3", "--answer", "heads|tails", "--sites", "S"]
    output = ["--keep", "fork,last", "--out", str(folder), "--json", "--quiet"]
    return subprocess.run([*command, *options, *output, *where], capture_output=True, text=True, timeout=timeout)


def commanded(folder: Path, where: list[str], told: list[str] | None = None) -> str:
    """The digest that `replaylens resample` prints; what it says meanwhile goes to `told`."""
    done = resampled(folder, where)
    assert done.returncode == 0, done.stderr
    if told is not None:
        told.append(done.stderr)
    digest: str = json.loads(done.stdout.splitlines()[-1])["digest"]
    return digest
