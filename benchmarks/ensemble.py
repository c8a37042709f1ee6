"""`Ensemble`: models of one shape that train together, on the same texts, as one sequence of launches.

A step of a small model is hundreds of launches with little work each. Stacked weights turn the products of E models into one
batched product, so E models take as many launches as one. Members may differ in their seed, in L_in and L_out, and in the
weights of their loss; each has its own gradient norm. Their losses are those of `engine.training.thinking.loss`.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Linear, Norm
from replaylens.engine.model.ops import AttentionSpec, Heads, Observer, SequenceOps
from replaylens.engine.thinking.model import ThinkingDecoder
from replaylens.engine.training import thinking
from replaylens.engine.training import thinking as thinking_train
from replaylens.engine.training.thinking import ChunkBatch, Model, ThinkingRecipe


class StackedOps(SequenceOps):
    """Arithmetic of E models at once: weights have a first dimension E, and rows belong to one model after the other."""

    def __init__(self, members: int, lengths: Sequence[int]) -> None:
        super().__init__(lengths)
        self.members = members

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        return torch.bmm(self._by_member(x), linear.weight).flatten(0, 1)

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        return torch.baddbmm(self._by_member(residual), self._by_member(x), linear.weight).flatten(0, 1)

    def unembed(self, x: Tensor, table: Tensor) -> Tensor:
        return torch.bmm(self._by_member(x), table.transpose(1, 2)).flatten(0, 1)

    def norm(self, x: Tensor, norm: Norm) -> Tensor:
        out = F.rms_norm(x, (x.shape[-1],), None, norm.eps)
        return (self._by_member(out) * norm.weight[:, None]).flatten(0, 1)

    def attend(self, heads: Heads, spec: AttentionSpec, observe: Observer | None = None) -> Tensor:
        """Queries and keys are rotated together. Rotation spans whole heads, and every sequence has the same length."""
        assert heads.joined is not None and heads.rotary is not None and observe is None
        cos, sin = heads.rotary.turns
        count, d_head = heads.q.shape[1:]
        qk = heads.joined[:, : 2 * count]
        qk = torch.addcmul(qk * cos, qk.roll(d_head // 2, -1), sin)
        fold = lambda x: x.unflatten(0, (-1, self.lengths[0])).transpose(1, 2)  # noqa: E731
        q, k, v = map(fold, (qk[:, :count], qk[:, count:], heads.v))  # [sequences, heads, length, d_head]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _by_member(self, x: Tensor) -> Tensor:
        return x.unflatten(0, (self.members, -1))


class Ensemble:
    """The members' weights as one matrix [E, weights], and their losses."""

    def __init__(self, recipes: Sequence[ThinkingRecipe], device: str) -> None:
        """Precondition: recipes that differ in what members may differ in, and in nothing else."""
        assert len({replace(recipe, **_FREE, thinking=_layers_free(recipe)).to_json() for recipe in recipes}) == 1
        config = recipes[0].config
        assert config.tied_embeddings and config.rotary_dim == config.d_head and config.num_heads == config.num_kv_heads
        self.recipes, self.device = list(recipes), device
        models = [thinking_train.initial(recipe) for recipe in recipes]
        self.weights = torch.stack([_flat(model) for model in models]).to(device)
        self.wired: Model = copy.deepcopy(models[0]).to(device)
        self.leaves = self._stack()
        self.ops_of = partial(StackedOps, len(recipes))
        self.backbone = self.wired.backbone if isinstance(self.wired, ThinkingDecoder) else self.wired
        self.backbone.embedding = self._embedded  # type: ignore[method-assign]
        self.completion = torch.tensor([[recipe.completion_weight] for recipe in recipes], device=device)
        self.by_chunk = torch.tensor([recipe.thought_loss == "chunks" for recipe in recipes], device=device)
        self.chosen = {kind: self._one_hot(kind) for kind in ("write_layer", "read_layer")}

    def _one_hot(self, kind: str) -> Tensor:
        """1 for the members whose layer of this kind it is, 0 for the others: [layers, E, 1, 1]."""
        layers = torch.tensor([getattr(recipe.thinking, kind) for recipe in self.recipes], device=self.device)
        return F.one_hot(layers, self.recipes[0].config.num_layers).float().t()[..., None, None]

    def _stack(self) -> list[Tensor]:
        """Replace every parameter by a view of `weights` [E, ...]; returns them."""
        leaves, begin = [], 0
        for name, parameter in list(self.wired.named_parameters()):
            end = begin + parameter.numel()
            stacked = nn.Parameter(self.weights[:, begin:end].unflatten(1, parameter.shape))
            owner, _, own = name.rpartition(".")
            self.wired.get_submodule(owner)._parameters[own] = stacked
            leaves.append(stacked)
            begin = end
        return leaves

    def _embedded(self, tokens: Tensor, positions: Tensor, tap: None = None) -> Tensor:
        members = torch.arange(len(self.recipes), device=tokens.device)[:, None]
        return self.backbone.embed[members, tokens.unflatten(0, (len(self.recipes), -1))].flatten(0, 1)

    def members(self) -> list[Model]:
        """The models, one by one, on the CPU."""
        models = [thinking_train.initial(recipe) for recipe in self.recipes]
        for model, row in zip(models, self.weights.cpu(), strict=True):
            torch.nn.utils.vector_to_parameters(row.clone(), model.parameters())
            model.requires_grad_(False).eval()
        return models

    def losses(self, batch: ChunkBatch, first: int = 0) -> Tensor:
        """The loss of every member on the same batch: [E]. `first` as in `thinking_train.loss`."""
        whole = ChunkBatch(*(x.repeat(len(self.recipes), *[1] * (x.dim() - 1)) for x in vars(batch).values()))
        rest = whole.rest(first)
        if isinstance(self.wired, Decoder):
            return self._token_losses(self._run(rest.tokens, None)[1], rest)
        states = thinking.states_of(self.wired, whole.thoughts, self.ops_of)
        hidden, last = self._run(rest.tokens, thinking.shifted(states, whole.continues)[:, first:])
        return self._token_losses(last, rest) + self._thought_losses(self.wired, hidden, rest)

    def _run(self, tokens: Tensor, received: Tensor | None) -> tuple[Tensor, Tensor]:
        """Texts [E B, K, c] with the states they receive -> what T reads, and the last residual stream [E B, K, c, d]."""
        texts, width = len(tokens), tokens[0].numel()
        positions = torch.arange(width, device=tokens.device).repeat(texts)
        ops, rotary = self.ops_of([width] * texts), self.backbone.rotary(positions)
        x = self._embedded(tokens.flatten(), positions)
        hidden = torch.zeros_like(x)
        for layer, block in enumerate(self.backbone.blocks):
            x = block(x, rotary[layer], ops, None)
            if received is not None:
                x = self._plus(x, received.flatten(0, 2), layer, "write_layer")
                hidden = self._plus(hidden, x, layer, "read_layer")
        return hidden.view(*tokens.shape, -1), x.view(*tokens.shape, -1)

    def _plus(self, x: Tensor, other: Tensor, layer: int, kind: str) -> Tensor:
        """x, plus `other` for those members whose layer of this kind it is."""
        mine = [getattr(recipe.thinking, kind) == layer for recipe in self.recipes]
        if all(mine) or not any(mine):
            return x + other if all(mine) else x
        old, new = (y.unflatten(0, (len(mine), -1)) for y in (x, other))
        return torch.addcmul(old, new, self.chosen[kind][layer]).flatten(0, 1)

    def _token_losses(self, last: Tensor, batch: ChunkBatch) -> Tensor:
        width = batch.tokens[0].numel()
        rows = last.reshape(len(last), width, -1)[:, :-1].flatten(0, 1)
        wanted, weights = (x.reshape(len(x), width)[:, 1:].flatten() for x in (batch.tokens, batch.weights))
        logits = self.backbone.logits(rows, self.ops_of([len(rows)]))
        found = F.cross_entropy(logits, wanted, reduction="none").unflatten(0, (len(self.recipes), -1))
        weights = weights.view(found.shape)
        weights = torch.where(weights > 1, self.completion, weights)  # the table has 0, 1 and COMPLETION
        return (found * weights).sum(1) / weights.sum(1)

    def _thought_losses(self, model: ThinkingDecoder, hidden: Tensor, batch: ChunkBatch) -> Tensor:
        logits = thinking.thought_logits(model, hidden, batch.thoughts, ops_of=self.ops_of)
        places = torch.arange(batch.thoughts.shape[-1], device=hidden.device)
        counted = (places < thinking.sizes(batch.thoughts, model.thinking.eos_token)[..., None]) & batch.thinks[..., None]
        found = F.cross_entropy(logits.flatten(0, -2), batch.thoughts.flatten(), reduction="none").view(counted.shape) * counted
        member = lambda x: x.unflatten(0, (len(self.recipes), -1)).flatten(1).sum(1)  # noqa: E731
        by_token = member(found) / member(counted).clamp(min=1)
        by_chunk = member(found.sum(-1) / counted.sum(-1).clamp(min=1))
        texts = member(batch.thinks & ~batch.continues).clamp(min=1)
        return torch.where(self.by_chunk, by_chunk / texts, by_token)


COMPLETION = 10.0
"""the weight of a completion in the table of texts, which each member replaces by its own"""
_FREE = dict(seed=0, completion_weight=COMPLETION, thought_loss="tokens")


def _layers_free(recipe: ThinkingRecipe):  # type: ignore[no-untyped-def]
    return replace(recipe.thinking, write_layer=0, read_layer=recipe.config.num_layers - 1)


def _flat(model: Model) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
