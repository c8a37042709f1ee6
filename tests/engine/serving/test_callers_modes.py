"""The caller's modes of torch change nothing: an engine made within one, used within it, or both, gives the same bits.

Here the whole caller is within the modes, and some that `tests/hostile.py` does not have: transforms of torch.func, and edits
and streams that were made elsewhere. All public calls are in `tests/test_boundary.py`, modes within passes in
`tests/engine/passes/test_thread_counts.py`.
"""

import ast
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from replaylens import Edit, Engine, tasks
from replaylens.engine.errors import BadEdit
from replaylens.engine.model import modes
from tests.engine.reference import same_bits
from tests.hostile import MODES, Mode
from tests.toy_model import random_model

PROMPT = "A coin's state is heads. Alice flips. What's the state? A:"


class Session:
    """One branch, a fork with an edit, and what each verb gives."""

    def __init__(self, engine: Engine, vector: Tensor) -> None:
        self.engine, self.vector = engine, vector

    def prompt(self) -> Sequence[Tensor]:
        self.branch = self.engine.prompt(PROMPT, sites="STCZ")
        return [self.branch.kv()]

    def fork(self) -> Sequence[Tensor]:
        edit = Edit("blocks.1.hook_in", "add", self.vector, positions=slice(1, 3))
        (self.edited,) = self.branch.fork(at=3, edits=[edit])
        return [self.edited.force([1, 2, 3]).kv()]

    def generate(self) -> Sequence[Tensor]:
        return [self.branch.generate(3, drafter="self", window=3).kv()]

    def rollback(self) -> Sequence[Tensor]:
        self.branch.rollback(self.branch.root_length)
        return [self.branch.generate(2).kv()]

    def activations(self) -> Sequence[Tensor]:
        return [self.branch.activations[site] for site in self.branch.activations.sites()]

    def logits(self) -> Sequence[Tensor]:
        return [self.branch.logits(), self.edited.logits()]

    def gradients(self) -> Sequence[Tensor]:
        found = [self.edited.gradients(metric, "S") for metric in ((1, 2), lambda logits: (logits * logits).sum())]
        return [each[site] for each in found for site in each]

    def dump(self, folder: Path) -> str:
        run = self.engine.replay(tasks.get("coin")().examples(2), sites="S", max_new=2)
        return str(run.save(folder).digest)


VERBS = ("prompt", "fork", "generate", "rollback", "activations", "logits", "gradients")


def outcome(loaded: Mode, used: Mode, folder: Path, made: Mode = nullcontext) -> dict[str, Any]:
    """What each verb gives, in an engine loaded within one mode and used within another."""
    with loaded():
        engine = Engine.load("coin-plain")
    with made():
        vector = torch.ones(128, dtype=torch.float32, device="cpu")
    session, found = Session(engine, vector), dict[str, Any]()
    for verb in VERBS:
        with used():
            found[verb] = getattr(session, verb)()
    with used():
        found["dump"] = session.dump(folder)
    return found


@cache
def truth(folder: Path) -> dict[str, Any]:
    return outcome(nullcontext, nullcontext, folder)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return truth(tmp_path_factory.getbasetemp() / "usual-modes")


def different(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """The verbs that give other bits, another dtype or tensors that autograd cannot save."""

    def same(a: Any, b: Any) -> bool:
        if isinstance(a, str):
            return bool(a == b)
        pairs = list(zip(a, b, strict=True))
        return all(type(x) is Tensor and x.dtype == y.dtype and torch.equal(x, y) and not x.is_inference() for x, y in pairs)

    return [verb for verb in theirs if not same(ours[verb], theirs[verb])]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["loaded within", "used within", "both"])
@pytest.mark.parametrize("mode", MODES)
def test_no_verb_depends_on_the_mode(mode: str, where: str, usual: dict[str, Any], tmp_path: Path) -> None:
    loaded = MODES[mode] if where != "used within" else nullcontext
    used = MODES[mode] if where != "loaded within" else nullcontext
    assert different(outcome(loaded, used, tmp_path / "d"), usual) == []


def test_an_edit_made_in_inference_mode_has_gradients(usual: dict[str, Any], tmp_path: Path) -> None:
    assert different(outcome(nullcontext, nullcontext, tmp_path / "d", made=torch.inference_mode), usual) == []


@pytest.mark.parametrize("mode", ["inference mode", "the meta device", "fake tensors"])
def test_control_without_leaving_them_modes_stop_the_engine(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "plain", nullcontext)
    loaded, used = (MODES[mode], nullcontext) if mode == "inference mode" else (nullcontext, MODES[mode])
    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)):
        outcome(loaded, used, tmp_path / "d")


@pytest.mark.parametrize("mode", ["inference mode", "the meta device", "fake tensors"])
def test_models_that_think_do_not_depend_on_the_mode(mode: str) -> None:
    truth = Engine.load("coin-thinking").prompt(PROMPT, sites="S").generate(2)
    with MODES[mode]():
        engine = Engine.load("coin-thinking")
        branch = engine.prompt(PROMPT, sites="S").generate(2)
    assert branch.tokens == truth.tokens and same_bits(branch.kv(), truth.kv())
    again = engine.prompt(PROMPT, sites="S").generate(2)
    assert same_bits(again.kv(), truth.kv())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_is_left_on_every_device(device: str) -> None:
    torch.set_autocast_enabled(device, True)
    try:
        held = modes.plain()
        assert held is not None
        with held:
            assert not torch.is_autocast_enabled(device)
        assert torch.is_autocast_enabled(device)
    finally:
        torch.set_autocast_enabled(device, False)


@pytest.mark.parametrize("mode", ["inference mode", "the meta device", "fake tensors"])
def test_the_callers_mode_is_restored(mode: str) -> None:
    engine = Engine.load("coin-plain")
    with MODES[mode]():
        before = torch.ones(3)
        engine.prompt(PROMPT).generate(1)
        after = torch.ones(3)
    assert type(before) is type(after) and before.device == after.device and before.is_inference() == after.is_inference()


FACTORIES = {"empty", "zeros", "ones", "randn", "rand", "linspace", "logspace", "eye", "scalar_tensor"}


def unnamed(source: str) -> list[int]:
    """The lines that make a tensor of floats and leave its dtype to torch's default."""
    found = list[int]()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="torch"), attr=name), args=given, keywords=more):
                floats = name in {"tensor", "full"} and re.search(r"\d\.\d|math\.|float\(", ast.unparse(given[-1]))
                if (name in FACTORIES or floats) and not {keyword.arg for keyword in more} & {"dtype", "out"}:
                    found.append(node.lineno)
    return found


def test_new_tensors_of_floats_name_their_dtype() -> None:
    """So that torch.set_default_dtype, which belongs to the process, rounds no weight, edit or result."""
    root = Path(__file__).parents[3]
    files = [file for part in ("engine", "probes", "src/replaylens") for file in sorted((root / part).rglob("*.py"))]
    assert len(files) > 150
    assert [f"{file.relative_to(root)}:{line}" for file in files for line in unnamed(file.read_text())] == []


@pytest.mark.parametrize("planted", ["torch.tensor(0.0)", "torch.zeros(3, device=x.device)", "torch.full((2,), math.nan)"])
def test_a_dtype_that_is_left_out_is_found(planted: str) -> None:
    """Negative control."""
    assert unnamed(f"a = {planted}") == [1] and unnamed(f"a = {planted[:-1]}, dtype=torch.float32)") == []


def test_an_engine_made_by_hand_in_inference_mode_is_an_ordinary_one() -> None:
    model = random_model()
    with torch.inference_mode():
        engine = Engine(model)
    assert not engine.runner.cache.data.is_inference()
    assert torch.equal(engine.prompt([1, 2, 3]).fork(at=2)[0].force([5]).kv(), Engine(model).prompt([1, 2, 5]).kv())


@pytest.mark.parametrize("mode", ["the meta device", "fake tensors", "autocast"])
def test_streams_are_stepped_in_no_callers_mode(mode: str, usual: dict[str, Any]) -> None:
    """A stream is opened outside the mode, and its tokens are asked for within it."""
    branch = Engine.load("coin-plain").prompt(PROMPT)
    stream = branch.stream(2, drafter="self", window=1)
    with MODES[mode]():
        assert len(list(stream)) == 2
    assert different({"rollback": [branch.kv()]}, {"rollback": usual["rollback"]}) == []


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor]], Any]] = {
    "vmap": torch.func.vmap,
    "grad": lambda function: torch.func.grad(lambda x: function(x).sum()),
    "functionalize": torch.func.functionalize,
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_an_engine_called_under_torch_func_gives_the_same_bits(transform: str, usual: dict[str, Any], tmp_path: Path) -> None:
    session, found = Session(Engine.load("coin-plain"), torch.ones(128)), dict[str, Any]()

    def function(x: Tensor) -> Tensor:
        found.update({verb: getattr(session, verb)() for verb in VERBS})
        return x * 2

    TRANSFORMS[transform](function)(torch.ones(3))
    assert different(found, {verb: usual[verb] for verb in VERBS}) == []


def test_values_without_numbers_are_refused() -> None:
    branch = Engine.load("coin-plain").prompt(PROMPT)
    with FakeTensorMode():
        fake = torch.ones(128)

    def edited(x: Tensor) -> Tensor:
        branch.fork(edits=[Edit("blocks.1.hook_in", "add", x)])
        return x

    with pytest.raises(BadEdit, match="no numbers of its own: it was made within FakeTensorMode"):
        edited(fake)
    with pytest.raises(BadEdit, match=r"argument of a function under torch\.func"):
        torch.func.vmap(edited)(torch.ones(2, 128))
