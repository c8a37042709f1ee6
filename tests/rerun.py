"""`Rerun`: a plugin of pytest that runs each test as it is, and again with each of several faults."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from tests.conftest import LONG
from tests.interrupted import OutOfTime, time_limit

ROOT = Path(__file__).parents[1]


class Rerun:
    """A fault is noticed if the test passes without it, fails with it, and passes where it is planted and does nothing.

    asked           node id of a test without its parameters -> the faults to try there, after the test has run without
    planted         (fault, whether it does anything) -> a context in which it is there
    limit           CPU seconds of a test that is not tried; ten times as many end it
    refusals_count  whether a fault is noticed that only keeps an error from being raised
    worth           whether a test is run at all
    """

    def __init__(
        self,
        asked: Callable[[str], Iterable[Any]],
        planted: Callable[[Any, bool], AbstractContextManager[None]],
        limit: float = 4.0,
        refusals_count: bool = True,
        worth: Callable[[str], bool] = lambda test: True,
    ) -> None:
        self.asked, self.planted, self.limit = asked, planted, limit
        self.noticed: dict[Any, str] = {}
        self.refusals_count, self.worth = refusals_count, worth

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """The long files last: shorter ones notice most."""
        items.sort(key=lambda item: item.nodeid.partition("::")[0].removeprefix("tests/") in LONG)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: Any, nextitem: Any) -> bool:
        test = item.nodeid.partition("[")[0]
        if self.worth(test) and (
            self._passes_soon(item) or self._passes_soon(item)
        ):  # the first of a file may import and make what others share
            for fault in [each for each in self.asked(test) if each not in self.noticed]:
                with self.planted(fault, True):
                    failed = self._fails(item)
                if failed:
                    with self.planted(fault, False):
                        failed = not self._fails(item)
                if failed:
                    self.noticed[fault] = item.nodeid
                    print(fault, item.nodeid, file=sys.__stderr__, flush=True)
        item.session._setupstate.teardown_exact(nextitem)
        return True

    def _passes_soon(self, item: Any) -> bool:
        began = time.process_time()
        return not self._fails(item) and time.process_time() - began < self.limit

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self, call: Any) -> Iterator[None]:
        made: Any = yield
        made.get_result().said = str(call.excinfo.value) if call.excinfo else ""

    def _fails(self, item: Any) -> bool:
        beside: Any = SimpleNamespace(listchain=lambda: item.parent.listchain())  # what the file shares stays
        try:
            with time_limit(10 * self.limit, processor=True):
                reports: Any = runtestprotocol(item, log=False, nextitem=beside)
        except OutOfTime:  # a fault keeps it from ending
            return False
        return any(each.failed and (self.refusals_count or "DID NOT RAISE" not in each.said) for each in reports)

    def run(self, files: Sequence[str]) -> "Rerun":
        options = ["-q", "--tb=no", "--assert=plain", "-p", "no:cacheprovider", "-p", "bench.mutants.quick"]
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing):
            pytest.main([*options, *(f"{ROOT}/{each}" for each in files)], plugins=[self])
        return self
