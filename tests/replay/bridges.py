"""TransformerBridges around the tiny models. Imports transformer_lens on demand, since the first import takes seconds."""

import copy
import tempfile
from functools import cache
from typing import Any

import torch

from tests.families import hugging_face


@cache
def bridge(name: str) -> Any:
    """A bridge around a copy of the family's model, booted from a folder with a tokenizer, as TransformerLens requires."""
    from transformer_lens.model_bridge import TransformerBridge

    model = copy.deepcopy(hugging_face(name))  # a bridge modifies the model that it wraps
    with tempfile.TemporaryDirectory() as folder:
        model.config.save_pretrained(folder)
        return TransformerBridge.boot_transformers(
            folder, hf_model=model, tokenizer=saved_tokenizer(folder), device="cpu", dtype=torch.float32
        )


def saved_tokenizer(folder: str) -> Any:
    """A tokenizer of 97 made-up words, saved to the folder and loaded again."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({f"w{i}": i for i in range(97)}, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="w0", eos_token="w1", bos_token="w2", pad_token="w3"
    ).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)
