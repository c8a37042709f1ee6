"""What is measured: shapes with random weights, SmolLM2-135M, and the same weights in Hugging Face and TransformerLens."""

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.model import hub, loading
from replaylens.engine.model.config import ModelConfig, Rope
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.loading import bridge as bridge
from replaylens.engine.model.loading import hugging_face as hugging_face
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch

SHAPE = ModelConfig(
    num_layers=32, d_model=4096, num_heads=32, num_kv_heads=8, d_head=128, d_mlp=14336, vocab_size=128256, max_positions=8192,
    rotary_dim=128, rope=Rope(theta=500000.0), tied_embeddings=False,
)  # fmt: skip
"""Llama-3.1-8B's"""
TINY_SHAPE = ModelConfig(
    num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_head=8, d_mlp=48, vocab_size=101, max_positions=256, rotary_dim=8,
    tied_embeddings=False,
)  # fmt: skip
ENDLESS = Sampling(ignore_eos=True)


def where(tiny: bool) -> tuple[ModelConfig, str, torch.dtype]:
    """(shape, device, dtype): the 8B shape on a GPU, or a tiny one on the CPU."""
    return (TINY_SHAPE, "cpu", torch.float32) if tiny else (SHAPE, "cuda", torch.bfloat16)


def random_decoder(shape: ModelConfig, device: str, dtype: torch.dtype, like: Decoder | None = None) -> Decoder:
    """Weights of the size that training begins with, made where they are used: large ones do not fit there twice. Those of
    `like` are shared where shapes agree."""
    torch.manual_seed(0)
    held = {} if like is None else dict(like.named_parameters())
    with torch.device("meta"):
        model = Decoder(shape)
    for name, parameter in list(model.named_parameters()):
        new = held.get(name)
        if new is None or new.shape != parameter.shape:
            new = torch.nn.Parameter(torch.empty(parameter.shape, dtype=dtype, device=device), requires_grad=False)
            is_norm = ".ln" in name or "_norm" in name or name.startswith("ln")
            new.fill_(1.0) if is_norm else new.normal_(std=0.1 if "router" in name else 0.02)
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], new)
    return model.to(device).eval()  # the rotary tables are made on the CPU


def certified(engine: Engine) -> Engine:
    """The engine; prints what its doctor found."""
    print(f"certified: {engine.certificate.certified}; controls that differed: {engine.certificate.has_teeth}", flush=True)
    return engine


def released(engine: Engine, branches: Iterable[Branch]) -> None:
    """Mutates the engine: nothing of these branches stays, nor of any prompt."""
    for branch in branches:
        branch.release()
    engine.prefix.clear()


def seeded(count: int, temperature: float = 1.0) -> list[Sampling]:
    """One per request: the same seed gives a request the same noise in every run."""
    return [Sampling(temperature=temperature, seed=seed, ignore_eos=True) for seed in range(count)]


# Peers


def llama(layers: int, d_model: int, heads: int, kv_heads: int, d_mlp: int, vocab: int, positions: int = 2048) -> Any:
    """A random Llama from Hugging Face, with tied embeddings."""
    import transformers as tf

    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=vocab, hidden_size=d_model, intermediate_size=d_mlp, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, max_position_embeddings=positions, tie_word_embeddings=True, bos_token_id=0,
        eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    return tf.LlamaForCausalLM(config).eval().requires_grad_(False)


@cache
def smollm2_or_shape() -> tuple[Any, str]:
    """(a Hugging Face model, its description): SmolLM2-135M if it is fetched, else a random model of its shape."""
    import transformers as tf

    if hub.is_fetched():
        found = tf.AutoModelForCausalLM.from_pretrained(hub.model_folder()).float().eval()
        return found.requires_grad_(False), "SmolLM2-135M"
    return llama(30, 576, 9, 3, 1536, 49152, 8192), "random model of SmolLM2-135M's shape"


def peer(model: Decoder) -> Any:
    """As `hugging_face`; loading it again checks the mapping of the weights."""
    made = hugging_face(model)
    ours, theirs = (dict(m.state_dict()) for m in (model, loading.load(made)))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "the mapping of the weights is wrong"
    return made


def difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, in float64."""
    return float((a.double() - b.double()).norm() / b.double().norm())
