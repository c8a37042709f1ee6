"""Rollouts on a stand-in for Ray: the same digest on any number of workers, also when some die. `make cluster` starts Ray."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from replaylens.cli import app
from replaylens.engine import cluster
from replaylens.engine.cluster import resample_on_cluster
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, ClusterFailed, FingerprintMismatch
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling.plan import Answer
from replaylens.engine.resampling.rollouts import Rollouts, WaveFolder
from tests.engine.dump.fake_ray import FakeRay

PROMPT, CHAIN = "A coin's state is heads.", " Alice flips. Bob flips."
OPTIONS: dict[str, Any] = {
    "at": "sentences",
    "sampling": Sampling(temperature=1.0, seed=3),
    "max_new": 8,
    "answer": Answer.regex("heads|tails"),
    "sites": "S",
    "keep": ["fork", "last"],
    "wave": 4,
}
Dies = Callable[[int, str, tuple[Any, ...]], bool]


@pytest.fixture(scope="module")
def reference() -> Rollouts:
    """In this process, without waves."""
    return Engine.load("coin-plain").prompt(PROMPT).force(CHAIN).resample(7, **{**OPTIONS, "wave": None})


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeRay]:
    """Replace Ray by a stand-in."""

    def install(dies: Dies = lambda *call: False) -> FakeRay:
        ray = FakeRay(2, dies)

        @contextmanager
        def connected(address: str) -> Iterator[FakeRay]:
            yield ray

        monkeypatch.setattr(cluster, "connected", connected)
        return ray

    return install


def drawn(folder: Path, **more: Any) -> Rollouts:
    return resample_on_cluster("coin-plain", folder, PROMPT, 7, chain=CHAIN, **{**OPTIONS, **more})


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers(fake: Any, reference: Rollouts, tmp_path: Path, workers: int) -> None:
    ray = fake()
    found = drawn(tmp_path, workers=workers)
    assert found.digest == reference.digest and ray.started == workers
    assert len(list(tmp_path.glob("wave-*.json"))) == 4


def test_dead_workers_are_replaced(fake: Any, reference: Rollouts, tmp_path: Path) -> None:
    """The first worker dies on its second wave."""
    written: list[int] = []

    def dies(actor: int, method: str, args: tuple[Any, ...]) -> bool:
        written.extend([actor] * (actor == 1 and method == "write"))
        return actor == 1 and len(written) > 1

    ray = fake(dies)
    assert drawn(tmp_path, workers=2).digest == reference.digest and ray.started == 3
    assert ray.killed == 3, "none outlives the call, and holds a place of the cluster"


def test_the_command_starts_one_cluster_for_all_chains(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting one takes many seconds. `connected` within `connected` takes the one that runs."""
    fake()
    depth, starts, once = 0, 0, cluster.connected

    @contextmanager
    def counted(address: str) -> Iterator[Any]:
        nonlocal depth, starts
        starts, depth = starts + (depth == 0), depth + 1
        with once(address) as ray:
            yield ray
        depth -= 1

    monkeypatch.setattr(cluster, "connected", counted)
    (tmp_path / "chains.jsonl").write_text(
        "".join(json.dumps({"prompt": PROMPT, "chain": chain}) + "\n" for chain in (CHAIN, " Bob flips."))
    )
    given = ["resample", "--file", str(tmp_path / "chains.jsonl"), "--n", "3", "--max-new", "4", "--out", str(tmp_path / "out")]
    told = CliRunner().invoke(app, [*given, "--workers", "2", "--quiet"])
    assert told.exit_code == 0 and len(list((tmp_path / "out").iterdir())) == 2, told.output
    assert (starts, depth) == (1, 0)


def test_a_wave_that_kills_every_worker(fake: Any, reference: Rollouts, tmp_path: Path) -> None:
    """It ends with a named error; the others are kept, and the next call goes on with them."""
    fake(lambda actor, method, args: method == "write" and args[1] == 2)
    with pytest.raises(ClusterFailed, match="Wave 2"):
        drawn(tmp_path, workers=1)
    fake()
    assert drawn(tmp_path, workers=2).digest == reference.digest


def test_other_workers_are_refused(fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake()
    created = WaveFolder.create

    def with_another_model(folder: Any, plan: Any, wave: int) -> WaveFolder:
        from dataclasses import replace

        return created(folder, replace(plan, fingerprint="0" * 64), wave)

    monkeypatch.setattr(WaveFolder, "create", with_another_model)
    with pytest.raises(FingerprintMismatch):
        drawn(tmp_path)


def test_functions_are_not_sent(fake: Any, tmp_path: Path) -> None:
    fake()
    with pytest.raises(BadRequest, match="at cannot be sent"):
        drawn(tmp_path, at=lambda position, text: True)
    with pytest.raises(BadRequest, match="function"):
        drawn(tmp_path, answer=Answer.function(str.upper))
