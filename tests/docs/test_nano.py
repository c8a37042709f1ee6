"""docs/nano.py beyond the contract: its numbers are right, they are the engine's, and its demonstration says so."""

import runpy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from docs import nano
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import ModelConfig
from tests.docs.blocks import ROOT
from tests.engine.reference import random_decoder, same_bits
from tests.nano import CONFIG, MODEL

PATH = torch.randint(97, (75,), generator=torch.Generator().manual_seed(2)).tolist()


def reference(model: nano.Model, path: list[int]) -> Tensor:
    """Log-probabilities [positions, vocab] in float64: all positions at once, with the library's attention and no cache."""
    c, w = model.config, {name: weight.double() for name, weight in model.weights.items()}
    rms = lambda x, name: F.rms_norm(x, (c.d_model,), w[name], eps=1e-5)  # noqa: E731
    angle = torch.arange(len(path)).double()[:, None] / 1e4 ** (torch.arange(0, c.d_head, 2).double() / c.d_head)
    turn = torch.polar(torch.ones_like(angle), angle)  # rotation as a product of complex numbers

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        turned = torch.complex(a, b) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    x = w["embed"][path]
    for block in (f"blocks.{layer}." for layer in range(c.num_layers)):
        qkv = (rms(x, block + "ln1.weight") @ w[block + "attn.qkv.weight"]).view(len(path), -1, c.d_head).transpose(0, 1)
        q, k, v = qkv.split([c.num_heads, c.num_kv_heads, c.num_kv_heads])
        z = F.scaled_dot_product_attention(rotated(q)[None], rotated(k)[None], v[None], is_causal=True, enable_gqa=True)
        x = x + z[0].transpose(0, 1).flatten(1) @ w[block + "attn.o.weight"]
        gate, up = (rms(x, block + "ln2.weight") @ w[block + "mlp.up.weight"]).chunk(2, dim=-1)
        x = x + (F.silu(gate) * up) @ w[block + "mlp.down.weight"]
    return (rms(x, "ln_final.weight") @ w["unembed.weight"]).log_softmax(-1)


def test_log_probs_are_those_of_float64() -> None:
    got = nano.Engine(MODEL).prompt(PATH).activations("Z")[:, -1]
    assert torch.allclose(got.double(), reference(MODEL, PATH), rtol=0, atol=2e-5)


def test_on_the_weights_of_an_engine_it_computes_what_the_engine_does() -> None:
    """S, T, C, KV and the logit lens at every layer, and the tokens that follow."""
    shape = {name: getattr(CONFIG, name) for name in CONFIG.__dataclass_fields__}
    decoder = random_decoder(ModelConfig(**shape, rotary_dim=CONFIG.d_head, tied_embeddings=False))
    engine = Engine(decoder).prompt(PATH, sites="STCZ", full=True).generate(8, final=True)
    small = nano.Model(CONFIG, {name: weight.detach() for name, weight in decoder.state_dict().items()})
    branch = nano.Engine(small).prompt(PATH).generate(8)
    assert branch.tokens == engine.tokens
    table, rows = engine.engine.sites, engine.activations
    pairs = {site: torch.stack([rows[name] for name in table.letter(site)], dim=1) for site in "STC"}
    pairs["Z"] = rows["Z.full"]
    for site, theirs in pairs.items():
        assert torch.allclose(branch.activations(site), theirs, rtol=0, atol=1e-4), site
    assert torch.allclose(branch.kv(), engine.kv(), rtol=0, atol=1e-4)


def test_an_edit_replaces_or_adds_a_vector_at_its_place_alone() -> None:
    vector = torch.linspace(-1, 1, CONFIG.d_model)
    plain, added, put = (
        nano.Engine(MODEL).prompt(PATH[:20], edits)
        for edits in ([], [nano.Edit("T", 0, 5, vector)], [nano.Edit("S", 1, 5, vector, replace=True)])
    )
    before = plain.activations("T")[5, 0]
    assert torch.equal(added.activations("T")[5, 0], before + vector)
    assert torch.equal(put.activations("S")[5, 1], vector)
    for edited in (added, put):
        assert same_bits(edited.activations("Z")[:5], plain.activations("Z")[:5])
        assert not torch.equal(edited.activations("Z")[6:, -1], plain.activations("Z")[6:, -1])


def test_released_rows_come_back_with_the_same_bits() -> None:
    branch = nano.Engine(MODEL, page_size=4).prompt(PATH[:9]).generate(6)
    kv, rows = branch.kv(), branch.activations("S")
    branch.release()
    assert sum(branch.engine.pool.owners) == 0 and branch.rows == []
    assert same_bits(branch.kv(), kv) and same_bits(branch.activations("S"), rows)


def test_a_full_pool_is_an_error_and_leaves_branches_usable() -> None:
    engine = nano.Engine(MODEL, num_pages=4, page_size=4)
    one, other = engine.prompt(PATH[:9]).generate(1), engine.prompt(PATH[:9])
    with pytest.raises(RuntimeError, match="All 4 pages are in use"):
        other.generate(1)
    kv = one.kv()
    one.release()
    assert same_bits(other.generate(1).kv(), kv)


def test_bad_calls_are_refused() -> None:
    branch = nano.Engine(MODEL).prompt(PATH[:5])
    for edit in (nano.Edit("Z", 0, 1, torch.ones(CONFIG.d_model)), nano.Edit("S", 0, -1, torch.ones(CONFIG.d_model))):
        with pytest.raises(ValueError, match="A site is S, T or C"):
            branch.fork(edits=[edit])
    for bad in (0, 6):
        with pytest.raises(ValueError, match="Give 1 to 5"):
            branch.rollback(bad)
        with pytest.raises(ValueError, match="Give 1 to 5"):
            branch.fork(at=bad)


def test_the_doctor_refuses_a_product_that_depends_on_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a product that rounds the rows of a tile differently."""
    scaled = torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, w: scaled(x, w) * (1 + torch.arange(len(x))[:, None] * 1e-6))
    with pytest.raises(RuntimeError, match="depends on a row's index"):
        nano.check_tiles(MODEL)


def test_the_demonstration(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "docs" / "nano.py"), run_name="__main__")
    said = capsys.readouterr().out.splitlines()
    assert said[-2].endswith(": 0 differing bits.")
    assert not said[-1].endswith(": 0 differing bits.") and said[-1].endswith("differing bits.")
    drafts = [line for line in said if "drafts accepted" in line]
    assert len(drafts) == 3 and not any(" 0 drafts" in line or " 0 rejected" in line for line in drafts)


def test_it_stays_one_short_file_on_torch_alone() -> None:
    source = (ROOT / "docs" / "nano.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 400
    imported = [line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert set(imported) == {"__future__", "collections", "dataclasses", "math", "typing", "torch"}
