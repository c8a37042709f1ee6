"""Where is the coin's face decodable? A sweep over layers and positions of a dump, from nothing to a report.

python docs/examples/layer_sweep.py OUT [EXAMPLES]
"""

import sys
from pathlib import Path

import replaylens as rl
from replaylens.dumps.maker import make_plan, write_dump


def main(out: Path, examples: int = 300) -> None:
    engine = rl.Engine.load("coin-plain")
    task = rl.tasks.get("coin")(flips=(1, 8))

    # Every token of every example, S, T and C at all layers; a second call finds the dump and goes on.
    plan = make_plan(engine, task, examples, sites="STC")
    dump = write_dump(engine, plan, out / "dump", resume=True, progress=True)
    assert dump is not None

    # Both frames: the face itself, and whether the number of flips is odd. Roots never cross the split.
    report = rl.probes.sweep(
        dump,
        ["face", "parity"],
        sites="STC",
        positions=["step", "query"],
        estimators=["logistic", "mass-mean"],
        engine=engine,  # adds the untrained model as a control
        resume=out / "parts",
        progress=True,
    )
    report.save(out / "report")
    print(report)

    # The best place, as a probe with its provenance: safetensors and JSON, loadable anywhere.
    best = report.best("face", position="query")
    place = {name: best[name] for name in ("site", "layer", "position", "estimator")}
    print("saved", rl.probes.fit_probe(dump, "face", **place).save(out / "face"), best["accuracy"])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
