"""docs/nano.py beyond the contract: its numbers are right, they are the engine's, and its demonstration says so."""

import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import replaylens as rl
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


@pytest.mark.slow
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


# ---- smollm2 script --------------------------------------------------------------------------------------------------
# The SmolLM2 script on the embedded model: the same functions with small sizes and no download.


@pytest.fixture(scope="module")
def script() -> Any:
    """The script as a module, with the layers of the embedded model."""
    spec = importlib.util.spec_from_file_location("smollm2_script", ROOT / "docs" / "examples" / "smollm2.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LAYERS = (1, 3)
    module.STREAM = ["blocks.1.hook_in", "blocks.3.hook_in"]
    module.SITES = [*module.STREAM, "blocks.1.mlp.hook_out"]
    return module


@pytest.fixture(scope="module")
def engine() -> rl.Engine:
    return rl.Engine.load("coin-plain")


def test_openings_part_at_the_lie(script: Any) -> None:
    """The truthful opening is the chain's own. In the lying one, truth and text differ, and only the first face changes."""
    for example in rl.tasks.get("coin")(rendering="steps", flips=(2, 4)).examples(20):
        true, lied = script.opening(example, False), script.opening(example, True)
        assert example.completion.startswith(true) and true.endswith(":")
        labels = example.read(lied).labels_after(len(example.prompt + lied))
        assert labels["face"] != labels["implied"] and {labels["face"], labels["implied"]} == {"heads", "tails"}
        assert sum(a != b for a, b in zip(true.split(), lied.split(), strict=True)) == 1


def test_questions_are_balanced(script: Any) -> None:
    asked = script.balanced(script.questions("turn", 3), 10)
    assert [e.answer for e in asked].count(" yes") == 5 and len({e.root for e in asked}) == 10
    shown = script.shots("turn")
    assert shown.count(" yes.") == shown.count(" no.") == 2 and " turns the coin over." in shown and "flip" not in shown


def test_interval(script: Any) -> None:
    assert script.row(0.5, 100) == "50.0% | 40% to 60%" and script.row(1.0, 10).startswith("100.0% | 72% to 100%")


@pytest.mark.slow
def test_forks_on_a_model_that_follows_the_text(script: Any, engine: rl.Engine, tmp_path: Path) -> None:
    """Known outcomes: the embedded model states the right face on truthful forks, and believes the lie on the others."""
    report = script.forks(engine, 40, tmp_path, print)
    found = {line["what"]: line["accuracy"] for line in report.lines}
    assert found["truthful fork: the model's next face is right"] == 1.0
    assert found["lied fork: the model's next face follows the text"] > 0.7
    assert (tmp_path / "forks" / "report.json").is_file()


def test_probes_of_sites_by_name_have_a_page(script: Any, engine: rl.Engine, tmp_path: Path) -> None:
    """A site probed by name, without a layer, is drawn too."""
    run = engine.replay(rl.tasks.get("coin")(flips=(1, 3)).examples(30), sites=script.STREAM)
    report = rl.probes.sweep(run, "face", sites=script.STREAM, positions="query", estimators="ridge")
    page = script.ReportPage(None, (report,)).save(tmp_path / "page.html").read_text()
    assert all(site in page for site in script.STREAM)


def test_dump_and_lens(script: Any, engine: rl.Engine, tmp_path: Path) -> None:
    """A dump with forced answers is written and verified. Its Z prefers the right answer at the end, not at the start."""
    said: list[str] = []
    task = script.questions("flip", (1, 4))  # the verb it was trained on, with the same stories
    dump = script.write(engine, task, 8, tmp_path / "look", said.append, sites="SZ", drafter="lens", targets=script.ANSWERS)
    assert dump.digest in said[0] and "verified: " in said[0]
    assert dump.to_numpy("Z.targets").shape[1:] == (5, 2)
    script.lens(engine, dump, said.append)
    assert re.search(r"\(8 prompts\): 1: \d+%, 3: \d+%, 4: 100%", said[-1])  # the model answers without error
