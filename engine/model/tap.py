"""`Tap`: who sees, and may replace, the values at the sites of a pass."""

from typing import Protocol

from torch import Tensor


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
