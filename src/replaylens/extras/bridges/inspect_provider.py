"""`ReplayAPI`: an engine as a model provider of Inspect (UK AISI's inspect_ai), by names such as "replaylens/smollm2".

inspect eval task.py --model replaylens/smollm2 -M sites=S -M activations=rows -M edits=edits.json --logprobs

Inspect finds it by its entry point. Requests that run at the same time are computed together, and each gets the tokens that it
would get alone. The log holds, per answer, all that reproduces it: the model's fingerprint, the seed, and the digests of edits,
probes and activations.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from replaylens import __version__
from replaylens.engine.errors import BadRequest, MissingPackage
from replaylens.engine.files import write_file
from replaylens.engine.records import SCHEME
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.values import as_bool, as_int
from replaylens.engine.serving.branch import Branch
from replaylens.extras.bridges.options import digest_of, edits_of, engine_of, probes_of, sampling_of, scores

try:
    import anyio.to_thread
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessage,
        ChatMessageAssistant,
        ChatMessageTool,
        GenerateConfig,
        Logprob,
        Logprobs,
        ModelAPI,
        ModelOutput,
        ModelUsage,
        TopLogprob,
        modelapi,
    )
    from inspect_ai.tool import ToolCall, ToolChoice, ToolInfo
except ImportError as error:
    raise MissingPackage(
        f"The provider for Inspect needs inspect-ai. Install it with: pip install 'replaylens[eval]' ({error})"
    ) from None

MAX_TOKENS = 2048
"""of an answer where the evaluation does not say, as in Inspect's own local providers"""
_REFUSED = ("best_of", "frequency_penalty", "response_schema", "modalities")
"""options that would change the answer and are not supported"""


_TOOL = {"name", "description", "parameters"}
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|$)", re.DOTALL)


# ---- tools -----------------------------------------------------------------------------------------------------------


def tool_calls(text: str, answer: str) -> tuple[str, list[ToolCall]]:
    """(the text beside the calls, the calls) of an answer. What cannot be read within <tool_call> is a call with a
    `parse_error`, which Inspect shows to the model.

    answer  names it in the ids of the calls
    """
    raw, rest = _CALL.findall(text), _CALL.sub("", text).strip()
    if not raw:
        try:
            whole = json.loads(text)
        except (ValueError, RecursionError):
            return text, []
        if not isinstance(whole, dict) or not {"name"} < whole.keys() <= {"name", "arguments", "parameters"}:
            return text, []
        raw, rest = [text], ""
    calls = [_call(each, f"{answer}-{number}") for number, each in enumerate(_objects(raw))]
    return rest, calls


def _objects(raw: Sequence[str]) -> list[Any]:
    """What each text holds: JSON values, those of a list one by one, or what is wrong with it as a text."""
    found = list[Any]()
    for each in raw:
        try:
            value = json.loads(each)
        except (ValueError, RecursionError) as error:
            value = f"The call is not JSON: {error}. It is: {each.strip()[:200]}"
        found += value if isinstance(value, list) else [value]
    return found


def _call(given: Any, name: str) -> ToolCall:
    if not isinstance(given, Mapping) or not isinstance(given.get("name"), str):
        wrong = given if isinstance(given, str) else f"A call needs a name and arguments. It is: {json.dumps(given)[:200]}"
        return ToolCall(id=name, function="unknown", arguments={}, parse_error=wrong)
    arguments = given.get("arguments", given.get("parameters", {}))
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    if not isinstance(arguments, dict):
        wrong = f"The arguments are no JSON object: {json.dumps(arguments)[:200]}"
        return ToolCall(id=name, function=given["name"], arguments={}, parse_error=wrong)
    return ToolCall(id=name, function=given["name"], arguments=arguments)


def _written(message: ChatMessage) -> dict[str, Any]:
    """A message as templates that know tools read it."""
    made: dict[str, Any] = {"role": message.role, "content": message.text}
    if isinstance(message, ChatMessageAssistant) and message.tool_calls:
        made["tool_calls"] = [
            {"id": each.id, "type": "function", "function": {"name": each.function, "arguments": each.arguments}}
            for each in message.tool_calls
        ]
    if isinstance(message, ChatMessageTool):
        made |= {"name": message.function, "tool_call_id": message.tool_call_id}
    return made


# ---- provider --------------------------------------------------------------------------------------------------------


@modelapi(name="replaylens")
class ReplayAPI(ModelAPI):
    """Chats, answered by an engine. Greedy unless the evaluation sets a temperature.

    model_name   what `Engine.load` takes, such as smollm2 or org/name; `engine` is an Engine to use instead
    chat         False: the texts of the messages, without a chat template, for models that were not trained on chats
    sites        what to capture of the answer: "STC", or site names. The log names it by its digest
    positions    which rows of it, as in `Engine.prompts`
    activations  a folder: captured rows are written there, as <digest>.safetensors
    probes       fitted probes that read the answer: files that `LinearProbe.save` wrote, or a dict of names to probes. The log
                 has their scores of each token; `Engine.watch` says what they are
    edits        steering: a list of Edits, or the path of a JSON file of them; one request's own are
                 GenerateConfig(extra_body={"edits": [edit.to_json(), ...]})

    Tools are written by the model's chat template, and calls are read from the answer as JSON: within <tool_call>, as Hermes,
    Qwen and SmolLM write them, or as the whole answer, as Llama 3 does.

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
        probes: Any = None,
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
        self.watch = None if probes is None else self.engine.watch(probes_of(probes))
        self.options = self.capture | ({} if self.watch is None else {"watch": self.watch, "positions": positions})
        self.folder = None if activations is None else Path(activations)
        self.edits = edits_of(edits)
        self._asked: Counter[bytes] = Counter()
        self._counting = threading.Lock()

    async def generate(
        self, input: list[ChatMessage], tools: list[ToolInfo], tool_choice: ToolChoice, config: GenerateConfig
    ) -> ModelOutput:
        """One answer, or config.num_choices of them."""
        if tool_choice not in ("auto", "none") and tools:
            raise BadRequest("replaylens cannot force a tool call. Use tool_choice='auto'.")
        if refused := [name for name in _REFUSED if getattr(config, name) is not None]:
            raise BadRequest(f"replaylens does not support {', '.join(refused)}. Leave it out.")
        return await anyio.to_thread.run_sync(self._answer, input, tools if tool_choice != "none" else [], config)

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

    def _answer(self, messages: list[ChatMessage], tools: list[ToolInfo], config: GenerateConfig) -> ModelOutput:
        """Runs in a thread of its own: the engine computes the requests of all threads together."""
        edits, count = self._edits(config), as_int("num_choices", config.num_choices or 1, 1)
        ids = self._prompt(messages, tools)
        first = self._first_seed(ids, edits, config, count)
        room = self.engine.config.max_positions - len(ids)
        length = min(config.max_tokens or MAX_TOKENS, room)
        options = {name: getattr(config, name) for name in ("temperature", "top_p", "top_k", "presence_penalty", "logit_bias")}
        samplings = [sampling_of(options, first + number, config.stop_seqs or ()) for number in range(count)]
        held = [self.engine.prompt(ids, edits=edits, **self.options)]
        try:
            held += (branches := held[0].fork(count))
            if length > 0:
                self.engine.generate(branches, length, sampling=samplings, final=self.watch is not None)
            choices = [self._choice(branch, config, length == room, bool(tools)) for branch in branches]
            told = [
                {"seed": sampling.seed, "certified": branch.certified} | self._kept(branch) | self._scores(branch)
                for branch, sampling in zip(branches, samplings, strict=True)
            ]
            written = sum(len(branch.generated) for branch in branches)
        finally:
            for branch in held:
                branch.release()
        made_by: dict[str, Any] = {"version": __version__, "fingerprint": self.engine.fingerprint.digest, "choices": told}
        if edits:
            plain = json.dumps([edit.to_json() for edit in edits], sort_keys=True)
            made_by["edits"] = SCHEME + hashlib.sha256(plain.encode()).hexdigest()
        if self.watch is not None:
            made_by["probes"] = {each.name: SCHEME + each.digest for each in self.watch.records}
        usage = ModelUsage(input_tokens=len(ids), output_tokens=written, total_tokens=len(ids) + written)
        return ModelOutput(model=self.model_name, choices=choices, usage=usage, metadata={"replaylens": made_by})

    def _prompt(self, messages: list[ChatMessage], tools: list[ToolInfo]) -> list[int]:
        """The tokens of the chat with its tools, or of the texts of its messages."""
        called = any(isinstance(message, ChatMessageAssistant) and message.tool_calls for message in messages)
        if not self.chat and (tools or called):
            raise BadRequest(
                "Tools need a chat template, which chat=False leaves out. Use chat=True, or a solver without tools."
            )
        if not self.chat:
            return self.engine.tokens_of("\n".join(message.text for message in messages))
        if not tools and not called:
            return self.engine.tokens_of([{"role": message.role, "content": message.text} for message in messages])
        text, written = self.engine.text, [_written(message) for message in messages]
        offered = [{"type": "function", "function": each.model_dump(include=_TOOL, exclude_none=True)} for each in tools]
        found = text.templated(written, tools=offered or None, add_generation_prompt=True)
        if tools and found == text.templated(written, add_generation_prompt=True):
            raise BadRequest(
                "The model's chat template leaves out the tools that the evaluation offers. Load a model whose template writes "
                "tools, set the tokenizer's chat_template, or use a solver without tools."
            )
        return text.encode(found, special=False)

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

    def _choice(self, branch: Branch, config: GenerateConfig, no_room: bool, tools: bool) -> ChatCompletionChoice:
        text = branch.generated_text
        for stop in config.stop_seqs or ():
            text = text.split(stop)[0]
        ended = "stop" if branch.finish_reason else "model_length" if no_room else "max_tokens"
        calls = list[ToolCall]()
        if tools:
            text, calls = tool_calls(text, hashlib.sha256(json.dumps(branch.tokens).encode()).hexdigest()[:12])
            ended = "tool_calls" if calls and branch.finish_reason else ended
        top = config.top_logprobs or 0
        said = self._logprobs(branch, branch.root_length, branch.length, top) if config.logprobs else None
        given = config.prompt_logprobs
        read = None if given is None else self._logprobs(branch, 1, branch.root_length, given)
        message = ChatMessageAssistant(content=text, tool_calls=calls or None, model=self.model_name, source="generate")
        return ChatCompletionChoice(message=message, stop_reason=ended, logprobs=said, prompt_logprobs=read)

    def _logprobs(self, branch: Branch, start: int, stop: int, top: int) -> Logprobs:
        """Of the tokens at [start, stop), from the model's own distribution, whatever the temperature."""
        if start >= stop:
            return Logprobs(content=[])
        engine, wanted = self.engine, branch.tokens[start:stop]
        (rows,) = engine.forest.final_rows([branch.lane], [start - 1], engine.sites.per_layer("S")[-1])
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

    def _scores(self, branch: Branch) -> dict[str, Any]:
        """What the log says about watched probes: the scores of each position, by name."""
        if self.watch is None:
            return {}
        scores = {name: x.tolist() for name, x in self.watch.scores(branch).items()} if branch.activations.positions() else {}
        return {"scores": {"positions": branch.activations.positions(), "probes": scores}}

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
            from safetensors.torch import save

            file = self.folder / f"{digest.removeprefix(SCHEME)}.safetensors"
            where = {"position": torch.tensor(positions), "token": torch.tensor(tokens)}
            write_file(file, save({name: x.contiguous() for name, x in (rows | where).items()}))
            told["file"] = str(file)
        return {"activations": told}
