"""`replaylens doctor`: checks that this device computes as it must."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from replaylens.commands.options import MODEL_HELP, RanksOption
from replaylens.engine.engine import default_dtype, load_model
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.ranks import Ranks
from replaylens.engine.proof import certificates
from replaylens.engine.proof.doctor import Certificate, examine_ranks


def doctor(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "coin-plain",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    ranks: RanksOption = 1,
    json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Check that a CPU has the bits of every machine, that on a GPU no row depends on its batch. Exit code 1 if not."""
    certificate = certificates.examine(_load(model, device))
    if ranks > 1:
        found = examine_ranks(Ranks(ranks, device, default_dtype(device)))
        certificate = Certificate((*certificate.findings, *found))
    if json:
        typer.echo(certificate.to_json())
    else:
        _show(certificate, model)
    if not certificate.certified:
        raise typer.Exit(1)


def _load(name: str, device: str) -> Decoder:
    return load_model(name, default_dtype(device), check=False, device=device)[0]


def _show(certificate: Certificate, model: str) -> None:
    console = Console()
    table = Table("op", "shape", "check", "bits", title=model)
    for finding in certificate.findings:
        if finding.control:
            bits = "equal (control failed)" if finding.equal else "differ, as expected"
        else:
            bits = "equal" if finding.equal else "[red]DIFFER[/red]"
        table.add_row(finding.op, finding.shape, finding.check, bits)
    console.print(table)
    if certificate.failures:
        bad = certificate.failures[0]
        console.print(
            f"[red]not certified[/red]: {bad.op} {bad.shape}, '{bad.check}', and {len(certificate.failures) - 1} more"
        )
    elif not certificate.has_teeth:
        console.print("[red]not certified[/red]: no negative control differed, so equal bits prove nothing here")
    else:
        compared = [f for f in certificate.findings if not f.control]
        console.print(f"[green]certified[/green]: {len(compared)} comparisons of bits, all equal", highlight=False)
