"""`replaylens report`: a dump and its probe reports as one HTML file.

Exit codes: 0 done, 1 the verification found a mismatch (the page is written and says so), 2 bad input, 3 the dump's store is
out of reach, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylens.commands.options import (
    DumpTaskOption,
    FeaturesOption,
    MakerDtypeOption,
    MakerOption,
    QuietOption,
    encoders,
    engine_for,
    know_task,
    unknown_maker,
    verify_command,
)
from replaylens.commands.reporting import refuse_idle, reporting
from replaylens.commands.tasks import JsonOption
from replaylens.engine.errors import BadRequest
from replaylens.engine.machine import in_bytes

if TYPE_CHECKING:
    from replaylens.dumps.reader import Dump
    from replaylens.dumps.verify import Verification
    from replaylens.engine.engine import Engine
    from replaylens.probes.report import Report

SHARE = 0.01
"""of the examples that are replayed by default"""
TREES = 300
"""as in `views.page`, which needs torch"""


def report(
    sources: Annotated[list[str], typer.Argument(help="A dump's folder, probe reports, or both.")],
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("report.html"),
    model: MakerOption = None,
    task: DumpTaskOption = None,
    features: FeaturesOption = None,
    device: Annotated[str, typer.Option(help="Device of the replay: cpu or cuda.")] = "cpu",
    dtype: MakerDtypeOption = None,
    verify: Annotated[float, typer.Option(min=0, max=1, help="Share of the examples to replay; 0: none.")] = SHARE,
    trees: Annotated[int, typer.Option(min=0, help="Maximum number of examples with a tree.")] = TREES,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "",
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Write one self-contained page: examples, trees, lens, probes, and the result of a verification."""
    from replaylens.dumps.verify import MISMATCH
    from replaylens.engine.display import word
    from replaylens.views.report import ReportPage, page_file  # needs pandas

    with reporting():
        page_file(out)
        dump, probes = _open(sources)
        if dump is None:
            of_dump = ["model", "task", "features", "device", "dtype", "verify", "trees"]
            refuse_idle(of_dump, "without a dump. Name the folder of one")
        if not verify:
            refuse_idle(["features"], "with --verify 0: they are for the replay. Give another share")
        if dump is not None:
            know_task(task, dump)
        engine = None
        if dump is not None:
            engine = engine_for(dump, model, device, dtype)
        verdict = None if dump is None else _verify(dump, engine, verify, features, quiet)
        decode = (lambda token: word(engine.text, token)) if engine is not None else None
        check = "" if dump is None else verify_command(dump.url, model, task, device, features, dtype)
        layers = None if engine is None or engine.plain else engine.thinking.layers  # type: ignore[attr-defined]
        given: dict[str, Any] = {"--model": model, "--task": task, "--title": title, "--features": features}
        given |= {"--device": device * (device != "cpu"), "--dtype": dtype, "--verify": str(verify) * (verify != SHARE)}
        again = _again(sources, out, given | {"--trees": str(trees) * (trees != TREES)})
        page = ReportPage(dump, probes, verdict, decode, trees, title, check=check, layers=layers, command=again)
        written = page.save(out, progress=not quiet)
    found, count = "not replayed" if verdict is None else verdict.status, written.stat().st_size
    if as_json:
        typer.echo(json.dumps({"path": str(written), "bytes": count, "verdict": None if verdict is None else asdict(verdict)}))
    else:
        typer.echo(f"{written}: {in_bytes(count)}; {found}")
    if verdict is not None and verdict.status == MISMATCH:
        raise typer.Exit(1)


def _again(sources: list[str], out: Path, options: dict[str, Any]) -> str:
    """The command that makes the page, to paste into a shell."""
    words = ["replaylens", "report", *sources, "--out", str(out)]
    for name, value in options.items():
        for each in [value] if isinstance(value, str) else value or ():
            words += [name, each] if each else []
    return shlex.join(words).encode(errors="replace").decode()  # a shell hands over bytes that are no text, too


def _open(sources: list[str]) -> tuple[Dump | None, tuple[Report, ...]]:
    """Sort the sources: a file, or a folder with a report, is a probe report; anything else must be a dump."""
    from replaylens.dumps.reader import Dump
    from replaylens.probes.report import FILE, Report

    probes = [source for source in sources if Path(source).is_file() or (Path(source) / FILE).is_file()]
    dumps = [source for source in sources if source not in probes]
    if gone := [source for source in dumps if "://" not in source and not Path(source).exists()]:
        raise BadRequest(f"{gone[0]} does not exist. Give a dump's folder, or a probe report's.")
    if len(dumps) > 1:
        raise BadRequest(f"Several dumps given: {', '.join(dumps)}. Make one page per dump; a probe report has a {FILE}.")
    return (Dump.open(dumps[0], check=False) if dumps else None), tuple(map(Report.load, probes))


def _verify(dump: Dump, engine: Engine | None, share: float, features: list[str] | None, quiet: bool) -> Verification | None:
    from replaylens.dumps.verify import verify as verify_dump

    if not share:
        return None
    if engine is None:
        raise BadRequest(f"{unknown_maker(dump)}, or skip the replay with --verify 0.")
    return verify_dump(dump.url, engine, sample=share, features=encoders(features), progress=not quiet)
