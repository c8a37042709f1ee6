"""Fixtures for all tests."""

import gc
import os
import sys
from collections.abc import Iterator
from types import ModuleType

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub: no test asks the hub

import pytest
import torch

if not torch.cuda.is_available():  # before anything imports Triton, which reads it then: kernels run in its interpreter
    os.environ["TRITON_INTERPRET"] = "1"


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
