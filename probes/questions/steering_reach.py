"""`steering_reach`: where along a path does steering stop working?"""

from collections.abc import Sequence
from typing import Any

from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.run import Run
from replaylens.probes.causal.interventions import steer
from replaylens.probes.data.groups import distinct
from replaylens.probes.data.rows import ProbeRows
from replaylens.probes.design.unseen import unseen
from replaylens.probes.errors import ProbeError
from replaylens.probes.fitting.probe import fit_probe, placebo_probes
from replaylens.probes.reports.report import Report, percent
from replaylens.tasks import Example


def steering_reach(
    engine: Engine,
    given: Dump | Run | ProbeRows,
    examples: Sequence[Example],
    label: str = "state",
    *,
    layers: Sequence[int],
    site: str = "S",
    estimator: str = "mass-mean",
    factor: float = 1.0,
    placebos: int = 4,
    seed: int = 0,
) -> Report:
    """Steer at each step of the prompt and at the query, with a probe fitted at such positions; does the answer follow?

    All examples have the same number of steps. The probes are fitted neither on them nor on rows that they begin with. A
    position is within reach if the probe's direction flips more answers than random directions of the same length, with the
    interval above zero.
    """
    rows = ProbeRows.of(given)
    rows.require(engine)
    steps = {len(example.events) for example in examples}
    if len(steps) != 1:
        raise ProbeError(f"The prompts have {sorted(steps)} steps. Give prompts of one length, so that steps can be compared.")
    if seen := {e.root for e in examples} & set(rows.roots):
        raise ProbeError(f"{len(seen)} of the prompts are among the rows that the probes are fitted on. Give other prompts.")
    last = steps.pop()
    lines: list[dict[str, Any]] = []
    notes: list[str] = []
    known = {}
    for kind in ("step", "query"):
        known[kind], left_out = unseen(distinct(rows.accepted().at(kind)), engine, examples)
        notes += [f"{kind}: {note}" for note in left_out]
    for layer in layers:
        for kind, places in (("step", [f"step:{t}" for t in range(1, last + 1)]), ("query", ["query"])):
            probe = fit_probe(known[kind], label, site=site, layer=layer, position=kind, estimator=estimator)
            placebo = placebo_probes(known[kind], probe, count=2, seed=seed)
            for place in places:
                how: dict[str, Any] = dict(untrained=placebo, factor=factor, placebos=placebos, seed=seed)
                found = steer(engine, probe, examples, position=place, **how)
                lines += [{**line, "site": site, "layer": layer, "position": place} for line in found.lines]
    settings = dict(label=label, estimator=estimator, factor=factor, steps=last, prompts=len(examples), seed=seed)
    named = [{**line, "what": f"{site}{line['layer']} at {line['position']}: {line['what']}"} for line in lines]
    return Report("steering_reach", named, probe.source, settings, notes, _say(named))


def _say(lines: list[dict[str, Any]]) -> list[str]:
    said = []
    for line in lines:
        if line["what"].endswith("probe minus random direction"):
            verdict = "within reach" if line["low"] > 0 else "out of reach"
            more = percent(line["accuracy"], line["low"], line["high"])
            said.append(f"{line['site']}{line['layer']} at {line['position']}: {verdict}, {more} more flips.")
    return said
