"""The notebooks run from their sources, give the committed outputs, and are fit to commit."""

import ast
import os
import re
from functools import cache
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from replaylens.weights import hub

FOLDER = Path(__file__).parents[2] / "notebooks"
NAMES = [source.stem for source in sorted(FOLDER.glob("[0-9]_*.py"))]
MAX_BYTES = 600_000
CACHE = hub.model_folder().parent
"""the user's cache; other tests change its environment variable later"""
LOCAL = re.compile(r"/(home|root|tmp|work|Users)/")


@cache
def build() -> Any:
    """notebooks/build.py, a script next to the notebooks and not a module of the package.

    Loaded late, as are nbformat and nbclient: importing them takes seconds.
    """
    spec = spec_from_file_location("notebooks_build", FOLDER / "build.py")
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def committed(name: str) -> Any:
    import nbformat

    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def code(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def texts(notebook: Any) -> list[str]:
    """Everything that a notebook shows, except pictures."""
    shown = [output for cell in code(notebook) for output in cell.outputs]
    return [str(o.get("text", "")) for o in shown] + [str(v) for o in shown for v in o.get("data", {}).values()]


def test_all_eight_are_there() -> None:
    assert [name[0] for name in NAMES] == list("12345678")


def test_the_table_has_the_seconds_of_each() -> None:
    """All run within two minutes; the last column is SmolLM2's, on which numbers 4 and 8 do not run."""
    lines = [line.split("|") for line in (FOLDER / "README.md").read_text().splitlines() if line.startswith("| [")]
    stated = [[int(cell) for cell in line[3:5] if cell.strip()] for line in lines]
    assert [len(each) for each in stated] == [2, 2, 2, 1, 2, 2, 2, 1] and max(map(max, stated)) < 120


# ---- as committed -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_is_its_source_run_once(name: str) -> None:
    """Same cells as the source. Every code cell ran in order, without errors or warnings. Small enough for git."""
    import nbformat

    made, source = committed(name), build().read(FOLDER / f"{name}.py")
    nbformat.validate(made)
    assert [(c.cell_type, c.source, c.id) for c in made.cells] == [(c.cell_type, c.source, c.id) for c in source.cells]
    assert [cell.execution_count for cell in code(made)] == list(range(1, len(code(made)) + 1))
    kinds = {(o.output_type, o.get("name")) for cell in code(made) for o in cell.outputs}
    assert kinds <= {("stream", "stdout"), ("execute_result", None), ("display_data", None)}
    assert (FOLDER / f"{name}.ipynb").stat().st_size < MAX_BYTES


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_shows_what_is_drawn_today(name: str) -> None:
    """Build it anew if this fails: OMP_NUM_THREADS=1 python notebooks/build.py NAME."""
    assert build().outdated(committed(name)) == []


def test_a_drawing_of_older_code_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: another mark for no-break spaces, a further tick label. Kinds that a notebook lacks do not matter."""
    made = committed("1_quickstart")
    assert build().drawn(made) == {"rl-tree", "image/png"}
    now = build().digests()
    monkeypatch.setattr(build(), "digests", lambda: {**now, "rl-tree": "other", "rl-thinking": "other"})
    assert build().outdated(made) == ["rl-tree"]
    del made.metadata["replaylens"]
    assert build().outdated(made) == ["image/png", "rl-tree"]


def test_a_digest_follows_what_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    from replaylens.workbench import lens
    from tests import drawings

    before = drawings.described(drawings.FIGURES["lens rank"]())
    assert drawings.described(drawings.FIGURES["lens rank"]()) == before
    monkeypatch.setitem(lens._LABELS, "rank", "place of the token")
    assert drawings.described(drawings.FIGURES["lens rank"]()) != before


@pytest.mark.parametrize("name", NAMES)
def test_what_a_notebook_imports_exists(name: str) -> None:
    """Running them is slow, so a name that moved would be found late: every `from replaylens... import x` and `module.x`."""
    tree = ast.parse((FOLDER / f"{name}.py").read_text())
    found: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("replaylens"):
            for alias in node.names:
                home = import_module(str(node.module))
                own = getattr(home, alias.name) if hasattr(home, alias.name) else import_module(f"{node.module}.{alias.name}")
                found[alias.asname or alias.name] = own
    modules = {key: value for key, value in found.items() if isinstance(value, ModuleType)}
    dotted = [(n.value.id, n.attr) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and isinstance(n.value, ast.Name)]
    assert [(name, own) for name, own in dotted if name in modules and not hasattr(modules[name], own)] == []


@pytest.mark.parametrize("name", NAMES)
def test_committed_notebook_names_no_path_of_the_machine(name: str) -> None:
    assert [found[0] for text in texts(committed(name)) if (found := LOCAL.search(text))] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_reads_no_file_beside_it(name: str) -> None:
    """Somebody who has only the notebook and the package can run it."""
    said = [cell.source for cell in committed(name).cells if cell.cell_type == "code"]
    assert said and [found[0] for text in said if (found := re.search(r"[\"']\.\.?/.*|__file__", text))] == []


@pytest.mark.parametrize("name", NAMES)
def test_notebook_says_first_what_to_expect(name: str) -> None:
    first = committed(name).cells[0]
    assert first.cell_type == "markdown" and first.source.startswith(f"# {name[0]}. ") and "What to expect" in first.source


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    links = [link for cell in committed(name).cells for link in re.findall(r"\]\((?!http)([^)#]+)", cell.source)]
    assert links and [link for link in links if not (FOLDER / link).exists()] == []


# ---- run --------------------------------------------------------------------------------------------------------------

CLAIMS = {
    "1_quickstart": ["100% right", "verified: 60 examples replayed", "Shown: face at step"],
    "2_determinism": ["all equal: True", "certified: True, False", "NotCertified", "certified: True"],
    "3_branches": ["implied:", "accepted rows where text and truth differ: 0%", "S1 follows the text", "patched states: True"],
    "4_thinking_states": ["100% right", "the other face's"],
    "8_living_tree": ["The same, bit for bit: 3 branches", "blocks.1.attn.hook_out", "b0.generate("],
    "5_five_things": ["the eighth of 8 is the eighth of 48: True", "Frank flips heads.", "L1H3"],
    "6_coming_from_transformerlens": ["186 of 186 names", "edit: ", "as captured: True", "gradients: False"],
    "7_your_own_activations": [
        "Shown: side at 7",
        "Shown: side at last",
        "No groups given",
        "Not shown: even",
        "direction: True",
    ],
}
"""what the text around the cells relies on, on any machine"""


def run(name: str, **environment: str) -> Any:
    return build().execute(build().read(FOLDER / f"{name}.py"), env={**os.environ, "OMP_NUM_THREADS": "1", **environment})


def check(name: str, notebook: Any) -> None:
    shown = "\n".join(texts(notebook))
    assert [claim for claim in CLAIMS[name] if claim not in shown] == []
    assert [text for text in texts(notebook) if re.search(r"\bsame (output|KV|bits)", text) and "False" in text] == []
    assert [len(cell.outputs) for cell in code(notebook)] == [len(cell.outputs) for cell in code(committed(name))]


@pytest.mark.slow  # `make test` runs the first one's calls with the page docs/quickstart.md, and a kernel in the test below
@pytest.mark.parametrize("name", NAMES)
def test_notebook_runs(name: str, tmp_path: Path) -> None:
    """In a fresh kernel with its own cache folder: nothing is downloaded, and certificates are made anew."""
    check(name, run(name, REPLAYLENS_CACHE=str(tmp_path)))


CHOICE = re.compile(r'^MODEL = "coin-plain"  # or "smollm2"$', re.M)
BY_VARIABLE = [name for name in NAMES if CHOICE.search((FOLDER / f"{name}.py").read_text())]
"""notebooks that run on SmolLM2 if one variable is changed"""


@pytest.mark.slow
@pytest.mark.skipif(not hub.is_fetched(), reason="SmolLM2-135M is not in the cache folder")
@pytest.mark.parametrize("name", BY_VARIABLE)
def test_one_variable_runs_it_on_the_real_model(name: str) -> None:
    """Every cell runs. What is said of the embedded model need not hold, but bits are the same wherever they should be."""
    notebook = build().read(FOLDER / f"{name}.py")
    for cell in notebook.cells:
        cell.source = CHOICE.sub('MODEL = "smollm2"', cell.source)
    build().execute(notebook, env={**os.environ, "OMP_NUM_THREADS": "1", "REPLAYLENS_CACHE": str(CACHE)})
    shown = "\n".join(texts(notebook))
    assert not re.search(r"(all equal|same bits|over the whole|as captured): False|mismatch", shown)


def test_all_but_two_run_on_the_real_model_by_one_variable() -> None:
    """One needs a model that thinks, one asks a coin, and both say so first."""
    others = [name for name in NAMES if name not in BY_VARIABLE]
    assert [name[0] for name in others] == ["4", "8"]
    assert all("no variable for SmolLM2" in committed(name).cells[0].source for name in others)


@pytest.mark.parametrize("name", NAMES)
def test_every_notebook_has_figures(name: str) -> None:
    assert {"image/png", "rl-tree", "rl-timeline", "rl-thinking"} & build().drawn(committed(name))


# ---- controls ---------------------------------------------------------------------------------------------------------


def test_a_failing_cell_fails_the_build(tmp_path: Path) -> None:
    """Negative control: a failed assertion in a cell fails the build instead of becoming an output."""
    from nbclient.exceptions import CellExecutionError

    (tmp_path / "1_bad.py").write_text("# %%\nassert 1 + 1 == 3\n\n# %%\nprint('not reached')\n")
    with pytest.raises(CellExecutionError, match="AssertionError"):
        build().execute(build().read(tmp_path / "1_bad.py"))


@pytest.mark.slow
def test_progress_bars_are_dropped_and_prints_joined(tmp_path: Path) -> None:
    """Equal sources give equal files, however many pieces the output arrives in."""
    import nbformat

    source = tmp_path / "1_noisy.py"
    source.write_text("# %%\nfrom tqdm.auto import tqdm\nfor i in tqdm(range(3)):\n    print(i, flush=True)\n")
    files = [nbformat.writes(build().execute(build().read(source))) for _ in range(2)]
    assert files[0] == files[1]
    (cell,) = code(nbformat.reads(files[0], as_version=4))
    assert [output.output_type for output in cell.outputs] == ["stream"] and cell.outputs[0].text == "0\n1\n2\n"


def test_unknown_notebook_is_named() -> None:
    with pytest.raises(SystemExit, match="no notebook 9_none; there are 1_quickstart"):
        build().main(["9_none"])
