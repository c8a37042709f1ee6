"""The doctor certifies canonical arithmetic, names whatever is not, and admits no model without a certificate."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

from replaylens import cli
from replaylens.commands import doctor as commands
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NotCertified
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.passes.batch import Segment
from replaylens.engine.passes.runner import Runner
from replaylens.engine.proof import certificates, doctor
from replaylens.engine.proof.doctor import Certificate, Finding
from replaylens.kernels import cpu, cpu_attention, cpu_recurrent
from replaylens.weights import loading
from tests.engine.reference import decoder, random_decoder

FAMILY, HYBRID = "llama", "qwen3-next"
RECURRENT = {"softplus", "short convolution", "gated delta rule", "state space"}


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No certificate in the process, before or after, and an empty folder for certificates on disk."""
    certificates._of_this_machine.cache_clear()
    monkeypatch.setattr(certificates, "_EXAMINED", {})
    monkeypatch.setattr("replaylens.engine.files.cache_folder", lambda: tmp_path)
    return tmp_path / "certificates"


# ---- canonical arithmetic is certified -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def examined() -> Certificate:
    """Of `FAMILY`, examined once."""
    return doctor.examine(decoder(FAMILY))


def test_this_machine_is_certified_for_every_model(examined: Certificate) -> None:
    """No bit depends on the shapes of a model, so all have one certificate."""
    assert examined.certified and examined.failures == [] and examined.has_teeth
    assert doctor.require(examined) is examined
    assert certificates.certificate_for(decoder(FAMILY)) is certificates.certificate_for(decoder("gpt2"))
    assert certificates.certificate_for(decoder("gpt2")) == examined == doctor.examine(decoder("gemma2"))


def test_every_kind_of_kernel_is_examined(examined: Certificate) -> None:
    """Those of recurrent layers for hybrids only."""
    for certificate, without in ((examined, RECURRENT), (doctor.examine(decoder(HYBRID)), set())):
        ops = {finding.op for finding in certificate.findings if not finding.control}
        assert ops == {*doctor.REFERENCE, "arithmetic"} - without
        assert all(not finding.equal for finding in certificate.findings if finding.control), "every control differs here"


def test_a_model_in_another_dtype_is_refused() -> None:
    model = random_decoder(decoder("llama").config).to(torch.bfloat16)
    with pytest.raises(BadRequest, match=r"holds torch\.bfloat16, and the CPU engine computes in torch\.float32"):
        Engine(model)
    assert Engine.load(model).model.embed.dtype is torch.float32


def test_a_model_that_can_still_be_trained_is_examined_all_the_same() -> None:
    model = loading.load(decoder(FAMILY), torch.float32).requires_grad_(True)
    assert doctor.examine(model).certified


# ---- other arithmetic is found and named -----------------------------------------------------------------------------


def a_librarys_exp(patch: pytest.MonkeyPatch) -> str:
    right = cpu.apply
    patch.setattr(cpu, "apply", lambda name, x: x.exp() if name == "exp" else right(name, x))
    return "exp"


def a_product_split_in_k(patch: pytest.MonkeyPatch) -> str:
    """Sums one half of the terms, then the other."""
    right = cpu.product

    def wrong(x: Tensor, panels: cpu.Panels, *more: Tensor) -> Tensor:
        half = panels.inputs // 2
        first = replace(panels, data=panels.data[:, :half].contiguous())
        second = replace(panels, data=panels.data[:, half:].contiguous())
        return right(x[:, :half].contiguous(), first) + right(x[:, half:].contiguous(), second, *more)

    patch.setattr(cpu, "product", wrong)
    return "product"


def flushed_denormals(patch: pytest.MonkeyPatch) -> str:
    right = cpu.product

    def wrong(x: Tensor, *rest: Any) -> Tensor:
        out = right(x, *rest)
        return torch.where(out.abs() < 2.0**-126, 0.0, out)

    patch.setattr(cpu, "product", wrong)
    return "product of denormal numbers"


def a_key_less(patch: pytest.MonkeyPatch) -> str:
    right = cpu_attention.attend

    def wrong(q: Tensor, keys: Tensor, values: Tensor, rows: cpu_attention.HostRows, *rest: Any) -> Tensor:
        return right(q, keys, values, replace(rows, position=(rows.position - 1).clamp(min=0)), *rest)

    patch.setattr(cpu_attention, "attend", wrong)
    return "attention"


def another_eps(patch: pytest.MonkeyPatch) -> str:
    right = cpu.norm
    patch.setattr(cpu, "norm", lambda x, weight, bias, eps, kind: right(x, weight, bias, eps * 1.5, kind))
    return "rms norm"


def a_librarys_log_softmax(patch: pytest.MonkeyPatch) -> str:
    patch.setattr(cpu, "log_softmax_", lambda x: x.copy_(x.log_softmax(-1)))
    return "log-softmax"


def chunks_that_begin_with_the_pass(patch: pytest.MonkeyPatch) -> str:
    """Rows before the pass are not read again: the state after them would have to be kept for every position."""
    right = cpu_recurrent.recur

    def wrong(q: Tensor, v: Tensor, beta: Any, memory: Any, pieces: Any, *rest: Any) -> Any:
        return right(q, v, beta, memory, [replace(piece, since=piece.start) for piece in pieces], *rest)

    patch.setattr(cpu_recurrent, "recur", wrong)
    return "gated delta rule"


def a_state_carried_over_a_rollback(patch: pytest.MonkeyPatch) -> str:
    """The state of a chunk that rejected rows have ended stays."""
    right = cpu_recurrent.recur

    def wrong(q: Tensor, v: Tensor, beta: Any, memory: Any, *rest: Any) -> Any:
        kept = memory.states.clone()
        out = right(q, v, beta, memory, *rest)
        memory.states[kept != 0] = kept[kept != 0]
        return out

    patch.setattr(cpu_recurrent, "recur", wrong)
    return "gated delta rule"


PLANTS = (a_librarys_exp, a_product_split_in_k, flushed_denormals, a_key_less, another_eps, a_librarys_log_softmax)


IN_HYBRIDS = (chunks_that_begin_with_the_pass, a_state_carried_over_a_rollback)


@pytest.mark.parametrize("plant", (*PLANTS, *IN_HYBRIDS))
def test_a_planted_op_is_found_and_named_and_no_engine_runs_on_it(
    plant: Callable[[pytest.MonkeyPatch], str], monkeypatch: pytest.MonkeyPatch, no_cache: Path
) -> None:
    said = f"{plant(monkeypatch)} : 'as everywhere' gave other bits"
    model = decoder(HYBRID if plant in IN_HYBRIDS else FAMILY)
    certificate = doctor.examine(model)
    assert not certificate.certified
    with pytest.raises(NotCertified, match=said):
        doctor.require(certificate)
    with pytest.raises(NotCertified, match=said):
        Engine(model)
    assert not no_cache.exists()  # no certificate is stored


def test_a_comparison_without_teeth_proves_nothing(
    examined: Certificate, monkeypatch: pytest.MonkeyPatch, no_cache: Path
) -> None:
    """If even the negative controls agree, the doctor must not certify."""
    blunt = replace(examined, findings=tuple(replace(f, equal=True) for f in examined.findings))
    assert blunt.failures == [] and not blunt.has_teeth and not blunt.certified
    monkeypatch.setattr(doctor, "conformance", lambda hybrid: blunt)
    with pytest.raises(NotCertified, match="No negative control differed"):
        Engine(decoder(FAMILY))


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
    failed = Certificate((Finding("op", "[3, 5]", "check", False), Finding("op", "", "", False, control=True)))
    assert Certificate.from_json(failed.to_json()) == failed and not failed.certified


DAMAGES: dict[str, Callable[[str], str]] = {
    "cut": lambda text: text[: len(text) // 2],
    "empty": lambda text: "",
    "no object": lambda text: "[]",
    "of an earlier version": lambda text: json.dumps(json.loads(text) | {"threads": {}}),
    "nothing compared": lambda text: json.dumps(json.loads(text) | {"findings": []}),
    "not certified": lambda text: text.replace('"equal": true', '"equal": false', 1),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_certificate_on_disk_is_none(damage: str, examined: Certificate, no_cache: Path) -> None:
    """A GPU's is kept on disk, one file for each shape of a model."""
    certificates._to_disk("key", examined)
    assert certificates._from_disk("key") == examined and certificates._from_disk("another") is None
    (file,) = no_cache.iterdir()
    file.write_text(DAMAGES[damage](file.read_text()))
    assert certificates._from_disk("key") is None


def test_a_folder_that_cannot_be_written_to_only_costs_time(examined: Certificate, no_cache: Path) -> None:
    no_cache.write_text("a file where the folder should be")
    assert certificates._to_disk("key", examined) is examined and certificates._from_disk("key") is None


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
    assert any("log-softmax" in x and "as everywhere" in x and "equal" in x for x in lines)
    assert any("control: the library's product" in x and "differ, as expected" in x for x in lines)
    assert lines[-1].startswith("certified: ")


def test_the_command_says_how_many_positions_a_cache_would_have(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as an engine has that is made now, and why."""
    config = decoder(FAMILY).config
    position = config.num_layers * 2 * config.num_kv_heads * config.d_head * 4
    for tokens, holds in ((1 << 13, "fewer"), (1 << 15, "no more"), (1 << 20, "more")):
        free = {"fewer": 0, "no more": 16 * position << 15, "more": 16 * position << 21}[holds]
        monkeypatch.setattr("replaylens.engine.memory.cache.free_memory", lambda free=free: free)
        said = f"a sixteenth of the {free / 2**30:.1f} GiB of free memory holds {holds}"
        assert f"cache_tokens here by default: {tokens:,}; {said}" in invoke(folder).stdout.splitlines()
        engine = Engine(decoder(FAMILY))
        assert engine.cache_tokens == tokens and f"; cache_tokens={tokens} was chosen: {said})" in repr(engine)
    assert "chosen" not in repr(Engine(decoder(FAMILY), cache_tokens=1 << 13))


def test_the_command_examines_afresh(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cached certificate does not influence what the doctor finds now."""
    certificates.certificate_for(decoder(FAMILY))
    a_key_less(monkeypatch)
    result = invoke(folder)
    assert result.exit_code == 1
    assert "DIFFER" in result.stdout
    assert "not certified: attention" in result.stdout


def test_the_command_prints_json(folder: str, examined: Certificate, monkeypatch: pytest.MonkeyPatch) -> None:
    result = invoke(folder, "--json")
    assert result.exit_code == 0
    assert Certificate.from_json(result.stdout) == examined
    assert json.loads(result.stdout)["certified"] is True
    a_key_less(monkeypatch)
    result = invoke(folder, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["certified"] is False


def test_the_command_examines_the_embedded_model_by_default() -> None:
    result = invoke()
    assert result.exit_code == 0 and "coin-plain" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "advice"),
    [
        (["--device", "cuda"], "BadRequest", "Use --device 'cpu'"),
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


# ---- kernels compiled ahead ------------------------------------------------------------------------------------------


class Inline:
    """As a pool of processes, in this one."""

    def __init__(self, processes: int, context: object) -> None:
        self.processes = processes

    def __enter__(self) -> "Inline":
        return self

    def __exit__(self, *error: object) -> None: ...

    map = staticmethod(map)


def test_kernels_are_compiled_without_weights(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("concurrent.futures.ProcessPoolExecutor", Inline)
    for file in Path(folder).glob("*.safetensors"):
        file.unlink()
    seen, exact = set[tuple[int, int]](), Runner.exact

    def watched(self: Runner, segments: list[Segment], *more: Any) -> Any:
        seen.add((self.model.config.num_layers, sum(len(segment.tokens) for segment in segments)))
        return exact(self, segments, *more)

    monkeypatch.setattr(Runner, "exact", watched)
    result = CliRunner().invoke(cli.app, ["warm", folder, "--device", "cpu"], env={"COLUMNS": "160"})
    assert result.exit_code == 0 and "kernels for cpu are compiled" in result.stdout
    assert {(1, 16), (1, 64), (1, 1), (1, 8)} <= seen, "prompts and steps of one layer"


@pytest.mark.parametrize("name", [FAMILY, HYBRID, "gemma3"])
def test_few_layers_are_of_every_kind(name: str) -> None:
    whole = decoder(name).config
    few = commands.few_layers(whole)

    def kinds(config: ModelConfig) -> set[tuple[object, ...]]:
        mixture = config.mixture
        lists = (config.windows, config.rotary_layers, config.parts, mixture.layers if mixture is not None else ())
        return {tuple(each[layer] for each in lists if each) for layer in range(config.num_layers)}

    assert kinds(few) == kinds(whole) and few.num_layers == len(kinds(whole))
    assert Engine(random_decoder(few)).prompt([1, 2, 3]).generate(2).length == 5


@pytest.mark.parametrize(
    ("arguments", "error", "advice"),
    [
        (["coin-plain"], "BadRequest", "Use --device 'cpu'"),
        (["no/where/at-all", "--device", "cpu"], "UnsupportedModel", "no/where/at-all does not exist"),
        (["smollm2", "--device", "cpu"], "BadRequest", "`replaylens fetch smollm2`"),
    ],
)
def test_nothing_is_compiled_for_what_is_not_there(
    arguments: list[str], error: str, advice: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("REPLAYLENS_CACHE", str(tmp_path))
    said = CliRunner().invoke(cli.app, ["warm", *arguments])
    assert said.exit_code == 2 and said.stderr.startswith(error) and advice in " ".join(said.stderr.split())
