"""Edits as a table of numbers have the bits of `PlacedEdit.apply`, in passes that are recorded and in those that are not."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import replaylens as rl
from replaylens.engine.engine import Engine
from replaylens.engine.passes import recorded, runner
from replaylens.engine.passes.edits_cpu import EditTable, TableTap
from replaylens.engine.passes.runner import EditTap
from replaylens.engine.request.placed import PlacedEdit
from replaylens.kernels import cpu_edits
from tests.engine.passes.test_recorded_passes import ENDLESS, recordings
from tests.engine.reference import same_bits
from tests.families import hugging_face
from tests.hostile import divide_everything
from tests.toy_model import random_model

OPS = ("add", "set", "zero", "project_out", "resample", "reweight")


def some_edits(shape: tuple[int, ...], trial: int, generator: torch.Generator) -> tuple[PlacedEdit, ...]:
    draw = lambda *size: torch.randn(*size, generator=generator)  # noqa: E731
    pick = lambda count, most: torch.randint(0, most, (count,), generator=generator).tolist()  # noqa: E731
    found = []
    for number in range(pick(1, 4)[0]):
        op: Any = OPS[pick(1, 6 if len(shape) == 1 else 3)[0]]
        picks = tuple(sorted(set(pick(5, 12)))) if trial % 2 else ()
        value: Tensor | None = draw(*shape) if trial % 3 or not picks else draw(len(picks), *shape)
        if op == "project_out":
            value = torch.linalg.qr(draw(shape[0], 2))[0].t()
        elif op == "resample":
            value = draw(3, *shape)
        heads = (1, 2) if len(shape) > 1 and op != "zero" and number % 2 else ()
        when = draw(*shape) if len(shape) == 1 and trial % 5 == 0 else None
        found.append(
            PlacedEdit(
                "site", op, None if op == "zero" else value, 1, None if trial % 4 else 6, picks, 1.7, 5, heads=heads, when=when,
                above=0.1, keep_norm=trial % 7 == 0 and op != "zero", match_norm=trial % 6 == 0,
                tokens=(1,) if trial % 8 == 0 else (),
            )
        )  # fmt: skip
    return tuple(found)


def both(shape: tuple[int, ...], trial: int) -> tuple[Tensor, Tensor]:
    """A value after the edits of four segments: by torch, and by the table."""
    generator = torch.Generator().manual_seed(trial)
    segments, offsets = [], [0]
    for _ in range(4):
        count, start = (int(torch.randint(1, 9, (1,), generator=generator)) for _ in range(2))
        tokens = torch.randint(0, 3, (count,), generator=generator).tolist()
        segments.append(SimpleNamespace(start=start, tokens=tokens, edits=some_edits(shape, trial, generator), hooks=()))
        offsets.append(offsets[-1] + count)
    batch: Any = SimpleNamespace(segments=segments, offsets=offsets, num_rows=offsets[-1])
    table: Any = SimpleNamespace(sites={"site": SimpleNamespace(shape=shape)})
    x = torch.randn(offsets[-1], *shape[:-1], shape[-1] + 3, generator=generator)[..., : shape[-1]]
    return EditTap(batch, None)("site", x), TableTap(EditTable(batch, table), None)("site", x)


@pytest.mark.parametrize("shape", [(37,), (576,), (4, 10)])
def test_every_kind_of_edit(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    divide_everything(monkeypatch)
    for trial in range(60):
        expected, found = both(shape, trial)
        assert same_bits(expected.contiguous(), found.contiguous()), trial


def test_a_row_without_its_edit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a row takes one edit less, or the next row's."""
    made = cpu_edits.edit_table
    for shift in (slice(1, None), slice(None, -1)):
        monkeypatch.setattr(cpu_edits, "edit_table", lambda sites, rows, s=shift: made([(r[s], e[s]) for r, e in sites], rows))
        assert not all(same_bits(*(x.contiguous() for x in both((37,), trial))) for trial in range(20))


# ---- recorded passes -------------------------------------------------------------------------------------------------


def steered(model: Any) -> tuple[list[Tensor], Engine]:
    """Branches with edits at the same sites, others at others, in passes together and alone; threads change on the way."""
    engine, generator = (
        Engine.load(model) if not isinstance(model, torch.nn.Module) or hasattr(model, "lm_head") else Engine(model),
        torch.Generator().manual_seed(0),
    )
    width, found = engine.config.d_model, list[Tensor]()
    vectors = torch.randn(3, width, generator=generator)
    root = engine.prompt([1, 2, 3, 4, 5], sites="S")
    edits = [
        [rl.Edit("blocks.0.hook_out", "add", vectors[0], positions=slice(0, None))],
        [rl.Edit("blocks.0.hook_out", "set", vectors[1], positions=slice(7, None))],
        [rl.Edit("blocks.1.hook_in", "project_out", vectors[2], positions=slice(0, None), factor=1.0)],
        [rl.Edit("blocks.0.hook_out", "add", vectors[0], positions=slice(0, 3))],
        [],
    ]
    branches = [engine.prompt([1, 2, 3, 4, 5], edits=each, sites="S") for each in edits]
    before = torch.get_num_threads()
    try:
        for count in (1, 3, 2, 1):
            torch.set_num_threads(count)
            engine.generate([*branches, root], 5, sampling=ENDLESS, window=1)
            for branch in branches[:2]:
                branch.generate(4, sampling=ENDLESS, window=1)
    finally:
        torch.set_num_threads(before)
    for branch in (*branches, root):
        found += [torch.tensor(branch.tokens), branch.kv(), *(branch.activations[s] for s in branch.activations.sites())]
    return found, engine


@pytest.mark.parametrize("name", ["toy", "qwen2-moe", "lfm2", "qwen3-next", "deepseek-v3"])
def test_passes_with_edits_are_recorded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    divide_everything(monkeypatch)
    model = random_model() if name == "toy" else hugging_face(name)
    with monkeypatch.context() as patch:
        patch.setattr(recorded, "WORTH", 1 << 30)
        patch.setattr(runner.Runner, "_edited_on", lambda self, batch, tap, *_: EditTap(batch, tap))
        truth, other = steered(model)
    assert not recordings(other).recordings
    found, engine = steered(model)
    assert all(map(same_bits, found, truth))
    shapes = set(recordings(engine).recordings)
    assert {shape.edited for shape in shapes} > {()} and not recordings(engine).unrecordable


def test_a_table_of_another_pass_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a recorded pass reads the edits of the pass that was recorded."""
    truth, _ = steered(random_model())
    run, kept = recorded.WorkList.run, dict[Any, int]()

    def stale(self: Any, bases: Any) -> None:
        run(self, [*bases[:8], *(kept.setdefault(self, base) for base in bases[8:])])

    held: list[Any] = []
    replayed = recorded.RecordedPasses._replayed
    monkeypatch.setattr(recorded.WorkList, "run", stale)
    monkeypatch.setattr(recorded.RecordedPasses, "_replayed", lambda *given: (held.append(given), replayed(*given))[1])
    found, _ = steered(random_model())
    assert not all(map(same_bits, found, truth))


def test_an_edited_pattern_ends_with_its_positions() -> None:
    """Edges of the prompt are cut by Python; what is generated afterwards is recorded."""
    engine = Engine(random_model())
    branch = engine.prompt([1, 2, 3, 4], edits=[rl.Edit("blocks.0.attn.hook_pattern", "zero", keys=[1], positions=[3])])
    branch.generate(6, sampling=ENDLESS, window=1)
    assert recordings(engine).recordings and not recordings(engine).unrecordable
    assert branch.tokens != engine.prompt([1, 2, 3, 4]).generate(6, sampling=ENDLESS, window=1).tokens
