"""`CacheModel`: the part of a model that the methods of TransformerLens' `ActivationCache` use; and what they look up."""

import warnings
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import NotFolded, UnknownSite
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Block, Mlp
from replaylens.engine.model.sites import SiteTable
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


class Cached(dict[str, Tensor]):
    """Cached values by name. A site that is there is found by its other names too; one that is not is named."""

    def __init__(self, values: Mapping[str, Tensor], table: SiteTable) -> None:
        super().__init__(values)
        self._table = table

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._other(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (a dict's own `get` knows no other names)

    def __missing__(self, name: str) -> Tensor:
        other = self._other(name)
        if other is None:
            there = f"{', '.join(list(self)[:6])}{', ...' if len(self) > 6 else ''}" or "nothing"
            raise UnknownSite(
                f"{name} is not in this cache, which holds {there}. Let names_filter choose it as well, or leave names_filter "
                "out for every site. decompose_resid needs hook_embed, hook_pos_embed where the model has one, hook_attn_out "
                "and hook_mlp_out of every block, and with apply_ln or logit_attrs ln_final.hook_scale."
            )
        return self[other]

    def _other(self, name: object) -> str | None:
        """The name in the cache of the same site."""
        site = self._table.names.get(name, name) if isinstance(name, str) else None
        return next((each for each in self if self._table.names.get(each, each) == site), None)


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
        """[vocab]"""
        bias = self._engine.model.unembed_bias
        return torch.zeros(self._engine.config.vocab_size, dtype=torch.float32) if bias is None else bias.detach().cpu()

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
        """The unembedding columns of tokens: [*tokens' shape, d_model]; of a single token, [d_model]. Warns: NotFolded."""
        norm = self._engine.model.ln_final
        if not bool((norm.weight == 1).all()) or (norm.bias is not None and bool(norm.bias.any())):
            warnings.warn(
                "logit_attrs leaves out the weights of the final norm, which are not folded into the unembedding here, so its "
                "attributions do not add up to logits. Use rl.dla(engine, prompt, (token, other)), whose parts do.",
                NotFolded,
                stacklevel=3,  # the caller of `logit_attrs`
            )
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
