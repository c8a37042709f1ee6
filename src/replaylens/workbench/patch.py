"""`patch`: activation patching. Which activations, copied from one prompt into another, carry a behaviour over?"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import pandas as pd
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.values import whole
from replaylens.engine.serving.core import Core
from replaylens.engine.serving.logits import At, chosen
from replaylens.workbench.drawing import Grid, figure, paragraph, plain, view
from replaylens.workbench.metric import Metric, MetricTokens, RowsFunction, words

Direction = Literal["denoise", "noise"]
Values = Literal["effect", "raw"]
_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output", "heads": "attention heads"}


@dataclass(frozen=True, eq=False)
class PatchResult:
    """The metric after each patch, by site: [layers, positions], or [layers, heads] of `heads`."""

    metric: str
    direction: Direction
    base: float
    """the metric of the prompt that is patched: the corrupt one if denoising, else the clean one"""
    source: float
    """the metric of the prompt that activations are taken from"""
    raw: dict[str, Tensor]
    """site -> the metric under each patch"""
    columns: dict[str, tuple[str, ...]]
    """site -> names of its columns: tokens of the patched prompt, or heads"""
    numbers: dict[str, tuple[int, ...]]
    """site -> the positions or heads of its columns"""

    def __repr__(self) -> str:
        grids = ", ".join(f"{site} {tuple(values.shape)}" for site, values in self.raw.items())
        return f"PatchResult({self.metric}, {self.direction}: {self.base:.4g} to {self.source:.4g}; {grids})"

    @property
    def effect(self) -> dict[str, Tensor]:
        """(raw - base) / (source - base): 0 if a patch changes nothing, 1 if it carries the whole difference over."""
        return {site: (values - self.base) / (self.source - self.base) for site, values in self.raw.items()}

    @property
    def frame(self) -> pd.DataFrame:
        """One line per patch, the strongest effect first."""
        lines = []
        for site, effect in self.effect.items():
            kind = "head" if site == "heads" else "position"
            for layer in range(effect.shape[0]):
                for j, (name, number) in enumerate(zip(self.columns[site], self.numbers[site], strict=True)):
                    known = {"site": site, "layer": layer, kind: number, "token": None if kind == "head" else name}
                    lines.append(known | {"raw": float(self.raw[site][layer, j]), "effect": float(effect[layer, j])})
        return pd.DataFrame(lines).sort_values("effect", ascending=False, key=abs, kind="stable", ignore_index=True)

    def grids(self, values: Values = "effect") -> list[Grid]:
        """One grid per site."""
        if values not in ("effect", "raw"):
            raise BadRequest(f"Unknown values {values!r}. Known: effect, raw.")
        around = 0.0 if values == "effect" else self.base
        return [
            Grid(_NAMES[site], [str(i) for i in range(len(grid))], self.columns[site], grid.numpy(), around=around)
            for site, grid in getattr(self, values).items()
        ]

    def plot(self, values: Values = "effect") -> Figure:
        """A heat map per site: layers by positions, or layers by heads."""
        label = "effect of the patch" if values == "effect" else "metric under the patch"
        made = figure(self.grids(values), label, "layer", "head" if set(self.raw) == {"heads"} else "token")
        made.suptitle(f"Patching ({self.direction}): {plain(self.metric)}", fontsize=9)
        return made

    def _repr_html_(self) -> str:
        lead = f"{self.metric}: {self.base:.3f} unpatched, {self.source:.3f} in the source prompt."
        return view(self.grids(), paragraph(lead), note="0: the patch changes nothing; 1: it carries the difference over.")


def patch(
    engine: Core,
    clean: str | list[int],
    corrupt: str | list[int],
    *,
    metric: MetricTokens | RowsFunction,
    sites: str = "S",
    positions: At = None,
    heads: bool | Sequence[int] = False,
    direction: Direction = "denoise",
    progress: bool = False,
) -> PatchResult:
    """Copy activations of one prompt into the other, one cell of the grid at a time, and measure the next token.

    clean, corrupt  prompts with the same number of tokens
    metric      a pair of tokens (their logit difference), one token (its log-probability), or a function of logits
                [rows, vocab] that returns [rows]; of the last position
    sites       letters: S (residual stream), T (attention output), C (MLP output); a grid of layers x positions each
    positions   those to patch; None: all
    heads       True or head numbers: patch the outputs of single heads (hook_z) instead, each at all `positions` together; a
                grid of layers x heads
    direction   "denoise": clean activations into the corrupt prompt; "noise": corrupt ones into the clean prompt

    All cells share the prompt's KV and are computed together; each has the bits of its edit made alone.

    >>> from replaylens import Engine, patch
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> result = patch(engine, text.format("heads"), text.format("tails"), metric=(" tails", " heads"))
    >>> round(float(result.effect["S"][0].max()), 3)  # the residual stream that enters block 0 at the changed word
    1.0
    """
    path, other = both(engine, clean, corrupt, direction)
    measure, at = Metric.of(engine, metric), sorted(chosen(positions, len(path)))
    wanted = _wanted(engine, sites, heads)
    rows = activations(engine, other, [name for names in wanted.values() for name in names])
    numbers = tuple(_heads(engine, heads)) if "heads" in wanted else tuple(at)
    edits = {
        site: [[_edit(name, rows[name], number, at, site == "heads")] for name in names for number in numbers]
        for site, names in wanted.items()
    }
    with engine.variants(path) as base:
        read = lambda logits: measure(logits[:, 0])  # noqa: E731
        together = [[], *(edit for each in edits.values() for edit in each)]
        found = base.read(together, [-1], read, progress)
    there = of_source(engine, other, measure, float(found[0]))
    pieces = found[1:].split([len(each) for each in edits.values()])
    raw = {site: piece.view(len(wanted[site]), -1) for site, piece in zip(edits, pieces, strict=True)}
    text = words(engine, path)
    columns = {site: tuple(str(n) if site == "heads" else text[n] for n in numbers) for site in raw}
    return PatchResult(measure.name, direction, float(found[0]), there, raw, columns, dict.fromkeys(raw, numbers))


def both(engine: Core, clean: str | list[int], corrupt: str | list[int], direction: Direction) -> tuple[list[int], list[int]]:
    """(the prompt that is patched, the prompt that activations are taken from); BadRequest if they differ in length."""
    if direction not in ("denoise", "noise"):
        raise BadRequest(f"Unknown direction {direction!r}. Known: denoise, noise.")
    first, second = engine.tokens_of(clean), engine.tokens_of(corrupt)
    if len(first) != len(second):
        raise BadRequest(
            f"The prompts have {len(first)} (clean) and {len(second)} (corrupt) tokens. Patching copies position by position: "
            "give prompts with the same number of tokens."
        )
    return (second, first) if direction == "denoise" else (first, second)


def of_source(engine: Core, path: list[int], measure: Metric, base: float) -> float:
    """The metric of the source prompt; BadRequest if it is that of the base."""
    found = float(measure(engine.logits(path)[None]))
    if found == base:
        raise BadRequest(f"{measure.name} is {base:.4g} for both prompts: there is nothing to carry over. Give other prompts.")
    return found


def _wanted(engine: Core, sites: str, heads: bool | Sequence[int]) -> dict[str, list[str]]:
    """The sites of each letter in layer order."""
    if heads is not False:
        return {"heads": [engine.sites.resolve(f"blocks.{layer}.attn.hook_z") for layer in range(engine.config.num_layers)]}
    letters = [letter for letter in sites.replace(",", "").replace(" ", "")]
    if not letters or set(letters) - set("STC"):
        raise BadRequest(f"Invalid sites={sites!r}. Give letters among S, T and C, or heads=True.")
    return {letter: engine.sites.per_layer(letter) for letter in dict.fromkeys(letters)}


def _heads(engine: Core, heads: bool | Sequence[int]) -> list[int]:
    count = engine.config.num_heads
    return list(range(count)) if isinstance(heads, bool) else [whole("heads", head, 0, count - 1) for head in heads]


def activations(engine: Core, path: list[int], names: list[str]) -> dict[str, Tensor]:
    """The rows of some sites."""
    branch = engine.prompt(path, sites=names)
    try:
        return {name: branch.activations[name] for name in names}
    finally:
        branch.release()


def _edit(name: str, rows: Tensor, number: int, at: list[int], head: bool) -> Edit:
    """The patch of one cell."""
    if head:
        return Edit(name, "set", rows[at][:, [number]], positions=at, heads=[number])
    return Edit(name, "set", rows[number], positions=number)
