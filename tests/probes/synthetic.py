"""Synthetic rows in which the content of every layer is known exactly."""

import hashlib
from typing import Any

import numpy as np
import pandas as pd
import torch

from replaylens.probes.positions import add_places
from replaylens.probes.rows import ProbeRows
from replaylens.probes.sources import About, MemorySource

WIDTH = 16


def rows_of(
    roots: int = 100, per_root: int = 2, seed: int = 0, effect: float = 3.0, width: int = WIDTH, **columns: Any
) -> ProbeRows:
    """Rows shaped like those of the coin task, `per_root` steps per root.

    S has three layers. Layer 0 is noise that the rows of a root share. Layer 1 holds `face` along `direction(seed)`. Layer 2 is
    layer 1 with that direction removed, so it holds nothing. `face` is a fair coin per row, `shuffled` one per root,
    `next_action` one per row.
    """
    generator = np.random.default_rng(seed)
    n = roots * per_root
    example = np.repeat(np.arange(roots), per_root)
    names = [hashlib.sha256(f"{seed}:{i}".encode()).hexdigest()[:16] for i in range(roots)]
    face = generator.integers(2, size=n)
    noise = generator.normal(size=(n, width)) + np.repeat(generator.normal(size=(roots, width)), per_root, 0)
    way = direction(seed, width)
    clean = noise - np.outer(noise @ way, way)
    planted = clean + np.outer((face - 0.5) * effect + 0.5 * generator.normal(size=n), way)
    frame = pd.DataFrame(
        {
            "example": example,
            "root": np.array(names)[example],
            "branch": 0,
            "parent": pd.NA,
            "fork_position": 0,
            "position": np.tile(np.arange(per_root), roots),
            "token": generator.integers(30, size=n),
            "text": " x",
            "token_state": "prompt",
            "accepted": True,
            "correct": True,
            "logprob": 0.0,
            "entropy": 0.0,
            "depth": 0,
            "actions": np.tile(np.arange(1, per_root + 1), roots),
            "face": np.where(face == 1, "tails", "heads"),
            "next_action": np.where(generator.integers(2, size=n) == 1, "flip", "keep"),
            "shuffled": np.repeat(generator.integers(2, size=roots), per_root),
            **columns,
        }
    )
    tensors = {f"blocks.{i}.hook_in": torch.from_numpy(x) for i, x in enumerate((noise, planted, clean))}
    source = MemorySource(tensors, {"S": list(tensors)}, About("coin", {}, "", None))
    return ProbeRows(add_places(frame, "actions"), source, np.arange(n))


def direction(seed: int = 0, width: int = WIDTH) -> np.ndarray:
    """The unit vector along which `rows_of` plants `face`."""
    way = np.random.default_rng([seed, 7]).normal(size=width)
    return way / np.linalg.norm(way)


def labelled_rows(x: np.ndarray, root: np.ndarray, label: np.ndarray, **columns: Any) -> ProbeRows:
    """Rows x [layers, rows, d] as S, with the column `label`; rows of equal root are positions of one prompt.

    Two rows of different roots have the same path if their columns `token` and their rows are equal.
    """
    position = np.concatenate([np.arange(count) for count in np.unique(root, return_counts=True)[1]])
    names = [hashlib.sha256(f"root:{i}".encode()).hexdigest()[:16] for i in np.unique(root)]
    frame = pd.DataFrame(
        {
            "example": root,
            "root": np.array(names)[np.unique(root, return_inverse=True)[1]],
            "branch": 0,
            "parent": pd.NA,
            "fork_position": 0,
            "position": position,
            "token": np.arange(len(root)),
            "text": " x",
            "token_state": "prompt",
            "accepted": True,
            "correct": True,
            "logprob": 0.0,
            "entropy": 0.0,
            "depth": 0,
            "actions": position + 1,
            "label": label,
        }
        | columns
    )
    steps = columns.get("steps")
    frame = add_places(frame.drop(columns="steps", errors="ignore"), "actions")
    frame = frame if steps is None else frame.assign(steps=steps)
    tensors = {f"blocks.{i}.hook_in": torch.from_numpy(layer) for i, layer in enumerate(x)}
    source = MemorySource(tensors, {"S": list(tensors)}, About("coin", {}, "", None))
    return ProbeRows(frame, source, np.arange(len(frame)))
