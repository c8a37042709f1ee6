"""Fixtures of the probes' tests: small dumps of the embedded model, and rows whose every property is known."""

from pathlib import Path

import pytest

from replaylens import tasks
from replaylens.engine.dump.maker import write_dump
from replaylens.engine.dump.planning import make_plan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine


@pytest.fixture(scope="session")
def engine() -> Engine:
    """The embedded coin model. Tests leave it as it was."""
    return Engine.load("coin-plain")


@pytest.fixture(scope="session")
def coin_dump(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Coin prompts of 2 to 5 actors, S and Z at every token, rejected lens drafts kept."""
    plan = make_plan(engine, tasks.get("coin")(flips=(2, 5)), 80, sites="SZ", examples_per_shard=32)
    dump = write_dump(engine, plan, tmp_path_factory.mktemp("coin"))
    assert dump is not None
    return dump


@pytest.fixture(scope="session")
def steps_dump(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """Chains of thought, drafted by the smaller model, whose rejected branches read well."""
    plan = make_plan(engine, tasks.get("coin")(flips=(2, 4), rendering="steps"), 40, sites="S", drafter="model")
    dump = write_dump(engine, plan, tmp_path_factory.mktemp("steps"))
    assert dump is not None
    return dump


@pytest.fixture
def report_folder(tmp_path: Path) -> Path:
    return tmp_path / "report"
