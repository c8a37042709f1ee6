"""`ReplayAPI`: an engine as a model provider of Inspect (UK AISI's inspect_ai), by names such as "replaylens/smollm2".

inspect eval task.py --model replaylens/smollm2 -M sites=S -M activations=rows -M edits=edits.json --logprobs

Inspect finds it by its entry point. Requests that run at the same time are computed together, and each gets the tokens that it
would get alone. The log holds, per answer, all that reproduces it: the model's fingerprint, the seed, and the digests of edits
and activations.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replaylens import __version__
from replaylens.bridges.options import digest_of, edits_of, engine_of, sampling_of, scores
from replaylens.engine.errors import BadRequest, MissingPackage
from replaylens.engine.records import SCHEME
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.values import as_bool, as_int
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.forest import Completer

try:
    import anyio.to_thread
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        GenerateConfig,
        Logprob,
        Logprobs,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        TopLogprob,
        modelapi,
    )
    from inspect_ai.tool import ToolChoice, ToolInfo
except ImportError as error:
    raise MissingPackage(
        f"The provider for Inspect needs inspect-ai. Install it with: pip install 'replaylens[eval]' ({error})"
    ) from None

MAX_TOKENS = 2048
"""of an answer where the evaluation does not say, as in Inspect's own local providers"""
_REFUSED = ("best_of", "frequency_penalty", "response_schema", "modalities")
"""options that would change the answer and are not supported"""


@modelapi(name="replaylens")
class ReplayAPI(ModelAPI):
    """Chats, answered by an engine. Greedy unless the evaluation sets a temperature.

    model_name   what `Engine.load` takes, such as smollm2 or org/name; `engine` is an Engine to use instead
    chat         False: the texts of the messages, without a chat template, for models that were not trained on chats
    sites        what to capture of the answer: "STC", or site names. The log names it by its digest
    positions    which rows of it, as in `Engine.prompts`
    activations  a folder: captured rows are written there, as <digest>.safetensors
    edits        steering: a list of Edits, or the path of a JSON file of them; one request's own are
                 GenerateConfig(extra_body={"edits": [edit.to_json(), ...]})

    The other model arguments are those of `Engine.load`. Answers that are sampled draw with config.seed (0 if it is not set)
    plus the number of earlier answers to the same prompt, so that epochs differ; the log says with which seed.
    """

    def __init__(
        self,
        model_name: str,
        base_url: str | None = None,
        api_key: str | None = None,
        config: GenerateConfig = GenerateConfig(),  # noqa: B008 (a constant of Inspect's interface)
        *,
        engine: Any = None,
        chat: bool = True,
        sites: str | Sequence[str] | None = None,
        positions: str = "response",
        activations: str | Path | None = None,
        edits: Any = (),
        **options: Any,
    ) -> None:
        super().__init__(model_name, base_url, api_key, [], config)
        self.engine = engine_of(model_name if engine is None else engine, options)
        self.chat = as_bool("chat", chat)
        self.capture: dict[str, Any] = {} if sites is None else {"sites": sites, "positions": positions}
        if sites is not None:
            self.engine.capture_spec(sites, positions=positions)  # an unknown name is an error now, not in every sample
        elif activations is not None:
            raise BadRequest("activations names a folder for captured rows, but nothing is captured. Give sites, too.")
        self.folder = None if activations is None else Path(activations)
        self.edits = edits_of(edits)
        self._asked: Counter[bytes] = Counter()
        self._counting = threading.Lock()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """One answer, or config.num_choices of them."""
        if tools:
            raise BadRequest("replaylens has no tool calls: templates differ between models. Use a solver without tools.")
        if refused := [name for name in _REFUSED if getattr(config, name) is not None]:
            raise BadRequest(f"replaylens does not support {', '.join(refused)}. Leave it out.")
        return await anyio.to_thread.run_sync(self._answer, input, config)

    def max_tokens(self) -> int | None:
        """Of an answer, by default."""
        return MAX_TOKENS

    def max_connections(self) -> int:
        """Requests at a time: the batch."""
        return 32

    def collapse_user_messages(self) -> bool:
        """Templates want users and assistants to take turns."""
        return True

    # ---- one request --------------------------------------------------------------------------------------------

    def _answer(self, messages: list[ChatMessage], config: GenerateConfig) -> ModelOutput:
        """Runs in a thread of its own: the engine computes the requests of all threads together."""
        edits, count = self._edits(config), as_int("num_choices", config.num_choices or 1, 1)
        ids = self.engine.tokens_of(self._prompt(messages))
        first = self._first_seed(ids, edits, config, count)
        room = self.engine.config.max_positions - len(ids)
        length = min(config.max_tokens or MAX_TOKENS, room)
        options = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "presence_penalty", "logit_bias")}
        samplings = [sampling_of(options, first + number, config.stop_seqs or ()) for number in range(count)]
        held = [self.engine.prompt(ids, edits=edits, **self.capture)]
        try:
            held += (branches := held[0].fork(count))
            if length > 0:
                self.engine.generate(branches, length, sampling=samplings)
            choices = [self._choice(branch, config, length == room) for branch in branches]
            told = [
                {"seed": sampling.seed, "certified": branch.certified} | self._kept(branch)
                for branch, sampling in zip(branches, samplings, strict=True)
            ]
            written = sum(len(branch.generated) for branch in branches)
        finally:
            for branch in held:
                branch.release()
        made_by = {"version": __version__, "fingerprint": self.engine.fingerprint.digest, "choices": told}
        if edits:
            plain = json.dumps([edit.to_json() for edit in edits], sort_keys=True)
            made_by["edits"] = SCHEME + hashlib.sha256(plain.encode()).hexdigest()
        usage = ModelUsage(input_tokens=len(ids), output_tokens=written, total_tokens=len(ids) + written)
        return ModelOutput(model=self.model_name, choices=choices, usage=usage, metadata={"replaylens": made_by})

    def _prompt(self, messages: list[ChatMessage]) -> Any:
        """The chat, or the texts of its messages."""
        if not self.chat:
            return "\n".join(message.text for message in messages)
        return [{"role": message.role, "content": message.text} for message in messages]

    def _edits(self, config: GenerateConfig) -> list[Edit]:
        own = config.extra_body or {}
        if unknown := own.keys() - {"edits"}:
            raise BadRequest(f"Unknown key of extra_body: {', '.join(sorted(unknown))}. replaylens reads edits.")
        return [*self.edits, *edits_of(own.get("edits", ()))]

    def _first_seed(self, ids: list[int], edits: list[Edit], config: GenerateConfig, count: int) -> int:
        """Mutates: counts the answers to a prompt. As many as there are have the same seeds in every run, in any order."""
        seed = config.seed or 0
        if not config.temperature:
            return seed
        key = hashlib.sha256(json.dumps([ids, seed, [edit.to_json() for edit in edits]]).encode()).digest()
        with self._counting:
            self._asked[key] += count
            return seed + self._asked[key] - count

    def _choice(self, branch: Branch, config: GenerateConfig, no_room: bool) -> ChatCompletionChoice:
        text = branch.generated_text
        for stop in config.stop_seqs or ():
            text = text.split(stop)[0]
        ended = "stop" if branch.finish_reason else "model_length" if no_room else "max_tokens"
        top = config.top_logprobs or 0
        said = self._logprobs(branch, branch.root_length, branch.length, top) if config.logprobs else None
        given = config.prompt_logprobs
        read = None if given is None else self._logprobs(branch, 1, branch.root_length, given)
        message = ChatMessageAssistant(content=text, model=self.model_name, source="generate")
        return ChatCompletionChoice(message=message, stop_reason=ended, logprobs=said, prompt_logprobs=read)

    def _logprobs(self, branch: Branch, start: int, stop: int, top: int) -> Logprobs:
        """Of the tokens at [start, stop), from the model's own distribution, whatever the temperature."""
        if start >= stop:
            return Logprobs(content=[])
        engine, wanted = self.engine, branch.tokens[start:stop]
        (rows,) = Completer(engine.forest).final_rows([branch.lane], [start - 1], engine.sites.per_layer("S")[-1])
        read = scores(engine, rows[: len(wanted)], wanted, top)
        words = engine.text.token
        return Logprobs(
            content=[
                Logprob(
                    token=words(token),
                    logprob=logprob,
                    bytes=list(words(token).encode()),
                    top_logprobs=[TopLogprob(token=words(i), logprob=p) for i, p in zip(ids, values, strict=True)] or None,
                )
                for token, logprob, ids, values in zip(
                    wanted, read.logprobs.tolist(), read.top_ids.tolist(), read.top_logprobs.tolist(), strict=True
                )
            ]
        )

    def _kept(self, branch: Branch) -> dict[str, Any]:
        """What the log says about captured rows; writes them, if there is a folder."""
        if not self.capture:
            return {}
        held = branch.activations
        rows, positions = held.copied(), held.positions()
        tokens = [branch.tokens[position] for position in positions]
        digest = digest_of(rows, positions, tokens)
        told = {"digest": digest, "rows": len(positions), "sites": {name: list(rows[name].shape) for name in sorted(rows)}}
        if self.folder is not None:
            import torch
            from safetensors.torch import save_file

            self.folder.mkdir(parents=True, exist_ok=True)
            file = self.folder / f"{digest.removeprefix(SCHEME)}.safetensors"
            where = {"position": torch.tensor(positions), "token": torch.tensor(tokens)}
            save_file({name: x.contiguous() for name, x in (rows | where).items()}, file)
            told["file"] = str(file)
        return {"activations": told}
