"""A fixture for files with models of many shapes: the doctor examines attention of one kind once per process.

Attention takes most of an examination. A file that imports the fixture must not replace any arithmetic.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.products import Finding
from replaylens.engine.proof import doctor
from replaylens.engine.proof.doctor import Examination

_KNOWN: dict[Any, tuple[tuple[int, ...], list[Finding], list[int]]] = {}


@pytest.fixture(autouse=True, scope="module")
def attention_examined_once() -> Iterator[None]:
    examine = doctor._examine_attention

    def once(model: Decoder, seen: Examination) -> tuple[int, ...]:
        c = model.config
        key = (c.num_heads, c.kv_shape, c.scale, c.attn_softcap, tuple(seen.more))
        if key not in _KNOWN:
            before = len(seen.findings)
            _KNOWN[key] = examine(model, seen), seen.findings[before:], list(seen.more)
            return _KNOWN[key][0]
        sizes, findings, more = _KNOWN[key]
        seen.findings += findings
        seen.more[:] = more
        return sizes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "_examine_attention", once)
        yield
