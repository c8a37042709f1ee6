"""`Readings`: Z of consecutive rows, as the views ask for it: how likely was a token, what would each layer say next."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from replaylens.engine.model.text import Text
from replaylens.engine.request.capture import Recording

GUESSES = 3
"""tokens shown per layer"""
Decode = Callable[[int], str]


@dataclass(frozen=True)
class Guess:
    """A next token, and the probability that a layer gives it."""

    token: str
    probability: float


@dataclass(frozen=True)
class LensLayer:
    """What one layer would say next."""

    site: str
    """where the residual stream was read"""
    guesses: tuple[Guess, ...]
    """most likely first"""


@dataclass(frozen=True)
class Readings:
    """Z of positions [base, base + rows). `emitted` [rows, layers] and so on: see `lens.readout`."""

    base: int
    z: Mapping[str, np.ndarray]
    decode: Decode

    @classmethod
    def of(cls, recording: Recording | None, decode: Decode) -> "Readings | None":
        """Of what a branch captured; None where Z is not part of it."""
        if recording is None or "Z.entropy" not in recording.sites():
            return None
        names = ("Z.entropy", "Z.kl", "Z.emitted", "Z.top_ids", "Z.top_logprobs")
        return cls(recording.positions()[0], {name: recording.peek(name).numpy() for name in names}, decode)

    def has(self, position: int) -> bool:
        return self.base <= position < self.base + len(self.z["Z.entropy"])

    def entropy(self, position: int) -> float | None:
        """Of the model's own distribution after this position."""
        return float(self.z["Z.entropy"][position - self.base, -1]) if self.has(position) else None

    def emitted(self, position: int) -> float | None:
        """Log-probability of the token that came after this position on the same path."""
        value = float(self.z["Z.emitted"][position - self.base, -1]) if self.has(position) else math.nan
        return None if math.isnan(value) else value

    def logprob(self, position: int, token: int) -> float | None:
        """Log-probability of any token after this position, where it is among the likeliest."""
        if not self.has(position):
            return None
        row = position - self.base
        found = np.flatnonzero(self.z["Z.top_ids"][row, -1] == token)
        return float(self.z["Z.top_logprobs"][row, -1, found[0]]) if len(found) else None

    def layers(self, position: int) -> tuple[LensLayer, ...]:
        """What each layer would say next, the model's own output last."""
        if not self.has(position):
            return ()
        row = position - self.base
        ids, shares = self.z["Z.top_ids"][row, :, :GUESSES], np.exp(self.z["Z.top_logprobs"][row, :, :GUESSES])
        return tuple(
            LensLayer(layer_name(i, len(ids)), tuple(map(self._guess, ids[i], shares[i])))  # [layers, k]
            for i in range(len(ids))
        )

    def _guess(self, token: Any, share: Any) -> Guess:
        return Guess(self.decode(int(token)), float(share))


def word(text: Text, token: int) -> str:
    """How a token reads; the one that ends a text, which reads as nothing, by its name; a number with a space before it."""
    if text.tokenizer is None:
        return f" {text.token(token)}"
    return text.token(token) or ("<eos>" if token == text.eos_id else "")


def layer_name(i: int, count: int) -> str:
    """S0 is what enters block 0; the last entry of Z is the model's own output."""
    return "output" if i == count - 1 else f"S{i}"
