"""`compare`: two models on the same texts. Where do their predictions and activations part?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens.engine.display import Citable, picture
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.values import as_instance, as_int, as_list, verb
from replaylens.probes.intervals import Estimate, difference_over_groups
from replaylens.workbench.drawing import Grid, paragraph, plain, view, words
from replaylens.workbench.patch import require_one_vocabulary

_NAMES = {"S": "residual stream", "T": "attention output", "C": "MLP output"}


@dataclass(frozen=True, eq=False)
class ComparedText:
    """One text under both models. All tensors are float64; those of predictions are about the token that follows."""

    tokens: tuple[str, ...]
    loss_a: Tensor
    """[positions]: minus the log-probability of the next token, in nats; NaN for the last position"""
    loss_b: Tensor
    kl: Tensor
    """[positions]: KL(a || b) of the next token's distributions, in nats"""
    difference: dict[str, Tensor]
    """site -> [layers, positions]: the length of b - a, as a share of that of a"""


@dataclass(frozen=True, eq=False)
class CompareResult(Citable):
    """Two models on some texts."""

    texts: tuple[ComparedText, ...]

    def __repr__(self) -> str:
        return f"CompareResult({len(self.texts)} texts: {self._summary()})"

    def _summary(self) -> str:
        losses = [float(torch.cat([getattr(text, name)[:-1] for text in self.texts]).mean()) for name in ("loss_a", "loss_b")]
        kl = float(torch.cat([text.kl for text in self.texts]).mean())
        return f"loss {losses[0]:.4g} and {losses[1]:.4g} nats per token, KL divergence {kl:.4g}"

    @property
    def frame(self) -> pd.DataFrame:
        """One line per text and position."""
        lines = []
        for number, text in enumerate(self.texts):
            columns = {name: getattr(text, name).numpy() for name in ("loss_a", "loss_b", "kl")}
            columns |= {site: values[-1].numpy() for site, values in text.difference.items()}
            about = {"text": number, "position": range(len(text.tokens)), "token": text.tokens}
            lines.append(pd.DataFrame(about | columns))
        return pd.concat(lines, ignore_index=True)

    @property
    def layers(self) -> pd.DataFrame:
        """One line per site and layer: the mean difference over positions, with its 95 % interval over texts."""
        lines = []
        for site, first in self.texts[0].difference.items():
            for layer in range(len(first)):
                found = self._over_texts([text.difference[site][layer] for text in self.texts])
                lines.append({"site": site, "layer": layer, "difference": found.value, "low": found.low, "high": found.high})
        return pd.DataFrame(lines, columns=["site", "layer", "difference", "low", "high"])

    @property
    def loss_change(self) -> Estimate:
        """loss_b - loss_a, the mean over tokens, with its 95 % interval over texts (NaN for a single text)."""
        return self._over_texts([(text.loss_b - text.loss_a)[:-1] for text in self.texts])

    def _over_texts(self, values: Sequence[Tensor]) -> Estimate:
        """values  of each text, one for each token"""
        together = torch.cat(list(values)).numpy()
        if len(values) == 1:
            return Estimate(float(together.mean()), float("nan"), float("nan"))
        groups = np.repeat(np.arange(len(values)), [len(each) for each in values])
        return difference_over_groups(together, groups, bounded=False)

    def plot(self, text: int = 0) -> Figure:
        """One text: change of loss and KL divergence above, differences of activations below, layers by tokens."""
        chosen = self.texts[as_int("text", text, 0, len(self.texts) - 1)]
        count, sites = len(chosen.tokens), chosen.difference
        heights = [1.6, *(0.6 + 0.16 * len(values) for values in sites.values())]
        made = picture(min(2.6 + 0.3 * count, 24), sum(heights) + 1.4)
        axes = made.subplots(len(heights), 1, squeeze=False, sharex=True, height_ratios=heights)[:, 0]
        middles = np.arange(count) + 0.5
        axes[0].bar(middles - 0.2, (chosen.loss_b - chosen.loss_a).numpy(), 0.4, label="loss of b - loss of a, next token")
        axes[0].bar(middles + 0.2, chosen.kl.numpy(), 0.4, label="KL(a || b), next token")
        axes[0].axhline(0, color="black", linewidth=0.5)
        axes[0].set_ylabel("nats")
        axes[0].legend(fontsize=7)
        for axis, (site, values) in zip(axes[1:], sites.items(), strict=True):
            most = (
                float(values.nan_to_num(0, 0, 0).max()) or 1.0
            )  # where nothing differs, matplotlib would put 0 into the middle
            image = axis.pcolormesh(values.numpy(), vmin=0.0, vmax=most, cmap="viridis")
            shown = range(0, len(values), 1 + len(values) // 12)
            axis.set(title=_NAMES[site], ylabel="layer", yticks=[layer + 0.5 for layer in shown], yticklabels=shown)
            made.colorbar(image, ax=axis, label="|b - a| / |a|")
        axes[-1].set_xticks(middles, [plain(token) for token in chosen.tokens], rotation=90, fontsize=7)
        made.suptitle(f"Text {text} of {len(self.texts)}", fontsize=9)
        return self._shown(made)

    def _repr_html_(self) -> str:
        first = self.texts[0]
        rows = torch.stack([first.loss_a, first.loss_b, first.kl]).flip(0).numpy()
        grids = [Grid("Nats, first text", ["KL", "loss of b", "loss of a"], first.tokens, rows)]
        for site, values in first.difference.items():
            grids.append(
                Grid(f"{_NAMES[site]}: |b - a| / |a|", [str(i) for i in range(len(values))], first.tokens, values.numpy())
            )
        return view(grids, paragraph(f"{len(self.texts)} texts: {self._summary()}."))


@verb
def compare(engine_a: Engine, engine_b: Engine, texts: Sequence[Prompt], *, sites: str = "S") -> CompareResult:
    """Run two models with the same tokens over texts: losses, KL divergence, and how far their activations are apart.

    texts  with two tokens or more each. A model in memory that has no tokenizer takes the tokens of the other one
    sites  letters among S, T and C, whose rows must have the same shapes in both; "": predictions only

    To carry activations from one model into the other, use `patch(engine_b, text, text, source=engine_a, ...)`.

    >>> from replaylens import Engine, compare
    >>> engine, text = Engine.load("coin-plain"), "A coin's state is heads. Alice flips. What's the state? A: tails."
    >>> compare(engine, engine, [text]).loss_change.value
    0.0
    """
    for name, engine in (("engine_a", engine_a), ("engine_b", engine_b)):
        as_instance(name, engine, Engine, "an engine")
    require_one_vocabulary(engine_a, engine_b)
    letters = _letters(engine_a, engine_b, sites)
    readers = [each for each in (engine_a, engine_b) if each.text.tokenizer is not None] or [engine_a]
    found = []
    for number, text in enumerate(as_list("texts", texts, "a list of texts")):
        path = readers[0].tokens_of(text)
        if len(path) < 2:
            raise BadRequest(f"Text {number} has one token, and nothing follows that could be predicted. Give longer texts.")
        if readers[-1].tokens_of(text) != path:
            raise BadRequest(f"The models' tokenizers split text {number} differently. Give models with the same tokenizer.")
        found.append(_compared(engine_a, engine_b, readers[0], path, letters))
    if not found:
        raise BadRequest("No texts. Give at least one.")
    return CompareResult(tuple(found), made_by=(engine_a.fingerprint, engine_b.fingerprint))


def _letters(engine_a: Engine, engine_b: Engine, sites: str) -> tuple[str, ...]:
    """The chosen sites; BadRequest if their shapes differ."""
    letters = tuple(
        dict.fromkeys(as_instance("sites", sites, str, "letters among S, T and C").replace(",", "").replace(" ", ""))
    )
    if set(letters) - set("STC"):
        raise BadRequest(f"Invalid sites={sites!r}. Give letters among S, T and C, or '' for predictions only.")
    shape = lambda engine: (engine.config.num_layers, engine.config.d_model)  # noqa: E731
    if letters and shape(engine_a) != shape(engine_b):
        raise BadRequest(
            f"The models have (layers, d_model) {shape(engine_a)} and {shape(engine_b)}, so that their activations do not "
            "correspond. Give sites='' to compare predictions only."
        )
    for engine in (engine_a, engine_b):
        if missing := [letter for letter in letters if not engine.sites.per_layer(letter)]:
            raise BadRequest(f"No layer of this {engine.config.family} model has {missing[0]}. Leave it out of sites.")
    return letters


def _compared(engine_a: Engine, engine_b: Engine, reader: Engine, path: list[int], letters: tuple[str, ...]) -> ComparedText:
    log_p, rows = [], []
    for engine in (engine_a, engine_b):
        branch = engine.prompt(path, sites=list(letters))
        try:
            log_p.append(branch.logits(None).double().log_softmax(-1))
            names = {letter: engine.sites.per_layer(letter) for letter in letters}
            rows.append({s: torch.stack([branch.activations[n].double().cpu() for n in names[s]]) for s in letters})
        finally:
            branch.release()
    follows = torch.tensor([*path[1:], 0])[:, None]
    losses = [-each.gather(1, follows)[:, 0] for each in log_p]
    for loss in losses:
        loss[-1] = torch.nan
    kl = (log_p[0].exp() * (log_p[0] - log_p[1])).sum(-1)
    apart = {site: (rows[1][site] - rows[0][site]).norm(dim=-1) / rows[0][site].norm(dim=-1) for site in letters}
    return ComparedText(words(reader, path), losses[0], losses[1], kl, apart)
