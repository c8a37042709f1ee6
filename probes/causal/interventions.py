"""Causal tests of a linear probe: does the model use the direction that the probe reads?

steer        add the distance between two class means along the direction, towards another class
ablate       remove the rows' variation along the direction, then fit a new probe: is the label gone, or only elsewhere?
interchange  replace a row's component along the direction by that of a row of another class

Each test is compared with random directions of the same length and with untrained probes (fitted on labels exchanged
between roots), on the same prompts and prefixes. The result is the difference, with its interval over roots and placebos.
An untrained mass-mean probe is a hard placebo: if the label is the main axis of variation, chance differences of means lie
on that axis too, with a random sign. In an interchange, even the sign does not matter.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.request.values import whole
from replaylens.probes.causal.effects import difference, line_of, line_of_placebos
from replaylens.probes.causal.stage import Stage, Subject, Variant
from replaylens.probes.data.target import make_target
from replaylens.probes.design.controls import majority
from replaylens.probes.design.goals import make_goal
from replaylens.probes.design.splits import fold_of_groups
from replaylens.probes.errors import OneClass, ProbeError
from replaylens.probes.estimators.erasers import row_space
from replaylens.probes.fitting.heldout import held_out
from replaylens.probes.fitting.probe import LinearProbe
from replaylens.probes.reports.report import Report, percent, score_line
from replaylens.probes.scoring.statistics import ratio_over_groups
from replaylens.tasks import Example

PLACEBOS = 8
"""number of random directions to compare a probe's direction with"""
_FOLDS = 5


def steer(
    engine: Engine,
    probe: LinearProbe,
    examples: Sequence[Example],
    *,
    untrained: Sequence[LinearProbe] = (),
    factor: float = 1.0,
    position: str | None = None,
    placebos: int = PLACEBOS,
    seed: int = 0,
) -> Report:
    """Move rows towards another class and test whether the answer follows.

    examples   prompts that the probe was not fitted on; the report's notes say how many were
    untrained  probes fitted on shuffled labels (see `placebo_probes`), a second kind of placebo
    factor     step in units of the distance between the class means, the same for every direction
    position   default: that of the probe
    """
    probe.require(engine)
    stage = Stage(engine, examples, probe.site, probe.label, position or probe.position)
    return _compare("steer", stage, probe, untrained, placebos, seed, lambda p: _towards(p, probe, factor), {"factor": factor})


def interchange(
    engine: Engine,
    probe: LinearProbe,
    examples: Sequence[Example],
    *,
    untrained: Sequence[LinearProbe] = (),
    position: str | None = None,
    placebos: int = PLACEBOS,
    seed: int = 0,
) -> Report:
    """Replace the component along the direction by that of a prompt of another class; the whole row serves as a ceiling."""
    probe.require(engine)
    stage = Stage(engine, examples, probe.site, probe.label, position or probe.position)
    sources = _sources(stage, seed)

    def along(chosen: LinearProbe) -> Variant:
        basis = chosen.basis

        def variant(subject: Subject) -> np.ndarray:
            gap = sources[subject.example.root] - subject.rows[-1:].double().numpy()
            size = np.linalg.norm(gap @ probe.basis.T @ probe.basis)  # the distance that the real probe moves the row
            part = gap @ basis.T @ basis
            return np.repeat(part / max(float(np.linalg.norm(part)), 1e-300) * size, len(subject.positions), 0)

        return variant

    def whole(subject: Subject) -> np.ndarray:
        return sources[subject.example.root] - subject.rows.double().numpy()

    return _compare("interchange", stage, probe, untrained, placebos, seed, along, {}, {"whole row": whole})


def ablate(
    engine: Engine,
    probe: LinearProbe,
    examples: Sequence[Example],
    *,
    untrained: Sequence[LinearProbe] = (),
    position: str | None = None,
    placebos: int = PLACEBOS,
    seed: int = 0,
) -> Report:
    """Replace the rows' component along the direction by its mean, then fit new probes at the site and at the last layer.

    The flip rate shows whether the answer depends on the direction. The `refit` lines show how well a new logistic probe,
    whatever the kind of the ablated one, reads the label. If the accuracy stays, other directions carry the label too.
    """
    probe.require(engine)
    stage = Stage(engine, examples, probe.site, probe.label, position or probe.position)
    centre = probe.means.mean(0)

    def without(chosen: LinearProbe) -> Variant:
        basis = chosen.basis
        return lambda subject: -(subject.rows.double().numpy() - centre) @ basis.T @ basis

    report = _compare("ablate", stage, probe, untrained, placebos, seed, without, {})
    lines, findings = refits(stage, without(probe), seed)
    return Report(
        "ablate", [*report.lines, *lines], report.source, report.settings, report.notes, [*report.findings, *findings]
    )


def _towards(chosen: LinearProbe, probe: LinearProbe, factor: float) -> Variant:
    """Move each row from its own class to the next, by the distance between the real probe's class means."""

    def variant(subject: Subject) -> np.ndarray:
        ways = []
        for own in subject.classes:
            other = probe.classes[(probe.classes.index(own) + 1) % len(probe.classes)]
            ways.append(factor * probe.gap(own, other) * chosen.direction(own, other))
        return np.stack(ways)

    return variant


def _random(probe: LinearProbe, number: int, seed: int) -> LinearProbe:
    """The probe with its weights, and its subspace if it has one, replaced by noise."""
    generator = np.random.default_rng([seed, number, 0xD1CE])
    weight = generator.normal(size=probe.weight.shape)
    subspace = None if probe.subspace is None else row_space(generator.normal(size=probe.subspace.shape))
    return replace(probe, weight=weight, subspace=subspace)


def _compare(
    kind: str,
    stage: Stage,
    probe: LinearProbe,
    untrained: Sequence[LinearProbe],
    placebos: int,
    seed: int,
    make: Any,
    settings: dict[str, Any],
    ceilings: dict[str, Variant] | None = None,
) -> Report:
    """Run the probe's variant, its placebos and any ceilings; tabulate rates and differences."""
    seed = whole("seed", seed, 0, error=ProbeError)
    if whole("placebos", placebos, error=ProbeError) < 1:
        raise ProbeError(f"placebos={placebos} leaves nothing to compare the effect with. Give at least one placebo.")
    ceilings = ceilings or {}
    directions = [probe, *(_random(probe, i, seed) for i in range(placebos)), *untrained]
    played = stage.play([*map(make, directions), *ceilings.values()])
    own, many = played[0], {"random direction": played[1 : 1 + placebos]}
    if untrained:
        many["untrained probe"] = played[1 + placebos : len(directions)]
    others = dict(zip(ceilings, played[len(directions) :], strict=True))
    lines = [
        line_of(f"{kind}: probe", own, stage.roots),
        *(line_of_placebos(f"{kind}: {name}", each, stage.roots, seed) for name, each in many.items()),
        *(line_of(f"{kind}: {name}", each, stage.roots) for name, each in others.items()),
        *(difference(f"{kind}: probe minus {name}", own, each, stage.roots, seed) for name, each in many.items()),
    ]
    about = {"label": probe.label, "site": probe.site, "position": stage.position.spec, "estimator": probe.estimator}
    settings = {**about, **settings, "placebos": placebos, "seed": seed, "prompts": len(stage.subjects)}
    notes = [] if untrained else ["Skipped the comparison with untrained probes: none was given."]
    single = [name for name, each in many.items() if len(each) == 1]
    notes += [f"Skipped the spread between placebos: only one {name} was given." for name in single]
    return Report(kind, lines, probe.source, settings, notes + _not_held_out(stage, probe), _say(kind, lines, about))


def _not_held_out(stage: Stage, probe: LinearProbe) -> list[str]:
    """Notes on prompts that the probe was fitted on, if it records them."""
    if not probe.roots:
        return ["Cannot check that prompts are held out: the probe does not record the prompts it was fitted on."]
    seen = int(np.isin(stage.roots, probe.roots).sum())
    return [f"{seen} of {len(stage.roots)} prompts are not held out: the probe was fitted on them."] if seen else []


def _say(kind: str, lines: list[dict[str, Any]], about: dict[str, Any]) -> list[str]:
    where = f"{about['label']} at {about['site']}, {about['position']} ({about['estimator']})"
    said = []
    for line in lines:
        if "minus" not in line["what"]:
            pull = f"{line['nats']:.2f} nats [{line['nats_low']:.2f}, {line['nats_high']:.2f}]"
            said.append(
                f"{line['what']}, {where}: answer flipped in {percent(line['accuracy'], line['low'], line['high'])}, {pull}."
            )
            continue
        verdict = "Shown" if line["low"] > 0 else "Not shown"
        other = line["what"].split("minus ")[1]
        more = percent(line["accuracy"], line["low"], line["high"])
        said.append(f"{verdict}: {kind} along the probe's direction flips more answers than the {other}: {more} more.")
    return said


def _sources(stage: Stage, seed: int) -> dict[str, np.ndarray]:
    """For each root, the last changed row [1, d] of a subject of another class, drawn with the seed."""
    generator = np.random.default_rng([seed, 0x50])
    last = [subject.classes[-1] for subject in stage.subjects]
    found = {}
    for i, subject in enumerate(stage.subjects):
        others = [j for j, name in enumerate(last) if name != last[i]]
        if not others:
            raise OneClass(f"All prompts have the class {last[0]!r} at this position. Give prompts of at least two classes.")
        found[subject.example.root] = stage.subjects[int(generator.choice(others))].rows[-1:].double().numpy()
    return found


def refits(stage: Stage, variant: Variant, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Accuracy of new probes before and after a change, at the site and on the last residual stream."""
    before = np.stack([subject.rows[-1].double().numpy() for subject in stage.subjects])
    after = np.stack([subject.rows[-1].double().numpy() + variant(subject)[-1] for subject in stage.subjects])
    still: Variant = lambda subject: np.zeros(subject.rows.shape)  # noqa: E731
    plain, gone = stage.last_rows([still, variant], stage.final)
    ends = {"site, before": before, "site, after": after, "last layer, before": plain, "last layer, after": gone}
    groups, once = np.unique(stage.groups, return_index=True)  # prompts that begin alike are one row
    goal = make_goal(make_target(stage.label, [stage.subjects[i].classes[-1] for i in once]))
    test = np.arange(_FOLDS)[:, None] == fold_of_groups(groups, _FOLDS, seed)
    goal.check(~test)
    lines, said = [], []
    for name, X in ends.items():
        predicted = held_out("logistic", torch.from_numpy(X[once])[None], [goal], ~test, test).predicted[0, 0]
        score = ratio_over_groups((predicted == goal.codes)[None], np.ones(len(once)), groups, folds=_FOLDS)[0]
        lines.append(score_line(f"refit: {name}", "accuracy", score, len(once), majority=majority(goal.codes, ~test, test)))
        said.append(f"refit at the {name}: {percent(score.value, score.low, score.high)}.")
    return lines, said
