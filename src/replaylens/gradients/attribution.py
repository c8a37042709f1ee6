"""Attribution by gradients: effects of activations estimated by patching, and by integrating along a path."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from replaylens.engine.display import Citable, word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, NoGradient
from replaylens.engine.model import modes
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placing import place_all
from replaylens.engine.request.values import as_bool, as_int, integer, verb
from replaylens.engine.serving.branch import Branch
from replaylens.gradients.backward import Tape
from replaylens.gradients.branches import differentiable, metric_of, tape_of
from replaylens.gradients.gradients import AnyMetric, LogitsFunction, row_sums, value_of

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure


# ---- effects ---------------------------------------------------------------------------------------------------------
# `Attribution`: estimated effects by site and position, next to the real effects.

_TITLES = {
    "hook_in": "residual stream",
    "attn.o.hook_in": "attention heads",
    "attn.hook_out": "attention output",
    "ln1_post.hook_out": "attention output",
    "mlp.hook_out": "MLP output",
    "ln2_post.hook_out": "MLP output",
}
"""names within a block -> titles of panels"""


@dataclass(frozen=True, eq=False)
class Attribution(Citable):
    """How much each row, replaced by another prompt's, changes the metric: in units of the metric."""

    before: float
    """the metric of the prompt that is patched"""
    after: float
    """the metric of the prompt that the rows come from"""
    sites: tuple[str, ...]
    words: tuple[str, ...]
    """the text of each token of the patched prompt"""
    estimate: Tensor
    """[sites, positions], or [sites, positions, heads]: by gradients"""
    real: Tensor | None
    """likewise, by patching, one fork per row or head; None if it was not asked for"""
    certified: bool
    """whether the bits of both are promised"""
    gap: float | None = None
    """of integrated gradients: after - before, minus the sum of the estimates. None of other attributions, which need not add
    up"""
    pairs: tuple[Attribution, ...] = ()
    """of a mean over pairs of prompts: that of each"""

    @classmethod
    def mean(cls, pairs: Sequence[Attribution]) -> Attribution:
        """The mean over pairs of prompts; BadRequest if their numbers of tokens differ."""
        require_one_length([len(pair.words) for pair in pairs])
        middle = lambda values: (sum(each.double() for each in values) / len(pairs)).float()  # noqa: E731
        real = [pair.real for pair in pairs if pair.real is not None]
        before, after = (sum(getattr(pair, side) for pair in pairs) / len(pairs) for side in ("before", "after"))
        return cls(
            before,
            after,
            pairs[0].sites,
            common_words([pair.words for pair in pairs]),
            middle(pair.estimate for pair in pairs),
            middle(real) if real else None,
            all(pair.certified for pair in pairs),
            pairs=tuple(pairs),
            made_by=pairs[0].made_by,
        )

    def __repr__(self) -> str:
        size = f"{len(self.pairs)} pairs, " if self.pairs else ""
        size += f"{len(self.sites)} sites, {len(self.words)} positions{f', {self.heads} heads' if self.heads else ''}"
        compared = "" if self.real is None else f", correlation {self.correlation:.2f} with real effects"
        return f"Attribution({self.before:.4g} to {self.after:.4g}; {size}{compared})"

    @property
    def heads(self) -> int:
        """The number of heads with effects of their own; 0: rows have one effect for all heads together."""
        return self.estimate.shape[2] if self.estimate.dim() == 3 else 0

    @property
    def correlation(self) -> float:
        """Pearson's correlation of estimates and real effects, over all rows. NaN if one of them does not vary."""
        real = self._compared()
        return float(torch.corrcoef(torch.stack([self.estimate.flatten(), real.flatten()]).double())[0, 1])

    @property
    def frame(self) -> pd.DataFrame:
        """One line per row, the largest estimate first; of a mean over pairs, with its 95 % interval (NaN for one pair)."""
        import pandas as pd

        lines = []
        ends = t_interval(torch.stack([pair.estimate for pair in self.pairs])) if self.pairs else None
        for at, estimate in zip(product(*map(range, self.estimate.shape)), self.estimate.flatten().tolist(), strict=True):
            line = {"site": self.sites[at[0]], "position": at[1], "token": self.words[at[1]]}
            line |= {"head": at[2]} if self.heads else {}
            line |= {"estimate": estimate} | ({} if self.real is None else {"real": float(self.real[at])})
            lines.append(line if ends is None else line | {"low": float(ends[0][at]), "high": float(ends[1][at])})
        return pd.DataFrame(lines).sort_values("estimate", key=abs, ascending=False, kind="stable", ignore_index=True)

    def worst(self, n: int = 10) -> pd.DataFrame:
        """The rows whose estimates are furthest from their real effects."""
        n = as_int("n", n, 1)
        self._compared()
        frame = self.frame
        frame["error"] = frame["estimate"] - frame["real"]
        return frame.sort_values("error", key=abs, ascending=False, kind="stable", ignore_index=True).head(n)

    def _compared(self) -> Tensor:
        if self.real is None:
            raise BadRequest("The real effects were not computed. Ask for them with compare=True.")
        return self.real

    def plot(self) -> Figure:
        """A heat map for each kind of site, layers by tokens, or by heads as sums over positions; the real effects below, on a
        scale of their own."""
        from replaylens.engine.display import picture, wrapped

        kinds, grids = self._kinds(), {"estimate": self.estimate}
        if self.real is not None:
            grids["real"] = self.real
        if self.heads:
            grids = {what: grid.sum(1) for what, grid in grids.items()}
        labels = [str(head) for head in range(self.heads)] or self._labels()
        figure = picture(1 + len(kinds) * max(3.0, 0.28 * len(labels)), 0.8 + len(grids) * 3.0)
        for line, (what, grid) in zip(figure.subplots(len(grids), len(kinds), squeeze=False), grids.items(), strict=True):
            most = float(grid.abs().max()) or 1.0
            colors = {"cmap": "RdBu_r", "vmin": -most, "vmax": most}
            for axis, (kind, rows) in zip(line, kinds.items(), strict=True):
                shown = axis.pcolormesh(grid[rows].numpy(), **colors)  # shapes, as a report page needs them
                axis.set(title=_TITLES.get(kind, kind), ylabel="layer")
                axis.set_yticks([i + 0.5 for i in range(len(rows))], [str(i) for i in range(len(rows))], fontsize=6)
                axis.set_xticks([i + 0.5 for i in range(len(labels))], labels, rotation=0 if self.heads else 90, fontsize=6)
            figure.colorbar(shown, ax=line, label=wrapped(f"change of the metric: {what}", 2.6))
        return self._shown(figure)

    def _labels(self) -> list[str]:
        from replaylens.engine.display import plain

        return [plain(word) for word in self.words]

    def _kinds(self) -> dict[str, list[int]]:
        """Sites of one kind in layer order: their rows by the name within a block. The stream that leaves the last block
        follows those that enter blocks."""
        found: dict[str, list[int]] = {}
        for i, site in enumerate(self.sites):
            found.setdefault(re.sub(r"^blocks\.\d+\.", "", site), []).append(i)
        if "hook_in" in found and len(found.get("hook_out", [])) == 1:
            found["hook_in"] += found.pop("hook_out")
        return found

    def _repr_html_(self) -> str:
        lead = f"<p>Metric: {self.before:.3f} of the patched prompt, {self.after:.3f} of the other one."
        if self.real is not None:
            lead += f" Correlation of estimates and real effects: {self.correlation:.3f}."
        if self.gap is not None:
            lead += f" The attributions miss the difference by {self.gap:.3f}."
        return lead + "</p>" + self.frame.head(12).to_html(index=False, float_format="{:.4f}".format)


def require_one_length(counts: Sequence[int], otherwise: str = "") -> None:
    """BadRequest if pairs of prompts have different numbers of tokens, since their positions do not correspond then."""
    for number, count in enumerate(counts):
        if count != counts[0]:
            raise BadRequest(
                f"Pair {number} of {len(counts)} has {count} tokens, and the first has {counts[0]}. Positions are averaged one "
                f"by one: give pairs with the same number of tokens{otherwise}."
            )


def common_words(paths: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The text of each position of several paths; where they differ, the first two texts."""
    distinct = [list(dict.fromkeys(words)) for words in zip(*paths, strict=True)]
    return tuple("/".join(words[:2]) + ("/..." if len(words) > 2 else "") for words in distinct)


def t_interval(values: Tensor) -> tuple[Tensor, Tensor]:
    """The ends of the 95 % t interval of the mean over pairs, [pairs, ...] -> [...] each; NaN for a single pair."""
    from scipy.stats import t

    values, count = values.double(), len(values)
    if count < 2:
        return values[0] * math.nan, values[0] * math.nan
    middle, reach = values.mean(0), float(t.ppf(0.975, count - 1)) * values.std(0) / math.sqrt(count)
    return middle - reach, middle + reach


# ---- patching --------------------------------------------------------------------------------------------------------
# `attribution_patching`: the effects of all patches to first order, from two forward passes and one backward pass.

T = TypeVar("T")
Prompts = Prompt | Sequence[Prompt]
"""one, or a list of them"""


@verb
def attribution_patching(
    engine: Engine,
    clean: Prompts,
    corrupt: Prompts,
    metric: AnyMetric | Branch | list[AnyMetric | Branch],
    sites: str | Sequence[str] | None = None,
    *,
    heads: bool = False,
    compare: bool = False,
    progress: bool = False,
) -> Attribution:
    """Estimate how the metric of `corrupt` changes if one row at a time is replaced by that of `clean`.

    The estimate is the gradient at the row, times the difference of the rows. It costs two forward passes and one backward
    pass for all sites and positions. To patch corrupt rows into the clean prompt, swap the two.

    clean, corrupt  prompts with the same number of tokens; or lists of them, all with the same number: the result is the mean
                    over pairs, with intervals in its frame
    metric          as in `Branch.gradients`, of the last position; for lists also a list with one for each pair
    sites           S, T and C, or site names; default: "STC", or attn.hook_z of every layer with `heads`
    heads           one effect for each head of sites with heads, instead of one for all of a row together
    compare         also patch every row, as forks of the corrupt prompt, for `real`, `correlation` and `worst`

    >>> from replaylens import Engine, attribution_patching
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is {}. Alice flips. What's the state? A:"
    >>> found = attribution_patching(engine, text.format("heads"), text.format("tails"), (" tails", " heads"), compare=True)
    >>> found.estimate.shape, found.certified, found.words[int(found.real[0].argmax())]
    (torch.Size([13, 15]), True, ' tails')
    """
    options: dict[str, Any] = dict(sites=sites, heads=as_bool("heads", heads), compare=compare, progress=progress)
    if (pairs := pairs_of(clean, corrupt)) is not None:
        return Attribution.mean(each_pair(lambda pair, own: _attributed(engine, *pair, own, **options), pairs, metric))
    return _attributed(engine, clean, corrupt, metric, **options)


def _attributed(
    engine: Engine, clean: Any, corrupt: Any, metric: Any, *, sites: Any, heads: bool, compare: bool, progress: bool
) -> Attribution:
    """One pair of prompts."""
    paths = paths_of(engine, clean, corrupt)
    names = _sites(engine, sites, heads)
    function, promised = metric_of(engine, metric)
    source = tape_of(engine, paths[0], (), names, backward=False)
    found = tape_of(engine, paths[1], (), names).gradients(function, engine.sites.aliases, promised)
    rows = {site: source.value(site) for site in names}
    moved = {site: rows[site] - found.activations[site] for site in names}
    estimate = torch.stack([_sums(found.peek(site) * moved[site], heads) for site in names])
    real = None
    if as_bool("compare", compare):
        changed = {site: (moved[site] if heads else moved[site].flatten(1)).any(-1) for site in names}
        real = patch_effects(engine, paths[1], rows, changed, function, found.value, as_bool("progress", progress))
    words, after, by = words_of(engine, paths[1]), source.measure(function), (engine.fingerprint,)
    return Attribution(found.value, after, names, words, estimate, real, found.certified, made_by=by)


def _sites(engine: Engine, sites: str | Sequence[str] | None, heads: bool) -> tuple[str, ...]:
    """The names of the sites; BadRequest if effects of heads are asked for and they have none, or not equally many."""
    if sites is None:
        sites = [f"blocks.{layer}.attn.hook_z" for layer in range(engine.config.num_layers)] if heads else "STC"
    names = differentiable(engine, sites)
    shapes = {engine.sites.sites[name].shape for name in names}
    if heads and (len(shapes) > 1 or len(next(iter(shapes))) != 2 or 0 in next(iter(shapes))):
        raise BadRequest(
            "heads=True was given for sites without heads, or with different ones. Give e.g. 'blocks.0.attn.hook_z'."
        )
    return names


def _sums(x: Tensor, heads: bool) -> Tensor:
    """[rows, ...] -> [rows]; with heads, [rows, heads, width] -> [rows, heads]"""
    return row_sums(x.flatten(0, 1)).view(x.shape[:2]) if heads else row_sums(x)


def patch_effects(
    engine: Engine,
    path: list[int],
    rows: Mapping[str, Tensor],
    changed: Mapping[str, Tensor],
    function: LogitsFunction,
    before: float,
    progress: bool,
) -> Tensor:
    """The change of the metric, from `before`, under each patch of one row, or of one head of a row.

    changed  site -> bool [positions], or [positions, heads]. What is replaced by its own bits changes nothing, so only what
             changed is computed, as forks of the path
    -> [sites, positions], or [sites, positions, heads]
    """
    cells = [(i, site, at) for i, site in enumerate(rows) for at in changed[site].nonzero().tolist()]
    effects = torch.zeros(len(rows), *next(iter(changed.values())).shape, dtype=torch.float32)
    with engine.variants(path) as base:
        edits = [[_patch(site, rows[site], *at)] for _, site, at in cells]
        values = base.read(edits, [-1], partial(_measured, function), progress).tolist() if edits else []
    for (i, _, at), value in zip(cells, values, strict=True):
        effects[(i, *at)] = value - before
    return effects


def _patch(site: str, rows: Tensor, at: int, head: int | None = None) -> Edit:
    if head is None:
        return Edit.interchange(site, rows[at], at)
    return Edit(site, "set", rows[at][[head]], at, heads=[head])


def _measured(function: LogitsFunction, logits: Tensor) -> Tensor:
    """The metric of each of several rows [rows, 1, vocab]: [rows], in double precision."""
    with modes.canonical():
        return torch.tensor([float(value_of(function, row)) for row in logits[:, 0]], dtype=torch.float64)


def paths_of(engine: Engine, *prompts: Prompt) -> list[list[int]]:
    """The tokens of prompts of one length; BadRequest if they differ, NoGradient if the model thinks."""
    if not engine.plain:
        raise NoGradient("No gradient flows through thoughts. Use a plain model.")
    paths = [engine.tokens_of(prompt) for prompt in prompts]
    if len({len(path) for path in paths}) > 1:
        counts = " and ".join(str(len(path)) for path in paths)
        raise BadRequest(f"The prompts have {counts} tokens. Rows are exchanged position by position: give equal lengths.")
    return paths


def pairs_of(clean: Any, corrupt: Any) -> list[tuple[Any, Any]] | None:
    """The pairs of two lists of prompts; None for two single prompts. BadRequest if their numbers differ."""
    listed = [
        isinstance(given, list | tuple) and len(given) > 0 and all(isinstance(each, str | list | tuple) for each in given)
        for given in (clean, corrupt)
    ]
    if not any(listed):
        if all(isinstance(given, list | tuple) and not given for given in (clean, corrupt)):
            raise BadRequest("No prompts: clean and corrupt are empty. Give at least one pair.")
        return None
    counts = [len(given) if many else 1 for given, many in zip((clean, corrupt), listed, strict=True)]
    if not all(listed):
        raise BadRequest("One side is a list of prompts and the other one prompt. Give two prompts, or two lists of them.")
    if counts[0] != counts[1]:
        raise BadRequest(f"Got {counts[0]} clean prompts and {counts[1]} corrupt ones. Give two lists of the same length.")
    return list(zip(clean, corrupt, strict=True))


def each_pair(run: Callable[[tuple[Any, Any], Any], T], pairs: list[tuple[Any, Any]], metric: Any) -> list[T]:
    """What `run` makes of each pair and its metric; BadRequest names the pair that is refused."""
    found = []
    for number, (pair, own) in enumerate(zip(pairs, one_for_each(metric, len(pairs), "pairs"), strict=True)):
        try:
            found.append(run(pair, own))
        except BadRequest as error:
            error.args = (f"Pair {number} of {len(pairs)}: {error}",)
            raise
    return found


def one_for_each(metric: Any, count: int, what: str) -> list[Any]:
    """A metric for each of several prompts or pairs, from one for all or from a list with one for each.

    A list of two tokens is a pair of tokens, for all. In a list, a token may be a tuple of one.
    """
    is_token = lambda value: isinstance(value, str) or integer(value) is not None  # noqa: E731
    if not isinstance(metric, list) or (len(metric) == 2 and all(map(is_token, metric))):
        return [metric] * count
    if len(metric) != count:
        raise BadRequest(f"Got {len(metric)} metrics for {count} {what}. Give one for each, or one for all.")
    return [each[0] if isinstance(each, tuple) and len(each) == 1 else each for each in metric]


def words_of(engine: Engine, path: Sequence[int]) -> tuple[str, ...]:
    """The text of each token."""
    return tuple(word(engine.text, token) for token in path)


# ---- integrated ------------------------------------------------------------------------------------------------------
# `integrated_gradients`: effects of rows from gradients along the way from a baseline to a prompt.


@verb
def integrated_gradients(
    engine: Engine,
    text: Prompt,
    baseline: Prompt | None,
    metric: AnyMetric | Branch,
    site: str = "embed.hook_out",
    *,
    steps: int = 16,
    compare: bool = False,
) -> Attribution:
    """Attribute the difference of the metric between a prompt and a baseline to the rows of one site.

    All rows of the site move together on a straight line from the baseline's to the prompt's. The attribution of a row is its
    move times its gradient, averaged over `steps` points of the line (the midpoint rule). At a site that everything
    passes, such as the embedding or S of a layer, the attributions add up to `after - before`, up to the error of the rule,
    which is `gap`. From rows of zeros, `before` is the metric of the prompt with these rows set to zero.

    text      a prompt; its metric is `after`
    baseline  a prompt with as many tokens, whose metric is `before`; None: rows of zeros
    metric    as in `Branch.gradients`, of the last position
    steps     forward and backward passes
    compare   also replace every row of the baseline alone, for `real`. Needs a prompt as the baseline
    """
    steps, compare = as_int("steps", steps, 1), as_bool("compare", compare)
    if compare and baseline is None:
        raise BadRequest("compare=True patches rows into the baseline prompt, but there is none. Give one.")
    path, base = paths_of(engine, text, text if baseline is None else baseline)
    names = differentiable(engine, [site])
    if len(names) != 1:
        raise BadRequest(f"Invalid site={site!r}. Give the name of one site, e.g. 'embed.hook_out' or 'blocks.0.hook_in'.")
    (name,) = names
    function, promised = metric_of(engine, metric)
    end = tape_of(engine, path, (), names, backward=False)
    start = end if baseline is None else tape_of(engine, base, (), names, backward=False)
    there = end.value(name)
    here = torch.zeros_like(there) if baseline is None else start.value(name)

    def moved(share: float) -> Tape:
        """The path with the site's rows this far from the baseline."""
        edit = Edit(name, "set", here + (there - here) * share, range(len(path)))
        return tape_of(engine, path, place_all([edit], engine.sites, len(path)), names)

    mean = torch.zeros_like(there, dtype=torch.float32)
    for step in range(steps):
        mean += moved((step + 0.5) / steps).gradients(function, engine.sites.aliases, promised)[name]
    estimate = row_sums((there - here) * (mean / steps))[None]
    before, after = (moved(0.0) if baseline is None else start).measure(function), end.measure(function)
    real = None
    if compare:
        changed = {name: (there - here).flatten(1).any(1)}
        real = patch_effects(engine, base, {name: there}, changed, function, before, progress=False)
    gap = after - before - math.fsum(estimate.flatten().tolist())
    words, by = words_of(engine, path), (engine.fingerprint,)
    return Attribution(before, after, names, words, estimate, real, promised, gap, made_by=by)
