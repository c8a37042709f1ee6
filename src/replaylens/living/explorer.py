"""`Explorer`: the living tree with the actions that change it, each a call of the public API that can be undone.

`handle` takes them as messages, such as {"do": "fork", "branch": 3, "at": 17}. No browser is needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest, EngineError, no_such
from replaylens.engine.loop.lane import Lane
from replaylens.engine.memory.tree import BranchStatus
from replaylens.engine.model.text import Prompt
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import as_float, as_instance, as_int, hides, short_repr, verb
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.watch import Probe
from replaylens.living.readings import blocks, words
from replaylens.living.state import Done, LivingTree, LongAction, RolledBack, regrow
from replaylens.rollouts.plan import rollout_seed
from replaylens.tasks.errors import TaskError

if TYPE_CHECKING:
    from replaylens.living.served import ServedPage

PIECE = 8
"""tokens of several branches that are drawn between two looks at whether to stop"""
MOST_NEW, MOST_DRAWN = 4096, 512
"""tokens, and branches, of one action"""
BETWEEN = 0.05
"""seconds between two messages about a branch that grows"""


class Pin(NamedTuple):
    """A token that somebody marked."""

    branch: Branch | None
    """None: it was released"""
    position: int
    token: str
    note: str


@hides("readings", "looked", "cuts", "spans", "used", "work", "handle", "listen", "refresh", "shape")
class Explorer(LivingTree):
    """A tree of branches to look at and to change: shows itself in a notebook, `save` writes a page, `serve` serves one.

    >>> from replaylens import Engine, explore
    >>> w = explore(Engine.load("coin-plain"), "A coin's state is heads. Alice flips.")
    >>> (fork,) = w.fork(w.root.id, at=7)
    >>> w.force(fork, at=7, text=" turns"), w.branch(fork).generated_text
    ([1], ' turns')
    """

    def __init__(
        self,
        root: Branch,
        *,
        probes: Probe | Mapping[str, Probe] | None = None,
        thresholds: Mapping[str, float] | None = None,
        edits: Mapping[str, Edit] | None = None,
        model: str = "",
    ) -> None:
        super().__init__(root, probes, thresholds, edits, model)
        self._held = {root.id: root}
        self._cutting = -1

    def __repr__(self) -> str:
        return f"Explorer({len(self._records())} branches below branch {self.root.id}, {len(self._done)} actions)"

    ACTIONS = (
        *LivingTree.ACTIONS,
        *("rollback", "fork", "force", "generate", "edit", "resample", "compare", "pin", "undo", "python"),
        *("pause", "resume", "stop"),
    )
    CHANGING = ("rollback", "fork", "force", "generate", "edit", "resample", "undo")
    LONG = ("force", "generate", "edit", "resample")

    # ---- what Python sees ---------------------------------------------------------------------------------------

    def branch(self, number: int) -> Branch:
        """A branch of the tree by its number; BadRequest or ClosedBranch says why there is none."""
        number = as_int("branch", number)
        if number < 0:
            raise BadRequest("These tokens were rolled back, so that no branch has them. Undo brings them back.")
        if number in self._held and self._held[number].status is not BranchStatus.RELEASED:
            return self._held[number]
        if number not in self._records():
            raise BadRequest(f"Branch {number} is not in this tree, or nothing refers to it any more.")
        return self.engine.handle(self._lane(number))

    @property
    def selection(self) -> Branch | list[Branch]:
        """The selected branch, or several."""
        found = [self.branch(number) for number in self._selected if number >= 0]
        return found[0] if len(found) == 1 else found

    @property
    def position(self) -> int:
        """The selected position."""
        return self._at

    @property
    def pins(self) -> list[Pin]:
        """What is pinned, in order."""
        found = []
        for number, at, note in self._marks:
            record = self._records().get(number)
            token = "" if record is None or at >= len(record.tokens) else self.engine.text.token(record.tokens[at])
            live = record is not None and number in self.engine.loop.lanes
            found.append(Pin(self.branch(number) if live else None, at, token, note))
        return found

    def python(self) -> str:
        """The Python that does what was done here and not undone."""
        given = self.root.tokens[: self.root.root_length]
        said = self.engine.text.decode(given)
        with suppress(EngineError, TaskError):
            given = said if self.engine.text.encode(said) == given else given  # type: ignore[assignment]
        name = repr(self.model) if self.model else "..."
        head = [
            "import replaylens as rl",
            "",
            f"engine = rl.Engine.load({name})",
            f"b{self.root.id} = engine.prompt({given!r})",
        ]
        return "\n".join([*head, *(line for done in self._done for line in done.lines)]) + "\n"

    def save(self, path: str | Path, *, readings: bool | None = None) -> Path:
        """Write a page that needs no kernel: tokens, readings, pins, and the plan that `rl.replay_page` follows.

        readings  True: of every token; False: of those that were looked at. Default: of every token of trees up to 2,000 tokens
        """
        from replaylens.living.saved import save

        return save(self, path, readings)

    def serve(self, *, port: int = 0, host: str = "127.0.0.1") -> ServedPage:
        """Serve the page to the browser that opens its address first. `.address` says where; `close` ends it."""
        from replaylens.living.served import ServedPage

        return ServedPage(self, port=port, host=host)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        from replaylens.living.widget import bundle

        return bundle(self)

    # ---- actions ------------------------------------------------------------------------------------------------

    def rollback(self, branch: int, to: int) -> int:
        """Keep the first `to` tokens of a branch. Undo makes the others again, to the same bits."""
        own = self.branch(branch)
        whole, spans = own.tokens, list(self.spans.get(branch, ()))
        lost = whole[as_int("to", to) :]
        own.rollback(to=to)
        self.spans[branch] = [(a, min(b, to), how) for a, b, how in spans if a < to]
        if lost:
            self.cuts.append(cut := RolledBack(self._cutting, branch, to, lost))
            self._cutting -= 1

            def undo() -> None:
                regrow(self._tip(branch, to), whole, self._again(spans, to))
                self.spans[branch] = spans
                self.cuts.remove(cut)

            self._did("rollback", undo, f"b{branch}.rollback(to={to})")
        return to

    def fork(self, branch: int, at: int, n: int = 1) -> list[int]:
        """New branches with the first `at` tokens. Returns their numbers."""
        made = self._fork(branch, at, n)
        told = ", ".join(f"b{number}" for number in made) + ("," if n == 1 else "")
        self._did("fork", lambda: self._drop(made), f"{told} = b{branch}.fork({n if n > 1 else ''}{', ' * (n > 1)}at={at})")
        return made

    def force(self, branch: int, at: int, text: str = "", token: int | None = None, **more: Any) -> list[int]:
        """Put a text or a token at a position: at the end of the branch, or on a fork at `at`. Returns the changed branch.

        more  n, temperature, seed: generate from there, as `generate` does
        """
        given = [as_int("token", token, 0)] if token is not None else self._encoded(text)
        own, at = self.branch(branch), as_int("at", at, 0)
        place = text if token is None else given
        if at < own.length or own.finish_reason:
            made = self._fork(branch, at)
            line = [f"b{made[0]}, = b{branch}.fork(at={at})", f"b{made[0]}.force({place!r})"]
            try:
                self.branch(made[0]).force(given)
            except EngineError:
                self._drop(made)
                raise
            self._did("force", lambda: self._drop(made), *line)
        else:
            made, before = [branch], own.length
            own.force(given)
            self._did(
                "force", lambda: self._tip(branch, before + len(given)).rollback(to=before), f"b{branch}.force({place!r})"
            )
        if more:
            self.generate(made[0], **more)
        return made

    def generate(self, branch: int, n: int = 16, temperature: float = 0.0, seed: int = 0) -> int:
        """Generate up to `n` tokens, one after another, so that somebody may pause or stop. Returns the new length."""
        own, how = self.branch(branch), Sampling(temperature=temperature, seed=seed)
        start, n = own.length, as_int("n", n, 1, MOST_NEW)
        with self._working("generate", branch, n) as work:
            stream, last = own.stream(n, sampling=how), 0.0
            try:
                for _ in stream:
                    work.done += 1
                    if time.monotonic() - last > BETWEEN:
                        last = time.monotonic()
                        self._tell({"event": "grown", "branch": branch, "end": start + work.done, **self._progress()})
                    if not work.may_go_on():
                        break
            finally:
                stream.close()
        if (end := start + work.done) > start:
            self.spans.setdefault(branch, []).append((start, end, how))

            def undo() -> None:
                self._tip(branch, end).rollback(to=start)
                self.spans[branch] = [span for span in self.spans.get(branch, ()) if span[0] < start]

            self._did("generate", undo, f"b{branch}.generate({end - start}{_told(how)})")
        return end

    def edit(
        self,
        branch: int,
        at: int,
        name: str = "",
        op: str = "",
        layer: int | None = None,
        token: str | int | None = None,
        factor: float = 0.5,
        **more: Any,
    ) -> list[int]:
        """A fork after the token at `at` with an edit: a named one, or one that is made here. Returns its number.

        op    "attention" or "mlp": that output of a layer is zero at this token; "steer": a token's unembedding vector is added
              to the layer's residual stream from this token on, `factor` times as long as the row
        more  n, temperature, seed: generate from there, as `generate` does
        """
        own, at = self.branch(branch), as_int("at", at, 0)
        if op:
            name, made, code = self._edit(op, at, layer, token, factor)
            self.edits[name] = made
        elif name not in self.edits:
            raise BadRequest(no_such("edit", str(name), list(self.edits)))
        else:
            code = f"edits[{name!r}]"
        (number,) = (fork.id for fork in self._hold(own.fork(at=min(at + 1, own.length), edits=[self.edits[name]])))
        self.used[number] = [*self.used.get(branch, ()), name]
        self._inherit(branch, number, at + 1)
        line = f"b{number}, = b{branch}.fork(at={min(at + 1, own.length)}, edits=[{code}])"
        self._did("edit", lambda: self._drop([number]), line)
        if more:
            self.generate(number, **more)
        return [number]

    def resample(
        self, branch: int, at: int, n: int = 8, max_new: int = 16, temperature: float = 1.0, seed: int = 0
    ) -> dict[str, Any]:
        """Draw `n` continuations at a position, each a branch with the tokens that `Branch.resample` draws. Returns their
        numbers, and where they part: position, and how many have each token there."""
        n, max_new = as_int("n", n, 1, MOST_DRAWN), as_int("max_new", max_new, 1, MOST_NEW)
        plain = Sampling(temperature=temperature, seed=seed)
        made = self._fork(branch, at, n)
        each = [plain.derived(seed=rollout_seed(plain.seed, at, number)) for number in range(n)]
        own = dict(zip(made, each, strict=True))
        try:
            with self._working("resample", branch, max_new) as work:
                while work.done < max_new and work.may_go_on():
                    open_ = [number for number in made if self.branch(number).finish_reason is None]
                    if not open_:
                        break
                    some = min(PIECE, max_new - work.done)
                    self.engine.generate([self.branch(b) for b in open_], some, sampling=[own[b] for b in open_])
                    work.done += some
                    self._tell({"event": "progress", **self._progress()})
        except BaseException:
            self._drop(made)
            raise
        for number in made:
            if (end := self.branch(number).length) > at:
                self.spans.setdefault(number, []).append((at, end, own[number]))
        line = f"rollouts = b{branch}.resample({n}, at=[{at}], max_new={max_new}, sampling={_sampling(plain)})"
        self._did("resample", lambda: self._drop(made), line)
        return {"branches": made, **self._parting(made, at)}

    def compare(self, first: int, second: int) -> dict[str, Any]:
        """What differs between two branches: the first token, and the first layer of the first position whose rows differ.

        Rows are compared bit for bit, from the first position where tokens or edits may differ, up to the first different
        token. `sizes` are distances there, as shares of the first branch's rows, layer by layer.
        """
        lanes = [self.branch(each).lane for each in (first, second)]
        paths = [list(lane.record.tokens) for lane in lanes]
        same = next((p for p, (a, b) in enumerate(zip(*paths, strict=False)) if a != b), min(map(len, paths)))
        token = [path[same] if same < len(path) else None for path in paths]
        edits: list[dict[bytes, int]] = [{edit.key: edit.first for edit in lane.edits} for lane in lanes]
        apart = [(edits[0] | edits[1])[key] for key in edits[0].keys() ^ edits[1].keys()]
        reply: dict[str, Any] = {"token": None if token == [None, None] else {"position": same, "ids": token}}
        reply["words"] = words(self.engine.text, [each for each in token if each is not None])
        start, end = min([same, *apart]), min(same + 1, *map(len, paths))
        reply["row"] = next((row for a, b in blocks(start, end) if (row := self._rows_apart(lanes, a, b))), None)
        return reply

    def pin(self, branch: int, position: int, note: str = "") -> bool:
        """Pin a token, or remove its pin. Returns whether it is pinned now."""
        key = (as_int("branch", branch), as_int("position", position, 0))
        before = list(self._marks)
        found = [mark for mark in before if mark[:2] == key]
        self._marks = [mark for mark in before if mark not in found]
        if not found or note:
            self._marks.append((*key, as_instance("note", note, str, "text")))
        self._tell({"event": "pins", "pins": self._marks})
        return len(self._marks) >= len(before)

    def undo(self) -> str:
        """Take the last action back: a rollback, or a release of its branches. Returns its name, "" if there is none."""
        if not self._done:
            return ""
        self._done[-1].undo()
        last = self._done.pop()
        self._changed()
        return last.what

    def pause(self) -> None:
        """The running action waits after its next token, until `resume`."""
        if self.work is not None:
            self.work.running.clear()

    def resume(self) -> None:
        """A paused action goes on."""
        if self.work is not None:
            self.work.running.set()

    def stop(self) -> None:
        """The running action ends after its next token. What it has made stays."""
        if self.work is not None:
            self.work.stopped = True
            self.work.running.set()

    def _did(self, what: str, undo: Callable[[], object], *lines: str) -> None:
        self._done.append(Done(what, undo, lines))
        self._changed()

    # ---- helpers of actions -------------------------------------------------------------------------------------

    def _working(self, what: str, branch: int, total: int) -> _Working:
        return _Working(self, LongAction(what, branch, total))

    def _hold(self, made: list[Branch]) -> list[Branch]:
        self._held |= {branch.id: branch for branch in made}
        return made

    def _fork(self, branch: int, at: int, n: int = 1) -> list[int]:
        own, at = self.branch(branch), as_int("at", at)
        made = [fork.id for fork in self._hold(own.fork(as_int("n", n, 1, MOST_DRAWN), at=at))]
        for number in made:
            self._inherit(branch, number, at)
        return made

    def _inherit(self, branch: int, made: int, at: int) -> None:
        """A fork knows how the tokens that it shares were made, and with which edits."""
        if branch in self.used and made not in self.used:
            self.used[made] = self.used[branch]

    def _drop(self, numbers: Sequence[int]) -> None:
        """Release branches that were made here, unless Python did."""
        for number in numbers:
            held = self._held.pop(number, None)
            if held is not None and held.status is not BranchStatus.RELEASED:
                held.release()
            self.spans.pop(number, None)
            self.used.pop(number, None)
        self._marks = [mark for mark in self._marks if mark[0] not in numbers]
        self._selected = [number for number in self._selected if number not in numbers] or [self.root.id]

    def _tip(self, branch: int, length: int) -> Branch:
        """The branch; BadRequest if it has changed since, so that an undo would take more back than the action."""
        own = self.branch(branch)
        if own.length != length:
            raise BadRequest(f"Branch {branch} has {own.length} tokens, and had {length} then. It was changed since: no undo.")
        return own

    @staticmethod
    def _again(spans: Sequence[tuple[int, int, Sampling]], to: int) -> list[tuple[int, int, Sampling]]:
        """How the tokens from `to` on were generated: a draw depends on its position, not on where the request began."""
        return [(max(start, to), end, how) for start, end, how in spans if end > to]

    def _encoded(self, text: str) -> list[int]:
        found = self.engine.text.encode(as_instance("text", text, str, "text"), special=False)
        if not found:
            raise BadRequest("No text to force. Type at least one character.")
        return found

    def _edit(self, op: str, at: int, layer: int | None, token: str | int | None, factor: float) -> tuple[str, Edit, str]:
        """(name, edit, its Python)."""
        which = as_int("layer", 0 if layer is None else layer, 0, self.engine.config.num_layers - 1)
        if op in ("attention", "mlp"):
            letter = "T" if op == "attention" else "C"
            name = f"no {op} {which} at {at}"
            told = f'rl.Edit("{letter}", "zero", positions={at}, layers=[{which}])'
            return name, Edit(letter, "zero", positions=at, layers=[which]), told
        if op != "steer":
            raise BadRequest(f"Unknown op {short_repr(op)}. Known: attention, mlp, steer.")
        if token is None:
            raise BadRequest("Which way to steer? Give a token, as text or id.")
        (target,) = self.engine.token_ids_of([token])
        vector: Tensor = self.engine.W_U[:, target].detach().to("cpu", torch.float32)
        factor = as_float("factor", factor)
        made = Edit("S", "add", vector, slice(at, None), layers=[which], factor=factor, match_norm=True)
        where = f"slice({at}, None), layers=[{which}], factor={factor}, match_norm=True"
        told = f'rl.Edit("S", "add", engine.W_U[:, {target}], {where})'
        return f"steer {which} to {self.engine.text.token(target)!r} x {factor:g} from {at}", made, told

    def _parting(self, made: Sequence[int], at: int) -> dict[str, Any]:
        """The first position where branches differ, and how many have each token there."""
        paths = [self._path(number)[at:] for number in made]
        for step in range(max(map(len, paths), default=0)):
            own = [path[step] if step < len(path) else None for path in paths]
            if len(set(own)) > 1:
                counts = {token: own.count(token) for token in dict.fromkeys(own)}
                ranked = sorted(counts.items(), key=lambda item: -item[1])
                told = [[token, count] for token, count in ranked]
                return {
                    "parts": at + step,
                    "counts": told,
                    "words": words(self.engine.text, [t for t in counts if t is not None]),
                }
        return {"parts": None, "counts": [], "words": {}}

    def _rows_apart(self, lanes: Sequence[Lane], first: int, end: int) -> dict[str, Any] | None:
        """The first position of a block where a row differs, with its site; None: none does."""
        sites = [site for site in self._order if site in self.engine.sites.sites]
        rows = [self.readings.rows(lane, first, end, sites) for lane in lanes]
        for at in range(end - first):
            for site in sites:
                one, other = (each[site][at] for each in rows)
                if not torch.equal(one, other):
                    streams = self.readings.spec.sites
                    return {"position": first + at, "site": site, "sizes": [_apart(*(r[s][at] for r in rows)) for s in streams]}
        return None

    @cached_property
    def _order(self) -> list[str]:
        """Residual streams, attention and MLP outputs in the order in which a pass computes them."""
        wanted = {site for letter in "STC" for site in self.engine.sites.per_layer(letter)} | {*self.readings.spec.sites}
        return [site for site in self.engine.sites.in_order() if site in wanted]


class _Working:
    """The one long action of an explorer, from its begin to its end."""

    def __init__(self, explorer: Explorer, work: LongAction) -> None:
        self.explorer, self.work = explorer, work

    def __enter__(self) -> LongAction:
        if self.explorer.work is not None:
            raise BadRequest(f"{self.explorer.work.what} is still running. Stop it, or wait for its end.")
        self.work.running.set()
        self.explorer.work = self.work
        self.explorer._tell({"event": "progress", **self.explorer._progress()})
        return self.work

    def __exit__(self, *_: object) -> None:
        self.explorer.work = None


def _apart(one: Tensor, other: Tensor) -> float:
    size = float(one.float().norm())
    return float((other.float() - one.float()).norm()) / size if size else 0.0


def _sampling(how: Sampling) -> str:
    return f"rl.Sampling(temperature={how.temperature:g}, seed={how.seed})"


def _told(how: Sampling) -> str:
    return f", sampling={_sampling(how)}" if how.temperature else ""


@verb
def explore(
    engine: Engine,
    prompt: Prompt,
    *,
    probes: Probe | Mapping[str, Probe] | None = None,
    thresholds: Mapping[str, float] | None = None,
    edits: Mapping[str, Edit] | None = None,
) -> Explorer:
    """The living tree of a prompt: in a notebook, click to roll back, fork, force, steer, ablate, resample and compare.

    probes      fitted probes, whose scores are shown under tokens, by name
    thresholds  of probes by name: above them, scores are marked; default: 0
    edits       edits by name, to fork with

    >>> from replaylens import Engine
    >>> explore(Engine.load("coin-plain"), "A coin's state is heads. Alice flips.")
    Explorer(1 branches below branch 0, 0 actions)
    """
    as_instance("engine", engine, Engine, "an engine")
    return Explorer(engine.prompt(prompt), probes=probes, thresholds=thresholds, edits=edits)
