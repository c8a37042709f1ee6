"""Writes the figures of README and docs/quickstart.md: python docs/img/five_things.py

Those of the quickstart are outputs of notebook 8; the README's heatmap is drawn from a run of SmolLM2, in light and in dark.
"""

import base64
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat

import replaylens as rl

HERE = Path(__file__).parent
NOTEBOOK = HERE.parents[1] / "notebooks" / "8_five_things.ipynb"
FIGURES = ("lens", "patch", "steer", "resample", "ablate")
THEMES = {"light": ("default", "#ffffff"), "dark": ("dark_background", "#14171a")}


def main() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    shown = [output.data for cell in cells if cell.cell_type == "code" for output in cell.outputs if "data" in output]
    pictures = [data["image/png"] for data in shown if "image/png" in data]
    for name, picture in zip(FIGURES, pictures, strict=True):
        (HERE / f"five-{name}.png").write_bytes(base64.b64decode(picture))
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
