"""`replaylens verify` and `diff`: is a dump what it says, and are two dumps the same?

Exit codes: 0 yes, 1 a mismatch was found, 2 bad input or a damaged manifest, 3 out of reach.
"""

import json
from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from replaylens.commands.engines import (
    MODEL,
    DeviceOption,
    FeaturesOption,
    MakerOption,
    encoders,
    engine_that_made,
    unknown_maker,
)
from replaylens.commands.replay_options import BatchOption, QuietOption
from replaylens.commands.reporting import reporting
from replaylens.commands.task_options import DumpTaskOption, know_task
from replaylens.commands.tasks import JsonOption
from replaylens.engine.dump.diff import diff as diff_dumps
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.verify import OTHER, VERIFIED
from replaylens.engine.dump.verify import verify as verify_dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest


def verify(
    path: Annotated[str, typer.Argument(help="A dump's folder.")],
    model: MakerOption = None,
    device: DeviceOption = "cpu",
    sample: Annotated[str, typer.Option(help="Share of the examples to replay: 0.01, or 1%.")] = "0.01",
    every: Annotated[bool, typer.Option("--all", help="Replay every example.")] = False,
    task: DumpTaskOption = None,
    features: FeaturesOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample.")] = 0,
    batch: BatchOption = 32,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check a dump's hashes, then replay a sample of its examples and compare every bit."""
    with reporting():
        share: float | str = "all" if every else _share(sample)
        know_task(task, path)
        dump = Dump.open(path, check_files=False)
        maker = engine_that_made(dump, device) if model is None else Engine.load(model, device=device)
        engine = maker or Engine.load(MODEL, device=device)  # any engine can check the files
        how: dict[str, Any] = {"sample": share, "seed": seed, "batch": batch, "features": encoders(features)}
        verdict = verify_dump(path, engine, progress=not quiet, **how)
        if verdict.status == OTHER and maker is None:
            verdict = replace(verdict, notes=(f"{unknown_maker(Dump.open(path, check_files=False))}.",))
    typer.echo(json.dumps(asdict(verdict), indent=1) if as_json else str(verdict))
    raise typer.Exit({VERIFIED: 0, OTHER: 2}.get(verdict.status, 1))


def _share(given: str) -> float:
    try:
        return 1.0 if given == "all" else float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        raise BadRequest(f"Invalid --sample {given}. Give a share such as 0.01 or 1%, or all.") from None


def diff(
    a: Annotated[str, typer.Argument(help="A dump's folder.")],
    b: Annotated[str, typer.Argument(help="Another dump's folder.")],
    accepted: Annotated[bool, typer.Option("--accepted", help="Ignore rejected branches.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the first row, site and layer at which two dumps differ. Exit codes: 0 same content, 1 different, 2 damaged,
    3 out of reach."""
    with reporting():
        found = diff_dumps(a, b, accepted=accepted, progress=not quiet)
    typer.echo(json.dumps({"same": bool(found), **asdict(found)}, indent=1) if as_json else str(found))
    raise typer.Exit(0 if found else 1)
