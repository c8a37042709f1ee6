"""`verify`: does a dump hold what its examples give when they are replayed, bit for bit? `diff`: where do two dumps part?

Files first (missing, cut short, a flipped bit), then what they say (digests), then the replay of a sample. Under another
fingerprint nothing can be said about the bits, and nothing is.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm.auto import tqdm

from replaylens.engine.dump.content import Content, Difference, concatenate, first_difference
from replaylens.engine.dump.maker import ShardMaker
from replaylens.engine.dump.manifest import INDEX, MANIFEST, Manifest
from replaylens.engine.dump.plan import CUSTOM, Selector, drafter_settings
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump, BadRequest
from replaylens.engine.request.capture import Recording
from replaylens.engine.run import RejectedPath, Result

if TYPE_CHECKING:
    from replaylens.engine.engine import Engine
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
    engine: "Engine",
    *,
    sample: float | str = 0.01,
    seed: int = 0,
    batch: int = 32,
    task: "AnyTask | None" = None,
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
        problems = check_files(dump, progress)
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


def check_files(dump: Dump, progress: bool = False) -> list[str]:
    """Lines naming every file that is missing, of the wrong size, or not the one that was hashed."""
    manifest, there, problems = dump.manifest, dump.files.store.sizes(), []
    entries: list[tuple[str, Any]] = [(INDEX, manifest.index), *((shard.name, shard) for shard in manifest.shards)]
    for name, entry in tqdm(entries, unit="file", desc="hashes", disable=not progress):
        if name not in there:
            problems.append(f"{name} is missing")
        elif there[name] != entry.bytes:
            problems.append(f"{name} has {there[name]} bytes, not {entry.bytes}")
        elif dump.files.store.sha256(name) != entry.sha256:
            problems.append(f"{name} was changed after it was written: its SHA-256 is another")
    return problems


def _sampled(manifest: Manifest, sample: float | str, seed: int) -> list[int]:
    indices = manifest.plan.examples
    if sample == "all":
        return list(indices)
    count = max(1, round(float(sample) * len(indices)))
    places = random.Random(f"{manifest.digest} {seed}").sample(range(len(indices)), count)
    return sorted(indices[place] for place in places)


class _Replay:
    """Makes the rows of some examples again, and compares them with the stored ones."""

    def __init__(self, dump: Dump, engine: "Engine", batch: int, task: "AnyTask | None", selector: Selector | None) -> None:
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
            for number, some in _by_shard(self.dump, examples).items():
                content = self.dump.files.content(number)
                if content.digests() != _noted(self.dump.manifest, number):
                    shard = self.dump.manifest.shards[number].name
                    return Verdict(MISMATCH, (f"{shard} and its lines of the index do not have the noted digest",))
                stored = _rows_of(content, some)
                if self.plan.rejected and not self.same_drafter and not self.by_path:
                    stored = accepted_rows(stored)
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
            recording.append(fork, {site: branch.activations[site][fork:] for site in branch.activations.sites()})
            return recording
        finally:
            branch.release()
            self.engine.tree.forget(branch.id)


# ---- two dumps ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Comparison:
    """What `diff` found."""

    difference: Difference | None
    """the first row that differs; None: the same content"""
    remarks: tuple[str, ...]
    """how fingerprints and plans differ; that alone is no difference in content"""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        return "\n".join([str(self.difference) if self.difference else "the same content", *self.remarks])


def diff(a: str | Path | Dump, b: str | Path | Dump, *, accepted: bool = False, progress: bool = False) -> Comparison:
    """Compare two dumps row by row, however they were cut into shards. `accepted`: leave rejected branches out.

    All files are hashed first: of a damaged dump nothing can be said, and BadDump names what is damaged.
    """
    mine, yours = (given if isinstance(given, Dump) else Dump.open(given) for given in (a, b))
    for dump in {mine.url: mine, yours.url: yours}.values():
        if problems := check_files(dump, progress):
            raise BadDump(f"{dump.url} is damaged: {'; '.join(problems)}. Resume it to repair it")
    remarks = [f"fingerprint: {line}" for line in mine.manifest.fingerprint.differences(yours.manifest.fingerprint)]
    remarks += [f"plan: {line}" for line in mine.manifest.plan.differences(yours.manifest.plan)]
    every = sorted({*mine.manifest.plan.examples, *yours.manifest.plan.examples})
    step = mine.manifest.plan.examples_per_shard
    for first in tqdm(range(0, len(every), step), unit="shard", desc="diff", disable=not progress):
        some = every[first : first + step]
        if _same_shard(mine, yours, some, accepted):
            continue
        here, there = _load(mine, some, accepted), _load(yours, some, accepted)
        if found := first_difference(here, there):
            return Comparison(found, tuple(remarks))
    return Comparison(None, tuple(remarks))


def accepted_rows(content: Content) -> Content:
    """Without rejected branches."""
    return content.select(content.index.column("accepted").to_numpy(zero_copy_only=False).astype(bool))


def _same_shard(a: Dump, b: Dump, indices: Sequence[int], accepted: bool) -> bool:
    """Whether both have these examples as one shard, with the same digest: then no row needs to be read."""
    found = []
    for dump in (a, b):
        number = dump.files.shard_of(indices[0]) if indices[0] in dump.manifest.plan.examples else None
        if number is None or list(dump.manifest.plan.indices(number)) != list(indices):
            return False
        found.append(_noted(dump.manifest, number)[1 if accepted else 0])
    return found[0] == found[1]


def _load(dump: Dump, indices: Iterable[int], accepted: bool) -> Content:
    """The rows of some examples, from whichever shards hold them; of examples that are not there, none."""
    there = [index for index in indices if index in dump.manifest.plan.examples]
    pieces = [_rows_of(dump.files.content(number), some) for number, some in _by_shard(dump, there).items()]
    pieces = pieces or [dump.files.content(0).select(np.zeros(0, dtype=np.int64))]
    tensors = {name: torch.cat([piece.tensors[name] for piece in pieces]) for name in pieces[0].tensors}
    content = Content(tensors, concatenate([piece.index for piece in pieces]))
    return accepted_rows(content) if accepted else content


def _by_shard(dump: Dump, examples: Iterable[int]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for example in examples:
        found.setdefault(dump.files.shard_of(example), []).append(example)
    return found


def _rows_of(content: Content, examples: Sequence[int]) -> Content:
    stored = content.index.column("example").to_numpy()
    return content.select(np.isin(stored, np.asarray(examples)))


def _noted(manifest: Manifest, number: int) -> tuple[str, str]:
    return manifest.shards[number].digest, manifest.shards[number].accepted_digest
