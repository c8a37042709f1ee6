"""Rows of forced paths: prompts with continuations of the user's own, right or wrong."""

from collections.abc import Sequence

from replaylens.engine.dump.planning import make_plan
from replaylens.engine.engine import Engine
from replaylens.engine.replay.examples import Result, result_of
from replaylens.probes.causal.stage import held
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.errors import ProbeError
from replaylens.tasks import Example

_BATCH = 32


def forced_rows(
    engine: Engine,
    examples: Sequence[Example],
    continuations: Sequence[str],
    *,
    sites: str | Sequence[str] = "S",
    more: Sequence[int] | int = 0,
) -> ProbeRows:
    """Force a continuation after each prompt, let the model continue, and return the rows with the labels of the whole text.

    more  number of tokens that the model may add, greedily: one for all, or one per example
    """
    lengths = [more] * len(examples) if isinstance(more, int) else list(more)
    if not len(examples) == len(continuations) == len(lengths):
        raise ProbeError(
            f"{len(examples)} examples, {len(continuations)} continuations, {len(lengths)} lengths. Give one per example."
        )
    results: list[Result] = []
    for first in range(0, len(examples), _BATCH):
        chosen = slice(first, first + _BATCH)
        some, texts = examples[chosen], continuations[chosen]
        with held(list(engine.prompts([e.prompt for e in some], sites=sites))) as branches:
            engine.force_all(branches, list(texts))
            for n, branch in zip(lengths[chosen], branches, strict=True):
                if n:
                    branch.generate(n, drafter="ngram", final=True)
            results += [result_of(engine, example, branch) for example, branch in zip(some, branches, strict=True)]
    plan = make_plan(engine, examples[0].maker, [e.index for e in examples], sites=sites, drafter="ngram", rejected=False)
    return ProbeRows.of_results(engine, plan, results)
