"""A pytest plugin: processes that collect the same tests share them. Every test runs in exactly one process.

A process takes a test by creating a file of its name, which only one process can do. It notes collected tests, taken tests
and outcomes as lines of JSON, so that a process that dies leaves its notes behind.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TOGETHER = 4
"""tests taken at once: neighbours share the fixtures of their module"""


def pytest_configure(config: pytest.Config) -> None:
    folder, number = Path(os.environ["SHARED_TESTS"]), int(os.environ["SHARED_NUMBER"])
    config.pluginmanager.register(Sharing(folder, number), "sharing")


class Sharing:
    """One process's part."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.file = folder, folder / f"{number}.jsonl"

    def note(self, **facts: Any) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def take(self, items: list[pytest.Item]) -> bool:
        """Try to take these tests. Returns whether this process owns them now."""
        name = hashlib.sha256("\n".join(item.nodeid for item in items).encode()).hexdigest()
        try:
            os.close(os.open(self.folder / name, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def ours(self, items: list[pytest.Item]) -> Iterator[pytest.Item]:
        """Tests that no other process has taken. The next one is taken on demand."""
        for first in range(0, len(items), TOGETHER):
            some = items[first : first + TOGETHER]
            if self.take(some):
                for item in some:
                    self.note(taken=item.nodeid)
                    yield item

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
