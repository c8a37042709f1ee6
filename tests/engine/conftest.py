"""Fixtures for the engine's tests."""

from collections.abc import Iterator
from typing import Any

import pytest

from replaylens.engine.engine import Engine
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.products import Finding
from replaylens.engine.proof import certificates, doctor
from replaylens.engine.proof.doctor import Examination
from tests.engine.coin_engine import fresh

_ATTENTION: dict[Any, tuple[tuple[int, ...], list[Finding], list[int]]] = {}
_ARITHMETIC = ("passes", "proof", "test_callers_modes")
"""folders and files that replace arithmetic, or the modes that it runs in"""


@pytest.fixture(autouse=True, scope="session")
def own_certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every run examines the arithmetic anew: certificates are neither read from nor written to the user's cache."""
    folder = tmp_path_factory.mktemp("certificates")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "cache_folder", lambda: folder)
        yield


@pytest.fixture(autouse=True, scope="module")
def attention_examined_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Models of many shapes are loaded here. Attention takes most of an examination: one of its kind is enough per process."""
    examine = doctor._examine_attention

    def once(model: Decoder, seen: Examination) -> tuple[int, ...]:
        c = model.config
        key = (c.num_heads, c.kv_shape, c.scale, c.attn_softcap, tuple(seen.more))
        if key not in _ATTENTION:
            before = len(seen.findings)
            _ATTENTION[key] = examine(model, seen), seen.findings[before:], list(seen.more)
            return _ATTENTION[key][0]
        sizes, findings, more = _ATTENTION[key]
        seen.findings += findings
        seen.more[:] = more
        return sizes

    with pytest.MonkeyPatch.context() as patch:
        if not {request.path.parent.name, request.path.stem} & set(_ARITHMETIC):
            patch.setattr(doctor, "_examine_attention", once)
        yield


@pytest.fixture
def served() -> Engine:
    """A fresh engine of `coin-plain`."""
    return fresh()
