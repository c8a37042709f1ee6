"""`make gpu`: run the tests marked gpu in parallel processes.

    PYTHONPATH=src python -m tests.gpu.run

Most of a test's time goes into compiling kernels on the host, one after another within a process. Every process collects all
tests and takes those that no other process has taken (`tests/gpu/share.py`). Needs only pytest.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHOWN = 200
"""last output lines shown for a failed process"""
EVERY = 20.0
"""seconds between two lines about what ran until then"""
SLOWEST = 10
"""files shown with the time their tests took"""


@dataclass
class Outcome:
    """The reports of all processes together."""

    collected: dict[str, list[int]] = field(default_factory=dict)
    """test -> the processes that collected it"""
    taken: Counter[str] = field(default_factory=Counter)
    results: dict[str, str] = field(default_factory=dict)
    """test -> passed, failed or skipped"""
    seconds: Counter[str] = field(default_factory=Counter)
    """file -> what its tests took, fixtures included"""
    crashed: list[int] = field(default_factory=list)
    """processes that ended without reporting it"""

    @classmethod
    def read(cls, folder: Path, processes: int) -> "Outcome":
        """Reads the notes of the processes, one line of JSON each."""
        found = cls()
        for number in range(processes):
            file = folder / f"{number}.jsonl"
            ended = False
            for line in file.read_text().splitlines(keepends=True) if file.exists() else ():
                if not line.endswith("\n"):  # it is being written
                    break
                note = json.loads(line)
                for test in note.get("collected", ()):
                    found.collected.setdefault(test, []).append(number)
                if "taken" in note:
                    found.taken[note["taken"]] += 1
                if "seconds" in note:
                    found.seconds[note["of"].split("::")[0]] += note["seconds"]
                if "test" in note and found.results.get(note["test"]) != "failed":
                    found.results[note["test"]] = note["outcome"]
                ended |= "ended" in note
            found.crashed += [] if ended else [number]
        return found

    @property
    def told(self) -> str:
        """How many tests passed, failed and were skipped."""
        counts = Counter(self.results.values())
        return ", ".join(f"{counts[kind]} {kind}" for kind in ("passed", "failed", "skipped") if counts[kind]) or "nothing run"

    def faults(self, processes: int, late: bool = False) -> list[str]:
        """Why the run failed. Empty if it succeeded. late: it was stopped before its end"""
        faults = [f"failed: {test}" for test, result in self.results.items() if result == "failed"]
        if late:
            faults.append(f"time ran out: {sum(test not in self.results for test in self.collected)} tests have no result")
        else:
            faults += [f"process {number} crashed" for number in self.crashed]
            faults += [f"no result: {test}" for test in self.taken if test not in self.results]
        if not self.crashed:
            faults += [f"not run: {test}" for test in self.collected if test not in self.taken]
            faults += [f"collected by some only: {test}" for test, by in self.collected.items() if len(by) < processes]
        faults += [f"run {times} times: {test}" for test, times in self.taken.items() if times > 1]
        return faults if self.collected else [*faults, "no test was selected"]


def candidates() -> list[str]:
    """The files that can hold a test marked gpu: the file or its conftest.py names the mark or the list of devices.

    Other files may import packages that a machine with a GPU lacks.
    """

    def names_it(file: Path) -> bool:
        return file.exists() and any(word in file.read_text() for word in ("mark.gpu", "import DEVICES", "with_devices"))

    tests = ROOT / "tests"
    folders = {folder for folder in [tests, *tests.rglob("*")] if names_it(folder / "conftest.py")}
    return [str(file) for file in sorted(tests.rglob("test_*.py")) if names_it(file) or folders & set(file.parents)]


def start(number: int, processes: int, folder: Path, expression: str, paths: list[str]) -> "subprocess.Popen[bytes]":
    """Start one pytest process that shares the tests with the others. Its output goes to a file."""
    ours = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": ours, "SHARED_TESTS": str(folder), "SHARED_NUMBER": str(number)}
    environment["SHARED_PROCESSES"] = str(processes)
    environment["PYTHONHASHSEED"] = "0"  # all processes must collect the same tests in the same order
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.gpu.share", "-p", "no:cacheprovider", "-m", expression]
    with (folder / f"{number}.log").open("wb") as log:
        return subprocess.Popen([*command, *paths], cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)


def ended(processes: list["subprocess.Popen[bytes]"], folder: Path, seconds: float | None) -> tuple[list[int], bool]:
    """(exit codes, whether time ran out). Those that are not done in time are interrupted, as by Ctrl-C, all at once.

    Meanwhile it tells what ran, and which tests failed: whoever ends this run knows it, too.
    """
    begin = told = now = time.monotonic()
    known: set[str] = set()
    while (late := [each for each in processes if each.poll() is None]) and (seconds is None or now - begin < seconds):
        time.sleep(0.1)
        now = time.monotonic()
        if now - told > EVERY:
            told, outcome = now, Outcome.read(folder, len(processes))
            print(f"{now - begin:.0f} s: {outcome.told} of {len(outcome.collected)}", flush=True)
            new = {test for test, result in outcome.results.items() if result == "failed"} - known
            known |= new
            print(*(f"failed: {test}" for test in sorted(new)), sep="\n", end="\n" if new else "", flush=True)
    for process in late:
        process.send_signal(signal.SIGINT)
    limit = time.monotonic() + 10
    for process in late:
        try:
            process.wait(max(0.0, limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [process.wait() for process in processes], bool(late)


def main() -> int:
    """Returns 0 if every selected test passed or was skipped for its own reason."""
    parser = argparse.ArgumentParser(description="Run the tests marked gpu in processes side by side.")
    parser.add_argument("--processes", type=int, default=max(6, (os.cpu_count() or 1) * 3 // 4), help="most compile")
    parser.add_argument("--marker", default="gpu", help="marker expression; another one tries this script without a GPU")
    parser.add_argument("--seconds", type=float, help="stop after so long, and report what ran until then")
    parser.add_argument("paths", nargs="*", help="files or folders; default: all that name the marker gpu")
    given = parser.parse_args()
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = given.paths or candidates()
        running = [start(number, given.processes, folder, given.marker, paths) for number in range(given.processes)]
        try:
            codes, late = ended(running, folder, given.seconds)
        finally:
            for process in running:  # if this one is interrupted
                process.kill()
        outcome = Outcome.read(folder, given.processes)
        faults = outcome.faults(given.processes, late)
        for number, code in enumerate(codes):
            if code not in (0, 5):  # 5: other processes took all tests
                said = (folder / f"{number}.log").read_text(errors="replace").splitlines()[-SHOWN:]
                print(f"---- process {number}, exit code {code}", *said, sep="\n")
                faults = faults or [f"process {number} ended with exit code {code}"]
    print(*faults, sep="\n", end="\n" if faults else "")
    print(*(f"{taken:6.0f} s  {file}" for file, taken in outcome.seconds.most_common(SLOWEST)), sep="\n")
    print(f"{outcome.told} in {time.monotonic() - begin:.0f} s, {given.processes} processes")
    print(f"Tests marked {given.marker}: {'FAILED' if faults else 'all passed'}.", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
