"""`replaylens tasks`: list tasks, and show examples with labels under their tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, fields
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from replaylens import tasks
from replaylens.commands.options import complete_task
from replaylens.commands.reporting import Command, reporting
from replaylens.engine.machine import EXAMPLE_BYTES, require_room
from replaylens.tasks.conformance import BrokenPromise
from replaylens.tasks.errors import TaskError, unknown
from replaylens.tasks.reading import NEXT_ACTION
from replaylens.tasks.task import AnyTask, Example
from replaylens.tasks.tokenizer import WordTokenizer

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON.")]
KnobOption = Annotated[list[str] | None, typer.Option("--knob", help="A task setting, key=value; can be repeated.")]

TaskArgument = Annotated[
    str,
    typer.Argument(
        help="A task's name (see `replaylens tasks list`), module:Class or file.py:Class.", autocompletion=complete_task
    ),
]

app = typer.Typer(help="Tasks with exact ground truth: list them, show examples, check a new one.", no_args_is_help=True)


@app.command("list", cls=Command)
def list_tasks(as_json: JsonOption = False) -> None:
    """List every task with its knobs, their defaults and meanings."""
    if as_json:
        typer.echo(json.dumps([_about(name) for name in tasks.names()], indent=1))
        return
    console = Console()
    for name in tasks.names():
        try:
            task = tasks.get(name)
        except TaskError as error:  # a broken plugin must not hide the others
            console.print(Text.assemble((name, "bold"), f"  {type(error).__name__}: {error}"))
            continue
        console.print(f"[bold]{name}[/bold]  {task.description}")
        table = Table(box=None, show_header=False, padding=(0, 2))
        for spec in sorted(fields(task.knobs_class), key=lambda spec: spec.name == "seed"):
            table.add_row(f"  {spec.name}", _shown(spec.default), spec.metadata["help"])
        console.print(table)


def _about(name: str) -> dict[str, Any]:
    """One task for --json."""
    try:
        task = tasks.get(name)
    except TaskError as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"}
    knobs = {spec.name: {"default": spec.default, "help": spec.metadata["help"]} for spec in fields(task.knobs_class)}
    return {"name": name, "description": task.description, "knobs": knobs, "labels": task().label_names}


@app.command(cls=Command)
def show(
    name: TaskArgument,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of examples.")] = 3,
    knob: KnobOption = None,
    labels: Annotated[str | None, typer.Option(help="Labels to show, separated by commas; or 'all'.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show examples of a task, with labels aligned under the tokens."""
    with reporting():
        require_room(f"n={n}", memory=n * EXAMPLE_BYTES)
        task = tasks.load(name)(**settings(knob))
        wanted = _wanted(task, labels)
        examples = task.examples(n)
    tokenizer = WordTokenizer(task.vocabulary())
    if as_json:
        typer.echo(json.dumps([_record(example, tokenizer, wanted) for example in examples], indent=1))
        return
    console = Console(highlight=False)
    for example in examples:
        console.print(f"[bold]{task.name} {example.index}[/bold]  answer:{example.answer}  root {example.root}")
        for line in _aligned(example, tokenizer, wanted, console.width):
            console.print(line, no_wrap=True, overflow="ellipsis")


@app.command(cls=Command)
def check(
    name: TaskArgument,
    n: Annotated[int, typer.Option("--n", min=2, help="Number of examples.")] = 200,
    knob: KnobOption = None,
    as_json: JsonOption = False,
) -> None:
    """Check that a task keeps the promises of its labels. Exit codes: 0 all kept, 1 one is broken."""
    with reporting():
        require_room(f"n={n}", memory=n * EXAMPLE_BYTES)
        task = tasks.load(name)(**settings(knob))
    tell_promises(tasks.check(task, n), as_json)


def tell_promises(found: Sequence[BrokenPromise], as_json: bool) -> None:
    """Print what is kept, what is broken and what was not run; exits with 1 if one is broken."""
    if as_json:
        facts = [
            {"promise": each.promise, "kept": each.kept, "problem": each.problem}
            | ({"not_run": each.not_run} if each.not_run else {})
            for each in found
        ]
        typer.echo(json.dumps(facts, indent=1))
    else:
        console = Console(highlight=False)
        for each in found:
            if each.not_run:
                console.print(Text.assemble(("not run: ", "yellow"), f"{each.promise}, because {each.not_run}"), soft_wrap=True)
                continue
            word = ("kept    ", "green") if each.kept else ("broken  ", "bold red")
            console.print(
                Text.assemble(word, each.promise, f"\n        {each.problem}" if each.problem else ""), soft_wrap=True
            )
    if any(each.problem for each in found):
        raise typer.Exit(1)


def settings(given: list[str] | None) -> dict[str, Any]:
    """The given knobs by name; TaskError for a knob without a value, or given twice."""
    found: dict[str, Any] = {}
    for each in given or []:
        name, value = _setting(each)
        if name in found:
            raise TaskError(f"--knob {name} is given twice: {_shown(found[name])} and {_shown(value)}. Give it once.")
        found[name] = value
    return found


def _setting(given: str) -> tuple[str, Any]:
    key, equals, value = given.partition("=")
    if not equals:
        raise TaskError(f"Invalid --knob {given!r}. Give key=value.")
    parts = [_value(part) for part in value.split(",")]
    return key.strip(), parts[0] if len(parts) == 1 else tuple(parts)


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip()


def _shown(default: Any) -> str:
    return ",".join(str(part) for part in default) if isinstance(default, tuple) else str(default)


def _wanted(task: AnyTask, labels: str | None) -> list[str]:
    if labels is None:
        return list(dict.fromkeys((task.state_label, *task.claims, NEXT_ACTION)))
    if labels == "all":
        return list(task.label_names)
    wanted = [label.strip() for label in labels.split(",")]
    for label in wanted:
        if label not in task.label_names:
            raise TaskError(unknown("label", label, task.label_names))
    return wanted


def _record(example: Example, tokenizer: WordTokenizer, wanted: list[str]) -> dict[str, Any]:
    ids, offsets = tokenizer.encode_with_offsets(example.text)
    return {
        "task": example.task,
        "knobs": json.loads(example.knobs),
        "index": example.index,
        "root": example.root,
        "digest": example.digest,
        "prompt": example.prompt,
        "completion": example.completion,
        "answer": example.answer,
        "events": [asdict(event) for event in example.events],
        "tokens": [tokenizer.token(token) for token in ids],
        "offsets": offsets,
        "labels": example.labels_at(offsets, wanted),
    }


def _aligned(example: Example, tokenizer: WordTokenizer, wanted: list[str], width: int) -> Iterator[Text]:
    """Lines of tokens that fit the width, each with one line per label below it."""
    ids, offsets = tokenizer.encode_with_offsets(example.text)
    labels = example.labels_at(offsets, wanted)
    rows = {"": [tokenizer.token(token).strip() for token in ids]}
    rows |= {name: ["-" if value is None else str(value) for value in labels[name]] for name in wanted}
    margin = max(map(len, rows)) + 2
    widths = [max(len(row[place]) for row in rows.values()) + 1 for place in range(len(ids))]
    for start, stop in _lines(widths, width - margin):
        for name, row in rows.items():
            cells = "".join(row[place].ljust(widths[place]) for place in range(start, stop))
            yield Text.assemble((name.ljust(margin), "dim"), (cells.rstrip(), "" if name else "bold"))
        yield Text()


def _lines(widths: list[int], room: int) -> Iterator[tuple[int, int]]:
    """Split columns into lines [start, stop) that fit the room; a wider column gets its own line."""
    start = used = 0
    for place, width in enumerate(widths):
        if used + width > room and place > start:
            yield start, place
            start, used = place, 0
        used += width
    yield start, len(widths)
