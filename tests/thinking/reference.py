"""The slow reference of a Thinking-States model: chunk by chunk, each row of the backbone, T and C in its own pass.

No guesses, rounds, batches or rollbacks. However the engine gets there, what it commits must have these bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.memory.cache import KVCache
from replaylens.engine.memory.pages import PagePool, PageTable
from replaylens.engine.model import sites
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.ops import Ops
from replaylens.engine.passes import lens
from replaylens.engine.passes.batch import Batch, Segment
from replaylens.engine.passes.runner import Runner
from replaylens.engine.request.capture import PassTap, Rows
from replaylens.engine.request.placed import added
from replaylens.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.thinking.thoughts import Thought
from tests.engine.reference import random_decoder, same_bits

EOS, PAD = 1, 0
BASE = ModelConfig(
    num_layers=4, d_model=32, num_heads=2, num_kv_heads=1, d_head=16, d_mlp=48, vocab_size=29, max_positions=128, rotary_dim=16
)  # fmt: skip
SHAPES: dict[str, ModelConfig] = {
    "rotary": BASE,
    "untied": replace(BASE, tied_embeddings=False, qkv_bias=True),
    "learned": replace(
        BASE, rotary_dim=0, learned_positions=True, norm="layer", gated_mlp=False, activation="gelu_tanh", qkv_bias=True,
        out_bias=True, mlp_bias=True,
    ),
    "windows": replace(BASE, windows=(4, 0, 4, 0), post_norms=True, qk_norm=True, embed_scale=4.0, activation="gelu_tanh"),
}  # fmt: skip
"""backbones of different families"""


def thinking_model(config: ModelConfig = BASE, chunk: int = 3, seed: int = 0, **others: Any) -> ThinkingDecoder:
    """Random weights. Some chunks have a thought, and others have none."""
    thinks = ThinkingConfig.for_backbone(config, chunk, EOS, PAD, **{"max_thought": 4, **others})
    made = ThinkingDecoder.around(random_decoder(config, seed), thinks)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, x in made.named_parameters():
            if not name.startswith("backbone."):
                x.add_(0.1 * torch.randn(x.shape, generator=generator))
        made.think_unembed[EOS] += 0.35 * made.think_unembed.abs().mean() * torch.sign(made.think_norm.weight)
    return made.requires_grad_(False).eval()


def random_prompt(chunks: int, chunk: int = 3, seed: int = 0, vocab: int = 29) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return [int(t) for t in torch.randint(2, vocab, (chunks * chunk,), generator=generator)]


@dataclass(frozen=True)
class Truth:
    """The expected result of a prompt."""

    kv: Tensor
    """[positions, layers, 2, kv_heads, d_head]"""
    sites: Rows
    """S, T and C of the backbone: [positions, d_model] each"""
    logits: Tensor
    """[positions, vocab]"""
    thoughts: list[Thought]
    """their whole distributions, under `thinking.full`"""
    states: dict[int, Tensor]
    """[c, d_model], keyed by the chunk that receives it"""


class ThinkingReference:
    """Prompts of one model, computed slowly."""

    def __init__(self, model: ThinkingDecoder) -> None:
        self.model, self.config = model, model.thinking
        self.runner = Runner(model.backbone, 512, page_size=1)
        self.names, _ = sites.table(model.config).select("STC")

    @torch.inference_mode()
    def run(self, path: Sequence[int], states: dict[int, Tensor] | None = None) -> Truth:
        """`states` maps chunks to states they receive instead of thought ones. Thoughts are T's output given those states."""
        c, table, given = self.config.chunk, PageTable(), states is not None
        received: dict[int, Tensor] = dict(states or {})
        rows: list[Rows] = []
        logits, thoughts = [], []
        for position, token in enumerate(path):
            chunk = position // c
            edits = tuple(added(self.config.write_site, i * c, state) for i, state in received.items())
            self.runner.reserve(table, position, position + 1)
            tap = PassTap(frozenset([*self.names, self.config.read_site]))
            result = self.runner.exact([Segment(table, position, [token], 1, edits)], tap)
            rows.append(tap.rows(tap.wanted, 0, 1))
            logits.append(result.logits[0].cpu())
            if position % c == c - 1:
                hidden = torch.cat([row[self.config.read_site] for row in rows[-c:]])
                thoughts.append(self.thought(hidden))
                if not given and not thoughts[-1].empty:
                    received[chunk + 1] = thoughts[-1].state
        kv = self.runner.cache.rows(self.runner.pool.slots(table, 0, len(path))).cpu()
        self.runner.pool.release(table)
        captured = {site: torch.cat([row[site] for row in rows]) for site in self.names}
        return Truth(kv, captured, torch.stack(logits), thoughts, received)

    def thought(self, hidden: Tensor) -> Thought:
        """T one row at a time, then C one row at a time."""
        config, block = self.config, _OneRow(self.model, self.runner)
        out = [block.think(row) for row in hidden][-1]
        tokens: list[int] = []
        rows, log_p = [], []
        while len(tokens) < config.max_thought - 1 and (not tokens or tokens[-1] != EOS):
            if tokens:
                word, step = torch.tensor([[tokens[-1]], [len(tokens) - 1]], device=self.runner.device)
                out = block.think(self.model.thought_embedding(word, step)[0])
            rows.append(out)
            logits = self._thought_logits(out)
            log_p.append(lens.log_softmax(logits))
            tokens.append(int(logits.argmax()))
        tokens += [] if tokens[-1] == EOS else [EOS]
        compressed = self.compressed(tokens)
        state = compressed[-config.chunk :] if len(compressed) else torch.zeros(config.chunk, hidden.shape[1])
        return Thought(tuple(tokens), torch.stack(rows), {"thinking.full": torch.stack(log_p)}, compressed, state)

    def compressed(self, tokens: Sequence[int]) -> Tensor:
        if len(tokens) == 1:
            return torch.empty(0, self.model.config.d_model)
        filled = [*tokens, *[EOS] * (self.config.chunk - len(tokens))]
        block = _OneRow(self.model, self.runner)
        return torch.stack([block.compress(token) for token in filled])

    def _thought_logits(self, row: Tensor) -> Tensor:
        return self.model.thought_logits(row[None].to(self.runner.device), self.runner.head_ops())[0].cpu()


class _OneRow:
    """A single block over rows that arrive one by one, each in its own pass and on its own page."""

    def __init__(self, model: ThinkingDecoder, runner: Runner) -> None:
        self.model, self.runner, self.table = model, runner, PageTable()
        self.pool = PagePool(64, 1)
        one_layer = replace(model.config, num_layers=1, windows=model.config.windows[:1])
        self.cache = KVCache(one_layer, self.pool, torch.float32, runner.device)

    def _next(self, token: int) -> tuple[Batch, Ops]:
        place, runner = self.table.length, self.runner
        self.pool.reserve(self.table, place, place + 1)
        segment = Segment(self.table, place, [token])
        batch = Batch([segment], self.pool, runner.device)
        return batch, runner.ops(batch, self.cache)

    def think(self, row: Tensor) -> Tensor:
        batch, ops = self._next(0)
        return self.model.run_think(row[None].to(self.runner.device), batch.positions, ops)[0].cpu()

    def compress(self, token: int) -> Tensor:
        batch, ops = self._next(token)
        return self.model.run_compress(batch.tokens, batch.positions, ops)[0].cpu()


def differences(branch: Any, truth: Truth) -> list[str]:
    """What differs on a prompt's branch, captured with sites="STCZ" and full=True, from the expected result."""
    found = [] if same_bits(branch.kv(), truth.kv[: branch.lane.computed]) else ["KV"]
    return found + row_differences(branch, truth)


def row_differences(branch: Any, truth: Truth) -> list[str]:
    """The same for captured rows and thoughts only: a rejected suffix no longer has KV."""
    rows, start, end = branch.activations, branch.activations.base, min(branch.activations.end, len(truth.logits))
    found = [site for site, x in truth.sites.items() if not same_bits(rows[site][: end - start], x[start:end])]
    log_p = lens.log_softmax(truth.logits[start:end])
    found += [] if same_bits(rows["Z.full"][: end - start, -1], log_p) else ["Z"]
    first = -(-start // branch.engine.thinking.chunk)
    for i, (ours, theirs) in enumerate(zip(branch.thoughts.chunks, truth.thoughts, strict=True)):
        if i >= first:
            found += [] if ours.tokens == theirs.tokens else [f"tokens of thought {i}"]
            pairs = {
                "T": (ours.hidden, theirs.hidden),
                "C": (ours.compressed, theirs.compressed),
                "S": (ours.state, theirs.state),
            }
            pairs["thought distribution"] = (ours.distribution["thinking.full"], theirs.distribution["thinking.full"])
            found += [f"{name} of chunk {i}" for name, (a, b) in pairs.items() if not same_bits(a, b)]
    received = {i: edit.value for i, edit in branch.thoughts.states.items()}
    same = received.keys() == truth.states.keys() and all(same_bits(received[i], x) for i, x in truth.states.items())
    return found + ([] if same else ["states received"])
