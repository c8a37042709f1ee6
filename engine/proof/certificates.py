"""Certificates: of a CPU once per process; of a GPU once per model shape and version, kept on disk."""

import hashlib
import logging
import os
import platform
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

import replaylens
from replaylens.engine.errors import BadFile, NotCertified
from replaylens.engine.model import modes
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof import doctor
from replaylens.engine.proof.doctor import Certificate
from replaylens.engine.proof.fingerprint import canonical_version, device_name, triton_version
from replaylens.kernels.gpus import gpu_of

_LOG = logging.getLogger(__name__)
_EXAMINED: dict[str, Certificate] = {}


def certificate_for(model: Decoder) -> Certificate:
    """The certificate for this model on its device. Raises NotCertified with the op and shape that failed."""
    if model.device.type == "cpu":
        plain = all(parameter.dtype == torch.float32 for parameter in model.held())
        return _of_this_machine(model.config.mixer is not None) if plain else examine(model)
    key = _key(model)
    if key not in _EXAMINED:
        _EXAMINED[key] = _from_disk(key) or _to_disk(key, doctor.require(_first_examination(model)))
    return _EXAMINED[key]


@cache
def _of_this_machine(hybrid: bool) -> Certificate:
    """The certificate of the CPU, whatever the model but for its recurrent layers."""
    if os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        raise NotCertified("NUMBA_DISABLE_JIT is set, and kernels must be compiled. Unset it before Python starts.")
    with modes.canonical(), torch.inference_mode():
        return doctor.require(doctor.conformance(hybrid))


def _first_examination(model: Decoder) -> Certificate:
    """As `examine`, with a line in the log: the first load of a model takes longer than later ones."""
    _LOG.info("No certificate for a model of this shape on this machine. The doctor examines it once and stores the result.")
    return examine(model)


def examine(model: Decoder) -> Certificate:
    """A new examination on the model's device."""
    if model.device.type == "cuda":
        from replaylens.engine.proof import doctor_cuda  # its kernels need triton

        return doctor_cuda.examine(model)
    return doctor.examine(model)


_EXAMINATION = "6"
"""raised if the doctor examines more than before: earlier certificates are then not read"""


def _key(model: Decoder) -> str:
    """A hash of everything that the examination depends on: shapes, not weights."""
    parts = [
        _EXAMINATION,
        replace(model.config, revision="").to_json(),
        str(model.dtype),
        device_name(model.device),
        gpu_of(model.device).name,  # another one, if its facts are imposed
        torch.__version__,
        replaylens.__version__,
        canonical_version(model),
        triton_version(model.device),
        platform.machine(),
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _path(key: str) -> Path:
    from replaylens.engine.files import cache_folder

    return cache_folder() / "certificates" / f"{key[:32]}.json"


def _from_disk(key: str) -> Certificate | None:
    """The certificate from an earlier process; None if it is missing, unreadable or not certified."""
    try:
        found = Certificate.from_json(_path(key).read_text(encoding="utf-8"))
        return found if found.certified else None
    except (OSError, UnicodeError, BadFile):
        return None


def _to_disk(key: str, certificate: Certificate) -> Certificate:
    path = _path(key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(certificate.to_json(), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        pass  # with a read-only cache folder, the next process examines again
    return certificate
