"""`ReplayLM`: an engine as a model of lm-eval (EleutherAI's evaluation harness), by the name "replaylens".

python -m replaylens.extras.bridges.lm_eval_model run --model replaylens --model_args pretrained=smollm2 --tasks hellaswag

lm-eval has no entry points for models, so the name exists once this module is imported; as a program, it is lm-eval's command
line with that name. Scores do not depend on the batch: `batch_size` is a matter of speed and memory alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from replaylens import __version__
from replaylens.engine.errors import BadRequest, MissingPackage
from replaylens.engine.records import SCHEME
from replaylens.engine.request.values import as_int
from replaylens.extras.bridges.options import count_of, edits_of, engine_of, sampling_of, scores

try:
    from lm_eval import utils
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import handle_stop_sequences, has_bos_prefix, normalize_gen_kwargs, postprocess_generated_text
    from tqdm import tqdm
except ImportError as error:
    raise MissingPackage(
        f"The model for lm-eval needs lm-eval. Install it with: pip install 'replaylens[eval]' ({error})"
    ) from None

_GREEDY = {"do_sample": (True, False), "num_beams": (1,), "use_cache": (True,), "early_stopping": (False,)}
"""options of transformers' `generate` with the values that change nothing here; whether to sample is the temperature's"""


@register_model("replaylens")
class ReplayLM(TemplateLM):
    """Log-likelihoods and generation, as lm-eval's own `hf` model computes them on transformers.

    pretrained    what `Engine.load` takes: a name, a folder, a model; or an Engine
    batch_size    requests that are computed together; changes no bit
    max_length    longest path; what is longer loses tokens from the left. Default: the model's
    max_gen_toks  tokens to generate where a task does not say
    seed          of sampling; the i-th request of a call draws with seed + i
    edits         steering: a list of Edits, or the path of a JSON file of them; on every request, and negative positions
                  count from the end of its path

    The other options are those of `Engine.load`.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        batch_size: int | str = 32,
        max_batch_size: int | None = None,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        seed: int = 0,
        edits: Any = (),
        **options: Any,
    ) -> None:
        super().__init__()
        self.engine = engine_of(pretrained, options)
        text = self.engine.text
        if text.eos_id is None:
            raise BadRequest("lm-eval needs a tokenizer with an end-of-sequence token. Load the model with tokenizer=...")
        self.tokenizer = None if text.foreign_end is None else text.tokenizer
        asked = 32 if str(batch_size).startswith("auto") else count_of("batch_size", batch_size)
        self.batch_size = as_int("batch_size", min(asked, max_batch_size or asked), 1)
        most = self.engine.config.max_positions
        self.max_length = most if max_length is None else as_int("max_length", max_length, 1, most)
        self.max_gen_toks, self.seed = as_int("max_gen_toks", max_gen_toks, 1), as_int("seed", seed, 0)
        self.edits = edits_of(edits)

    # ---- text ---------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int:
        """The end-of-sequence token."""
        return int(self.engine.text.eos_id or 0)  # never None: see __init__

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        bos = self.engine.text.bos_id
        return self.eot_token_id if bos is None else bos

    @property
    def tokenizer_name(self) -> str:
        """What lm-eval's cache of requests is keyed by."""
        name = getattr(self.engine.text.tokenizer, "name_or_path", "") or type(self.engine.text.tokenizer).__name__
        return str(name).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; without a second beginning-of-sequence token where the text has one."""
        text = self.engine.text
        if add_special_tokens is None:
            add_special_tokens = not has_bos_prefix(string, text.token(self.prefix_token_id))
        return text.encode(string, special=add_special_tokens)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The chat as the tokenizer's template writes it; BadTexts if it has none."""
        return self.engine.text.written(chat_history)

    def get_model_info(self) -> dict[str, Any]:
        """What the results' config says about the model: enough to get the same scores again."""
        steering = json.dumps([edit.to_json() for edit in self.edits], sort_keys=True)
        return {
            "replaylens_version": __version__,
            "model_fingerprint": self.engine.fingerprint.digest,
            "model_dtype": str(self.engine.model.dtype),
            "edits": SCHEME + hashlib.sha256(steering.encode()).hexdigest() if self.edits else None,
        }

    # ---- requests -----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding gives it) of each continuation after its context."""
        last, found = self.engine.sites.per_layer("S")[-1], []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests") as bar:
            for batch in _batches(requests, self.batch_size):
                paths = [(context + wanted)[-(self.max_length + 1) :][:-1] for _, context, wanted in batch]
                if not all(wanted for *_, wanted in batch):
                    raise BadRequest("A continuation is empty, so that it has no likelihood. Give it at least one token.")
                if any(len(wanted) > len(path) for path, (_, _, wanted) in zip(paths, batch, strict=True)):
                    raise BadRequest(f"A continuation has more than {self.max_length} tokens, or no context. Shorten it.")
                branches = self.engine.prompts(paths, sites=[last], edits=self.edits)
                for branch, (asked, _, wanted) in zip(branches, batch, strict=True):
                    read = scores(self.engine, branch.activations[last][-len(wanted) :], wanted)
                    answer = float(read.logprobs.sum()), bool(read.greedy.all())
                    found.append(answer)
                    if asked is not None:
                        self.cache_hook.add_partial("loglikelihood", asked, answer)
                    branch.release()
                bar.update(len(batch))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """The log-likelihood of each whole text, in windows of `max_length` tokens that predict each token once."""
        windows, owners = [], []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            rolling = utils.get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, context_len=1)
            for context, wanted in map(utils.make_disjoint_window, rolling):
                windows.append((None, context, wanted))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first stop string. Greedy, unless the task samples."""
        found: list[str] = []
        with tqdm(total=len(requests), disable=disable_tqdm, desc="Running generate_until requests") as bar:
            for batch in _batches(requests, self.batch_size):
                found += self._generated(batch, len(found))
                bar.update(len(batch))
        return found

    def _generated(self, batch: Sequence[Any], first: int) -> list[str]:
        eos = self.engine.text.token(self.eot_token_id)
        by_length: dict[int, list[tuple[int, Any, Any, list[str]]]] = {}
        for number, request in enumerate(batch):
            context, given = request.args
            named = normalize_gen_kwargs(given, self.max_gen_toks)
            stop = handle_stop_sequences(named.pop("until", None), eos=None)
            length, ids = named.pop("max_gen_toks"), self.tok_encode(context)
            if length >= self.max_length:
                raise BadRequest(f"max_gen_toks={length} leaves no room for a context within {self.max_length} tokens.")
            for name, values in _GREEDY.items():
                if named.pop(name, values[0]) not in values:
                    raise BadRequest(f"Unsupported option of generation: {name}={given[name]}. Leave it out.")
            sampling = sampling_of(named, self.seed + first + number, [each for each in stop if each])
            by_length.setdefault(length, []).append((number, ids[-(self.max_length - length) :], sampling, stop))
        texts = [""] * len(batch)
        for length, jobs in by_length.items():
            branches = self.engine.prompts([ids for _, ids, *_ in jobs], edits=self.edits)
            self.engine.generate(branches, length, sampling=[sampling for *_, sampling, _ in jobs])
            for branch, (number, _, _, stop) in zip(branches, jobs, strict=True):
                texts[number] = postprocess_generated_text(self._words(branch.generated), [*stop, eos], None)
                self.cache_hook.add_partial("generate_until", batch[number].args, texts[number])
                branch.release()
        return texts

    def _words(self, ids: list[int]) -> str:
        """Text without special tokens, as transformers decodes an answer."""
        if self.tokenizer is None:
            return self.engine.text.decode([each for each in ids if each != self.eot_token_id])
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


def _batches(requests: Sequence[Any], size: int) -> Iterator[Sequence[Any]]:
    return (requests[start : start + size] for start in range(0, len(requests), size))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
