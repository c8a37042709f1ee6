"""One way to measure: a `Case` declares what is compared, `run` times its arms in turns and writes one JSON file.

The set-up function of a case is a generator. It prepares one comparison, checks the results that are about to be timed, and
yields a `Line` with its arms; the harness times them in turns and sends the `Found` back, so that the function can note more
numbers and clean up before it goes on. A line without arms holds what the function has counted or measured itself.

    @case("norm", ours="ours", baseline="torch", needs="gpu", clock="device", unit="us")
    def norm(rows: tuple[int, ...] = (1, 64)) -> Lines:
        '''RMSNorm against torch.'''
        ...
        yield Line("norm rows 1", {"ours": ours, "torch": theirs})

Ratios are taken within one run, because absolute times mean little on shared machines. A case "FILE.PART" shares FILE.json with
the other parts; every part there has its own commit, date, machine and parameters.
"""

import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch

RESULTS = Path(__file__).parent / "results"
UNITS = {"us": 1e6, "ms": 1e3, "s": 1.0}
AIM = re.compile(r"(>=|<=|>|<) ([\d.]+)x?$")


@dataclass
class Line:
    """One comparison, or one measurement that is a number already."""

    what: str
    arms: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """timed in turns"""
    times: dict[str, list[float]] = field(default_factory=dict)
    """seconds that the case has measured itself, in turns, for instance in processes"""
    per: float | Mapping[str, float] = 1.0
    """what a time is divided by (steps, cells), for all arms or by arm"""
    ratio: float | None = None
    """of a line without times"""
    aim: str | None = None
    """None: the case's"""
    met: bool | None = None
    """None: follows from ratio and aim"""
    check: bool = True
    """what is timed gives the right result; False: it is not timed, and the run fails"""
    before: Callable[[str], None] | None = None
    """called with the arm's name before it is timed"""
    after: Callable[[str, Any], None] | None = None
    """called with the arm's name and result, to free what it left"""
    rounds: int | None = None
    """None: the case's"""
    numbers: dict[str, Any] = field(default_factory=dict)


@dataclass
class Found:
    """What was measured of a line."""

    row: dict[str, Any]
    values: dict[str, float] = field(default_factory=dict)
    """seconds by arm, divided by `Line.per`: the best round's, or the median"""
    results: dict[str, Any] = field(default_factory=dict)
    """what each arm returned last"""

    def note(self, **numbers: Any) -> None:
        """Mutates: more numbers of this line."""
        self.row.update(numbers)

    def judge(self, ratio: float) -> None:
        """Mutates: a ratio that is computed from the values in another way; it has no spread."""
        self.row = {key: value for key, value in self.row.items() if key not in ("lowest", "highest")}
        self.note(ratio=ratio, met=meets(ratio, self.row["aim"]))


Lines = Generator[Line, Found, None]
Clock = Literal["cpu", "wall", "device"]


@dataclass(frozen=True)
class Case:
    """A declared measurement; see the module's docstring. Its parameters are those of `set_up`."""

    name: str
    about: str
    set_up: Callable[..., Lines]
    ours: str = ""
    """the arm that is judged; empty: the case has no arms"""
    baseline: str = ""
    """the arm it is compared with"""
    others: tuple[str, ...] = ()
    aim: str = ""
    """of the ratio of every line that has no aim of its own"""
    needs: Literal["cpu", "gpu", "smollm2"] = "cpu"
    clock: Clock = "cpu"
    cost: bool = False
    """the ratio is the time of `ours` over the baseline's, not the reverse"""
    best: bool = False
    """the best round counts, not the median: on a shared machine the others measure its neighbours"""
    unit: str = "ms"
    rounds: int = 5
    warm: int = 1
    """rounds that do not count"""
    patience: float | None = None
    """seconds after which two rounds are enough"""
    threads: int | None = None
    portable: bool = False
    """on a GPU: computes in float32, that is in portable arithmetic; on a CPU every case does"""
    quick: dict[str, Any] = field(default_factory=dict)
    """parameters of `run --quick`; with `tiny`, a case that needs a GPU runs on a CPU"""

    def __post_init__(self) -> None:
        if bool(self.ours) != bool(self.baseline) or (self.ours and len(set(self.arms)) < len(self.arms)):
            raise ValueError(f"{self.name}: arms {self.arms} need a name each, one is ours and another the baseline")
        if unknown := set(self.quick) - set(self.parameters(False)):
            raise ValueError(f"{self.name}: no parameter {', '.join(sorted(unknown))}")

    @property
    def arms(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.ours, self.baseline, *self.others)))

    @property
    def file(self) -> str:
        """Stem of the result file."""
        return self.name.partition(".")[0]

    def parameters(self, quick: bool) -> dict[str, Any]:
        """The defaults, or those of a quick run."""
        given = {name: p.default for name, p in inspect.signature(self.set_up).parameters.items()}
        return {**given, **self.quick} if quick else given


CASES: dict[str, Case] = {}


def case(name: str, **declared: Any) -> Callable[[Callable[..., Lines]], Callable[..., Lines]]:
    """Declares the decorated generator as a case; its docstring says what is measured."""

    def declare(set_up: Callable[..., Lines]) -> Callable[..., Lines]:
        made = Case(name, " ".join((set_up.__doc__ or "").split()), set_up, **declared)
        known = CASES.setdefault(name, made)
        if (known.set_up.__module__, known.set_up.__qualname__) != (set_up.__module__, set_up.__qualname__):
            raise ValueError(f"two cases are called {name}")
        CASES[name] = made
        return set_up

    return declare


def chosen(names: Iterable[str]) -> list[Case]:
    """Cases by name or pattern (`kernels-*`), or all parts of a file. SystemExit lists the known names."""
    found = []
    for name in names:
        mine = [each for each in CASES.values() if name == each.file or fnmatchcase(each.name, name)]
        if not mine:
            raise SystemExit(f"no case {name!r}; the cases are {', '.join(CASES)}")
        found += mine
    return found


# Timing


def seconds(work: Callable[[], Any], clock: Clock) -> tuple[float, Any]:
    """(time of one call, what it returned). wall: what it started on the device is finished."""
    if clock == "cpu":
        begin = time.process_time()
        result = work()
        return time.process_time() - begin, result
    if clock == "device" and torch.cuda.is_available():
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        result = work()
        end.record()
        end.synchronize()
        return 1e-3 * start.elapsed_time(end), result
    finish()
    begin = time.perf_counter()
    result = work()
    finish()
    return time.perf_counter() - begin, result


def finish() -> None:
    """Waits for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def in_turns(made: Case, line: Line, rounds: int) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """(seconds of every counted round by arm, the last results). Each round begins with another arm: clocks and caches change
    for all alike."""
    names, results = list(line.arms), dict[str, Any]()
    times: dict[str, list[float]] = {name: [] for name in names}
    begin = time.perf_counter()
    for number in range(made.warm + rounds):
        late = made.patience is not None and time.perf_counter() - begin > made.patience
        if late and len(times[names[0]]) >= 2:
            break
        for place in range(len(names)):
            name = names[(number + place) % len(names)]
            if line.before:
                line.before(name)
            taken, results[name] = seconds(line.arms[name], made.clock)
            if line.after:
                line.after(name, results[name])
            if number >= made.warm:
                times[name].append(taken)
    return times, results


def in_process(work: Callable[..., Any], *given: Any, source: Path | str | None = None) -> Any:
    """What a module's function returns in a process of its own, on one thread; arguments and result go as JSON.

    source  another checkout of this repository, whose `src` takes the place of ours
    """
    here = RESULTS.parent.parent
    code = f"import json; from {work.__module__} import {work.__name__} as work; "
    code += f"print(json.dumps(work(*json.loads({json.dumps(given)!r}))))"
    found = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    paths = os.pathsep.join([f"{source or here}/src", str(here), *found])
    settings = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=settings, cwd=here, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        where = source or "this checkout"
        raise RuntimeError(f"{work.__name__} of {where} failed with status {done.returncode}; see its errors above")
    return json.loads(done.stdout.splitlines()[-1])


def random_tokens(count: int, length: int, vocab: int, seed: int = 0, first: int = 2) -> list[list[int]]:
    """`count` prompts of `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(first, vocab, (count, length), generator=generator).tolist()


def memory_mb(field: str) -> float:
    """A line of the kernel's account of this process (VmRSS, VmHWM). `getrusage` would start from the parent's memory."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024 / 1e6


def meets(ratio: float, aim: str) -> bool | None:
    """None: the aim is not a bound."""
    if not (match := AIM.match(aim)):
        return None
    bound = float(match[2])
    return {">=": ratio >= bound, "<=": ratio <= bound, ">": ratio > bound, "<": ratio < bound}[match[1]]


def measure(made: Case, line: Line, quick: bool = False) -> Found:
    """Time a line and compute its row. AssertionError if its arms are not those of the case."""
    timed = set(line.arms or line.times)
    assert timed <= set(made.arms), f"{made.name} declares no arms {timed - set(made.arms)}"
    row: dict[str, Any] = {"what": line.what, "case": made.name, "ratio": line.ratio}
    row["aim"] = line.aim if line.aim is not None else made.aim if timed else ""
    if not line.check:
        return Found(row | {"check": False, "met": False})
    times, results = line.times, dict[str, Any]()
    if line.arms:
        times, results = in_turns(made, line, 1 if quick else line.rounds or made.rounds)
    per = line.per if isinstance(line.per, Mapping) else dict.fromkeys(times, line.per)
    times = {arm: [each / per[arm] for each in own] for arm, own in times.items()}
    values = {arm: (min if made.best else statistics.median)(own) for arm, own in times.items()}
    if made.ours in values and made.baseline in values and line.ratio is None:
        top, bottom = (made.ours, made.baseline) if made.cost else (made.baseline, made.ours)
        each = [a / b for a, b in zip(times[top], times[bottom], strict=False)]
        row |= {"ratio": values[top] / values[bottom], "lowest": min(each), "highest": max(each)}
    row["met"] = line.met if line.met is not None or row["ratio"] is None else meets(row["ratio"], row["aim"])
    row |= {f"{slug(arm)}_{made.unit}": UNITS[made.unit] * value for arm, value in values.items()} | line.numbers
    if times:
        row["times_s"] = times
    return Found(row, values, results)


def slug(arm: str) -> str:
    return re.sub(r"\W+", "_", arm.lower()).strip("_")


# Results


COMMIT = "REPLAYLENS_COMMIT"
"""environment variable: the commit of a tree that was copied, with a history that is missing or lags behind"""


def provenance(written: Sequence[str] = (), portable: bool = False) -> dict[str, Any]:
    """Commit, date, machine and arithmetic of a run, with a digest of that arithmetic.

    written   folders, from the repository's root, that the run itself writes to: their changes do not count
    portable  on a GPU: the run computes in float32
    """

    return {
        "commit": commit(written),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine(portable),
        "digest": arithmetic_digest(portable),
    }


def commit(written: Sequence[str] = ()) -> str:
    """The commit of this tree; written: as of `provenance`."""

    def git(*words: str) -> str:
        if shutil.which("git") is None:
            return ""
        return subprocess.run(["git", *words], cwd=RESULTS, capture_output=True, text=True).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ":/", *(f":(top,exclude){each}" for each in written))
    return os.environ.get(COMMIT) or git("rev-parse", "HEAD") + ("+changes" if changed else "") or "unknown"


@cache
def arithmetic_digest(portable: bool = False) -> str:
    """SHA-256 of tokens, KV and captured rows of a fixed request, in the arithmetic of a run. Portable arithmetic has the same
    one on every machine, so that a result file shows whether it was measured in today's."""
    from replaylens.engine.engine import Engine

    cuda = torch.cuda.is_available()
    dtype = torch.bfloat16 if cuda and not portable else torch.float32
    engine = Engine.load("coin-plain", device="cuda" if cuda else "cpu", dtype=dtype)
    branch = engine.prompt("A coin's state is heads. Alice flips. What's the state? A:", sites="STC").generate(
        4, drafter="lens"
    )
    rows = [branch.activations[site] for letter in "STC" for site in engine.sites.letter(letter)]
    parts = [torch.tensor(branch.tokens), branch.kv(), *rows]
    return hashlib.sha256(b"".join(part.cpu().contiguous().view(torch.uint8).numpy().tobytes() for part in parts)).hexdigest()


def machine(portable: bool = False) -> dict[str, Any]:
    from replaylens.engine.proof import fingerprint

    info = Path("/proc/cpuinfo")
    models = re.findall(r"^model name\s*: (.*)", info.read_text(), re.MULTILINE) if info.exists() else []
    versions = {name: metadata.version(name) for name in ("torch", "triton", "transformers") if find_spec(name)}
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    cpu = models[0] if models else platform.processor() or platform.machine()
    canonical = fingerprint.PORTABLE if gpu is None or portable else fingerprint.of_tensor_cores()
    found = {"cpu": cpu, "architecture": platform.machine(), "cores": os.cpu_count(), "gpu": gpu}
    return {**found, "threads": torch.get_num_threads(), "canonical_version": canonical, **versions}


class Report:
    """The rows of a result file. Written after every row, so that a killed run leaves its measurements."""

    def __init__(self, file: Path | None) -> None:
        """Keeps what the file has of other cases. None: rows are only printed."""
        self.file = file
        self.body: dict[str, Any] = {"name": file.stem if file else "", "about": "", "cases": {}, "rows": []}
        if file is not None and file.exists():
            self.body |= json.loads(file.read_text())

    def begin(self, made: Case, parameters: dict[str, Any]) -> None:
        """Mutates: forgets earlier rows of this case, which rows without a case are if it has the file's name."""
        self.body["rows"] = [row for row in self.body["rows"] if row.get("case", self.body["name"]) != made.name]
        self.body["about"] = self.body["about"] or made.about
        self.body["cases"][made.name] = {"about": made.about, **provenance(portable=made.portable), "parameters": parameters}

    def add(self, row: dict[str, Any]) -> None:
        """Mutates: one more row, in place of one of its case with the same words."""
        same = lambda other: (other.get("case", row["case"]), other["what"]) == (row["case"], row["what"])  # noqa: E731
        self.body["rows"] = [other for other in self.body["rows"] if not same(other)] + [row]
        print(shown(row), flush=True)
        if self.file is not None:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            self.file.write_text(json.dumps(self.body, indent=1, default=str) + "\n")


def shown(row: dict[str, Any]) -> str:
    """A row as one line of text."""
    named = ("what", "case", "ratio", "aim", "met", "lowest", "highest", "check")
    numbers = {k: v for k, v in row.items() if k not in named and isinstance(v, int | float | str | bool)}
    told = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in numbers.items())
    verdict = "CHECK FAILED" if not row.get("check", True) else {None: "", True: "met", False: "MISSED"}[row["met"]]
    ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
    spread = f"[{row['lowest']:.2f}, {row['highest']:.2f}]" if "lowest" in row else ""
    return f"{row['what']:58s} {ratio:>8s} {spread:14s} {row['aim']:10s} {verdict:6s}  {told}"


def run(made: Case, quick: bool = False, out: Path | None = None, given: Mapping[str, Any] | None = None) -> bool:
    """Measure a case. Returns whether it ran to its end with all checks passed; a failure is printed, not raised."""
    parameters = {**made.parameters(quick), **(given or {})}
    if unknown := set(given or {}) - set(known := made.parameters(quick)):
        raise SystemExit(f"{made.name} has no parameter {', '.join(sorted(unknown))}; it has {', '.join(known)}")
    refuse_missing(made, parameters)
    if made.threads is not None:
        torch.set_num_threads(made.threads)
    report = Report(out or (None if quick else RESULTS / f"{made.file}.json"))  # small sizes are no result
    report.begin(made, parameters)
    print(f"\n{made.name}: {made.about}", flush=True)
    lines, found, good = made.set_up(**parameters), None, True
    try:
        line = next(lines)
        while True:
            try:
                found = measure(made, line, quick)
            except Exception as error:
                line = lines.throw(error)  # the case cleans up; it may also go on with another line
                continue
            good &= found.row.get("check", True)
            line = lines.send(found)  # it may note more numbers of this line first
            report.add(found.row)
    except StopIteration:
        if found is not None:
            report.add(found.row)
    except Exception:
        print(f"{made.name} FAILED\n{traceback.format_exc()}", flush=True)
        return False
    return good


def refuse_missing(made: Case, parameters: Mapping[str, Any]) -> None:
    """SystemExit if this machine lacks what the case needs."""
    if made.needs == "gpu" and not torch.cuda.is_available() and not parameters.get("tiny"):
        quick = ", or with --quick, which has a tiny model on the CPU" if made.quick.get("tiny") else ""
        raise SystemExit(f"{made.name}: no CUDA device found. Run it on a machine with a GPU{quick}.")
    if made.needs == "smollm2":
        from replaylens.weights import hub

        if not hub.is_fetched():
            raise SystemExit(f"{made.name}: SmolLM2-135M is not here. Run `replaylens fetch smollm2` first.")
