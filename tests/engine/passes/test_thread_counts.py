"""Canonical bits are those of one thread, on any number of threads, however and whenever it is set.

If the library's own products do not depend on the number of threads, a product that does replaces them: MKL splits the sum
of a product of few rows when there are many threads. The last tests run the real library in processes with 1, 2,
3, 8 and 16 threads and compare digests.
"""

import ctypes
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import ModesChanged, NotCertified
from replaylens.engine.lens import lens
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes import cpu, runner
from replaylens.engine.passes.products import by_torch
from replaylens.engine.proof import certificates, doctor, trace
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from tests.engine.passes.thread_digests import WIDE
from tests.engine.reference import same_bits
from tests.toy_model import random_model

ROOT = Path(__file__).parents[3]
THREADS = (1, 2, 3, 8, 16)
PATH = [(i * i * 7 + i) % 61 for i in range(150)]
PATTERN = "blocks.0.attn.hook_pattern"
SITES = ["S", "Z", PATTERN]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Decoder:
    """A small model that runs on all given threads of an eight-core machine, without certificates."""
    monkeypatch.setattr(modes, "available_cores", lambda: 8)
    monkeypatch.setattr(runner, "_WORTH_THREADS", 0)
    monkeypatch.setattr(certificates, "_EXAMINED", {})
    monkeypatch.setattr(certificates, "cache_folder", lambda: tmp_path)
    return random_model(d_model=64, d_mlp=96)


@pytest.fixture(autouse=True)
def the_users_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def right(a: Tensor, b: Tensor) -> Tensor:
    """The product, rounded once: the same on any machine for any number of rows and threads."""
    return (a.double() @ b.double()).float()


def split(a: Tensor, b: Tensor) -> Tensor:
    """A product summed in two halves, as in a library that gives each half to a thread."""
    half = a.shape[1] // 2
    return right(a[:, :half], b[:half]) + right(a[:, half:], b[half:])


def never(threads: int, rows: int) -> bool:
    return False


def plant(patch: pytest.MonkeyPatch, when: Callable[[int, int], bool]) -> None:
    """Replaces the library's products, packed ones included, by ones that split their sums where `when(threads, rows)`."""

    def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        value = split(a, b) if when(torch.get_num_threads(), len(a)) else right(a, b)
        return value if out is None else out.copy_(value)

    patch.setattr(torch, "mm", mm)
    patch.setattr(torch, "bmm", right)
    patch.setattr("replaylens.engine.proof.doctor.can_pack", lambda weight: False)


def rows_of(engine: Engine, cuts: tuple[int, ...] = (150,)) -> dict[str, Tensor]:
    """KV, S, T, C and Z of `PATH`, computed in pieces that end at `cuts`."""
    branch = engine.prompt(PATH[: cuts[0]], sites="STCZ")
    for start, end in pairwise(cuts):
        branch.force(PATH[start:end])
    assert branch.certified
    return {"kv": branch.kv(), **{site: branch.activations[site] for site in branch.activations.sites()}}


def different(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    return [name for name in theirs if not same_bits(ours[name], theirs[name])]


# ---- finding a number of threads with the bits of one thread ----------------------------------------------------------


def test_products_that_split_on_eight_threads_are_no_reason_to_refuse(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in MKL with few rows: on eight threads only large row counts are used, and the rest runs on one thread."""
    plant(monkeypatch, lambda threads, rows: threads >= 8 and rows < 256)
    torch.set_num_threads(1)
    truth = rows_of(Engine(model))
    torch.set_num_threads(8)
    engine = Engine(model, max_rows=512)
    allowed = engine.certificate.allowed
    assert engine.certificate.threads == (1, 2, 4, 8)
    assert set(allowed[8].row_counts.values()) == {(512, 256)} and set(allowed[4].row_counts) == set(allowed[8].row_counts)
    assert all(counts[-1] == 16 for count in (1, 2, 4) for counts in allowed[count].row_counts.values())
    assert different(rows_of(engine), truth) == []
    long = engine.prompts([PATH, PATH[::-1], [60 - p for p in PATH[:149]]], sites="S")  # 448 rows: both kinds
    assert torch.equal(long[0].kv(), truth["kv"])


def test_the_number_of_threads_with_the_least_work_is_taken(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda threads, rows: threads >= 8 and rows < 256)
    certificate = doctor.examine(model)
    assert [certificate.threads_for(limit) for limit in (1, 2, 3, 4, 7, 8, 64)] == [1, 2, 2, 4, 4, 4, 4]


def test_a_row_wise_op_that_differs_on_four_threads_excludes_them(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    activate = cpu.activate

    def wrong(x: Tensor, kind: Any) -> Tensor:
        out = activate(x, kind)
        return torch.nextafter(out, out + 1) if torch.get_num_threads() == 4 else out

    plant(monkeypatch, never)
    monkeypatch.setattr(cpu, "activate", wrong)
    certificate = doctor.examine(model)
    assert certificate.certified and certificate.threads == (1, 2, 8)
    assert [f.op for f in certificate.findings if not f.equal and not f.control] == ["activation silu"]


def test_the_certificate_does_not_depend_on_the_users_threads(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda threads, rows: threads >= 2 and rows < 64)
    found = []
    for count in (1, 8):
        torch.set_num_threads(count)
        found.append((doctor.examine(model).to_json(), certificates._key(model), trace.take(model).digest))
        assert torch.get_num_threads() == count
    assert found[0] == found[1]


def test_the_machine_is_part_of_what_a_certificate_is_kept_for(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    on_eight = certificates._key(model)
    monkeypatch.setattr(modes, "available_cores", lambda: 2)
    assert certificates._key(model) != on_eight


@pytest.mark.parametrize(
    ("cores", "counts"),
    [(1, (1,)), (2, (1, 2)), (3, (1, 2, 3)), (6, (1, 2, 3, 4, 6)), (16, (1, 2, 4, 8, 16)), (96, (1, 2, 4, 8, 16, 32, 64))],
)
def test_which_counts_are_examined(cores: int, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "available_cores", lambda: cores)
    assert modes.thread_counts() == counts


# ---- holding it during every pass --------------------------------------------------------------------------------------


def few_rows_split(threads: int, rows: int) -> bool:
    """As in MKL on two threads at 1536 x 576: row counts from 32 to 128 are split, smaller and larger ones are not."""
    return threads >= 2 and 32 <= rows <= 128


@pytest.mark.parametrize("later", [2, 3, 8])
def test_the_number_of_threads_may_change_after_loading(later: int, model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, few_rows_split)
    torch.set_num_threads(1)
    engine, other = Engine(model), Engine(model)
    truth = rows_of(Engine(model))
    torch.set_num_threads(later)
    assert different(rows_of(engine), truth) == []
    assert different(rows_of(other, (20, 90, 150)), truth) == []
    assert torch.get_num_threads() == later


def test_without_the_hold_the_bits_move(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the same comparison without the hold, under the one-thread certificate, finds other bits."""
    plant(monkeypatch, few_rows_split)
    torch.set_num_threads(1)
    one = Engine(model)
    other, truth = Engine(model), rows_of(Engine(model))
    for engine in (one, other):
        engine.runner.products.allowed = {count: engine.certificate.allowed[1] for count in (1, 2)}
    monkeypatch.setattr(runner.modes, "canonical", lambda count=1: nullcontext())
    torch.set_num_threads(2)
    moved = different(rows_of(one), truth)
    assert {"kv", "blocks.1.hook_in", "Z.entropy"} <= {*moved} and different(rows_of(other, (20, 90, 150)), rows_of(one))


def test_every_pass_is_held_and_given_back(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """In prefill, drafts, verification, head sites and lens, all products and sums see certified numbers of threads."""
    seen: set[int] = set()

    def note(threads: int, rows: int) -> bool:
        seen.add(threads)
        return threads >= 8

    def statistics(*given: Any) -> Any:
        note(torch.get_num_threads(), 0)
        return of_rows(*given)

    of_rows = lens.statistics
    plant(monkeypatch, note)
    monkeypatch.setattr(lens, "statistics", statistics)
    engine = Engine(model, draft_model=random_model(d_model=64, d_mlp=96, seed=1))
    seen.clear()
    for count in (3, 5, 64):
        torch.set_num_threads(count)
        branch = engine.prompt(PATH[:40], sites=["S", "Z", "ln_final.hook_out", "unembed.hook_out"])
        branch.generate(4, drafter="model", window=3)
        branch.generate(4, drafter="lens", window=3)
        assert torch.get_num_threads() == count
    assert seen == {2, 4}  # 2 for 3 threads, 4 for 5 and 64: on eight threads these products differ from one thread's


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


def test_another_python_thread_computes_the_same_bits(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new thread starts with the process's number of threads, and may set its own."""
    plant(monkeypatch, few_rows_split)
    truth, found = rows_of(Engine(model)), []

    def work(count: int) -> None:
        torch.set_num_threads(count)
        found.append(different(rows_of(Engine(model), (33, 150)), truth))

    for count in (8, 2):
        worker = threading.Thread(target=work, args=[count])
        worker.start()
        worker.join()
    assert found == [[], []]


# ---- other modes -------------------------------------------------------------------------------------------------------


@contextmanager
def flushing() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def precision(value: str) -> Iterator[None]:
    torch.set_float32_matmul_precision(value)
    try:
        yield
        assert torch.get_float32_matmul_precision() == value
    finally:
        torch.set_float32_matmul_precision("highest")


@contextmanager
def strictly_deterministic() -> Iterator[None]:
    torch.set_deterministic_debug_mode("error")  # as use_deterministic_algorithms, without loading the compiler
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode("default")


@contextmanager
def doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


ROUNDINGS = {"up": 1, "down": 2, "to zero": 3} if platform.machine() == "aarch64" else {"up": 2, "down": 1, "to zero": 3}
"""the processor's numbers for the directions other than to nearest, which is 0"""


def number_of(direction: str) -> int:
    return ROUNDINGS[direction] << (22 if platform.machine() == "aarch64" else 10)


@contextmanager
def rounding(direction: str) -> Iterator[None]:
    """fesetround of the C library, which also other libraries call."""
    libm, mode = ctypes.CDLL(None), number_of(direction)
    assert libm.fesetround(mode) == 0
    try:
        yield
        assert libm.fegetround() == mode, "the user's direction is restored"
    finally:
        libm.fesetround(0)


MODES: dict[str, Callable[[], Any]] = {
    "flushed denormals": flushing,
    **{f"rounding {direction}": partial(rounding, direction) for direction in ROUNDINGS},
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "without oneDNN": lambda: torch.backends.mkldnn.flags(enabled=False),
    "medium precision": lambda: precision("medium"),
    "deterministic algorithms": strictly_deterministic,
    "another default dtype": doubles,
}


@cache
def wide_enough() -> Decoder:
    """A tied table of 1536 x 576, which oneDNN multiplies on aarch64, and scores whose softmax has denormal numbers."""
    model = random_model(
        d_model=1536, d_mlp=32, num_heads=2, num_kv_heads=1, vocab_size=576, num_layers=1, tied_embeddings=True
    )
    model.blocks[0].attn.qkv.weight.mul_(3)
    return model


@cache
def in_default_modes() -> Branch:
    return Engine(wide_enough()).prompt(PATH, sites=SITES)


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_set_after_loading_moves_no_bit(mode: str) -> None:
    truth, engine = in_default_modes(), Engine(wide_enough())
    with MODES[mode]():
        branch = engine.prompt(PATH, sites=SITES)
    assert torch.equal(branch.kv(), truth.kv())
    assert [site for site in truth.activations.sites() if not same(branch.activations[site], truth.activations[site])] == []


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype == theirs.dtype and torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_without_the_hold_modes_do_move_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control. Other modes depend on the CPU: oneDNN on aarch64, medium precision where there is bfloat16."""
    truth, engine = in_default_modes(), Engine(wide_enough())
    monkeypatch.setattr(runner.modes, "canonical", lambda count=1: nullcontext())
    monkeypatch.setattr(modes, "plain", nullcontext)
    with flushing():
        branch = engine.prompt(PATH, sites=SITES)
    assert not same(branch.activations[PATTERN], truth.activations[PATTERN])
    for direction in ROUNDINGS:
        with rounding(direction):
            assert not same(Engine(wide_enough()).prompt(PATH).kv(), truth.kv()), direction
    monkeypatch.setattr(runner, "batched_product", lambda *_: by_torch)  # NumPy's products know no autocast
    with MODES["autocast"](), pytest.raises(RuntimeError, match="BFloat16"):
        Engine(wide_enough()).prompt(PATH, sites=SITES)


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
    monkeypatch.setattr(modes, "_c_library", lambda: None)
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
                patch.setattr(modes, "canonical", lambda count=1: nullcontext())
                with pytest.raises(NotCertified, match="arithmetic float32: 'rounded to nearest even"):
                    doctor.require(doctor.examine(model))


@pytest.mark.parametrize("direction", ROUNDINGS)
def test_a_hook_that_changes_the_direction_of_rounding_is_named(direction: str) -> None:
    def change(value: Tensor, context: object) -> None:
        ctypes.CDLL(None).fesetround(number_of(direction))

    with pytest.raises(ModesChanged, match="direction of rounding"):
        Engine(random_model()).prompt(PATH[:9], hooks=[("blocks.0.hook_in", change)])
    assert ctypes.CDLL(None).fegetround() == 0


@pytest.mark.parametrize("direction", ROUNDINGS)
def test_workers_that_round_in_another_direction_are_not_used(direction: str) -> None:
    found: list[tuple[int, bool]] = []

    def work() -> None:
        fractions = [torch.full((1 << 17,), 1 / n) for n in range(3, 9)]
        torch.set_num_threads(3)
        with rounding(direction):
            _ = fractions[0] * fractions[1]  # starts workers
        assert any(len((x * x).unique()) > 1 for x in fractions), "the control: they still do"
        with pytest.warns(RuntimeWarning, match="canonical passes run on one thread"), modes.canonical(3):
            found.append((torch.get_num_threads(), all(len((x * x).unique()) == 1 for x in fractions)))

    elsewhere(work)
    assert found == [(1, True)]


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


def test_workers_that_flush_denormal_numbers_are_not_used() -> None:
    """Workers keep the mode of the thread that started them. Here that thread has its own workers."""
    found: list[tuple[int, bool]] = []

    def work() -> None:
        tiny = torch.full((1 << 17,), 1e-40)
        torch.set_num_threads(3)
        with flushing():
            _ = tiny * 0.5  # starts workers
        assert not (tiny * 0.5).all(), "the control: they still flush"
        with pytest.warns(RuntimeWarning, match="canonical passes run on one thread"), modes.canonical(3):
            found.append((torch.get_num_threads(), bool((tiny * 0.5).all())))

    elsewhere(work)
    assert found == [(1, True)]


@pytest.mark.parametrize("name", modes.ENVIRONMENT)
def test_variables_that_choose_other_kernels_are_part_of_the_fingerprint(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for other in modes.ENVIRONMENT:
        monkeypatch.delenv(other, raising=False)
    model = random_model()
    plain, key = trace.take(model), certificates._key(model)
    monkeypatch.setenv(name, "AVX2,STRICT")
    other_one = trace.take(model)
    assert other_one.differences(plain) == [f"device: {plain.device} {name}=AVX2,STRICT here, {plain.device} there"]
    assert certificates._key(model) != key
    monkeypatch.delenv(name)
    assert trace.take(model) == plain


# ---- the library itself ------------------------------------------------------------------------------------------------


def digests(count: int, folder: Path, shapes: list[str]) -> dict[str, Any]:
    """The output of `thread_digests` for these shapes, in a process that starts with this number of threads."""
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


@pytest.mark.parametrize("direction", ROUNDINGS)
def test_edits_gradients_and_answers_do_not_depend_on_the_direction_of_rounding(direction: str) -> None:
    """What a call computes beside its passes: values of edits in float32, metrics, products with activations."""
    engine, value = Engine(random_model(), cache_tokens=512), torch.linspace(-1, 1, 7, dtype=torch.float64) / 3
    width = engine.config.d_model
    edits = [
        Edit("C", "scale", factor=0.1, layers=[0]),
        Edit("S", "add", value.repeat(width)[:width], layers=[1]),
        Edit("S", "project_out", value.repeat(width)[:width].float(), layers=[1]),
    ]

    def found() -> list[torch.Tensor]:
        rows: list[torch.Tensor] = []
        other = engine.prompt([5, 9, 2, 8])
        for edit in edits:
            branch = engine.prompt([5, 9, 2, 7], edits=[edit], sites="S")
            rows += [branch.kv(), branch.logits()]
        plain = engine.prompt([5, 9, 2, 7])
        gradients = plain.gradients(other, sites="S")
        return [*rows, torch.tensor(gradients.value, dtype=torch.float64), *gradients.times_input().values()]

    usual = found()
    with rounding(direction):
        turned = found()
    assert all(torch.equal(a, b) for a, b in zip(usual, turned, strict=True))
