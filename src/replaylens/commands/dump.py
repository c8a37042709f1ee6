"""`replaylens dump`, `verify` and `diff`: reproducible activation dumps from the shell.

Exit codes: 0 done, 2 bad input, 3 store or cluster unreachable, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from replaylens import tasks
from replaylens.commands.inspect import facts_of
from replaylens.commands.options import (
    CLUSTER,
    MODEL,
    BatchOption,
    DeviceOption,
    DrafterOption,
    DraftModelOption,
    DtypeOption,
    DumpTaskOption,
    FeaturesOption,
    MakerDtypeOption,
    MakerOption,
    MaxNewOption,
    ModelOption,
    OwnTaskOption,
    QuietOption,
    RanksOption,
    SeedOption,
    TemperatureOption,
    WindowOption,
    check_drafter,
    encoders,
    engine_for,
    know_task,
    unknown_maker,
)
from replaylens.commands.reporting import refuse_idle, reporting
from replaylens.commands.tasks import JsonOption, KnobOption, settings
from replaylens.engine.errors import BadFile, BadRequest, BadWeights
from replaylens.engine.machine import in_bytes, optional, require_room
from replaylens.engine.records import DTYPES, SCHEME, Identifier

if TYPE_CHECKING:
    from replaylens.commands.cited import Checked, CitedFile
    from replaylens.dumps.maker import PlanKeywords
    from replaylens.dumps.reader import Dump
    from replaylens.dumps.verify import Verification
    from replaylens.engine.engine import Engine

# ---- dump ------------------------------------------------------------------------------------------------------------

LabelOption = Annotated[
    list[str] | None,
    typer.Option(help="A field of --texts that holds a label; several are separated by commas, or given one by one."),
]
ShardOption = Annotated[str | None, typer.Option(help="i/n: write every n-th shard from i on; other processes write the rest.")]
WorkersOption = Annotated[
    int | None, typer.Option(min=1, help="Ray workers; without --ray, on this machine.  [default: one per device]")
]
WritersOption = Annotated[
    int | None, typer.Option(min=1, help="Threads that hash and write; each holds one shard in memory.  [default: 1]")
]
KEPT = "all, prompt, response, 7, 3:7, -2:, response[:32], last, steps, text:SUBSTRING or label:NAME"
"""as in `engine.request.positions`, which needs numpy"""
TASK, EXAMPLES = "coin", 100
"""what `dump` replays by default"""


@dataclass(frozen=True)
class _Wanted:
    """What `dump` was asked for, apart from the plan's own options."""

    out: str
    task: str | None
    n: int | None
    texts: str | None
    text: str
    labels: list[str]
    model: str
    knobs: dict[str, Any]
    loaded: dict[str, Any]
    """options of the engine"""
    common: dict[str, Any]
    """options of writing a dump, here or on a cluster"""
    as_json: bool


def dump(
    out: Annotated[str, typer.Option("--out", help="Folder for the dump: a path, or any fsspec URL.")],
    task: OwnTaskOption = None,
    n: Annotated[int | None, typer.Option("--n", min=1, help="Number of examples.  [default: 100, or all texts]")] = None,
    texts: Annotated[str | None, typer.Option(help="A JSONL file with texts of your own, instead of a task.")] = None,
    text: Annotated[str, typer.Option(help="The field of --texts that holds the text, the token ids or the chat.")] = "text",
    label: LabelOption = None,
    model: ModelOption = MODEL,
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    ranks: RanksOption = 1,
    sites: Annotated[str, typer.Option(help="Letters of STCZ, or site names separated by commas.")] = "STCZ",
    drafter: DrafterOption = "lens",
    draft_model: DraftModelOption = None,
    window: WindowOption = None,
    knob: KnobOption = None,
    positions: Annotated[str, typer.Option(help=f"Rows to keep: {KEPT}.")] = "all",
    stored_dtype: Annotated[
        str | None, typer.Option(help=f"What rows are stored in: {', '.join(DTYPES)}.  [default: as computed]")
    ] = None,
    rejected: Annotated[bool, typer.Option(help="Keep rejected branches.")] = True,
    probabilities: Annotated[bool, typer.Option(help="Store log-probability and entropy of every row.")] = True,
    features: FeaturesOption = None,
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Features per row of --features, the strongest.  [default: k of a TopK SAE, or 64]"),
    ] = None,
    temperature: TemperatureOption = 0.0,
    seed: SeedOption = 0,
    max_new: MaxNewOption = None,
    shard_examples: Annotated[int, typer.Option(min=1, help="Examples per shard file.")] = 128,
    batch: BatchOption = 32,
    resume: Annotated[bool, typer.Option("--resume", help="Resume the dump in the folder.")] = False,
    shard: ShardOption = None,
    ray: Annotated[str | None, typer.Option(help="Address of a Ray cluster, or 'local'.")] = None,
    workers: WorkersOption = None,
    writers: WritersOption = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Replay examples of a task, or texts, and write every captured row, with labels and hashes. Can be interrupted and
    resumed."""
    from replaylens.dumps.maker import PlanKeywords
    from replaylens.dumps.store import Store
    from replaylens.engine.request.sampling import Sampling

    with reporting(lambda: "the same command with --resume" if _is_begun(out) else None):
        check_drafter(model, drafter, draft_model)
        _check_texts(out, texts, label, task, knob)
        if texts is None:
            refuse_idle(["text"], "without --texts, of whose lines it is a field. Give --texts")
        if keep is not None and not features:
            raise BadRequest(f"--keep {keep} says how many of --features to store, and none are given. Leave it out.")
        Store(out).require_writable()
        require_room(f"ranks={ranks}", processes=ranks)
        require_room(f"writers={writers}", threads=writers or 1)
        if resume and not (_is_begun(out) or _was_killed_early(out)):
            raise BadRequest(f"--out {out} holds no dump to resume. Leave out --resume to start one, or correct the path.")
        _check_dtypes(device, dtype, stored_dtype)
        options = PlanKeywords(sites=sites, drafter=drafter, window=window, positions=positions, rejected=rejected)
        options |= PlanKeywords(stored_dtype=stored_dtype, probabilities=probabilities, examples_per_shard=shard_examples)
        options |= PlanKeywords(max_new=max_new, sampling=Sampling(temperature=temperature, seed=seed))
        labels = [name.strip() for each in label or () for name in each.split(",") if name.strip()]
        loaded: dict[str, Any] = dict(device=device, dtype=dtype, draft_model=draft_model) | (
            dict(ranks=ranks) if ranks > 1 else {}
        )
        common = dict(batch=batch, resume=resume, progress=not quiet)
        wanted = _Wanted(out, task, n, texts, text, labels, model, settings(knob), loaded, common, as_json)
        if ray is None and workers is None:
            made = _dump_here(wanted, {**options, "features": encoders(features), "keep": keep}, _part(shard), writers or 1)
        elif features:
            raise BadRequest("--features does not work with Ray. Leave out --ray and --workers, or use --shard.")
        else:
            made = _dump_on_cluster(wanted, options, ray or "local", workers, shard, writers)
        _tell_dump(made, out, as_json)


def _dump_here(wanted: _Wanted, options: dict[str, Any], part: tuple[int, int], writers: int) -> Dump | None:
    """The dump; None if other processes have yet to write their shards."""
    from replaylens.dumps.maker import make_plan, write_dump
    from replaylens.engine.engine import Engine

    engine = Engine.load(wanted.model, **wanted.loaded)
    if wanted.texts is not None:
        given = engine.texts(wanted.texts, text=wanted.text, labels=wanted.labels)
        plan = make_plan(engine, given, min(wanted.n or len(given), len(given)), **options)
    else:
        task = tasks.load(wanted.task or TASK)(**wanted.knobs)
        plan = make_plan(engine, task, wanted.n or EXAMPLES, **options)
        if wanted.task is None and not wanted.as_json:
            typer.echo(f"no --task given: examples of {TASK}")
    return write_dump(engine, plan, wanted.out, part=part, writers=writers, **wanted.common)


def _dump_on_cluster(
    wanted: _Wanted, options: PlanKeywords, address: str, workers: int | None, shard: str | None, writers: int | None
) -> Dump | None:
    """The dump, written by Ray workers; BadRequest if an option does not work there."""
    if shard is not None:
        raise BadRequest("--shard does not work with Ray. Give either --shard, or --ray and --workers.")
    if wanted.texts is not None:
        raise BadRequest("--texts does not work with Ray. Leave out --ray and --workers, or write parts with --shard.")
    if wanted.task is not None and ":" in wanted.task:
        raise BadRequest(f"--task {wanted.task} does not work with Ray: workers find tasks by name. Install its entry point.")
    if writers is not None:
        raise BadRequest("--writers does not work with Ray, whose workers write one shard each. Give more --workers.")
    where: dict[str, Any] = {"address": address, "workers": workers, "engine_options": wanted.loaded, "knobs": wanted.knobs}
    made: Dump | None = optional(CLUSTER, "--ray").dump_on_cluster(
        wanted.model, wanted.out, wanted.task or TASK, wanted.n or EXAMPLES, **where, **wanted.common, **options
    )
    return made


def _is_begun(out: str) -> bool:
    """Whether there is a dump to resume, finished or not."""
    from replaylens.dumps.manifest import MANIFEST, PLAN
    from replaylens.dumps.store import Store

    return not {PLAN, MANIFEST}.isdisjoint(Store(out).sizes())


def _was_killed_early(out: str) -> bool:
    """Whether the folder holds what a writer leaves that ends before it writes plan.json, and nothing else."""
    from replaylens.dumps.store import Store
    from replaylens.dumps.writer import foreign_names

    store = Store(out)
    return bool(store.names()) and not foreign_names(store)


def _check_texts(out: str, texts: str | None, label: list[str] | None, task: str | None, knob: list[str] | None) -> None:
    """Raise BadRequest if there is no folder, or if options of texts and of a task are mixed."""
    if not out.strip():
        raise BadRequest("--out is empty. Name a folder for the dump.")
    if texts is None and label:
        raise BadRequest("--label names a field of --texts. Give --texts, or leave it out: a task has labels of its own.")
    if texts is not None and (task is not None or knob):
        raise BadRequest("--texts takes the place of a task. Leave out --task and --knob.")


def _check_dtypes(device: str, dtype: str | None, stored: str | None) -> None:
    """Raise BadRequest, before a model is loaded, if what is stored was given for what is computed, or has no such name."""
    if stored is not None and stored not in DTYPES:
        raise BadRequest(f"Unknown --stored-dtype {stored}. Use one of {', '.join(DTYPES)}.")
    if device == "cpu" and dtype in DTYPES and dtype != "float32":
        raise BadRequest(
            f"A CPU computes in float32 only, not in --dtype {dtype}. To store rows so, give --stored-dtype {dtype}."
        )


def _tell_dump(made: Dump | None, out: str, as_json: bool) -> None:
    facts: dict[str, Any] = facts_of(made) if made is not None else {"path": out, "finished": False}
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    elif made is None:
        typer.echo(f"{out}: this part is done; the dump is not finished yet")
    else:
        typer.echo(f"{out}: {facts['rows']} rows in {facts['shards']} shards, {in_bytes(facts['bytes'])}")
        typer.echo(f"computed in {facts['arithmetic']}, stored in {facts['stored_dtype']}")
        typer.echo(f"digest {facts['digest']}\naccepted rows {facts['accepted_digest']}")


def _part(given: str | None) -> tuple[int, int]:
    if given is None:
        return 0, 1
    i, slash, n = given.partition("/")
    if not (slash and i.isdigit() and n.isdigit() and int(i) < int(n)):
        raise BadRequest(f"Invalid --shard {given}. Give i/n with 0 <= i < n, such as 0/3.")
    return int(i), int(n)


# ---- verify ----------------------------------------------------------------------------------------------------------
# `replaylens verify` and `diff`: is a dump what it says, and are two dumps the same?
#
# Exit codes: 0 yes, 1 a mismatch was found, 2 bad input or a damaged manifest, 3 store unreachable.


def verify(
    what: Annotated[str, typer.Argument(help="A file or folder that replaylens wrote; or its replaylens:sha256: identifier.")],
    model: MakerOption = None,
    device: DeviceOption = "cpu",
    dtype: MakerDtypeOption = None,
    sample: Annotated[
        str, typer.Option(help="Rows to replay, such as 200; or a share of the examples, such as 0.01 or 1%; or all.")
    ] = "all",
    every: Annotated[bool, typer.Option("--all", help="Replay every example, the default.")] = False,
    where: Annotated[
        list[str] | None,
        typer.Option("--in", help="Folders with the result, or with a report's dump.  [default: this one]"),
    ] = None,
    task: DumpTaskOption = None,
    features: FeaturesOption = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sample.")] = 0,
    batch: BatchOption = 32,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Check hashes, then replay a dump's examples or draw rollouts again, all or a sample, and compare every bit. A report is
    computed again from its dump, if that is there. Of figures, saved probes and parts of a sweep, the hashes are checked."""
    from replaylens.commands.cited import CitedFile, find, kind_of, require_whole
    from replaylens.dumps.reader import Dump
    from replaylens.dumps.verify import OTHER, VERIFIED
    from replaylens.dumps.verify import verify as verify_dump
    from replaylens.engine.engine import Engine

    with reporting():
        if every and sample != "all":
            raise BadRequest(f"--all and --sample {sample} contradict each other. Give one of them.")
        drawn = _sample(sample)
        wanted = Identifier.parse(what) if what.startswith(SCHEME) else None
        if wanted is None:
            require_whole(what)
        found = CitedFile(kind_of(what), what) if wanted is None else find(wanted, where or ["."])
        if where is not None and wanted is None and found.kind != "report":
            raise BadRequest(f"--in says where to look for an identifier, and {what} is a path. Leave it out.")
        verdict: Verification | Checked
        if found.kind not in ("dump", "row"):
            verdict = _checked(found, lambda: _drawer(found.path, model, device, dtype), drawn, seed, where or ["."])
        else:
            know_task(task, found.path)
            dump = Dump.open(found.path, check_files=False)
            maker = engine_for(dump, model, device, dtype)
            engine = maker or Engine.load(MODEL, device=device, dtype=dtype)  # any engine can check the files
            how: dict[str, Any] = {"sample": drawn, "seed": seed, "batch": batch, "features": encoders(features)}
            if wanted is not None and wanted.row is not None:
                how["rows"] = [wanted.row]
            verdict = verify_dump(found.path, engine, progress=not quiet, **how)
            if verdict.status == OTHER and maker is None:
                verdict = replace(verdict, notes=(f"{unknown_maker(dump)}.",))
    typer.echo(json.dumps(asdict(verdict), indent=1) if as_json else str(verdict))
    raise typer.Exit({VERIFIED: 0, OTHER: 2}.get(verdict.status, 1))


def _checked(
    found: CitedFile, drawer: Callable[[], Engine], sample: int | float | str, seed: int, folders: list[str]
) -> Checked:
    """The verdict on anything but a dump. Damaged files are a mismatch, as those of a dump are."""
    from replaylens.commands.cited import Checked, check_figure, check_report, check_rollouts, check_saved, check_sweep
    from replaylens.dumps.verify import MISMATCH

    try:
        if found.kind == "figure":
            return check_figure(found.path)
        if found.kind == "report":
            return check_report(found.path, folders)
        if found.kind == "sweep":
            return check_sweep(found.path)
        if found.kind in ("probe", "lens", "saved"):
            return check_saved(found.path, found.kind)
        return check_rollouts(found.path, drawer(), sample, seed)
    except (BadFile, BadWeights) as error:
        if found.kind == "report" and "was changed" not in str(error):  # it is none
            raise
        return Checked(MISMATCH, found.kind, found.path, (str(error),))


def _drawer(path: str, model: str | None, device: str, dtype: str | None) -> Engine:
    """The engine that draws rollouts again; BadRequest if it is not known."""
    from replaylens.rollouts.rollouts import Rollouts

    rollouts = Rollouts.load(path)
    engine = engine_for(rollouts, model, device, dtype)
    if engine is None:
        raise BadRequest(f"{unknown_maker(rollouts)}.")
    return engine


def _sample(given: str) -> int | float | str:
    """What --sample asks for: rows, a share of the examples, or all."""
    try:
        if given == "all" or given.isdecimal():
            return given if given == "all" else int(given)
        return float(given.removesuffix("%")) / (100 if given.endswith("%") else 1)
    except ValueError:
        raise BadRequest(
            f"Invalid --sample {given}. Give a number of rows such as 200, a share of the examples such as 0.01 or 1%, or all."
        ) from None


def diff(
    a: Annotated[str, typer.Argument(help="A dump's folder.")],
    b: Annotated[str, typer.Argument(help="Another dump's folder.")],
    accepted: Annotated[bool, typer.Option("--accepted", help="Ignore rejected branches.")] = False,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Find the first row, site and layer at which two dumps differ. Exit codes: 0 same content, 1 different, 2 damaged,
    3 store unreachable."""
    from replaylens.dumps.verify import diff as diff_dumps

    with reporting():
        found = diff_dumps(a, b, accepted=accepted, progress=not quiet)
    typer.echo(json.dumps({"same": bool(found), **asdict(found)}, indent=1) if as_json else str(found))
    raise typer.Exit(0 if found else 1)
