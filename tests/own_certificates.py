"""A fixture for tests that start other processes. A conftest that imports it applies it to its folder."""

from collections.abc import Iterator

import pytest

from replaylens.engine.proof import certificates


@pytest.fixture(autouse=True, scope="session")
def own_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Certificates are neither read from nor written to the user's cache. Subprocesses share the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLAYLENS_CACHE", str(tmp_path_factory.mktemp("certificates")))
        patch.setattr(certificates, "_EXAMINED", {})
        yield
