"""A pytest plugin: TransformerLens' own tests get caches that a replaylens engine made, of a tiny GPT-2 with random weights."""

import copy
import json
import os
import tempfile
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

import replaylens as rl
from replaylens.engine.serving.transformer_lens import CacheModel

PROMPTS = " ".join(
    [
        "When John and Mary went to the shops, Mary gave the bag to John. When Tom and James went to the park, James gave the",
        "ball to Tom. When Dan and Sid went to the shops, Sid gave an apple to Dan. After Martin and Amy went to the park, Amy",
        "gave a drink to Martin. The quick brown fox jumps over the lazy dog. Hello world! This is a test",
    ]
)
FOLDER = tempfile.TemporaryDirectory()
"""of the tiny model: a bridge reads its tokenizer again"""
CONTROL = "PEERS_CONTROL"
"""set: the tests get a bridge of TransformerLens around the same model instead, to see which of them it passes"""


class Ours:
    """What a test calls a model: an engine, whose caches are under test, with what TransformerLens' caches read of a model."""

    def __init__(self, engine: rl.Engine) -> None:
        self.engine, self.read = engine, CacheModel(engine)

    def enable_compatibility_mode(self, **_: Any) -> None:
        """Folds weights, there. Here caches are of the model as it is."""

    def cpu(self) -> "Ours":
        """An engine stays where it was loaded, which is there."""
        return self

    @property
    def hook_dict(self) -> dict[str, Any]:
        return dict(self.engine.sites.sites)

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.engine(*args, **options)

    def run_with_cache(self, tokens: Any, **options: Any) -> Any:
        """Counts the caches that a test gets from us."""
        _asked.append(1)
        return self.engine.run_with_cache(tokens, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine if hasattr(self.engine, name) else self.read, name)


@cache
def tiny() -> tuple[Any, Any]:
    """Three layers, with a tokenizer to which all words of the tests' prompts are single tokens."""
    from tokenizers import Regex, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Split
    from transformers import AutoTokenizer, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

    cut = Split(Regex(r" ?\w+|[^\w\s]|\s"), "isolated")
    words = sorted({word for text in (PROMPTS, f" {PROMPTS}") for word, _ in cut.pre_tokenize_str(text)})
    made = Tokenizer(WordLevel({word: i for i, word in enumerate([*words, "<end>", "<unk>"])}, unk_token="<unk>"))
    made.pre_tokenizer, made.decoder = cut, Fuse()
    torch.manual_seed(0)
    shape = GPT2Config(vocab_size=len(words) + 2, n_embd=48, n_layer=3, n_head=4, n_positions=64, initializer_range=0.2)
    special = {"bos_token": "<end>", "eos_token": "<end>", "unk_token": "<unk>", "pad_token": "<end>"}
    model = GPT2LMHeadModel(shape).eval()
    model.config.save_pretrained(FOLDER.name)
    PreTrainedTokenizerFast(tokenizer_object=made, **special).save_pretrained(FOLDER.name)
    return model, AutoTokenizer.from_pretrained(FOLDER.name)


def made(boot: Any) -> Any:
    """The model that a test gets: ours, or as a control theirs."""
    model, tokenizer = tiny()
    if CONTROL not in os.environ:
        return Ours(rl.Engine.load(model, tokenizer=tokenizer))
    return boot(FOLDER.name, hf_model=copy.deepcopy(model), tokenizer=tokenizer, device="cpu", dtype=torch.float32)


def pytest_configure(config: Any) -> None:
    from transformer_lens.model_bridge import TransformerBridge

    boot = TransformerBridge.boot_transformers
    TransformerBridge.boot_transformers = lambda name, **_: made(boot)


# ---- results ---------------------------------------------------------------------------------------------------------

_asked: list[int] = []
"""caches that the running test has got from us"""


@pytest.fixture(scope="session")
def gpt2_bridge() -> Any:
    from transformer_lens.model_bridge import TransformerBridge

    return TransformerBridge.boot_transformers("gpt2")


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Writes one line per test: its name, how it ended, whether it got a cache of ours, the first line of its error."""
    found = (yield).get_result()
    if found.when == "setup":
        _asked.clear()
    if found.when == "call" or found.outcome != "passed":
        said = (
            ""
            if found.outcome == "passed"
            else (str(call.excinfo.value if call.excinfo else "").strip().splitlines() or [""])[0][:160]
        )
        line = {
            "test": item.name,
            "outcome": found.outcome,
            "ours": bool(_asked) or "gpt2_bridge" in item.fixturenames,
            "error": said,
        }
        with open(os.environ["PEERS_RESULTS"], "a") as file:
            file.write(json.dumps(line) + "\n")
