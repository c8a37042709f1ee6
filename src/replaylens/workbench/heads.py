"""The choice of attention heads, which means the same in every verb."""

from collections.abc import Sequence
from typing import Any

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import integer, items, shown, whole
from replaylens.engine.serving.core import Core

HeadChoice = bool | Sequence[int] | Sequence[tuple[int, int]]
FORMS = "True (all), head numbers (in every layer), or (layer, head) pairs"


def chosen_heads(engine: Core, heads: Any, layers: Sequence[int] | None = None) -> list[tuple[int, int]]:
    """(layer, head) pairs; BadRequest if there are none.

    heads   True: all; numbers: those heads, in every layer; or pairs
    layers  of all heads, or of the numbers; None: all
    """
    config = engine.config
    if heads is True:
        heads = range(config.num_heads)
    given = items("heads", heads, FORMS)
    where = range(config.num_layers) if layers is None else layers
    if given and all(integer(each) is not None for each in given):
        numbers = [whole("heads", each, 0, config.num_heads - 1) for each in given]
        return [(layer, head) for layer in where for head in dict.fromkeys(numbers)]
    if layers is not None and given:
        raise BadRequest(f"layers was given with heads={shown(heads)}, which name their layers. Leave one of the two out.")
    found = [pair_of("heads", pair, config.num_layers, config.num_heads) for pair in given]
    if not found:
        raise BadRequest(f"heads is empty. Give {FORMS}.")
    return list(dict.fromkeys(found))


def pair_of(name: str, pair: Any, layers: int, count: int) -> tuple[int, int]:
    """A (layer, number) pair."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise BadRequest(f"Invalid {name}: {shown(pair)} is not a pair. Give (layer, number) pairs.")
    return whole(f"{name} (layer)", pair[0], 0, layers - 1), whole(name, pair[1], 0, count - 1)


def chosen_layers(layers: Any, count: int) -> list[int]:
    """Layer numbers below `count`; None: all. BadRequest if there are none."""
    if layers is None:
        return list(range(count))
    found = [whole("layers", layer, 0, count - 1) for layer in items("layers", layers, "a list of layers")]
    if not found:
        raise BadRequest("layers is empty. Give at least one layer, or leave it out for all.")
    return list(dict.fromkeys(found))
