"""Bad input raises a named error that says what to do. Nothing committed is lost, and the engine stays usable.

A request is refused as a whole, before any change: tokens, KV and rows of all branches stay the same.
"""

import contextlib
import io
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import replaylens as rl
from replaylens import Dump, Edit, Run, tasks
from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadEdit,
    BadRange,
    BadRequest,
    ClosedBranch,
    EngineError,
    NonFinite,
    OutOfPages,
    UnknownOption,
    UnknownSite,
)
from replaylens.engine.loop.lane import Job
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.request import Stream
from replaylens.tasks.errors import TaskError
from tests.devices import swept
from tests.toy_model import VOCAB, Reference, continuation, engine, random_model, toy

SITE = "blocks.1.hook_in"
PATTERN = "blocks.0.attn.hook_pattern"


class Desk:
    """An engine with branches of all kinds. Branches a, b, c and `branch`, of nine tokens, are fine."""

    def __init__(self) -> None:
        self.engine: Engine = engine(record=True)
        self.a, self.b, self.c = self.engine.prompts([[1, 2, 3], [4, 5], [6, 7, 8]], sites="S", keep_rejected=True)
        self.branch = self.engine.prompt([1, 2, 3], sites="S", keep_rejected=True)
        self.branch.generate(6, drafter="lens", window=4, keep_pages=True)
        self.rejected = self.branch.rejected[0]
        (self.empty,) = self.branch.fork(at=0)
        self.finished = self.engine.prompt([6, 7]).generate(3, sampling=Sampling(stop_tokens=tuple(range(VOCAB))))
        self.released = self.engine.prompt([5])
        self.released.release()
        self.streamed = self.engine.prompt([3, 1])
        self.stream: Stream = self.streamed.stream(9, window=2)
        next(self.stream)
        self.foreign = engine().prompt([1, 2, 3])

    def look(self) -> list[tuple[list[int], list[Any], Tensor, Tensor | None, str | None]]:
        """Everything visible of every branch."""
        branches = [self.a, self.b, self.c, self.branch, self.finished, self.streamed, self.rejected]
        return [(b.tokens, b.states, self.engine.forest.held_kv(b.lane), self._rows(b), b.finish_reason) for b in branches]

    def _rows(self, branch: Branch) -> Tensor | None:
        return branch.activations[SITE] if branch.lane.recording is not None else None

    def numbers(self) -> tuple[Any, ...]:
        """Numbers that must not grow: branches, jobs, pages in use, events of the trace."""
        loop, pool = self.engine.loop, self.engine.runner.pool
        return len(self.engine.tree), list(loop.lanes), list(loop.jobs), pool.num_free, len(self.engine.trace.events)


def same(before: Any, after: Any) -> bool:
    def equal(x: Any, y: Any) -> bool:
        return torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else bool(x == y)

    return all(equal(x, y) for one, other in zip(before, after, strict=True) for x, y in zip(one, other, strict=True))


Call = Callable[[Desk], Any]
NO_TOKENS: dict[str, Any] = {
    "bytes": b"\x01\x02",
    "a bytearray": bytearray(b"\x01"),
    "a set": {1, 2},
    "a frozenset": frozenset({1}),
    "a dict": {1: 2},
    "keys": {1: 2}.keys(),
    "a number": 5,
    "none": None,
    "two dimensions": torch.tensor([[1, 2], [3, 4]]),
    "no dimension": torch.tensor(1),
    "floats in a tensor": torch.tensor([1.0]),
    "floats in an array": np.array([1.0]),
    "bools in a tensor": torch.tensor([True]),
    "bools in an array": np.array([True]),
    "no values": torch.zeros(2, device="meta", dtype=torch.int64),
}


def narrow(n: int, **options: Any) -> Branch:
    """A request on nine tokens, in passes of 16 rows."""
    return engine(max_rows=16).prompt(range(1, 10)).generate(n, **options)


def forced(drafts: Any) -> Callable[[Desk], Any]:
    return lambda d: d.branch.generate(3, drafter="forced", drafts=drafts)


def edited(*edit: Any, **fields: Any) -> Callable[[Desk], Any]:
    return lambda d: d.branch.fork(edits=[Edit(*edit, **fields)])


REFUSED: dict[type[Exception], list[tuple[Call, str]]] = {
    BadRequest: [
        # prompts
        (lambda d: d.engine.prompt([]), "prompt is empty"),
        (lambda d: d.engine.prompts([[1, 2], []], sites="S"), "prompt is empty"),
        (lambda d: d.engine.prompt([1] * 257), "257 tokens exceed the model's 256 positions"),
        (
            lambda d: d.engine.prompt([1, VOCAB]),
            rf"Token {VOCAB} is not in the vocabulary of {VOCAB} tokens\. Give ids from 0 to",
        ),
        (lambda d: d.engine.prompts([[1, 2], [VOCAB]]), "vocabulary"),
        (lambda d: d.engine.prompt([-1]), "Token -1 is not in the vocabulary"),
        (lambda d: d.engine.prompt([1.0]), r"1\.0 is a float, not a token id\. Give text, or ids"),
        (lambda d: d.engine.prompt([1, None]), "None is a NoneType, not a token id"),
        (lambda d: d.engine.prompt([True, 2]), "True is a bool, not a token id"),
        (lambda d: d.engine.prompt([1, "2"]), "'2' is a str, not a token id"),
        (lambda d: d.engine.prompt("heads"), "no tokenizer. Give token ids"),
        (lambda d: d.engine.prompt([1], sites="Z", targets=[VOCAB]), "not in the vocabulary"),
        (lambda d: d.engine.prompt([1], sites=5), "sites=5. Give letters such as 'STCZ'"),
        (lambda d: d.engine.prompt([1], top_k=3), "Z is not captured. Ask for it, e.g. with sites='Z'"),
        (lambda d: d.engine.prompt([1], sites="S", targets=[3]), "Z is not captured"),
        (lambda d: d.engine.prompt([1], full=True), "Z is not captured"),
        (lambda d: d.engine.prompt([1], sites="Z", targets="ab"), "targets='ab'. Give a list"),
        *((lambda d, k=k: d.engine.prompt([1], sites="Z", top_k=k), "top_k=.* Give a whole") for k in (0, -1, 10**6, 2.5)),
        *((lambda d, v=v: d.engine.prompt(v), "text=|vocabulary|token id") for v in NO_TOKENS.values()),
        (lambda d: d.engine.run_with_cache([1, 2], None, 2), "pos_slice=2. Give a whole number"),
        # requests
        (lambda d: d.branch.generate(0), "n=0.*at least 1"),
        (lambda d: d.branch.generate(-2), "at least 1"),
        (lambda d: d.branch.generate(2.5), "whole number"),
        (lambda d: d.branch.generate(math.nan), "whole number"),
        (lambda d: d.branch.generate("2"), "n='2'. Give a whole number of at least 1"),
        (lambda d: d.branch.generate(True), "n=True. Give a whole number"),
        (lambda d: d.branch.generate(248), "9 tokens and 248 more exceed the model's 256 positions"),
        (lambda d: d.engine.generate([d.b, d.a], 254), "exceed"),
        (lambda d: d.branch.generate(3, window=0), "window=0. Give a whole number of at least 1"),
        (lambda d: d.branch.generate(3, window=-1), "window=-1"),
        (lambda d: d.branch.generate(3, window=1.5), "whole number"),
        (lambda d: d.engine.generate([d.a, d.b], 400, drafter="tree", window=300), "exceed|does not fit"),
        (lambda d: narrow(40, window=17), "window of 17 rows does not fit into a pass of 16"),
        (lambda d: narrow(40, window=6, drafter="tree"), "window of 18 rows does not fit into a pass of 16"),
        (lambda d: narrow(40, drafter="forced", drafts={9: [[1] * 16]}), "window of 17 rows does not fit into a pass of 16"),
        (lambda d: d.branch.generate(3, drafter="oracle"), "Unknown drafter 'oracle'. Known: .*self.*tree"),
        (lambda d: d.engine.generate([d.a, d.b], 3, drafter="oracle"), "oracle"),
        (lambda d: d.branch.generate(3, drafter=None), "drafter=None. Give the name of a drafter"),
        (lambda d: d.branch.generate(3, drafter="model"), "draft_model="),
        (lambda d: d.branch.generate(3, deterministic="no"), "deterministic='no'. Give True or"),
        (lambda d: d.branch.generate(3, drafter="ngram", drafts={9: [[1]]}), "Use drafter='forced'"),
        (forced([[1]]), r"drafts=\[\[1\]\]. Give a dict: position -> list of chains"),
        (
            forced({9: [1, 2]}),
            r"drafts\[9\]=\[1, 2\]: one chain where a list of chains goes\. Give .*\{9: \[\[5, 7\], \[6\]\]\}",
        ),
        (forced({"5": [[1]]}), "position of drafts='5'"),
        (forced({5: [["x"]]}), "Token 'x' in"),
        (forced({9: [[1, VOCAB]]}), "drafts is not in the vocabulary"),
        (forced({9: [[True]]}), "vocabulary"),
        (lambda d: d.branch.generate(3, sampling=Sampling(logit_bias={VOCAB: 1.0})), "vocabulary"),
        (lambda d: d.branch.generate(3, window=1, sampling=Sampling(logit_bias={-1: 1.0})), "Token -1"),
        (lambda d: d.engine.generate([d.a, d.b], 3, sampling=[Sampling(), Sampling(logit_bias={VOCAB: 1.0})]), "vocabulary"),
        (lambda d: d.branch.generate(2, sampling=Sampling(stop_tokens=(10**9,))), "not in the vocabulary"),
        (lambda d: d.branch.generate(2, sampling={}), "sampling={}. Give a Sampling"),
        (lambda d: d.branch.generate(2, sampling={"seed": 1}), "sampling={'seed': 1}. Give"),
        (lambda d: d.branch.generate(2, sampling=0.7), r"sampling=0\.7\. Give a Sampling, such as Sampling\(temperature"),
        (lambda d: d.engine.generate([d.a], 2, sampling=0.7), r"Give a Sampling, such as Sampling\(temperature=0\.7\)"),
        (lambda d: d.engine.generate([d.a], 2, sampling=[3]), "sampling=3. Give"),
        (lambda d: d.engine.generate([d.a, d.b], 3, sampling=[Sampling()]), "1 samplings for 2"),
        (lambda d: d.engine.stream(d.a, 5, sampling="greedy"), "sampling='greedy'. Give a Sampling, such as Sampling"),
        (lambda d: d.engine.replay(tasks.get("coin")().examples(1), sampling=0.7), r"Give a Sampling, such as Sampling\(temp"),
        # of branches
        (
            lambda d: d.engine.generate("some text", 5),
            r"branches='some text'\. Give a list of branches, such as \[engine\.prom",
        ),
        (lambda d: d.engine.generate(d.a, 2), r"branches=Branch\(.*Give a list of branches, such as"),
        (lambda d: d.engine.generate([d.a, 3], 2), "branch=3. Give a Branch"),
        (lambda d: d.engine.generate(["some text"], 5), "Give a Branch, such as prompt"),
        (lambda d: d.engine.generate([d.a, d.b, d.a], 3), "given 2 times"),
        (lambda d: d.engine.generate([d.b, d.b], 3), "given 2 times"),
        (lambda d: d.engine.generate([d.a, d.b, d.streamed], 3), "is busy"),
        (lambda d: d.engine.generate([d.a, d.foreign], 3), "another engine"),
        (lambda d: d.branch.stream(0), "at least 1"),
        (lambda d: d.streamed.stream(3), "is busy"),
        (lambda d: d.engine.stream(d.foreign, 3), "another engine"),
        (lambda d: d.empty.generate(2), "no tokens. Force at least one"),
        (lambda d: d.engine.cancel(Job(d.foreign.lane, 3)), "not a branch of this"),
        (lambda d: d.finished.activations, "Nothing was captured"),
        # forks, forced tokens and rollbacks
        (lambda d: d.branch.fork(0), "n=0. Give a whole number between 1 and"),
        (lambda d: d.branch.fork(-1), "n=-1. Give a whole number between 1 and"),
        (lambda d: d.branch.fork(1.5), "n=1.5. Give a whole number"),
        (lambda d: d.branch.fork(10**6), "n=1000000. Give a whole number between 1 and 65536"),
        (lambda d: d.branch.fork(at=1.5), "at=1.5. Give a whole number"),
        (lambda d: d.branch.rollback(4.5), "whole number"),
        (lambda d: d.streamed.rollback(2), "is busy"),
        (lambda d: d.branch.force([]), "at least one token"),
        (lambda d: d.branch.force([1, VOCAB]), "vocabulary"),
        (lambda d: d.branch.force(" heads"), "no tokenizer"),
        (lambda d: d.branch.force([1] * 248), "257 tokens exceed"),
        *((lambda d, v=v: d.branch.force(v), "tokens=|vocabulary|not a token id") for v in NO_TOKENS.values()),
        (lambda d: d.engine.force_all([d.b, d.b], [[1], [2]]), "given 2 times"),
        (lambda d: d.engine.force_all([d.a, d.streamed], [[1], [2]]), "is busy"),
        (lambda d: d.engine.force_all([d.a, d.foreign], [[1], [2]]), "another engine"),
        (lambda d: d.engine.force_all([d.a], []), "0 texts for 1 branches. Give one for each"),
        (lambda d: d.engine.force_all([d.a, d.b], [[1], []]), "at least one"),
        (lambda d: d.engine.force_all([d.a, d.b], [[1], [VOCAB]]), "vocabulary"),
        (lambda d: d.a.resample(2, at="words"), r"Unknown at 'words'\. Use all, .* or sentences"),
        (lambda d: rl.patch([1], d.engine, [2], metric=3), r"Invalid engine=\[1\] in patch\(\)\. Give an Engine"),
        (lambda d: d.branch.rollback(2), "Use 3 .* to 9"),
        (lambda d: d.branch.rollback(10), "cannot roll back to 10"),
        (lambda d: d.branch.rollback(-1), "cannot roll back to -1"),
    ],
    BadRange: [
        (lambda d: d.branch.fork(at=10), "9 tokens. Cannot fork it at 10"),
        (lambda d: d.branch.fork(at=-1), "Cannot fork it at -1"),
    ],
    ClosedBranch: [
        (lambda d: d.engine.generate([d.a, d.released], 3), "released"),
        (lambda d: d.engine.generate([d.a, d.finished], 3), "finished"),
        (lambda d: d.engine.generate([d.a, d.rejected], 3), "rejected"),
        (lambda d: d.finished.generate(2), "finished. Roll it back or fork it"),
        (lambda d: d.rejected.generate(2), "is rejected. Fork it"),
        (lambda d: d.rejected.stream(3), "rejected"),
        (lambda d: d.rejected.rollback(3), "rejected"),
        (lambda d: d.engine.force_all([d.a, d.finished], [[1], [2]]), "finished"),
        (lambda d: d.engine.force_all([d.a, d.rejected], [[1], [2]]), "rejected"),
        (lambda d: d.released.generate(1), "released"),
        (lambda d: list(d.released.stream(1)), "released"),
        (lambda d: d.released.force([1]), "released"),
        (lambda d: d.released.fork(), "released"),
        (lambda d: d.released.rollback(1), "released"),
        (lambda d: d.released.release(), "released"),
        (lambda d: d.released.kv(), "released"),
        (lambda d: d.engine.force_all([d.released], [[1]]), "released"),
        (lambda d: list(d.engine.stream(d.released, 1)), "released"),
    ],
    UnknownSite: [
        (lambda d: d.engine.prompt([1], sites="SQ"), "SQ"),
        (lambda d: d.engine.prompt([1], sites=["blocks.7.hook_in"]), "blocks"),
        (lambda d: d.engine.prompt([1], sites=["blocks.0.hook_inn"]), "blocks.0.hook_in"),
        (lambda d: d.engine.prompt([1], sites=[5]), "Invalid site 5"),
        (lambda d: d.branch.activations["blocks.0.mlp.hook_out"], "was not captured"),
        (lambda d: d.branch.fork(hooks=[("blocks.0.hook_inn", print)]), "Nearest"),
    ],
    BadEdit: [
        (lambda d: d.branch.fork(hooks=["x"]), "Invalid hook 'x'. Give a list of .site name, function"),
        (lambda d: d.branch.fork(hooks=[("blocks.0.hook_in", 3)]), "function"),
        (lambda d: d.engine.prompt([1], hooks={"blocks.0.hook_in": print}), "hooks=.*Give a list"),
        (lambda d: d.branch.fork(edits=Edit("S", "zero")), "edits=.*Give a list of Edits"),
        (edited("S", "add", torch.ones(32, requires_grad=True)), r"but none flows through an engine. Give value\.detach\(\)"),
        (edited("S", "add", torch.ones(32) + 0j), "Give a dense real tensor"),
        (edited("S", "add", np.array(["a"])), "value for S=.*Give a tensor"),
        (edited(SITE, "add", ["a"]), "Give a tensor, an array or a list"),
        (edited(SITE, "add", [[1.0], [1.0, 2.0]]), "Give a tensor, an array or a list"),
        (edited("S", "zero", layers=1), "layers=1. Give a list of whole numbers"),
        (edited("S", "zero", seed=-1), "seed=-1. Give a whole number between"),
        (edited(SITE, "set", torch.ones(32), factor=2.0), "factor=2.0.*op 'set'.*Only 'add'"),
        (edited(SITE, "zero", factor=0.5), "Only 'add'"),
        (edited(SITE, "project_out", torch.eye(32).repeat(2, 1)), "linearly dependent"),
        (edited(SITE, "set", torch.zeros(4, 32)), "one row per position.*Give positions"),
        (lambda d: d.branch.fork(edits=[Edit.interchange(SITE, torch.zeros(4, 32))]), "Give positions"),
        (edited("s", "zero", layers=[1]), "'s' is not S, T or C"),
        (edited("ST", "zero", layers=[1]), "'ST' names several"),
        (edited("Z", "zero", layers=[1]), "Z, the logit lens, .* Edit what it reads"),
        (edited(SITE, "add", [1e300] * 32), r"holds 1e\+300 \(absolute\), beyond float32\. Give at most 3\.4e\+38"),
        (edited(PATTERN, "set", -1e300, keys=[0], positions=[2]), r"holds 1e\+300 \(absolute\), beyond float32"),
        (edited(SITE, "add", [1.0] * 32, factor=1e300), r"factor=1e\+300 is beyond float32"),
        (edited(SITE, "add", [math.nan] * 32), "NaN or infinity"),
    ],
    UnknownOption: [
        (lambda d: d.engine.prompt([[1]], site="S"), r"prompt\(\) has no option 'site' \(did you mean 'sites'\?\)"),
        (lambda d: d.engine.prompts([[1]], tokens=3), r"prompts\(\) has no option 'tokens'"),
        (lambda d: d.branch.generate([1], 5), r"generate\(\) takes only n by position.* Got 2"),
        (lambda d: d.branch.generate(5, 0.7), r"generate\(\) takes only n by position"),
        (lambda d: d.engine.generate([d.a]), r"generate\(\) needs n\."),
        (lambda d: d.branch.generate(5, temperature=0.7), r"no option 'temperature'.*sampling=Sampling\(temperature=\.\.\.\)"),
        (
            lambda d: d.engine.generate([], 5, max_new_tokens=3),
            r"generate\(\) has no option 'max_new_tokens'\. It has .*drafter",
        ),
        (lambda d: d.engine.replay([], samplng=1), r"replay\(\) has no option 'samplng' \(did you mean 'sampling'\?\)"),
        (lambda d: d.branch.fork(edit=[]), r"fork\(\) has no option 'edit' \(did you mean 'edits'\?\)"),
        (lambda d: d.branch.rollback(), r"rollback\(\) needs to"),
        (
            lambda d: d.engine.run_with_cache([1], name_filter="S"),
            r"run_with_cache\(\) has no option 'name_filter' \(did you mean",
        ),
        (lambda d: Engine.load("coin-plain", devise="cpu"), r"load\(\) has no option 'devise' \(did you mean 'device'\?\)"),
        (lambda d: Sampling(temprature=1), r"Sampling\(\) has no option 'temprature' \(did you mean 'temperature'\?\)"),
        (lambda d: Edit("S", "zero", position=3), r"Edit\(\) has no option 'position' \(did you mean 'positions'\?\)"),
        (lambda d: Engine.load("coin-thinking").prompt("A coin", site="S"), r"prompt\(\) has no option 'site'"),
        (lambda d: rl.patch(d.engine, [1], [2]), r"^patch\(\) needs metric\. metric: a pair of tokens"),
        (lambda d: rl.patch(d.engine, [1]), r"^patch\(\) needs corrupt and metric"),
        (lambda d: rl.patch(), r"^patch\(\) needs engine and clean and corrupt and metric"),
        (lambda d: rl.patch(d.engine, [1], [2], metrik=3), r"no option 'metrik' \(did you mean 'metric'\?\)"),
        (lambda d: rl.steer(d.engine, [1.0], ["a"]), r"^steer\(\) needs layers and strengths"),
        (lambda d: rl.lens(d.engine, [1], 3), r"lens\(\) takes only engine, text by position, .* Got 3"),
    ],
}
CASES = [(error, call, saying) for error, rows in REFUSED.items() for call, saying in rows]


@pytest.fixture(scope="module")
def desk() -> Desk:
    return Desk()


@pytest.mark.parametrize(("error", "call", "saying"), CASES, ids=[saying[:40] for _, _, saying in CASES])
def test_a_bad_call_is_refused_and_changes_nothing(desk: Desk, error: type[Exception], call: Call, saying: str) -> None:
    """Options that there are not are Python's own kind of error, too, and say nothing of the inside."""
    before, numbers = desk.look(), desk.numbers()
    with pytest.raises(error, match=saying) as caught:
        call(desk)
    assert isinstance(caught.value, EngineError)
    if error is UnknownOption:
        assert isinstance(caught.value, TypeError) and isinstance(caught.value, BadRequest)
        assert not any(inside in str(caught.value) for inside in ("Core", "__init__", "positional argument"))
    assert same(before, desk.look())
    assert desk.numbers() == numbers
    desk.engine.check_integrity()


def test_after_all_bad_calls_the_engine_gives_the_same_bits() -> None:
    desk = Desk()
    for error, call, _ in CASES:
        with pytest.raises(error):
            call(desk)
    desk.engine.generate([desk.a, desk.b, desk.c], 5)
    for branch, prompt, n in ((desk.a, [1, 2, 3], 5), (desk.b, [4, 5], 5), (desk.c, [6, 7, 8], 5), (desk.branch, [1, 2, 3], 6)):
        assert branch.generated == continuation(toy(), prompt, n)
        assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])
    list(desk.stream)
    assert desk.streamed.generated == continuation(toy(), [3, 1], 9)
    assert desk.branch.generate(3).generated == continuation(toy(), [1, 2, 3], 9), "it can go on where it stood"
    desk.engine.check_integrity()


@pytest.mark.parametrize(
    "call",
    [
        lambda d: d.engine.generate([d.b, d.b], 3),
        lambda d: d.engine.generate([d.a, d.b, d.streamed], 3),
        lambda d: d.engine.force_all([d.b, d.b], [[1], [2]]),
    ],
)
def test_the_checker_finds_a_request_that_is_half_done(monkeypatch: pytest.MonkeyPatch, call: Call) -> None:
    """Negative control: without the check of the whole request, other branches have changed when one is refused."""
    desk = Desk()
    monkeypatch.setattr(Forest, "require", lambda forest, jobs: None)
    before, numbers = desk.look(), desk.numbers()
    with pytest.raises(EngineError):
        call(desk)
    assert not same(before, desk.look()) or desk.numbers() != numbers


FILLS: dict[str, dict[str, Any]] = {
    "a window": {"window": 16},
    "siblings": {"window": 5, "drafter": "tree"},
    "drafts": {"drafter": "forced", "drafts": {9: [[1] * 15]}},
    "chains of drafts": {"drafter": "forced", "drafts": {9: [[1] * 7, [2] * 7]}},
}


@pytest.mark.parametrize("fills", FILLS)
def test_a_window_that_fills_a_pass_is_served(fills: str) -> None:
    """The largest that is not refused above."""
    assert narrow(20, **FILLS[fills]).generated == continuation(toy(), list(range(1, 10)), 20)


# ---- impossible engines ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "saying"),
    [
        ({"cache_tokens": 0}, "cache_tokens=0. Give a whole number of at least 4"),
        ({"cache_tokens": 3}, "cache_tokens=3. Give a whole number of at least 4"),
        ({"cache_tokens": 1e13}, "cache_tokens=10000000000000.0. Give a whole number"),
        (
            {"cache_tokens": 10**13},
            r"cache_tokens=10000000000000 needs [\d,]+ GiB for KV, but there are only .*Give at most \d+",
        ),
        ({"page_size": 0}, "page_size=0. Give a whole number of at least 1"),
        ({"page_size": -4}, "page_size=-4"),
        ({"page_size": 2.5}, "page_size=2.5. Give a whole number of at least 1"),
        ({"max_rows": 15}, "max_rows=15. Give a whole number of at least 16"),
        ({"max_rows": 0}, "max_rows=0"),
        ({"lens_layer": 3}, "lens_layer=3. Give a whole number between 1 and 2"),
        ({"lens_layer": 0}, "lens_layer=0. Give a whole number between 1 and 2"),
        ({"lens_layer": -1}, "lens_layer=-1"),
        ({"tree_width": 1}, "tree_width=1. Give a whole number of at least 2"),
        ({"canary": "yes"}, "canary='yes'. Give True or False"),
        ({"tokenizer": 3}, "tokenizer=3. Give a WordTokenizer"),
        ({"tokenizer": "gpt2"}, "tokenizer='gpt2'. Give a WordTokenizer"),
        ({"draft_model": 3}, "draft_model=3. Give a Decoder"),
        ({"draft_model": random_model(1, vocab_size=62)}, "62 tokens, the model one of 61.*same tokenizer"),
        ({"draft_model": random_model().to("meta")}, r"on the device 'meta'.*Load the model on 'cpu'"),
        ({"model": random_model().to("meta")}, r"on the device 'meta'.*Load the model on 'cpu'"),
    ],
)
def test_an_engine_that_cannot_be(options: dict[str, Any], saying: str) -> None:
    with pytest.raises(BadRequest, match=saying):
        engine(**options)


# ---- sampling --------------------------------------------------------------------------------------------------------

NOT_FINITE = st.sampled_from([math.nan, math.inf, -math.inf])
NOT_A_NUMBER = st.sampled_from(["1", None, [1.0]])
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
BAD_SAMPLING = st.one_of(
    st.tuples(st.sampled_from(FLOATS), NOT_FINITE | NOT_A_NUMBER),
    st.tuples(st.just("logit_bias"), st.dictionaries(st.integers(0, 9), NOT_FINITE | NOT_A_NUMBER, min_size=1)),
    st.tuples(st.just("logit_bias"), st.sampled_from([None, [1.0], "3"])),
    st.tuples(st.just("temperature"), st.floats(max_value=-1e-9) | st.floats(1e-300, 1e-7)),
    st.tuples(st.just("top_k"), st.integers(max_value=-1) | st.sampled_from([1.0, "2", None, True])),
    st.tuples(st.just("top_p"), st.floats(max_value=0) | st.floats(1.001)),
    st.tuples(st.just("min_p"), st.floats(max_value=-1e-9) | st.floats(1.001)),
    st.tuples(st.just("repetition_penalty"), st.floats(max_value=0)),
    st.tuples(st.just("seed"), st.integers(max_value=-1) | st.integers(2**64) | st.sampled_from([1.0, "2", None, True])),
    st.tuples(st.just("stop"), st.sampled_from(["", "end", ("",), ("a", ""), (1,), None, 3])),
    st.tuples(st.just("stop_tokens"), st.sampled_from([("heads",), 3, (True,)])),
)


@given(BAD_SAMPLING)
def test_a_sampling_parameter_that_cannot_be(bad: tuple[str, Any]) -> None:
    name, value = bad
    with pytest.raises(BadRequest, match=name.split("_")[0]):
        Sampling(**{name: value})


@given(
    temperature=st.just(0.0) | st.floats(1e-6, 1e6),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
    penalty=st.floats(1e-6, 1e6),
    bias=st.floats(-1e9, 1e9),
)
def test_a_sampling_parameter_that_can_be_draws_a_token(
    temperature: float, top_p: float, min_p: float, seed: int, penalty: float, bias: float
) -> None:
    """Up to the limits of the allowed range, a token is drawn without a warning."""
    sampling = Sampling(temperature, 3, top_p, min_p, penalty, bias, {0: bias}, seed)
    logits = torch.tensor([3e38, -3e38, 0.0, 1.0]).numpy()
    assert 0 <= sampling.choose(logits, [1, 2, 3], 1) < 4


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_a_prompt_that_can_never_fit_into_the_cache() -> None:
    subject = engine(cache_tokens=16)
    with pytest.raises(
        OutOfPages,
        match=r"A path of 20 tokens can never fit: it takes 5 pages of 4, and the cache has 4\. Use .*cache_tokens=20",
    ) as caught:
        subject.prompt([1] * 20)
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert subject.prompt([1, 2, 3]).generate(9).generated == continuation(toy(), [1, 2, 3], 9)
    subject.check_integrity()


def test_a_prompt_that_failed_leaves_nothing_behind() -> None:
    subject = engine(cache_tokens=16)
    with pytest.raises(OutOfPages):
        subject.prompts([[1, 2, 3], [1] * 20])
    assert subject.loop.lanes == {} and subject.tree.roots() == []


@pytest.mark.parametrize("drafter", ["self", "lens", "tree"])
def test_a_request_that_outgrows_the_cache_keeps_what_it_had(drafter: str) -> None:
    """The request gets as far as the pages allow. Its committed tokens are right and stay; then an error gives the numbers."""
    subject = engine(cache_tokens=16)
    branch = subject.prompt([1, 2, 3])
    with pytest.raises(
        OutOfPages, match=r"A path of 17 tokens can never fit: .* the cache has 4\. Use .* cache_tokens=44 or more"
    ):
        branch.generate(40, drafter=drafter, window=4)
    truth = continuation(toy(), [1, 2, 3], 40)
    assert len(branch.generated) >= 13 and branch.generated == truth[: len(branch.generated)]
    assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])
    subject.check_integrity()
    branch.rollback(5)
    assert branch.generate(6, drafter=drafter).generated == truth[:8]


def test_forced_tokens_that_do_not_fit_are_taken_back() -> None:
    subject = engine(cache_tokens=16)
    branch = subject.prompt([1, 2, 3]).generate(2)
    before = branch.tokens
    with pytest.raises(OutOfPages, match="can never fit"):
        branch.force([4] * 20)
    assert branch.tokens == before
    assert branch.generate(4).generated == continuation(toy(), [1, 2, 3], 6)
    subject.check_integrity()


def test_one_request_that_cannot_fit_does_not_stop_the_others() -> None:
    subject = engine(cache_tokens=24)
    small, large = subject.prompts([[1, 2, 3], [4, 5, 6]])
    truth = continuation(toy(), [1, 2, 3], 8)
    with pytest.raises(OutOfPages, match=r"can never fit.*the cache has 6"):
        subject.forest.wait(jobs := [_submitted(small, 8), _submitted(large, 60)])
    assert jobs[0].error is None and small.generated == truth
    assert large.generated == continuation(toy(), [4, 5, 6], 60)[: len(large.generated)]
    subject.check_integrity()


def _submitted(branch: Branch, n: int) -> Job:
    branch.engine.loop.submit(job := Job(branch.lane, n))
    return job


# ---- numbers that overflow -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", ["self", "lens", "tree", "ngram"])
@pytest.mark.parametrize("window", [1, 4])
def test_logits_that_overflow(drafter: str, window: int) -> None:
    """Raises NonFinite. The branch does not change, and what needs no logits still works."""
    model = random_model()
    assert model.unembed is not None
    model.unembed.weight.copy_(model.unembed.weight.sign() * 3e38)
    subject = engine(model)
    branch = subject.prompt([1, 2, 3, 1, 2], sites="S")
    with pytest.raises(NonFinite, match="Nothing of this pass was committed"):
        branch.generate(4, drafter=drafter, window=window)
    assert branch.tokens == [1, 2, 3, 1, 2] and subject.loop.jobs == []
    branch.force([7, 8])
    assert torch.equal(branch.kv(), Reference(random_model(), branch.tokens).kv), "the blocks are those of the healthy model"
    subject.check_integrity()


# ---- odd values ------------------------------------------------------------------------------------------------------
# Odd values for every parameter of the public API give a named error or an answer, never a bare error, and do no harm.


class Odd:
    """An object that no parameter accepts."""

    def __repr__(self) -> str:
        return "Odd()"


NUMBERS: list[Any] = [0, -1, 2, 1.5, 10**30, -(10**30), math.nan, math.inf, 1e13, True, 1 + 2j, np.int64(2), np.float32(0.5)]
TEXTS: list[Any] = ["", "x", "Z", "2", "\ud800", "blocks.0.hook_in", "S" * 1000, b"", b"\x01\x02", Path("nowhere")]
CONTAINERS: list[Any] = [
    [],
    (),
    {},
    set(),
    [None],
    [[]],
    [1, "2"],
    [1.5],
    [True],
    {1, 2},
    {0: 1},
    {"a": 1},
    {1: [[1]]},
    {1: [5]},
    {None: [[1]]},
    {-1: [["x"]]},
    range(3),
    slice(None),
    slice("a", 3),
    slice(0, 10, 2),
    np.array([1, 2]),
    np.array([[1, 2]]),
    np.array(3),
    np.array(["a"]),
    torch.tensor(2),
    torch.tensor(0.5),
    torch.tensor([1, 2]),
    torch.tensor([[1, 2]]),
    torch.tensor([True]),
    torch.full((32,), math.nan),
    torch.zeros(32, requires_grad=True),
    torch.zeros(2, 3, 4),
    torch.zeros(3, dtype=torch.complex64),
    torch.zeros(3, device="meta"),
]
OBJECTS: list[Any] = [
    None,
    Odd(),
    print,
    lambda *_: None,
    Sampling(),
    [Sampling()],
    [("x", print)],
    [("blocks.0.hook_in", 3)],
    [Edit("S", "zero")],
    [Edit("S", "zero", positions=[Odd()])],  # type: ignore[list-item]
]
ODD = [*NUMBERS, *TEXTS, *CONTAINERS, *OBJECTS]
CallOfOddValues = Callable[[Any], Any]


def asked(call: CallOfOddValues) -> int:
    """Call it with every odd value and with an iterator. Returns how many were refused."""
    refused = 0
    for value in (*ODD, iter([1, 2])):
        with contextlib.redirect_stdout(io.StringIO()):  # print is among the values
            try:
                call(value)
            except (EngineError, TaskError) as error:
                refused += 1
                assert str(error), "an error says what happened"
    return refused


@pytest.fixture(scope="module")
def served() -> Engine:
    return engine(cache_tokens=8192)


@pytest.fixture(scope="module")
def thinking() -> Engine:
    return Engine.load("coin-thinking")


@pytest.fixture(scope="module")
def run() -> Run:
    return Engine.load("coin-plain").replay(tasks.get("coin")(flips=1).examples(2), sites="SZ", drafter="lens")


@pytest.fixture(scope="module")
def dump(run: Run) -> Dump:
    return run.save("memory://odd-values")


def assert_unharmed(subject: Engine) -> None:
    """Checks the engine, and drops the branches that the calls made."""
    subject.check_integrity()
    assert subject.loop.jobs == []
    for branch in list(subject.loop.lanes):
        if branch in subject.loop.lanes:  # rejected drafts go with their parent branch
            subject.forest.release(subject.loop.lanes[branch])
    assert subject.loop.lanes == {} and subject.check_integrity()


OPTIONS = ("sampling", "window", "deterministic", "keep_pages", "final", "drafter")


def engine_calls(e: Engine) -> dict[str, CallOfOddValues]:
    root = cache(lambda: e.prompt([1, 2, 3], sites="S"))

    def one() -> Branch:
        return root().fork()[0]

    prompted = {f"prompt.{name}": _given(lambda **o: e.prompt([1, 2], **o), name) for name in ("sites", "edits", "hooks")}
    prompted |= {
        f"prompt.{name}": _given(lambda **o: e.prompt([1, 2], sites="Z", **o), name)
        for name in ("keep_rejected", "top_k", "targets", "full", "lens")
    }
    generated = {f"generate.{name}": _given(lambda **o: e.generate([one()], 2, **o), name) for name in (*OPTIONS, "progress")}
    generated |= {
        f"Branch.generate.{name}": _given(lambda **o: one().generate(2, **o), name) for name in (*OPTIONS, "progress")
    }
    streamed = {f"stream.{name}": _given(lambda **o: list(e.stream(one(), 2, **o)), name) for name in OPTIONS}
    streamed |= {f"Branch.stream.{name}": _given(lambda **o: list(one().stream(2, **o)), name) for name in OPTIONS}
    return {
        **prompted,
        **generated,
        **streamed,
        "prompt.text": lambda v: e.prompt(v),
        "prompts.texts": lambda v: e.prompts(v),
        "prompts.text among others": lambda v: e.prompts([[1], v]),
        "tokens_of.text": lambda v: e.tokens_of(v),
        "capture_spec.sites": lambda v: e.capture_spec(v),
        "capture_spec.rejected": lambda v: e.capture_spec("S", rejected=v),
        "generate.branches": lambda v: e.generate(v, 2),
        "generate.branch among others": lambda v: e.generate([one(), v], 2),
        "generate.n": lambda v: e.generate([one()], v),
        "generate.drafts": lambda v: e.generate([one()], 2, drafter="forced", drafts=v),
        "stream.branch": lambda v: list(e.stream(v, 2)),
        "stream.n": lambda v: list(e.stream(one(), v)),
        "stream.drafts": lambda v: list(e.stream(one(), 2, drafter="forced", drafts=v)),
        "force_all.branches": lambda v: e.force_all(v, [[1]]),
        "force_all.tokens": lambda v: e.force_all([one()], v),
        "cancel.job": lambda v: e.cancel(v),
        "replay.examples": lambda v: e.replay(v),
        "replay_trace.trace": lambda v: e.replay_trace(v),
        "replay_trace.sites": lambda v: e.replay_trace(engine(record=True).trace, sites=v),
        "run_with_cache.tokens": lambda v: e.run_with_cache(v),
        "run_with_cache.names_filter": lambda v: e.run_with_cache([1, 2], v),
        "run_with_cache.pos_slice": lambda v: e.run_with_cache([1, 2], "blocks.0.hook_in", v),
        "run_with_cache.remove_batch_dim": lambda v: e.run_with_cache([1, 2], "blocks.0.hook_in", remove_batch_dim=v),
        "run_with_cache.stop_at_layer": lambda v: e.run_with_cache([1, 2], "embed.hook_out", stop_at_layer=v),
        "engine.tokens": lambda v: e(v),
        "engine.return_type": lambda v: e([1, 2], v),
        "engine.prepend_bos": lambda v: e([1, 2], prepend_bos=v),
        "engine.loss_per_token": lambda v: e([1, 2], "loss", loss_per_token=v),
        "run_with_hooks.fwd_hooks": lambda v: e.run_with_hooks([1, 2], v),
        "run_with_hooks.fwd_hooks, a pair": lambda v: e.run_with_hooks([1, 2], [(v, print)]),
        "run_with_hooks.fwd_hooks, a function": lambda v: e.run_with_hooks([1, 2], [("blocks.0.hook_in", v)]),
        "hooks.fwd_hooks": lambda v: e.hooks(v).__enter__(),
        "to_tokens.input": lambda v: e.to_tokens(v),
        "to_string.tokens": lambda v: e.to_string(v),
        "to_str_tokens.input": lambda v: e.to_str_tokens(v),
        "to_single_token.string": lambda v: e.to_single_token(v),
        "Branch.generate.n": lambda v: one().generate(v),
        "Branch.generate.drafts": lambda v: one().generate(2, drafter="forced", drafts=v),
        "Branch.fork.n": lambda v: one().fork(v),
        "Branch.fork.at": lambda v: one().fork(at=v),
        "Branch.fork.edits": lambda v: one().fork(edits=v),
        "Branch.fork.hooks": lambda v: one().fork(hooks=v),
        "Branch.force.tokens": lambda v: one().force(v),
        "Branch.rollback.to": lambda v: one().rollback(v),
        "Branch.activations[]": lambda v: one().activations[v],
    }


def _given(call: Callable[..., Any], name: str) -> CallOfOddValues:
    return lambda v: call(**{name: v})


def value_calls(e: Engine) -> dict[str, CallOfOddValues]:
    fields = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias", "seed", "stop")
    good: dict[str, Any] = {"site": "S", "op": "add", "value": torch.zeros(32)}
    return {
        **{
            f"Sampling.{name}": _given(lambda **o: e.prompt([1, 2]).generate(2, sampling=Sampling(**o)), name)
            for name in (*fields, "stop_tokens", "ignore_eos")
        },
        **{
            f"Edit.{name}": _given(lambda **o: e.prompt([1, 2, 3], edits=[Edit(**{**good, **o})]), name)
            for name in ("site", "op", "value", "positions", "layers", "factor", "seed")
        },
        **{
            f"Edit.to_json of {name}": _given(lambda **o: Edit(**{**good, **o}).to_json(), name)
            for name in ("site", "op", "value", "positions", "layers", "factor", "seed")
        },
        "Edit.interchange.site": lambda v: e.prompt([1, 2, 3], edits=[Edit.interchange(v, torch.zeros(32))]),
        "Edit.interchange.source": lambda v: e.prompt([1, 2, 3], edits=[Edit.interchange("S", v)]),
        "Edit.from_json": lambda v: Edit.from_json(v),
        "Sampling.from_json": lambda v: Sampling.from_json(v),
    }


def in_other_words(name: str) -> bool:
    """Whether `Engine.generate` takes the same option, through the same checks."""
    verb, _, option = name.rpartition(".")
    return verb in ("stream", "Branch.generate", "Branch.stream") and option in OPTIONS


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if in_other_words(name) else name
        for name in engine_calls(None)  # type: ignore[arg-type]
    ],
)
def test_odd_values_for_an_engine_and_its_branches(name: str, served: Engine) -> None:
    assert asked(engine_calls(served)[name]) > 20
    assert_unharmed(served)


@pytest.mark.parametrize("name", value_calls(None))  # type: ignore[arg-type]
def test_odd_values_within_a_sampling_or_an_edit(name: str, served: Engine) -> None:
    assert asked(value_calls(served)[name]) > 20
    assert_unharmed(served)


LOADED = ("device", "dtype", "draft_model", "cache_tokens", "page_size", "max_rows", "lens_layer", "tree_width", "canary")


@pytest.mark.parametrize(
    "name", swept([*LOADED, "guess", "check", "tokenizer", "record"], "tree_width", "dtype", "draft_model", "check", "record")
)
def test_odd_values_for_loading(name: str) -> None:
    assert asked(lambda v: Engine.load(toy(), **{name: v})) > 20


def test_odd_sources() -> None:
    assert asked(lambda v: Engine.load(v)) == len(ODD) + 1
    assert asked(lambda v: Engine(v)) == len(ODD) + 1


def thinking_calls(e: Any) -> dict[str, CallOfOddValues]:
    text = "A coin's state is heads. Alice flips."
    root = cache(lambda: e.prompt(text))
    return {
        "prompt.text": lambda v: e.prompt(v),
        "prompt.guess": lambda v: e.prompt(text, guess=v),
        "prompt.drafts": lambda v: e.prompt(text, guess="drafted", drafts=v),
        "prompt.edits": lambda v: e.prompt(text, edits=v),
        "prompt.hooks": lambda v: e.prompt(text, hooks=v),
        "prompt.sites": lambda v: e.prompt(text, sites=v),
        "Branch.fork.n": lambda v: root().fork(v),
        "Branch.fork.at": lambda v: root().fork(at=v),
        "Branch.fork.edits": lambda v: root().fork(edits=v),
        "Branch.fork.hooks": lambda v: root().fork(hooks=v),
        "Branch.extend.text": lambda v: root().extend(v),
        "Branch.extend.guess": lambda v: root().extend(" Bob flips.", v),
        "thought_place.site": lambda v: e.thought_place(v, 0),
        "thought_place.chunk": lambda v: e.thought_place("thinking.hook_out", v),
        "thought_place.step": lambda v: e.thought_place("thinking.hook_out", 0, v),
        "run_with_cache.tokens": lambda v: e.run_with_cache(v),
    }


@pytest.mark.parametrize("name", thinking_calls(None))
def test_odd_values_for_a_model_that_thinks(name: str, thinking: Engine) -> None:
    assert asked(thinking_calls(thinking)[name]) > 20
    assert_unharmed(thinking)


def run_calls(run: Run, folder: Path) -> dict[str, CallOfOddValues]:
    """Leaves out `run[i]`, which raises what a list raises, as a sequence must."""
    names = ("sites", "drafter", "window", "seed", "sampling", "edits", "rejected", "deterministic", "batch", "progress")
    replayed: Callable[..., Run] = lambda **o: run.engine.replay([r.example for r in run], **{"max_new": 1, **o})  # type: ignore[attr-defined]  # noqa: E731
    return {
        **{f"replay.{name}": _given(replayed, name) for name in (*names, "max_new")},
        "tree.index": lambda v: run.tree(v),
        "timeline.index": lambda v: run.timeline(v),
        "picture.index": lambda v: run.picture(v),
        "save.path": lambda v: None if isinstance(v, str | Path) and str(v) else run.save(v),  # any other is a valid folder
        "save.positions": lambda v: run.save(f"memory://odd-{id(v)}", positions=v),
        "save.stored_dtype": lambda v: run.save(f"memory://odd-{id(v)}", stored_dtype=v),
        "save.examples_per_shard": lambda v: run.save(f"memory://odd-{id(v)}", examples_per_shard=v),
        "save.resume": lambda v: run.save(folder / str(id(v)), resume=v),
    }


@pytest.mark.parametrize("name", run_calls(None, None))  # type: ignore[arg-type]
def test_odd_values_for_a_run(name: str, run: Run, tmp_path: Path) -> None:
    assert asked(run_calls(run, tmp_path)[name]) > 20
    run.engine.check_integrity()
    assert run.engine.loop.lanes == {} and run.engine.loop.jobs == []


def dump_calls(dump: Dump) -> dict[str, CallOfOddValues]:
    return {
        "open.path": lambda v: Dump.open(v),
        "open.check_files": lambda v: Dump.open("memory://odd-values", check_files=v),
        "resolve.site": lambda v: dump.resolve(v),
        "resolve.layer": lambda v: dump.resolve("S", v),
        "resolve.layer of Z": lambda v: dump.resolve("Z.kl", v),
        "where.predicate": lambda v: len(dump.where(v)),
        "where.token": lambda v: len(dump.where(token=v)),
        "where.position": lambda v: len(dump.where(position=v)),
        "where.accepted": lambda v: len(dump.where(accepted=v)),
        "matrix.site": lambda v: dump.matrix(v, 0),
        "matrix.layer": lambda v: dump.matrix("S", v),
        "matrix.where": lambda v: dump.matrix("S", 0, where=v),
        "matrix.label": lambda v: dump.matrix("S", 0, label=v),
        "to_torch.site": lambda v: dump.to_torch(v),
        "to_numpy.layer": lambda v: dump.to_numpy("S", v),
        "stream.site": lambda v: list(dump.stream(v)),
        "stream.layer": lambda v: list(dump.stream("S", v)),
        "stream.batch_rows": lambda v: list(dump.stream("S", 0, v)),
        "to_activation_cache.example": lambda v: dump.to_activation_cache(v),
        "to_activation_cache.branch": lambda v: dump.to_activation_cache(0, v),
    }


@pytest.mark.parametrize("name", dump_calls(None))  # type: ignore[arg-type]
def test_odd_values_for_a_dump(name: str, dump: Dump) -> None:
    refused = asked(dump_calls(dump)[name])
    assert refused > 0 if name.startswith("where") else refused > 20
    assert Dump.open("memory://odd-values").digest == dump.digest


def test_the_net_is_not_too_wide(served: Engine) -> None:
    """Negative control: a bare error passes through, and valid values are served."""
    with pytest.raises(ZeroDivisionError):
        asked(lambda v: 1 / 0)
    assert asked(lambda v: v) == 0
    assert served.prompt(np.array([1, 2])).generate(np.int64(2)).length == 4
    assert_unharmed(served)


def test_all_positions_of_a_model_can_be_filled() -> None:
    served = Engine(random_model(num_layers=1, max_positions=12), page_size=4)
    full = [1 + i % 5 for i in range(12)]
    assert served.prompt(full).tokens == full == served.prompt(full[:2]).force(full[2:]).tokens
    branch = served.prompt([1, 2, 3])
    with pytest.raises(BadRequest, match="3 tokens and 10 more exceed the model's 12 positions"):
        branch.generate(10)
    assert branch.generate(9, sampling=Sampling(ignore_eos=True)).length == 12
    for more in lambda: branch.generate(1), lambda: branch.force([1]):
        with pytest.raises(BadRequest, match="12 positions"):
            more()


def test_an_empty_fork_can_be_forced() -> None:
    """A fork of no token becomes any path: with the bits of a prompt, also after a rollback to nothing."""
    desk = Desk()
    wanted, fork = desk.engine.prompt([1, 2, 3], sites="S").generate(4), desk.empty
    for tokens in ([[1, 2, 3]], [[1], [2, 3]]):
        for more in tokens:
            fork.force(more)
        fork.generate(4)
        assert fork.tokens == wanted.tokens and fork.certified and torch.equal(fork.kv(), wanted.kv())
        (site,) = {*fork.activations} & {"blocks.1.hook_in"}
        assert torch.equal(fork.activations[site], wanted.activations[site])
        fork.rollback(to=0)
    assert fork.length == 0
    with pytest.raises(BadRequest, match="Force at least one"):
        fork.generate(1)
    desk.engine.check_integrity()
