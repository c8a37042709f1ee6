"""The doctor examines the kernel for many rows wherever it can run, also if too few rows would choose it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Norm
from replaylens.engine.proof import doctor_cuda
from replaylens.engine.proof.doctor import Finding
from replaylens.kernels import attention as paged
from replaylens.kernels.attention import attention
from replaylens.kernels.shared import PagedRows
from tests.engine.reference import decoder, random_decoder

CHECK = "specialised warpgroups against others"


def examined(model: Decoder) -> list[Finding]:
    random = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    found: list[Finding] = []
    doctor_cuda._attention(model, random, found)
    return [finding for finding in found if finding.check == CHECK]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is examined there")
@torch.no_grad()
def test_the_kernel_for_many_rows_is_examined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its part is played by the general kernel, with the right bits and with others."""
    model = decoder("llama")
    monkeypatch.setattr(model, "config", replace(model.config, max_positions=24))  # the model is shared
    assert examined(model) == [], "the interpreter cannot run it"
    error = 0.0

    def played(q: Tensor, k: Tensor, v: Tensor, out: Tensor, tiles: Tensor, sequence: Tensor, position: Tensor, table: Tensor,
               scale: float, softcap: float, window: int, page_size: int) -> None:  # fmt: skip
        rows = PagedRows(sequence, position, table, tiles, per_tile=int(tiles[0, 1]))
        attention(q, k, v, rows, model.config.scale, page_size=page_size, out=out, specialised=False)
        out[-1, 0, 0] += error

    monkeypatch.setattr(paged, "can_prefill", lambda *given: True)
    monkeypatch.setattr(paged, "prefill", played)
    assert [finding.passed for finding in examined(model)] == [True]
    error = 1e-3
    assert [finding.passed for finding in examined(model)] == [False]


# ---- views ------------------------------------------------------------------------------------------------------------
# The doctor gives norms the views that the engine gives them: columns of a wider product.

OF_VIEWS = "rows of a wider product"


@pytest.mark.parametrize("sees_strides", [False, True])
@torch.no_grad()
def test_a_norm_that_sees_what_its_rows_are_views_of_is_found(sees_strides: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = doctor_cuda.HeadOps.norm

    def norm(self: doctor_cuda.HeadOps, x: Tensor, norm: Norm) -> Tensor:
        return honest(self, x, norm) * (1 + 1e-6 * (sees_strides and x.stride(0) % 16 == 0))

    monkeypatch.setattr(doctor_cuda, "ROWS", (1, 9))
    monkeypatch.setattr(doctor_cuda.HeadOps, "norm", norm)
    random = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))  # noqa: E731
    model, found = decoder("olmoe-normalised"), []
    doctor_cuda._rowwise(model, random, found)
    seen = {finding.shape: finding.equal for finding in found if finding.check == OF_VIEWS}
    assert "[36]" in seen and all(same != sees_strides for shape, same in seen.items() if shape == "[36]")
    assert all(finding.equal for finding in found if finding.check != OF_VIEWS)


# ---- recurrences ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_recurrence_whose_chunks_begin_with_the_pass_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels run once, and pass. Then their outputs are handed out again, wrong in some passes."""
    ops, kept = doctor_cuda.CanonicalCudaOps, dict[str, list[Tensor]]()
    monkeypatch.setattr(doctor_cuda, "RECURRED", 70)
    monkeypatch.setattr(doctor_cuda.recurrent_rows, "MANY", 5)
    config = decoder("mamba2").config
    assert config.mixer is not None
    few = replace(config.mixer, heads=2, key_heads=1, channels=2 * config.mixer.d_key + 2 * config.mixer.d_value)
    model = random_decoder(replace(config, mixer=few)).to("cuda" if torch.cuda.is_available() else "cpu")
    random = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).to(model.device)  # noqa: E731

    def keeping(name: str) -> Callable[..., Tensor]:
        honest, outputs = getattr(ops, name), kept.setdefault(name, [])
        return lambda self, *given: outputs.append(honest(self, *given)) or outputs[-1]

    def again(name: str, fault: str) -> Callable[..., Tensor]:
        outputs = iter(kept[name])

        def wrong(self: doctor_cuda.CanonicalCudaOps, *given: object) -> Tensor:
            out = next(outputs)
            among_many = fault == "many" and self.rows.single and len(out) > 1
            return out * (1 + 1e-6 * len(out)) if name == "recur" and (fault == "moved" or among_many) else out

        return wrong

    for fault, passed in (("none", [True] * 3), ("moved", [False] * 3), ("many", [True, True, False])):
        for name in ("recur", "short_conv"):
            monkeypatch.setattr(ops, name, again(name, fault) if kept.get(name) else keeping(name))
        found: list[Finding] = []
        doctor_cuda._recurrence(model, random, found)
        assert [finding.passed for finding in found] == [*passed, True], fault
        assert [finding.equal for finding in found if finding.control] == [False]
