"""`make_plan`: from a user's options to a `DumpPlan` with every name resolved."""

from collections.abc import Iterable, Sequence
from types import MappingProxyType
from typing import Any

from replaylens.engine.dump.features import Encoders, planned
from replaylens.engine.dump.places import FORMS, NamedPlace
from replaylens.engine.dump.plan import CUSTOM, POSITIONS, DumpPlan, Selector, compact, plain
from replaylens.engine.errors import BadRequest, no_such
from replaylens.engine.lens.tuned import TunedLens
from replaylens.engine.loop.planner import FIXED_WINDOW
from replaylens.engine.replay.examples import ReplayOptions
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import flag, instance, shown, whole
from replaylens.engine.serving.core import Core
from replaylens.tasks.registry import require_own_name
from replaylens.tasks.task import AnyTask
from replaylens.tasks.texts import GivenTexts

MAX_TEXT_BYTES = 1 << 27
"""limit for the texts of one dump, which its plan and its manifest hold"""


def make_plan(
    engine: Core,
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
    top_k: int = 8,
    targets: Sequence[str | int] = (),
    full: bool = False,
    lens: TunedLens | None = None,
    probabilities: bool = True,
    features: Encoders = MappingProxyType({}),
    keep: int | None = None,
) -> DumpPlan:
    """A plan for this engine, with every name resolved. It cites the task by name; TaskNameTaken if another task is
    registered under it.

    examples   number of examples, from index 0 on; or their indices, in any order
    edits      edits of every example, as in `Engine.replay`
    positions  rows to keep: "all", "generated", "last" (of each branch), "steps" (tokens that end a step of the task), a
               place such as "text:Paris", "label:subject" or "3:7" (see `places`), or a function from an `ExamplePath` to
               positions
    dtype      "float32", "bfloat16" or "float16"; default: that of the model
    top_k, targets, full, lens
               how Z is stored, as in `Engine.capture_spec`
    probabilities
               whether to store log-probability and entropy of every row, which takes the unembedding of all of them
    features   sparse features to store, name -> `SparseFeatures`; sites="" stores nothing else
    keep       the largest number of features per row, the strongest; default: k of a TopK SAE, else 64
    """
    require_own_name(type(task))
    edits, drafter = engine.tokenized(edits), instance("drafter", drafter, str, "the name of a drafter")
    if not isinstance(positions, str) and (not callable(positions) or isinstance(positions, type)):
        raise BadRequest(f"positions={shown(positions)}: give one of {', '.join(POSITIONS)}, {FORMS}, or a function of a path")
    indices = compact(examples)
    if isinstance(task, GivenTexts):
        _check_texts(task, positions, indices)
    spec = engine.capture_spec(sites, rejected=rejected, top_k=top_k, targets=targets, full=full, lens=lens)
    stored = planned(engine, features, keep)
    if not spec.sites and not spec.thoughts and spec.lens is None and not stored:
        raise BadRequest(f"sites={sites!r} stores nothing. Give letters of STCZ, or site names.")
    for name in spec.sites:
        if 0 in engine.sites.sites[name].shape:
            raise BadRequest(
                f"{name} cannot be dumped: its width is the number of keys, and a dump holds rows of one width. Leave it out."
            )
    custom = None if isinstance(positions, str) else positions
    return DumpPlan(
        task=task.name,
        knobs=plain({name: value for name, value in vars(task.knobs).items()}),
        examples=indices,
        sites=spec.sites + spec.thoughts,
        lens=spec.lens,
        drafter=drafter,
        drafter_settings=drafter_settings(engine, drafter),
        window=_window(engine, drafter, None if window is None else whole("window", window, 1)),
        sampling=instance("sampling", Sampling() if sampling is None else sampling, Sampling, "a Sampling"),
        max_new=None if max_new is None else whole("max_new", max_new, 0),
        rejected=rejected,
        positions=positions if isinstance(positions, str) else CUSTOM + getattr(positions, "__qualname__", "function"),
        dtype=str(engine.model.embed.dtype).removeprefix("torch.") if dtype is None else dtype,
        examples_per_shard=whole("examples_per_shard", examples_per_shard, 1),
        edits=tuple(edit.to_json() for edit in edits),
        probabilities=flag("probabilities", probabilities),
        features=stored,
        selector=custom,
        encoders=dict(features),
    )


def _check_texts(task: GivenTexts, positions: str | Selector, indices: Sequence[int]) -> None:
    """Raise BadRequest if a dump cannot hold the texts, or if they lack the positions or indices."""
    if indices and indices[-1] >= len(task):
        raise BadRequest(f"Text {indices[-1]} was asked for, but there are only {len(task)}, from 0 on. Give fewer examples.")
    if positions == "steps":
        raise BadRequest("Given texts have no steps. Use positions such as 'all', 'last' or 'text:SUBSTRING'.")
    place = NamedPlace.parse(positions) if isinstance(positions, str) else None
    if place is not None and place.kind == "label" and place.name not in task.label_names:
        raise BadRequest(no_such("label", place.name, task.label_names))
    if (size := len(task.knobs.canonical())) > MAX_TEXT_BYTES:
        raise BadRequest(
            f"The texts take {size / 1e6:.0f} MB, and the plan of a dump holds up to {MAX_TEXT_BYTES / 1e6:.0f} MB. Write "
            f"several dumps."
        )


def plan_of_run(
    engine: Core,
    task: AnyTask,
    indices: Iterable[int],
    options: ReplayOptions,
    positions: str | Selector = "all",
    dtype: str | None = None,
    examples_per_shard: int = 128,
    probabilities: bool = True,
    features: Encoders = MappingProxyType({}),
    keep: int | None = None,
) -> DumpPlan:
    """The plan that would reproduce a run: the same task and the same options."""
    return make_plan(
        engine,
        task,
        indices,
        sites=options.sites or (),
        drafter=options.drafter,
        window=options.window,
        sampling=options.sampling,
        edits=options.edits,
        max_new=options.max_new,
        rejected=options.rejected,
        positions=positions,
        dtype=dtype,
        examples_per_shard=examples_per_shard,
        probabilities=probabilities,
        features=features,
        keep=keep,
    )


def drafter_settings(engine: Core, name: str) -> dict[str, Any]:
    """What drafts depend on besides the path: the drafter's exit layer, width and weights, and how a model that thinks
    guesses thoughts."""
    if name not in engine.loop.drafters:
        raise BadRequest(no_such("drafter", name, engine.loop.drafters))
    return engine.loop.drafters[name].settings() | engine.guesses()


def _window(engine: Core, name: str, window: int | None) -> int | None:
    """The window as a number, so that a version with another default gives the same rejected branches."""
    drafter = engine.loop.drafters[name]
    if window is not None or not drafter.reproducible:
        return window
    return min(FIXED_WINDOW, engine.loop.max_rows // drafter.width)
