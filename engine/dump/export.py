"""A dump as a Hugging Face `Dataset`: index columns and activations, over the mapped files where Arrow knows the dtype."""

import hashlib
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from replaylens.engine.dump.array import Located, SiteArray, gather, shard_starts
from replaylens.engine.dump.files import DumpFiles
from replaylens.engine.errors import MissingPackage

if TYPE_CHECKING:
    from datasets import Dataset


def to_dataset(files: DumpFiles, sites: dict[str, tuple[str, int | None]], chosen: np.ndarray | None) -> "Dataset":
    """The index columns of the chosen rows (None: all), and one column per site. Raises MissingPackage."""
    try:
        from datasets import Dataset
    except ImportError:
        raise MissingPackage("`to_dataset` needs the package datasets. Install it with: pip install datasets") from None
    table = arrow_table(files, sites, chosen)
    rows = "" if chosen is None else hashlib.sha256(chosen.astype("<i8").tobytes()).hexdigest()
    name = hashlib.sha256(repr((files.manifest.digest, sorted(sites.items()), rows)).encode()).hexdigest()[:16]
    return Dataset(table, fingerprint=name)  # without one, datasets would hash all activations to make one


def arrow_table(files: DumpFiles, sites: dict[str, tuple[str, int | None]], chosen: np.ndarray | None) -> pa.Table:
    """One chunk per shard; a row of a site is a list of fixed length, nested if it has several dimensions."""
    lines = pa.concat_tables([files.lines(number, files.columns) for number in range(len(files.manifest.shards))])
    if chosen is not None:
        lines = lines.take(pa.array(chosen))
    for key, (name, entry) in sites.items():
        lines = lines.append_column(key, pa.chunked_array(_chunks(files, name, entry, chosen)))
    return lines


def _chunks(files: DumpFiles, name: str, entry: int | None, chosen: np.ndarray | None) -> list[Any]:
    if chosen is None and files.store.local:
        return [_arrow(x) for x in SiteArray(files, name, entry, None).pieces()]
    numbers = np.arange(files.manifest.rows) if chosen is None else chosen
    return [_arrow(gather(files, name, entry, Located.of(shard_starts(files), numbers)))]


def _arrow(x: Tensor) -> Any:
    """Without a copy, but for bfloat16, which Arrow lacks: it becomes float32 without loss."""
    x = x.float() if x.dtype is torch.bfloat16 else x
    values: Any = pa.array(x.contiguous().numpy().reshape(-1))
    for length in reversed(x.shape[1:]):
        values = pa.FixedSizeListArray.from_arrays(values, length)
    return values
