"""`python -m bench.mutants`: run the campaign, print a table, and exit with 1 if too many mutants survive."""

import argparse
import signal
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.mutants.campaign import LIMIT, NEEDED, Campaign, NotSound, Outcome, Result, good_enough
from bench.mutants.mutant import Mutant
from bench.mutants.table import MUTANTS

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None, mutants: Sequence[Mutant] = MUTANTS, root: Path = ROOT) -> int:
    """The exit status. 0: success. 1: too many survivors, or a mutant that cannot be tried. 2: tests fail without mutants."""
    given = _parse(arguments, mutants)
    if given.fresh:
        return _fresh(given.fresh, given.seed)
    chosen = [mutant for mutant in mutants if not given.only or mutant.name in given.only]
    if given.list:
        for mutant in chosen:
            print(f"{mutant.name:<40} {mutant.module.removeprefix('replaylens.'):<28} {mutant.breaks}")
        return 0
    try:
        results = Campaign(root, given.jobs, given.limit).run(chosen, _tell)
    except NotSound as error:
        print(error, file=sys.stderr)
        return 2
    _summarise(results)
    return 0 if good_enough(results) else 1


def _fresh(count: int, seed: int) -> int:
    """Try mutants that are drawn anew; see `bench.mutants.fresh`."""
    from bench.mutants.fresh import drawn, run

    found = drawn(count, seed)
    noticed = run(found)
    print(*(f"survived: {each}" for each in found if each not in noticed), sep="\n")
    print(f"{len(noticed)} of {len(found)} killed ({len(noticed) / len(found):.0%}; needed: {NEEDED:.0%})")
    return 0 if len(noticed) >= NEEDED * len(found) else 1


def _parse(arguments: Sequence[str] | None, mutants: Sequence[Mutant]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.mutants", description="Do the tests notice planted faults?")
    names = [mutant.name for mutant in mutants]
    parser.add_argument("--only", action="append", metavar="NAME", choices=names, help="this mutant; may be repeated")
    parser.add_argument("--jobs", type=int, default=1, help="copies of the tree that are worked on at a time")
    parser.add_argument("--limit", type=float, default=LIMIT, help="seconds for the tests of one mutant")
    parser.add_argument("--list", action="store_true", help="name the mutants and what they break, and run nothing")
    parser.add_argument(
        "--fresh", type=int, default=0, metavar="N", help="try N mutants that are drawn from the sources instead"
    )
    parser.add_argument("--seed", type=int, default=0, help="which mutants are drawn")
    return parser.parse_args(arguments)


def _tell(result: Result) -> None:
    mutant = result.mutant
    print(f"{mutant.name:<40} {result.outcome.value:<16} {result.seconds:6.1f} s  {result.detail}", flush=True)


def _summarise(results: Sequence[Result]) -> None:
    counts = Counter(result.outcome for result in results)
    killed = counts[Outcome.KILLED]
    print(f"\n{killed} of {len(results)} killed ({killed / len(results):.0%}; needed: {NEEDED:.0%})")
    for result in results:
        if result.outcome is not Outcome.KILLED:
            print(f"{result.outcome.value}: {result.mutant.name}: {result.mutant.breaks}")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # leave no copies and no processes behind
    sys.exit(main())
