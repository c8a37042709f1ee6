"""Edits of routing: experts that are forced, forbidden or reweighted become edits of the sites of their router.

Forcing and forbidding change what experts are chosen by, not the logits that their weights follow from. So a forced expert has
the weight that its own logit gives it, and the weights of a softmax over all experts stay as they are.
"""

from collections.abc import Sequence
from itertools import product

import torch

from replaylens.engine.errors import BadEdit
from replaylens.engine.model.config import MixtureConfig, ModelConfig
from replaylens.engine.model.routing import BARRED
from replaylens.engine.model.site_names import CHOICE_SITE, WEIGHTS_SITE
from replaylens.engine.model.sites import SiteTable, layer_of
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.placed import Op, PlacedEdit

_MOVED = {"force": -2 * BARRED, "forbid": 2 * BARRED}
"""the scores for the choice of experts that are forced or forbidden: beyond any other score"""


def on_router(edit: Edit, name: str, table: SiteTable, where: tuple[int, int | None, tuple[int, ...]]) -> list[PlacedEdit]:
    """The op force, forbid or reweight on one router; BadEdit if it does not fit.

    The scores of forced and forbidden experts are multiplied by 0 before the new ones are added, so that of several edits of
    an expert the last one counts.
    """
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
    if edit.op == "force":
        _require_places(experts, mixture)
    if edit.op == "forbid":
        _require_enough(experts, mixture)
    begin = f"blocks.{layer}."
    kept = torch.ones(mixture.num_experts, dtype=torch.float32)
    kept[experts] = edit.factor if edit.op == "reweight" else 0.0
    if edit.op == "reweight":
        return [PlacedEdit(begin + WEIGHTS_SITE, "reweight", kept, start, stop, picks, 1.0, 0)]
    value = torch.zeros(mixture.num_experts, dtype=torch.float32)
    value[experts] = _MOVED[edit.op]
    steps: tuple[tuple[Op, torch.Tensor], ...] = (("reweight", kept), ("add", value))
    return [PlacedEdit(begin + CHOICE_SITE, op, numbers, start, stop, picks, 1.0, 0) for op, numbers in steps]


def require_places(edits: Sequence[PlacedEdit], config: ModelConfig) -> None:
    """Raise BadEdit if several edits of a branch together force more experts on a position than a row goes to."""
    routers: dict[str, list[PlacedEdit]] = {}
    for edit in edits:
        if edit.site.endswith(CHOICE_SITE):
            routers.setdefault(edit.site, []).append(edit)
    for site, own in routers.items():
        if config.mixture is None or sum(_forces(edit) for edit in own) < 2:
            continue
        ends = {end for edit in own for end in (edit.start, edit.stop) if end is not None}
        ends |= {end for edit in own for pick in edit.picks for end in (pick, pick + 1)}
        tokens = sorted({token for edit in own for token in edit.tokens})
        for position, token in product(sorted(ends), [-1, *tokens]):  # -1: any other token
            experts = _forced([edit for edit in own if edit.edited(position, [token])])
            try:
                _require_places(experts, config.mixture)
            except BadEdit as error:
                at = f"{site.removesuffix('.' + CHOICE_SITE)}, position {position}"
                raise BadEdit(f"The edits together force the experts {experts} at {at}: {error}") from None


def _forces(edit: PlacedEdit) -> bool:
    return edit.op == "add" and edit.value is not None and bool((edit.value == _MOVED["force"]).any())


def _forced(edits: Sequence[PlacedEdit]) -> list[int]:
    """The experts that edits of one position leave forced. Of several edits of an expert, the last one counts."""
    forced: set[int] = set()
    for edit in edits:
        if edit.value is None:
            continue
        if edit.op == "reweight":
            forced -= set((edit.value == 0).nonzero().flatten().tolist())
        elif edit.op == "add":
            forced |= set((edit.value == _MOVED["force"]).nonzero().flatten().tolist())
    return sorted(forced)


def _require_places(experts: list[int], mixture: MixtureConfig) -> None:
    """Raise BadEdit if a row cannot go to all of these experts."""
    top, chosen_groups = mixture.routing.top, mixture.routing.chosen_groups
    if len(experts) > top:
        raise BadEdit(f"{len(experts)} experts are forced, but a row goes to {top}. Force at most {top}.")
    groups = {expert // (mixture.num_experts // mixture.routing.groups) for expert in experts}
    if len(groups) > chosen_groups:
        raise BadEdit(
            f"The forced experts {experts} are in {len(groups)} groups, but a row goes to {chosen_groups}. "
            "Force those of fewer groups."
        )


def _require_enough(experts: list[int], mixture: MixtureConfig) -> None:
    """Raise BadEdit if a row may have to go to one of these experts.

    Groups without other experts are chosen last, so the fewest are left where the smallest of the others are chosen.
    """
    routing, width = mixture.routing, mixture.num_experts // mixture.routing.groups
    if mixture.num_experts - len(experts) < routing.top:
        raise BadEdit(
            f"{len(experts)} of {mixture.num_experts} experts are forbidden, but a row goes to {routing.top}. Forbid fewer."
        )
    left = [width - sum(expert // width == group for expert in experts) for group in range(routing.groups)]
    fewest = sum(sorted(count for count in left if count)[: routing.chosen_groups])
    if fewest < routing.top:
        raise BadEdit(
            f"Without the experts {experts}, the chosen groups of a row ({routing.chosen_groups} of {routing.groups}) may "
            f"leave {fewest} of the {routing.top} experts that a row goes to. Forbid fewer, or all experts of a group."
        )


def _experts(edit: Edit, count: int) -> list[int]:
    experts = list(edit.experts or ())
    if not experts or len(set(experts)) < len(experts):
        raise BadEdit(f"The op {edit.op!r} needs experts, each only once. Given: {experts}.")
    if bad := [expert for expert in experts if not 0 <= expert < count]:
        raise BadEdit(f"No expert {bad[0]}. The router has experts 0 to {count - 1}.")
    return experts
