"""Gold thoughts belong to the chunk with the earliest token that decides them. Prompts and completions share no chunk."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from replaylens import tasks
from replaylens.engine.errors import BadThought
from replaylens.engine.thinking.model import ThinkingConfig, padded
from replaylens.engine.training.thinking import METHODS, ChunkTable, Method, chunked
from replaylens.tasks import Example, WordTokenizer

PICTURE = "A coin's state is heads. Alice flips, then Bob flips. What's the state? A:"
CONFIG = ThinkingConfig(chunk=2, read_layer=2, eos_token=WordTokenizer.eos_id, pad_token=WordTokenizer.pad_id, max_thought=4)


def coin(**knobs: object) -> tuple[WordTokenizer, list[Example]]:
    task = tasks.get("coin")(**knobs)
    return WordTokenizer(task.vocabulary()), task.examples(20)


def picture() -> tuple[WordTokenizer, Example]:
    """The sentence of the fifth picture, as an example of the task."""
    task = tasks.get("coin")()
    example = replace(task.example(0), prompt=PICTURE, completion=" heads.", answer=" heads")
    return WordTokenizer(task.vocabulary()), example


def test_the_pictures_sentence() -> None:
    tokenizer, example = picture()
    text = chunked(example, tokenizer, CONFIG, "thinking")
    shown = {
        tokenizer.decode(text.prompt[2 * i : 2 * i + 2]): tokenizer.decode(thought)
        for i, thought in enumerate(text.thoughts)
        if len(thought) > 1
    }
    assert shown == {" Alice flips": " tails", " Bob flips": " heads"}
    assert len(text.prompt) == 20, "19 tokens and one pad"


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 8, 50])
@pytest.mark.parametrize("method", METHODS)
def test_borders_and_places(chunk: int, method: Method) -> None:
    config = replace(CONFIG, chunk=chunk, max_thought=16)
    tokenizer, examples = coin(rendering="states")
    for example in examples:
        text = chunked(example, tokenizer, config, method)
        assert len(text.prompt) % chunk == 0
        assert len(text.thoughts) == len(text.prompt) // chunk
        words = [word for thought in text.thoughts for word in thought[:-1]]
        assert tokenizer.decode(words) == "".join(words for _, words in example.thoughts)
        _, offsets = tokenizer.encode_with_offsets(example.prompt)
        for read, _ in example.thoughts:
            earliest = next(i for i, (_, end) in enumerate(offsets) if end >= read)
            assert len(text.thoughts[earliest // chunk]) > 1
        assert text.completion[text.answer - 1] == tokenizer.id(example.answer)
        if method == "cot":
            assert text.completion[: len(words) + 1] == (*words, config.eos_token)


@pytest.mark.parametrize("name", tasks.names())
def test_every_task_with_steps_can_be_cut(name: str) -> None:
    task = tasks.get(name)()
    tokenizer = WordTokenizer(sorted(set(task.vocabulary())))
    for example in task.examples(5):
        text = chunked(example, tokenizer, replace(CONFIG, chunk=4, max_thought=64), "thinking")
        assert tokenizer.decode(text.prompt) == example.prompt


def test_a_thought_that_does_not_fit() -> None:
    tokenizer, examples = coin(rendering="states", flips=8)
    with pytest.raises(BadThought, match="Raise max_thought, or use smaller chunks"):
        chunked(examples[0], tokenizer, replace(CONFIG, chunk=50), "thinking")


def test_packed_rows_hold_whole_texts_and_states_do_not_cross_them() -> None:
    tokenizer, examples = coin(flips=(1, 3))
    texts = [chunked(example, tokenizer, CONFIG, "thinking") for example in examples]
    table = ChunkTable(texts, CONFIG, 10.0, torch.device("cpu"))
    row = table.row(np.array([3, 5, 7, 9, 11]), 64)
    batch = table.batch(row[None])
    kept = [i for i, end in zip([3, 5, 7, 9, 11], np.cumsum(table.sizes[[3, 5, 7, 9, 11]]), strict=True) if end <= 64]
    assert kept and kept != [3, 5, 7, 9, 11]
    ids = [token for token in batch.tokens.flatten().tolist() if token not in (CONFIG.pad_token, CONFIG.eos_token)]
    assert tokenizer.decode(ids) == "".join(examples[i].text for i in kept)
    assert (~batch.continues[0]).nonzero().flatten().tolist()[: len(kept)] == np.cumsum([0, *table.sizes[kept[:-1]]]).tolist()
    assert not bool(batch.weights[0][batch.tokens[0] == CONFIG.pad_token].any())
    assert int(batch.thinks.sum()) == sum(len(texts[i].thoughts) for i in kept)


def test_padded() -> None:
    assert padded([5, 6, 7], CONFIG) == (5, 6, 7, CONFIG.pad_token)
    assert padded([5, 6], CONFIG) == (5, 6)
