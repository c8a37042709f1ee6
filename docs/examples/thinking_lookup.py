"""Which thoughts about variables go wrong beyond the trained length?

python docs/examples/thinking_lookup.py MODEL [LENGTH ...]

Under the true states, so that no error comes of an earlier one. A thought needs the values of the variables on the right side
of its operation, and each of them stands in the thought after which it was last changed: so many operations back. Texts of up
to N operations never show a distance above N; longer ones do. MODEL is a folder that
`python -m bench run thinking-variables-gpu --set models=FOLDER` left.
"""

import json
import re
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from replaylens.tasks import WordTokenizer
from replaylens.thinking import model as thinking
from replaylens.thinking.model import ThinkingDecoder
from replaylens.training import embedded as zoo
from replaylens.training import thinking as plain
from replaylens.training.recipe import RecipePart
from replaylens.training.thinking import ChunkTable, chunked

VARIABLES = RecipePart("variables", 1.0)
EXAMPLES = 200
EDGES = (0, 3, 6, 8, 10, 12, 15, 20, 1000)
"""of the distances that are counted together: [0, 3), [3, 6), ..."""


def distances(prompt: str) -> list[int]:
    """Of each operation, how many operations back the value was told that lies farthest back; 0: it needs none."""
    told, found = {}, []
    for sentence in prompt.split(": ", 1)[1].split(".")[:-1]:
        target, right = sentence.split(" = ")
        read = re.findall("[a-h]", right)
        if len(told) == len({*told, target.strip()}) or read:  # the first sentence about a variable is no operation
            found.append(max((len(found) - told[name] for name in read), default=0))
            told[target.strip()] = len(found) - 1
        else:
            told[target.strip()] = -1
    return found


@torch.no_grad()
def thoughts(model: ThinkingDecoder, tokenizer: WordTokenizer, length: int) -> list[tuple[int, bool]]:
    """(distance, right?) of every thought about an operation."""
    out = []
    for example in zoo.held_out(VARIABLES, length, EXAMPLES):
        text = chunked(example, tokenizer, model.thinking, "thinking")
        table = ChunkTable([text], model.thinking, 1.0, torch.device("cpu"))
        batch = table.batch(table.row(np.array([0]), int(table.sizes[0]))[None])
        hidden, _ = plain.run(model, batch.tokens, plain.shifted(plain.states_of(model, batch.thoughts), batch.continues))
        said = plain.think(model, hidden[0], model.thinking.max_thought).tolist()
        right = [tuple(s[: len(t)]) == t for s, t in zip(said, text.thoughts, strict=False) if len(t) > 1]
        out += list(zip(distances(example.prompt), right, strict=True))
    return out


def main(folder: Path, lengths: list[int]) -> None:
    model, tokenizer = thinking.load(folder), WordTokenizer.load(folder / zoo.TOKENIZER_FILE)
    groups: dict[int, list[bool]] = defaultdict(list)
    for length in lengths:
        for distance, right in thoughts(model, tokenizer, length):
            groups[max(edge for edge in EDGES if edge <= distance)].append(right)
    for low, high in pairwise(EDGES):
        if groups[low]:
            wrong = len(groups[low]) - sum(groups[low])
            line = {"distance": [low, high - 1], "thoughts": len(groups[low]), "wrong": wrong}
            print(json.dumps(line | {"percent": round(100 * wrong / len(groups[low]), 2)}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(length) for length in sys.argv[2:]] or [20, 30, 40])
