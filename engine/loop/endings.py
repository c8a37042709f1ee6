"""`Endings`: where a turn's new tokens end its job, by a stop token, a stop string, an answer or the length."""

from replaylens.engine.loop.commit import Outcome
from replaylens.engine.loop.stops import Stops
from replaylens.engine.loop.turn import Turn
from replaylens.engine.loop.verify import Verdict
from replaylens.engine.memory.tree import BranchTree
from replaylens.engine.model.text import Text


class Endings:
    """Cuts verdicts at the token that ends the job."""

    def __init__(self, tree: BranchTree, text: Text) -> None:
        self.tree, self.stops = tree, Stops(text)

    def cut(self, turn: Turn, verdict: Verdict, drafted: int | None = None) -> Outcome:
        """The verdict up to the token that ends the job, if one does. Mutates the job: counts, finish reason."""
        job, chain = turn.job, turn.chains[verdict.chain][: verdict.num_accepted]
        new = [*chain, verdict.token]
        for i, token in enumerate(new):
            if job.sampling.stop_tokens and token in job.sampling.stop_tokens:
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
        record = self.tree.branch(turn.job.lane.branch)
        return self.stops.completed(turn.job.sampling.stop, record.past.path(turn.end, new), record.root_length)

    def _answered(self, turn: Turn, new: list[int]) -> bool:
        """Whether the tokens that the job generated, ending with the new ones, are all that its caller wants."""
        job, record = turn.job, self.tree.branch(turn.job.lane.branch)
        assert job.until is not None
        return job.until(record.past.path(turn.end, new)[turn.end - job.generated :])
