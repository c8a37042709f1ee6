"""Every probe of docs/notes/coin_plain.md on coin-plain, from its dumps to its verdicts.

python docs/examples/coin_probes.py OUT [SCALE [QUESTION ...]]

SCALE multiplies the number of examples; names choose questions. A second call finds the dumps and the finished parts of sweeps
and goes on. OUT/NAME holds the report of each question; what is printed are their findings.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import replaylens as rl
from replaylens.dumps.maker import make_plan, write_dump
from replaylens.dumps.reader import Dump
from replaylens.probes.intervals import mean_over_groups
from replaylens.probes.report import Report

DUMPS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "coin": (1000, dict(flips=(1, 8)), dict(sites="STC")),
    "eight": (600, dict(flips=8), dict(sites="S", rejected=False)),
    "steps": (400, dict(flips=(2, 8), rendering="steps"), dict(sites="S", drafter="model")),
    "long": (600, dict(flips=(7, 12)), dict(sites="S", rejected=False)),
    "drafts": (150, dict(flips=(2, 8), rendering="steps"), dict(sites="SZ", drafter="lens")),
}
"""name -> (examples, knobs of the task, options of the dump)"""


class CoinProbes:
    """The dumps, made when first asked for, and the questions about them."""

    def __init__(self, out: Path, scale: float) -> None:
        self.out, self.scale = out, scale
        self.engine = rl.Engine.load("coin-plain")
        self.coin = rl.tasks.get("coin")

    def dump(self, name: str) -> Dump:
        count, knobs, options = DUMPS[name]
        plan = make_plan(self.engine, self.coin(**knobs), self._some(count), **options)
        dump = write_dump(self.engine, plan, self.out / "dumps" / name, resume=True)
        assert dump is not None
        return dump

    def _some(self, count: int) -> int:
        return max(20, round(self.scale * count))

    # ---- where a label can be read ------------------------------------------------------------------------------

    def sweep(self) -> Report:
        """Face and parity at every site, with all controls."""
        where: dict[str, Any] = dict(sites="STC", positions=("step", "query"), resume=self.out / "parts")
        return rl.probes.sweep(self.dump("coin"), ["face", "parity"], engine=self.engine, code_length=True, **where)

    def places(self) -> Report:
        """Eight actors: every step and the query."""
        positions = (*(f"step:{n}" for n in range(1, 9)), "query")
        return rl.probes.sweep(self.dump("eight"), ["face", "parity"], sites="S", positions=positions, controls=False)

    def length(self) -> Report:
        """Fitted on up to five actors, tested on more."""
        return rl.probes.sweep(self.dump("coin"), "face", sites="S", split="length:5", controls=False)

    def depth(self) -> Report:
        """Linear probes and MLPs, with their selectivity."""
        where: dict[str, Any] = dict(sites="S", layers=[2, 3], positions=("step:3", "query"))
        return rl.probes.sweep(self.dump("coin"), "face", estimators=("logistic", "mlp"), **where)

    # ---- questions about branches -------------------------------------------------------------------------------

    def implied(self) -> Report:
        return rl.probes.transfer(self.dump("steps"), "implied")

    def face(self) -> Report:
        return rl.probes.transfer(self.dump("steps"), "face")

    def text(self) -> Report:
        examples = self.coin(flips=(3, 6), rendering="steps").examples(self._some(500))
        return rl.probes.text_or_truth(self.engine, examples)

    def wrong(self) -> Report:
        return rl.probes.viable_branch(self.dump("long"))

    def outcome(self) -> Report:
        return rl.probes.outcome_at_fork(self.dump("coin"))

    def judge(self) -> Report:
        return rl.probes.judge(self.dump("drafts"), draft_layer=2)

    def contrast(self) -> Report:
        """CCS on pairs of forked answers."""
        count = self._some(400)
        fit = count * 5 // 8
        examples = self.coin(flips=(1, 8)).examples(count)
        forced = [rl.probes.forced_rows(self.engine, examples, [word] * count, sites="S") for word in (" heads", " tails")]
        answered = [rows.at("query+1") for rows in forced]
        truth = forced[0].at("query").target("face").values == "heads"
        lines = []
        for layer in range(5):
            pairs = np.hstack([rows.matrix("S", layer) for rows in answered])
            said = rl.probes.CcsProbe().fit(pairs[:fit], truth[:fit]).predict(pairs[fit:])
            found = mean_over_groups((said == truth[fit:]).astype(float), answered[0].roots[fit:])
            lines.append(dict(what=f"S{layer}", metric="accuracy", accuracy=found.value, low=found.low, high=found.high))
        said_so = [f"CCS at {line['what']}: {line['accuracy']:.3f} [{line['low']:.3f}, {line['high']:.3f}]." for line in lines]
        return Report("contrast", lines, {}, {}, [], said_so)

    # ---- causal tests -------------------------------------------------------------------------------------------

    def steering(self) -> Report:
        """Every estimator's direction at S1, S2 and S3, with placebos."""
        dump, lines, said = self.dump("coin"), [], []
        for layer in (1, 2, 3):
            for estimator in ("mass-mean", "logistic", "ridge", "lda", "mass-mean-whitened"):
                report = self._causal(rl.probes.steer, dump, "face", layer, estimator)
                lines += [line | {"layer": layer, "estimator": estimator} for line in report.lines]
                said += [f"S{layer}, {estimator}: {finding}" for finding in report.findings]
        return Report("steering", lines, {}, {}, [], said)

    def _causal(self, test: Callable[..., Report], dump: Dump, label: str, layer: int, estimator: str) -> Report:
        probe = rl.probes.fit_probe(dump, label, layer=layer, position="query", estimator=estimator)
        examples = dump.manifest.plan.make_task().examples(range(10_000, 10_000 + self._some(200)))
        return test(self.engine, probe, examples, untrained=rl.probes.placebo_probes(dump, probe))

    def others(self) -> Report:
        """Activation patching and ablation along mass-mean and logistic directions, and steering along the parity's."""
        dump, lines, said = self.dump("coin"), [], []
        tests = [(rl.probes.interchange, "face", 3), (rl.probes.ablate, "face", 3), (rl.probes.steer, "parity", 2)]
        for test, label, layer in [*tests, (rl.probes.steer, "parity", 3)]:
            for estimator in ("mass-mean", "logistic"):
                report = self._causal(test, dump, label, layer, estimator)
                name = f"{test.__name__}, {label} at S{layer}, {estimator}"
                lines += [line | {"what": f"{name}: {line['what']}"} for line in report.lines]
                said += [f"{name}: {finding}" for finding in report.findings]
        return Report("causal", lines, {}, {}, [], said)

    def reach(self) -> Report:
        examples = self.coin(flips=6, seed=5).examples(self._some(60))
        return rl.probes.steering_reach(self.engine, self.dump("coin"), examples, "face", layers=[1, 2, 3])


READING = ("sweep", "places", "length", "depth")
CAUSAL = ("steering", "others", "reach")
BRANCHES = ("implied", "face", "text", "wrong", "outcome", "judge", "contrast")


def main(out: Path, scale: float = 1.0, *names: str) -> None:
    probes = CoinProbes(out, scale)
    for name in names or (*READING, *CAUSAL, *BRANCHES):
        report: Report = getattr(probes, name)()
        report.save(out / name, figures=False)
        print(f"## {name}\n{report}\n", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]) if sys.argv[2:] else 1.0, *sys.argv[3:])
