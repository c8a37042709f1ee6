"""What every study shares: its record, its figure, its intervals.

A study is a module of this folder, listed in `bench/studies/__main__.py`:

    PARTS = ("coin-plain", "smollm2")            # computed and recorded one by one

    def run(quick: bool, part: str, place: Place) -> dict:  # plain data; "inputs": name -> digest of what it is computed from
    def draw(parts: dict[str, dict]) -> Figure:  # of all recorded parts; the figure is made by `picture`

`python -m bench.studies NAME [PART ...]` computes the parts and writes `results/NAME.json` and `figures/NAME.svg`. Each part
keeps its own commit, date, machine and versions, so that parts can be computed at different times.
"""

import hashlib
import json
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import replaylens as rl
from bench.harness import provenance
from replaylens.engine.display import picture as _picture
from replaylens.views.html import PAGES, tag
from replaylens.views.sections import svg

HERE = Path(__file__).parent
PACKAGES = ("torch", "numpy", "scikit-learn", "scipy", "transformers")
COLOURS = ("#1b76c4", "#d9662b", "#3a9a5b", "#a8559c", "#8a7a2e", "#5b6b7a")
"""of lines and points: readable on white and on black"""
_INK, _PAGE, _QUIET = "#010203", "#fdfcfb", "#808182"
"""colours that a viewer's light or dark scheme replaces; `QUIET` is for baselines, grids and controls"""
QUIET = _QUIET
_SPACE, _TAG, _DIGITS = re.compile(r"\s+"), re.compile("<[^>]*>"), re.compile(r"([1-9]\d*\.\d)\d+")
_FAMILY = re.compile(r"font: ([\d.]+px) [^;\"]*;?")
"""what a figure's file says more briefly"""


# ---- models ----------------------------------------------------------------------------------------------------------

FOLDERS = {"smollm2": "smollm2-135m-instruct", "qwen": "qwen2.5-coder-1.5b"}
"""folders of models that have another name there"""


@dataclass(frozen=True)
class Place:
    """Where a study computes, and where the models are that are not embedded."""

    device: str = "cpu"
    """"cpu" (float32) or "cuda" (bfloat16)"""
    weights: Path = Path.home() / ".cache" / "replaylens"

    def load(self, model: str, **options: Any) -> rl.Engine:
        """A model by name: its folder, or the only .gguf file there; a path; or whatever `Engine.load` knows by that name."""
        folder = self.weights / FOLDERS.get(model, model)
        lone = list(folder.glob("*.gguf"))
        source = lone[0] if lone else folder if folder.exists() else model
        return rl.Engine.load(str(source), device=self.device, **options)


# ---- record ----------------------------------------------------------------------------------------------------------


def execute(
    name: str,
    parts: Sequence[str] = (),
    quick: bool = False,
    out: Path = HERE,
    place: Place = Place(),
) -> dict[str, Any]:
    """Compute parts of a study (default: all), and write its record and figure. Returns the record."""
    study = import_module(f"bench.studies.{name}")
    file = out / "results" / f"{name}.json"
    record: dict[str, Any] = {"study": name, "about": " ".join((study.__doc__ or "").split("\n\n")[0].split()), "parts": {}}
    for part in parts or study.PARTS:
        begun = time.process_time()
        origin = provenance(("bench/studies/results", "bench/studies/figures"), portable=place.device == "cpu")
        where = {**origin, "device": place.device, "quick": quick}
        where["versions"] = {"replaylens": rl.__version__, **{each: metadata.version(each) for each in PACKAGES}}
        found = study.run(quick, part, place)
        if file.exists():  # read late: another process may have written its own parts in the meantime
            record["parts"] = json.loads(file.read_text())["parts"]
        record["parts"][part] = {**where, "cpu_s": round(time.process_time() - begun, 1), **found}
        order = {each: number for number, each in enumerate(study.PARTS)}
        record["parts"] = dict(sorted(record["parts"].items(), key=lambda item: order.get(item[0], len(order))))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(_plain(record), indent=1) + "\n")  # after every part: a killed run keeps what it has
    save_figure(name, record["parts"], out)
    return record


def save_figure(name: str, parts: dict[str, Any], out: Path = HERE) -> Path:
    """Draw a study's recorded parts. The file follows the viewer's light or dark scheme, and says for readers who cannot see it
    what is asked and what its panels show."""
    study = import_module(f"bench.studies.{name}")
    made = study.draw(parts)
    for axis in made.axes:
        axis.title.set(color=_INK, fontsize=9)  # `set_title` takes matplotlib's own
    text = str(svg(made, letters="none")).replace("background:white", f"font-family:sans-serif;background:{_PAGE}")
    text = _TAG.sub(lambda tag: _FAMILY.sub(r"font-size:\1;", _DIGITS.sub(r"\1", tag[0])), _SPACE.sub(" ", text))
    roles = {"page": _PAGE, "text": _INK, "quiet": _QUIET}
    for role, colour in roles.items():
        text = text.replace(colour, f"var(--{role})")
    light, dark = ("".join(f"--{role}:{PAGES[theme][role]};" for role in roles) for theme in ("light", "dark"))
    style = f"<style>svg{{{light}}}@media (prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    panels = [" ".join(filter(None, (axis.get_title(), axis.get_xlabel(), axis.get_ylabel()))) for axis in made.axes]
    asked = " ".join((study.__doc__ or "").split("\n\n")[0].split())
    said = tag("title", asked) + tag("desc", "; ".join(" ".join(panel.split()) for panel in panels if panel))
    text = text.replace("<svg", '<svg role="img"', 1).replace(">", f">{said}{style}", 1)
    file = out / "figures" / f"{name}.svg"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text + "\n")
    return file


def inputs(engine: rl.Engine, **digests: str) -> dict[str, str]:
    """What a part was computed from: the model's weights and config, and digests of texts or dumps."""
    return {"weights": engine.fingerprint.weights, "config": engine.fingerprint.config, **digests}


def digest(texts: Iterable[str]) -> str:
    """Of prompts and stories."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


def _plain(value: Any) -> Any:
    """Numbers of numpy as Python's, five digits; NaN as None."""
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(each) for each in value]
    if isinstance(value, float | np.floating):
        return round(float(value), 5) if np.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


# ---- intervals and figures -------------------------------------------------------------------------------------------


def share(right: Sequence[float] | np.ndarray, groups: Sequence[Any] | np.ndarray) -> dict[str, Any]:
    """{value, low, high, n, groups}: a mean with its 95 % interval over groups, such as root prompts; one group has none."""
    from replaylens.probes.intervals import mean_over_groups

    values, names = np.asarray(right, dtype=float), np.asarray(groups)
    count = len(np.unique(names))
    if count < 2:
        mean = float(values.mean()) if len(values) else float("nan")
        return dict(value=mean, low=float("nan"), high=float("nan"), n=len(values), groups=count)
    found = mean_over_groups(values, names)
    return dict(value=found.value, low=found.low, high=found.high, n=len(values), groups=count)


def paired(
    ours: Sequence[float] | np.ndarray, theirs: Sequence[float] | np.ndarray, groups: Sequence[Any] | np.ndarray
) -> dict[str, Any]:
    """As `share`, of how much more the first outcome has than the second on the same cases, one by one."""
    from replaylens.probes.intervals import difference_over_groups

    gaps, names = np.asarray(ours, dtype=float) - np.asarray(theirs, dtype=float), np.asarray(groups)
    count = len(np.unique(names))
    if count < 2:
        return share(gaps, groups)
    shares = all(np.min(each) >= 0 and np.max(each) <= 1 for each in (ours, theirs))
    found = difference_over_groups(gaps, names, bounded=shares)
    low, high = (
        (max(found.low, -1.0), min(found.high, 1.0)) if shares else (found.low, found.high)
    )  # of few groups t reaches beyond
    return dict(value=found.value, low=low, high=high, n=len(gaps), groups=count)


def picture(columns: int, rows: int = 1, width: float = 4.2, height: float = 3.2) -> tuple[Figure, np.ndarray]:
    """A figure with its axes [rows, columns], in colours that follow the viewer's light or dark scheme."""
    made = _picture(width * columns, height * rows)
    made.set_facecolor(_PAGE)
    axes = made.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set_facecolor(_PAGE)
        axis.tick_params(colors=_INK, labelsize=8)
        axis.grid(color=_QUIET, linewidth=0.4, alpha=0.4)
        for text in (axis.xaxis.label, axis.yaxis.label):
            text.set(color=_INK, fontsize=9)
        for side, spine in axis.spines.items():
            spine.set(color=_QUIET, visible=side in ("left", "bottom"))
    return made, axes


def legend(axis: Any, **options: Any) -> None:
    """A legend in the figure's colours."""
    axis.legend(**{"fontsize": 7, "frameon": False, "labelcolor": _INK, **options})


def curve(
    axis: Any, x: Sequence[float], found: Sequence[dict[str, Any]], colour: str, label: str, dashed: bool = False
) -> None:
    """Values with their intervals as a band; a missing one (None) leaves a gap."""
    kept = [[np.nan if each[key] is None else each[key] for each in found] for key in ("value", "low", "high")]
    y, low, high = np.array(kept, dtype=float)
    axis.plot(x, y, color=colour, label=label, linewidth=1.5, marker="o", markersize=3, linestyle="--" if dashed else "-")
    axis.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
