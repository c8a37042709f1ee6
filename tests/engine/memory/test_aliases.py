"""What an engine returns is the caller's own: changing it changes nothing that is committed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaylens.engine.dump.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.request.capture import Recording
from replaylens.engine.serving.branch import Branch
from replaylens.tasks import get
from tests.engine.reference import same_bits
from tests.toy_model import engine

SITE = "blocks.1.hook_in"


def captured(subject: Engine) -> Branch:
    """A branch whose rows are in one chunk, the case in which an alias shows."""
    return subject.prompt([1, 2, 3, 4, 5], sites="STCZ", keep_rejected=True)


def spoil(x: Tensor) -> None:
    """Centre the rows in place, as is usual before fitting a probe."""
    x -= x.float().mean(0).to(x.dtype) + 1


def test_rows_changed_in_place_change_no_branch() -> None:
    subject = engine()
    branch = captured(subject)
    (fork,) = branch.fork()
    for site in branch.activations:
        truth = branch.activations[site].clone()
        spoil(branch.activations[site])
        assert same_bits(branch.activations[site], truth) and same_bits(fork.activations[site], truth), site
    for site, rows in branch.activations.items():
        truth = rows.clone()
        spoil(rows)
        assert same_bits(branch.activations[site], truth), site
    fresh = captured(engine())
    grown = fork.generate(4, drafter="lens").activations
    truths = fresh.generate(4, drafter="lens").activations
    assert all(same_bits(grown[site], truths[site]) for site in truths)


def test_rows_of_a_site_do_not_keep_the_other_sites_in_memory() -> None:
    branch = captured(engine())
    rows = branch.activations[SITE]
    assert rows.untyped_storage().nbytes() == rows.numel() * rows.element_size()


def test_the_checker_finds_an_alias(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: rows returned without a copy are changed by their reader."""
    monkeypatch.setattr(Recording, "__getitem__", Recording.peek)
    branch = captured(engine())
    truth = branch.activations[SITE].clone()
    spoil(branch.activations[SITE])
    assert not torch.equal(branch.activations[SITE], truth)


def test_kv_changed_in_place_changes_no_branch() -> None:
    branch = captured(engine())
    truth = branch.kv().clone()
    branch.kv().zero_()
    assert torch.equal(branch.kv(), truth)
    assert branch.generate(5).tokens == captured(engine()).generate(5).tokens


def test_rejected_paths_are_copies() -> None:
    subject = engine()
    branch = captured(subject).generate(12, drafter="tree", window=4, keep_pages=True)
    assert branch.rejected
    for other in branch.rejected:
        rows, kv = other.activations[SITE].clone(), other.kv().clone()
        spoil(other.activations[SITE])
        spoil(other.kv())
        assert torch.equal(other.activations[SITE], rows) and torch.equal(other.kv(), kv)


def test_results_of_a_run_and_its_dump_are_copies(tmp_path: Any) -> None:
    """A run centred in place is saved, and read back, as it was computed."""
    subject = Engine.load("coin-plain")
    examples = get("coin")(flips=2).examples(3)
    run, untouched = (subject.replay(examples, sites="SZ", drafter="lens", window=4) for _ in range(2))
    for result in run:
        for recording in [result.activations, *(path.activations for path in result.rejected)]:
            for site in recording:
                spoil(recording[site])
    dump = run.save(tmp_path / "spoilt")
    assert dump.digest == untouched.save(tmp_path / "untouched").digest
    reads: dict[str, Callable[[Dump], Any]] = {
        "to_torch": lambda d: d.to_torch("S", 1),
        "to_torch of some": lambda d: d.where(accepted=True).to_torch("S", 1),
        "to_numpy": lambda d: d.to_numpy("S", 1),
        "X": lambda d: d.matrix("S", 1, label="face").X,
        "y": lambda d: d.matrix("S", 1, label="face").y,
        "groups": lambda d: d.matrix("S", 1, label="face").groups,
        "stream": lambda d: next(iter(d.stream("S", 1)))[0],
        "cache": lambda d: d.to_activation_cache(0)["blocks.1.hook_in"],
        "index": lambda d: d.index["position"].to_numpy(copy=False),
        "stream index": lambda d: next(iter(d.stream("S", 1)))[1]["position"].to_numpy(copy=False),
    }
    for name, read in reads.items():
        first = read(dump)
        truth = first.clone() if isinstance(first, Tensor) else first.copy()
        try:
            first[:] = first[::-1].copy() if not isinstance(first, Tensor) else first.flip(0) + 1
        except ValueError:
            continue  # pandas gives out read-only arrays
        again = read(dump)
        same = torch.equal(again, truth) if isinstance(again, Tensor) else (again == truth).all()
        assert same, name
    assert Dump.open(tmp_path / "spoilt").digest == dump.digest


def test_thoughts_are_copies() -> None:
    """A state that a reader zeroes is still passed to the next chunk as it was thought."""
    subject, fresh = (Engine.load("coin-thinking") for _ in range(2))
    text = "A coin's state is heads. Alice flips, then Bob does not flip."
    branch, truth = subject.prompt(text, sites="STCZ"), fresh.prompt(text, sites="STCZ")
    assert any(not thought.empty for thought in branch.thoughts.chunks) and branch.thoughts.states
    for thought in branch.thoughts.chunks:
        for x in (thought.hidden, thought.compressed, thought.state, *thought.distribution.values()):
            x.zero_()
    for edit in branch.thoughts.states.values():
        assert edit.value is not None
        edit.value.zero_()
    more = ", then Carol flips."
    mine, yours = branch.extend(more), truth.extend(more)
    assert [t.tokens for t in mine.thoughts.chunks] == [t.tokens for t in yours.thoughts.chunks]
    assert torch.equal(mine.kv(), yours.kv())
    for site in yours.activations:
        assert same_bits(mine.activations[site], yours.activations[site]), site
    for site in truth.activations:
        assert same_bits(branch.activations[site], truth.activations[site]), site
