"""`Core`: a certified model and the branches it serves. `Engine` adds `load`, `replay` and `run_with_cache`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor

from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.lens.lens import KnownLenses, TunedLens
from replaylens.engine.loop.drafters import (
    Drafter,
    ForcedDrafter,
    LensDrafter,
    ModelDrafter,
    NgramDrafter,
    SelfDrafter,
    TreeDrafter,
)
from replaylens.engine.loop.lane import Lane
from replaylens.engine.loop.loop import Loop
from replaylens.engine.memory.cache import PlacedCache, cache_bytes, chosen_tokens, require_memory, require_page_size
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.memory.tree import BranchStatus, BranchTree
from replaylens.engine.model import sites
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.text import Prompt, Text
from replaylens.engine.passes.runner import Keep, Runner
from replaylens.engine.passes.transfer import RING_BYTES, SMALLEST_RING
from replaylens.engine.proof import certificates
from replaylens.engine.proof.fingerprint import take
from replaylens.engine.proof.trace import Trace
from replaylens.engine.records import Fingerprint, LensSpec
from replaylens.engine.request.capture import CaptureSpec, Recording, Rows
from replaylens.engine.request.edits import Edit, Hook, resolve_hooks
from replaylens.engine.request.placed import PlacedEdit
from replaylens.engine.request.placing import place_all, warn_of_no_match
from replaylens.engine.request.positions import CAPTURED, At, Position, PositionSlice, chosen
from replaylens.engine.request.values import (
    as_bool,
    as_instance,
    as_int,
    as_list,
    defines,
    hides,
    integer,
    named_options,
    short_repr,
)
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.generation import Generation
from replaylens.engine.serving.lock import EngineLock, changing, reading
from replaylens.engine.serving.request import NotCopyable
from replaylens.engine.serving.variants import Variants
from replaylens.engine.serving.watch import Probe, Watch
from replaylens.engine.terminal import defer_interrupt
from replaylens.kernels.definition import CHUNK

# ---- assembly --------------------------------------------------------------------------------------------------------
# The parts of an engine that its options choose: drafters, and the decode steps that a device takes on its own.


def make_drafters(runner: Runner, draft_model: Decoder | None, layer: int | None, width: int) -> dict[str, Drafter]:
    """All drafters of an engine by name; `model` only if there is a model to draft with.

    layer  where the early-exit drafters leave the model; None: in the middle
    width  sibling chains of the `tree` drafter
    """
    config = runner.model.config
    layer = max(1, config.num_layers // 2) if layer is None else layer
    drafters: dict[str, Drafter] = {
        "self": SelfDrafter(),
        "lens": LensDrafter(runner, layer),
        "ngram": NgramDrafter(),
        "tree": TreeDrafter(runner, layer, width),
        "forced": ForcedDrafter(),
    }
    if draft_model is not None:
        require_page_size(draft_model.config, runner.pool.page_size, "a hybrid draft model")
        certificates.certificate_for(draft_model)
        own = Runner(draft_model, runner.pool.num_pages, runner.pool.page_size)
        drafters["model"] = ModelDrafter(own, config.vocab_size)
    return drafters


def decode_on_device(loop: Loop) -> None:
    """Mutates: the loop decodes in bursts and its passes are CUDA graphs. Precondition: the model is on CUDA."""
    from replaylens.engine.lens import cuda as cuda_lens
    from replaylens.engine.passes.bursts import Bursts
    from replaylens.engine.passes.graphs import PassGraphs

    runner = loop.runner
    loop.bursts = Bursts(runner, partial(cuda_lens.columns, runner.model))
    runner.graphs = PassGraphs(runner.model, runner.one_cache, loop.bursts.spare.pages[0], runner.vectors)


def replay_on_devices(runner: Runner) -> None:
    """Mutates: the passes of layers on several CUDA devices are graphs, one per device. Decode steps are passes, too."""
    from replaylens.engine.passes.edits_cuda import Vectors
    from replaylens.engine.passes.graphs import PassGraphs, PlacedGraphs

    model, spare = runner.model, PageTable()
    runner.pool.reserve(spare, 0, 1)
    assert isinstance(runner.cache, PlacedCache)
    runner.graphs = PlacedGraphs(
        [
            PassGraphs(model, part, spare.pages[0], Vectors(model.dtype, str(stage.device)), stage=stage)
            for stage, part in zip(model.stages, runner.cache.parts, strict=True)
        ],
        spare,
        model.device,
    )


# ---- core ------------------------------------------------------------------------------------------------------------

AnyBranch = TypeVar("AnyBranch", bound=Branch)
_CPU_ROWS, _CUDA_ROWS, _CUDA_LONE_ROWS = 512, 1024, 8192
"""default of `max_rows`; a device needs more rows to be busy, and has them if nobody waits for a pass"""
_OPEN = 32
"""requests of a hybrid that run at once, each with the entries of two chunks: the open one, and the next"""

_PAGE = 16
"""default of `page_size`"""
_COPYING = 12
"""threads that copy captured rows for a caller, at most"""

SITES = "letters such as 'STCZ', a site name, or a list of these"
"""the accepted values of `sites`, for error messages"""


class Sizes(NamedTuple):
    """Of an engine's cache."""

    tokens: int
    """positions"""
    state_tokens: int
    """positions whose recurrent entries are kept"""
    why: str
    """why so many positions; empty: they were given"""

    @classmethod
    def of(
        cls,
        model: Decoder,
        tokens: int | None = None,
        page_size: int = _PAGE,
        state_tokens: int | None = None,
        max_rows: int = _CPU_ROWS,
        draft_model: Decoder | None = None,
    ) -> Sizes:
        """The sizes that are given, or else those that this machine has room for now."""
        config, stages = model.config, model.stages
        least = max_rows + 4 * CHUNK  # a pass, the chunk before it and the tail of another
        if state_tokens is not None and config.mixer is None:
            raise BadRequest(f"This {config.family} model has no recurrent layers, so state_tokens is of no use. Leave it out.")
        if state_tokens is not None and stages:
            raise BadRequest("Over several devices, a hybrid keeps the states of all positions. Leave state_tokens out.")
        given = state_tokens if state_tokens is None else as_int("state_tokens", state_tokens, least)

        def states(tokens: int) -> int:
            return given or max(least, max_rows + min(tokens // 4, 2 * _OPEN * CHUNK))

        def needs(tokens: int) -> int:
            own = cache_bytes(config, tokens, page_size, model.dtype, None if stages else states(tokens))
            small = draft_model and cache_bytes(draft_model.config, tokens, page_size, draft_model.dtype, None)
            return own + (small or 0)

        why = ""
        if tokens is None:
            places = {model.device: 1.0} if not stages else dict.fromkeys((stage.device for stage in stages), 0.0)
            for stage in stages:
                places[stage.device] += (stage.end - stage.first) / config.num_layers
            tokens, why = chosen_tokens(needs, page_size, places)
        tokens = as_int("cache_tokens", tokens, page_size)
        devices = {stage.device for stage in stages} or {model.device}
        require_memory(config, tokens, page_size, model.dtype, devices, None if stages else states(tokens))
        return cls(tokens, states(tokens), why)

    @classmethod
    def usual(cls, model: Decoder) -> Sizes:
        """Those of an engine that is made without options."""
        return cls.of(model, None, usual_page(model), None, _CUDA_ROWS if model.device.type == "cuda" else _CPU_ROWS)


def usual_page(model: Decoder) -> int:
    """Positions of a page, by default."""
    return _PAGE if model.config.mixer is None else CHUNK


def _copied(recordings: Sequence[Recording]) -> list[Rows]:
    """Copies of their rows. Several threads: one fills fresh memory slowly."""
    with ThreadPoolExecutor(min(_COPYING, torch.get_num_threads())) as threads:
        return list(threads.map(Recording.copied, recordings))


class EngineKeywords(TypedDict, total=False):
    """How an engine computes. `Core` documents it."""

    cache_tokens: int | None
    page_size: int | None
    state_tokens: int | None
    max_rows: int | None
    lens_layer: int | None
    tree_width: int
    canary: bool
    record: bool
    capture_buffer: int


class CaptureKeywords(TypedDict, total=False):
    """What is stored of captured rows, and where. `Core.capture_spec` documents it."""

    top_k: int
    targets: Sequence[str | int]
    full: bool
    lens: TunedLens | None
    positions: str
    keep: Keep
    watch: Watch | None


class PromptKeywords(CaptureKeywords, total=False):
    """How a root branch is made. `Core.prompts` documents it."""

    sites: str | Sequence[str] | None
    keep_rejected: bool
    edits: Sequence[Edit]
    hooks: Sequence[Hook]


@hides(
    *("cancel", "forest", "guesses", "handle", "lenses", "lock", "loop", "open_stream", "placed", "plain"),
    *("planted", "prefix"),
    *("require_positions", "runner", "serve", "token_ids_of", "tokenized", "tree", "variants"),
)
class Core(Generation, NotCopyable):
    """A model, its KV cache and its tree of branches.

    cache_tokens   positions in the KV cache, also as an attribute; when it is full, requests wait or are preempted and computed
                   again. Changes no bit. Default: a power of two from 8,192 to 1,048,576, the largest that may come to take
                   a sixteenth of the free memory (an eighth of a GPU's)
    page_size      positions per page; changes no bit. Default: 16; of a hybrid 64, and otherwise a divisor of it
    state_tokens   positions of a hybrid whose recurrent entries are kept. Those of others, and states beyond the memory
                   of KV, are computed again if a rollback or a fork needs them; changes no bit. A request that runs
                   takes up to 128. Default: for a pass and a quarter of the cache, 32 requests at most
    max_rows       rows per pass; changes no bit. Default: 512; on CUDA 1024, or up to 8192 for prompts alone, as many as
                   `capture_buffer` holds if they capture
    draft_model    a smaller model with the same tokenizer, for the `model` drafter
    lens_layer     the early-exit layer of the `lens` and `tree` drafters; default: the middle
    tree_width     sibling chains of the `tree` drafter
    canary         debug mode: before every pass, check that the cache holds the KV of the branches' own tokens
    record         keep every event in `trace`, for replays and timelines; grows with use
    capture_buffer bytes of pinned memory through which captured rows leave a GPU; while it is full, generation waits

    Threads may share an engine. Their requests are computed together, and each gets the result it would get alone.
    """

    plain = True
    """whether the model is a decoder alone, so that its logits are a sum over its layers and gradients flow through it"""
    _instead = "Load another engine from the same source. It commits the same bits."

    @defines(EngineKeywords)
    def __init__(
        self,
        model: Decoder,
        tokenizer: Any = None,
        *,
        cache_tokens: int | None = None,
        page_size: int | None = None,
        state_tokens: int | None = None,
        max_rows: int | None = None,
        draft_model: Decoder | None = None,
        lens_layer: int | None = None,
        tree_width: int = 3,
        canary: bool = False,
        record: bool = False,
        capture_buffer: int = RING_BYTES,
    ) -> None:
        self.model = as_instance("model", model, Decoder, "a Decoder; Engine.load takes other sources")
        self._require_device(model)
        self.config, on_cuda = model.config, model.device.type == "cuda"
        page_size = usual_page(model) if page_size is None else as_int("page_size", page_size, 1)
        lone_rows = _CUDA_LONE_ROWS if max_rows is None and on_cuda else 0
        max_rows = (_CUDA_ROWS if on_cuda else _CPU_ROWS) if max_rows is None else as_int("max_rows", max_rows, 16)
        canary, record = as_bool("canary", canary), as_bool("record", record)
        capture_buffer = as_int("capture_buffer", capture_buffer, SMALLEST_RING)
        if draft_model is not None:
            self._require_device(as_instance("draft_model", draft_model, Decoder, "a Decoder; Engine.load takes other sources"))
        sizes = Sizes.of(model, cache_tokens, page_size, state_tokens, max_rows, draft_model)
        self.cache_tokens, state_tokens, self._why_so_many = sizes
        lone_rows = lone_rows if self.config.mixer is None else min(lone_rows, state_tokens // 2)
        self.text = tokenizer if isinstance(tokenizer, Text) else Text(tokenizer)
        self.certificate = certificates.certificate_for(model)
        self.sites = self._site_table()
        self.tree = BranchTree()
        self.lenses = KnownLenses(model)
        spare = int(on_cuda)  # an extra page for the padding rows of CUDA graphs
        self.runner = Runner(model, self.cache_tokens // page_size + spare, page_size, canary, capture_buffer, state_tokens)
        self.prefix = PrefixIndex(self.runner.pool)
        drafters = make_drafters(self.runner, draft_model, lens_layer, tree_width)
        self.loop = Loop(self.runner, self.tree, self.prefix, drafters, self.text, max_rows, lone_rows, self.lenses)
        if on_cuda and not model.stages and self.runner.elsewhere is None:
            decode_on_device(self.loop)
        elif on_cuda and all(stage.device.type == "cuda" for stage in model.stages) and self.runner.elsewhere is None:
            replay_on_devices(self.runner)
        self.lock = EngineLock()
        trace = Trace(self.fingerprint) if record else None
        self.forest = Forest(self.runner, self.tree, self.prefix, self.loop, self.lock, trace)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the bits of a result depend on, besides path and edits. Weights are hashed when it is first asked for, which
        takes seconds of gigabytes; BadWeights if they are no longer those that results were computed with."""
        self.runner.weights.require_unchanged()
        return self._fingerprint()

    def _fingerprint(self) -> Fingerprint:
        return take(self.model)

    def __repr__(self) -> str:
        c, pool = self.config, self.runner.pool
        cache = f"{pool.num_pages - pool.num_free} of {pool.num_pages} KV pages in use{self._cache_words()}"
        return f"{type(self).__name__}({c.num_layers} layers, d_model {c.d_model}, {self.model.device}, {cache})"

    def _cache_words(self) -> str:
        """Why the cache has its size, if that was chosen, and what branches gave up when it was full."""
        lost = self.loop.admission.reservations.given_up
        chosen = f"; cache_tokens={self.cache_tokens} was chosen: {self._why_so_many}" if self._why_so_many else ""
        full = f"; full: branches gave up the KV of {lost} positions, to be computed again. A larger cache_tokens avoids it"
        return chosen + full * bool(lost)

    @reading
    def _repr_html_(self) -> str:
        from replaylens.views.pictures import tree_of
        from replaylens.views.summary import MAX_TREES, cache_and_pictures, code

        pool = self.runner.pool
        used = pool.num_pages - pool.num_free
        facts = {
            "model": f"{self.config.num_layers} layers, width {self.config.d_model}, vocabulary {self.config.vocab_size}",
            "device": f"{self.fingerprint.device}, {self.fingerprint.dtype}",
            "certified": "yes" if self.certificate.certified else "no",
            "fingerprint": code(self.fingerprint.digest),
            "KV pages": f"{used} of {pool.num_pages} in use, {pool.page_size} positions each{self._cache_words()}",
        }
        if (mixer := self.config.mixer) is not None:
            cache, layers = self.runner.cache, len(self.config.layers_with("mixer"))
            part = cache.parts[0] if isinstance(cache, PlacedCache) else cache
            positions, states = part.entries.shape[1] - pool.page_size, part.states.shape[1] - 1
            facts["recurrent layers"] = (
                f"{layers}, each with {mixer.columns[-1]} numbers of {positions} positions and {math.prod(mixer.state_shape)} "
                f"of {states} states"
            )
        held = [i for i in self.tree.roots() if self.tree.branch(i).status is not BranchStatus.RELEASED]
        recordings = {i: lane.recording for i, lane in self.loop.lanes.items()}
        trees = [tree_of(self.tree.branch(root), recordings, self.text) for root in held[-MAX_TREES:]]
        more = len(held) - len(trees)
        return cache_and_pictures(facts, used, pool.num_pages, trees, f"and {more} older roots" if more > 0 else "")

    @property
    def trace(self) -> Trace:
        """Every event since the engine was made; BadRequest unless it was made with `record=True`."""
        if self.forest.trace is None:
            raise BadRequest("This engine records no trace. Make it with record=True, e.g. Engine.load(..., record=True).")
        return self.forest.trace

    # ---- branches -----------------------------------------------------------------------------------------------

    @defines(CaptureKeywords)
    @named_options
    def capture_spec(
        self,
        sites: str | Sequence[str],
        *,
        rejected: bool = False,
        top_k: int = 8,
        targets: Sequence[str | int] = (),
        full: bool = False,
        lens: TunedLens | None = None,
        positions: str = "all",
        keep: Keep = "host",
        watch: Watch | None = None,
    ) -> CaptureSpec:
        """Resolve what to capture. UnknownSite lists the nearest names.

        rejected   also keep the rows of rejected drafts
        top_k      number of the likeliest tokens kept in Z, the logit lens
        targets    tokens whose log-probs Z always keeps
        full       keep whole distributions
        lens       read Z through this tuned lens instead of the plain one
        positions  which rows to keep, such as "last" (of the prompt), "response[:32]" or "all[::4]"; the others are neither
                   moved nor kept. Forms: `engine.request.positions`
        keep       "host": rows are kept in ordinary memory; "device": on the model's device, for probes that run there
        watch      record the scores of its probes, whether or not the rows that they read are captured
        """
        if watch is not None and as_instance("watch", watch, Watch, "a Watch, such as engine.watch(probe)").engine is not self:
            raise BadRequest("The watch belongs to another engine. Make it with this engine's watch(...).")
        names, wants_lens = self.sites.select(sites if isinstance(sites, str) else as_list("sites", sites, SITES))
        rejected, full = as_bool("rejected", rejected), as_bool("full", full)
        asked = as_list("targets", targets, "a list of tokens, as text or ids")
        if not wants_lens and (integer(top_k) != 8 or asked or full or lens is not None):
            raise BadRequest(
                "top_k, targets, full and lens say how Z is stored, but Z is not captured. Ask for it, e.g. with sites='Z'."
            )
        residuals = tuple(self.sites.per_layer("S"))
        spec = None
        if wants_lens:
            top_k = as_int("top_k", top_k, 1, self.config.vocab_size)
            ids = tuple(self._target(t) for t in asked)
            spec = LensSpec(residuals, top_k, ids, full, None if lens is None else self.lenses.add(lens))
        if not isinstance(keep, str) or keep not in ("host", "device"):
            raise BadRequest(f"Invalid keep={short_repr(keep)}. Give 'host' or 'device'.")
        where = Position.parse(positions, CAPTURED).tokens or PositionSlice()
        scored = () if watch is None else watch.scored
        names += () if watch is None else tuple(site for site in watch.unscored if site not in names)
        return self._fitted(CaptureSpec(names, spec, rejected, residuals[-1], positions=where, keep=keep, scored=scored))

    @defines(PromptKeywords)
    @named_options
    def prompts(
        self,
        texts: Iterable[Prompt],
        *,
        sites: str | Sequence[str] | None = None,
        keep_rejected: bool = False,
        edits: Sequence[Edit] = (),
        hooks: Sequence[Hook] = (),
        **stored: Unpack[CaptureKeywords],
    ) -> Sequence[Branch]:
        """Several root branches, computed together.

        sites          what to capture on them and their forks: "STCZ", or site names
        keep_rejected  also capture the rows of rejected drafts
        edits, hooks   interventions, as in `Branch.fork`
        top_k, targets, full, lens, positions, keep, watch
                       what is stored of them and where, as in `capture_spec`
        """
        capture = self._wanted(sites, keep_rejected, **stored)
        return self._named(self._planted(texts, capture, edits, hooks), sites)

    @named_options
    def prompt(self, text: Prompt, **options: Unpack[PromptKeywords]) -> Branch:
        """A new root branch with its prompt computed. Options as in `prompts`."""
        (branch,) = self.prompts([text], **options)
        return branch

    def activations(self, branches: Sequence[Branch], *, release: bool = False) -> list[dict[str, Tensor]]:
        """What each branch captured, by site: [rows, ...], copied as by `branch.activations`, but faster. A tensor that is kept
        keeps those of its branch's other sites in memory, too; clone it if you need only that one.

        release  release the branches. Rows that nobody else has, and that lie in one piece, are handed over without a copy; a
                 kept tensor may then keep all rows of its pass in memory
        """
        given = as_list("branches", branches, "a list of branches, such as engine.prompts(...)")
        recordings = [self._own(branch).activations for branch in given]
        if not as_bool("release", release):
            return _copied(recordings)
        if len({branch.id for branch in given}) < len(given):
            raise BadRequest("A branch is given twice, and its rows can be handed over once. Give each branch once.")
        sole = [each.sole for each in recordings]
        others = [each for each, own in zip(recordings, sole, strict=True) if not own]
        copies = iter(_copied(others))  # what can fail comes first
        return self._handed_over(given, [None if own else next(copies) for own in sole])

    @changing
    def _handed_over(self, branches: Sequence[Branch], copies: Sequence[Rows | None]) -> list[Rows]:
        """The copies, and the rows themselves where there is none. Mutates: releases the branches that are not released yet."""
        lanes, found = [branch.lane for branch in branches], list[Rows]()
        for lane, rows in zip(lanes, copies, strict=True):
            assert lane.recording is not None  # its rows were looked at
            found.append(lane.recording.handed_over() if rows is None else rows)
        self.forest.release_all(lanes)
        return found

    def _named(self, branches: list[AnyBranch], sites: str | Sequence[str] | None) -> list[AnyBranch]:
        """Mutates: captured rows are listed by the names that they were asked for. Returns the branches."""
        asked = self.sites.asked(sites if isinstance(sites, str) else () if sites is None else tuple(sites))
        for branch in branches if asked else ():
            for recording in (branch.lane.recording, branch.lane.template):
                if recording is not None:
                    recording.asked = asked
        return branches

    def _wanted(
        self, sites: str | Sequence[str] | None, rejected: bool, **stored: Unpack[CaptureKeywords]
    ) -> CaptureSpec | None:
        """What to capture on a prompt; None: nothing."""
        if sites is None or (isinstance(sites, str | Sequence) and not len(sites)):
            sites = ""
        spec = self.capture_spec(sites, rejected=rejected, **stored)
        return spec if sites or stored.get("watch") is not None else None

    def _planted(
        self,
        texts: Iterable[Prompt],
        capture: CaptureSpec | None,
        edits: Sequence[Edit],
        hooks: Sequence[Hook],
    ) -> list[Branch]:
        self.lenses.of(capture.lens if capture else None)  # an unknown lens fails before anything is computed
        paths = [self.tokens_of(text) for text in as_list("texts", texts, "a list of prompts; prompt(...) takes one")]
        edits = as_list("edits", edits, "a list of Edits", BadEdit)
        placed = [self.placed(edits, len(path)) for path in paths]
        warn_of_no_match(placed, paths)
        return self.planted(paths, capture, placed, resolve_hooks(hooks, self.sites))

    def planted(
        self,
        paths: Sequence[list[int]],
        capture: CaptureSpec | None,
        edits: Sequence[tuple[PlacedEdit, ...]],
        hooks: tuple[Hook, ...] = (),
    ) -> list[Branch]:
        """Root branches with these tokens, each under its own placed edits, computed together."""
        with self.forest.made() as lanes:
            with defer_interrupt():
                lanes += [self.forest.plant(path, capture, own, hooks) for path, own in zip(paths, edits, strict=True)]
            self.forest.compute(lanes)
        return [self.handle(lane) for lane in lanes]

    def handle(self, lane: Lane) -> Branch:
        """The user's handle on a lane."""
        return Branch(self, lane)

    def watch(self, probes: Probe | Mapping[str, Probe]) -> Watch:
        """Fitted linear probes that read every token while it is generated: scores as a stream, as stop conditions, and as
        conditions of edits.

        probes  one, which is named by its label, or a dict from names to probes
        """
        return Watch(self, probes)

    def logits(
        self,
        text: Prompt,
        *,
        edits: Sequence[Edit] = (),
        positions: At = -1,
        tokens: Sequence[str | int] | None = None,
    ) -> Tensor:
        """The logits of a text, under edits: [vocab] for one position, else [positions, vocab]; as `Branch.logits`."""
        branch = self.prompt(text, edits=edits)
        try:
            return branch.logits(positions, tokens=tokens)
        finally:
            branch.release()

    def logits_under(
        self,
        text: Prompt,
        variants: Sequence[Sequence[Edit]],
        *,
        edits: Sequence[Edit] = (),
        positions: At = -1,
        tokens: Sequence[str | int] | None = None,
        progress: bool = False,
    ) -> Tensor:
        """The logits of a text under each of several lists of edits: [variants, vocab], or [variants, positions, vocab].

        All are computed together. They share the text's KV, and rows that an edit leaves alone are not computed again. Each has
        the bits of `logits` with the same edits.

        edits  made in every variant, before its own
        """
        variants = as_list("variants", variants, "a list of lists of Edits", BadEdit)
        if not variants:
            raise BadEdit("No variants. Give at least one list of edits; an empty list leaves the text as it is.")
        with self.variants(text, edits) as base:
            at = chosen(positions, len(base.path), len(base.path), lambda: map(self.text.token, base.path))
            columns = slice(None) if tokens is None else self.token_ids_of(tokens)
            found = base.read(variants, at, lambda logits: logits[..., columns], progress)
        return found[:, 0] if integer(positions) is not None else found

    def variants(self, text: Prompt, edits: Sequence[Edit] = (), keep: Sequence[str] = ()) -> Variants:
        """The text, to be computed under many lists of edits; see `Variants`."""
        return Variants(self.forest, self.sites, self.placed, self.tokens_of(text), edits, keep)

    def placed(self, edits: Sequence[Edit], length: int) -> tuple[PlacedEdit, ...]:
        """The edits of a branch with `length` tokens, in their order, one per site."""
        return place_all(self.tokenized(edits), self.sites, length)

    def check_integrity(self) -> list[str]:
        """Recount pages, tree, prefixes and rows. Returns lines with the counts; IntegrityError names the first fault."""
        return self.forest.check_integrity()

    def guesses(self) -> dict[str, Any]:
        """Guesses besides drafts, such as guessed thoughts. Rejected branches depend on them."""
        return {}

    # ---- internals ----------------------------------------------------------------------------------------------

    @staticmethod
    def _require_device(model: Decoder) -> None:
        if model.device.type not in ("cpu", "cuda"):
            raise BadRequest(
                f"The weights are on the device {str(model.device)!r}, where no engine computes; 'meta' holds no numbers. Load "
                "the model on 'cpu' or 'cuda'."
            )

    def _site_table(self) -> sites.SiteTable:
        return sites.table(self.config)

    def _fitted(self, spec: CaptureSpec) -> CaptureSpec:
        """What this kind of model keeps of a checked spec; BadRequest for what it cannot keep."""
        return spec
