"""Whatever JSON stands in a trace or a certificate: it is refused by a named error with the field's path, or it is valid."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadFile
from replaylens.engine.proof.doctor import Certificate, Finding
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from tests.toy_model import random_model

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def trace() -> Trace:
    """All kinds of events, with edits, captures and Z."""
    engine = Engine(random_model(), None, record=True)
    root = engine.prompt([3, 1, 4, 1], sites="SZ", edits=[Edit("S", "zero", positions=[1, 2], layers=[1])])
    (fork,) = root.fork()
    root.generate(6, drafter="lens", sampling=Sampling(temperature=0.7, seed=5, logit_bias={4: 0.5}))
    fork.force([2, 7])
    fork.rollback(5)
    fork.release()
    kinds = {event["event"] for event in engine.trace.events}
    assert kinds == {"plant", "fork", "generate", "draft", "verdict", "finish", "force", "rollback", "release"}
    return engine.trace


def changed(trace: Trace, path: tuple[Any, ...], value: Any, file: Path) -> Path:
    """The trace with one value replaced, saved with the hash of what it says now."""
    events = json.loads(json.dumps(trace.events))
    there: Any = events
    for step in path[:-1]:
        there = there[step]
    there[path[-1]] = value
    Trace(trace.fingerprint, events).save(file)
    return file


def first(trace: Trace, kind: str) -> int:
    return next(i for i, event in enumerate(trace.events) if event["event"] == kind)


HOSTILE: dict[str, tuple[str, tuple[Any, ...], Any]] = {
    "true for a branch": ("fork", ("branch",), True),
    "a float for a branch": ("fork", ("branch",), 0.0),
    "a float for a token": ("plant", ("tokens",), [3.0]),
    "nested tokens": ("force", ("tokens",), [[[2]]]),
    "true for a position": ("fork", ("at",), True),
    "a negative rollback": ("rollback", ("to",), -1),
    "text for a number of tokens": ("generate", ("n",), "6"),
    "a float for the seed": ("generate", ("sampling", "seed"), 5.0),
    "a temperature below zero": ("generate", ("sampling", "temperature"), -1.0),
    "an unknown parameter": ("generate", ("sampling", "charm"), 1),
    "an unknown field": ("release", ("hook",), "os.system"),
    "an edit of another type": ("plant", ("edits", 0, "picks"), "all"),
    "an unknown field of an edit": ("plant", ("edits", 0, "code"), "x"),
    "a capture of another type": ("plant", ("capture", "sites"), 3),
    "a lens of another type": ("plant", ("capture", "lens", "top_k"), 8.0),
    "chains of no tokens": ("draft", ("chains",), [1, 2]),
    "a float for the accepted": ("verdict", ("accepted",), 2.0),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_events(trace: Trace, tmp_path: Path, name: str) -> None:
    kind, path, value = HOSTILE[name]
    number = first(trace, kind)
    file = changed(trace, (number, *path), value, tmp_path / "trace.jsonl")
    with pytest.raises(BadFile, match=f"line {number + 2}: not an event") as caught:
        Trace.load(file)
    assert any(str(step) in str(caught.value) for step in path), "the error names the field"


def test_numbers_that_are_none(trace: Trace, tmp_path: Path) -> None:
    for number in (float("nan"), float("inf")):
        place = first(trace, "generate"), "sampling", "temperature"
        with pytest.raises(BadFile, match="not JSON"):
            Trace.load(changed(trace, place, number, tmp_path / "trace.jsonl"))


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_anywhere_in_an_event(trace: Trace, tmp_path: Path, data: st.DataObject) -> None:
    events = json.loads(json.dumps(trace.events))
    number = data.draw(st.integers(0, len(events) - 1))
    path, value, there = [number], data.draw(JSON), events[number]
    while isinstance(there, dict | list) and there and (len(path) == 1 or data.draw(st.booleans())):
        step = data.draw(st.sampled_from(sorted(there) if isinstance(there, dict) else range(len(there))))
        there = there[step]
        path.append(step)
    try:
        loaded = Trace.load(changed(trace, tuple(path), value, tmp_path / "trace.jsonl"))
    except BadFile:
        return
    found: Any = loaded.events
    for step in path:
        found = found[step]
    assert found == value and type(found) is type(value)


CERTIFICATE = Certificate((Finding("op", "[3, 5]", "check", True), Finding("op", "", "", False, control=True)))
BAD_CERTIFICATES: dict[str, tuple[tuple[Any, ...], Any]] = {
    "text for a flag": (("findings", 0, "equal"), "yes"),
    "a number for an op": (("findings", 0, "op"), 3),
    "an unknown field": (("findings", 0, "code"), "x"),
    "a field of earlier versions": (("threads",), {}),
    "a number for the arithmetic": (("arithmetic",), 32),
    "an object for findings": (("findings",), {}),
}


@pytest.mark.parametrize("name", BAD_CERTIFICATES)
def test_hostile_certificates(name: str) -> None:
    path, value = BAD_CERTIFICATES[name]
    raw = json.loads(CERTIFICATE.to_json())
    assert Certificate.from_json(json.dumps(raw)) == CERTIFICATE
    there = raw
    for step in path[:-1]:
        there = there[step]
    there[path[-1]] = value
    with pytest.raises(BadFile, match="The certificate is invalid"):
        Certificate.from_json(json.dumps(raw))


@pytest.mark.parametrize("text", ["", "{", "NaN", "[]", "3", "[" * 100_000, '{"certified": true}'])
def test_what_is_no_certificate(text: str) -> None:
    with pytest.raises(BadFile):
        Certificate.from_json(text)
