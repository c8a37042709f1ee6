"""Dumps of texts that are joined: the coins of equal numbers must not be equal in all parts."""

from pathlib import Path

from replaylens.engine.dump.maker import make_plan, write_dump
from replaylens.engine.engine import Engine
from replaylens.probes.rows import ProbeRows


def test_coins_of_parts_are_independent(tmp_path: Path) -> None:
    """A number stands for something, such as the fork of a rollout: `shuffled` must not follow from it."""
    engine = Engine.load("coin-plain")
    task = engine.texts(["A coin's state is heads.", "A coin's state is tails.", "A coin's state is heads. Alice flips."])
    dump = write_dump(
        engine, make_plan(engine, task, 3, sites=["blocks.0.hook_in"], max_new=0, positions="last"), tmp_path / "d"
    )
    joined = ProbeRows.join(**{f"c{i}": ProbeRows.of(dump) for i in range(40)})
    alone = ProbeRows.of(dump).frame["shuffled"].to_numpy().astype(int)
    turned = joined.frame["shuffled"].to_numpy().reshape(40, 3).astype(int) ^ alone
    assert (turned == turned[:, :1]).all(), "a part is turned over as a whole"
    assert 8 <= turned[:, 0].sum() <= 32, "about half of them are"
