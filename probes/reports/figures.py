"""Figures of a report: heatmaps, curves and bars, with matplotlib and without a display."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from replaylens.engine.pictures.figure import DPI, picture, plain, short, wrapped
from replaylens.probes.errors import ProbeError

_CONTROLS = {"majority": "0.5", "bag_of_tokens": "tab:brown", "untrained": "tab:red", "shuffled": "tab:pink"}

_DOT: dict[str, Any] = {
    "marker": "o",
    "color": "white",
    "markeredgecolor": "black",
    "markeredgewidth": 0.6,
    "markersize": 4,
    "linestyle": "",
}
"""seen on every colour of the scale"""


def heatmap(table: pd.DataFrame, label: str | None = None, estimator: str | None = None) -> Figure:
    """Score by layer and position, one panel per site. A dot marks p_family <= 0.05, as the legend says."""
    part, label = _narrow(table, label, estimator)
    sites, positions = list(dict.fromkeys(part["site"])), list(dict.fromkeys(part["position"]))
    figure = picture(1.2 + 2.6 * len(sites), 1.4 + 0.45 * len(positions))
    axes = figure.subplots(1, len(sites), squeeze=False)[0]
    floor = float(part["majority"].min()) if "majority" in part and part["majority"].notna().any() else float(part["low"].min())
    for axis, site in zip(axes, sites, strict=True):
        own = part[part["site"] == site]
        layers = sorted({0 if pd.isna(layer) else int(layer) for layer in own["layer"]})
        grid = np.full((len(positions), len(layers)), np.nan)
        for line in own.itertuples():
            at = positions.index(line.position), layers.index(0 if pd.isna(line.layer) else int(line.layer))
            grid[at] = line.accuracy
            if line.p_family is not None and line.p_family <= 0.05:
                axis.plot(at[1], at[0], **_DOT)
        image = axis.imshow(grid, vmin=min(floor, 0.99), vmax=1.0, cmap="viridis", aspect="auto")
        axis.set(title=site, xlabel="layer", xticks=range(len(layers)), xticklabels=layers)
        axis.set(yticks=range(len(positions)), yticklabels=positions if axis is axes[0] else [])
    figure.colorbar(image, ax=list(axes), label=wrapped(part["metric"].iloc[0], figure.get_figheight() - 1))
    figure.suptitle(wrapped(plain(f"{label} ({part['estimator'].iloc[0]})"), figure.get_figwidth(), 12))
    dot = Line2D([], [], **_DOT, label="p ≤ 0.05 over the whole grid (p_family)")
    figure.legend(handles=[dot], loc="outside lower center", fontsize=7, facecolor="0.85")
    return figure


def curves(table: pd.DataFrame, label: str | None = None, estimator: str | None = None) -> Figure:
    """Score by layer with its interval, one panel per position, one line per site; controls are those of the first site."""
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
        first = here[here["site"] == here["site"].iloc[0]]
        for name, colour in _CONTROLS.items():
            if name in first and first[name].notna().all():
                axis.plot(first["layer"].fillna(0), first[name], "--", color=colour, linewidth=1, label=name.replace("_", " "))
        axis.set(title=position, xlabel="layer")
    axes[0].set_ylabel(part["metric"].iloc[0])
    figure.legend(*axes[-1].get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    figure.suptitle(wrapped(plain(f"{label} ({part['estimator'].iloc[0]})"), figure.get_figwidth(), 12))
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
    axis.set(
        yticks=range(len(table)), yticklabels=[plain(short(what, 60)) for what in table["what"]], title=title, xlabel="score"
    )
    axis.invert_yaxis()
    return figure


def save_all(kind: str, table: pd.DataFrame, folder: Path) -> list[Path]:
    """Save every figure of a report of this kind as PNG. The files contain no timestamps."""
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
    paths = []
    for name, figure in made.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=DPI, metadata={"Software": None})
    return paths


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
