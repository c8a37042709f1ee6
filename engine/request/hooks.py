"""Hook functions at names that can be read but not changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit
from replaylens.engine.model.sites import KEY_SITES, SiteTable
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
        return site, _reading(name, function)
    return site, function


def _reading(name: str, function: HookFunction) -> HookFunction:
    """The function, shown a copy of the value; BadEdit if it changes it."""

    def read(value: Tensor, hook: Any) -> None:
        given = value.clone()
        changed = function(given, hook)
        if not torch.equal(given if changed is None else changed, value):
            raise BadEdit(f"The hook function on {name} changed its value, which can be read but not changed. Return None.")

    return read
