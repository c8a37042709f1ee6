"""`DumpPlan`: everything that determines a dump's content. Batch size, workers and order of work are not part of it."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch
from msgspec import UNSET, UnsetType

from replaylens import tasks
from replaylens.engine.dump.features import Encoders, StoredFeatures
from replaylens.engine.dump.path import ExamplePath
from replaylens.engine.dump.places import FORMS, NamedPlace
from replaylens.engine.errors import BadRequest
from replaylens.engine.records import Count, Positive, build
from replaylens.engine.request.capture import LensSpec
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.records import EditRecord
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import integer, items, whole
from replaylens.tasks.task import AnyTask
from replaylens.tasks.texts import cited

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POSITIONS = ("all", "generated", "last", "steps")
CUSTOM = "custom:"
Selector = Callable[[ExamplePath], Iterable[int]]
"""path -> the positions to keep"""


@dataclass(frozen=True)
class DumpPlan:
    """What to replay and which rows to keep. Equal plans under equal fingerprints give equal dumps."""

    task: str
    knobs: dict[str, Any]
    """the task's settings, including its seed"""
    examples: range | tuple[int, ...]
    """indices, ascending"""
    sites: tuple[str, ...]
    """sites to store, by their TransformerLens names"""
    lens: LensSpec | None
    """how the logit lens (Z) is stored; None: not stored"""
    drafter: str
    drafter_settings: dict[str, Any]
    """what the drafts depend on besides the path"""
    window: int | None
    """rows per verification; None: chosen by timing, only for the drafter `self`"""
    sampling: Sampling
    max_new: int | None
    rejected: bool
    """keep rejected branches"""
    positions: str
    """which rows to keep: all, generated, last, steps, a place such as text:SUBSTRING, or custom:NAME"""
    dtype: str
    """dtype of the sites; Z is always float32 and int32"""
    examples_per_shard: int
    edits: tuple[dict[str, Any], ...] = ()
    """edits of every example, as written by `Edit.to_json`"""
    probabilities: bool = True
    """whether the index has log-probability and entropy of every row; False: both are null, and the unembedding is not run"""
    features: tuple[StoredFeatures, ...] = ()
    """sparse features to store, besides the sites"""
    selector: Selector | None = field(default=None, compare=False, repr=False)
    """the function named by custom:NAME; not stored in files"""
    encoders: Encoders = field(default_factory=dict, compare=False, repr=False)
    """the weights of `features`, by name; not stored in files"""

    def __post_init__(self) -> None:
        checks = {
            f"Unknown dtype {self.dtype!r:.60}. Use one of {', '.join(DTYPES)}.": (
                isinstance(self.dtype, str) and self.dtype in DTYPES
            ),
            f"Invalid examples_per_shard {self.examples_per_shard}. Give at least 1.": self.examples_per_shard >= 1,
            f"Invalid probabilities {self.probabilities!r:.60}. Use True or False.": isinstance(self.probabilities, bool),
            "The plan has no examples. Give at least one.": len(self.examples) > 0,
            "Two sets of features have the same name. Give each its own.": len({each.name for each in self.features})
            == len(self.features),
            f"Unknown positions {self.positions!r:.60}. Use one of {', '.join(POSITIONS)}, {FORMS}, or a function.": (
                self.positions in POSITIONS or self.positions.startswith(CUSTOM) or NamedPlace.parse(self.positions) is not None
            ),
        }
        for message, fine in checks.items():
            if not fine:
                raise BadRequest(message)

    @property
    def num_shards(self) -> int:
        return -(-len(self.examples) // self.examples_per_shard)

    @property
    def reproducible(self) -> bool:
        """Whether a second run gives the same rejected branches. Drafts of the drafter `self` depend on timing."""
        return self.drafter != "self" or not self.rejected

    def indices(self, shard: int) -> range | tuple[int, ...]:
        """The examples of one shard."""
        return self.examples[shard * self.examples_per_shard : (shard + 1) * self.examples_per_shard]

    def make_task(self) -> AnyTask:
        """The task with its settings; UnknownTask, which says how to register it, if no task of this name is known."""
        return tasks.get(self.task)(**self.knobs)

    @property
    def cited_knobs(self) -> dict[str, Any]:
        """The task's settings as a page shows them: given texts are counted, not repeated."""
        return cited(self.task, self.knobs)

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON values; `from_json` restores it, except for a custom selector and the weights of features."""
        usual = {"edits": (), "probabilities": True, "features": ()}  # left out, as in dumps older than these options
        unwritten = ("selector", "encoders")
        raw = {name: value for name, value in vars(self).items() if name not in unwritten and value != usual.get(name, ...)}
        if self.features:
            raw["features"] = [asdict(each) for each in self.features]
        indices = self.examples
        spelled = {"start": indices.start, "stop": indices.stop} if isinstance(indices, range) else {"indices": list(indices)}
        lens = None if self.lens is None else asdict(self.lens)
        return plain({**raw, "examples": spelled, "lens": lens, "sampling": self.sampling.to_json()})

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "DumpPlan":
        """Inverse of `to_json`; BadRequest names the first field that is missing, unknown, or of another type."""
        read = build(PlanRecord, raw, "The plan", BadRequest)
        for name, kind in (("sampling", Sampling), ("lens", LensSpec)):  # their defaults are for callers, not for files
            written = [each.name for each in fields(kind) if each.name != "tuned"]  # which is younger than dumps
            if missing := [] if raw[name] is None else [each for each in written if each not in raw[name]]:
                raise BadRequest(f"The plan is invalid: missing field `{missing[0]}` - at `$.{name}`.")
        edits = tuple(Edit.from_json(edit).to_json() for edit in raw.get("edits", ()))
        return cls(**{**vars(read), "examples": read.examples.listed(), "edits": edits})

    def differences(self, other: "DumpPlan") -> list[str]:
        """One readable line per option that differs."""
        mine, theirs = ({"features": [], **plan.to_json(), "probabilities": plan.probabilities} for plan in (self, other))
        if mine["knobs"] != theirs["knobs"]:  # texts are too long for a line
            mine["knobs"], theirs["knobs"] = self.cited_knobs, other.cited_knobs
        other_edits = ["edits: other interventions"] if mine.pop("edits", None) != theirs.pop("edits", None) else []
        return other_edits + [f"{name}: {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]


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


@dataclass(frozen=True)
class PlanRecord:
    """What `DumpPlan.to_json` writes. The task checks its knobs, and the drafter its settings."""

    task: str
    knobs: dict[str, Any]
    examples: ExamplesRecord
    sites: tuple[str, ...]
    lens: LensSpec | None
    drafter: str
    drafter_settings: dict[str, Any]
    window: Positive | None
    sampling: Sampling
    max_new: Count | None
    rejected: bool
    positions: str
    dtype: str
    examples_per_shard: Positive
    edits: tuple[EditRecord, ...] = ()
    probabilities: bool = True
    features: tuple[StoredFeatures, ...] = ()


def compact(indices: int | Iterable[int]) -> range | tuple[int, ...]:
    """Indices in ascending order, as a range if they are contiguous; for a number, that many from 0 on. BadRequest for
    duplicates and invalid indices."""
    if (count := integer(indices)) is not None:
        return range(whole("examples", count, 0, 2**48))
    listed = [whole("examples", i, 0) for i in items("examples", indices, "how many, or a list of indices")]
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
