"""`patch`: activation patching. Which activations, copied from one prompt into another, carry a behaviour over?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.display import Citable
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.sites import by_layer, numbered
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.positions import At, chosen, ends_of
from replaylens.engine.request.values import as_instance, as_int, as_list, short_repr, verb
from replaylens.gradients.attribution import Prompts, common_words, each_pair, pairs_of, require_one_length, t_interval
from replaylens.workbench.ablate import HeadChoice, chosen_heads, chosen_layers, pair_of, require_attention
from replaylens.workbench.drawing import Grid, Metric, RowMetric, figure, one_name, paragraph, plain, view, words

# ---- aligned ---------------------------------------------------------------------------------------------------------
# `Aligned`: two prompts, and which positions of one correspond to which of the other.

Direction = Literal["denoise", "noise"]
Align = str | Sequence[tuple[int, int]] | None
FORMS = "pairs (clean position, corrupt position), 'start', 'end', or 'text:SUBSTRING'"


@dataclass(frozen=True, eq=False)
class Aligned:
    """The prompt that is patched, and the one that activations are taken from."""

    base: list[int]
    source: list[int]
    pairs: tuple[tuple[int, int], ...]
    """(position of the base, position of the source), in the order of the base"""

    @classmethod
    def of(cls, engine: Engine, clean: Any, corrupt: Any, direction: Direction, align: Align, positions: At = None) -> Aligned:
        """The pairs at the chosen positions of the base; BadRequest if lengths differ and nothing says what corresponds."""
        if direction not in ("denoise", "noise"):
            raise BadRequest(f"Unknown direction {short_repr(direction)}. Known: denoise, noise.")
        first, second = engine.tokens_of(clean), engine.tokens_of(corrupt)
        pairs = _pairs(engine, first, second, align)
        if direction == "denoise":
            pairs = [(theirs, mine) for mine, theirs in pairs]
            first, second = second, first
        asked = set(chosen(positions, len(first), len(first), lambda: map(engine.text.token, first)))
        kept = tuple(sorted(pair for pair in pairs if pair[0] in asked))
        if not kept:
            raise BadRequest(f"positions={short_repr(positions)} has no counterpart in the other prompt. Give other positions.")
        return cls(first, second, kept)

    @property
    def at(self) -> list[int]:
        """The positions of the base."""
        return [mine for mine, _ in self.pairs]

    @property
    def there(self) -> list[int]:
        """The positions of the source, in the order of the base's."""
        return [theirs for _, theirs in self.pairs]


def _pairs(engine: Engine, clean: list[int], corrupt: list[int], align: Align) -> list[tuple[int, int]]:
    """(clean position, corrupt position) pairs."""
    lengths = len(clean), len(corrupt)
    if align is None:
        if lengths[0] != lengths[1]:
            raise BadRequest(
                f"The prompts have {lengths[0]} (clean) and {lengths[1]} (corrupt) tokens, but rows are copied one by one. "
                f"Give prompts with the same number of tokens, or say which correspond with align: {FORMS}."
            )
        return [(i, i) for i in range(lengths[0])]
    if isinstance(align, str):
        return _named(engine, clean, corrupt, align)
    found = []
    for pair in as_list("align", align, FORMS):
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise BadRequest(f"Invalid align: {short_repr(pair)} is not a pair. Give {FORMS}.")
        here, there = (as_int("align", p, -n, n - 1) % n for p, n in zip(pair, lengths, strict=True))
        found.append((here, there))
    if not found or any(len({pair[side] for pair in found}) < len(found) for side in (0, 1)):
        raise BadRequest(f"Invalid align={short_repr(align)}. Give at least one pair, and each position only once.")
    return found


def _named(engine: Engine, clean: list[int], corrupt: list[int], name: str) -> list[tuple[int, int]]:
    shorter = min(len(clean), len(corrupt))
    if name == "start":
        return [(i, i) for i in range(shorter)]
    if name == "end":
        return [(len(clean) - i, len(corrupt) - i) for i in range(shorter, 0, -1)]
    if not name.startswith("text:") or name == "text:":
        raise BadRequest(f"Unknown align={short_repr(name)}. Give {FORMS}.")
    substring = name.removeprefix("text:")
    ends = [ends_of(substring, words(engine, path)) for path in (clean, corrupt)]
    if not ends[0] or len(ends[0]) != len(ends[1]):
        raise BadRequest(
            f"{substring!r} occurs {len(ends[0])} times in the clean prompt and {len(ends[1])} times in the corrupt one. Give "
            "a text that occurs equally often in both, or pairs of positions."
        )
    return list(zip(*ends, strict=True))


def require_one_vocabulary(first: Engine, second: Engine) -> None:
    """BadRequest if two models do not have the same tokens: their logits and positions would not correspond."""
    sizes = first.config.vocab_size, second.config.vocab_size
    if sizes[0] != sizes[1]:
        raise BadRequest(f"The models have vocabularies of {sizes[0]} and {sizes[1]} tokens. Give models with the same tokens.")
    if first.text.tokenizer is None or second.text.tokenizer is None:
        return  # prompts are token ids then
    names = [_vocabulary(engine) for engine in (first, second)]
    if names[0] != names[1]:
        other = next((i for i, pair in enumerate(zip(*names, strict=False)) if pair[0] != pair[1]), min(map(len, names)))
        raise BadRequest(f"The models' tokenizers differ, first in token {other}. Give models with the same tokenizer.")


def _vocabulary(engine: Engine) -> list[str]:
    """The names of all tokens, in order."""
    known = getattr(engine.text.tokenizer, "get_vocab", None)
    if known is None:
        return [engine.text.token(token) for token in range(engine.config.vocab_size)]
    names: dict[str, int] = known()
    return sorted(names, key=names.__getitem__)


# ---- patch result ----------------------------------------------------------------------------------------------------
# `PatchResult`: the metric after each patch of a grid.

Values = Literal["effect", "raw"]
_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output", "heads": "attention heads"}


@dataclass(frozen=True, eq=False)
class PatchResult(Citable):
    """The metric after each patch, by site: [layers, positions], or [layers, heads] of `heads`. NaN: not asked for."""

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
    """site -> the positions or heads of its columns; positions are negative where pairs have different lengths"""
    layers: dict[str, tuple[int, ...]]
    """site -> the layers of its rows"""
    length: int = 0
    """tokens of the patched prompt"""
    pairs: tuple[PatchResult, ...] = ()
    """of a mean over pairs of prompts: the result of each"""

    @classmethod
    def mean(cls, pairs: Sequence[PatchResult], from_end: bool = False) -> PatchResult:
        """The mean over pairs of prompts; BadRequest if their positions do not correspond.

        from_end  positions of prompts with different lengths correspond if they are equally far from the end
        """
        if from_end and len({pair.length for pair in pairs}) > 1:
            pairs = [pair._at_end(pairs) for pair in pairs]
        first = pairs[0]
        for site in first.raw:
            if site != "heads":
                require_one_length([pair.length for pair in pairs], ", or align='end'")
                if any(pair.numbers[site] != first.numbers[site] for pair in pairs):
                    raise BadRequest("The pairs are patched at different positions. Give positions that all of them have.")
        middle = lambda values: sum(values) / len(pairs)  # noqa: E731
        names = {pair.metric for pair in pairs}
        return cls(
            first.metric if len(names) == 1 else "metric",
            first.direction,
            middle(pair.base for pair in pairs),
            middle(pair.source for pair in pairs),
            {site: torch.stack([pair.raw[site] for pair in pairs]).double().mean(0).float() for site in first.raw},
            {site: common_words([pair.columns[site] for pair in pairs]) for site in first.raw},
            first.numbers,
            first.layers,
            first.length,
            tuple(pairs),
            made_by=first.made_by,
        )

    def _at_end(self, pairs: Sequence[PatchResult]) -> PatchResult:
        """This pair, with the columns that all pairs have, counted from the end: -1 is the last position."""
        raw, columns, numbers = dict(self.raw), dict(self.columns), dict(self.numbers)
        for site in self.raw.keys() - {"heads"}:
            known = set.intersection(*({number - pair.length for number in pair.numbers[site]} for pair in pairs))
            kept = [i for i, number in enumerate(self.numbers[site]) if number - self.length in known]
            if not kept:
                raise BadRequest("The pairs have no patched position in common, counted from the end. Give other positions.")
            raw[site] = self.raw[site][:, kept]
            columns[site] = tuple(self.columns[site][i] for i in kept)
            numbers[site] = tuple(self.numbers[site][i] - self.length for i in kept)
        return replace(self, raw=raw, columns=columns, numbers=numbers, length=0)

    def __repr__(self) -> str:
        grids = ", ".join(f"{site} {tuple(values.shape)}" for site, values in self.raw.items())
        count = f"; mean of {len(self.pairs)} pairs" if self.pairs else ""
        return f"PatchResult({self.metric}, {self.direction}: {self.base:.4g} to {self.source:.4g}; {grids}{count})"

    @property
    def effect(self) -> dict[str, Tensor]:
        """(raw - base) / (source - base): 0 if a patch changes nothing, 1 if it carries the whole difference over. Of several
        pairs, the mean of theirs."""
        if self.pairs:
            return {site: self._effects(site).double().mean(0).float() for site in self.raw}
        return {site: (values - self.base) / (self.source - self.base) for site, values in self.raw.items()}

    def _effects(self, site: str) -> Tensor:
        """[pairs, layers, positions or heads]"""
        return torch.stack([pair.effect[site] for pair in self.pairs])

    @property
    def frame(self) -> pd.DataFrame:
        """One line per patch, the strongest effect first; of several pairs, with the 95 % interval of its mean effect over
        pairs (NaN for a single one)."""
        lines = []
        for site, effect in self.effect.items():
            low, high = t_interval(self._effects(site)) if self.pairs else (effect, effect)
            kind = "head" if site == "heads" else "position"
            for i, layer in enumerate(self.layers[site]):
                for j, (name, number) in enumerate(zip(self.columns[site], self.numbers[site], strict=True)):
                    if effect[i, j].isnan():
                        continue
                    known = {"site": site, "layer": layer, kind: number, "token": None if kind == "head" else name}
                    known |= {"raw": float(self.raw[site][i, j]), "effect": float(effect[i, j])}
                    ends = {"low": float(low[i, j]), "high": float(high[i, j]), "pairs": len(self.pairs)}
                    lines.append(known | ends if self.pairs else known)
        return pd.DataFrame(lines).sort_values("effect", ascending=False, key=abs, kind="stable", ignore_index=True)

    def grids(self, values: Values = "effect") -> list[Grid]:
        """One grid per site."""
        if values not in ("effect", "raw"):
            raise BadRequest(f"Unknown values {values!r}. Known: effect, raw.")
        around = 0.0 if values == "effect" else self.base
        return [
            Grid(_NAMES[site], [str(layer) for layer in self.layers[site]], self.columns[site], grid.numpy(), around=around)
            for site, grid in getattr(self, values).items()
        ]

    def plot(self, values: Values = "effect") -> Figure:
        """A heat map per site: layers by positions, or layers by heads."""
        label = "effect of the patch (0: none, 1: all of it)" if values == "effect" else "metric under the patch"
        made = figure(self.grids(values), label, "layer", "head" if set(self.raw) == {"heads"} else "token")
        count = f", mean of {len(self.pairs)} pairs" if self.pairs else ""
        called = one_name(pair.metric for pair in self.pairs or (self,))
        made.suptitle(f"Patching ({self.direction}): {plain(called)}{count}", fontsize=9)
        return self._shown(made)

    def _repr_html_(self) -> str:
        lead = f"{self.metric}: {self.base:.3f} unpatched, {self.source:.3f} in the source prompt."
        lead += f" Means over {len(self.pairs)} pairs." if self.pairs else ""
        return view(self.grids(), paragraph(lead), note="0: the patch changes nothing; 1: it carries the difference over.")


# ---- patch -----------------------------------------------------------------------------------------------------------

LayerCell = tuple[int, int]
"""layer, and position or head"""


@verb
def patch(
    engine: Engine,
    clean: Prompts,
    corrupt: Prompts,
    *,
    metric: RowMetric | list[RowMetric],
    sites: str = "S",
    layers: Sequence[int] | None = None,
    positions: At = None,
    heads: HeadChoice = False,
    direction: Direction = "denoise",
    align: Align = None,
    source: Engine | None = None,
    progress: bool = False,
) -> PatchResult:
    """Copy activations of one prompt into the other, one cell of the grid at a time, and measure the next token.

    clean, corrupt  prompts with the same number of tokens, or with `align`; or lists of them, all with the same number of
                tokens unless heads are patched or align="end", which counts positions from the end: the result is the mean
                over pairs, with intervals in its frame
    metric      a pair of tokens (their logit difference), one token (its log-probability), a branch (the KL divergence from
                its distribution), or a function of logits [rows, vocab] that returns [rows]; of the last position. For lists of
                prompts also a list with one for each pair
    sites       letters: S (residual stream), T (attention output), C (MLP output); a grid of layers x positions each
    layers      those to patch; None: all
    positions   those to patch, in the prompt that is patched; None: all
    heads       True, head numbers or (layer, head) pairs: patch the outputs of single heads (hook_z) instead, each at all
                `positions` together; a grid of layers x heads
    direction   "denoise": clean activations into the corrupt prompt; "noise": corrupt ones into the clean prompt
    align       for prompts of different lengths, which positions correspond: (clean position, corrupt position) pairs;
                "start" or "end", counted from there; or "text:SUBSTRING", the tokens that end its occurrences
    source      another model with the same tokens and shapes, which the copied activations come from; the prompts may be equal
                then

    All cells share the prompt's KV and are computed together; each has the bits of its edit made alone.

    >>> from replaylens import Engine, patch
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> result = patch(engine, text.format("heads"), text.format("tails"), metric=(" tails", " heads"))
    >>> round(float(result.effect["S"][0].max()), 3)  # the residual stream that enters block 0 at the changed word
    1.0
    """
    if (pairs := pairs_of(clean, corrupt)) is not None:
        options: dict[str, Any] = dict(sites=sites, layers=layers, positions=positions, heads=heads, direction=direction)
        options |= dict(align=align, source=source, progress=progress)
        each = each_pair(lambda pair, own: patch(engine, *pair, metric=own, **options), pairs, metric)
        return PatchResult.mean(each, from_end=align == "end")
    one: Any = metric
    two, measure = Aligned.of(engine, clean, corrupt, direction, align, positions), Metric.of(engine, one)
    cells = _cells(engine, sites, layers, heads, two)
    names = {site: _names(engine, site) for site in cells}
    origin = engine if source is None else _other(engine, source, [names[site][at[0]] for site in cells for at in cells[site]])
    rows = activations(origin, two.source, [names[site][layer] for site in cells for layer in _first(cells[site])])
    edits = {site: [[_edit(names[site][at[0]], rows, at[1], two, site == "heads")] for at in cells[site]] for site in cells}
    with engine.variants(two.base) as base:
        read = lambda logits: measure(logits[:, 0])  # noqa: E731
        found = base.read([[], *(edit for each in edits.values() for edit in each)], [-1], read, progress)
    there = of_source(origin, two.source, measure, float(found[0]))
    pieces = found[1:].split([len(each) for each in edits.values()])
    grids = {site: _grid(cells[site], piece) for site, piece in zip(cells, pieces, strict=True)}
    text = words(engine, two.base)
    return PatchResult(
        measure.name,
        direction,
        float(found[0]),
        there,
        {site: values for site, (_, _, values) in grids.items()},
        {site: tuple(str(n) if site == "heads" else text[n] for n in numbers) for site, (_, numbers, _) in grids.items()},
        {site: numbers for site, (_, numbers, _) in grids.items()},
        {site: layers for site, (layers, _, _) in grids.items()},
        len(two.base),
        made_by=tuple(dict.fromkeys(each.fingerprint for each in (engine, origin))),
    )


def _other(engine: Engine, source: Any, names: Sequence[str]) -> Engine:
    """The model that activations come from; BadRequest if its tokens or the shapes of the sites differ."""
    other = as_instance("source", source, Engine, "an engine")
    require_one_vocabulary(engine, other)
    for name in names:
        shapes = [each.sites.sites[name].shape if name in each.sites.sites else None for each in (engine, other)]
        if shapes[0] != shapes[1]:
            raise BadRequest(
                f"{name} has rows of shape {shapes[0]}, and {shapes[1] or 'does not exist'} in the source model. Give layers "
                "and sites that both have, with the same shapes."
            )
    return other


def of_source(engine: Engine, path: list[int], measure: Metric, base: float) -> float:
    """The metric of the source prompt; BadRequest if it is that of the base."""
    found = float(measure(engine.logits(path)[None]))
    if found == base:
        raise BadRequest(f"{measure.name} is {base:.4g} for both prompts: there is nothing to carry over. Give other prompts.")
    return found


def _cells(
    engine: Engine, sites: str, layers: Sequence[int] | None, heads: HeadChoice, two: Aligned
) -> dict[str, list[LayerCell]]:
    """The cells of each grid."""
    count = engine.config.num_layers
    if heads is not False:
        return {"heads": chosen_heads(engine, heads, None if layers is None else chosen_layers(layers, count))}
    given = as_instance("sites", sites, str, "letters among S, T and C")
    letters = [letter for letter in given.replace(",", "").replace(" ", "")]
    if not letters or set(letters) - set("STC"):
        raise BadRequest(f"Invalid sites={sites!r}. Give letters among S, T and C, or heads=True.")
    found = {letter: _layers(engine, letter, layers) for letter in dict.fromkeys(letters)}
    return {letter: [(layer, position) for layer in own for position in two.at] for letter, own in found.items()}


def _layers(engine: Engine, letter: str, layers: Sequence[int] | None) -> list[int]:
    """The chosen layers of a letter; BadRequest for one that lacks it, as some of a hybrid do."""
    names = _names(engine, letter)
    if not names:
        raise BadRequest(f"No layer of this {engine.config.family} model has {letter}. Leave it out of sites.")
    found = list(names) if layers is None else chosen_layers(layers, engine.config.num_layers + (letter == "S"))
    if bad := [layer for layer in found if layer not in names]:
        raise BadRequest(f"No {letter} at layer {bad[0]}. It has layers {numbered(names)}.")
    return found


def _names(engine: Engine, site: str) -> dict[int, str]:
    """The sites of a letter, or of heads, by layer."""
    if site != "heads":
        return by_layer(engine.sites.per_layer(site))
    return {layer: engine.sites.resolve(f"blocks.{layer}.attn.hook_z") for layer in engine.config.layers_with("attn")}


def _first(cells: list[LayerCell]) -> list[int]:
    return sorted({layer for layer, _ in cells})


def activations(engine: Engine, path: list[int], names: list[str]) -> dict[str, Tensor]:
    """The rows of some sites."""
    branch = engine.prompt(path, sites=names)
    try:
        return {name: branch.activations[name] for name in names}
    finally:
        branch.release()


def _edit(name: str, rows: dict[str, Tensor], number: int, two: Aligned, head: bool) -> Edit:
    """The patch of one cell."""
    if head:
        return Edit(name, "set", rows[name][two.there][:, [number]], positions=two.at, heads=[number])
    return Edit(name, "set", rows[name][dict(two.pairs)[number]], positions=number)


def _grid(cells: list[LayerCell], found: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """(layers, numbers, values [layers, numbers]); NaN where there is no cell."""
    layers, numbers = (tuple(sorted({cell[i] for cell in cells})) for i in (0, 1))
    values = torch.full((len(layers), len(numbers)), math.nan, dtype=torch.float32)
    for (layer, number), value in zip(cells, found.tolist(), strict=True):
        values[layers.index(layer), numbers.index(number)] = value
    return layers, numbers, values


# ---- path patch ------------------------------------------------------------------------------------------------------
# `path_patch`: which heads act on a receiving head, or on the output, directly rather than through other heads?

Into = Literal["q", "k", "v"]


@verb
def path_patch(
    engine: Engine,
    clean: Prompt,
    corrupt: Prompt,
    *,
    metric: RowMetric,
    receivers: Sequence[tuple[int, int]] | Literal["logits"] = "logits",
    into: Into = "v",
    direction: Direction = "denoise",
    align: Align = None,
    progress: bool = False,
) -> PatchResult:
    """Patch the path from each head to the receivers: the sender's output changes, other heads in between stay as they are.

    receivers  (layer, head) pairs, or "logits": the direct path to the output
    into       what of the receivers takes the change: queries ("q"), keys ("k") or values ("v"); heads that share keys and
               values change together
    others     as in `patch`

    First each sender's output (hook_z) is taken from the source prompt, while the outputs of all heads in later layers are
    held at the base prompt's; MLPs are computed again. Then the receivers' q, k or v of that pass is put into the base
    prompt, where everything follows from it. The result is a grid of senders, layers x heads.

    >>> from replaylens import Engine, path_patch
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> result = path_patch(engine, text.format("heads"), text.format("tails"), metric=(" tails", " heads"), receivers=[(1, 3)])
    >>> result.raw["heads"].shape  # senders in layers below the receiver
    torch.Size([1, 4])
    """
    two, measure = Aligned.of(engine, clean, corrupt, direction, align), Metric.of(engine, metric)
    path, count, everywhere = two.base, engine.config.num_heads, range(len(two.base))
    ends = [] if isinstance(receivers, str) and receivers == "logits" else _receivers(engine, receivers, into)
    last = max((layer for layer, _, _ in ends), default=engine.config.num_layers)
    layers = [layer for layer in engine.config.layers_with("attn") if layer < last]
    require_attention(engine.config, layers)
    if not layers:
        raise BadRequest(f"No layer below {last} has attention heads that could send. Give receivers in later layers.")
    outputs = [engine.sites.resolve(f"blocks.{layer}.attn.hook_z") for layer in layers]
    changed, held = activations(engine, two.source, outputs), activations(engine, path, outputs)
    senders = [(number, head) for number in range(len(layers)) for head in range(count)]
    sent = [
        [
            Edit(outputs[number], "set", changed[outputs[number]][two.there], positions=two.at, heads=[head]),
            *(Edit(name, "set", held[name], positions=everywhere) for name in outputs[number + 1 :]),
        ]
        for number, head in senders
    ]
    with engine.variants(path, keep=list(dict.fromkeys(site for _, site, _ in ends))) as base:
        if ends:
            arrived = base.capture(sent, progress)
            sent = [_received(ends, arrived, number, everywhere) for number in range(len(senders))]
        found = base.read([[], *sent], [-1], lambda logits: measure(logits[:, 0]), progress)
    there = of_source(engine, two.source, measure, float(found[0]))
    raw, numbers = {"heads": found[1:].view(len(layers), count)}, tuple(range(count))
    columns, rows = {"heads": tuple(map(str, numbers))}, {"heads": tuple(layers)}
    name, by = f"{measure.name}, by path", (engine.fingerprint,)
    return PatchResult(name, direction, float(found[0]), there, raw, columns, {"heads": numbers}, rows, made_by=by)


def _receivers(engine: Engine, receivers: Sequence[tuple[int, int]], into: Into) -> list[tuple[int, str, int]]:
    """(layer, site, head of the site) of each receiver; key heads for keys and values."""
    config = engine.config
    if into not in ("q", "k", "v"):
        raise BadRequest(f"Unknown into={into!r}. Known: q, k, v.")
    if config.latent is not None and into != "q":
        raise BadRequest(f"into={into!r}: latent attention computes no keys and values of heads. Use into='q'.")
    group = 1 if into == "q" else config.num_heads // config.num_kv_heads
    made = []
    for pair in as_list("receivers", receivers, "(layer, head) pairs, or 'logits'"):
        layer, head = pair_of("receivers", pair, config.num_layers, config.num_heads)
        as_int("receivers (layer)", layer, 1)
        require_attention(config, [layer])
        made.append((layer, engine.sites.resolve(f"blocks.{layer}.attn.hook_{into}"), head // group))
    if not made:
        raise BadRequest("No receivers. Give (layer, head) pairs, or 'logits'.")
    return list(dict.fromkeys(made))


def _received(ends: list[tuple[int, str, int]], arrived: dict[str, Tensor], number: int, everywhere: range) -> list[Edit]:
    """The edits that give the receivers what arrived from one sender."""
    by_site: dict[str, list[int]] = {}
    for _, site, head in ends:
        by_site.setdefault(site, []).append(head)
    return [
        Edit(site, "set", torch.as_tensor(arrived[site][number]), positions=everywhere, heads=heads)
        for site, heads in by_site.items()
    ]
