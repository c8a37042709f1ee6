"""`replaylens replay`: examples of a task, with the rejected drafts, on the terminal."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from replaylens import tasks
from replaylens.commands.options import (
    MODEL,
    BatchOption,
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    MaxNewOption,
    ModelOption,
    QuietOption,
    SeedOption,
    TaskOption,
    TemperatureOption,
    WindowOption,
    check_drafter,
)
from replaylens.commands.reporting import reporting
from replaylens.commands.tasks import JsonOption, KnobOption, settings
from replaylens.engine.errors import BadRequest
from replaylens.engine.machine import EXAMPLE_BYTES, require_room

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
    from replaylens.replay.replayer import Result
    from replaylens.thinking.thoughts import Thoughts


def replay(
    task: TaskOption = "coin",
    n: Annotated[int, typer.Option("--n", min=1, help="Number of examples.")] = 3,
    model: ModelOption = MODEL,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    drafter: DrafterOption = "lens",
    draft_model: DraftModelOption = None,
    window: WindowOption = None,
    knob: KnobOption = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    max_new: MaxNewOption = None,
    batch: BatchOption = 32,
    board: Annotated[
        str | None, typer.Option(help="An SVG file to write: how one of the examples was decoded, verified and rolled back.")
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Replay examples of a task: the text with rejected drafts in brackets; --board draws how one was decoded.

    The prompt is blue, what the model wrote is green. A red bracket is a rejected draft; it follows the token that was
    committed in its place.
    """
    from replaylens.engine.display import is_stamped
    from replaylens.engine.engine import Engine
    from replaylens.engine.files import write_file
    from replaylens.engine.request.sampling import Sampling
    from replaylens.replay.run import Run

    with reporting():
        check_drafter(model, drafter, draft_model)
        target = None if board is None else board_file(board)
        require_room(f"n={n}", memory=n * EXAMPLE_BYTES)
        engine = Engine.load(model, device=device, dtype=dtype, draft_model=draft_model, record=target is not None)
        examples = tasks.load(task)(**settings(knob)).examples(n)
        run = engine.replay(
            examples,
            drafter=drafter,
            window=window,
            sampling=Sampling(temperature=temperature, seed=seed),
            max_new=max_new,
            batch=batch,
            sites=[engine.sites.per_layer("S")[-1]],  # so that rejected drafts are kept
            progress=not quiet,
        )
        assert isinstance(run, Run)
        if target is not None:
            told = run.most_telling()
            write_file(target, told.board(), is_stamped)
    if as_json:
        shown = {"accuracy": run.accuracy, "acceptance": None if run.acceptance != run.acceptance else run.acceptance}
        typer.echo(json.dumps({**shown, "examples": [_record(engine, result) for result in run]}, indent=1))
        return
    console = Console(highlight=False)
    for number, result in enumerate(run):
        console.print(_coloured(engine, result), soft_wrap=True)
        if result.thoughts is not None:
            console.print(Text(str(run.picture(number))), soft_wrap=True)
    console.print(f"{len(run)} examples, {run.accuracy:.1%} correct, {run.drafting}")
    if target is not None:
        console.print(f"{target}: {told.title}", soft_wrap=True)


def board_file(path: str) -> Path:
    """The path to write a board to; BadRequest unless it names an SVG file that can be written, in a folder that exists, and
    that is a board or new."""
    from replaylens.engine.display import is_stamped
    from replaylens.engine.files import require_own
    from replaylens.engine.request.values import output_path

    target = output_path(path)
    if target.suffix != ".svg" or target.is_dir() or not target.parent.is_dir():
        raise BadRequest(f"Cannot write a board to {path}. Name an SVG file in an existing folder, such as board.svg.")
    require_own(target, is_stamped)
    return target


def _record(engine: Engine, result: Result) -> dict[str, Any]:
    """One example for --json."""
    return {
        "index": result.example.index,
        "prompt": result.example.prompt,
        "answer": result.example.answer,
        "generated": engine.text.decode(result.tokens[result.num_prompt :]),
        "correct": result.correct,
        "finish_reason": result.finish_reason,
        "tokens": result.tokens,
        "num_prompt": result.num_prompt,
        "rejected": [
            {"position": path.fork_position, "text": engine.text.decode(path.tokens[path.fork_position :])}
            for path in result.rejected
        ],
        "statistics": asdict(result.statistics),
    } | ({} if result.thoughts is None else {"thoughts": _thoughts(engine, result.thoughts)})


def _thoughts(engine: Engine, thoughts: Thoughts) -> list[dict[str, Any]]:
    """The thoughts of a Thinking-States model, by chunk, for --json."""
    said = [{"tokens": list(t.tokens), "thought": engine.text.decode(t.tokens)} for t in thoughts.chunks]
    return [{"chunk": number, **each} for number, each in enumerate(said)]


def _coloured(engine: Engine, result: Result) -> Text:
    """Prompt in blue, accepted tokens in green, rejected drafts in red at their fork position."""
    prompt = engine.text.decode(result.tokens[: result.num_prompt])
    line = Text.assemble((f"[{result.example.index}] ", "bold"), (prompt, "blue"))
    for position in range(result.num_prompt, len(result.tokens)):
        line.append(engine.text.token(result.tokens[position]), "green")
        for path in result.rejected:
            if path.fork_position == position:
                line.append(f" ({engine.text.decode(path.tokens[position:]).strip() or 'end'})", "red strike")
    return line.append(f"  {'right' if result.correct else 'wrong'}", "bold" if result.correct else "dim")
