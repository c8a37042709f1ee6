"""What the evaluation bridges share: engines and edits from command-line options, log-probabilities and digests of rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from torch import Tensor

from replaylens.dumps.content import Content
from replaylens.engine import records
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadEdit, BadRequest
from replaylens.engine.passes.runner import LENS_ROWS
from replaylens.engine.records import SCHEME
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_float, as_instance, as_int, as_list, short_repr
from replaylens.engine.serving.request import logits_of
from replaylens.probes.probe import LinearProbe


def engine_of(source: Any, options: Mapping[str, Any]) -> Engine:
    """The engine itself, or one loaded with the options of `Engine.load`; those that are None are unset."""
    if isinstance(source, Engine):
        if options:
            raise BadRequest(f"{', '.join(options)} cannot be changed on an engine that is loaded. Give its name instead.")
        return source
    return Engine.load(source, **{name: value for name, value in options.items() if value is not None})


def edits_of(given: Any) -> list[Edit]:
    """Edits from the path of a JSON file, or from a list of Edits or of what `Edit.to_json` returns.

    The file holds such a list. It is data: nothing in it is executed. BadEdit for anything else.
    """
    if isinstance(given, str | Path):
        try:
            content = Path(given).read_bytes()
        except OSError as error:
            raise BadEdit(f"Cannot read the edits in {given}: {error}.") from error
        given = records.parse(content, str(given), BadEdit)  # pickles and other binary files are no JSON
    if not isinstance(given, list | tuple):
        raise BadEdit(
            f"Invalid edits={short_repr(given)}. Give a list of Edits, or the path of a JSON file of what Edit.to_json returns."
        )
    return [each if isinstance(each, Edit) else Edit.from_json(each) for each in given]


def probes_of(given: Any) -> dict[str, Any]:
    """Probes by name: from a dict of probes or their files, or from files that `LinearProbe.save` wrote, named so."""
    if not isinstance(given, Mapping):
        files = [given] if isinstance(given, str | Path) else as_list("probes", given, "files of saved probes, or a dict")
        given = {_name(each): each for each in files}
        if len(given) < len(files):
            raise BadRequest(f"Two of the probes {', '.join(map(str, files))} have one name. Rename a file, or give a dict.")
    return {name: LinearProbe.load(each) if isinstance(each, str | Path) else each for name, each in given.items()}


def _name(file: Any) -> str:
    if not isinstance(file, str | Path):
        raise BadRequest(f"Invalid probes={short_repr(file)}. Give files of saved probes, or a dict from names to probes.")
    return Path(file).name.removesuffix(".json").removesuffix(".safetensors")


def count_of(name: str, given: Any) -> int:
    """A whole number, also as text, which command lines and JSON keys are."""
    return as_int(name, int(given) if isinstance(given, str) and given.isdecimal() else given, 0)


def sampling_of(given: Mapping[str, Any], seed: int, stop: Sequence[str]) -> Sampling:
    """The sampling of options that evaluation frameworks give by name; None means unset. BadRequest for unknown ones."""
    known = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "logit_bias"}
    named = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(named.keys() - known):
        raise BadRequest(f"Unsupported option of generation: {', '.join(unknown)}. Supported: {', '.join(sorted(known))}.")
    if "logit_bias" in named:
        biases = as_instance("logit_bias", named["logit_bias"], dict, "a dict of token ids and numbers")
        named["logit_bias"] = {count_of("token", token): as_float("logit_bias", bias) for token, bias in biases.items()}
    if "top_k" in named:  # -1 is "all" elsewhere
        named["top_k"] = max(0, as_int("top_k", named["top_k"]))
    return Sampling(seed=seed, stop=tuple(stop), **named)


@dataclass(frozen=True)
class TokenLogProbs:
    """Log-probabilities of tokens, each from the row before it: [tokens], and those of the likeliest: [tokens, top]."""

    logprobs: Tensor
    greedy: Tensor
    """whether each token is the likeliest, the lowest id among equals"""
    top_ids: Tensor
    top_logprobs: Tensor


def scores(engine: Engine, residual: Tensor, tokens: Sequence[int], top: int = 0) -> TokenLogProbs:
    """`residual` [tokens, d_model] is the final residual stream, one row before each token. Log-softmax is in float64, and
    never more than a few hundred rows of the vocabulary are in memory."""
    parts: list[tuple[Tensor, ...]] = []
    for rows, ids in zip(residual.split(LENS_ROWS), torch.tensor(tokens, dtype=torch.int64).split(LENS_ROWS), strict=True):
        logits = engine.lock.alone(logits_of, engine.runner, rows, None)
        logprobs = logits.double().log_softmax(-1)
        best = logprobs.topk(top, dim=-1)
        parts.append((logprobs.gather(1, ids[:, None])[:, 0], logits.argmax(-1) == ids, best.indices, best.values))
    return TokenLogProbs(*(torch.cat(column) for column in zip(*parts, strict=True)))


def digest_of(rows: Mapping[str, Tensor], positions: Sequence[int], tokens: Sequence[int]) -> str:
    """The identifier of captured rows: it covers every site's name, dtype, shape and bytes, and where the rows are. The same
    rows in a dump's content with these index columns have the same digest."""
    whole = {"position": pa.array(positions, pa.int32()), "token": pa.array(tokens, pa.int32())}
    index = pa.table(whole | {"accepted": pa.array([True] * len(positions), pa.bool_())})
    return SCHEME + Content({name: rows[name].cpu().contiguous() for name in rows}, index).digests()[0]
