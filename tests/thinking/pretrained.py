"""A tiny model in the format of published pretrained ones: random weights, and a Hugging Face tokenizer that splits words."""

from pathlib import Path
from typing import Any

import torch

from replaylens import tasks
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Decoder
from replaylens.training.recipe import PretrainedTokenizer
from replaylens.weights import loading

SPECIALS = ["<|text|>", "<|begin|>", "<|end|>"]
MERGES = 160


def hugging_face_tokenizer(begins: bool = False, **specials: str | None) -> Any:
    """A BPE tokenizer trained on the coin task's texts. `begins`: a prompt starts with a special token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [e.text for rendering in ("picture", "states", "wei") for e in tasks.get("coin")(rendering=rendering).examples(30)]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=256 + MERGES, special_tokens=SPECIALS, initial_alphabet=alphabet)
    )
    if begins:
        made.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    named = {"eos_token": "<|end|>", "pad_token": "<|end|>", "bos_token": "<|begin|>", "unk_token": "<|text|>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **{**named, **specials})


def write_backbone(folder: Path, **tokenizer: Any) -> Path:
    """A model folder with three random layers and the tokenizer."""
    own = hugging_face_tokenizer(**tokenizer)
    config = ModelConfig(
        num_layers=3, d_model=32, num_heads=2, num_kv_heads=1, d_head=16, d_mlp=48, vocab_size=len(own), max_positions=512,
        rotary_dim=16,
    )  # fmt: skip
    model = Decoder(config).initialize(0)
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(2 if x.ndim == 2 else 1)  # as in the trainer's own initialisation: learns within a hundred steps
    loading.save(model, folder)
    PretrainedTokenizer(own).save(folder / "tokenizer.json")
    return folder
