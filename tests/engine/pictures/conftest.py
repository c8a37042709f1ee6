"""The view tests' model, which emits markup, and its run."""

from tests.views.conftest import engine, run  # noqa: F401
