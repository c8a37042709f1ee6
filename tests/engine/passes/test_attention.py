"""Attention over several key blocks, against float64 code in this file and against Hugging Face.

The engine's own reference runs the same kernel, so it cannot detect their faults.
"""

import math
from copy import deepcopy

import pytest
import torch
from torch import Tensor

from replaylens import Engine
from replaylens.kernels.cpu_attention import KV_BLOCK, HostRows, attend
from replaylens.weights import loading
from tests.families import NAMES, core, hugging_face

LENGTH = 150
"""more than two blocks of keys"""


def values(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def plain_attention(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, cap: float) -> Tensor:
    """Softmax over the visible keys, one query and one head at a time, in float64."""
    q, keys, values = q.double(), keys.double(), values.double()
    out, group = torch.zeros_like(q), q.shape[1] // len(keys)
    for row in range(len(q)):
        visible = seen[row].nonzero()[:, 0]
        for head in range(q.shape[1]):
            scores = keys[head // group, visible] @ q[row, head]
            scores = torch.tanh(scores / cap) * cap if cap else scores
            out[row, head] = scores.softmax(0) @ values[head // group, visible]
    return out


def one_sequence(position: Tensor, num_keys: int) -> HostRows:
    none = torch.zeros_like(position)
    return HostRows(none, position, torch.arange(num_keys // KV_BLOCK)[None], KV_BLOCK, torch.arange(len(position)))


@pytest.mark.parametrize("window", [0, 40, 100])
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_blocks_against_float64(window: int, cap: float) -> None:
    """Grouped heads, ten blocks of keys in two splits: outputs, and scores, which move no bit."""
    n, positions = 10 * KV_BLOCK, torch.tensor([0, 62, 63, 64, 65, 149, 511, 512, 630])
    q, keys, vs = values(len(positions), 4, 8), values(2, n, 8), values(2, n, 9)[..., :8].contiguous()
    at = torch.arange(n)
    seen = at <= positions[:, None]
    seen = seen & (at > positions[:, None] - window) if window else seen
    ours = attend(q, keys, vs, one_sequence(positions, n), 1.0, cap, window)
    assert torch.allclose(ours.double(), plain_attention(q, keys, vs, seen, cap), atol=1e-6)
    scores = torch.full((len(q), 4, n), -math.inf)
    assert torch.equal(attend(q, keys, vs, one_sequence(positions, n), 1.0, cap, window, scores=scores), ours)
    assert torch.equal(scores[:, 0] > -math.inf, seen)


@pytest.mark.parametrize("key", [0, KV_BLOCK - 1, KV_BLOCK, 2 * KV_BLOCK - 1, 2 * KV_BLOCK, LENGTH - 1])
def test_every_key_counts(key: int) -> None:
    """A key with a dominant score takes everything, wherever it is in its block; equal keys take equal shares."""
    n = 3 * KV_BLOCK
    q, keys, vs = torch.ones(1, 1, 4), torch.zeros(1, n, 4), values(1, n, 4)
    rows = one_sequence(torch.tensor([LENGTH - 1]), n)
    assert torch.allclose(attend(q, keys, vs, rows, 1.0)[0, 0], vs[0, :LENGTH].mean(0), atol=1e-6)
    keys[0, key] = 25.0
    assert torch.equal(attend(q, keys, vs, rows, 1.0)[0, 0], vs[0, key])


@pytest.mark.parametrize("name", core(NAMES))
def test_the_engine_against_hugging_face_at_150_tokens(name: str) -> None:
    """Logits of every position, in one pass and in uneven chunks, against Hugging Face in float64."""
    model = hugging_face(name)
    tokens = torch.randint(3, 97, (LENGTH,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.no_grad():
        theirs = deepcopy(model).double()(torch.tensor([tokens])).logits[0]
    served = Engine(loading.load(model, torch.float32), page_size=8)
    whole = served.prompt(tokens, sites=["unembed.hook_out"])
    pieces = served.prompt(tokens[:70], sites=["unembed.hook_out"])
    for start, end in ((70, 71), (71, 128), (128, 149), (149, 150)):
        pieces.force(tokens[start:end])
    ours = _capped(whole.activations["unembed.hook_out"], served.config.logit_softcap)
    assert torch.equal(_capped(pieces.activations["unembed.hook_out"], served.config.logit_softcap), ours)
    error = (ours.double() - theirs).norm(dim=1) / theirs.norm(dim=1)
    assert error.max() < 1e-5, f"position {int(error.argmax())}: {float(error.max()):.1e}"
    assert math.isfinite(float(error.max()))


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap if cap else logits


@pytest.mark.parametrize("name", ["llama", "qwen3", "neox", "gpt2"])
def test_looking_at_heads_changes_no_bit_and_shows_them_before_their_rotation(name: str) -> None:
    """Queries and keys nobody looks at are rotated in place, within the product that they come from."""
    served = Engine(loading.load(hugging_face(name), torch.float32))
    tokens = torch.randint(3, 97, (90,), generator=torch.Generator().manual_seed(6)).tolist()
    plain = served.prompt(tokens, sites="S")
    for parts in (("q",), ("k",), ("v",), ("q", "k", "v")):
        seen = served.prompt(tokens, sites=["S", *(f"blocks.1.attn.{part}.hook_out" for part in parts)])
        assert torch.equal(seen.kv(), plain.kv())
        assert all(torch.equal(seen.activations[site], plain.activations[site]) for site in plain.activations)
    if served.config.rotary_dim and not served.config.qk_norm:
        rotated = served.prompt(tokens, sites=["blocks.1.attn.hook_rot_q"]).activations["blocks.1.attn.hook_rot_q"]
        before = seen.activations["blocks.1.attn.q.hook_out"]
        assert torch.equal(rotated[0], before[0]) and not torch.equal(rotated, before)
