"""`ReplacementModel`: the pass of one path made linear, and where a direction in it comes from.

Attention patterns, the scales of norms and the outputs of MLPs are held at their values in the pass. What is left is linear in
what enters the residual stream: embeddings, MLP outputs, edits and biases. So the projection of any row on any direction is a
sum over these, each times its gradient: a walk back over the steps of the pass. A row depends on earlier positions only, and is
computed from them alone: its sum has the same bits on every path that begins with the same tokens, and with any other
directions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import pad

from replaylens.engine.errors import BadRequest, NoGradient
from replaylens.engine.model.layers import Rotary
from replaylens.engine.model.program import Numbered, Operation
from replaylens.engine.model.sites import SiteTable
from replaylens.gradients.backward import Flowing, Held, Tape
from replaylens.gradients.derivatives import HostProducts, pattern_of, through_rotary

ENTRY = "blocks.0.hook_in"
"""the site of the embeddings"""


class Entering(NamedTuple):
    """What enters the residual stream at a site, and the gradient of some directions there."""

    kind: Literal["embedding", "write", "edit", "bias"]
    site: str
    """empty for biases"""
    gradient: Tensor
    """[directions, rows, ...]"""
    value: Tensor
    """[rows, ...]; of a bias [...], the same in every row"""


def mlp_sites(sites: SiteTable, layer: int) -> tuple[set[str], list[str]]:
    """What a transcoder of a layer may read, and where its MLP writes, next to the stream first. Both are empty without one."""
    begin = f"blocks.{layer}."
    if (read := sites.names.get(f"{begin}mlp.hook_in")) is None:
        return set(), []
    stream = next(n for n in (f"{begin}ln2.hook_in", f"{begin}hook_in") if n in sites.sites or n in sites.same)
    stream = sites.resolve(stream)
    within = set() if read == stream else {read, read.replace("hook_out", "hook_normalized")}
    return {stream, *within}, list(dict.fromkeys((sites.aliases[f"{begin}hook_mlp_out"], f"{begin}mlp.hook_out")))


def require_place(sites: SiteTable, layer: int, reads: str | None, writes: str | None) -> None:
    """BadRequest unless a transcoder of this layer reads what its MLP reads, and writes what its MLP writes."""
    known, written = mlp_sites(sites, layer)
    if reads is not None and reads not in known:
        raise BadRequest(
            f"A transcoder reads {reads}, but the MLP of layer {layer} reads {', '.join(sorted(known))}. Use these."
        )
    if writes is not None and writes not in written:
        raise BadRequest(f"A transcoder writes {writes}, but the MLP of layer {layer} writes {' or '.join(written)}.")


class ReplacementModel(Held):
    """The linear replacement of one path's pass: a walk in which directions of one row are rows side by side."""

    def __init__(self, tape: Tape, reads: Mapping[int, str], writes: Mapping[int, str]) -> None:
        """
        tape    with the values of `reads`, of `writes`, of `ENTRY` and of edited sites
        reads   layer -> the site that directions of this layer are about: what its MLP reads, before or after its norm
        writes  layer -> the site of what its MLP writes

        NoGradient for a pass that is not linear, once these are held.
        """
        products, recorder = tape.products(), tape.recorder
        if not isinstance(products, HostProducts):
            raise NoGradient("The replacement model is computed on a CPU only. Load the engine with device='cpu'.")
        assert recorder is not None
        super().__init__(tape.runner.model, recorder, (), frozenset((ENTRY,)), products)
        self.host, self.writes, self.num_rows = products, dict(writes), len(tape.tokens)
        self._values, self._unedited = tape.forward.values, tape.forward.unedited
        self.width = max(self.model.config.d_model, self.model.config.num_heads * self.model.config.d_head)
        """numbers of the widest gradient of a row"""
        places = {step.site: step.outs[0] for step in recorder.steps if step.kind == "site"}
        number, capped = self.logits(recorder.number(tape.forward.logits))
        self.last_logits = (recorder.values[number][-1] if capped else tape.forward.logits).float()
        """of the last row, before the softcap: [vocab]"""
        head = next(step for step in reversed(recorder.steps) if step.kind == "unembed")
        self._starts = {layer: places[site] for layer, site in reads.items()} | {self.num_layers: head.reads[0]}
        self._readers = Counter(number for step in recorder.steps for number in step.reads)
        first = next(i for i, step in enumerate(recorder.steps) if step.kind == "site" and step.site == ENTRY)
        before = {number for step in recorder.steps[: first + 1] for number in step.reads}
        if before & {number for step in recorder.steps[first + 1 :] for number in step.reads}:  # which no node would have
            raise NoGradient(f"This model's wiring reads what enters {ENTRY} past that site, too. Read what the site gives.")
        self._known: dict[Any, Any] = {}
        """patterns, scales and weights by the steps that need them"""
        self._narrow: dict[int, tuple[slice, tuple[int, ...]]] = {}
        """number -> the columns that its gradient is about, if it is about a part of a row only, and their shape"""
        self.edited: dict[str, Tensor] = {}
        """site -> what edits add there: [rows, ...], of the sites that gradients pass"""
        self._passed = set[str]()
        for layer, start in self._starts.items():
            self.pull(0, layer, torch.zeros(1, recorder.values[start].shape[-1], dtype=torch.float32))
        for site in sorted(self._passed & {edit.site for edit in tape.edits}):
            self.edited[site] = self.value(site) - self._unedited[site].float()

    @property
    def num_layers(self) -> int:
        return self.model.config.num_layers

    def value(self, site: str) -> Tensor:
        """The value at a site, after edits, in float32."""
        return self._values[site].float()

    def written(self, site: str) -> Tensor:
        """As `value`, before edits."""
        return self._unedited[site].float() if site in self._unedited else self.value(site)

    def towards(self, right: Sequence[int], wrong: Sequence[int | None]) -> tuple[Tensor, Tensor]:
        """Differences of logits before their softcap as directions of ln_final.hook_out [n, d_model], and what the biases of
        the unembedding add: [n]

        wrong  the token whose logit is subtracted; None: the mean of all
        """
        bias = self.model.unembed_bias
        vectors = _differences(self.model.unembedding.detach().float(), right, wrong) * self.model.config.logit_scale
        if bias is None:
            return vectors, vectors.new_zeros(len(vectors))
        return vectors, _differences(bias.detach().float()[:, None], right, wrong)[:, 0] * self.model.config.logit_scale

    # ---- walk ----------------------------------------------------------------------------------------------------------

    def pull(self, position: int, layer: int, directions: Tensor) -> list[Entering]:
        """All that a row's projections on some directions are sums of: the value of each times its gradient.

        position    of the row
        layer       of the directions: what `reads` says; the number of layers: what the unembedding reads
        directions  [n, d]
        """
        self._count, self._rows, self._entering = len(directions), position + 1, list[Entering]()
        number = self._starts[layer]
        g = torch.zeros(self.shape(Numbered(number)), dtype=torch.float32)
        self._each(g)[:, -1] = directions
        self.run(number, g)
        return self._entering

    def _each(self, g: Tensor) -> Tensor:
        """[directions * rows, ...] -> [directions, rows, ...]"""
        return g.view(self._count, -1, *g.shape[1:])

    def shape(self, x: Numbered) -> tuple[int, ...]:
        rows, *width = self.recorder.values[x.number].shape
        if x.number in self._narrow:
            width = list(self._narrow[x.number][1])
        return (self._count * min(rows, self._rows), *width)

    def __call__(self, x: Any) -> Any:
        """Of what steps made, the shape alone."""
        return torch.empty((), dtype=torch.float32).expand(self.shape(x)) if isinstance(x, Numbered) else super().__call__(x)

    def rule(self, step: Operation) -> Any:
        known = super().rule(step)
        return ReplacementModel.item if known is not None and step.kind == "torch.__getitem__" else OWN.get(step.kind, known)

    def _through(self, step: Operation, outs: list[Tensor | None]) -> list[tuple[Numbered, Tensor]]:
        number, g = step.outs[0], outs[0]
        if number in self._narrow and g is not None:
            if step.kind == "linear" or (step.kind in _SAME and self._readers[step.reads[0]] == 1):
                return self._narrowed(step, g, *self._narrow.pop(number))
            columns, _ = self._narrow.pop(number)
            whole = torch.zeros(self.shape(Numbered(number)), dtype=torch.float32).flatten(1)
            whole[:, columns] = g.flatten(1)
            outs = [whole.view(self.shape(Numbered(number))), *outs[1:]]
        return super()._through(step, outs)

    def _narrowed(self, step: Operation, g: Tensor, columns: slice, _: Any) -> list[tuple[Numbered, Tensor]]:
        """Of a gradient that is about some columns only."""
        x, linear = step.args[0], step.args[-1]
        if step.kind != "linear":
            self._narrow[x.number] = columns, g.flatten(1).shape[1:]
            return [(x, g.flatten(1))]
        if linear.bias is not None:
            self.enters(step, g, linear.bias[columns].float())
        if (step, "weight") not in self._known:
            self._known[step, "weight"] = self.host.packed(linear.weight[:, columns].detach().mT)
        return [(x, self.products.plain(g, self._known[step, "weight"]))]

    def parts(self, step: Operation, *outs: Tensor | None) -> Flowing:
        """Of split and chunk: values are parts of one product with queries and keys, which have no gradient."""
        x, dim = step.args[0], step.options.get("dim", step.args[-1])
        if dim != 1 or len(given := [i for i, g in enumerate(outs) if g is not None]) > 1 or self._readers[x.number] > 1:
            return super().parts(step, *outs)
        sizes = [self.shape(Numbered(out))[1] for out in step.outs]
        first, g, inner = sum(sizes[: given[0]]), outs[given[0]], math.prod(self.shape(x)[2:])
        assert g is not None
        self._narrow[x.number] = slice(first * inner, (first + sizes[given[0]]) * inner), g.shape[1:]
        return [(x, g)]

    def item(self, step: Operation, g: Tensor) -> Flowing:
        x, at = step.args
        if at == slice(-1, None):  # the last row
            whole = torch.zeros(self.shape(x), dtype=torch.float32)
            self._each(whole)[:, -1] = g
            return [(x, whole)]
        if not isinstance(at, tuple) or at[0] not in (slice(None), Ellipsis):  # other rows
            raise self._refused(step)
        return super().item(step, g)

    def site(self, step: Operation, g: Tensor) -> Flowing:
        site, rows = step.site, slice(0, self._rows)
        self._passed.add(site)
        if site in self.edited:
            self._entering.append(Entering("edit", site, self._each(g), self.edited[site][rows]))
        if site == ENTRY or site in self.writes.values():
            kind: Any = "embedding" if site == ENTRY else "write"
            self._entering.append(Entering(kind, site, self._each(g), self.written(site)[rows]))
            self.found.setdefault(site, g)
            return []
        return [(step.args[0], g)]

    def enters(self, step: Operation, g: Tensor, value: Tensor) -> None:
        self._entering.append(Entering("bias", "", self._each(g), value))

    def scale(self, step: Operation) -> Tensor:
        if (step, "scale") not in self._known:
            self._known[step, "scale"] = super().scale(step)
        held = self._known[step, "scale"][: self._rows]
        return held.repeat(self._count, *[1] * (held.dim() - 1))

    def rotated(self, step: Operation, g: Tensor) -> Flowing:
        positions = step.args[1].positions[: self._rows].repeat(self._count)
        return [(step.args[0], through_rotary(g, Rotary(step.args[1].table, positions)))]

    def attend(self, step: Operation, g: Tensor) -> Flowing:
        """With the pattern held: the gradient of values alone, a sum over rows, and over the heads of a group."""
        heads, spec = step.args
        if (step, "pattern") not in self._known:
            q, k = (self.recorder.values[x.number].float() for x in (heads.q, heads.k))
            self._known[step, "pattern"] = pattern_of(q, k, spec, self.products, heads.sinks)
        pattern = self._known[step, "pattern"][:, :, : self._rows, : self._rows]
        weights = rearrange(pattern, "kv group rows keys -> kv (group rows) keys")
        of_rows = rearrange(self._each(g), "n rows (kv group) d -> kv (n d) (group rows)", kv=len(weights))
        found = [self.products.plain(x.contiguous(), self.host.packed(w)) for x, w in zip(of_rows, weights, strict=True)]
        by_value = rearrange(torch.stack(found), "kv (n d) keys -> (n keys) kv d", n=self._count).contiguous()
        return [(heads.v, pad(by_value, (0, self.shape(heads.v)[-1] - g.shape[-1])))]  # of a latent, a part is the value


_SAME = ("torch.view", "torch.reshape", "torch.flatten", "torch.unflatten")
OWN = {
    "site": ReplacementModel.site,
    "attend": ReplacementModel.attend,
    "rotate": ReplacementModel.rotated,
    **dict.fromkeys(("torch.split", "torch.chunk"), ReplacementModel.parts),
}
"""by kind: rules of the replacement model alone"""


def _differences(table: Tensor, right: Sequence[int], wrong: Sequence[int | None]) -> Tensor:
    """Rows of a table [rows, d] minus others; None: minus the mean of all, summed in float64 from first to last"""
    mean = table.new_zeros(table.shape[1])
    if None in wrong:
        total = torch.zeros(table.shape[1], dtype=torch.float64)
        for piece in table.split(4096):  # numpy adds rows of this order one by one
            total += torch.from_numpy(piece.numpy().astype("float64", order="C").sum(0))
        mean = (total / len(table)).float()
    return torch.stack([table[a] - (mean if b is None else table[b]) for a, b in zip(right, wrong, strict=True)])
