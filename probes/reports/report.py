"""`Report`: scores with their controls, as a table, text, figures and JSON."""

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from replaylens.engine.request.values import output_path
from replaylens.probes.checks import make_folder
from replaylens.probes.data.rows import Cell, ProbeRows
from replaylens.probes.errors import BadProbeFile, ProbeError
from replaylens.probes.reports.summary import best_of, summarise
from replaylens.probes.scoring.statistics import Estimate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT, SCHEMA = "replaylens-report", 2
FILE, SUMMARY, TABLE = "report.json", "summary.txt", "table.csv"


@dataclass(frozen=True, eq=False)
class Report:
    """The lines of one table, with their source. Equal input gives equal bytes on disk."""

    kind: str
    """sweep, or the name of a branch question or causal test"""
    lines: list[dict[str, Any]]
    source: dict[str, Any]
    """task, knobs, digest and fingerprint of the rows"""
    settings: dict[str, Any]
    notes: list[str] = field(default_factory=list)
    """what was skipped, and why"""
    findings: list[str] = field(default_factory=list)
    """findings of a question or causal test, in words; those of a sweep are made from its lines"""

    @property
    def table(self) -> pd.DataFrame:
        """One line per cell, tidy."""
        return pd.DataFrame(self.lines)

    def text(self) -> str:
        """The findings, then the notes."""
        return "\n".join(self.summary())

    def summary(self) -> list[str]:
        shown = self.findings or summarise(self.table, self.settings)
        return [*shown, *self.notes]

    def __str__(self) -> str:
        return self.text()

    def best(self, label: str, **where: Any) -> dict[str, Any]:
        """The best line for a label, by `summary.best_of`: the highest score among lines that are shown, if any is.

        where  filters by other columns
        """
        wanted = {"label": label, **where}
        fitting = [line for line in self.lines if all(line.get(name) == value for name, value in wanted.items())]
        if not fitting:
            raise ProbeError(f"No line with {wanted}. Labels: {sorted({line.get('label', '') for line in self.lines})}.")
        if "p_family" not in fitting[0]:
            return max(fitting, key=lambda line: line["accuracy"])
        table = pd.DataFrame(fitting)
        return fitting[table.index.get_loc(best_of(table).name)]

    # ---- figures ------------------------------------------------------------------------------------------------

    def heatmap(self, label: str | None = None, *, estimator: str | None = None) -> "Figure":
        """Score by layer and position, one panel per site; see `figures.heatmap`."""
        from replaylens.probes.reports import figures

        return figures.heatmap(self.table, label, estimator)

    def curves(self, label: str | None = None, *, estimator: str | None = None) -> "Figure":
        """Score by layer with its interval and controls, one panel per position; see `figures.curves`."""
        from replaylens.probes.reports import figures

        return figures.curves(self.table, label, estimator)

    def complexity(self) -> "Figure":
        """Accuracy against complexity and C, of a `complexity_curve`; see `figures.complexity`."""
        from replaylens.probes.reports import figures

        return figures.complexity(self.table, self.settings["label"])

    # ---- on disk ------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain values; NaN becomes null. docs/probes.md describes the fields."""
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            "kind": self.kind,
            "source": self.source,
            "settings": self.settings,
            "summary": self.summary(),
            "notes": self.notes,
            "findings": self.findings,
            "rows": [{name: _plain(value) for name, value in line.items()} for line in self.lines],
        }

    def save(self, folder: str | Path, figures: bool = True) -> Path:
        """Write report.json, summary.txt, table.csv and PNG figures, over an older report. Returns the folder."""
        folder = report_folder(make_folder(folder))
        (folder / FILE).write_text(json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")
        (folder / SUMMARY).write_text(self.text() + "\n")
        self.table.to_csv(folder / TABLE, index=False)
        if figures:
            from replaylens.probes.reports import figures as drawing

            drawing.save_all(self.kind, self.table, folder)
        return folder

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Load a report from its folder or JSON file. Raises BadProbeFile, which says what is wrong."""
        path = Path(path)
        path = path / FILE if path.is_dir() else path
        try:
            raw = json.loads(path.read_text())
            if raw["format"] != FORMAT or raw["schema"] != SCHEMA:
                raise BadProbeFile(f"{path} has format {raw['format']} {raw['schema']} instead of {FORMAT} {SCHEMA}.")
            fields = {name: raw[name] for name in ("kind", "source", "settings", "notes", "findings")}
            return cls(lines=raw["rows"], **fields)
        except (OSError, KeyError, TypeError, json.JSONDecodeError) as error:
            raise BadProbeFile(f"{path} is not a report ({error}).") from error


def report_folder(given: str | Path) -> Path:
    """The folder for a report, which may hold an older one. Makes nothing. BadRequest if it cannot be written, ProbeError if
    it has files of a report's names and no report."""
    folder = output_path(given, folder=True)
    taken = [name for name in (FILE, SUMMARY, TABLE) if (folder / name).exists()]
    try:
        ours = not taken or json.loads((folder / FILE).read_bytes())["format"] == FORMAT
    except (OSError, ValueError, TypeError, KeyError):
        ours = False
    if not ours:
        raise ProbeError(f"{folder} has a {taken[0]} that is not of a report, and would be overwritten. Give another folder.")
    return folder


def about_rows(rows: ProbeRows) -> dict[str, Any]:
    """The source of rows, as a report cites it."""
    about = rows.about
    return {
        "task": about.task,
        "knobs": about.cited_knobs,
        "digest": about.digest,
        "fingerprint": about.fingerprint.digest if about.fingerprint else None,
        "rows": len(rows),
        "roots": int(rows.frame["root"].nunique()),
    }


def score_line(what: str, metric: str, score: Estimate, rows: int, cell: Cell | None = None, **more: Any) -> dict[str, Any]:
    """One line of a branch question or a causal test; docs/probes.md describes the fields."""
    place = {} if cell is None else {"site": cell.site, "layer": cell.layer}
    numbers = {"accuracy": score.value, "low": score.low, "high": score.high, "rows": rows}
    return {"what": what, **place, "metric": metric, **numbers, **more}


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value.item() if hasattr(value, "item") else value


def percent(value: float, low: float, high: float) -> str:
    """A score with its interval, as written in findings."""
    return f"{100 * value:.1f} % [{100 * low:.1f}, {100 * high:.1f}]"
