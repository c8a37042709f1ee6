"""Positions: which rows of a path a probe looks at.

| spec | rows |
|---|---|
| `all` | every row |
| `7` | the token at position 7 of its path |
| `step`, `step+2`, `step-1` | where a step of the task is decided; two tokens later; the token before |
| `step:3`, `step:3+1` | the same, of the third step only |
| `query`, `query-1`, `query+1` | the prompt's last token with labels; before it; the answer's first token |
| `last`, `last-1` | the last token of its prompt; before it. Only for rows from arrays: rows of a task have the query |

A row belongs to the last step decided, so `step+5` has no rows if the next step comes four tokens later. The query is the
prompt's last token, from which the answer is read. If a model pads its prompts, the query is the last token before the padding.
Padding has no text, no labels and no distance from the query. Rows from arrays know neither steps nor queries.
"""

import re
from dataclasses import dataclass

import numpy as np
import pandas as pd

from replaylens.engine.dump.content import CORE
from replaylens.probes.data.paths import row_paths
from replaylens.probes.errors import BadPosition

STEP_LABELS = ("actions", "hops")
"""labels that count steps; a task's first one is used, and a step is decided where it grows"""
_SPEC = re.compile(r"(?P<all>all)|(?P<at>\d+)|(?P<anchor>step|query|last)(:(?P<which>\d+))?(?P<shift>[+-]\d+)?")
PLACES = ("step", "since_step", "until_step", "since_query", "steps")
"""the columns of `add_places`; all missing in rows from arrays"""


@dataclass(frozen=True)
class Position:
    """A parsed spec."""

    spec: str
    anchor: str
    """all, at, step, query or last"""
    shift: int = 0
    which: int | None = None

    @classmethod
    def parse(cls, spec: str | int, arrays: bool = False) -> "Position":
        """Parse a spec. Raises BadPosition, which lists the forms, those of rows from `arrays` if they are."""
        found = _SPEC.fullmatch(str(spec).replace(" ", ""))
        if found is None or (found["which"] and found["anchor"] != "step"):
            forms = "all, a number or last" if arrays else "all, a number, step, step+1, step:3, query or query-1"
            raise BadPosition(f"Unknown position {str(spec)!r}. Use {forms}.")
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
        column, which = ("since_step", self.which) if self.shift >= 0 else ("until_step", self.which and self.which - 1)
        mask = (frame[column] == abs(self.shift)).to_numpy()
        return mask if which is None else mask & (frame["step"] == which).to_numpy()

    def _check(self, frame: pd.DataFrame) -> None:
        said, arrays = f"Position {self.spec!r} is unknown: these rows", "since_last" in frame
        if arrays and self.anchor in ("step", "query"):
            raise BadPosition(f"{said} come from arrays, which have no {self.anchor}. Use all, a number or last.")
        if arrays and self.anchor in ("at", "last") and len(frame) and frame["position"].isna().all():
            raise BadPosition(f"{said} were given without positions. Use all, or give positions= to ProbeRows.of_arrays.")
        if self.anchor == "last" and not arrays:
            raise BadPosition(f"{said} come from a task, whose prompts end with the query. Use query.")
        if self.anchor == "step" and frame["since_step"].isna().all():
            raise BadPosition(f"{said} do not record steps. Dump positions 'all'.")


def add_places(frame: pd.DataFrame, knows_steps: bool) -> pd.DataFrame:
    """A copy with the columns that positions are resolved by.

    step         steps decided so far on the row's path (in a chain of thought: those recited so far)
    since_step   tokens since the last decided step; NaN before the first
    until_step   tokens until the next decided step; NaN after the last
    since_query  tokens since the query, padding not counted; negative before it, NaN on padding
    steps        total number of steps on the example's accepted path
    """
    frame = frame.copy()
    counter = next((name for name in STEP_LABELS if name in frame), None)
    places = np.full((4, len(frame)), np.nan)  # step, since_step, until_step, since_query
    counted = frame[counter].to_numpy(dtype=float, na_value=np.nan) if counter and knows_steps else None
    position = frame["position"].to_numpy()
    in_prompt = (frame["token_state"] == "prompt").to_numpy()
    labelled = frame.drop(columns=[*CORE.names, "shard", "row", "depth"], errors="ignore").notna().any(axis=1).to_numpy()
    examples = ["part", "example"] if "part" in frame else ["example"]
    for rows in frame.groupby(examples, sort=False).indices.values():
        main = rows[frame["branch"].to_numpy()[rows] == 0]
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
