"""`Request`: what is asked for when a branch shall go on, checked before anything starts."""

from dataclasses import dataclass, field, replace

from replaylens.engine.errors import BadRequest
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.request.sampling import Sampling


@dataclass(frozen=True)
class Request:
    """Generate up to `n` tokens. The fields are the options of `Engine.generate`, which says what they mean."""

    n: int
    sampling: Sampling = field(default_factory=Sampling)
    drafter: str = "self"
    window: int | None = None
    deterministic: bool = True
    keep_rejected: bool = False
    drafts: dict[int, list[list[int]]] | None = None
    final: bool = False

    def __post_init__(self) -> None:
        if self.n < 1:
            raise BadRequest(f"generate {self.n} tokens: give at least 1")
        if self.window is not None and self.window < 1:
            raise BadRequest(f"window {self.window}: give at least 1 (1 decodes directly)")
        if self.drafts is not None and self.drafter != "forced":
            raise BadRequest(f"drafts are for drafter='forced', not for {self.drafter!r}")

    def job(self, lane: Lane, eos_id: int | None) -> Job:
        """The work this means on a lane. The tokenizer's end-of-sequence token ends it, unless the sampling ignores it."""
        stop = self.sampling.stop_tokens
        if eos_id is not None and not self.sampling.ignore_eos:
            stop = (*stop, eos_id)
        forced = {int(at): [list(c) for c in chains] for at, chains in (self.drafts or {}).items() if chains}
        return Job(
            lane,
            new_tokens=self.n,
            sampling=replace(self.sampling, stop_tokens=tuple(dict.fromkeys(stop))),
            drafter=self.drafter,
            window=self.window,
            exact=self.deterministic,
            final=self.final,
            keep_rejected=self.keep_rejected,
            forced_drafts=forced if self.drafter == "forced" else None,
        )
