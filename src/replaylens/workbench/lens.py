"""`lens`: what each layer predicts at each position of a text, by the logit lens, plain, tuned or by Jacobians."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm.auto import tqdm

from replaylens.engine.display import Citable, picture, plain, word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Prompt
from replaylens.engine.passes.lens import TunedLens, read_ranked, unembed_hash
from replaylens.engine.request.values import as_bool, as_instance, as_int, as_list, verb
from replaylens.engine.terminal import hidden
from replaylens.features.features import SparseFeatures
from replaylens.features.rows import FeatureRows
from replaylens.gradients.branches import differentiable, tape_of
from replaylens.kernels import cpu as portable
from replaylens.views.data import layer_name
from replaylens.workbench.drawing import Grid, figure, view, words

Measure = Literal["probability", "entropy", "kl", "rank", "logprob", "features"]
_LABELS = {
    "probability": "probability of the likeliest token",
    "entropy": "entropy, nats",
    "kl": "KL divergence of the layer from the model's output, nats",
    "rank": "rank of the token, 0 is the likeliest",
    "logprob": "log-probability of the token",
    "features": "activation of the strongest feature",
}


@dataclass(frozen=True, eq=False)
class FeatureLine:
    """The sparse features of one site at every position of a text."""

    name: str
    """the site that they read"""
    rows: FeatureRows

    def top(self, position: int, n: int = 5) -> list[tuple[int, float]]:
        """The strongest features of a position, (feature, activation), the strongest first."""
        indices, values = self.rows.row(position)
        order = values.argsort(descending=True, stable=True)[:n]
        return [(int(indices[i]), float(values[i])) for i in order]


@dataclass(frozen=True, eq=False)
class LensResult(Citable):
    """The logit lens of one text. Layer i reads the residual stream that enters block i; the last is the model's output."""

    tokens: tuple[str, ...]
    layers: tuple[str, ...]
    token: str | None
    """the token that `rank` and `logprob` are about; None: the one that follows in the text (NaN for the last position)"""
    top: tuple[tuple[tuple[str, ...], ...], ...]
    """[layers][positions][k]: the likeliest tokens"""
    top_ids: Tensor
    """[layers, positions, k]"""
    top_logprobs: Tensor
    """[layers, positions, k]"""
    entropy: Tensor
    """[layers, positions], in nats"""
    kl: Tensor
    """[layers, positions]: KL(model's output || layer), in nats"""
    rank: Tensor
    """[layers, positions]: how many tokens are likelier. Whole numbers if a token is given; else NaN in the last position,
    and so floats"""
    logprob: Tensor
    """[layers, positions]"""
    features: tuple[FeatureLine, ...] = ()
    """the sparse features at every position, one line per set of features"""

    def __repr__(self) -> str:
        about = "the next token" if self.token is None else repr(self.token)
        return f"LensResult({len(self.layers)} layers, {len(self.tokens)} tokens, rank of {about})"

    @property
    def probability(self) -> Tensor:
        """Of the likeliest token: [layers, positions]."""
        return portable.apply("exp", self.top_logprobs[..., 0])

    @property
    def frame(self) -> pd.DataFrame:
        """One line per layer and position."""
        at = [(i, j) for i in range(len(self.layers)) for j in range(len(self.tokens))]
        columns = {name: getattr(self, name).flatten().numpy() for name in ("probability", "entropy", "kl", "rank", "logprob")}
        facts = [(i, self.layers[i], j, self.tokens[j], self.top[i][j][0]) for i, j in at]
        frame = pd.DataFrame(facts, columns=["layer", "name", "position", "token", "top"]).assign(**columns)
        return frame.astype({"rank": "Int64"})  # whole numbers that may be missing

    def grid(self, measure: Measure | None = None) -> Grid:
        """The numbers of one measure, with the likeliest tokens as words. None: as `plot` chooses."""
        measure = measure or self._measure
        if measure == "features":
            return self._feature_grid()
        if measure not in _LABELS:
            raise BadRequest(f"Unknown measure {measure!r}. Known: {', '.join(_LABELS)}.")
        best = [[self.top[i][j][0] for j in range(len(self.tokens))] for i in range(len(self.layers))]
        values, ranks, off = getattr(self, measure).numpy(), measure == "rank", int(measure in ("logprob", "kl"))
        title = f"Logit lens: {self._label(measure)}"
        return Grid(title, self.layers, self.tokens, values, best, ranks=ranks, facts=self._facts, off_scale=off)

    def _label(self, measure: Measure) -> str:
        return _LABELS[measure] if self.token is None else _LABELS[measure].replace("the token", repr(self.token))

    @property
    def _measure(self) -> Measure:
        """What to show unless told: the likeliest token, or the token that was asked about."""
        return "probability" if self.token is None else "logprob"

    def _feature_grid(self) -> Grid:
        """One row per set of features: the strongest feature of each token, and its activation."""
        if not self.features:
            raise BadRequest("This lens has no features. Give some: lens(..., features=SparseFeatures.load(...)).")
        strongest = [[line.top(position, 1) for position in range(len(self.tokens))] for line in self.features]
        values = np.array([[cell[0][1] if cell else 0.0 for cell in line] for line in strongest])
        best = [[str(cell[0][0]) if cell else "" for cell in line] for line in strongest]

        def facts(row: int, position: int) -> tuple[str, ...]:
            line = self.features[row]
            strong = [f"{value:.3g}\tfeature {feature}" for feature, value in line.top(position)]
            return (f"{line.name} after {self.tokens[position]!r}", *strong)

        names = [line.name for line in self.features]
        return Grid(f"Sparse features: {_LABELS['features']}", names, self.tokens, values, best, facts=facts)

    def _facts(self, layer: int, position: int) -> tuple[str, ...]:
        chances = self.top_logprobs[layer, position].exp().tolist()
        guesses = [f"{p:.3f}\t{token!r}" for p, token in zip(chances, self.top[layer][position], strict=True)]
        rank, about = self.rank[layer, position], "the next token" if self.token is None else repr(self.token)
        own = () if rank.isnan() else (f"rank {int(rank)}\t{about}, log-probability {self.logprob[layer, position]:.3f}",)
        return (f"{self.layers[layer]} after {self.tokens[position]!r}", *guesses, *own)

    def plot(self, measure: Measure | None = None) -> Figure:
        """A heat map, layers by positions, with each layer's likeliest token in its cell.

        measure  None: the probability of the likeliest token; the log-probability of the token that `lens` was asked about
        """
        measure = measure or self._measure
        rows = "features" if measure == "features" else "layer"
        return self._shown(figure([self.grid(measure)], self._label(measure), rows, "token"))

    def _repr_html_(self) -> str:
        likely = "it is more likely" if self.token is None else f"{self.token!r} is more likely"
        note = f"Each cell shows the layer's likeliest next token; a stronger colour: {likely}."
        if not self.features:
            return view([self.grid()], note=note)
        below = "Each cell shows the number of the token's strongest feature; a stronger colour is more active."
        return view([self.grid()], note=note) + view([self._feature_grid()], note=below)


@verb
def lens(
    engine: Engine,
    text: Prompt,
    *,
    token: str | int | None = None,
    tuned: TunedLens | None = None,
    features: SparseFeatures | Sequence[SparseFeatures] = (),
    top_k: int = 5,
) -> LensResult:
    """What each layer predicts at each position.

    token     the token to rank at every position; None: the one that follows in the text
    tuned     read through this tuned lens instead of the plain one
    features  sparse autoencoders or transcoders whose features are shown below the layers, one line each
    top_k     likeliest tokens kept per cell

    >>> from replaylens import Engine, lens
    >>> result = lens(Engine.load("coin-plain"), "A coin's state is heads. Alice flips. What's the state? A:")
    >>> result.top[-1][-1][0], result.rank.shape
    (' tails', torch.Size([5, 15]))
    """
    target = None if token is None else engine.token_ids_of([token])[0]
    own = [features] if isinstance(features, SparseFeatures) else as_list("features", features, "sparse features")
    for each in own:
        as_instance("features", each, SparseFeatures, "the result of SparseFeatures.load").require(engine)
    spec = engine.capture_spec("Z", top_k=top_k, lens=tuned).lens
    assert spec is not None
    branch = engine.prompt(text, sites=[*spec.sites, *(each.site_in(engine) for each in own)])
    try:
        path, rows = branch.tokens, {site: branch.activations[site] for site in spec.sites}
        lines = tuple(FeatureLine(each.config.hook, each.of(branch)) for each in own)
    finally:
        branch.release()
    followers = [*path[1:], -1] if target is None else [target] * len(path)
    z = engine.lock.alone(read_ranked, spec, engine.runner, rows, followers, engine.lenses.of(spec))
    parts = ("Z.top_ids", "Z.top_logprobs", "Z.entropy", "Z.kl", "Z.rank", "Z.emitted")
    ids, logprobs, entropy, kl, rank, logprob = (z[name].transpose(0, 1).clone() for name in parts)
    text_of = {i: word(engine.text, i) for i in set(ids.flatten().tolist())}
    top = tuple(tuple(tuple(text_of[i] for i in cell) for cell in line) for line in ids.tolist())
    names = tuple(layer_name(layer, len(spec.sites)) for layer in range(len(spec.sites)))
    about = None if target is None else word(engine.text, target)
    rank = rank if target is None else rank.long()
    numbers, by = (ids, logprobs, entropy, kl, rank, logprob), (engine.fingerprint,)
    return LensResult(words(engine, path), names, about, top, *numbers, lines, made_by=by)


# ---- Jacobian lens ---------------------------------------------------------------------------------------------------
# What a layer's residual stream does, to first order, to the final one at the same position. J[l] is the mean over texts and
# positions of d final / d stream[l], and the lens reads a row x of layer l as
#
#     mean(final) + J[l] (x - mean(stream[l]))
#
# through the final norm and the unembedding. Nothing is trained: the map says what the model itself makes of a small change,
# where a tuned lens says what predicts the output best. It is a `TunedLens`, and goes wherever one does.


@verb
def fit_jacobian_lens(
    engine: Engine,
    texts: Sequence[Prompt],
    *,
    first: int = 1,
    centred: bool = True,
    progress: bool = False,
) -> TunedLens:
    """Fit a Jacobian lens by gradients over texts. A function of its arguments: on a CPU, with the same bits on every machine.

    texts    prompts of any form. Each takes d_model backward passes over its tokens, for all layers and positions together
    first    the first position that counts. The stream of a text's first token is unlike all others in most models
    centred  False: read J[l] x alone, without the means

    >>> from replaylens import Engine, lens
    >>> engine = Engine.load("coin-plain")
    >>> fitted = fit_jacobian_lens(engine, ["A coin's state is heads. Alice flips."])
    >>> fitted.weight.shape, lens(engine, "A coin's state is heads.", tuned=fitted).kl.shape
    (torch.Size([4, 128, 128]), torch.Size([5, 6]))
    """
    given = as_list("texts", texts, "a list of texts, token ids or chats")
    first, centred = as_int("first", first, 0), as_bool("centred", centred)
    streams = engine.sites.per_layer("S")
    asked = differentiable(engine, streams[:-1])
    if asked != tuple(streams[:-1]):
        raise BadRequest(f"The streams of this model are not one per layer: {', '.join(asked)}.")
    paths = [engine.tokens_of(text) for text in given]
    if short := [number for number, path in enumerate(paths) if len(path) <= first]:
        raise BadRequest(
            f"Text {short[0]} has {len(paths[short[0]])} tokens, none from position {first} on. Give longer texts."
        )
    if not paths:
        raise BadRequest("No texts. Give at least one.")
    width, count = engine.config.d_model, sum(len(path) - first for path in paths)
    jacobian = torch.zeros(len(asked), width, width, dtype=torch.float64)
    means = torch.zeros(len(streams), width, dtype=torch.float64)
    with tqdm(total=width * len(paths), unit="pass", disable=hidden(progress)) as bar:
        for path in paths:
            tape = tape_of(engine, path, (), asked)
            picked = range(first, len(path))
            lines: Any = engine.lock.alone(tape.own_jacobians, picked, lambda _: bar.update())
            jacobian += lines.double()
            values = [*(tape.value(site) for site in asked), tape.forward.residual.cpu()]
            means += torch.stack([value[first:].double().sum(0) for value in values])
    jacobian, means = jacobian / count, means / count
    bias = means[-1] - torch.einsum("led,ld->le", jacobian, means[:-1]) if centred else torch.zeros_like(means[:-1])
    weight = jacobian - torch.eye(width, dtype=torch.float64)
    return TunedLens(weight.float(), bias.float(), unembed_hash(engine.model))


# ---- several lenses --------------------------------------------------------------------------------------------------

PLAIN = "plain"


@dataclass(frozen=True, eq=False)
class LensComparison(Citable):
    """Several lenses over the same texts, layer by layer."""

    frame: pd.DataFrame
    """one line per lens and layer: `kl`, of the lens from the model's output in nats, and `agreement`, the share of positions
    where both have the same likeliest token; means over positions"""
    positions: int

    def __repr__(self) -> str:
        return f"LensComparison({self.frame['lens'].nunique()} lenses, {self.positions} positions)"

    def plot(self) -> Figure:
        """KL divergence and agreement by layer, a line for each lens."""
        drawn = picture(8.4, 3.4)
        for axis, column, label in zip(
            drawn.subplots(1, 2), ("kl", "agreement"), ("KL divergence, nats", "same likeliest token"), strict=True
        ):
            for name, own in self.frame.groupby("lens", sort=False):
                axis.plot(own["layer"], own[column], marker="o", markersize=3, label=plain(str(name)))
            axis.set(xlabel="layer", ylabel=label)
            axis.set_ylim(bottom=0)
        drawn.legend(*drawn.axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, fontsize=8)
        return self._shown(drawn)

    def _repr_html_(self) -> str:
        table: str = self.frame.round(4).to_html(index=False)
        return table


@verb
def compare_lenses(
    engine: Engine, texts: Sequence[Prompt], lenses: Mapping[str, TunedLens], *, first: int = 1
) -> LensComparison:
    """How well lenses read a model's output from its layers: the plain lens, and tuned or Jacobian ones by name.

    Give texts that no lens was fitted on.

    first  the first position that counts, as in `fit_jacobian_lens`
    """
    first = as_int("first", first, 0)
    if PLAIN in as_instance("lenses", lenses, Mapping, "a dict from names to tuned or Jacobian lenses"):  # type: ignore[type-abstract]
        raise BadRequest(f"{PLAIN!r} is the plain lens, which is always shown. Give the lens another name.")
    given = as_list("texts", texts, "a list of texts, token ids or chats")
    if not given:
        raise BadRequest("No texts. Give at least one.")
    parts = []
    for name, tuned in ((PLAIN, None), *lenses.items()):
        read = [lens(engine, text, tuned=tuned, top_k=1) for text in given]
        kl = np.concatenate([each.kl[:, first:].double().numpy() for each in read], axis=1)  # [layers, positions]
        best = np.concatenate([each.top_ids[:, first:, 0].numpy() for each in read], axis=1)
        if not kl.shape[1]:
            raise BadRequest(f"No text has a token from position {first} on. Give longer texts.")
        agreement = (best == best[-1]).mean(1)
        parts.append(pd.DataFrame({"lens": name, "layer": range(len(kl)), "kl": kl.mean(1), "agreement": agreement}))
    return LensComparison(pd.concat(parts, ignore_index=True), kl.shape[1], made_by=(engine.fingerprint,))
