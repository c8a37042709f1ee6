"""Edits of routing: experts that are forced, forbidden or reweighted become edits of the sites of their router.

Forcing and forbidding change what experts are chosen by, not the logits that their weights follow from. So a forced expert has
the weight that its own logit gives it, and the weights of a softmax over all experts stay as they are.
"""

import torch

from replaylens.engine.errors import BadEdit
from replaylens.engine.model.routing import BARRED
from replaylens.engine.model.site_names import CHOICE_SITE, WEIGHTS_SITE
from replaylens.engine.model.sites import SiteTable, layer_of
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import PlacedEdit

_MOVED = {"force": -2 * BARRED, "forbid": 2 * BARRED}
"""what is added to the scores for the choice: larger than any score, so that experts moved by it are equal among themselves"""


def on_router(edit: Edit, name: str, table: SiteTable, where: tuple[int, int | None, tuple[int, ...]]) -> PlacedEdit:
    """The op force, forbid or reweight on one router; BadEdit if it does not fit."""
    start, stop, picks = where
    layer, mixture = layer_of(name), table.config.mixture
    if mixture is None or layer is None or not table.config.sparse(layer) or ".mlp.gate." not in name:
        raise BadEdit(
            f"The op {edit.op!r} is for the router of a mixture of experts, not for {name}. Edit blocks.N.mlp.gate.hook_out "
            "of a layer that has one."
        )
    given = {"value": edit.value, "heads": edit.heads, "keys": edit.keys, "when": edit.when}
    if extra := [option for option, value in given.items() if value is not None]:
        raise BadEdit(f"The op {edit.op!r} takes no {extra[0]}. Give experts, and a factor for 'reweight'.")
    experts = _experts(edit, mixture.num_experts)
    top = mixture.routing.top
    if edit.op == "force" and len(experts) > top:
        raise BadEdit(f"{len(experts)} experts are forced, but a row goes to {top}. Force at most {top}.")
    if edit.op == "forbid" and mixture.num_experts - len(experts) < top:
        raise BadEdit(f"{len(experts)} of {mixture.num_experts} experts are forbidden, but a row goes to {top}. Forbid fewer.")
    begin = f"blocks.{layer}."
    if edit.op == "reweight":
        value = torch.ones(mixture.num_experts)
        value[experts] = edit.factor
        return PlacedEdit(begin + WEIGHTS_SITE, "reweight", value, start, stop, picks, 1.0, 0)
    value = torch.zeros(mixture.num_experts)
    value[experts] = _MOVED[edit.op]
    return PlacedEdit(begin + CHOICE_SITE, "add", value, start, stop, picks, 1.0, 0)


def _experts(edit: Edit, count: int) -> list[int]:
    experts = list(edit.experts or ())
    if not experts or len(set(experts)) < len(experts):
        raise BadEdit(f"The op {edit.op!r} needs experts, each only once. Given: {experts}.")
    if bad := [expert for expert in experts if not 0 <= expert < count]:
        raise BadEdit(f"No expert {bad[0]}. The router has experts 0 to {count - 1}.")
    return experts
