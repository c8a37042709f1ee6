"""Fixtures for the probe tests: small dumps of the embedded model, and rows with known properties."""

from pathlib import Path

import pytest

from replaylens import tasks
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The embedded coin model. Tests must not change it."""
    return Engine.load("coin-plain")


@pytest.fixture(scope="session")
def coin_dump(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Coin prompts of 2 to 5 actors with S and Z at every token. Rejected lens drafts are kept."""
    plan = make_plan(engine, tasks.get("coin")(flips=(2, 5)), 80, sites="SZ", examples_per_shard=32)
    dump = write_dump(engine, plan, tmp_path_factory.mktemp("coin"))
    assert dump is not None
    return dump


@pytest.fixture(scope="session")
def steps_dump(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Chains of thought drafted by the smaller model. The text of rejected branches is well formed."""
    plan = make_plan(engine, tasks.get("coin")(flips=(2, 4), rendering="steps"), 40, sites="S", drafter="model")
    dump = write_dump(engine, plan, tmp_path_factory.mktemp("steps"))
    assert dump is not None
    return dump


@pytest.fixture
def report_folder(tmp_path: Path) -> Path:
    return tmp_path / "report"
