"""`Tree` and `Timeline`, which draw themselves, made from traces and from live branches."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replaylens.engine.display import is_stamped, visible, word
from replaylens.engine.errors import BadRequest
from replaylens.engine.files import write_together
from replaylens.engine.memory.path import path_digest
from replaylens.engine.memory.tree import HOOKED, ORDINARY, BranchRecord, TokenState
from replaylens.engine.model.text import Text
from replaylens.engine.proof.trace import Trace
from replaylens.engine.request.capture import Recording
from replaylens.views import boards, draw, html
from replaylens.views.data import Check, DrawnPath, Fill, Frame, Paths, Phase, Readings, Slot, Token, capacity

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

    from replaylens.engine.serving.branch import Branch


# ---- tree ------------------------------------------------------------------------------------------------------------
# `Tree`: a path and its branches. It draws itself in a notebook and in a terminal.


@dataclass(frozen=True, repr=False)
class Tree(Paths):
    """Paths that draw themselves."""

    live: "Callable[[], Branch | None] | None" = field(default=None, compare=False)
    """the branch of a live tree, as long as it is open; it is not held"""

    def save(self, path: str | Path, *, readings: bool | None = None) -> Path:
        """Write the living tree as a page that needs no kernel, as `Explorer.save`, of a branch that is still open."""
        from replaylens.living.explorer import Explorer

        branch = None if self.live is None else self.live()
        if branch is None:
            raise BadRequest("This tree has no open branch. Save branch.tree() before it is released; of a dump, use report().")
        return Explorer(branch).save(path, readings=readings)

    def __str__(self) -> str:
        return "\n".join(line.plain for line in draw.tree_lines(self))

    __repr__ = __str__

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield from draw.tree_lines(self)

    def _repr_html_(self) -> str:
        return html.fragment(draw.draw_tree(self))


# ---- timeline --------------------------------------------------------------------------------------------------------
# `Timeline`: one request step by step: prefill, decode, verify, accept or rollback. It draws itself.


@dataclass(frozen=True, repr=False)
class Timeline:
    """Frames of one request. Draws itself in a notebook and in a terminal; `still` and `board` are SVG files."""

    frames: tuple[Frame, ...]
    title: str = ""

    @property
    def capacity(self) -> int:
        """The largest number of KV positions in any frame."""
        return capacity(self.frames)

    @property
    def interest(self) -> int:
        """How much of the protocol it shows: most with a verification that accepts some drafts and rejects others."""
        return max(map(_interest, self.frames), default=0)

    def first(self, *phases: Phase) -> list[Frame]:
        """One frame per phase, if there is one; decode, verify and rollback come from the most informative round."""
        best = max(range(len(self.frames)), key=lambda i: (_interest(self.frames[i]), -i), default=0)
        chosen = self.frames[max(0, best - 1) : best + 2]  # decode, verify, result
        found = (next((f for f in (*chosen, *self.frames) if f.phase is phase), None) for phase in phases)
        return [frame for frame in found if frame is not None]

    def still(self, frame: Frame) -> str:
        """One frame as an SVG file."""
        return boards.document([frame], self.capacity, self.title)

    def board(self, frames: Sequence[Frame] | None = None) -> str:
        """Several frames as one SVG file, from left to right; default: one of each kind of step, but either accept or rollback.
        The board says how many steps it leaves out."""
        found = {frame.phase for frame in self.frames}
        hidden = {Phase.ACCEPT} if Phase.ROLLBACK in found else set()
        shown = frames or self.first(*(phase for phase in Phase if phase not in hidden))
        when = [id(frame) for frame in self.frames]
        shown = sorted(shown, key=lambda frame: when.index(id(frame)) if id(frame) in when else len(when))
        return boards.document(shown, self.capacity, self.title, self.frames)

    def save(self, folder: str | Path) -> list[Path]:
        """Write every frame as an SVG file, over older boards only; returns the paths."""
        files = {Path(folder) / f"{i:03d}-{frame.phase.value}.svg": self.still(frame) for i, frame in enumerate(self.frames)}
        write_together(files, is_stamped)
        return list(files)

    def __str__(self) -> str:
        return "\n".join(line.plain for line in draw.frame_lines(list(self.frames)))

    __repr__ = __str__

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        yield from draw.frame_lines(list(self.frames))

    def _repr_html_(self) -> str:
        return html.fragment(boards.stepper(self.frames, self.title))


def _interest(frame: Frame) -> int:
    """How informative a verification is: best with accepted and rejected drafts, then with accepted ones only."""
    kept = sum(check.accepted for check in frame.checks)
    return 2 * (0 < kept < sum(check.draft is not None for check in frame.checks)) + bool(kept)


# ---- timeline from a trace -------------------------------------------------------------------------------------------
# Timelines from traces: the frames of one branch, from the engine's events.
#
# Every number in a frame comes from the run. Steps without drafts leave no event; their tokens are taken from the branch's
# path if it is known, and shown as unknown otherwise. The first token after a prompt, unless it was drafted, is part of the
# prefill: it comes out of the same canonical arithmetic.

PROMPT, ACCEPTED, PENDING, DRAFT, REJECTED = TokenState


def timeline(
    trace: Trace, branch: int, decode: Callable[[int], str], known: Mapping[int, Sequence[int]] | None = None, title: str = ""
) -> Timeline:
    """The timeline of one branch of a trace. `known`: final token paths, for steps without an event."""
    teller = _Teller(branch, decode, known or {}, _family(trace, branch))
    for event in trace.events:
        teller.hear(event)
    if not teller.frames:
        raise BadRequest(f"The trace has no branch {branch}.")
    return Timeline(tuple(teller.frames), title or f"branch {branch}")


def _family(trace: Trace, branch: int) -> set[int]:
    """The branch and those that it was forked or cut from. Of all others it only counts that they run."""
    found = {branch}
    for event in reversed(trace.events):
        children = {event["child"]} if event["event"] == "fork" else set(event.get("rejected", ()))
        if children & found:
            found.add(event["branch"])
    return found


@dataclass
class _Line:
    """A branch at one point of the trace: [0, computed) has KV; at most one token after that is pending."""

    tokens: list[int | None]
    num_prompt: int
    computed: int
    at: int = 0
    chains: list[list[int]] = field(default_factory=list)
    """drafted after position `at`, not verified yet"""
    drafted_beside: int = 0
    """other requests when they were drafted: some may finish in the pass that verifies the drafts, and are told of first"""
    prefilling: bool = False
    beside: int = 0
    """the largest number of other requests during its prefill"""
    uncertified_from: int | None = None
    why: str = ""
    """why nothing is promised of tokens from `uncertified_from` on"""
    final: bool = False
    """whether the request also computes the row of its last token"""
    first_token: bool = False
    """whether its first token after the prompt came out of the prefill"""

    def uncertify(self, position: int, why: str) -> None:
        """Mutates: nothing is promised of the tokens from `position` on."""
        first = max(self.num_prompt, position)
        self.uncertified_from = first if self.uncertified_from is None else min(first, self.uncertified_from)
        self.why = self.why or why


class _Teller:
    """Follows a branch and its family through a trace; makes the frames of the branch."""

    def __init__(self, branch: int, decode: Callable[[int], str], known: Mapping[int, Sequence[int]], family: set[int]) -> None:
        self.branch, self.decode, self.known, self.family = branch, decode, known, family
        self.lines: dict[int, _Line] = {}
        self.running: set[int] = set()
        self.mine = False
        """whether the current event is the branch's own; of other branches no frames are made"""
        self.frames: list[Frame] = []
        self.ended, self.waiting = set[int](), set[int]()
        """other branches whose generation, or whose prefill, has ended since the last frame, and that were given nothing new"""

    def hear(self, event: dict[str, Any]) -> None:
        """Mutates: process one event."""
        line, self.mine = self.lines.get(event["branch"]), event["branch"] == self.branch
        if event["branch"] not in self.family and event["event"] in ("force", "draft", "verdict", "rollback"):
            return
        made: Iterator[Frame] = iter(())
        match event["event"]:
            case "plant":
                count = len(event["tokens"])
                planted = self.lines[event["branch"]] = _Line(list(event["tokens"]), count, count, prefilling=True)
                if event.get("hooks"):
                    planted.uncertify(0, HOOKED)
                self._start(event["branch"])
            case "fork" if line is not None:
                self._fork(line, event)
            case "force" if line is not None:
                line.tokens += event["tokens"]
                line.computed = len(line.tokens)
                words = visible("".join(map(self.decode, event["tokens"])))
                made = iter([self._frame(line, Phase.FORCE, f"forced: {words}")])
            case "generate":
                if line is not None:
                    line.final = event["final"]
                    if not event.get("deterministic", True):
                        line.uncertify(line.computed, ORDINARY)
                self._start(event["branch"])
            case "draft" if line is not None:
                made = self._draft(line, event)
            case "verdict" if line is not None:
                made = self._verdict(line, event)
            case "finish" if line is not None:
                self.running.discard(event["branch"])
                self._count(event)
                made = self._finish(line, event) if event["branch"] in self.family else made
            case "rollback" if line is not None:
                del line.tokens[event["to"] :]
                line.computed = min(line.computed, event["to"])
                line.uncertified_from = None if line.uncertified_from is None else min(line.uncertified_from, event["to"])
                made = iter([self._frame(line, Phase.ROLLBACK, f"rolled back to {event['to']} tokens")])
        frames = list(made)  # consumed for the whole family, because that updates its line
        if self.mine and frames:
            self.frames += [*frames[:-1], replace(frames[-1], ended=len(self.ended), waiting=len(self.waiting))]
            self.ended, self.waiting = set(), set()

    def _count(self, event: dict[str, Any]) -> None:
        """Mutates: a request of another branch has ended. A prompt that is only prefilled waits for one that generates."""
        if not self.mine and self.frames:
            prefilled = event["generated"] == 0 and event.get("reason") not in ("cancelled", "error")
            (self.waiting if prefilled else self.ended).add(event["branch"])

    def _start(self, branch: int) -> None:
        self.running.add(branch)
        self.ended, self.waiting = self.ended - {branch}, self.waiting - {branch}
        for line in (self.lines[each] for each in self.running if each in self.lines):
            line.beside = max(line.beside, len(self.running) - 1) if line.prefilling else 0

    def _fork(self, line: _Line, event: dict[str, Any]) -> None:
        at = event["at"]
        child = self.lines[event["child"]] = _Line(line.tokens[:at], min(line.num_prompt, at), min(line.computed, at))
        if line.uncertified_from is not None:
            child.uncertify(min(line.uncertified_from, at), line.why)
        if event.get("hooks"):
            child.uncertify(0, HOOKED)
        if event["child"] == self.branch:
            self.mine = True
            caption = f"forked from branch {event['branch']} at {at}: pages shared, nothing copied"
            self.frames.append(self._frame(child, Phase.FORK, caption))
            self.mine = False  # the event is its parent's

    def _draft(self, line: _Line, event: dict[str, Any]) -> Iterator[Frame]:
        yield from self._direct(line, event["branch"], event["at"], last=event.get("after"))
        line.at, line.chains = event["at"], event["chains"] if any(event["chains"]) else []
        line.drafted_beside = len(self.running - {event["branch"]})
        if line.chains:
            width = f" in {len(line.chains)} chains" if len(line.chains) > 1 else ""
            drafted = _counted(sum(map(len, line.chains)))
            yield self._frame(line, Phase.DECODE, f"{drafted} drafted{width}, not verified yet")

    def _verdict(self, line: _Line, event: dict[str, Any]) -> Iterator[Frame]:
        """The verification, then the sequence and cache after it."""
        chains, chain, accepted, pending = line.chains, event["chain"], event["accepted"], list(event["pending"])
        followed = chains[chain] if chains else []
        rows = 1 + max(map(len, chains), default=0)
        caption = f"one canonical pass over {rows} rows" + (f" of each of {len(chains)} chains" if len(chains) > 1 else "")
        if line.at == line.num_prompt:  # drafters such as lens and model draft T0, too
            caption += "; the prompt's last row gives T0"
        said = [*followed[:accepted], *pending]
        checks = self._checks(line, followed, accepted, said, list(event.get("overruled", ())))
        frame = self._frame(line, Phase.VERIFY, caption + _unless_promised(line), chain, checks)
        yield replace(frame, others=line.drafted_beside, ordinary=self._ordinary(line.drafted_beside))
        rejected = [c for i, c in enumerate(chains) if c and i != chain]
        rejected += [followed] if len(followed) > accepted else []
        for kept, path in zip(event["rejected"], rejected, strict=False):
            cut = self.lines[kept] = _Line([*line.tokens, *path], line.num_prompt, line.at + len(path))
            cut.uncertified_from, cut.why = line.uncertified_from, line.why
        num_rejected = sum(map(len, chains)) - accepted
        line.tokens = [*line.tokens[: line.at], *followed[:accepted], *pending]
        dropped = not pending and not line.final  # the row of a draft that ended the request
        line.computed, line.chains = line.at + accepted - dropped, []
        final = f"T{len(line.tokens) - line.num_prompt - 1}"
        gained = f"{_counted(accepted + bool(pending))} accepted" + (f", {accepted} of them drafted" if pending else "")
        where = f"; KV up to position {line.computed}"
        if num_rejected:
            gained += f", {num_rejected} draft{'s' * (num_rejected != 1)} rejected"
            final += ", whose KV is pending" if pending else ""
            where = f"; sequence and KV cache restored until the final accepted token ({final})"
        phase = Phase.ROLLBACK if num_rejected else Phase.ACCEPT
        yield self._frame(line, phase, f"{gained}{where}{_unless_promised(line)}")

    def _checks(self, line: _Line, followed: list[int], accepted: int, said: list[int], void: list[int]) -> tuple[Check, ...]:
        """The verifier's tokens: those that are committed, `said`, then those that follow a rejected draft, `void`."""
        checks = []
        for i in range(max(len(followed), len(said) + len(void)) if self.mine else 0):
            number = line.at - line.num_prompt + i
            draft = self._slot(line, followed[i], DRAFT, number, drafted=True) if i < len(followed) else None
            state = ACCEPTED if i < accepted else PENDING if i < len(said) else REJECTED
            verifier = self._slot(line, [*said, *void][i], state, number) if i < len(said) + len(void) else None
            checks.append(Check(draft, verifier))
        return tuple(checks)

    def _finish(self, line: _Line, event: dict[str, Any]) -> Iterator[Frame]:
        if line.prefilling:
            yield self._frame(line, Phase.PREFILL, f"{line.num_prompt} prompt tokens in canonical passes")
        line.chains, line.prefilling = [], False
        yield from self._direct(line, event["branch"], event["length"], event["path"])
        if event["generated"] == 0:
            line.computed = event["length"]

    def _direct(
        self, line: _Line, branch: int, length: int, digest: str | None = None, last: int | None = None
    ) -> Iterator[Frame]:
        """Tokens committed one by one since the last event; `last` is the last of them, if the event names it."""
        count = length - len(line.tokens)
        if count <= 0:
            return
        path = list(self.known.get(branch, ()))[:length]
        known = path[: len(line.tokens)] == line.tokens and len(path) == length
        if digest is not None and known:
            known = path_digest(path) == digest
        new = path[len(line.tokens) :] if known else [*[None] * (count - 1), last]
        if len(line.tokens) == line.num_prompt and not line.why:
            line.tokens, line.first_token, new = [*line.tokens, new[0]], True, new[1:]
            yield from self._first_token(line, branch)
        if not new:
            return
        line.tokens += new
        line.computed = max(line.num_prompt, length - 1)
        if line.why == ORDINARY:
            yield self._frame(line, Phase.ORDINARY, f"{_counted(len(new))} of the fast path. {ORDINARY}")
        elif line.why:
            yield self._frame(line, Phase.ORDINARY, f"{_counted(len(new))} decoded. {line.why}")
        else:
            yield self._frame(line, Phase.DIRECT, f"{_counted(len(new))} decoded directly in canonical passes")

    def _first_token(self, line: _Line, branch: int) -> Iterator[Frame]:
        """T0 in the frame of the prefill; in a frame of its own if other frames came in between."""
        if branch == self.branch and self.frames and self.frames[-1].phase is Phase.PREFILL:
            before = self.frames.pop()
            frame = self._frame(line, Phase.PREFILL, f"{before.caption}; the last row gives T0")
            yield replace(frame, others=before.others, ordinary=before.ordinary)
        else:
            yield self._frame(line, Phase.DIRECT, "the prompt's last row, in a canonical pass, gives T0")

    # ---- frames -------------------------------------------------------------------------------------------------

    def _frame(self, line: _Line, phase: Phase, caption: str, chain: int = 0, checks: tuple[Check, ...] = ()) -> Frame:
        """The current state of the line. Drafts have their own KV slots after those of the sequence."""
        if not self.mine:
            return Frame(phase, caption, Fill(0))
        first = len(line.tokens) - line.num_prompt
        slots = [self._slot(line, token, self._state(line, p), p - line.num_prompt) for p, token in enumerate(line.tokens)]
        drafts = [tuple(self._slot(line, t, DRAFT, first + i, True) for i, t in enumerate(c)) for c in line.chains]
        if checks:  # the verdicts on the followed chain stand beside it; the others are rejected as a whole
            drafts = [c if i == chain else tuple(replace(slot, state=REJECTED) for slot in c) for i, c in enumerate(drafts)]
        prompt = min(line.num_prompt, line.computed)
        waiting = len(line.tokens) - line.computed if line.chains else 0
        certified = line.computed if line.uncertified_from is None else max(prompt, min(line.computed, line.uncertified_from))
        ordinary, pending = line.computed - certified, waiting
        if line.uncertified_from is not None and line.uncertified_from <= line.computed:  # nothing is promised of it, either
            ordinary, pending = ordinary + waiting, 0
        fill = Fill(prompt, certified - prompt, sum(map(len, line.chains)), ordinary, pending)
        others = line.beside if line.prefilling else len(self.running - {self.branch})
        return Frame(
            phase,
            caption,
            fill,
            (*slots[line.num_prompt :], *(drafts[chain] if drafts else ())),
            checks,
            tuple(other for i, other in enumerate(drafts) if i != chain and other),
            others,
            self._ordinary(others),
        )

    def _ordinary(self, most: int) -> int:
        """How many of `most` other requests are ordinary."""
        return min(most, sum(bool(self.lines[each].why) for each in self.running - {self.branch} if each in self.lines))

    def _state(self, line: _Line, position: int) -> TokenState:
        if position < line.num_prompt:
            return PROMPT
        first = line.first_token and position == line.num_prompt
        return ACCEPTED if position < line.computed or first else PENDING

    def _slot(self, line: _Line, token: int | None, state: TokenState, number: int, drafted: bool = False) -> Slot:
        promised = line.uncertified_from is None or line.num_prompt + number < line.uncertified_from
        return Slot("…" if token is None else self.decode(token), state, number, drafted, "" if promised else line.why)


def _counted(tokens: int) -> str:
    return f"{tokens} token{'s' if tokens != 1 else ''}"


def _unless_promised(line: _Line) -> str:
    """The end of a caption about tokens that a canonical pass verified, on a branch of which nothing is promised."""
    if line.why == ORDINARY:
        return ". Not certified: it follows tokens of the fast path"
    return f". {line.why}" if line.why else ""


# ---- live ------------------------------------------------------------------------------------------------------------
# Trees of live branches, with their captured rows.

MAX_BRANCHES = 200
"""limit per tree"""


ThoughtsByBranch = Mapping[int, Mapping[int, tuple[str, ...]]]


def tree_of(
    trunk: BranchRecord,
    recordings: Mapping[int, Recording | None],
    text: Text,
    title: str = "",
    thoughts: ThoughtsByBranch | None = None,
) -> Tree:
    """A branch as the trunk, with all forks and rejected drafts below it.

    recordings  captured rows by branch
    thoughts    words thought after a position, by branch
    """
    every = _below(trunk)
    shown = {record.id: record for record in every[:MAX_BRANCHES]}
    readings = {i: Readings.of(recordings.get(i), partial(word, text)) for i in shown}
    said = thoughts or {}
    paths = [_path(record, shown, trunk.id, readings, text, said.get(record.id, {})) for record in shown.values()]
    return Tree(tuple(paths), title or f"branch {trunk.id}", len(every) - len(shown))


def _below(trunk: BranchRecord) -> list[BranchRecord]:
    """The branch and all below it, level by level, so that a limit drops the deepest first."""
    found, level = [], [trunk]
    while level:
        found += level
        level = [child for parent in level for child in parent.children]
    return found


def _path(
    record: BranchRecord,
    shown: Mapping[int, BranchRecord],
    trunk: int,
    readings: Mapping[int, Readings | None],
    text: Text,
    thoughts: Mapping[int, tuple[str, ...]],
) -> DrawnPath:
    """One branch as it is drawn: its own tokens, from where it leaves its drawn parent."""
    own = 0 if record.id == trunk else record.fork_position
    parent = None if record.id == trunk else _drawn_parent(record, shown, trunk)
    before = readings.get(parent) if parent is not None else None
    reading = readings[record.id]
    tokens = []
    for position in range(own, len(record.tokens)):
        logprob = reading.emitted(position - 1) if reading else None
        if logprob is None and position == own and before is not None:  # predicted by the last row before the fork
            logprob = before.logprob(position - 1, record.tokens[position])
        entropy, lens = (reading.entropy(position), reading.layers(position)) if reading else (None, ())
        shown_as = word(text, record.tokens[position])
        promised = record.uncertified_from is None or position < record.uncertified_from
        why = "" if promised else record.uncertified_why
        tokens.append(
            Token(
                shown_as, position, record.states[position], logprob, entropy, lens, why=why, thought=thoughts.get(position, ())
            )
        )
    return DrawnPath(record.id, parent, own, record.status.value, tuple(tokens))


def _drawn_parent(record: BranchRecord, shown: Mapping[int, BranchRecord], trunk: int) -> int:
    """The branch that owns the token before the fork: the parent, or an ancestor if the fork lies before the parent's."""
    parent = record.parent
    assert parent is not None
    while (
        parent != trunk and record.fork_position <= shown[parent].fork_position
    ):  # parents are on higher levels, so they are shown
        above = shown[parent].parent
        assert above is not None
        parent = above
    return parent
