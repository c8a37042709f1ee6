"""SmolLM2-135M packed to a fifth of its size, in pieces for transfer, and unpacked bit for bit.

This copy holds the values of a 4-bit file in float32, so blocks of 32 neighbours lie on a grid: code * scale + low with 4-bit
codes (most matrices), or code * scale with 8-bit codes (the embedding); scale and low are float16. `pack` finds the grid of
every matrix and raises if there is none; `unpack` multiplies it out with the same two float32 operations.
"""

import hashlib
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from replaylens.engine.errors import BadWeights

WEIGHTS_FILE, MANIFEST = "model.safetensors", "packed.json"
OTHERS = ("config.json", "tokenizer.json", "tokenizer_config.json")
BLOCK = 32
LARGEST = 40_000_000
"""bytes of a piece"""


def pack(source: Path, folder: Path, largest: int = LARGEST) -> list[Path]:
    """Write a Hugging Face folder in pieces of equal size, at most `largest` bytes each. BadWeights if a matrix has no grid."""
    packed: dict[str, Tensor] = {}
    for name, weight in load_file(source / WEIGHTS_FILE).items():
        packed |= {f"{name}/{part}": x for part, x in _codes(name, weight).items()}
    body = save(packed)
    count = -(-len(body) // largest)
    size = -(-len(body) // count)
    pieces = [folder / f"packed.{i}" for i in range(count)]
    folder.mkdir(parents=True, exist_ok=True)
    for i, piece in enumerate(pieces):
        piece.write_bytes(body[i * size : (i + 1) * size])
    (folder / MANIFEST).write_text(json.dumps({"pieces": count, "sha256": hashlib.sha256(body).hexdigest()}))
    for name in OTHERS:
        shutil.copyfile(source / name, folder / name)
    return pieces


def unpack(folder: Path) -> Path:
    """Unpack the weights in `folder`, unless it has been done. BadWeights names a missing or changed piece."""
    if (folder / WEIGHTS_FILE).is_file() or not (folder / MANIFEST).is_file():
        return folder
    manifest = json.loads((folder / MANIFEST).read_text())
    pieces = [folder / f"packed.{i}" for i in range(manifest["pieces"])]
    if missing := [piece.name for piece in pieces if not piece.is_file()]:
        raise BadWeights(f"{folder} lacks {', '.join(missing)} of {len(pieces)} pieces")
    body = b"".join(piece.read_bytes() for piece in pieces)
    if hashlib.sha256(body).hexdigest() != manifest["sha256"]:
        raise BadWeights(f"the pieces in {folder} are not those that {MANIFEST} was written with; pack and send them again")
    packed = load(body)
    names = sorted({key.rpartition("/")[0] for key in packed})
    whole = {
        n: _values({p: packed[f"{n}/{p}"] for p in ("raw", "low", "scale", "codes") if f"{n}/{p}" in packed}) for n in names
    }
    unfinished = folder / (WEIGHTS_FILE + ".part")
    save_file(whole, unfinished, metadata={"format": "pt"})
    unfinished.replace(folder / WEIGHTS_FILE)
    return folder


def _codes(name: str, weight: Tensor) -> dict[str, Tensor]:
    """A tensor's codes [..., columns] or [..., columns / 2], and its blocks' scales and lows; vectors are left unchanged."""
    if weight.ndim == 1:
        return {"raw": weight}
    blocks = weight.view(*weight.shape[:-1], -1, BLOCK)
    low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
    scale = (high - low) / 15
    nibbles = _nearest((blocks - low) / scale, 0, 15).flatten(-2).to(torch.uint8)
    fine = torch.maximum(-low, high) / 127
    bytes_ = _nearest(blocks / fine, -127, 127).flatten(-2).to(torch.int8)
    for found in (
        {"codes": nibbles[..., ::2] | nibbles[..., 1::2] << 4, "scale": scale.half(), "low": low.half()},
        {"codes": bytes_, "scale": fine.half()},
    ):
        if torch.equal(_values(found).view(torch.int32), weight.view(torch.int32)):
            return found
    raise BadWeights(f"{name} does not hold the values of a 4-bit or 8-bit file: it cannot be packed without loss")


def _nearest(x: Tensor, lowest: int, highest: int) -> Tensor:
    """Rounded to integers; 0 for a block of equal values, which divides by zero."""
    return x.nan_to_num(0, 0, 0).round().clamp(lowest, highest)


def _values(found: dict[str, Tensor]) -> Tensor:
    """The inverse of `_codes`: [..., columns], float32."""
    if "raw" in found:
        return found["raw"]
    codes, scale = found["codes"], found["scale"].float()
    if "low" not in found:
        return (codes.unflatten(-1, (-1, BLOCK)).float() * scale).flatten(-2)
    codes = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    return (codes.unflatten(-1, (-1, BLOCK)).float() * scale + found["low"].float()).flatten(-2)
