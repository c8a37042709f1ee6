"""`Run`: task examples or texts replayed on an engine, with everything that was captured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from replaylens.engine.display import word
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadRequest
from replaylens.engine.records import Citation, Identifier
from replaylens.engine.request.values import as_bool, as_int, renamed
from replaylens.engine.serving.watch import Watch
from replaylens.replay.replayer import ReplayOptions, Result

if TYPE_CHECKING:
    from replaylens.dumps.content import Content
    from replaylens.dumps.plan import DumpPlan, Encoders, Selector
    from replaylens.dumps.reader import Dump
    from replaylens.views.pictures import Timeline, Tree
    from replaylens.views.thoughts import Thinking


class Run(Sequence[Result]):
    """Results in the order of the examples.

    options  the options of the replay

    >>> from replaylens import Engine, tasks
    >>> examples = tasks.get("coin")(flips=2).examples(4)
    >>> run = Engine.load("coin-plain").replay(examples, sites="S", drafter="lens")
    >>> run.accuracy, run[0].text == examples[0].text
    (1.0, True)
    """

    def __init__(self, engine: Engine, results: list[Result], options: ReplayOptions) -> None:
        self.engine, self.results, self.options = engine, results, options

    def __len__(self) -> int:
        return len(self.results)

    @overload
    def __getitem__(self, index: int) -> Result: ...
    @overload
    def __getitem__(self, index: slice) -> list[Result]: ...
    def __getitem__(self, index: int | slice) -> Result | list[Result]:
        return self.results[index if isinstance(index, slice) else as_int("index", index, -sys.maxsize, sys.maxsize)]

    def __iter__(self) -> Iterator[Result]:
        return iter(self.results)

    def __repr__(self) -> str:
        scored = f"{self.accuracy:.1%} correct, " if self._scored else ""
        return f"Run({len(self)} examples, {scored}{self.drafting})"

    @property
    def _scored(self) -> list[bool]:
        """Whether each example with a right answer was answered rightly."""
        return [result.correct for result in self.results if result.correct is not None]

    @property
    def accuracy(self) -> float:
        """The share of right answers; nan if no example has one, as given texts."""
        return sum(self._scored) / len(self._scored) if self._scored else float("nan")

    @property
    def acceptance(self) -> float:
        """The share of drafts that were accepted, over all examples; nan if nothing was drafted."""
        drafted = sum(r.statistics.drafted for r in self.results)
        return sum(r.statistics.accepted for r in self.results) / drafted if drafted else float("nan")

    @property
    def drafting(self) -> str:
        """The acceptance as text."""
        drafted = any(r.statistics.drafted for r in self.results)
        return f"{self.acceptance:.1%} of drafts accepted" if drafted else "nothing drafted"

    @cached_property
    def probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """(log-probability of each token, entropy after it) [rows], in the order of a dump's rows; computed once, bit for bit
        those of `save`."""
        from replaylens.dumps.maker import plan_of_run
        from replaylens.dumps.rows import probabilities

        plan = plan_of_run(self.engine, self[0].example.maker, [r.example.index for r in self], self.options)
        return probabilities(self.engine, plan, self.results)

    def tree(self, index: int) -> Tree:
        """The branch tree of one example: its path and rejected branches. Draws itself in a notebook; `print` it elsewhere."""
        from replaylens.views.pictures import tree_of
        from replaylens.views.thoughts import thoughts_by_branch

        result = self._result(index)
        recordings = {result.branch: result.recording} | {path.branch: path.activations for path in result.rejected}
        title = f"example {result.example.index}" + {True: ", right", False: ", wrong", None: ""}[result.correct]
        text, thoughts = self.engine.text, result.thoughts
        said = None if thoughts is None else thoughts_by_branch(text, result.record, thoughts)
        return self.engine.lock.alone(tree_of, result.record, recordings, text, title, said)

    def picture(self, index: int) -> Thinking:
        """The Thinking-States picture of one example: chunks, states, thoughts. Draws itself in a notebook; or `print` it.

        BadRequest if the model does not think.
        """
        from replaylens.views.thoughts import picture

        result = self._result(index)
        if result.thoughts is None:
            raise BadRequest("This model does not think, so there is no picture of its thoughts. Use run.tree(i).")
        return picture(self.engine.text, result.tokens, result.thoughts, f"example {result.example.index}")

    def timeline(self, index: int) -> Timeline:
        """One example step by step: prefill, decode, verify, rollback, and the contents of the KV cache."""
        from replaylens.views.pictures import timeline
        from replaylens.views.thoughts import with_rounds

        result = self._result(index)
        decode, known = partial(word, self.engine.text), {result.branch: result.tokens}
        told = timeline(self.engine.trace, result.branch, decode, known, f"example {result.example.index}")
        return told if result.thoughts is None else with_rounds(told, self.engine.text, result.thoughts)

    def most_telling(self) -> Timeline:
        """The timeline of the example that shows most of the protocol: drafts that were accepted and drafts that were rejected
        in one verification, early on. Needs an engine with record=True."""
        return max((self.timeline(i) for i in range(len(self))), key=lambda told: (told.interest, -told.capacity))

    def _result(self, index: int) -> Result:
        return self.results[as_int("index", index, -len(self), len(self) - 1)]

    def _repr_html_(self) -> str:
        from replaylens.views.summary import MAX_TREES, folded_pictures

        facts: dict[str, str | int | float] = {
            "examples": len(self),
            "right answers": f"{self.accuracy:.1%}" if self._scored else "none",
            "drafts accepted": f"{self.acceptance:.1%}" if self.acceptance == self.acceptance else "nothing drafted",
        }
        thinks = any(result.thoughts is not None for result in self.results)
        draw, verb = (self.picture, "run.picture(i)") if thinks else (self.tree, "run.tree(i)")
        shown = [draw(i) for i in range(min(len(self), MAX_TREES))]
        more = len(self) - len(shown)
        return folded_pictures(facts, shown, f"and {more} more: {verb} shows any of them" if more > 0 else "")

    @renamed(dtype="stored_dtype")
    def save(
        self,
        path: str | Path,
        *,
        positions: str | Selector = "all",
        stored_dtype: str | None = None,
        examples_per_shard: int = 128,
        probabilities: bool = True,
        features: Encoders = MappingProxyType({}),
        keep: int | None = None,
        watch: Watch | None = None,
        resume: bool = False,
    ) -> Dump:
        """Write the run as a dump: bit for bit the one that `write_dump` makes from the same plan.

        path       a local folder, or any URL that fsspec supports
        resume     continue an unfinished dump in `path`
        others     as in `make_plan`

        BadRequest if the examples are not of one task, or if nothing was captured.
        """
        from replaylens.dumps.maker import describe_sites
        from replaylens.dumps.writer import DumpWriter

        resume = as_bool("resume", resume)
        how: dict[str, Any] = dict(positions=positions, probabilities=probabilities, features=features, keep=keep, watch=watch)
        plan, assembled = self._planned(stored_dtype=stored_dtype, examples_per_shard=examples_per_shard, **how)

        def make(number: int, done: Callable[[int], object]) -> Content:
            content = assembled(number)
            done(len(plan.indices(number)))
            return content

        writer = DumpWriter(path, plan, self.engine.fingerprint)
        dump = writer.write(make, partial(describe_sites, self.engine), resume=resume)
        assert dump is not None  # there are no other writers
        return dump

    def _planned(self, **how: Any) -> tuple[DumpPlan, Callable[[int], Content]]:
        """The plan of the run's dump, and what makes the content of a shard by its number."""
        from replaylens.dumps.maker import plan_of_run
        from replaylens.dumps.rows import assemble

        by_index = {result.example.index: result for result in self.results}
        makers = {result.example.maker for result in self.results}
        if len(makers) != 1 or len(by_index) != len(self.results):
            raise BadRequest("The examples are not of one task and setting, or some occur twice. Replay them as separate runs.")
        if self.options.sites is None:
            raise BadRequest("Nothing was captured. Replay with sites='STCZ' or site names.")
        plan = plan_of_run(self.engine, makers.pop(), list(by_index), self.options, **how)
        return plan, lambda number: assemble(self.engine, plan, [by_index[index] for index in plan.indices(number)])

    @cached_property
    def digest(self) -> str:
        """Digest of the dump that `save` writes with its default options; nothing is written. Computed once."""
        from replaylens.dumps.content import combine

        plan, assembled = self._planned()
        return combine(assembled(number).digests()[0] for number in range(plan.num_shards))

    def cite(self) -> Citation:
        """How to cite the run: by the identifier of the dump that `save` writes with its default options."""
        fingerprint, found = self.engine.fingerprint, Identifier(self.digest)
        what = f"replay of {self[0].example.maker.name}, {len(self)} examples"
        check = f"replaylens verify {found} --in FOLDER, after run.save(FOLDER)"
        return Citation(str(found), what, check, fingerprint=fingerprint.digest, **fingerprint.cited)
