"""Hook functions: on whole batches, and at names that can be read but not changed."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.model.site_names import KEY_SITES
from replaylens.engine.model.sites import SiteTable
from replaylens.engine.request.capture import HEAD_SITES

HookFunction = Callable[[Tensor, Any], Tensor | None]


def hook_at(name: str, function: HookFunction, table: SiteTable) -> tuple[str, HookFunction]:
    """(site, hook function) of a hook at a name; BadEdit if no pass reaches the site."""
    site = table.resolve(name)
    if site in HEAD_SITES:
        raise BadEdit(
            f"A hook function on {name} is never called: the head runs once the rows are committed. Capture {site} instead, "
            f"or hook {table.per_layer('S')[-1]}."
        )
    if name in table.read_only or site.endswith(KEY_SITES):
        if isinstance(function, BatchHook):
            return site, replace(function, function=_reading(name, function.function))
        return site, _reading(name, function)
    return site, function if name == site or isinstance(function, BatchHook) else NamedHook(function, name)


@dataclass(frozen=True, eq=False)
class NamedHook:
    """A hook function, and the name that it was asked for by: another name of its site."""

    function: HookFunction
    name: str

    def __call__(self, value: Tensor, hook: Any) -> Tensor | None:
        return self.function(value, hook)


@dataclass(frozen=True, eq=False)
class BatchHook:
    """A hook function that sees all sequences of a batch at once, as in TransformerLens.

    The batch must be computed in one pass: its sequences are segments that share this object.
    """

    function: HookFunction
    name: str
    count: int
    """the number of sequences"""
    length: int
    """the tokens of each"""
    heads_first: bool = False
    """whether the function sees [batch, heads, positions, ...]; keys end with the sequence"""
    errors: list[Exception] = field(default_factory=list)
    """what it raised; the first one is for the caller"""

    def __call__(self, value: Tensor, hook: Any) -> Tensor | None:
        """value [batch, positions, ...] -> as the function says; BadRequest if this is not the whole batch."""
        if tuple(value.shape[:2]) != (self.count, self.length):
            raise BadRequest(
                f"The hook function on {self.name} is for {self.count} sequences of {self.length} tokens, which take more than "
                f"one pass. Give fewer at a time, or load the engine with max_rows={self.count * self.length} or more."
            )
        if not self.heads_first:
            return self.function(value, hook)
        value = value.transpose(1, 2)
        changed = self.function(value[..., : self.length] if self.name.endswith(KEY_SITES) else value, hook)
        return None if changed is None else changed.transpose(1, 2)


def _reading(name: str, function: HookFunction) -> HookFunction:
    """The function, shown a copy of the value; BadEdit if it changes it."""

    def read(value: Tensor, hook: Any) -> None:
        given = value.clone()
        changed = function(given, hook)
        if not torch.equal(given if changed is None else changed, value):
            raise BadEdit(f"The hook function on {name} changed its value, which can be read but not changed. Return None.")

    return read
