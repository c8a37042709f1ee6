"""Acceptance: which drafts are accepted, and which token follows them.

The canonical pass runs over [last token, draft 1, draft 2, ...]. Its row i chooses the token after the first i drafts.
A draft is accepted if it equals the token chosen from the row before it. At the first mismatch, the chosen token follows.
So every pass gains at least one token, and the committed tokens do not depend on the drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from replaylens.engine.loop.turn import Turn
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.passes.runner import PassResult


@dataclass(frozen=True)
class Verdict:
    """What one verification says. How much of it is committed is an `Outcome`."""

    chain: int
    """which of the sibling chains is followed; 0 if all are rejected"""
    num_accepted: int
    """the number of its drafts that are accepted"""
    token: int
    """the token chosen after them; its KV is not computed yet"""


def judge(chains: Sequence[Sequence[int]], choose: Callable[[int, int], int]) -> Verdict:
    """Accept drafts up to the first mismatch. `choose(chain, row)` returns the token after the first `row` drafts of a chain.

    Precondition: the chains' first drafts differ, so at most one can be accepted. `choose` is not called for rows after the
    first mismatch.
    """
    token = choose(0, 0)
    followed = next((i for i, chain in enumerate(chains) if chain and chain[0] == token), None)
    if followed is None:
        return Verdict(0, 0, token)
    for accepted, draft in enumerate(chains[followed]):
        if draft != token:
            return Verdict(followed, accepted, token)
        token = choose(followed, accepted + 1)
    return Verdict(followed, len(chains[followed]), token)


def judged(turns: list[Turn], result: PassResult, tree: BranchTree) -> dict[Turn, Verdict]:
    """A verdict for every turn. Precondition: the pass computed logits for all drafts of the turns.

    A choice that needs only the logits is made on the device, for all turns together; others are made on the host, row by row.
    """
    before = list(accumulate((segment.num_logits for segment in result.batch.segments), initial=0))
    first = {turn: [before[s] for s in turn.segments] for turn in turns}  # the row of the last token of the path
    verdicts: dict[Turn, Verdict] = {}
    if result.logits.device.type != "cpu" and (bare := [turn for turn in turns if turn.job.sampling.bare]):
        verdicts = _by_device(bare, result, first)
    return verdicts | {turn: _by_host(turn, result, first[turn], tree) for turn in turns if turn not in verdicts}


def overruled(turn: Turn, verdict: Verdict, result: PassResult, tree: BranchTree) -> list[int]:
    """What the verifier chose in its rows after a rejected draft. They follow a token that is not part of the path, so they are
    void; pictures of the verification show them."""
    before = sum(segment.num_logits for segment in result.batch.segments[: turn.segments[verdict.chain]])
    chain, record = turn.chains[verdict.chain], tree.branch(turn.job.lane.branch)
    return [
        result.choose(before + row, turn.job.sampling, record.past.path(turn.end, chain[:row]), record.root_length)
        for row in range(verdict.num_accepted + 1, len(chain) + 1)
    ]


def drafted(turns: list[Turn], result: PassResult, tree: BranchTree) -> dict[Turn, int]:
    """The next draft of every turn: what its sampling chooses from its row of the fast batch."""
    before = list(accumulate((segment.num_logits for segment in result.batch.segments), initial=0))
    row = {turn: before[turn.segments[0]] for turn in turns}
    drawn = [turn for turn in turns if turn.job.sampling.bare and not turn.job.sampling.plain_greedy]
    chosen = _drawn_together(drawn, result, row) if result.logits.device.type != "cpu" and drawn else {}
    for turn in turns:
        record, window = tree.branch(turn.job.lane.branch), turn.job.window_open
        assert window is not None
        if turn not in chosen:
            path = record.past.path(turn.end, window.chain)
            chosen[turn] = result.choose(row[turn], turn.job.sampling, path, record.root_length)
    return chosen


def _drawn_together(turns: list[Turn], result: PassResult, row: dict[Turn, int]) -> dict[Turn, int]:
    """The drafts of turns whose draws need only the logits, in one launch: one by one, each waits for the device."""
    from replaylens.engine.passes.choice import draw  # needs triton, as everything on the device does

    positions = [turn.end + len(turn.job.window_open.chain) for turn in turns if turn.job.window_open is not None]
    logits = result.logits[[row[turn] for turn in turns]]
    return dict(zip(turns, draw(logits, [turn.job.sampling for turn in turns], positions).tolist(), strict=True))


def _by_host(turn: Turn, result: PassResult, first: list[int], tree: BranchTree) -> Verdict:
    chains, sampling = turn.chains, turn.job.sampling
    if sampling.plain_greedy:
        return judge(chains, lambda chain, row: result.greedy[first[chain] + row])
    record, end = tree.branch(turn.job.lane.branch), turn.end
    path, num_prompt = record.past.path, record.root_length
    return judge(
        chains, lambda chain, row: result.choose(first[chain] + row, sampling, path(end, chains[chain][:row]), num_prompt)
    )


def _by_device(turns: list[Turn], result: PassResult, first: dict[Turn, list[int]]) -> dict[Turn, Verdict]:
    """Sibling chains start with different drafts, so at most one is accepted; if none is, all yield the same token."""
    from replaylens.engine.passes.choice import Question, answers  # needs triton, as everything on the device does

    questions = [
        Question(row, chain, turn.job.sampling, turn.end)
        for turn in turns
        for row, chain in zip(first[turn], turn.chains, strict=True)
    ]
    answered = iter(answers(result.logits, questions))
    verdicts = {}
    for turn in turns:
        siblings = [Verdict(i, *next(answered)) for i in range(len(turn.chains))]
        verdicts[turn] = next((verdict for verdict in siblings if verdict.num_accepted), siblings[0])
    return verdicts
