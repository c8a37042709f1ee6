"""`Shards`: the tensors of a folder of safetensors files, read one by one."""

import json
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from replaylens.engine.errors import BadWeights

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAPPED_BYTES = 1 << 28
"""how much is read before files are mapped anew, which returns the memory of what was read"""


class Shards:
    """All tensors of a folder, one file or sharded by an index. BadWeights names the file at fault.

    Files are mapped into memory. The pages that were read of a mapping count as memory of the process until it ends. So files
    are closed once much was read: only the mappings of tensors that are still in use remain.
    """

    def __init__(self, folder: Path, files: list[str] | None = None) -> None:
        """files  their names; default: those of a model"""
        self.folder = folder
        self.names: dict[str, str] = {}
        """tensor -> its file"""
        self._open: dict[str, Any] = {}
        self._mapped = 0
        for file in weight_files(folder) if files is None else files:
            for name in self._handle(file).keys():  # noqa: SIM118 (not a dict)
                if name in self.names:
                    raise BadWeights(
                        f"Tensor {name} is both in {self.names[name]} and in {file}. Is one left from an earlier save?"
                    )
                self.names[name] = file

    def read(self, name: str) -> Tensor:
        """The tensor, in a mapping of its file or a copy of it."""
        x: Tensor = self._handle(self.names[name]).get_tensor(name)
        self._mapped += x.nbytes
        if self._mapped > MAPPED_BYTES:
            self._open.clear()
            self._mapped = 0
        return x

    def _handle(self, file: str) -> Any:
        if file not in self._open:
            self._open[file] = _opened(self.folder / file)
        return self._open[file]


def weight_files(folder: Path) -> list[str]:
    """The names of a folder's weight files, present or not."""
    index = folder / INDEX_FILE
    if not index.exists():
        return [WEIGHTS_FILE]
    try:
        files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        bad = [name for name in files if Path(name).name != name]
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise BadWeights(f"{index} is not an index of shards ({e!r}). Copy it again.") from None
    if bad:
        raise BadWeights(f"{index} points outside its folder: {bad}.")
    if (folder / WEIGHTS_FILE).exists() and WEIGHTS_FILE not in files:  # transformers would read this one alone
        raise BadWeights(f"{folder} holds both {WEIGHTS_FILE} and {index.name}, which may be two models. Remove one.")
    return files


def _opened(file: Path) -> Any:
    if not file.exists():
        raise BadWeights(f"{file} is missing. Only safetensors checkpoints are read (no pickle).")
    try:
        return safe_open(file, framework="pt")
    except Exception as e:
        raise BadWeights(f"{file} is not a readable safetensors file: {e}") from e
