"""`ReportPage`: a dump, its probe reports and results of the workbench as one HTML file to share."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup
from tqdm.auto import tqdm

from replaylens.dumps.reader import Dump
from replaylens.dumps.verify import MISMATCH, VERIFIED, Verification
from replaylens.engine.display import together
from replaylens.engine.errors import BadRequest
from replaylens.engine.files import require_own, write_file
from replaylens.engine.records import Citation, Identifier
from replaylens.engine.request.values import as_instance, as_list, output_path, verb
from replaylens.engine.terminal import hidden
from replaylens.probes.report import Report
from replaylens.views import boards, draw, examples, page
from replaylens.views import maps as heatmap
from replaylens.views import thoughts as thinking
from replaylens.views.data import Decode
from replaylens.views.examples import DumpedExample
from replaylens.views.html import asset, join, tag, void
from replaylens.views.maps import LensAverages, example_maps
from replaylens.views.pictures import Timeline
from replaylens.views.rollouts import RolloutTree, rollout_style
from replaylens.views.sections import (
    Reportable,
    better,
    checked,
    draw_opening,
    draw_probes,
    draw_results,
    finding,
    glossary,
    rank,
    word,
)
from replaylens.views.summary import fact_list


@dataclass(frozen=True)
class ReportPage:
    """A page about a dump, probe reports, results of the workbench, trees of rollouts, or several of these.

    verdict  verification of the dump; None: none was run, and the page says so
    decode   texts of tokens that occur only in the lens
    trees    maximum number of examples with a tree
    results  what `lens`, `patch`, `ablate`, `steer`, `attention` and attributions return, in the order of the page
    decoded  timelines of examples, which show how they were decoded
    check    the command that verifies the dump; default: for an embedded model
    layers   of a Thinking-States model: the blocks where states are added and thoughts are read; None: not known
    command  the command that makes the page again; default: none is known, because Python made it
    """

    dump: Dump | None = None
    probes: tuple[Report, ...] = ()
    verdict: Verification | None = None
    decode: Decode | None = None
    trees: int = page.MAX_TREES
    title: str = ""
    results: tuple[Reportable, ...] = ()
    rollouts: tuple[RolloutTree, ...] = ()
    decoded: tuple[Timeline, ...] = ()
    check: str = ""
    layers: tuple[int, int] | None = None
    command: str = ""

    def add(self, *results: Reportable) -> ReportPage:
        """The same page with more results at its end."""
        return replace(self, results=(*self.results, *results))

    def save(self, path: str | Path, progress: bool = False) -> Path:
        """Write the page, as a whole or not at all, over an older page only."""
        return write_file(page_file(path), self.html(progress), is_page)

    def html(self, progress: bool = False) -> str:
        """The page. Equal dumps, reports and verdicts give equal bytes."""
        sections, data, lead = ([], Markup(), []) if self.dump is None else _about_dump(self, self.dump, progress)
        if self.probes:
            digest = None if self.dump is None else self.dump.digest
            body = draw_probes(self.probes, digest)
            sections.insert(len(sections) - 1 if sections else 0, page.Section("probes", "Probes", body))
        if self.decoded:
            sections.append(page.Section("decoded", "How it was decoded", _decoded(self.decoded)))
        if self.dump is None and self.probes:
            sections.append(page.Section("found", "What was found", draw_opening(self.probes)))
        rows = [] if self.dump is None or self.dump.filters else [self.dump.cite()]
        results = checked(self.results)
        if cited := [*rows, *(each.cite() for each in (*self.probes, *results) if hasattr(each, "cite"))]:
            sections.append(page.Section("cite", "Cite", _cited(cited, self.command)))
        if results:
            sections.append(page.Section("results", "Results", draw_results(results)))
        if self.rollouts:
            sections.append(page.Section("rollouts", "Rollouts", join(tree.draw() for tree in self.rollouts)))
        if not sections:
            raise BadRequest("The page would be empty. Give a dump, probe reports, results or rollouts.")
        sections.sort(key=lambda section: rank(section.key))
        tasks = [self.dump.manifest.plan.task] if self.dump is not None else [p.source["task"] or "arrays" for p in self.probes]
        title = self.title or f"replaylens: {', '.join(dict.fromkeys(tasks)) or ('results' if results else 'rollouts')}"
        lead += [f"{p.kind}, {len(p.lines)} lines" for p in self.probes]
        lead += [f"{len(results)} result{'s' * (len(results) > 1)}"] if results else []
        lead += [repr(tree) for tree in self.rollouts]
        code, look = (asset("rollouts.js"), rollout_style()) if self.rollouts else ("", page.NO_STYLE)
        view = [str(Identifier(self.dump.digest))] if self.dump is not None and not rows else []
        source = together([*view, *(each.identifier for each in cited), *(tree.source for tree in self.rollouts)])
        about = [_first_sentence(self), "; ".join(lead), *([glossary()] if self.dump is not None or self.probes else [])]
        return page.assemble(title, about, sections, data, code=code, more_style=look, source=source)


def _first_sentence(wanted: ReportPage) -> str:
    """What a reader who knows nothing of the page may take away: its first finding, or else what it is about."""
    found = next(filter(None, map(finding, wanted.probes)), "")
    if found or wanted.dump is None:
        return found or "What a language model computes, layer by layer and token by token."
    count = len(wanted.dump.manifest.plan.examples)
    return f"What a language model computed at every token of {count} text{'s' * (count != 1)}, and which drafts it rejected."


@verb
def report(
    path: str | Path,
    *,
    results: Sequence[Reportable] = (),
    dump: Dump | str | Path | None = None,
    probes: Report | str | Path | Sequence[Any] = (),
    title: str = "",
) -> Path:
    """Write results of the workbench, with a dump and probe reports if given, as one self-contained page.

    results  what `lens`, `patch`, `path_patch`, `ablate`, `steer`, `attention` and attributions return
    dump     also the path of one
    probes   reports or their paths, one or several

    >>> import tempfile
    >>> from replaylens import Engine, attention, lens, report
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is heads. Alice flips. What's the state? A:"
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = report(f"{folder}/page.html", results=[lens(engine, text), attention(engine, text, layers=[1])])
    ...     page.read_text().count("<svg")
    2
    """
    shown = Dump.open(dump) if isinstance(dump, str | Path) else dump
    if shown is not None:
        as_instance("dump", shown, Dump, "a dump, or its path")
    return ReportPage(shown, _reports(probes), title=title, results=checked(results)).save(path)


def _reports(given: Any) -> tuple[Report, ...]:
    """Probe reports, given as they are or by their paths, one or several. BadRequest for what is none."""
    wanted = "probe reports or their paths, one or several"
    every = [given] if isinstance(given, Report | str | Path) else as_list("probes", given, wanted)
    found = (Report.load(each) if isinstance(each, str | Path) else each for each in every)
    return tuple(as_instance("probes", each, Report, wanted) for each in found)


def page_file(path: str | Path) -> Path:
    """The path to write a page to; BadRequest for a folder, a path that cannot be written, and a file that is not ours."""
    target = output_path(path)
    if not target.name or target.is_dir():
        raise BadRequest(f"{path} is a folder. Name the file to write, such as {target / 'report.html'}.")
    require_own(target, is_page)
    return target


def is_page(content: bytes) -> bool:
    """Whether a file is one of our pages."""
    return f'content="{page.MADE_BY}'.encode() in content[:4096]


def _about_dump(wanted: ReportPage, dump: Dump, progress: bool) -> tuple[list[page.Section], Markup, list[str]]:
    """(sections, data for the script, parts of the page's first line) for a dump."""
    plan, manifest = dump.manifest.plan, dump.manifest
    seen = _Seen()
    found = examples.examples(dump, wanted.decode, layers=wanted.layers)
    counted = tqdm(found, total=len(plan.examples), unit="example", desc="report", disable=hidden(progress))
    blocks = page.packed_blocks(seen.fragments(counted, wanted.trees))
    sections = [
        page.Section("found", "What was found", draw_opening(wanted.probes, seen.told(), seen.example)),
        page.Section("overview", "Overview", _overview(dump, seen)),
        page.Section("certificate", "Determinism certificate", _certificate(dump, wanted)),
        page.Section("examples", "Examples", _explorer(len(seen.rows), min(wanted.trees, len(seen.rows)))),
        page.Section("lens", "Logit lens by layer", _lens(seen.averages)),
    ]
    lead = [f"{plan.task}, {len(plan.examples)} examples, {manifest.rows} rows", f"dump {manifest.digest[:16]}"]
    return sections, join([page.json_block("rl-rows", seen.rows), blocks]), lead


def _overview(dump: Dump, seen: _Seen) -> Markup:
    plan, manifest = dump.manifest.plan, dump.manifest
    scored = [row.right for row in seen.rows if row.right is not None]
    letters = [join([word(x), f": {len(manifest.letter(x))} tensors "]) for x in "STCZ" if manifest.letter(x)]
    facts: dict[str, str | int | float] = {
        "task": plan.task,
        "settings": json.dumps(plan.cited_knobs),
        "examples": len(seen.rows),
        "right answers": f"{sum(scored)} ({sum(scored) / len(scored):.1%})" if scored else "none",
        "rows": f"{manifest.rows}, {manifest.accepted_rows} of them on accepted paths",
        "rejected branches": sum(row.rejected for row in seen.rows),
        "drafter": f"{plan.drafter}, window {plan.window or 'chosen by timing'}",
        "captured": join(letters),
        "labels": ", ".join(manifest.labels),
    }
    return fact_list(facts)


def _decoded(timelines: tuple[Timeline, ...]) -> Markup:
    """Timelines to step through."""
    about = (
        "A drafter proposes tokens (yellow). One canonical pass over them decides: what it agrees with is accepted (green), "
        "the rest is rolled back (red) with its KV. The verifier's own last token is pending (checkered). Grey: other "
        "requests, checkered where they decode in the same round."
    )
    steps = (boards.stepper(told.frames, told.title) for told in timelines)
    return join([tag("p", about, class_="rl-quiet"), *steps])


def _certificate(dump: Dump, wanted: ReportPage) -> Markup:
    manifest = dump.manifest
    facts: dict[str, str | int | float] = {
        "digest": tag("code", manifest.digest),
        "accepted rows": join([tag("code", manifest.accepted_digest), " (the same for every drafter)"]),
        "fingerprint": tag("code", manifest.fingerprint.digest),
    }
    facts |= {f"· {name}": tag("code", value) for name, value in manifest.fingerprint.parts().items()}
    promise = (
        "Every row of this dump is a function of weights, token path and edits alone, bit for bit, under the fingerprint "
        "below. The digest names all of its content."
    )
    command = wanted.check or f"replaylens verify {shlex.quote(dump.url)} --all"
    again = manifest.plan.check_in_python(dump.url) or command
    check = tag("p", "Check it, where this page was made: ", tag("code", again, id="rl-check"))
    return join([_verdict(wanted.verdict), tag("p", promise), fact_list(facts), check])


def _cited(given: Sequence[Citation], command: str) -> Markup:
    """Citations of what the page shows, and the line that reproduces the page."""
    parts = []
    for each in given:
        bibtex = tag("details", tag("summary", "BibTeX"), tag("pre", each.bibtex))
        parts.append(tag("div", tag("p", each.text), bibtex))
    again = [tag("p", "Make this page again: ", tag("code", command, id="rl-again"))] if command else []
    return join([*parts, *again])


def _verdict(verdict: Verification | None) -> Markup:
    """The result of the verification, including skipped checks."""
    if verdict is None:
        return tag("p", "Not replayed when this page was made.", class_="rl-verdict", data_status="none")
    mark = {VERIFIED: "✓", MISMATCH: "✗"}.get(verdict.status, "–")
    lines = str(verdict).splitlines()
    rest = [tag("p", line, class_="rl-quiet") for line in lines[1:]]
    return tag("div", tag("b", f"{mark} {lines[0]}"), *rest, class_="rl-verdict", data_status=verdict.status)


def _lens(averages: LensAverages) -> Markup:
    maps = averages.maps()
    if not maps:
        return tag("p", "This dump holds no Z. Dump with sites STCZ to see the lens.", class_="rl-quiet")
    return join(map(heatmap.draw, maps))


def _explorer(count: int, trees: int) -> Markup:
    """The table of examples and the place for the selected one; the page's script fills both."""
    search = void("input", type="search", id="rl-search", placeholder="search in prompts and answers", aria_label="search")
    kinds = {"all": "all", "right": "right", "wrong": "wrong", "rejected": "with rejected branches"}
    chosen = tag("select", *(tag("option", text, value=key) for key, text in kinds.items()), id="rl-kind", aria_label="show")
    pager = [tag("button", text, type="button", id=f"rl-{text}") for text in ("previous", "next")]
    shown = tag("span", id="rl-shown", class_="rl-quiet")
    names = {"example": "rl-number", "prompt": "", "generated": "", "answer": "", "right": "", "rejected": "rl-number"}
    head = tag("tr", *(tag("th", name, class_=look or None) for name, look in names.items()))
    table = tag("table", tag("thead", head), tag("tbody", id="rl-table"), class_="rl-examples")
    note = [] if trees == count else [tag("p", f"The first {trees} of {count} examples have a tree.", class_="rl-quiet")]
    bar = tag("div", search, chosen, *pager, shown, class_="rl-steps")
    return join([bar, tag("div", table, class_="rl-scroll"), *note, tag("div", id="rl-explorer", aria_live="polite")])


class TableRow(NamedTuple):
    """One line of the page's table, in the order that its script reads."""

    example: int
    prompt: str
    generated: str
    answer: str
    right: bool | None
    """None: a given text, which has no right answer"""
    rejected: int
    """number of rejected branches"""


class _Seen:
    """Collects the table and the lens averages in one pass over the examples."""

    def __init__(self) -> None:
        self.rows: list[TableRow] = []
        self.averages = LensAverages()
        self.example: DumpedExample | None = None
        """the one that the page opens with"""

    def told(self) -> str:
        """What was replayed, in words."""
        scored = [row.right for row in self.rows if row.right is not None]
        right = f", {sum(scored) / len(scored):.0%} answered right" if scored else ""
        rejected = sum(row.rejected for row in self.rows)
        return f"{len(self.rows)} examples{right}, with {rejected} rejected branch{'es' if rejected != 1 else ''}."

    def fragments(self, found: Iterator[DumpedExample], most: int) -> Iterator[str]:
        """Mutates: add table rows and averages; yields the pictures of the first `most` examples."""
        for example in found:
            self.averages.add(example)
            self.example = better(self.example, example)
            texts = example.prompt, example.generated, example.answer
            self.rows.append(TableRow(example.index, *texts, example.correct, example.num_rejected))
            if len(self.rows) <= most:
                yield _example(example)


def _example(example: DumpedExample) -> Markup:
    """Thoughts, tree and lens of one example, if the dump holds them. The lens starts where the answer does."""
    prompt, answer = example_maps(example.tree.trunk.tokens)
    thoughts = [thinking.draw(example.thinking)] if example.thinking else []
    lens = [heatmap.draw(answer)] if answer else []
    if prompt:
        lens.append(tag("details", tag("summary", "Lens of the prompt"), heatmap.draw(prompt)))
    return join([*thoughts, draw.draw_tree(example.tree), *lens])
