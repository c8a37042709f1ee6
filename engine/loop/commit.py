"""The end of a turn: which drafts are accepted, where the job ends, and the commit of tokens, KV and captured rows."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from replaylens.engine.loop.lane import Lane, Turn
from replaylens.engine.memory.pages import PageTable
from replaylens.engine.memory.path import PathView
from replaylens.engine.memory.tree import ORDINARY, BranchTree, TokenState
from replaylens.engine.model.text import Text
from replaylens.engine.passes import lens as readout
from replaylens.engine.passes.lens import KnownLenses
from replaylens.engine.passes.runner import Keep, PassResult, Runner
from replaylens.engine.records import LensSpec
from replaylens.engine.request.capture import HEAD_SITES, Chunk, JoinedRows, PassTap, sliced_rows

# ---- verify ----------------------------------------------------------------------------------------------------------
# Acceptance: which drafts are accepted, and which token follows them.
#
# The canonical pass runs over [last token, draft 1, draft 2, ...]. Its row i chooses the token after the first i drafts.
# A draft is accepted if it equals the token chosen from the row before it. At the first mismatch, the chosen token follows.
# So every pass gains at least one token, and the committed tokens do not depend on the drafts.


@dataclass(frozen=True)
class Verdict:
    """What one verification says. How much of it is committed is an `Outcome`."""

    chain: int
    """which of the sibling chains is followed; 0 if all are rejected"""
    num_accepted: int
    """the number of its drafts that are accepted"""
    token: int
    """the token chosen after them; its KV is not computed yet"""


def judge(chains: Sequence[Sequence[int]], choose: Callable[[int, int], int]) -> Verdict:
    """Accept drafts up to the first mismatch. `choose(chain, row)` returns the token after the first `row` drafts of a chain.

    Precondition: the chains' first drafts differ, so at most one can be accepted. `choose` is not called for rows after the
    first mismatch.
    """
    token = choose(0, 0)
    followed = next((i for i, chain in enumerate(chains) if chain and chain[0] == token), None)
    if followed is None:
        return Verdict(0, 0, token)
    for accepted, draft in enumerate(chains[followed]):
        if draft != token:
            return Verdict(followed, accepted, token)
        token = choose(followed, accepted + 1)
    return Verdict(followed, len(chains[followed]), token)


def judged(turns: list[Turn], result: PassResult) -> dict[Turn, Verdict]:
    """A verdict for every turn. Precondition: the pass computed logits for all drafts of the turns.

    A choice that needs only the logits is made on the device, for all turns together; others are made on the host, row by row.
    """
    before = list(accumulate((segment.num_logits for segment in result.batch.segments), initial=0))
    first = {turn: [before[s] for s in turn.segments] for turn in turns}  # the row of the last token of the path
    verdicts: dict[Turn, Verdict] = {}
    if result.logits.device.type != "cpu" and (bare := [turn for turn in turns if turn.job.sampling.bare]):
        verdicts = _by_device(bare, result, first)
    return verdicts | {turn: _by_host(turn, result, first[turn]) for turn in turns if turn not in verdicts}


def overruled(turn: Turn, verdict: Verdict, result: PassResult) -> list[int]:
    """What the verifier chose in its rows after a rejected draft. They follow a token that is not part of the path, so they are
    void; pictures of the verification show them."""
    before = sum(segment.num_logits for segment in result.batch.segments[: turn.segments[verdict.chain]])
    chain, record = turn.chains[verdict.chain], turn.job.lane.record
    return [
        result.choose(before + row, turn.job.sampling, record.past.path(turn.end, chain[:row]), record.root_length)
        for row in range(verdict.num_accepted + 1, len(chain) + 1)
    ]


def drafted(turns: list[Turn], result: PassResult) -> dict[Turn, int]:
    """The next draft of every turn: what its sampling chooses from its row of the fast batch."""
    before = list(accumulate((segment.num_logits for segment in result.batch.segments), initial=0))
    row = {turn: before[turn.segments[0]] for turn in turns}
    drawn = [turn for turn in turns if turn.job.sampling.bare and not turn.job.sampling.plain_greedy]
    chosen = _drawn_together(drawn, result, row) if result.logits.device.type != "cpu" and drawn else {}
    for turn in turns:
        record, window = turn.job.lane.record, turn.job.window_open
        assert window is not None
        if turn not in chosen:
            path = record.past.path(turn.end, window.chain)
            chosen[turn] = result.choose(row[turn], turn.job.sampling, path, record.root_length)
    return chosen


def _drawn_together(turns: list[Turn], result: PassResult, row: dict[Turn, int]) -> dict[Turn, int]:
    """The drafts of turns whose draws need only the logits, in one launch: one by one, each waits for the device."""
    from replaylens.engine.passes.cuda import draw  # needs triton, as everything on the device does

    positions = [turn.end + len(turn.job.window_open.chain) for turn in turns if turn.job.window_open is not None]
    logits = result.logits[[row[turn] for turn in turns]]
    return dict(zip(turns, draw(logits, [turn.job.sampling for turn in turns], positions).tolist(), strict=True))


def _by_host(turn: Turn, result: PassResult, first: list[int]) -> Verdict:
    chains, sampling = turn.chains, turn.job.sampling
    if sampling.plain_greedy:
        return judge(chains, lambda chain, row: result.greedy[first[chain] + row])
    record, end = turn.job.lane.record, turn.end
    path, num_prompt = record.past.path, record.root_length
    return judge(
        chains, lambda chain, row: result.choose(first[chain] + row, sampling, path(end, chains[chain][:row]), num_prompt)
    )


def _by_device(turns: list[Turn], result: PassResult, first: dict[Turn, list[int]]) -> dict[Turn, Verdict]:
    """Sibling chains start with different drafts, so at most one is accepted; if none is, all yield the same token."""
    from replaylens.engine.passes.cuda import (
        Question,
        answers,  # needs triton, as everything on the device does
    )

    questions = [
        Question(row, chain, turn.job.sampling, turn.end)
        for turn in turns
        for row, chain in zip(first[turn], turn.chains, strict=True)
    ]
    answered = iter(answers(result.logits, questions))
    verdicts = {}
    for turn in turns:
        siblings = [Verdict(i, *next(answered)) for i in range(len(turn.chains))]
        verdicts[turn] = next((verdict for verdict in siblings if verdict.num_accepted), siblings[0])
    return verdicts


# ---- stops -----------------------------------------------------------------------------------------------------------
# `Stops`: whether the last token completes a stop string. It decodes the end of the text only, however long the text is.

_FIRST_TRY = 16
_MARGIN = 4
"""characters after the first token of an end that may differ from the whole text's: a dropped space, the marks of a word
piece, the rest of a character that began before"""
_HALF = "\ufffd"
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")


class Stops:
    """Finds stop strings in generated text.

    A token is the start of an end of the text if the text from it on does not depend on earlier tokens, except for a few
    characters. Two kinds of token are not: a piece of a character (it decodes to U+FFFD), and a byte of a byte fallback, whose
    whole run decodes to characters only if all of it is valid. Tokenizers of unknown kind have no such tokens, so their text
    is decoded from its beginning.
    """

    def __init__(self, text: Text) -> None:
        self.text = text
        self._pieces: dict[int, str] = {}

    def completed(self, stops: Sequence[str], path: PathView, first: int) -> bool:
        """Whether the last token of `path` completes a stop string in the text of the tokens from `first` on.

        A stop string that is already in earlier, forced text does not count.
        """
        longest, size, end = max(map(len, stops)), _FIRST_TRY, len(path)
        while True:
            start = self._start(path, first, end - size - longest)
            tokens = path[start:]
            # Half a character is no text yet.
            text, before = self.text.decode(tokens), self.text.decode(tokens[:-1]).rstrip(_HALF)
            if start == first or len(before) - longest + 1 >= len(self._pieces[path[start]]) + _MARGIN:
                return any(stop in text[max(0, len(before) - len(stop) + 1) :] for stop in stops)
            size *= 2

    def _start(self, path: PathView, first: int, latest: int) -> int:
        """The last position up to `latest` whose token starts an end of the text; `first` if there is none."""
        if not self.text.local:
            return first
        return next((at for at in range(latest, first, -1) if self._piece(path[at])), first)

    def _piece(self, token: int) -> str:
        """The text of a token that starts an end; empty for others."""
        if token not in self._pieces:
            piece = self.text.token(token)
            apart = piece.startswith(_HALF) or _BYTE.fullmatch(self.text.name(token)) is not None
            self._pieces[token] = "" if apart else piece
        return self._pieces[token]


# ---- captured --------------------------------------------------------------------------------------------------------
# Captured rows, from a pass or a burst into the recordings of branches.

SiteRows = Mapping[str, Tensor]


@dataclass(frozen=True)
class _Ahead:
    """Z of many rows of a pass."""

    row_of: dict[int, int]
    """packed row -> row of Z"""
    emitted: list[int]
    rows: SiteRows


class PassRows:
    """The captured rows of one pass. They are sent on and read through the lens for all turns together."""

    def __init__(self, runner: Runner, lenses: KnownLenses, tap: PassTap, result: PassResult) -> None:
        self.runner, self.lenses, self.tap, self.result = runner, lenses, tap, result
        self._ahead: dict[tuple[LensSpec, Keep], _Ahead] = {}

    def send(self, turns: Sequence[Turn]) -> None:
        """Start the way of all rows that turns may keep to where they are kept."""
        batch = self.result.batch
        for keep in ("host", "device"):
            packed: list[int] = []
            names: dict[str, None] = {}
            for turn in turns:
                spec = turn.job.lane.capture
                if spec is not None and spec.keep == keep and turn.job.lane.recording is not None:
                    first, segments = turn.first_to_record, [(i, batch.segments[i].end) for i in turn.segments]
                    found = [row for i, end in segments for row in self._packed(turn.job.lane, i, first, max(first, end))]
                    packed += found
                    names |= dict.fromkeys(site for site in spec.recorded if site not in HEAD_SITES and found)
            self.runner.send(self.tap, tuple(names), packed, batch.num_rows, keep)

    def read_ahead(self, turns: Sequence[Turn], verdicts: Mapping[Turn, Verdict]) -> None:
        """Read the rows that turns will commit through the lens, all together."""
        asked: dict[tuple[LensSpec, Keep], tuple[list[int], list[int]]] = {}
        for turn in turns:
            spec = turn.job.lane.capture
            if spec is not None and spec.lens is not None and turn.job.lane.recording is not None:
                packed, emitted = asked.setdefault((spec.lens, spec.keep), ([], []))
                for chain in range(len(turn.segments)):
                    rows, follows = self._following(turn, chain, verdicts.get(turn))
                    packed += rows
                    emitted += follows
        for (lens, keep), (packed, emitted) in asked.items():
            if packed:
                z = self._read(lens, keep, packed, emitted)
                self._ahead[lens, keep] = _Ahead({row: i for i, row in enumerate(packed)}, emitted, z)

    def chunk(self, lane: Lane, segment: int, start: int, emitted: Sequence[int]) -> Chunk:
        """Rows of a segment from position `start` on; emitted[i] is the token after the i-th of them, -1: none yet."""
        spec, end = lane.capture, start + len(emitted)
        assert spec is not None
        positions = lane.kept(start, end)
        if not positions:
            return Chunk(start, end, positions, {})
        packed = self._packed(lane, segment, start, end)
        parts = [self.tap.take(tuple(site for site in spec.recorded if site not in HEAD_SITES), packed, spec.keep)]
        if head := [site for site in spec.sites if site in HEAD_SITES]:
            parts.append(self.runner.kept(self.runner.head(self._values(spec.last, packed), head), spec.keep))
        if spec.lens is not None:
            parts.append(self._z(spec.lens, spec.keep, packed, [emitted[p - start] for p in positions]))
        return Chunk(start, end, positions, parts[0] if len(parts) == 1 else JoinedRows(parts))

    def _z(self, lens: LensSpec, keep: Keep, packed: Sequence[int], emitted: list[int]) -> SiteRows:
        """Z of some rows; read again if they do not end as foreseen, such as at a stop string."""
        ahead = self._ahead.get((lens, keep))
        first = ahead.row_of.get(packed[0], -1) if ahead is not None else -1
        if ahead is None or first < 0 or ahead.emitted[first : first + len(packed)] != emitted:
            return self._read(lens, keep, packed, emitted)
        end = first + len(packed)
        if isinstance(ahead.rows, dict):  # a copy, so that a long-lived branch does not keep the whole pass alive
            return {name: z[first:end].clone() for name, z in ahead.rows.items()}
        return sliced_rows(ahead.rows, first, end)

    def _read(self, lens: LensSpec, keep: Keep, packed: Sequence[int], emitted: list[int]) -> SiteRows:
        residuals = {site: self._values(site, packed) for site in lens.sites}
        return self.runner.kept(readout.read_there(lens, self.runner, residuals, emitted, self.lenses.of(lens)), keep)

    def _values(self, site: str, packed: Sequence[int]) -> Tensor:
        """Rows of a site, where the pass computed them."""
        value = self.tap.values[site]
        if packed[-1] - packed[0] == len(packed) - 1:
            return value[packed[0] : packed[-1] + 1]
        return value[torch.tensor(packed).to(value.device, non_blocking=True)]

    def _packed(self, lane: Lane, segment: int, start: int, end: int) -> Sequence[int]:
        """The packed rows of the positions of [start, end) that the lane keeps."""
        shift = self.result.batch.row(segment, start) - start
        kept = lane.kept(start, end)
        return range(kept.start + shift, kept.stop + shift, kept.step) if isinstance(kept, range) else [p + shift for p in kept]

    def _following(self, turn: Turn, chain: int, verdict: Verdict | None) -> tuple[Sequence[int], list[int]]:
        """(packed rows of one chain that may be committed, the token after each)."""
        lane, drafts = turn.job.lane, turn.chains[chain]
        tokens, segment = [*turn.rows, *drafts], turn.segments[chain]
        follows = [*tokens[1:], -1]
        if not turn.complete:
            follows[-1] = lane.record.tokens[turn.end]
        if verdict is not None and chain == verdict.chain:
            follows[len(turn.rows) - 1 + verdict.num_accepted] = verdict.token
        assert lane.capture is not None
        start, end = turn.first_to_record, turn.start + len(tokens)
        if not lane.capture.rejected and verdict is not None:
            end = turn.end + verdict.num_accepted if chain == verdict.chain else start
        kept = lane.kept(start, max(start, end))
        return self._packed(lane, segment, start, max(start, end)), [follows[p - turn.start] for p in kept]


# ---- commit ----------------------------------------------------------------------------------------------------------
# `Committer`: the transaction at the end of a turn. Tokens, KV and captured rows are committed together or not at all.
#
# Rejected drafts are rolled back in the same transaction: they become a rejected branch, which keeps its rows or pages on
# demand.


@dataclass(frozen=True)
class Outcome:
    """What a turn decided: the first `accepted` drafts of `chain`, then `pending`, whose KV is not computed yet."""

    chain: int = 0
    accepted: int = 0
    pending: tuple[int, ...] = ()
    by_draft: bool = False
    """whether the pending token is an accepted draft, too: one that ends the request"""


class Committer:
    """Applies outcomes to tree, pages and recordings. A rejected branch that keeps rows or pages is added to `lanes`."""

    def __init__(self, runner: Runner, tree: BranchTree, lanes: dict[int, Lane], changed: set[int]) -> None:
        """
        changed  to be told of new lanes; see `JobQueue.changed`
        """
        self.runner, self.tree, self.lanes, self.changed = runner, tree, lanes, changed

    def commit(self, turn: Turn, outcome: Outcome, rows: "PassRows | Mapping[str, Tensor] | None") -> None:
        """Mutates tree, lane, pages and recording. Precondition: the turn's rows are computed.

        rows  what the pass captured; after a burst, which rejects nothing, the rows of the turn's kept positions
        """
        followed = turn.chains[outcome.chain]
        num_accepted = {i: 0 for i, chain in enumerate(turn.chains) if i != outcome.chain and chain}
        if len(followed) > outcome.accepted:
            num_accepted[outcome.chain] = outcome.accepted
        # Everything that can fail comes first: rows and lens readouts are taken while nothing has changed.
        captured = self._captured(turn, outcome, rows)
        cut_off = {i: self._cut_off(turn, i, n, rows) for i, n in num_accepted.items()}
        turn.closed = True
        self.drop_drafts(turn)
        self._accept_rows(turn)
        for i, n in num_accepted.items():
            self._reject(turn, i, n, cut_off[i])
        branch = turn.job.lane.branch
        if outcome.accepted:
            self.tree.append(branch, followed[: outcome.accepted], TokenState.DRAFT)
            self.tree.mark(branch, turn.end, turn.end + outcome.accepted, TokenState.ACCEPTED)
        if outcome.pending:  # a finished branch refuses even an empty append
            self.tree.append(branch, outcome.pending, TokenState.PENDING)
        self._accept_kv(turn, outcome)
        if captured is not None and turn.job.lane.recording is not None:
            turn.job.lane.recording.add(*captured)

    def abandon(self, turn: Turn) -> None:
        """Undo a turn whose pass failed: the branch is as it was before. Mutates tree, lane and pages."""
        lane, turn.job.window_open = turn.job.lane, None
        self.drop_drafts(turn)
        self._release_forks(turn)
        lane.computed = min(lane.computed, turn.start)
        self.runner.pool.truncate(lane.table, lane.computed)
        turn.closed = True

    def drop_drafts(self, turn: Turn) -> None:
        """Cut the turn's drafts from the tree. Mutates the tree only."""
        if turn.complete and len(turn.job.lane.record.tokens) > turn.end:
            self.tree.rollback(turn.job.lane.branch, turn.end)  # of an incomplete turn, the rest is prompt, not drafts

    def _accept_rows(self, turn: Turn) -> None:
        branch = turn.job.lane.branch
        first = max(turn.start, turn.job.lane.record.states.num_committed)
        self.tree.mark(branch, min(first, turn.end), turn.end, TokenState.ACCEPTED)

    def _accept_kv(self, turn: Turn, outcome: Outcome) -> None:
        lane, pool = turn.job.lane, self.runner.pool
        if outcome.chain:  # a sibling chain is followed: its table becomes the branch's
            turn.tables[0], turn.tables[outcome.chain] = turn.tables[outcome.chain], turn.tables[0]
            lane.table = turn.tables[0]
        lane.computed = turn.end + outcome.accepted
        lane.exact = lane.exact and turn.job.exact
        if not lane.exact:
            self.tree.uncertify(lane.branch, turn.start, ORDINARY)
        pool.truncate(lane.table, lane.computed)
        self._release_forks(turn)
        self._seal(lane, turn.start)

    def _seal(self, lane: Lane, start: int) -> None:
        """In debug mode, record what the lane's KV from `start` on holds."""
        if self.runner.cache.chain is not None:
            tokens = lane.record.tokens[: lane.computed]
            self.runner.cache.seal(tokens, self.runner.pool.slots(lane.table, 0, lane.computed), start)

    def _release_forks(self, turn: Turn) -> None:
        for table in turn.tables[1:]:
            self.runner.pool.release(table)

    def _captured(
        self, turn: Turn, outcome: Outcome, rows: "PassRows | Mapping[str, Tensor] | None"
    ) -> tuple[Chunk, bool] | None:
        """(rows, open end) of the committed positions. None: nothing to record."""
        job, lane = turn.job, turn.job.lane
        if lane.capture is None or lane.recording is None or rows is None:
            return None
        known = lane.record.tokens  # a complete turn's may end in drafts; a part of a prompt's are final
        added = [*turn.chains[outcome.chain][: outcome.accepted], *outcome.pending]
        length = turn.end + len(added) if turn.complete else len(known)
        computed, start = turn.end + outcome.accepted, turn.first_to_record
        end = min(computed, length - lane.capture.lag)
        if isinstance(rows, PassRows) and job.remaining == 0 and computed == length:
            end = computed  # no token follows yet: the last row's end is open. After a burst, a pass reads that row
        if end <= start:
            return None
        open_end = end == length and lane.capture.lag > 0
        if not isinstance(rows, PassRows):
            return Chunk(start, end, lane.kept(start, end), rows), open_end
        follows = known[start + 1 : end + 1]
        if turn.complete:
            follows = [*known[start + 1 : turn.end], *added[max(0, start + 1 - turn.end) :]]
        emitted = [*follows, -1][: end - start]
        return rows.chunk(lane, turn.segments[outcome.chain], start, emitted), open_end

    def _cut_off(
        self, turn: Turn, index: int, num_accepted: int, rows: "PassRows | Mapping[str, Tensor] | None"
    ) -> Chunk | None:
        """The rows of a chain's rejected drafts. None: they are not kept."""
        lane, chain = turn.job.lane, turn.chains[index]
        if lane.recording is None or lane.capture is None or not lane.capture.rejected or not isinstance(rows, PassRows):
            return None
        return rows.chunk(lane, turn.segments[index], turn.end + num_accepted, [*chain[num_accepted + 1 :], -1])

    def _reject(self, turn: Turn, index: int, num_accepted: int, rows: Chunk | None) -> None:
        """Make chain[num_accepted:] a rejected branch with its own canonical rows and, if the job keeps them, its pages."""
        job, lane, chain = turn.job, turn.job.lane, turn.chains[index]
        base = turn.end + num_accepted
        self.tree.append(lane.branch, chain, TokenState.DRAFT)
        self.tree.mark(lane.branch, turn.end, base, TokenState.ACCEPTED)
        kept = self.tree.rollback(lane.branch, base, keep=True)
        assert kept is not None  # chain[num_accepted:] is not empty
        self.tree.rollback(lane.branch, turn.end)
        job.rejected.append(kept)
        record = self.tree.branch(kept)
        other = Lane(record, PageTable(), exact=lane.exact, edits=lane.edits, hooks=lane.hooks, carried=lane.carried)
        other.capture, other.traced = lane.capture, lane.traced
        other.template = lane.recording.like(base=base) if lane.recording is not None else None
        if rows is not None and other.template is not None:
            other.recording = other.template.like(base=base)
            other.recording.add(rows)
        if job.keep_pages:
            other.computed = turn.end + len(chain)
            other.table = self.runner.pool.fork(turn.tables[index], other.computed)
            self._seal(other, turn.start)
        if other.recording is not None or job.keep_pages:
            self.lanes[kept] = other
            self.changed.add(kept)
            lane.rejected.append(kept)


# ---- endings ---------------------------------------------------------------------------------------------------------
# `Endings`: where a turn's new tokens end its job, by a stop token, a stop string, an answer or the length.


class Endings:
    """Cuts verdicts at the token that ends the job."""

    def __init__(self, text: Text) -> None:
        self.stops = Stops(text)

    def cut(self, turn: Turn, verdict: Verdict, drafted: int | None = None) -> Outcome:
        """The verdict up to the token that ends the job, if one does. Mutates the job: counts, finish reason."""
        job, chain = turn.job, turn.chains[verdict.chain][: verdict.num_accepted]
        new = [*chain, verdict.token]
        limit = job.new_tokens - job.generated
        for i in range(max(0, limit - 1) if job.certain else 0, len(new)):
            if job.sampling.stop_tokens and new[i] in job.sampling.stop_tokens:
                job.finish_reason = "eos"
            elif job.sampling.stop and self._stops(turn, new[: i + 1]):
                job.finish_reason = "stop"
            elif job.until is not None and self._answered(turn, new[: i + 1]):
                job.finish_reason = "answer"
            elif job.generated + i + 1 == job.new_tokens:
                job.finish_reason = "length"
            if job.finish_reason:
                new = new[: i + 1]
                break
        agreed = min(len(new), verdict.num_accepted)
        by_draft = job.finish_reason is not None and len(new) <= verdict.num_accepted
        if by_draft:  # later drafts count as never drafted; so they do in the event that told of them, which has this list
            turn.chains[verdict.chain] = chain[:agreed]
        job.generated += len(new)
        if drafted is None:
            drafted = sum(map(len, turn.chains))
        job.statistics.count(drafted, min(drafted, agreed), len(new))
        if by_draft and not job.final:  # its row is dropped: whether there is one would depend on drafter and window
            turn.chains = [chain[: agreed - 1] if i == verdict.chain else each for i, each in enumerate(turn.chains)]
            return Outcome(verdict.chain, agreed - 1, (new[-1],), by_draft=True)
        return Outcome(verdict.chain, agreed, tuple(new[agreed:]))

    def _stops(self, turn: Turn, new: list[int]) -> bool:
        """Whether the last of the new tokens completes a stop string in the text after the prompt."""
        record = turn.job.lane.record
        return self.stops.completed(turn.job.sampling.stop, record.past.path(turn.end, new), record.root_length)

    def _answered(self, turn: Turn, new: list[int]) -> bool:
        """Whether the tokens that the job generated, ending with the new ones, are all that its caller wants."""
        job, record = turn.job, turn.job.lane.record
        assert job.until is not None
        return job.until(record.past.path(turn.end, new)[turn.end - job.generated :])
