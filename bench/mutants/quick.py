"""A plugin for the campaign's test runs: Hypothesis draws the same examples every time and does not shrink failures, and slow
tests come last.

Only whether a test fails matters, and shrinking a failure of a state machine takes a minute.
"""

import pytest
from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)
settings.load_profile("mutants")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A run ends with its first failure. A slow test is seldom that one."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
