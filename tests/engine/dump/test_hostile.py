"""Whatever JSON stands in a manifest, plan or part: it is refused by a named error with the field's path, or it is valid."""

import copy as copies
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from replaylens.engine.dump.manifest import Manifest, _seal
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.writer import DumpWriter
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadRequest
from replaylens.tasks.errors import TaskError
from tests.engine.dump.damage import edit_manifest

Planned = Callable[..., DumpPlan]
FREE = ("knobs", "drafter_settings")
"""their content is any JSON: the task and the drafter check it"""


def set_at(path: str, value: Any) -> Callable[[dict[str, Any]], object]:
    """Replace the value at a path such as `plan.examples.start`."""
    *way, last = path.split(".")

    def change(raw: Any) -> None:
        for step in way:
            raw = raw[int(step) if isinstance(raw, list) else step]
        raw[int(last) if isinstance(raw, list) else last] = value

    return change


HOSTILE: dict[str, tuple[str, Any]] = {
    "a float for a count": ("shards.0.rows", 4.0),
    "true for an index": ("shards.0.first_example", False),
    "a float for the schema": ("schema", 1.0),
    "true for the schema": ("schema", True),
    "a float for the first example": ("plan.examples.start", 0.0),
    "text for the last example": ("plan.examples.stop", "10"),
    "true for shard examples": ("plan.examples_per_shard", True),
    "a float for shard examples": ("plan.examples_per_shard", 4.0),
    "a float for the window": ("plan.window", 8.0),
    "a list for the window": ("plan.window", [8]),
    "text for a flag": ("plan.rejected", "no"),
    "a number for a flag": ("plan.rejected", 1),
    "a float for max_new": ("plan.max_new", 7.0),
    "a number for the task": ("plan.task", 3),
    "a list for the task": ("plan.task", ["coin"]),
    "a number for the positions": ("plan.positions", 3),
    "a list for the dtype": ("plan.dtype", ["float32"]),
    "nested lists for sites": ("plan.sites", [[["blocks.0.hook_in"]]]),
    "text for sites": ("plan.sites", "STC"),
    "a list for knobs": ("plan.knobs", [["flips", 3]]),
    "text for the drafter's settings": ("plan.drafter_settings", "fast"),
    "true for the temperature": ("plan.sampling.temperature", True),
    "a float for the seed": ("plan.sampling.seed", 0.0),
    "a list for the sampling": ("plan.sampling", [0]),
    "nothing of the sampling": ("plan.sampling", {}),
    "half of the lens": ("plan.lens", {"sites": ["blocks.0.hook_in"], "full": False}),
    "a float for top_k": ("plan.lens.top_k", 8.0),
    "text for a flag of the lens": ("plan.lens.full", "yes"),
    "an unknown field of the lens": ("plan.lens.hook", "os.system"),
    "text for edits": ("plan.edits", "none"),
    "a float for the layer": ("sites.blocks/0/hook_in.layer", 0.0),
    "true for a length": ("sites.blocks/0/hook_in.shape", [True]),
    "nested lists for a shape": ("sites.blocks/0/hook_in.shape", [[32]]),
    "nested lists for aliases": ("sites.blocks/0/hook_in.aliases", [["x"]]),
    "a list for the labels": ("labels", [["face", "string"]]),
    "a list for a hash": ("shards.0.sha256", ["0" * 64]),
    "a hash with a line end": ("shards.0.sha256", "0" * 64 + "\n"),
    "a list for the index": ("index", []),
    "a number for a fingerprint's part": ("fingerprint.weights", 7),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest(copy: Path, name: str) -> None:
    path, value = HOSTILE[name]
    edit_manifest(copy, with_slashes(set_at(path, value)))
    with pytest.raises(BadDump, match=r"manifest\.json") as caught:
        Dump.open(copy)
    field = path.split(".")[-1]
    assert field in str(caught.value), "the error names the field"


def with_slashes(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    """Names of sites have dots in them: a path writes slashes there."""

    def renamed(raw: dict[str, Any]) -> None:
        raw["sites"] = {name.replace(".", "/"): site for name, site in raw["sites"].items()}
        change(raw)
        raw["sites"] = {name.replace("/", "."): site for name, site in raw["sites"].items()}

    return renamed


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity", "1e999", "[" * 5000 + "]" * 5000])
@pytest.mark.parametrize("place", ['"temperature": 0.0', '"p": 0.5'])
def test_numbers_that_are_none(copy: Path, place: str, literal: str) -> None:
    """Sealed by a writer whose JSON has such numbers, as Python's has."""
    path = copy / "manifest.json"
    text = path.read_text()
    assert place in text
    path.write_text(text.replace(place, f"{place.split(':')[0]}: {literal}"))
    if not literal.startswith("["):
        raw = json.loads(path.read_text())
        raw.pop("seal")
        raw["seal"] = _seal(raw)
        path.write_text(json.dumps(raw).replace("Infinity", "1e999") if literal == "1e999" else json.dumps(raw))
    with pytest.raises(BadDump, match=r"manifest\.json"):
        Dump.open(copy)


def places(raw: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value, but none within what is free."""
    yield path
    inner = raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ()
    for name, value in inner:
        if name not in FREE:
            yield from places(value, (*path, name))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_json_anywhere_in_a_manifest(reference: Dump, data: st.DataObject) -> None:
    """One value is replaced and the seal is right: BadDump, or a manifest that says the same when it is written again."""
    raw = json.loads(Path(reference.url, "manifest.json").read_text())
    del raw["seal"]
    path = data.draw(st.sampled_from([place for place in places(raw) if place]))
    value = data.draw(JSON)
    changed = copies.deepcopy(raw)
    there = changed
    for step in path[:-1]:
        there = there[step]
    there[path[-1]] = value
    changed["seal"] = _seal(changed)
    try:
        found = Manifest.from_bytes(json.dumps(changed).encode(), "here")
    except BadDump:
        return
    again = json.loads(found.to_bytes())
    for step in path:
        again = again[step]
    same = type(again) is type(value) or {type(again), type(value)} == {int, float}
    assert again == value and same, "it was taken for something else"


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(raw=JSON)
def test_any_json_as_a_plan(raw: Any) -> None:
    with pytest.raises(BadRequest, match="plan"):
        DumpPlan.from_json(raw)


@pytest.mark.parametrize(
    "change", [("plan.window", 8.0), ("plan", [1]), ("fingerprint.torch", 2), ("digest", "none"), ("x", 1)]
)
def test_hostile_plan_of_an_unfinished_dump(engine: Engine, planned: Planned, tmp_path: Path, change: tuple[str, Any]) -> None:
    writer = DumpWriter(tmp_path, planned(), engine.fingerprint)
    assert writer.plan_file.create()
    raw = json.loads((tmp_path / "plan.json").read_text())
    set_at(*change)(raw)
    (tmp_path / "plan.json").write_text(json.dumps(raw))
    with pytest.raises(BadDump, match=r"plan\.json is"):
        writer.plan_file.check()


@pytest.mark.parametrize(
    "change",
    [("shard.rows", 4.0), ("shard.bytes", True), ("index.sha256", "x"), ("sites", []), ("shard.url", "x"), ("index", [[]])],
)
def test_a_hostile_part_is_no_part(
    engine: Engine, planned: Planned, reference: Dump, tmp_path: Path, change: tuple[str, Any]
) -> None:
    """The shard counts as missing, as if its entry had been cut short; so it is made again."""
    writer = DumpWriter(tmp_path, planned(), engine.fingerprint)
    content = reference.files.content(0)
    writer.write_shard(0, content, reference.manifest.sites)
    assert writer.parts.entry(0) is not None
    raw = json.loads((tmp_path / "part-00000.json").read_text())
    set_at(*change)(raw)
    (tmp_path / "part-00000.json").write_text(json.dumps(raw))
    assert writer.parts.entry(0) is None


@pytest.mark.parametrize("knobs", [{"self": 1}, {"flips": [[[]]]}, {"flips": {"a": 1}}, {"seed": True}, {"": None}])
def test_hostile_knobs_are_the_tasks_to_refuse(reference: Dump, knobs: dict[str, Any]) -> None:
    plan = DumpPlan.from_json({**reference.manifest.plan.to_json(), "knobs": knobs})
    with pytest.raises(TaskError):
        plan.make_task()
