"""Taps that edit the sites of a pass, one segment after another. On a GPU, edits run as an `EditProgram`."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit
from replaylens.engine.model.tap import Tap
from replaylens.engine.passes.batch import Batch
from replaylens.engine.request.hooks import BatchHook, NamedHook


class EditTap:
    """Applies the hooks of a batch's segments, and before them the edits if asked to; then passes the value to `inner`."""

    def __init__(self, batch: Batch, inner: Tap | None, edits: bool = True) -> None:
        self.batch, self.inner, self.edits = batch, inner, edits
        self.sites = {name for s in batch.segments for name, _ in s.hooks}
        self.sites |= {edit.site for s in batch.segments for edit in s.edits if edits and not edit.on_pattern}

    def wants(self, site: str) -> bool:
        return site in self.sites or (self.inner is not None and self.inner.wants(site))

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site in self.sites:
            value = value.clone()
            for index, segment in enumerate(self.batch.segments):
                first = self.batch.offsets[index]
                for edit in segment.edits if self.edits else ():
                    if edit.site == site:
                        positions = edit.edited(segment.start, segment.tokens)
                        rows = [first + p - segment.start for p in positions]
                        if rows:
                            value[rows] = edit.apply(value[rows], positions)
                for name, hook in segment.hooks:
                    if name == site and isinstance(hook, BatchHook):
                        self._hook_batch(site, hook, index, value)
                    elif name == site:
                        rows_now = value[first : first + len(segment.tokens)][None]  # a batch of one, as hooks expect
                        asked = hook.name if isinstance(hook, NamedHook) else site
                        changed = hook(rows_now, HookContext(asked, segment.start))
                        value[first : first + len(segment.tokens)] = _hooked(site, rows_now, changed)[0]
        return self.inner(site, value) if self.inner is not None and self.inner.wants(site) else value

    def _hook_batch(self, site: str, hook: BatchHook, index: int, value: Tensor) -> None:
        """Mutates the value: applies a hook function to all segments that share it, once, at the first of them."""
        owners = [i for i, s in enumerate(self.batch.segments) if any(own is hook for _, own in s.hooks)]
        if owners[0] != index:
            return
        segments = [self.batch.segments[i] for i in owners]
        if len({len(s.tokens) for s in segments}) > 1:  # one of them is computed in pieces
            segments = segments[:1]
        rows = [
            slice(self.batch.offsets[i], self.batch.offsets[i] + len(s.tokens)) for i, s in zip(owners, segments, strict=False)
        ]
        together = torch.stack([value[each] for each in rows])
        try:
            changed = _hooked(site, together, hook(together, HookContext(hook.name, segments[0].start)))
        except Exception as error:
            hook.errors.append(error)  # the loop repeats a failed pass branch by branch, where this is no longer a batch
            raise hook.errors[0] from None
        for each, new in zip(rows, changed, strict=True):
            value[each] = new


class UneditedTap:
    """Keeps the values that `inner` is about to edit at some sites."""

    def __init__(self, sites: frozenset[str], inner: Tap) -> None:
        self.sites, self.inner = sites, inner
        self.values: dict[str, Tensor] = {}

    def wants(self, site: str) -> bool:
        return self.inner.wants(site)

    def __call__(self, site: str, value: Tensor) -> Tensor:
        if site in self.sites:
            self.values[site] = value
        return self.inner(site, value)


def _hooked(site: str, value: Tensor, changed: Any) -> Tensor:
    """The value after a hook function. None keeps `value`, which may be changed in place. BadEdit if the shape differs."""
    if changed is None:
        return value
    if not isinstance(changed, Tensor) or changed.shape != value.shape:
        given = f"a tensor of shape {tuple(changed.shape)}" if isinstance(changed, Tensor) else f"a {type(changed).__name__}"
        raise BadEdit(f"The hook function on {site} returned {given}. Return a tensor of shape {tuple(value.shape)}, or None.")
    return changed


@dataclass(frozen=True)
class HookContext:
    """The second argument of a hook function."""

    name: str
    """as the hook was asked for"""
    start: int
    """position of the first row in the value"""

    def layer(self) -> int:
        """The block that the site belongs to."""
        return int(self.name.split(".")[1])
