"""`Window`: drafts that a deterministic request collects from the fast path, one per step, until they are verified together.

They are no tokens of the branch: nobody sees them before the verification, and dropping them costs only time.
"""

from dataclasses import dataclass, field

from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.past import Path


@dataclass(eq=False)
class Window:
    """Up to `count` drafts after position `at` - 1, the last token of the path."""

    at: int
    """the first draft's position"""
    count: int
    chain: list[int] = field(default_factory=list)
    ended: bool = False
    """whether nothing can follow the chain, or the fast path failed"""
    _pages: list[int] | None = None
    """the pages that hold the KV of the rows run so far; None: no row was run"""

    @property
    def full(self) -> bool:
        """Whether the drafts wait for their verification."""
        return self.ended or len(self.chain) >= self.count

    @property
    def num_missing(self) -> int:
        """The steps until it is full."""
        return 0 if self.full else self.count - len(self.chain)

    def num_rows(self, table: PageTable, page_size: int) -> int:
        """The rows that the next draft takes: one, or all again if the KV of earlier rows is gone."""
        return 1 if self._kept(table, page_size) else 1 + len(self.chain)

    def rows(self, path: Path, table: PageTable, page_size: int) -> tuple[int, list[int]]:
        """(first position, tokens) of the rows that the next draft takes."""
        if self._kept(table, page_size):
            return self.at - 1 + len(self.chain), self.chain[-1:]
        return self.at - 1, [path[-1], *self.chain]

    def add(self, token: int, stop_tokens: tuple[int, ...], table: PageTable, page_size: int) -> None:
        """Mutates: one more draft. Precondition: its rows were run into the pages of `table`."""
        self.chain.append(token)
        self.ended = token in stop_tokens
        self._pages = table.pages[(self.at - 1) // page_size :]

    def _kept(self, table: PageTable, page_size: int) -> bool:
        """Whether the KV of earlier rows is where it was written. A page that was shared in the meantime is replaced."""
        return self._pages is not None and self._pages == table.pages[(self.at - 1) // page_size :]
