"""`Engine`: the public object. Loads a model and replays examples, texts and traces on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from replaylens.engine import zoo
from replaylens.engine.errors import BadRequest, BadTexts, FetchFailed, FingerprintMismatch, UnsupportedModel, nearest, no_such
from replaylens.engine.model import loading
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.hub import PACKAGED, HubOptions, fetched_folder, is_hub_name
from replaylens.engine.model.layers import freeze
from replaylens.engine.model.text import Text, load_text
from replaylens.engine.passes.ranks import OTHERS, TIMEOUT, Ranks, follow, require_divisible
from replaylens.engine.passes.wire import launched
from replaylens.engine.proof.doctor import examine_ranks, require
from replaylens.engine.proof.trace import Trace
from replaylens.engine.records import DTYPES
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import (
    as_bool,
    as_float,
    as_instance,
    as_int,
    as_list,
    as_processes,
    named_options,
    short_repr,
)
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import EngineKeywords
from replaylens.engine.serving.request import SAMPLING
from replaylens.engine.transformer_lens import TransformerLensVerbs
from replaylens.tasks.tokenizer import WordTokenizer

if TYPE_CHECKING:
    from replaylens.engine.replay.run import Run
    from replaylens.engine.replay.texts import NamedLabels
    from replaylens.engine.thinking.model import ThinkingDecoder
    from replaylens.engine.thinking.prefill import Guess
    from replaylens.tasks.task import Example
    from replaylens.tasks.texts import GivenTexts


class Engine(TransformerLensVerbs):
    """A model, its KV cache and its tree of branches.

    Make one with `Engine.load`; the parameters of the constructor are those of `Core`.

    >>> engine = Engine.load("coin-plain")
    >>> branch = engine.prompt("A coin's state is heads. Alice flips. What's the state? A:", sites="S")
    >>> branch.generate(2, drafter="lens").text[-9:]
    'A: tails.'
    >>> branch.length, branch.activations["blocks.2.hook_in"].shape  # one row per token; the last one is still pending
    (17, torch.Size([16, 128]))
    """

    ranks: Ranks | None = None
    """the processes that compute with this one; None: none"""

    @classmethod
    @named_options
    def load(
        cls,
        source: Any,
        *,
        device: str = "cpu",
        devices: Sequence[str] | None = None,
        ranks: int = 1,
        rank_timeout: float = TIMEOUT,
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

        The other parameters are those of `Core`.
        """
        where: loading.Where = device
        if devices is not None:
            named = placed_devices(devices, device)
            device = "cuda" if named[0] != "cpu" else "cpu"
            where = named if len(named) > 1 else device
            dtype = torch.float32 if dtype is None and "cpu" in where else dtype
        dtype = default_dtype(device, dtype)
        _require_float32(dtype, where)
        ranks = as_int("ranks", ranks, 1) if launched() else as_processes("ranks", ranks)
        if ranks > 1:
            if not isinstance(where, str):
                raise BadRequest(f"Both devices={list(where)} and ranks={ranks} were given. Give one of them.")
            if isinstance(source, Decoder):  # others are checked once they are read
                require_divisible(source.config)
            if (place := launched(ranks)) is not None and place[0]:
                follow(device)
        if draft_model is None and isinstance(source, str) and source == "coin-plain":
            draft_model = "coin-draft"
        hub = HubOptions(revision, token, cache_dir, local_files_only)
        beside = replace(hub, revision=None)  # the draft model may be on the hub, too
        draft = None
        if draft_model is not None:
            draft = _owned(load_model(draft_model, dtype, False, device, hub=beside, packed=True, with_text=False)[0])
        check = None if check is None else as_bool("check", check)
        source = _located(source, adapter, hub)
        if (found := _thinking_model(source)) is not None:
            loading.require_unchecked(bool(check), "a Thinking-States model")
            _require_one_place(where, "a Thinking-States model", ranks)
            on_disk = isinstance(source, loading.LocatedModel)
            _require_no_adapter(source.adapter if on_disk else adapter, "a Thinking-States model")
            if not on_disk:
                hub.require_unused(source)
            thinker, text = found
            from replaylens.engine.thinking.core import ThinkingEngine

            thinker = loading.in_dtype(thinker, dtype).to(device)
            freeze(thinker)
            return ThinkingEngine(thinker, text if tokenizer is None else tokenizer, guess=guess, draft_model=draft, **options)
        if not isinstance(guess, str) or guess != "empty":  # an array answers != with an array
            _require_guess(guess)
        check = loading.is_live(source) if check is None else check
        if ranks == 1:
            model, text = load_model(source, dtype, check, where, adapter, hub, packed=True, with_text=tokenizer is None)
            return cls(_owned(model), text if tokenizer is None else tokenizer, draft_model=draft, **options)
        group = Ranks(ranks, device, dtype, as_float("rank_timeout", rank_timeout))
        with group.closed_by_errors():
            read = partial(load_model, source, dtype, device=device, adapter=adapter, hub=hub)
            model, text = read(check=check, packed=group, with_text=tokenizer is None)
            engine = cls(_owned(group.take(model)), text if tokenizer is None else tokenizer, draft_model=draft, **options)
            engine._follow(group, partial(read, check=False, with_text=False))
        return engine

    def _follow(self, group: Ranks, read: Callable[..., tuple[Decoder, Text]]) -> None:
        """Mutates: examines the ranks; from now on they can be restarted. NotCertified if they do not have the bits of one."""
        found = examine_ranks(group)
        self.certificate = require(replace(self.certificate, findings=(*self.certificate.findings, *found)))
        weights, held = self.fingerprint.weights, weakref.ref(self.model)

        def reload(ranks: Ranks) -> None:
            ranks.take(read(packed=ranks)[0])
            if (model := held()) is not None and loading.weights_hash(model) != weights:
                raise FingerprintMismatch(OTHERS)

        group.ready(reload)
        self.ranks = group

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
        from replaylens.engine.replay.replayer import ReplayOptions, replay_examples
        from replaylens.engine.replay.run import Run

        sampling = as_instance("sampling", Sampling() if sampling is None else sampling, Sampling, SAMPLING)
        sampling = replace(sampling, seed=sampling.seed + as_int("seed", seed))
        options = ReplayOptions(sites, drafter, window, sampling, edits, max_new, rejected, deterministic)
        if options.max_new is not None:
            self.require_positions("max_new", options.max_new)
        return Run(self, replay_examples(self, self._examples(examples, text, labels), options, batch, progress), options)

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
        from replaylens.engine.replay.texts import texts_of

        return texts_of(self, given, text, labels)

    def _examples(self, given: Any, text: str | None, labels: NamedLabels) -> list[Example]:
        """Examples as they are; texts as those of their task."""
        from replaylens.engine.replay.texts import is_list
        from replaylens.engine.resampling.rollouts import Rollouts
        from replaylens.tasks.task import Example, Task
        from replaylens.tasks.texts import GivenTexts

        if isinstance(given, GivenTexts):
            given = given.examples()
        elif isinstance(given, Task) or (isinstance(given, type) and issubclass(given, Task)):
            how = "task().examples(100)" if isinstance(given, type) else "task.examples(100)"
            raise BadTexts(f"{short_repr(given)} is a task. Give examples of it: engine.replay({how}).")
        elif text is None and is_list(given) and not isinstance(given, Rollouts):
            given = list(given)  # an iterator can be read only once
        named = labels is not None or text is not None
        if isinstance(given, list) and (any(isinstance(each, Example) for each in given) if given else not named):
            if named:
                raise BadTexts("text= and labels= describe texts, but examples of a task were given. Leave them out.")
            return given
        return self.texts(given, text=text, labels=labels).examples()

    def replay_trace(self, trace: Trace, *, sites: str | Sequence[str] | None = None) -> dict[int, Branch]:
        """Replay a recorded trace. Returns its branches by their recorded ids; see `replayer.replay_trace`.

        sites  capture these instead of the recorded sites
        """
        from replaylens.engine.replay.replayer import replay_trace

        return replay_trace(self, trace, sites)


def default_dtype(device: str, dtype: str | torch.dtype | None = None) -> torch.dtype:
    """The dtype that a device computes in; BadRequest if the device is missing or does not support it."""
    if not isinstance(device, str) or device not in ("cpu", "cuda"):
        raise BadRequest(f"Unknown device {short_repr(device)}. Use 'cpu' or 'cuda'.")
    if device == "cuda" and not torch.cuda.is_available():
        raise BadRequest("No CUDA device found. Use device='cpu'.")
    given = ("float32" if device == "cpu" else "bfloat16") if dtype is None else dtype
    name = str(given).removeprefix("torch.") if isinstance(given, torch.dtype) else given
    if not isinstance(name, str) or name not in DTYPES:
        raise BadRequest(f"Unknown dtype {short_repr(dtype)}. Use one of {', '.join(DTYPES)}.")
    if device == "cpu" and name != "float32":
        raise BadRequest(f"A CPU computes in float32 only, and dtype {name} was given. Use float32, or device='cuda'.")
    found: torch.dtype = getattr(torch, name)
    return found


def placed_devices(given: Any, device: str) -> tuple[str, ...]:
    """`devices` of `Engine.load`, each with its number; BadRequest if one is missing, or `device` names another kind."""
    listed = [given] if isinstance(given, str) else as_list("devices", given, 'a list of devices, such as ["cuda:0", "cuda:1"]')
    known = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    named = tuple("cuda:0" if isinstance(each, str) and each == "cuda" else each for each in listed)
    if not named:
        raise BadRequest(f"devices=[] names none. Give at least one of {', '.join(known)}.")
    if len(known) == 1 and any(isinstance(each, str) and each.startswith("cuda") for each in named):
        raise BadRequest("No CUDA device found. Use devices=['cpu'].")
    if any(each not in known for each in named):
        raise BadRequest(f"Invalid devices={short_repr(given)}. Give a list of {', '.join(known)}.")
    if device != "cpu" and not any(each.startswith(device) for each in named):
        raise BadRequest(f"device={device!r} and devices={list(named)} were given. Give one of them.")
    if named[0] != "cpu" and torch.device(named[0]).index != torch.cuda.current_device():
        advice = f"Call torch.cuda.set_device({named[0]!r}) before."
        raise BadRequest(f"The first of devices={list(named)} is not the current one. {advice}")
    return named


def _require_float32(dtype: torch.dtype, where: loading.Where) -> None:
    if "cpu" in where and dtype != torch.float32:
        raise BadRequest(f"A CPU is among devices={list(where)}, and it does not compute in {dtype}. Use torch.float32.")


def _require_one_place(where: loading.Where, what: str, ranks: int = 1) -> None:
    if not isinstance(where, str) or ranks > 1:
        raise UnsupportedModel(f"Not supported: {what} over {'devices' if ranks == 1 else 'ranks'}. Leave it out.")


def load_model(
    source: Any,
    dtype: torch.dtype,
    check: bool,
    device: loading.Where = "cpu",
    adapter: str | Path | None = None,
    hub: HubOptions = HubOptions(),  # noqa: B008 (frozen)
    packed: bool | loading.Divider = False,
    with_text: bool = True,
) -> tuple[Decoder, Text]:
    """A decoder and its tokenizer, from any source of `Engine.load`; the options as in `loading.load`.

    with_text  whether a file's tokenizer is read, which may take half a minute or be impossible, for somebody who has his own
    """
    if isinstance(source, str) and source in zoo.PLAIN:
        loading.require_unchecked(check, source)
        _require_no_adapter(adapter, source)
        hub.require_unused(source)
        folder = zoo.CHECKPOINTS / source
        words = WordTokenizer.load(folder / zoo.TOKENIZER_FILE)
        return loading.load(folder, dtype, device=device), Text(words)
    found = _located(source, adapter, hub)
    if isinstance(found, loading.LocatedModel):
        places = [place for place in (found.adapter, found.path) if place is not None and with_text]
        text = next((found for found in map(load_text, places) if found.tokenizer is not None), Text(None))
        return loading.load(found.path, dtype, check, device, found.adapter, found.revision, packed), text
    hub.require_unused(source)
    return loading.load(source, dtype, check, device, adapter), Text(getattr(source, "tokenizer", None))


def folder_of(source: str) -> Path:
    """Where a named model is: its folder, or its .gguf file. Fetched from the hub if need be."""
    if source in (*zoo.PLAIN, *zoo.THINKING):
        return zoo.CHECKPOINTS / source
    found: loading.LocatedModel = _located(source, None, HubOptions())
    return found.path


def _located(source: Any, adapter: str | Path | None, hub: HubOptions) -> Any:
    """Where a path, smollm2 or a name on the hub is, as a `LocatedModel`; other sources as they are."""
    if not isinstance(source, str | Path) or source in (*zoo.PLAIN, *zoo.THINKING):
        return source
    if source in PACKAGED:
        hub.require_unused(source)
        source = fetched_folder(str(source))
    if not str(source) or not loading.exists(Path(source)):
        _require_name(source)
    try:
        return loading.located(source, adapter, hub)
    except FetchFailed as error:
        if "/" not in str(source):
            error.args = (f"{error} Models of replaylens: {', '.join(_own_names())}.",)
        raise


def _owned(model: Decoder) -> Decoder:
    """Mutates: the model belongs to an engine. In float32, weights are held as products read them; they cannot be changed."""
    if model.dtype == torch.float32:
        for module, name in model.packable(model.device.type).values():
            module.pack(name)
    freeze(model)
    return model


def _require_name(source: str | Path) -> None:
    """UnsupportedModel for a path that does not exist and is no name on the hub, or is nearly that of an embedded model.

    The hub is not asked for words like those: all its models but a few of its first have an owner in their names.
    """
    known, name = _own_names(), str(source).lower()
    if is_hub_name(source) and not nearest(name, known):
        return
    raise UnsupportedModel(
        f"{str(source) or repr('')} does not exist. Give the path of a folder or a .gguf file, or a name: on the Hugging Face "
        f"hub, such as gpt2 or org/name, or of an embedded model. {no_such('model', name, known)}"
    )


def _own_names() -> tuple[str, ...]:
    return (*zoo.PLAIN, *zoo.THINKING, *PACKAGED)


def _require_guess(guess: Any) -> None:
    from replaylens.engine.thinking.prefill import GUESSES

    if not isinstance(guess, str) or guess not in GUESSES:
        raise BadRequest(
            f"Invalid guess={short_repr(guess)}. Give one of {', '.join(GUESSES)}, for Thinking-States models only."
        )


def _require_no_adapter(adapter: str | Path | None, what: str) -> None:
    if adapter is not None:
        raise BadRequest(f"adapter= goes with the folder of a base model, not with {what}. Leave adapter out.")


def _thinking_model(source: Any) -> tuple[ThinkingDecoder, Text] | None:
    """A Thinking-States model and its tokenizer, from an embedded name, a located folder or a ThinkingDecoder; None for other
    sources."""
    from replaylens.engine.thinking import model as thinking
    from replaylens.engine.thinking.model import ThinkingDecoder

    if isinstance(source, ThinkingDecoder):
        return source, Text(None)
    if isinstance(source, str) and source in zoo.THINKING:
        from replaylens.engine.training.embedded_thinking import load_embedded

        model, tokenizer = load_embedded(source)
        return model, Text(tokenizer)
    if isinstance(source, loading.LocatedModel) and loading.exists(source.path / thinking.CONFIG_FILE):
        return thinking.load(source.path, revision=source.revision), load_text(source.path)
    return None
