"""Sites: their names, as TransformerLens 4 has them, and `SiteTable`: those of a model, with letters and shapes."""

import difflib
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from replaylens import boundary
from replaylens.engine.errors import BadEdit, Caveat, UnknownSite
from replaylens.engine.model.config import ModelConfig

# ---- site names ------------------------------------------------------------------------------------------------------
# The names of sites, as TransformerLens 4 has them: where they are, what they are called besides, and which are one value.

SCORES = "attn.hook_attn_scores"
KEY_SITES = ("attn.hook_pattern", SCORES)
"""the ends of names of sites whose rows have one value per key"""

LAYER_SITES: dict[str, tuple[str, str | None]] = {
    # name within the block: (trailing shape, legacy alias), in the order of a pass
    "hook_in": ("d_model", "hook_resid_pre"),
    "ln1.hook_scale": ("one", None),
    "ln1.hook_normalized": ("d_model", None),
    "ln1.hook_out": ("d_model", None),
    "mixer.hook_gate": ("gate", "linear_attn.hook_gate_input"),
    "mixer.conv.hook_in": ("channels", None),
    "mixer.conv.hook_out": ("channels", "conv.conv.hook_out mixer.conv1d.hook_out"),
    "mixer.hook_q": ("key_heads d_key", None),
    "mixer.hook_k": ("key_heads d_key", None),
    "mixer.hook_v": ("value_heads d_read", None),
    "mixer.hook_log_decay": ("value_heads", "linear_attn.hook_log_decay"),
    "mixer.hook_beta": ("value_heads", "linear_attn.hook_beta"),
    "mixer.hook_state": ("value_heads d_key d_read", "linear_attn.hook_ssm_state"),
    "mixer.hook_read": ("value_heads d_read", "linear_attn.hook_recurrence_out"),
    "mixer.o.hook_in": ("gate", None),
    "attn.hook_gate": ("heads d_head", None),
    "attn.q.hook_out": ("heads d_head", "attn.hook_q"),
    "attn.k.hook_out": ("kv_heads d_head", "attn.hook_k"),
    "attn.v.hook_out": ("kv_heads d_head", "attn.hook_v"),
    "attn.q_norm.hook_out": ("heads d_head", "attn.hook_q_normed"),
    "attn.k_norm.hook_out": ("kv_heads d_head", "attn.hook_k_normed"),
    "attn.q_a_layernorm.hook_in": ("query_rank", None),
    "attn.hook_q_latent": ("query_rank", None),
    "attn.hook_rot_q": ("heads d_turned", None),
    "attn.kv_a_layernorm.hook_in": ("rank", None),
    "attn.hook_kv_latent": ("rank", None),
    "attn.hook_rot_k": ("turned_heads d_turned", None),
    "attn.hook_q": ("heads d_head", None),
    "attn.hook_k": ("kv_heads d_head", None),
    "attn.hook_v": ("kv_heads d_value", None),
    "attn.hook_attn_scores": ("heads keys", None),
    "attn.hook_pattern": ("heads keys", None),
    "attn.o.hook_in": ("heads d_value", "attn.hook_z"),
    "mixer.hook_out": ("d_model", "hook_attn_out linear_attn.hook_out"),
    "attn.hook_out": ("d_model", "hook_attn_out"),
    "ln1_post.hook_scale": ("one", None),
    "ln1_post.hook_normalized": ("d_model", None),
    "ln1_post.hook_out": ("d_model", "hook_attn_out"),
    "ln2.hook_in": ("d_model", "hook_resid_mid"),
    "ln2.hook_scale": ("one", None),
    "ln2.hook_normalized": ("d_model", None),
    "ln2.hook_out": ("d_model", None),
    "mlp.gate.hook_out": ("d_mlp", "mlp.hook_pre"),
    "mlp.in.hook_out": ("d_mlp", "mlp.hook_pre"),
    "mlp.out.hook_in": ("d_mlp", "mlp.hook_post"),
    "mlp.hook_out": ("d_model", "hook_mlp_out"),
    "ln2_post.hook_scale": ("one", None),
    "ln2_post.hook_normalized": ("d_model", None),
    "ln2_post.hook_out": ("d_model", "hook_mlp_out"),
    "hook_out": ("d_model", "hook_resid_post"),
}
_QK_NORMS = ("attn.q_norm.hook_out", "attn.k_norm.hook_out")
_MLP = ("mlp.gate.hook_out", "mlp.in.hook_out", "mlp.out.hook_in")
_MIXTURE: dict[str, tuple[str, str | None]] = {
    # the sites of a mixture of experts, in the place of those of `_MLP`; some have two aliases
    "mlp.gate.hook_out": ("experts", "mlp.router.hook_out"),
    "mlp.gate.hook_choice": ("experts", None),
    "mlp.gate.hook_expert_indices": ("top", "mlp.hook_expert_indices mlp.router.hook_expert_indices"),
    "mlp.gate.hook_expert_weights": ("experts", "mlp.hook_expert_weights mlp.router.hook_expert_weights"),
    "mlp.experts.hook_expert_post": ("top d_expert", None),
    "mlp.experts.hook_expert_out": ("top d_model", None),
    "mlp.experts.hook_out": ("d_model", None),
    "mlp.shared_expert.hook_out": ("d_model", "mlp.shared_experts.hook_out"),
    "mlp.shared_expert_gate.hook_out": ("one", None),
}
STATE = "mixer.hook_state"
"""the end of names of sites with recurrent states"""
_STATEFUL = ("q", "k", "v", "log_decay", "state", "read")
"""sites of recurrent layers that have a state"""
CHOICE_SITE, WEIGHTS_SITE = "mlp.gate.hook_choice", "mlp.gate.hook_expert_weights"
"""where edits force, forbid and reweight experts"""
BY_SLOT = ("mlp.experts.hook_expert_post", "mlp.experts.hook_expert_out")
"""the ends of names of sites with one row per chosen expert, in the order of `hook_expert_indices`"""
CHOSEN = "hook_expert_indices"
"""the end of every name of the site with the chosen experts"""


def layer_sites(sparse: bool, mixture: bool, norms_late: bool = False) -> dict[str, tuple[str, str | None]]:
    """The sites of a layer in the order of a pass: name within the block -> (trailing shape, legacy alias).

    sparse      the layer has a mixture of experts
    mixture     some layer of the model has. As in TransformerLens, the parts of an MLP next to it have names of their own,
                since `mlp.gate` is the router
    norms_late  queries and keys are normed after their rotation
    """
    found: dict[str, tuple[str, str | None]] = {}
    for name, entry in LAYER_SITES.items():
        if norms_late and name in _QK_NORMS:
            continue
        if norms_late and name == "attn.hook_rot_k":
            found |= {late: LAYER_SITES[late] for late in (name, *_QK_NORMS)}
        elif name not in _MLP:
            found[name] = entry
        elif not sparse:
            found[name.replace("mlp.", "mlp.dense_") if mixture else name] = entry
        else:
            found |= _MIXTURE
    return found


SAME_VALUES = {
    # name within the block: (the site that has this value, whether an edit there is the same as well)
    "ln1.hook_in": ("hook_in", False),
    "attn.hook_in": ("ln1.hook_out", True),
    "attn.q.hook_in": ("ln1.hook_out", False),
    "attn.k.hook_in": ("ln1.hook_out", False),
    "attn.v.hook_in": ("ln1.hook_out", False),
    "attn.q_a_proj.hook_out": ("attn.q_a_layernorm.hook_in", True),
    "attn.q_a_layernorm.hook_out": ("attn.hook_q_latent", True),
    "attn.q_b_proj.hook_in": ("attn.hook_q_latent", True),
    "attn.kv_a_layernorm.hook_out": ("attn.hook_kv_latent", True),
    "attn.kv_b_proj.hook_in": ("attn.hook_kv_latent", True),
    "attn.o.hook_out": ("attn.hook_out", True),
    "mixer.hook_in": ("ln1.hook_out", True),
    "mixer.o.hook_out": ("mixer.hook_out", True),
    "ln1_post.hook_in": ("attn.hook_out", True),
    "mlp.hook_in": ("ln2.hook_out", True),
    "mlp.in.hook_in": ("ln2.hook_out", False),
    "mlp.gate.hook_in": ("ln2.hook_out", False),
    "mlp.out.hook_out": ("mlp.hook_out", True),
    "ln2_post.hook_in": ("mlp.hook_out", True),
}
"""TransformerLens has a name on either side of every module. Where nothing happens in between, both have one value"""
_SAME_IN_MIXTURE = {"mlp.gate.hook_in": ("ln2.hook_out", False), "mlp.experts.hook_in": ("ln2.hook_out", False)}


def same_values(sparse: bool, mixture: bool) -> dict[str, tuple[str, bool]]:
    """`SAME_VALUES` of a layer; see `layer_sites`."""
    own = ("mlp.in.hook_in", "mlp.gate.hook_in", "mlp.out.hook_out")
    shared = {name: same for name, same in SAME_VALUES.items() if name not in own}
    if sparse:
        return shared | _SAME_IN_MIXTURE
    return shared | {name.replace("mlp.", "mlp.dense_") if mixture else name: SAME_VALUES[name] for name in own}


READ_ONLY = ("hook_scale", "hook_normalized", "hook_attn_scores", "hook_expert_indices", "attn.hook_k", "attn.hook_v")
"""the ends of names of sites that are computed outside the pass. Keys and values have these names with latent attention only,
which computes with neither"""
GLOBAL_SITES = {
    "embed.hook_out": ("d_model", "hook_embed"),
    "pos_embed.hook_out": ("d_model", "hook_pos_embed"),
    "ln_final.hook_scale": ("one", None),
    "ln_final.hook_normalized": ("d_model", None),
    "ln_final.hook_out": ("d_model", None),
    "unembed.hook_out": ("vocab", "hook_unembed"),
}


def same_value(name: str) -> str | None:
    """The site that has the value of this name in every model; None: the name is of no such kind."""
    block = re.match(r"(blocks\.\d+\.)(.+)", name)
    found = SAME_VALUES.get(block[2]) if block else None
    return f"{block[1]}{found[0]}" if block and found else None


def warn_of_mixed_experts(site: str, at_caller: bool = False) -> None:
    """Caveat for a site whose rows, laid flat, have a place for each chosen expert: another one in each row.

    at_caller  of the package is the place of the warning; else it is here, so that a site is named once, not for every read
               of a sweep
    """
    if site.endswith((*BY_SLOT, CHOSEN)):
        what = "holds the numbers of the chosen experts" if site.endswith(CHOSEN) else "holds one vector per chosen expert"
        (boundary.warn if at_caller else warnings.warn)(
            f"{site} {what}, so that a column belongs to another expert in each row. Choose the rows of one expert by "
            "hook_expert_indices (docs/models.md, Probe one expert), or take hook_expert_weights, a column for each expert.",
            Caveat,
        )


# ---- sites -----------------------------------------------------------------------------------------------------------
# The sites of a decoder: every place that can be captured or edited, by its TransformerLens 4 name.
#
# Four letters select the usual ones:
# S  the residual stream entering each block, and leaving the last
# T  the attention output, as added to the residual stream
# C  the MLP output, as added to the residual stream
# Z  the logit lens at every S (not a tensor of the pass: see `engine/passes/lens.py`)

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
            listed = layer_sites(config.sparse(layer), config.mixture is not None, config.qk_norm_rotated)
            for name, (shape, alias) in listed.items():
                if self._has(name, layer):
                    self._add(f"blocks.{layer}.{name}", layer, shape)
                    # later entries win: with post-norms, the output of the post-norm is added to the residual stream
                    self.aliases |= {f"blocks.{layer}.{each}": f"blocks.{layer}.{name}" for each in (alias or "").split()}
        if config.gated_mlp:  # the linear half of a gated MLP has its own legacy name
            for layer in (layer for layer in config.layers_with("mlp") if not config.sparse(layer)):
                begin = f"blocks.{layer}.mlp."
                own = begin if config.mixture is None else f"{begin}dense_"
                self.aliases[f"{begin}hook_pre_linear"] = f"{own}in.hook_out"
                self.aliases[f"{begin}hook_pre"] = f"{own}gate.hook_out"
        for name, site in self.sites.items():
            self.sites[name] = replace(site, aliases=tuple(a for a, of in self.aliases.items() if of == name))
        self._name_twice()

    def __iter__(self) -> Iterator[str]:
        return iter(self.in_order())

    def __repr__(self) -> str:
        names = self.in_order()
        return f"{type(self).__name__}({len(names)} sites: {names[0]}, {names[1]}, ..., {names[-1]})"

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
        config, mixer = self.config, self.config.mixer
        attends, recurs, has_mlp = (config.has(part, layer) for part in ("attn", "mixer", "mlp"))
        there = {"attn": attends, "mixer": recurs, "mlp": has_mlp, "ln1": attends or recurs, "ln2": has_mlp}
        if not there.get(name.partition(".")[0].removesuffix("_post"), True):
            return False
        if name == "ln2.hook_in":  # the residual stream between attention and MLP, also without a norm there
            return not config.parallel_residual
        before, after = config.norms(layer)
        scaled, mixture, latent = config.residual_scale != 1.0, config.mixture, config.latent
        absent = {
            "ln1": not before,
            "ln2": not before or config.shared_norm,
            "attn.o.hook_out": scaled,  # before the factor, which `attn.hook_out` is after
            "mixer.o.hook_out": scaled,
            "mlp.out.hook_out": scaled,
            "mlp.dense_out.hook_out": scaled,
            "mlp.dense_gate": not config.gated_mlp,
            "mlp.shared_expert": mixture is None or not mixture.d_shared,
            "mlp.shared_expert_gate": mixture is None or not mixture.shared_gate,
            "ln1_post": not after,
            "ln2_post": not after,
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
            **dict.fromkeys((f"mixer.hook_{part}" for part in _STATEFUL), mixer is None or mixer.kind == "conv"),
            "mixer.hook_beta": mixer is None or mixer.kind != "delta",
            "attn.hook_gate": not config.attn_gate,
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
        if (m := c.mixer) is not None:
            sizes |= dict(channels=m.channels, key_heads=m.key_heads, d_key=m.d_key, value_heads=m.heads, d_read=m.d_value)
            gate = {"conv": "channels", "delta": "value_heads d_read", "ssd": "values"}[m.kind]
            shape, sizes["values"] = shape.replace("gate", gate), m.heads * m.d_value
        self.sites[name] = Site(name, layer, tuple(sizes[word] for word in shape.split()), ())

    def resolve(self, name: str) -> str:
        """The TransformerLens 4 name of a name or alias; UnknownSite lists the nearest names."""
        if not isinstance(name, str):
            raise UnknownSite(f"Invalid site {name!r:.60}. Give a name as text; list(engine.sites) has them.")
        if name in self.sites:
            return name
        if name in self.names:
            return self.names[name]
        near = difflib.get_close_matches(name, [*self.sites, *self.names], n=4, cutoff=0.4)
        raise UnknownSite(f"Unknown site {name!r}. Nearest: {', '.join(near) or 'none'}. Letters: {LETTERS}.")

    def matching(self, word: str) -> dict[str, str]:
        """Name -> its site, of a name or of all names that match a pattern, where a star stands for one part of a name."""
        if not isinstance(word, str) or "*" not in word:
            return {word: self.resolve(word)}
        pattern = re.compile(re.escape(word).replace(r"\*", "[^.]*"))
        found = {name: self.resolve(name) for name in (*self.sites, *self.aliases) if pattern.fullmatch(name)}
        if not found:
            raise UnknownSite(f"No site matches {word!r}. engine.sites lists the sites.")
        return found

    def editable(self, name: str) -> str:
        """As `resolve`, but BadEdit for names whose value can be captured and not edited."""
        site = self.resolve(name)
        if name in self.read_only:
            why = (
                "It is computed outside the pass"
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
                return [self.aliases[f"blocks.{l}.hook_attn_out"] for l in layers if c.has("attn", l) or c.has("mixer", l)]
            case "C":
                return [self.aliases[f"blocks.{l}.hook_mlp_out"] for l in c.layers_with("mlp")]
            case _:
                raise UnknownSite(f"No site per layer for the letter {letter!r}. Known: S, T, C.")

    def select(self, sites: str | list[str] | tuple[str, ...]) -> tuple[tuple[str, ...], bool]:
        """Resolve "STCZ", "S,T", a name, a pattern such as blocks.*.mixer.hook_out, or a list of these into (site names in
        model order, whether Z is selected)."""
        names: set[str] = set()
        lens = False
        for word in _words(sites):
            if _is_letters(word):
                lens |= "Z" in word
                names.update(name for letter in word for name in self.letter(letter))
            else:
                names.update(self.matching(word).values())
        if not names and not lens and _words(sites):
            raise UnknownSite(f"No layer of this {self.config.family} model has {sites}. Choose other sites.")
        order = {name: i for i, name in enumerate(self.in_order())}
        return tuple(sorted(names, key=order.__getitem__)), lens

    def asked(self, sites: str | list[str] | tuple[str, ...]) -> dict[str, tuple[str, ...]]:
        """Site -> the names that it is asked for by, where these are not just its own. Precondition: `select` takes them."""
        found: dict[str, dict[str, None]] = {}
        for word in _words(sites):
            if _is_letters(word):
                pairs = {name: name for each in word for name in self.letter(each)}
            else:
                pairs = self.matching(word)
            for asked, name in pairs.items():
                found.setdefault(name, {})[asked] = None
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


def own_wiring(model: Any) -> type | None:
    """The first class of its modules that is not one of the package; None: all are."""
    own = (type(module) for module in model.modules() if not type(module).__module__.startswith(("replaylens.", "torch.nn.")))
    return next(own, None)


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


def numbered(layers: Iterable[int]) -> str:
    """Layers in words: "0 to 3" without gaps, else all of them."""
    found = sorted(layers)
    whole = found and found == list(range(found[-1] + 1))
    return f"0 to {found[-1]}" if whole else ", ".join(map(str, found)) or "none"


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
