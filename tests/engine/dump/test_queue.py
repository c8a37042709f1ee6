"""Writes beside the computation: bounded, never cut off, their errors raised in the caller; any number of threads, one dump."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replaylens.engine.dump.content import Content
from replaylens.engine.dump.maker import ShardMaker, write_dump
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.writer import DumpWriter, WriteQueue
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, DumpWriteFailed

Planned = Callable[..., DumpPlan]


@pytest.mark.parametrize("threads", [1, 3])
def test_no_more_writes_than_threads(threads: int) -> None:
    under_way, most, lock = [0], [0], threading.Lock()

    def write(pause: threading.Event) -> None:
        with lock:
            under_way[0] += 1
            most[0] = max(most[0], under_way[0])
        pause.wait(0.02)
        with lock:
            under_way[0] -= 1

    with WriteQueue(threads) as queue:
        for _ in range(9):
            queue.put(write, threading.Event())
        queue.wait()
    assert most == [threads] and under_way == [0]


def test_an_error_is_raised_at_the_next_call() -> None:
    def write(message: str) -> None:
        if message:
            raise DumpWriteFailed(message)

    for call in ("check", "put", "wait"):
        with WriteQueue() as queue, pytest.raises(DumpWriteFailed, match="the disk is full"):
            queue.put(write, "the disk is full")
            queue._pool.submit(lambda: None).result()  # the one thread has come to the end of the write
            queue.put(write, "") if call == "put" else getattr(queue, call)()


def test_a_failing_block_does_not_cut_off_a_write() -> None:
    go, written = threading.Event(), list[str]()

    def write() -> None:
        assert go.wait(60)
        written.append("all")

    with pytest.raises(KeyboardInterrupt), WriteQueue() as queue:
        queue.put(write)
        threading.Timer(0.05, go.set).start()
        raise KeyboardInterrupt
    assert written == ["all"]


@pytest.mark.parametrize("writers", [1, 3])
def test_the_files_do_not_depend_on_the_threads(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, writers: int
) -> None:
    dump = write_dump(engine, planned(), tmp_path, writers=writers)
    assert dump is not None and dump.digest == reference.digest
    for name in reference.files.store.sizes():
        assert (tmp_path / name).read_bytes() == Path(reference.url, name).read_bytes(), name


def test_impossible_numbers_of_threads(engine: Engine, planned: Planned, tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="writers"):
        write_dump(engine, planned(), tmp_path / "none", writers=0)
    assert not (tmp_path / "none").exists()


def test_a_failed_write_ends_the_next_shard_early(
    engine: Engine, planned: Planned, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shard 1 cannot be written. The error comes after a batch of shard 2, not after all of it, and shard 0 is kept."""
    original, put, made, queues = DumpWriter.write_shard, WriteQueue.put, list[int](), list[WriteQueue]()

    def write(self: DumpWriter, number: int, content: Content, sites: Any) -> None:
        if number == 1:
            raise DumpWriteFailed("the disk is full")
        original(self, number, content, sites)

    plan = planned(examples=9, examples_per_shard=3)
    maker = ShardMaker(engine, plan, batch=1)

    def make(number: int, done: Callable[[int], object]) -> Content:
        def counted(count: int) -> None:
            made.append(number)
            if number == 2:  # the thread has ended with its error
                assert isinstance(queues[-1]._under_way[0].exception(60), DumpWriteFailed)
            done(count)

        return maker.make(number, counted)

    def seen(self: WriteQueue, *work: Any) -> None:
        queues.append(self)
        put(self, *work)

    with monkeypatch.context() as patch:
        patch.setattr(DumpWriter, "write_shard", write)
        patch.setattr(WriteQueue, "put", seen)
        with pytest.raises(DumpWriteFailed, match="the disk is full"):
            DumpWriter(tmp_path, plan, engine.fingerprint).write(make, maker.sites)
    assert made == [0] * 3 + [1] * 3 + [2]
    assert sorted(path.name for path in tmp_path.glob("part-*.json")) == ["part-00000.json"]
    whole = write_dump(engine, plan, tmp_path, resume=True)
    assert whole is not None and whole.digest == _digest(engine, plan, tmp_path / "again")


def _digest(engine: Engine, plan: DumpPlan, folder: Path) -> str:
    dump = write_dump(engine, plan, folder)
    assert dump is not None
    return dump.digest
