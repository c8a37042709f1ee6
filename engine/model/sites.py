"""The sites of a decoder: every place that can be captured or edited, by its TransformerLens 4 name.

Four letters select the usual ones:
S  the residual stream entering each block, and leaving the last
T  the attention output, as added to the residual stream
C  the MLP output, as added to the residual stream
Z  the logit lens at every S (not a tensor of the pass: see `engine/lens/`)
"""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from replaylens.engine.errors import BadEdit, UnknownSite
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.site_names import GLOBAL_SITES, READ_ONLY, layer_sites, same_values

LETTERS = "STCZ"


@dataclass(frozen=True)
class Site:
    """One place in the model."""

    name: str
    """its TransformerLens 4 name"""
    layer: int | None
    shape: tuple[int, ...]
    """the shape of one row; the last dimension of a pattern, the number of keys, is 0 here"""
    aliases: tuple[str, ...]
    """legacy names that resolve to this site"""


class SiteTable:
    """All sites of one decoder, by name and by legacy alias."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.sites: dict[str, Site] = {}
        self.aliases: dict[str, str] = {}
        """legacy name -> site"""
        self.same: dict[str, str] = {}
        """other name of the same value -> site"""
        self.read_only: set[str] = set()
        """names that can be captured, but not edited"""
        for name, (shape, alias) in GLOBAL_SITES.items():
            if name != "pos_embed.hook_out" or config.learned_positions:
                self._add(name, None, shape)
                self.aliases |= {alias: name} if alias else {}
        for layer in range(config.num_layers):
            for name, (shape, alias) in layer_sites(config.sparse(layer), config.mixture is not None).items():
                if self._has(name, layer):
                    self._add(f"blocks.{layer}.{name}", layer, shape)
                    # later entries win: with post-norms, the output of the post-norm is added to the residual stream
                    self.aliases |= {f"blocks.{layer}.{each}": f"blocks.{layer}.{name}" for each in (alias or "").split()}
        if config.gated_mlp:  # the linear half of a gated MLP has its own legacy name
            for layer in (layer for layer in range(config.num_layers) if not config.sparse(layer)):
                begin = f"blocks.{layer}.mlp."
                own = begin if config.mixture is None else f"{begin}dense_"
                self.aliases[f"{begin}hook_pre_linear"] = f"{own}in.hook_out"
                self.aliases[f"{begin}hook_pre"] = f"{own}gate.hook_out"
        for name, site in self.sites.items():
            self.sites[name] = replace(site, aliases=tuple(a for a, of in self.aliases.items() if of == name))
        self._name_twice()

    def _name_twice(self) -> None:
        """Mutates: adds the names of `SAME_VALUES`, and says what cannot be edited."""
        last = self.config.num_layers - 1
        self.same = {"ln_final.hook_in": f"blocks.{last}.hook_out", "unembed.hook_in": "ln_final.hook_out"}
        for layer in range(last + 1):
            for name, (site, editable) in same_values(self.config.sparse(layer), self.config.mixture is not None).items():
                full = f"blocks.{layer}.{name}"
                if self._has(name, layer):
                    if not self._has(site, layer):
                        site, editable = self._read_instead(site), False
                    self.same[full] = f"blocks.{layer}.{site}"
                    if not editable and not (name.endswith("in.hook_in") and not self.config.gated_mlp):
                        self.read_only.add(full)
            if self.config.parallel_residual and self._has("ln2.hook_out", layer):  # the MLP's norm reads what enters the block
                self.same[f"blocks.{layer}.ln2.hook_in"] = f"blocks.{layer}.hook_in"
                self.read_only.add(f"blocks.{layer}.ln2.hook_in")
        self.read_only |= {name for name in self.sites if name.endswith(READ_ONLY)}
        self.read_only |= {alias for alias, site in self.aliases.items() if site in self.read_only}

    @cached_property
    def names(self) -> dict[str, str]:
        """Every name that is not a site's own -> the site with its value."""
        return {**self.aliases, **self.same}

    @cached_property
    def twins(self) -> dict[str, str]:
        """The residual stream between two blocks has two sites: what leaves one and what enters the next."""
        pairs = [(f"blocks.{l}.hook_out", f"blocks.{l + 1}.hook_in") for l in range(self.config.num_layers - 1)]
        return {a: b for one, other in pairs for a, b in ((one, other), (other, one))}

    def _read_instead(self, norm: str) -> str:
        """What attention or MLP reads in a model that lacks the norm."""
        if self.config.shared_norm:
            return "ln1.hook_out"
        return "hook_in" if norm == "ln1.hook_out" or self.config.parallel_residual else "ln2.hook_in"

    def _has(self, name: str, layer: int) -> bool:
        config = self.config
        if name == "ln2.hook_in":  # the residual stream between attention and MLP, also without a norm there
            return not config.parallel_residual
        scaled, mixture, latent = config.residual_scale != 1.0, config.mixture, config.latent
        absent = {
            "ln1": not config.pre_norms,
            "ln2": not config.pre_norms or config.shared_norm,
            "attn.o.hook_out": scaled,  # before the factor, which `attn.hook_out` is after
            "mlp.out.hook_out": scaled,
            "mlp.dense_out.hook_out": scaled,
            "mlp.dense_gate": not config.gated_mlp,
            "mlp.shared_expert": mixture is None or not mixture.d_shared,
            "mlp.shared_expert_gate": mixture is None or not mixture.shared_gate,
            "ln1_post": not config.post_norms,
            "ln2_post": not config.post_norms,
            "attn.q_norm": not config.qk_norm,
            "attn.k_norm": not config.qk_norm,
            "mlp.gate": mixture is None and not config.gated_mlp,
            **dict.fromkeys(("attn.q", "attn.k", "attn.v"), latent is not None),
            **dict.fromkeys(("attn.hook_q", "attn.hook_k", "attn.hook_v"), latent is None),
            **dict.fromkeys(("attn.hook_kv_latent", "attn.kv_a_layernorm", "attn.kv_b_proj"), latent is None),
            **dict.fromkeys(
                ("attn.hook_q_latent", "attn.q_a_proj", "attn.q_a_layernorm", "attn.q_b_proj"),
                latent is None or not latent.query_rank,
            ),
            "attn.hook_rot_q": not config.rotates(layer),
            "attn.hook_rot_k": not config.rotates(layer),
        }
        return not (absent.get(name, False) or absent.get(name.rpartition(".")[0], False))

    def _add(self, name: str, layer: int | None, shape: str) -> None:
        c = self.config
        sizes = dict(
            d_model=c.d_model,
            heads=c.num_heads,
            kv_heads=c.num_kv_heads,
            d_head=c.d_head,
            d_value=c.d_value,
            d_turned=c.d_head if c.latent is None else c.rotary_dim,
            turned_heads=c.num_kv_heads if c.latent is None else 1,
            rank=0 if c.latent is None else c.latent.rank,
            query_rank=0 if c.latent is None else c.latent.query_rank,
            d_mlp=c.d_mlp,
            vocab=c.vocab_size,
            keys=0,
            one=1,
        )
        if c.mixture is not None:
            sizes |= dict(experts=c.mixture.num_experts, top=c.mixture.routing.top, d_expert=c.mixture.d_expert)
        self.sites[name] = Site(name, layer, tuple(sizes[word] for word in shape.split()), ())

    def resolve(self, name: str) -> str:
        """The TransformerLens 4 name of a name or alias; UnknownSite lists the nearest names."""
        if not isinstance(name, str):
            raise UnknownSite(f"Invalid site {name!r:.60}. Give a name as text; engine.sites lists them.")
        if name in self.sites:
            return name
        if name in self.names:
            return self.names[name]
        near = difflib.get_close_matches(name, [*self.sites, *self.names], n=4, cutoff=0.4)
        raise UnknownSite(f"Unknown site {name!r}. Nearest: {', '.join(near) or 'none'}. Letters: {LETTERS}.")

    def editable(self, name: str) -> str:
        """As `resolve`, but BadEdit for names whose value can be captured and not edited."""
        site = self.resolve(name)
        if name in self.read_only:
            why = (
                "It is computed beside the pass"
                if site in self.read_only
                else f"Its value, {site}, is read by other parts as well"
            )
            raise BadEdit(f"{name} can be captured but not edited. {why}. Edit a site before or after it.")
        return site

    def letter(self, letter: str) -> list[str]:
        """All sites that `select` chooses for a letter. For Z of a plain decoder there are none: it is computed from S."""
        if letter not in LETTERS or len(letter) != 1:
            raise UnknownSite(f"Unknown site letter {letter!r}. Known: {', '.join(LETTERS)}.")
        return [] if letter == "Z" else self.per_layer(letter)

    def per_layer(self, letter: str) -> list[str]:
        """The sites of S, T or C that every layer has, in layer order."""
        c = self.config
        layers = range(c.num_layers)
        match letter:
            case "S":
                return [f"blocks.{l}.hook_in" for l in layers] + [f"blocks.{c.num_layers - 1}.hook_out"]
            case "T":
                return [self.resolve(f"blocks.{l}.hook_attn_out") for l in layers]
            case "C":
                return [self.resolve(f"blocks.{l}.hook_mlp_out") for l in layers]
            case _:
                raise UnknownSite(f"No site per layer for the letter {letter!r}. Known: S, T, C.")

    def select(self, sites: str | list[str] | tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """Resolve "STCZ", "S,T", a name, or a list of these into (site names in model order, whether Z is selected)."""
        names: set[str] = set()
        lens = False
        for word in _words(sites):
            if _is_letters(word):
                lens |= "Z" in word
                names.update(name for letter in word for name in self.letter(letter))
            else:
                names.add(self.resolve(word))
        order = {name: i for i, name in enumerate(self.in_order())}
        return tuple(sorted(names, key=order.__getitem__)), lens

    def asked(self, sites: str | list[str] | tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Site -> the names that it is asked for by, where these are not just its own. Precondition: `select` takes them."""
        found: dict[str, dict[str, None]] = {}
        for word in _words(sites):
            for name in [self.resolve(word)] if not _is_letters(word) else [n for each in word for n in self.letter(each)]:
                found.setdefault(name, {})[name if _is_letters(word) else word] = None
        return {site: tuple(names) for site, names in found.items() if tuple(names) != (site,)}

    def in_order(self) -> list[str]:
        """All site names, in the order of a pass."""
        first = [n for n in ("embed.hook_out", "pos_embed.hook_out") if n in self.sites]
        last = [n for n in self.sites if n.startswith(("ln_final.", "unembed."))]
        return first + [n for n in self.sites if n.startswith("blocks.")] + last


def _words(sites: str | list[str] | tuple[str, ...]) -> list[str]:
    """The letters and names of "STCZ", "S,T", a name, or a list of these."""
    words = re.split(r"[,\s]+", sites.strip()) if isinstance(sites, str) else list(sites)
    return [word for word in words if not isinstance(word, str) or word]


def _is_letters(word: str) -> bool:
    return isinstance(word, str) and set(word) <= set(LETTERS)


@lru_cache(maxsize=32)
def table(config: ModelConfig) -> SiteTable:
    """The sites of a decoder with this config."""
    return SiteTable(config)


def layer_of(site: str) -> int | None:
    """The layer in a site's name."""
    found = re.match(r"blocks\.(\d+)\.", site)
    return int(found[1]) if found else None


def by_layer(sites: Iterable[str]) -> dict[int, str]:
    """Sites of one letter by layer, in order. The stream that leaves block l counts as layer l + 1, which it would enter."""
    leaves = re.compile(r"blocks\.\d+\.hook_out")
    found = {(layer_of(site) or 0) + bool(leaves.fullmatch(site)): site for site in sites}
    return dict(sorted(found.items()))


_LETTER_SITES = {
    # names within a block, in order of preference, and whether the next layer is meant
    "S": (("hook_in", 0), ("hook_resid_pre", 0), ("hook_out", 1), ("hook_resid_post", 1)),
    "T": (("attn.hook_out", 0), ("hook_attn_out", 0)),
    "C": (("mlp.hook_out", 0), ("hook_mlp_out", 0)),
}
_POST_NORMS = {"T": (("ln1_post.hook_out", 0),), "C": (("ln2_post.hook_out", 0),)}


def by_letter(names: Iterable[str], post_norms: bool = False) -> dict[str, dict[int, str]]:
    """S, T and C by layer among TransformerLens names, new or legacy, of a model whose config is unknown.

    A letter without a site is left out. The stream that leaves block l is S at layer l + 1, as in `by_layer`.

    post_norms  whether the model has norms after attention and MLP. T and C are then the outputs of these norms. The presence
                of such a name says the same
    """
    there = set(names)
    layers = sorted({layer for name in there if (layer := layer_of(name)) is not None})
    post_norms = post_norms or any(name.endswith(("ln1_post.hook_out", "ln2_post.hook_out")) for name in there)
    found: dict[str, dict[int, str]] = {}
    for letter, usual in _LETTER_SITES.items():
        at: dict[int, str] = {}
        for own, shift in _POST_NORMS.get(letter, usual) if post_norms else usual:
            for layer in layers:
                if (name := f"blocks.{layer}.{own}") in there:
                    at.setdefault(layer + shift, name)
        if at:
            found[letter] = dict(sorted(at.items()))
    return found


def at_layer(letter: str, stored: dict[int, str], layer: int | None) -> str:
    """The site of a letter at a layer; -1 is the last stored one. UnknownSite lists the stored layers."""
    if layer is not None and -len(stored) <= layer < 0:
        return list(stored.values())[layer]
    if layer not in stored:
        raise UnknownSite(f"{letter} is stored at layers {', '.join(map(str, stored))}. Choose one of them, not {layer}.")
    return stored[layer]
