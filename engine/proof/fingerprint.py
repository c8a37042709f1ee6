"""`Fingerprint`: everything that the bits of a result depend on, besides token path and edits."""

import hashlib
import json
import platform
from dataclasses import asdict, dataclass, replace

import torch

import replaylens
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.weights import weights_hash
from replaylens.engine.passes.batch import KV_BLOCK, TILE

CANONICAL_VERSION = 1
"""raised by any change of the canonical arithmetic that moves bits"""


@dataclass(frozen=True)
class Fingerprint:
    """Results with equal fingerprint, token path and edits have equal bits."""

    weights: str
    config: str
    dtype: str
    device: str
    torch: str
    triton: str
    replaylens: str
    canonical: str
    revision: str = ""
    """name@commit of a model from the Hugging Face hub; empty: from elsewhere"""

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(self.parts(), sort_keys=True)

    def parts(self) -> dict[str, str]:
        """What is written: a revision only if there is one, so that other fingerprints keep their bytes."""
        return {name: value for name, value in asdict(self).items() if name != "revision" or value}

    def differences(self, other: "Fingerprint") -> list[str]:
        """The parts that differ, one readable line each."""
        mine, theirs = asdict(self), asdict(other)
        return [f"{name}: {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]


def take(model: Decoder) -> Fingerprint:
    """The fingerprint of a loaded model on its device."""
    device = model.embed.device
    return Fingerprint(
        weights=weights_hash(model),
        config=hashlib.sha256(replace(model.config, revision="").to_json().encode()).hexdigest(),
        dtype=str(model.embed.dtype).removeprefix("torch."),
        device=device_name(device),
        torch=torch.__version__,
        triton=triton_version(device),
        replaylens=replaylens.__version__,
        canonical=canonical_version(device),
        revision=model.config.revision,
    )


def canonical_version(device: torch.device) -> str:
    """The version of the arithmetic, with its canonical constants."""
    if device.type == "cuda":
        from replaylens.kernels import launch

        return f"cuda{launch.CANONICAL_VERSION}:block{launch.KV_BLOCK}:split{launch.KV_SPLIT}"
    return f"{CANONICAL_VERSION}:tile{TILE}:block{KV_BLOCK}"


def device_name(device: torch.device) -> str:
    """The device model, as far as the arithmetic depends on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_model()}"
    return " ".join(filter(None, [name, modes.environment()]))


def _cpu_model() -> str:
    """The processor's name, if the system reports it. BLAS libraries choose kernels by it."""
    try:
        with open("/proc/cpuinfo") as lines:
            fields = dict(line.split(":", 1) for line in lines if ":" in line)
    except OSError:
        return platform.processor()
    clean = {key.strip(): value.strip() for key, value in fields.items()}
    return clean.get("model name") or clean.get("CPU part") or platform.processor()


def triton_version(device: torch.device) -> str:
    """The version of Triton, which compiles the kernels; "none" on a CPU."""
    if device.type != "cuda":
        return "none"
    from importlib.metadata import version

    return version("triton")
