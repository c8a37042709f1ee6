"""Tiny sparse autoencoders and transcoders, written as SAELens writes them, and their formulas in float64."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

WIDTH, COUNT = 32, 48
"""of the toy model's residual stream, and of features"""
HOOK = "blocks.0.hook_resid_post"
MORE: dict[str, dict[str, Any]] = {
    "standard": {},
    "standard without b_dec": {"architecture": "standard", "apply_b_dec_to_input": False},
    "topk": {"k": 5},
    "topk rescaled": {"architecture": "topk", "k": 5, "rescale_acts_by_decoder_norm": True},
    "jumprelu": {},
    "transcoder": {"apply_b_dec_to_input": False, "d_out": WIDTH},
    "jumprelu_transcoder": {"apply_b_dec_to_input": False, "d_out": WIDTH},
}
"""kind -> its fields that differ from those of a standard SAE"""


def config(kind: str, hook: str = HOOK, d_in: int = WIDTH, **changes: Any) -> dict[str, Any]:
    """The cfg.json of a kind, with all fields that SAELens 6 writes."""
    metadata = {"hook_name": hook, "model_name": "toy", "sae_lens_version": "6.20.0", "prepend_bos": False}
    if "transcoder" in kind:
        hook, metadata["hook_name"], metadata["hook_name_out"] = "", "blocks.1.ln2.hook_out", "blocks.1.hook_mlp_out"
    base = {
        "architecture": kind,
        "d_in": d_in,
        "d_sae": COUNT,
        "dtype": "float32",
        "device": "cpu",
        "apply_b_dec_to_input": True,
        "normalize_activations": "none",
        "reshape_activations": "none",
        "metadata": metadata,
    }
    return {**base, **MORE[kind], **changes}


def tensors(kind: str, d_in: int = WIDTH, seed: int = 0) -> dict[str, Tensor]:
    """Random weights. Decoder rows differ in length, so that rescaling matters."""
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    generator = torch.Generator().manual_seed(seed)
    d_out = MORE[kind].get("d_out", d_in)
    made = {
        "W_enc": draw(d_in, COUNT) / d_in**0.5,
        "b_enc": 0.1 * draw(COUNT) - 0.2,
        "W_dec": draw(COUNT, d_out) * torch.rand(COUNT, 1, generator=generator),
        "b_dec": 0.1 * draw(d_out),
    }
    return {**made, "threshold": draw(COUNT).abs()} if kind.startswith("jumprelu") else made


def write(folder: Path, kind: str, d_in: int = WIDTH, hook: str = HOOK, **changes: Any) -> Path:
    """A folder as SAELens saves it; `changes` are fields of its cfg.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cfg.json").write_text(json.dumps(config(kind, hook, d_in, **changes)))
    save_file(tensors(kind, d_in), folder / "sae_weights.safetensors")
    return folder


def formula(folder: Path, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(features, reconstruction) in float64, dense, straight from the files."""
    cfg = json.loads((folder / "cfg.json").read_text())
    w = {name: value.double() for name, value in load_file(folder / "sae_weights.safetensors").items()}
    x = rows.reshape(len(rows), -1).double()
    pre = (x - w["b_dec"] if cfg["apply_b_dec_to_input"] else x) @ w["W_enc"] + w["b_enc"]
    norms = w["W_dec"].norm(dim=-1) if cfg.get("rescale_acts_by_decoder_norm") else torch.ones(COUNT, dtype=torch.float64)
    pre = pre * norms
    acts = pre.relu()
    if "k" in cfg:
        top = pre.topk(cfg["k"])
        acts = torch.zeros_like(pre).scatter(-1, top.indices, top.values.relu())
    if "threshold" in w:
        acts = acts * (pre > w["threshold"])
    return acts, (acts / norms) @ w["W_dec"] + w["b_dec"]
