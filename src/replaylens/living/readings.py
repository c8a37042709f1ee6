"""What is read under tokens when somebody looks: the logit lens of every layer, entropy, surprise, probes, attention, values.

Rows are computed when they are asked for, whatever the branch captures, with the bits that they have in a capture. They leave
as bytes: probabilities and weights in steps of 1/255 of the largest, values in steps of 1/127 of theirs.
"""

from __future__ import annotations

import base64
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.loop.lane import Lane
from replaylens.engine.model.text import Text
from replaylens.engine.passes.lens import read_ranked
from replaylens.engine.request.capture import CaptureSpec, Recording
from replaylens.engine.request.values import as_int
from replaylens.engine.serving.watch import Watch

BLOCK = 64
"""positions that are read together"""
TOP, TOP_OF_ONE = 4, 10
"""likeliest tokens of each layer: of a block's tokens, and of a token that is looked at"""
KEPT = 4096
"""blocks that stay in memory"""
BROKEN = "\ufffd"
"""in the text of a token that holds a part of a character"""
LONGEST = 200
"""characters of a token's text that are shown"""


# ---- bytes -----------------------------------------------------------------------------------------------------------


def packed(array: np.ndarray) -> str:
    """Numbers as base64, little-endian."""
    return base64.b64encode(np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"))).tobytes()).decode()


def quantised(values: np.ndarray, least: float = 0.0) -> dict[str, Any]:
    """Numbers from 0 up as bytes, with the number that 255 stands for; NaN becomes 0."""
    clean = np.nan_to_num(np.asarray(values, dtype=np.float64), posinf=0.0, neginf=0.0)
    most = max(float(clean.max(initial=0.0)), least) or 1.0
    return {"most": most, "data": packed(np.rint(np.clip(clean, 0, most) / most * 255).astype(np.uint8))}


def signed(values: np.ndarray) -> dict[str, Any]:
    """Numbers of both signs as bytes, with the number that 127 stands for."""
    clean = np.nan_to_num(np.asarray(values, dtype=np.float64), posinf=0.0, neginf=0.0)
    most = float(np.abs(clean).max(initial=0.0)) or 1.0
    return {"most": most, "data": packed(np.rint(clean / most * 127).astype(np.int8))}


# ---- words -----------------------------------------------------------------------------------------------------------


def shown(text: Text, token: int) -> str:
    """A token's text, shortened if it is very long."""
    found = word(text, token)
    return found if len(found) <= LONGEST else f"{found[:LONGEST]}…"


def words(text: Text, tokens: Sequence[int]) -> dict[str, str]:
    """Texts by token id, each once."""
    return {str(token): shown(text, token) for token in dict.fromkeys(map(int, tokens))}


def repaired(text: Text, tokens: Sequence[int], first: int) -> dict[str, str]:
    """Texts by position where a character is split over tokens: its first token shows it, the others show nothing."""
    own, found, at = [word(text, token) for token in tokens], dict[str, str](), 0
    while at < len(own):
        if BROKEN in own[at]:
            ends = range(at + 2, min(at + 8, len(own)) + 1)
            joined = ((end, text.decode(list(tokens[at:end]))) for end in ends if all(BROKEN in each for each in own[at:end]))
            whole = next(((end, said) for end, said in joined if BROKEN not in said), None)
            if whole is not None:
                found |= {str(first + at): whole[1]} | {str(first + p): "" for p in range(at + 1, whole[0])}
                at = whole[0]
                continue
        at += 1
    return found


# ---- reading ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadBlock:
    """The readings of consecutive positions of one branch."""

    first: int
    surprise: np.ndarray
    """[positions]: minus the log-probability of the token itself, in nats; NaN for the first of a path"""
    entropy: np.ndarray
    """[positions]: of the distribution after the token, in nats"""
    ids: np.ndarray
    """[positions, layers, k]: what each layer takes for likeliest after the token"""
    shares: np.ndarray
    """[positions, layers, k]: their probabilities"""
    scores: Mapping[str, np.ndarray] = field(default_factory=dict)
    """probe -> [positions]: its score; of several classes, the largest"""
    checks: np.ndarray = field(default_factory=lambda: np.empty((0, 0), np.uint64))
    """[positions, layers]: 8 bytes of the BLAKE2b of each layer's row"""

    def to_json(self, text: Text) -> dict[str, Any]:
        said = {str(i): shown(text, int(i)) for i in np.unique(self.ids)}
        return {
            "first": self.first,
            "count": len(self.entropy),
            "layers": self.ids.shape[1],
            "k": self.ids.shape[2],
            "surprise": quantised(self.surprise),
            "entropy": quantised(self.entropy),
            "ids": packed(self.ids.astype(np.uint32)),
            "shares": quantised(self.shares, 1.0),
            "scores": {name: signed(values) for name, values in self.scores.items()},
            "words": said,
        }


class RowReader:
    """Reads rows of an engine's branches, and keeps the latest blocks."""

    def __init__(self, engine: Engine, watch: Watch | None) -> None:
        self.engine, self.watch = engine, watch
        spec = engine.capture_spec("Z", top_k=min(TOP, engine.config.vocab_size)).lens
        assert spec is not None
        self.spec = spec
        self.kept: OrderedDict[tuple[int, int, int, int], ReadBlock] = OrderedDict()

    def block(self, lane: Lane, path: list[int], first: int, end: int) -> ReadBlock:
        """The readings of positions [first, end) of a path, the lane's own."""
        key = (lane.branch, first, end, hash(tuple(path[: end + 1])))
        if key not in self.kept:
            self.kept[key] = self._read(lane, path, first, end)
            while len(self.kept) > KEPT:
                self.kept.popitem(last=False)
        self.kept.move_to_end(key)
        return self.kept[key]

    def seen(self, branch: int, path: list[int]) -> list[ReadBlock]:
        """The blocks that were read of a branch and that its path still has, in order."""
        own = [(first, end, told) for of, first, end, told in self.kept if of == branch and end <= len(path)]
        valid = {first: end for first, end, told in sorted(own) if hash(tuple(path[: end + 1])) == told}
        return [self.kept[branch, first, end, hash(tuple(path[: end + 1]))] for first, end in sorted(valid.items())]

    def rows(self, lane: Lane, first: int, end: int, sites: Sequence[str]) -> Recording:
        """Rows of positions [first, end)."""
        spec = CaptureSpec(tuple(dict.fromkeys(sites)), last=self.spec.sites[-1])
        return self.engine.forest.rows_between([lane], [first], [end], spec)[0]

    def _read(self, lane: Lane, path: list[int], first: int, end: int) -> ReadBlock:
        before = max(first - 1, 0)  # the row before says how likely the first token was
        probes = () if self.watch is None else self.watch.sites
        rows = self.rows(lane, before, end, [*self.spec.sites, *probes])
        streams = {site: rows[site] for site in self.spec.sites}
        follow = [*path[before + 1 : end + 1]]
        follow += [-1] * (end - before - len(follow))
        z = self.engine.lock.alone(read_ranked, self.spec, self.engine.runner, streams, follow)
        skip, logprob = first - before, z["Z.emitted"][:, -1].numpy()
        surprise = -np.concatenate([[np.nan] * (1 - skip), logprob])[: end - first]
        scores = {} if self.watch is None else dict(_scores(self.watch, rows, skip))
        return ReadBlock(
            first,
            surprise,
            z["Z.entropy"][skip:, -1].numpy(),
            z["Z.top_ids"][skip:].numpy(),
            np.exp(z["Z.top_logprobs"][skip:].numpy().astype(np.float64)),
            scores,
            checks_of([streams[site][skip:] for site in self.spec.sites]),
        )

    # ---- one token ----------------------------------------------------------------------------------------------

    def look(self, lane: Lane, path: list[int], position: int, layer: int | None) -> dict[str, Any]:
        """What the model thinks at one token: alternatives to it, each layer's next tokens, sizes of the three streams, and
        where a layer's heads attend."""
        engine, before = self.engine, max(position - 1, 0)
        sizes = {letter: engine.sites.per_layer(letter) for letter in "STC"}
        pattern = f"blocks.{0 if layer is None else layer}.attn.hook_pattern"
        attends = layer is not None and pattern in engine.sites.sites
        wanted = [*self.spec.sites, *(site for sites in sizes.values() for site in sites), *([pattern] if attends else [])]
        rows = self.rows(lane, before, position + 1, wanted)
        spec = replace(self.spec, top_k=min(TOP_OF_ONE, engine.config.vocab_size))
        token = path[position]
        follow = [token] * (position - before) + [path[position + 1] if position + 1 < len(path) else -1]
        z = engine.lock.alone(read_ranked, spec, engine.runner, {site: rows[site] for site in spec.sites}, follow)
        ids, shares = z["Z.top_ids"].numpy(), np.exp(z["Z.top_logprobs"].numpy().astype(np.float64))
        instead = position > 0
        reply: dict[str, Any] = {
            "position": position,
            "token": token,
            "id": int(token),
            "surprise": -float(z["Z.emitted"][0, -1]) if instead else None,
            "rank": int(z["Z.rank"][0, -1]) if instead else None,
            "entropy": float(z["Z.entropy"][-1, -1]),
            "instead": _chances(ids[0, -1], shares[0, -1]) if instead else [],
            "next": _chances(ids[-1, -1], shares[-1, -1]),
            "layers": [_chances(ids[-1, i, :TOP], shares[-1, i, :TOP]) for i in range(ids.shape[1])],
            "kl": [float(x) for x in z["Z.kl"][-1]],
            "sizes": {name: [float(rows[s][-1].float().norm()) for s in sites] for name, sites in sizes.items() if sites},
            "words": words(engine.text, [token, *ids.flatten().tolist()]),
        }
        if attends:
            weights = rows[pattern][-1].float().numpy()[:, : position + 1]  # [heads, keys]
            reply["attention"] = {"layer": layer, "heads": len(weights), **quantised(weights, 1.0)}
        return reply

    def values(self, lane: Lane, position: int, site: str) -> dict[str, Any]:
        """One row of a site."""
        name = self.engine.sites.resolve(site)
        row = self.rows(lane, position, position + 1, [name])[name][-1].float().numpy()
        strongest = np.argsort(-np.abs(row.ravel()), kind="stable")[:8]
        return {
            "site": name,
            "shape": list(row.shape),
            "strongest": [[int(i), float(row.ravel()[i])] for i in strongest],
            **signed(row.ravel()),
        }


def _chances(ids: np.ndarray, shares: np.ndarray) -> list[list[float]]:
    """[id, probability] of tokens."""
    return [[int(i), round(float(p), 6)] for i, p in zip(ids, shares, strict=True)]


def _scores(watch: Watch, rows: Recording, skip: int) -> Iterator[tuple[str, np.ndarray]]:
    for name, found in watch._of(rows).items():
        values = found[skip:].float().numpy()
        yield name, values if values.ndim == 1 else values.max(1)


def checks_of(rows: Sequence[Tensor]) -> np.ndarray:
    """[positions, sites]: the first 8 bytes of the BLAKE2b of each row."""
    found = np.empty((len(rows[0]), len(rows)), dtype="<u8")
    for number, each in enumerate(rows):
        raw = each.detach().cpu().contiguous().view(torch.uint8).numpy().reshape(len(each), -1)
        found[:, number] = [int.from_bytes(blake2b(row.tobytes(), digest_size=8).digest(), "little") for row in raw]
    return found


def blocks(first: int, end: int) -> list[tuple[int, int]]:
    """The blocks of [first, end): they begin at multiples of BLOCK, whatever the branch."""
    edges = [first, *range((first // BLOCK + 1) * BLOCK, end, BLOCK), end]
    return [(a, b) for a, b in pairwise(edges) if a < b]


def layer_of_message(engine: Engine, layer: Any) -> int | None:
    """A layer of a message; BadRequest if the model has none of this number."""
    return None if layer is None else as_int("layer", layer, 0, engine.config.num_layers - 1, BadRequest)
