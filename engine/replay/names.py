"""Which names and positions a cache of TransformerLens' `run_with_cache` has."""

from collections.abc import Callable, Sequence

from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.model.site_names import KEY_SITES
from replaylens.engine.model.sites import SiteTable, layer_of
from replaylens.engine.replay import tokens as text
from replaylens.engine.request.values import items, whole
from replaylens.engine.serving.core import Core

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
HEADS_FIRST = (*KEY_SITES, "q_norm.hook_out", "k_norm.hook_out", "attn.hook_q", "attn.hook_k", "attn.hook_v")
"""sites that TransformerLens gives as [batch, heads, positions, ...]. The last three: with latent attention"""


def layer_number(engine: Core, stop_at_layer: int | None) -> int | None:
    """The block at which a run stops, counted from 0; None: it does not."""
    if stop_at_layer is None:
        return None
    count = engine.config.num_layers
    return whole("stop_at_layer", stop_at_layer, -count, count) % (count + (stop_at_layer >= 0))


def residual_site(engine: Core, stop: int | None) -> str:
    """The residual stream that enters a block; of all blocks or none, that which leaves the last."""
    last = engine.config.num_layers
    return f"blocks.{last - 1}.hook_out" if stop in (None, last) else f"blocks.{stop}.hook_in"


def slice_of(pos_slice: slice | int | None, length: int) -> slice:
    """The positions as a slice. A single position keeps its dimension."""
    if pos_slice is None:
        return slice(None)
    if not isinstance(pos_slice, slice):
        at = whole("pos_slice", pos_slice, -length, length - 1)
        return slice(at, at + 1 or None)
    start, stop = (None if end is None else whole("pos_slice", end) for end in (pos_slice.start, pos_slice.stop))
    step = 1 if pos_slice.step is None else whole("pos_slice.step", pos_slice.step, 1)
    return slice(*slice(start, stop, step).indices(length))


def sliced(site: str, value: Tensor, where: slice) -> Tensor:
    """Some positions of a site's [batch, positions, ...], in TransformerLens' layout."""
    value = value[:, where]
    return value.transpose(1, 2) if site.endswith(HEADS_FIRST) else value


def chosen(engine: Core, names_filter: NamesFilter, stop_at_layer: int | None) -> list[str]:
    """The names in the cache: those that a function accepts; of sites given by name, their own and the legacy one as well."""
    table, stop = engine.sites, layer_number(engine, stop_at_layer)
    every = _every(table)
    if names_filter is None or callable(names_filter):
        found = [name for name in every if names_filter is None or names_filter(name)]
        if names_filter is None and engine.runner.device != "cpu":
            found = [name for name in found if not name.endswith(KEY_SITES)]
        return [name for name in found if _runs(table.names.get(name, name), stop)]
    said = "a name, names or a function"
    found = [names_filter] if isinstance(names_filter, str) else items("names_filter", names_filter, said)
    for name in found:
        site = name if isinstance(name, str) and name in text.INPUTS else table.resolve(name)
        if not _runs(site, stop):
            raise BadRequest(f"{name} is not computed with stop_at_layer={stop_at_layer}. Leave one of the two out.")
    sites = {table.resolve(name) for name in found if name not in text.INPUTS}
    wanted = {*found, *sites, *(alias for site in sites for alias in table.sites[site].aliases)}
    return [name for name in every if name in wanted]


def _every(table: SiteTable) -> list[str]:
    """All names, in the order of a pass: each site with its other names."""
    others: dict[str, list[str]] = {site: [site, *table.sites[site].aliases] for site in table.in_order()}
    for name, site in table.same.items():
        others[site].append(name)
    first = [name for name in text.INPUTS if name != "pos_embed.hook_in" or "pos_embed.hook_out" in table.sites]
    return [*first, *(name for names in others.values() for name in names)]


def _runs(site: str, stop: int | None) -> bool:
    """Whether a run that stops at a block computes the site."""
    if stop is None:
        return True
    layer = layer_of(site)
    return layer < stop if layer is not None else not site.startswith(("ln_final.", "unembed."))
