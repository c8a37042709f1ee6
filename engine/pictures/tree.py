"""`Tree`: a path and its branches. It draws itself in a notebook and in a terminal."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from replaylens.engine.pictures import html, terminal, tree_html
from replaylens.engine.pictures.paths import Paths

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult


@dataclass(frozen=True, repr=False)
class Tree(Paths):
    """Paths that draw themselves."""

    def __str__(self) -> str:
        return "\n".join(line.plain for line in terminal.tree_lines(self))

    __repr__ = __str__

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield from terminal.tree_lines(self)

    def _repr_html_(self) -> str:
        return html.fragment(tree_html.draw(self))
