"""Controls: what a number must be compared with before it says anything about the model.

majority        always the most frequent class of the training rows
token identity  the most frequent class of the row's own token
bag of tokens   logistic regression on how often each token occurs in the path up to the row
shuffled        the same probe, fitted and tested on labels exchanged between roots
control task    the same probe on a random class per type of context (Hewitt & Liang, arXiv 1909.03368); selectivity is what is
                left of the accuracy when that of the control task is taken away
untrained       the same probe on a model of the same shape with random weights
known zeros     labels of the task that nothing in the text tells
"""

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch

from replaylens.engine.model import Decoder
from replaylens.probes.errors import ProbeError
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sources import MemorySource

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine

LEAST_TYPES, LONGEST_CONTEXT = 10, 16
"""a control task needs this many types of context; contexts grow up to so many tokens to find them"""


def majority(codes: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """Predicted class numbers [rows] of held-out rows; -1 elsewhere. Masks [folds, rows]."""
    return token_identity(codes, np.zeros(len(codes), dtype=np.int64), train, test)


def token_identity(codes: np.ndarray, tokens: np.ndarray, train: np.ndarray, test: np.ndarray) -> np.ndarray:
    """The most frequent class of each token among the training rows; of all of them for a token not seen there."""
    places = np.unique(tokens, return_inverse=True)[1]
    out = np.full(len(codes), -1)
    for fit, held in zip(train, test, strict=True):
        counts = np.zeros((places.max() + 1, codes.max() + 1))
        np.add.at(counts, (places[fit], codes[fit]), 1)
        best = np.where(counts.sum(1) > 0, counts.argmax(1), counts.sum(0).argmax())
        out[held] = best[places[held]]
    return out


def bags(every: ProbeRows, chosen: ProbeRows) -> np.ndarray:
    """[chosen rows, different tokens]: how often each token occurs on the row's path up to and with the row.

    every  all rows of the dump or run, from which the paths are read
    """
    frame = every.frame
    tokens, column = np.unique(frame["token"].to_numpy(), return_inverse=True)
    wanted = pd.Series(np.arange(len(chosen)), index=chosen.numbers)
    position, branch, fork = (frame[name].to_numpy() for name in ("position", "branch", "fork_position"))
    out = np.zeros((len(chosen), len(tokens)), dtype=np.float32)
    for rows in frame.groupby("example", sort=False).indices.values():
        main = rows[branch[rows] == 0]
        for number in np.unique(branch[rows]):
            own = rows[branch[rows] == number]
            asked = np.flatnonzero(np.isin(every.numbers[own], chosen.numbers))
            if not len(asked):
                continue
            path = own if number == 0 else np.concatenate([main[position[main] < fork[own[0]]], own])
            seen = np.cumsum(np.eye(len(tokens), dtype=np.float32)[column[path]], axis=0)
            out[wanted[every.numbers[own[asked]]]] = seen[len(path) - len(own) + asked]
    return out


def contexts(every: ProbeRows, chosen: ProbeRows) -> tuple[np.ndarray, int] | None:
    """(type of each chosen row, tokens looked at): the shortest suffix of the path that has enough types; None if none has."""
    frame = every.frame
    token, position = frame["token"].to_numpy(), frame["position"].to_numpy()
    before: dict[tuple[int, int, int], int] = {
        key: number for number, key in enumerate(zip(frame["example"], frame["branch"], position, strict=True))
    }
    place = {number: i for i, number in enumerate(every.numbers)}
    suffixes: list[list[int]] = []
    for number in chosen.numbers:
        i = place[number]
        example, branch, at = frame["example"].iat[i], frame["branch"].iat[i], int(position[i])
        fork = frame["fork_position"].iat[i]
        path = [before.get((example, branch if p >= fork else 0, p)) for p in range(at, at - LONGEST_CONTEXT, -1)]
        suffixes.append([-1 if n is None else int(token[n]) for n in path])
    table = np.array(suffixes, dtype=np.int64).reshape(len(chosen), LONGEST_CONTEXT)
    for length in range(1, LONGEST_CONTEXT + 1):
        types = np.unique(table[:, :length], axis=0, return_inverse=True)[1].reshape(-1)
        if types.max(initial=0) + 1 >= LEAST_TYPES:
            return types, length
    return None


def control_labels(types: np.ndarray, codes: np.ndarray, seed: int = 0) -> np.ndarray:
    """A class for every type of context, drawn with the frequencies of the real classes: [rows]."""
    shares = np.cumsum(np.bincount(codes[codes >= 0])) / (codes >= 0).sum()
    draws = [int(hashlib.sha256(f"{seed}:{t}".encode()).hexdigest()[:13], 16) / 16**13 for t in range(types.max() + 1)]
    of_type = np.minimum(np.searchsorted(shares, draws, side="right"), len(shares) - 1)
    return np.where(codes >= 0, of_type[types], -1)


def untrained_rows(rows: ProbeRows, engine: "Engine", sites: Sequence[str], seed: int = 0, batch: int = 32) -> ProbeRows:
    """The same paths through a model of the same shape with random weights; rows in the same order.

    The rows must hold all positions of their paths, since every token is run again.
    """
    from replaylens.engine.engine import Engine

    model = Decoder(engine.config).initialize(seed).requires_grad_(False).to(engine.model.embed)
    blank = Engine(model, engine.text)
    frame = rows.frame
    keys = frame.groupby(["example", "branch"], sort=False).indices
    paths: list[tuple[np.ndarray, list[int], int]] = []  # (rows, tokens, first own position)
    for (example, _), own in keys.items():
        own = own[np.argsort(frame["position"].to_numpy()[own], kind="stable")]
        first = int(frame["fork_position"].iat[own[0]])
        main = keys[example, 0]
        head = main[frame["position"].to_numpy()[main] < first]
        tokens = frame["token"].to_numpy()[np.concatenate([head, own])].tolist()
        if frame["position"].iat[own[0]] != first or len(tokens) != frame["position"].iat[own[-1]] + 1:
            raise ProbeError("the untrained model must read whole paths: dump all positions, and give all rows")
        paths.append((own, tokens, first))
    names, _ = engine.sites.select(list(sites))
    tensors = {name: torch.zeros(len(frame), *engine.sites.sites[name].shape) for name in names}
    for start in range(0, len(paths), batch):
        some = paths[start : start + batch]
        branches = blank.prompts([tokens for _, tokens, _ in some], sites=list(names))
        for (own, _, first), made in zip(some, branches, strict=True):
            for name in names:
                tensors[name][torch.from_numpy(own)] = made.activations[name][first:].float()
            made.release()
    letters = {letter: engine.sites.letter(letter) for letter in "STC"}
    return ProbeRows(frame, MemorySource(tensors, letters, rows.about), np.arange(len(frame)))
