"""`replaylens explore`: the living tree of a prompt, served to one browser on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from replaylens.commands.options import DeviceOption, DtypeOption


def explore(
    model: Annotated[str, typer.Argument(help="Model: a name, a folder or a .gguf file.")],
    prompt: Annotated[str, typer.Argument(help="The prompt.")],
    device: DeviceOption = "cpu",
    dtype: DtypeOption = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free.")] = 0,
    host: Annotated[str, typer.Option(help="Where to listen; others than 127.0.0.1 are reached from elsewhere.")] = "127.0.0.1",
    save: Annotated[str | None, typer.Option(help="Write the page here at the end.")] = None,
) -> None:
    """See a model's branches in a browser: click to roll back, fork, force, steer, resample. Ctrl-C ends it."""
    from replaylens.engine.engine import Engine
    from replaylens.engine.request.values import output_path
    from replaylens.living.explorer import Explorer

    if save is not None:
        output_path(save)
    engine = Engine.load(model, device=device, dtype=dtype)
    explorer = Explorer(engine.prompt(prompt), model=model)
    with explorer.serve(port=port, host=host) as served:
        typer.echo(f"{served.address}\nOpen it in one browser; the address opens nothing a second time. Ctrl-C ends it.")
        try:
            served.wait()
        except KeyboardInterrupt:
            typer.echo("ended")
    if save is not None:
        typer.echo(str(explorer.save(save)))
