"""Windows that the device fills on its own, with a stand-in for its decode graphs: same tokens, all requests come on alike."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.errors import UnknownSite
from replaylens.engine.loop.commit import _drawn_together
from replaylens.engine.loop.lane import Job, Lane, Turn, Window
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.passes import bursts as bursts_file
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.bursts import BurstRequest, BurstRows, Bursts, StepBlock, StepRows
from replaylens.engine.passes.runner import PassResult, Runner
from replaylens.engine.passes.transfer import PendingRows, SiteGroup
from replaylens.engine.request.capture import PassTap
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.request import Request
from replaylens.rollouts.drawing import Waves
from tests.engine.serving.test_watch import IN, OUT, probe
from tests.kernels.interpreted import served
from tests.toy_model import random_model

PROMPTS = [[5, 9, 2, 7], [3, 3, 8], [1, 4, 1, 5, 9, 2, 6], [8, 2], [6, 6, 6, 1, 2]]
N = 21


class StandIn:
    """`Bursts` whose steps are passes on the host."""

    def __init__(self, runner: Runner) -> None:
        self.runner, self.calls, self.spare = runner, list[tuple[int, int, bool]](), PageTable()
        self.meanwhile: list[Callable[[], object]] = []

    def run(self, places: list[BurstRequest], steps: int, exact: bool) -> tuple[list[list[int]], list[StepRows | None]]:
        self.calls.append((len(places), steps, exact))
        Bursts.busy(self)  # type: ignore[arg-type]
        tokens: list[list[int]] = [[] for _ in places]
        wanted = [(i, place.wanted) for i, place in enumerate(places) if place.wanted is not None]
        sites, rows_of = (
            sorted({site for _, each in wanted for site in each.spec.sites}),
            BurstRows(len(wanted), lambda rows: None),
        )
        for step in range(steps):
            last = [[own[-1] if own else place.token] for own, place in zip(tokens, places, strict=True)]
            rows = [Segment(p.table, p.position + step, own, 1, p.edits) for p, own in zip(places, last, strict=True)]
            tap = PassTap(frozenset(sites))
            result = self.runner.exact(rows, tap) if exact else self.runner.fast(rows, tap)
            if held := [i for i, each in wanted if step in each.steps]:
                kept = PendingRows([(names, x[:, held]) for names, x in tap.stacked(sites)], 0)
                rows_of.blocks["host"].append(StepBlock(kept, held, 1))
            for i, (own, place) in enumerate(zip(tokens, places, strict=True)):
                own.append(result.choose(i, place.sampling, [0] * (place.position + step + 1), 0))
        views = {i: rows_of.view(i, "host", {site: site for site in each.spec.recorded}) for i, each in wanted}
        return tokens, [views.get(i) for i in range(len(places))]


@pytest.fixture
def wrong_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fast path whose drafts are often wrong."""
    fast, generator = Runner.fast, torch.Generator().manual_seed(0)

    def noisy(self: Runner, segments: list[Segment], tap: object = None) -> PassResult:
        result = fast(self, segments, tap)  # type: ignore[arg-type]
        result.logits = result.logits + 0.7 * torch.randn(result.logits.shape, generator=generator)
        return result

    monkeypatch.setattr(Runner, "fast", noisy)


def made() -> tuple[Engine, StandIn]:
    engine = Engine(random_model(), cache_tokens=1024, page_size=4, record=True)
    bursts = StandIn(engine.runner)
    engine.loop.bursts = bursts  # type: ignore[assignment]
    return engine, bursts


def drawn(seed: int, **options: object) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, **options)  # type: ignore[arg-type]


def alone(i: int, sampling: Sampling) -> list[int]:
    return Engine(random_model(), cache_tokens=1024).prompt(PROMPTS[i]).generate(N, window=1, sampling=sampling).generated


def test_windows_fill_on_the_device(wrong_drafts: None) -> None:
    """Windows of several sizes, ordinary and direct requests beside them. Every promised token is that of the request alone."""
    engine, bursts = made()
    branches = engine.prompts(PROMPTS)
    windows: list[int | None] = [6, 4, None, 1, 9]
    asked = [Request(N, drawn(i), window=window, deterministic=i != 2) for i, window in enumerate(windows)]
    engine.serve(branches, asked)
    for i in (0, 1, 3, 4):
        assert branches[i].generated == alone(i, drawn(i)), i
        assert branches[i].certified
    assert not branches[2].certified and len(branches[2].generated) == N
    assert max(steps for _, steps, exact in bursts.calls if not exact) > 2, "no window was filled by a burst"
    assert any(branch.statistics.rejected for branch in branches), "no draft was wrong: the test shows nothing"
    engine.check_integrity()


@pytest.mark.parametrize("sites", [None, "S", "SZ"])
def test_the_last_row_is_part_of_the_burst(sites: str | None) -> None:
    """With `final`, the last token's row is one more step, unless Z wants the token after it. Tokens, KV and rows are those of
    an engine without bursts; a stop token ends a request within the burst."""
    engine, bursts = made()
    plain, ends = Engine(random_model(), cache_tokens=1024), drawn(1, stop_tokens=(alone(1, drawn(1))[5],))
    passes = list[int]()
    for subject in (engine, plain):
        branches = subject.prompts(PROMPTS[:2], sites=sites)
        run = subject.runner.exact
        subject.runner.exact = lambda *given, run=run: (passes.append(1), run(*given))[1]  # type: ignore[method-assign]
        subject.generate(branches, N, sampling=[drawn(0), ends], window=1, final=True)
        subject.runner.exact = run  # type: ignore[method-assign]
        if subject is engine:
            taken, mine = len(passes), branches
    assert [(each.tokens, each.states[-1]) for each in mine] == [(each.tokens, "generated") for each in branches]
    assert len(mine[1].generated) <= 6, "nothing ended within a burst"
    for one, other in zip(mine, branches, strict=True):
        assert torch.equal(one.kv(), other.kv())
        if sites is not None:
            assert all(
                torch.equal(one.activations[site].nan_to_num(), other.activations[site].nan_to_num())
                for site in other.activations
            )
    steps = sum(number for _, number, _ in bursts.calls)
    assert sites == "SZ" or taken == steps, "a pass beside the bursts computed the last row"
    engine.check_integrity()


def test_long_bursts_only_where_nobody_looks() -> None:
    """Requests that may end early, and streams, come back to the host after 16 steps."""
    for options, longest in [({}, 64), ({"stop_tokens": (0,)}, 16), ({"stop": ("never",)}, 16)]:
        engine, bursts = made()
        engine.prompt(PROMPTS[0]).generate(72, sampling=drawn(0, **options))
        assert max(steps for _, steps, _ in bursts.calls) == longest
    engine, bursts = made()
    assert len(list(engine.prompt(PROMPTS[0]).stream(40, sampling=drawn(0)))) == 40
    assert max(steps for _, steps, _ in bursts.calls) == 16
    job = engine._job(engine.prompt(PROMPTS[0]), Request(40, drawn(0)))
    assert job.certain and not replace(job, cancel_at=16).certain, "a stream that is replayed ends where it was closed"


def test_a_wave_is_finished_once_the_device_is_busy_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the thread that reads and writes it would only delay the launch."""
    engine, bursts = made()
    read, launched = Waves.read, list[int]()
    monkeypatch.setattr(Waves, "read", lambda *given, **how: launched.append(len(bursts.calls)) or read(*given, **how))
    drawing = dict(sampling=drawn(0, ignore_eos=True), max_new=4, wave=2)
    found = list(engine.prompt(PROMPTS[0]).stream_rollouts(6, folder=tmp_path, **drawing))
    assert launched == [2, 3, 3] and len(found) == 6, "the last one has nothing to wait for"
    launched.clear()
    with engine.forest.meanwhile(lambda: launched.append(0)):
        assert not launched
    assert launched == [0] and not bursts.meanwhile, "once, at the end if nothing was computed"
    with engine.forest.meanwhile(lambda: launched.append(1)), ExitStack() as other:
        other.enter_context(engine.forest.meanwhile(lambda: launched.append(2)))
        first = ExitStack()
        first.enter_context(engine.forest.meanwhile(lambda: launched.append(3)))
        other.close()  # another thread's block ends first
        assert launched == [0, 2] and len(bursts.meanwhile) == 2
        first.close()
    assert launched == [0, 2, 3, 1] and not bursts.meanwhile


def test_all_requests_come_on_alike(wrong_drafts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one step, every request that drafts or decodes takes equally many steps on the device."""
    engine, _ = made()
    seen: list[set[int]] = []
    admit = engine.loop.admit

    def watched() -> list[Turn]:
        turns = admit()
        seen.append({turn.burst for turn in turns if turn.drafting or (turn.deciding and not turn.num_drafts)})
        return turns

    monkeypatch.setattr(engine.loop, "admit", watched)
    branches = engine.prompts(PROMPTS[:3])
    kinds: list[tuple[int | None, bool]] = [(6, True), (None, False), (1, True)]
    engine.serve(branches, [Request(N, drawn(i), window=w, deterministic=d) for i, (w, d) in enumerate(kinds)])
    assert all(len(bursts) <= 1 for bursts in seen), "some took more steps than others"
    assert max(set().union(*seen)) > 1


def test_a_request_that_needs_the_host_slows_all_to_single_steps(wrong_drafts: None) -> None:
    """A penalty is applied on the host, so nobody runs ahead of that request."""
    engine, bursts = made()
    branches = engine.prompts(PROMPTS[:2])
    own = [drawn(0), drawn(1, repetition_penalty=1.3)]
    engine.serve(branches, [Request(8, own[0], window=6), Request(16, own[1], deterministic=False)])
    assert branches[0].generated == alone(0, own[0])[:8]
    assert not bursts.calls


def test_rows_that_decode_join_the_pass_of_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a prompt is computed, nobody decodes in bursts beside it: those would run with few rows while all others wait."""
    engine, bursts = made()
    short, long = engine.prompt(PROMPTS[0]), list(range(1, 60))
    engine.loop.admission.max_rows = 16
    admit, mixed = engine.loop.admit, list[bool]()

    def watched() -> list[Turn]:
        turns = admit()
        if any(len(turn.rows) > 1 for turn in turns):
            mixed.append(len(turns) > 1)
            assert not any(turn.burst for turn in turns)
        return turns

    monkeypatch.setattr(engine.loop, "admit", watched)
    late = engine.handle(engine.forest.plant(long, None))
    engine.serve([short, late], [Request(N, drawn(0)), Request(N, drawn(7))])
    assert sum(mixed) >= 3, "no row decoded beside a prompt"
    assert short.generated == alone(0, drawn(0))
    assert late.generated == Engine(random_model(), cache_tokens=1024).prompt(long).generate(N, sampling=drawn(7)).generated
    assert max(steps for _, steps, _ in bursts.calls) > 2, "bursts come back once no prompt waits"


def test_a_draft_that_ends_the_sequence_ends_the_window(wrong_drafts: None) -> None:
    """Drafts after a stop token are dropped; a wrong stop token costs nothing."""
    ended = 0
    for seed in range(6):
        engine, _ = made()
        stops = drawn(seed, stop_tokens=(3, 4, 5, 6, 7, 8))
        branch = engine.prompt(PROMPTS[0]).generate(N, window=8, sampling=stops)
        assert branch.generated == alone(0, stops) and branch.finish_reason == ("eos" if len(branch.generated) < N else None)
        chains = [chain for event in engine.trace.events if event["event"] == "draft" for chain in event["chains"]]
        assert not any(token in stops.stop_tokens for chain in chains for token in chain[:-1])
        ended += sum(chain[-1] in stops.stop_tokens for chain in chains if chain)
        engine.check_integrity()
    assert ended, "no draft ended a sequence: the test shows nothing"


# ---- drawn together ---------------------------------------------------------------------------------------------------
# Drafts that are drawn together on the device: the tokens that each request draws by itself.


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_drawn_together_as_one_by_one(device: str) -> None:
    """Rows in another order than the turns, windows of different lengths, different seeds and temperatures."""
    logits = 3 * torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    rows, turns, tree = [4, 0, 6, 1], [], BranchTree()
    for i, (temperature, length) in enumerate([(0.7, 5), (1.0, 9), (2.0, 3), (1.0, 30)]):
        job = Job(Lane(tree.branch(tree.plant([0])), PageTable()), sampling=Sampling(temperature=temperature, seed=i))
        job.window_open = Window(length, 4, list(range(i)))
        turns.append(Turn(job, length - 1, [1], complete=True, drafting=True))
    result = SimpleNamespace(logits=logits.to(device))
    found = _drawn_together(turns, result, dict(zip(turns, rows, strict=True)))  # type: ignore[arg-type]
    for i, (turn, row) in enumerate(zip(turns, rows, strict=True)):
        path = [0] * (turn.end + i)
        assert found[turn] == turn.job.sampling.choose(logits[row].numpy(), path, 1)
    other = turns[0].job.sampling.choose(logits[rows[0]].numpy(), [0] * 2, 1)
    assert other != found[turns[0]], "negative control: the position matters"


# ---- scores ---------------------------------------------------------------------------------------------------------------


class Again:
    """A recorded step: a replay launches it again, into the tensors that it returned first."""

    def __init__(self, step: Callable[[], list[SiteGroup]]) -> None:
        self.step, self.found = step, step()

    def replay(self) -> None:
        for (_, kept), (_, new) in zip(self.found, self.step(), strict=True):
            kept.copy_(new)

    def pool(self) -> None:
        return None


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_the_step_of_a_burst_scores_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real step in the interpreter, with a stand-in for CUDA's graph. Scores are those of passes and of captured rows, on
    branches that keep no rows; those of another watch in the same step are its own."""
    monkeypatch.setattr(bursts_file, "recorded", lambda step, *_: (again := Again(step), again.found))
    engine = served("cpu")
    burst = Bursts(engine.runner, lambda *given: {})
    engine.loop.bursts = burst
    watch = engine.watch({"a": probe(1), "b": probe(2, OUT, classes=3), "c": probe(3, OUT)})
    other = engine.watch({"a": probe(4, OUT)})
    one, two, plain = (*engine.prompts([[1, 2]], watch=watch), *engine.prompts([[3, 4]], watch=other), engine.prompt([5]))
    engine.generate([one, two, plain], 2, final=True)
    (key,) = burst._graphs
    assert {each.site for each in key.scored} == {IN, OUT} and len(key.scored) == 3 and not key.sites
    assert list(one.activations) == []
    engine.loop.bursts = None
    for branch, watching in ((one, watch), (two, other)):
        rows = engine.prompt(branch.tokens, sites=[IN, OUT])
        assert rows.lane.capture is not None and not rows.lane.capture.scored
        with watching.prompt(branch.tokens) as again:
            for found in (watching.scores(again), watching.scores(rows)):
                assert all(torch.equal(found[name], x) and len(x) == 4 for name, x in watching.scores(branch).items())
    with pytest.raises(UnknownSite):
        other.scores(one)
