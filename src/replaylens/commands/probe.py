"""`replaylens probe` and `replaylens steer`: probe sweeps over a dump, and causal tests of a probe."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylens.commands.options import (
    DeviceOption,
    DumpTaskOption,
    MakerDtypeOption,
    MakerOption,
    QuietOption,
    engine_for,
    know_task,
    unknown_maker,
)
from replaylens.commands.reporting import refuse_idle, reporting
from replaylens.commands.tasks import JsonOption
from replaylens.engine.errors import BadRequest
from replaylens.engine.machine import EXAMPLE_BYTES, require_room

if TYPE_CHECKING:
    from replaylens.dumps.reader import Dump
    from replaylens.probes.probe import LinearProbe
    from replaylens.probes.report import Report
    from replaylens.tasks.task import Example

TESTS = ("steer", "ablate", "interchange")
DumpArgument = Annotated[str | None, typer.Argument(metavar="DUMP", help="A dump's folder.")]
OutOption = Annotated[str | None, typer.Option("--out", help="Folder for report.json, summary, table and figures.")]
CheckOption = Annotated[
    bool, typer.Option("--check/--no-check", help="Hash each shard of a local dump when it is first opened.")
]
ProbeSeedOption = Annotated[int, typer.Option(min=0, help="Seed of folds, resamples, permutations and placebos.")]


def probe(
    path: DumpArgument = None,
    label: Annotated[
        str, typer.Option(help="Labels, separated by commas; state: the task's state label, or the first one of texts.")
    ] = "state",
    sites: Annotated[
        str | None,
        typer.Option(help="Letters of STC, or site names separated by commas.  [default: those of S, T, C in the dump]"),
    ] = None,
    layers: Annotated[str | None, typer.Option(help="Layers, separated by commas.  [default: all]")] = None,
    positions: Annotated[
        str | None,
        typer.Option(
            help="all, a number, step, step+1, step:3, query, query-1; of texts: last, text:SUBSTRING, label:NAME, 3:7; "
            "separated by commas.  [default: step,query; of texts: last]"
        ),
    ] = None,
    estimators: Annotated[str, typer.Option(help="Names from --list, separated by commas.")] = "logistic",
    split: Annotated[str, typer.Option(help="root, length:N, depth:N, accepted-rejected or rejected-accepted.")] = "root",
    folds: Annotated[int, typer.Option(min=2, help="Folds of the cross-validation over roots.")] = 5,
    permutations: Annotated[
        int, typer.Option(min=0, help="Permutations of the labels, with a new fit each; 0: a corrected t test.")
    ] = 99,
    metric: Annotated[
        str, typer.Option(help="Of classes: accuracy, balanced_accuracy, auroc, or auto: auroc where classes are unequal.")
    ] = "auto",
    branches: Annotated[str, typer.Option(help="Branches to use: accepted, rejected or all.")] = "accepted",
    model: Annotated[str | None, typer.Option(help="The dump's model; adds an untrained model as a control.")] = None,
    task: DumpTaskOption = None,
    controls: Annotated[bool, typer.Option(help="Run the controls.")] = True,
    residualise: Annotated[
        str, typer.Option(help="Index columns to regress out of the rows first, such as position,steps.")
    ] = "",
    code_length: Annotated[
        bool, typer.Option("--code-length", help="Also compute the online code length (description length).")
    ] = False,
    precision: Annotated[str, typer.Option(help="Precision of the fits: double or single.")] = "double",
    device: DeviceOption = "cpu",
    dtype: MakerDtypeOption = None,
    jobs: Annotated[int, typer.Option(help="Number of processes for estimators that are fitted one by one.")] = 1,
    backend: Annotated[str | None, typer.Option(help="joblib backend; ray uses a cluster.")] = None,
    resume: Annotated[str | None, typer.Option(help="Folder for finished parts; a later run continues from it.")] = None,
    save_probes: Annotated[str | None, typer.Option(help="Folder for the best linear probe of each label.")] = None,
    seed: ProbeSeedOption = 0,
    check: CheckOption = True,
    out: OutOption = None,
    listed: Annotated[bool, typer.Option("--list", help="List the estimators.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Fit probes over sites, layers and positions of a dump, with controls and statistics."""
    if listed:
        _list(as_json)
        return
    with reporting(lambda: "the same command" if resume else None):
        from replaylens.probes.checks import as_draws
        from replaylens.probes.settings import SweepKeywords
        from replaylens.probes.sweeps import require_jobs, sweep

        if model is None:
            refuse_idle(["dtype"], "without --model: it is the arithmetic of the untrained model. Give --model")
        if "logistic" not in _words(estimators):
            refuse_idle(["code_length"], f"with --estimators {estimators}: it is of logistic probes. Give logistic, too")
        if split.partition(":")[0] in ("length", "part"):
            refuse_idle(["folds"], f"with --split {split}, which has one fold. Give another split")
        require_jobs(jobs, backend)
        as_draws("permutations", permutations)
        _check_outputs(out, save_probes, resume)
        found = _open(path, check, task)
        if save_probes is not None:
            _refuse_foreign_probes(Path(save_probes), found.labels if "state" in _words(label) else _words(label))
        options = SweepKeywords(folds=folds, permutations=permutations, metric=metric, branches=branches, controls=controls)
        options |= SweepKeywords(code_length=code_length, precision=precision, device=device, seed=seed)
        options |= SweepKeywords(layers=None if layers is None else _numbers(layers), residualise=_words(residualise))
        how: dict[str, Any] = {"resume": resume, "jobs": jobs, "backend": backend, "progress": not quiet}
        report = sweep(
            found,
            _words(label),
            sites=sites,
            positions=None if positions is None else _positions(positions),
            estimators=_words(estimators),
            split=split,
            engine=None if model is None else engine_for(found, model, device, dtype),
            **how,
            **options,
        )
        if save_probes is not None:
            _save_best(found, report, Path(save_probes))
        _tell(report, out, as_json)


def steer(
    path: DumpArgument = None,
    label: Annotated[str, typer.Option(help="Label to change; state: the task's state label.")] = "state",
    site: Annotated[str, typer.Option(help="S, T or C, or a site name.")] = "S",
    layer: Annotated[int | None, typer.Option(help="Layer, if --site is a letter.")] = None,
    position: Annotated[str, typer.Option(help="Position at which the probe is fitted and rows are changed.")] = "query",
    estimator: Annotated[str, typer.Option(help="A linear estimator.")] = "mass-mean",
    saved: Annotated[str | None, typer.Option("--probe", help="A saved probe to use instead of fitting one.")] = None,
    test: Annotated[str, typer.Option(help=f"{', '.join(TESTS)}.")] = "steer",
    factor: Annotated[float, typer.Option(help="For steer: step in units of the distance between class means.")] = 1.0,
    n: Annotated[int, typer.Option("--n", min=1, help="Number of prompts, none of them in the dump.")] = 100,
    placebos: Annotated[
        int, typer.Option(min=1, help="Number of random directions, and of untrained probes, to compare with.")
    ] = 8,
    model: MakerOption = None,
    task: DumpTaskOption = None,
    device: DeviceOption = "cpu",
    dtype: MakerDtypeOption = None,
    seed: ProbeSeedOption = 0,
    check: CheckOption = True,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Test a probe's direction causally: does the answer follow it more than random directions?"""
    with reporting():
        from replaylens.probes import causal
        from replaylens.probes.checks import PLACEBO_BYTES, as_draws
        from replaylens.probes.probe import LinearProbe, fit_probe, placebo_probes

        _check_outputs(out)
        require_room(f"n={n}", memory=n * EXAMPLE_BYTES)
        as_draws("placebos", placebos, each=PLACEBO_BYTES)
        if test not in TESTS:
            raise BadRequest(f"Unknown --test {test}. Use one of {', '.join(TESTS)}.")
        if test != "steer":
            refuse_idle(["factor"], f"with --test {test}. Give --test steer")
        if saved is not None:
            fitted = ["label", "site", "layer", "position", "estimator"]
            refuse_idle(fitted, f"with --probe {saved}, which has its own. Leave out --probe")
        found = _open(path, check, task)
        engine = engine_for(found, model, device, dtype)
        if engine is None:
            raise BadRequest(f"{unknown_maker(found)}.")
        if saved is not None:
            probe = LinearProbe.load(saved)
        else:
            probe = fit_probe(found, label, site=site, layer=layer, position=position, estimator=estimator)
        how: dict[str, Any] = {"placebos": placebos, "seed": seed}
        how["untrained"] = placebo_probes(found, probe, count=placebos, seed=seed)
        if test == "steer":
            how["factor"] = factor
        report = getattr(causal, test)(engine, probe, _unseen(found, n), **how)
        _tell(report, out, as_json)


def _list(as_json: bool) -> None:
    from replaylens.probes.registry import ESTIMATORS

    if as_json:
        facts = [{"name": e.name, "about": e.about, "swept": e.swept, "linear": e.linear} for e in ESTIMATORS.values()]
        typer.echo(json.dumps(facts, indent=1))
        return
    for each in ESTIMATORS.values():
        typer.echo(f"{each.name:<20} {each.about}{'' if each.swept != 'no' else '  (from Python only)'}")


def _open(path: str | None, check: bool, task: str | None) -> Dump:
    from replaylens.dumps.reader import Dump

    if path is None:
        raise BadRequest("No dump given. Name its folder; `replaylens dump` makes one.")
    dump = Dump.open(path, check=None if check else False)
    know_task(task, dump)
    return dump


def _unseen(dump: Dump, n: int) -> list[Example]:
    """Prompts of the dump's task that are not in the dump."""
    task = dump.manifest.plan.make_task()
    seen = set(dump.index["root"])
    index, found = max(dump.manifest.plan.examples) + 1, []
    for example in (task.example(i) for i in range(index, index + 200 * n)):
        if example.root not in seen:
            seen.add(example.root)
            found.append(example)
            if len(found) == n:
                return found
    raise BadRequest(
        f"Found only {len(found)} of {n} prompts that are not in the dump. Give a smaller --n: the task has too few prompts."
    )


def _save_best(dump: Dump, report: Report, folder: Path) -> None:
    """Save the best linear probe of each label, fitted on all rows of its cell."""
    from replaylens.probes.probe import fit_probe
    from replaylens.probes.registry import get

    linear = [line for line in report.lines if not line["known_zero"] and get(line["estimator"]).linear]
    for label in dict.fromkeys(line["label"] for line in linear if line["metric"] != "r2"):
        best = replace(report, lines=[line for line in linear if line["label"] == label]).best(label)
        place = {name: best[name] for name in ("site", "layer", "position", "estimator")}
        made: LinearProbe = fit_probe(dump, label, **place)
        typer.echo(f"{made.save(folder / label)}: {label} at {best['site']}{best['layer']}, {best['position']}", err=True)


def _check_outputs(report: str | None, *folders: str | None) -> None:
    """Raise before the work if its result could not be written, or would be among files of somebody else."""
    from replaylens.engine.files import require_own_folder
    from replaylens.engine.request.values import output_path
    from replaylens.probes.report import report_folder
    from replaylens.probes.sweeps import holds_probes

    if report is not None:
        report_folder(report)
    for folder in (report, *folders):
        if folder is not None:
            require_own_folder(output_path(folder, folder=True), holds_probes)


def _refuse_foreign_probes(folder: Path, labels: Sequence[str]) -> None:
    """Raise BadRequest before the work if a probe of one of these labels would replace a file of somebody else."""
    from replaylens.engine.files import require_own_pair
    from replaylens.probes.probe import files_of, is_probe

    for label in labels:
        require_own_pair(*files_of(folder / label), is_probe)


def _tell(report: Report, out: str | None, as_json: bool) -> None:
    if out is not None:
        report.save(out)
    typer.echo(json.dumps(report.to_json(), indent=1) if as_json else report.text())


def _positions(given: str) -> Sequence[str]:
    """Positions, separated by commas. A substring may hold spaces; with commas in it, the position stands in quotes."""
    return tuple(each for each in next(csv.reader([given], skipinitialspace=True)) if each.strip())


def _words(given: str) -> Sequence[str]:
    return tuple(word for word in given.replace(" ", "").split(",") if word)


def _numbers(given: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(given))
    except ValueError:
        raise BadRequest(f"Invalid --layers {given}. Give integers, separated by commas.") from None
