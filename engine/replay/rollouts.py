"""Rollouts as texts: their paths with outcome, fork position, number and kept places as labels."""

from collections.abc import Sequence

from replaylens.engine.errors import BadTexts
from replaylens.engine.model.text import Text
from replaylens.engine.resampling.rollout import Rollout
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.tasks.given import GivenText, TokenSpan
from replaylens.tasks.texts import GivenTexts

OUTCOME, FORK, NUMBER, PLACE, CHAIN = "outcome", "fork", "rollout", "place", "chain"
"""labels: the outcome, the fork position, the number of the rollout there, at the tokens whose rows are kept the place, and of
rollouts of several chains the number of the chain"""


def texts_of_rollouts(text: Text, given: Rollouts | Sequence[Rollouts]) -> GivenTexts:
    """The task of the rollouts' paths. A dump of it with positions="label:place" has just the kept rows, and verifies from its
    folder, like a dump of any texts."""
    chains = [given] if isinstance(given, Rollouts) else list(given)
    if empty := [number for number, rollouts in enumerate(chains) if not len(rollouts)]:
        raise BadTexts("There are no rollouts." if len(chains) == 1 else f"Chain {empty[0]} has no rollouts. Leave it out.")
    made = list[GivenText]()
    for number, rollouts in enumerate(chains):
        made += _texts(text, rollouts, {} if isinstance(given, Rollouts) else {CHAIN: number})
    return GivenTexts.of(made)


def _texts(text: Text, rollouts: Rollouts, more: dict[str, int]) -> list[GivenText]:
    """The paths of one chain's rollouts, with these labels besides their own."""
    plan, made = rollouts.plan, []
    for index, rollout in enumerate(rollouts):
        place, _ = plan.rollout(index)
        prefix = plan.prefix(place)
        tokens = (*prefix, *rollout.tokens)
        prompt = min(plan.num_prompt, len(prefix))
        rest = text.decode(tokens[prompt:]) if tokens[prompt:] else ""
        labels = {OUTCOME: rollout.outcome, FORK: rollout.position, NUMBER: rollout.number, **more}
        spans = {PLACE: _spans(rollout)} if rollout.rows else {}
        edits = plan.edits[place] if plan.edits else ()
        made.append(GivenText(tokens, prompt, text.decode(tokens[:prompt]), rest, labels, spans, edits))
    return made


def _spans(rollout: Rollout) -> tuple[TokenSpan, ...]:
    """One span for each token with a kept row. A token that is several places has their names, joined by +."""
    names: dict[int, list[str]] = {}
    for place, at in rollout.rows:
        names.setdefault(at, []).append(place)
    return tuple((at, at + 1, "+".join(names[at])) for at in sorted(names))
