"""`CacheModel`: the part of a model that the methods of TransformerLens' `ActivationCache` use."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Block, Mlp
from replaylens.engine.serving.core import Core


def tl_config(c: ModelConfig) -> SimpleNamespace:
    """Sizes and settings by TransformerLens' names."""
    return SimpleNamespace(
        n_layers=c.num_layers,
        n_heads=c.num_heads,
        n_key_value_heads=c.num_kv_heads,
        d_model=c.d_model,
        d_mlp=c.d_mlp,
        d_head=c.d_head,
        d_vocab=c.vocab_size,
        n_ctx=c.max_positions,
        eps=c.norm_eps,
        attn_only=False,
        normalization_type="RMS" if c.norm == "rms" else "LN",
        device="cpu",
    )


class CacheModel:
    """Weights in TransformerLens' shapes, the final norm, and tokens. On the CPU, where cached values are."""

    def __init__(self, engine: Core) -> None:
        self._engine = engine
        self.cfg = tl_config(engine.config)
        self.blocks = [CacheBlock(block) for block in engine.model.blocks]

    def ln_final(self, x: Tensor) -> Tensor:
        """The final norm of the residual stream, canonical: [..., d_model]."""
        return self._engine.lock.alone(self._normed, x)

    @torch.inference_mode()
    def _normed(self, x: Tensor) -> Tensor:
        runner, rows = self._engine.runner, x.reshape(-1, x.shape[-1])
        with runner.canonical(len(rows)):
            out = runner.head_ops().norm(rows.to(runner.device, runner.model.embed.dtype), runner.model.ln_final)
        return out.to(x.device).view(x.shape)

    @property
    def W_U(self) -> Tensor:
        """[d_model, vocab]"""
        return self._engine.model.unembedding.detach().t().cpu()

    @property
    def b_U(self) -> Tensor:
        """[vocab]: no family has one"""
        return torch.zeros(self._engine.config.vocab_size, dtype=torch.float32)

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """The sum of what the biases of the first `layer` blocks write to the residual stream: [d_model]."""
        total = torch.zeros(self._engine.config.d_model, dtype=torch.float32)
        for i, block in enumerate(self.blocks[: layer + mlp_input]):
            parts = [block.attn.b_O, block.mlp.b_out if include_mlp_biases and i < layer else None]
            for bias in parts:
                total = total if bias is None else total + bias
        return total

    def to_single_token(self, text: str) -> int:
        return self._engine._target(text)

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """The unembedding columns of tokens: [*tokens' shape, d_model]; of a single token, [d_model]."""
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens)
        return self.W_U.t()[tokens]


class CacheBlock:
    """The output weights of one block."""

    def __init__(self, block: Any) -> None:
        assert isinstance(block, Block)
        heads, width = block.attn.heads, block.attn.width
        plain = lambda x: None if x is None else x.detach().cpu()  # noqa: E731
        out = block.attn.o
        self.attn = SimpleNamespace(W_O=out.weight.detach().cpu().view(heads, width, -1), b_O=plain(out.bias))
        self.mlp = SimpleNamespace(b_out=None)  # experts have no weight or bias that all rows share
        if isinstance(block.mlp, Mlp):
            self.mlp = SimpleNamespace(W_out=block.mlp.down.weight.detach().cpu(), b_out=plain(block.mlp.down.bias))
