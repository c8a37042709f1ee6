"""`Rollouts`: all rollouts of a plan, as a table, as counts of outcomes, and as rows of activations."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from replaylens.engine.errors import BadRollouts, UnknownSite
from replaylens.engine.resampling.answers import NO_ANSWER, OTHER
from replaylens.engine.resampling.counts import OutcomeCounts
from replaylens.engine.resampling.folder import WaveFolder
from replaylens.engine.resampling.plan import ResamplePlan
from replaylens.engine.resampling.rollout import Rollout, joined

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MAX_TEXT = 48
"""characters of a fork's text in a figure"""


@dataclass(frozen=True, eq=False)
class Rollouts:
    """The result of `branch.resample`: rollouts in order of position and number. Reads like a list of `Rollout`."""

    plan: ResamplePlan
    rollouts: tuple[Rollout, ...]

    @classmethod
    def load(cls, folder: str | Path) -> Rollouts:
        """The rollouts of a folder. Rows are read when they are looked at. BadRollouts if some are missing or damaged."""
        files = WaveFolder.open(folder)
        if missing := files.missing():
            raise BadRollouts(
                f"{folder} has {len(missing)} unfinished waves of {files.num_waves}. Resume it with the same call."
            )
        return cls(files.plan, tuple(rollout for number in range(files.num_waves) for rollout in files.read(number)))

    def __len__(self) -> int:
        return len(self.rollouts)

    def __getitem__(self, index: int) -> Rollout:
        return self.rollouts[index]

    def __iter__(self) -> Iterator[Rollout]:
        return iter(self.rollouts)

    def __repr__(self) -> str:
        kept = f", {len(self.index)} rows of {len(self.states)} sites" if self.plan.sites else ""
        return f"Rollouts({self.plan.n} at each of {len(self.plan.positions)} positions{kept})"

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One line per rollout: position, number, seed, tokens, text, outcome, stopped; with choices, their probabilities."""
        import pandas as pd

        names = ("position", "number", "seed", "tokens", "text", "outcome", "stopped")
        columns = {name: [getattr(each, name) for each in self.rollouts] for name in names}
        made = pd.DataFrame({**columns, "outcome": pd.Series(columns["outcome"], dtype=object)})
        for column, name in enumerate(self._choices):
            made[f"p({name})"] = [each.probabilities[column] for each in self.rollouts]
        return made

    @cached_property
    def index(self) -> pd.DataFrame:
        """One line per kept row: position and number of its rollout, place, and the position of its token on the path."""
        import pandas as pd

        lines = [(each.position, each.number, place, at) for each in self.rollouts for place, at in each.rows]
        return pd.DataFrame(lines, columns=["position", "number", "place", "token"])

    @property
    def states(self) -> States:
        """The kept rows by site: [rows, ...], in the order of `index`. Patterns have as many keys as the longest path needs."""
        return States(self.rollouts)

    def outcomes(self) -> OutcomeCounts:
        """How often each outcome followed each position."""
        plan, n = self.plan, self.plan.n
        names = list(self._choices) or self._found_outcomes()
        counts = np.zeros((len(plan.positions), len(names)), dtype=np.int64)
        for place in range(len(plan.positions)):
            found = Counter(each.outcome for each in self.rollouts[place * n : (place + 1) * n])
            for outcome, count in found.items():
                counts[place, names.index(NO_ANSWER if outcome is None else outcome)] = count
        shares = None
        if self._choices:
            each = np.array([rollout.probabilities for rollout in self.rollouts]).reshape(len(plan.positions), n, len(names))
            shares = each.mean(1)
        return OutcomeCounts(list(plan.positions), names, counts, list(plan.texts), shares)

    def _found_outcomes(self) -> list[str]:
        found = sorted({each.outcome for each in self.rollouts if each.outcome is not None})
        return found + [NO_ANSWER] * any(each.outcome is None for each in self.rollouts)

    @property
    def _choices(self) -> tuple[str, ...]:
        """The names of the choices, and of the rest."""
        answer = self.plan.answer
        return (*map(str, answer.tokens), OTHER) if answer is not None and answer.tokens else ()

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all rollouts with their rows. The same for any waves and any number of workers."""
        return hashlib.sha256("".join(each.digest for each in self.rollouts).encode()).hexdigest()

    def plot(self) -> Figure:
        """Shares of the outcomes at each fork, one bar per fork from top to bottom, named by the text after it."""
        from replaylens.engine.pictures.figure import picture, plain, short
        from replaylens.engine.pictures.outcomes import colours

        counts = self.outcomes()
        rows, below = range(len(counts.positions)), np.zeros(len(counts.positions))
        figure = picture(8, max(min(0.26 * len(rows), 40) + 1.2, 1.9))  # the label of the axis needs its height
        axis = figure.subplots()
        for column, (name, fill) in enumerate(zip(counts.outcomes, colours(counts.outcomes), strict=True)):
            axis.barh(rows, counts.shares[:, column], left=below, label=plain(name), color=fill)
            below = below + counts.shares[:, column]
        names = [
            f"{plain(short(text.strip(), _MAX_TEXT))} ({at})" for at, text in zip(counts.positions, counts.texts, strict=True)
        ]
        axis.set_yticks(rows, names, fontsize=8)
        axis.set(xlabel="share of rollouts", xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5), ylabel="fork before (position)")
        figure.legend(loc="outside upper center", ncols=min(4, len(counts.outcomes)), fontsize=8)
        return figure

    def _repr_html_(self) -> str:
        counts = self.outcomes()
        head = "".join(f"<th>{escape(name)}</th>" for name in ("position", "text", *counts.outcomes))
        lines = [
            f"<tr><td>{at}</td><td>{escape(text.strip()[:80])}</td>{''.join(f'<td>{x:.2f}</td>' for x in shares)}</tr>"
            for at, text, shares in zip(counts.positions, counts.texts, counts.shares, strict=True)
        ]
        return f"<p>{escape(repr(self))}</p><table><tr>{head}</tr>{''.join(lines)}</table>"


class States(Mapping[str, Tensor]):
    """The kept rows of some rollouts, by site. Tensors are joined, or read from their files, when they are asked for."""

    def __init__(self, rollouts: tuple[Rollout, ...]) -> None:
        self._rollouts = rollouts

    def __getitem__(self, site: str) -> Tensor:
        if site not in set(self):
            raise UnknownSite(f"Site {site!r:.60} was not captured. Captured: {', '.join(self) or 'nothing'}.")
        return joined(site, [each.states[site] for each in self._rollouts if each.rows])

    def __iter__(self) -> Iterator[str]:
        return iter(next((list(each.states) for each in self._rollouts if each.rows), []))

    def __len__(self) -> int:
        return len(list(iter(self)))
