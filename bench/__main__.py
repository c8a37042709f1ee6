"""`python -m bench list`, `run NAME... [--quick] [--out FILE] [--set PARAMETER=JSON]`, `page`, and `gpus`."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.harness import CASES, Case, chosen, refuse_missing, run

TOPICS = (
    "generation", "hostwork", "loading", "dump", "feed", "workbench", "probes", "engine_gpu",
    "hybrids_ranks_gpu", "baselines", "long", "resampling", "kernels", "natural", "natural_pages",
    "thinking", "thinking_tables",
)  # fmt: skip
"""modules that declare cases"""


def declared() -> None:
    """Import every topic, so that its cases are in `CASES`."""
    for topic in TOPICS:
        import_module(f"bench.{topic}")


def listed() -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("case", "needs", "clock", "arms (ours first, then the baseline)", "aim", "what it measures", box=None)
    for made in CASES.values():
        table.add_row(made.name, made.needs, made.clock, " | ".join(made.arms), made.aim, made.about.partition(". ")[0])
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list", help="every case, with what it needs and measures")
    command = commands.add_parser("run", help="measure cases, each file's in a process of its own")
    command.add_argument("names", nargs="+", metavar="NAME", help="a case, or a file with all its parts")
    command.add_argument("--quick", action="store_true", help="small sizes and one round: shows that everything runs")
    command.add_argument("--out", type=Path, metavar="FILE", help="default: bench/results/NAME.json; --quick writes none there")
    command.add_argument("--set", action="append", default=[], metavar="PARAMETER=JSON", help="another value of a parameter")
    commands.add_parser(
        "page", help="write the pages with the numbers of the result files: docs/performance.md and parts of others"
    )
    commands.add_parser("gpus", add_help=False, help="shared memory of every kernel in every tile, compiled for GPUs elsewhere")
    given, rest = parser.parse_known_args(words)
    if given.command == "gpus":
        os.environ["TRITON_INTERPRET"] = "0"  # before anything imports Triton
        from bench import gpus

        raise SystemExit(gpus.main(rest))
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if given.command == "page":
        from bench import page

        print("\n".join(page.write()) or "every page has the numbers of the result files")
        return
    declared()
    if given.command == "list":
        listed()
        return
    cases = chosen(given.names)
    others = dict(_assigned(each) for each in given.set)
    known = {made.name: made.parameters(given.quick) for made in cases}
    if unknown := set(others) - {name for parameters in known.values() for name in parameters}:
        raise SystemExit(f"{', '.join(known)}: no parameter {', '.join(sorted(unknown))}")
    mine = {made: {name: value for name, value in others.items() if name in parameters} for made, parameters in known.items()}
    for made in cases:
        refuse_missing(made, {**known[made.name], **mine[made.name]})
    files = dict.fromkeys(made.file for made in cases)
    if len(files) == 1:
        failed = [made.name for made in cases if not run(made, given.quick, given.out, mine[made.name])]
    else:  # so that none warms up the next
        options = ["--quick"] * given.quick + ([] if given.out is None else ["--out", str(given.out)])
        failed = [file for file in files if _process([made for made in cases if made.file == file], options, given.set)]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def _assigned(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        found = json.loads(value)
    except json.JSONDecodeError:
        found = value  # a word
    return name, tuple(found) if isinstance(found, list) else found


def _process(cases: Sequence[Case], options: list[str], assigned: list[str]) -> int:
    """Run cases in a process of their own, with those of the parameters that they have."""
    known = {name for made in cases for name in made.parameters(False)}
    options = options + [word for each in assigned if each.partition("=")[0] in known for word in ("--set", each)]
    names = [made.name for made in cases]
    return subprocess.run([sys.executable, "-m", "bench", "run", *names, *options], check=False).returncode


if __name__ == "__main__":
    main()
