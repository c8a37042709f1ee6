"""The workbench on SmolLM2-135M against a loop over TransformerLens' hooks: CPU seconds per cell of a grid.

    python -m benchmarks.workbench

Both sides run on one thread and take turns in one run; the best round of each counts. A round of ours is the whole verb: both
prompts, all cells, the metric. TransformerLens runs a sample of the same cells, one hooked pass each. The largest difference
between the two is reported as well.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.table import Table
from replaylens import Engine, ablate, patch
from replaylens.engine.model import smollm2

CLEAN = "When Mary and John went to the store, John gave a drink to"
CORRUPT = "When Mary and John went to the store, Mary gave a drink to"
TOKENS = (" Mary", " John")
LAYERS = (0, 7, 15, 22, 29)
"""layers of the sample, evenly spread: a cell costs us more the lower its layer"""
PATCHED = [(layer, position) for layer in LAYERS for position in (2, 9, 13)]
ABLATED = [(layer, head) for layer in LAYERS for head in (0, 4, 8)]
Cell = tuple[int, int]


def hooked(model: Any) -> Any:
    """A bridge around the same weights."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    folder = str(smollm2.model_folder())
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32)


class Hooks:
    """The same cells by hook functions."""

    def __init__(self, bridge: Any, engine: Engine) -> None:
        self.bridge = bridge
        self.clean, self.corrupt = (torch.tensor([engine.tokens_of(text)]) for text in (CLEAN, CORRUPT))
        self.right, self.wrong = engine.token_ids_of(TOKENS)
        with torch.no_grad():
            _, cache = bridge.run_with_cache(self.clean, names_filter=lambda name: name.endswith("hook_in"))
        self.rows = {f"blocks.{layer}.hook_in": cache[f"blocks.{layer}.hook_in"] for layer in range(engine.config.num_layers)}

    def patched(self, cell: Cell) -> float:
        layer, position = cell
        site = f"blocks.{layer}.hook_in"

        def put(value: Tensor, hook: Any) -> Tensor:
            value = value.clone()
            value[:, position] = self.rows[site][:, position]
            return value

        return self._difference(self.corrupt, site, put)

    def ablated(self, cell: Cell) -> float:
        layer, head = cell

        def zero(value: Tensor, hook: Any) -> Tensor:
            value = value.clone()
            value[:, :, head] = 0
            return value

        return self._difference(self.clean, f"blocks.{layer}.attn.hook_z", zero)

    def _difference(self, tokens: Tensor, site: str, change: Callable[[Tensor, Any], Tensor]) -> float:
        with torch.no_grad():
            logits = self.bridge.run_with_hooks(tokens, fwd_hooks=[(site, change)])
        return float(logits[0, -1, self.right] - logits[0, -1, self.wrong])


def patches(engine: Engine) -> Tensor:
    """[layers, positions]"""
    return patch(engine, CLEAN, CORRUPT, metric=TOKENS).raw["S"]


def ablations(engine: Engine) -> Tensor:
    """[LAYERS, heads]"""
    heads = [(layer, head) for layer in LAYERS for head in range(engine.config.num_heads)]
    return ablate(engine, [CLEAN], metric=TOKENS, heads=heads).ablated.view(len(LAYERS), -1)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin = time.process_time()
    done = work()
    return time.process_time() - begin, done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM

    engine = Engine.load("smollm2")
    hooks = Hooks(hooked(AutoModelForCausalLM.from_pretrained(smollm2.model_folder(), dtype=torch.float32)), engine)
    table = Table("workbench-cpu", "CPU seconds of TransformerLens' hooks per cell / ours")
    patching = "patch: 31 layers x 14 positions of SmolLM2-135M"
    measure(table, patching, rounds, lambda: patches(engine), hooks.patched, PATCHED, PATCHED)
    places = [(LAYERS.index(layer), head) for layer, head in ABLATED]
    ablating = "ablate: heads of SmolLM2-135M, 14 tokens"
    measure(table, ablating, rounds, lambda: ablations(engine), hooks.ablated, ABLATED, places)
    table.save()


def measure(
    table: Table,
    what: str,
    rounds: int,
    ours: Callable[[], Tensor],
    theirs: Callable[[Cell], float],
    cells: list[Cell],
    places: list[Cell],
) -> None:
    """Mutates the table: adds the ratio of one verb.

    places  of the cells in our grid
    """
    mine = other = float("inf")
    for _ in range(rounds):
        seconds, grid = timed(ours)
        mine = min(mine, seconds / grid.numel())
        seconds, values = timed(lambda: [theirs(cell) for cell in cells])
        other = min(other, seconds / len(cells))
    apart = max(abs(float(grid[place]) - value) for place, value in zip(places, values, strict=True))
    numbers = {"ours_ms": 1e3 * mine, "hooks_ms": 1e3 * other, "largest_difference": apart}
    table.add(what, ratio=other / mine, aim=">= 8x", met=other / mine >= 8, **numbers)


if __name__ == "__main__":
    main()
