"""Twelve published figures on small weights at hand, one public call each: what was published, what came out, hit or miss.

Every figure is one `replaylens reproduce NAME`, whose criteria were committed before the first run. The record keeps the digest
of each run: `same_bits` says whether all recorded runs of the same call, in processes of their own, gave the same one.
"""

import json
from typing import Any

import numpy as np
from matplotlib.figure import Figure

import replaylens as rl
from bench.studies.common import COLOURS, HERE, QUIET, Place, inputs, picture
from replaylens.extras.reproduce import FIGURES, reproduce

PARTS = tuple(FIGURES)


def run(quick: bool, part: str, place: Place) -> dict[str, Any]:
    found = reproduce(part).to_json()
    digests = [*before(part, found["call"]), found["digest"]]
    known = {} if "random" in found["model"] else inputs(rl.Engine.load(found["model"]))
    return {"inputs": known, **found, "digests": digests, "same_bits": len(set(digests)) == 1}


def before(name: str, call: str) -> list[str]:
    """The digests of recorded runs of the same call."""
    file = HERE / "results" / "reproduce.json"
    part = json.loads(file.read_text())["parts"].get(name, {}) if file.exists() else {}
    return list(part["digests"]) if part.get("call") == call else []


def draw(parts: dict[str, dict[str, Any]]) -> Figure:
    made, axes = picture(1, width=7.2, height=3.4)
    axis = axes[0, 0]
    at = np.arange(len(parts))
    seconds = [each["cpu_s"] for each in parts.values()]
    axis.barh(at, seconds, color=[COLOURS[2] if each["hit"] else COLOURS[1] for each in parts.values()])
    for y, (x, each) in enumerate(zip(seconds, parts.values(), strict=True)):
        key, value = next(iter(each["measured"].items()))
        said = f"{'hit' if each['hit'] else 'miss'}: {key.replace('_', ' ')} {value:.3g}"
        axis.annotate(said, (x, y), (4, -3), textcoords="offset points", fontsize=7, color=QUIET)
    axis.set_yticks(at, list(parts))
    axis.invert_yaxis()
    axis.set(xlabel="CPU seconds of the call, one thread, model included", xlim=(0, 1.6 * max(seconds)))
    return made
