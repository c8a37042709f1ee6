"""What erasing or steering a label does while the model runs: `amnesic` and `steering_reach`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import no_such
from replaylens.engine.request.values import as_int
from replaylens.probes.causal import (
    EffectDifference,
    InterventionRunner,
    Subject,
    Variant,
    differences,
    line_of,
    line_of_placebos,
    refits,
    steering,
)
from replaylens.probes.checks import PLACEBO_BYTES, as_draws, example_list, layer_list, names
from replaylens.probes.controls import make_goal
from replaylens.probes.erasers import Inlp, Leace
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.probes.groups import distinct, groups_of
from replaylens.probes.probe import fit_probe, placebo_probes
from replaylens.probes.report import Report, about_rows, percent
from replaylens.probes.rows import Cell, ProbeRows
from replaylens.probes.splits import unseen
from replaylens.probes.verdicts import SHOWN, Conclusion, of_line
from replaylens.replay.run import Run
from replaylens.tasks.task import Example

# ---- amnesic ---------------------------------------------------------------------------------------------------------
# `amnesic`: what does the model lose if a label is erased while it runs? (Elazar et al., arXiv 2006.00995)

ERASERS = ("leace", "inlp")
_KNOWN = " and ".join(ERASERS)
_ITERATIONS = 64
"""of INLP at most; it stops when a held-out classifier does not beat chance"""
Change = Callable[[np.ndarray], np.ndarray]
"""rows [n, d] -> what erasing adds to them"""


def amnesic(
    engine: Engine,
    given: Dump | Run | ProbeRows,
    examples: Sequence[Example],
    label: str = "state",
    *,
    layers: Sequence[int],
    site: str = "S",
    position: str = "query",
    erasers: str | Sequence[str] = ERASERS,
    placebos: int = 16,
    seed: int = 0,
) -> Report:
    """Erase a label from the rows of a position while the model runs, and read what follows the prompt.

    An eraser is fitted on rows whose paths begin none of the prompts, and becomes an edit at the site. Its cost is the loss in
    task accuracy and the divergence of the next-token distribution from the unedited one, both compared with erasing random
    directions of the same rank, and with erasing nothing. Every eraser keeps the mean of the rows and removes variation only.

    examples  prompts to change
    erasers   `leace` removes the least that makes every class mean equal; `inlp` projects out the directions of repeated
              classifiers. The placebo of LEACE is LEACE of random labels, a random direction in the rows' own metric; that of
              INLP is a random subspace
    placebos  number of random erasers
    """
    erasers, layers, examples = names("erasers", erasers), layer_list(layers), example_list(examples)
    if not erasers or not layers:
        raise ProbeError(f"No {'layers' if erasers else 'erasers'} given. Give at least one layer and one of {_KNOWN}.")
    for name in erasers:
        if name not in ERASERS:
            raise ProbeError(no_such("eraser", name, ERASERS))
    placebos, seed = as_draws("placebos", placebos, 1, PLACEBO_BYTES), as_int("seed", seed, 0, error=ProbeError)
    rows = ProbeRows.of(given)
    if rows.about.task is None:
        raise ProbeError(
            "These rows come from arrays, and no engine is known to have computed them. Give a dump or a run of the engine."
        )
    rows.require(engine)
    here = rows.accepted().at(position)
    here = here.where(here.target(label).present)
    here, notes = unseen(distinct(here), engine, examples)
    parts: list[tuple[str, int, list[dict[str, Any]], EffectDifference]] = []
    for layer in layers:
        cell = rows.cell(site, layer)
        stage = InterventionRunner(engine, examples, rows.source.letters(site)[layer], label, position)
        for name in erasers:
            fitted = _Eraser(here, cell, label, name)
            if not fitted.rank:
                notes.append(f"Skipped {name} at {cell}: it finds no direction that tells {label!r}.")
                continue
            parts.append((f"{cell} {name}", fitted.rank, *_compare(stage, cell, fitted, placebos, seed)))
    if not parts:
        raise BadRows(f"No eraser finds {label!r} at {position}. Choose another layer, or give more rows.")
    settings: dict[str, Any] = dict(label=label, site=site, layers=list(layers), position=position, erasers=list(erasers))
    settings |= dict(placebos=placebos, seed=seed, prompts=len(stage.subjects))
    lines: list[dict[str, Any]] = []
    said: list[str] = []
    tests = differences([asked for *_, asked in parts], seed, "difference of error rates", nats=True)
    for (name, rank, own, _), difference in zip(parts, tests, strict=True):
        some = [*own[:3], difference, *own[3:]]
        lines, said = lines + some, said + _say_amnesic(name, label, rank, some)
    return Report("amnesic", lines, about_rows(here), settings, notes, said)


class _Eraser:
    """An eraser of one label, fitted on the rows of one cell."""

    def __init__(self, rows: ProbeRows, cell: Cell, label: str, name: str) -> None:
        self.name, target = name, rows.target(label)
        make_goal(target).check(np.ones((1, len(rows)), dtype=bool))
        self.X, self.y = rows.matrix(cell.site, cell.layer).astype(np.float64), target.values
        self.mean = self.X.mean(0)
        if name == "leace":
            fitted: Any = Leace().fit(self.X, self.y)
        else:
            fitted = Inlp(iterations=_ITERATIONS).fit(self.X, self.y, groups=groups_of(rows))
        self.rank = len(fitted.basis_) if name == "inlp" else int(np.linalg.matrix_rank(fitted.projection_, tol=1e-8))
        self.change = self._around_mean(fitted.transform)

    def placebo(self, seed: int, number: int) -> Change:
        """The same kind of eraser, of the same rank, in random directions."""
        generator = np.random.default_rng([seed, number, 0xE7A5])
        if self.name == "leace":
            return self._around_mean(Leace().fit(self.X, generator.permutation(self.y)).transform)
        basis = np.linalg.qr(generator.normal(size=(self.X.shape[1], self.rank)))[0]
        return self._around_mean(lambda X: X - X @ basis @ basis.T)

    def _around_mean(self, transform: Change) -> Change:
        """A projection through the origin would also move the mean, whatever it erases."""
        drift = transform(self.mean[None]) - self.mean
        return lambda X: transform(X) - X - drift


def _variant(change: Change) -> Variant:
    def variant(subject: Subject) -> np.ndarray:
        return change(subject.rows.double().numpy())

    return variant


def _compare(
    stage: InterventionRunner, cell: Cell, eraser: _Eraser, placebos: int, seed: int
) -> tuple[list[dict[str, Any]], EffectDifference]:
    """Lines of one eraser at one cell, and what is to be tested."""
    random = [_variant(eraser.placebo(seed, number)) for number in range(placebos)]
    nothing: Variant = lambda subject: np.zeros(subject.rows.shape)  # noqa: E731
    plain, own, *others = stage.ask([nothing, _variant(eraser.change), *random])
    name, error = f"{cell} {eraser.name}", "error rate"
    lines = [
        line_of(f"{name}: nothing erased", plain, stage.roots, error),
        line_of(f"{name}: label erased", own, stage.roots, error),
        line_of_placebos(f"{name}: random directions erased", others, stage.roots, seed, error),
    ]
    still, _ = refits(stage, _variant(eraser.change), seed)
    lines += [{**line, "what": f"{name}: {line['what']}"} for line in still]
    place: dict[str, Any] = {"site": cell.site, "layer": cell.layer, "rank": eraser.rank}
    asked = EffectDifference(f"{name}: label minus random directions", own, others, stage.roots, place)
    return [{**line, **place} for line in lines], asked


def _say_amnesic(name: str, label: str, rank: int, lines: list[dict[str, Any]]) -> list[str]:
    plain, own, random, more = lines[:4]
    after = next(line for line in lines if line["what"].endswith("refit: site, after"))
    rates = [percent(line["accuracy"], line["low"], line["high"]) for line in (plain, own, random, after)]
    said = [
        f"{name} (rank {rank}): {rates[0]} wrong answers with nothing erased, {rates[1]} without {label!r}, {rates[2]} without "
        f"random directions; a new probe at the site reads {label!r} in {rates[3]} (majority {100 * after['majority']:.1f} %)."
    ]
    shift = f"{more['nats']:+.3g} nats [{more['nats_low']:+.3g}, {more['nats_high']:+.3g}]"
    cost = percent(more["accuracy"], more["low"], more["high"])
    pull = Conclusion(more["nats_verdict"], more["bound"], more["nats_needed"])
    verdicts = [verdict.head for verdict in (of_line(more), pull)]
    if after["low"] > after["majority"]:  # what is still there may be used: the model's need is not told by its loss
        verdicts = [
            head if head == SHOWN.capitalize() else f"No verdict, since {label!r} is still readable" for head in verdicts
        ]
    return [
        *said,
        f"{verdicts[0]}: {name}: the model needs {label!r} there: {cost} more wrong answers than random directions cost.",
        f"{verdicts[1]}: {name}: erasing {label!r} changes what follows more than random directions do: {shift}.",
    ]


# ---- steering reach --------------------------------------------------------------------------------------------------
# `steering_reach`: where along a path does steering stop working?


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
    asked: list[EffectDifference] = []
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
                found = steering(engine, probe, examples, position=place, **how)
                about: dict[str, Any] = {"site": site, "layer": layer, "position": place}
                lines += [{**line, **about} for line in found.lines]
                asked += [replace(each, more=about) for each in found.asked]
                if found.no_path and found.no_path not in notes:
                    notes.append(found.no_path)
    lines += differences(asked, seed)
    settings = dict(label=label, estimator=estimator, factor=factor, steps=last, prompts=len(examples), seed=seed)
    named = [{**line, "what": f"{site}{line['layer']} at {line['position']}: {line['what']}"} for line in lines]
    return Report("steering_reach", named, probe.source, settings, notes, _say_reach(named))


def _say_reach(lines: list[dict[str, Any]]) -> list[str]:
    said = []
    for line in lines:
        if line["what"].endswith("probe minus random direction"):
            more = percent(line["accuracy"], line["low"], line["high"])
            where = f"{line['site']}{line['layer']} at {line['position']}"
            said.append(f"{of_line(line)}: {where} is within reach: {more} more flips than random directions.")
    return said
