"""Positions of rows: which rows of a path a probe looks at. Their forms are those of `engine.request.positions`.

A row belongs to the last step decided, so `step+5` has no rows if the next step comes four tokens later. The query is the
prompt's last token, from which the answer is read. If a model pads its prompts, the query is the last token before the padding.
Padding has no text, no labels and no distance from the query. Rows of given texts and from arrays know neither steps nor
queries; rows of a task end their prompts with the query, not with `last`. A function gets the frame of the rows, and gives a
boolean for each of them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pandas as pd

from replaylens.dumps.content import CORE
from replaylens.engine.errors import no_such
from replaylens.engine.request import positions
from replaylens.probes.checks import mask_of
from replaylens.probes.errors import BadPosition

# ---- paths -----------------------------------------------------------------------------------------------------------
# Paths of rows: the rows before each row on its branch, and whether any are missing.


@dataclass(frozen=True, eq=False)
class RowPath:
    """One branch of an example, from the prompt's first token on. Rows are numbers in the frame, sorted by position."""

    rows: np.ndarray
    """the whole path: accepted rows up to the fork, then the branch's own"""
    num_own: int
    """number of the branch's own rows, at the end"""
    whole: np.ndarray
    """[rows] bool: whether no position from 0 up to the row is missing"""

    @property
    def own(self) -> np.ndarray:
        return self.rows[len(self.rows) - self.num_own :]


def row_paths(frame: pd.DataFrame) -> Iterator[RowPath]:
    """Every branch of every example; examples of joined parts are kept apart."""
    position, branch, fork = (frame[name].to_numpy() for name in ("position", "branch", "fork_position"))
    keys = ["part", "example"] if "part" in frame else ["example"]
    for rows in frame.groupby(keys, sort=False).indices.values():
        rows = rows[np.argsort(position[rows], kind="stable")]
        main = rows[branch[rows] == 0]
        for number in np.unique(branch[rows]):
            own = rows[branch[rows] == number]
            path = own if number == 0 else np.concatenate([main[position[main] < fork[own[0]]], own])
            yield RowPath(path, len(own), np.logical_and.accumulate(position[path] == np.arange(len(path))))


def example_keys(frame: pd.DataFrame) -> list[tuple[str, int]]:
    """The example of each row, as (part, example): joined parts number their examples alike."""
    part = frame["part"] if "part" in frame else [""] * len(frame)
    return list(zip(part, frame["example"], strict=True))


# ---- positions -------------------------------------------------------------------------------------------------------

OF_TASKS = ("tokens", "step", "query", "text", "label", "custom")
OF_ARRAYS = ("tokens", "last", "text", "label", "custom")
"""also of given texts"""
KINDS = (*OF_TASKS, "last")
PositionFunction = Callable[[pd.DataFrame], Any]
"""frame of the rows -> one boolean for each row"""
PLACES = ("step", "since_step", "until_step", "since_query", "steps")
"""the columns of `add_places`; all missing in rows from arrays"""


class RowPosition(positions.Position):
    """A parsed position of rows."""

    @classmethod
    def parse(
        cls, given: Any, kinds: Sequence[str] = KINDS, name: str = "position", error: type[Exception] = BadPosition
    ) -> Self:
        """The position of a spec; BadPosition, which lists the forms, if it is of none of these kinds."""
        return super().parse(given, kinds, name, error)

    def mask(self, frame: pd.DataFrame) -> np.ndarray:
        """One boolean per row of a frame with the columns of `add_places`. Raises BadPosition if the frame cannot tell."""
        match self.kind:
            case "tokens" | "last" if self.tokens is not None:
                return _of_slice(self.spec, self.tokens, frame)
            case "text":
                return _of_text(self.spec, self.name, frame)
            case "label":
                if self.name not in frame:
                    raise BadPosition(no_such("label", self.name, frame.columns))
                return frame[self.name].notna().to_numpy()
            case "query":
                return (frame["since_query"] == self.shift).to_numpy()
            case "custom":
                if self.function is None:
                    raise BadPosition(f"Position {self.spec!r} is a function, which its name does not give. Pass the function.")
                return mask_of(f"position {self.spec}", self.function(frame), len(frame))
        if frame["since_step"].isna().all():
            raise BadPosition(
                f"Position {self.spec!r} is unknown: these rows do not record steps. Dump positions 'all'; if that is so, no "
                "label of the task counts its steps: name it `actions`, or set `step_label` in the task's class."
            )
        column, which = ("since_step", self.which) if self.shift >= 0 else ("until_step", self.which and self.which - 1)
        mask = (frame[column] == abs(self.shift)).to_numpy()
        return mask if which is None else mask & (frame["step"] == which).to_numpy()


def _of_slice(spec: str, tokens: positions.PositionSlice, frame: pd.DataFrame) -> np.ndarray:
    """One boolean per row. What counts from a prompt has no rows where none of the prompt is."""
    position, mask = frame["position"].to_numpy(), np.full(len(frame), tokens == positions.PositionSlice())
    if mask.all():
        return mask
    if frame["position"].isna().all():
        raise BadPosition(
            f"Position {spec!r} is unknown: these rows were given without positions. Use all, or give positions= to "
            "ProbeRows.of_arrays."
        )
    from_start = tokens.part == "all" and tokens.start >= 0 and (tokens.stop or 0) >= 0
    counts = np.zeros(len(frame)) if from_start else _num_prompt(frame)
    for count in np.unique(counts[~np.isnan(counts)]):
        here = np.flatnonzero(counts == count)
        mask[here] = np.isin(position[here], tokens.kept(0, int(position[here].max()) + 1, int(count)))
    return mask


def _of_text(spec: str, substring: str, frame: pd.DataFrame) -> np.ndarray:
    """One boolean per row."""
    if frame["text"].isna().any():
        raise BadPosition(f"Position {spec!r} needs the text of every token, which these rows do not have.")
    position, text = frame["position"].to_numpy(), frame["text"].to_numpy(dtype=object)
    mask = np.zeros(len(frame), dtype=bool)
    for path in row_paths(frame):
        gaps = np.diff(position[path.rows], prepend=position[path.rows][:1]) > 1
        pieces = ["\0" * bool(gap) + piece for gap, piece in zip(gaps, text[path.rows], strict=True)]  # no match across a gap
        found = [i for i in positions.ends_of(substring, pieces) if i >= len(path.rows) - path.num_own]
        mask[path.rows[found]] = True
    return mask


def add_places(frame: pd.DataFrame, step_label: str | None) -> pd.DataFrame:
    """A copy with the columns that positions are resolved by. None: the rows do not record steps.

    step         steps decided so far on the row's path (in a chain of thought: those recited so far)
    since_step   tokens since the last decided step; NaN before the first
    until_step   tokens until the next decided step; NaN after the last
    since_query  tokens since the query, padding not counted; negative before it, NaN on padding
    steps        total number of steps on the example's accepted path
    """
    frame = frame.copy()
    places = np.full((4, len(frame)), np.nan)  # step, since_step, until_step, since_query
    counted = frame[step_label].to_numpy(dtype=float, na_value=np.nan) if step_label in frame else None
    position, branch = frame["position"].to_numpy(), frame["branch"].to_numpy()
    in_prompt = (frame["token_state"] == "prompt").to_numpy()
    labelled = frame.drop(columns=[*CORE.names, "shard", "row", "depth"], errors="ignore").notna().any(axis=1).to_numpy()
    examples = ["part", "example"] if "part" in frame else ["example"]
    for rows in frame.groupby(examples, sort=False).indices.values():
        main = rows[branch[rows] == 0]
        prompt, after = main[in_prompt[main]], main[~in_prompt[main]]
        if len(prompt) or len(after):
            end = position[prompt].max() if len(prompt) else position[after].min() - 1
            query = position[prompt[labelled[prompt]]].max(initial=-1)
            places[3, rows] = _since_query(position[rows], end if query < 0 else query, end)
    if counted is not None:
        for path in row_paths(frame):
            places[:3, path.own] = _steps(counted[path.rows], position[path.rows])[:, -path.num_own :]
    for name, values in zip(("step", "since_step", "until_step", "since_query"), places, strict=True):
        frame[name] = values
    frame["steps"] = frame["step"].where(frame["branch"] == 0).groupby([frame[name] for name in examples]).transform("max")
    return frame


def _num_prompt(frame: pd.DataFrame) -> np.ndarray:
    """The number of prompt tokens of each row's example."""
    keys = [frame["part"], frame["example"]] if "part" in frame else [frame["example"]]
    ends = frame["position"].where((frame["token_state"] == "prompt") & (frame["branch"] == 0))
    return np.asarray(ends.groupby(keys).transform("max").to_numpy(dtype=float) + 1)


def add_last(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy with `since_last`: tokens since the last one of the prompt, negative before it. Marks rows without a query."""
    return frame.assign(**dict.fromkeys(PLACES, np.nan), since_last=frame["position"] - (_num_prompt(frame) - 1))


def _since_query(position: np.ndarray, query: int, end: int) -> np.ndarray:
    """Tokens since the query of a prompt that ends at `end`; NaN for the padding between them."""
    return np.select([position <= query, position > end], [position - query, position - end], np.nan)


def _steps(counted: np.ndarray, position: np.ndarray) -> np.ndarray:
    """(step, since_step, until_step) along one path [3, rows]."""
    known = np.where(np.isnan(counted), 0.0, counted)
    decided = np.flatnonzero(known > np.concatenate([[0.0], known[:-1]]))
    out = np.full((3, len(counted)), np.nan)
    out[0] = counted
    if len(decided):
        places = position[decided]
        last = np.searchsorted(places, position, side="right") - 1
        following = last + 1
        some, more = last >= 0, following < len(places)
        out[1, some] = position[some] - places[last[some]]
        out[2, more] = places[following[more]] - position[more]
    return out
