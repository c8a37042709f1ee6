"""`Certificate`: which shapes of which ops were shown to give canonical bits on this device."""

import json
from dataclasses import asdict, dataclass

from replaylens.engine.passes.products import RowCounts, Shape


@dataclass(frozen=True)
class Finding:
    """One comparison of bits."""

    op: str
    shape: str
    check: str
    equal: bool
    control: bool = False
    """a negative control: it should differ for at least one shape, or the comparison has no teeth"""

    @property
    def passed(self) -> bool:
        return self.control or self.equal


@dataclass(frozen=True)
class Certificate:
    """What the doctor found. The engine uses only what stands here."""

    row_counts: RowCounts
    """per product shape: row counts that give the bits of the reference tile, largest first"""
    packed: frozenset[Shape]
    """product shapes that give the same bits with a packed weight, at any row count"""
    query_rows: tuple[int, ...]
    """query rows per attention piece that give the bits of the reference piece, smallest first"""
    findings: tuple[Finding, ...]
    threads: int

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if not f.passed]

    @property
    def has_teeth(self) -> bool:
        """Whether some negative control differed, as it must."""
        return any(f.control and not f.equal for f in self.findings)

    @property
    def certified(self) -> bool:
        return not self.failures and self.has_teeth

    def to_json(self) -> str:
        counts = {f"{k}x{n}": list(c) for (k, n), c in sorted(self.row_counts.items())}
        return json.dumps(
            {
                "certified": self.certified,
                "threads": self.threads,
                "row_counts": counts,
                "packed": [f"{k}x{n}" for k, n in sorted(self.packed)],
                "query_rows": list(self.query_rows),
                "findings": [asdict(f) for f in self.findings],
            },
            indent=1,
        )

    @classmethod
    def from_json(cls, text: str) -> "Certificate":
        """Inverse of `to_json`."""
        raw = json.loads(text)
        counts = {_shape(text): tuple(rows) for text, rows in raw["row_counts"].items()}
        packed = frozenset(map(_shape, raw["packed"]))
        findings = tuple(Finding(**f) for f in raw["findings"])
        return cls(counts, packed, tuple(raw["query_rows"]), findings, raw["threads"])


def _shape(text: str) -> Shape:
    inputs, outputs = text.split("x")
    return int(inputs), int(outputs)
