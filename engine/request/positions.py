"""`Where`: which positions of a branch are captured."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from replaylens.engine.errors import BadRequest
from replaylens.engine.request.values import instance

FORMS = "'all', 'prompt', 'response', 'last', or a slice of one of them, such as 'response[:32]' or 'all[::4]'"
_FORM = re.compile(r"(all|prompt|response)(?:\[(-?\d*)(?:(:)(-?\d*)(?::(\d*))?)?\])?")


@dataclass(frozen=True)
class Where:
    """A slice of the positions of a path, of its prompt, or of its response."""

    part: Literal["all", "prompt", "response"] = "all"
    start: int = 0
    """counted from the first position of the part; negative: from the prompt's end"""
    stop: int | None = None
    step: int = 1

    @classmethod
    def parse(cls, text: str) -> "Where":
        """Inverse of `str`, and 'last' for the prompt's last position; BadRequest for anything else."""
        text = instance("positions", text, str, FORMS)
        if text == "last":
            return cls("prompt", -1)
        found = _FORM.fullmatch(text)
        if found is None or (found[2] == "" and found[3] is None):
            raise BadRequest(f"Unknown positions {text!r:.60}. Give {FORMS}.")
        part, first, colon, stop, step = found.groups()
        start = int(first) if first not in (None, "", "-") else 0
        end = int(stop) if stop not in (None, "", "-") else None
        if first == "-" or stop == "-" or step == "0" or (part != "prompt" and (start < 0 or (end is not None and end < 0))):
            raise BadRequest(f"Invalid positions {text!r:.60}. Only a prompt has an end to count from; a step is at least 1.")
        if first is not None and colon is None:  # a single position
            end = start + 1 if start != -1 else None
        return cls(part, start, end, int(step) if step else 1)  # type: ignore[arg-type]

    def __str__(self) -> str:
        stop = "" if self.stop is None else self.stop
        cut = f"[{self.start or ''}:{stop}{f':{self.step}' if self.step > 1 else ''}]"
        return self.part if cut == "[:]" else self.part + cut

    @property
    def everything(self) -> bool:
        """Whether no position is left out."""
        return self == Where()

    def kept(self, first: int, end: int, num_prompt: int) -> Sequence[int]:
        """The positions of [first, end) that are captured, on a path whose first `num_prompt` tokens are its prompt."""
        low, high = (num_prompt, None) if self.part == "response" else (0, num_prompt if self.part == "prompt" else None)
        start = low + self.start if self.start >= 0 else max(0, num_prompt + self.start)
        if self.stop is not None:
            stop = low + self.stop if self.stop >= 0 else num_prompt + self.stop
            high = stop if high is None else min(high, stop)
        last = end if high is None else min(end, high)
        if start < first:  # the first position of the slice that is not before `first`
            start += -(-(first - start) // self.step) * self.step
        return range(start, max(start, last), self.step)


def before(positions: Sequence[int], limit: int) -> int:
    """How many of the sorted positions are below `limit`."""
    if isinstance(positions, range):
        return len(range(positions.start, max(positions.start, min(positions.stop, limit)), positions.step))
    return bisect_left(positions, limit)
