"""The doctor: shows that this machine computes portable arithmetic to the bit.

On a CPU it runs every kind of kernel on numbers made of integers and compares digests with those that every machine must have
(`REFERENCE`); shapes of a model do not matter, since no bit depends on them. Negative controls, which must differ, compute the
same functions as a library does: another order, another exp, products that are rounded before they are added. On a GPU,
`doctor_cuda.py` compares every kernel at the model's shapes.
"""

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.errors import BadFile, BadRequest, NotCertified
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.fingerprint import PORTABLE
from replaylens.engine.records import read
from replaylens.engine.request.sampling import hash_bits

# ---- certificate -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One comparison of bits."""

    op: str
    shape: str
    check: str
    equal: bool
    control: bool = False
    """a negative control: at least one must differ, or the comparison proves nothing"""

    @property
    def passed(self) -> bool:
        return self.control or self.equal


@dataclass(frozen=True)
class Certificate:
    """The doctor's findings."""

    findings: tuple[Finding, ...]
    arithmetic: str = ""
    """what was examined: the version of the arithmetic and its dtype; empty: parts of it"""

    @property
    def failures(self) -> list[Finding]:
        return [f for f in self.findings if not f.passed]

    @property
    def has_teeth(self) -> bool:
        """Whether at least one negative control differed, as it must."""
        return any(f.control and not f.equal for f in self.findings)

    @property
    def certified(self) -> bool:
        return not self.failures and self.has_teeth

    def to_json(self) -> str:
        said = {"certified": self.certified, "arithmetic": self.arithmetic}
        return json.dumps({**said, "findings": [asdict(f) for f in self.findings]}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "Certificate":
        """The inverse of `to_json`; BadFile names the first field that is not of its type."""
        found = read(_CertificateRecord, text, "The certificate", BadFile)
        return cls(found.findings, found.arithmetic)


@dataclass(frozen=True)
class _CertificateRecord:
    """What `Certificate.to_json` writes. Whether it is certified follows from the findings."""

    certified: bool
    arithmetic: str
    findings: tuple[Finding, ...]


def require(certificate: Certificate) -> Certificate:
    """Return the certificate. Raises NotCertified with the first op and shape that failed."""
    if certificate.failures:
        bad = certificate.failures[0]
        raise NotCertified(
            f"{bad.op} {bad.shape}: '{bad.check}' gave other bits ({len(certificate.failures)} failures in all). This device "
            "does not give canonical results. Update numba and llvmlite, or torch and triton on a GPU. `replaylens doctor` "
            "prints the whole table."
        )
    if not certificate.has_teeth:
        raise NotCertified("No negative control differed, so the comparison proves nothing. Run `replaylens doctor`.")
    return certificate


# ---- conformance -----------------------------------------------------------------------------------------------------

REFERENCE = {
    "product": "0c40f11aece2f1e7",
    "product with bfloat16": "c5bcfd031005f98d",
    "product of denormal numbers": "78f7ca47f1352c00",
    "rms norm": "436dc3a8816b6d68",
    "layer norm": "e39745b5780c3ed5",
    "exp": "c11362804936cd8a",
    "tanh": "2b6e9d4257cc5c5e",
    "log": "731f266051e66335",
    "activations": "cfdf0328aaa4762c",
    "gated activations": "3566d93fcf1649b8",
    "rotation": "2d6dbae05a9b27a3",
    "log-softmax": "b6e2d3fae3548d9c",
    "entropies": "bad63c47824fef96",
    "attention": "537be416142f2acd",
    "attention with a window, a cap, slopes and sinks": "05b4bb20b6f540bc",
    "noise": "e294d2046bb5bf33",
    "softplus": "3190571761689e86",
    "short convolution": "8c6bed8df40ed13a",
    "gated delta rule": "0629c9d859a104df",
    "state space": "70af01ff58dec46c",
}
"""what every machine computes: the first digits of a SHA-256"""


@torch.inference_mode()
def examine(model: Decoder) -> Certificate:
    """Examine this machine: the certificate lists the failures. BadRequest unless the model is float32."""
    if other := [parameter.dtype for parameter in model.held() if parameter.dtype != torch.float32]:
        raise BadRequest(
            f"The model holds {other[0]}, and the CPU engine computes in torch.float32. Give model.float(), or use "
            "Engine.load(model), which converts it."
        )
    with modes.canonical():
        return conformance(model.config.mixer is not None)


def conformance(hybrid: bool = False) -> Certificate:
    """Every kind of kernel against the digests of `REFERENCE`, and controls that must differ from them.

    hybrid  with the kernels of recurrent layers, whose first compilation takes seconds
    """
    from replaylens.kernels import portable

    findings = [
        Finding("arithmetic", "float32", "fused multiply-adds", portable.has_fma()),
        Finding("arithmetic", "float32", "rounded to nearest even, denormal numbers kept", modes.rounds_to_nearest()),
    ]
    cases, controls = _cases() | (_recurrent_cases() if hybrid else {}), _controls() | (_recurrent_controls() if hybrid else {})
    computed = {name: digest(case()) for name, case in cases.items()}
    findings += [Finding(name, "", "as everywhere", found == REFERENCE.get(name)) for name, found in computed.items()]
    for name, (of, case) in controls.items():
        findings.append(Finding(of, "", f"control: {name}", digest(case()) == REFERENCE.get(of), control=True))
    return Certificate(tuple(findings), f"{PORTABLE} (float32)")


def digest(x: Tensor) -> str:
    return hashlib.sha256(np.ascontiguousarray(x.numpy()).tobytes()).hexdigest()[:16]


def numbers(seed: int, *shape: int) -> Tensor:
    """Numbers of many sizes, the same on every machine: integers times powers of two."""
    bits = hash_bits(seed, 0, np.arange(math.prod(shape), dtype=np.uint64))
    whole, power = (bits >> np.uint64(40)).astype(np.int64) - 2**23, (bits & np.uint64(7)).astype(np.int64) - 26
    return torch.from_numpy(np.ldexp(whole.astype(np.float32), power).astype(np.float32)).view(shape)


def _cases() -> dict[str, Callable[[], Tensor]]:
    from replaylens.kernels import cpu, cpu_noise

    x, w, few = numbers(1, 70, 577), numbers(2, 577, 100), numbers(3, 9, 100) * 2.0**-130
    row = numbers(4, 3, 5000)
    return {
        "product": lambda: cpu.product(x, cpu.Panels.of(w)),
        "product with bfloat16": lambda: cpu.product(x, cpu.Panels.of(w.bfloat16().float()), w[0], x[:, :100].contiguous()),
        "product of denormal numbers": lambda: cpu.product(few, cpu.Panels.of(w[:100])),
        "rms norm": lambda: cpu.norm(x, w.flatten()[:577], None, 1e-6, "rms"),
        "layer norm": lambda: cpu.norm(x, w.flatten()[:577], w.flatten()[577:1154], 1e-5, "layer"),
        "exp": lambda: cpu.apply("exp", x * 16),
        "tanh": lambda: cpu.apply("tanh", x),
        "log": lambda: cpu.apply("log", x.abs() + 2.0**-40),
        "activations": lambda: torch.cat([cpu.activate(x, kind, gated=False) for kind in cpu.ACTIVATIONS[:-1]]),
        "gated activations": lambda: torch.cat([cpu.activate(x[:, :576], kind, gated=True) for kind in cpu.ACTIVATIONS]),
        "rotation": lambda: cpu.rotate_(x[:, :512].reshape(70, 8, 64), w.flatten()[:5760].view(90, 2, 32), torch.arange(70)),
        "log-softmax": lambda: cpu.log_softmax_(row.clone()),
        "entropies": lambda: torch.stack(cpu.entropies(cpu.log_softmax_(row.clone())[None])),
        "attention": lambda: _attention(),
        "attention with a window, a cap, slopes and sinks": lambda: _attention(5.0, 100, numbers(9, 6) / 64, numbers(10, 6)),
        "noise": lambda: torch.from_numpy(cpu_noise.gumbel(12345, 6789, 4096)),
    }


def _attention(cap: float = 0.0, window: int = 0, slopes: Tensor | None = None, sinks: Tensor | None = None) -> Tensor:
    """Six query heads over three key heads and 700 positions, in pages that lie in another order."""
    from replaylens.kernels import cpu_attention

    pages = torch.arange(44).flip(0)[None] + 1
    keys, values = numbers(5, 3, 720, 20), numbers(6, 3, 720, 20)
    position = torch.tensor([0, 5, 63, 64, 511, 512, 699])
    order = torch.arange(len(position))
    rows = cpu_attention.HostRows(torch.zeros_like(order), position, pages.contiguous(), 16, order)
    return cpu_attention.attend(numbers(7, len(position), 6, 20), keys, values, rows, 20**-0.5, cap, window, slopes, sinks)


def _recurrent_cases() -> dict[str, Callable[[], Tensor]]:
    from replaylens.kernels import cpu, cpu_recurrent
    from replaylens.kernels.cpu_attention import HostRows

    at, x = torch.arange(70), numbers(1, 96, 577)
    rows = HostRows(torch.zeros_like(at), at, torch.arange(1, 6)[None], 16, at)
    return {
        "softplus": lambda: cpu.apply("softplus", x * 16),
        "short convolution": lambda: cpu_recurrent.short_conv(x, numbers(11, 4, 500), numbers(12, 500), rows),
        "gated delta rule": lambda: _recurrence(delta=True),
        "state space": lambda: _recurrence(delta=False),
    }


def _recurrence(delta: bool, from_pass: bool = False) -> Tensor:
    """What two heads read over 150 positions in four passes, each after one whose rows are rejected; and the last state.

    from_pass  the chunks of a pass begin with it, as they must not
    """
    from replaylens.kernels import cpu_recurrent as kernels
    from replaylens.kernels.definition import CHUNK

    q, k, v = numbers(13, 150, 1, 6) / 8, numbers(14, 150, 1, 6) / 8, numbers(15, 150, 2, 10)
    square = (numbers(16, 150, 2) / 4) * (numbers(16, 150, 2) / 4)
    g, beta = -square * square, numbers(17, 150, 2).abs() / 4 if delta else None
    zeros = partial(torch.zeros, dtype=torch.float32)
    memory = kernels.LayerMemory(zeros(176, 28), zeros(11, 2, 6, 10), (0, 6, 26), 1)
    memory.entries[16:166, :6], memory.entries[16:166, 26:] = k[:, 0], g
    out, state, pages = torch.zeros_like(v), zeros(2, 6, 10), torch.arange(1, 11)[None]
    for start, end in ((0, 40), (40, 64), (64, 70), (70, 150)):
        since, initial = (start, state.clone()) if from_pass else (start - start % CHUNK, None)
        for given in (v.flip(0), v):  # the first of them are drafts
            own, piece = slice(start, end), kernels.Piece(0, 0, start, end - start, since, initial, state)
            strength = None if beta is None else beta[own]
            found = kernels.recur(q[own], given[own], strength, memory, [piece], pages, pages, 16)
            out[own] = math.nan if found is None else found
    return torch.cat([out.flatten(), state.flatten()])


def _recurrent_controls() -> dict[str, tuple[str, Callable[[], Tensor]]]:
    return {
        "chunks that begin with the pass": ("gated delta rule", lambda: _recurrence(delta=True, from_pass=True)),
        "the library's softplus": ("softplus", lambda: torch.nn.functional.softplus(numbers(1, 96, 577) * 16)),
    }


def _controls() -> dict[str, tuple[str, Callable[[], Tensor]]]:
    """name -> (the case that it must differ from, how a library would compute it)"""
    x, w = numbers(1, 70, 577), numbers(2, 577, 100)
    return {
        "the library's product": ("product", lambda: x @ w),
        "every product rounded before it is added": ("product", lambda: sum_of_products(x, w)),
        "the library's exp": ("exp", lambda: (x * 16).exp()),
        "the library's log-softmax": ("log-softmax", lambda: numbers(4, 3, 5000).log_softmax(-1)),
    }


def sum_of_products(x: Tensor, w: Tensor) -> Tensor:
    """x [rows, k] times w [k, columns] in the order of k, without fused multiply-adds."""
    out = torch.zeros(len(x), w.shape[1], dtype=torch.float32)
    for k in range(len(w)):
        out += x[:, k : k + 1] * w[k]
    return out
