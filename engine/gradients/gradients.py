"""`Gradients`: of a scalar of the logits, at the sites of one path."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from replaylens.engine.errors import UnknownSite
from replaylens.engine.model import modes


@dataclass(frozen=True, eq=False)
class Gradients(Mapping[str, Tensor]):
    """Site -> the gradient of the metric at every position of the path, [positions, *site shape].

    A site's gradient is that of its value after the branch's edits, as captures show it. A pattern has as many keys as the
    path has positions, and gradient 0 at the keys that a row does not see.
    """

    value: float
    """the metric itself"""
    tokens: tuple[int, ...]
    """the path"""
    certified: bool
    """whether the bits are promised: a canonical path, and a metric that is data rather than a function"""
    activations: Mapping[str, Tensor]
    """the values at the same sites, to the bits that captures have"""
    _found: Mapping[str, Tensor] = field(repr=False)
    _aliases: Mapping[str, str] = field(repr=False)

    def __repr__(self) -> str:
        promised = "certified" if self.certified else "not certified"
        return f"Gradients(of {self.value:.4g} at {len(self._found)} sites, {len(self.tokens)} positions, {promised})"

    @modes.plainly
    def __getitem__(self, site: str) -> Tensor:
        """A copy of a site's gradient, by its name or a legacy name."""
        return self.peek(site).clone()

    def peek(self, site: str) -> Tensor:
        """As `gradients[site]`, but without a copy. The caller must not change it."""
        name = self._aliases.get(site, site)
        if name not in self._found:
            raise UnknownSite(f"No gradient at site {site!r:.60}. There are: {', '.join(self._found)}.")
        return self._found[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    @modes.plainly
    def times_input(self) -> dict[str, Tensor]:
        """Gradient times input, summed over features: site -> [positions]. To first order, the effect of zeroing a row,
        with the opposite sign."""
        return {site: row_sums(g * self.activations[site]) for site, g in self._found.items()}


def row_sums(x: Tensor) -> Tensor:
    """[rows, ...] -> [rows]"""
    with modes.canonical(1):
        return x.flatten(1).sum(1)
