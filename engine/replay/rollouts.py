"""Rollouts as texts: their paths with outcome, fork position, number and kept places as labels."""

from replaylens.engine.errors import BadTexts
from replaylens.engine.model.text import Text
from replaylens.engine.resampling.rollout import Rollout
from replaylens.engine.resampling.rollouts import Rollouts
from replaylens.tasks.given import GivenText, TokenSpan
from replaylens.tasks.texts import GivenTexts

OUTCOME, FORK, NUMBER, PLACE = "outcome", "fork", "rollout", "place"
"""labels: the outcome, the fork position, the number of the rollout there, and, at the tokens whose rows are kept, the place"""


def texts_of_rollouts(text: Text, rollouts: Rollouts) -> GivenTexts:
    """The task of the rollouts' paths. A dump of it with positions="label:place" has just the kept rows, and verifies from its
    folder, like a dump of any texts."""
    if not len(rollouts):
        raise BadTexts("There are no rollouts.")
    plan = rollouts.plan
    made = []
    for index, rollout in enumerate(rollouts):
        place, _ = plan.rollout(index)
        prefix = plan.prefix(place)
        tokens = (*prefix, *rollout.tokens)
        prompt = min(plan.num_prompt, len(prefix))
        rest = text.decode(tokens[prompt:]) if tokens[prompt:] else ""
        labels = {OUTCOME: rollout.outcome, FORK: rollout.position, NUMBER: rollout.number}
        spans = {PLACE: _spans(rollout)} if rollout.rows else {}
        edits = plan.edits[place] if plan.edits else ()
        made.append(GivenText(tokens, prompt, text.decode(tokens[:prompt]), rest, labels, spans, edits))
    return GivenTexts.of(made)


def _spans(rollout: Rollout) -> tuple[TokenSpan, ...]:
    """One span for each token with a kept row. A token that is several places has their names, joined by +."""
    names: dict[int, list[str]] = {}
    for place, at in rollout.rows:
        names.setdefault(at, []).append(place)
    return tuple((at, at + 1, "+".join(names[at])) for at in sorted(names))
