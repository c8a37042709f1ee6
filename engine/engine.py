"""`Engine`: the public object. Loads a model and replays examples, texts and traces on it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_instance, as_int, named_options
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import EngineKeywords
from replaylens.engine.serving.request import SAMPLING
from replaylens.engine.transformer_lens import TransformerLensVerbs

if TYPE_CHECKING:
    from replaylens.replay.run import Run
    from replaylens.replay.texts import NamedLabels
    from replaylens.tasks.task import Example
    from replaylens.tasks.texts import GivenTexts
    from replaylens.weights.opening import Guess


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

    ranks: Any = None
    """the processes that compute with this one, a `Ranks`; None: none"""

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

        The other parameters are those of `Core`.
        """
        from replaylens.weights.hub import HubOptions
        from replaylens.weights.opening import open_engine

        hub = HubOptions(revision, token, cache_dir, local_files_only)
        how = (device, devices, dtype, tokenizer, adapter, hub, draft_model, guess, check, ranks, rank_timeout)

        def make(kind: type | None, *given: Any, **more: Any) -> Engine:
            return cls(*given, **more, **options) if kind is None else kind(*given, **more, **options)

        engine: Engine = open_engine(make, source, *how)
        return engine

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
        from replaylens.replay.replayer import replay_trace

        return replay_trace(self, trace, sites)
