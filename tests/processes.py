"""For tests that start other processes: certificates of their own, and Ray clusters that start on a busy machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from replaylens.engine.proof import certificates


@pytest.fixture(autouse=True, scope="session")
def own_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Certificates are neither read from nor written to the user's cache. Subprocesses share the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLAYLENS_CACHE", str(tmp_path_factory.mktemp("certificates")))
        patch.setattr(certificates, "_EXAMINED", {})
        yield


def python_path(folder: Path) -> str:
    """A PYTHONPATH that hides rfc3987_syntax from the processes of a cluster, by a module in `folder`, which is created.

    jsonschema, which Ray imports, imports it if it is installed, as Jupyter wants. It builds a grammar for 1.8 s, in each of
    Ray's six processes. Ray ends a node whose agents take more than 15 s, which on two busy cores they then do.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rfc3987_syntax.py").write_text('raise ImportError("hidden from the cluster")\n')
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
