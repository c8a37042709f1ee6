"""A rollout's bits depend on its number alone: not on how many are drawn, in which waves, beside whom, or after what."""

from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.resampling import drawing
from replaylens.engine.resampling.drawing import plan_rollouts, waves_of
from replaylens.engine.resampling.plan import rollout_seed
from replaylens.engine.resampling.rollouts import Rollout, Rollouts
from replaylens.engine.serving.branch import Branch
from tests.toy_model import engine

PATH, NEW, N = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8], 12, 5
AT = [7, 16, 19]
HOT = Sampling(temperature=1.2, seed=11, ignore_eos=True)
EDITS = [Edit("blocks.1.hook_in", "add", torch.linspace(-1, 1, 32), positions=[2, 3])]
EVERYTHING = ["fork", "last", "all", 0, -2]


def path_of(subject: Engine, edited: bool = False) -> Branch:
    return subject.prompt(PATH[:5], edits=EDITS if edited else []).force(PATH[5:])


def drawn(branch: Branch, n: int = N, wave: int | None = None, at: object = AT, **more: object) -> Rollouts:
    return branch.resample(n, at=at, sampling=HOT, max_new=NEW, sites="SZ", keep=EVERYTHING, wave=wave, **more)  # type: ignore[arg-type]


def same(left: Rollout, right: Rollout) -> bool:
    return left.to_json() == right.to_json() and all(
        torch.equal(left.states[site].nan_to_num(7.0), right.states[site].nan_to_num(7.0)) for site in left.states
    )


@pytest.fixture(scope="module")
def reference() -> Rollouts:
    return drawn(path_of(engine()))


def alone(edited: bool, position: int, number: int) -> tuple[list[int], dict[str, Tensor], Tensor]:
    """One rollout by hand, on an engine of its own: tokens, rows from the fork on, and KV."""
    root = engine().prompt(PATH[:5], sites="S", edits=EDITS if edited else []).force(PATH[5:])
    (fork,) = root.fork(at=position)
    fork.generate(NEW, sampling=replace(HOT, seed=rollout_seed(HOT.seed, position, number)), final=True)
    return fork.tokens[position:], {site: rows[position - 1 :] for site, rows in fork.activations.items()}, fork.kv()


@pytest.mark.parametrize("edited", [False, True])
def test_as_one_branch_alone(edited: bool) -> None:
    """Tokens, captured rows and KV of a rollout in company are those of a fork that is computed by hand, alone."""
    subject = engine()
    branch = path_of(subject, edited)
    plan, _ = plan_rollouts(branch, N, AT, HOT, NEW, None, "S", EVERYTHING)
    indices = range(len(plan))
    with ExitStack() as opened:
        waves = waves_of(subject, branch, plan)
        forks = waves.forked(indices, opened)
        waves.generated(forks, indices)
        for index in (0, 6, 14):
            place, number = plan.rollout(index)
            tokens, rows, kv = alone(edited, AT[place], number)
            fork = forks[index]
            assert isinstance(fork, Branch) and fork.tokens[AT[place] :] == tokens
            assert torch.equal(fork.kv(), kv)
            for site in rows:
                assert torch.equal(fork.activations[site], rows[site]), site
    assert list(subject.loop.lanes) == [branch.id]
    subject.check_integrity()


@pytest.mark.parametrize("wave", [1, 4, 7, 100])
def test_waves(reference: Rollouts, wave: int) -> None:
    assert drawn(path_of(engine()), wave=wave).digest == reference.digest


def test_company(reference: Rollouts) -> None:
    """Fewer rollouts, fewer positions, other requests beside them: the ones in common are the same."""
    subject = engine()
    other = subject.prompt([9, 9, 9])
    stream = other.stream(40)
    next(stream)
    few = drawn(path_of(subject), n=2, at=[16])
    assert [same(mine, reference[N + i]) for i, mine in enumerate(few)] == [True, True]
    next(stream)


def test_preemption(reference: Rollouts) -> None:
    """In a cache with room for a few rollouts only, all at once: they take pages from each other and compute them again."""
    subject, preempted = engine(cache_tokens=160, page_size=4), []
    subject.loop.listeners.append(lambda event: preempted.append(event) if event["event"] == "preempt" else None)
    found = drawn(path_of(subject), wave=len(reference))
    assert found.digest == reference.digest and preempted
    subject.check_integrity()


def test_waves_fit_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default fits into the KV cache, so that nothing is preempted, and into a number of bytes."""
    subject, preempted = engine(cache_tokens=160, page_size=4), []
    subject.loop.listeners.append(lambda event: preempted.append(event) if event["event"] == "preempt" else None)
    branch = path_of(subject)
    _, wave = plan_rollouts(branch, N, AT, HOT, NEW)
    assert wave == (40 - 5) // 4 and branch.resample(N, at=AT, sampling=HOT, max_new=NEW).plan.n == N and not preempted
    monkeypatch.setattr(drawing, "MAX_BYTES", 10_000)
    assert plan_rollouts(branch, N, AT, HOT, NEW, sites="S")[1] == 10_000 // (13 * 3 * 32 * 4) < wave


@pytest.mark.parametrize("options", [{"max_rows": 16}, {"page_size": 1}, {"page_size": 5, "max_rows": 20}])
def test_other_engines(reference: Rollouts, options: dict[str, int]) -> None:
    assert drawn(path_of(engine(**options))).digest == reference.digest


def test_captures_change_no_token(reference: Rollouts) -> None:
    plain = path_of(engine()).resample(N, at=AT, sampling=HOT, max_new=NEW)
    assert [each.tokens for each in plain] == [each.tokens for each in reference]
    captured = engine().prompt(PATH[:5], sites="STC", keep_rejected=True).force(PATH[5:])
    assert drawn(captured).digest == reference.digest, "what the branch itself captures does not matter"


def test_negative_control(reference: Rollouts) -> None:
    """Another seed, another edit and another path have other bits; rollouts differ from each other."""
    branch = path_of(engine())
    other = branch.resample(N, at=AT, sampling=replace(HOT, seed=12), max_new=NEW, sites="SZ", keep=EVERYTHING)
    assert other.digest != reference.digest
    assert drawn(path_of(engine(), edited=True)).digest != reference.digest
    assert len({each.tokens for each in reference}) > N
    assert len({each.seed for each in reference}) == len(reference)
    changed = replace(reference[0], states={**reference[0].states, "blocks.0.hook_in": reference[1].states["blocks.0.hook_in"]})
    assert changed.digest != reference[0].digest, "the digest covers the rows"


def test_replacement() -> None:
    """A replaced sentence is forced, and the rollout goes on from it, as by hand."""
    branch = path_of(engine())
    found = branch.resample(3, at=[7, 16], sampling=HOT, max_new=6, replace=[4, 4, 2], sites="S", keep=["fork", "last"])
    (fork,) = engine().prompt(PATH[:5], sites="S").force(PATH[5:]).fork(at=16)
    fork.force([4, 4, 2]).generate(6, sampling=replace(HOT, seed=rollout_seed(11, 16, 2)), final=True)
    assert list(found[5].tokens) == fork.tokens[19:]
    assert found[5].rows == (("fork", 18), ("last", 24))
    rows = fork.activations["blocks.0.hook_in"]
    assert torch.equal(found[5].states["blocks.0.hook_in"], rows[[18, 24]])
    again = branch.resample(3, at=[7, 16], sampling=HOT, max_new=6, replace=[4, 4, 2], sites="S", keep=["fork", "last"], wave=1)
    assert again.digest == found.digest
    assert found.digest != branch.resample(3, at=[7, 16], sampling=HOT, max_new=6, sites="S", keep=["fork", "last"]).digest


def test_a_stream_stays_on_its_path_when_the_branch_moves_on() -> None:
    """Waves that are drawn later belong to the path of the call, not to what the branch has become."""
    engine = Engine.load("coin-plain")
    start = "A coin's state is heads."
    chain = engine.prompt(start).force(" Alice flips. Bob flips. What's the state? A:")
    wanted = chain.resample(3, at="sentences", max_new=6, wave=2)
    stream = chain.stream_rollouts(3, at="sentences", max_new=6, wave=2)
    first = next(stream)
    chain.rollback(engine.prompt(start).length)
    chain.force(" Bob does not flip. Carol flips. What's the state? A:")
    chain.release()
    assert [each.digest for each in (first, *stream)] == [each.digest for each in wanted.rollouts]
