"""The campaign applies mutants to scratch copies, one at a time, and runs the tests near them.

A mutant is killed only if tests run and fail. A run that times out or cannot start kills nothing. The same tests must first
pass on the unchanged copy, or a failure would mean nothing.
"""

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from bench.mutants.mutant import CannotApply, Mutant

NEEDED = 0.9
"""the share of mutants that must be killed"""
LIMIT = 300.0
"""seconds for the tests of one mutant"""
PLUGIN = "bench.mutants.quick"
_NOWHERE = ("__pycache__", ".*_cache", ".hypothesis", ".ipynb_checkpoints", "*.egg-info")
_NOT_AT_THE_TOP = {".git", ".venv", "build", "demo", "dist", "dumps", "report", "trained"}
"""not copied: caches, and files that a checkout's own commands leave"""
_FAILED = re.compile(r"^FAILED (.+?)(?: - .*)?$", re.MULTILINE)


class Outcome(Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    NOT_APPLIED = "could not apply"
    NOT_RUN = "tests did not run"
    CUT_OFF = "over the time limit"


@dataclass(frozen=True)
class Result:
    """The outcome of one mutant."""

    mutant: Mutant
    outcome: Outcome
    seconds: float = 0.0
    detail: str = ""
    """the first failed test, or why there is none"""


class NotSound(Exception):
    """The tests fail without any mutant, so their failing with one shows nothing."""


@dataclass(frozen=True)
class Campaign:
    """Settings of a campaign.

    root   the checkout to copy; it is only read
    jobs   copies tested in parallel
    limit  seconds for the tests of one mutant
    """

    root: Path
    jobs: int = 1
    limit: float = LIMIT
    _running: "set[subprocess.Popen[str]]" = field(default_factory=set, repr=False)

    def run(self, mutants: Sequence[Mutant], told: Callable[[Result], object] = lambda result: None) -> list[Result]:
        """Try all mutants, passing each result to `told` as it comes. Raises NotSound if the unchanged tree fails its tests."""
        with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(self.jobs) as threads:
            copies = [self._copy(Path(folder) / str(number)) for number in range(self.jobs)]
            self._check(mutants, copies[0])
            free: queue.Queue[Path] = queue.Queue()
            for copy in copies:
                free.put(copy)

            def one(mutant: Mutant) -> Result:
                copy = free.get()
                try:
                    result = self._try(mutant, copy)
                finally:
                    free.put(copy)
                told(result)
                return result

            try:
                return list(threads.map(one, mutants))
            except BaseException:  # Ctrl-C reaches only this process: the runs have their own sessions
                threads.shutdown(wait=False, cancel_futures=True)
                for process in list(self._running):
                    _kill(process)
                raise

    def _copy(self, target: Path) -> Path:
        caches = shutil.ignore_patterns(*_NOWHERE)

        def left_out(folder: str, names: list[str]) -> set[str]:
            return caches(folder, names) | (_NOT_AT_THE_TOP if Path(folder) == self.root else set())

        shutil.copytree(self.root, target, symlinks=True, ignore=left_out)
        # Bytecode is checked by the source's hash: by time and size, a changed file could pass for the unchanged one
        hashed = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", "."]
        subprocess.run([sys.executable, *hashed], cwd=target, check=False, capture_output=True)
        return target

    def _check(self, mutants: Sequence[Mutant], copy: Path) -> None:
        tests = list(dict.fromkeys(test for mutant in mutants for test in mutant.tests))
        status, said = self._pytest(tests, copy, self.limit * max(1, len(mutants)))
        if status != 0:
            raise NotSound(f"the tests do not pass without any mutant (status {status}):\n{said[-4000:]}")

    def _try(self, mutant: Mutant, copy: Path) -> Result:
        began = time.monotonic()
        try:
            with _planted(mutant, copy):
                status, said = self._pytest(mutant.tests, copy, self.limit)
        except CannotApply as error:
            return Result(mutant, Outcome.NOT_APPLIED, 0.0, str(error))
        outcome = {0: Outcome.SURVIVED, 1: Outcome.KILLED, None: Outcome.CUT_OFF}.get(status, Outcome.NOT_RUN)
        failed = _FAILED.search(said)
        last = said.strip().splitlines()[-1:] or [""]
        detail = failed[1] if failed else f"status {status}: {last[0]}" if outcome is Outcome.NOT_RUN else ""
        return Result(mutant, outcome, time.monotonic() - began, detail)

    def _pytest(self, tests: Sequence[str], copy: Path, limit: float) -> tuple[int | None, str]:
        """(exit status or None after a timeout, output) of tests in a copy."""
        options = ["-q", "-m", "not gpu", "-x", "-rf", "--tb=no", "--no-header", "-p", "no:cacheprovider", "-p", PLUGIN]
        own = {
            "PYTHONPATH": str(copy / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # not needed, and slow to import
            "OMP_NUM_THREADS": "1",
            "REPLAYLENS_CACHE": tempfile.mkdtemp(prefix="cache-", dir=copy.parent),  # a mutant certifies nothing for other runs
        }
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=copy,
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._running.add(process)
        try:
            said, _ = process.communicate(timeout=limit)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            return None, ""
        finally:
            self._running.discard(process)
            _kill(process)


def _kill(process: "subprocess.Popen[str]") -> None:
    """Kill a run that has not ended, and the processes that its tests started."""
    if process.poll() is None:  # after that, its pid may belong to another process
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def _planted(mutant: Mutant, copy: Path) -> Iterator[None]:
    """Plants the mutant in the copy while the block runs."""
    path = mutant.path(copy)
    try:
        source = path.read_text()
    except FileNotFoundError:
        raise CannotApply(f"there is no {mutant.module}") from None
    changed = mutant.applied(source)
    try:
        path.write_text(changed)
        yield
    finally:
        path.write_text(source)


def good_enough(results: Sequence[Result]) -> bool:
    """Whether enough mutants were killed, and all could be tried."""
    tried = all(result.outcome in (Outcome.KILLED, Outcome.SURVIVED) for result in results)
    return tried and sum(result.outcome is Outcome.KILLED for result in results) >= NEEDED * len(results)
