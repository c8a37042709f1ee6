"""Rows of paths that a user writes: prompts with continuations of their own, right or wrong."""

from collections.abc import Sequence

from replaylens.engine.dump.planning import make_plan
from replaylens.engine.engine import Engine
from replaylens.engine.replay.examples import Result, result_of
from replaylens.probes.errors import ProbeError
from replaylens.probes.rows import ProbeRows
from replaylens.probes.stage import held
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
    """Force each prompt's continuation, let the model write on, and give the rows with labels of the path as it reads.

    more  tokens that the model may add, greedily: one number for all, or one for each
    """
    lengths = [more] * len(examples) if isinstance(more, int) else list(more)
    if not len(examples) == len(continuations) == len(lengths):
        raise ProbeError(
            f"{len(examples)} examples, {len(continuations)} continuations, {len(lengths)} lengths: give one for each"
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
