"""`verify`: does a replay of a dump's examples give the stored rows, bit for bit?

Checks the files (missing, truncated, changed) and what manifest and index say about each other, then the digests of their
content, then a replay of a sample. Under another fingerprint, bits are not comparable, and no replay is run.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pyarrow as pa
import torch
from tqdm.auto import tqdm

from replaylens.dumps.content import KEYS, LOCATORS, Content, Difference, concatenate, count_accepted, first_difference
from replaylens.dumps.files import DumpFiles
from replaylens.dumps.maker import ShardMaker, drafter_settings
from replaylens.dumps.manifest import Manifest, SiteEntry
from replaylens.dumps.plan import Encoders, ExamplePath, Selector, matched
from replaylens.dumps.reader import Dump
from replaylens.engine.engine import Engine
from replaylens.engine.errors import BadDump, BadRequest
from replaylens.engine.request.capture import Recording
from replaylens.engine.request.positions import CUSTOM
from replaylens.engine.request.values import integer, real, short_repr
from replaylens.engine.terminal import hidden
from replaylens.replay.replayer import RejectedPath, ReplayOptions, Result, prompt_examples
from replaylens.tasks.task import AnyTask, Example

# ---- described -------------------------------------------------------------------------------------------------------
# What a dump says about its rows, compared with the rows: entries of sites, accepted rows, locators.
#
# No digest of the content covers these, and the seal of a manifest only shows that it was not changed by accident.


def index_problems(files: DumpFiles) -> list[str]:
    """One line for every shard whose accepted rows the index counts otherwise than the manifest. Needs no engine.

    Raises BadDump if the index cannot be read, has columns of other types, or does not say where the rows are stored.
    """
    found = list[str]()
    for number, shard in enumerate(files.manifest.shards):
        lines = files.lines(number, ["accepted", *LOCATORS])  # which checks the locators
        if (accepted := count_accepted(lines)) != shard.accepted_rows:
            found.append(f"{shard.name} has {shard.accepted_rows} accepted rows in the manifest, and {accepted} in the index")
    return found


def _content_problems(files: DumpFiles) -> list[str]:
    """One line for every shard whose rows do not have the digest that a reader cites."""
    wrong = [s.name for number, s in enumerate(files.manifest.shards) if files.content(number).digests() != s.digests]
    return [f"{name} and its index lines do not have the digest in the manifest" for name in wrong]


def sites_differ(here: Mapping[str, SiteEntry], there: Mapping[str, SiteEntry]) -> Difference | None:
    """The first site that is described differently. Their order does not count."""
    for name in sorted({*here, *there}):
        mine, yours = here.get(name), there.get(name)
        if mine is None or yours is None:
            said = ("missing" if entry is None else "present" for entry in (mine, yours))
            return Difference(None, None, None, f"site {name}", None, *said)
        for field in fields(SiteEntry):
            values = getattr(mine, field.name), getattr(yours, field.name)
            if values[0] != values[1]:
                return Difference(None, None, None, f"site {name}, {field.name}", None, *map(_shown, values))
    return None


def labels_differ(here: Mapping[str, str], there: Mapping[str, str], accepted: bool) -> Difference | None:
    """The first label with another type. `accepted`: rejected rows, which may alone have values of a label, do not count."""
    for name in sorted({*here, *there}):
        types = here.get(name, "missing"), there.get(name, "missing")
        if types[0] != types[1] and not (accepted and "null" in types):
            return Difference(None, None, None, f"label {name}", None, *types)
    return None


def _shown(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)


# ---- verify ----------------------------------------------------------------------------------------------------------

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
    of_examples: int = 0
    """number of examples in the dump; 0 if none was replayed"""
    of_rows: int = 0
    """number of rows in the dump; 0 if none was compared"""
    reproduced: tuple[str, ...] = ()
    """parts of the plan by which the replay computed the rows that were compared"""
    trusted: tuple[str, ...] = ()
    """parts of dump and plan that no row shows, and why: the dump's word is taken for them"""

    def __bool__(self) -> bool:
        return self.status == VERIFIED

    def __str__(self) -> str:
        examples, rows = f"{self.examples} examples replayed", f"{self.rows} rows compared"
        if self.rows < self.of_rows:
            examples = f"{self.examples} of {self.of_examples} examples replayed"
            rows = f"{self.rows} of {self.of_rows} rows compared"
        head = f"{self.status}: {examples}, {rows}"
        told = [f"reproduced: {', '.join(self.reproduced)}"] if self.reproduced else []
        told += [f"taken on trust: {each}" for each in self.trusted]
        return "\n".join([head, *self.problems, *([str(self.difference)] if self.difference else []), *self.notes, *told])


def verify(
    path: str | Path,
    engine: Engine,
    *,
    sample: int | float | str = "all",
    seed: int = 0,
    batch: int = 32,
    task: AnyTask | None = None,
    selector: Selector | None = None,
    features: Encoders = MappingProxyType({}),
    rows: Sequence[tuple[int, int, int]] | None = None,
    progress: bool = False,
) -> Verification:
    """Check files, digests and fingerprint, then replay the examples, or a sample, and compare every bit.

    sample    a whole number: that many rows, spread over examples; a float: a share of the examples, at least one; or "all".
              Drawn by the dump's digest and `seed`: a reader who distrusts the author chooses the seed. Hashes cover every row,
              sampled or not, but whoever makes a dump makes its hashes
    task      required if the dump's task is not registered
    selector  required if the dump's positions were chosen by a function
    features  required if the dump holds sparse features: name -> `SparseFeatures`
    rows      replay these (example, branch, position) instead of a sample

    Damaged files are a mismatch. A folder without a manifest, or with one that is damaged or edited, is no dump to compare
    with: BadDump or UnfinishedDump.
    """
    count, share = integer(sample), real(sample)
    whole = isinstance(sample, str) and sample == "all"
    if not (whole or (count >= 1 if count is not None else share is not None and 0 < share <= 1)):
        raise BadRequest(
            f"Invalid sample {short_repr(sample)}. Give a number of rows from 1 on, a share of the examples above 0 and up to "
            "1.0, or 'all'."
        )
    dump = Dump.open(path, check_files=False)
    if count is not None and count >= dump.manifest.rows:
        count, sample = None, "all"
    try:
        problems = dump.files.problems(progress) or index_problems(dump.files) or _content_problems(dump.files)
    except BadDump as error:
        return Verification(MISMATCH, (str(error),))
    if problems:
        return Verification(MISMATCH, tuple(problems))
    if differences := engine.fingerprint.differences(dump.manifest.fingerprint):
        made = dump.manifest.fingerprint
        who = [f"its files are intact; {made.maker} could replay it"] * (made.canonical != engine.fingerprint.canonical)
        return Verification(OTHER, ("the dump was made under another fingerprint:", *differences, *who))
    if (end := dump.manifest.plan.end) not in (None, engine.text.eos_id):
        lines = "the dump was made with another tokenizer:", f"end of a text: token {engine.text.eos_id} here, {end} there"
        return Verification(OTHER, (*lines, "Load the model with the tokenizer that made the dump (tokenizer=)."))
    replay = _Replay(dump, engine, batch, task, selector, features)
    try:
        if rows is not None:
            found = replay.run_rows(_named(rows), progress)
        elif count is None:
            found = replay.run(_sampled(dump.manifest, sample, seed), progress)
        else:
            found = replay.run_rows(_drawn(dump.files, count, seed, replay.accepted_only), progress)
    except BadDump as error:
        return Verification(MISMATCH, (str(error),))
    return replace(found, of_examples=len(dump.manifest.plan.examples), of_rows=dump.manifest.rows)


def _sampled(manifest: Manifest, sample: float | str, seed: int) -> list[int]:
    indices = manifest.plan.examples
    if sample == "all":
        return list(indices)
    count = max(1, round(float(sample) * len(indices)))
    places = random.Random(f"{manifest.digest} {seed}").sample(range(len(indices)), count)
    return sorted(indices[place] for place in places)


_Rows = Mapping[tuple[int, int], set[int]]
"""positions of rows by (example, branch)"""


def _named(rows: Sequence[tuple[int, int, int]]) -> _Rows:
    found: dict[tuple[int, int], set[int]] = {}
    for example, branch, position in rows:
        found.setdefault((example, branch), set()).add(position)
    return found


_REPLAYED = 4
"""rows of replayed examples for each row of a sample: examples are replayed whole, so more would spread it further, and cost
more than reading Z at its rows"""


def _drawn(files: DumpFiles, count: int, seed: int, accepted: bool) -> _Rows:
    """`count` rows, or all if there are fewer, in turn from examples that together have `_REPLAYED` times as many.

    accepted  of the accepted paths only
    """
    tables = [files.lines(number, [*KEYS, "accepted"]) for number in range(len(files.manifest.shards))]
    keys = np.stack([np.concatenate([table.column(key).to_numpy() for table in tables]) for key in KEYS], axis=1)  # [rows, 3]
    if accepted:
        keys = keys[np.concatenate([table.column("accepted").to_numpy(zero_copy_only=False) for table in tables]).astype(bool)]
    keys = keys[np.argsort(keys[:, 0], kind="stable")]
    _, starts, sizes = np.unique(keys[:, 0], return_index=True, return_counts=True)
    draw = random.Random(f"{files.manifest.digest} {seed}")
    order = draw.sample(range(len(sizes)), len(sizes))
    enough = int(np.searchsorted(np.cumsum(sizes[order]), _REPLAYED * count)) + 1
    turns = [
        (turn, int(starts[i]) + row)
        for i in order[:enough]
        for turn, row in enumerate(draw.sample(range(int(sizes[i])), min(count, int(sizes[i]))))
    ]
    found: dict[tuple[int, int], set[int]] = {}
    for _, row in sorted(turns, key=lambda each: each[0])[:count]:
        example, branch, position = keys[row].tolist()
        found.setdefault((example, branch), set()).add(position)
    return found


_RUNTIME = ("selector", "encoders")
"""parts of a plan in memory that no file holds; `positions` and `features` name them"""


class _Replay:
    """Recomputes the rows of some examples and compares them with the stored ones."""

    def __init__(
        self, dump: Dump, engine: Engine, batch: int, task: AnyTask | None, selector: Selector | None, features: Encoders
    ) -> None:
        plan = dump.manifest.plan
        if plan.place.kind == "custom" and selector is None:
            raise BadRequest(f"This dump keeps positions {plan.positions}. Pass that function as `selector`.")
        self.dump, self.engine = dump, engine
        self.plan = replace(plan, selector=selector, encoders=matched(plan.features, features))
        known = plan.drafter in engine.loop.drafters and drafter_settings(engine, plan.drafter) == plan.drafter_settings
        self.same_drafter = plan.reproducible and known
        if plan.rejected and not self.same_drafter and "thoughts" in plan.drafter_settings:
            raise BadRequest(
                f"Rejected branches of a Thinking-States model are reproducible only with the dump's drafter {plan.drafter} "
                f"({plan.drafter_settings}), and not with `self`. Load the engine with it, or dump with rejected=False."
            )
        self.by_path = plan.rejected and not self.same_drafter and plan.positions == "all"
        again = self.plan if self.same_drafter else replace(self.plan, drafter="ngram", rejected=False, window=8)
        self.maker = ShardMaker(engine, again, batch, task)
        self.accepted_only = plan.rejected and not self.same_drafter and not self.by_path
        """whether accepted rows alone can be compared"""

    def run_rows(self, drawn: _Rows, progress: bool) -> Verification:
        """Replay the examples of some rows, and compare these rows. Z, most of the work, is read at no others."""

        def wanted(path: ExamplePath) -> set[int]:
            return drawn.get((path.example.index, path.branch), set())

        sampled = replace(self.maker.plan, positions=f"{CUSTOM}sample", selector=wanted)
        self.maker = ShardMaker(self.engine, sampled, self.maker.batch, self.maker.task)
        return self.run(sorted({example for example, _ in drawn}), progress, drawn)

    def run(self, examples: list[int], progress: bool, drawn: _Rows | None = None) -> Verification:
        """Replay some examples, and compare all their rows, or those drawn."""
        rows = rejected = 0
        by_shard = self.dump.files.by_shard(examples)
        with tqdm(total=len(examples), unit="example", desc="replay", disable=hidden(progress)) as bar:
            for number, some in by_shard.items():
                content = self.dump.files.content(number)
                stored = content.of_examples(some) if drawn is None else _picked(content, drawn)
                if self.accepted_only:
                    stored = stored.accepted()
                made = self.maker.rows_of(some, bar.update, self._with_stored_branches(content.index))
                rows += len(stored)
                rejected += len(stored) - count_accepted(stored.index)
                described = self.dump.manifest.sites
                if found := first_difference(stored, made) or sites_differ(described, self.maker.sites(made)):
                    return Verification(MISMATCH, ("replay and dump differ:",), found, bar.n, rows)
        note = "skipped rejected rows: their drafter is not available, and the dump does not hold their full paths"
        notes = (note,) if self.accepted_only else ()
        reproduced, trusted = self._told(rows, rejected)
        return Verification(VERIFIED, (), None, len(examples), rows, notes, reproduced=reproduced, trusted=trusted)

    def _told(self, rows: int, rejected: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """What a replay without a difference reproduced, and what it did not. Drafts show in rejected rows alone."""
        plan, manifest = self.dump.manifest.plan, self.dump.manifest
        drafts = ("drafter", "drafter_settings", "window")
        if rejected and self.same_drafter:
            why = None
        elif not rejected:
            why = "no row that was compared was rejected, and accepted rows do not depend on them"
        else:
            why = f"the drafter {plan.drafter} was not run: rejected rows were computed from their stored tokens"
        unshown = {"examples_per_shard", *_RUNTIME, *(() if why is None else (*drafts, "rejected"))}
        unshown |= {"end"} if plan.end is None else set()
        names = [name for name in (each.name for each in fields(plan)) if name not in unshown]
        told = f"{', '.join((*drafts, 'rejected'))} of the plan, and that there were no other drafts"
        trusted = [] if why is None else [f"{told}: {why}"]
        trusted.append("examples_per_shard of the plan: no row depends on it")
        if plan.end is None:
            trusted.append("end of the plan: the dump does not name the token that ends a generation")
        if rows < manifest.rows:
            trusted.append(f"{manifest.rows - rows} of {manifest.rows} rows: only their hashes were checked")
        if free := sorted(manifest.fingerprint.unbound):
            trusted.append(f"{', '.join(free)} of the fingerprint: results do not depend on them")
        return tuple(names), tuple(trusted)

    def _with_stored_branches(self, index: pa.Table) -> Callable[[Result], Result]:
        """If drafts are not reproducible, take the rejected paths from the dump's index and recompute their rows."""
        if not self.by_path:
            return lambda result: result
        frame = index.select(["example", "branch", "fork_position", "token"]).to_pandas()
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


def _picked(content: Content, drawn: _Rows) -> Content:
    """The drawn rows of a shard."""
    keys = zip(*(content.index.column(key).to_pylist() for key in KEYS), strict=True)
    return content.select(np.array([position in drawn.get((example, branch), ()) for example, branch, position in keys], bool))


# ---- diff ------------------------------------------------------------------------------------------------------------
# `diff`: the first row in which two dumps differ; if there is none, the first site or label that they describe differently.


@dataclass(frozen=True)
class Comparison:
    """The result of `diff`."""

    difference: Difference | None
    """the first row, site or label that differs; None: the content is the same"""
    remarks: tuple[str, ...]
    """differences between fingerprints and plans; the content can still be the same"""
    arithmetic: tuple[str, str]
    """of each side: portable-1, or one that is bound to a kind of GPU or, in dumps made before portable-1, a processor"""

    def __bool__(self) -> bool:
        return self.difference is None

    def __str__(self) -> str:
        mine, yours = self.arithmetic
        arithmetic = f"{mine} on both sides" if mine == yours else f"{mine} here, {yours} there"
        found = str(self.difference) if self.difference else "the same content"
        return "\n".join([found, f"arithmetic: {arithmetic}", *self.remarks])


def diff(a: str | Path | Dump, b: str | Path | Dump, *, accepted: bool = False, progress: bool = False) -> Comparison:
    """Compare two dumps row by row, whatever their shard sizes. `accepted`: ignore rejected branches.

    Hashes all files first and raises BadDump, with their names, if any are damaged, or if index and manifest contradict each
    other.
    """
    mine, yours = (given if isinstance(given, Dump) else Dump.open(given) for given in (a, b))
    for dump in {mine.url: mine, yours.url: yours}.values():
        if problems := dump.files.problems(progress):
            raise BadDump(f"{dump.url} is damaged: {'; '.join(problems)}. Resume the dump to repair it.")
        if problems := index_problems(dump.files):
            raise BadDump(f"{dump.url} contradicts itself: {'; '.join(problems)}. Copy it again from an intact dump.")
    remarks = [f"fingerprint: {line}" for line in mine.manifest.fingerprint.differences(yours.manifest.fingerprint)]
    if advice := mine.manifest.fingerprint.other_kind(yours.manifest.fingerprint):
        remarks.insert(0, advice)
    remarks += [f"plan: {line}" for line in mine.manifest.plan.differences(yours.manifest.plan)]
    arithmetic = mine.manifest.fingerprint.arithmetic, yours.manifest.fingerprint.arithmetic
    every = sorted({*mine.manifest.plan.examples, *yours.manifest.plan.examples})
    step = mine.manifest.plan.examples_per_shard
    for first in tqdm(range(0, len(every), step), unit="shard", desc="diff", disable=hidden(progress)):
        some = every[first : first + step]
        here, there = _load(mine, some, accepted), _load(yours, some, accepted)
        if found := first_difference(here, there):
            return Comparison(found, tuple(remarks), arithmetic)
    ours, others = mine.manifest, yours.manifest
    described = sites_differ(ours.sites, others.sites) or labels_differ(ours.labels, others.labels, accepted)
    return Comparison(described, tuple(remarks), arithmetic)


def _load(dump: Dump, indices: Iterable[int], accepted: bool) -> Content:
    """The rows of the given examples, from all shards that hold them. Examples that the dump lacks have no rows."""
    there = [index for index in indices if index in dump.manifest.plan.examples]
    pieces = [dump.files.content(number).of_examples(some) for number, some in dump.files.by_shard(there).items()]
    pieces = pieces or [dump.files.content(0).select(np.zeros(0, dtype=np.int64))]
    tensors = {name: torch.cat([piece.tensors[name] for piece in pieces]) for name in pieces[0].tensors}
    content = Content(tensors, concatenate([piece.index for piece in pieces]))
    return content.accepted() if accepted else content
