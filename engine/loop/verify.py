"""Acceptance: which drafted tokens stand, and which token the verifier puts after them.

The canonical pass ran over [last token, draft 1, draft 2, ...]; its row i says what follows the first i drafts.
A draft stands if it is what the row before it says. The first row that says otherwise gives the next token itself.
So every pass gains at least one token, and the outcome does not depend on the drafts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


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
