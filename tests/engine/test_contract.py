"""The contract: what a request commits is a function of its token path, whatever else the engine does.

Each theorem runs the same requests under other conditions and compares every token, KV entry and captured row (S, T, C, Z,
also of rejected drafts) with the slow reference, byte by byte. The last theorems are the negative controls: with the fast
path instead of the canonical pass, the comparison fails.

Subjects are engines with models of all families, and docs/nano.py, which explains the engine in one file.
"""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from docs import nano
from replaylens.engine.engine import Engine
from replaylens.engine.loop.commit import Endings, Outcome, Verdict
from replaylens.engine.loop.lane import Job, Turn
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.request import Request as ServedRequest
from replaylens.training import embedded as zoo
from tests.devices import DEVICES, swept, with_devices
from tests.engine.reference import GREEDY, Reference, decoder, differences, perturbed, random_decoder, reference_of, same_bits
from tests.families import MORE, NAMES, NEW_WIRINGS
from tests.nano import MODEL, NanoBranch, NanoEngine, NanoReference

NEW = 8
LONGEST = 75
"""longest prompt: exceeds the first block of keys"""
WINDOWS = (1, 2, 3, 8, 16)
END_AT = 6
"""where a request ends that is stopped"""
REASONS = {"end token": "eos", "stop string": "stop", "answer": "answer", "length": "length"}
"""what ends a request -> its finish reason"""
DRAFTERS = ("self", "model", "lens", "ngram", "tree")
REPRODUCIBLE = ("model", "lens", "ngram", "tree", "forced")
WIRED_ALIKE = ("mistral", "qwen2", "qwen3", "llama3", "gemma2", "neox", "neox-sequential", "llama")
"""families whose wiring others cover"""
HYBRID = ("qwen3-next",)
"""hybrids that are not slow: gated delta nets and attention, with experts"""
BOOKKEEPING = ("gemma3",)
"""subjects of the theorems about pages, forks and scheduling: full and sliding windows in the same model; the other families
are slow there, and `test_hybrids.py` tries what recurrent layers keep"""
CUTS = [(4, 16), (16, 17), (64, 33), (4, 512)]
"""positions of a page, and rows of a pass"""
SAMPLINGS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=1.0, seed=7),
    "filtered": Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=2**64 - 1),
    "penalised": Sampling(temperature=0.5, repetition_penalty=1.3, presence_penalty=0.4, logit_bias={5: 1.5}, seed=3),
    "careful": Sampling(repetition_penalty=1.2, presence_penalty=0.3),
}

SHAPE = ModelConfig(
    num_layers=3,
    d_model=128,
    num_heads=4,
    num_kv_heads=4,
    d_head=32,
    d_mlp=384,
    vocab_size=97,
    max_positions=128,
    rotary_dim=32,
)
"""products of 128 and 384 terms: long enough for a matrix-vector product to round differently from a matrix product"""


@dataclass(frozen=True)
class Request:
    """A request to the engine."""

    prompt: tuple[int, ...]
    drafter: str = "self"
    window: int | None = None
    sampling: Sampling = GREEDY
    n: int = NEW
    drafts: dict[int, list[list[int]]] | None = field(default=None, compare=False)

    def options(self) -> dict[str, Any]:
        return {"drafter": self.drafter, "window": self.window, "sampling": self.sampling, "drafts": self.drafts}


@dataclass(frozen=True)
class Subject:
    """A model under test."""

    name: str
    model: Decoder
    draft_model: Decoder
    reference: Reference
    reproducible: tuple[str, ...] = REPRODUCIBLE
    """drafters whose drafts do not depend on the batch either"""

    def engine(self, **options: Any) -> Any:
        return Engine(self.model, draft_model=self.draft_model, **options)

    def differences(self, branch: Any) -> list[str]:
        """What differs on a branch from the rows of its path."""
        return differences(branch, self.reference)

    def gaps(self, branch: Any) -> list[str]:
        """Rows and rejected branches that are missing once a request is done."""
        found = ["computed positions"] * (branch.lane.computed != branch.length)
        if branch.lane.recording is not None:
            found += ["captured positions"] * (branch.activations.positions() != [*range(branch.length)])
            found += ["rejected branches"] * (len(branch.rejected) != len(self.rejected(branch)))
        return found

    def rejected(self, branch: Any) -> list[tuple[int, list[int]]]:
        """Positions and tokens of rejected drafts, in order."""
        cuts = branch.record.cut
        return [(cut.fork_position, cut.tokens) for cut in cuts if cut.status is BranchStatus.REJECTED]

    def edit(self, layer: int, position: int, vector: Tensor) -> Any:
        """Adds a vector to the residual stream that enters a block."""
        return Edit(f"blocks.{layer}.hook_in", "add", vector, positions=position)

    def prompt(self, length: int, seed: int = 0) -> tuple[int, ...]:
        """Tokens with some repetition, so that the n-gram drafter makes proposals."""
        draw = random.Random(f"{self.name} {seed}")
        tokens = [draw.randrange(self.model.config.vocab_size) for _ in range(LONGEST)]
        for start in range(5, LONGEST - 3, 9):
            tokens[start : start + 3] = tokens[:3]
        return tuple(tokens[:length])

    def answer(self, request: Request) -> list[int]:
        return self.reference.continuation(request.prompt, request.n, request.sampling)

    def forced(self, prompt: tuple[int, ...], right: int, sampling: Sampling = GREEDY) -> Request:
        """Drafts of six tokens for every position. The first `right` of each chain are right, the others wrong."""
        path = [*prompt, *self.reference.continuation(prompt, NEW, sampling)]
        vocab, drafts = self.model.config.vocab_size, {}
        for at in range(len(prompt), len(path)):
            chain = path[at : at + 6]
            drafts[at] = [[token if i < right else (token + 1) % vocab for i, token in enumerate(chain)]]
        return Request(prompt, "forced", None, sampling, drafts=drafts)


class Nano(Subject):
    """docs/nano.py: the drafters `tree` and `model` are its early exit, and samplings their temperature and seed."""

    def engine(self, **options: Any) -> NanoEngine:
        return NanoEngine(**options)

    def differences(self, branch: NanoBranch) -> list[str]:
        return self.reference.differences(branch)

    def gaps(self, branch: NanoBranch) -> list[str]:
        return ["rows"] * (len(branch.branch.rows) != branch.length)

    def rejected(self, branch: NanoBranch) -> list[tuple[int, list[int]]]:
        return [(draft.length, draft.tokens) for draft in branch.rejected]

    def edit(self, layer: int, position: int, vector: Tensor) -> nano.Edit:
        return nano.Edit("S", layer, position, vector)


@cache
def subject_of(family: str, device: str) -> Subject:
    if family == "nano":
        return Nano(family, MODEL, MODEL, NanoReference(), ("ngram", "forced"))  # type: ignore[arg-type]
    if family != "coin-plain":
        model = decoder(family, device)
        return Subject(family, model, perturbed(model), reference_of(family, device))
    model, draft_model = (zoo.load_embedded(each)[0].to(device) for each in (family, "coin-draft"))
    return Subject(family, model, draft_model, Reference(model))


EVERY_FAMILY = (*NAMES, "coin-plain", *MORE)
ON_CPU_ONLY = tuple(name for name in MORE if name not in NEW_WIRINGS)


SLOW = (*WIRED_ALIKE, "coin-plain", *(name for name in MORE if name not in HYBRID))
FAMILIES = with_devices(EVERY_FAMILY, slow=SLOW, cpu_only=ON_CPU_ONLY)
NOT_BOOKKEPT = tuple(name for name in EVERY_FAMILY if name not in BOOKKEEPING)
BOOKKEPT = with_devices(EVERY_FAMILY, slow=NOT_BOOKKEPT, cpu_only=ON_CPU_ONLY)
NANO = pytest.param(("nano", "cpu"), id="nano")


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> Subject:
    """Every family with random weights, and a trained model."""
    return subject_of(*request.param)


@pytest.fixture(scope="module", params=[*FAMILIES, NANO])
def subject(request: pytest.FixtureRequest) -> Subject:
    """Every family, and docs/nano.py."""
    return subject_of(*request.param)


@pytest.fixture(scope="module", params=BOOKKEPT)
def few(request: pytest.FixtureRequest) -> Subject:
    """The same families, most of them slow."""
    return subject_of(*request.param)


@pytest.fixture(scope="module", params=[*BOOKKEPT, NANO])
def bookkept(request: pytest.FixtureRequest) -> Subject:
    """The same subjects, most of them slow."""
    return subject_of(*request.param)


def run_together(engine: Any, requests: Sequence[Request], sites: str | None = "STCZ") -> list[Any]:
    """All requests at once, each with its own options. The row of every token is computed."""
    branches = [engine.prompt(r.prompt, sites=sites, keep_rejected=bool(sites)) for r in requests]
    return go_on(engine, branches, requests)


def go_on(engine: Any, branches: list[Any], requests: Sequence[Request]) -> list[Any]:
    pairs = zip(branches, requests, strict=True)
    for stream in [branch.stream(r.n, final=True, **r.options()) for branch, r in pairs]:
        for _ in stream:
            pass
    engine.check_integrity()
    return branches


def broken(subject: Subject, branches: list[Any], requests: Sequence[Request]) -> list[str]:
    """The broken promises: tokens, KV, captured rows, and rows of rejected drafts."""
    found = []
    for branch, request in zip(branches, requests, strict=True):
        found += [f"tokens of {request}"] * (branch.generated != subject.answer(request))
        found += [f"{what} of {request}" for what in subject.gaps(branch)]
        for one in (branch, *branch.rejected):
            found += [f"{what}: {request}" for what in subject.differences(one)]
    return found


def mixed(subject: Subject) -> list[Request]:
    """Requests of other lengths, drafters, windows and samplings."""
    s, short = SAMPLINGS, subject.prompt(9, seed=1)
    return [
        Request(subject.prompt(21, seed=1), "lens", 3, s["warm"]),
        Request(subject.prompt(1, seed=2), "self", 8),
        Request(subject.prompt(70), "tree", 3, s["filtered"]),
        Request(short, "ngram", 8, s["careful"]),
        Request(subject.prompt(40), "model", None, s["penalised"]),
        subject.forced(short, right=3),
    ]


# ---- the theorems ---------------------------------------------------------------------------------------------------


def test_a_prompt_computed_at_once_has_the_rows_of_one_row_at_a_time(subject: Subject) -> None:
    path = subject.prompt(LONGEST)
    branch = subject.engine().prompt(path, sites="STCZ")
    assert subject.differences(branch) == [] and subject.gaps(branch) == []


PAIRS = [(drafter, window) for drafter in DRAFTERS for window in (*WINDOWS, None)]
SOME_PAIRS = [pair for i, pair in enumerate(PAIRS) if (i + 5 * (i // 6)) % 6 == 0] + PAIRS[-1:]


def test_no_drafter_and_no_window_changes_anything(subject: Subject) -> None:
    """All drafters and all windows at once, over three prompts. Rejected drafts do not depend on the batch."""
    assert {drafter for drafter, _ in SOME_PAIRS} == {*DRAFTERS} and {window for _, window in SOME_PAIRS} == {*WINDOWS, None}
    draft_together(subject, SOME_PAIRS, forced=[(0, 0), (1, 3), (2, 6)])


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.slow), *DEVICES[1:]])
def test_no_drafter_in_any_window_changes_anything(device: str) -> None:
    """Every drafter in every window."""
    draft_together(subject_of("llama", device), PAIRS, forced=list(product(range(3), (0, 3, 6))))


def draft_together(subject: Subject, pairs: list[tuple[str, int | None]], forced: list[tuple[int, int]]) -> None:
    """`forced` has pairs of a sampling and the number of right tokens in every chain."""
    prompts = [subject.prompt(length) for length in (1, 14, 62)]
    samplings = list(SAMPLINGS.values())
    requests = [Request(prompts[i % 3], *pair, samplings[i % 5]) for i, pair in enumerate(pairs)]
    requests += [subject.forced(prompts[i], right, samplings[i]) for i, right in forced]
    branches = run_together(subject.engine(), requests)
    assert broken(subject, branches, requests) == []
    again = run_together(subject.engine(page_size=4, max_rows=65), requests[::-1], sites=None)[::-1]
    for one, other, request in zip(branches, again, requests, strict=True):
        if request.drafter in subject.reproducible:
            assert subject.rejected(one) == subject.rejected(other), request
    assert any(branch.statistics.rejected for branch in branches) and any(branch.statistics.accepted for branch in branches)


@pytest.mark.parametrize("cuts", [CUTS[1::2], pytest.param(CUTS[::2], marks=pytest.mark.slow)], ids=["some", "others"])
def test_no_chunk_no_page_and_no_neighbour_changes_anything(bookkept: Subject, cuts: list[tuple[int, int]]) -> None:
    """Together with some pages and rows per pass, alone with others: the same rows, and the same rejected drafts."""
    engines = [bookkept.engine(page_size=page_size, max_rows=max_rows) for page_size, max_rows in cuts]
    requests = mixed(bookkept)
    together = run_together(engines[0], requests)
    assert broken(bookkept, together, requests) == []
    for request, other in zip(requests, together, strict=True):
        (alone,) = run_together(engines[1], [request])
        assert broken(bookkept, [alone], [request]) == []
        assert bookkept.rejected(alone) == bookkept.rejected(other) or request.drafter not in bookkept.reproducible


def test_forks_rollbacks_and_cancels_leave_no_mark(bookkept: Subject) -> None:
    """A random history on the same engine, and on the branches that the requests then run on."""
    engine, draw = bookkept.engine(page_size=4), random.Random(bookkept.name)
    requests = mixed(bookkept)
    branches = [engine.prompt(r.prompt, sites="STCZ", keep_rejected=True) for r in requests]
    for _ in range(3):
        for branch, request in zip(branches, requests, strict=True):
            meddle(draw, branch, bookkept.model.config.vocab_size)
            branch.rollback(len(request.prompt))
            for other in branch.rejected:
                other.release()
    assert broken(bookkept, go_on(engine, branches, requests), requests) == []


def meddle(draw: random.Random, branch: Branch, vocab: int) -> None:
    """Fork, force, generate and cancel at random from a branch that stays usable."""
    (child,) = branch.fork(at=draw.randrange(1, branch.length + 1))
    child.force([draw.randrange(vocab) for _ in range(draw.randrange(1, 7))])
    stream = child.stream(9, drafter=draw.choice(DRAFTERS), window=draw.choice(WINDOWS), keep_pages=True)
    for _ in range(draw.randrange(1, 5)):
        next(stream)
    stream.close()
    branch.generate(draw.randrange(1, 6), drafter=draw.choice(DRAFTERS), sampling=draw.choice(list(SAMPLINGS.values())))
    branch.force([draw.randrange(vocab)])
    if draw.random() < 0.5:
        child.release()


def test_preemption_leaves_no_mark(few: Subject) -> None:
    """Twelve requests in a cache for two: pages are taken, and rows are recomputed to the same bits."""
    requests = [*mixed(few), *mixed(few)]
    engine = few.engine(cache_tokens=192, page_size=8)
    preempted: list[int] = []
    engine.loop.listeners.append(lambda event: preempted.append(event["branch"]) if event["event"] == "preempt" else None)
    branches = run_together(engine, requests)
    assert preempted
    plenty = run_together(few.engine(), requests)
    for branch, other, request in zip(branches, plenty, requests, strict=True):
        assert branch.generated == few.answer(request)
        assert few.rejected(branch) == few.rejected(other) or request.drafter not in REPRODUCIBLE, request
        for one in (branch, *branch.rejected):
            assert differences(one, few.reference) == []


def test_a_shared_prefix_is_the_same_as_none(family: Subject) -> None:
    engine, prompt = family.engine(page_size=4), family.prompt(40)
    vocab = family.model.config.vocab_size
    other = [(token + 1) % vocab for token in (*prompt, 0)]
    requests = [Request((*prompt[:end], *other[end : end + 1])) for end in (40, 40, 39, 17, 4, 3)]
    run_together(engine, requests[:1], sites=None)
    adopted = [engine.prefix.adopt(r.prompt, limit=len(r.prompt) - 1) for r in requests[1:]]
    assert [table.length for table in adopted] == [40, 36, 16, 4, 0]
    for table in adopted:
        engine.runner.pool.release(table)
    for sites in (None, "STCZ"):
        assert broken(family, run_together(engine, requests, sites), requests) == []


def test_a_replayed_trace_reproduces_every_row(few: Subject, tmp_path: Path) -> None:
    """Committed and rejected rows, of forks and after rollbacks, on a fresh engine with other page and pass sizes."""
    engine, requests = few.engine(record=True), mixed(few)
    branches = run_together(engine, requests)
    (child,) = branches[0].fork(at=25)
    child.force([1, 2, 3]).generate(5, drafter="tree", window=4, keep_pages=True)
    branches[2].rollback(72).generate(4, drafter="self", window=3)
    branches[3].release()
    engine.trace.save(tmp_path / "trace.jsonl")
    replayed = few.engine(page_size=8, max_rows=100).replay_trace(Trace.load(tmp_path / "trace.jsonl"))
    assert isinstance(replayed, dict)
    for old in (child, *branches[:3], *branches[4:]):
        for one in (old, *old.rejected):
            new = replayed[one.id]
            assert new.tokens == one.tokens and new.states == one.states
            assert new.activations.positions() == one.activations.positions()
            assert differences(new, few.reference) == []


def finished(engine: Engine, prompt: Sequence[int], sampling: Sampling, until: str, **how: Any) -> tuple[Branch, Job]:
    """A branch after one request, which ends with the text `until` at the latest, and the request."""
    branch = engine.prompt(prompt, sites="SZ")
    request = engine._job(branch, ServedRequest(END_AT + 3, sampling, **how))
    request.until = (lambda tokens: engine.text.decode(tokens).endswith(until)) if until else None
    engine.forest.serve(lambda: [request])
    return branch, request


def readable(branch: Branch) -> dict[str, Any]:
    """All that a user reads off a finished branch: what it is, then tensors."""
    rows = branch.activations
    words = {"tokens": branch.tokens, "states": branch.states, "why": branch.finish_reason, "rows": rows.positions()}
    return words | {"KV": branch.kv()} | {site: rows[site] for site in rows}


def unlike(branch: Branch, wanted: Branch) -> list[str]:
    """What reads differently off two finished branches."""
    a, b = readable(branch), readable(wanted)
    same = {key: same_bits(a[key], b[key]) if isinstance(b[key], Tensor) else a[key] == b[key] for key in b}
    return [key for key, equal in same.items() if not equal]


def ended_by(kind: str, pairs: Iterable[tuple[str, int | None]]) -> list[str]:
    """What reads differently off branches whose requests end alike, over drafters, windows and caches. Some requests end with a
    draft that was accepted."""
    subject = subject_of("coin-plain", "cpu")
    tokenizer = zoo.load_embedded("coin-plain")[1]
    prompt = tokenizer.encode("A coin's state is heads. Alice flips")
    answer, ends = subject.reference.continuation(prompt, 2 * END_AT, GREEDY), 0
    last = answer.index(answer[END_AT])  # the first time that this token comes
    text = tokenizer.decode(answer[: last + 1])[-4:]
    stops = {"end token": {"stop_tokens": (answer[last],)}, "stop string": {"stop": (text,)}}
    sampling, until = Sampling(ignore_eos=True, **stops.get(kind, {})), text if kind == "answer" else ""  # type: ignore[arg-type]
    ways: list[dict[str, Any]] = [{"drafter": d, "window": w} for d, w in pairs]
    found, reasons = [], set()
    for options in ({}, {"cache_tokens": 48, "page_size": 4}):
        engine = Engine(subject.model, tokenizer, draft_model=subject.draft_model, **options)  # type: ignore[arg-type]
        direct, _ = finished(engine, prompt, sampling, until, window=1)
        chain = {"drafter": "forced", "drafts": {len(prompt) + i: [answer[i:][:8]] for i in range(END_AT)}}
        for how in (*ways, chain):
            branch, job = finished(engine, prompt, sampling, until, **how)
            if options:
                engine.prompt(subject.prompt(40))  # takes its pages
            found += [f"{what} by {how}" for what in unlike(branch, direct)]
            reasons.add(job.finish_reason)
            ends += job.statistics.accepted == job.generated
        assert direct.lane.computed == direct.length - 1 and direct.states[-1] == "pending"
        assert unlike(engine.prompt(prompt, sites="SZ").generate(branch.length - len(prompt), final=True), direct), (
            "the control"
        )
    assert reasons == {REASONS[kind]} and (ends > 0) == (kind != "length"), "drafts end requests, but never by their length"
    return found


@pytest.mark.parametrize("kind", swept(REASONS, "end token", "length"))
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_last_token_of_a_request_is_pending_however_it_came(kind: str, every: bool) -> None:
    """A draft that ends a request was accepted, so its row is there; without drafts it is not. No branch keeps it."""
    windows = (1, 3, None)
    pairs = product(DRAFTERS, windows) if every else zip(DRAFTERS, (*windows, 3, None), strict=True)
    assert ended_by(kind, pairs) == []


def cached_after_the_end() -> tuple[int, bool]:
    """How many rows of a request's path the prefix index holds beyond those before the last token, an accepted draft; and
    whether that path, and one that goes on from it, have the same tokens and KV with the index and without."""
    model, words = zoo.load_embedded("coin-plain")
    prompt = words.encode("A coin's state is heads. Alice flips")
    engine, without = (Engine(model, words, page_size=1, cache_tokens=256) for _ in range(2))  # every row is a whole page
    answer = engine.prompt(prompt).generate(END_AT + 1, window=1).tokens[len(prompt) :]
    stop, first = Sampling(ignore_eos=True, stop_tokens=(answer[-1],)), answer.index(answer[-1])
    engine.prefix.clear()
    drafts = {len(prompt) + i: [answer[i:]] for i in range(END_AT)}
    branch = engine.prompt(prompt).generate(END_AT + 3, drafter="forced", drafts=drafts, sampling=stop)
    assert branch.tokens == [*prompt, *answer[: first + 1]] and branch.statistics.accepted == first + 1
    held, same = len(engine.prefix.match(branch.tokens)), True
    for path in (branch.tokens, [*branch.tokens, *prompt]):
        without.prefix.clear()
        one, other = (each.prompt(path).generate(2) for each in (engine, without))
        same = same and one.tokens == other.tokens and same_bits(one.kv(), other.kv())
    return held - len(branch.tokens) + 1, same


def test_no_prefix_holds_the_row_of_a_pending_end_token() -> None:
    """With a prefix index or without: what follows the end of a request has the same bits."""
    assert cached_after_the_end() == (0, True)


# ---- captured rows ---------------------------------------------------------------------------------------------------


@pytest.fixture(params=[*with_devices(("llama",)), NANO])
def llama_or_nano(request: pytest.FixtureRequest) -> Subject:
    return subject_of(*request.param)


@pytest.fixture(params=DEVICES)
def llama(request: pytest.FixtureRequest) -> Subject:
    return subject_of("llama", request.param)


def test_a_branch_as_long_as_the_cache_fits_into_it(llama: Subject) -> None:
    """Token by token with capture, so that the last row of a page is computed twice: the prefix index gives up pages."""
    engine = llama.engine(cache_tokens=64, page_size=4)
    branch = engine.prompt(llama.prompt(1), sites="STCZ")
    while branch.length < 64:
        branch.force([branch.length])
    assert differences(branch, llama.reference) == [] and branch.lane.computed == 64


def test_a_fork_of_a_rejected_draft_has_the_rows_of_its_own_path(llama_or_nano: Subject) -> None:
    """Also once the branch that it was cut from went elsewhere."""
    (branch,) = run_together(llama_or_nano.engine(), [Request(llama_or_nano.prompt(9), "lens", 4)])
    first, last = branch.rejected[0], branch.rejected[-1]
    children = list(first.fork())
    branch.rollback(9).force([1] * 12)
    for child in (*children, *last.fork()):
        child.generate(2)
        assert llama_or_nano.differences(child) == []


def test_an_edited_fork_has_the_bits_of_its_edited_path_alone(llama_or_nano: Subject) -> None:
    """The fork shares what lies before its edit, and decodes beside its parent. The edit changes what follows it."""
    subject, path = llama_or_nano, llama_or_nano.prompt(40)
    edits = [subject.edit(1, 17, torch.linspace(-1, 1, subject.model.config.d_model))]
    engine = subject.engine(page_size=4)
    root = engine.prompt(path, sites="STCZ")
    assert len(root.kv()) == len(path)  # computed, so that there is something to share
    (fork,) = root.fork(edits=edits)
    go_on(engine, [root, fork], [Request(path, "lens", 3), Request(path, "ngram", 2)])
    alone = subject.engine(page_size=16, max_rows=32).prompt(fork.tokens, sites="STCZ", edits=edits)
    assert same_bits(fork.kv(), alone.kv()) and all(
        same_bits(rows, alone.activations[s]) for s, rows in fork.activations.items()
    )
    assert subject.differences(root) == [] and not same_bits(fork.kv()[17:40], root.kv()[17:40])
    assert same_bits(fork.kv()[:17], root.kv()[:17])


# ---- the negative control --------------------------------------------------------------------------------------------


def test_with_the_fast_path_in_its_place_the_contract_fails() -> None:
    """The comparison finds no difference on the canonical pass, and changed KV, S, T, C and Z on the fast path.

    On a CUDA device the library sums such small products in one order, so `tests/gpu` uses a wider model.
    """
    model = random_decoder(SHAPE)
    subject = Subject("control", model, model, Reference(model))
    requests = [Request(subject.prompt(48), "self", window=1)]
    assert broken(subject, run_together(subject.engine(), requests), requests) == []

    engine = subject.engine()
    fast = engine.runner.fast
    engine.runner.exact = lambda segments, tap=None, stop_at_layer=None: fast(segments, tap)  # type: ignore[method-assign]
    found = "\n".join(broken(subject, run_together(engine, requests), requests))
    for what in ("KV", "blocks.1.hook_in", "blocks.0.attn.hook_out", "blocks.0.mlp.hook_out", "Z.entropy"):
        assert what in found


def test_nano_without_canonical_arithmetic_breaks_the_contract() -> None:
    subject = subject_of("nano", "cpu")
    requests = [Request(subject.prompt(48), "lens", window=1)]
    assert broken(subject, run_together(subject.engine(), requests), requests) == []
    found = "\n".join(broken(subject, run_together(subject.engine(canonical=False), requests), requests))
    for what in ("KV", "S", "T", "C", "Z"):
        assert f"{what}: Request" in found


def test_where_an_accepted_end_keeps_its_row_the_comparison_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    cut = Endings.cut

    def kept(self: Endings, turn: Turn, verdict: Verdict, drafted: int | None = None) -> Outcome:
        final, turn.job.final = turn.job.final, True
        outcome, turn.job.final = cut(self, turn, verdict, drafted), final
        return outcome

    monkeypatch.setattr(Endings, "cut", kept)
    found = "\n".join(ended_by("end token", zip(DRAFTERS, (1, 3, None, 3, None), strict=True)))
    for what in ("states", "rows", "KV", "blocks.1.hook_in", "Z.entropy"):
        assert what in found
    assert cached_after_the_end()[0] == 1
