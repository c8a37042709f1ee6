"""Digests that every machine must have: tokens, KV and activations of a dozen models and requests, through the public API.

`python -m tests.digests` prints them; `tests/digests.json` holds them, and `tests/test_digests.py` compares. Weights are made
of integers, since random numbers of a library differ between machines.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import replaylens as rl
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.model.config import Latent, MixerConfig, MixtureConfig, ModelConfig, Rope, Routing
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof.doctor import numbers
from replaylens.engine.serving.branch import Branch
from replaylens.features.features import SparseFeatures
from replaylens.probes import ProbeRows
from tests.features import tiny
from tests.mixtures import ROUTINGS

FILE = Path(__file__).with_suffix(".json")
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1, 8], [(7 * i * i + 3) % 59 for i in range(150)]]
_DENSE: dict[str, Any] = dict(
    num_layers=2, d_model=40, num_heads=4, num_kv_heads=2, d_head=12, d_mlp=56, vocab_size=61, max_positions=256, rotary_dim=8
)
_MORE: dict[str, Any] = {
    "a gated model with norms of heads": dict(qk_norm=True),
    "caps, windows and second norms": dict(
        attn_softcap=5.0, logit_softcap=8.0, windows=(70, 0), activation="gelu_tanh", post_norms=True, embed_scale=6.25
    ),
    "layer norms, biases, learned positions": dict(
        norm="layer", learned_positions=True, rotary_dim=0, gated_mlp=False, activation="gelu", qkv_bias=True, out_bias=True,
        mlp_bias=True, unembed_bias=True, tied_embeddings=False,
    ),
    "slopes": dict(rotary_dim=0, slopes=(0.5, 0.25, 0.125, 0.0625), gated_mlp=False, activation="relu2"),
    "sinks and clamped experts": dict(sinks=True, activation="clamped_swiglu", mixture=ROUTINGS["biases"]),
    "experts with a shared one": dict(mixture=ROUTINGS["softmax of all, a shared expert with a gate"]),
    "experts in groups": dict(mixture=ROUTINGS["sigmoids in groups"]),
    "sparsemixer": dict(mixture=MixtureConfig(4, 24, Routing(2, "sparsemixer", jitter=0.01))),
    "latent attention": dict(num_kv_heads=4, rotary_dim=4, latent=Latent(rank=24, d_value=12, query_rank=20)),
    "YaRN": dict(rope=Rope(theta=5e3, scaling="yarn", factor=4.0, original_positions=64), qk_norm=True),
    "SmolLM2's shape": dict(
        num_layers=3, d_model=576, num_heads=9, num_kv_heads=3, d_head=64, d_mlp=1536, vocab_size=1000, rotary_dim=64
    ),
    "gated convolutions": dict(mixer=MixerConfig("conv", 3, 40), parts=("mixer mlp", "attn mlp")),
    "a gated delta net": dict(mixer=MixerConfig("delta", 4, 68, 4, 2, 7, 10), parts=("mixer mlp", "attn mlp"), attn_gate=True),
    "Mamba-2": dict(mixer=MixerConfig("ssd", 4, 68, 4, 2, 7, 10, norm_groups=2), parts=("mixer", "mixer attn mlp")),
}  # fmt: skip


_EDITS = (
    rl.Edit("blocks.0.hook_out", "add", numbers(50, 40), [1, 2]),
    rl.Edit("blocks.1.attn.hook_pattern", "mask", positions=[3], keys=[0]),
    rl.Edit("blocks.0.attn.hook_pattern", "zero", positions=[2, 3], keys=[1], heads=[1]),
)


def model_of(config: ModelConfig, seed: int = 1) -> Decoder:
    """A model whose weights are integers times powers of two, large enough that every layer matters."""
    model = Decoder(config).requires_grad_(False)
    for i, (name, parameter) in enumerate(model.named_parameters()):
        plain = numbers(seed * 1000 + i, *parameter.shape)
        if "norm" in name or ".ln" in name or name.startswith("ln"):
            plain = 1.0 + plain / 16
        elif name == "embed" or name.endswith(("a_log", "step_bias")):
            plain = plain / 8
        elif parameter.dim() > 1 and name != "pos_embed":
            plain = plain * 2.0 ** -round(np.log2(parameter.shape[-2]) / 2)
        parameter.copy_(plain)
    return model


def digest_of(branches: list[Branch]) -> str:
    """Tokens, KV and captured rows of branches."""
    found = hashlib.sha256()
    for branch in branches:
        found.update(np.array(branch.tokens, dtype="<i8").tobytes())
        found.update(branch.kv().cpu().contiguous().numpy().tobytes())
        mixer = branch.engine.config.mixer
        for layer in branch.engine.config.layers_with("mixer") if mixer is not None and mixer.heads else ():
            found.update(np.ascontiguousarray(branch.state(layer).numpy()).tobytes())
        for site in sorted(branch.activations):
            found.update(site.encode())
            found.update(np.ascontiguousarray(branch.activations[site].cpu().numpy()).tobytes())
    return found.hexdigest()[:32]


def generated(engine: Engine, edits: Sequence[rl.Edit] = (), **options: Any) -> str:
    branches = engine.prompts(PROMPTS, sites="STCZ", edits=list(edits))
    engine.generate(branches, 12, **options)
    return digest_of(branches)


def _tiny(more: dict[str, Any], device: str, **options: Any) -> str:
    model = model_of(ModelConfig(**{**_DENSE, **more}))
    return generated(Engine(model.to(device), None), **options)


def _dumped(device: str, read: Callable[[Dump], str], model: str = "coin-plain", drafter: str = "lens", **stored: Any) -> str:
    """What `read` gives of a dump, made as `replaylens dump` makes it."""
    engine = Engine.load(model, device=device, dtype=torch.float32)
    run = engine.replay(rl.tasks.get("coin")(flips=(2, 8)).examples(4), sites="STCZ", drafter=drafter, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        return read(run.save(Path(folder) / "dump", **stored))


def _sparse(kind: str) -> SparseFeatures:
    """Sparse features of coin-plain's second block, with weights that are integers times powers of two."""
    shapes = {"W_enc": (128, tiny.COUNT), "b_enc": (tiny.COUNT,), "W_dec": (tiny.COUNT, 128), "b_dec": (128,)}
    shapes |= {"threshold": (tiny.COUNT,)} if kind == "jumprelu" else {}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "cfg.json").write_text(json.dumps(tiny.config(kind, d_in=128)))
        weights = {name: numbers(70 + i, *shape) / 4 for i, (name, shape) in enumerate(shapes.items())}
        save_file(weights, Path(folder, "sae_weights.safetensors"))
        return SparseFeatures.load(folder)


def _dump(device: str, model: str = "coin-plain", drafter: str = "lens", **stored: Any) -> str:
    return _dumped(device, lambda dump: dump.digest, model, drafter, **stored)[:32]


def _inputs_of_probes(dump: Dump) -> str:
    """What a sweep reads of a dump: its rows at the positions of the task, labels and groups."""
    found, rows = hashlib.sha256(), ProbeRows.of(dump)
    for position in ("step", "query"):
        here = rows.at(position)
        for site, layer in product("STC", range(4)):
            found.update(np.ascontiguousarray(here.matrix(site, layer)).tobytes())
        for label in ("face", "parity"):
            found.update("\n".join(map(str, here.target(label).values)).encode())
        found.update("\n".join(map(str, here.roots)).encode())
    return found.hexdigest()[:32]


def _gradients() -> str:
    """Of a logit difference and of a log-probability, at every site of S, T and C. A GPU's differ."""
    engine, found = Engine(model_of(ModelConfig(**_DENSE)), None), hashlib.sha256()
    for metric in ((7, 9), 11):
        gradients = engine.prompt(PROMPTS[0], sites="STC").gradients(metric)
        found.update(np.float32(gradients.value).tobytes())
        for site in sorted(gradients):
            found.update(np.ascontiguousarray(gradients[site].numpy()).tobytes())
    return found.hexdigest()[:32]


def cases(device: str = "cpu") -> dict[str, Callable[[], str]]:
    """name -> computes the digest"""
    warm = rl.Sampling(temperature=2.0, seed=7)
    filtered = rl.Sampling(temperature=4.0, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.2, seed=2**63)
    kinds = "standard", "jumprelu", "topk"
    plain = _MORE["a gated model with norms of heads"]
    found: dict[str, Callable[[], str]] = {
        "dump of the coin task": lambda: _dump(device),
        "dump with rejected drafts": lambda: _dump(device, drafter="ngram"),
        "dump of a model that thinks": lambda: _dump(device, "coin-thinking", drafter="ngram"),
        "dump with features": lambda: _dump(device, features={kind: _sparse(kind) for kind in kinds}),
        "inputs of probes": lambda: _dumped(device, _inputs_of_probes),
        "sampled": lambda: _tiny(plain, device, sampling=warm),
        "filtered and penalised": lambda: _tiny(plain, device, sampling=filtered),
        "drafted": lambda: _tiny(plain, device, drafter="self", window=4),
        "edited": lambda: _tiny(plain, device, edits=_EDITS),
    }
    found |= {"sampled at temperature 1": lambda: _tiny(plain, device, sampling=rl.Sampling(temperature=1.0, seed=3))}
    found |= {"gradients": _gradients} if device == "cpu" else {}
    for name, more in _MORE.items():
        found[name] = lambda more=more: _tiny(more, device)  # type: ignore[misc]
    return found


if __name__ == "__main__":
    with torch.no_grad():
        made = {name: case() for name, case in cases(*sys.argv[1:2]).items()}
    print(json.dumps(made, indent=1))
