"""Positions: which rows of a path a probe looks at.

| spec | rows |
|---|---|
| `all` | every row |
| `7` | the token at position 7 of its path |
| `step`, `step+2`, `step-1` | where a step of the task is decided; two tokens later; the token before |
| `step:3`, `step:3+1` | the same, of the third step only |
| `query`, `query-1`, `query+1` | the prompt's last token with labels; before it; the answer's first token |
| `last`, `last-1` | the last token of its prompt; before it. Of given texts and rows from arrays: a task has the query |
| `text:Paris` | the token that ends each occurrence of the substring; spaces count |
| `label:subject` | every token where the label has a value |
| `3:7`, `-2:` | a span of tokens; negative numbers count from the end of the prompt |
| a function | from the frame of the rows to a boolean for each of them |

A row belongs to the last step decided, so `step+5` has no rows if the next step comes four tokens later. The query is the
prompt's last token, from which the answer is read. If a model pads its prompts, the query is the last token before the padding.
Padding has no text, no labels and no distance from the query. Rows of given texts and from arrays know neither steps nor
queries.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from replaylens.dumps.content import CORE
from replaylens.dumps.plan import FORMS, NamedPosition, ends_of
from replaylens.engine.errors import no_such
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

_SPEC = re.compile(r"(?P<all>all)|(?P<at>\d+)|(?P<anchor>step|query|last)(:(?P<which>\d+))?(?P<shift>[+-]\d+)?")
CUSTOM = "custom:"
"""begins the spec of a function"""
PositionFunction = Callable[[pd.DataFrame], Any]
"""frame of the rows -> one boolean for each row"""
PLACES = ("step", "since_step", "until_step", "since_query", "steps")
"""the columns of `add_places`; all missing in rows from arrays"""


@dataclass(frozen=True)
class Position:
    """A parsed spec."""

    spec: str
    anchor: str
    """all, at, step, query, last, place or custom"""
    shift: int = 0
    which: int | None = None
    place: NamedPosition | None = None
    function: PositionFunction | None = None

    @classmethod
    def parse(cls, spec: "str | int | PositionFunction", arrays: bool = False) -> "Position":
        """Parse a spec. Raises BadPosition, which lists the forms, those of rows of texts or from `arrays` if they are."""
        if callable(spec):
            return cls(CUSTOM + getattr(spec, "__qualname__", "function"), "custom", function=spec)
        if isinstance(spec, str) and spec.startswith(CUSTOM):
            return cls(spec, "custom")
        if isinstance(spec, str) and (place := NamedPosition.parse(spec)) is not None:
            return cls(spec, "place", place=place)
        found = _SPEC.fullmatch(str(spec).replace(" ", ""))
        if found is None or (found["which"] and found["anchor"] != "step"):
            forms = "all, a number or last" if arrays else "all, a number, step, step+1, step:3, query or query-1"
            raise BadPosition(f"Unknown position {str(spec)!r}. Use {forms}. Also: {FORMS}; or a function.")
        if found["all"]:
            return cls("all", "all")
        if found["at"]:
            return cls(str(int(found["at"])), "at", int(found["at"]))
        which = int(found["which"]) if found["which"] else None
        return cls(found.group(), found["anchor"], int(found["shift"] or 0), which)

    def mask(self, frame: pd.DataFrame) -> np.ndarray:
        """One boolean per row of a frame with the columns of `add_places`. Raises BadPosition if the frame cannot tell."""
        self._check(frame)
        match self.anchor:
            case "all":
                return np.ones(len(frame), dtype=bool)
            case "at":
                return (frame["position"] == self.shift).to_numpy()
            case "query" | "last":
                return (frame[f"since_{self.anchor}"] == self.shift).to_numpy()
            case "place":
                assert self.place is not None  # `parse` sets it
                return _at_place(self.place, frame)
            case "custom":
                if self.function is None:
                    raise BadPosition(f"Position {self.spec!r} is a function, which its name does not give. Pass the function.")
                return mask_of(f"position {self.spec}", self.function(frame), len(frame))
        column, which = ("since_step", self.which) if self.shift >= 0 else ("until_step", self.which and self.which - 1)
        mask = (frame[column] == abs(self.shift)).to_numpy()
        return mask if which is None else mask & (frame["step"] == which).to_numpy()

    def _check(self, frame: pd.DataFrame) -> None:
        said, arrays = f"Position {self.spec!r} is unknown: these rows", "since_last" in frame
        if arrays and self.anchor in ("step", "query"):
            raise BadPosition(
                f"{said} come from given texts or from arrays, which have no {self.anchor}. Use all, a number or last. "
                f"Also: {FORMS}."
            )
        if arrays and self.anchor in ("at", "last", "place") and len(frame) and frame["position"].isna().all():
            raise BadPosition(f"{said} were given without positions. Use all, or give positions= to ProbeRows.of_arrays.")
        if self.anchor == "last" and not arrays:
            raise BadPosition(f"{said} come from a task, whose prompts end with the query. Use query.")
        if self.anchor == "step" and frame["since_step"].isna().all():
            raise BadPosition(
                f"{said} do not record steps. Dump positions 'all'; if that is so, no label of the task counts its steps: "
                "name it `actions`, or set `step_label` in the task's class."
            )


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


def _at_place(place: NamedPosition, frame: pd.DataFrame) -> np.ndarray:
    """One boolean per row. Raises BadPosition if the frame lacks the label, or texts of tokens."""
    position = frame["position"].to_numpy()
    if place.kind == "label":
        if place.name not in frame:
            raise BadPosition(no_such("label", place.name, frame.columns))
        return frame[place.name].notna().to_numpy()
    if place.kind == "span":
        start, stop = place.span(0)
        since = position - _num_prompt(frame)
        after = since >= start if place.start < 0 else position >= start
        return np.asarray(after & (since < stop if (place.stop or 0) < 0 else position < stop))
    if frame["text"].isna().any():
        raise BadPosition(f"Position 'text:{place.name}' needs the text of every token, which these rows do not have.")
    mask, text = np.zeros(len(frame), dtype=bool), frame["text"].to_numpy(dtype=object)
    for path in row_paths(frame):
        gaps = np.diff(position[path.rows], prepend=position[path.rows][:1]) > 1
        pieces = ["\0" * bool(gap) + piece for gap, piece in zip(gaps, text[path.rows], strict=True)]  # no match across a gap
        found = [i for i in ends_of(place.name, pieces) if i >= len(path.rows) - path.num_own]
        mask[path.rows[found]] = True
    return mask


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
