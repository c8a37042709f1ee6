"""Decode - verify - rollback, phase by phase: both worked examples of the protocol, with page contents and token states."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.engine.engine import Engine
from replaylens.engine.loop.lane import Job, Turn
from replaylens.engine.memory.tree import ACCEPTED, DRAFT, PENDING, PROMPT, REJECTED, BranchStatus
from replaylens.engine.serving.branch import Branch
from tests.toy_model import VOCAB, Reference, continuation, engine, toy, watch_passes

P = [3, 1, 4, 1, 5, 9]
N = len(P)
SITES = ("blocks.0.hook_in", "blocks.1.attn.hook_out", "blocks.1.mlp.hook_out")


@pytest.fixture(scope="module")
def t() -> list[int]:
    """T0, T1, ...: the tokens after the prompt, each from its whole path computed from scratch."""
    return continuation(toy(), P, 8)


def other(token: int) -> int:
    """A token other than this one."""
    return (token + 1) % VOCAB


class Stage:
    """A deterministic request with given drafts after T0, between another deterministic one and an ordinary one."""

    def __init__(self, drafts: list[list[int]], keep_pages: bool = False, drafter: str = "forced") -> None:
        self.engine: Engine = engine()
        self.branch = self.engine.prompt(P, sites=SITES, keep_rejected=True)
        self.beside = self.engine.prompt([2, 7, 1, 8, 2])
        self.ordinary = self.engine.prompt([8, 2, 8])
        given = {N + 1: drafts} if drafter == "forced" else None
        self.job = Job(self.branch.lane, 8, drafter=drafter, window=4, forced_drafts=given, keep_pages=keep_pages)
        self.jobs = [
            Job(self.beside.lane, 8, drafter="lens", window=4),
            self.job,
            Job(self.ordinary.lane, 8, exact=False),
        ]
        for job in self.jobs:
            self.engine.loop.submit(job)
        self.passes = watch_passes(self.engine)

    def t0(self) -> None:
        """Decode T0, the last step of the prefill."""
        self.verify(self.engine.loop.draft(self.engine.loop.admit()))

    def admit(self) -> list[Turn]:
        return self.engine.loop.admit()

    def draft(self, turns: list[Turn]) -> list[Turn]:
        return self.engine.loop.draft(turns)

    def verify(self, turns: list[Turn]) -> None:
        for exact in (True, False):
            self.engine.loop.verify([turn for turn in turns if turn.job.exact is exact], exact)
        self.engine.check_integrity()

    def to_the_verdict(self) -> None:
        self.t0()
        self.verify(self.draft(self.admit()))

    def slots(self) -> list[int]:
        table = self.branch.lane.table
        return self.engine.runner.pool.slots(table, 0, table.length)


def assert_canonical(branch: Branch, num_rows: int) -> None:
    """The pages hold `num_rows` rows, equal bit for bit to those of a fresh engine and of the path computed in one pass."""
    assert branch.lane.computed == branch.lane.table.length == num_rows
    assert torch.equal(branch.kv(), Reference(toy(), branch.tokens[:num_rows]).kv)
    assert torch.equal(branch.kv(), engine(page_size=16).prompt(branch.tokens[:num_rows]).kv())


def assert_captured(branch: Branch, positions: range) -> None:
    truth = Reference(toy(), branch.tokens, SITES).rows
    assert branch.activations.positions() == list(positions)
    for site in SITES:
        assert torch.equal(branch.activations[site], truth[site][positions.start : positions.stop])


def test_prefill_yields_t0_pending_and_the_cache_holds_the_prompt(t: list[int]) -> None:
    stage = Stage([t[1:4]])
    assert stage.branch.record.states == [PROMPT] * N
    assert_canonical(stage.branch, N)
    stage.t0()
    assert stage.branch.tokens == [*P, t[0]]
    assert stage.branch.record.states == [PROMPT] * N + [PENDING]
    assert_canonical(stage.branch, N)


def test_drafts_stand_in_reserved_slots_and_nothing_is_promised_yet(t: list[int]) -> None:
    stage = Stage([[t[1], other(t[2]), t[3]]])
    stage.t0()
    turns = stage.admit()
    assert len(stage.slots()) == N + 4, "room for T0 and three drafts"
    assert len(set(stage.slots())) == N + 4
    stage.draft(turns)
    assert stage.branch.tokens == [*P, t[0], t[1], other(t[2]), t[3]]
    assert stage.branch.record.states == [PROMPT] * N + [PENDING] + [DRAFT] * 3
    assert stage.branch.lane.computed == N
    assert torch.equal(stage.branch.kv(), Reference(toy(), P).kv)


def test_the_fast_path_drafts_into_the_slots_that_verification_overwrites(t: list[int]) -> None:
    stage = Stage([], drafter="self")
    for _ in range(4):  # T0 comes out of the canonical pass, then the fast batch drafts T1 to T3, one per step
        stage.engine.loop.step()
        assert stage.branch.tokens == [*P, t[0]] and stage.branch.lane.computed == N
    turns = stage.draft(stage.admit())
    assert stage.branch.record.states == [PROMPT] * N + [PENDING] + [DRAFT] * 3
    drafted = stage.engine.runner.cache.rows(stage.slots()[N:])
    assert drafted[:-1].abs().amax((1, 2, 3, 4)).min() > 0, "yellow: the draft step wrote KV (but for its last token)"
    stage.verify(turns)
    assert_canonical(stage.branch, stage.branch.length - 1)
    assert not torch.equal(drafted, stage.branch.kv()[N : N + len(drafted)]), "control: the fast path has other bits"


def test_one_pass_verifies_t0_and_the_drafts_beside_everybody_else(t: list[int]) -> None:
    stage = Stage([[t[1], other(t[2]), t[3]]])
    stage.t0()
    before = len(stage.passes)
    stage.verify(stage.draft(stage.admit()))
    assert len(stage.passes) == before + 1
    mine = [s for s in stage.passes[-1] if s.table is stage.branch.lane.table]
    assert [(s.start, s.tokens, s.num_logits) for s in mine] == [(N, [t[0], t[1], other(t[2]), t[3]], 4)]
    assert len(stage.passes[-1]) == 2, "the other deterministic request is in the same pass; the ordinary one is not"


def test_all_match(t: list[int]) -> None:
    """Seed 001: T1 T2 T3 are accepted, and T4 is the bonus token, still pending. The cache holds the prompt and T0 to T3."""
    stage = Stage([t[1:4]])
    stage.to_the_verdict()
    assert stage.branch.tokens == P + t[:5]
    assert stage.branch.record.states == [PROMPT] * N + [ACCEPTED] * 4 + [PENDING]
    assert_canonical(stage.branch, N + 4)
    assert_captured(stage.branch, range(N + 4))
    assert stage.job.rejected == []
    statistics = stage.job.statistics
    assert (statistics.drafted, statistics.accepted, statistics.rejected, statistics.tokens) == (3, 3, 0, 5)


@pytest.mark.parametrize("keep_pages", [False, True])
def test_a_mismatch_rolls_back_to_the_last_accepted_token(t: list[int], keep_pages: bool) -> None:
    """Seeds 000, 002, 003: T2' is wrong. T1 is accepted, the verifier's T2 is pending, T2' and T3' are rejected."""
    wrong = [t[1], other(t[2]), t[3]]
    stage = Stage([wrong], keep_pages)
    stage.to_the_verdict()
    assert stage.branch.tokens == P + t[:3]
    assert stage.branch.record.states == [PROMPT] * N + [ACCEPTED] * 2 + [PENDING]
    assert_canonical(stage.branch, N + 2)  # restored to the last accepted token, T1
    assert_captured(stage.branch, range(N + 2))
    statistics = stage.job.statistics
    assert (statistics.drafted, statistics.accepted, statistics.rejected, statistics.tokens) == (3, 1, 2, 3)

    (rejected,) = stage.branch.rejected
    assert rejected.tokens == [*P, t[0], *wrong]
    assert rejected.record.states == [PROMPT] * N + [ACCEPTED] * 2 + [REJECTED] * 2
    assert rejected.status is BranchStatus.REJECTED
    assert stage.engine.tree.branch(rejected.id).fork_position == N + 2
    assert_captured(rejected, range(N + 2, N + 4))  # with its own canonical rows
    if keep_pages:
        assert torch.equal(rejected.kv(), Reference(toy(), rejected.tokens).kv)
    else:
        assert rejected.lane.table.pages == []


def test_pages_of_the_rejected_part_are_free_again(t: list[int]) -> None:
    """With a mismatch at T1', only T0 is accepted. The page that T1' to T3' started returns to the pool."""
    stage = Stage([[other(t[1]), t[2], t[3]]])
    stage.t0()
    pages = list(stage.branch.lane.table.pages)
    turns = stage.draft(stage.admit())
    grown = list(stage.branch.lane.table.pages)
    assert len(grown) == len(pages) + 1
    stage.verify(turns)
    assert len(stage.branch.lane.table.pages) == len(pages)
    assert stage.engine.runner.pool.refcount(grown[-1]) == 0
    assert_canonical(stage.branch, N + 1)


def test_a_rejected_branch_can_be_continued(t: list[int]) -> None:
    stage = Stage([[t[1], other(t[2]), t[3]]], keep_pages=True)
    stage.to_the_verdict()
    for job in stage.jobs:
        stage.engine.cancel(job)
    (fork,) = stage.branch.rejected[0].fork()
    fork.generate(5)
    assert fork.generated[4:] == continuation(toy(), [*P, t[0], t[1], other(t[2]), t[3]], 5)
    assert_canonical(fork, fork.length - 1)


def test_siblings_are_verified_in_one_pass_and_the_right_one_is_followed(t: list[int]) -> None:
    chains = [[other(t[1]), t[2], t[3]], [t[1], t[2], other(t[3])], [other(other(t[1])), t[2]]]
    stage = Stage(chains)
    stage.to_the_verdict()
    assert stage.branch.tokens == P + t[:4]
    assert stage.branch.record.states == [PROMPT] * N + [ACCEPTED] * 3 + [PENDING]
    assert_canonical(stage.branch, N + 3)
    assert_captured(stage.branch, range(N + 3))
    left = {tuple(r.tokens[N + 1 :]): r for r in stage.branch.rejected}
    assert set(left) == {tuple(chain) for chain in chains}
    for chain, at in zip(chains, (N + 1, N + 3, N + 1), strict=True):
        assert_captured(left[tuple(chain)], range(at, N + 1 + len(chain)))


@pytest.mark.parametrize("draft", ["right", "wrong"])
def test_the_others_are_untouched(t: list[int], draft: str) -> None:
    """Whatever happens to one request, its neighbours have the tokens, states and KV that they would have alone."""
    stage = Stage([t[1:4] if draft == "right" else [t[1], other(t[2]), t[3]]])
    stage.to_the_verdict()
    prompt = [2, 7, 1, 8, 2]
    assert stage.beside.generated == continuation(toy(), prompt, 8)[: len(stage.beside.generated)]
    assert_canonical(stage.beside, stage.beside.length - 1)
    assert stage.beside.certified

    alone = engine().prompt([8, 2, 8]).generate(2, deterministic=False)
    assert stage.ordinary.tokens == alone.tokens
    assert torch.equal(stage.ordinary.kv(), alone.kv())
    assert stage.ordinary.record.states == [PROMPT] * 3 + [ACCEPTED, PENDING]
    assert not stage.ordinary.certified


def test_with_the_fast_path_for_a_verifier_the_page_contents_differ(t: list[int]) -> None:
    """Negative control: `assert_canonical` detects the difference, even if the tokens are equal."""
    subject = engine()
    branch = subject.prompt(P)
    runner = subject.runner
    runner.exact = lambda segments, tap=None: runner.fast(segments, tap)
    branch.generate(8, window=1)
    assert branch.tokens == P + t
    with pytest.raises(AssertionError):
        assert_canonical(branch, N + 7)


@pytest.fixture(scope="module")
def shared() -> Engine:
    return engine()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_pass_gains_at_least_one_token(shared: Engine, t: list[int], data: st.DataObject) -> None:
    """Whatever the drafts, each pass adds at least one token, and the tokens are the same."""
    token = st.sampled_from(t) | st.integers(0, VOCAB - 1)
    chains = st.lists(st.lists(token, max_size=6), min_size=1, max_size=3, unique_by=lambda chain: chain[0] if chain else None)
    drafts = data.draw(st.fixed_dictionaries({at: chains for at in range(N, N + 8)}))
    branch = shared.prompt(P)
    job = Job(branch.lane, 8, drafter="forced", forced_drafts=drafts)
    shared.loop.submit(job)
    steps = 0
    while not job.done:
        before = branch.length
        shared.loop.step()
        steps += 1
        assert branch.length > before
        assert branch.tokens == (P + t)[: branch.length]
        assert branch.record.states[-1] in (PENDING, ACCEPTED)
    assert steps <= 8 and branch.generated == t
    assert torch.equal(branch.kv(), Reference(toy(), branch.tokens).kv[: branch.lane.computed])
    shared.check_integrity()
    branch.release()
