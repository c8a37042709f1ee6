"""The widget on a live kernel: JupyterLab on the loopback, a real browser, every action clicked, and the kernel killed."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

PROMPT = "A coin's state is heads. Alice flips. Bob doesn't flip. Carol flips."
SHOW = f"""
import replaylens as rl
engine = rl.Engine.load("coin-plain")
w = rl.explore(engine, {PROMPT!r}, edits={{"quiet": rl.Edit("C", "scale", factor=0.5, layers=[1], positions=slice(9, None))}})
w
"""
CHECK = """
import io, re, torch
code = w.python().replace("rl.Engine.load(...)", "rl.Engine.load('coin-plain')")
names = {"edits": w.edits}
exec(code, names)
rebuilt = {int(name[1:]): branch for name, branch in names.items() if re.fullmatch(r"b[0-9]+", name)}
drawn = [r.tokens for r in names["rollouts"]]
mine = [line["id"] for line in w.shape() if line["id"] >= 0]
own = [w.branch(i) for i in mine if i in rebuilt]
pairs = [(b, rebuilt[b.id]) for b in own]
equal = lambda b, c: b.tokens == c.tokens and torch.equal(b.logits(None), c.logits(None)) and torch.equal(b.kv(), c.kv())
bits = all(equal(b, c) for b, c in pairs)
others = [tuple(w.branch(i).tokens[w.root.root_length:]) for i in mine if i not in rebuilt]
print("checked", len(own), len(others), bits, sorted(others) == sorted(map(tuple, drawn)), len(w.pins), w.selection.id in mine)
"""
KILL = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
FROM_PYTHON = "w.root.fork(at=11)[0].force(' turns') and None; kept = w.root.fork(at=11)[0].force(' turns')"


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[str]:
    """The address of a notebook with four cells, in a server of its own."""
    cells = [nbformat.v4.new_code_cell(source) for source in (SHOW, CHECK, FROM_PYTHON, KILL)]
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, tmp_path / "t.ipynb")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--no-browser", "--allow-root", f"--port={port}", "--ip=127.0.0.1", "--IdentityProvider.token=abc"]
    command = [str(Path(sys.executable).parent / "jupyter"), "lab", *options, f"--ServerApp.root_dir={tmp_path}"]
    places = {name: str(tmp_path / name) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR")}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    server = subprocess.Popen(command, env={**os.environ, **places, "PATH": path}, **quiet)
    try:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/lab/tree/t.ipynb?token=abc"
    finally:
        server.terminate()
        server.wait(30)


@pytest.mark.slow
def test_every_action_in_a_notebook(browser: Any, lab: str) -> None:
    """Each action by mouse or key on a live kernel; bits as the API makes them; then the kernel is killed."""
    page = browser.new_page(viewport={"width": 1500, "height": 1000})
    page.goto(lab, timeout=90_000)
    page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=90_000)
    page.wait_for_selector("text=/ipykernel.* Idle/", timeout=90_000)

    def run(cell: int) -> None:
        page.locator(".jp-Notebook .jp-CodeCell").nth(cell).locator(".cm-content").click()
        page.keyboard.press("Shift+Enter")

    run(0)
    page.wait_for_selector(".rlx-at", timeout=60_000)
    page.locator(".rlx").evaluate("e => e.style.height = '520px'")

    def said(text: str) -> None:
        page.wait_for_function("t => document.querySelector('.rlx-status').textContent == t", arg=text, timeout=30_000)

    def rows() -> int:
        return int(page.get_attribute(".rlx-grid", "aria-rowcount"))

    def until(count: int) -> None:
        page.wait_for_function("n => +document.querySelector('.rlx-grid').getAttribute('aria-rowcount') == n", arg=count)

    def token(branch: int, position: int) -> None:
        page.locator(f".rlx-cell[data-b='{branch}'][data-p='{position}']").click()

    token(0, 15)
    page.keyboard.press("g")
    said("generate: done")
    page.wait_for_selector(".rlx-cell[data-b='0'][data-p='20']")
    token(0, 12)
    page.wait_for_selector("button.rlx-chance")
    page.locator("button.rlx-chance").nth(0).click()  # another token, from the list, and on from there
    said("force: done")
    until(2)
    token(0, 8)
    page.keyboard.press("t")
    page.keyboard.type(" turns")
    page.keyboard.press("Enter")
    said("force: done")
    until(3)
    token(0, 10)
    page.keyboard.press("e")
    page.locator(".rlx-side details").nth(0).locator("select").select_option("oattention")
    page.get_by_role("button", name="fork with the edit").click()
    said("edit: done")
    until(4)
    token(0, 10)
    page.locator(".rlx-side details").nth(0).locator("select").select_option("nquiet")
    page.get_by_role("button", name="fork with the edit").click()
    said("edit: done")
    until(5)
    token(0, 15)
    page.locator("input[name=temperature]").fill("2")
    page.locator(".rlx-grid").focus()
    page.keyboard.press("n")
    said("resample: done")
    until(13)
    assert page.locator(".rlx-results").inner_text().startswith("Resampled")
    page.locator("input[name=temperature]").fill("0")
    token(0, 18)
    page.get_by_role("button", name="roll back", exact=True).click()
    said("rollback: done")
    until(14)
    assert page.locator(".rlx-row .rl-gone").count() > 0, "what was rolled back is drawn grey"
    page.keyboard.press("u")
    said("undo: done")
    until(13)
    page.keyboard.press("p")
    said("pin: done")
    page.wait_for_selector(".rlx-pinned")
    page.keyboard.press("y")
    page.wait_for_selector("dialog .rlx-code")
    assert "b0.generate(" in page.locator("dialog .rlx-code").input_value()
    page.get_by_role("button", name="close").click()
    page.locator(".rlx-name").nth(1).click()
    page.keyboard.press("c")
    page.locator(".rlx-name").nth(0).click()
    page.keyboard.press("c")
    page.wait_for_function("document.querySelector('.rlx-results').textContent.includes('First different token')")
    run(1)
    page.wait_for_selector("text=/^checked /", timeout=60_000)
    assert page.locator("text=/^checked /").inner_text().strip() == "checked 5 8 True True 1 True"
    run(2)
    until(14)  # a fork that Python has made

    shown = page.locator(".rlx-cell[data-b='0'] .rl-token").all_inner_texts()
    run(3)
    page.wait_for_selector(".rlx-banner:not([hidden])", timeout=40_000)
    assert "does not answer" in page.locator(".rlx-banner").inner_text()
    assert page.locator(".rlx-cell[data-b='0'] .rl-token").all_inner_texts() == shown, "what was seen stays"
    page.locator(".jp-Dialog .jp-mod-accept").click()  # JupyterLab says that the kernel has died
    with page.expect_download() as download:
        page.locator(".rlx-banner button").click()
    assert '"tokens"' in Path(download.value.path()).read_text()
    page.close()
