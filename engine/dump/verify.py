"""`verify`: does a dump hold what its examples give when they are replayed, bit for bit?

Files first (missing, cut short, a flipped bit), then what they say (digests), then the replay of a sample. Under another
fingerprint nothing can be said about the bits, and nothing is.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tqdm.auto import tqdm

from replaylens.engine.dump.content import Content
from replaylens.engine.dump.difference import Difference, first_difference
from replaylens.engine.dump.maker import ShardMaker
from replaylens.engine.dump.manifest import MANIFEST, Manifest
from replaylens.engine.dump.plan import CUSTOM, Selector
from replaylens.engine.dump.planning import drafter_settings
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump, BadRequest
from replaylens.engine.replay.examples import RejectedPath, Result
from replaylens.engine.request.capture import Recording
from replaylens.engine.serving.core import Core
from replaylens.tasks.task import AnyTask

VERIFIED, MISMATCH, OTHER = "verified", "mismatch", "other fingerprint"


@dataclass(frozen=True)
class Verdict:
    """What a verification found."""

    status: str
    """verified, mismatch or other fingerprint"""
    problems: tuple[str, ...] = ()
    """what is wrong with the files, or how the fingerprints differ"""
    difference: Difference | None = None
    """the first row that came out otherwise"""
    examples: int = 0
    """how many were replayed"""
    rows: int = 0
    """how many were compared"""
    notes: tuple[str, ...] = ()
    """what could not be checked, and why"""

    def __bool__(self) -> bool:
        return self.status == VERIFIED

    def __str__(self) -> str:
        head = f"{self.status}: {self.examples} examples replayed, {self.rows} rows compared"
        return "\n".join([head, *self.problems, *([str(self.difference)] if self.difference else []), *self.notes])


def verify(
    path: str | Path,
    engine: Core,
    *,
    sample: float | str = 0.01,
    seed: int = 0,
    batch: int = 32,
    task: AnyTask | None = None,
    selector: Selector | None = None,
    progress: bool = False,
) -> Verdict:
    """Check files, digests and fingerprint, then replay a sample of the examples and compare every bit.

    sample    share of the examples, drawn by `seed`, at least one; or "all"
    task      where the dump's task is none of ours; selector: where it kept positions by a function of your own

    A damaged dump is a mismatch; where there is no manifest, there is nothing to verify: BadDump, or UnfinishedDump.
    """
    if not (sample == "all" or (isinstance(sample, int | float) and 0 < sample <= 1)):
        raise BadRequest(f"sample {sample!r}: give a share above 0 and up to 1, or 'all'")
    try:
        dump = Dump.open(path, check_files=False)
        problems = dump.files.problems(progress)
    except BadDump as error:
        if not Store(path).exists(MANIFEST):
            raise
        return Verdict(MISMATCH, (str(error),))
    if problems:
        return Verdict(MISMATCH, tuple(problems))
    if differences := engine.fingerprint.differences(dump.manifest.fingerprint):
        return Verdict(OTHER, ("the dump was made under another fingerprint:", *differences))
    chosen = _sampled(dump.manifest, sample, seed)
    try:
        return _Replay(dump, engine, batch, task, selector).run(chosen, progress)
    except BadDump as error:
        return Verdict(MISMATCH, (str(error),))


def _sampled(manifest: Manifest, sample: float | str, seed: int) -> list[int]:
    indices = manifest.plan.examples
    if sample == "all":
        return list(indices)
    count = max(1, round(float(sample) * len(indices)))
    places = random.Random(f"{manifest.digest} {seed}").sample(range(len(indices)), count)
    return sorted(indices[place] for place in places)


class _Replay:
    """Makes the rows of some examples again, and compares them with the stored ones."""

    def __init__(self, dump: Dump, engine: Core, batch: int, task: AnyTask | None, selector: Selector | None) -> None:
        plan = dump.manifest.plan
        if plan.positions.startswith(CUSTOM) and selector is None:
            raise BadRequest(f"this dump keeps {plan.positions}: give that function as `selector`")
        self.dump, self.engine, self.plan = dump, engine, replace(plan, selector=selector)
        known = plan.drafter in engine.loop.drafters and drafter_settings(engine, plan.drafter) == plan.drafter_settings
        self.same_drafter = plan.reproducible and known
        if plan.rejected and not self.same_drafter and "thoughts" in plan.drafter_settings:
            raise BadRequest(
                f"rejected branches of a model that thinks come out again only with the drafter {plan.drafter} as it was "
                f"({plan.drafter_settings}; not `self`): load the engine so, or dump with rejected=False"
            )
        self.by_path = plan.rejected and not self.same_drafter and plan.positions == "all"
        again = self.plan if self.same_drafter else replace(self.plan, drafter="ngram", rejected=False, window=8)
        self.maker = ShardMaker(engine, again, batch, task)
        self.notes: list[str] = []

    def run(self, examples: list[int], progress: bool) -> Verdict:
        rows = 0
        with tqdm(total=len(examples), unit="example", desc="replay", disable=not progress) as bar:
            for number, some in self.dump.files.by_shard(examples).items():
                content = self.dump.files.content(number)
                if content.digests() != self.dump.manifest.shards[number].digests:
                    shard = self.dump.manifest.shards[number].name
                    return Verdict(MISMATCH, (f"{shard} and its lines of the index do not have the noted digest",))
                stored = content.of_examples(some)
                if self.plan.rejected and not self.same_drafter and not self.by_path:
                    stored = stored.accepted()
                    note = "rejected rows were not compared: their drafter cannot be run again, nor their paths be known"
                    self.notes = [note]
                made = self.maker.rows_of(some, bar.update, self._with_stored_branches(stored))
                rows += len(stored)
                if found := first_difference(stored, made):
                    return Verdict(MISMATCH, ("the replay gives other bits than the dump:",), found, bar.n, rows)
        return Verdict(VERIFIED, (), None, len(examples), rows, tuple(self.notes))

    def _with_stored_branches(self, stored: Content) -> Callable[[Result], Result]:
        """Where drafts do not come out again: the rejected paths are those of the dump, their rows are computed anew."""
        if not self.by_path:
            return lambda result: result
        frame = stored.index.select(["example", "branch", "fork_position", "token"]).to_pandas()
        branches = frame[frame["branch"] > 0].groupby(["example", "branch"])

        def complete(result: Result) -> Result:
            paths = []
            for (example, branch), rows in branches:
                if example == result.example.index:
                    fork = int(rows["fork_position"].iloc[0])
                    tokens = result.tokens[:fork] + [int(token) for token in rows["token"]]
                    recording = self._recorded(tokens, result.num_prompt, fork)
                    paths.append(RejectedPath(int(branch), tokens, fork, recording))
            return replace(result, rejected=paths)

        return complete

    def _recorded(self, tokens: list[int], num_prompt: int, fork: int) -> Recording:
        """A path's rows from `fork` on, under the plan's edits: those count negative positions from the prompt's end."""
        branch = self.engine.prompt(tokens[:num_prompt], sites=self.maker.wanted, edits=self.maker.edits)
        try:
            if rest := tokens[num_prompt:]:
                branch.force(rest)
            recording = Recording(base=fork)
            recording.append(fork, {site: branch.activations.peek(site)[fork:] for site in branch.activations.sites()})
            return recording
        finally:
            branch.release()
