"""Runs the notebooks' sources, percent scripts in this folder, and writes each as an .ipynb with its outputs.

python notebooks/build.py [NAME ...]    such as 1_quickstart; all without a name
"""

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient

HERE = Path(__file__).parent
SECONDS = 300
"""that one cell may take"""
WIDGET = "application/vnd.jupyter.widget-view+json"
Notebook = nbformat.NotebookNode


def sources() -> list[Path]:
    """The percent scripts, in reading order."""
    return sorted(HERE.glob("[0-9]_*.py"))


def read(source: Path) -> Notebook:
    """A source as a notebook without outputs. Cells have their number as id, so that equal sources give equal files."""
    notebook: Notebook = jupytext.read(source)
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "file_extension": ".py", "mimetype": "text/x-python"},
    }
    notebook.nbformat_minor = 5
    return notebook


def execute(notebook: Notebook, **kernel: Any) -> Notebook:
    """Mutates: runs all cells in a fresh kernel; CellExecutionError shows the first that fails. Returns the notebook.

    kernel  options of its start, such as env
    """
    about = dict(notebook.metadata)
    where = {"metadata": {"path": str(HERE)}}
    quiet = ["--log-level=ERROR"]
    NotebookClient(notebook, timeout=SECONDS, record_timing=False, resources=where, extra_arguments=quiet).execute(**kernel)
    notebook.metadata = about  # the kernel adds its version
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = list(_tidy(cell.outputs))
    return notebook


def _tidy(outputs: list[Any]) -> Iterator[Any]:
    """Without widgets, which are dead outside the kernel, but with their pictures; printed text in one piece."""
    last = None
    for output in outputs:
        if WIDGET in output.get("data", {}):
            del output.data[WIDGET]
            if "text/html" not in output.data:
                continue
        if last is not None and output.output_type == last.output_type == "stream" and output.name == last.name:
            last.text += output.text
            continue
        last = output
        yield output


@cache
def digests() -> dict[str, str]:
    """Kind of drawing -> digest of what it looks like now, on samples with made-up numbers."""
    sys.path.insert(0, str(HERE.parent))
    from tests import drawings

    return drawings.digests()


def drawn(notebook: Notebook) -> set[str]:
    """The kinds of drawings among a notebook's outputs."""
    shown = [output.get("data", {}) for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    pages = "".join("".join(data.get("text/html", "")) for data in shown)
    return {kind for kind in digests() if f'class="{kind}' in pages or any(kind in data for data in shown)}


def outdated(notebook: Notebook) -> list[str]:
    """The kinds of drawings that look otherwise by now than when the notebook was built."""
    known = notebook.metadata.get("replaylens", {}).get("drawings", {})
    return sorted(kind for kind in drawn(notebook) if known.get(kind) != digests()[kind])


def main(names: list[str]) -> None:
    known = {source.stem: source for source in sources()}
    if unknown := set(names) - set(known):
        sys.exit(f"no notebook {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    for name in names or known:
        print(f"{name}: ", end="", flush=True)
        target = HERE / f"{name}.ipynb"
        made = execute(read(known[name]))
        made.metadata["replaylens"] = {"drawings": {kind: digests()[kind] for kind in sorted(drawn(made))}}
        nbformat.write(made, target)
        print(f"{target.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
