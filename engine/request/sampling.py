"""`Sampling`: how the next token is chosen from logits and path. It has no state, so a rollback has nothing to restore.

Seeded draws are Gumbel-max: the argmax of scaled logits plus noise. The noise of a token is a hash of (seed, position, token
id) and nothing else. It is keyed by id, not by rank, so near-ties may swap ranks without changing the draw. A drafter with the
same noise agrees more often; the output does not depend on the drafter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import as_bool, as_float, as_instance, as_int, as_list, named_fields
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    from replaylens.engine.model import modes
else:
    modes = Later("replaylens.engine.model.modes")

COLDEST = 1e-6
"""the smallest temperature above 0; much smaller ones overflow the scaled logits"""
LARGEST = 1e9
"""the largest bias or penalty; larger ones lose the differences between logits, and finally overflow"""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1, _MIX2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@runtime_checkable
class HasDistinctTokens(Protocol):
    """A path that knows its distinct tokens, so that penalties need not read the whole path for every token."""

    def distinct(self, start: int = 0) -> NDArray[np.int64]:
        """The tokens from position `start` on, each at least once, in any order."""
        ...


@named_fields
@dataclass(frozen=True)
class Sampling:
    """How to choose the next token. The default is greedy.

    >>> import numpy as np
    >>> logits = np.array([1.0, 3.0, 2.0], dtype=np.float32)
    >>> Sampling().choose(logits, path=[0], num_prompt=1), Sampling(logit_bias={0: 9.0}).choose(logits, [0], 1)
    (1, 0)
    >>> drawn = [Sampling(temperature=1.0, seed=seed).choose(logits, [0], 1) for seed in range(6)]
    >>> drawn == [Sampling(temperature=1.0, seed=seed).choose(logits, [0], 1) for seed in range(6)]
    True
    """

    temperature: float = 0.0
    """0: greedy"""
    top_k: int = 0
    """keep the k likeliest tokens; 0: all"""
    top_p: float = 1.0
    """keep the likeliest tokens that together reach this probability"""
    min_p: float = 0.0
    """keep tokens at least this fraction as likely as the likeliest"""
    repetition_penalty: float = 1.0
    """divides positive (multiplies negative) logits of tokens that occur in the path"""
    presence_penalty: float = 0.0
    """subtracted once from the logit of every token generated so far"""
    logit_bias: dict[int, float] = field(default_factory=dict)
    """added to single logits"""
    seed: int = 0
    stop: tuple[str, ...] = ()
    """stop once the generated text contains one of these"""
    stop_tokens: tuple[int, ...] = ()
    """stop after one of these; the tokenizer's EOS is added unless `ignore_eos`"""
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        for name, value in self._plain().items():
            object.__setattr__(self, name, value)
        checks = {
            f"temperature must be 0 (greedy) or at least {COLDEST}": self.temperature == 0 or self.temperature >= COLDEST,
            "top_p must be in (0, 1]": 0 < self.top_p <= 1,
            "min_p must be in [0, 1]": 0 <= self.min_p <= 1,
            f"repetition_penalty must be between {1 / LARGEST} and {LARGEST}": 1 / LARGEST
            <= self.repetition_penalty
            <= LARGEST,
            f"presence_penalty must be between {-LARGEST} and {LARGEST}": abs(self.presence_penalty) <= LARGEST,
            f"logit_bias must be between {-LARGEST} and {LARGEST}": all(abs(b) <= LARGEST for b in self.logit_bias.values()),
            "A stop string must not be empty": all(self.stop),
        }
        for message, fine in checks.items():
            if not fine:
                raise BadRequest(f"{message}. Given: {self}.")

    def _plain(self) -> dict[str, Any]:
        """The fields as plain Python values; BadRequest names the field that is invalid."""
        names = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty")
        numbers: dict[str, Any] = {name: as_float(name, getattr(self, name)) for name in names}
        biases = as_instance("logit_bias", self.logit_bias, dict, "a dict of token ids and finite numbers (-1e9 rules one out)")
        bias = {
            as_int("token of logit_bias", token): as_float(
                f"logit_bias of token {token}", value, hint=" -1e9 rules a token out."
            )
            for token, value in biases.items()
        }
        stop = as_list("stop", self.stop, "a tuple of strings")
        ends = as_list("stop_tokens", self.stop_tokens, "a tuple of token ids (strings go into stop)")
        return numbers | {
            "top_k": as_int("top_k", self.top_k, 0),
            "seed": as_int("seed", self.seed, 0, 2**64 - 1),
            "logit_bias": bias,
            "stop": tuple(as_instance("stop", each, str, "a tuple of strings") for each in stop),
            "stop_tokens": tuple(as_int("stop_tokens", each) for each in ends),
            "ignore_eos": as_bool("ignore_eos", self.ignore_eos),
        }

    def derived(self, **fields: Any) -> Sampling:
        """A copy with other values of some fields. Precondition: they are valid. Nothing is checked, which takes long."""
        made = object.__new__(Sampling)
        made.__dict__.update(self.__dict__, **fields)
        return made

    def to_json(self) -> dict[str, Any]:
        """Plain values, for traces, dump plans and workers."""
        return asdict(self)

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> Sampling:
        """Inverse of `to_json`, also after a JSON file has turned biased ids into text and tuples into lists."""
        try:
            plain = as_instance("sampling", raw, dict, "the result of to_json")
            if missing := [each for each in cls.__dataclass_fields__ if each not in plain]:
                raise BadRequest(f"Not a sampling: {missing[0]} is missing.")
            return cls(**{**plain, "logit_bias": {int(token): bias for token, bias in plain["logit_bias"].items()}})
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise error if isinstance(error, BadRequest) else BadRequest(f"Not a sampling: {error!r}.") from error

    @property
    def bare(self) -> bool:
        """Whether it needs only logits, seed and position: no penalty, bias or filter."""
        filtered = self.temperature and (self.top_k or self.top_p < 1.0 or self.min_p)
        return not (filtered or self.logit_bias or self.presence_penalty) and self.repetition_penalty == 1.0

    @property
    def plain_greedy(self) -> bool:
        """Whether the choice is the bare argmax."""
        return self.bare and self.temperature == 0

    def choose(self, logits: NDArray[np.float32], path: Sequence[int], num_prompt: int) -> int:
        """The token after `path`, chosen from the `logits` [vocab] of its last row. A pure function of its arguments."""
        scores = logits.astype(np.float64)
        if self.plain_greedy:
            return int(scores.argmax())  # numpy returns the lowest id among equals
        with modes.arithmetic():
            scores = self._adjusted(scores, path, num_prompt)
            if self.temperature == 0.0:
                return int(scores.argmax())
            scores = self._filtered(scores / self.temperature)
            from replaylens.kernels import cpu_noise  # loads a compiler

            return cpu_noise.draw(scores, self.seed, len(path))

    def _adjusted(self, scores: NDArray[np.float64], path: Sequence[int], num_prompt: int) -> NDArray[np.float64]:
        if self.repetition_penalty != 1.0:
            seen = _distinct(path)
            factor = self.repetition_penalty
            scores[seen] = np.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
        if self.presence_penalty and len(path) > num_prompt:
            scores[_distinct(path, num_prompt)] -= self.presence_penalty  # once, however often a token is listed
        for token, bias in self.logit_bias.items():
            if not 0 <= token < len(scores):
                raise BadRequest(f"Token {token} of logit_bias is not in the vocabulary of {len(scores)} tokens.")
            scores[token] += bias
        return scores

    def _filtered(self, scores: NDArray[np.float64]) -> NDArray[np.float64]:
        """The scores, with -inf for tokens outside top-k, top-p and min-p. The lower id wins ties in rank."""
        if not (self.top_k or self.top_p < 1.0 or self.min_p):
            return scores
        order = np.argsort(-scores, kind="stable")
        from replaylens.kernels import cpu_noise  # loads a compiler

        probabilities = cpu_noise.exponentials(scores[order] - scores[order[0]])
        keep = np.ones(len(order), dtype=bool)
        if self.top_k:
            keep[self.top_k :] = False
        if self.min_p:
            keep &= probabilities >= self.min_p
        if self.top_p < 1.0:
            probabilities = np.where(keep, probabilities, 0.0)
            before = np.cumsum(probabilities) - probabilities
            keep &= before < self.top_p * (before[-1] + probabilities[-1])
        out = np.full_like(scores, -np.inf)
        out[order[keep]] = scores[order[keep]]
        return out


def _distinct(path: Sequence[int], start: int = 0) -> NDArray[np.int64]:
    """The tokens from position `start` on, each at least once."""
    return path.distinct(start) if isinstance(path, HasDistinctTokens) else np.unique(np.asarray(path[start:], dtype=np.int64))


def hash_bits(seed: int, position: int, ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """64 random bits per token id, from rounds of a counter-based mixer. `reference.hash64` gives the same bits."""
    stream = _mix(_mix(np.asarray([seed], dtype=np.uint64) + _GOLDEN) + _GOLDEN * np.asarray([position], dtype=np.uint64))
    return _mix(stream + _GOLDEN * ids)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX1
    x = (x ^ (x >> np.uint64(27))) * _MIX2
    return x ^ (x >> np.uint64(31))


def gumbel(seed: int, position: int, vocab: int) -> NDArray[np.float64]:
    """Gumbel noise for the token at `position`: [vocab], float64."""
    from replaylens.kernels import cpu_noise  # loads a compiler

    return cpu_noise.gumbel(seed, position, vocab)
