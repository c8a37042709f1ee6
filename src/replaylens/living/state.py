"""`LivingTree`: a branch and all below it as data for pages, sent when it is looked at; messages, and what listens to them."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, ClosedBranch, EngineError, ReplayMismatch, no_such
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import BranchRecord, BranchStatus
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_float, as_instance, as_int, as_list, short_repr
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.watch import Probe, Watch
from replaylens.living.readings import RowReader, blocks, layer_of_message, packed, repaired, words
from replaylens.tasks.errors import TaskError

LETTERS = {"prompt": "p", "generated": "g", "forced": "f", "pending": "n", "draft": "d", "rejected": "x"}
"""what a token is, as rows of the tree name it; o: ordinary, r: rolled back"""
FOUND = 200
"""places that a search returns"""


@dataclass
class LongAction:
    """A long action: who waits for it can pause or stop it."""

    what: str
    branch: int
    total: int
    done: int = 0
    running: threading.Event = field(default_factory=threading.Event)
    stopped: bool = False

    def may_go_on(self) -> bool:
        """Wait while it is paused. Returns whether to go on."""
        self.running.wait()
        return not self.stopped


@dataclass(frozen=True)
class RolledBack:
    """Tokens that were rolled back: drawn, and nothing else."""

    number: int
    """below 0: no branch has it"""
    branch: int
    at: int
    tokens: list[int]


@dataclass(frozen=True)
class Done:
    """An action that can be undone."""

    what: str
    undo: Callable[[], object]
    lines: tuple[str, ...]
    """the Python that does the same"""


class LivingTree:
    """The tree of a branch as plain data. Branches have the engine's numbers; tokens that were rolled back, numbers below 0.

    A page sends messages such as {"do": "rows", "branch": 3, "first": 0, "end": 64} to `handle`, and `listen` gets what
    happens meanwhile, whatever carries them.
    """

    def __init__(
        self,
        root: Branch,
        probes: Probe | Mapping[str, Probe] | None = None,
        thresholds: Mapping[str, float] | None = None,
        edits: Mapping[str, Edit] | None = None,
        model: str = "",
    ) -> None:
        self.root = as_instance("branch", root, Branch, "a Branch, such as prompt(...) returns")
        root._check_open()
        self.engine: Engine = root.engine
        self.model = model or self.engine.fingerprint.revision
        self.watch = None if probes is None else probes if isinstance(probes, Watch) else self.engine.watch(probes)
        names = () if self.watch is None else tuple(each.name for each in self.watch.records)
        self.thresholds = {name: 0.0 for name in names} | {k: as_float(k, v) for k, v in (thresholds or {}).items()}
        if unknown := [name for name in self.thresholds if name not in names]:
            raise BadRequest(no_such("probe", unknown[0], names))
        self.edits: dict[str, Edit] = {k: as_instance(f"edits[{k!r}]", v, Edit, "an Edit") for k, v in (edits or {}).items()}
        """edits by name: those that were given, and those that were made here"""
        self.readings = RowReader(self.engine, self.watch)
        self.looked: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        """(branch, position) -> hash of the path up to the next token, and what was shown of it last"""
        self.cuts: list[RolledBack] = []
        self.spans: dict[int, list[tuple[int, int, Sampling]]] = {}
        """branch -> [start, end) and how they were generated"""
        self.used: dict[int, list[str]] = {}
        """branch -> names of the edits that it was forked with"""
        self.work: LongAction | None = None
        self._marks: list[tuple[int, int, str]] = []
        self._selected, self._at = [root.id], root.length - 1
        self._done: list[Done] = []
        self._listeners: list[Callable[[dict[str, Any]], object]] = []
        self._shape: list[Any] = []

    # ---- data ---------------------------------------------------------------------------------------------------

    def ping(self) -> bool:
        """Whether somebody answers."""
        return True

    def tree(self) -> dict[str, Any]:
        """All branches without their tokens."""
        shape = self._shape = self.shape()
        return {
            "branches": shape,
            "root": self.root.id,
            "title": self.model or f"branch {self.root.id}",
            "layers": len(self.readings.spec.sites),
            "blocks": self.engine.config.num_layers,
            "attention": [l for l in range(self.engine.config.num_layers) if self._attends(l)],
            "sites": list(self.engine.sites.in_order()),
            "probes": self.thresholds,
            "edits": list(self.edits),
            "pins": self._marks,
            "selected": self._selected,
            "position": self._at,
            "undo": [done.what for done in self._done],
            **self._progress(),
        }

    def rows(self, branch: int, first: int, end: int) -> dict[str, Any]:
        """Tokens of positions [first, end) of a branch: ids, what each is, and texts."""
        number, first, end = as_int("branch", branch), as_int("first", first, 0), as_int("end", end, 0)
        cut = next((each for each in self.cuts if each.number == number), None)
        if cut is not None:
            path = [*self._path(cut.branch)[: cut.at], *cut.tokens]
            letters = ["r"] * len(path)
        else:
            record = self._record(number)
            path, letters = self._path(number), [LETTERS[said] for said in record.words()]
            if record.uncertified_from is not None:
                letters[record.uncertified_from :] = ["o"] * max(0, len(letters) - record.uncertified_from)
        ids = path[first:end]
        return {
            "branch": number,
            "first": first,
            "ids": packed(np.array(ids, dtype=np.uint32)),
            "states": "".join(letters[first:end]),
            "words": words(self.engine.text, ids),
            "repaired": repaired(self.engine.text, ids, first),
        }

    def read(self, branch: int, first: int, end: int) -> dict[str, Any]:
        """Readings of the blocks that have positions of [first, end)."""
        lane, path = self._lane(as_int("branch", branch)), self._path(branch)
        own = [b for b in blocks(self._starts()[branch], len(path)) if b[0] < end and first < b[1]]
        return {"branch": branch, "blocks": [self.readings.block(lane, path, *b).to_json(self.engine.text) for b in own]}

    def look(self, branch: int, position: int, layer: int | None = None) -> dict[str, Any]:
        """Everything about one token."""
        lane, path = self._lane(as_int("branch", branch)), self._path(branch)
        at, chosen = as_int("position", position, 0, len(path) - 1), layer_of_message(self.engine, layer)
        found = self.readings.look(lane, path, at, chosen)
        self.looked[branch, at] = (hash(tuple(path[: at + 2])), found)
        if "attention" in found:
            found["path"] = packed(np.array(path[: at + 1], dtype=np.uint32))
            found["words"] |= words(self.engine.text, path[: at + 1])
        return {"branch": branch, **found}

    def values(self, branch: int, position: int, site: str) -> dict[str, Any]:
        """The row of a site at one token, as bytes."""
        at = as_int("position", position, 0, len(self._path(branch)) - 1)
        return {"branch": branch, "position": at, **self.readings.values(self._lane(branch), at, site)}

    def find(self, text: str) -> list[list[int]]:
        """[branch, position] of the tokens where a text begins, each token once."""
        wanted, found = as_instance("text", text, str, "text").lower(), list[list[int]]()
        starts = self._starts()
        for number, start in starts.items() if wanted else ():
            pieces = [self.engine.text.token(token).lower() for token in self._path(number)[start:]]
            ends = np.cumsum([len(piece) for piece in pieces])
            whole, at = "".join(pieces), -1
            while len(found) < FOUND and (at := whole.find(wanted, at + 1)) >= 0:
                found.append([number, start + int(np.searchsorted(ends, at, side="right"))])
        return found

    def select(self, branches: Sequence[int], position: int) -> None:
        """What `selection` and `position` return."""
        known = self._records().keys() | {cut.number for cut in self.cuts}
        chosen = [as_int("branch", each) for each in as_list("branches", branches, "a list of branch numbers")]
        if unknown := [each for each in chosen if each not in known]:
            raise BadRequest(f"Branch {unknown[0]} is not in this tree.")
        self._selected, self._at = chosen, as_int("position", position, 0)

    # ---- messages -----------------------------------------------------------------------------------------------

    ACTIONS: ClassVar[tuple[str, ...]] = ("tree", "rows", "read", "look", "values", "find", "select", "ping")
    """what a message may ask for"""
    CHANGING: ClassVar[tuple[str, ...]] = ()
    """those of them that no other one may run beside"""
    LONG: ClassVar[tuple[str, ...]] = ()
    """those that run in a thread of their own if they generate tokens"""

    def handle(self, message: Any) -> dict[str, Any]:
        """The reply to a message of a page. Never raises: an error is one sentence. A long action runs on in a thread of its
        own, and its reply is an event."""
        number = message.get("id") if isinstance(message, dict) else None
        try:
            do, options = self._asked(message)
            if do in self.CHANGING and self.work is not None:
                raise BadRequest(f"{self.work.what} is still running. Stop it, or wait for its end.")
            if do in self.LONG and "n" in options:
                threading.Thread(target=self._run, args=(number, do, options), daemon=True).start()
                return {"id": number, "started": do}
            return {"id": number, "reply": getattr(self, do)(**options)}
        except Exception as error:
            return {"id": number, "error": sentence(error)}

    def _run(self, number: Any, do: str, options: dict[str, Any]) -> None:
        try:
            self._tell({"event": "done", "id": number, "reply": getattr(self, do)(**options)})
        except Exception as error:
            self._changed()
            self._tell({"event": "done", "id": number, "error": sentence(error)})

    def _asked(self, message: Any) -> tuple[str, dict[str, Any]]:
        """The action and its arguments; BadRequest if they do not fit."""
        if not isinstance(message, dict) or message.get("do") not in self.ACTIONS:
            raise BadRequest(f"Unknown message {short_repr(message)}. Known actions: {', '.join(self.ACTIONS)}.")
        do, options = str(message["do"]), {k: v for k, v in message.items() if k not in ("do", "id")}
        try:
            inspect.signature(getattr(self, do)).bind(**options)
        except TypeError as error:
            raise BadRequest(f"The action {do!r} was given {short_repr(options)}: {error}.") from None
        return do, options

    def listen(self, listener: Callable[[dict[str, Any]], object]) -> Callable[[], None]:
        """Call a function with each event, from any thread. Returns what ends it."""
        self._listeners.append(listener)
        return lambda: self._listeners.remove(listener) if listener in self._listeners else None

    def refresh(self) -> None:
        """Tell the pages if Python has changed the branches since."""
        if self.work is None and self.shape() != self._shape:
            self._changed()

    def _tell(self, event: dict[str, Any]) -> None:
        for listener in list(self._listeners):
            listener(event)

    def _changed(self) -> None:
        self._tell({"event": "tree", "tree": self.tree()})

    # ---- records ------------------------------------------------------------------------------------------------

    def _records(self) -> dict[int, BranchRecord]:
        """The branch and all below it that can be seen: live ones, rejected ones, and released ones above them."""
        found, level = dict[int, BranchRecord](), [self.root.record]
        lanes = self.engine.loop.lanes
        while level:
            found |= {record.id: record for record in level}
            level = [child for parent in level for child in parent.children]
        needed = {self.root.id}
        for number in reversed(found):
            record = found[number]
            live = number in lanes and lanes[number].traced
            if live or number in needed or record.status is BranchStatus.REJECTED:
                needed |= {number} | ({record.parent} if record.parent is not None else set())
        return {number: record for number, record in found.items() if number in needed}

    def _record(self, number: int) -> BranchRecord:
        found = self._records()
        if number not in found:
            raise BadRequest(f"Branch {number} is not in this tree, or nothing refers to it any more.")
        return found[number]

    def _path(self, number: int) -> list[int]:
        return self._record(number).tokens[:]

    def _lane(self, number: int) -> Lane:
        lane = self.engine.loop.lanes.get(number)
        if lane is None:
            raise ClosedBranch(f"Branch {number} has ended: it was released or rejected, and only its tokens are known.")
        return lane

    def _starts(self) -> dict[int, int]:
        return {line["id"]: line["start"] for line in self.shape() if line["id"] >= 0}

    def shape(self) -> list[dict[str, Any]]:
        """Each branch with its own tokens [start, end), below the branch that has those before. Parents before children."""
        records, lines, starts = self._records(), list[dict[str, Any]](), dict[int, int]()
        parents = dict[int, int | None]()
        for number, record in records.items():
            parent, start = record.parent, record.fork_position
            if number == self.root.id:
                parent, start = None, 0
            while parent is not None:
                above = records[parent].tokens
                if len(above) < start or above[:start] != record.tokens[:start]:  # its parent has changed since
                    pairs = enumerate(zip(above, record.tokens, strict=False))
                    start = next((p for p, (a, b) in pairs if a != b), min(len(above), start))
                if start > starts[parent] or parents[parent] is None:
                    break
                parent = parents[parent]
            starts[number], parents[number] = start, parent
            lines.append(self._line(record, parent, start))
        for cut in self.cuts:
            if cut.branch in records:
                place: dict[str, Any] = {
                    "id": cut.number,
                    "parent": cut.branch,
                    "start": cut.at,
                    "end": cut.at + len(cut.tokens),
                }
                lines.append(place | {"key": 0, "status": "rolled back", "root": 0, "finish": "", "edits": [], "spans": []})
        return lines

    def _line(self, record: BranchRecord, parent: int | None, start: int) -> dict[str, Any]:
        lane = self.engine.loop.lanes.get(record.id)
        edits = () if lane is None else lane.edits
        return {
            "id": record.id,
            "parent": parent,
            "start": start,
            "end": len(record.tokens),
            "key": hash(tuple(record.tokens[:])) & 0xFFFFFFFF,
            "status": record.status.value,
            "root": record.root_length,
            "finish": record.finish_reason or "",
            "edits": self.used.get(record.id) or [f"{edit.op} {edit.site}" for edit in edits],
            "spans": [[edit.start, edit.stop, list(edit.picks)] for edit in edits],
        }

    def _attends(self, layer: int) -> bool:
        return f"blocks.{layer}.attn.hook_pattern" in self.engine.sites.sites

    def _progress(self) -> dict[str, Any]:
        work = self.work
        if work is None:
            return {"work": None}
        paused = not work.running.is_set()
        return {"work": {"what": work.what, "branch": work.branch, "done": work.done, "total": work.total, "paused": paused}}


def sentence(error: Exception) -> str:
    """An error as one sentence with its name."""
    said = " ".join(str(error).split()) or "it says nothing."
    known = isinstance(error, EngineError | TaskError)
    return f"{type(error).__name__}: {said}" if known else f"Unexpected {type(error).__name__}: {said}"


def regrow(branch: Branch, tokens: Sequence[int], spans: Sequence[tuple[int, int, Sampling]]) -> None:
    """Mutates: the branch grows to these tokens, each generated as it was, or forced where that is not known. ReplayMismatch
    names the first token that is another one now."""
    for start, end, how in [*spans, (len(tokens), len(tokens), Sampling())]:
        if branch.length < start:
            branch.force(list(tokens[branch.length : start]))
        if start == branch.length < end and branch.finish_reason is None:
            branch.generate(end - start, sampling=how)
            now, then = branch.tokens[start:], list(tokens[start:end])
            if now != then:
                first = next((p for p, (a, b) in enumerate(zip(now, then, strict=False)) if a != b), min(len(now), len(then)))
                said = [branch.engine.text.token(path[first]) if first < len(path) else "" for path in (then, now)]
                raise ReplayMismatch(
                    f"Branch {branch.id}, position {start + first}: the token was {said[0]!r}, and is {said[1]!r} now."
                )
