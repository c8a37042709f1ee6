"""`Hold`: what all handles on one branch share. When the last of them is gone, the branch is released.

Python may run finalizers in any thread and within any allocation, also within a step of the engine. So a finalizer only
leaves a note; the engine reads it before its next call.
"""

import weakref
from functools import partial

from replaylens.engine.loop.lane import Lane
from replaylens.engine.serving.forest import Forest


class Hold:
    """Keeps a branch open while something refers to it."""

    __slots__ = ("__weakref__",)


def hold_of(forest: Forest, lane: Lane) -> Hold | None:
    """The hold on a lane, made at its first use. A rejected branch lives as long as the branch that it was cut from, so its
    handles hold that one. None: nothing would be released."""
    if lane.branch not in forest.loop.lanes:
        return None
    parent = forest.tree.branch(lane.branch).parent
    main = None if parent is None else forest.loop.lanes.get(parent)
    if main is not None and lane.branch in main.rejected:
        lane = main
    held = None if lane.hold is None else lane.hold()
    if not isinstance(held, Hold):
        held = Hold()
        lane.hold = weakref.ref(held)
        weakref.finalize(held, forest.lock.later, partial(_abandon, weakref.ref(forest), weakref.ref(lane))).atexit = False
    return held


def _abandon(forest: "weakref.ref[Forest]", lane: "weakref.ref[Lane]") -> None:
    """Release a lane. Only the engine's next call reads the note: one that held the engine, as the thoughts of a lane do, would
    keep it from being freed."""
    of, found = forest(), lane()
    if of is not None and found is not None:
        of.abandon(found)
