"""`Table`: rows of a benchmark, printed and saved as JSON."""

import json
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def seconds(work: Callable[[], Any], repeats: int = 5, warm: int = 1) -> float:
    """Median time of `work` after `warm` warm-up runs."""
    for _ in range(warm):
        work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def in_turns(*works: Callable[[], Any], rounds: int = 5) -> list[float]:
    """Median time of each, measured in turns after one warm-up run, so that changes of the machine's load affect all alike."""
    times = [[seconds(work, repeats=1, warm=0) for work in works] for _ in range(rounds + 1)][1:]
    return [statistics.median(mine) for mine in zip(*times, strict=True)]


@dataclass
class Table:
    """Results of one benchmark. Numbers are ratios within one run, because absolute times mean little on shared machines."""

    name: str
    about: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    out: Path | None = None
    """a file to write after every line, so that a killed run leaves its measurements"""

    def add(self, what: str, *, ratio: float | None = None, aim: str = "", met: bool | None = None, **numbers: Any) -> None:
        """Mutates: add one line and print it."""
        self.rows.append({"what": what, "ratio": ratio, "aim": aim, "met": met, **numbers})
        print(_line(self.rows[-1]), flush=True)
        if self.out is not None:
            self.save()

    def show(self) -> None:
        """Print all lines."""
        print(self.about, *map(_line, self.rows), sep="\n", flush=True)

    def save(self, beside: bool = False) -> None:
        """Write `out`, or benchmarks/results/<name>.json. `beside`: keep lines of the file that this run did not measure."""
        RESULTS.mkdir(exist_ok=True)
        file, rows = self.out or RESULTS / f"{self.name}.json", {row["what"]: row for row in self.rows}
        if beside and file.exists():
            rows = {row["what"]: row for row in json.loads(file.read_text())["rows"]} | rows
        machine = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
        body = {"name": self.name, "about": self.about, "machine": machine, "rows": list(rows.values())}
        file.write_text(json.dumps(body, indent=1) + "\n")


def _line(row: dict[str, Any]) -> str:
    named = ("what", "ratio", "aim", "met")
    numbers = {key: value for key, value in row.items() if key not in named and not isinstance(value, list)}
    shown = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in numbers.items())
    verdict = "" if row["met"] is None else "met" if row["met"] else "MISSED"
    ratio = "" if row["ratio"] is None else f"{row['ratio']:6.2f}x"
    return f"{row['what']:58s} {ratio:>8s}  {row['aim']:10s} {verdict:6s}  {shown}"
