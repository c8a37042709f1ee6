"""`Mutant`: one planted fault, as data."""

import ast
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from pathlib import Path


class CannotApply(Exception):
    """The source no longer holds the text that a mutant replaces, or holds it more than once."""


@cache
def _statements(source: str) -> list[tuple[int, int, str]]:
    """The statements of a module, which many mutants share: the characters [start, end) of their lines, and their tree."""
    found, starts = [], list(accumulate((len(line) + 1 for line in source.split("\n")), initial=0))
    for node in ast.parse(source).body:
        first = min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", []))])
        found.append((starts[first - 1], starts[node.end_lineno or first], ast.dump(node)))
    return found


@dataclass(frozen=True)
class Mutant:
    """A piece of source, its replacement, and the tests that must fail."""

    name: str
    module: str
    """dotted name, such as replaylens.engine.loop.commit"""
    before: str
    """occurs exactly once in the module's source"""
    after: str
    breaks: str
    """the promise that the fault breaks"""
    tests: tuple[str, ...]
    """files or node ids for pytest; at least one test among them must fail"""

    def path(self, root: Path) -> Path:
        """The module's file in a tree."""
        return root / "src" / f"{self.module.replace('.', '/')}.py"

    def applied(self, source: str) -> str:
        """The source with the fault. Raises CannotApply if the table is out of date or the fault changes nothing."""
        count = source.count(self.before)
        if count != 1:
            raise CannotApply(f"the text occurs {count} times in {self.module}, not once")
        changed, at = source.replace(self.before, self.after), source.index(self.before)
        whole = (0, len(source), "")
        start, end, tree = next((each for each in _statements(source) if each[0] <= at < each[1]), whole)
        if at + len(self.before) > end:  # over several statements
            (start, end, _), tree = whole, ""
        try:
            found = ast.parse(source[start:end].replace(self.before, self.after)).body
            same = [ast.dump(node) for node in found] == ([tree] if tree else [each[2] for each in _statements(source)])
        except SyntaxError as error:
            raise CannotApply(f"{self.module} does not compile with it: {error}") from None
        if same:
            raise CannotApply(f"it changes nothing that {self.module} does")
        return changed
