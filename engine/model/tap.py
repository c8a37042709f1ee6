"""`Tap`: who sees, and may replace, the values at the sites of a pass."""

from functools import partial
from typing import Protocol

from torch import Tensor

from replaylens.engine.model.ops import Observer


class Tap(Protocol):
    """Sees, and may replace, the values at the named sites."""

    def wants(self, site: str) -> bool:
        """Whether to call `__call__` at this site; called once per site and pass."""
        ...

    def __call__(self, site: str, value: Tensor) -> Tensor:
        """The value to continue with: [rows, ...]. Must not change `value` in place."""
        ...


def wanted(tap: Tap | None, *sites: str) -> bool:
    """Whether the tap wants any of the sites."""
    return tap is not None and any(tap.wants(site) for site in sites)


def tapped(tap: Tap | None, site: str, value: Tensor) -> Tensor:
    return tap(site, value) if tap is not None and tap.wants(site) else value


def observer(tap: Tap | None, pattern_site: str, scores_site: str) -> Observer | None:
    """Shows the inside of an attention to the tap. None: it wants neither pattern nor scores."""
    pattern, scores = wanted(tap, pattern_site), wanted(tap, scores_site)
    if tap is None or not (pattern or scores):
        return None
    return Observer(partial(tap, pattern_site) if pattern else None, partial(tap, scores_site) if scores else None)
