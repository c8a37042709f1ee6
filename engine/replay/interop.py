"""TransformerLens' verbs on an engine: `engine(tokens)`, `run_with_cache`, `run_with_hooks` and its tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest
from replaylens.engine.replay import tokens as text
from replaylens.engine.replay.cache_model import Cached, CacheModel, tl_config
from replaylens.engine.replay.names import HEADS_FIRST, NamesFilter, chosen, layer_number, residual_site, slice_of, sliced
from replaylens.engine.replay.tokens import TokenInput
from replaylens.engine.request.hooks import BatchHook, hook_at
from replaylens.engine.request.options import named_options
from replaylens.engine.request.values import flag, items, shown
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core

ReturnType = Literal["logits", "loss", "both"] | None
FwdHook = tuple[str | Callable[[str], bool], Callable[[Tensor, Any], Tensor | None]]
_around: ContextVar[tuple[tuple[TransformerLensVerbs, FwdHook], ...]] = ContextVar("hooks", default=())
"""the hooks of the open `hooks` contexts"""


class TransformerLensVerbs(Core):
    """The methods of an engine that are called as in TransformerLens. Their values are canonical, except after hooks.

    Sequences are of one length. Strings are padded on the right to the longest one, which changes no row before the padding.
    In a batch, padding tokens at the end of a sequence do not count in a loss.
    prepend_bos  None: the tokenizer decides, as in `prompt`; True: with one; False: without
    """

    _kept: tuple[FwdHook, ...] = ()
    """what `add_hook` added"""

    @named_options
    def __call__(
        self,
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
        return _run(self, tokens, (), (), return_type, loss_per_token, prepend_bos, stop_at_layer)[0]

    @named_options
    def run_with_cache(
        self,
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
        rows, names = text.paths(self, tokens, prepend_bos), chosen(self, names_filter, stop_at_layer)
        where = slice_of(pos_slice, len(rows[0]))
        if flag("remove_batch_dim", remove_batch_dim) and len(rows) > 1:
            raise BadRequest(f"remove_batch_dim=True was given for {len(rows)} sequences. Give one sequence.")
        sites = tuple(dict.fromkeys(self.sites.resolve(name) for name in names if name not in text.INPUTS))
        out, values = _run(self, rows, sites, (), return_type, loss_per_token, None, stop_at_layer)
        cache: dict[str, Tensor] = {}
        for name in names:
            if name in text.INPUTS:
                cache[name] = text.inputs(name, rows)[..., where]
            else:
                site = self.sites.resolve(name)
                cache[name] = sliced(site, values[site], where)
        if not flag("return_cache_object", return_cache_object):
            return out, {name: value[0] for name, value in cache.items()} if remove_batch_dim else cache
        from transformer_lens import ActivationCache

        made = ActivationCache(Cached(cache, self.sites), CacheModel(self))
        return out, made.remove_batch_dim() if remove_batch_dim else made

    @named_options
    def run_with_hooks(
        self,
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
        return _run(self, tokens, (), fwd_hooks, return_type, loss_per_token, prepend_bos, stop_at_layer)[0]

    @contextmanager
    def hooks(self, fwd_hooks: Sequence[FwdHook] = ()) -> Iterator[TransformerLensVerbs]:
        """A context in which `engine(tokens)`, `run_with_cache` and `run_with_hooks` run with these hooks as well.

        Branches have their own: `prompt(..., hooks=...)`, `fork(hooks=...)`.
        """
        pairs = tuple((self, (name, function)) for name, function in _pairs(fwd_hooks))
        before = _around.set((*_around.get(), *pairs))
        try:
            yield self
        finally:
            _around.reset(before)

    def add_hook(self, name: str | Callable[[str], bool], hook: Callable[[Tensor, Any], Tensor | None]) -> None:
        """Mutates: `engine(tokens)`, `run_with_cache` and `run_with_hooks` run with this hook too, until `reset_hooks`.

        Branches, verbs and dumps do not: give them edits, which are certified, or hooks of their own.
        """
        (pair,) = _pairs([(name, hook)])
        if isinstance(name, str):
            hook_at(name, hook, self.sites)
        self._kept = (*self._kept, pair)

    def reset_hooks(self) -> None:
        """Mutates: removes the hooks of `add_hook`."""
        self._kept = ()

    @property
    def cfg(self) -> SimpleNamespace:
        """The sizes of the model by TransformerLens' names: n_layers, n_heads, d_model, d_vocab, ... `config` has all."""
        return tl_config(self.config)

    @property
    def W_U(self) -> Tensor:
        """The unembedding [d_model, vocab], on the CPU. Norms are not folded into it."""
        return CacheModel(self).W_U

    @property
    def W_E(self) -> Tensor:
        """The embedding [vocab, d_model], on the CPU."""
        return self.model.embed.detach().cpu()

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer; None if it has none."""
        return self.text.tokenizer

    @named_options
    def to_tokens(self, input: text.TextInput, prepend_bos: bool | None = None) -> Tensor:
        """Token ids [batch, positions] of a text or chat, or of several; padded on the right with the padding token."""
        return torch.tensor(text.encoded(self, input, prepend_bos))

    def to_string(self, tokens: TokenInput) -> str | list[str]:
        """The text of token ids; of a batch, one for each."""
        return text.decoded(self, tokens)

    def to_str_tokens(self, input: TokenInput, prepend_bos: bool | None = None) -> list[str]:
        """The text of each token of one text or path."""
        (path,) = text.one(self, input, prepend_bos)
        return [self.text.token(token) for token in path]

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token; BadRequest if it is not."""
        return self._target(string)


def _run(
    engine: Core,
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
        raise BadRequest(f"Invalid return_type={shown(return_type)}. Give 'logits', 'loss', 'both' or None.")
    per_token, paths = flag("loss_per_token", loss_per_token), text.paths(engine, tokens, prepend_bos)
    stop = layer_number(engine, stop_at_layer)
    wanted = residual_site(engine, stop)
    if return_type in ("loss", "both") and (stop is not None or len(paths[0]) < 2):
        raise BadRequest("A loss needs the whole model and at least two tokens. Ask for return_type='logits' instead.")
    kept = engine._kept if isinstance(engine, TransformerLensVerbs) else ()
    around = [hook for owner, hook in _around.get() if owner is engine]
    hooks = _batched(engine, [*kept, *around, *_pairs(fwd_hooks)], paths)
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
    loss = _loss(out, paths, text.lengths(engine, paths), per_token)
    return ((out, loss) if return_type == "both" else loss), values


def _residuals(branches: Sequence[Branch], site: str) -> Tensor:
    return torch.stack([branch.activations[site] for branch in branches])


def _loss(logits: Tensor, paths: list[list[int]], lengths: list[int], per_token: bool) -> Tensor:
    """Minus the log-probability of each next token: [batch, positions - 1], 0 for padding; or its mean without padding."""
    follows = torch.tensor(paths)[:, 1:, None]
    loss = -logits[:, :-1].log_softmax(-1).gather(-1, follows).squeeze(-1)
    padding = torch.arange(1, len(paths[0])) >= torch.tensor(lengths)[:, None]
    if not padding.any():
        return loss if per_token else loss.mean()
    loss = loss.masked_fill(padding, 0.0)
    return loss if per_token else loss.sum() / (~padding).sum()


def _pairs(fwd_hooks: Sequence[FwdHook]) -> list[FwdHook]:
    accepted = "a list of (name, or function of the name; function of value and hook) pairs"
    pairs = items("fwd_hooks", fwd_hooks, accepted)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not callable(pair[1]):
            raise BadRequest(f"Invalid hook {shown(pair)}. Give {accepted}.")
    return [(pair[0], pair[1]) for pair in pairs]


def _batched(engine: Core, pairs: list[FwdHook], paths: list[list[int]]) -> list[tuple[str, BatchHook]]:
    """The hooks of all sequences of a batch. A function of the name chooses among the sites' own names."""
    found: list[tuple[str, BatchHook]] = []
    for name, function in pairs:
        names = [site for site in engine.sites.in_order() if name(site)] if callable(name) else [name]
        for each in names:
            heads_first = engine.sites.resolve(each).endswith(HEADS_FIRST)
            found.append((each, BatchHook(function, each, len(paths), len(paths[0]), heads_first)))
    return found
