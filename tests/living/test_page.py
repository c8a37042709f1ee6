"""The component in a real browser, on a served and on a saved page: actions, secrets, hostile texts, and its speed."""

import base64
import gzip
import html
import http.client
import json
import re
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadFile, BadRequest, FingerprintMismatch
from replaylens.living.explorer import Explorer
from replaylens.living.saved import page as page_of
from replaylens.living.saved import replay_page
from replaylens.living.served import ServedPage
from replaylens.views.html import tag
from tests.living.conftest import PROMPT, large
from tests.views.checks import assert_harmless
from tests.views.conftest import HOSTILE
from tests.views.test_browser import CHROMIUM


class Tab:
    """A tab that notes errors, dialogues and requests."""

    def __init__(self, browser: Any, **options: Any) -> None:
        self.context = browser.new_context(viewport={"width": 1300, "height": 800}, **options)
        self.page, self.faults, self.requests = self.context.new_page(), list[str](), list[str]()
        self.page.on("pageerror", lambda error: self.faults.append(str(error)))
        self.page.on("console", lambda message: self.faults.append(message.text) if message.type == "error" else None)
        self.page.on("dialog", lambda dialog: (self.faults.append(dialog.message), dialog.dismiss()))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def said(self, text: str) -> None:
        self.page.wait_for_function("t => document.querySelector('.rlx-status').textContent == t", arg=text, timeout=30_000)

    def token(self, branch: int, position: int) -> Any:
        return self.page.locator(f".rlx-cell[data-b='{branch}'][data-p='{position}']")

    def rows(self, count: int) -> None:
        self.page.wait_for_function("n => +document.querySelector('.rlx-grid').getAttribute('aria-rowcount') == n", arg=count)


def asked(
    served: ServedPage, path: str | None = None, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, str, str]:
    """(status, cookie, body) of a request by hand."""
    host = re.match(r"http://([^/]+)", served.address)[1]  # type: ignore[index]
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.putrequest(method, f"/{served.token}/" if path is None else path, skip_host=True)
    raw = b"" if body is None else json.dumps(body).encode()
    given = {
        "Host": host,
        **({"Content-Type": "application/json", "Content-Length": str(len(raw))} if body is not None else {}),
    }
    for name, value in {**given, **{name.replace("_", "-"): value for name, value in headers.items()}}.items():
        connection.putheader(name, value)
    connection.endheaders(raw)
    reply = connection.getresponse()
    found = reply.status, reply.headers.get("Set-Cookie", ""), reply.read().decode()
    connection.close()
    return found


def test_clicks_and_keys_on_a_served_page(browser: Any, explorer: Explorer) -> None:
    """What is clicked is done, with the API's bits; a second browser is refused; no request leaves the page's address."""
    root, tab = explorer.root.id, Tab(browser)
    mine = Engine.load("coin-plain").prompt(PROMPT)
    with explorer.serve() as served:
        tab.page.goto(served.address)
        tab.page.wait_for_selector(".rlx-at")
        tab.page.locator(".rlx-grid").focus()
        tab.page.keyboard.press("g")
        tab.said("generate: done")
        assert explorer.root.tokens == mine.generate(16).tokens
        tab.token(root, 12).click()
        tab.page.wait_for_selector("button.rlx-chance")
        tab.page.uncheck("input[type=checkbox]")
        tab.page.locator("button.rlx-chance").nth(0).click()
        tab.said("force: done")
        tab.rows(2)
        (forced,) = (line["id"] for line in explorer.shape() if line["id"] != root)
        assert torch.equal(explorer.branch(forced).logits(), mine.fork(at=12)[0].force(",").logits())
        tab.page.locator(".rlx-grid").focus()
        tab.page.wait_for_function(
            "b => document.querySelector('.rlx-heading').textContent.includes('branch ' + b)", arg=forced
        )
        tab.page.keyboard.press("g")
        tab.said("generate: done")
        assert explorer.selection.id == forced  # type: ignore[union-attr]
        tab.page.keyboard.press("ArrowLeft")
        tab.page.keyboard.press("r")
        tab.said("rollback: done")
        tab.page.locator(".rlx-row .rl-gone").first.wait_for()
        tab.page.keyboard.press("u")
        tab.said("undo: done")
        explorer.root.fork(at=3)  # gone at once: nobody holds it
        held = explorer.root.fork(at=3)[0].force(" Bob")
        tab.rows(3)
        tab.token(held.id, 3).get_by_text("Bob").wait_for()
        tab.page.reload()  # the same browser may
        tab.page.wait_for_selector(".rlx-at")
        assert tab.faults == [] and {url.startswith(served.address) for url in tab.requests} == {True}
        other = Tab(browser)
        assert other.page.goto(served.address).status == 403 and "Refused" in other.page.content()
        other.context.close()
    tab.page.wait_for_selector(".rlx-banner:not([hidden])", timeout=30_000)
    assert tab.page.locator(".rlx-cell").count() > 20, "what was seen stays"
    tab.context.close()
    held.release()


def test_who_may_not_ask_is_refused(explorer: Explorer) -> None:
    """Another host, origin or site, a wrong or missing token, no cookie, another method or kind of content: 403 or 404."""
    with explorer.serve() as served:
        host, ask = served.address.split("/")[2], f"/{served.token}/ask"
        for headers in (
            {"Host": "example.org"},
            {"Host": "127.0.0.1"},
            {"Origin": "http://example.org"},
            {"Origin": "null"},
            {"Sec_Fetch_Site": "cross-site"},
        ):
            assert asked(served, **headers)[0] == 403, headers
        for path in ("/", "/x/", f"/{served.token[:-1]}/", f"/{served.token}x/", "//", "/ask"):
            assert asked(served, path)[0] == 403, path
        assert asked(served, f"/{served.token}/other")[0] == 404
        ping = {"id": 1, "do": "ping"}
        assert asked(served, ask, "POST", ping)[0] == 403, "nobody has opened the page"
        status, cookie, body = asked(served, Origin=f"http://{host}")
        body = html.unescape(body)
        assert status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and "connect-src 'self'" in body
        own = cookie.partition(";")[0]
        assert asked(served)[0] == 403, "a second browser"
        assert asked(served, Cookie=own)[0] == 200, "the first one again"
        assert json.loads(asked(served, ask, "POST", ping, Cookie=own)[2]) == {"id": 1, "reply": True}
        assert asked(served, ask, "POST", ping, Cookie=own[:-1])[0] == 403
        assert asked(served, ask, "POST", ping, Cookie=own, Origin="http://localhost.example.org")[0] == 403
        assert asked(served, ask, "POST", ping, Cookie=own, Content_Type="text/plain")[0] == 403
        assert asked(served, ask.replace(served.token, "x"), "POST", ping, Cookie=own)[0] == 403
        assert asked(served, ask, "POST", ping, Cookie=own, Content_Length="9999999")[0] == 413
        assert asked(served, f"/{served.token}/events", "POST", {"after": "x"}, Cookie=own)[0] == 400
        assert asked(served, ask, "PUT", ping, Cookie=own)[0] == 501
        with pytest.raises(BadRequest, match="another port"):
            explorer.serve(port=int(host.split(":")[1]))
        held = http.client.HTTPConnection(host, timeout=20)
        message = json.dumps(ping).encode()
        kinds = {"Content-Type": "application/json", "Cookie": own}
        held.request("POST", ask, message, kinds)
        assert json.loads(held.getresponse().read())["reply"] is True
    held.request("POST", ask, message, kinds)
    assert held.getresponse().status == 503, "a connection that outlives the server is no way in"
    held.close()


def test_a_saved_page_is_whole_and_replays(browser: Any, explorer: Explorer, tmp_path: Path) -> None:
    """No kernel and no request: tokens, readings and pins are there, actions say why not. Its plan rebuilds the tree."""
    root = explorer.root.id
    explorer.generate(root, 8)
    explorer.resample(root, 16, n=3, max_new=4, temperature=2.0)
    explorer.edit(root, 9, op="attention", layer=1, n=4)
    (forked,) = explorer.force(root, 5, text=" Bob", n=3)
    explorer.rollback(forked, to=7)
    explorer.pin(root, 9, "here")
    saved = explorer.save(tmp_path / "tree.html")
    assert_harmless(re.sub(r"(?s)<script>.*</script>", "", saved.read_text()), scripts=2)
    tab = Tab(browser)
    tab.page.goto(saved.as_uri())
    tab.page.wait_for_selector(".rlx-bar")
    tab.rows(7)
    tab.token(root, 12).click()
    tab.page.wait_for_selector(".rlx-chip")
    tab.page.keyboard.press("f")
    assert "replay_page" in tab.page.inner_text(".rlx-status") and tab.page.locator(".rlx-actions button:enabled").count() == 0
    tab.page.fill(".rlx-find", "Bob")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_function("document.querySelector('.rlx-status').textContent == '1 of 2'")
    tab.page.select_option(".rlx-tools select", "layers")
    tab.page.wait_for_selector(".rlx-layers")
    assert tab.faults == [] and tab.requests == [saved.as_uri()]
    tab.context.close()

    result = replay_page(saved)
    assert result.same and len(result.branches) == 6 and str(result).startswith("The same, bit for bit: 6 branches")
    for number, branch in result.branches.items():
        own = explorer.branch(number)
        assert branch.tokens == own.tokens and torch.equal(branch.logits(None), own.logits(None))
    assert result.rows == 5 * sum(line["end"] - line["start"] for line in explorer.shape() if line["id"] >= 0)
    assert explorer.save(tmp_path / "again.html").read_bytes() == saved.read_bytes()
    with pytest.raises(FingerprintMismatch):
        replay_page(saved, engine=Engine.load("coin-draft"))


def planned(path: Path, change: Any) -> Path:
    """A copy of a page with another plan."""
    text = path.read_text()
    start = text.index('id="rl-plan">') + len('id="rl-plan">')
    end = text.index("</script>", start)
    plan = json.loads(text[start:end])
    change(plan)
    made = path.with_name("changed.html")
    made.write_text(text[:start] + json.dumps(plan) + text[end:])
    return made


def test_what_differs_is_named(explorer: Explorer, tmp_path: Path) -> None:
    """One token, or one bit of one row's check: the replay names branch, position and site. A broken plan is refused."""
    root = explorer.root.id
    explorer.generate(root, 6, temperature=1.0, seed=5)
    (other,) = explorer.fork(root, at=18)
    explorer.generate(other, 3)
    saved = explorer.save(tmp_path / "tree.html")

    def token(plan: Any) -> None:
        plan["branches"][1]["tokens"][1] += 1

    assert re.search(
        rf"branch {other}, position 19: the token was", str(replay_page(planned(saved, token), engine=explorer.engine))
    )

    def bit(plan: Any) -> None:
        checks = plan["branches"][0]["checks"][0]
        raw = bytearray(base64.b64decode(checks["data"]))
        raw[(7 * 5 + 3) * 8] ^= 1  # position 7, site 3
        checks["data"] = base64.b64encode(bytes(raw)).decode()

    found = replay_page(planned(saved, bit), engine=explorer.engine)
    assert (
        not found.same and found.difference.startswith(f"branch {root}, position 7") and "blocks.3.hook_in" in found.difference
    )

    def format_(plan: Any) -> None:
        plan["format"] = 9

    def parent(plan: Any) -> None:
        plan["branches"][1]["parent"] = 77

    def field(plan: Any) -> None:
        plan["branches"][0]["tokens"] = "x"

    def checks(plan: Any) -> None:
        plan["branches"][0]["checks"][0]["data"] = "AAAA"

    def places(plan: Any) -> None:
        plan["branches"][0]["checks"][0]["first"] = 9

    for change in (format_, parent, field, checks, places):
        with pytest.raises(BadFile):
            replay_page(planned(saved, change), engine=explorer.engine)
    (tmp_path / "none.html").write_text("<html></html>")
    for path in ("none.html", "missing.html"):
        with pytest.raises(BadFile):
            replay_page(tmp_path / path)
    with pytest.raises(BadRequest, match="does not name its model"):
        replay_page(planned(saved, lambda plan: plan.update(model="")))


def test_tree_save(coin: Engine, tmp_path: Path) -> None:
    """`branch.tree().save` writes the same page, as long as the branch is open; a tree does not keep its branch open."""
    branch = coin.prompt(PROMPT)
    branch.generate(4)
    tree = branch.tree()
    assert replay_page(tree.save(tmp_path / "tree.html"), engine=coin).same
    assert len(replay_page(tree.save(tmp_path / "no.html", readings=False), engine=coin).branches) == 1
    assert replay_page(tmp_path / "no.html", engine=coin).rows == 0 < replay_page(tmp_path / "tree.html", engine=coin).rows
    branch.release()
    with pytest.raises(BadRequest, match="no open branch"):
        tree.save(tmp_path / "late.html")
    with pytest.raises(BadRequest, match="is a folder"):
        coin.prompt(PROMPT).explore().save(tmp_path)


LONG = "<script>alert(9)</script>" + "\u202e\u2066" + "x" * 100_000


@pytest.mark.parametrize("saved", [True, False])
def test_hostile_texts_are_inert(
    browser: Any, hostile: Engine, tmp_path: Path, saved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, model and edits named with markup, quotes, right-to-left marks and 100 kB: text, and nothing else."""
    from replaylens import Edit

    plain = hostile.text.decode
    monkeypatch.setattr(hostile.text, "decode", lambda ids: LONG if list(ids) == [5] else plain(ids))
    name = HOSTILE[1] + "\u202e" + HOSTILE[0]
    explorer = Explorer(hostile.prompt([*range(40), 5]), model=name, edits={name: Edit("T", "zero", layers=[0])})
    explorer.edit(explorer.root.id, 20, name=name, n=6)
    explorer.pin(explorer.root.id, 3, name)
    tab = Tab(browser)
    with explorer.serve() as served:
        address = explorer.save(tmp_path / "tree.html").as_uri() if saved else served.address
        tab.page.goto(address)
        tab.page.wait_for_selector(".rlx-at")
        for strip in ("layers", "surprise"):
            tab.page.select_option(".rlx-tools select", strip)
            for position in (3, 4, 5, 6, 7, 20):
                tab.page.evaluate("p => { document.querySelector('.rlx-grid').scrollLeft = p * 60 - 300 }", position)
                tab.token(explorer.root.id, position).click()
                tab.page.wait_for_timeout(120)
        text = tab.page.inner_text("body")
        assert "<script>alert(1)</script>" in text and "\u202e" not in text and len(tab.page.content()) < 3_000_000
        assert tab.page.locator("#rl-explore script, #rl-explore img").count() == 0
        assert tab.faults == [] and all(url.startswith(address) for url in tab.requests)
    tab.context.close()


def made_up(path: Path, positions: int, branches: int) -> Path:
    raw = gzip.compress(json.dumps(large(positions, branches)).encode(), mtime=0)
    data = tag("script", base64.b64encode(raw).decode(), type="text/plain", id="rl-data")
    path.write_text(page_of("made up", "\nreplaylensExplore.saved();\n", data))
    return path


def test_only_what_is_in_sight_exists(browser: Any, tmp_path: Path) -> None:
    """5,000 tokens x 500 branches: a few hundred cells, wherever one scrolls, each the token that belongs there."""
    tab = Tab(browser)
    tab.page.goto(made_up(tmp_path / "large.html", 5000, 500).as_uri())
    tab.page.wait_for_selector(".rlx-cell")
    data = large(5000, 500)
    for left, top in ((0, 0), (150_000, 9000), (300_000, 20_000), (40, 25_000)):
        tab.page.evaluate("([x, y]) => document.querySelector('.rlx-grid').scrollTo(x, y)", [left, top])
        tab.page.wait_for_timeout(400)
        cells = tab.page.evaluate(
            "[...document.querySelectorAll('.rlx-cell')].map(c => [+c.dataset.b, +c.dataset.p, c.firstChild.textContent])"
        )
        assert len(cells) < 2500
        for branch, position, text in cells[::37]:
            row = data["rows"][str(branch)]
            ids = memoryview(base64.b64decode(row["ids"])).cast("I")
            assert text == data["words"][str(ids[position - row["first"]])]
    assert tab.faults == []
    tab.context.close()


@pytest.mark.slow
def test_the_trace_of_scrolling(browser: Any, tmp_path: Path) -> None:
    """What `python -m tests.living.test_page` prints can be measured here."""
    found = trace(browser, made_up(tmp_path / "large.html", 5000, 500))
    assert found["frames"] > 30 and found["first"] > 0


SCROLL = """async () => {
    const grid = document.querySelector('.rlx-grid');
    for (let i = 0; i < 240; i++) {
        grid.scrollBy(i % 80 < 40 ? 40 : 0, i % 80 < 40 ? 0 : 40);
        await new Promise(requestAnimationFrame);
    }
}"""
TRACED = ["devtools.timeline", "disabled-by-default-devtools.timeline", "disabled-by-default-devtools.timeline.frame", "cc"]


def trace(browser: Any, path: Path) -> dict[str, float]:
    """Milliseconds until tokens are there, and of frames and tasks while scrolling both ways, by the browser's own trace."""
    tab = Tab(browser)
    tab.page.goto(path.as_uri())
    tab.page.wait_for_selector(".rlx-cell[aria-label*=word]")
    first = tab.page.evaluate("performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? performance.now()")
    there = tab.page.evaluate("performance.now()")
    tab.page.wait_for_timeout(1000)
    browser.start_tracing(page=tab.page, categories=TRACED)
    tab.page.evaluate(SCROLL)
    events = json.loads(browser.stop_tracing())["traceEvents"]
    tasks = [event["tdur"] / 1000 for event in events if event["name"] == "RunTask" and "tdur" in event]  # of the processor
    frames = sorted(event["ts"] / 1000 for event in events if event["name"] == "DrawFrame")
    gaps = [b - a for a, b in pairwise(frames)]
    tab.context.close()
    facts = {
        "first": first,
        "there": there,
        "frames": len(frames),
        "gap": max(gaps, default=0.0),
        "task": max(tasks, default=0.0),
    }
    return facts | {"over": sum(gap > 50 for gap in gaps)}


def main() -> None:
    """Print the traces of three visits to 5,000 x 500 tokens."""
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as runner:
        running = runner.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = made_up(Path(folder) / "large.html", 5000, 500)
        for _ in range(3):
            print({name: round(value, 1) for name, value in trace(running, page).items()}, flush=True)
        running.close()


if __name__ == "__main__":
    main()
