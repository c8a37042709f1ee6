"""`replaylens doctor`: checks on this device that every op gives a row the same bits in any batch."""

from collections.abc import Iterator
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from replaylens.commands.options import MODEL_HELP
from replaylens.engine.engine import default_dtype, load_model
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.products import Certificate
from replaylens.engine.proof import certificates


def doctor(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)] = "coin-plain",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="Print the certificate as JSON.")] = False,
) -> None:
    """Check on this device that results do not depend on batch, offset, window or threads. Exit code 1 if they do."""
    certificate = certificates.examine(_load(model, device))
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
            different = "differ, not used" if finding.passed else "[red]DIFFER[/red]"
            bits = "equal" if finding.equal else different
        table.add_row(finding.op, finding.shape, finding.check, bits)
    console.print(table)
    for line in _products(certificate):
        console.print(line, highlight=False)
    if certificate.failures:
        bad = certificate.failures[0]
        console.print(
            f"[red]not certified[/red]: {bad.op} {bad.shape}, '{bad.check}', and {len(certificate.failures) - 1} more"
        )
    elif not certificate.has_teeth:
        console.print("[red]not certified[/red]: no negative control differed, so equal bits prove nothing here")
    else:
        compared = [f for f in certificate.findings if not f.control]
        equal, threads = sum(f.equal for f in compared), ", ".join(map(str, certificate.threads))
        some = "all equal" if equal == len(compared) else f"{equal} equal, the others are not used"
        console.print(
            f"[green]certified[/green]: {len(compared)} comparisons of bits, {some}; threads: {threads}", highlight=False
        )


def _products(certificate: Certificate) -> Iterator[str]:
    """One line per shape, and one more for each number of threads with other row counts than on one thread."""
    for shape, counts in sorted(certificate.row_counts.items()):
        name = f"product {shape[0]} x {shape[1]}"
        yield f"{name}: {_rows(counts)}"
        for threads, some in certificate.allowed.items():
            here = some.row_counts.get(shape, ())
            if here != counts:
                yield f"{name} on {threads} threads: {_rows(here) if here else 'none, it runs on one'}"


def _rows(counts: tuple[int, ...]) -> str:
    return f"rows {', '.join(map(str, counts))}"
