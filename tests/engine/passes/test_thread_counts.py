"""Canonical bits are the same on any number of threads, however and whenever it is set, and in any modes of the processor.

The last tests run processes with 1, 2, 3, 8 and 16 threads and compare digests.
"""

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens import boundary
from replaylens.engine.engine import Engine
from replaylens.engine.errors import ModesChanged, NotCertified
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes import cpu as products
from replaylens.engine.passes import lens, runner
from replaylens.engine.proof import doctor
from replaylens.engine.proof.doctor import numbers
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.kernels import threads
from replaylens.kernels.cpu import Panels, product
from replaylens.kernels.portable import arguments, integers, task
from tests.engine.passes import thread_digests
from tests.engine.passes.thread_digests import WIDE
from tests.engine.reference import same_bits
from tests.hostile import MODES, ROUNDINGS, divide_everything, number_of, rounding
from tests.toy_model import random_model

ROOT = Path(__file__).parents[3]
THREADS = (1, 2, 3, 8, 16)
PATH = [(i * i * 7 + i) % 61 for i in range(150)]
PATTERN = "blocks.0.attn.hook_pattern"
SITES = ["S", "Z", PATTERN]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Decoder:
    """A small model whose kernels run on all given threads."""
    divide_everything(monkeypatch)
    return random_model(d_model=64, d_mlp=96)


@pytest.fixture(autouse=True)
def the_users_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows_of(engine: Engine, cuts: tuple[int, ...] = (150,)) -> dict[str, Tensor]:
    """KV, S, T, C and Z of `PATH`, computed in pieces that end at `cuts`."""
    branch = engine.prompt(PATH[: cuts[0]], sites="STCZ")
    for start, end in pairwise(cuts):
        branch.force(PATH[start:end])
    assert branch.certified
    return {"kv": branch.kv(), **{site: branch.activations[site] for site in branch.activations.sites()}}


def different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    return [name for name in theirs if not same_bits(ours[name], theirs[name])]


# ---- threads -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("later", [2, 3, 8])
def test_the_number_of_threads_may_change_after_loading(later: int, model: Decoder) -> None:
    torch.set_num_threads(1)
    engine, other = Engine(model), Engine(model)
    truth = rows_of(Engine(model))
    torch.set_num_threads(later)
    assert different(rows_of(engine), truth) == []
    assert different(rows_of(other, (20, 90, 150)), truth) == []
    assert torch.get_num_threads() == later and threads._crew.helpers >= later - 1, "they were used"


def test_threads_that_split_a_sum_are_seen(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: products whose terms, not outputs, are divided among threads."""
    right = products.product

    def split(x: Tensor, panels: Any, bias: Any = None, residual: Any = None, parts: int = 8) -> Tensor:
        half = panels.inputs // 2 if threads._here.count > 1 else 0
        if not half:
            return right(x, panels, bias, residual)
        halves = [replace(panels, data=panels.data[:, s].contiguous()) for s in (slice(half), slice(half, None))]
        out = right(x[:, :half].contiguous(), halves[0], bias, residual)
        return right(x[:, half:].contiguous(), halves[1], None, out)

    torch.set_num_threads(1)
    truth = rows_of(Engine(model))
    monkeypatch.setattr(products, "product", split)
    assert different(rows_of(Engine(model)), truth) == []
    torch.set_num_threads(2)
    assert {"kv", "blocks.1.hook_in", "Z.entropy"} <= {*different(rows_of(Engine(model)), truth)}


def test_every_pass_is_held_and_given_back(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prefill, drafts, verification, head sites and lens, torch has one thread and kernels have the user's."""
    seen: set[tuple[int, int]] = set()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *given, **more: (seen.add((torch.get_num_threads(), threads._here.count)), function(*given, **more))[1]

    monkeypatch.setattr(products, "product", noted(products.product))
    monkeypatch.setattr(lens, "statistics", noted(lens.statistics))
    engine = Engine(model, draft_model=random_model(d_model=64, d_mlp=96, seed=1))
    for count in (3, 5, 64):
        seen.clear()
        torch.set_num_threads(count)
        branch = engine.prompt(PATH[:40], sites=["S", "Z", "ln_final.hook_out", "unembed.hook_out"])
        branch.generate(4, drafter="model", window=3)
        branch.generate(4, drafter="lens", window=3)
        assert torch.get_num_threads() == count and seen == {(1, count)}


def test_the_users_threads_come_back_after_an_error(model: Decoder) -> None:
    engine = Engine(model)
    torch.set_num_threads(3)

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        engine.prompt(PATH[:9], hooks=[("blocks.0.hook_in", fail)])
    assert torch.get_num_threads() == 3


def test_a_hook_that_changes_the_threads_fails_alone(model: Decoder) -> None:
    engine = Engine(model)
    torch.set_num_threads(1)
    truth = engine.prompt(PATH[:30]).kv()
    engine = Engine(model)
    good, bad = engine.prompts([PATH[:20], PATH[:19]])
    (hooked,) = bad.fork(hooks=[("blocks.1.hook_in", lambda value, context: torch.set_num_threads(2))])
    with pytest.raises(ModesChanged, match="A hook function changed the number of threads"):
        hooked.force(PATH[19:30])
    assert torch.get_num_threads() == 1
    assert torch.equal(good.force(PATH[20:30]).kv(), truth) and hooked.length == 19


def test_python_threads_at_the_same_time_compute_the_same_bits(model: Decoder) -> None:
    """Each has an engine and a number of threads of its own; they share the workers."""
    truth, found, together = rows_of(Engine(model)), list[list[str]](), threading.Barrier(3)

    def work(count: int) -> None:
        torch.set_num_threads(count)
        together.wait()
        for cuts in ((150,), (33, 150), (1, 2, 150)):
            found.append(different(rows_of(Engine(model), cuts), truth))

    workers = [threading.Thread(target=work, args=[count]) for count in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert found == [[]] * 9


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system has no fork")
def test_a_forked_process_has_workers_of_its_own(model: Decoder) -> None:
    """Threads do not survive a fork: a child that waited for those of its parent would hang."""
    torch.set_num_threads(2)
    truth = Engine(model).prompt(PATH[:40]).kv()
    assert threads._crew.helpers
    child = os.fork()
    if not child:
        signal.alarm(60)
        with suppress(BaseException):
            os._exit(0 if threads._crew.helpers == 0 and torch.equal(products_of_a_child(model), truth) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def products_of_a_child(model: Decoder) -> Tensor:
    """torch's own threads do not survive a fork, either."""
    with threads.within(2), modes.threads(1):
        return Engine(model).prompt(PATH[:40]).kv()


@task
def _count(given, index, count):  # type: ignore[no-untyped-def]
    """Adds 1 to a number of this part after some idle laps, and asks for too much memory if there is no such number."""
    numbers, laps = arguments(given, 2)
    idle = np.empty(8 if numbers else 1 << 60, np.float32)
    for lap in range(laps):
        idle[lap % 8] = np.float32(lap)
    own = integers(numbers, count)
    own[index] += 1 + np.intp(idle[0] * np.float32(0.0))
    return 1


def counted(times: int, count: int, laps: int, more: Callable[[], None] = lambda: None) -> Any:
    """How often each part of a work was done, the memory still watched after the last."""
    found = np.zeros(count, np.int64)
    for _ in range(times):
        threads._crew.run(_count, array("q", [found.ctypes.data, laps]), count)
        more()
    return found


@pytest.mark.parametrize("count", [2, 7, 16, 255])
def test_each_part_is_done_once(count: int) -> None:
    assert counted(300, count, 40).tolist() == [300] * count


def test_python_threads_at_the_same_time_each_have_their_work_done() -> None:
    """One of them has the crew; the others, who do not wait, do all of theirs themselves: in one part."""
    found = list[list[int]]()
    workers = [threading.Thread(target=lambda: found.append(counted(60, 3, 40_000).tolist())) for _ in range(3)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()
    assert [each[0] for each in found] == [60] * 3 and all(each[1] == each[2] <= 60 for each in found)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_part_without_memory_is_told_and_the_threads_stay() -> None:
    for _ in range(3):
        with pytest.raises(MemoryError, match="_count in 3 parts: there is no memory"):
            threads._crew.run(_count, array("q", [0, 1]), 3)
    assert counted(3, 3, 1).tolist() == [3, 3, 3] and threads._crew.helpers < 255


def test_an_interrupt_waits_for_the_threads() -> None:
    """They write to memory that is freed when the call is left. It used to be left between handing out work and its own."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background processes ignore it
    timer = threading.Timer(0.05, signal.pthread_kill, (threading.main_thread().ident or 0, signal.SIGINT))
    found, seen = np.zeros(4, np.int64), list[list[int]]()
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            while True:
                threads._crew.run(_count, array("q", [found.ctypes.data, 3_000_000]), 4)
        seen.append(found.tolist())
        threading.Event().wait(0.05)
    finally:
        signal.signal(signal.SIGINT, before)
    assert found.tolist() == seen[0] == [seen[0][0]] * 4


def test_helpers_that_never_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may refuse threads, and a busy machine may not run them: their parts are done by the others."""
    monkeypatch.setattr(threads, "_crew", threads.Crew())
    monkeypatch.setattr(threads.threading, "Thread", refused)
    assert counted(3, 5, 1).tolist() == [3] * 5 and threads._crew.helpers == 0


def refused(**_: object) -> None:
    raise RuntimeError("can't start new thread")


# ---- other modes -------------------------------------------------------------------------------------------------------


WITHIN_PASSES = (
    *("flushed denormals", *(f"rounding {direction}" for direction in ROUNDINGS), "autocast", "without oneDNN"),
    *("medium precision", "deterministic algorithms", "float64 by default"),
)


@cache
def with_denormals() -> Decoder:
    """The values of the first block are denormal numbers."""
    model = random_model()
    model.blocks[0].attn.qkv.weight[:, -8:].mul_(2.0**-128)
    return model


@cache
def in_default_modes() -> Branch:
    return Engine(with_denormals()).prompt(PATH, sites=SITES)


@pytest.mark.parametrize("mode", WITHIN_PASSES)
def test_a_mode_set_after_loading_moves_no_bit(mode: str) -> None:
    truth, engine = in_default_modes(), Engine(with_denormals())
    with MODES[mode]():
        branch = engine.prompt(PATH, sites=SITES)
    assert torch.equal(branch.kv(), truth.kv())
    assert [site for site in truth.activations.sites() if not same(branch.activations[site], truth.activations[site])] == []


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_without_the_hold_modes_do_move_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control. No kernel knows autocast, oneDNN or its precision."""
    truth, engine = in_default_modes(), Engine(with_denormals())
    monkeypatch.setattr(runner.modes, "canonical", nullcontext)
    monkeypatch.setattr(modes, "plain", nullcontext)
    with MODES["flushed denormals"]():
        branch = engine.prompt(PATH, sites=SITES)
    assert not same(branch.kv(), truth.kv())
    for direction in ROUNDINGS:
        with rounding(direction):
            assert not same(Engine(with_denormals()).prompt(PATH).kv(), truth.kv()), direction


@pytest.mark.parametrize("mode", ["flushed denormals", *(f"rounding {direction}" for direction in ROUNDINGS)])
def test_tokens_are_drawn_in_the_processors_usual_modes(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The penalised and divided scores of every token, to the last bit."""
    logits = (torch.randn(4096, generator=torch.Generator().manual_seed(3)) * 0.01).numpy()
    path, seen = list(range(0, 4096, 2)), dict[str, Any]()

    def drawn(scores: Any) -> Any:
        seen["scores"] = scores.copy()
        return filtered(how, scores)

    how, filtered = Sampling(temperature=0.7, top_p=0.9, presence_penalty=0.1, repetition_penalty=1.3), Sampling._filtered
    monkeypatch.setattr(Sampling, "_filtered", lambda self, scores: drawn(scores))
    token, scores = how.choose(logits, path, 0), seen["scores"]
    with MODES[mode]():
        assert how.choose(logits, path, 0) == token
        assert seen["scores"].tobytes() == scores.tobytes()


def test_a_direction_that_cannot_be_set_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine(random_model())
    before = engine.prompt(PATH[:9]).kv()
    monkeypatch.setattr(boundary, "_c_library", lambda: None)
    with rounding("up"), pytest.raises(ModesChanged, match="rounds in another direction than to nearest"):
        Engine(random_model()).prompt(PATH[:9])
    assert torch.equal(Engine(random_model()).prompt(PATH[:9]).kv(), before), "nothing to set, nothing needed"


def test_the_doctor_finds_a_direction_that_was_not_set_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """The certificate is the same in every direction. Negative control: without the hold, the doctor names the arithmetic."""
    model = random_model()
    truth = doctor.examine(model)
    for direction in ROUNDINGS:
        with rounding(direction):
            assert doctor.examine(model).to_json() == truth.to_json()
            with monkeypatch.context() as patch:
                patch.setattr(modes, "canonical", nullcontext)
                patch.setattr(modes, "plain", nullcontext)
                with pytest.raises(NotCertified, match="arithmetic float32: 'rounded to nearest even"):
                    doctor.require(doctor.examine(model))


@pytest.mark.parametrize("direction", ROUNDINGS)
def test_a_hook_that_changes_the_direction_of_rounding_is_named(direction: str) -> None:
    def change(value: Tensor, context: object) -> None:
        ctypes.CDLL(None).fesetround(number_of(direction))

    with pytest.raises(ModesChanged, match="direction of rounding"):
        Engine(random_model()).prompt(PATH[:9], hooks=[("blocks.0.hook_in", change)])
    assert ctypes.CDLL(None).fegetround() == 0


@pytest.mark.parametrize("mode", ["flushed denormals", "rounding up"])
def test_workers_that_start_in_other_modes_take_the_usual_ones(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins with the modes of the one that starts it. Here that is a hook's fault, and later passes are right."""
    x, panels = numbers(3, 64, 30) * 2.0**-130, Panels.of(numbers(2, 30, 64))
    right = product(x, panels)

    def in_workers() -> Tensor:
        with threads.within(4):
            return product(x, panels)

    divide_everything(monkeypatch)
    for fault in (False, True):
        monkeypatch.setattr(threads, "_crew", threads.Crew())
        if fault:
            monkeypatch.setattr(threads, "_set_usual_modes", lambda: None)
        with MODES[mode]():
            in_workers()
        found = [torch.equal(in_workers(), right) for _ in range(200)]  # helpers do not come to every work
        assert all(found) is not fault, "control: they would keep them"


def set_precision(value: str) -> None:
    torch.backends.mkldnn.matmul.fp32_precision = value  # type: ignore[attr-defined]


def elsewhere(work: Callable[..., None], *arguments: object) -> None:
    """Run in another Python thread, and wait for it."""
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    thread.join()


def test_a_mode_that_another_thread_changes_during_a_pass_is_noticed() -> None:
    try:
        with pytest.raises(ModesChanged, match="Another thread changed"), modes.canonical():
            elsewhere(set_precision, "tf32")
        assert modes._read() == (True, "tf32"), "the user's latest word stays"
        with modes.canonical():
            assert modes._read() == (True, "ieee")
        assert modes._read() == (True, "tf32")
    finally:
        set_precision("none")


def test_a_mode_that_another_pass_has_set_right_again_is_noticed_too() -> None:
    def hold() -> None:
        with modes.canonical():
            pass

    try:
        with pytest.raises(ModesChanged, match="Another thread changed"), modes.canonical():
            elsewhere(set_precision, "tf32")
            elsewhere(hold)
    finally:
        set_precision("none")


def test_the_last_of_several_passes_gives_the_modes_back() -> None:
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with modes.canonical():
            inside.set()
            leave.wait()

    other = threading.Thread(target=hold)
    set_precision("tf32")
    try:
        with modes.canonical():
            other.start()
            inside.wait()
        assert modes._read() == (True, "ieee"), "the other pass still runs"
        leave.set()
        other.join()
        assert modes._read() == (True, "tf32")
    finally:
        set_precision("none")


# ---- the library itself ------------------------------------------------------------------------------------------------


def digests(count: int, folder: Path, shapes: list[str]) -> dict[str, Any]:
    """The output of `thread_digests` for these shapes, in a process that starts with so many threads. This one has one."""
    if count == 1:
        return dict(json.loads(json.dumps(thread_digests.main(folder, shapes))))
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_", "KMP_"))}
    environment |= {"OMP_NUM_THREADS": str(count), "MKL_NUM_THREADS": str(count), "MKL_DYNAMIC": "FALSE"}
    environment |= {"REPLAYLENS_CACHE": str(folder.parent / "cache"), "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.engine.passes.thread_digests", str(folder), *shapes],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    printed: dict[str, Any] = json.loads(done.stdout)
    return printed


@pytest.mark.parametrize(
    "counts, shapes", [((1, 8), ["14336 inputs"]), pytest.param(THREADS, list(WIDE), marks=pytest.mark.slow)]
)
def test_digests_are_the_same_on_any_number_of_threads(tmp_path: Path, counts: tuple[int, ...], shapes: list[str]) -> None:
    """A dump, the doctor's findings, and part of the contract with products of up to 14336 terms, under one certificate."""
    found = {count: digests(count, tmp_path / str(count), shapes) for count in counts}
    assert {count: each.pop("threads") for count, each in found.items()} == {count: count for count in counts}
    assert all(each["different"] == [] for each in found.values())
    for count in counts:
        assert found[count] == found[1], f"{count} threads"
