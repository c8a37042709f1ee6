"""Every shell line and Python block of README and docs runs as written, and every link has a target."""

import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from replaylens.cli import main
from replaylens.probes.settings import SweepSettings
from replaylens.tasks import registry
from tests.docs.blocks import PAGES, ROOT, Block, anchors, blocks, links
from tests.docs.pages import FEWEST_PERMUTATIONS, GIVEN, NOT_RUN, PROCESS, SMALLER

TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
RUN = [
    page for page in PAGES if page != "docs/log.md" and any(b.language in ("sh", "python") for b in blocks(page, TEXTS[page]))
]


def smaller(text: str) -> str:
    for given, instead in SMALLER.items():
        text = text.replace(given, instead)
    return text


def reason(page: str, text: str) -> str | None:
    """Why a line or block is not run, or None if it is."""
    return next((why for start, why in NOT_RUN.get(page, {}).items() if text.startswith(start)), None)


def run_line(line: str, patch: pytest.MonkeyPatch) -> None:
    """Run one shell line, in this process to load torch only once. Only our own command is supported."""
    words = shlex.split(line, comments=True)
    with patch.context() as here:
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            here.setenv(*words.pop(0).split("=", 1))
        if not words:
            return
        assert words[0] == "replaylens", f"not run and not listed in tests/docs/pages.py: {line}"
        here.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            main()
    assert not ended.value.code, f"exit code {ended.value.code}: {line}"


def run_python(block: Block, names: dict[str, Any]) -> None:
    where = f"{block.page}:{block.line}"
    variables = next((env for start, env in PROCESS.get(block.page, {}).items() if block.text.startswith(start)), None)
    if variables is None:
        exec(compile("\n" * (block.line - 1) + smaller(block.text), where, "exec"), names)
        return
    Path("snippet.py").write_text(block.text)
    done = subprocess.run([sys.executable, "snippet.py"], capture_output=True, text=True, env={**os.environ, **variables})
    assert done.returncode == 0, f"{where}: {done.stderr}"


def run_page(page: str, text: str, folder: Path, patch: pytest.MonkeyPatch) -> int:
    """Run a page's lines and blocks in order, in one folder and one namespace. Returns how many ran.

    A block that is a file is written there, and later blocks can import it. Tasks are registered for this page only.
    """
    patch.chdir(folder)
    patch.syspath_prepend(folder)
    patch.setattr(registry, "_REGISTERED", {})
    defaults = {name: each.default for name, each in inspect.signature(SweepSettings).parameters.items()}
    patch.setattr(SweepSettings.__init__, "__defaults__", tuple({**defaults, "permutations": FEWEST_PERMUTATIONS}.values()))
    names: dict[str, Any] = {}
    exec(compile(GIVEN.get(page, ""), f"given for {page}", "exec"), names)
    for name in [name for name, value in names.items() if isinstance(value, ModuleType)]:
        del names[name]  # what is given are objects and files: a page imports what its snippets use
    ran = 0
    for block in blocks(page, text):
        if block.file is not None:
            Path(block.file).write_text(smaller(block.text))
            patch.delitem(sys.modules, Path(block.file).stem, raising=False)
        elif block.language == "python" and reason(page, block.text) is None:
            run_python(block, names)
            ran += 1
        for line in block.text.splitlines() if block.language == "sh" else ():
            if line.strip() and reason(page, line) is None:
                run_line(smaller(line), patch)
                ran += 1
    return ran


@pytest.mark.parametrize("page", RUN)
def test_snippets(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run_page(page, TEXTS[page], tmp_path, monkeypatch)
    assert ran or page in NOT_RUN


PLANTED = {
    "a command that fails": "```sh\nreplaylens inspect nowhere\n```\n",
    "an unknown option": "```sh\nreplaylens tasks list --colour\n```\n",
    "a command that is not ours": "```sh\nrm -rf x\n```\n",
    "a snippet that raises": "```python\nimport replaylens as rl\nrl.tasks.get('coinn')\n```\n",
    "a name that the page never made": "```python\nprint(engine)\n```\n",
}


@pytest.mark.parametrize("what", PLANTED)
def test_snippets_control(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a snippet that fails is found."""
    with pytest.raises((AssertionError, NameError, ValueError)):
        run_page("docs/planted.md", PLANTED[what], tmp_path, monkeypatch)


def test_snippets_import_what_they_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: what a page is given hides no missing import."""
    monkeypatch.setitem(GIVEN, "docs/planted.md", "import json\nknown = json.dumps(1)")
    assert run_page("docs/planted.md", "```python\nknown\n```\n", tmp_path, monkeypatch) == 1
    with pytest.raises(NameError, match="json"):
        run_page("docs/planted.md", "```python\njson.dumps(known)\n```\n", tmp_path, monkeypatch)


def test_a_block_can_be_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not run by itself, and the blocks after it import it."""
    page = "```python\n# planted.py\nVALUE = 1 / ({})\n```\n```python\nimport planted\nassert planted.VALUE == 0.5\n```\n"
    assert run_page("docs/planted.md", page.format(2), tmp_path, monkeypatch) == 1
    with pytest.raises(ZeroDivisionError):
        run_page("docs/planted.md", page.format("0 + 0"), tmp_path, monkeypatch)


def test_lists_are_about_something() -> None:
    """Every entry of tests/docs/pages.py matches a snippet, and every omission has a reason."""
    for page, starts in NOT_RUN.items():
        lines = [line for b in blocks(page, TEXTS[page]) for line in (b.text.splitlines() if b.language == "sh" else [b.text])]
        for start, why in starts.items():
            assert why and any(line.startswith(start) for line in lines), f"{page}: {start!r}"
    everything = "".join(b.text for page in RUN for b in blocks(page, TEXTS[page]))
    assert [given for given in SMALLER if given not in everything] == []
    for page, starts in PROCESS.items():
        assert all(any(b.text.startswith(start) for b in blocks(page, TEXTS[page])) for start in starts)


# Links


def broken(page: str, text: str) -> list[str]:
    """Links of a page without a target, including anchors."""
    wrong = []
    for link in links(text):
        path, _, anchor = link.partition("#")
        if "://" in path:
            continue
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES)
def test_links(page: str) -> None:
    assert broken(page, TEXTS[page]) == []


def test_links_control() -> None:
    text = "[a](nowhere.md) [b](docs/faq.md#no-such) [c](docs/faq.md) [d](#here)\n## Here\n"
    assert broken("planted.md", text) == ["nowhere.md", "docs/faq.md#no-such", "#here"]
