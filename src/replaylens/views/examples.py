"""Examples of a dump, one by one, for the report: text, outcome, tree, lens, thoughts. Reads one shard at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.engine.errors import BadDump
from replaylens.engine.memory.tree import BranchStatus, TokenState
from replaylens.tasks.errors import UnknownTask
from replaylens.tasks.task import AnyTask
from replaylens.views.data import Decode, DrawnPath, Readings, Token
from replaylens.views.pictures import Tree
from replaylens.views.thoughts import END, DrawnChunk, DrawnRound, Thinking, step_facts

if TYPE_CHECKING:
    import pandas as pd

# ---- dumped thoughts -------------------------------------------------------------------------------------------------
# `DumpedThoughts`: the Thinking-States picture of a dumped example, from its stored rows, without a model.

_NOTHING = -1
"""marks the absence of a token"""
TOKENS_SITE, STATE_SITE = "thinking.tokens", "thinking.state"
"""a dump may hold these sites where Thinking-States models are not installed"""


@dataclass(frozen=True, eq=False)
class DumpedThoughts:
    """The thoughts of a shard, by row; see `thinking.thoughts`."""

    plan: DumpPlan
    decode: Decode
    tokens: np.ndarray
    """[rows, steps]; only the last row of a chunk holds a thought"""
    squares: np.ndarray | None
    """squared norm of the added state: [rows]"""
    likely: np.ndarray | None
    """probability of each step's most likely token, NaN for missing steps: [rows, steps]"""

    @classmethod
    def of(cls, dump: Dump, number: int, decode: Decode) -> "DumpedThoughts | None":
        """The thoughts of one shard; None if the model does not think, or the dump lacks thoughts or positions."""
        plan, shard = dump.manifest.plan, dump.files.shard(number)
        if TOKENS_SITE not in dump.sites or plan.positions != "all":
            return None
        rows = {
            name: shard.rows(name, slice(0, shard.entry.rows))
            for name in (TOKENS_SITE, STATE_SITE, "thinking.top_ids", "thinking.top_logprobs")
            if name in dump.sites
        }
        squares = rows[STATE_SITE].float().square().sum(1).numpy() if STATE_SITE in rows else None
        likely = None
        if {"thinking.top_ids", "thinking.top_logprobs"} <= rows.keys():
            ids, logprobs = rows["thinking.top_ids"][:, :, 0], rows["thinking.top_logprobs"][:, :, 0]
            likely = np.where(ids.numpy() == _NOTHING, np.nan, logprobs.float().exp().numpy())
        return cls(plan, decode, rows[TOKENS_SITE].numpy(), squares, likely)

    def picture(self, rows: "pd.DataFrame", tree: Tree) -> Thinking:
        """The picture of the example with these index lines."""
        accepted, *others = [self._chunks(path, rows["row"][rows["branch"] == path.branch].to_numpy()) for path in tree.paths]
        forks = [path.fork_position for path in tree.paths[1:]]
        suffixes = {fork: tuple(chunks) for fork, chunks in zip(forks, others, strict=True) if chunks}
        return Thinking(tuple(accepted), tuple(self._rounds(accepted, suffixes)))

    def _chunks(self, path: DrawnPath, rows: np.ndarray) -> list[DrawnChunk]:
        """The chunks of one branch. Each ends at a row with a thought; the rest after the last one is the answer. Empty
        without thoughts, as in rejected drafts of an answer."""
        ends = np.flatnonzero(self.tokens[rows, 0] != _NOTHING) + 1
        pieces = np.split(np.arange(len(rows)), ends) if len(ends) else []
        return [self._chunk([path.tokens[i].text for i in piece], rows[piece]) for piece in pieces if len(piece)]

    def _chunk(self, texts: list[str], rows: np.ndarray) -> DrawnChunk:
        said = [int(token) for token in self.tokens[rows[-1]] if token != _NOTHING]
        thought = (*map(self.decode, said[:-1]), END) if said else ()
        state = None if self.squares is None else float(np.sqrt(self.squares[rows].sum()))
        likely = [] if self.likely is None else [p for p in self.likely[rows[-1]].tolist() if p == p]
        return DrawnChunk(tuple(texts), thought, state, step_facts(likely))

    def _rounds(self, accepted: list[DrawnChunk], suffixes: dict[int, tuple[DrawnChunk, ...]]) -> list[DrawnRound]:
        """The rounds, from the forks of the rolled-back suffixes; empty if the dump lacks rejected branches."""
        count = sum(bool(chunk.thought) for chunk in accepted)
        if not self.plan.rejected:
            return []
        if self.plan.drafter_settings.get("thoughts") == "sequential":
            return [DrawnRound(i, i + 1, i + 1) for i in range(count)]
        ends = np.cumsum([len(chunk.tokens) for chunk in accepted]).tolist()
        rounds, first = [], 0
        for fork, dropped in sorted(suffixes.items()):
            kept = ends.index(fork) + 1
            rounds.append(DrawnRound(first, kept, kept + len(dropped), dropped))
            first = kept
        return [*rounds, DrawnRound(first, count, count)]


# ---- dumped ----------------------------------------------------------------------------------------------------------

_LENS = ("Z.entropy", "Z.kl", "Z.emitted", "Z.top_ids", "Z.top_logprobs")


@dataclass(frozen=True)
class DumpedExample:
    """One example of a dump."""

    index: int
    root: str
    prompt: str
    generated: str
    answer: str
    """the right one; empty if the task is unknown"""
    correct: bool | None
    """None: a given text, which has no right answer"""
    num_rejected: int
    """number of rejected branches"""
    tree: Tree
    readings: Readings | None
    """Z of the accepted path"""
    thinking: Thinking | None = None
    """only of a Thinking-States model"""


def examples(
    dump: Dump, decode: Decode | None = None, with_lens: bool = True, layers: tuple[int, int] | None = None
) -> Iterator[DumpedExample]:
    """All examples in order.

    decode  texts of tokens that occur only in the lens; default: their ids
    layers  of a Thinking-States model: the blocks where states are added and thoughts are read
    """
    words, task = decode or _words(dump), _task(dump)
    lens = [name for name in _LENS if name in dump.sites] if with_lens else []
    for number, shard in enumerate(dump.manifest.shards):
        lists = dict.fromkeys(("text", "token_state", *dump.labels), object)  # of every branch: quicker from plain objects
        frame = dump.files.frame(number).astype(lists)
        z = {name: dump.files.shard(number).rows(name, slice(0, shard.rows)).numpy() for name in lens}
        thoughts = DumpedThoughts.of(dump, number, words)
        for index, rows in frame.groupby("example", sort=True):
            answer = task.example(int(index)).answer.strip() if task else ""
            example = _example(int(index), answer, rows, z, words, list(dump.labels))
            thinking = replace(thoughts.picture(rows, example.tree), layers=layers) if thoughts else None
            yield replace(example, thinking=thinking)


def _task(dump: Dump) -> AnyTask | None:
    """The dump's task; None if it is not registered."""
    try:
        return dump.manifest.plan.make_task()
    except UnknownTask:
        return None


def _words(dump: Dump) -> Decode:
    """Texts of the tokens in the index; other tokens show as ids."""
    known: dict[int, str] = {}
    for number in range(len(dump.manifest.shards)):
        frame = dump.files.frame(number)
        known |= dict(zip(frame["token"].tolist(), frame["text"].tolist(), strict=True))
    return lambda token: known.get(token, f"#{token}")


def _example(
    index: int, answer: str, rows: "pd.DataFrame", z: dict[str, np.ndarray], decode: Decode, labels: list[str]
) -> DumpedExample:
    paths, readings = [], None
    for branch, own in rows.groupby("branch", sort=True):
        reading = _readings(own, z, decode)
        paths.append(_path(int(branch), own, reading, decode, labels))
        readings = reading if branch == 0 else readings
    if not paths or paths[0].branch:  # the dump has no rows of the accepted path
        paths.insert(0, DrawnPath(0, None, 0, BranchStatus.FINISHED.value, ()))
    accepted = rows[rows["accepted"]]
    prompt = accepted["token_state"] == TokenState.PROMPT.value
    correct = None if rows["correct"].isna().iloc[0] else bool(rows["correct"].iloc[0])
    title = f"example {index}" + {True: ", right", False: ", wrong", None: ""}[correct]
    return DumpedExample(
        index,
        str(rows["root"].iloc[0]),
        "".join(accepted["text"][prompt]),
        "".join(accepted["text"][~prompt]),
        answer,
        correct,
        len(paths) - 1,
        Tree(tuple(paths), title),
        readings,
    )


def _readings(own: "pd.DataFrame", z: dict[str, np.ndarray], decode: Decode) -> Readings | None:
    """Z of a branch's rows; None if the dump lacks Z or some positions in between."""
    positions = own["position"].to_numpy()
    if len(z) < len(_LENS) or not np.array_equal(np.diff(positions), np.ones(len(positions) - 1)):
        return None
    rows = own["row"].to_numpy()
    places = {int(position): row for row, position in enumerate(positions)}
    return Readings(places, {name: x[rows] for name, x in z.items()}, decode)


def _path(branch: int, own: "pd.DataFrame", reading: Readings | None, decode: Decode, labels: list[str]) -> DrawnPath:
    columns = [own[name].tolist() for name in ("position", "token", "text", "token_state", "logprob", "entropy")]
    known = [own[name].tolist() for name in labels]
    tokens = []
    for i, (position, token, text, state, logprob, entropy) in enumerate(zip(*columns, strict=True)):
        holds = tuple((name, str(values[i])) for name, values in zip(labels, known, strict=True) if not _missing(values[i]))
        lens = reading.layers(position) if reading else ()
        reads = text or decode(token)
        tokens.append(Token(reads, position, _state(state), _number(logprob), _number(entropy), lens, holds))
    rejected = branch > 0
    status = BranchStatus.REJECTED if rejected else BranchStatus.FINISHED
    return DrawnPath(branch, 0 if rejected else None, int(own["fork_position"].iloc[0]), status.value, tuple(tokens))


def _state(written: str) -> TokenState:
    try:
        return TokenState(written)
    except ValueError:
        known = ", ".join(state.value for state in TokenState)
        raise BadDump(f"Unknown token_state {written!r} in the index; known: {known}. Run `replaylens verify`.") from None


def _missing(value: Any) -> bool:
    """Whether a value is None, NaN or pandas' NA: comparing NaN or NA with itself does not give equality."""
    return value is None or (value != value) is not False


def _number(value: Any) -> float | None:
    return None if _missing(value) else float(value)
