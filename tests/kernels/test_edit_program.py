"""The edits of a CUDA pass, as tables of numbers, give the rows that the edits themselves give."""

import torch

from replaylens.engine.model import sites
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.passes.edits_cuda import EditedRows, EditProgram, ProgramTap, Vectors
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all

TABLE = sites.table(ModelConfig(2, 32, 4, 2, 8, 48, 61, 64, rotary_dim=8))
Z = "blocks.0.attn.o.hook_in"


def test_edits_of_heads(case, same):
    """Heads, whole rows and unedited rows share the stages of one pass."""
    value = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    lists = [
        [Edit(Z, "zero", heads=[1]), Edit(Z, "add", value[:1], heads=[3], positions=slice(2, None))],
        [Edit(Z, "zero")],
        [],
        [Edit(Z, "set", value[:2], heads=[0, 2]), Edit(Z, "set", value)],
        [Edit(Z, "scale", factor=0.3, heads=[0, 3]), Edit(Z, "scale", factor=-2.0), Edit(Z, "add", value)],
        [Edit(Z, "resample", torch.stack([value, -value]), heads=[2, 1], seed=4)],
    ]
    placed = [place_all(edits, TABLE, 5) for edits in lists]
    program = EditProgram([EditedRows(0, 5, edits) for edits in placed], TABLE)
    x = case.randn(5 * len(lists), 4, 8)
    tap = ProgramTap(program.shape(), len(x), Vectors(case.dtype, case.device))
    tap.load(program, len(x))
    got = tap(Z, x)
    for number, edits in enumerate(placed):
        truth = x[5 * number : 5 * number + 5].clone()
        for edit in edits:
            positions = edit.positions(0, 5)
            truth[positions] = edit.apply(truth[positions], positions)
        same(got[5 * number : 5 * number + 5], truth)
    assert not torch.equal(got[:5], x[:5]), "control: the edits change something"


def test_lengths_and_conditions(case):
    """`keep_norm` and `when` of some rows, beside rows without, as the edits themselves compute them; and row by row."""
    draw = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    site = "blocks.1.hook_in"
    lists = [
        [Edit(site, "add", draw[0], factor=3.0, keep_norm=True)],
        [Edit(site, "add", draw[0], when=draw[1]), Edit(site, "zero", when=draw[2], positions=slice(1, None))],
        [],
        [Edit(site, "scale", factor=1.7, when=draw[0]), Edit(site, "scale", factor=0.6, positions=slice(2, None))],
        [Edit(site, "project_out", draw[2], when=-draw[1]), Edit(site, "add", draw[1], keep_norm=True, when=draw[0])],
    ]
    placed = [place_all(edits, TABLE, 5) for edits in lists]
    x = case.randn(5 * len(lists), 32)
    got = _run(case, [EditedRows(0, 5, edits) for edits in placed], site, x)
    for number, edits in enumerate(placed):
        truth = x[5 * number : 5 * number + 5].clone().cpu().float()
        for edit in edits:
            positions = edit.positions(0, 5)
            truth[positions] = edit.apply(truth[positions], positions)
        mine = got[5 * number : 5 * number + 5]
        case.close(mine, truth.double().to(mine.device), slack=4)
        for row in range(5):
            alone = x[5 * number + row :][:1]
            assert torch.equal(_run(case, [EditedRows(row, 1, edits)], site, alone), mine[row : row + 1])
    assert torch.equal(got[10:15], x[10:15])
    assert not torch.equal(got[:5], x[:5]) and not torch.equal(got[5:10], x[5:10]), "control: the edits change something"


def _run(case, rows, site, x):
    program = EditProgram(rows, TABLE)
    tap = ProgramTap(program.shape(), len(x), Vectors(case.dtype, case.device))
    if program.stages:
        tap.load(program, len(x))
    return tap(site, x) if tap.wants(site) else x
