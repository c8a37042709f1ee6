"""`Readings`: the logit lens (Z) of consecutive rows: log-probabilities of tokens, and each layer's next-token guesses."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaylens.engine.model.text import Text
from replaylens.engine.request.recording import Recording

GUESSES = 3
"""tokens shown per layer"""
Decode = Callable[[int], str]


@dataclass(frozen=True)
class LensGuess:
    """A next token, and the probability that a layer gives it."""

    token: str
    probability: float


@dataclass(frozen=True)
class LensLayer:
    """The next-token guesses of one layer."""

    site: str
    """name of the residual stream that was read"""
    guesses: tuple[LensGuess, ...]
    """most likely first"""


@dataclass(frozen=True)
class Readings:
    """Z at some positions; for its parts and their shapes see `lens.readout`."""

    row_of: Mapping[int, int]
    """position -> row of z"""
    z: Mapping[str, np.ndarray]
    decode: Decode

    @classmethod
    def of(cls, recording: Recording | None, decode: Decode) -> "Readings | None":
        """The readings of captured rows; None if Z was not captured."""
        if recording is None or "Z.entropy" not in recording.sites():
            return None
        names = ("Z.entropy", "Z.kl", "Z.emitted", "Z.top_ids", "Z.top_logprobs")
        rows = {position: row for row, position in enumerate(recording.positions())}
        return cls(rows, {name: recording.peek(name).cpu().numpy() for name in names}, decode)

    def has(self, position: int) -> bool:
        return position in self.row_of

    def entropy(self, position: int) -> float | None:
        """Entropy of the model's next-token distribution at this position."""
        return float(self.z["Z.entropy"][self.row_of[position], -1]) if self.has(position) else None

    def emitted(self, position: int) -> float | None:
        """Log-probability of the token after this position on the same path."""
        value = float(self.z["Z.emitted"][self.row_of[position], -1]) if self.has(position) else math.nan
        return None if math.isnan(value) else value

    def logprob(self, position: int, token: int) -> float | None:
        """Log-probability of a token after this position; None if it is not among the top k."""
        if not self.has(position):
            return None
        row = self.row_of[position]
        found = np.flatnonzero(self.z["Z.top_ids"][row, -1] == token)
        return float(self.z["Z.top_logprobs"][row, -1, found[0]]) if len(found) else None

    def layers(self, position: int) -> tuple[LensLayer, ...]:
        """Next-token guesses of each layer; the model's output comes last."""
        if not self.has(position):
            return ()
        row = self.row_of[position]
        ids, shares = self.z["Z.top_ids"][row, :, :GUESSES], np.exp(self.z["Z.top_logprobs"][row, :, :GUESSES])
        return tuple(
            LensLayer(layer_name(i, len(ids)), tuple(map(self._guess, ids[i], shares[i])))  # [layers, k]
            for i in range(len(ids))
        )

    def _guess(self, token: Any, share: Any) -> LensGuess:
        return LensGuess(self.decode(int(token)), float(share))


def word(text: Text, token: int) -> str:
    """A token's text. An <EOS> without text becomes "<eos>"; without a tokenizer, it is the id after a space."""
    if text.tokenizer is None:
        return f" {text.token(token)}"
    return text.token(token) or ("<eos>" if token == text.eos_id else "")


def layer_name(i: int, count: int) -> str:
    """S0 enters block 0; the last entry of Z is the model's output."""
    return "output" if i == count - 1 else f"S{i}"
