"""The doctor certifies canonical arithmetic, names whatever is not, and admits no model without a certificate."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from replaylens import cli
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.lens import lens
from replaylens.engine.model import loading
from replaylens.engine.model.config import Activation, ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Linear
from replaylens.engine.passes import cpu
from replaylens.engine.passes.batch import KV_BLOCK
from replaylens.engine.passes.products import Allowed, Certificate, Finding, Products
from replaylens.engine.proof import certificates, doctor
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import Rows
from tests.engine.reference import decoder, random_decoder
from tests.families import NAMES

FAMILY = "llama"
SHAPES = {"llama": {(32, 64), (32, 32), (32, 128), (64, 32), (32, 97)}}


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No certificate in the process, and an empty folder for certificates on disk."""
    monkeypatch.setattr(certificates, "_EXAMINED", {})
    monkeypatch.setattr(certificates, "cache_folder", lambda: tmp_path)
    return tmp_path / "certificates"


# ---- canonical arithmetic is certified -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examined() -> Certificate:
    """Of `FAMILY`, examined once."""
    return doctor.examine(decoder(FAMILY))


WIRED_ALIKE = ("llama3", "mistral", "qwen2", "neox-sequential", "gemma2")
"""families whose operations others have, too"""


@pytest.mark.parametrize("family", [pytest.param(n, marks=pytest.mark.slow) if n in WIRED_ALIKE else n for n in NAMES])
def test_every_family_is_certified_here(family: str) -> None:
    certificate = doctor.examine(decoder(family))
    assert certificate.certified and certificate.failures == [] and certificate.has_teeth
    assert doctor.require(certificate) is certificate
    assert all(counts[-1] == 16 and [*counts] == sorted(counts, reverse=True) for counts in certificate.row_counts.values())
    assert 16 in certificate.query_rows and [*certificate.query_rows] == sorted(certificate.query_rows)


def test_every_product_norm_and_activation_of_the_model_is_examined(examined: Certificate) -> None:
    linears = {tuple(m.weight.shape) for m in decoder(FAMILY).modules() if isinstance(m, Linear)}
    assert set(examined.row_counts) == SHAPES[FAMILY] == linears
    ops = {finding.op for finding in examined.findings}
    assert {"attention", "activation silu", "log-softmax", "lens statistics", "rotary", "unembed"} <= ops
    assert any(op.startswith("rms norm") for op in ops)


def test_a_model_in_another_dtype_is_refused() -> None:
    model = random_decoder(decoder("llama").config).to(torch.bfloat16)
    with pytest.raises(BadRequest, match=r"holds torch\.bfloat16, and the CPU engine computes in torch\.float32"):
        Engine(model)
    assert Engine.load(model).model.embed.dtype is torch.float32


def test_a_model_that_can_still_be_trained_is_examined_all_the_same() -> None:
    model = loading.load(decoder(FAMILY), torch.float32).requires_grad_(True)
    assert doctor.examine(model).certified


# ---- other arithmetic is found and named -----------------------------------------------------------------------------

Plant = Callable[[pytest.MonkeyPatch], str]
"""replaces the right op by a wrong one and returns the name that the doctor must give"""


def silu_as_a_product_on_odd_row_counts(patch: pytest.MonkeyPatch) -> str:
    right = cpu.activate

    def wrong(x: Tensor, kind: Activation) -> Tensor:
        return x * (1 / (1 + (-x).exp())) if len(x) % 2 else right(x, kind)

    patch.setattr(cpu, "activate", wrong)
    return r"activation silu \[64\]: 'row alone'"


def product_of_single_rows(patch: pytest.MonkeyPatch) -> str:
    """Multiplies row by row if all rows of the tile but the first are zero."""
    right = Products.linear

    def wrong(self: Products, x: Tensor, linear: Linear) -> Tensor:
        if x[1:].any():
            return right(self, x, linear)
        return torch.stack([torch.mv(linear.weight.t(), row) for row in x])

    patch.setattr(Products, "linear", wrong)
    return r"blocks.0.attn.qkv \[32, 64\]: 'row alone in a zero-padded tile'"


def product_split_in_k(rows: int) -> Plant:
    """Sums one half of the terms, then the other, at one row count."""

    def plant(patch: pytest.MonkeyPatch) -> str:
        right = Products.linear

        def wrong(self: Products, x: Tensor, linear: Linear) -> Tensor:
            if len(x) != rows or linear.weight.shape[0] != 64:
                return right(self, x, linear)
            return x[:, :32] @ linear.weight[:32] + x[:, 32:] @ linear.weight[32:]

        patch.setattr(Products, "linear", wrong)
        check = {16: "row at another offset of the tile", 32: "any number of rows", 48: "any number of rows"}[rows]
        return rf"blocks.0.mlp.down \[64, 32\]: '{check}'"

    return plant


def unembedding_by_place(patch: pytest.MonkeyPatch) -> str:
    right = Products.unembed

    def wrong(self: Products, x: Tensor, table: Tensor) -> Tensor:
        out = right(self, x, table)
        out[:8] = torch.stack([torch.mv(table, row) for row in x[:8]])
        return out

    patch.setattr(Products, "unembed", wrong)
    return r"unembed \[32, 97\]: 'row at another offset of the tile'"


def attention_blocks_by_length(patch: pytest.MonkeyPatch) -> str:
    right = cpu.attend_blocks

    def wrong(q: Tensor, keys: Tensor, values: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(cpu, "KV_BLOCK", 128 if keys.shape[1] > 192 else 64)
            return right(q, keys, values, *rest)  # type: ignore[arg-type]

    patch.setattr(cpu, "attend_blocks", wrong)
    return r"attention 4 heads of 8, 2 kv heads: 'more padding keys'"


def attention_by_neighbours(patch: pytest.MonkeyPatch) -> str:
    right = cpu.attend_blocks

    def wrong(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        out, pattern = right(q, *rest)  # type: ignore[arg-type]
        return (torch.nextafter(out, out + 1) if len(q) > 1 else out), pattern

    patch.setattr(cpu, "attend_blocks", wrong)
    return r"attention 4 heads of 8, 2 kv heads: 'beside other sequences'"


def norm_over_a_batch(patch: pytest.MonkeyPatch) -> str:
    right = cpu.CpuOps.norm
    patch.setattr(cpu.CpuOps, "norm", lambda self, x, norm: right(self, x, norm) * (1 + x.abs().amax() * 1e-6))
    return r"rms norm \(ln_final\) \[32\]: 'row alone'"


def statistics_of_a_whole_batch(patch: pytest.MonkeyPatch) -> str:
    right = lens.statistics

    def wrong(spec: LensSpec, log_p: Tensor, emitted: list[int]) -> Rows:
        read = right(spec, log_p, emitted)
        return read | {"Z.entropy": read["Z.entropy"] + log_p.mean() * 1e-6}

    patch.setattr(lens, "statistics", wrong)
    return r"lens statistics \[3, 97\]: 'row alone'"


PLANTS: dict[str, Plant] = {
    "silu as a product on odd row counts": silu_as_a_product_on_odd_row_counts,
    "product of single rows": product_of_single_rows,
    "product split in K at 16 rows": product_split_in_k(16),
    "product split in K at 32 rows": product_split_in_k(32),
    "product split in K at 48 rows": product_split_in_k(48),
    "unembedding by place": unembedding_by_place,
    "attention blocks by length": attention_blocks_by_length,
    "attention by neighbours": attention_by_neighbours,
    "norm over a batch": norm_over_a_batch,
    "statistics of a whole batch": statistics_of_a_whole_batch,
}


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_op_is_found_and_named_and_no_engine_runs_on_it(
    plant: str, monkeypatch: pytest.MonkeyPatch, no_cache: Path
) -> None:
    said = PLANTS[plant](monkeypatch)
    certificate = doctor.examine(decoder(FAMILY))
    assert not certificate.certified
    with pytest.raises(NotCertified, match=said):
        doctor.require(certificate)
    monkeypatch.setattr(doctor, "examine", lambda model: certificate)  # it would find the same
    with pytest.raises(NotCertified, match=said) as refused:
        Engine(decoder(FAMILY))
    assert "on one thread" in str(refused.value) and "MKL_CBWR=AVX2,STRICT" in str(refused.value)  # and what to try
    assert not no_cache.exists()  # no certificate is stored


def test_a_comparison_without_teeth_proves_nothing(
    examined: Certificate, monkeypatch: pytest.MonkeyPatch, no_cache: Path
) -> None:
    """If even the negative controls agree, the doctor must not certify."""
    blunt = replace(examined, findings=tuple(replace(f, equal=True) for f in examined.findings))
    assert blunt.failures == [] and not blunt.has_teeth and not blunt.certified
    monkeypatch.setattr(doctor, "examine", lambda model: blunt)
    with pytest.raises(NotCertified, match="No negative control differed"):
        Engine(decoder(FAMILY))


def test_row_counts_that_give_other_bits_are_left_out_and_not_used(monkeypatch: pytest.MonkeyPatch, no_cache: Path) -> None:
    """If a library splits K from 256 rows on, smaller row counts are still used and larger ones are not."""
    right, used = torch.mm, set()

    def mm(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
        used.add(len(a))
        if len(a) < 256:
            return right(a, b, out=out)
        half = a.shape[1] // 2
        return torch.add(right(a[:, :half], b[:half]), right(a[:, half:], b[half:]), out=out)

    monkeypatch.setattr(torch, "mm", mm)
    engine = Engine(decoder(FAMILY), max_rows=512)
    assert set(engine.certificate.row_counts.values()) == {(128, 64, 32, 16)}
    used.clear()
    engine.prompts([[i % 97 for i in range(n)] for n in (200, 190)])
    assert 128 in used and max(used) == 128


def test_query_rows_that_give_other_bits_are_left_out(examined: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu.attend_blocks

    def wrong(q: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        out, pattern = right(q, *rest)  # type: ignore[arg-type]
        return (torch.nextafter(out, out + 1) if q.shape[1] in (1, 64) else out), pattern

    before = examined.query_rows
    monkeypatch.setattr(cpu, "attend_blocks", wrong)
    certificate = doctor.examine(decoder(FAMILY))
    assert certificate.certified and {*before} - {*certificate.query_rows} == {*before} & {1, 64}


def test_query_rows_that_give_other_bits_with_few_keys_are_left_out(
    examined: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library may choose its kernel by the number of keys: here by whether they are one block."""
    right = cpu.attend_blocks

    def wrong(q: Tensor, keys: Tensor, *rest: object) -> tuple[Tensor, Tensor]:
        out, pattern = right(q, keys, *rest)  # type: ignore[arg-type]
        few = q.shape[1] == 4 and keys.shape[1] == q.shape[0] * KV_BLOCK
        return (torch.nextafter(out, out + 1) if few else out), pattern

    before = examined.query_rows
    monkeypatch.setattr(cpu, "attend_blocks", wrong)
    certificate = doctor.examine(decoder(FAMILY))
    assert certificate.certified and {*before} - {*certificate.query_rows} == {4}


@pytest.mark.parametrize("width", [4, 5, 6, 7, 8])
def test_heads_narrower_than_a_vector_register_keep_their_bits(width: int) -> None:
    """Some libraries multiply a single narrow row by one block of keys with another kernel than by several blocks."""
    config = ModelConfig(1, 6 * width, 6, 6, width, 24, 61, 64, learned_positions=True)
    model = random_decoder(config)
    tokens = [(7 * i * i + 3 * i) % 61 for i in range(20)]
    together, single = Engine(model).prompt(tokens, sites="S"), Engine(model).prompt(tokens[:1], sites="S")
    for token in tokens[1:]:
        single.force([token])
    assert torch.equal(together.kv(), single.kv())
    assert all(torch.equal(together.activations[site], single.activations[site]) for site in together.activations)


# ---- certificates ----------------------------------------------------------------------------------------------------


def test_a_certificate_survives_json(examined: Certificate) -> None:
    assert Certificate.from_json(examined.to_json()) == examined
    allowed = {1: Allowed({(3, 5): (16,)}, frozenset({(3, 5)})), 7: Allowed({(3, 5): ()})}
    failed = Certificate(allowed, (16,), (Finding("op", "[3, 5]", "check", False), Finding("op", "", "", False, threads=7)))
    assert Certificate.from_json(failed.to_json()) == failed and not failed.certified

    right, examined = doctor.examine, []
    monkeypatch.setattr(doctor, "examine", lambda model: (examined.append(model), right(model))[1])
    first = certificates.certificate_for(decoder(FAMILY))
    assert certificates.certificate_for(decoder(FAMILY)) is first and len(examined) == 1
    certificates._EXAMINED.clear()  # as in a new process
    assert certificates.certificate_for(decoder(FAMILY)) == first and len(examined) == 1
    assert certificates.certificate_for(decoder("gpt2")) != first and len(examined) == 2  # another shape


def cut(text: str) -> str:
    return text[: len(text) // 2]


def without_findings(text: str) -> str:
    return json.dumps({key: value for key, value in json.loads(text).items() if key != "findings"})


def uncertified(text: str) -> str:
    raw = json.loads(text)
    raw["findings"][0]["equal"] = False
    return json.dumps(raw)


def nothing_compared(text: str) -> str:
    return json.dumps(json.loads(text) | {"findings": []})


DAMAGES = [cut, without_findings, lambda text: "", lambda text: "[]"]


@pytest.mark.parametrize("damage", [*DAMAGES, *(pytest.param(d) for d in (uncertified, nothing_compared))])
def test_a_damaged_certificate_on_disk_is_examined_again(
    damage: Callable[[str], str], examined: Certificate, monkeypatch: pytest.MonkeyPatch, no_cache: Path
) -> None:
    times: list[Decoder] = []
    monkeypatch.setattr(doctor, "examine", lambda model: times.append(model) or examined)
    certificates.certificate_for(decoder(FAMILY))
    (file,) = no_cache.iterdir()
    file.write_text(damage(file.read_text()))
    certificates._EXAMINED.clear()
    assert certificates.certificate_for(decoder(FAMILY)) == examined and len(times) == 2
    assert Certificate.from_json(file.read_text()) == examined  # repaired


def test_a_folder_that_cannot_be_written_to_only_costs_time(monkeypatch: pytest.MonkeyPatch, no_cache: Path) -> None:
    no_cache.parent.joinpath("certificates").write_text("a file where the folder should be")
    assert certificates.certificate_for(decoder(FAMILY)).certified


# ---- the command -----------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, ["doctor", *arguments], env={"COLUMNS": "160"})


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """A tiny model on disk."""
    loading.save(decoder(FAMILY), tmp_path / "model")
    return str(tmp_path / "model")


def test_the_command_prints_every_comparison_and_the_verdict(folder: str) -> None:
    result = invoke(folder)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert any("blocks.0.mlp.down" in x and "[64, 32]" in x and "any number of rows" in x and "equal" in x for x in lines)
    assert any("control: matrix-vector product" in x and "differ, as expected" in x for x in lines)
    assert "product 64 x 32: rows 512, 256, 128, 64, 32, 16" in lines
    assert lines[-1].startswith("certified: ")


def test_the_command_examines_afresh(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached certificate does not influence what the doctor finds now."""
    certificates.certificate_for(decoder(FAMILY))
    attention_by_neighbours(monkeypatch)
    result = invoke(folder)
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout
    assert "not certified: attention 4 heads of 8, 2 kv heads, 'beside other sequences'" in result.stdout


def test_the_command_prints_json(folder: str, examined: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(folder, "--json")
    assert result.exit_code == 0
    assert Certificate.from_json(result.stdout) == examined
    assert json.loads(result.stdout)["certified"] is True
    attention_by_neighbours(monkeypatch)
    result = invoke(folder, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["certified"] is False


def test_the_command_examines_the_embedded_model_by_default() -> None:
    result = invoke()
    assert result.exit_code == 0 and "coin-plain" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "advice"),
    [
        (["--device", "cuda"], "BadRequest", "Use device='cpu'"),
        (["--device", "abacus"], "BadRequest", "Use 'cpu' or 'cuda'"),
        (["smollm2"], "BadRequest", "`replaylens fetch smollm2`"),
        (["no/where/at-all"], "UnsupportedModel", "no/where/at-all does not exist"),
        (["nowhere"], "FetchFailed", "nowhere is neither a path here nor in the cache"),
    ],
)
def test_the_command_refuses_what_is_not_there(
    arguments: list[str],
    error: str,
    advice: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("REPLAYLENS_CACHE", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["replaylens", "doctor", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert left.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith(error) and advice in said
