"""`dla`: its parts are those of a float64 reference, and sum to the logit difference."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from replaylens import Engine, dla
from replaylens.engine.errors import BadRequest
from replaylens.engine.model import loading
from replaylens.engine.model.decoder import Decoder, Mlp
from replaylens.engine.model.ops import SequenceOps
from replaylens.workbench.dla import DlaResult
from tests.families import hugging_face

PATH = torch.randint(3, 97, (9,), generator=torch.Generator().manual_seed(1)).tolist()
PAIR = (11, 40)
CLOSE = 5e-6
COIN = "A coin's state is heads. Alice flips. What's the state? A:"
FAMILIES = {
    "gpt2": "LayerNorm with bias, learned positions",
    "llama3": "RMSNorm, biases in attention and MLP",
    "gemma": "(1 + w) norm, scaled embedding",
    "gemma2": "sandwich norms, softcap",
    "gemma3": "sandwich norms",
    "olmo2": "norms after products only",
    "neox": "parallel blocks",
    "phi-plain": "parallel blocks, one norm, biased unembedding",
    "cohere": "LayerNorm without bias, scaled logits",
    "granite": "scaled writes",
    "minicpm3": "latent attention",
}


class Values:
    """A tap that keeps the last row of every site."""

    def __init__(self) -> None:
        self.rows: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return not site.endswith(("hook_pattern", "hook_attn_scores"))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        self.rows[site] = value[-1]
        return value


class Reference:
    """The model in float64, and every part as a vector that goes forward through the norms, their scales frozen."""

    def __init__(self, model: Decoder) -> None:
        self.model, tap, ops = model.double(), Values(), SequenceOps([len(PATH)])
        with torch.no_grad():
            stream = model(torch.tensor(PATH), torch.arange(len(PATH)), ops, tap)
            model.logits(stream[-1:], ops, tap)
        self.rows, self.stream = tap.rows, stream[-1]
        self.total = self.of_logits(tap.rows["unembed.hook_out"])

    def of_logits(self, logits: Tensor) -> float:
        return float(logits[PAIR[0]] - logits[PAIR[1]]) * self.model.config.logit_scale

    def through(self, norm: Any, part: Tensor, row: Tensor) -> Tensor:
        """Without the norm's bias."""
        middle = (lambda x: x - x.mean()) if norm.kind == "layer" else (lambda x: x)
        return middle(part) / (middle(row).square().mean() + norm.eps).sqrt() * norm.weight

    @torch.no_grad()
    def value(self, part: Tensor) -> float:
        """Of a vector that is added to the stream."""
        return self.of_logits(self.model.unembedding @ self.through(self.model.ln_final, part, self.stream))

    @torch.no_grad()
    def written(self, layer: int, mlp: bool, part: Tensor) -> float:
        """Of a vector that attention or MLP computes, before its post-norm."""
        block: Any = self.model.blocks[layer]
        post, (site, _) = (block.ln2_post, block.mlp_sites) if mlp else (block.ln1_post, block.attn_sites)
        part = part * block.scale
        return self.value(part if post is None else self.through(post, part, self.rows[site]))


def close(found: float, wanted: float) -> bool:
    return abs(found - wanted) < CLOSE


@pytest.mark.parametrize("name", FAMILIES)
def test_parts_are_those_of_a_float64_reference(name: str) -> None:
    theirs = hugging_face(name)
    served, reference = Engine(loading.load(theirs, torch.float32), page_size=4), Reference(loading.load(theirs))
    found = {by: dla(served, PATH, PAIR, by=by) for by in ("layer", "head", "neuron")}  # type: ignore[arg-type]
    for result in found.values():
        assert close(result.total, reference.total) and abs(result.total) > 100 * CLOSE
        assert sum(part.value for part in result.parts) == pytest.approx(result.total, abs=1e-12)
        assert result.parts[-1].name == "rounding" and abs(result.parts[-1].value) < CLOSE
    for part in found["layer"].parts:
        if part.kind in ("embedding", "positions"):
            site = {"embedding": "embed", "positions": "pos_embed"}[part.kind] + ".hook_out"
            assert close(part.value, reference.value(reference.rows[site]))
        if part.layer is not None:
            block: Any = reference.model.blocks[part.layer]
            post, sites = (block.ln2_post, block.mlp_sites) if part.kind == "MLP" else (block.ln1_post, block.attn_sites)
            assert close(part.value, reference.value(reference.rows[sites[0] if post is None else sites[1][2]]))
    heads = [part for part in found["head"].parts if part.kind == "head"]
    assert len(heads) == served.config.num_layers * served.config.num_heads
    for part in heads:
        block = reference.model.blocks[part.layer]
        own = block.attn.o.weight.view(block.attn.heads, block.attn.width, -1)[part.number]
        assert close(part.value, reference.written(part.layer, False, reference.rows[block.attn.z_site][part.number] @ own))
    neurons = [part for part in found["neuron"].parts if part.kind == "neuron"]
    assert len(neurons) == served.config.num_layers * served.config.d_mlp
    for part in neurons[::17]:
        block = reference.model.blocks[part.layer]
        assert isinstance(block.mlp, Mlp)
        written = reference.rows[block.mlp.post_site][part.number] * block.mlp.down.weight[part.number]
        assert close(part.value, reference.written(part.layer, True, written))


def test_the_final_bias_is_that_of_norm_and_unembedding() -> None:
    """Control: without the norm's bias, the number is another."""
    theirs = hugging_face("phi-plain")
    model = loading.load(theirs).double()
    assert model.unembed_bias is not None and model.ln_final.bias is not None
    part = dla(Engine(loading.load(theirs, torch.float32)), PATH, PAIR).parts[-2]
    logits = model.unembedding @ model.ln_final.bias
    own, other = logits[PAIR[0]] - logits[PAIR[1]], model.unembed_bias[PAIR[0]] - model.unembed_bias[PAIR[1]]
    assert part.name == "final bias" and close(part.value, float(own + other)) and not close(part.value, float(other))


def test_a_softcap_is_named() -> None:
    """What is split is the difference before it, which is another than the model's. Control: a model without one."""
    served = Engine(loading.load(hugging_face("gemma2"), torch.float32))
    result, logits = dla(served, PATH, PAIR), served.logits(PATH, tokens=PAIR)
    assert "before the softcap" in result.metric and not close(result.total, float(logits[0] - logits[1]))
    plain = Engine(loading.load(hugging_face("llama"), torch.float32))
    logits = plain.logits(PATH, tokens=PAIR)
    assert dla(plain, PATH, PAIR).total == float(logits[0] - logits[1]) and "softcap" not in dla(plain, PATH, PAIR).metric


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "deepseek-v2-lite"])
def test_mixtures_split_into_layers_and_heads(name: str) -> None:
    served = Engine(loading.load(hugging_face(name), torch.float32))
    for by in ("layer", "head"):
        result = dla(served, PATH, PAIR, by=by)  # type: ignore[arg-type]
        assert (
            abs(result.parts[-1].value) < CLOSE and sum(part.kind == "MLP" for part in result.parts) == served.config.num_layers
        )
    with pytest.raises(BadRequest, match="mixture of experts"):
        dla(served, PATH, PAIR, by="neuron")


def test_what_cannot_be_split_is_refused() -> None:
    served = Engine.load("coin-plain")
    for metric, by, message in (
        (" tails", "layer", "give a pair of tokens"),
        (lambda logits: logits[0], "layer", "give a pair of tokens"),
        ((" tails", " heads", " flips"), "layer", r"Only logit differences are sums over parts.*give a pair of tokens"),
        ((" tails", " heads"), "expert", "Known: layer, head, neuron"),
    ):
        with pytest.raises(BadRequest, match=message):
            dla(served, COIN, metric, by=by)  # type: ignore[arg-type]
    for prompt, message in (
        ([COIN, COIN], "2 prompts.*dla takes one at a time"),
        (served.prompt(COIN), r"Give branch\.tokens"),
    ):
        with pytest.raises(BadRequest, match=message):
            dla(served, prompt, (" tails", " heads"))  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="Thinking-States"):
        dla(Engine.load("coin-thinking"), COIN, (" tails", " heads"))


# What is drawn


def of_coin(by: Any) -> DlaResult:
    return dla(Engine.load("coin-plain"), COIN, (" tails", " heads"), by=by)


def test_the_table_names_the_largest_part_first() -> None:
    result = of_coin("head")
    values = result.frame["value"]
    assert (values.abs().diff().dropna() <= 0).all() and len(values) == len(result.parts)
    first = max(result.parts, key=lambda part: abs(part.value))
    assert result.frame.iloc[0]["part"] == first.name and f"{result.total:.4g}" in repr(result)


def test_figures_show_the_parts() -> None:
    by_layer = of_coin("layer")
    axis = by_layer.plot().axes[0]
    names, drawn = [tick.get_text() for tick in axis.get_xticklabels()], {}
    for bar in axis.patches:
        drawn[round(bar.get_x() + bar.get_width() / 2, 6)] = bar.get_height()
    shifts = {"attention": -0.2, "MLP": 0.2}
    for part in by_layer.parts:
        at = names.index(part.name if part.layer is None else str(part.layer)) + shifts.get(part.kind, 0.0)
        assert drawn[round(at, 6)] == part.value
    by_head = of_coin("head")
    picture = by_head.plot()
    mesh = picture.axes[0].collections[0]
    wanted = np.array([part.value for part in by_head.parts if part.kind == "head"]).reshape(4, 4)
    assert np.array_equal(mesh.get_array(), wanted) and mesh.get_clim() == (-abs(wanted).max(), abs(wanted).max())
    mlps = sum(part.value for part in by_head.parts if part.kind == "MLP")
    assert f"MLP of all layers {mlps:.2f}" in picture.get_suptitle() and f"{mlps:.2f}" in by_head._repr_html_()
    by_neuron = of_coin("neuron")
    axis = by_neuron.plot().axes[0]
    top = by_neuron.frame.head(40)
    assert [bar.get_width() for bar in axis.patches] == list(top["value"])
    assert [tick.get_text() for tick in axis.get_yticklabels()] == list(top["part"])
    assert str(top["part"][0]) in by_neuron._repr_html_()
