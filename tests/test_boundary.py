"""Nothing that the package computes depends on the modes of its caller (`src/replaylens/boundary.py`).

Every public name is within the boundary, and is called in hostile modes by a group of `tests/golden.py` or of
`tests/boundary_calls.py` (`boundary.txt` says which) whose results must be the same as in the usual modes, bit for bit; what
is not has its reason here. After a change of public names, `python -m tests.test_boundary` writes that file anew and prints
what no group calls.
"""

import hashlib
import importlib.util
import inspect
import re
import sys
import tempfile
import typing
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

import replaylens
from replaylens import boundary
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadWeights, Caveat
from replaylens.engine.loop.admission import Planner
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.doctor import numbers
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from tests import golden_calls
from tests.boundary_calls import GROUPS as MORE
from tests.devices import swept
from tests.golden import Walk, answers_of, error
from tests.golden_inside import GROUPS
from tests.hostile import COMBINED, MODES, hostile
from tests.test_imports import modules
from tests.toy_model import random_model

ROOT = Path(__file__).parents[1]
TABLE = Path(__file__).with_name("boundary.txt")
PATH = [5, 9, 2, 8, 1, 7]

# ---- the public names ------------------------------------------------------------------------------------------------

IN_A_PASS = "a part of passes, which hold the modes themselves"
REASONS = {
    "engine.errors": "makes texts",
    "engine.loop.lane": IN_A_PASS,
    "engine.model.config.ModelConfig": "fields as they are given; passes compute with them in the usual modes",
    "engine.model.decoder": IN_A_PASS,
    "engine.model.layers": IN_A_PASS,
    "engine.request.capture.CaptureSpec": IN_A_PASS,
    "engine.memory.tree.BranchRecord": "integers and texts",
    "engine.request.capture.Recording.add": IN_A_PASS,
    "engine.request.capture.Recording.end": IN_A_PASS,
    "engine.request.capture.RowBlock": "a protocol",
    "engine.request.placed": IN_A_PASS,
    "engine.request.positions.Position": "integers and texts",
    "engine.request.sampling.Sampling.bare": "compares",
    "engine.request.sampling.Sampling.plain_greedy": "compares",
    "engine.request.scores": IN_A_PASS,
    "engine.request.values": "checks the arguments of calls that are within the boundary",
    "training.recipe.Tokenizer": "a protocol",
    "tasks.reading.Scene": "integers and texts; called by Task, which is within the boundary",
}
"""public names that are outside of the boundary"""


def public() -> dict[str, Callable[..., Any]]:
    """Every function, method and property of the public namespaces, of what the pages import, and of the classes of results:
    those that the annotation of another public name returns."""
    found, seen, waiting = dict[str, Callable[..., Any]](), set[int](), list(_roots())
    while waiting:
        each = waiting.pop()
        if id(each) in seen or not str(getattr(each, "__module__", "")).startswith("replaylens."):
            continue
        if not isinstance(each, type) and not inspect.isfunction(inspect.unwrap(each)):
            continue
        seen.add(id(each))
        calls = _members(each) if isinstance(each, type) else {f"{each.__module__}.{each.__qualname__}": each}
        found |= {name: call for name, call in calls.items() if inspect.unwrap(call).__code__.co_filename != "<string>"}
        for call in calls.values():
            waiting += _returned(call)
    return {name.removeprefix("replaylens."): call for name, call in sorted(found.items())}


def _roots() -> Iterator[Any]:
    for space in (replaylens, replaylens.probes, replaylens.tasks):
        yield from (each for name in space.__all__ if callable(each := getattr(space, name)))
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for module, names in re.findall(r"^from (replaylens[\w.]*) import ([\w, ]+)", page.read_text(), re.MULTILINE):
            for name in names.split(","):
                yield from _imported(module, name.split()[0])


def _imported(module: str, name: str) -> list[Any]:
    """A function or class, or those of a module."""
    found = getattr(import_module(module), name, None)
    if callable(found):
        return [found]
    found = import_module(f"{module}.{name}") if found is None else found
    return (
        [each for key, each in vars(found).items() if callable(each) and not key.startswith("_")]
        if inspect.ismodule(found)
        else []
    )


def _members(cls: type) -> dict[str, Callable[..., Any]]:
    """The functions behind the public attributes of a class. A base's are named as the base's, one of a file as the file's."""
    found = dict[str, Callable[..., Any]]()
    for owner in cls.__mro__:
        if owner.__module__.startswith("replaylens.") and not issubclass(owner, BaseException):
            for name, value in vars(owner).items():
                call = _function(value)
                if call is not None and (name in boundary.SPECIAL or not name.startswith("_")):
                    bound = call.__module__ != owner.__module__ and call.__module__.startswith("replaylens.")
                    where = call.__module__ if bound else f"{owner.__module__}.{owner.__qualname__}"
                    found[f"{where}.{call.__name__ if bound else name}"] = call
    return found


def _function(value: Any) -> Callable[..., Any] | None:
    match value:
        case property():
            return value.fget
        case classmethod() | staticmethod():
            return _function(value.__func__)
        case cached_property():
            return value.func
    return value if inspect.isfunction(value) else None


def _returned(call: Callable[..., Any]) -> Iterator[type]:
    """The classes in what a call returns, by its annotation."""
    call = inspect.unwrap(call)
    try:
        waiting = [typing.get_type_hints(call).get("return")]
    except NameError:  # it names something for type checkers only
        words = re.findall(r"\w+", str(call.__annotations__.get("return")))
        known = _for_checkers(call.__module__) | call.__globals__  # type: ignore[attr-defined]
        waiting = [known.get(word) for word in words]
    while waiting:
        each = waiting.pop()
        waiting += [part for given in typing.get_args(each) for part in (given if isinstance(given, list) else [given])]
        if isinstance(each, type):
            yield each


@cache
def _for_checkers(module: str) -> dict[str, Any]:
    """What a file of the engine imports from it for type checkers only."""
    source = inspect.getsource(import_module(module))
    found = re.findall(r"^    from (replaylens\.engine[\w.]*) import (.+)$", source, re.MULTILINE)
    return {name: getattr(import_module(origin), name) for origin, names in found for name in names.split(", ")}


def reason(name: str, reasons: Iterable[str]) -> str | None:
    """The entry of a list for a name: the name itself or what it belongs to."""
    return next((each for each in reasons if f"{name}.".startswith(f"{each}.")), None)


def test_every_public_name_is_within_the_boundary() -> None:
    outside = [name for name, call in public().items() if not hasattr(call, boundary.MARK)]
    assert [name for name in outside if reason(name, REASONS) is None] == []
    assert [each for each in REASONS if each not in {reason(name, REASONS) for name in outside}] == [], "stale reasons"


def test_every_module_is_enclosed_or_named() -> None:
    """A new module is, without doing anything for it; what is left out exists."""
    loaders = {name: type(getattr(sys.modules[name].__spec__, "loader", None)) for name in modules() if name in sys.modules}
    before = {"replaylens", "replaylens.boundary"}
    assert {name for name, loader in loaders.items() if loader is not boundary._Source} == before
    for name in boundary.INNER.split():
        found: Any = replaylens
        for word in name.split("."):
            found = getattr(found, word, None) or import_module(f"{found.__name__}.{word}")


def test_a_new_function_method_or_property_is_enclosed(tmp_path: Path) -> None:
    """Whatever kind it is: each of them sees the usual direction of rounding, and the caller gets theirs back."""
    source = """
        from contextlib import contextmanager
        from functools import cache, cached_property
        ONE, LITTLE = 1.0, 2.0**-54
        def up(): return _up()
        def steps():
            yield up()
            yield up()
        @contextmanager
        def block(): yield _up()
        @cache
        def kept(number): return _up()
        def _up(): return ONE + LITTLE > ONE
        class New:
            def __init__(self): self.made = _up()
            def __getitem__(self, key): return _up()
            def __iter__(self): yield _up()
            method = lambda self: _up()
            alone, of = staticmethod(lambda: _up()), classmethod(lambda cls: _up())
            read, lazy = property(lambda self: _up()), cached_property(lambda self: _up())
            lazy.__set_name__(None, "lazy")
    """
    file = tmp_path / "made.py"
    file.write_text(inspect.cleandoc(source))
    spec = importlib.util.spec_from_loader("replaylens.made", boundary._Source("replaylens.made", str(file)))
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)

    def found() -> list[bool]:
        new = made.New()
        with made.block() as entered:
            answers = [made.up(), *made.steps(), entered, new.made, new[0], *new, new.method(), new.alone(), new.of()]
        return [*answers, new.read, new.lazy, made.kept(0)]

    with MODES["rounding up"]():
        assert made._up(), "control: a private function called by the test itself is not enclosed"
        assert found() == [False] * 13
        assert made._up()


def test_a_module_is_compiled_in_the_usual_modes(tmp_path: Path) -> None:
    """Python rounds the numbers of a source when it compiles it, and keeps what it compiled."""
    text = f"NUMBERS = {[i / 7 * 10**-9 for i in range(2000)]}"
    usual = dict[str, Any]()
    exec(text, usual)
    for direction in ("up", "down", "to zero"):
        file = tmp_path / f"{direction[0]}.py"
        file.write_text(text)
        loader = boundary._Source("replaylens.made", str(file))
        module = importlib.util.module_from_spec(importlib.util.spec_from_loader("replaylens.made", loader))
        own = dict[str, Any]()
        with MODES[f"rounding {direction}"]():
            loader.exec_module(module)
            exec(text, own)
        assert usual["NUMBERS"] == module.NUMBERS and own["NUMBERS"] != usual["NUMBERS"], "control: Python's own rounding"


# ---- the same bits in every mode -------------------------------------------------------------------------------------

ALL = {**GROUPS, **MORE}
SHORT = ("branches", "edits", "fork statistics", "features", "arrays", "conversation", "builders")
"""groups that are run in each mode by itself"""
ALWAYS = {"features", "arrays", "conversation", "recorded", "texts of tasks"}
"""those that are run in one state of many modes without being asked for; of passes, `derived` is run in every mode"""
_OF_A_RUN = re.compile(rf",\s+dtype=torch\.\w+(?=\))|object at 0x\w+|{re.escape(tempfile.gettempdir())}/[\w.-]+")
"""what is another in each run: places, and the dtype that torch writes behind a tensor where it is not the default one"""


class Bits(Walk):
    """A value to the last bit; of tensors also what kind they are."""

    def _add(self, value: Any) -> None:
        if isinstance(value, Tensor):
            self.texts.append(f"{type(value)} {value.device} {value.is_inference()} {value.requires_grad}")
        super()._add(value)

    def digest(self) -> str:
        found = hashlib.sha256(_OF_A_RUN.sub("", " ".join(self.texts)).encode())
        for each in [*self.committed, *(each.tobytes() for each in self.numbers)]:
            found.update(each)
        return found.hexdigest()


def told(name: str) -> dict[str, str]:
    """A digest of everything that the results of a group tell."""
    untimed = patch.object(Planner, "timing", lambda self, kind, rows: nullcontext())
    with nullcontext() if name == "planner" else untimed:
        found = [pair for key, each in ALL[name]().items() for pair in answers_of(key, each)]
        return {key: Bits(value).digest() for key, value in found if not key.startswith("boundary")}


@cache
def told_usually(name: str) -> tuple[dict[str, str], set[str]]:
    """(the same in the usual modes, the functions that the group calls)"""
    with hostile() as called:
        return told(name), called


def usual(name: str) -> dict[str, str]:
    return told_usually(name)[0]


def test_a_last_bit_is_a_difference() -> None:
    """Negative control, of each place for numbers and of the kind of a tensor."""
    least = torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 2**-22]), torch.tensor([1.0, 2.0], requires_grad=True)
    doubles = 0.1, float(np.nextafter(0.1, 1)), least[0].double(), least[1].double(), least[0].half()
    assert len({Bits(each).digest() for each in (*least, *doubles)}) == 8


def different(ours: dict[str, str], theirs: dict[str, str]) -> list[str]:
    return [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]


@pytest.mark.parametrize(
    "name, state",
    [
        pytest.param(name, state, marks=() if (i + j) % 3 == 0 and name in ALWAYS else pytest.mark.slow)
        for i, name in enumerate([*SHORT, *(each for each in ALL if each not in SHORT)])
        for j, state in enumerate(COMBINED)
    ],
)
def test_no_result_depends_on_the_callers_modes(name: str, state: str) -> None:
    """Every public call of the group is made in many modes at once."""
    with hostile(*COMBINED[state]):
        found = told(name)
    assert different(found, usual(name)) == []


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SHORT)
def test_no_result_depends_on_one_of_the_modes(name: str, mode: str) -> None:
    with hostile(mode):
        assert different(told(name), usual(name)) == []


# ---- which group calls what ------------------------------------------------------------------------------------------


UNCALLED = {
    "engine.records.Fingerprint.other_kind": "compares; two kinds of GPUs are not here",
    **dict.fromkeys([f"tasks.task.Task.{name}" for name in ("answers", "scene", "vocabulary", "write")], "abstract: texts"),
    "tasks.task.Task.next_action_chance": "abstract; see `test_probabilities_of_tasks_do_not_depend_on_the_rounding`",
    "engine.serving.branch.Branch.record": "hands over a field",
    "training.recipe.Recipe.sequences": "kept from when the recipe is made",
}
"""within the boundary, as others are, but no group calls them from outside"""
TEXTS = ("__init__", "__post_init__", "__repr__", "__str__")
"""of these, that they are enclosed is enough: they keep what they are given, and show it"""


def table() -> dict[str, str]:
    """The public names that are called in hostile modes -> the first group that calls them."""
    return dict(line.split(": ") for line in TABLE.read_text().splitlines())


def test_every_public_name_is_called_in_hostile_modes_or_has_a_reason() -> None:
    """A new name: call it in a group of `tests/golden.py`, or say why not."""
    known, names = table(), {name for name in public() if not name.endswith(TEXTS)}
    new = sorted(name for name in names - {*known, *UNCALLED} if reason(name, REASONS) is None)
    gone = sorted({*known, *UNCALLED} - names)
    assert (new, gone) == ([], []), f"python -m tests.test_boundary writes {TABLE.name}; {new=}, {gone=}"
    assert {*known.values()} <= {*ALL} and not {*known} & {*UNCALLED}


# ---- without the harness ---------------------------------------------------------------------------------------------


@cache
def given() -> dict[str, Any]:
    """What calls take, made in the usual modes."""
    rows, groups = numbers(7, 60, 12).double() / 3, torch.arange(60) // 3
    weights = {"value": numbers(8, 32) / 3, "factor": 0.1, "models": [random_model(), random_model(seed=1)]}
    return {"x": rows.numpy(), "y": (rows[:, 0] > rows[:, 1]).numpy(), "groups": groups.numpy(), **weights}


def derived() -> dict[str, Any]:
    """What is computed from passes, and not within one."""
    rl, at, two = replaylens, given(), {"metric": (3, 4)}
    engine, other = (Engine(model, cache_tokens=512) for model in at["models"])
    clean, corrupt = PATH, [6, *PATH[1:]]
    edits = [
        [Edit("blocks.1.attn.hook_pattern", "zero", positions=[4], keys=[1])],
        [Edit("blocks.0.attn.hook_pattern", "set", [0.3, 0.1], positions=5, keys=[0, 2])],
        [Edit("S", "add", at["value"], layers=[1]), Edit("C", "scale", factor=at["factor"], layers=[0])],
        [Edit("S", "project_out", at["value"], layers=[0])],
    ]
    patched = rl.patch(engine, clean, corrupt, **two, layers=[0, 1])
    probe = rl.probes.fit_probe(
        rl.probes.ProbeRows.of_arrays(at["x"], {"y": at["y"]}, groups=at["groups"]), "y", site="X", position="all"
    )
    branch = engine.prompt(clean, sites="SZ", edits=edits[2])
    gradients = branch.gradients((3, 4), sites="S")
    return {
        "initial": [*Decoder(at["models"][0].config).initialize(3).requires_grad_(False).parameters()],
        "under": engine.logits_under(clean, edits),
        "alone": [engine.logits(clean, edits=each) for each in edits],
        "kv": branch.kv(),
        "rows": [branch.activations[site] for site in branch.activations.sites()],
        "gradients": [*gradients.times_input().values()],
        "patched": [patched.effect, patched.frame],
        "paths": rl.path_patch(engine, clean, corrupt, **two, receivers=[(1, 0)]).frame,
        "ablated": rl.ablate(engine, [clean, corrupt], **two, heads=True, how="mean").frame,
        "compared": rl.compare(engine, other, [clean, corrupt], sites="ST").frame,
        "parts": rl.dla(engine, clean, (3, 4)).frame,
        "steered": rl.steer(engine, at["value"], [clean], layers=[1], strengths=[0.3], n=2, **two).frame,
        "attributed": rl.attribution_patching(engine, clean, corrupt, **two).frame,
        "probe": [probe.weight, probe.bias, probe.scores(at["x"][:3])],
        "mean": rl.probes.mean_over_groups(at["x"][:, 0], at["groups"]),
        "warm": branch.generate(3, sampling=Sampling(temperature=0.7, seed=2)).tokens,
    }


@cache
def derived_usually() -> dict[str, str]:
    return {key: Bits(value).digest() for key, value in derived().items()}


@pytest.mark.parametrize(
    "mode",
    swept(
        MODES,
        "rounding up",
        "inference mode",
        "the meta device",
        "fake tensors",
        "float64 by default",
        "three decimal digits",
        "two threads",
    ),
)
def test_what_is_derived_from_passes_does_not_depend_on_a_mode(mode: str) -> None:
    usually = derived_usually()  # first: what calls take is made in the usual modes
    with MODES[mode]():
        found = derived()
    assert different({key: Bits(value).digest() for key, value in found.items()}, usually) == []


@pytest.mark.parametrize("mode", ["inference mode", "the meta device", "rounding up"])
def test_weights_are_read_only_in_every_mode(mode: str) -> None:
    engine = golden_calls.coin()
    with MODES[mode]():
        weights = engine.W_E
    with pytest.raises(BadWeights):
        weights[0] = 0.0


def probabilities() -> list[Any]:
    """Of every task: that of the likeliest next action; of a coin, those of its faces."""
    found, coin = list[Any](), replaylens.tasks.get("coin")(flips=(1, 7), p=0.3)
    for name in replaylens.tasks.names():
        for given in ({}, {"p": 0.3}, {"p": 0.1, "reset": 0.7}):
            made = error(replaylens.tasks.get(name), **given)  # not all of them have these options
            found.append(None if isinstance(made, Exception) else error(made.next_action_chance))
    found = [each for each in found if isinstance(each, float)]
    return [found, *(coin.outcomes(coin.example(i).prompt) for i in range(9))]


@pytest.mark.parametrize("direction", ["up", "down", "to zero"])
def test_probabilities_of_tasks_do_not_depend_on_the_rounding(direction: str) -> None:
    """1 / 3, 1 - p and sums of powers of it: what else tasks compute are integers and texts, and is left alone."""
    usually, shares = probabilities(), [1 / n for n in range(2, 12)]
    with MODES[f"rounding {direction}"]():
        found, others = probabilities(), [1 / n for n in range(2, 12)]
    assert found == usually and len(found[0]) > 12
    assert others != shares, "control: Python's own rounding"


BREAK = ("rounding up", "rounding down", "rounding to zero", "inference mode", "the meta device", "another default device")
BREAK += ("fake tensors",)
"""modes in which results are other ones, or cannot be had, without the boundary"""


@pytest.mark.parametrize("mode", BREAK)
def test_without_the_boundary_results_depend_on_the_mode(mode: str) -> None:
    """Negative control."""
    with hostile(mode, bounded=False):
        try:
            found = {key: Bits(value).digest() for key, value in derived().items()}
        except (RuntimeError, NotImplementedError, AssertionError, FloatingPointError, TypeError):
            return
    assert different(found, derived_usually()) != []


UNDERFLOWS: dict[str, Callable[[Any, dict[str, Any]], Any]] = {
    "a false discovery rate": lambda probes, at: probes.false_discovery([1e-320, 0.1, 1e-310]),
    "a mean": lambda probes, at: probes.mean_over_groups(at["x"][:, 0] * 1e-315, at["groups"]),
    "a fit": lambda probes, at: probes.MassMeanProbe().fit(at["x"] * 1e-170, at["y"]).decision_function(at["x"] * 1e-170),
}


@pytest.mark.parametrize("name", UNDERFLOWS)
def test_a_caller_whom_numpys_errors_interrupt_gets_results(name: str) -> None:
    """np.seterr(all="raise"), and numbers so small that some underflow."""
    at = given()
    usually = UNDERFLOWS[name](replaylens.probes, at)
    with hostile("numpy raises"):
        found = UNDERFLOWS[name](replaylens.probes, at)
    assert Bits(found).digest() == Bits(usually).digest()
    with hostile("numpy raises", bounded=False), pytest.raises(FloatingPointError):  # control
        UNDERFLOWS[name](replaylens.probes, at)


@pytest.mark.parametrize("how", ["raise", "call", "print"])
def test_numpys_errors_are_the_usual_ones(how: Any) -> None:
    def shares() -> list[float]:
        return [float(each) for each in (np.float64(1e-200) * np.float64(1e-200), np.float64(1.0) / np.float64(1e308))]

    enclosed, usually = boundary._enclosed(shares), np.geterr()
    with np.errstate(all=how, call=lambda *_: pytest.fail("called")):
        assert enclosed() == [0.0, 1e-308] and set(np.geterr().values()) == {how}
        assert boundary._enclosed(np.geterr)() == usually
    with MODES["inference mode"]():
        assert boundary._enclosed(modes._ERRORS.get)(None) is None, "no context variable is set, which finalizers must not"
    with np.errstate(all="ignore"):
        assert set(boundary._enclosed(np.geterr)().values()) == {"ignore"}, "what only asks for silence is left"


def test_a_call_costs_a_look_and_a_decode_step_none() -> None:
    """However many tokens are generated: what runs within a step is not enclosed."""
    engine, counts = Engine(random_model(), cache_tokens=512), list[int]()
    held = boundary._held
    for tokens in (2, 42):
        branch = engine.prompt(PATH, sites="STCZ")
        with patch.object(boundary, "_held", side_effect=held) as looks:
            branch.generate(tokens)
        counts.append(looks.call_count)
    assert counts[1] - counts[0] < 10, "of 40 steps"
    modes._write(*modes._PROCESS_MODES)  # torch.set_float32_matmul_precision, set back, leaves oneDNN's own as it was set
    assert boundary._held(len) is None, "in the usual modes, there is no block"


def test_a_warning_names_the_line_that_called_the_package() -> None:
    with pytest.warns(DeprecationWarning, match="old") as found:
        boundary.warn("old", DeprecationWarning)
    assert found[0].filename == __file__


def calls_of_groups() -> dict[str, str]:
    """The functions that groups call -> the first group that does. What one group keeps for others is made by the first."""
    calls = dict[str, str]()
    for name in [*SHORT, *(each for each in ALL if each not in SHORT)]:
        calls = dict.fromkeys(told_usually(name)[1], name) | calls
    return calls


@pytest.mark.slow
def test_the_table_names_what_groups_call() -> None:
    called = calls_of_groups()
    assert [name for name in table() if name not in called] == []


def main() -> None:
    """Write the table, and print what is in no group."""
    names = {name for name in public() if not name.endswith(TEXTS)}
    calls = {name: group for name, group in calls_of_groups().items() if name in names}
    TABLE.write_text("".join(f"{name}: {group}\n" for name, group in sorted(calls.items())))
    print(*sorted(name for name in names - {*calls, *UNCALLED} if reason(name, REASONS) is None), sep="\n")


if __name__ == "__main__":
    main()


def test_a_caveat_names_the_line_of_the_caller() -> None:
    """Python shows a warning once for each line: at a line of ours, the second caller would not see his."""
    engine, text = Engine.load("coin-plain"), "A coin's state is heads. Alice flips"
    branch = engine.prompt(text)
    nowhere = Edit("S", "zero", positions=-1, tokens=[" tails"], layers=[1])
    calls: dict[str, Callable[[], object]] = {
        "forks with one seed": lambda: engine.generate(branch.fork(2), 1, sampling=Sampling(temperature=1.0)),
        "an edit of no token": lambda: engine.prompt(text, edits=[nowhere]),
    }
    for name, call in calls.items():
        with pytest.warns(Caveat) as caught:
            call()
        assert {each.filename for each in caught} == {__file__}, name
