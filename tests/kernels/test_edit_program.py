"""The edits of a CUDA pass, as tables of numbers, give the rows that the edits themselves give."""

import torch

from replaylens.engine.model import sites
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.passes.program import EditedRows, EditProgram, ProgramTap, Vectors
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
