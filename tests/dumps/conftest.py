"""Fixtures for the dump tests: a tiny random model over the coin's vocabulary, whose drafts are often rejected."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylens import tasks
from replaylens.dumps.content import Content
from replaylens.dumps.maker import ShardMaker, make_plan, write_dump
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.engine.engine import Engine
from replaylens.engine.model.decoder import Decoder
from replaylens.tasks import WordTokenizer
from replaylens.tasks.task import AnyTask
from replaylens.training import embedded as zoo
from tests.toy_model import random_model

EXAMPLES, PER_SHARD, NEW = 7, 3, 5
"""gives three shards, the last one smaller"""


def written(engine: Engine, plan: DumpPlan, path: Any, **options: Any) -> Dump:
    dump = write_dump(engine, plan, path, **options)
    assert dump is not None
    return dump


def in_memory(dump: Dump, url: str) -> Dump:
    """The same files in a remote store."""
    store = Store(url)
    for name in dump.files.store.sizes():
        store.write(name, dump.files.store.read(name, 1 << 30))
    return Dump.open(url)


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
    dump = written(engine, planned(), tmp_path_factory.mktemp("reference"))
    assert dump.manifest.accepted_rows < dump.manifest.rows, "the model must have drafts rejected"
    return dump


@pytest.fixture
def computed_once(reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what is written, not of what is computed: each shard of a plan is made once in all."""
    plain, replay = ShardMaker.make, ShardMaker._replay

    def make(self: ShardMaker, number: int, done: Callable[[int], object] = lambda count: None) -> Content:
        if ShardMaker._replay is not replay:  # a test watches it
            return plain(self, number, done)
        key = self.engine.fingerprint.digest, json.dumps(self.plan.to_json(), default=str), number
        if key in SHARDS:
            done(len(self.plan.indices(number)))
        else:
            SHARDS[key] = plain(self, number, done)
        kept = SHARDS[key]
        return Content({name: x.clone() for name, x in kept.tensors.items()}, kept.index)

    monkeypatch.setattr(ShardMaker, "make", make)


SHARDS: dict[tuple[str, str, int], Content] = {}


@pytest.fixture
def copy(reference: Dump, tmp_path: Path) -> Path:
    """A copy of the reference dump, to damage."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in reference.files.store.sizes():
        (folder / name).write_bytes(Path(reference.url, name).read_bytes())
    return folder
