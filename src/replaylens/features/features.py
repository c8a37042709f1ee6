"""`SparseFeatures`: a sparse autoencoder or transcoder. Encodes captured rows and makes edits of features.

Each row is encoded on its own, in canonical arithmetic, so its features are a function of weights, token path and edits, as the
row itself is.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from replaylens.engine import records
from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadConfig, BadEdit, BadRequest, BadWeights, UnknownSite
from replaylens.engine.memory.tree import TokenState
from replaylens.engine.model import modes
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.positions import Positions, chosen
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_float, as_instance, as_int, as_path, short_repr
from replaylens.engine.serving.branch import Branch
from replaylens.features.rows import FeatureRows, Ids, KernelProduct, RowProduct, feature_ids
from replaylens.features.weights import FeatureConfig, FeatureWeights

# ---- changes ---------------------------------------------------------------------------------------------------------
# `FeatureChanges`: what becomes of some features, and the difference that this makes to rows.

_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class FeatureChanges:
    """The new activation of some features: a value, or a multiple of the present one."""

    ops: tuple[tuple[int, Literal["set", "scale"], float], ...]
    """(feature, op, amount), by ascending feature"""

    @classmethod
    def of(cls, width: int, ablate: Ids, values: Mapping[int, float], factors: Mapping[int, float]) -> FeatureChanges:
        """From the arguments of `SparseFeatures.edits`. Raises BadRequest for an unknown feature, or one given twice."""
        ops: list[tuple[int, Literal["set", "scale"], float]] = []
        ops += [(feature, "set", 0.0) for feature in feature_ids("ablate", ablate, width)]
        ops += [(feature, "set", amount) for feature, amount in _amounts("set", values, width)]
        ops += [(feature, "scale", amount) for feature, amount in _amounts("scale", factors, width)]
        features = [feature for feature, _, _ in ops]
        if twice := [feature for feature in features if features.count(feature) > 1]:
            raise BadRequest(f"Feature {twice[0]} is changed in two ways. Give it to one of ablate, set and scale.")
        if not ops:
            raise BadRequest("No feature to change. Give ablate=[7], set={7: 4.0} or scale={7: 2.0}.")
        return cls(tuple(sorted(ops)))

    @property
    def features(self) -> list[int]:
        return [feature for feature, _, _ in self.ops]

    def differences(self, found: FeatureRows) -> Tensor:
        """New activations minus those found: [rows, changed features]."""
        now, new = found.columns(self.features), []
        for i, (_, op, amount) in enumerate(self.ops):
            new.append(now[:, i] * amount if op == "scale" else torch.full((len(now),), amount, dtype=torch.float32))
        return torch.stack(new, 1) - now

    def __str__(self) -> str:
        return ", ".join(f"{op} {feature} {'by' if op == 'scale' else 'to'} {amount:g}" for feature, op, amount in self.ops)


def _amounts(name: str, given: Mapping[int, float], width: int) -> list[tuple[int, float]]:
    if not isinstance(given, Mapping):
        raise BadRequest(f"Invalid {name}={short_repr(given)}. Give a dict from features to numbers, such as {{7: 2.0}}.")
    ids = feature_ids(name, list(given), width)
    found = [(feature, as_float(name, amount)) for feature, amount in zip(ids, given.values(), strict=True)]
    if large := [amount for _, amount in found if abs(amount) > _MAX]:
        raise BadRequest(f"Invalid {name}={short_repr(given)}. {large[0]:.3g} is beyond float32, which ends at {_MAX:.3g}.")
    return found


def rows_at(positions: Positions, captured: list[int], length: int) -> list[int]:
    """The numbers of the captured rows at these positions of a branch of `length` tokens; BadEdit if one was not captured."""
    if positions is None:
        return list(range(len(captured)))
    wanted = sorted(set(chosen(positions, length, error=BadEdit)))
    place = {position: row for row, position in enumerate(captured)}
    if missing := [p for p in wanted if p not in place]:
        raise BadEdit(
            f"Position {missing[0]} has no captured row on this branch of {length} tokens, so its features are not known. "
            "Give other positions, or capture it."
        )
    return [place[p] for p in wanted]


# ---- features --------------------------------------------------------------------------------------------------------

_NUMBERS = 1 << 24
"""activations per step; bounds the memory, and changes no bit"""
_NONE: Mapping[int, float] = MappingProxyType({})


class SparseFeatures:
    """A sparse autoencoder or transcoder in SAELens' format.

    f = act(W_enc^T (x - b_dec) + b_enc), without b_dec if the config says so; x is approximated by W_dec^T f + b_dec
    act: ReLU (standard, transcoder), ReLU of the k largest (topk), ReLU above a threshold (jumprelu)
    """

    def __init__(self, config: FeatureConfig, weights: FeatureWeights, device: str = "cpu") -> None:
        """
        weights  on the CPU
        device   "cpu" or "cuda": where rows are encoded; the two differ in the last bits
        """
        if device not in ("cpu", "cuda") or (device == "cuda" and not torch.cuda.is_available()):
            raise BadRequest(f"No device {short_repr(device)} found. Use device='cpu', or 'cuda' on a machine with a GPU.")
        self.config, self.weights, self.device = config, weights, device
        self.digest = hashlib.sha256(f"{config!r} {weights.digest}".encode()).hexdigest()
        """hash of config and tensors"""
        self.decoder = weights.W_dec
        """[d_sae, d_out]: what a unit of each feature adds to a row"""
        self._norms: Tensor | None = None
        if config.rescale_acts_by_decoder_norm:
            with modes.canonical():
                self._norms = _lengths(weights.W_dec)
            if bool((self._norms == 0).any()):
                raise BadWeights("W_dec has a row of zeros, but features are in units of its rows' lengths. Check the weights.")
            self.decoder = weights.W_dec / self._norms[:, None]
            self._norms = self._norms.to(device)
        self._encoder = weights if device == "cpu" else weights.to(device)
        self._last: tuple[bytes, FeatureRows] | None = None
        """hash of the rows that edits were last made from, and their features"""

    @classmethod
    def load(cls, folder: str | Path, device: str = "cpu") -> SparseFeatures:
        """Read a folder with `cfg.json` and `sae_weights.safetensors`, as SAELens saves it.

        device  "cpu" or "cuda": where rows are encoded

        Raises BadConfig, UnsupportedModel or BadWeights; `require` checks that a model has its sites.
        """
        folder = as_path("folder", folder)
        path = folder / "cfg.json"
        try:
            content = path.read_bytes()
        except OSError as problem:
            raise BadConfig(f"{path} cannot be read ({problem.strerror}). Give a folder that SAELens has saved.") from None
        config = FeatureConfig.of_json(records.parse(content, str(path), BadConfig), str(path))
        return cls(config, FeatureWeights.read(folder / "sae_weights.safetensors", config), device)

    def __len__(self) -> int:
        """The number of features."""
        return self.config.d_sae

    def __repr__(self) -> str:
        c = self.config
        where = c.hook if not c.transcodes else f"{c.hook} to {c.hook_out}"
        return f"SparseFeatures({c.architecture}, {c.d_sae} features of {where}, {self.digest[:12]})"

    def require(self, engine: Engine) -> SparseFeatures:
        """Return self. Raises UnknownSite or BadWeights if the model lacks its sites, or has them with other widths."""
        self._sites(engine.sites)
        return self

    def site_in(self, engine: Engine) -> str:
        """The site that is encoded, by its name in this model. Raises as `require`."""
        return self._sites(engine.sites)[0]

    def site_out(self, engine: Engine) -> str:
        """The site that is decoded to, by its name in this model. Raises as `require`."""
        return self._sites(engine.sites)[1]

    def _sites(self, table: SiteTable) -> tuple[str, str]:
        """The sites that are encoded and decoded to, by their names in this model."""
        found = []
        for hook, width in ((self.config.hook, self.config.d_in), (self.config.hook_out, self.config.d_out)):
            try:
                name = table.resolve(hook)
            except UnknownSite as unknown:
                raise UnknownSite(f"{self!r}: {unknown} Load features that were trained on this model.") from None
            size = torch.Size(table.sites[name].shape).numel()
            if size != width:
                raise BadWeights(
                    f"{self!r}: {hook} has width {width} there and {size} in this model. Load features of this model."
                )
            found.append(name)
        order = table.in_order()
        if order.index(found[1]) < order.index(found[0]):
            raise BadConfig(f"{self!r}: {found[1]} is computed before {found[0]}. Check hook_name and hook_name_out.")
        return found[0], found[1]

    # ---- encoding -----------------------------------------------------------------------------------------------

    @cached_property
    def _product(self) -> RowProduct | KernelProduct:
        """Made at first use: of a cross-layer transcoder, only one part encodes."""
        return RowProduct(self.weights.W_enc) if self.device == "cpu" else KernelProduct(self._encoder.W_enc)

    @torch.no_grad()
    def encode(self, rows: Tensor) -> FeatureRows:
        """The active features of rows [n, d_in], or [n, heads, d_head], which may be on any device. Computed in float32.

        A row gets the same bits alone or with others, and on any number of threads. Raises BadRequest for rows of another
        width or that are not finite, NotCertified on a machine whose products cannot keep this promise.
        """
        c = self.config
        if not isinstance(rows, Tensor) or rows.dim() < 2 or rows.shape[1:].numel() != c.d_in:
            given = list(rows.shape) if isinstance(rows, Tensor) else short_repr(rows)
            raise BadRequest(f"Invalid rows: {given}. Give a tensor [n, {c.d_in}], such as branch.activations[{c.hook!r}].")
        x = rows.detach().reshape(len(rows), c.d_in).to(self.device, torch.float32)
        if not bool(torch.isfinite(x).all()):
            raise BadRequest("Rows to encode contain NaN or infinity. Leave them out, or compute them again.")
        with modes.canonical():
            return FeatureRows.of_dense(self._activations(x), c.d_sae)

    def _activations(self, x: Tensor) -> Iterator[Tensor]:
        """Dense activations, some rows at a time."""
        c, w = self.config, self._encoder
        for some in x.split(max(1, _NUMBERS // c.d_sae)):
            centred = some - w.b_dec if c.apply_b_dec_to_input else some
            pre = self._product(centred).add_(w.b_enc)
            if self._norms is not None:
                pre.mul_(self._norms)
            if w.threshold is not None:
                pre.masked_fill_(pre <= w.threshold, 0)
            yield (pre if c.k is None else _largest(pre, c.k)).relu_()

    @torch.no_grad()
    def decode(self, found: FeatureRows) -> Tensor:
        """The rows that features stand for: [n, d_out]. Each is a sum over its own features, so no row depends on another."""
        if as_instance("found", found, FeatureRows, "the result of encode").width != len(self):
            raise BadRequest(f"These rows have {found.width} features, not {len(self)}. Decode with what encoded them.")
        with modes.canonical():
            out = torch.zeros(len(found), self.config.d_out, dtype=torch.float32)
            for row, (index, value) in enumerate(map(found.row, range(len(found)))):
                if len(index):
                    out[row] = RowProduct(self.decoder[index.long()])(value[None])[0]
            return out + self.weights.b_dec

    def of(self, branch: Branch) -> FeatureRows:
        """The features of a branch's captured rows, with positions and tokens.

        Raises UnknownSite if their site was not captured, or the model does not have it.
        """
        recording, tokens = as_instance("branch", branch, Branch, "a branch").activations, branch.tokens
        found, positions = self.encode(recording.peek(self._captured(branch))), tuple(recording.positions())
        words = tuple(word(branch.engine.text, tokens[position]) for position in positions)
        return FeatureRows(found.offsets, found.indices, found.values, found.width, positions, words)

    def _captured(self, branch: Branch) -> str:
        """The captured site whose rows are encoded."""
        site, recording = self._sites(branch.engine.sites)[0], branch.activations
        if site in recording:
            return site
        if (leaves := re.fullmatch(r"blocks\.(\d+)\.hook_out", site)) is not None:
            # the stream that leaves a block enters the next one, and letters name it so; an edit there comes in between
            following = f"blocks.{int(leaves[1]) + 1}.hook_in"
            edited = branch.lane.hooks or any(edit.site == following for edit in branch.lane.edits)
            if following in recording and not edited:
                return following
        raise UnknownSite(f"{site} was not captured on this branch. Ask for it: prompt(..., sites=[{self.config.hook!r}]).")

    # ---- editing ------------------------------------------------------------------------------------------------

    def edits(
        self,
        branch: Branch,
        *,
        ablate: Ids = (),
        set: Mapping[int, float] = _NONE,
        scale: Mapping[int, float] = _NONE,
        positions: Positions = None,
    ) -> list[Edit]:
        """Edits that change features of a branch's captured rows, for `branch.fork(edits=...)`:

            x' = x + sum_i (f_i' - f_i(x)) W_dec[i]

        What the features do not explain of x stays as it is. A transcoder adds this to its output site.

        ablate     features set to zero
        set        feature -> its new activation
        scale      feature -> factor of its activation
        positions  as in `Edit`; default: all tokens of the branch, as far as their rows are captured

        The differences are computed here, from this branch's rows, so that the edit is data and its fork is certified. No row
        of the site depends on the edited rows of other positions, so this is what a hook function would compute. Tokens that
        are generated later are not edited: see `generate`. Raises BadEdit if no row would change.
        """
        changes = FeatureChanges.of(len(self), ablate, set, scale)
        made = self._edits(branch, changes, positions)
        if not made:
            raise BadEdit(f"Nothing would change: {changes}, and no row at positions={short_repr(positions)} has them active.")
        return made

    @torch.no_grad()
    def _edits(self, branch: Branch, changes: FeatureChanges, positions: Positions) -> list[Edit]:
        """One edit; none if no row would change."""
        target = self._sites(branch.engine.sites)[1]
        captured, found = self._measured(branch)
        rows = rows_at(positions, captured, branch.length)
        difference = changes.differences(found)[rows]
        moved = (difference != 0).any(1)
        value = torch.zeros(int(moved.sum()), self.config.d_out, dtype=torch.float32)
        for feature, amount in zip(changes.features, difference[moved].T, strict=True):
            value += amount[:, None] * self.decoder[feature]  # element by element: no row depends on another
        at = [captured[row] for row, moves in zip(rows, moved.tolist(), strict=True) if moves]
        shape = branch.engine.sites.sites[target].shape
        return [Edit(target, "add", value.reshape(len(at), *shape), positions=at)] if at else []

    def _measured(self, branch: Branch) -> tuple[list[int], FeatureRows]:
        """(positions, features) of a branch's tokens. The last generated one has no row yet: a twin computes it."""
        if branch.record.states.last is not TokenState.PENDING:
            rows = branch.activations.peek(self._captured(branch)).cpu()
            key = hashlib.sha256(rows.contiguous().view(torch.uint8).numpy().tobytes()).digest()
            if self._last is None or self._last[0] != key:  # edits of many features are often made from the same rows
                self._last = key, self.encode(rows)
            return branch.activations.positions(), self._last[1]
        (twin,) = branch.fork(at=branch.length - 1)
        try:
            return self._measured(twin.force(branch.tokens[-1:]))
        finally:
            twin.release()

    def generate(
        self,
        branch: Branch,
        n: int,
        *,
        ablate: Ids = (),
        set: Mapping[int, float] = _NONE,
        scale: Mapping[int, float] = _NONE,
        positions: Positions = None,
        sampling: Sampling | None = None,
    ) -> Branch:
        """A fork that continues by up to `n` tokens with features changed at all of these tokens, too.

        Arguments as in `edits`; `positions` are those of the tokens that the branch has. Every generated token is computed
        twice, first to find its features and then with its edit. The fork is certified, and its last token is edited as well.
        """
        n, changes = as_int("n", n, 0), FeatureChanges.of(len(self), ablate, set, scale)
        (held,) = branch.fork(edits=self._edits(branch, changes, positions))
        for _ in range(n):
            held.generate(1, sampling=sampling)
            if held.finish_reason is not None:
                break
            if made := self._edits(held, changes, -1):
                plain, (held,) = held, held.fork(edits=made)
                plain.release()
        return held


def _lengths(rows: Tensor) -> Tensor:
    """The Euclidean lengths of rows [n, d], summed in float64 from first to last, as on every machine: [n]"""
    total = torch.zeros(len(rows), dtype=torch.float64)
    for column in rows.double().unbind(1):
        total += column * column
    return torch.from_numpy(np.sqrt(total.numpy())).float()


def _largest(pre: Tensor, k: int) -> Tensor:
    """Mutates and returns pre [n, d]: all but the k largest of each row become zero. Of equal ones the first are kept."""
    least = pre.topk(k).values.amin(-1, keepdim=True)  # values only: which of equal ones topk returns may depend on its kernel
    dropped = pre < least
    tied = (dropped.sum(-1) < pre.shape[1] - k).nonzero().flatten()
    if len(tied):
        equal = pre[tied] == least[tied]
        room = k - (pre[tied] > least[tied]).sum(-1, keepdim=True)
        dropped[tied] |= equal & (equal.cumsum(-1) > room)
    return pre.masked_fill_(dropped, 0)
