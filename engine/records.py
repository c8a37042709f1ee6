"""JSON records, read strictly into dataclasses: every value has its annotated type, and no field is missing or unknown.

Nothing is coerced: 4.0 and true are no whole numbers, NaN and Infinity are no JSON. Limits are annotations, too.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from replaylens.engine.errors import BadRequest, EngineError
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = Later("torch")

T = TypeVar("T")
Count = Annotated[int, Meta(ge=0, le=1 << 48)]
"""a number of rows or examples, or the index of one"""
Positive = Annotated[int, Meta(ge=1, le=1 << 48)]
Natural = Annotated[int, Meta(ge=0)]
Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


def one_of(*names: str) -> Meta:
    """The constraint that a string is one of these."""
    return Meta(pattern=rf"^({'|'.join(names)})\Z")


def parse(content: bytes | str, what: str, error: type[EngineError]) -> Any:
    """The JSON value of a file, in plain Python values. `what` names the file in the error."""
    try:
        return msgspec.json.decode(content)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as problem:
        raise error(f"{what} is not JSON ({str(problem)[:100]}).") from None


def build(kind: type[T], raw: Any, what: str, error: type[EngineError]) -> T:
    """A dataclass from plain values. The error names the offending field by its path from `$`, the record itself."""
    try:
        made = msgspec.convert(raw, kind, str_keys=True)
    except (msgspec.ValidationError, RecursionError) as problem:
        raise error(f"{what} is invalid: {str(problem)[:300]}.") from None
    if (unknown := _unknown(made, raw)) is not None:
        raise error(f"{what} is invalid: unknown field - at `${unknown[:200]}`.")
    return made


def read(kind: type[T], content: bytes | str, what: str, error: type[EngineError]) -> T:
    """A dataclass from the JSON of a file."""
    return build(kind, parse(content, what, error), what, error)


def _unknown(made: Any, raw: Any) -> str | None:
    """The path of the first field that its dataclass does not have, which msgspec ignores."""
    if is_dataclass(made) and isinstance(raw, dict):
        for name, value in raw.items():
            if name not in made.__dataclass_fields__:
                return f".{name}"
            if isinstance(value, dict | list) and (inner := _unknown(getattr(made, name), value)) is not None:
                return f".{name}{inner}"
    elif made is not raw and isinstance(raw, dict) and isinstance(made, dict):
        for (name, value), item in zip(raw.items(), made.values(), strict=True):
            if isinstance(value, dict | list) and (inner := _unknown(item, value)) is not None:
                return f".{name}{inner}"
    elif made is not raw and isinstance(raw, list) and isinstance(made, list | tuple):
        for place, (value, item) in enumerate(zip(raw, made, strict=True)):
            if isinstance(value, dict | list) and (inner := _unknown(item, value)) is not None:
                return f"[{place}]{inner}"
    return None


# ---- fingerprint -----------------------------------------------------------------------------------------------------


DTYPES = ("float32", "bfloat16", "float16")
"""what an engine computes in, and what a dump stores"""
BEFORE_PORTABLE = "f10e131a"
"""the last commit whose CPU computes in the earlier arithmetic; the number of the version did not change"""


@dataclass(frozen=True)
class Fingerprint:
    """Results with equal fingerprint, token path and edits have equal bits.

    Portable arithmetic (`canonical`) has the same bits on every machine, so device and versions are told and bind nothing.
    """

    weights: str
    config: str
    dtype: str
    device: str
    torch: str
    triton: str
    replaylens: str
    canonical: str
    revision: str = ""
    """name@commit of a model from the Hugging Face hub; empty: from elsewhere"""

    @property
    def digest(self) -> str:
        binding = self._binding
        bound = {name: value for name, value in self.parts().items() if name in binding}
        return hashlib.sha256(json.dumps(bound, sort_keys=True).encode()).hexdigest()

    @property
    def _binding(self) -> set[str]:
        """The parts that results depend on."""
        free = {"device", "torch", "triton", "replaylens"} if self.canonical.startswith("portable") else set()
        return set(vars(self)) - free

    @property
    def unbound(self) -> set[str]:
        """The parts that no result shows."""
        return set(vars(self)) - self._binding

    @property
    def arithmetic(self) -> str:
        """The arithmetic, and what else its bits are bound to: nothing, a kind of GPU, or, before `portable-1`, a processor."""
        if self.canonical.startswith("portable"):
            return self.canonical
        made = f"{self.dtype} on {self.device} with torch {self.torch}"
        return f"{self.canonical} ({made} and triton {self.triton})" if self._of_gpu else f"{self.canonical} ({made})"

    @property
    def computed(self) -> str:
        """The arithmetic, and the dtype of its numbers."""
        portable = self.canonical.startswith("portable")
        return f"{self.canonical} ({self.dtype}, the same bits on every machine)" if portable else self.arithmetic

    @property
    def maker(self) -> str:
        """Who could compute these bits again."""
        if self.canonical.startswith("portable"):
            return f"replaylens {self.replaylens} in {self.dtype} on any machine"
        version = self.replaylens if self._of_gpu else f"{self.replaylens} up to commit {BEFORE_PORTABLE}, before portable-1,"
        triton = f" and triton {self.triton}" if self._of_gpu else ""
        return f"replaylens {version} on {self.device} with torch {self.torch}{triton}"

    @property
    def _of_gpu(self) -> bool:
        return self.canonical.startswith("cuda")

    @property
    def cited(self) -> dict[str, str]:
        """What a citation says of the computation."""
        model = self.revision or f"weights sha256:{self.weights}"
        return {"model": model, "arithmetic": self.arithmetic, "replaylens": self.replaylens}

    def other_kind(self, other: Fingerprint) -> str | None:
        """What to do if both are bound to GPUs, of different kinds; None if they are not."""
        if not (self._of_gpu and other._of_gpu and self.device != other.device):
            return None
        return (
            f"bits in {self.dtype} hold on one kind of GPU, and these are of {self.device} here, {other.device} there; to "
            "compare what they compute, make both in float32, whose bits are the same on every machine"
        )

    def to_json(self) -> str:
        return json.dumps(self.parts(), sort_keys=True)

    def parts(self) -> dict[str, str]:
        """What is written: a revision only if there is one, so that other fingerprints keep their bytes."""
        return {name: value for name, value in vars(self).items() if name != "revision" or value}

    def differences(self, other: Fingerprint) -> list[str]:
        """The parts that differ and that results depend on, one readable line each."""
        mine, theirs, binding = asdict(self), asdict(other), self._binding | other._binding
        differ = [name for name in mine if name in binding and mine[name] != theirs[name]]
        return [f"{name}: {mine[name]} here, {theirs[name]} there" for name in differ]


# ---- citation --------------------------------------------------------------------------------------------------------
# `Identifier`: the name of a result in a paper, the same wherever the result is computed again. `Citation`: text and BibTeX.

SCHEME = "replaylens:sha256:"
_IDENTIFIER = re.compile(rf"{SCHEME}([0-9a-f]{{64}})(?:#([0-9]{{1,15}})\.([0-9]{{1,15}})\.([0-9]{{1,15}}))?")


@dataclass(frozen=True)
class Identifier:
    """replaylens:sha256:DIGEST of a dump, rollouts, a report or a figure; of a row, #EXAMPLE.BRANCH.POSITION follows.

    The digest is that of the content, as its class defines it. The place of a row says where to look, and is not hashed.

    >>> str(Identifier("0" * 64, (3, 0, 17)))[-12:]
    '00000#3.0.17'
    """

    digest: str
    row: tuple[int, int, int] | None = None
    """example, branch and position"""

    def __str__(self) -> str:
        return f"{SCHEME}{self.digest}" + ("" if self.row is None else f"#{'.'.join(map(str, self.row))}")

    @classmethod
    def parse(cls, text: str) -> Identifier:
        """Inverse of `str`; BadRequest for other texts."""
        found = _IDENTIFIER.fullmatch(text)
        if found is None:
            form = f"{SCHEME} and 64 hexadecimal digits; of a row, #EXAMPLE.BRANCH.POSITION after them"
            raise BadRequest(f"Invalid identifier {text[:100]!r}. Give {form}.")
        example, branch, position = found.groups()[1:]
        return cls(found[1], None if example is None else (int(example), int(branch), int(position)))


def digest_of(value: Any) -> str:
    """SHA-256 of a JSON value. The order of keys does not count; NaN and Infinity are no JSON."""
    plain = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(plain.encode()).hexdigest()


@dataclass(frozen=True)
class Citation:
    """How to cite a result. `text` and `bibtex` are ready to paste; `str` gives both."""

    identifier: str
    what: str
    """the result in a few words"""
    check: str
    """the command that checks it"""
    replaylens: str | None = None
    """the version that computed it; None: computed elsewhere, as given arrays are"""
    model: str | None = None
    """name@commit on the Hugging Face hub, or the digest of the weights"""
    arithmetic: str | None = None
    """such as portable-1, whose bits are those of every machine"""
    fingerprint: str | None = None
    """digest of all that the bits depend on"""

    @property
    def _facts(self) -> str:
        given = {"replaylens": self.replaylens, "model": self.model, "arithmetic": self.arithmetic}
        given["fingerprint"] = None if self.fingerprint is None else self.fingerprint[:16]
        return ", ".join(f"{name} {value}" for name, value in given.items() if value) or "rows computed elsewhere"

    @property
    def text(self) -> str:
        return f"{self.what} ({self._facts}). {self.identifier}. Check: {self.check}"

    @property
    def bibtex(self) -> str:
        key = f"replaylens-{Identifier.parse(self.identifier).digest[:12]}"
        fields = {"key": "replaylens", "title": f"{{{_tex(self.what)}}}"}
        fields |= {"howpublished": rf"\texttt{{{_tex(self.identifier)}}}", "note": _tex(self._facts)}
        return "\n".join([f"@misc{{{key},", *(f"  {name} = {{{value}}}," for name, value in fields.items()), "}"])

    def __str__(self) -> str:
        return f"{self.text}\n\n{self.bibtex}"


def _tex(text: str) -> str:
    """Text whose special characters BibTeX and LaTeX take as they are."""
    special = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
    return re.sub(r"[\\~^{}%#&_$]", lambda found: special.get(found[0], f"\\{found[0]}"), text)


# ---- edits -----------------------------------------------------------------------------------------------------------
# How edits are written in files: by `Edit.to_json` in dump plans, and by `PlacedEdit.to_json` in traces.


@dataclass(frozen=True)
class SliceRecord:
    """Positions [start, stop)."""

    start: int | None
    stop: int | None


@dataclass(frozen=True)
class TensorRecord:
    """float32, in base64."""

    shape: Annotated[tuple[Count, ...], Meta(max_length=8)]
    data: str


@dataclass(frozen=True)
class EditRecord:
    """An edit as it was asked for."""

    site: str
    op: str
    positions: int | tuple[int, ...] | SliceRecord | None
    layers: tuple[int, ...] | None
    factor: float
    seed: Natural
    value: TensorRecord | UnsetType = UNSET
    heads: tuple[Count, ...] | UnsetType = UNSET
    keys: int | tuple[int, ...] | SliceRecord | UnsetType = UNSET
    keep_norm: bool | UnsetType = UNSET
    when: TensorRecord | UnsetType = UNSET
    tokens: tuple[str | Count, ...] | UnsetType = UNSET
    experts: tuple[Count, ...] | UnsetType = UNSET
    match_norm: bool | UnsetType = UNSET
    above: float | UnsetType = UNSET


@dataclass(frozen=True)
class PlacedEditRecord:
    """An edit at one site, with positions counted from 0."""

    site: str
    op: str
    start: Count
    stop: Count | None
    picks: tuple[Count, ...]
    factor: float
    seed: Natural
    needs: Count = 0
    value: TensorRecord | UnsetType = UNSET
    heads: tuple[Count, ...] = ()
    keys: tuple[Count, ...] = ()
    keep_norm: bool = False
    when: TensorRecord | UnsetType = UNSET
    tokens: tuple[Count, ...] = ()
    match_norm: bool = False
    above: float = 0.0


# ---- probes ----------------------------------------------------------------------------------------------------------
# How dumps name the probes whose scores they hold.


@dataclass(frozen=True)
class ProbeRecord:
    """A linear probe: score = weight x + bias, one line for two classes (positive: the second), else one per class."""

    name: str
    site: str
    label: str
    classes: tuple[str, ...]
    weight: TensorRecord
    """[k, d]"""
    bias: TensorRecord
    """[k]"""

    @property
    def digest(self) -> str:
        """SHA-256 of all but its name."""
        return digest_of({name: value for name, value in asdict(self).items() if name != "name"})


# ---- lens ------------------------------------------------------------------------------------------------------------
# How Z is stored: in dump plans, and in what a request captures.

MAX_TOP, MAX_TARGETS = 32, 63
"""limits of the lens kernel per row; the emitted token takes one more target"""


@dataclass(frozen=True)
class LensSpec:
    """How Z, the logit lens at every layer, is stored."""

    sites: tuple[str, ...]
    """the residual streams it reads, in layer order; the last is the model's own output"""
    top_k: int = 8
    targets: tuple[int, ...] = ()
    """token ids whose log-probs are always kept"""
    full: bool = False
    """keep whole distributions"""
    tuned: str | None = None
    """digest of the tuned lens it is read through; None: the plain lens"""

    def targets_on(self, device: torch.device) -> Tensor | None:
        """`targets` as a tensor [tokens], int64; None: there are none."""
        return torch.tensor(self.targets).to(device, non_blocking=True) if self.targets else None

    @property
    def fits_kernel(self) -> bool:
        """Whether the kernel of a GPU can compute it. It cannot give whole distributions or long lists."""
        return not self.full and self.top_k <= MAX_TOP and len(self.targets) <= MAX_TARGETS

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> LensSpec:
        """Inverse of `asdict`, with lists for tuples."""
        return cls(**{**raw, "sites": tuple(raw["sites"]), "targets": tuple(raw["targets"])})
