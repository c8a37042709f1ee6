"""The fingerprint: what the bits of a result depend on, besides token path and edits, read off a loaded model."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import replaylens
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Packable
from replaylens.engine.records import Fingerprint

T = TypeVar("T")
PORTABLE = "portable-1"
"""the arithmetic of float32, on every machine; raised by any change that moves bits"""


def take(model: Decoder, whole: nn.Module | None = None) -> Fingerprint:
    """The fingerprint of a loaded model on its device. whole: what it is a part of, whose weights are hashed"""
    device = model.device
    return Fingerprint(
        weights=weights_hash(model if whole is None else whole),
        config=config_digest(model.config),
        dtype=str(model.dtype).removeprefix("torch."),
        device=device_name(device),
        torch=torch.__version__,
        triton=triton_version(device),
        replaylens=replaylens.__version__,
        canonical=canonical_version(model),
        revision=model.config.revision,
    )


def config_digest(config: ModelConfig) -> str:
    """SHA-256 of a config, wherever its model comes from."""
    return hashlib.sha256(replace(config, revision="").to_json().encode()).hexdigest()


def canonical_version(model: Decoder) -> str:
    """The version of the arithmetic, with its canonical constants. It covers the wiring of this package; the digest of another
    one's program is added."""
    portable = model.device.type != "cuda" or model.dtype == torch.float32
    version = PORTABLE if portable else of_tensor_cores()
    if model.usual:
        return version
    from replaylens.engine.model.program import Program  # which most models have no need of

    return f"{version}:wiring {Program.of_wiring(model).digest}"


def arithmetic_of(model: Decoder) -> str:
    """The arithmetic that a certificate is about: its version and its dtype."""
    return f"{canonical_version(model)} ({str(model.dtype).removeprefix('torch.')})"


def of_tensor_cores() -> str:
    """The version of a GPU's arithmetic in bfloat16 and float16."""
    from replaylens.kernels import launch

    return f"cuda{launch.CANONICAL_VERSION}:block{launch.KV_BLOCK}:split{launch.KV_SPLIT}"


def device_name(device: torch.device) -> str:
    """The device model, as far as the arithmetic depends on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {_cpu_model()}"


def _cpu_model() -> str:
    """The processor's name, if the system reports it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
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


# ---- weights ---------------------------------------------------------------------------------------------------------

_SLAB = 1 << 25
"""bytes of a GPU's weights that are hashed at a time"""


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over names, shapes, dtypes and bytes of all weights. The same weights have the same hash on any device."""
    digest, parts = hashlib.sha256(), _hashed(model)
    for part in _ahead(parts) if any(x.is_cuda for x in model.parameters()) else parts:
        digest.update(part)
    return digest.hexdigest()


def _hashed(model: nn.Module) -> Iterator[Any]:
    """What is hashed, in order."""
    for name, module, leaf in sorted(_leaves(model), key=lambda each: each[0]):  # one by one: packed ones are copied
        shape, pieces = _shape_and_pieces(module, leaf)
        yield f"{name} {shape}\n".encode()
        for x in pieces:
            yield from (part.numpy() for part in _on_host(x.detach().contiguous().view(-1).view(torch.uint8)))


def _on_host(flat: Tensor) -> Iterator[Tensor]:
    """All of it, or parts of a GPU's: copies to pinned memory are fast, and each lies where the next but one will."""
    if not flat.is_cuda:
        yield flat
        return
    size = min(_SLAB, len(flat))
    slabs = [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) for _ in range(2)]
    for number, part in enumerate(flat.split(_SLAB)):
        yield slabs[number % 2][: len(part)].copy_(part)


def _ahead(items: Iterator[T]) -> Iterator[T]:
    """The same, each made while the one before is used: weights leave a GPU as fast as they are hashed."""
    with ThreadPoolExecutor(1) as maker:
        coming = maker.submit(next, items, None)
        while (item := coming.result()) is not None:
            coming = maker.submit(next, items, None)
            yield item


def _shape_and_pieces(module: nn.Module, leaf: str) -> tuple[str, Iterable[Tensor]]:
    """dtype and shape of a weight, and its numbers, of a packed one a few rows at a time."""
    if isinstance(module, Packable) and leaf in module.panels:
        panels, turned = module.panels[leaf], leaf in module.turned
        dtype = getattr(panels, "dtype", torch.float32)  # of a weight that is divided over ranks: the model's
        return f"{dtype} {panels.shape[::-1] if turned else panels.shape}", panels.pieces(turned)
    x = getattr(module, leaf)
    return f"{x.dtype} {tuple(x.shape)}", (x,)


def _leaves(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """The tensors of a state dict: (name, the module that holds it, its name there)."""
    for path, module in model.named_modules():
        own = [leaf for leaf, x in (*module._parameters.items(), *module._buffers.items()) if x is not None]
        packed = module.panels if isinstance(module, Packable) else ()
        for leaf in (*(leaf for leaf in own if leaf not in module._non_persistent_buffers_set), *packed):
            yield f"{path}.{leaf}".removeprefix("."), module, leaf
