"""`replaylens doctor`: checks that this device computes as it must; `replaylens warm`: compiles a model's kernels ahead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from replaylens.commands.options import MODEL_HELP, DtypeOption, RanksOption
from replaylens.commands.reporting import reporting
from replaylens.engine.machine import optional, require_room

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
    from replaylens.engine.model.config import ModelConfig
    from replaylens.engine.model.decoder import Decoder
    from replaylens.engine.proof.doctor import Certificate

# ---- doctor ----------------------------------------------------------------------------------------------------------


def doctor(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "coin-plain",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: DtypeOption = None,
    ranks: RanksOption = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
    program: Annotated[bool, typer.Option("--program", help="Print the steps of the model's pass instead.")] = False,
) -> None:
    """Test this machine: a CPU must give the bits of every machine, a GPU the same bits in any batch. Exit code 1 if not."""
    if program:
        with reporting():
            _print_program(model, dtype)
        return
    from replaylens.engine.proof import certificates
    from replaylens.engine.serving.assembly import Sizes
    from replaylens.kernels.gpus import gpu_of
    from replaylens.weights.opening import RANKS, default_dtype

    with reporting():
        require_room(f"ranks={ranks}", processes=ranks)
        certificate = certificates.examine(loaded := _load(model, device, dtype))
        if ranks > 1:
            over = optional(RANKS, f"--ranks {ranks}")
            found = over.examine_ranks(over.Ranks(ranks, device, default_dtype(device, dtype)))
            certificate = replace(certificate, findings=(*certificate.findings, *found))
    if json:
        typer.echo(certificate.to_json())
    else:
        cache = Sizes.usual(loaded)
        said = [str(gpu_of(loaded.device)), cache.memory] if loaded.device.type == "cuda" else []
        _show(certificate, model, "\n".join([*said, f"cache_tokens here by default: {cache.tokens:,}; {cache.why}"]))
    if not certificate.certified:
        raise typer.Exit(1)


def _print_program(name: str, dtype: str | None) -> None:
    from replaylens.engine.model.program import Program

    found = _load(name, "cpu", dtype)
    made = Program.of_wiring(found)
    typer.echo(f"{made}\n{len(made.steps)} steps, digest {made.digest}")


def _load(name: str, device: str, dtype: str | None) -> Decoder:
    from replaylens.weights.opening import default_dtype, load_model

    return load_model(name, default_dtype(device, dtype), check=False, device=device, with_text=False)[0]


def _show(certificate: Certificate, model: str, cache: str) -> None:
    console = Console()
    table = Table("op", "shape", "check", "bits", title=model)
    for finding in certificate.findings:
        if finding.control:
            bits = "equal (control failed)" if finding.equal else "differ, as expected"
        else:
            bits = "equal" if finding.equal else "[red]DIFFER[/red]"
        table.add_row(finding.op, finding.shape, finding.check, bits)
    console.print(table)
    console.print(cache, highlight=False)
    if certificate.failures:
        bad = certificate.failures[0]
        console.print(
            f"[red]not certified[/red]: {bad.op} {bad.shape}, '{bad.check}', and {len(certificate.failures) - 1} more"
        )
    elif not certificate.has_teeth:
        console.print("[red]not certified[/red]: no negative control differed, so equal bits prove nothing here")
    else:
        compared = f"{sum(not f.control for f in certificate.findings)} comparisons of bits, all equal"
        console.print(f"[green]certified[/green]: {compared}; arithmetic {certificate.arithmetic}", highlight=False)


# ---- warm ------------------------------------------------------------------------------------------------------------
# Kernels depend on a model's shape and on the number of rows, not on weights or on how many layers there are. So every process
# makes one layer of each kind with random weights, and computes as many rows as requests bring, each beginning elsewhere.

_PROMPTS = {"cuda": (1, 16, 64, 256, 1024), "cpu": (16, 64)}
_BRANCHES = {"cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024), "cpu": (1, 8)}
_NEW = 17
"""tokens of a branch, so that a device decodes in bursts"""


def warm(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "coin-plain",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    dtype: DtypeOption = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes that compile at the same time.")] = 8,
) -> None:
    """Compile a model's kernels in advance. Triton's cache, or numba's on a CPU, keeps them for all later processes."""
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    from replaylens.weights.loading import config_of
    from replaylens.weights.opening import default_dtype, folder_of

    with reporting():
        require_room(f"processes={processes}", processes=processes)
        default_dtype(device, dtype)
        config, begun = few_layers(config_of(folder_of(model))), monotonic()
        if device == "cpu":
            processes = 1  # numba's kernels are few
        with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
            if device == "cuda":  # in threads: it compiles what the others begin with
                pool.submit(_examine, config.to_json(), device, dtype).result()
            list(pool.map(partial(_warm, config.to_json(), device, dtype), range(processes)))
    with_how_many = f"{processes} processes" if processes > 1 else "1 process"
    Console().print(f"{model}: kernels for {device} are compiled ({monotonic() - begun:.1f} s, {with_how_many})")


def few_layers(config: ModelConfig) -> ModelConfig:
    """The config with the first layer of each kind."""
    mixture = config.mixture
    lists = [config.windows, config.rotary_layers, config.parts, () if mixture is None else mixture.layers]
    kinds: dict[tuple[Any, ...], int] = {}
    for layer in range(config.num_layers):
        kinds.setdefault(tuple(each[layer] for each in lists if each), layer)
    windows, rotary, parts, experts = (tuple(each[layer] for layer in kinds.values()) if each else each for each in lists)
    few = {"num_layers": len(kinds), "windows": windows, "rotary_layers": rotary, "parts": parts, "weights_of": ()}
    return replace(config, **few, mixture=None if mixture is None else replace(mixture, layers=experts))  # type: ignore[arg-type]


def _model(config: str, device: str, dtype: str | None) -> Decoder:
    from replaylens.engine.model.config import ModelConfig
    from replaylens.engine.model.decoder import Decoder
    from replaylens.weights.opening import default_dtype

    model = Decoder(ModelConfig.from_json(config)).initialize(0).to(default_dtype(device, dtype)).to(device)
    return model.requires_grad_(False)


def _examine(config: str, device: str, dtype: str | None) -> None:
    from replaylens.engine.proof import certificates

    certificates.examine(_model(config, device, dtype))


def _warm(config: str, device: str, dtype: str | None, turn: int) -> None:
    """Compute with a model of this shape, beginning with part `turn` of the work."""
    from replaylens.engine.engine import Engine

    most = max(_BRANCHES[device])
    engine = Engine(_model(config, device, dtype), cache_tokens=8192 + most * 64, max_rows=max(1024, most))
    room = max(1, engine.config.max_positions - _NEW)
    work: list[Callable[[], None]] = [partial(_prompt, engine, min(rows, room)) for rows in _PROMPTS[device]]
    work += [partial(_decode, engine, count, min(16, room)) for count in _BRANCHES[device]]
    first = turn * 3 % len(work)
    for each in (*work[first:], *work[:first]):
        each()


def _prompt(engine: Engine, rows: int) -> None:
    engine.prompt([0] * rows).release()
    engine.prefix.clear()


def _decode(engine: Engine, count: int, rows: int) -> None:
    from replaylens.engine.request.sampling import Sampling

    with engine.prompt([0] * rows) as root:
        forks = root.fork(count)
        engine.generate(forks, _NEW, sampling=[Sampling(temperature=1.0, seed=seed, ignore_eos=True) for seed in range(count)])
        for fork in forks:
            fork.release()
