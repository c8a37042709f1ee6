"""Writes the figures of README and docs/quickstart.md from runs of SmolLM2: python docs/img/five_things.py

Those of the quickstart are drawn by the page's own code. Each is drawn in light and in dark.
"""

import re
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

import replaylens as rl

HERE = Path(__file__).parent
FIGURES = {"lens": "seen", "patch": "patched"}
"""figure -> the page's name for what it shows"""
THEMES = {"light": ("default", "#ffffff"), "dark": ("dark_background", "#14171a")}


def main() -> None:
    jobs = (HERE.parent / "quickstart.md").read_text(encoding="utf-8").split("\n## ")[2]
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", jobs, re.MULTILINE | re.DOTALL):
        exec(block, names)
    for theme, (style, background) in THEMES.items():
        with plt.style.context(style):
            for figure, name in FIGURES.items():
                names[name].plot().savefig(HERE / f"five-{figure}-{theme}.png", facecolor=background)
    heatmap()


def heatmap() -> None:
    clean, corrupt = (f"When Mary and John went to the store, {name} gave a drink to" for name in ("John", "Mary"))
    patched = rl.patch(rl.Engine.load("smollm2"), clean, corrupt, metric=(" Mary", " John"), sites="STC")
    for theme, (style, background) in THEMES.items():
        with plt.style.context(style):
            figure = patched.plot()
            figure.set_size_inches(11, 4.2)
            for axes in figure.axes[:3]:
                axes.set_yticks([row + 0.5 for row in range(0, 30, 5)], range(0, 30, 5))
            figure.savefig(HERE / f"patch-{theme}.png", dpi=120, facecolor=background)


if __name__ == "__main__":
    main()
