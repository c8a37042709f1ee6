"""`Request`: the options of one generation, checked before anything starts."""

from dataclasses import dataclass, field, replace
from typing import Any

from replaylens.engine.errors import BadRequest
from replaylens.engine.loop.lane import Job, Lane
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import flag, instance, integer, items, shown, token_ids, whole

SAMPLING = "a Sampling, such as Sampling(temperature=0.7)"


@dataclass(frozen=True)
class Request:
    """Generate up to `n` tokens. The fields are the options of `Engine.generate`, which documents them."""

    n: int
    sampling: Sampling = field(default_factory=Sampling)
    drafter: str = "self"
    window: int | None = None
    deterministic: bool = True
    keep_pages: bool = False
    drafts: dict[int, list[list[int]]] | None = None
    final: bool = False

    def __post_init__(self) -> None:
        for name, value in self._plain().items():
            object.__setattr__(self, name, value)
        if self.drafts is not None and self.drafter != "forced":
            raise BadRequest(f"drafts were given with drafter={self.drafter!r}. Use drafter='forced'.")

    def _plain(self) -> dict[str, Any]:
        """The fields as plain Python values; BadRequest names the field that is invalid."""
        return {
            "n": whole("n", self.n, 1),
            "sampling": instance("sampling", self.sampling, Sampling, SAMPLING),
            "drafter": instance("drafter", self.drafter, str, "the name of a drafter"),
            "window": None if self.window is None else whole("window", self.window, 1),
            "deterministic": flag("deterministic", self.deterministic),
            "keep_pages": flag("keep_pages", self.keep_pages),
            "drafts": None if self.drafts is None else _chains(self.drafts),
            "final": flag("final", self.final),
        }

    def job(self, lane: Lane, eos_id: int | None) -> Job:
        """The request as a job on a lane. The tokenizer's end-of-sequence token ends it, unless the sampling ignores it."""
        stop = self.sampling.stop_tokens
        if eos_id is not None and not self.sampling.ignore_eos:
            stop = (*stop, eos_id)
        return Job(
            lane,
            new_tokens=self.n,
            sampling=replace(self.sampling, stop_tokens=tuple(dict.fromkeys(stop))),
            drafter=self.drafter,
            window=self.window,
            exact=self.deterministic,
            final=self.final,
            keep_pages=self.keep_pages,
            forced_drafts=self.drafts or {} if self.drafter == "forced" else None,
        )


def _chains(drafts: Any) -> dict[int, list[list[int]]]:
    """Chains of tokens by position, as plain lists; a position without chains is left out."""
    accepted = "a dict: position -> list of chains of token ids, such as {9: [[5, 7], [6]]}"
    out: dict[int, list[list[int]]] = {}
    for at, chains in instance("drafts", drafts, dict, accepted).items():
        if isinstance(chains, list | tuple) and any(integer(each) is not None for each in chains):
            raise BadRequest(f"Invalid drafts[{at}]={shown(chains)}: one chain where a list of chains goes. Give {accepted}.")
        found = [token_ids(f"drafts[{at}]", chain) for chain in items(f"drafts[{at}]", chains, accepted)]
        if found:
            out[whole("position of drafts", at)] = found
    return out
