"""`python -m bench.studies list`, and `python -m bench.studies NAME [PART ...]` with the options below."""

import argparse
import shlex
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from bench.studies.common import HERE, Place, execute, save_figure

STUDIES = ("rejected_branches", "state_tracking", "what_decides", "reproduce")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.studies", description=__doc__)
    parser.add_argument("name", choices=("list", *STUDIES))
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all parts of the study")
    parser.add_argument("--quick", action="store_true", help="small sizes, which show that everything runs; no result")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", default=Place.weights, help="default: %(default)s")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: bench/studies/; --quick writes nothing there")
    parser.add_argument("--draw", action="store_true", help="only draw the figure of the recorded parts again")
    given = parser.parse_args(words)
    if given.name == "list":
        for name in STUDIES:
            study = import_module(f"bench.studies.{name}")
            print(f"{name}: {(study.__doc__ or '').splitlines()[0]} Parts: {_listed(study.PARTS)}.")
        return
    known = import_module(f"bench.studies.{given.name}").PARTS
    if unknown := set(given.parts) - set(known):
        raise SystemExit(f"{given.name} has no part {', '.join(sorted(unknown))}. Its parts are {_listed(known)}.")
    if given.draw:
        import json

        print(save_figure(given.name, json.loads((HERE / "results" / f"{given.name}.json").read_text())["parts"]))
        return
    out = given.out or (Path(tempfile.mkdtemp()) if given.quick else HERE)
    execute(given.name, given.parts, given.quick, out, Place(given.device, given.weights))
    print(f"{out / 'results' / given.name}.json")


def _listed(parts: Sequence[str]) -> str:
    """As a shell takes them: some names have a comma."""
    return ", ".join(map(shlex.quote, parts))


if __name__ == "__main__":
    main()
