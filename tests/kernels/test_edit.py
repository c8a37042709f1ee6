import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.model import sites
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.passes.edits_cuda import EditedRows, EditProgram, ProgramTap, Vectors
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all
from replaylens.engine.serving.branch import Branch
from replaylens.kernels import reference
from replaylens.kernels.edit import ADD, KEEP, SET, ZERO, edit_rows, keep_lengths
from tests.kernels.interpreted import DEVICES, served
from tests.toy_model import random_model


def made(case, rows, width, vectors):
    generator = torch.Generator().manual_seed(rows + width)
    codes = torch.randint(0, 4, (rows,), generator=generator, dtype=torch.int32)
    index = torch.randint(0, vectors, (rows,), generator=generator, dtype=torch.int32)
    return case.randn(rows, width), codes, index, case.randn(vectors, width)


@pytest.mark.parametrize("vectors", [1, 5])
def test_every_row_does_what_its_code_says(case, same, vectors):
    rows, width = (129, 3000) if case.gpu else (9, 70)
    x, codes, index, table = made(case, rows, width, vectors)
    got = edit_rows(x, codes.to(x.device), index.to(x.device), table)
    for row in range(rows):
        vector = table[int(index[row])]
        truth = {KEEP: x[row], ADD: x[row] + vector, SET: vector, ZERO: torch.zeros_like(vector)}[int(codes[row])]
        same(got[row], truth)
    same(edit_rows(x[3:4], codes[3:4].to(x.device), index[3:4].to(x.device), table), got[3:4])


def test_a_kept_row_keeps_its_bits(case, same):
    """Adding zero is not enough: it turns -0 into 0."""
    x = -torch.zeros_like(case.randn(2, 16))
    nothing = torch.zeros(2, dtype=torch.int32, device=x.device)
    kept = edit_rows(x, nothing, nothing, torch.zeros_like(x[:1]))
    same(kept.view(torch.uint8), x.view(torch.uint8))
    assert not torch.equal((x + 0).view(torch.uint8), x.view(torch.uint8))


@pytest.mark.parametrize("heads", [1, 4])
def test_lengths_are_kept(case, same, heads):
    """Of single heads too; and a row's bits depend on no other row."""
    rows, width = (129, 4096) if case.gpu else (9, 72)
    before, after = case.randn(rows, width + 8, seed=1)[:, 8:], case.randn(rows, width, seed=2, scale=3.0)
    kept = case.ints(rows, below=2, seed=3)
    got = keep_lengths(before, after, kept, heads)
    case.close(got, reference.keep_lengths(before.double(), after.double(), kept, heads))
    same(got[kept == 0], after[kept == 0])
    for some in (slice(3, 4), slice(2, 8), slice(1, 9, 3)):
        same(keep_lengths(before[some], after[some], kept[some].contiguous(), heads), got[some])
    assert not torch.equal(got, after), "control: some rows are scaled"


def test_errors_say_what_is_wrong(case):
    x, codes, index, table = made(case, 4, 8, 2)
    codes, index = codes.to(x.device), index.to(x.device)
    with pytest.raises(ValueError, match="Expected int32"):
        edit_rows(x, codes.long(), index, table)
    with pytest.raises(ValueError, match="table"):
        edit_rows(x, codes, index, table[:, :4])


# ---- tables of a pass -------------------------------------------------------------------------------------------------
# The edits of a CUDA pass, as tables of numbers, give the rows that the edits themselves give.

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
        [Edit(site, "add", draw[2], factor=-1.3, match_norm=True), Edit(site, "add", draw[0], match_norm=True, when=draw[1])],
        [Edit(site, "add", draw[0], when=draw[1], above=1.5), Edit(site, "zero", when=draw[2], above=-2.0)],
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
    assert not torch.equal(got[25:30], x[25:30])


def _run(case, rows, site, x):
    program = EditProgram(rows, TABLE)
    tap = ProgramTap(program.shape(), len(x), Vectors(case.dtype, case.device))
    if program.stages:
        tap.load(program, len(x))
    return tap(site, x) if tap.wants(site) else x


# ---- engines ----------------------------------------------------------------------------------------------------------
# Edits of an engine whose passes run by the kernels: the CPU's numbers, and the same bits alone and in company.

PATH = [3, 1, 4, 1, 5]
VECTOR = torch.randn(32, generator=torch.Generator().manual_seed(1))
PLANE = torch.randn(32, generator=torch.Generator().manual_seed(3))
EDITS = {
    "keep_norm of a head": [
        Edit("blocks.0.attn.hook_z", "add", VECTOR[:8].expand(1, 8), heads=[2], positions=slice(2, None), keep_norm=True)
    ],
    "when": [Edit("S", "add", VECTOR, layers=[0], factor=3.0, when=PLANE)],
    "edges": [
        Edit("blocks.0.attn.hook_pattern", "mask", positions=slice(2, None), keys=[0, 1], heads=[1, 3]),
        Edit("blocks.0.attn.hook_pattern", "zero", positions=[1, 4], keys=slice(0, 2)),
        Edit("S", "add", VECTOR, layers=[0], positions=0),
    ],
    "weights, and chosen tokens": [
        Edit("blocks.0.attn.hook_pattern", "set", torch.tensor([0.5, 0.0, 2.0]), positions=4, keys=[0, 2, 4], heads=[2]),
        Edit("blocks.0.attn.hook_pattern", "mask", positions=slice(1, None), keys=[0], tokens=[4]),
        Edit("S", "add", VECTOR, layers=[0], tokens=[1]),
    ],
    "several": [
        Edit("S", "add", VECTOR, layers=[0], factor=3.0, keep_norm=True, when=PLANE),
        Edit("S", "zero", layers=[0], positions=[2, 3], when=VECTOR),
        Edit("S", "project_out", PLANE, layers=[0], when=-VECTOR),
    ],
}


@pytest.fixture(scope="module", params=DEVICES)
def engine(request: pytest.FixtureRequest) -> Engine:
    return served(request.param, random_model(num_layers=1))


@pytest.fixture(scope="module")
def host() -> Engine:
    return Engine(random_model(num_layers=1), cache_tokens=1024)


def rows(branch: Branch) -> dict[str, torch.Tensor]:
    return {site: branch.activations[site].cpu() for site in branch.activations.sites()}


def test_edited_branches(engine: Engine, host: Engine) -> None:
    """Alone: the CPU's rows and tokens. As forks, beside each other and a branch without edits: the same bits."""
    alone = [engine.prompt(PATH, sites="S", edits=edits) for edits in EDITS.values()]
    for branch, edits in zip(alone, EDITS.values(), strict=True):
        truth = host.prompt(PATH, sites="S", edits=edits)
        assert branch.certified
        for site, found in rows(branch).items():
            torch.testing.assert_close(found, truth.activations[site], rtol=1e-4, atol=1e-4)
    plain = engine.prompt(PATH, sites="S")
    forks = [plain.fork(edits=edits)[0] for edits in EDITS.values()]
    engine.generate([plain, *forks], 1)
    for fork, branch, edits in zip(forks, alone, EDITS.values(), strict=True):
        assert fork.tokens == host.prompt(PATH, edits=edits).generate(1).tokens
        assert torch.equal(fork.kv(), branch.kv())
        assert all(torch.equal(found, rows(fork)[site]) for site, found in rows(branch).items())
        last = "blocks.0.hook_out"
        assert not torch.equal(rows(plain)[last], rows(branch)[last]), "control: the edit changes something"
    engine.check_integrity()
