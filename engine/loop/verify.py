"""Acceptance: which drafted tokens stand, and which token the verifier puts after them.

The canonical pass ran over [last token, draft 1, draft 2, ...]; its row i says what follows the first i drafts.
A draft stands if it is what the row before it says. The first row that says otherwise gives the next token itself.
So every pass gains at least one token, and the outcome does not depend on the drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replaylens.engine.loop.turn import Turn
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.passes.runner import PassResult


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification."""

    chain: int
    """which of the sibling chains is followed (0 where none stands)"""
    num_accepted: int
    """how many of its drafts stand"""
    token: int
    """what the verifier puts next: in the sequence, its KV not computed yet"""


def judge(chains: Sequence[Sequence[int]], choose: Callable[[int, int], int]) -> Verdict:
    """`choose(chain, row)` is the token that follows the first `row` drafts of a chain.

    Precondition: the chains' first drafts differ from one another, so at most one can stand. `choose` is not asked
    about rows after the first mismatch.
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
    """A verdict for every turn. Precondition: the pass gave the turns logits for all their drafts.

    Where a choice needs the logits alone, a device makes it itself, for all turns together; the host is asked row by row.
    """
    row_of = {row: i for i, row in enumerate(result.batch.logit_rows())}
    first = {turn: [row_of[result.batch.row(s, turn.end - 1)] for s in turn.segments] for turn in turns}
    alone = [turn for turn in turns if result.logits.device.type != "cpu" and turn.job.sampling.bare]
    verdicts = _by_device(alone, result, first) if alone else {}
    return verdicts | {turn: _by_host(turn, result, first[turn], tree) for turn in turns if turn not in verdicts}


def _by_host(turn: Turn, result: PassResult, first: list[int], tree: BranchTree) -> Verdict:
    record, sampling = tree.branch(turn.job.lane.branch), turn.job.sampling
    path, num_prompt = record.tokens[: turn.end], record.root_length
    return judge(
        turn.chains,
        lambda chain, row: result.choose(first[chain] + row, sampling, path + turn.chains[chain][:row], num_prompt),
    )


def _by_device(turns: list[Turn], result: PassResult, first: dict[Turn, list[int]]) -> dict[Turn, Verdict]:
    """Siblings begin with different drafts, so at most one of them stands; where none does, all say the same token."""
    from replaylens.engine.passes.choice import Question, answers  # needs triton, as everything on the device does

    questions = [
        Question(row, chain, turn.job.sampling, turn.end)
        for turn in turns
        for row, chain in zip(first[turn], turn.chains, strict=True)
    ]
    told = iter(answers(result.logits, questions))
    verdicts = {}
    for turn in turns:
        mine = [Verdict(i, *next(told)) for i in range(len(turn.chains))]
        verdicts[turn] = next((verdict for verdict in mine if verdict.num_accepted), mine[0])
    return verdicts
