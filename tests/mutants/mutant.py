"""`Mutant`: one planted fault, as data."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path


class CannotApply(Exception):
    """The source no longer holds the text that a mutant replaces, or holds it more than once."""


@cache
def _dumped(source: str) -> str:
    """Of a module that many mutants share."""
    return ast.dump(ast.parse(source))


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
        changed = source.replace(self.before, self.after)
        try:
            same = ast.dump(ast.parse(changed)) == _dumped(source)
        except SyntaxError as error:
            raise CannotApply(f"{self.module} does not compile with it: {error}") from None
        if same:
            raise CannotApply(f"it changes nothing that {self.module} does")
        return changed
