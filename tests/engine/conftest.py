"""Fixtures of the engine's tests."""

from collections.abc import Iterator

import pytest
import torch

from replaylens.engine import certificates


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Models this small run fastest on one thread. The bits are the same on any number: the doctor's tests show it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def own_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every run examines the arithmetic anew: no certificate is taken from, or left in, the user's cache."""
    folder = tmp_path_factory.mktemp("certificates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "cache_folder", lambda: folder)
        yield
