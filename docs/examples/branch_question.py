"""Do rejected branches hold the truth or their own text, and does the model use what a probe reads?

python docs/examples/branch_question.py OUT [EXAMPLES]
"""

import sys
from pathlib import Path

import replaylens as rl


def main(out: Path, examples: int = 200) -> None:
    engine = rl.Engine.load("coin-plain")
    chains = rl.tasks.get("coin")(flips=(2, 6), rendering="steps")

    # A smaller model drafts; what it gets wrong is kept, with canonical rows of its own.
    run = engine.replay(chains.examples(examples), sites="S", drafter="model", progress=True)
    rows = rl.probes.ProbeRows.of(run)
    for label in ("face", "implied"):  # the truth, and where a reader who believes the text ends up
        report = rl.probes.transfer(rows, label)
        report.save(out / f"transfer-{label}")
        print(f"{label}:\n{report}\n")

    # After a forced lie in the chain of thought: text or truth?
    report = rl.probes.text_or_truth(engine, chains.examples(range(examples, 2 * examples)))
    report.save(out / "text-or-truth")
    print(report, "\n")

    # A direction that only correlates with the answer does nothing when rows are moved along it.
    questions = rl.tasks.get("coin")(flips=(2, 6))
    seen = rl.probes.ProbeRows.of(engine.replay(questions.examples(examples), sites="S", drafter="lens"))
    fresh = [e for e in questions.examples(range(examples, 2 * examples)) if e.root not in set(seen.roots)]
    for estimator in ("mass-mean", "logistic"):
        probe = rl.probes.fit_probe(seen, "face", layer=3, position="query", estimator=estimator)
        report = rl.probes.steer(engine, probe, fresh[:50], untrained=rl.probes.placebo_probes(seen, probe))
        report.save(out / f"steer-{estimator}")
        print(report, "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
