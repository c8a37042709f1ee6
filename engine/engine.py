"""`Engine`: the public object. A certified model and the branches it serves.

Verbs that need the engine's public face alone are functions of `engine/serving/`, bound in the class body.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, UnsupportedModel
from replaylens.engine.loop.lane import Lane
from replaylens.engine.loop.loop import Loop
from replaylens.engine.memory.cache import PlacedCache
from replaylens.engine.memory.prefix import PrefixIndex
from replaylens.engine.memory.tree import BranchStatus, BranchTree
from replaylens.engine.model import sites
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.text import Text
from replaylens.engine.passes.lens import KnownLenses
from replaylens.engine.passes.runner import RING_BYTES, SMALLEST_RING, Runner
from replaylens.engine.proof.certificates import certificate_for
from replaylens.engine.proof.fingerprint import take
from replaylens.engine.records import Fingerprint
from replaylens.engine.request.capture import CaptureSpec
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_bool, as_instance, as_int, defines, hides, named_options
from replaylens.engine.serving import transformer_lens, verbs
from replaylens.engine.serving.assembly import (
    CPU_ROWS,
    CUDA_ROWS,
    EngineKeywords,
    Sizes,
    decode_on_device,
    make_drafters,
    replay_on_devices,
    require_device,
    usual_page,
)
from replaylens.engine.serving.branch import Branch, own_branch
from replaylens.engine.serving.forest import Forest
from replaylens.engine.serving.lock import EngineLock, reading
from replaylens.engine.serving.request import SAMPLING, NotCopyable

if TYPE_CHECKING:
    from replaylens.engine.proof.trace import Trace
    from replaylens.engine.serving.watch import Probe, Watch
    from replaylens.replay.run import Run
    from replaylens.replay.texts import NamedLabels
    from replaylens.tasks.task import Example
    from replaylens.tasks.texts import GivenTexts
    from replaylens.weights.opening import Guess


_LOG = logging.getLogger(__name__)


@hides(
    *("cancel", "forest", "guesses", "handle", "lenses", "lock", "loop", "open_stream", "placed", "plain"),
    *("planted", "prefix"),
    *("require_positions", "runner", "serve", "token_ids_of", "tokenized", "tree", "variants"),
)
class Engine(NotCopyable):
    """A model, its KV cache and its tree of branches. `Engine.load` makes one of any source; the constructor takes a decoder.

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

    >>> engine = Engine.load("coin-plain")
    >>> branch = engine.prompt("A coin's state is heads. Alice flips. What's the state? A:", sites="S")
    >>> branch.generate(2, drafter="lens").text[-9:]
    'A: tails.'
    >>> branch.length, branch.activations["blocks.2.hook_in"].shape  # one row per token; the last one is still pending
    (17, torch.Size([16, 128]))
    """

    plain = True
    """whether the model is a decoder alone, so that its logits are a sum over its layers and gradients flow through it"""
    _kept: tuple[transformer_lens.FwdHook, ...] = ()
    """the hooks of `add_hook`"""
    _instead = "Load another engine from the same source. It commits the same bits."
    ranks: Any = None
    """the processes that compute with this one, a `Ranks`; None: none"""

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
        require_device(model)
        self.config, on_cuda = model.config, model.device.type == "cuda"
        page_size = usual_page(model) if page_size is None else as_int("page_size", page_size, 1)
        given_rows = None if max_rows is None else as_int("max_rows", max_rows, 16)
        max_rows = given_rows or (CUDA_ROWS if on_cuda else CPU_ROWS)
        canary, record = as_bool("canary", canary), as_bool("record", record)
        capture_buffer = as_int("capture_buffer", capture_buffer, SMALLEST_RING)
        if draft_model is not None:
            require_device(as_instance("draft_model", draft_model, Decoder, "a Decoder; Engine.load takes other sources"))
        sizes = Sizes.of(model, cache_tokens, page_size, state_tokens, given_rows, draft_model)
        self.cache_tokens, state_tokens, self._why_so_many, lone_rows, self._memory = sizes
        if self._memory:
            _LOG.info(self._memory)
        lone_rows = lone_rows if self.config.mixer is None else min(lone_rows, state_tokens // 2)
        self.text = tokenizer if isinstance(tokenizer, Text) else Text(tokenizer)
        self.certificate = certificate_for(model)
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
        self.forest = Forest(self.runner, self.tree, self.prefix, self.loop, self.lock, self._new_trace() if record else None)
        if not model.usual:
            self._require_known_sites()

    def _require_known_sites(self) -> None:
        """UnsupportedModel if the model passes a site that the table lacks, which nobody could ask for."""
        passed = _Passed()
        self.runner.whole([0], (), passed)  # type: ignore[arg-type]
        if unknown := [site for site in passed.sites if site not in self.sites.sites]:
            raise UnsupportedModel(
                f"This model's wiring passes the site {unknown[0]}, which the table of sites does not have. Tap one that it "
                "has (list(engine.sites) of a plain model), or none."
            )

    @classmethod
    @named_options
    def load(
        cls,
        source: Any,
        *,
        device: str = "cpu",
        devices: Sequence[str] | None = None,
        ranks: int = 1,
        rank_timeout: float = 60.0,
        dtype: str | torch.dtype | None = None,
        tokenizer: Any = None,
        adapter: str | Path | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        draft_model: Any = None,
        guess: Guess = "empty",
        check: bool | None = None,
        **options: Unpack[EngineKeywords],
    ) -> Engine:
        """Load a name (embedded, smollm2, or of the Hugging Face hub: gpt2, org/name, org/name@revision), a folder, a .gguf
        file, a transformers or peft model, a TransformerBridge or a Decoder. A path of that name comes before the hub.

        device       "cpu" or "cuda"
        dtype        the arithmetic: "float32", whose bits are the same on every machine, "bfloat16" or "float16", or a
                     torch.dtype. A CPU computes in float32 only; the default of a GPU is bfloat16
        devices      instead of `device`: several, such as ["cuda:0", "cuda:1"], to divide the layers over, weights and KV, in
                     proportion to their free memory. Changes no bit. Embedding, head and captured rows are on the first
        ranks        processes that divide the products among them, each with a part of the weights; this one is rank 0 and
                     starts the others, unless torchrun did: there they serve within `load` and end with it. Changes no bit
        rank_timeout seconds to wait for an answer of a rank; then RankFailed
        tokenizer    replaces the source's own
        adapter      a LoRA adapter in peft's format, a folder or a name on the hub, merged into the weights of a folder, a
                     .gguf file or a name. The fingerprint names it. An adapter's own folder loads by itself if its config
                     names the base
        revision, token, cache_dir, local_files_only
                     of a name on the hub: as in huggingface_hub, whose environment variables count (HF_TOKEN, HF_HOME,
                     HF_HUB_OFFLINE). The fingerprint names the commit
        draft_model  a smaller model with the same tokenizer, for the `model` drafter; any source that `load` takes
        guess        for Thinking-States models: how a prompt's thoughts are guessed ahead (see `ThinkingEngine`)
        check        compare with transformers on a few tokens, layer by layer; ModelMismatch if they differ. None: check only
                     models in memory, whose weights do not determine all that they compute

        The other parameters are those of `Engine` itself.
        """
        from replaylens.weights.opening import open_engine
        from replaylens.weights.source import HubOptions

        hub = HubOptions(revision, token, cache_dir, local_files_only)
        how = (device, devices, dtype, tokenizer, adapter, hub, draft_model, guess, check, ranks, rank_timeout)

        def make(kind: type | None, *given: Any, **more: Any) -> Engine:
            return cls(*given, **more, **options) if kind is None else kind(*given, **more, **options)

        engine: Engine = open_engine(make, source, *how)
        return engine

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """What the bits of a result depend on, besides path and edits. Weights are hashed when it is first asked for, which
        takes seconds of gigabytes; BadWeights if they are no longer those that results were computed with."""
        self.runner.weights.require_unchanged()
        return self._fingerprint()

    def _fingerprint(self) -> Fingerprint:
        return take(self.model)

    def _new_trace(self) -> Trace:
        from replaylens.engine.proof.trace import Trace

        return Trace(self.fingerprint)

    def __repr__(self) -> str:
        c, pool = self.config, self.runner.pool
        cache = f"{pool.num_pages - pool.num_free} of {pool.num_pages} KV pages in use{self._cache_words()}"
        return f"{type(self).__name__}({c.num_layers} layers, d_model {c.d_model}, {self.model.device}, {cache})"

    def _cache_words(self) -> str:
        """Why the cache has its size, if that was chosen, and what branches gave up when it was full."""
        lost = self.loop.admission.reservations.given_up
        chosen = f"; cache_tokens={self.cache_tokens} was chosen: {self._why_so_many}" if self._why_so_many else ""
        full = f"; full: branches gave up the KV of {lost} positions, to be computed again. A larger cache_tokens avoids it"
        return chosen + f"; {self._memory}" * bool(self._memory) + full * bool(lost)

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

    tokens_of = verbs.tokens_of
    token_ids_of = verbs.token_ids_of
    tokenized = verbs.tokenized
    placed = verbs.placed
    require_positions = verbs.require_positions
    capture_spec = verbs.capture_spec
    prompts = verbs.prompts
    prompt = verbs.prompt
    planted = verbs.planted
    activations = verbs.activations
    logits = verbs.logits
    logits_under = verbs.logits_under
    variants = verbs.variants
    generate = verbs.generate
    serve = verbs.serve
    stream = verbs.stream
    open_stream = verbs.open_stream
    force_all = verbs.force_all
    cancel = verbs.cancel
    _target = verbs.target_id
    _check_tokens = verbs.check_tokens
    _own = own_branch
    _job = verbs.job_of

    def handle(self, lane: Lane) -> Branch:
        """The user's handle on a lane."""
        return Branch(self, lane)

    def watch(self, probes: Probe | Mapping[str, Probe]) -> Watch:
        """Fitted linear probes that read every token while it is generated: scores as a stream, as stop conditions, and as
        conditions of edits.

        probes  one, which is named by its label, or a dict from names to probes
        """
        from replaylens.engine.serving.watch import Watch

        return Watch(self, probes)

    def check_integrity(self) -> list[str]:
        """Recount pages, tree, prefixes and rows. Returns lines with the counts; IntegrityError names the first fault."""
        return self.forest.check_integrity()

    def guesses(self) -> dict[str, Any]:
        """Guesses besides drafts, such as guessed thoughts. Rejected branches depend on them."""
        return {}

    def _site_table(self) -> sites.SiteTable:
        return sites.table(self.config)

    def _fitted(self, spec: CaptureSpec) -> CaptureSpec:
        """What this kind of model keeps of a checked spec; BadRequest for what it cannot keep."""
        return spec

    # ---- replay -------------------------------------------------------------------------------------------------

    @named_options
    def replay(
        self,
        examples: Iterable[Example] | Any,
        *,
        text: str | None = None,
        labels: NamedLabels = None,
        sites: str | Sequence[str] | None = None,
        drafter: str = "self",
        window: int | None = None,
        seed: int = 0,
        sampling: Sampling | None = None,
        edits: Sequence[Edit] = (),
        max_new: int | None = None,
        rejected: bool = True,
        deterministic: bool = True,
        batch: int = 32,
        progress: bool = False,
    ) -> Run:
        """Prompt with each example, generate its answer and capture every row of the path.

        examples       examples of a task; or texts of your own, as in `texts`
        text, labels   of texts: as in `texts`
        sites          what to capture: "STCZ", or site names
        drafter, window
                       as in `generate`
        seed           each example samples with the sum of this seed, the sampling's own and the example's index. For
                       independent runs, choose seeds further apart than the indices
        edits          interventions on every example; negative positions count from the end of its prompt
        max_new        maximal number of tokens to generate; default: a little more than the right completion has, and none
                       after texts of your own
        rejected       keep the rows of rejected drafts
        deterministic  False: take the fast path's tokens; the run is then not certified and cannot be saved
        batch          number of examples served together; changes no bit
        """
        from replaylens.replay.replayer import ReplayOptions, replay_examples
        from replaylens.replay.run import Run
        from replaylens.replay.texts import examples_of

        sampling = as_instance("sampling", Sampling() if sampling is None else sampling, Sampling, SAMPLING)
        sampling = replace(sampling, seed=sampling.seed + as_int("seed", seed))
        options = ReplayOptions(sites, drafter, window, sampling, edits, max_new, rejected, deterministic)
        if options.max_new is not None:
            self.require_positions("max_new", options.max_new)
        return Run(self, replay_examples(self, examples_of(self, examples, text, labels), options, batch, progress), options)

    def texts(self, given: Any, *, text: str | None = None, labels: NamedLabels = None) -> GivenTexts:
        """Texts of your own as a task, to replay and dump like any other. `replay` makes it by itself.

        given   a list of strings, token lists, chats (lists of {"role", "content"}, by the tokenizer's template) or branches;
                or a table: a pandas DataFrame, the path of a JSONL file, a Hugging Face dataset, a mapping of columns; or
                the Rollouts of `branch.resample`, whose labels are outcome, fork, rollout and place; or a list of those, of
                several chains, with the number of the chain as the label chain
        text    of a table: the column of the texts
        labels  of a table: the columns of the labels; of a list: a dict from label to values, one for each text. A value
                belongs to the text, or is a list with one value per token, or a list of spans {"start", "end", "value"}
                in characters

        A branch becomes its path, with its edits. BadTexts names the text, label or line that cannot be used.

        >>> engine = Engine.load("coin-plain")
        >>> run = engine.replay(["A coin's state is heads.", "A coin's state is tails."], labels={"up": [1, 0]}, sites="S")
        >>> run[1].tokens == engine.tokens_of("A coin's state is tails."), run[1].example.maker
        (True, GivenTexts(2 texts, labels up))
        """
        from replaylens.replay.texts import texts_of

        return texts_of(self, given, text, labels)

    def replay_trace(self, trace: Trace, *, sites: str | Sequence[str] | None = None) -> dict[int, Branch]:
        """Replay a recorded trace. Returns its branches by their recorded ids; see `replayer.replay_trace`.

        sites  capture these instead of the recorded sites
        """
        from replaylens.engine.proof.trace import Trace
        from replaylens.replay.replayer import replay_trace

        return replay_trace(self, as_instance("trace", trace, Trace, "a Trace, such as engine.trace"), sites)

    # ---- TransformerLens ----------------------------------------------------------------------------------------

    __call__ = transformer_lens.logits_or_loss
    run_with_cache = transformer_lens.run_with_cache
    run_with_hooks = transformer_lens.run_with_hooks
    hooks = transformer_lens.hooks
    add_hook = transformer_lens.add_hook
    reset_hooks = transformer_lens.reset_hooks
    to_tokens = transformer_lens.to_tokens
    to_string = transformer_lens.decoded
    to_str_tokens = transformer_lens.to_str_tokens
    to_single_token = transformer_lens.to_single_token

    @property
    def cfg(self) -> SimpleNamespace:
        """The sizes of the model by TransformerLens' names: n_layers, n_heads, d_model, d_vocab, ... `config` has all."""
        return transformer_lens.tl_config(self.config)

    @property
    def W_U(self) -> Tensor:
        """The unembedding [d_model, vocab], on the CPU. Norms are not folded into it."""
        return self.model.unembedding.detach().t().cpu()

    @property
    def W_E(self) -> Tensor:
        """The embedding [vocab, d_model], on the CPU."""
        return self.model.embed.detach().cpu()

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer; None if it has none."""
        return self.text.tokenizer


Core = Engine
"""its old name, until the next version"""


class _Passed:
    """A tap that wants nothing, and keeps the names that it is asked for."""

    values: Mapping[str, Any] = {}

    def __init__(self) -> None:
        self.sites: dict[str, None] = {}

    def wants(self, site: str) -> bool:
        self.sites[site] = None
        return False
