"""Writes the figures of docs/quickstart.md, taken from the outputs of notebook 8: python docs/img/five_things.py"""

import base64
from pathlib import Path

import nbformat

HERE = Path(__file__).parent
NOTEBOOK = HERE.parents[1] / "notebooks" / "8_five_things.ipynb"
FIGURES = ("lens", "patch", "steer", "resample", "ablate")


def main() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    shown = [output.data for cell in cells if cell.cell_type == "code" for output in cell.outputs if "data" in output]
    pictures = [data["image/png"] for data in shown if "image/png" in data]
    for name, picture in zip(FIGURES, pictures, strict=True):
        (HERE / f"five-{name}.png").write_bytes(base64.b64decode(picture))


if __name__ == "__main__":
    main()
