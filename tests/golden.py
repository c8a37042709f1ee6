"""Golden answers: what every public verb gives on embedded and tiny models, with its figures, tables, texts and errors.

`tests/golden.json` holds the answers, `tests/test_golden.py` compares, and `python -m tests.golden` prints what differs;
`--record` writes it anew. Every answer holds on every kind of processor, and is compared there. It has up to three parts:

a text     or its hash where it is long
a hash     of the numbers in the engine's precisions, float32 and narrower: what is promised bit for bit
a sketch   of the others, which libraries round: how many they are, two weighted sums, and the sum of their sizes, to which
           differences are relative

`ROUNDED` names the answers whose float32 numbers libraries round too.
"""

import argparse
import base64
import dataclasses
import gzip
import hashlib
import inspect
import json
import math
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import nullcontext
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pandas as pd
import torch
from matplotlib.collections import QuadMesh
from matplotlib.figure import Figure

from replaylens.engine.loop.admission import Planner
from replaylens.engine.proof.fingerprint import device_name
from tests.drawings import described

FILE = Path(__file__).with_suffix(".json")
LONGEST = 72
"""characters of a text that is kept as it is"""
TOLERANCE = 1e-5
"""of a sketch, relative to the sum of sizes"""
_ELSEWHERE = {"engine", "fingerprint", "trace", "digest", "identifier", "made_by", "lane", "record", "lock", "forest", "url"}
"""attributes that depend on the machine, or have digests of their own"""
_UNSTEADY = ("rejected.table[bag_of_tokens]", "judge.table", "judge.summary", "judge.findings", "$ probe json")
"""answers that hang on last bits: they change with the kernels of OpenBLAS (OPENBLAS_CORETYPE)"""
ROUNDED = {"solvers": "", "verbs of transformer lens": "parts", "rarer": "lens"}
"""group -> how answers begin whose numbers libraries round, though they are float32"""
Answers = dict[str, dict[str, list[Any]]]


# ---- one value ------------------------------------------------------------------------------------------------------------


class Walk:
    """A value as texts and numbers."""

    def __init__(self, value: Any, rounded: bool = False) -> None:
        self.texts: list[str] = []
        self.numbers: list[np.ndarray] = []
        self.committed: list[bytes] = []
        self.rounded = rounded
        self._add(value)

    def leaf(self) -> list[Any]:
        """[text, or its hash], the hash of what is promised bit for bit and the sketch of other numbers, if there are any."""
        text = _masked(" ".join(self.texts))
        if len(text) > LONGEST:
            text = f"{text[:32]}.. {hashlib.sha256(text.encode()).hexdigest()[:12]}"
        exact = [hashlib.sha256(b"".join(self.committed)).hexdigest()[:16]] if self.committed else []
        return [text, *exact, *(sketch(np.concatenate(self.numbers)) if self.numbers else [])]

    def _add(self, value: Any) -> None:
        if isinstance(value, bool | int | str | bytes | type(None) | np.bool_ | np.integer):
            self.texts.append(_BLOCK.sub(_unpacked, str(value)))
        elif isinstance(value, float | np.floating):
            self._add_array(np.asarray(value, dtype=np.float64), "")
        elif isinstance(value, torch.Tensor):
            plain = value.detach().cpu()
            self._add_array((plain.double() if plain.is_floating_point() else plain).numpy(), str(value.dtype))
        elif isinstance(value, np.ndarray):
            self._add_array(value, str(value.dtype)) if value.dtype.kind in "biuf" else self._add(value.tolist())
        elif isinstance(value, pd.DataFrame | pd.Series):
            for name, column in _columns(value).items():
                self._add([name, column])
        elif isinstance(value, Figure):
            self._add_drawn(described(value))
        elif isinstance(value, Enum):
            self.texts.append(value.name)
        elif isinstance(value, BaseException):
            self.texts.append(f"{type(value).__name__}: {value}")
        else:
            self._add_parts(value)

    def _add_parts(self, value: Any) -> None:
        if isinstance(value, Mapping):
            for key in value:
                self._add(key)
                self._add(value[key])
        elif isinstance(value, Set):
            self._add(sorted(map(str, value)))
        elif isinstance(value, list | tuple | range | Iterator):
            self.texts.append("(")
            for each in value:
                self._add(each)
            self.texts.append(")")
        elif dataclasses.is_dataclass(value):
            self.texts.append(type(value).__name__)
            for each in dataclasses.fields(value):
                if each.name not in _ELSEWHERE and not each.name.startswith("_"):
                    self._add(getattr(value, each.name))
        elif isinstance(value, Path):
            self.texts.append(value.name)
        elif callable(value):
            self.texts.append(getattr(value, "__qualname__", type(value).__name__))
        else:
            self.texts.append(str(value))

    def _add_array(self, value: np.ndarray, dtype: str) -> None:
        self.texts.append(f"{dtype}{list(value.shape)}" if dtype else "")
        if value.dtype.kind != "f":
            self.texts += [str(each) for each in value.ravel().tolist()]
            return
        flat = value.astype(np.float64).ravel()
        odd = np.flatnonzero(~np.isfinite(flat))
        self.texts += [f"{flat[i]}@{i}" for i in odd.tolist()]
        plain = np.where(np.isfinite(flat), flat, 0.0)
        if self.rounded or dtype.endswith("float64") or not dtype:
            self.numbers.append(plain)
        else:
            self.committed.append(plain.tobytes())

    def _add_drawn(self, drawn: Any) -> None:
        """Numbers of a figure are texts, rounded to four digits."""
        for each in drawn:
            if isinstance(each, list | tuple):
                self._add_drawn(each)
            elif isinstance(each, str):
                try:
                    self._add(float(each))
                except ValueError:
                    self.texts.append(each)
            else:
                self._add(each)


def sketch(values: np.ndarray) -> list[float]:
    """[how many, two weighted sums, sum of sizes]"""
    i = np.arange(len(values), dtype=np.float64)
    sums = values @ (1 + (i * 0.6180339887) % 1), values @ np.cos(1.7 * i + 0.3), np.abs(values).sum()
    return [len(values), *(float(f"{each:.9g}") for each in sums)]


def same(found: list[Any], known: list[Any]) -> bool:
    """Whether two leaves agree."""
    (mine, own), (theirs, other) = _parts(found), _parts(known)
    if mine != theirs or own[:1] != other[:1] or len(own) != len(other):
        return False
    return all(math.isclose(a, b, rel_tol=0, abs_tol=TOLERANCE * other[3] + 1e-12) for a, b in zip(own, other, strict=True))


def _parts(leaf: list[Any]) -> tuple[list[str], list[float]]:
    """What must be equal, and the sketch."""
    return [each for each in leaf if isinstance(each, str)], [each for each in leaf if not isinstance(each, str)]


_MASKS = {
    re.escape(tempfile.gettempdir()) + r"/[\w.-]+": "TMP",
    re.escape(device_name(torch.device("cpu"))): "PROCESSOR",
    re.escape(torch.__version__): "TORCH",
    r" at 0x[0-9a-f]+": "",
    r"[0-9a-f]{40,}": "HASH",
}
"""what differs between machines -> what stands for it"""


_BLOCK = re.compile(r'(<script type="text/plain"[^>]*>)([^<]*)')


def _unpacked(block: re.Match[str]) -> str:
    """A packed part of a page as it is written: how it is packed depends on the version of zlib."""
    return block[1] + gzip.decompress(base64.b64decode(block[2])).decode()


def _masked(text: str) -> str:
    for pattern, instead in _MASKS.items():
        text = re.sub(pattern, instead, text)
    return text


def _columns(value: "pd.DataFrame | pd.Series[Any]") -> dict[str, Any]:
    """Of equal values in a column of texts, all; dates and objects as texts."""
    if isinstance(value, pd.Series):
        value = value.to_frame(str(value.name))
    found: dict[str, Any] = {}
    for name in value.columns:
        column = value[name]
        kind = column.dtype.kind if isinstance(column.dtype, np.dtype) else "O"
        found[str(name)] = (
            column.to_numpy() if kind in "biuf" else ["" if each is None or each is pd.NA else each for each in column]
        )
    return found


def bits(*tensors: torch.Tensor) -> str:
    """A digest of tensors, bit for bit."""
    found = hashlib.sha256()
    for each in tensors:
        plain = each.detach().cpu().contiguous()
        found.update(
            f"{each.dtype}{list(each.shape)}".encode() + plain.view(torch.uint8).numpy().tobytes() if plain.dim() else b""
        )
    return found.hexdigest()[:16]


def error(call: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """The error that a call raises; what it gives if it raises none."""
    try:
        return call(*given, **options)
    except Exception as found:
        return found


def strokes(figure: Figure) -> Iterator[Any]:
    """What `described` leaves out: limits, widths, sizes of marks, their places and colours, bands, ranges of colours."""
    for axis in figure.axes:
        yield np.array([*axis.get_xlim(), *axis.get_ylim()])
        yield [np.array([line.get_linewidth(), line.get_markersize()]) for line in axis.lines]
        for each in axis.collections:
            if not isinstance(each, QuadMesh):
                yield [*(path.vertices for path in each.get_paths()), np.ma.filled(each.get_offsets(), np.nan)]
            yield [each.get_facecolor(), each.get_linewidths(), getattr(each, "get_sizes", list)(), each.get_clim()]
        yield [(each.get_clim(), each.get_extent()) for each in axis.images]


# ---- results --------------------------------------------------------------------------------------------------------------


def answers_of(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of everything that a result tells: fields, properties, columns, text, figure, page."""
    if isinstance(value, pd.DataFrame):
        yield from ((f"{name}[{column}]", each) for column, each in _columns(value).items())
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for key, each in value.items():
            yield from answers_of(f"{name}.{key}" if name else key, each)
    elif type(value).__module__.startswith("replaylens") and not isinstance(value, BaseException | Enum | Figure):
        yield from _of_object(name, value)
    elif isinstance(value, Figure):
        yield from ((name, value), (f"{name}.strokes", strokes(value)))
    else:
        yield name, value


def _of_object(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    public = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    public += [each for each in dir(kind) if isinstance(getattr(kind, each, None), property | cached_property)]
    for each in dict.fromkeys(public):
        if each in _ELSEWHERE or each.startswith("_"):
            continue
        found = error(getattr, value, each)
        if isinstance(found, pd.DataFrame):
            yield from answers_of(f"{name}.{each}", found)
        else:
            yield f"{name}.{each}", found
    if not _repeats_its_fields(kind):
        yield f"{name}.str", str(value)
    if hasattr(value, "plot"):
        yield from answers_of(f"{name}.plot", error(value.plot))
    if hasattr(value, "_repr_html_"):
        yield f"{name}.page", value._repr_html_() or ""


def _repeats_its_fields(kind: type) -> bool:
    """Whether its text is the one that dataclasses write, with all digits of all numbers."""
    code = getattr(inspect.unwrap(kind.__repr__), "__code__", None)
    return kind.__str__ is object.__str__ and code is not None and code.co_filename == "<string>"


def answers(group: Callable[[], dict[str, Any]]) -> dict[str, list[Any]]:
    """name -> leaf of everything that a group of calls gives. No costs are measured, which drafts depend on: a busy machine
    gives the same answers."""
    untimed = patch.object(Planner, "timing", lambda self, kind, rows: nullcontext())
    with torch.no_grad(), nullcontext() if group.__name__ == "_planner" else untimed:
        found = ((name, value) for key, each in group().items() for name, value in answers_of(key, each))
        rounded = ROUNDED.get(group.__name__.replace("_", " ").strip(), "\0")
        return {name: Walk(value, name.startswith(rounded)).leaf() for name, value in found if not name.startswith(_UNSTEADY)}


def differences(found: dict[str, list[Any]], known: dict[str, list[Any]]) -> list[str]:
    """A line per answer that is new, gone or different."""
    return [
        f"{name}: {known.get(name, 'new')} -> {found.get(name, 'gone')}"
        for name in {**known, **found}
        if name not in found or name not in known or not same(found[name], known[name])
    ]


def read() -> Answers:
    """The answers on file."""
    known: Answers = json.loads(FILE.read_text())
    return known


def main() -> int:
    """Compare all groups, or those named, with the file; with --record, write them into it."""
    from tests.golden_inside import GROUPS

    parser = argparse.ArgumentParser(prog="python -m tests.golden", description=__doc__)
    parser.add_argument("groups", nargs="*", choices=[*GROUPS, []], help="default: all")
    parser.add_argument("--record", action="store_true", help="write what was found; read the differences first")
    given = parser.parse_args()
    known = read()
    changed = 0
    for name in given.groups or GROUPS:
        found = answers(GROUPS[name])
        lines = differences(found, known.get(name, {}))
        changed += len(lines)
        print(*(f"{name}: {line}" for line in lines), sep="\n", flush=True)
        known[name] = found
    if given.record:
        lines = [
            f" {json.dumps(name)}: {{\n"
            + ",\n".join(f"  {json.dumps(key)}: {json.dumps(leaf)}" for key, leaf in known[name].items())
            + "\n }"
            for name in GROUPS
            if name in known
        ]
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{changed} differences in {sum(map(len, known.values()))} answers")
    return 1 if changed and not given.record else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
