"""`routing`: which experts each token of a text goes to, layer by layer, and the experts of rejected drafts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from replaylens import boundary
from replaylens.engine.display import Citable
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, Caveat
from replaylens.engine.model.sites import WEIGHTS_SITE
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.values import as_int, as_list, verb
from replaylens.engine.serving.branch import Branch
from replaylens.workbench.drawing import Grid, figure, view, words

_INDICES_SITE = "mlp.gate.hook_expert_indices"
_MAX_DRAFTS = 8
"""rejected drafts in a picture; the frames hold all"""


@dataclass(frozen=True, eq=False)
class RoutedTokens:
    """The experts of consecutive tokens, in the order of their index."""

    start: int
    """position of the first token"""
    tokens: tuple[str, ...]
    chosen: Tensor
    """[layers, tokens, top] int64"""
    weights: Tensor
    """[layers, tokens, top]"""

    def lines(self, layers: Sequence[int], draft: int) -> list[dict[str, object]]:
        """One line per layer, token and chosen expert."""
        chosen, weights = self.chosen.tolist(), self.weights.tolist()
        return [
            {"draft": draft, "position": self.start + i, "token": token, "layer": layer, "expert": expert, "weight": weight}
            for at, layer in enumerate(layers)
            for i, token in enumerate(self.tokens)
            for expert, weight in zip(chosen[at][i], weights[at][i], strict=True)
        ]

    def grid(self, title: str, layers: Sequence[int], named: int) -> Grid:
        """Layers from the bottom up, tokens from left to right. A cell names so many of its experts, the heaviest first."""
        order = self.weights.argsort(dim=-1, descending=True, stable=True)
        experts, weights = self.chosen.gather(-1, order).tolist(), self.weights.gather(-1, order)
        cells = [[" ".join(map(str, each[:named])) for each in row] for row in experts]

        def facts(i: int, j: int) -> tuple[str, ...]:
            pairs = zip(experts[i][j], weights[i, j].tolist(), strict=True)
            return (f"layer {layers[i]}, position {self.start + j}", *(f"expert {e}: {w:.4g}" for e, w in pairs))

        return Grid(title, [str(layer) for layer in layers], self.tokens, weights[..., 0].numpy(), cells, facts=facts)


@dataclass(frozen=True, eq=False)
class RoutingResult(Citable):
    """Where the tokens of one path went."""

    layers: tuple[int, ...]
    """the layers with a mixture of experts"""
    num_experts: int
    path: RoutedTokens
    drafts: tuple[RoutedTokens, ...]
    """rejected drafts, if the branch kept them"""

    def __repr__(self) -> str:
        found = f"{len(self.layers)} layers, {self.num_experts} experts, {len(self.path.tokens)} tokens"
        return f"RoutingResult({found}, {len(self.drafts)} rejected drafts)"

    @property
    def frame(self) -> pd.DataFrame:
        """One line per token, layer and chosen expert. `draft` is -1 on the path, else the number of the rejected draft."""
        lines = self.path.lines(self.layers, -1)
        for number, draft in enumerate(self.drafts):
            lines += draft.lines(self.layers, number)
        return pd.DataFrame(lines, columns=["draft", "position", "token", "layer", "expert", "weight"])

    @property
    def load(self) -> pd.DataFrame:
        """One line per layer and expert: how many tokens of the path went there, and the sum of their weights."""
        lines = []
        for at, layer in enumerate(self.layers):
            chosen, weights = self.path.chosen[at].flatten(), self.path.weights[at].flatten().double()
            tokens = chosen.bincount(minlength=self.num_experts).tolist()
            total = torch.zeros(self.num_experts, dtype=torch.float64).index_add(0, chosen, weights).tolist()
            lines += [
                {"layer": layer, "expert": e, "tokens": n, "weight": w}
                for e, (n, w) in enumerate(zip(tokens, total, strict=True))
            ]
        return pd.DataFrame(lines)

    @property
    def beside(self) -> pd.DataFrame:
        """One line per rejected token and layer: its experts, those of the accepted token there, and how many they share."""
        lines: list[dict[str, object]] = []
        for number, draft in enumerate(self.drafts):
            for i, token in enumerate(draft.tokens):
                there = draft.start + i - self.path.start
                if not 0 <= there < len(self.path.tokens):
                    continue  # the path ends before
                for at, layer in enumerate(self.layers):
                    ours, theirs = self.path.chosen[at, there].tolist(), draft.chosen[at, i].tolist()
                    line: dict[str, object] = {"draft": number, "position": draft.start + i, "layer": layer}
                    line |= {"rejected": token, "accepted": self.path.tokens[there]}
                    line |= {"rejected_experts": tuple(theirs), "accepted_experts": tuple(ours)}
                    lines.append(line | {"shared": len(set(ours) & set(theirs))})
        columns = ["draft", "position", "layer", "rejected", "accepted", "rejected_experts", "accepted_experts", "shared"]
        return pd.DataFrame(lines, columns=columns)

    def plot(self) -> Figure:
        """The path and its first rejected drafts: each token's heaviest expert, coloured by its weight."""
        return self._shown(figure(self._grids(1), "weight of the heaviest expert", "layer", "token"))

    def plot_load(self) -> Figure:
        """How many tokens each expert got: layers by experts."""
        counts = self.load["tokens"].to_numpy(dtype=float).reshape(len(self.layers), self.num_experts)
        rows, columns = map(str, self.layers), map(str, range(self.num_experts))
        grid = Grid("tokens per expert", list(rows), list(columns), counts, [[f"{n:.0f}" for n in row] for row in counts])
        return self._shown(figure([grid], "tokens", "layer", "expert"))

    def _grids(self, named: int) -> list[Grid]:
        drafts = [draft.grid(f"rejected at {draft.start}", self.layers, named) for draft in self.drafts[:_MAX_DRAFTS]]
        return [self.path.grid("path", self.layers, named), *drafts]

    def _repr_html_(self) -> str:
        grids = self._grids(self.path.chosen.shape[-1])
        return view(grids, note="Rows are layers, columns are tokens. A cell names its experts, the heaviest first.")


def router_sites(engine: Engine, layers: Sequence[int]) -> list[str]:
    """The sites that `routing` reads: the chosen experts and their weights."""
    return [f"blocks.{layer}.{site}" for layer in layers for site in (_INDICES_SITE, WEIGHTS_SITE)]


@verb
def routing(engine: Engine, text: Prompt | Branch, *, layers: Sequence[int] | None = None) -> RoutingResult:
    """Which experts the tokens of a text go to.

    text    a prompt, or a branch that captures the sites `hook_expert_indices` and `hook_expert_weights` of the
            routers. A branch made with keep_rejected shows its rejected drafts as well
    layers  those to read, which must have a mixture of experts; None: all that have one
    """
    mixture = engine.config.mixture
    if mixture is None:
        raise BadRequest(f"This model ({engine.config.family}) has no experts. Load one with a mixture of experts.")
    chosen = _chosen(engine, layers)
    if isinstance(text, Branch):
        path, drafts = _of_branch(engine, text, chosen)
        return RoutingResult(tuple(chosen), mixture.num_experts, path, drafts, made_by=(engine.fingerprint,))
    branch = engine.prompt(text, sites=router_sites(engine, chosen))
    try:
        path, drafts = _of_branch(engine, branch, chosen)
    finally:
        branch.release()
    return RoutingResult(tuple(chosen), mixture.num_experts, path, drafts, made_by=(engine.fingerprint,))


def _chosen(engine: Engine, layers: Sequence[int] | None) -> list[int]:
    sparse = [layer for layer in range(engine.config.num_layers) if engine.config.sparse(layer)]
    if layers is None:
        return sparse
    given = as_list("layers", layers, "a list of layers")
    found = [as_int("layers", layer, 0, engine.config.num_layers - 1) for layer in given]
    if not found or (dense := [layer for layer in found if layer not in sparse]):
        what = f"Layer {dense[0]} has an MLP" if found else "layers is empty"
        raise BadRequest(f"{what}. Give layers with a mixture of experts: {', '.join(map(str, sparse))}.")
    return list(dict.fromkeys(found))


def _of_branch(engine: Engine, branch: Branch, layers: Sequence[int]) -> tuple[RoutedTokens, tuple[RoutedTokens, ...]]:
    missing = [site for site in router_sites(engine, layers) if site not in branch.activations.sites()]
    if missing:
        raise BadRequest(
            f"The branch does not capture {missing[0]}. Give sites={router_sites(engine, layers)[:2]} and so on to prompt."
        )
    kept = [each for each in branch.rejected if _kept(each)]
    if branch.rejected and not kept:
        boundary.warn(
            f"The {len(branch.rejected)} rejected drafts of the branch are not shown: their rows were not captured. "
            "Make the branch with prompt(..., sites=..., keep_rejected=True).",
            Caveat,
        )
    return _routed(engine, branch, layers), tuple(_routed(engine, each, layers) for each in kept)


def _kept(rejected: Branch) -> bool:
    """Whether a rejected branch keeps rows: those with pages alone do not."""
    return rejected.lane.recording is not None and bool(rejected.lane.recording.positions())


def _routed(engine: Engine, branch: Branch, layers: Sequence[int]) -> RoutedTokens:
    """The captured rows of a branch; of a rejected one, those of its drafts."""
    rows = branch.activations
    chosen = torch.stack([rows[f"blocks.{layer}.{_INDICES_SITE}"] for layer in layers])
    spread = torch.stack([rows[f"blocks.{layer}.{WEIGHTS_SITE}"] for layer in layers])
    positions = rows.positions()
    if positions != list(range(positions[0], positions[0] + len(positions))):
        raise BadRequest(f"The branch captures positions {positions[:8]} and so on. Capture consecutive ones.")
    tokens = words(engine, branch.tokens[positions[0] : positions[-1] + 1])
    return RoutedTokens(positions[0], tokens, chosen, spread.gather(-1, chosen))
