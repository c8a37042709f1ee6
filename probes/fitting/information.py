"""Scores beyond accuracy: usable information, description length, calibration.

V-information (Xu et al., arXiv 2002.10689): bits about the label that a family of probes gains over the class frequencies.
Online code (Voita & Titov, arXiv 2003.12298): bits to transmit the labels given the rows, each block coded by a probe fitted
on the blocks before it. Expected calibration error: the gap between confidence and accuracy.

A probe cannot know a class that its training rows lack, and would pay without bound for it. So every probability p of k
classes, of a probe fitted on n rows and of their class frequencies alike, counts as

    (n p + 1/2) / (n + k/2)

For frequencies this is the estimator of Krichevsky and Trofimov (1981), the standard code for a class that has not occurred.
For a probe it is a mixture with the uniform distribution, of weight k / (2n + k), that fades as rows come in. No row costs more
than log(2n + k).
"""

from itertools import pairwise

import numpy as np

from replaylens.probes.design.splits import fold_of_groups

BLOCKS = (0.001, 0.002, 0.004, 0.008, 0.016, 0.032, 0.0625, 0.125, 0.25, 0.5, 1.0)
"""ends of the blocks, as fractions of the roots"""
MIN_ROOTS = 8
"""minimum number of roots to fit a probe on; earlier rows are coded uniformly"""


def v_information(log_loss: np.ndarray, null_log_loss: np.ndarray) -> float:
    """Bits per row, from held-out losses in nats under the probe and under the class frequencies of its training set."""
    return float((null_log_loss.mean() - log_loss.mean()) / np.log(2))


def smoothed(log_p: np.ndarray, rows: int) -> np.ndarray:
    """Log-probabilities [..., k] of classes by the rule above, from those of a probe fitted on so many rows."""
    counts = rows * np.exp(log_p)
    out: np.ndarray = np.log((counts + 0.5) / (rows + 0.5 * log_p.shape[-1]))
    return out


def null_log_loss(codes: np.ndarray, train: np.ndarray, test: np.ndarray, classes: int) -> np.ndarray:
    """[rows]: log-loss in nats of each tested row under the class frequencies of the rows that its probe is fitted on.

    codes        [rows]: class numbers, -1 if missing (such a row counts nowhere)
    train, test  [folds, rows] bool; NaN for rows that no fold tests
    """
    out = np.full(len(codes), np.nan)
    for fit, held in zip(train & (codes >= 0), test & (codes >= 0), strict=True):
        with np.errstate(divide="ignore"):
            log_p = np.log(np.bincount(codes[fit], minlength=classes) / max(fit.sum(), 1))
        out[held] = -smoothed(log_p, int(fit.sum()))[codes[held]]
    return out


def calibration_error(confidence: np.ndarray, correct: np.ndarray, bins: int = 15) -> float:
    """Mean gap between confidence and accuracy over bins with the same number of rows, each weighted by its rows."""
    order = np.argsort(confidence, kind="stable")
    parts = [part for part in np.array_split(order, bins) if len(part)]
    gaps = [abs(confidence[part].mean() - correct[part].mean()) * len(part) for part in parts]
    return float(sum(gaps) / len(confidence))


def code_blocks(roots: np.ndarray, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(train, test) masks [blocks, rows] of the online code; rows in no test block come before the first probe."""
    number = len(np.unique(roots))
    rank = fold_of_groups(roots, number, seed)  # as many folds as roots: a shuffled order of the roots
    ends = sorted({round(number * share) for share in BLOCKS if round(number * share) >= min(MIN_ROOTS, number // 2)})
    train = np.stack([rank < begin for begin in ends[:-1]])
    test = np.stack([(rank >= begin) & (rank < end) for begin, end in pairwise(ends)])
    return train, test


def code_length(log_loss: np.ndarray, coded: np.ndarray, classes: int) -> tuple[float, float]:
    """(bits per row, compression). A row that no probe codes costs log2(classes) bits.

    log_loss  [rows], in nats; only entries with `coded` count. Compression above 1 means fewer bits than a uniform code.
    """
    even = np.log2(classes)
    bits = log_loss[coded].sum() / np.log(2) + even * (~coded).sum()
    return float(bits / len(log_loss)), float(even * len(log_loss) / max(bits, 1e-12))
