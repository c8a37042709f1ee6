"""A long-running engine does not grow: what nothing holds is freed. A trace grows, and is recorded only on request."""

import gc
import io
import os
import random
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens import tasks
from replaylens.engine import machine
from replaylens.engine.engine import Engine
from replaylens.engine.errors import (
    BadRequest,
    Caveat,
    ClosedBranch,
    EngineError,
    NotEnoughMemory,
    UnsupportedModel,
)
from replaylens.engine.memory import cache as cache_module
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving import assembly
from replaylens.kernels import gpus
from replaylens.kernels.gpus import KNOWN, imposed
from replaylens.tasks import get
from replaylens.weights.source import require_fit
from tests.toy_model import VOCAB, continuation, engine, random_model, toy

LLAMA = ModelConfig(32, 4096, 32, 8, 128, 14336, 128256, 8192, rotary_dim=128, rope=Rope(theta=5e5), tied_embeddings=False)
"""Llama-3.1-8B's shape"""
Cycle = Callable[[Engine, random.Random], object]


@cache
def small() -> Decoder:
    return random_model(num_layers=1)


def prompt_of(draw: random.Random, length: int = 5) -> list[int]:
    return [draw.randrange(VOCAB) for _ in range(length)]


def plain(subject: Engine, draw: random.Random) -> None:
    subject.prompt(prompt_of(draw)).generate(1).release()


def everything(subject: Engine, draw: random.Random) -> None:
    """Edits, captures, forks, kept rejected drafts, rollbacks, abandoned streams, pictures, and a bad request."""
    edit = Edit("blocks.0.hook_in", "add", torch.randn(200, 32), positions=range(200))
    root = subject.prompt(prompt_of(draw), sites="SZ", keep_rejected=True, edits=[edit])
    (fork,) = root.fork(at=3)
    how = {"drafter": draw.choice(("tree", "lens", "model", "self")), "window": 3, "keep_pages": True}
    subject.generate([root, fork], 4, **how)
    root.rollback(5).force([1, 2])
    next(fork.stream(3))
    root.kv()
    str(root.tree())
    with pytest.raises(BadRequest):
        subject.generate([root, root], 3)
    fork.release()
    root.release()


def held() -> tuple[int, int]:
    """Objects tracked by the interpreter, and bytes of all tensors."""
    gc.collect()
    objects = gc.get_objects()
    tensors = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in objects if type(x) is Tensor}
    return len(objects), sum(tensors.values())


def growth(subject: Engine, cycle: Cycle, count: int, warm_up: int = 60) -> tuple[float, float]:
    """Objects and bytes of tensors that a cycle leaves behind, once pages, index and caches are full.

    The minimum over two halves: a leak shows in both, while a module loaded by another thread shows in only one.
    """
    draw = random.Random(0)
    for _ in range(warm_up):
        cycle(subject, draw)
    marks = [held()]
    for _ in range(2):
        for _ in range(count // 2):
            cycle(subject, draw)
        marks.append(held())
    subject.check_integrity()
    objects, tensors = (min((b[i] - a[i]) / (count // 2) for a, b in pairwise(marks)) for i in range(2))
    return objects, tensors


def failing(subject: Engine, draw: random.Random) -> None:
    with pytest.raises(EngineError):
        subject.prompts([[1, 2, 3], prompt_of(draw, 80)])


def thinking(subject: Engine, draw: random.Random) -> None:
    face, name = draw.choice(("heads", "tails")), draw.choice(("Alice", "Bob", "Carol"))
    branch = subject.prompt(f"A coin's state is {face}. {name} flips, then Bob flips.", sites="STCZ", keep_rejected=True)
    (fork,) = branch.fork(edits=[Edit("thinking.state", "zero")])
    fork.generate(2).release()
    branch.release()


def replayed(subject: Engine, draw: random.Random) -> None:
    run = subject.replay(get("coin")(flips=2).examples([draw.randrange(1000)]), sites="SZ", drafter="tree", window=4)
    assert run.tree(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "cycle", "count", "objects", "tensors"),
    [
        (lambda: engine(small(), cache_tokens=128), plain, 400, 0.02, 1),
        # a page more or less in the prefix index; an edit alone has 25,600 bytes
        (lambda: engine(small(), cache_tokens=128, draft_model=random_model(3, num_layers=1)), everything, 60, 1, 500),
        (lambda: engine(small(), cache_tokens=64), failing, 60, 1, 10),
        (lambda: Engine.load("coin-thinking", cache_tokens=128), thinking, 12, 2, 2000),
        (lambda: Engine.load("coin-plain", cache_tokens=96), replayed, 20, 2, 2000),
    ],
)
def test_requests_leave_nothing_behind(
    make: Callable[[], Engine], cycle: Cycle, count: int, objects: float, tensors: float
) -> None:
    subject = make()
    found = growth(subject, cycle, count, warm_up=60 if count >= 60 else 20)
    assert found[0] < objects and found[1] < tensors
    assert len(subject.tree) == 0 and subject.loop.lanes == {}


def test_a_recorded_trace_grows() -> None:
    """Negative control, and why a trace is opt-in: every event stays, with every value of an edit."""
    subject = engine(small(), cache_tokens=128, draft_model=random_model(3, num_layers=1), record=True)
    objects, _ = growth(subject, everything, 10, warm_up=5)
    assert objects > 20
    assert sum(len(str(event)) for event in subject.trace.events) > 15 * 30_000


def test_without_recording_the_trace_says_how_to_get_one() -> None:
    subject = engine()
    branch = subject.prompt([1, 2, 3])
    for look in (lambda: subject.trace, branch.timeline):
        with pytest.raises(BadRequest, match=r"Make it with record=True, e.g. Engine.load\(\.\.\., record=True\)"):
            look()


def test_forks_of_a_branch_that_stays() -> None:
    subject = engine(small(), cache_tokens=128)
    root = subject.prompt([1, 2, 3], sites="S")

    def cycle(_: Engine, draw: random.Random) -> None:
        (fork,) = root.fork()
        fork.force(prompt_of(draw, 2)).release()

    objects, tensors = growth(subject, cycle, 160)
    assert objects < 0.1 and tensors < 10 and subject.tree.children(root.id) == []


@pytest.mark.slow
def test_a_branch_that_goes_to_and_fro() -> None:
    """Rejected drafts hang off the branch until it is rolled back before them."""
    subject = engine(cache_tokens=256)
    root = subject.prompt([1, 2, 3])

    def cycle(_: Engine, draw: random.Random) -> None:
        root.force([draw.randrange(VOCAB)]).generate(5, drafter="tree", window=3)
        assert root.record.cut
        root.rollback(3)

    objects, tensors = growth(subject, cycle, 60)
    assert objects < 1 and tensors < 10 and subject.tree.children(root.id) == []


# ---- held objects stay readable --------------------------------------------------------------------------------------


def test_a_handle_keeps_its_record() -> None:
    subject = engine()
    root = subject.prompt([1, 2, 3]).generate(6, drafter="tree", window=3)
    (fork,) = root.fork()
    tokens, drawn = fork.generate(2).tokens, str(root.tree())
    assert "rejected" in drawn
    number = fork.id
    fork.release()
    root.release()
    assert fork.tokens == tokens and fork.status.value == "released"
    assert str(root.tree()).count("\n") == drawn.count("\n"), "the same lines; released ones say so"
    del fork
    with pytest.raises(BadRequest, match="released and nothing refers to it"):
        subject.tree.branch(number)
    assert str(root.tree()).count("\n") == drawn.count("\n") - 1
    del root
    assert len(subject.tree) == 0


def test_a_run_keeps_its_trees() -> None:
    subject = Engine.load("coin-plain")
    task = get("coin")(flips=2)
    run = subject.replay(task.examples(2), sites="S", drafter="tree", window=4)
    drawn = [str(run.tree(i)) for i in range(2)]
    for _ in range(3):
        subject.replay(task.examples(2), sites="S")
    gc.collect()
    assert [str(run.tree(i)) for i in range(2)] == drawn and " released x" in "".join(drawn)


# ---- holds -----------------------------------------------------------------------------------------------------------
# Branches that nobody holds are released: at the end of a `with` block, and when their last handle is gone.

DRAWN = Sampling(temperature=1.0, ignore_eos=True)


def seeds(n: int, first: int = 0) -> list[Sampling]:
    return [Sampling(temperature=1.0, seed=first + i, ignore_eos=True) for i in range(n)]


def test_with_releases_on_exit() -> None:
    subject = engine()
    with subject.prompt([1, 2, 3]) as root, root.fork()[0] as fork:
        assert len(subject.loop.lanes) == 2
    assert root.status is fork.status is BranchStatus.RELEASED and not subject.loop.lanes
    with subject.prompt([1, 2, 3]) as early:
        early.release()  # a second release is an error; leaving the block is not
    with pytest.raises(ZeroDivisionError), subject.prompt([1]) as failed:
        raise ZeroDivisionError
    assert failed.status is BranchStatus.RELEASED
    with pytest.raises(ClosedBranch):
        failed.release()


def test_dropped_forks_are_released_before_the_next_call() -> None:
    """Nothing runs when a handle is dropped; the engine releases the branch before its next call."""
    subject = engine()
    root = subject.prompt([1, 2, 3])
    forks = root.fork(5)
    kept = forks[2]
    del forks
    assert len(subject.loop.lanes) == 6, "a finalizer only leaves a note"
    assert root.length == 3
    assert sorted(subject.loop.lanes) == [root.id, kept.id]
    assert kept.generate(2).length == 5  # negative control: what is held stays open
    subject.check_integrity()


def test_a_thousand_branches_dropped_at_once_are_freed() -> None:
    """Releasing one must not begin the release of the next within it."""
    subject = engine(cache_tokens=4096)
    root = subject.prompt([1, 2, 3, 4, 5])
    forks = root.fork(1000)
    del forks
    gc.collect()
    assert root.generate(3).generated == continuation(toy(), [1, 2, 3, 4, 5], 3)
    assert list(subject.loop.lanes) == [root.id]
    subject.check_integrity()


def test_the_root_of_held_forks_keeps_its_shared_pages() -> None:
    """Idle branches give up their own pages before those they share, or else each new fork computes the prompt again."""
    subject = engine(cache_tokens=512)
    root, held = subject.prompt(list(range(40))), []
    for number in range(8):
        held += subject.generate(root.fork(10), 12, sampling=seeds(10, 10 * number))
        assert root.lane.computed >= 32, "its two whole pages"
    subject.check_integrity()
    alone = engine().prompt(list(range(40))).generate(12, sampling=seeds(1, 3)[0])
    assert held[3].tokens == alone.tokens and torch.equal(held[3].kv(), alone.kv())


def test_rejected_branches_hold_the_branch_they_were_cut_from() -> None:
    subject = engine(record=True)
    cut = subject.prompt([1, 2, 3], sites="S", keep_rejected=True).generate(6, drafter="tree", window=3).rejected
    assert cut and subject.loop.lanes
    rows = cut[0].activations["blocks.0.hook_in"]
    assert len(rows) and cut[0].status is BranchStatus.REJECTED
    count = len(subject.trace.events)
    del cut
    subject.check_integrity()
    assert not subject.loop.lanes
    assert len(subject.trace.events) == count, "when Python frees a handle is not part of the trace"


def test_a_stream_holds_its_branch() -> None:
    subject = engine()
    stream = subject.prompt([1, 2, 3]).stream(5)
    gc.collect()
    tokens = list(stream)
    assert tokens == subject.prompt([1, 2, 3]).generate(5).generated
    del stream
    assert subject.prompt([1]).length == 1 and not any(lane.streamed for lane in subject.loop.lanes.values())


def test_handles_dropped_by_other_threads() -> None:
    """Threads fork, generate and drop while others do the same. Their tokens are those of a quiet engine."""
    subject, found = engine(cache_tokens=1024), {}
    root = subject.prompt([5, 6, 7])

    def work(number: int) -> None:
        for round_ in range(6):
            (fork,) = root.fork()
            found[number, round_] = fork.generate(4, sampling=seeds(1, 10 * number + round_)[0]).tokens

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()
    assert root.length == 3 and list(subject.loop.lanes) == [root.id]
    subject.check_integrity()
    for (number, round_), tokens in found.items():
        assert tokens == root.fork()[0].generate(4, sampling=seeds(1, 10 * number + round_)[0]).tokens


# ---- equal draws -----------------------------------------------------------------------------------------------------


def test_forks_with_one_seed_warn() -> None:
    subject = engine()
    root = subject.prompt([1, 2, 3])
    with pytest.warns(Caveat, match="same seed, 0"):
        forks = subject.generate(root.fork(3), 6, sampling=DRAWN)
    assert len({tuple(fork.tokens) for fork in forks}) == 1
    with pytest.warns(Caveat, match="same seed, 7"):  # one after another, too
        forks = [fork.generate(6, sampling=seeds(1, 7)[0]) for fork in root.fork(3)]


def test_other_draws_do_not_warn() -> None:
    """Negative control: other seeds, positions, edits or parents, greedy forks, and a branch that goes on."""
    subject = engine()
    root, other = subject.prompts([[1, 2, 3], [1, 2, 3]])
    with warnings.catch_warnings():
        warnings.simplefilter("error", Caveat)
        subject.generate(root.fork(3), 4, sampling=seeds(3))
        subject.generate([*other.fork(), *root.fork(at=2)], 4, sampling=DRAWN)
        subject.generate(root.fork(3), 4)
        edits = [Edit("blocks.0.hook_out", "add", torch.full((subject.config.d_model,), size)) for size in (1.0, 2.0)]
        subject.generate([root.fork(at=1, edits=[edit])[0] for edit in edits], 4, sampling=DRAWN)
        hook = ("blocks.0.hook_out", lambda value, hook: value)
        subject.generate([*root.fork(at=1), *root.fork(at=1, hooks=[hook])], 4, sampling=DRAWN)
        root.generate(2, sampling=DRAWN).generate(2, sampling=DRAWN)


# ---- end of process --------------------------------------------------------------------------------------------------
# A script may end in the middle of anything that it holds: the process ends promptly, and says nothing of its own.

SCRIPT = """
import sys
from replaylens.engine.request.sampling import Sampling
from tests.toy_model import engine
subject = engine(cache_tokens=512)
drawn = Sampling(temperature=1.0, ignore_eos=True)
stream = iter(subject.prompt([1, 2, 3], sites=["blocks.0.hook_out"]).stream(20, sampling=drawn))
next(stream)
rollouts = subject.prompt([1, 2, 3]).stream_rollouts(20, at=[3], max_new=8, wave=4, sampling=drawn)
next(rollouts)
with_branch = subject.prompt([4, 5]).__enter__()
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("", 0), ("sys.exit(7)", 7)])
def test_streams_and_rollouts_under_way(ending: str, code: int) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT + ending], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


# ---- traps -----------------------------------------------------------------------------------------------------------
# Traps that a new user falls into: each says what is wrong, and what to write instead.

PROMPT = "A coin's state is heads. Alice flips"


@pytest.fixture(scope="module")
def served() -> Engine:
    return Engine.load("coin-plain")


@pytest.mark.usefixtures("watched")
def test_a_progress_bar_ends_at_its_end(served: Engine) -> None:
    """Also where branches stop before all their tokens."""
    task = tasks.get("coin")(flips=2)
    branches = served.prompts([example.prompt for example in task.examples(3)])
    shown = io.StringIO()
    with redirect_stderr(shown):
        served.generate(branches, 40, progress=True)
    assert all(branch.finish_reason for branch in branches), "they stop early"
    bars = re.findall(r"(\d+)%\|[^|]*\| (\d+)/(\d+)", shown.getvalue())
    done = sum(len(branch.generated) for branch in branches)
    assert bars[-1] == ("100", str(done), str(done)) and done < 120
    long = io.StringIO()
    with redirect_stderr(long):
        served.generate([served.prompt(PROMPT)], 6, sampling=Sampling(ignore_eos=True), progress=True)
    assert re.findall(r"(\d+)%\|[^|]*\| (\d+)/(\d+)", long.getvalue())[-1] == ("100", "6", "6")


# ---- the size of the cache -----------------------------------------------------------------------------------------------


def with_free(monkeypatch: pytest.MonkeyPatch, free: int, **options: Any) -> Engine:
    """An engine made while so many bytes are free. A position of the small model takes 128."""
    monkeypatch.setattr("replaylens.engine.memory.cache.free_memory", lambda: free)
    return Engine(small(), page_size=4, **options)


def test_the_cache_is_sized_by_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sixteenth of it holds a power of two from 8,192 positions to 1,048,576, of a draft model too. What is given stays."""
    part = 16 * 128
    assert with_free(monkeypatch, 1 << 16 << 11).cache_tokens == 1 << 16
    assert with_free(monkeypatch, (1 << 16 << 11) - 1).cache_tokens == 1 << 15
    assert with_free(monkeypatch, 0).cache_tokens == with_free(monkeypatch, (1 << 14) * part - 1).cache_tokens == 8192
    assert with_free(monkeypatch, 1 << 60).cache_tokens == 1 << 20
    assert with_free(monkeypatch, 1 << 16 << 11, draft_model=small()).cache_tokens == 1 << 15
    for given in (36, 1 << 17):
        subject = with_free(monkeypatch, 1 << 16 << 11, cache_tokens=given)
        assert subject.cache_tokens == given and f"of {given // 4} KV pages" in repr(subject)
    monkeypatch.setattr("replaylens.engine.memory.cache.total_memory", lambda: 4000 * 128)
    assert with_free(monkeypatch, 0).cache_tokens == 2048, "as much as there is at all"


def test_an_engine_says_that_its_cache_was_too_small() -> None:
    """How many positions branches gave up to others, once any did; not with room for all. The tokens are the same."""
    found = {}
    for tokens in (40, 400):
        subject = Engine(small(), page_size=4, cache_tokens=tokens)
        held = [subject.prompt([i, *range(16)]).generate(3) for i in range(4)]  # KV of 19 positions each: two fit at once
        lost = sum(19 - min(19, 4 * len(branch.lane.table.pages)) for branch in held)
        found[tokens] = [branch.generated for branch in held]
        said = f"; full: branches gave up the KV of {lost} positions, to be computed again. A larger cache_tokens avoids it"
        assert ("gave up" in repr(subject)) is (tokens == 40) is ("gave up" in subject._repr_html_())
        assert tokens == 400 or said in repr(subject), repr(subject)
    assert found[40] == found[400]


def test_a_large_cache_takes_memory_where_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several engines may each be allowed more than the machine has: making one touches nothing."""
    resident = lambda: int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")  # noqa: E731
    with_free(monkeypatch, 0)
    before = resident()
    subject = with_free(monkeypatch, 1 << 60)
    assert subject.runner.cache.num_bytes >= 1 << 27 and resident() - before < 1 << 23
    subject.prompt([1, 2, 3]).generate(3)
    assert subject.check_integrity() and resident() - before < 1 << 24
    subject.runner.cache.data.view(-1)[::512] = 1.0
    assert resident() - before > 1 << 26, "the control: what is written is seen"


def test_nothing_that_is_kept_depends_on_the_size_of_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    examples, found = tasks.get("coin")(flips=2).examples(6), set()
    for free in (0, 1 << 60):
        monkeypatch.setattr("replaylens.engine.memory.cache.free_memory", lambda free=free: free)
        subject = Engine.load("coin-plain")
        root = subject.prompt("A coin's state is heads. Alice flips")
        drawn = root.resample(8, max_new=4, sites="S")
        found.add((subject.fingerprint.digest, subject.replay(examples, sites="STC").digest, drawn.digest, repr(drawn.plan)))
        assert subject.cache_tokens in (8192, 1 << 20)
    assert len(found) == 1


# ---- the memory of a GPU -------------------------------------------------------------------------------------------------
# Pure functions of facts: no GPU is needed.


def on_gpu(
    monkeypatch: pytest.MonkeyPatch, name: str, held: int, config: ModelConfig = LLAMA, **options: Any
) -> assembly.Sizes:
    """The sizes of an engine on a GPU of this name after `held` bytes of weights."""
    with imposed(name) as gpu:
        free = max(0, gpu.memory - held)
        for module in (cache_module, assembly):
            monkeypatch.setattr(module, "free_on", lambda place: free)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda device=None: held)
        model: Any = SimpleNamespace(config=config, stages=(), device=torch.device("cuda"), dtype=torch.bfloat16)
        return assembly.Sizes.of(model, **options)


def test_an_8b_model_fits_into_24_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of 15.0 GiB leave room for KV and passes, which follow from what is there; a larger GPU has more of both."""
    weights = 2 * 8_030_000_000
    small = on_gpu(monkeypatch, "4090", weights)
    assert (small.tokens, small.lone_rows) == (8192, 8192)
    kv, passes = 8192 * 131_072, 8192 * 2 * 69_632  # keys and values; four residual streams, heads, gate, up and hidden
    free = (24 << 30) - weights - kv - passes
    parts = (
        f"weights 15.0 GiB, KV of cache_tokens=8,192 {kv / 2**30:.1f} GiB, passes of up to 8,192 rows {passes / 2**30:.1f} GiB"
    )
    assert small.memory == f"24.0 GiB of 4090: {parts}; {free / 2**30:.1f} GiB stay free"
    large = on_gpu(monkeypatch, "H200", weights)
    assert (large.tokens, large.lone_rows) == (1 << 16, 8192)
    assert on_gpu(monkeypatch, "4090", weights + (2 << 30)).lone_rows == 4096
    assert on_gpu(monkeypatch, "4090", weights, tokens=16384, max_rows=256).tokens == 16384


def test_a_card_with_too_little_memory_is_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 300 << 20
    with pytest.raises(NotEnoughMemory, match=r"4090 has 24\.0 GiB, of which 0\.3 GiB are free.*smaller max_rows, or divide"):
        on_gpu(monkeypatch, "4090", (24 << 30) - left, max_rows=1 << 14)
    with pytest.raises(NotEnoughMemory, match=r"KV of cache_tokens=65,536 8\.0 GiB.* Give cache_tokens=\d+ at most") as found:
        on_gpu(monkeypatch, "4090", 17 << 30, tokens=65536)
    most = int(re.findall(r"cache_tokens=(\d+) at most", str(found.value))[0])
    assert on_gpu(monkeypatch, "4090", 17 << 30, tokens=most).tokens == most, "what the refusal proposes is taken"
    with pytest.raises(NotEnoughMemory):
        on_gpu(monkeypatch, "4090", 17 << 30, tokens=most + 16)


def test_weights_that_do_not_fit_are_refused_before_they_are_read() -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"weights take 131\.4 GiB in bfloat16, and 4090 has 23\.5 GiB free of 24\.0"
    ) as found:
        require_fit(2 * 70_553_706_496, torch.bfloat16, KNOWN["4090"], int(23.5 * 2**30))
    assert "Use a smaller model, several GPUs (devices=[...]), or device='cpu'." in str(found.value)
    require_fit(16 << 30, torch.bfloat16, KNOWN["4090"], 23 << 30)


def test_gpus_without_kernels_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """sm_75 and older, ROCm and MPS, each with what works; and facts of a GPU that nobody knows."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 0)
    old = replace(KNOWN["A10"], name="Tesla T4", capability=(7, 5))
    monkeypatch.setattr("replaylens.kernels.gpus._imposed", old)
    works = r"Use device='cpu', whose float32 has the same bits everywhere\.$"
    with pytest.raises(
        UnsupportedModel, match=r"^Tesla T4 has compute capability 7\.5, which is not supported\. .*8\.0.*" + works
    ):
        Engine.load("coin-plain", device="cuda")
    monkeypatch.setattr("replaylens.kernels.gpus._imposed", KNOWN["A10"])
    monkeypatch.setattr("torch.version.hip", "6.4")
    with pytest.raises(UnsupportedModel, match=r"is an AMD GPU \(ROCm 6\.4\), which is not supported\..*" + works):
        Engine.load("coin-plain", device="cuda")
    with pytest.raises(UnsupportedModel, match=r"Apple GPUs \(mps\) are not supported.* Use device='cpu'"):
        Engine.load("coin-plain", device="mps")
    assert machine.unsupported(KNOWN["A100"], None) is None
    monkeypatch.setattr("replaylens.kernels.gpus._imposed", None)
    monkeypatch.setenv("REPLAYLENS_GPU", "GTX 480")
    gpus._of.cache_clear()
    with pytest.raises(BadRequest, match=r"Unknown GPU 'GTX 480'\. Use one of A100, "):
        Engine.load("coin-plain", device="cuda")
