"""`DumpPlan`: everything that decides what a dump holds. Batch size, workers and the order of work are not in it."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from replaylens import tasks
from replaylens.engine.errors import BadRequest, no_such
from replaylens.engine.loop.drafters import ModelDrafter
from replaylens.engine.loop.planner import FIXED_WINDOW
from replaylens.engine.model.weights import weights_hash
from replaylens.engine.request.capture import LensSpec
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling

if TYPE_CHECKING:
    from replaylens.engine.dump.rows import Path
    from replaylens.engine.engine import Engine
    from replaylens.tasks.task import AnyTask

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
POSITIONS = ("all", "generated", "last", "steps")
CUSTOM = "custom:"
Selector = Callable[["Path"], Iterable[int]]
"""positions of one path that are to be kept"""


@dataclass(frozen=True)
class DumpPlan:
    """What to replay and what to keep of it. Equal plans under equal fingerprints give equal dumps."""

    task: str
    knobs: dict[str, Any]
    """the task's settings, its seed among them"""
    examples: range | tuple[int, ...]
    """indices, ascending"""
    sites: tuple[str, ...]
    """stored as they are, by their TransformerLens names"""
    lens: LensSpec | None
    """how Z is stored; None: not at all"""
    drafter: str
    drafter_settings: dict[str, Any]
    """what its guesses depend on besides the path"""
    window: int | None
    """rows per verification; None: by the clock, which only the drafter `self` may"""
    sampling: Sampling
    max_new: int | None
    rejected: bool
    """keep rejected branches"""
    positions: str
    """which rows are kept: all, generated, last, steps, or custom:NAME"""
    dtype: str
    """of the sites; Z is always float32 and int32"""
    examples_per_shard: int
    edits: tuple[dict[str, Any], ...] = ()
    """interventions on every example, as `Edit.to_json` spells them"""
    selector: Selector | None = field(default=None, compare=False, repr=False)
    """the function behind custom:NAME; a file cannot hold it"""

    def __post_init__(self) -> None:
        checks = {
            f"dtype {self.dtype!r}: choose {', '.join(DTYPES)}": self.dtype in DTYPES,
            f"{self.examples_per_shard} examples per shard: give at least 1": self.examples_per_shard >= 1,
            "no examples: give at least one": len(self.examples) > 0,
            f"positions {self.positions!r}: choose {', '.join(POSITIONS)} or give a function": (
                self.positions in POSITIONS or self.positions.startswith(CUSTOM)
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
        """Whether the rejected branches come out again too. What the drafter `self` guesses depends on the clock."""
        return self.drafter != "self" or not self.rejected

    def indices(self, shard: int) -> range | tuple[int, ...]:
        """The examples of one shard."""
        return self.examples[shard * self.examples_per_shard : (shard + 1) * self.examples_per_shard]

    def make_task(self) -> "AnyTask":
        """The task with its settings; UnknownTask where it is none of ours."""
        return tasks.get(self.task)(**self.knobs)

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` gives the plan back, but for a custom selector."""
        raw = {name: value for name, value in vars(self).items() if name != "selector" and (value or name != "edits")}
        indices = self.examples
        spelled = {"start": indices.start, "stop": indices.stop} if isinstance(indices, range) else {"indices": list(indices)}
        lens = None if self.lens is None else asdict(self.lens)
        return _plain({**raw, "examples": spelled, "lens": lens, "sampling": self.sampling.to_json()})

    @classmethod
    def from_json(cls, raw: dict[str, Any]) -> "DumpPlan":
        """Inverse of `to_json`. TypeError, KeyError or BadRequest for anything else; the manifest's reader says where."""
        given = dict(raw)
        spelled, lens, sampling = given["examples"], given["lens"], Sampling.from_json(given["sampling"])
        if set(spelled) == {"start", "stop"}:
            start, stop = int(spelled["start"]), int(spelled["stop"])
            if not 0 <= start <= stop <= 2**48:
                raise BadRequest(f"examples {start} to {stop} are absurd")
            indices: range | tuple[int, ...] = range(start, stop)
        else:
            indices = compact(spelled["indices"])
        lens = None if lens is None else LensSpec.from_json(lens)
        edits = tuple(Edit.from_json(edit).to_json() for edit in given.get("edits", ()))
        fixed = {"examples": indices, "lens": lens, "sampling": sampling, "sites": tuple(given["sites"])}
        return cls(**{**given, **fixed, "edits": edits})

    def differences(self, other: "DumpPlan") -> list[str]:
        """Readable lines: which options differ."""
        mine, theirs = self.to_json(), other.to_json()
        other_edits = ["edits: other interventions"] if mine.pop("edits", None) != theirs.pop("edits", None) else []
        return other_edits + [f"{name}: {mine[name]} here, {theirs[name]} there" for name in mine if mine[name] != theirs[name]]


def make_plan(
    engine: "Engine",
    task: "AnyTask",
    examples: int | Iterable[int],
    *,
    sites: str | Sequence[str] = "STCZ",
    drafter: str = "lens",
    window: int | None = None,
    sampling: Sampling | None = None,
    edits: Sequence[Edit] = (),
    max_new: int | None = None,
    rejected: bool = True,
    positions: str | Selector = "all",
    dtype: str | None = None,
    examples_per_shard: int = 128,
    **lens: Any,
) -> DumpPlan:
    """A plan for this engine, every name resolved.

    examples   how many, from index 0 on; or which indices, in any order
    edits      interventions on every example, as in `replay_examples`
    positions  rows to keep: "all", "generated", "last" (of each branch), "steps" (where a step of the task ends), or a
               function from a `Path` to positions
    dtype      "float32", "bfloat16" or "float16"; default: as the model computes
    lens       how Z is stored: top_k, targets, full, lens (see `Engine.capture_spec`)
    """
    spec = engine.capture_spec(sites, rejected=rejected, **lens)
    if not spec.sites and not spec.thoughts and spec.lens is None:
        raise BadRequest(f"sites {sites!r}: nothing would be stored; give letters of STCZ, or site names")
    for name in spec.sites:
        if 0 in engine.sites.sites[name].shape:
            raise BadRequest(f"{name} has as many columns as the path has keys: a dump holds rows of one width only")
    custom = None if isinstance(positions, str) else positions
    return DumpPlan(
        task=task.name,
        knobs=_plain({name: value for name, value in vars(task.knobs).items()}),
        examples=range(examples) if isinstance(examples, int) else compact(examples),
        sites=spec.sites + spec.thoughts,
        lens=spec.lens,
        drafter=drafter,
        drafter_settings=drafter_settings(engine, drafter),
        window=_window(engine, drafter, window),
        sampling=sampling or Sampling(),
        max_new=max_new,
        rejected=rejected,
        positions=positions if isinstance(positions, str) else CUSTOM + getattr(positions, "__qualname__", "function"),
        dtype=dtype or str(engine.model.embed.dtype).removeprefix("torch."),
        examples_per_shard=examples_per_shard,
        edits=tuple(edit.to_json() for edit in edits),
        selector=custom,
    )


def compact(indices: Iterable[int]) -> range | tuple[int, ...]:
    """Indices in ascending order, as a range where they are one. BadRequest for duplicates and what is no index."""
    listed = list(indices)
    if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in listed):
        raise BadRequest("examples: give whole numbers from 0 up")
    ordered = sorted(set(listed))
    if len(ordered) != len(listed):
        raise BadRequest("an example stands twice: a dump holds each once")
    whole = bool(ordered) and ordered[-1] - ordered[0] + 1 == len(ordered)
    return range(ordered[0], ordered[-1] + 1) if whole else tuple(ordered)


def drafter_settings(engine: "Engine", name: str) -> dict[str, Any]:
    """What guesses depend on besides the path: where the drafter exits, how wide it is, whose weights it has; and how
    thoughts are guessed, where the model thinks."""
    if name not in engine.loop.drafters:
        raise BadRequest(no_such("drafter", name, engine.loop.drafters))
    drafter = engine.loop.drafters[name]
    layer = getattr(getattr(drafter, "lens", drafter), "layer", None)
    found: dict[str, Any] = {} if layer is None else {"layer": layer}
    if drafter.width > 1:
        found["width"] = drafter.width
    if isinstance(drafter, ModelDrafter):
        found["weights"] = weights_hash(drafter.runner.model)
    return found | engine.guesses()


def _window(engine: "Engine", name: str, window: int | None) -> int | None:
    """The window spelled out, so that a later version with another default gives the same rejected branches."""
    drafter = engine.loop.drafters[name]
    if window is not None or not drafter.reproducible:
        return window
    return min(FIXED_WINDOW, engine.loop.max_rows // drafter.width)


def _plain(value: Any) -> Any:
    """The value as JSON would give it back: tuples as lists, keys as text."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
