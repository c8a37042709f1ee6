"""The views' model, which speaks markup, and its run."""

from tests.views.conftest import engine, run  # noqa: F401
