"""The saved page: everything that was computed, without a kernel; and `replay_page`, which rebuilds its tree bit for bit."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

from replaylens.engine.display import is_stamped, visible
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadFile, BadRequest, FingerprintMismatch, ReplayMismatch
from replaylens.engine.files import write_file
from replaylens.engine.records import SCHEME, Fingerprint, build, digest_of, parse
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_path, verb
from replaylens.engine.serving.branch import Branch
from replaylens.living.readings import RowReader, checks_of, packed
from replaylens.living.state import LivingTree, regrow
from replaylens.views.html import asset, style, tag
from replaylens.views.page import document, json_block

FORMAT = 1
EVERY = 2000
"""tokens of a tree that is read as a whole when it is saved"""
_PLAN = re.compile(rb'<script type="application/json" id="rl-plan">(.*?)</script>', re.DOTALL)


# ---- page ------------------------------------------------------------------------------------------------------------


@cache
def explore_style() -> Markup:
    """The style of the component, besides that of all views."""
    return Markup(f"<style>{asset('explore.css', 'replaylens.living')}</style>")


def page(title: str, start: str, data: str = "", source: str = "", connects: str = "") -> str:
    """A page with the component alone. `start`: the call that begins it."""
    head = [tag("title", visible(title)), style(), explore_style()]
    code = asset("explore.js", "replaylens.living") + start
    needs = tag("noscript", tag("p", "This page needs its own script, which loads nothing."))
    body = [tag("main", needs, id="rl-explore", class_="rl-view rl-alone"), Markup(data)]
    return document(code, head, body, "rl-view rl-whole", source, connects)


def save(explorer: LivingTree, path: str | Path, readings: bool | None = None) -> Path:
    """See `Explorer.save`."""
    target = as_path("path", path)
    if not target.name or target.is_dir():
        raise BadRequest(f"{path} is a folder. Name the file to write, such as {target / 'tree.html'}.")
    tree = explorer.tree()
    if explorer.work is not None:
        raise BadRequest(f"{explorer.work.what} is still running. Stop it, or wait for its end.")
    own = sum(line["end"] - line["start"] for line in tree["branches"])
    if readings is True or (readings is None and own <= EVERY):
        _read_all(explorer)
    content = {"tree": tree | {"undo": []}, **_content(explorer, tree["branches"])}
    plan = plan_of(explorer, tree["branches"])
    raw = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    data = tag("script", base64.b64encode(gzip.compress(raw, mtime=0)).decode(), type="text/plain", id="rl-data")
    title = f"Tree of {len(tree['branches'])} branches: {tree['title']}"
    whole = page(title, "\nreplaylensExplore.saved();\n", data + json_block("rl-plan", plan), source=_source(plan))
    return write_file(target, whole, is_stamped)


def _source(plan: Mapping[str, Any]) -> str:
    return f"{SCHEME}{digest_of(plan)}"


def _read_all(explorer: LivingTree) -> None:
    for line in explorer.shape():
        if line["id"] in explorer.engine.loop.lanes and line["start"] < line["end"]:
            explorer.read(line["id"], line["start"], line["end"])


def _content(explorer: LivingTree, shape: list[dict[str, Any]]) -> dict[str, Any]:
    """Tokens of each branch, each text once; readings and looks that its path still has."""
    rows, read, looks, texts = {}, {}, {}, dict[str, str]()
    for line in shape:
        number = line["id"]
        own = explorer.rows(number, line["start"], line["end"])
        texts |= own.pop("words")
        rows[str(number)] = own
        if number < 0 or number not in explorer.engine.loop.lanes:
            continue
        path = explorer.engine.handle(explorer.engine.loop.lanes[number]).tokens
        told = [block.to_json(explorer.engine.text) for block in explorer.readings.seen(number, path)]
        for each in told:
            texts |= each.pop("words")
        read[str(number)] = told
        for (branch, at), (known, look) in explorer.looked.items():
            if branch == number and at < len(path) and hash(tuple(path[: at + 2])) == known:
                texts |= look["words"]
                looks[f"{branch} {at}"] = {name: value for name, value in look.items() if name != "words"}
    return {"rows": rows, "read": read, "looks": looks, "words": texts}


# ---- plan ------------------------------------------------------------------------------------------------------------
# What rebuilds the tree: for each branch where it leaves its parent, its tokens, how they were generated, its edits; and the
# checks of the rows that were read.


@dataclass(frozen=True)
class _RowChecks:
    first: int
    count: int
    data: str
    """[count, sites] numbers of 8 bytes, as base64"""


@dataclass(frozen=True)
class _Planned:
    id: int
    parent: int | None
    start: int
    tokens: list[int]
    """from `start` on"""
    spans: list[tuple[int, int, dict[str, Any]]]
    edits: list[dict[str, Any]]
    checks: list[_RowChecks]


@dataclass(frozen=True)
class _Plan:
    format: int
    fingerprint: Fingerprint
    model: str
    prompt: int
    """number of prompt tokens"""
    sites: list[str]
    """whose rows were checked"""
    branches: list[_Planned]
    left_out: list[int]
    """branches that no plan rebuilds: released, rejected, or with hook functions or tokens of the fast path"""


def plan_of(explorer: LivingTree, shape: list[dict[str, Any]]) -> dict[str, Any]:
    """The plan as plain values."""
    lanes, made, left_out = explorer.engine.loop.lanes, list[dict[str, Any]](), list[int]()
    for line in shape:
        number = line["id"]
        lane = lanes.get(number)
        if lane is None or not lane.certified or line["status"] == "rejected" or line["parent"] in left_out:
            left_out += [number] * (number >= 0)
            continue
        path, start = list(lane.record.tokens), line["start"]
        parent = None if line["parent"] is None else lanes[line["parent"]]
        known = set() if parent is None else {edit.key for edit in parent.edits if edit.needs <= start}
        spans = explorer.spans.get(number, ())
        made.append(
            {
                "id": number,
                "parent": line["parent"],
                "start": start,
                "tokens": path[start:],
                "spans": [[a, b, how.to_json()] for a, b, how in spans],
                "edits": [edit.to_json() for edit in lane.edits if edit.key not in known],
                "checks": [
                    {"first": block.first, "count": len(block.checks), "data": packed(block.checks)}
                    for block in explorer.readings.seen(number, path)
                ],
            }
        )
    return {
        "format": FORMAT,
        "fingerprint": explorer.engine.fingerprint.parts(),
        "model": explorer.model,
        "prompt": explorer.root.root_length,
        "sites": list(explorer.readings.spec.sites),
        "branches": made,
        "left_out": left_out,
    }


@dataclass(frozen=True, eq=False)
class ReplayedPage:
    """What came of replaying a saved page."""

    branches: dict[int, Branch] = field(repr=False)
    """by their numbers on the page"""
    tokens: int
    """that were made again"""
    rows: int
    """whose bits were compared, one for each layer and token"""
    left_out: tuple[int, ...]
    """branches of the page that no plan rebuilds"""
    difference: str
    """the first token, or the first token and site, that differs; empty: everything is the same, bit for bit"""

    @property
    def same(self) -> bool:
        return not self.difference

    def __str__(self) -> str:
        if self.difference:
            return f"Not the same: {self.difference}"
        left = f" Left out: branches {', '.join(map(str, self.left_out))}." if self.left_out else ""
        return f"The same, bit for bit: {len(self.branches)} branches, {self.tokens} tokens, {self.rows} rows compared.{left}"

    __repr__ = __str__


@verb
def replay_page(path: str | Path, *, engine: Engine | None = None) -> ReplayedPage:
    """Rebuild the tree of a saved page, and compare tokens and rows with those that the page was made of.

    engine  with the same weights; None: the model that the page names is loaded

    Tokens are generated again where the page knows how they were, and forced elsewhere. FingerprintMismatch if the engine has
    other weights or another arithmetic. The branches stay open; `print` the result.
    """
    plan = read_plan(path)
    if engine is None:
        if not plan.model:
            raise BadRequest(f"{path} does not name its model. Give engine=, with weights {plan.fingerprint.weights[:12]}.")
        engine = Engine.load(plan.model)
    if differences := plan.fingerprint.differences(engine.fingerprint):
        raise FingerprintMismatch(f"{path} was made with another model or arithmetic: {'; '.join(differences)}.")
    made, tokens, rows, difference = dict[int, Branch](), 0, 0, ""
    for line in plan.branches:
        try:
            made[line.id] = branch = _rebuilt(engine, plan, line, made)
        except ReplayMismatch as mismatch:
            difference = re.sub(r"^Branch \d+", f"branch {line.id}", str(mismatch))
            break
        tokens += len(line.tokens)
        compared, difference = _compared(engine, plan, line, branch)
        rows += compared
        if difference:
            break
    return ReplayedPage(made, tokens, rows, tuple(plan.left_out), difference)


def read_plan(path: str | Path) -> _Plan:
    """The plan of a page; BadFile says what is wrong with it."""
    try:
        content = as_path("path", path).read_bytes()
    except OSError as error:
        raise BadFile(f"Cannot read {str(path)[:200]!r}: {error.strerror or error}.") from error
    found = _PLAN.search(content)
    if found is None:
        raise BadFile(f"{path} carries no plan. Give a page that Explorer.save or Tree.save of a live branch has written.")
    raw = parse(found[1], f"the plan of {path}", BadFile)
    if isinstance(raw, dict) and raw.get("format") != FORMAT:
        raise BadFile(f"{path} has a plan of format {raw.get('format')}. This version reads format {FORMAT}.")
    return build(_Plan, raw, f"the plan of {path}", BadFile)


def _rebuilt(engine: Engine, plan: _Plan, line: _Planned, made: Mapping[int, Branch]) -> Branch:
    edits = _placed(line)
    if line.parent is None:
        first, start = engine.prompt(line.tokens[: plan.prompt]), plan.prompt
        whole = line.tokens
    elif line.parent in made:
        first, start = made[line.parent], line.start
        whole = first.tokens[:start] + line.tokens
    else:
        raise BadFile(f"The plan's branch {line.id} comes before its parent {line.parent}.")
    if edits or line.parent is not None:
        branch = engine.handle(engine.lock.alone(engine.forest.fork, first.lane, start, edits))
    else:
        branch = first
    if line.parent is not None and not branch.record.root_length:
        raise BadFile(f"The plan's branch {line.id} has no prompt.")
    try:
        spans = [(max(a, branch.length), b, Sampling.from_json(how)) for a, b, how in line.spans if b > branch.length]
        regrow(branch, whole, spans)
    except BaseException:
        branch.release()
        raise
    return branch


def _placed(line: _Planned) -> tuple[PlacedEdit, ...]:
    try:
        return tuple(PlacedEdit.from_json(raw) for raw in line.edits)
    except (KeyError, TypeError, ValueError) as error:
        raise BadFile(f"An edit of the plan's branch {line.id} cannot be read: {error!r}.") from error


def _compared(engine: Engine, plan: _Plan, line: _Planned, branch: Branch) -> tuple[int, str]:
    """(rows that were compared, the first that differs in words)."""
    readings, count = RowReader(engine, None), 0
    for each in line.checks:
        try:
            then = np.frombuffer(base64.b64decode(each.data), dtype="<u8").reshape(each.count, len(plan.sites))
        except ValueError as error:
            raise BadFile(f"The checks of the plan's branch {line.id} cannot be read: {error}.") from error
        if not 0 <= each.first < each.first + each.count <= branch.length:
            raise BadFile(f"The checks of the plan's branch {line.id} are of positions that it does not have.")
        rows = readings.rows(branch.lane, each.first, each.first + each.count, plan.sites)
        now = checks_of([rows[site] for site in plan.sites])
        count += now.size
        for at, site in zip(*np.nonzero(now != then), strict=True):
            position = each.first + int(at)
            token = engine.text.token(branch.tokens[position])
            return count, f"branch {line.id}, position {position} ({token!r}): the row of {plan.sites[int(site)]} differs."
    return count, ""
