"""`Run`: task examples replayed on an engine, with everything that was captured on the way."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm.auto import tqdm

from replaylens.engine.errors import BadRequest
from replaylens.engine.loop.lane import Statistics
from replaylens.engine.request.capture import Recording
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.sampling import Sampling
from replaylens.engine.serving.branch import Branch
from replaylens.tasks import Example

if TYPE_CHECKING:
    from replaylens.engine.dump.reader import Dump
    from replaylens.engine.engine import Engine
    from replaylens.engine.pictures.thoughts import Thinking
    from replaylens.engine.pictures.timeline import Timeline
    from replaylens.engine.pictures.tree import Tree
    from replaylens.engine.thinking.thoughts import Thoughts


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
    thoughts: "Thoughts | None" = None
    """what a model that thinks thought along the prompt"""

    @property
    def activations(self) -> Recording:
        """Captured rows by site, in order of position."""
        if self.recording is None:
            raise BadRequest("nothing was captured: replay with sites='STCZ' or site names")
        return self.recording


class Run(Sequence[Result]):
    """Results in the order of the examples.

    options  what they were replayed with, as a dump's plan wants to know it

    >>> from replaylens import Engine, tasks
    >>> examples = tasks.get("coin")(flips=2).examples(4)
    >>> run = Engine.load("coin-plain").replay(examples, sites="S", drafter="lens")
    >>> run.accuracy, run[0].text == examples[0].text
    (1.0, True)
    """

    def __init__(self, engine: "Engine", results: list[Result], options: dict[str, Any] | None = None) -> None:
        self.engine, self.results, self.options = engine, results, options or {}

    def __len__(self) -> int:
        return len(self.results)

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __repr__(self) -> str:
        return f"Run({len(self)} examples, {self.accuracy:.1%} correct, {self.drafting})"

    @property
    def accuracy(self) -> float:
        return sum(r.correct for r in self.results) / len(self.results) if self.results else float("nan")

    @property
    def acceptance(self) -> float:
        """Share of drafts that stood, over all examples."""
        drafted = sum(r.statistics.drafted for r in self.results)
        return sum(r.statistics.accepted for r in self.results) / drafted if drafted else float("nan")

    @property
    def drafting(self) -> str:
        """The acceptance in words."""
        drafted = any(r.statistics.drafted for r in self.results)
        return f"{self.acceptance:.1%} of drafts accepted" if drafted else "nothing drafted"

    def tree(self, index: int) -> "Tree | Thinking":
        """The branch tree of one example: its path, and the rejected drafts hanging off it; of a model that thinks, its
        chunks, states and thoughts. Draws itself, or `print` it."""
        result = self.results[index]
        if result.thoughts is not None:
            from replaylens.engine.thinking.picture import picture

            return picture(self.engine, result.tokens, result.thoughts, f"example {result.example.index}")
        from replaylens.engine.pictures.live import tree_of_result

        return tree_of_result(self.engine, result)

    def timeline(self, index: int) -> "Timeline":
        """One example step by step: prefill, decode, verify, rollback, and what the KV cache held."""
        from replaylens.engine.pictures.retelling import timeline_of

        result = self.results[index]
        return timeline_of(self.engine, result.branch, f"example {result.example.index}")

    def _repr_html_(self) -> str:
        from replaylens.engine.pictures.summary import run_html

        return run_html(self)

    def save(self, path: str | Path, **options: Any) -> "Dump":
        """Write the run as a dump, at a local path or any that fsspec knows. Options: see `dump_writer.save_run`."""
        from replaylens.engine.dump import writer as dump_writer

        return dump_writer.save_run(self, path, **options)


def replay_examples(
    engine: "Engine",
    examples: list[Example],
    *,
    sites: str | Sequence[str] | None = None,
    drafter: str = "self",
    window: int | None = None,
    seed: int = 0,
    sampling: Sampling | None = None,
    edits: Sequence[Edit] = (),
    max_new: int | None = None,
    rejected: bool = True,
    deterministic: bool = True,
    batch: int = 32,
    progress: bool = False,
) -> Run:
    """Prompt with each example, generate its answer, capture every row of the path.

    seed           added to the sampling's own and to each example's index: that is the example's own stream. Runs that are
                   to be independent need seeds that lie further apart than the indices
    edits          interventions on every example; negative positions count from the end of its prompt
    max_new        tokens to generate at most; default: the length of the right completion and a little more
    rejected       keep the rows of rejected drafts
    deterministic  False: take the fast path's tokens; such a run is not certified and cannot be saved
    batch          examples worked on together; no influence on any bit
    """
    for name, number in (("batch", batch), ("max_new", max_new)):
        if number is not None and number < 1:
            raise BadRequest(f"{name} {number}: give at least 1")
    sampling = sampling or Sampling()
    sampling = replace(sampling, seed=sampling.seed + seed)
    how: dict[str, Any] = dict(drafter=drafter, window=window, deterministic=deterministic, final=True)
    results: list[Result] = []
    with tqdm(total=len(examples), unit="example", disable=not progress) as bar:
        for first in range(0, len(examples), batch):
            some = examples[first : first + batch]
            branches = engine.prompts([e.prompt for e in some], sites=sites, keep_rejected=rejected, edits=edits)
            try:
                for n, group in _by_length(engine, some, branches, max_new).items():
                    own = [replace(sampling, seed=(sampling.seed + e.index) % 2**64) for e, _ in group]
                    engine.generate([b for _, b in group], n, sampling=own, **how)
                results += [result_of(engine, example, branch) for example, branch in zip(some, branches, strict=True)]
            finally:
                for branch in branches:
                    for path in [*branch.rejected, branch]:
                        path.release()
            bar.update(len(some))
    options: dict[str, Any] = dict(sites=sites, drafter=drafter, window=window, sampling=sampling, max_new=max_new)
    options |= dict(rejected=rejected, edits=edits)
    return Run(engine, results, options)


def _by_length(
    engine: "Engine", examples: list[Example], branches: list[Branch], max_new: int | None
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


def result_of(engine: "Engine", example: Example, branch: Branch) -> Result:
    """What came of an example on a branch that went on from its prompt. Precondition: the branch is not released yet."""
    rejected = [
        RejectedPath(other.id, other.tokens, engine.tree.branch(other.id).fork_position, other.lane.recording)
        for other in branch.rejected
    ]
    return Result(
        example=example,
        branch=branch.id,
        tokens=branch.tokens,
        text=branch.text,
        num_prompt=branch.root_length,
        finish_reason=branch.finish_reason,
        correct=_is_right(engine, example, branch.generated),
        statistics=branch.statistics,
        rejected=rejected,
        recording=branch.lane.recording,
        certified=branch.certified,
        thoughts=branch.lane.thoughts,
    )


def _is_right(engine: "Engine", example: Example, generated: list[int]) -> bool:
    """Whether generated tokens end with the example's answer."""
    answer = engine.text.decode([token for token in generated if token != engine.text.eos_id])
    return _last_word(answer) == _last_word(example.completion)


def _last_word(text: str) -> str:
    """The last word without its punctuation, in lower case: in every rendering, the answer."""
    words = text.lower().replace(".", " ").split()
    return words[-1] if words else ""
