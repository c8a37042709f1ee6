"""Options that several commands share: of replays, models, devices, drafters and tasks, with shell completion."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from replaylens import tasks
from replaylens.engine.errors import BadDump, BadRequest, EngineError
from replaylens.engine.records import DTYPES, Fingerprint
from replaylens.weights import zoo

if TYPE_CHECKING:
    from replaylens.dumps.reader import Dump
    from replaylens.engine.engine import Engine
    from replaylens.features.features import SparseFeatures
    from replaylens.rollouts.rollouts import Rollouts

# ---- replay options --------------------------------------------------------------------------------------------------
# Command-line options of the commands that replay examples.

TemperatureOption = Annotated[float, typer.Option(min=0, help="0: greedy.")]
SeedOption = Annotated[int, typer.Option(min=0, help="Seed of the sampling; for the task's seed use --knob seed=...")]
BatchOption = Annotated[int, typer.Option(min=1, help="Examples replayed together; changes no bit.")]
MaxNewOption = Annotated[int | None, typer.Option(min=0, help="Maximum tokens per answer.  [default: by task; 0 for texts]")]
QuietOption = Annotated[bool, typer.Option("--quiet", help="Hide progress bars.")]


# ---- completion ------------------------------------------------------------------------------------------------------
# Shell completion of values: names of tasks, models and drafters.

DRAFTERS = ("lens", "tree", "ngram", "model", "self")
"""drafters available to commands; `forced` needs tokens, so it is available from Python only"""


FETCHED = ("smollm2", "gemma3-270m")
"""`hub.PACKAGED`, whose module needs torch"""


def complete_task(incomplete: str) -> list[str]:
    return [name for name in tasks.names() if name.startswith(incomplete)]


def complete_drafter(incomplete: str) -> list[str]:
    return [name for name in DRAFTERS if name.startswith(incomplete)]


def complete_model(incomplete: str) -> list[str]:
    return [name for name in (*zoo.PLAIN, *zoo.THINKING, *FETCHED) if name.startswith(incomplete)]


# ---- engines ---------------------------------------------------------------------------------------------------------
# Options that choose an engine: model, device and drafter; and the engine that made a dump.

CLUSTER = "replaylens.extras.cluster"
"""what works on Ray"""
MODEL = "coin-plain"
MODEL_HELP = "An embedded model's name, smollm2, a model folder, or a name on the Hugging Face hub (org/name@revision)."
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP, autocompletion=complete_model)]
MakerOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help=f"{MODEL_HELP}  [default: the model that made the dump, if it is embedded or in the hub's cache]",
        autocompletion=complete_model,
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
DtypeOption = Annotated[
    str | None,
    typer.Option(
        help=f"The arithmetic: {', '.join(DTYPES)}. In float32, every machine has the same bits.  "
        "[default: float32 on a CPU, bfloat16 on a GPU]"
    ),
]
MakerDtypeOption = Annotated[
    str | None, typer.Option(help=f"The arithmetic: {', '.join(DTYPES)}.  [default: that of the dump; on a CPU, float32]")
]
RanksOption = Annotated[int, typer.Option(min=1, help="Processes that divide the products among them; changes no bit.")]
DrafterOption = Annotated[
    str, typer.Option(help=f"The drafter: {', '.join(DRAFTERS)}. For none, use --window 1.", autocompletion=complete_drafter)
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model",
        help="The model of --drafter model.  [default: coin-draft for coin-plain]",
        autocompletion=complete_model,
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(min=1, help="Rows per verification; 1: no drafts, tokens are decoded directly.  [default: 8]"),
]

FeaturesOption = Annotated[
    list[str] | None,
    typer.Option(help="NAME=FOLDER of sparse features in SAELens' format; can be given several times.  [default: none]"),
]


def check_drafter(model: str, drafter: str, draft_model: str | None) -> None:
    """Raise BadRequest for drafters that the command cannot use, in terms of its options."""
    if drafter == "none":
        raise BadRequest("Unknown drafter 'none'. To decode without drafts, give --window 1.")
    if drafter == "model" and draft_model is None and model != MODEL:
        raise BadRequest(f"--drafter model needs a draft model for {model}. Name it with --draft-model, such as coin-draft.")
    if draft_model is not None and drafter != "model":
        raise BadRequest(f"--draft-model {draft_model} would not be used with --drafter {drafter}. Give --drafter model.")


def verify_command(
    dump: str,
    model: str | None = None,
    task: str | None = None,
    device: str = "cpu",
    features: list[str] | None = None,
    dtype: str | None = None,
) -> str:
    """The command that verifies a dump, to paste into a shell."""
    options = {"--model": model, "--task": task, "--device": None if device == "cpu" else device, "--dtype": dtype}
    given = [part for name, value in options.items() if value is not None for part in (name, value)]
    given += [part for each in features or () for part in ("--features", each)]
    return shlex.join(["replaylens", "verify", dump, "--all", *given])


def engine_for(made: Dump | Rollouts, model: str | None, device: str, dtype: str | None) -> Engine | None:
    """An engine with --model, or with the model that made a dump or rollouts: of the hub, by the revision that they name, if
    the cache has it; or the fetched or embedded one with its weights. None if there is none. Nothing is downloaded because a
    file asks for it. It computes in the arithmetic that they were made in, if the device can, unless --dtype says otherwise.
    """
    from replaylens.engine.engine import Engine
    from replaylens.engine.proof.fingerprint import config_digest
    from replaylens.weights.hub import PACKAGED, is_fetched, model_folder
    from replaylens.weights.loading import config_of

    made_by = _fingerprint(made)
    if dtype is None and device == "cuda" and made_by is not None:
        dtype = made_by.dtype
    if model is not None:
        return Engine.load(model, device=device, dtype=dtype)
    if made_by is None:
        return None
    if made_by.revision:
        try:
            return Engine.load(made_by.revision, device=device, dtype=dtype, local_files_only=True)
        except EngineError:
            return None
    fetched = [name for name in PACKAGED if is_fetched(name) and config_digest(config_of(model_folder(name))) == made_by.config]
    loaded = (Engine.load(name, device=device, dtype=dtype) for name in (*fetched, *zoo.PLAIN, *zoo.THINKING))
    return next((engine for engine in loaded if engine.fingerprint.weights == made_by.weights), None)


def unknown_maker(made: Dump | Rollouts) -> str:
    """What to say if `engine_for` finds none."""
    from replaylens.dumps.reader import Dump

    made_by, what = _fingerprint(made), "this dump" if isinstance(made, Dump) else "these rollouts"
    if made_by is not None and (revision := made_by.revision):
        return f"{revision} made {what}, and the cache of the hub does not hold it. Fetch it with --model {revision}"
    return f"No embedded or fetched model made {what}. Name its model with --model"


def _fingerprint(made: Dump | Rollouts) -> Fingerprint | None:
    from replaylens.dumps.reader import Dump

    return made.manifest.fingerprint if isinstance(made, Dump) else made.made_by


def encoders(given: list[str] | None) -> dict[str, SparseFeatures]:
    """The sparse features of --features NAME=FOLDER, by name."""
    from replaylens.features.features import SparseFeatures

    found: dict[str, SparseFeatures] = {}
    for each in given or ():
        name, equals, folder = each.partition("=")
        if not equals or name in found:
            raise BadRequest(f"Invalid --features {each}. Give NAME=FOLDER, each name once, such as sae=saes/block1.")
        found[name] = SparseFeatures.load(folder)
    return found


# ---- task options ----------------------------------------------------------------------------------------------------
# Options that choose a task: by its name, or by its code.

TASK_HELP = "A task's name (see `replaylens tasks list`), module:Class or file.py:Class."
TaskOption = Annotated[str, typer.Option("--task", help=TASK_HELP, autocompletion=complete_task)]
OwnTaskOption = Annotated[
    str | None, typer.Option("--task", help=f"{TASK_HELP}  [default: coin]", autocompletion=complete_task)
]
DumpTaskOption = Annotated[
    str | None,
    typer.Option("--task", help="The code of the dump's task, if it is not installed: module:Class or file.py:Class."),
]


def know_task(reference: str | None, path: str | Dump) -> None:
    """Register the task of a dump by its code, so that the dump finds it by its name. BadRequest if it is another task's."""
    from replaylens.dumps.reader import Dump

    if reference is None:
        return
    loaded = tasks.load(reference)
    try:
        dump = path if isinstance(path, Dump) else Dump.open(path, check_files=False)
    except BadDump:
        return  # the command itself says what is wrong with the dump
    if (used := dump.manifest.plan.task) != loaded.name:
        raise BadRequest(f"--task {reference} is the task {loaded.name!r}, but the dump is of {used!r}. Give that task's code.")
