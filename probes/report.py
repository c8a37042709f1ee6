"""`Report`: scores with their controls, as a table, text, figures and JSON."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from replaylens import boundary
from replaylens.engine.display import DPI, is_stamped, picture, plain, short, shows, stamp_of, wrapped
from replaylens.engine.errors import BadFile, BadRequest, Unsealed
from replaylens.engine.files import require_own, write_together
from replaylens.engine.records import Citation, Identifier, digest_of
from replaylens.engine.request.values import output_path, short_repr
from replaylens.probes.checks import make_folder
from replaylens.probes.errors import ProbeError
from replaylens.probes.intervals import Estimate
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.verdicts import BELOW, ERROR, LOOKS, SHOWN, best_of, of_line, verdict_of, verdicts

# ---- summary ---------------------------------------------------------------------------------------------------------
# A sweep's table in words: what is shown, what is not, and known zeros.

CONTROLS = ("majority", "token_identity", "position_only", "bag_of_tokens", "shuffled", "control_task", "untrained")
OF_TEXT = ("token_identity", "bag_of_tokens", "control_task")
"""controls that need the tokens of the paths; where they are missing, a verdict says so"""


def summarise(
    table: pd.DataFrame, settings: Mapping[str, Any] | None = None, grouping: Mapping[str, str] | None = None
) -> list[str]:
    """Lines of text for a sweep's table.

    grouping  which rows are one group, for each position
    """
    if table.empty or "p_family" not in table:
        return ["No lines."]
    main, zeros = table[~table["known_zero"].astype(bool)], table[table["known_zero"].astype(bool)]
    lines = list(_labels(main, (settings or {}).get("groups") is not None))
    lines += list(_zeros(zeros))
    missing = [name for name in CONTROLS if name not in main or main[name].isna().all()]
    if missing:
        lines.append(f"Controls not run: {', '.join(missing)}.")
    lines.append(_method(main, settings or {}))
    rules: dict[str, list[str]] = {}
    for position, rule in (grouping or {}).items():
        rules.setdefault(rule, []).append(position)
    lines += [f"Groups{f' at {chr(44).join(at)}' if len(rules) > 1 else ''}: {rule}." for rule, at in rules.items()]
    lines.append("A probe shows that a label can be read off, not that the model uses it. Test the direction causally.")
    return lines


def _labels(main: pd.DataFrame, held_out: bool) -> Iterator[str]:
    """Per label, estimator and position: the best cell, how many cells are shown, and what decided.

    held_out  whether groups were given, so that nobody needs the hint
    """
    for (label, estimator, position), part in main.groupby(["label", "estimator", "position"], sort=False):
        best, every = best_of(part), verdicts(part)
        verdict = verdict_of(best)
        if verdict is None:
            continue
        decided = str(verdict.decided_by)
        where = f"{best['site']}{'' if pd.isna(best['layer']) else int(best['layer'])}"
        controls = [(float(best[name]), name.replace("_", " ")) for name in CONTROLS if pd.notna(best.get(name))]
        against = "best control {:.3f} ({})".format(*max(controls)) if controls else "no controls"
        without = [name.replace("_", " ") for name in OF_TEXT if pd.isna(best.get(name))]
        if without and pd.notna(best.get("majority")):
            against += f", without {' and '.join(without)}"
        score = f"{best['metric'].replace('auroc', 'AUROC').replace('_', ' ')} {best['accuracy']:.3f}"
        ends = ("low", "high") if pd.isna(best.get("low_family")) else ("low_family", "high_family")
        chosen = "" if ends[0] == "low" or not best.get("cells", 1) > 1 else f" for the best of {best['cells']:g} cells"
        score += f" [{best[ends[0]]:.3f}, {best[ends[1]]:.3f}]{chosen} at {where}, {against}"
        count = ", ".join(f"{number} of {len(part)} {kind}" for kind in LOOKS if (number := int((every == kind).sum())))
        than = " above what decides" if verdict.outcome == BELOW else " groups" if verdict.needed is not None else ""
        yield f"{verdict.head}{than}: {label} at {position} ({estimator}): cells {count}; best {score}, {_p(best)}."
        yield f"  decided by {_decision(best, decided)}."
        if pd.notna(best.get("selectivity")):
            interval = f"[{best['selectivity_low']:.3f}, {best['selectivity_high']:.3f}]"
            yield f"  selectivity there {best['selectivity']:.3f} {interval} (control task {best['control_task']:.3f})."
        if best["metric"] == "accuracy" and pd.notna(best.get("auroc_low")):
            yield f"  AUROC there {best['auroc']:.3f} [{best['auroc_low']:.3f}, {best['auroc_high']:.3f}]."
        if decided == "control_task" and verdict.outcome != SHOWN and not held_out:
            yield "  Readable, but the probe learns a random class per context as well."
            yield "  Hold out contexts to tell them apart: sweep(groups=)."
        if verdict.outcome != SHOWN and not held_out and decided in ("bag_of_tokens", "token_identity"):
            yield "  The words alone tell the label in these texts. Test on words that were held out: sweep(groups=)."


def _decision(line: pd.Series, decided: str) -> str:
    if decided == "no test":
        return "nothing: there is no p without a new fit for each permutation (give permutations=, or another estimator)"
    if decided == "p_family":
        side = ">" if float(line["p_family"]) > ERROR else "<="
        return f"p over the grid {side} {ERROR}"
    if decided == "majority":
        return "the majority, which scores as well"
    side = "above" if float(line["margin"]) > 0 else "not above"
    return f"the margin over {decided.replace('_', ' ')}: lower bound {float(line['margin']):+.3f}, {side} 0"


def _method(main: pd.DataFrame, settings: Mapping[str, Any]) -> str:
    """The grid, the tests and their correction, and the smallest p that they can give."""
    axes = (("site", "sites"), ("layer", "layers"), ("position", "positions"), ("label", "labels"), ("estimator", "estimators"))
    sizes = ", ".join(f"{count} {names if count > 1 else name}" for name, names in axes if (count := main[name].nunique()))
    tests = list(dict.fromkeys(main["test"].dropna()))
    count = settings.get("permutations")
    said = []
    if any("permutation" in test for test in tests):
        floor = f" ({count} permutations: no p is below {1 / (count + 1):.3f})" if count else ""
        said.append(f"permutation{floor}, corrected by the maximum statistic over the grid")
    if "corrected t" in tests:
        said.append("corrected t, with Bonferroni's correction over the grid")
    margin = "; margins over controls: one-sided, 5 % over the grid" if main.get("margin", pd.Series()).notna().any() else ""
    return f"Grid of {len(main)} cells ({sizes}). Tests: {'; '.join(said) or 'none'}{margin}."


def _p(line: pd.Series) -> str:
    if pd.isna(line["p_family"]):
        return f"no p ({_sizes(line)})"
    p = float(line["p_family"])
    return f"p {'< 0.001' if p < 0.001 else f'= {p:.3f}'} over the grid ({line['test']}; {_sizes(line)})"


def _sizes(line: pd.Series) -> str:
    """How many rows, different ones, and independent groups a line rests on."""
    same = "" if line["rows"] == line["distinct"] else f", {line['distinct']} distinct"
    return f"{line['rows']} rows{same} of {line['groups']} groups"


def _zeros(zeros: pd.DataFrame) -> Iterator[str]:
    """Known zeros: how many intervals contain the exact chance."""
    for (label, position), part in zeros.groupby(["label", "position"], sort=False):
        inside = ((part["low"] <= part["chance"]) & (part["chance"] <= part["high"])).sum()
        worst = part.loc[(part["accuracy"] - part["chance"]).abs().fillna(-np.inf).idxmax()]
        yield (
            f"Known zero {label} at {position}: chance {worst['chance']:.3f} inside {inside} of {len(part)} intervals "
            f"(at 95 %, about one in twenty falls outside); farthest {worst['accuracy']:.3f}."
        )


# ---- report ----------------------------------------------------------------------------------------------------------

FORMAT, SCHEMA = "replaylens-report", 2
FILE, SUMMARY, TABLE = "report.json", "summary.txt", "table.csv"
_KINDS = {"kind": str, "source": dict, "settings": dict, "notes": list, "findings": list, "rows": list}
"""fields of a report's file"""


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
        said = self.findings or summarise(self.table, self.settings, self.source.get("grouping"))
        return [*said, *self.notes]

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

    @property
    def digest(self) -> str:
        """SHA-256 of kind, source, settings, notes, findings and lines. The order of their keys does not count, nor does the
        version that computed the rows."""
        raw = self._plain()
        source = {name: value for name, value in self.source.items() if name != "replaylens"}
        return digest_of({**raw, "source": source})

    def cite(self) -> Citation:
        """How to cite the report, a verdict with its controls: text and BibTeX with an identifier that holds on every
        machine."""
        found, source = Identifier(self.digest), self.source
        rows = f" {Identifier(source['digest'])}" if len(source.get("digest") or "") == 64 else ""
        task = source.get("task") or "arrays"
        what = f"{self.kind} report, {len(self.lines)} lines, on {source.get('rows')} rows of {task}{rows}"
        made = {name: source.get(name) for name in ("model", "arithmetic", "replaylens", "fingerprint")}
        return Citation(str(found), what, f"replaylens verify {found} --in FOLDER", **made)

    # ---- figures ------------------------------------------------------------------------------------------------

    def heatmap(self, label: str | None = None, *, estimator: str | None = None) -> "Figure":
        """Score by layer and position, one panel per site; see `figures.heatmap`."""

        return self._figure(heatmap(self.table, label, estimator))

    def curves(self, label: str | None = None, *, estimator: str | None = None) -> "Figure":
        """Score by layer with its interval and controls, one panel per position; see `figures.curves`."""

        return self._figure(curves(self.table, label, estimator))

    def complexity(self) -> "Figure":
        """Accuracy against complexity and C, of a `complexity_curve`; see `figures.complexity`."""

        return self._figure(complexity(self.table, self.settings["label"]))

    def _figure(self, made: "Figure") -> "Figure":
        return shows(made, lambda: str(Identifier(self.digest)))

    # ---- on disk ------------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """Plain values; NaN becomes null. docs/probes.md describes the fields."""
        return {"summary": self.summary(), "digest": self.digest, **self._plain()}

    def _plain(self) -> dict[str, Any]:
        """What the report consists of; its summary is made from it."""
        return {
            "format": FORMAT,
            "schema": SCHEMA,
            "kind": self.kind,
            "source": self.source,
            "settings": self.settings,
            "notes": self.notes,
            "findings": self.findings,
            "rows": [{name: _plain(value) for name, value in line.items()} for line in self.lines],
        }

    def save(self, folder: str | Path, figures: bool = True) -> Path:
        """Write report.json, summary.txt, table.csv and PNG figures, over an older report. Returns the folder.

        None of the older files is replaced before all new ones are on the disk. BadRequest or ProbeError, and nothing is
        written, if one of them is not ours.
        """
        folder = report_folder(make_folder(folder))
        drawn = draw_all(self.kind, self.table, self._figure) if figures else {}
        for name in drawn:
            require_own(folder / name, is_stamped)
        contents: dict[str, bytes | str] = {**drawn, **self._files()}
        write_together({folder / name: content for name, content in contents.items()})
        return folder

    def _files(self) -> dict[str, str]:
        """The files without figures. The one that is read comes last."""
        text = json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n"
        return {SUMMARY: self.text() + "\n", TABLE: self.table.to_csv(index=False), FILE: text}

    def strays(self, folder: str | Path) -> tuple[list[str], list[str]]:
        """(files of the report's folder that are its own, files there that are not): summary and table as this version writes
        them, and intact figures that name the report. Others are left out."""
        own, other, files = list[str](), list[str](), self._files()
        for path in sorted(Path(folder).iterdir()) if Path(folder).is_dir() else ():
            if path.name in (SUMMARY, TABLE):
                (own if path.read_bytes() == files[path.name].encode() else other).append(path.name)
            elif _FIGURE.fullmatch(path.name) or path.name == f"{self.kind}.png":
                (own if _shows(path.read_bytes(), str(Identifier(self.digest))) else other).append(path.name)
        return own, other

    @classmethod
    def load(cls, path: str | Path) -> "Report":
        """Load a report from its folder or JSON file. Raises BadFile, which says what is wrong. Warns (Unsealed) of one
        without a digest."""
        path = Path(path)
        try:
            path = path / FILE if path.is_dir() else path
            raw = json.loads(path.read_text(encoding="utf-8"))
            if raw["format"] != FORMAT or raw["schema"] != SCHEMA:
                raise BadFile(f"{path} has format {raw['format']} {raw['schema']} instead of {FORMAT} {SCHEMA}.")
            if wrong := [name for name, kind in _KINDS.items() if not isinstance(raw[name], kind)]:
                raise BadFile(f"{path} is not a report: {wrong[0]} is {short_repr(raw[wrong[0]])}.")
            found = cls(lines=raw["rows"], **{name: raw[name] for name in _KINDS if name != "rows"})
            if unknown := sorted(raw.keys() - {*_KINDS, "format", "schema", "summary", "digest"}):
                raise BadFile(f"{path} was changed: it has an unknown field {short_repr(unknown[0])}. Copy it again.")
            if "digest" not in raw:
                boundary.warn(
                    f"{path} has no digest: an older version wrote it, and a change of it would not be noticed. Save it again.",
                    Unsealed,
                )
            elif raw["digest"] != found.digest:
                raise BadFile(f"{path} was changed: it does not have its digest. Copy it again, or run the probe again.")
        except BadFile:
            raise
        except (OSError, KeyError, TypeError, ValueError, RecursionError) as error:  # also text that is no UTF-8, and NaN
            raise BadFile(f"{path} is not a report ({str(error)[:200]}).") from error
        return found


def report_folder(given: str | Path) -> Path:
    """The folder for a report, which may hold an older one. Makes nothing. BadRequest if it cannot be written, ProbeError if
    it has files of a report's names and no report."""
    folder = output_path(given, folder=True)
    for path in sorted(folder.glob("*.png")):
        if _FIGURE.fullmatch(path.name):
            require_own(path, is_stamped)
    taken = [name for name in (FILE, SUMMARY, TABLE) if (folder / name).exists()]
    if taken and not ((folder / FILE).is_file() and is_report((folder / FILE).read_bytes())):
        raise ProbeError(f"{folder} has a {taken[0]} that is not of a report, and would be overwritten. Give another folder.")
    return folder


def is_report(content: bytes) -> bool:
    """Whether a JSON file is one that `Report.save` wrote."""
    try:
        return bool(json.loads(content)["format"] == FORMAT)
    except (ValueError, TypeError, KeyError, RecursionError):
        return False


def about_rows(rows: ProbeRows) -> dict[str, Any]:
    """The source of rows, as a report cites it."""
    about = rows.about
    return {
        "task": about.task,
        "knobs": about.cited_knobs,
        "digest": about.digest,
        "fingerprint": about.fingerprint.digest if about.fingerprint else None,
        **({} if about.fingerprint is None else about.fingerprint.cited),
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


# ---- figures ---------------------------------------------------------------------------------------------------------
# Figures of a report: heatmaps, curves and bars, with matplotlib and without a display.

_COLOURS = dict(zip(CONTROLS, ("0.5", "tab:olive", "tab:cyan", "tab:brown", "tab:pink", "tab:purple", "tab:red"), strict=True))
"""of every control: whichever decides is drawn"""

_NAMED = {"shuffled": "labels exchanged"}
"""controls in legends, where their column has another name: tasks have a label `shuffled`, a known zero"""


def _mark(outcome: str) -> dict[str, Any]:
    """How an outcome is drawn, seen on every colour of the scale."""
    marker, colour = LOOKS[outcome]
    return {
        "marker": marker,
        "color": colour,
        "markeredgecolor": "black",
        "markeredgewidth": 0.6,
        "markersize": 5,
        "linestyle": "",
    }


def _marks(outcomes: Iterable[str]) -> list[Line2D]:
    """The legend of those outcomes that occur."""
    found = set(outcomes)
    return [Line2D([], [], **_mark(each), label=each) for each in LOOKS if each in found]


def heatmap(table: pd.DataFrame, label: str | None = None, estimator: str | None = None) -> Figure:
    """Score by layer and position, one panel per site. Marks are the verdicts, as the legend says; known zeros have none."""
    part, label = _narrow(table, label, estimator)
    sites, positions = list(dict.fromkeys(part["site"])), list(dict.fromkeys(part["position"]))
    figure = picture(1.2 + 2.6 * len(sites), 1.4 + 0.45 * len(positions))
    axes = figure.subplots(1, len(sites), squeeze=False)[0]
    outcomes = verdicts(part)
    floor = float(part["majority"].min()) if "majority" in part and part["majority"].notna().any() else float(part["low"].min())
    for axis, site in zip(axes, sites, strict=True):
        own = part[part["site"] == site]
        layers = sorted({0 if pd.isna(layer) else int(layer) for layer in own["layer"]})
        grid = np.full((len(positions), len(layers)), np.nan)
        for line, outcome in zip(own.itertuples(), outcomes[own.index], strict=True):
            at = positions.index(line.position), layers.index(0 if pd.isna(line.layer) else int(line.layer))
            grid[at] = line.accuracy
            if outcome is not None:
                axis.plot(at[1], at[0], **_mark(outcome))
        image = axis.imshow(grid, vmin=min(floor, 0.99), vmax=1.0, cmap="viridis", aspect="auto")
        axis.set(title=site, xlabel="layer", xticks=range(len(layers)), xticklabels=layers)
        axis.set(yticks=range(len(positions)), yticklabels=positions if axis is axes[0] else [])
    figure.colorbar(image, ax=list(axes), label=wrapped(part["metric"].iloc[0], figure.get_figheight() - 1))
    figure.suptitle(wrapped(plain(_title(part, label)), figure.get_figwidth(), 12))
    if handles := _marks(outcomes.dropna()):
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, facecolor="0.85")
    return figure


def _title(part: pd.DataFrame, label: str) -> str:
    zero = "known zero, " if "known_zero" in part and part["known_zero"].astype(bool).any() else ""
    return f"{label} ({zero}{part['estimator'].iloc[0]})"


def curves(table: pd.DataFrame, label: str | None = None, estimator: str | None = None) -> Figure:
    """Score by layer with its interval and the mark of its verdict, one panel per position, one line per site; every control
    that was run, of the first site."""
    part, label = _narrow(table, label, estimator)
    positions = list(dict.fromkeys(part["position"]))
    figure = picture(1.0 + 3.2 * len(positions), 3.2)
    axes = figure.subplots(1, len(positions), squeeze=False, sharey=True)[0]
    for axis, position in zip(axes, positions, strict=True):
        here = part[part["position"] == position]
        for site, own in here.groupby("site", sort=False):
            layer = own["layer"].fillna(0)
            axis.errorbar(
                layer,
                own["accuracy"],
                yerr=[own["accuracy"] - own["low"], own["high"] - own["accuracy"]],
                marker="o",
                markersize=3,
                capsize=2,
                label=str(site),
            )
            for line, outcome in zip(own.itertuples(), verdicts(own), strict=True):
                if outcome is not None:
                    axis.plot(0 if pd.isna(line.layer) else line.layer, line.accuracy, **_mark(outcome), zorder=3)
        first = here[here["site"] == here["site"].iloc[0]]
        for name, colour in _COLOURS.items():
            if name in first and first[name].notna().any():
                axis.plot(
                    first["layer"].fillna(0),
                    first[name],
                    "--",
                    color=colour,
                    linewidth=1,
                    label=_NAMED.get(name, name).replace("_", " "),
                )
        axis.set(title=position, xlabel="layer")
    axes[0].set_ylabel(part["metric"].iloc[0])
    handles, labels = axes[-1].get_legend_handles_labels()
    marks = _marks(verdicts(part).dropna())
    figure.legend(
        [*handles, *marks], [*labels, *(str(each.get_label()) for each in marks)], loc="outside right upper", fontsize=7
    )
    figure.suptitle(wrapped(plain(_title(part, label)), figure.get_figwidth(), 12))
    return figure


def complexity(table: pd.DataFrame, title: str) -> Figure:
    """A complexity curve: accuracy against the share of exchanged labels that the probe fits, and both against C."""
    figure = picture(7.4, 3.2)
    left, right = figure.subplots(1, 2, sharey=True)
    error = [(table["accuracy"] - table["low"]).clip(lower=0), (table["high"] - table["accuracy"]).clip(lower=0)]
    left.errorbar(table["complexity"], table["accuracy"], yerr=error, marker="o", markersize=3, capsize=2, linewidth=0.5)
    front = table[table["pareto"].astype(bool)].sort_values("complexity")
    left.step(front["complexity"], front["accuracy"], where="post", color="tab:red", linewidth=1, label="Pareto front")
    right.errorbar(table["C"], table["accuracy"], yerr=error, marker="o", markersize=3, capsize=2, label="held out")
    right.plot(table["C"], table["train"], "--", color="tab:brown", linewidth=1, label="training rows")
    right.plot(table["C"], table["complexity"], "--", color="tab:pink", linewidth=1, label="exchanged labels, training rows")
    for axis in (left, right):
        axis.axhline(float(table["majority"].iloc[0]), color="0.5", linestyle=":", linewidth=1, label="majority")
        axis.legend(fontsize=7)
    left.set(xlabel="complexity", ylabel="accuracy")
    right.set(xlabel="C", xscale="log")
    figure.suptitle(title)
    return figure


def bars(table: pd.DataFrame, title: str) -> Figure:
    """A branch question's lines: one bar with its interval per line, named by its column `what`."""
    figure = picture(6.4, 1.0 + 0.3 * len(table))
    axis = figure.subplots()
    value = table["accuracy"].astype(float)
    error = [(value - table["low"].astype(float)).clip(lower=0), (table["high"].astype(float) - value).clip(lower=0)]
    axis.barh(range(len(table)), value, xerr=error, color="tab:blue", alpha=0.7, capsize=2)
    told = [of_line(line).outcome if isinstance(line.get("verdict"), str) else None for line in table.to_dict("records")]
    for place, outcome in enumerate(told):
        if outcome is not None:
            axis.plot(value.iloc[place], place, **_mark(outcome))
    if handles := _marks(each for each in told if each is not None):
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), fontsize=7, facecolor="0.85")
    axis.set(
        yticks=range(len(table)), yticklabels=[plain(short(what, 60)) for what in table["what"]], title=title, xlabel="score"
    )
    axis.invert_yaxis()
    return figure


_FIGURE = re.compile(r"(heatmap|curves)-.*\.png|(complexity_curve|steer|ablate|interchange)\.png", re.DOTALL)
"""the names of figures that commands write"""


def _shows(content: bytes, source: str) -> bool:
    """Whether a file is an intact figure of a result."""
    try:
        stamp = stamp_of(content)
    except BadRequest:
        return False
    return stamp is not None and stamp.intact and source in stamp.sources


def draw_all(kind: str, table: pd.DataFrame, named: Callable[[Figure], Figure]) -> dict[str, bytes]:
    """Every figure of a report of this kind as PNG, by the name of its file. The files contain no timestamps."""
    made = {}
    if kind == "sweep":
        main = table[~table["known_zero"].astype(bool)]
        for (label, estimator), _ in main.groupby(["label", "estimator"], sort=False):
            made[f"heatmap-{label}-{estimator}"] = heatmap(table, label, estimator)
            made[f"curves-{label}-{estimator}"] = curves(table, label, estimator)
    elif kind == "complexity_curve":
        made[kind] = complexity(table, kind)
    elif "what" in table and table["accuracy"].notna().any():
        made[kind] = bars(table[table["accuracy"].notna()].head(40), kind)
    drawn = {}
    for name, figure in made.items():
        named(figure).savefig(content := BytesIO(), dpi=DPI)
        drawn[f"{name}.png"] = content.getvalue()
    return drawn


def _narrow(table: pd.DataFrame, label: str | None, estimator: str | None) -> tuple[pd.DataFrame, str]:
    """The lines of one label and one estimator."""
    if "p_family" not in table:
        raise ProbeError("Only sweeps have layers and positions to draw. Give the report of a sweep.")
    label = label or str(table["label"].iloc[0])
    estimator = estimator or str(table["estimator"].iloc[0])
    part = table[(table["label"] == label) & (table["estimator"] == estimator)]
    if part.empty:
        raise ProbeError(f"No lines for label {label!r} with {estimator}. Labels: {', '.join(sorted(set(table['label'])))}.")
    return part, label
