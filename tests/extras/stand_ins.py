"""Stand-ins for the parts of lm-eval and Inspect that the bridges use, so that the bridges run where neither is installed."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, make_dataclass
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

BRIDGES = ("replaylens.extras.bridges.lm_eval_model", "replaylens.extras.bridges.inspect_provider")


@contextmanager
def installed() -> Iterator[None]:
    """Both packages can be imported within the block, and the bridges are imported anew."""
    with patch.dict(sys.modules, {**_lm_eval(), **_inspect()}):
        for name in BRIDGES:
            sys.modules.pop(name, None)
        yield
        for name in BRIDGES:
            sys.modules.pop(name, None)


def _module(name: str, **content: Any) -> dict[str, ModuleType]:
    made = ModuleType(name)
    vars(made).update(content)
    return {name: made}


# ---- lm-eval --------------------------------------------------------------------------------------------------------------


class TemplateLM:
    """What the harness adds to a model: pairs of texts as tokens. `cached` is what its cache is told."""

    def __init__(self) -> None:
        self.cached: list[Any] = []
        self.cache_hook = SimpleNamespace(add_partial=lambda *told: self.cached.append(told))

    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> Any:
        model: Any = self
        asked = []
        for context, wanted in (each.args for each in requests):
            first = model.tok_encode(context) if context else [model.prefix_token_id]
            asked.append(((context, wanted), first, model.tok_encode(wanted, add_special_tokens=False)))
        return model._loglikelihood_tokens(asked, disable_tqdm=disable_tqdm)


def rolling(ids: list[int], prefix: int, longest: int, context_len: int) -> Iterator[tuple[list[int], list[int]]]:
    """(context, wanted) of windows in which each token is wanted once."""
    before = [prefix, *ids]
    yield before[: min(longest, len(ids))], ids[:longest]
    for start in range(longest, len(ids), longest - context_len + 1):
        stop = min(start + longest - context_len + 1, len(ids))
        yield before[max(0, stop - longest) : stop], ids[start:stop]


def disjoint(window: tuple[list[int], list[int]]) -> tuple[list[int], list[int]]:
    context, wanted = window
    return context[: len(context) - len(wanted) + 1], wanted


def named_options(given: dict[str, Any], longest: int) -> dict[str, Any]:
    return {"max_gen_toks": longest, **given}


def stops(until: Any, eos: str | None) -> list[str]:
    found = [until] if isinstance(until, str) else list(until or ())
    return found if eos is None else [*found, eos]


def cut(text: str, stop: list[str], think_end: str | None) -> str:
    for each in stop:
        text = text.split(each)[0] if each else text
    return text


def _lm_eval() -> dict[str, ModuleType]:
    windows = SimpleNamespace(get_rolling_token_windows=rolling, make_disjoint_window=disjoint)
    helpers = dict(
        handle_stop_sequences=stops,
        has_bos_prefix=lambda text, bos: text.startswith(bos),
        normalize_gen_kwargs=named_options,
        postprocess_generated_text=cut,
    )
    return {
        **_module("lm_eval", utils=windows),
        **_module("lm_eval.api"),
        **_module("lm_eval.api.model", TemplateLM=TemplateLM),
        **_module("lm_eval.api.registry", register_model=lambda name: lambda model: model),
        **_module("lm_eval.models"),
        **_module("lm_eval.models.utils", **helpers),
    }


# ---- Inspect --------------------------------------------------------------------------------------------------------------


@dataclass
class Message:
    content: str
    role: str = "user"
    tool_calls: Any = None
    function: str | None = None
    tool_call_id: str | None = None
    model: str | None = None
    source: str | None = None

    @property
    def text(self) -> str:
        return self.content


class Said(Message):
    """of the assistant"""


class Done(Message):
    """of a tool"""


class Options(SimpleNamespace):
    """Options that were not set are None."""

    def __getattr__(self, name: str) -> None:
        return None


@dataclass
class Tool:
    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    secret: str = "not offered"

    def model_dump(self, include: set[str], exclude_none: bool) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name in include and not (exclude_none and value is None)}


class ModelAPI:
    def __init__(self, model_name: str, base_url: Any, api_key: Any, api_key_vars: list[str], config: Any) -> None:
        self.model_name, self.about = model_name, (base_url, api_key, api_key_vars, config)


def _record(name: str, *names: str) -> Any:
    return make_dataclass(name, [(each, Any, None) for each in names])


def _inspect() -> dict[str, ModuleType]:
    model = dict(
        ChatCompletionChoice=_record("Choice", "message", "stop_reason", "logprobs", "prompt_logprobs"),
        ChatMessage=Message,
        ChatMessageAssistant=Said,
        ChatMessageTool=Done,
        GenerateConfig=Options,
        Logprob=_record("Logprob", "token", "logprob", "bytes", "top_logprobs"),
        Logprobs=_record("Logprobs", "content"),
        ModelAPI=ModelAPI,
        ModelOutput=_record("Output", "model", "choices", "usage", "metadata"),
        ModelUsage=_record("Usage", "input_tokens", "output_tokens", "total_tokens"),
        TopLogprob=_record("Top", "token", "logprob"),
        modelapi=lambda name: lambda kind: kind,
    )
    call = _record("ToolCall", "id", "function", "arguments", "parse_error")
    return {
        **_module("inspect_ai"),
        **_module("inspect_ai.model", **model),
        **_module("inspect_ai.tool", ToolCall=call, ToolChoice=str, ToolInfo=Tool),
    }
