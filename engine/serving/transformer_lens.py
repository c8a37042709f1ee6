"""TransformerLens' verbs on an engine: `engine(tokens)`, `run_with_cache`, `run_with_hooks` and its tokens."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from replaylens.engine.errors import BadRequest, Caveat, UnknownSite
from replaylens.engine.model import modes
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.model.decoder import Block, Mlp
from replaylens.engine.model.sites import KEY_SITES, SiteTable, layer_of
from replaylens.engine.model.text import Chat, Prompt, is_chat
from replaylens.engine.passes.lens import log_softmax
from replaylens.engine.request.edits import BatchHook, hook_at
from replaylens.engine.request.values import as_bool, as_int, as_list, integer, named_options, short_repr, token_ids
from replaylens.engine.serving.branch import Branch

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine

# ---- tokens ----------------------------------------------------------------------------------------------------------
# Texts and token ids, as TransformerLens' verbs take them.

TokenInput = Prompt | Sequence[str] | Sequence[Sequence[int]] | Sequence[Chat]
"""one prompt, or several"""
TextInput = str | Chat | Sequence[str] | Sequence[Chat]
INPUTS = ("embed.hook_in", "pos_embed.hook_in")
"""names of what goes in: token ids and positions. A cache has them; as sites of a branch, see `tokens`"""


def inputs(name: str, paths: list[list[int]]) -> Tensor:
    """The token ids [batch, positions], or the positions [1, positions]."""
    return torch.tensor(paths) if name == "embed.hook_in" else torch.arange(len(paths[0]))[None]


def token_paths(engine: Engine, tokens: TokenInput, prepend_bos: bool | None = None) -> list[list[int]]:
    """Checked token ids of sequences of one length."""
    if isinstance(tokens, str) or is_chat(tokens):
        return encoded(engine, tokens, prepend_bos)
    rows = as_list("tokens", tokens, "text, a chat, several of these, token ids, or several lists of them of one length")
    if rows and all(isinstance(row, str) or is_chat(row) for row in rows):
        return encoded(engine, rows, prepend_bos)
    if prepend_bos is not None:
        raise BadRequest(f"prepend_bos={prepend_bos} was given with token ids. It is for text: leave it out.")
    several = rows and all(isinstance(row, Sequence | np.ndarray | Tensor) and integer(row) is None for row in rows)
    found = [engine.tokens_of(row) for row in rows] if several else [engine.tokens_of(rows)]
    if len({len(path) for path in found}) != 1:
        raise BadRequest(
            "The sequences differ in length, but run_with_cache returns one tensor per site. Use prompts() instead."
        )
    return found


def one(engine: Engine, tokens: TokenInput, prepend_bos: bool | None = None) -> list[list[int]]:
    """As `token_paths`, of one sequence."""
    found = token_paths(engine, tokens, prepend_bos)
    if len(found) != 1:
        raise BadRequest(f"Got {len(found)} sequences. Give one text, or the token ids of one.")
    return found


def encoded(engine: Engine, texts: TextInput, prepend_bos: bool | None) -> list[list[int]]:
    """The token ids of texts and chats, padded on the right to the longest: a row depends on no later token."""
    accepted = "a text or a chat, or a list of these"
    listed = [texts] if isinstance(texts, str) or is_chat(texts) else as_list("input", texts, accepted)
    if not listed or not all(isinstance(each, str) or is_chat(each) for each in listed):
        raise BadRequest(f"Invalid input={texts!r:.60}. Give {accepted}.")
    found = [engine.tokens_of(_with_bos(engine, each, prepend_bos)) for each in listed]
    longest = max(map(len, found))
    if len(set(map(len, found))) == 1:
        return found
    pad = engine.text.pad_id
    if pad is None:
        raise BadRequest("The texts differ in length, and the tokenizer has no padding token. Use prompts() instead.")
    return [path + [pad] * (longest - len(path)) for path in found]


def path_lengths(engine: Engine, paths: Sequence[Sequence[int]]) -> list[int]:
    """The tokens of each sequence of a batch without the padding tokens at its end. A single sequence has none."""
    pad = engine.text.pad_id
    found = [len(path) for path in paths]
    for number, path in enumerate(paths if len(paths) > 1 and pad is not None else ()):
        while found[number] > 1 and path[found[number] - 1] == pad:
            found[number] -= 1
    return found


def _with_bos(engine: Engine, text: str | Chat, prepend_bos: bool | None) -> Any:
    """What to prompt with: the text itself if its tokenizer decides, or token ids that begin as asked for."""
    if prepend_bos is None:
        return text
    if not isinstance(text, str):
        raise BadRequest(f"prepend_bos={prepend_bos} was given with a chat, whose template decides. Leave it out.")
    if not isinstance(prepend_bos, bool):
        raise BadRequest(f"Invalid prepend_bos={prepend_bos!r:.60}. Give True, False or None.")
    ids, bos = engine.text.encode(text), engine.text.bos_id
    if bos is None and prepend_bos:
        raise BadRequest("prepend_bos=True was given, but the tokenizer has no beginning-of-sequence token. Leave it out.")
    begins = bos is not None and ids[:1] == [bos]
    return ids[1:] if begins and not prepend_bos else ids if begins or not prepend_bos else [bos, *ids]


def decoded(engine: Engine, tokens: TokenInput) -> str | list[str]:
    """The text of token ids, or of one; of a batch, one for each."""
    rows = as_list("tokens", [tokens] if integer(tokens) is not None else tokens, "token ids, or several lists of them")
    if rows and all(isinstance(row, Sequence | np.ndarray | Tensor) and integer(row) is None for row in rows):
        return [engine.text.decode(engine._check_tokens(token_ids("tokens", row))) for row in rows]
    return engine.text.decode(engine._check_tokens(token_ids("tokens", rows)))


# ---- names -----------------------------------------------------------------------------------------------------------
# Which names and positions a cache of TransformerLens' `run_with_cache` has.

NamesFilter = str | Sequence[str] | Callable[[str], bool] | None
HEADS_FIRST = (*KEY_SITES, "q_norm.hook_out", "k_norm.hook_out", "attn.hook_q", "attn.hook_k", "attn.hook_v")
"""sites that TransformerLens gives as [batch, heads, positions, ...]. The last three: with latent attention"""


def layer_number(engine: Engine, stop_at_layer: int | None) -> int | None:
    """The block at which a run stops, counted from 0; None: it does not."""
    if stop_at_layer is None:
        return None
    count = engine.config.num_layers
    return as_int("stop_at_layer", stop_at_layer, -count, count) % (count + (stop_at_layer >= 0))


def residual_site(engine: Engine, stop: int | None) -> str:
    """The residual stream that enters a block; of all blocks or none, that which leaves the last."""
    last = engine.config.num_layers
    return f"blocks.{last - 1}.hook_out" if stop in (None, last) else f"blocks.{stop}.hook_in"


def slice_of(pos_slice: slice | int | None, length: int) -> slice:
    """The positions as a slice. A single position keeps its dimension."""
    if pos_slice is None:
        return slice(None)
    if not isinstance(pos_slice, slice):
        at = as_int("pos_slice", pos_slice, -length, length - 1)
        return slice(at, at + 1 or None)
    start, stop = (None if end is None else as_int("pos_slice", end) for end in (pos_slice.start, pos_slice.stop))
    step = 1 if pos_slice.step is None else as_int("pos_slice.step", pos_slice.step, 1)
    return slice(*slice(start, stop, step).indices(length))


def sliced(site: str, value: Tensor, where: slice) -> Tensor:
    """Some positions of a site's [batch, positions, ...], in TransformerLens' layout."""
    value = value[:, where]
    return rearrange(value, "batch position heads d -> batch heads position d") if site.endswith(HEADS_FIRST) else value


def chosen(engine: Engine, names_filter: NamesFilter, stop_at_layer: int | None) -> list[str]:
    """The names in the cache: those that a function accepts; of sites given by name, their own and the legacy one as well."""
    table, stop = engine.sites, layer_number(engine, stop_at_layer)
    every = _every(table)
    if names_filter is None or callable(names_filter):
        found = [name for name in every if names_filter is None or names_filter(name)]
        if names_filter is None and engine.runner.device != "cpu":
            found = [name for name in found if not name.endswith(KEY_SITES)]
        return [name for name in found if _runs(table.names.get(name, name), stop)]
    said = "a name, names or a function"
    found = [names_filter] if isinstance(names_filter, str) else as_list("names_filter", names_filter, said)
    for name in found:
        site = name if isinstance(name, str) and name in INPUTS else table.resolve(name)
        if not _runs(site, stop):
            raise BadRequest(f"{name} is not computed with stop_at_layer={stop_at_layer}. Leave one of the two out.")
    sites = {table.resolve(name) for name in found if name not in INPUTS}
    wanted = {*found, *sites, *(alias for site in sites for alias in table.sites[site].aliases)}
    return [name for name in every if name in wanted]


def _every(table: SiteTable) -> list[str]:
    """All names, in the order of a pass: each site with its other names."""
    others: dict[str, list[str]] = {site: [site, *table.sites[site].aliases] for site in table.in_order()}
    for name, site in table.same.items():
        others[site].append(name)
    first = [name for name in INPUTS if name != "pos_embed.hook_in" or "pos_embed.hook_out" in table.sites]
    return [*first, *(name for names in others.values() for name in names)]


def _runs(site: str, stop: int | None) -> bool:
    """Whether a run that stops at a block computes the site."""
    if stop is None:
        return True
    layer = layer_of(site)
    return layer < stop if layer is not None else not site.startswith(("ln_final.", "unembed."))


# ---- cache model -----------------------------------------------------------------------------------------------------
# `CacheModel`: the part of a model that the methods of TransformerLens' `ActivationCache` use; and what they look up.


def tl_config(c: ModelConfig) -> SimpleNamespace:
    """Sizes and settings by TransformerLens' names."""
    return SimpleNamespace(
        n_layers=c.num_layers,
        n_heads=c.num_heads,
        n_key_value_heads=c.num_kv_heads,
        d_model=c.d_model,
        d_mlp=c.d_mlp,
        d_head=c.d_head,
        d_vocab=c.vocab_size,
        n_ctx=c.max_positions,
        eps=c.norm_eps,
        attn_only=False,
        normalization_type="RMS" if c.norm == "rms" else "LN",
        device="cpu",
    )


class Cached(dict[str, Tensor]):
    """Cached values by name. A site that is there is found by its other names too; one that is not is named."""

    def __init__(self, values: Mapping[str, Tensor], table: SiteTable) -> None:
        super().__init__(values)
        self._table = table

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._other(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default  # noqa: SIM401 (a dict's own `get` knows no other names)

    def __missing__(self, name: str) -> Tensor:
        other = self._other(name)
        if other is None:
            there = f"{', '.join(list(self)[:6])}{', ...' if len(self) > 6 else ''}" or "nothing"
            raise UnknownSite(
                f"{name} is not in this cache, which holds {there}. Let names_filter choose it as well, or leave names_filter "
                "out for every site. decompose_resid needs hook_embed, hook_pos_embed where the model has one, hook_attn_out "
                "and hook_mlp_out of every block, and with apply_ln or logit_attrs ln_final.hook_scale."
            )
        return self[other]

    def _other(self, name: object) -> str | None:
        """The name in the cache of the same site."""
        site = self._table.names.get(name, name) if isinstance(name, str) else None
        return next((each for each in self if self._table.names.get(each, each) == site), None)


class CacheModel:
    """Weights in TransformerLens' shapes, the final norm, and tokens. On the CPU, where cached values are."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.cfg = tl_config(engine.config)
        self.blocks = [CacheBlock(block) for block in engine.model.blocks]

    def ln_final(self, x: Tensor) -> Tensor:
        """The final norm of the residual stream, canonical: [..., d_model]."""
        return self._engine.lock.alone(self._normed, x)

    @torch.inference_mode()
    def _normed(self, x: Tensor) -> Tensor:
        runner, rows = self._engine.runner, x.reshape(-1, x.shape[-1])
        with modes.canonical():
            out = runner.head_ops().norm(rows.to(runner.device, runner.model.dtype), runner.model.ln_final)
        return out.to(x.device).view(x.shape)

    @property
    def W_U(self) -> Tensor:
        """[d_model, vocab]"""
        return self._engine.model.unembedding.detach().t().cpu()

    @property
    def b_U(self) -> Tensor:
        """[vocab]"""
        bias = self._engine.model.unembed_bias
        return torch.zeros(self._engine.config.vocab_size, dtype=torch.float32) if bias is None else bias.detach().cpu()

    def accumulated_bias(self, layer: int, mlp_input: bool = False, include_mlp_biases: bool = True) -> Tensor:
        """The sum of what the biases of the first `layer` blocks write to the residual stream: [d_model]."""
        total = torch.zeros(self._engine.config.d_model, dtype=torch.float32)
        for i, block in enumerate(self.blocks[: layer + mlp_input]):
            parts = [block.attn.b_O, block.mlp.b_out if include_mlp_biases and i < layer else None]
            for bias in parts:
                total = total if bias is None else total + bias
        return total

    def to_single_token(self, text: str) -> int:
        return self._engine._target(text)

    def tokens_to_residual_directions(self, tokens: str | int | Tensor) -> Tensor:
        """The unembedding columns of tokens: [*tokens' shape, d_model]; of a single token, [d_model]. Warns: Caveat."""
        norm = self._engine.model.ln_final
        if not bool((norm.weight == 1).all()) or (norm.bias is not None and bool(norm.bias.any())):
            warnings.warn(
                "logit_attrs leaves out the weights of the final norm, which are not folded into the unembedding here, so its "
                "attributions do not add up to logits. Use rl.dla(engine, prompt, (token, other)), whose parts do.",
                Caveat,
                stacklevel=4,  # the caller of `logit_attrs`
            )
        if isinstance(tokens, str):
            tokens = self.to_single_token(tokens)
        elif isinstance(tokens, Tensor) and tokens.numel() == 1:
            tokens = int(tokens)
        return self.W_U.t()[tokens]


class CacheBlock:
    """The output weights of one block."""

    def __init__(self, block: Any) -> None:
        assert isinstance(block, Block)
        plain = lambda x: None if x is None else x.detach().cpu()  # noqa: E731
        self.attn = SimpleNamespace(b_O=None)
        for part, _ in block.writers:  # a recurrent part of a hybrid counts as its attention
            by_head = rearrange(plain(part.o.weight), "(heads d_head) d_model -> heads d_head d_model", heads=part.heads)
            self.attn = SimpleNamespace(W_O=by_head, b_O=plain(part.o.bias))
        self.mlp = SimpleNamespace(b_out=None)  # experts have no weight or bias that all rows share
        if isinstance(block.mlp, Mlp):
            self.mlp = SimpleNamespace(W_out=block.mlp.down.weight.detach().cpu(), b_out=plain(block.mlp.down.bias))


# ---- verbs -----------------------------------------------------------------------------------------------------------
# The methods of an engine that are called as in TransformerLens. Their values are canonical, except after hooks.
#
# Sequences are of one length. Strings are padded on the right to the longest one, which changes no row before the padding.
# In a batch, padding tokens at the end of a sequence do not count in a loss.
# prepend_bos  None: the tokenizer decides, as in `prompt`; True: with one; False: without

ReturnType = Literal["logits", "loss", "both"] | None
FwdHook = tuple[str | Callable[[str], bool], Callable[[Tensor, Any], Tensor | None]]
_around: ContextVar[tuple[tuple[Engine, FwdHook], ...]] = ContextVar("hooks", default=())
"""the hooks of the open `hooks` contexts"""


@named_options
def logits_or_loss(
    engine: Engine,
    tokens: TokenInput,
    return_type: ReturnType = "logits",
    *,
    loss_per_token: bool = False,
    prepend_bos: bool | None = None,
    stop_at_layer: int | None = None,
) -> Any:
    """Logits [batch, positions, vocab], the mean loss of predicting the tokens, both, or nothing.

    stop_at_layer  returns the residual stream that enters this block instead; negative ones count from the end
    """
    return _run(engine, tokens, (), (), return_type, loss_per_token, prepend_bos, stop_at_layer)[0]


@named_options
def run_with_cache(
    engine: Engine,
    tokens: TokenInput,
    names_filter: NamesFilter = None,
    pos_slice: slice | int | None = None,
    *,
    return_type: ReturnType = "logits",
    loss_per_token: bool = False,
    remove_batch_dim: bool = False,
    return_cache_object: bool = True,
    prepend_bos: bool | None = None,
    stop_at_layer: int | None = None,
) -> tuple[Any, Any]:
    """What `engine(tokens)` returns, and a TransformerLens `ActivationCache` of the named sites.

    names_filter         a name, several, or a function of the name; None: every site that the device can capture
    pos_slice            positions in the cache; the logits cover all positions
    remove_batch_dim     of the cache, for one sequence
    return_cache_object  False: a dict of tensors
    stop_at_layer        as in `engine(tokens)`; the cache ends before this block

    Every value is canonical: it has the same bits as in a replay, a fork or a dump.
    """
    rows, names = token_paths(engine, tokens, prepend_bos), chosen(engine, names_filter, stop_at_layer)
    where = slice_of(pos_slice, len(rows[0]))
    if as_bool("remove_batch_dim", remove_batch_dim) and len(rows) > 1:
        raise BadRequest(f"remove_batch_dim=True was given for {len(rows)} sequences. Give one sequence.")
    sites = tuple(dict.fromkeys(engine.sites.resolve(name) for name in names if name not in INPUTS))
    out, values = _run(engine, rows, sites, (), return_type, loss_per_token, None, stop_at_layer)
    cache: dict[str, Tensor] = {}
    for name in names:
        if name in INPUTS:
            cache[name] = inputs(name, rows)[..., where]
        else:
            site = engine.sites.resolve(name)
            cache[name] = sliced(site, values[site], where)
    if not as_bool("return_cache_object", return_cache_object):
        return out, {name: value[0] for name, value in cache.items()} if remove_batch_dim else cache
    from transformer_lens import ActivationCache

    made = ActivationCache(Cached(cache, engine.sites), CacheModel(engine))
    return out, made.remove_batch_dim() if remove_batch_dim else made


@named_options
def run_with_hooks(
    engine: Engine,
    tokens: TokenInput,
    fwd_hooks: Sequence[FwdHook] = (),
    *,
    return_type: ReturnType = "logits",
    loss_per_token: bool = False,
    prepend_bos: bool | None = None,
    stop_at_layer: int | None = None,
) -> Any:
    """As `engine(tokens)`, with hook functions: (name, or function of the name; function of value and hook) pairs.

    A function sees and may replace the value of the whole batch. What it computes is not certified: an `Edit` is.
    """
    return _run(engine, tokens, (), fwd_hooks, return_type, loss_per_token, prepend_bos, stop_at_layer)[0]


@contextmanager
def hooks(engine: Engine, fwd_hooks: Sequence[FwdHook] = ()) -> Iterator[Engine]:
    """A context in which `engine(tokens)`, `run_with_cache` and `run_with_hooks` run with these hooks as well.

    Branches have their own: `prompt(..., hooks=...)`, `fork(hooks=...)`.
    """
    pairs = tuple((engine, (name, function)) for name, function in _pairs(fwd_hooks))
    before = _around.set((*_around.get(), *pairs))
    try:
        yield engine
    finally:
        _around.reset(before)


def add_hook(engine: Engine, name: str | Callable[[str], bool], hook: Callable[[Tensor, Any], Tensor | None]) -> None:
    """Mutates: `engine(tokens)`, `run_with_cache` and `run_with_hooks` run with this hook too, until `reset_hooks`.

    Branches, verbs and dumps do not: give them edits, which are certified, or hooks of their own.
    """
    (pair,) = _pairs([(name, hook)])
    if isinstance(name, str):
        hook_at(name, hook, engine.sites)
    engine._kept = (*engine._kept, pair)


def reset_hooks(engine: Engine) -> None:
    """Mutates: removes the hooks of `add_hook`."""
    engine._kept = ()


@named_options
def to_tokens(engine: Engine, input: TextInput, prepend_bos: bool | None = None) -> Tensor:
    """Token ids [batch, positions] of a text or chat, or of several; padded on the right with the padding token."""
    return torch.tensor(encoded(engine, input, prepend_bos))


def to_str_tokens(engine: Engine, input: TokenInput, prepend_bos: bool | None = None) -> list[str]:
    """The text of each token of one text or path."""
    (path,) = one(engine, input, prepend_bos)
    return [engine.text.token(token) for token in path]


def to_single_token(engine: Engine, string: str) -> int:
    """The id of a text that is one token; BadRequest if it is not."""
    return engine._target(string)


def _run(
    engine: Engine,
    tokens: TokenInput,
    sites: Sequence[str],
    fwd_hooks: Sequence[FwdHook],
    return_type: ReturnType,
    loss_per_token: bool,
    prepend_bos: bool | None,
    stop_at_layer: int | None,
) -> tuple[Any, dict[str, Tensor]]:
    """(what was asked for, site -> rows [batch, positions, ...])"""
    if return_type is not None and (not isinstance(return_type, str) or return_type not in ("logits", "loss", "both")):
        raise BadRequest(f"Invalid return_type={short_repr(return_type)}. Give 'logits', 'loss', 'both' or None.")
    per_token, paths = as_bool("loss_per_token", loss_per_token), token_paths(engine, tokens, prepend_bos)
    stop = layer_number(engine, stop_at_layer)
    wanted = residual_site(engine, stop)
    if return_type in ("loss", "both") and (stop is not None or len(paths[0]) < 2):
        raise BadRequest("A loss needs the whole model and at least two tokens. Ask for return_type='logits' instead.")
    around = [hook for owner, hook in _around.get() if owner is engine]
    hooks = _batched(engine, [*engine._kept, *around, *_pairs(fwd_hooks)], paths)
    branches = engine.prompts(paths, sites=list(dict.fromkeys([*sites, wanted])), hooks=hooks)
    try:
        values = {site: torch.stack([branch.activations[site] for branch in branches]) for site in sites}
        out = None if return_type is None else _residuals(branches, wanted)
        if out is not None and stop is None:
            out = torch.stack([engine.lock.alone(engine.runner.logits, rows).cpu() for rows in out])
    finally:
        for branch in branches:
            branch.release()
    if out is None or return_type == "logits" or stop is not None:
        return out, values
    loss = _loss(out, paths, path_lengths(engine, paths), per_token)
    return ((out, loss) if return_type == "both" else loss), values


def _residuals(branches: Sequence[Branch], site: str) -> Tensor:
    return torch.stack([branch.activations[site] for branch in branches])


def _loss(logits: Tensor, paths: list[list[int]], lengths: list[int], per_token: bool) -> Tensor:
    """Minus the log-probability of each next token: [batch, positions - 1], 0 for padding; or its mean without padding."""
    follows = torch.tensor(paths)[:, 1:, None]
    log_p = log_softmax(logits[:, :-1].flatten(0, 1)).view(len(logits), -1, logits.shape[-1])
    loss = -log_p.gather(-1, follows).squeeze(-1)
    padding = torch.arange(1, len(paths[0])) >= torch.tensor(lengths)[:, None]
    if not padding.any():
        return loss if per_token else loss.mean()
    loss = loss.masked_fill(padding, 0.0)
    return loss if per_token else loss.sum() / (~padding).sum()


def _pairs(fwd_hooks: Sequence[FwdHook]) -> list[FwdHook]:
    accepted = "a list of (name, or function of the name; function of value and hook) pairs"
    pairs = as_list("fwd_hooks", fwd_hooks, accepted)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
            raise BadRequest(f"Invalid hook {short_repr(pair)}. Give {accepted}.")
    return [(pair[0], pair[1]) for pair in pairs]


def _batched(engine: Engine, pairs: list[FwdHook], paths: list[list[int]]) -> list[tuple[str, BatchHook]]:
    """The hooks of all sequences of a batch. A function of the name chooses among the sites' own names."""
    found: list[tuple[str, BatchHook]] = []
    for name, function in pairs:
        names = [site for site in engine.sites.in_order() if name(site)] if callable(name) else [name]
        for each in names:
            heads_first = engine.sites.resolve(each).endswith(HEADS_FIRST)
            found.append((each, BatchHook(function, each, len(paths), len(paths[0]), heads_first)))
    return found
