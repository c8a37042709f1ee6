"""Fixtures for the dump tests: a tiny random model over the coin's vocabulary, whose drafts are often rejected."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylens import tasks
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.model.decoder import Decoder
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from replaylens.training import embedded as zoo
from tests.toy_model import random_model

EXAMPLES, PER_SHARD, NEW = 10, 4, 5
"""gives three shards, the last one smaller"""


@pytest.fixture(scope="session")
def tokenizer() -> WordTokenizer:
    return WordTokenizer(tasks.get("coin").vocabulary())


@pytest.fixture(scope="session")
def model(tokenizer: WordTokenizer) -> Decoder:
    return random_model(vocab_size=tokenizer.vocab_size)


@pytest.fixture(scope="session")
def engine(model: Decoder, tokenizer: WordTokenizer) -> Engine:
    """Shared by all tests. Writing a dump does not change it."""
    draft = random_model(seed=3, vocab_size=tokenizer.vocab_size, num_layers=1)
    return Engine(model, tokenizer, draft_model=draft, record=True)


@pytest.fixture(scope="session")
def model_folder(model: Decoder, tokenizer: WordTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model on disk, for other processes."""
    folder = tmp_path_factory.mktemp("model")
    zoo.save(model, tokenizer, folder)
    return folder


@pytest.fixture(scope="session")
def coin() -> AnyTask:
    return tasks.get("coin")(flips=(1, 3))


@pytest.fixture(scope="session")
def planned(engine: Engine, coin: AnyTask) -> Callable[..., DumpPlan]:
    """A small plan with some options changed."""

    def make(**changes: Any) -> DumpPlan:
        options = {"max_new": NEW, "examples_per_shard": PER_SHARD} | changes
        return make_plan(options.pop("engine", engine), coin, options.pop("examples", EXAMPLES), **options)

    return make


@pytest.fixture(scope="session")
def reference(engine: Engine, planned: Callable[..., DumpPlan], tmp_path_factory: pytest.TempPathFactory) -> Dump:
    """The dump that other dumps are compared with. Tests must not change it."""
    dump = write_dump(engine, planned(), tmp_path_factory.mktemp("reference"))
    assert dump is not None and dump.manifest.accepted_rows < dump.manifest.rows, "the model must have drafts rejected"
    return dump


@pytest.fixture
def copy(reference: Dump, tmp_path: Path) -> Path:
    """A copy of the reference dump, to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in reference.files.store.sizes():
        (folder / name).write_bytes(Path(reference.url, name).read_bytes())
    return folder
