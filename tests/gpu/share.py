"""A pytest plugin: processes that collect the same tests share them. Every test runs in exactly one process.

A process takes a test by creating a file of its name, which only one process can do. It notes collected tests, taken tests
and outcomes as lines of JSON, so that a process that dies leaves its notes behind.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

FIRST = ("tests/engine/test_machine.py",)
"""files with a test of minutes: it must not be the last one to start"""


def pytest_configure(config: pytest.Config) -> None:
    folder = Path(os.environ["SHARED_TESTS"])
    number, processes = int(os.environ["SHARED_NUMBER"]), int(os.environ["SHARED_PROCESSES"])
    config.pluginmanager.register(Sharing(folder, number, processes), "sharing")


class Sharing:
    """One process's part."""

    def __init__(self, folder: Path, number: int, processes: int) -> None:
        self.folder, self.file = folder, folder / f"{number}.jsonl"
        self.number, self.processes = number, processes

    def note(self, **facts: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def take(self, item: pytest.Item) -> bool:
        """Try to take this test. Returns whether this process owns it now."""
        name = hashlib.sha256(item.nodeid.encode()).hexdigest()
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        self.note(taken=item.nodeid)
        return True

    def ours(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Tests that no other process has taken. The next one is taken on demand.

        Neighbours share fixtures and compiled kernels. So every process has a part of its own, and helps others from the end of
        theirs when it is done.
        """
        long = [item for item in items if item.nodeid.startswith(FIRST)]
        cuts = [len(items) * part // self.processes for part in range(self.processes + 1)]
        parts = [items[begin:end] for begin, end in pairwise(cuts)]
        others = [*parts[self.number + 1 :], *parts[: self.number]]
        order = [long, parts[self.number], *(part[::-1] for part in others)]
        yield from (item for part in order for item in part if self.take(item))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            raise session.Interrupted(f"{session.testsfailed} errors during collection")
        self.note(collected=[item.nodeid for item in session.items])
        mine = self.ours(session.items)
        item = next(mine, None)
        while item is not None:
            following = next(mine, None)  # pytest keeps fixtures that the next test needs
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        self.note(ended=True)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.note(of=report.nodeid, seconds=report.duration)
        if report.failed or (report.when == "call" and report.passed) or report.skipped:
            self.note(test=report.nodeid, outcome=report.outcome)
