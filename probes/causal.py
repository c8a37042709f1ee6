"""Causal tests of a probe's direction: steer, ablate, interchange, with placebos; and a direction found by DAS."""

import hashlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy import stats
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, UnknownSite
from replaylens.engine.model.sites import by_layer, numbered
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.values import as_int
from replaylens.engine.serving.branch import Branch
from replaylens.probes.checks import PLACEBO_BYTES, as_draws, example_list
from replaylens.probes.controls import majority, make_goal
from replaylens.probes.erasers import row_space
from replaylens.probes.errors import BadPosition, BadRows, MissingLabel, OneClass, ProbeError
from replaylens.probes.heldout import held_out
from replaylens.probes.intervals import LEVEL, Estimate, difference_over_groups, mean_over_placebos, ratio_over_groups
from replaylens.probes.positions import OF_TASKS, RowPosition, add_places
from replaylens.probes.probe import LinearProbe
from replaylens.probes.report import Report, percent, score_line
from replaylens.probes.rows import Cell, make_target
from replaylens.probes.sources import LETTERS
from replaylens.probes.splits import fold_of_groups
from replaylens.probes.verdicts import family, of_line, tested
from replaylens.tasks.task import Example
from replaylens.tasks.tokenizer import path_offsets
from replaylens.weights.loading import bridge as as_bridge
from replaylens.weights.loading import hugging_face

# ---- stage -----------------------------------------------------------------------------------------------------------
# `InterventionRunner`: changes rows of prompts and reads the answers again, every variant on the same cached prefix.
#
# A variant is a function from a subject to the change that is added to its rows. It becomes an edit of a fork: the KV cache
# before the first changed position is shared with the base branch, everything after it comes from the canonical pass.

_BATCH = 32


@dataclass(frozen=True, eq=False)
class Subject:
    """One prompt with the rows to change."""

    example: Example
    tokens: list[int]
    positions: list[int]
    """positions of the rows to change, ascending"""
    rows: Tensor
    """[positions, d]: before the change"""
    classes: list[str]
    """the label at each of these positions"""
    logits: Tensor
    """[answers]: logits of the task's answers after the prompt"""

    @property
    def answer(self) -> int:
        """The number of the model's own answer."""
        return int(self.logits.argmax())


@dataclass(frozen=True, eq=False)
class Effect:
    """The effect of a variant, per subject."""

    flipped: np.ndarray
    """1 if the most likely answer is no longer the model's own, else 0"""
    pull: np.ndarray
    """decrease in nats of the margin of the model's own answer over the best other one"""


Variant = Callable[[Subject], np.ndarray]
"""a subject -> [positions, d], to be added to its rows"""


class InterventionRunner:
    """Prompts of one task on one engine; rows at one site and position."""

    def __init__(self, engine: Engine, examples: Sequence[Example], site: str, label: str, position: str = "query") -> None:
        self.engine, self.site, self.label = engine, engine.sites.resolve(site), label
        self.final = engine.sites.per_layer("S")[-1]
        self.position = RowPosition.parse(position, OF_TASKS)
        examples = example_list(examples)
        self.answers = _single_tokens(engine, examples[0].maker.answers())
        self.subjects: list[Subject] = []
        for first in range(0, len(examples), _BATCH):
            self.subjects += self._look(examples[first : first + _BATCH])

    @property
    def roots(self) -> np.ndarray:
        return np.array([subject.example.root for subject in self.subjects])

    @property
    def groups(self) -> np.ndarray:
        """The beginning of each prompt up to its last changed row: prompts that begin alike have the same rows there."""
        begun = [np.array(subject.tokens[: subject.positions[-1] + 1]).tobytes() for subject in self.subjects]
        return np.array([hashlib.sha256(tokens).hexdigest()[:16] for tokens in begun])

    def why_no_path(self) -> str | None:
        """Why a change of these rows cannot reach the answer, in a sentence; None if it can."""
        last = {self.engine.sites.per_layer(letter)[-1] for letter in "STC" if self.engine.sites.per_layer(letter)}
        if self.site not in last or any(subject.positions[-1] == len(subject.tokens) - 1 for subject in self.subjects):
            return None
        return (
            f"No causal path: {self.site} comes after the last attention, and {self.position.spec!r} before the prompt's last "
            "token, so no change there can reach the answer; choose an earlier layer, or the position query."
        )

    def play(self, variants: Sequence[Variant]) -> list[Effect]:
        """Apply every variant to every subject and read the answers again."""
        flipped, pull = np.zeros((2, len(variants), len(self.subjects)))
        with closing(self._forks(variants, [self.final])) as played:
            for number, subject, _, forks in played:
                for v, fork in enumerate(forks):
                    after = self._answer_logits(fork, len(subject.tokens))
                    flipped[v, number] = int(after.argmax()) != subject.answer
                    pull[v, number] = _margin(subject.logits, subject.answer) - _margin(after, subject.answer)
        return [Effect(flipped[v], pull[v]) for v in range(len(variants))]

    def ask(self, variants: Sequence[Variant]) -> list[Effect]:
        """Apply every variant; what follows the prompt, over the whole vocabulary?

        Here an effect is flipped where the most likely token is not the first of the right answer, and its pull is the
        divergence of the model's own distribution from the changed one: KL(own || changed), in nats.
        """
        flipped, pull = np.zeros((2, len(variants), len(self.subjects)))
        with closing(self._forks(variants, [self.final])) as played:
            for number, subject, base, forks in played:
                right = self.engine.text.encode(subject.example.answer, special=False)[0]
                own = self._logits(base, len(subject.tokens)).log_softmax(-1)
                for v, fork in enumerate(forks):
                    after = self._logits(fork, len(subject.tokens)).log_softmax(-1)
                    flipped[v, number] = int(after.argmax()) != right
                    pull[v, number] = float((own.exp() * (own - after)).sum())
        return [Effect(flipped[v], pull[v]) for v in range(len(variants))]

    def answers_to(self, paths: Sequence[list[int]]) -> list[int]:
        """The number of the model's answer to each of these prompts of tokens."""
        found = []
        for first in range(0, len(paths), _BATCH):
            with held(list(self.engine.prompts(paths[first : first + _BATCH], sites=[self.final]))) as branches:
                found += [int(self._answer_logits(branch, branch.length).argmax()) for branch in branches]
        return found

    def last_rows(self, variants: Sequence[Variant], site: str) -> list[np.ndarray]:
        """For each variant, the prompts' last rows [subjects, d] of a site after the change."""
        found: list[list[Tensor]] = [[] for _ in variants]
        with closing(self._forks(variants, [site])) as played:
            for _, subject, _, forks in played:
                for rows, fork in zip(found, forks, strict=True):
                    rows.append(fork.activations.peek(site)[len(subject.tokens) - 1])
        return [torch.stack(rows).double().numpy() for rows in found]

    def _forks(
        self, variants: Sequence[Variant], sites: list[str]
    ) -> Generator[tuple[int, Subject, Branch, "list[Branch]"], None, None]:
        """(number, subject, its branch, one computed fork per variant); forks share the KV cache of their subject's prompt.

        Close the generator: the branches of a batch live until the next batch.
        """
        for first in range(0, len(self.subjects), _BATCH):
            some = self.subjects[first : first + _BATCH]
            edits = [[self._edit(subject, variant) for variant in variants] for subject in some]
            with held(list(self.engine.prompts([s.tokens for s in some], sites=sites))) as bases, held([]) as forks:
                for base, own in zip(bases, edits, strict=True):
                    for edit in own:
                        forks += base.fork(1, edits=[edit])
                self.engine.forest.compute([fork.lane for fork in forks])
                for i, subject in enumerate(some):
                    yield first + i, subject, bases[i], forks[i * len(variants) : (i + 1) * len(variants)]

    def _edit(self, subject: Subject, variant: Variant) -> Edit:
        value = torch.as_tensor(np.asarray(variant(subject)), dtype=torch.float32)
        return Edit(self.site, "add", value, positions=subject.positions)

    def _look(self, examples: Sequence[Example]) -> list[Subject]:
        found = []
        with held(list(self.engine.prompts([e.prompt for e in examples], sites=[self.final, self.site]))) as branches:
            for example, branch in zip(examples, branches, strict=True):
                positions, classes = self._places(example, branch.tokens)
                if positions:
                    rows = branch.activations[self.site][positions]
                    logits = self._answer_logits(branch, branch.length)
                    found.append(Subject(example, branch.tokens, positions, rows, classes, logits))
        if not found:
            raise BadPosition(f"No prompt has label {self.label!r} at position {self.position.spec!r}. Choose another.")
        return found

    def _answer_logits(self, branch: Branch, length: int) -> Tensor:
        return self._logits(branch, length)[self.answers]

    def _logits(self, branch: Branch, length: int) -> Tensor:
        """[vocabulary]: after the token at the end of this length."""
        row = branch.activations.peek(self.final)[length - 1 : length]
        return self.engine.lock.alone(self.engine.runner.logits, row)[0].double().cpu()

    def _places(self, example: Example, tokens: list[int]) -> tuple[list[int], list[str]]:
        """Positions of the prompt that the spec selects, with the label at each."""
        text, offsets = path_offsets(self.engine.text.tokenizer, tokens)
        labels = example.maker.read(text, example.index).labels_at(offsets)
        name = example.maker.state_label if self.label == "state" and "state" not in labels else self.label
        if name not in labels:
            raise MissingLabel(f"Unknown label {self.label!r}. The task has {', '.join(labels)}.")
        frame = pd.DataFrame({key: pd.Series(values, dtype=object) for key, values in labels.items()})
        texts = [text[start:end] for start, end in offsets]
        frame = frame.assign(
            example=0, branch=0, fork_position=0, position=range(len(tokens)), token_state="prompt", text=texts
        )
        asked = self.position.mask(add_places(frame, example.maker.step_label))
        chosen: list[int] = np.flatnonzero(asked & frame[name].notna().to_numpy()).tolist()
        return chosen, [str(labels[name][p]) for p in chosen]


@contextmanager
def held(branches: "list[Branch]") -> "Iterator[list[Branch]]":
    """Release the branches at the end, also after an error. More may be appended in between."""
    with ExitStack() as end:
        end.callback(lambda: [branch.release() for branch in branches])
        yield branches


def _single_tokens(engine: Engine, words: Sequence[str]) -> list[int]:
    """Token ids of the answers. Raises ProbeError unless there are at least two, of one token each."""
    ids = [engine.text.encode(word, special=False) for word in words]
    if len(ids) < 2 or any(len(each) != 1 for each in ids):
        raise ProbeError(f"Cannot compare answers {list(words[:4])}. Use a task with at least two answers of one token each.")
    return [each[0] for each in ids]


def _margin(logits: Tensor, answer: int) -> float:
    """The margin of an answer over the best other one, in nats."""
    return float(logits[answer] - torch.cat([logits[:answer], logits[answer + 1 :]]).max())


# ---- effects ---------------------------------------------------------------------------------------------------------
# Lines of a report about what changes of rows do to prompts, compared with placebos on the same prompts.


def line_of(what: str, effect: Effect, roots: np.ndarray, metric: str = "flip rate") -> dict[str, Any]:
    """The share of prompts that an effect flips, and its pull in nats."""
    pull = difference_over_groups(effect.pull, roots, bounded=False)
    return score_line(what, metric, _rate(effect, roots), len(roots), **_nats(pull))


def line_of_placebos(
    what: str, placebos: list[Effect], roots: np.ndarray, seed: int, metric: str = "flip rate"
) -> dict[str, Any]:
    """The same for several placebos together."""
    pull = mean_over_placebos(np.stack([each.pull for each in placebos]), roots, seed=seed)
    return score_line(what, metric, _rate_of_placebos(placebos, roots, seed), len(roots), **_nats(pull))


@dataclass(frozen=True, eq=False)
class EffectDifference:
    """What an effect does beyond placebos on the same prompts, as one of the tests of a call."""

    what: str
    own: Effect
    placebos: list[Effect]
    roots: np.ndarray
    more: dict[str, Any] = field(default_factory=dict)
    """further columns of its line"""

    def gains(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        return getattr(self.own, name) - np.mean([getattr(each, name) for each in self.placebos], axis=0), self.roots

    def p_of_placebos(self, name: str) -> float:
        """That another direction does as much: placebos are a sample of directions, and the effect is that of one more (a t
        test of a new observation). 0 if they do not vary."""
        means, count = np.array([getattr(each, name).mean() for each in self.placebos]), len(self.placebos)
        spread = means.std(ddof=1) * np.sqrt(1 + 1 / count) if count > 1 else 0.0
        lead = getattr(self.own, name).mean() - means.mean()
        return float(stats.t.sf(lead / spread, count - 1)) if spread > 0 else 0.0


def differences(
    each: Sequence[EffectDifference], seed: int, metric: str = "difference of flip rates", *, nats: bool = False
) -> list[dict[str, Any]]:
    """A line for each, with its verdict: all of them are one family. Intervals hold for all jointly.

    If one side flips all answers or none, resampling shows no spread there; the interval then adds both sides' ends.

    nats  the pull is a second question, whose verdict is in columns of its own
    """
    asked = ("flipped", "pull") if nats else ("flipped",)
    found = family([one.gains(name) for name in asked for one in each], seed=seed)
    of_placebos = np.array([one.p_of_placebos(name) for name in asked for one in each])
    found = replace(found, p=np.maximum(found.p, np.minimum(1, of_placebos * len(of_placebos))))
    lines, pulls = [], []
    for one in each:
        flipped = np.stack([placebo.flipped for placebo in one.placebos])
        if np.ptp(one.own.flipped) == 0 or np.ptp(flipped) == 0:
            mine, other = _rate(one.own, one.roots, found.level), _rate_of_placebos(one.placebos, one.roots, seed, found.level)
            rate = Estimate(mine.value - other.value, mine.low - other.high, mine.high - other.low)
        else:
            rate = mean_over_placebos(one.own.flipped - flipped, one.roots, seed=seed, level=found.level)
        gaps = one.own.pull - np.stack([placebo.pull for placebo in one.placebos])
        pull = mean_over_placebos(gaps, one.roots, seed=seed, level=found.level)
        pulls.append({"accuracy": pull.value, "low": pull.low, "high": pull.high, "rows": len(one.roots)})
        lines.append(
            score_line(one.what, metric, rate, len(one.roots), **_nats(pull), roots=len(np.unique(one.roots)), **one.more)
        )
    for line, about in zip(pulls, lines, strict=True):
        line["roots"] = about["roots"]
    tested([*lines, *(pulls if nats else ())], found)
    if nats:
        for line, pull_line in zip(lines, pulls, strict=True):
            line |= {f"nats_{name}": pull_line[name] for name in ("verdict", "needed", "p_family")}
    return lines


def _rate(effect: Effect, roots: np.ndarray, level: float = LEVEL) -> Estimate:
    return ratio_over_groups(effect.flipped[None], np.ones(len(roots)), roots, level=level)[0]


def _rate_of_placebos(placebos: list[Effect], roots: np.ndarray, seed: int, level: float = LEVEL) -> Estimate:
    return mean_over_placebos(np.stack([each.flipped for each in placebos]), roots, seed=seed, share=True, level=level)


def _nats(pull: Estimate) -> dict[str, Any]:
    return {"nats": pull.value, "nats_low": pull.low, "nats_high": pull.high}


# ---- interventions ---------------------------------------------------------------------------------------------------
# Causal tests of a linear probe: does the model use the direction that the probe reads?
#
# steer        add the distance between two class means along the direction, towards another class
# ablate       remove the rows' variation along the direction, then fit a new probe: is the label gone, or only elsewhere?
# interchange  replace a row's component along the direction by that of a row of another class
#
# Each test is compared with random directions of the same length and with untrained probes (fitted on labels exchanged
# between roots), on the same prompts and prefixes. The result is the difference, with its interval over roots and placebos.
# An untrained mass-mean probe is a hard placebo: if the label is the main axis of variation, chance differences of means lie
# on that axis too, with a random sign. In an interchange, even the sign does not matter.

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
    how: dict[str, Any] = dict(untrained=untrained, factor=factor, position=position, placebos=placebos, seed=seed)
    return steering(engine, probe, examples, **how).report(seed)


def steering(
    engine: Engine,
    probe: LinearProbe,
    examples: Sequence[Example],
    *,
    untrained: Sequence[LinearProbe],
    factor: float,
    position: str | None,
    placebos: int,
    seed: int,
) -> "Compared":
    """What `steer` does, before its verdicts: those of several calls may be one family."""
    probe.require(engine)
    stage = InterventionRunner(engine, examples, probe.site, probe.label, position or probe.position)
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
    stage = InterventionRunner(engine, examples, probe.site, probe.label, position or probe.position)
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

    return _compare("interchange", stage, probe, untrained, placebos, seed, along, {}, {"whole row": whole}).report(seed)


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
    stage = InterventionRunner(engine, examples, probe.site, probe.label, position or probe.position)
    centre = probe.means.mean(0)

    def without(chosen: LinearProbe) -> Variant:
        basis = chosen.basis
        return lambda subject: -(subject.rows.double().numpy() - centre) @ basis.T @ basis

    report = _compare("ablate", stage, probe, untrained, placebos, seed, without, {}).report(seed)
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


@dataclass(frozen=True, eq=False)
class Compared:
    """What a direction does, next to placebos."""

    kind: str
    lines: list[dict[str, Any]]
    asked: list[EffectDifference]
    probe: LinearProbe
    settings: dict[str, Any]
    notes: list[str]
    no_path: str | None
    """why no change there can reach the answer"""

    def report(self, seed: int) -> Report:
        lines, about = [*self.lines, *differences(self.asked, seed)], self.settings
        said = [self.no_path] if self.no_path else []
        return Report(self.kind, lines, self.probe.source, about, self.notes, said + _say(self.kind, lines, about))


def _compare(
    kind: str,
    stage: InterventionRunner,
    probe: LinearProbe,
    untrained: Sequence[LinearProbe],
    placebos: int,
    seed: int,
    make: Any,
    settings: dict[str, Any],
    ceilings: dict[str, Variant] | None = None,
) -> Compared:
    """Run the probe's variant, its placebos and any ceilings; tabulate rates, and what is to be tested."""
    seed = as_int("seed", seed, 0, error=ProbeError)
    if as_draws("placebos", placebos, -1, PLACEBO_BYTES) < 1:
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
    ]
    asked = [EffectDifference(f"{kind}: probe minus {name}", own, each, stage.roots) for name, each in many.items()]
    about = {"label": probe.label, "site": probe.site, "position": stage.position.spec, "estimator": probe.estimator}
    settings = {**about, **settings, "placebos": placebos, "seed": seed, "prompts": len(stage.subjects)}
    notes = [] if untrained else ["Skipped the comparison with untrained probes: none was given."]
    single = [name for name, each in many.items() if len(each) == 1]
    notes += [f"Skipped the spread between placebos: only one {name} was given." for name in single]
    return Compared(kind, lines, asked, probe, settings, notes + _not_held_out(stage, probe), stage.why_no_path())


def _not_held_out(stage: InterventionRunner, probe: LinearProbe) -> list[str]:
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
        other = line["what"].split("minus ")[1]
        more = percent(line["accuracy"], line["low"], line["high"])
        said.append(f"{of_line(line)}: {kind} along the probe's direction flips more answers than the {other}: {more} more.")
    return said


def _sources(stage: InterventionRunner, seed: int) -> dict[str, np.ndarray]:
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


def refits(stage: InterventionRunner, variant: Variant, seed: int) -> tuple[list[dict[str, Any]], list[str]]:
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


# ---- das -------------------------------------------------------------------------------------------------------------
# Distributed alignment search (Geiger et al., arXiv 2303.02536) with TransformerLens; gives a probe for the causal tests.


def _require_peer(engine: Engine, made: Any) -> None:
    """BadRequest unless a Hugging Face model computes what the engine's does: a translation may lack a bias or a norm."""
    tokens = [number % engine.config.vocab_size for number in range(2, 18)]
    ours = engine.logits(tokens).double()
    with torch.inference_mode():
        theirs = made(torch.tensor([tokens], device=made.device)).logits[0, -1].double().cpu()
    error = float((ours.cpu() - theirs).abs().max() / theirs.abs().max())
    if not error < 1e-3:
        raise BadRequest(f"A bridge of these weights computes other logits (by {error:.1e}). Give one of your own.")


def find_direction(
    engine: Engine,
    bridge: Any,
    examples: Sequence[Example],
    label: str = "state",
    *,
    site: str = "S",
    layer: int,
    position: str = "query",
    rank: int = 1,
    epochs: int = 20,
    lr: float = 1e-2,
    seed: int = 0,
) -> LinearProbe:
    """Learn the subspace whose interchange makes the answer follow the source prompt, by gradient descent.

    The target of a pair is the model's answer to the source up to the position, followed by the rest of the base: at the
    query, its answer to the source.

    bridge    a `TransformerBridge` of the engine's model; TransformerLens does the search. None: it is made of the engine's
              weights, which must be of the llama family, as those of the embedded models are
    examples  prompts with the same number of tokens, since TransformerLens takes them as one tensor
    label     with at least two classes, for the probe's scores: nearest class mean within the subspace
    position  one row of each prompt, such as "query", "query-1", "step:2" or a number
    rank      number of dimensions to exchange
    """
    from transformer_lens.tools.analysis.interchange import fit_das

    if bridge is None:
        made = hugging_face(engine.model)
        _require_peer(engine, made)
        bridge = as_bridge(made)
    name = _name(engine, site, layer)
    stage = InterventionRunner(engine, examples, name, label, position)
    tokens, places = _aligned(stage)
    width = stage.subjects[0].rows.shape[-1]
    if not 1 <= rank <= width:
        raise BadRows(f"rank={rank} is impossible. Rows of {name} have {width} dimensions: give 1 to {width}.")
    source = np.random.default_rng([seed, 0xDA5]).permutation(len(tokens))
    grafts = [tokens[s][: places[s] + 1].tolist() + tokens[b][places[b] + 1 :].tolist() for b, s in enumerate(source.tolist())]
    found = fit_das(
        bridge,
        name,
        tokens,
        tokens[torch.from_numpy(source)],
        torch.tensor(stage.answers_to(grafts)),
        lambda some: bridge(some)[:, -1, stage.answers],
        rank=rank,
        base_positions=places,
        source_positions=places[torch.from_numpy(source)],
        epochs=epochs,
        lr=lr,
        seed=seed,
    )
    about = {"task": examples[0].task, "fingerprint": engine.fingerprint.digest, "digest": ""}
    return _probe(stage, found.basis.double().cpu().numpy().T, Cell(site, layer), about)


def _aligned(stage: InterventionRunner) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens [prompts, length], position of each prompt's row [prompts]). Raises BadRows if they are no tensors."""
    if len({len(subject.tokens) for subject in stage.subjects}) != 1:
        raise BadRows("The prompts have different lengths. Give prompts with the same number of tokens.")
    if any(len(subject.positions) != 1 for subject in stage.subjects):
        raise BadRows(f"Position {stage.position.spec!r} has several rows per prompt. Use one such as 'query' or 'step:2'.")
    tokens = torch.tensor([subject.tokens for subject in stage.subjects])
    return tokens, torch.tensor([subject.positions[0] for subject in stage.subjects])


def _probe(stage: InterventionRunner, basis: np.ndarray, cell: Cell, about: dict[str, Any]) -> LinearProbe:
    """The probe of a subspace [rank, d]: its scores compare a row with the class means within the subspace."""
    classes = np.array([subject.classes[-1] for subject in stage.subjects])
    names = tuple(str(each) for each in np.unique(classes))
    if len(names) < 2:
        raise BadRows(f"All prompts have the class {names[0]!r}. Give prompts of at least two classes.")
    rows = np.stack([subject.rows[-1].double().numpy() for subject in stage.subjects])
    means = np.stack([rows[classes == each].mean(0) for each in names])
    inside = means @ basis.T @ basis
    if len(names) == 2:
        weight = inside[1:] - inside[:1]
        bias = -weight @ means.mean(0)
    else:
        weight, bias = inside, -0.5 * (inside**2).sum(1)
    roots = tuple(np.unique(stage.roots).tolist())
    return LinearProbe(
        weight, bias, means, names, stage.label, stage.site, cell, stage.position.spec, "das", about, roots, row_space(basis)
    )


def _name(engine: Engine, site: str, layer: int) -> str:
    """The site's full name. Raises UnknownSite if the letter has no such layer."""
    names = by_layer(engine.sites.per_layer(site)) if site in LETTERS else {layer: engine.sites.resolve(site)}
    if layer not in names:
        raise UnknownSite(f"No layer {layer}. {site} has layers {numbered(names)}.")
    return names[layer]
