"""`DumpPlan`: everything that determines a dump's content. Batch size, workers and order of work are not part of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from msgspec import UNSET, UnsetType

from replaylens import tasks
from replaylens.engine.errors import BadDump, BadRequest, no_such
from replaylens.engine.records import DTYPES, Count, EditRecord, Hash, LensSpec, Positive, ProbeRecord, build
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_instance, as_int, as_list, integer, short_repr
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from replaylens.engine.engine import Engine
    from replaylens.engine.request.capture import Recording
    from replaylens.engine.request.positions import Position
    from replaylens.features.features import SparseFeatures
    from replaylens.features.rows import FeatureRows
    from replaylens.tasks.reading import Label, Reading
    from replaylens.tasks.task import AnyTask, Example
    from replaylens.tasks.texts import GivenTexts
else:
    torch = Later("torch")

# ---- path ------------------------------------------------------------------------------------------------------------
# `ExamplePath`: one token path of an example, with its captured rows.


@dataclass(eq=False)
class ExamplePath:
    """One token path of an example, with the rows that it does not share with the accepted path: those from `base` on."""

    example: Example
    branch: int
    """0: the accepted path"""
    tokens: list[int]
    num_prompt: int
    base: int
    """position of its first own token; 0 for the accepted path"""
    correct: bool | None
    recording: Recording
    tokenizer: Any

    accepted: ExamplePath | None = None
    """the accepted path of the example, if this is a rejected one: up to `base` it has the same tokens"""

    @cached_property
    def _text(self) -> tuple[str, list[tuple[int, int]]]:
        from replaylens.tasks.tokenizer import path_offsets

        known = self.accepted.offsets[: self.base] if self.accepted is not None else ()
        return path_offsets(self.tokenizer, self.tokens, known)

    @property
    def text(self) -> str:
        return self._text[0]

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """Characters [start, end) of each token."""
        return self._text[1]

    @cached_property
    def reading(self) -> Reading:
        """The task's reading of the text."""
        known = self.accepted.reading if self.accepted is not None else None
        return self.example.maker.read(self.text, self.example.index, known)

    def labels_at(self, positions: Sequence[int], names: Sequence[str]) -> dict[str, list[Label]]:
        """Labels of some of its tokens: those of a given text are known by position, others are read from the text."""
        from replaylens.tasks.reading import SHUFFLED
        from replaylens.tasks.texts import GivenTexts

        given, maker = self.example.given, self.example.maker
        if given is None or not isinstance(maker, GivenTexts):
            return self.reading.labels_at([self.offsets[position] for position in positions], names)
        drawn: list[Label] = [maker.shuffled(self.example.index)] * len(positions)
        return {name: drawn if name == SHUFFLED else values for name, values in given.labels_at(positions, names).items()}


# ---- features --------------------------------------------------------------------------------------------------------
# `StoredFeatures`: sparse features in a dump, and the tensors that hold them.
#
# The features of a row are stored as the `keep` strongest: their numbers in ascending order, their activations, and how many
# were active in all. A row with fewer is padded with the number -1 and the activation 0.

PARTS = ("indices", "values", "counts")
PREFIX = "features."
PROBES = "probes."
"""prefix of the scores of watched probes"""
_NAME = re.compile(r"[A-Za-z0-9_-]{1,60}")
KEEP = 64
"""features per row, unless the caller or the k of a TopK SAE says otherwise"""


@dataclass(frozen=True)
class StoredFeatures:
    """What a plan says about one set of features."""

    name: str
    """its name in the dump"""
    site: str
    """the site that is encoded"""
    digest: Hash
    """of their config and weights"""
    width: Positive
    """the number of features"""
    keep: Positive
    """the largest number of features stored per row"""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise BadRequest(f"Invalid name of features {self.name!r:.60}. Use letters, digits, - and _.")
        if self.keep > self.width:
            raise BadRequest(f"Invalid keep={self.keep}: {self.name} has {self.width} features. Give at most that.")

    @property
    def tensors(self) -> tuple[str, str, str]:
        """Names of the stored tensors: indices, values, counts."""
        indices, values, counts = (f"{PREFIX}{self.name}.{part}" for part in PARTS)
        return indices, values, counts


Encoders = Mapping[str, "SparseFeatures"]
"""name in the dump -> the features"""


def planned(engine: Engine, encoders: Encoders, keep: int | None) -> tuple[StoredFeatures, ...]:
    """The plan's entries for these features. BadRequest, UnknownSite or BadWeights if they do not fit the model.

    keep  features per row; None: k of a TopK SAE, else 64
    """
    from replaylens.features.features import SparseFeatures

    if not isinstance(encoders, Mapping):
        raise BadRequest(f"features={short_repr(encoders)}: give a dict from names to features, such as {{'sae': features}}.")
    made = []
    for name, features in encoders.items():
        features = as_instance(f"features[{name!r}]", features, SparseFeatures, "the result of SparseFeatures.load")
        site, most = features.site_in(engine), as_int("keep", keep, 1) if keep is not None else features.config.k or KEEP
        made.append(StoredFeatures(str(name), site, features.digest, len(features), min(most, len(features))))
    return tuple(made)


def matched(planned: Sequence[StoredFeatures], encoders: Encoders) -> Encoders:
    """The encoders themselves. BadRequest names planned features that are missing, or that have other weights."""
    for stored in planned:
        if stored.name not in encoders:
            raise BadRequest(
                f"The features {stored.name!r} (digest {stored.digest[:12]}) of {stored.site} are planned, but a plan does not "
                f"hold their weights. Pass them: features={{{stored.name!r}: SparseFeatures.load(...)}}."
            )
        if (found := encoders[stored.name].digest) != stored.digest:
            raise BadRequest(
                f"The features {stored.name!r} have the digest {found[:12]}, but {stored.digest[:12]} in the plan. Pass those "
                "that the dump was made with."
            )
    return encoders


def named(stored: Sequence[StoredFeatures], name: str) -> StoredFeatures:
    """The features of this name; BadRequest if there are none."""
    for each in stored:
        if each.name == name:
            return each
    raise BadRequest(no_such("features", str(name)[:60], [each.name for each in stored]))


def to_tensors(stored: StoredFeatures, found: FeatureRows) -> dict[str, Tensor]:
    """The tensors of some rows: [rows, keep], [rows, keep] and [rows]. Of equal activations the first features are kept."""
    rows, indices, values = found.rows_of_entries.numpy(), found.indices.numpy(), found.values.numpy()
    order = np.lexsort((indices, -values, rows))
    kept = np.sort(order[np.arange(len(order)) - found.offsets.numpy()[rows] < stored.keep])  # back in ascending order
    place = np.arange(len(kept)) - np.searchsorted(rows[kept], rows[kept])
    numbers = np.full((len(found), stored.keep), -1, dtype=np.int32)
    amounts = np.zeros((len(found), stored.keep), dtype=np.float32)
    numbers[rows[kept], place], amounts[rows[kept], place] = indices[kept], values[kept]
    made = (torch.from_numpy(numbers), torch.from_numpy(amounts), found.counts.to(torch.int32))
    return dict(zip(stored.tensors, made, strict=True))


def to_rows(stored: StoredFeatures, indices: Tensor, values: Tensor) -> FeatureRows:
    """Inverse of `to_tensors`, up to the features that were not kept. BadDump for numbers that no feature has."""
    from replaylens.features.rows import FeatureRows

    if len(wrong := indices[(indices < -1) | (indices >= stored.width)]):
        raise BadDump(
            f"The stored features {stored.name!r} include number {wrong[0].item()}, but there are {stored.width} features. The "
            "dump was changed after it was made: copy it again from an intact one, or make it again."
        )
    there = indices >= 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), there.sum(1).cumsum(0)])
    return FeatureRows(offsets, indices[there], values[there], stored.width)


# ---- plan ------------------------------------------------------------------------------------------------------------

KINDS = ("tokens", "last", "steps", "text", "label", "custom")
"""kinds of positions"""
Selector = Callable[[ExamplePath], Iterable[int]]
"""path -> the positions to keep"""
MAX_TEXT_BYTES = 1 << 27
"""limit for the texts of one dump, which its plan and its manifest hold"""


@dataclass(frozen=True)
class ExamplesRecord:
    """The examples as a file spells them: `start` and `stop`, or `indices`."""

    start: Count | UnsetType = UNSET
    stop: Count | UnsetType = UNSET
    indices: tuple[Count, ...] | UnsetType = UNSET

    def __post_init__(self) -> None:
        ends = (self.start is not UNSET) + (self.stop is not UNSET)
        if (ends, self.indices is UNSET) not in ((2, True), (0, False)):
            raise BadRequest("Examples are given by `start` and `stop`, or by `indices`")

    def listed(self) -> range | tuple[int, ...]:
        if self.indices is not UNSET:
            return compact(self.indices)
        assert self.start is not UNSET and self.stop is not UNSET
        return range(self.start, max(self.start, self.stop))


ExamplesOf = TypeVar("ExamplesOf")
EditOf = TypeVar("EditOf")


@dataclass(frozen=True)
class PlanRecord(Generic[ExamplesOf, EditOf]):
    """The options of a dump that its files hold. Those with a default are left out where they have it, as in dumps that are
    older than they are. The task checks its knobs, and the drafter its settings."""

    task: str
    knobs: dict[str, Any]
    """the task's settings, including its seed"""
    examples: ExamplesOf
    """indices, ascending"""
    sites: tuple[str, ...]
    """sites to store, by their TransformerLens names"""
    lens: LensSpec | None
    """how the logit lens (Z) is stored; None: not stored"""
    drafter: str
    drafter_settings: dict[str, Any]
    """what the drafts depend on besides the path"""
    window: Positive | None
    """rows per verification; None: chosen by timing, only for the drafter `self`"""
    sampling: Sampling
    max_new: Count | None
    rejected: bool
    """keep rejected branches"""
    positions: str
    """which rows to keep: a `Position`, in its own spelling"""
    dtype: str
    """dtype of the sites; Z is always float32 and int32"""
    examples_per_shard: Positive
    edits: tuple[EditOf, ...] = ()
    """edits of every example"""
    probabilities: bool = True
    """whether the index has log-probability and entropy of every row; False: both are null, and the unembedding is not run"""
    features: tuple[StoredFeatures, ...] = ()
    """sparse features to store, besides the sites"""
    probes: tuple[ProbeRecord, ...] = ()
    """linear probes whose scores are stored, with their weights"""
    end: Count | None = None
    """the token that ends a generation, where the tokenizer comes from elsewhere: versions of one may differ in it"""


@dataclass(frozen=True)
class DumpPlan(PlanRecord[range | tuple[int, ...], dict[str, Any]]):
    """What to replay and which rows to keep. Equal plans under equal fingerprints give equal dumps. Edits are as written by
    `Edit.to_json`."""

    selector: Selector | None = field(default=None, compare=False, repr=False)
    """the function named by custom:NAME; not stored in files"""
    encoders: Encoders = field(default_factory=dict, compare=False, repr=False)
    """the weights of `features`, by name; not stored in files"""

    def __post_init__(self) -> None:
        checks = {
            f"Unknown dtype {self.dtype!r:.60}. Use one of {', '.join(DTYPES)}.": (
                isinstance(self.dtype, str) and self.dtype in DTYPES
            ),
            "The plan has no examples. Give at least one.": len(self.examples) > 0,
            "Two sets of features have the same name. Give each its own.": len({each.name for each in self.features})
            == len(self.features),
            "Two probes have the same name, or one has other characters than letters, digits, - and _. Give each its own.": (
                len({each.name for each in self.probes if _NAME.fullmatch(each.name)}) == len(self.probes)
            ),
        }
        for message, fine in checks.items():
            if not fine:
                raise BadRequest(message)
        if self.positions != "all":  # what most dumps hold is not parsed when they are opened
            self.place  # noqa: B018

    @property
    def place(self) -> Position:
        """The positions, parsed; BadRequest if there are none of this name."""
        from replaylens.engine.request.positions import Position

        return Position.parse(self.positions, KINDS)

    @property
    def num_shards(self) -> int:
        return -(-len(self.examples) // self.examples_per_shard)

    @property
    def reproducible(self) -> bool:
        """Whether a second run gives the same rejected branches. Drafts of the drafter `self` depend on timing."""
        return self.drafter != "self" or not self.rejected

    def check_in_python(self, url: str) -> str | None:
        """How to verify the dump if a function chose its positions, which no command can be given; None: a command can."""
        if self.place.kind != "custom":
            return None
        return f"dumps.verify.verify({url!r}, engine, selector=...) in Python, with {self.positions}"

    def indices(self, shard: int) -> range | tuple[int, ...]:
        """The examples of one shard."""
        return self.examples[shard * self.examples_per_shard : (shard + 1) * self.examples_per_shard]

    def make_task(self) -> AnyTask:
        """The task with its settings; UnknownTask, which says how to register it, if no task of this name is known."""
        return tasks.get(self.task)(**self.knobs)

    @property
    def cited_knobs(self) -> dict[str, Any]:
        """The task's settings as a page shows them: given texts are counted, not repeated."""
        from replaylens.tasks.texts import cited

        return cited(self.task, self.knobs)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `from_json` restores it, except for a custom selector and the weights of features."""
        raw = {each.name: value for each in fields(PlanRecord) if (value := getattr(self, each.name)) != each.default}
        if self.features:
            raw["features"] = [asdict(each) for each in self.features]
        if self.probes:
            raw["probes"] = [asdict(each) for each in self.probes]
        indices = self.examples
        spelled = {"start": indices.start, "stop": indices.stop} if isinstance(indices, range) else {"indices": list(indices)}
        lens = None if self.lens is None else asdict(self.lens)
        return plain({**raw, "examples": spelled, "lens": lens, "sampling": self.sampling.to_json()})

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> DumpPlan:
        """Inverse of `to_json`; BadRequest names the first field that is missing, unknown, or of another type."""
        read = build(PlanRecord[ExamplesRecord, EditRecord], raw, "The plan", BadRequest)
        for name, kind in (("sampling", Sampling), ("lens", LensSpec)):  # their defaults are for callers, not for files
            written = [each.name for each in fields(kind) if each.name != "tuned"]  # which is younger than dumps
            if missing := [] if raw[name] is None else [each for each in written if each not in raw[name]]:
                raise BadRequest(f"The plan is invalid: missing field `{missing[0]}` - at `$.{name}`.")
        edits = _checked_edits(raw["edits"]) if raw.get("edits") else ()
        return cls(**{**vars(read), "examples": read.examples.listed(), "edits": edits})

    def differences(self, there: DumpPlan) -> list[str]:
        """One readable line per option that differs."""
        usual = {each.name: plain(each.default) for each in fields(PlanRecord) if each.default is not MISSING}
        mine, theirs = (usual | plan.to_json() for plan in (self, there))
        if mine["knobs"] != theirs["knobs"]:  # texts are too long for a line
            mine["knobs"], theirs["knobs"] = self.cited_knobs, there.cited_knobs
        told = {"edits": "other interventions", "probes": "other probes"}  # whose tensors are too long for a line
        other = [f"{name}: {said}" for name, said in told.items() if mine.pop(name, None) != theirs.pop(name, None)]
        return other + [f"{name}: {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]


def _checked_edits(raw: Iterable[dict[str, Any]]) -> tuple[dict[str, Any], ...]:
    """Edits as `Edit.to_json` writes them. Their values are tensors, which need torch."""
    from replaylens.engine.request.edits import Edit

    return tuple(Edit.from_json(edit).to_json() for edit in raw)


def compact(indices: int | Iterable[int]) -> range | tuple[int, ...]:
    """Indices in ascending order, as a range if they are contiguous; for a number, that many from 0 on. BadRequest for
    duplicates and invalid indices."""
    if (count := integer(indices)) is not None:
        return range(as_int("examples", count, 0, 2**48))
    listed = [as_int("examples", i, 0) for i in as_list("examples", indices, "how many, or a list of indices")]
    ordered = sorted(set(listed))
    if len(ordered) != len(listed):
        raise BadRequest("An example index occurs twice. A dump holds each example once.")
    dense = bool(ordered) and ordered[-1] - ordered[0] + 1 == len(ordered)
    return range(ordered[0], ordered[-1] + 1) if dense else tuple(ordered)


def plain(value: Any) -> Any:
    """The value after a round trip through JSON: tuples become lists, keys become strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def check_texts(task: GivenTexts, positions: Position, indices: Sequence[int]) -> None:
    """Raise BadRequest if a dump cannot hold the texts, or if they lack the positions or indices."""
    if indices and indices[-1] >= len(task):
        raise BadRequest(f"Text {indices[-1]} was asked for, but there are only {len(task)}, from 0 on. Give fewer examples.")
    if positions.kind == "steps":
        raise BadRequest("Given texts have no steps. Use positions such as 'all', 'last' or 'text:SUBSTRING'.")
    if positions.kind == "label" and positions.name not in task.label_names:
        raise BadRequest(no_such("label", positions.name, task.label_names))
    if (size := len(task.knobs.canonical())) > MAX_TEXT_BYTES:
        raise BadRequest(
            f"The texts take {size / 1e6:.0f} MB, and the plan of a dump holds up to {MAX_TEXT_BYTES / 1e6:.0f} MB. Write "
            f"several dumps."
        )
