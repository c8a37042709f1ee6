"""Fixtures for all tests."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test asks the hub

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell: tests interrupt themselves and others
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():  # before anything imports Triton, which reads it then: kernels run in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]  # nbformat loads jsonschema, which compiles this grammar: 4 s


from replaylens.engine.engine import Engine  # noqa: E402
from tests.engine.coin_engine import fresh  # noqa: E402
from tests.processes import own_certificates  # noqa: E402, F401

LONG = (
    "test_options.py", "test_imports.py", "engine/test_contract.py", "test_package.py", "probes/sweeps/test_sweep.py",
    "extras/test_ranks.py", "test_extend.py", "engine/serving/test_bad_input.py", "docs/test_pages.py",
    "engine/passes/test_thread_counts.py", "workbench/test_grids.py", "dumps/test_cli.py",
    "probes/estimators/test_contract.py", "test_golden.py", "thinking/test_replay.py", "dumps/test_verify.py",
    "gradients/test_gradients.py", "test_boundary.py", "docs/test_shell.py", "weights/test_check.py",
    "gradients/test_recurrent.py", "views/test_figures.py", "probes/questions/test_questions.py",
    "engine/proof/test_trace.py", "weights/test_families.py", "training/test_trainer.py", "views/test_report.py",
    "test_demo.py", "docs/test_words.py", "weights/test_weights.py", "tasks/test_conformance.py",
)  # fmt: skip
"""files that take ten seconds and more: `make test` begins with them, so that no process is left alone with one at the end"""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    first = {Path(__file__).parent / name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: first.get(item.path, len(LONG)))


@pytest.fixture(autouse=True, scope="module")
def what_stays_is_no_garbage() -> None:
    """What is there before a file of tests stays as long as the process: modules, caches, shared fixtures. Looking for garbage
    among them takes seconds after some thousand tests, and tests do it often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small run fastest on one thread. The bits do not depend on it: see the doctor's tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a notebook: progress bars are shown without a terminal."""
    monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))


@pytest.fixture
def served() -> Engine:
    """A fresh engine of `coin-plain` that records a trace."""
    return fresh()
