"""Drafters change no token and no bit, their statistics add up, and all but `self` depend only on the path."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from replaylens.engine.engine import Engine
from replaylens.engine.errors import NonFinite
from replaylens.engine.loop.commit import Verdict, judge
from replaylens.engine.loop.drafters import Chains, DraftCall, ModelDrafter, NgramDrafter
from replaylens.engine.loop.lane import Job, Statistics, Turn
from replaylens.engine.memory.path import PathHistory
from replaylens.engine.memory.tree import ACCEPTED, DRAFT, PENDING, PROMPT, REJECTED, BranchStatus
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from tests.toy_model import VOCAB, Reference, continuation, engine, random_model, scripted_model, toy, watch_passes

DRAFTERS = ("self", "lens", "ngram", "tree", "model", "forced")
REPRODUCIBLE = ("lens", "ngram", "tree", "model")
HOT = Sampling(temperature=0.9, seed=21, repetition_penalty=1.1)


@pytest.fixture(scope="module")
def small() -> Decoder:
    """The draft model, with other weights and one layer."""
    return random_model(1, num_layers=1)


def subject_with(small: Decoder, **options: object) -> Engine:
    return engine(draft_model=small, **options)


def watch_drafts(subject: Engine) -> dict[int, list[tuple[int, Chains]]]:
    """Collects, per branch, where it drafted what."""
    drafts: dict[int, list[tuple[int, Chains]]] = {}

    def listen(event: dict[str, object]) -> None:
        if event["event"] == "draft":
            drafts.setdefault(event["branch"], []).append((event["at"], event["chains"]))

    subject.loop.listeners.append(listen)
    return drafts


def assert_adds_up(statistics: Statistics, tokens: int) -> None:
    assert statistics.drafted == statistics.accepted + statistics.rejected
    assert statistics.tokens == tokens
    assert statistics.accepted <= statistics.tokens <= statistics.accepted + statistics.passes
    assert statistics.passes <= tokens
    if statistics.drafted:
        assert statistics.acceptance == statistics.accepted / statistics.drafted


# ---- the promise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", [1, 2, 5, 14, None])
def test_no_drafter_and_no_window_changes_anything(small: Decoder, window: int | None) -> None:
    """Tokens, KV and statistics of requests with different drafters that run together, in windows up to more than needed."""
    prompt, subject = [4, 5, 6, 4, 5], subject_with(small)
    asked = [(drafter, sampling) for drafter in DRAFTERS for sampling in (Sampling(), HOT)]
    truths = {repr(sampling): continuation(toy(), prompt, 14, sampling) for sampling in (Sampling(), HOT)}
    branches = subject.prompts([prompt] * len(asked))
    jobs = []
    for branch, (drafter, sampling) in zip(branches, asked, strict=True):
        truth = truths[repr(sampling)]
        given = {at: [truth[at - 5 : at - 3], [VOCAB - 1]] for at in range(5, 19, 2)} if drafter == "forced" else None
        jobs.append(Job(branch.lane, 14, sampling=sampling, drafter=drafter, window=window, forced_drafts=given))
        subject.loop.submit(jobs[-1])
    subject.forest.wait(jobs)
    for branch, (drafter, sampling), job in zip(branches, asked, jobs, strict=True):
        truth = truths[repr(sampling)]
        assert branch.generated == truth, (drafter, sampling)
        assert torch.equal(branch.kv(), Reference(toy(), prompt + truth).kv[: branch.lane.computed])
        assert_adds_up(job.statistics, 14)
        assert job.statistics.drafted == 0 or window != 1 or drafter == "forced", "a window of 1 decodes directly"
    subject.check_integrity()


def test_statistics_add_up_over_calls_and_rejected_branches(small: Decoder) -> None:
    """A branch counts all its calls. Each rejected draft token is on exactly one rejected branch."""
    subject = subject_with(small)
    for drafter in ("lens", "tree", "model"):
        branch = subject.prompt([1, 2, 3], sites="S", keep_rejected=True)
        for n in (3, 7, 1, 9):
            branch.generate(n, drafter=drafter, window=4)
        assert_adds_up(branch.statistics, 20)
        left = [r.length - subject.tree.branch(r.id).fork_position for r in branch.rejected]
        assert sum(left) == branch.statistics.rejected > 0


# ---- acceptance ------------------------------------------------------------------------------------------------------


def test_self_drafts_are_nearly_all_accepted() -> None:
    """The fast path rounds differently but predicts the same tokens, which is the premise of verified speculation."""
    model = random_model(3, num_layers=4, d_model=128, num_heads=4, num_kv_heads=4, d_head=32, d_mlp=256, rotary_dim=32)
    branches = engine(model, page_size=16).prompts([[i, 2 * i % VOCAB, 5] for i in range(4)])
    branches[0].engine.generate(branches, 60, window=8)
    drafted, accepted = (sum(getattr(b.statistics, name) for b in branches) for name in ("drafted", "accepted"))
    assert drafted >= 200 and accepted >= 0.95 * drafted


def test_ngram_drafts_are_accepted_on_repetitive_text() -> None:
    """The model cycles through 1 2 3 4 5. After one cycle, its own history is a perfect draft."""
    subject = engine(scripted_model({5: 1}))
    branch = subject.prompt([1, 2, 3, 4, 5, 1, 2]).generate(40, drafter="ngram", window=5)
    assert branch.statistics.acceptance == 1.0 and branch.statistics.passes == 40 // 5
    fresh = subject.prompt([1, 2, 3]).generate(2, drafter="ngram", window=5)
    assert fresh.statistics.drafted == 0, "control: nothing to repeat yet"


@given(st.lists(st.integers(0, 3), min_size=1, max_size=20), st.integers(1, 5))
def test_ngram_repeats_what_followed_the_longest_latest_match(path: list[int], count: int) -> None:
    ((chain,),) = NgramDrafter(3).propose([DraftCall(PathHistory(path).path(len(path)), 0, count, Sampling(), [], 0)])
    matches = [
        (size, at)
        for size in (3, 2, 1)
        for at in range(len(path) - size)
        if size < len(path) and path[at : at + size] == path[-size:]
    ]
    if not matches:
        assert chain == []
    else:
        size, at = max(matches)
        assert chain == path[at + size :][:count]


def test_right_forced_drafts_are_all_accepted_and_wrong_ones_not() -> None:
    prompt, n = [1, 2, 3], 12
    truth = continuation(toy(), prompt, n)
    right = {3 + at: [truth[at : at + 3]] for at in range(n)}
    branch = engine().prompt(prompt).generate(n, drafter="forced", drafts=right)
    assert branch.generated == truth and branch.statistics.rejected == 0
    assert branch.statistics.passes == n // 4, "three drafts and the verifier's own token each"
    wrong = {3 + at: [[(t + 1) % VOCAB for t in truth[at : at + 3]]] for at in range(n)}
    branch = engine().prompt(prompt).generate(n, drafter="forced", drafts=wrong)
    assert branch.generated == truth and branch.statistics.accepted == 0
    assert branch.statistics.passes == n, "the verifier's own token each"


@pytest.mark.slow
def test_tree_follows_a_sibling() -> None:
    """If the early exit's second or third choice is right, the pass still gains more than one token."""
    subject = engine(tree_width=3)
    drafts = watch_drafts(subject)
    verdicts: list[dict[str, object]] = []
    subject.loop.listeners.append(lambda e: verdicts.append(e) if e["event"] == "verdict" else None)
    branches = subject.prompts([[i, i + 1] for i in range(6)])
    subject.generate(branches, 20, drafter="tree", window=4)
    for branch, prompt in zip(branches, [[i, i + 1] for i in range(6)], strict=True):
        assert branch.generated == continuation(toy(), prompt, 20)
    assert any(v["chain"] and v["accepted"] for v in verdicts), "a sibling was followed"
    for _, chains in (entry for entries in drafts.values() for entry in entries):
        assert len(chains) == 3 and len({chain[0] for chain in chains}) == 3


def test_drafts_of_the_last_layer_are_the_models_own_with_its_noise() -> None:
    """An exit at the end reads the model's own logits, so that a sampled request accepts the first chain as a whole."""
    subject = engine(lens_layer=toy().config.num_layers, tree_width=2)
    sampling = Sampling(temperature=1.5, seed=3, ignore_eos=True)
    for drafter, width in ("lens", 1), ("tree", 2):
        verdicts: list[dict[str, Any]] = []
        subject.loop.listeners[:] = [lambda e, seen=verdicts: seen.append(e) if e["event"] == "verdict" else None]
        found = subject.prompt([4, 9, 2]).generate(24, drafter=drafter, window=4, sampling=sampling).statistics
        assert {v["chain"] for v in verdicts} == {0} and found.drafted == width * found.accepted > 0


@settings(deadline=None)
@given(data=st.data())
def test_judge_accepts_the_longest_right_beginning(data: st.DataObject) -> None:
    """Holds for any truth and any siblings with different first tokens."""
    truth = data.draw(st.lists(st.integers(0, 3), min_size=6, max_size=6))
    chains = data.draw(
        st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=1, max_size=3, unique_by=lambda chain: chain[0])
    )

    def choose(chain: int, row: int) -> int:
        assert chains[chain][:row] == truth[:row], "not asked about rows after a mismatch"
        return truth[row]

    def stands(chain: list[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(chain, truth, strict=False)) if a != b), len(chain))

    accepted = max(map(stands, chains))
    followed = next((i for i, chain in enumerate(chains) if stands(chain) == accepted > 0), 0)
    assert judge(chains, choose) == Verdict(followed, accepted, truth[accepted])


# ---- reproducible drafts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", REPRODUCIBLE)
def test_a_reproducible_drafter_proposes_the_same_in_any_batch(small: Decoder, drafter: str) -> None:
    """Hence rejected branches are functions of the path, too."""
    prompts = [[1, 2, 3, 1, 2], [9, 8, 7], [4] * 9, [5, 6]]

    def run(together: bool, **options: object) -> list[list[tuple[int, Chains]]]:
        subject = subject_with(small, **options)
        drafts = watch_drafts(subject)
        branches = subject.prompts(prompts)
        for group in [branches] if together else [[b] for b in branches]:
            subject.generate(group, 12, drafter=drafter, sampling=HOT)
        return [drafts[b.id] for b in branches]

    alone = run(together=False)
    assert run(together=True, page_size=16, max_rows=40) == alone
    assert run(together=True, cache_tokens=48) == alone, "also when requests wait, or lose their pages"


def drafts_after(drafter: ModelDrafter, path: list[int], branch: int, count: int = 4) -> list[int]:
    ((chain,),) = drafter.propose([DraftCall(PathHistory(list(path)).path(len(path)), 2, count, Sampling(), [], branch)])
    return chain


def fresh(small: Decoder, num_pages: int = 64) -> ModelDrafter:
    return ModelDrafter(Runner(small, num_pages, 4), VOCAB, str)


def test_the_model_drafter_after_rollbacks_and_forks_of_branches(small: Decoder) -> None:
    """The same through the engine: on a rolled-back branch and on forks, it drafts what a fresh drafter does."""
    subject = subject_with(small)
    drafts = watch_drafts(subject)

    def generate(branch: Branch) -> None:
        path = branch.tokens
        drafts.pop(branch.id, None)
        branch.generate(6, drafter="model", window=4)
        assert branch.tokens == path + continuation(toy(), path, 6)
        for at, chains in drafts[branch.id]:
            assert chains == [drafts_after(fresh(small), branch.tokens[:at], 0, len(chains[0]))]

    branch = subject.prompt([1, 2, 3])
    generate(branch)
    generate(branch)
    (fork,) = branch.fork(at=5)
    generate(fork)
    generate(branch.rollback(6).force([7, 7]))
    generate(branch.rollback(4).force([40, 41, 42, 43, 44, 45]))
    generate(fork)


def test_the_model_drafter_has_room_for_fewer_branches_than_the_engine(small: Decoder) -> None:
    """Forks share the prefix's pages in the engine, but not in the draft model's cache: it drafts for a few at a time."""
    subject = subject_with(small, cache_tokens=128)
    prefix = [(5 * i) % VOCAB for i in range(60)]
    forks = subject.prompt(prefix).fork(8)
    drafts = watch_drafts(subject)
    subject.generate(forks, 5, drafter="model")
    truth = continuation(toy(), prefix, 5)
    assert [fork.generated for fork in forks] == [truth] * 8
    chains = [drafts[fork.id][0][1] for fork in forks]
    assert chains == [[drafts_after(fresh(small), prefix, 0)]] * 8


# ---- a drafter cannot fail a request ---------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [8, 9, 10, 11, 12, 16])
def test_a_draft_model_with_fewer_positions(longest: int) -> None:
    """Beyond its last position the draft model proposes nothing, and the request continues."""
    short = random_model(1, num_layers=1, max_positions=longest)
    subject = engine(draft_model=short)
    drafts = watch_drafts(subject)
    branch = subject.prompt([1, 2, 3, 4, 5, 6]).generate(20, drafter="model", window=4)
    assert branch.generated == continuation(toy(), [1, 2, 3, 4, 5, 6], 20)
    ends = [at + len(chains[0]) for at, chains in drafts[branch.id] if chains[0]]
    assert ends and max(ends) <= longest + 1, "its last row may say one token more"


def test_a_draft_model_with_nan() -> None:
    broken = random_model(1, num_layers=1)
    broken.embed[2] = float("inf")
    subject = engine(draft_model=broken)
    branch, other = subject.prompts([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(NonFinite):
        drafts_after(fresh(broken), [1, 2, 3], 0)
    told: list[dict[str, object]] = []
    subject.loop.listeners.append(told.append)
    subject.generate([branch, other], 10, drafter="model", window=4)
    failed = [event for event in told if event["event"] == "draft_failed"]
    assert failed and all(event["branch"] == branch.id and "NonFinite" in str(event["error"]) for event in failed)
    assert branch.generated == continuation(toy(), [1, 2, 3], 10) and branch.statistics.drafted == 0
    assert other.generated == continuation(toy(), [4, 5, 6], 10) and other.statistics.drafted > 0
    subject.check_integrity()


def test_a_drafter_that_proposes_what_is_no_token() -> None:
    """A custom drafter: drafts before the first invalid token are verified, the rest is dropped."""

    class Wild:
        reproducible, width = True, 1

        def propose(self, calls: list[DraftCall]) -> list[Chains]:
            return [[[1, VOCAB, 2]] for _ in calls]

    subject = engine()
    subject.loop.drafters["wild"] = Wild()
    drafts = watch_drafts(subject)
    branch = subject.prompt([1, 2, 3]).generate(8, drafter="wild", window=4)
    assert branch.generated == continuation(toy(), [1, 2, 3], 8)
    assert {tuple(chain) for _, chains in drafts[branch.id] for chain in chains} == {(1,)}


@pytest.mark.parametrize("drafter", ["tree", "lens", "self", "model"])
def test_drafts_that_do_not_fit_into_the_cache(small: Decoder, drafter: str) -> None:
    """The cache has room for the path but not for its window and siblings: slower, with the same tokens."""
    subject = subject_with(small, cache_tokens=12, tree_width=4)
    branch = subject.prompt([1, 2, 3]).generate(9, drafter=drafter, window=8)
    assert branch.generated == continuation(toy(), [1, 2, 3], 9)
    assert_adds_up(branch.statistics, 9)
    subject.check_integrity()


# ---- protocol --------------------------------------------------------------------------------------------------------
# Decode - verify - rollback, phase by phase: both worked examples of the protocol, with page contents and token states.

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


@settings(max_examples=12, deadline=None)
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


def test_a_model_drafts_for_itself_under_the_edits_of_the_branch() -> None:
    """Its drafts are its own next tokens then, so that all are accepted. Control: the edit changes what it says."""
    subject = engine()
    vector = torch.randn(subject.config.d_model, generator=torch.Generator().manual_seed(4)) * 30
    edit = Edit("blocks.1.hook_in", "add", vector)
    edited, plain = subject.prompt([1, 2, 3], edits=[edit]), subject.prompt([1, 2, 3])
    for branch in (edited, plain):
        branch.generate(12, drafter="self", window=4)
        assert branch.statistics.rejected == 0 < branch.statistics.accepted
    assert edited.generated != plain.generated
