"""`Certificate`: the ops and shapes that were shown to give canonical bits on this device."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from msgspec import Meta

from replaylens.engine.errors import BadCertificate
from replaylens.engine.passes.products import Allowed, RowCounts, Shape
from replaylens.engine.records import Positive, read

ShapeText = Annotated[str, Meta(pattern=r"^[1-9][0-9]{0,8}x[1-9][0-9]{0,8}\Z")]
"""inputs x outputs"""


@dataclass(frozen=True)
class Finding:
    """One comparison of bits."""

    op: str
    shape: str
    check: str
    equal: bool
    control: bool = False
    """a negative control: it must differ for at least one shape, or the comparison proves nothing"""
    threads: int = 1
    """variants that differ on more than one thread are not used, so they are no failure"""

    @property
    def passed(self) -> bool:
        return self.control or self.equal or self.threads > 1


@dataclass(frozen=True)
class Certificate:
    """The doctor's findings. The engine uses only what is listed here. Canonical bits are those of one thread."""

    allowed: dict[int, Allowed]
    """allowed products by number of threads, starting with one; all other ops have canonical bits on each of these numbers"""
    query_rows: tuple[int, ...]
    """query rows per attention piece that give the bits of the reference piece on all these threads, smallest first"""
    findings: tuple[Finding, ...]

    @property
    def threads(self) -> tuple[int, ...]:
        """The certified numbers of threads."""
        return tuple(self.allowed)

    @property
    def row_counts(self) -> RowCounts:
        """On one thread."""
        return self.allowed[1].row_counts

    @property
    def packed(self) -> frozenset[Shape]:
        """On one thread."""
        return self.allowed[1].packed

    def threads_for(self, limit: int) -> int:
        """The fastest certified number of threads up to `limit`, taking a product's time as proportional to its weights."""
        return min((n for n in self.allowed if n <= limit), key=lambda n: (self._cost(n), -n))

    def _cost(self, threads: int) -> float:
        """Relative time of a pass of few rows. Products that are not certified on `threads` threads run on one."""
        some = self.allowed[threads]
        return sum(k * n / (threads if some.serves((k, n)) else 1) for k, n in self.row_counts)

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if not f.passed]

    @property
    def has_teeth(self) -> bool:
        """Whether at least one negative control differed, as it must."""
        return any(f.control and not f.equal for f in self.findings)

    @property
    def certified(self) -> bool:
        return not self.failures and self.has_teeth

    def to_json(self) -> str:
        return json.dumps(
            {
                "certified": self.certified,
                "threads": {str(count): _allowed_json(some) for count, some in self.allowed.items()},
                "query_rows": list(self.query_rows),
                "findings": [asdict(f) for f in self.findings],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Certificate":
        """The inverse of `to_json`; BadCertificate names the first field that is not of its type."""
        record = read(_CertificateRecord, text, "The certificate", BadCertificate)
        if 1 not in record.threads:
            raise BadCertificate("The certificate is invalid: it does not cover one thread - at `$.threads`.")
        allowed = {count: some.allowed() for count, some in record.threads.items()}
        return cls({1: allowed[1]} | allowed, record.query_rows, record.findings)


@dataclass(frozen=True)
class _AllowedRecord:
    row_counts: dict[ShapeText, tuple[Positive, ...]]
    packed: tuple[ShapeText, ...]

    def allowed(self) -> Allowed:
        counts = {_shape(text): rows for text, rows in self.row_counts.items()}
        return Allowed(counts, frozenset(map(_shape, self.packed)))


@dataclass(frozen=True)
class _CertificateRecord:
    """What `Certificate.to_json` writes. Whether it is certified follows from the findings."""

    certified: bool
    threads: dict[Positive, _AllowedRecord]
    query_rows: tuple[Positive, ...]
    findings: tuple[Finding, ...]


def _allowed_json(some: Allowed) -> dict[str, Any]:
    counts = {f"{k}x{n}": list(c) for (k, n), c in sorted(some.row_counts.items())}
    return {"row_counts": counts, "packed": [f"{k}x{n}" for k, n in sorted(some.packed)]}


def _shape(text: str) -> Shape:
    inputs, outputs = text.split("x")
    return int(inputs), int(outputs)
