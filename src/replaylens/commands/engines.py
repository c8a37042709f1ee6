"""Engines as commands name them: by a model, a device, and who drafts; or by the dump that was made with one."""

from typing import Annotated

import typer

from replaylens.commands.completion import DRAFTERS, complete_drafter, complete_model
from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.zoo import coin as zoo
from replaylens.engine.zoo import thinking as thinking_zoo

MODEL = "coin-plain"
MODEL_HELP = "An embedded model's name, smollm2, or a model folder."
ModelOption = Annotated[str, typer.Option("--model", help=MODEL_HELP, autocompletion=complete_model)]
MakerOption = Annotated[
    str | None,
    typer.Option(
        "--model", help=f"{MODEL_HELP}  [default: the embedded model that made the dump]", autocompletion=complete_model
    ),
]
DeviceOption = Annotated[str, typer.Option(help="Where to compute: cpu or cuda.")]
DrafterOption = Annotated[
    str, typer.Option(help=f"Who guesses ahead: {', '.join(DRAFTERS)}. Nobody: --window 1.", autocompletion=complete_drafter)
]
DraftModelOption = Annotated[
    str | None,
    typer.Option(
        "--draft-model", help="Who --drafter model is.  [default: coin-draft for coin-plain]", autocompletion=complete_model
    ),
]
WindowOption = Annotated[
    int | None,
    typer.Option(min=1, help="Rows per verification; 1: nothing is drafted, tokens are decoded directly.  [default: 8]"),
]


def check_drafter(model: str, drafter: str, draft_model: str | None) -> None:
    """Refuse drafters that a command cannot have, in words of its options."""
    if drafter == "none":
        raise BadRequest("--drafter none: to decode directly, without drafts, give --window 1")
    if drafter == "model" and draft_model is None and model != MODEL:
        raise BadRequest(f"--drafter model: name the model that drafts for {model} with --draft-model, such as coin-draft")
    if draft_model is not None and drafter != "model":
        raise BadRequest(f"--draft-model {draft_model} would not be used: it drafts with --drafter model, not {drafter}")


def engine_that_made(dump: Dump, device: str) -> Engine | None:
    """The embedded model with the weights of a dump's; None: it is none of ours."""
    made_by = dump.manifest.fingerprint.weights
    loaded = (Engine.load(name, device=device) for name in (*zoo.names(), *thinking_zoo.names()))
    return next((engine for engine in loaded if engine.fingerprint.weights == made_by), None)
