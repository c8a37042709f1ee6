"""The Thinking-States model: what it computes, how it is initialised and saved, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from replaylens.engine.errors import BadConfig, BadWeights
from replaylens.engine.model.ops import SequenceOps
from replaylens.engine.thinking import model as thinking
from replaylens.engine.thinking.model import ThinkingConfig, ThinkingDecoder
from replaylens.engine.training import thinking as plain
from replaylens.engine.training.score import along
from tests.engine.reference import random_decoder
from tests.engine.thinking.reference import BASE, EOS, PAD, random_prompt, thinking_model

CONFIG = BASE


def shape(chunk: int = 3, **others: Any) -> ThinkingConfig:
    return ThinkingConfig.for_backbone(CONFIG, chunk, EOS, PAD, **{"max_thought": 4, **others})


def text(chunks: int) -> torch.Tensor:
    return torch.tensor(random_prompt(chunks)).view(chunks, 3)


# What the model computes


def test_without_thoughts_it_is_its_backbone() -> None:
    made, tokens = thinking_model(), text(5)
    empty = torch.full((5, 4), EOS)
    states = plain.states_of(made, empty[None])
    assert torch.equal(states, torch.zeros_like(states)), "the state of an empty thought is exactly zero"
    _, last = plain.run(made, tokens[None], states)
    ops = SequenceOps([15])
    assert torch.equal(last.view(15, -1), made.backbone(tokens.flatten(), torch.arange(15), ops))


def test_texts_side_by_side_with_a_cache_think_as_each_does_alone() -> None:
    made, tokens = thinking_model(), torch.stack([text(7), text(7).flip(0)])
    thinks = torch.ones(2, 7, dtype=torch.bool)
    thoughts, last = along(made, tokens, thinks)
    for i in range(2):
        alone, _, logits = plain.sequential(made, tokens[i])
        assert any(t[0] != EOS for t in alone), "something is thought"
        assert torch.equal(thoughts[i], alone)
        again = made.backbone.logits(last[i].view(21, -1), SequenceOps([21])).view(7, 3, -1)
        assert torch.allclose(again, logits, atol=1e-4)
    first = int((thoughts[0, :, 0] != EOS).nonzero()[0])
    thinks[0, first] = False
    silenced, _ = along(made, tokens, thinks)
    assert int(silenced[0, first, 0]) == EOS and not torch.equal(silenced[0], thoughts[0])
    assert torch.equal(silenced[1], thoughts[1])


def test_a_state_reaches_the_next_chunk_and_no_earlier_one() -> None:
    made, tokens = thinking_model(), text(4)
    states = torch.zeros(1, 4, 3, CONFIG.d_model)
    _, without = plain.run(made, tokens[None], states)
    states[:, 2] = 1.0
    _, having = plain.run(made, tokens[None], states)
    assert torch.equal(having[:, :2], without[:, :2])
    assert not torch.equal(having[:, 2], without[:, 2])
    assert not torch.equal(having[:, 3], without[:, 3])


@pytest.mark.parametrize("length", [2, 3, 4, 6])
def test_a_thought_is_compressed_to_the_last_real_positions(length: int) -> None:
    """Fill tokens and batch padding change nothing: the state of a long thought comes from its own last c positions."""
    made = thinking_model(max_thought=8)
    words = torch.tensor([[*range(5, 5 + length - 1), EOS]])
    alone = plain.states_of(made, words)
    roomy = plain.states_of(made, torch.cat([words, torch.full((1, 8 - length), EOS)], dim=1))
    assert torch.allclose(alone, roomy, atol=1e-5)
    filled = torch.cat([words[0], torch.full((max(0, 3 - length),), EOS)])
    rows = made.run_compress(filled, torch.arange(len(filled)), SequenceOps([len(filled)]))
    assert torch.allclose(alone[0], rows[-3:], atol=1e-5)


def test_thoughts_are_cut_at_the_limit() -> None:
    made = thinking_model()
    with torch.no_grad():
        made.think_unembed[EOS] = -1e3 * made.think_norm.weight.sign()
        made.think_unembed[7] = 1e3 * made.think_norm.weight.sign()
    hidden = torch.ones(2, 3, CONFIG.d_model)
    found = plain.think(made, hidden, 4)
    assert found.shape == (2, 4)
    assert found[:, -1].tolist() == [EOS, EOS]


# Initialisation and saving


def test_t_starts_as_the_last_block_and_c_as_the_first() -> None:
    backbone = random_decoder(CONFIG)
    made = ThinkingDecoder.around(backbone, shape())
    for block, source in ((made.think, backbone.blocks[-1]), (made.compress, backbone.blocks[0])):
        assert all(torch.equal(x, source.state_dict()[name]) for name, x in block.state_dict().items())
    assert torch.equal(made.think_unembed, backbone.embed)
    made.think.attn.o.weight.data.add_(1.0)
    assert not torch.equal(made.think.attn.o.weight, made.backbone.blocks[-1].attn.o.weight), "copies, not ties"


def test_saved_and_loaded(tmp_path: Path) -> None:
    made = thinking_model()
    thinking.save(made, tmp_path)
    back = thinking.load(tmp_path)
    assert back.thinking == made.thinking
    assert back.config == made.config
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in made.state_dict().items())


# What the model refuses


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"chunk": 0}, "chunk must be at least 1"),
        ({"max_thought": 1}, "max_thought must be at least 2"),
        ({"write_layer": 2}, "must come before read_layer"),
        ({"read_layer": 4}, "must come before read_layer"),
        ({"eos_token": 29}, "needs a tokenizer with an <EOS>"),
        ({"pad_token": -1}, "pad_token -1 is not in the vocabulary"),
    ],
)
def test_impossible_configs(changes: dict[str, int], says: str) -> None:
    with pytest.raises(BadConfig, match=says):
        replace(shape(), **changes).check(CONFIG)


def test_a_backbone_of_two_blocks_is_too_shallow() -> None:
    with pytest.raises(BadConfig, match="at least 3"):
        ThinkingConfig.for_backbone(replace(CONFIG, num_layers=2), 3, EOS, PAD)


@pytest.mark.parametrize(("part", "says"), [("think.", "thinking block T"), ("compress.", "compression block C")])
def test_a_checkpoint_without_t_or_c(tmp_path: Path, part: str, says: str) -> None:
    thinking.save(thinking_model(), tmp_path)
    file = tmp_path / thinking.WEIGHTS_FILE
    save_file({name: x for name, x in load_file(file).items() if not name.startswith(part)}, file)
    with pytest.raises(BadWeights, match=says):
        thinking.load(tmp_path)
    file.unlink()
    with pytest.raises(BadWeights, match="neither T nor C"):
        thinking.load(tmp_path)


def test_a_plain_decoder_is_no_thinking_one(tmp_path: Path) -> None:
    with pytest.raises(BadConfig, match="plain decoder"):
        thinking.load(tmp_path)
