"""`verify`: does a replay of a dump's examples give the stored rows, bit for bit?

Checks the files (missing, truncated, changed) and what manifest and index say about each other, then the digests of their
content, then a replay of a sample. Under another fingerprint, bits are not comparable, and no replay is run.
"""

import random
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from tqdm.auto import tqdm

from replaylens.engine.dump.content import Content
from replaylens.engine.dump.described import index_problems, sites_differ
from replaylens.engine.dump.difference import Difference, first_difference
from replaylens.engine.dump.features import Encoders, matched
from replaylens.engine.dump.maker import ShardMaker
from replaylens.engine.dump.manifest import Manifest
from replaylens.engine.dump.plan import CUSTOM, Selector
from replaylens.engine.dump.planning import drafter_settings
from replaylens.engine.dump.reader import Dump
from replaylens.engine.errors import BadDump, BadRequest
from replaylens.engine.progress import hidden
from replaylens.engine.replay.examples import RejectedPath, ReplayOptions, Result, prompt_examples
from replaylens.engine.request.recording import Recording
from replaylens.engine.serving.core import Core
from replaylens.tasks.task import AnyTask, Example

VERIFIED, MISMATCH, OTHER = "verified", "mismatch", "other fingerprint"


@dataclass(frozen=True)
class Verification:
    """The result of `verify`."""

    status: str
    """verified, mismatch or other fingerprint"""
    problems: tuple[str, ...] = ()
    """damage to the files, or differences between the fingerprints"""
    difference: Difference | None = None
    """the first row that differs, or entry of a site"""
    examples: int = 0
    """number of examples replayed"""
    rows: int = 0
    """number of rows compared"""
    notes: tuple[str, ...] = ()
    """checks that were skipped, and why"""

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
    features: Encoders = MappingProxyType({}),
    progress: bool = False,
) -> Verification:
    """Check files, digests and fingerprint, then replay a sample of the examples and compare every bit.

    sample    share of the examples to replay, drawn with `seed`, at least one; or "all"
    task      required if the dump's task is not registered
    selector  required if the dump's positions were chosen by a function
    features  required if the dump holds sparse features: name -> `SparseFeatures`

    Damaged files are a mismatch. A folder without a manifest, or with one that is damaged or edited, is no dump to compare
    with: BadDump or UnfinishedDump.
    """
    if not (sample == "all" or (isinstance(sample, int | float) and 0 < sample <= 1)):
        raise BadRequest(f"Invalid sample {sample!r}. Give a share above 0 and up to 1, or 'all'.")
    dump = Dump.open(path, check_files=False)
    try:
        problems = dump.files.problems(progress) or index_problems(dump.files)
    except BadDump as error:
        return Verification(MISMATCH, (str(error),))
    if problems:
        return Verification(MISMATCH, tuple(problems))
    if differences := engine.fingerprint.differences(dump.manifest.fingerprint):
        return Verification(OTHER, ("the dump was made under another fingerprint:", *differences))
    chosen = _sampled(dump.manifest, sample, seed)
    try:
        return _Replay(dump, engine, batch, task, selector, features).run(chosen, progress)
    except BadDump as error:
        return Verification(MISMATCH, (str(error),))


def _sampled(manifest: Manifest, sample: float | str, seed: int) -> list[int]:
    indices = manifest.plan.examples
    if sample == "all":
        return list(indices)
    count = max(1, round(float(sample) * len(indices)))
    places = random.Random(f"{manifest.digest} {seed}").sample(range(len(indices)), count)
    return sorted(indices[place] for place in places)


class _Replay:
    """Recomputes the rows of some examples and compares them with the stored ones."""

    def __init__(
        self, dump: Dump, engine: Core, batch: int, task: AnyTask | None, selector: Selector | None, features: Encoders
    ) -> None:
        plan = dump.manifest.plan
        if plan.positions.startswith(CUSTOM) and selector is None:
            raise BadRequest(f"This dump keeps positions {plan.positions}. Pass that function as `selector`.")
        self.dump, self.engine = dump, engine
        self.plan = replace(plan, selector=selector, encoders=matched(plan.features, features))
        known = plan.drafter in engine.loop.drafters and drafter_settings(engine, plan.drafter) == plan.drafter_settings
        self.same_drafter = plan.reproducible and known
        if plan.rejected and not self.same_drafter and "thoughts" in plan.drafter_settings:
            raise BadRequest(
                f"Rejected branches of a model that thinks are reproducible only with the dump's drafter {plan.drafter} "
                f"({plan.drafter_settings}), and not with `self`. Load the engine with it, or dump with rejected=False."
            )
        self.by_path = plan.rejected and not self.same_drafter and plan.positions == "all"
        again = self.plan if self.same_drafter else replace(self.plan, drafter="ngram", rejected=False, window=8)
        self.maker = ShardMaker(engine, again, batch, task)
        self.notes: list[str] = []

    def run(self, examples: list[int], progress: bool) -> Verification:
        rows = 0
        by_shard = self.dump.files.by_shard(examples)
        with (
            tqdm(total=len(examples), unit="example", desc="replay", disable=hidden(progress)) as bar,
            closing(self._stored(by_shard)) as contents,
        ):
            for (number, some), (content, intact) in zip(by_shard.items(), contents, strict=True):
                if not intact:
                    shard = self.dump.manifest.shards[number].name
                    return Verification(MISMATCH, (f"{shard} and its index lines do not have the digest in the manifest",))
                stored = content.of_examples(some)
                if self.plan.rejected and not self.same_drafter and not self.by_path:
                    stored = stored.accepted()
                    note = "skipped rejected rows: their drafter is not available, and the dump does not hold their full paths"
                    self.notes = [note]
                made = self.maker.rows_of(some, bar.update, self._with_stored_branches(stored))
                rows += len(stored)
                described = self.dump.manifest.sites
                if found := first_difference(stored, made) or sites_differ(described, self.maker.sites(made)):
                    return Verification(MISMATCH, ("replay and dump differ:",), found, bar.n, rows)
        return Verification(VERIFIED, (), None, len(examples), rows, tuple(self.notes))

    def _stored(self, numbers: Iterable[int]) -> Generator[tuple[Content, bool]]:
        """Each shard's rows, and whether they have the manifest's digest. A shard is hashed while the last one is replayed."""

        def load(number: int) -> tuple[Content, bool]:
            content = self.dump.files.content(number)
            return content, content.digests() == self.dump.manifest.shards[number].digests

        with ThreadPoolExecutor(1) as ahead:
            loading: deque[Future[tuple[Content, bool]]] = deque()
            for number in numbers:
                loading.append(ahead.submit(load, number))
                if len(loading) > 1:
                    yield loading.popleft().result()
            while loading:
                yield loading.popleft().result()

    def _with_stored_branches(self, stored: Content) -> Callable[[Result], Result]:
        """If drafts are not reproducible, take the rejected paths from the dump and recompute their rows."""
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
                    recording = self._recorded(result.example, tokens, result.num_prompt, fork)
                    paths.append(RejectedPath(int(branch), tokens, fork, recording))
            return replace(result, rejected=paths)

        return complete

    def _recorded(self, example: Example, tokens: list[int], num_prompt: int, fork: int) -> Recording:
        """A path's rows from `fork` on, under the plan's edits, which count negative positions from the prompt's end."""
        options = ReplayOptions(sites=self.maker.wanted, edits=self.maker.edits, rejected=False)
        (branch,) = prompt_examples(self.engine, [example], options)
        try:
            if rest := tokens[num_prompt:]:
                branch.force(rest)
            recording = Recording(base=fork)
            recording.append(fork, {site: branch.activations.peek(site)[fork:] for site in branch.activations.sites()})
            return recording
        finally:
            branch.release()
