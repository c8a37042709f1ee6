"""A plugin for the campaign's test runs: Hypothesis draws the same examples every time and does not shrink failures.

Only whether a test fails matters, and shrinking a failure of a state machine takes a minute.
"""

from hypothesis import Phase, settings

settings.register_profile("mutants", phases=(Phase.explicit, Phase.generate), derandomize=True, database=None)
settings.load_profile("mutants")
