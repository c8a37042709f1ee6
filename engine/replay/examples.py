"""Task examples, replayed: prompt, generate, capture every row of the path."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest
from replaylens.engine.loop.lane import Statistics
from replaylens.engine.memory.tree import BranchRecord
from replaylens.engine.request.capture import Recording
from replaylens.engine.request.edits import Edit, listed
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.request.values import flag, instance, whole
from replaylens.engine.serving.branch import Branch
from replaylens.engine.serving.core import Core
from replaylens.engine.thinking.thoughts import Thoughts, thoughts_of
from replaylens.tasks import Example


@dataclass(frozen=True)
class RejectedPath:
    """Drafts that did not stand: tokens from `fork_position` on, with canonical rows of their own."""

    branch: int
    tokens: list[int]
    fork_position: int
    activations: Recording | None


@dataclass(frozen=True)
class Result:
    """One example's path."""

    example: Example
    branch: int
    record: BranchRecord = field(repr=False)
    """its place in the engine's tree, held so that it can be drawn after its release"""
    tokens: list[int]
    text: str
    num_prompt: int
    finish_reason: str | None
    correct: bool
    """whether the generated text ends in the right answer, in capitals or not"""
    statistics: Statistics
    rejected: list[RejectedPath]
    recording: Recording | None
    certified: bool = True
    """whether every row of it is canonical; only such examples can be dumped"""
    thoughts: Thoughts | None = None
    """what a model that thinks thought along the prompt"""

    @property
    def activations(self) -> Recording:
        """Captured rows by site, in order of position."""
        if self.recording is None:
            raise BadRequest("nothing was captured: replay with sites='STCZ' or site names")
        return self.recording


@dataclass(frozen=True)
class ReplayOptions:
    """How examples are replayed."""

    sites: str | Sequence[str] | None = None
    """what to capture: "STCZ", or site names"""
    drafter: str = "self"
    window: int | None = None
    sampling: Sampling = field(default_factory=Sampling)
    """its seed plus an example's index is the example's own stream; runs that are to be independent need seeds that lie
    further apart than the indices"""
    edits: Sequence[Edit] = ()
    """interventions on every example; negative positions count from the end of its prompt"""
    max_new: int | None = None
    """tokens to generate at most; None: the length of the right completion and a little more"""
    rejected: bool = True
    """keep the rows of rejected drafts"""
    deterministic: bool = True
    """False: take the fast path's tokens; such a run is not certified and cannot be saved"""

    def __post_init__(self) -> None:
        if self.max_new is not None:
            object.__setattr__(self, "max_new", whole("max_new", self.max_new, 1))
        instance("sampling", self.sampling, Sampling, "a Sampling")
        object.__setattr__(self, "edits", tuple(listed(self.edits)))
        flag("rejected", self.rejected)


def replay_examples(
    engine: Core, examples: list[Example], options: ReplayOptions, batch: int = 32, progress: bool = False
) -> list[Result]:
    """Prompt with each example, generate its answer, capture every row of the path.

    batch  examples worked on together; no influence on any bit
    """
    batch, progress = whole("batch", batch, 1), flag("progress", progress)
    for example in examples:
        instance("examples", example, Example, "examples of a task, such as tasks.get('coin')().examples(4)")
    o, results = options, list[Result]()
    with tqdm(total=len(examples), unit="example", disable=not progress) as bar:
        for first in range(0, len(examples), batch):
            some = examples[first : first + batch]
            branches = engine.prompts([e.prompt for e in some], sites=o.sites, keep_rejected=o.rejected, edits=o.edits)
            try:
                for n, group in _by_length(engine, some, branches, o.max_new).items():
                    engine.generate(
                        [branch for _, branch in group],
                        n,
                        sampling=[replace(o.sampling, seed=(o.sampling.seed + e.index) % 2**64) for e, _ in group],
                        drafter=o.drafter,
                        window=o.window,
                        deterministic=o.deterministic,
                        final=True,
                    )
                results += [result_of(engine, example, branch) for example, branch in zip(some, branches, strict=True)]
            finally:
                for branch in branches:
                    branch.release()
            bar.update(len(some))
    return results


def _by_length(
    engine: Core, examples: list[Example], branches: Sequence[Branch], max_new: int | None
) -> dict[int, list[tuple[Example, Branch]]]:
    """Pairs by how many tokens they may generate."""
    groups: dict[int, list[tuple[Example, Branch]]] = {}
    for example, branch in zip(examples, branches, strict=True):
        n = max_new or len(engine.text.encode(example.completion, special=False)) + 2
        n = min(n, engine.config.max_positions - branch.length)
        if n < 1:
            raise BadRequest(f"example {example.index}: its prompt of {branch.length} tokens leaves no room to generate")
        groups.setdefault(n, []).append((example, branch))
    return groups


def result_of(engine: Core, example: Example, branch: Branch) -> Result:
    """What came of an example on a branch that went on from its prompt. Precondition: the branch is not released yet."""
    thoughts = thoughts_of(branch.lane)
    rejected = [
        RejectedPath(other.id, other.tokens, other.record.fork_position, other.lane.recording) for other in branch.rejected
    ]
    return Result(
        example=example,
        branch=branch.id,
        record=branch.record,
        tokens=branch.tokens,
        text=branch.text,
        num_prompt=branch.root_length,
        finish_reason=branch.finish_reason,
        correct=_is_right(engine, example, branch.generated),
        statistics=branch.statistics,
        rejected=rejected,
        recording=branch.lane.recording,
        certified=branch.certified,
        thoughts=None if thoughts is None else thoughts.copy(),
    )


def _is_right(engine: Core, example: Example, generated: list[int]) -> bool:
    """Whether generated tokens end with the example's answer."""
    answer = engine.text.decode([token for token in generated if token != engine.text.eos_id])
    return _last_word(answer) == _last_word(example.completion)


def _last_word(text: str) -> str:
    """The last word without its punctuation, in lower case: in every rendering, the answer."""
    words = text.lower().replace(".", " ").split()
    return words[-1] if words else ""
