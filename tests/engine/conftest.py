"""Fixtures for the engine's tests."""

from collections.abc import Iterator

import pytest

from replaylens.engine.engine import Engine
from replaylens.engine.proof import certificates
from tests.engine.coin_engine import fresh


@pytest.fixture(autouse=True, scope="session")
def own_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every run examines the arithmetic anew: certificates are neither read from nor written to the user's cache."""
    folder = tmp_path_factory.mktemp("certificates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "cache_folder", lambda: folder)
        yield


@pytest.fixture
def served() -> Engine:
    """A fresh engine of `coin-plain`."""
    return fresh()
