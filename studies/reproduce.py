"""Twelve published figures on small weights at hand, one public call each: what was published, what came out, hit or miss.

Every figure is computed by `replaylens reproduce NAME`, whose criteria were fixed before the first run, in a process of its
own, twice; the record says whether both runs have the same digest.
"""

import json
import subprocess
import sys
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from replaylens.workbench.reproduce import FIGURES
from studies.common import COLOURS, QUIET, picture

PARTS = tuple(FIGURES)


def run(quick: bool, part: str) -> dict[str, Any]:
    first = computed(part)
    again = first if quick else computed(part)
    return {"inputs": {}, **first, "same_bits_twice": None if quick else first["digest"] == again["digest"], "cpu_s_again": again["cpu_s"]}


def computed(name: str) -> dict[str, Any]:
    """The figure, by the command, in a new process; BadRequest and the like end the study."""
    made = subprocess.run([sys.executable, "-m", "replaylens", "reproduce", name, "--json"], capture_output=True, text=True)
    if made.returncode not in (0, 1):
        raise SystemExit(made.stderr)
    found: dict[str, Any] = json.loads(made.stdout)
    return found


def draw(parts: dict[str, dict[str, Any]]) -> Figure:
    made, axes = picture(1, width=7.2, height=3.4)
    axis = axes[0, 0]
    at = np.arange(len(parts))
    seconds = [each["cpu_s"] for each in parts.values()]
    axis.barh(at, seconds, color=[COLOURS[2] if each["hit"] else COLOURS[1] for each in parts.values()])
    for y, (x, each) in enumerate(zip(seconds, parts.values(), strict=True)):
        key, value = next(iter(each["measured"].items()))
        axis.annotate(f"{'hit' if each['hit'] else 'miss'}: {key.replace('_', ' ')} {value:.3g}", (x, y), (4, -3), textcoords="offset points", fontsize=7, color=QUIET)
    axis.set_yticks(at, list(parts))
    axis.invert_yaxis()
    axis.set(xlabel="CPU seconds of the call, one thread, model included", xlim=(0, 1.6 * max(seconds)))
    return made
