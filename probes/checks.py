"""Checks of what a caller gives: masks, prompts, columns and folders. Each error says what was given and what to do.

Numbers and lists are checked by `engine.request.values`, with the errors of the probes.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from replaylens.engine.machine import require_room
from replaylens.engine.request.values import as_int, as_list, as_path, short_repr
from replaylens.probes.errors import BadRows, ProbeError
from replaylens.tasks.task import Example


def names(option: str, given: Any, error: type[ProbeError] = ProbeError) -> tuple[str, ...]:
    """Names from a list, or from text with commas or spaces between them. Raises the error for a name that is given twice."""
    if isinstance(given, str):
        found = [*filter(None, given.replace(" ", ",").split(","))]
    else:
        found = as_list(option, given, "a name, or a list of names", error)
    for name in found:
        if not isinstance(name, str):
            raise error(f"Invalid {option}: {short_repr(name)} is a {type(name).__name__}, not a name. Give names, as text.")
    return once(option, found, error)


def once(option: str, given: list[str], error: type[ProbeError] = ProbeError) -> tuple[str, ...]:
    """The names, if each is given once: a repeated one would count its cells twice."""
    twice = [name for name in dict.fromkeys(given) if given.count(name) > 1]
    if twice:
        raise error(f"{option} has {twice[0]!r} {given.count(twice[0])} times. Give each name once.")
    return tuple(given)


def folds_and_seed(folds: Any, seed: Any) -> tuple[int, int]:
    """Both as plain numbers."""
    return as_int("folds", folds, 1, error=ProbeError), as_int("seed", seed, 0, error=ProbeError)


def layer_list(given: Any) -> tuple[int, ...]:
    """Layers as plain numbers."""
    layers = as_list("layers", given, "a list of layers, such as [0, 3]", ProbeError)
    return tuple(as_int("layers", layer, error=ProbeError) for layer in layers)


def example_list(given: Any) -> list[Example]:
    """Prompts of a task, at least one."""
    how = "a list of a task's examples, such as task.examples(24)"
    found = as_list("examples", given, how, ProbeError)
    for example in found:
        if not isinstance(example, Example):
            raise ProbeError(f"Invalid examples: {short_repr(example)} is a {type(example).__name__}. Give {how}.")
    if not found:
        raise ProbeError("No examples. Give at least one prompt to change.")
    return found


def mask_of(what: str, given: Any, rows: int) -> np.ndarray:
    """[rows] bool. Raises BadRows for another length, and for numbers: rows by number would be taken for True."""
    values = np.asarray(given, dtype=object if getattr(given, "dtype", None) == "boolean" else None)
    if values.dtype == object and all(isinstance(value, bool | np.bool_) for value in values.reshape(-1)):
        values = values.astype(bool)
    if values.shape != (rows,):
        raise BadRows(f"The {what} has shape {list(values.shape)}, but there are {rows} rows. Give one boolean per row.")
    if values.dtype != bool:
        raise BadRows(
            f"The {what} has values such as {short_repr(values[0])}. Give one boolean per row, without missing ones; of row "
            f"numbers, make a mask with np.isin(np.arange({rows}), numbers)."
        )
    return values


def plain(values: Any) -> Any:
    """Tensors of any dtype and device, also with gradients, as NumPy arrays; lists of tensors or rows too. Anything else, such
    as a DataFrame, is returned as it is. Types that NumPy lacks, such as bfloat16, become float32, which holds all of them."""
    if isinstance(values, Tensor):
        found = values.detach().cpu()
        wide = found.is_floating_point() and found.dtype not in (torch.float32, torch.float64)
        return (found.float() if wide else found).resolve_conj().resolve_neg().numpy()
    if isinstance(values, list | tuple) and any(isinstance(value, Tensor) for value in values):
        return np.stack([np.asarray(plain(value)) for value in values])
    return values


def as_matrix(X: Any, width: int | None = None) -> np.ndarray:
    """[rows, d] of numbers from anything that holds them: see `plain`. Raises BadRows for other shapes, or another width."""
    found = np.asarray(plain(X))
    if found.ndim != 2 or found.dtype.kind not in "fiub" or (width is not None and found.shape[1] != width):
        wanted = "[rows, d]" if width is None else f"[rows, {width}]"
        raise BadRows(f"The rows have shape {list(found.shape)} and type {found.dtype}. Give numbers {wanted}, a line per row.")
    return found


def same_length(**columns: Any) -> None:
    """Raise BadRows unless the last dimensions, which count rows, are equal."""
    lengths = {name: np.shape(column)[-1] if np.ndim(column) else 0 for name, column in columns.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise BadRows(f"Different numbers of rows: {listed}. Give one value of each per row.")
    if not min(lengths.values()):
        raise BadRows(f"{' and '.join(lengths)} have no rows. Give at least one value per row, as an array.")


PLACEBO_BYTES = 1000
"""what a probe takes at least"""


def as_draws(name: str, value: Any, least: int = 0, each: int = 8) -> int:
    """A number of random draws; ProbeError if there is no memory for them.

    each  bytes that a draw takes at least
    """
    found = as_int(name, value, least, error=ProbeError)
    require_room(f"{name}={short_repr(found)}", memory=each * found, error=ProbeError)
    return found


def as_numbers(what: str, values: Any) -> np.ndarray:
    """The values in double precision; BadRows if some are no numbers."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise BadRows(f"Invalid {what}={short_repr(values)}: {error}. Give numbers.") from error


def no_nan(what: str, values: np.ndarray) -> None:
    """Raise BadRows if a value is NaN, or no number. Infinite scores still have a rank."""
    bad = np.isnan(as_numbers(what, values))
    if bad.any():
        raise BadRows(f"The {what} has NaN in {int(bad.sum())} of {bad.size} places. Leave out rows without a value.")


def make_folder(given: str | Path) -> Path:
    """The folder, made if it is not there. Raises ProbeError if it is a file or cannot be made."""
    folder = as_path("folder", given, ProbeError)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        why = "it is a file" if os.path.isfile(folder) else (getattr(error, "strerror", None) or str(error))
        raise ProbeError(f"Cannot use {str(given)!r} as a folder: {why}. Give a folder, or a new path.") from None
    return folder
