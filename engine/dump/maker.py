"""`ShardMaker`: replays the examples of a shard on an engine and returns their rows."""

from collections.abc import Callable, Sequence
from pathlib import Path

from replaylens.engine.dump.content import Content
from replaylens.engine.dump.features import PREFIX
from replaylens.engine.dump.manifest import SiteEntry
from replaylens.engine.dump.pieces import pieces_of
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.rows import assemble
from replaylens.engine.dump.writer import DumpWriter, WorkerPart
from replaylens.engine.errors import BadRequest
from replaylens.engine.model import modes
from replaylens.engine.model.sites import layer_of
from replaylens.engine.replay.examples import ReplayOptions, Result, replay_examples
from replaylens.engine.request.edits import Edit
from replaylens.engine.request.values import whole
from replaylens.engine.serving.core import Core
from replaylens.tasks import Example
from replaylens.tasks.task import AnyTask


class ShardMaker:
    """Makes the content of any shard of a plan. Leaves no branches or trace events on the engine; clears its prefix index.

    task  required if the plan's task is not registered
    """

    def __init__(self, engine: Core, plan: DumpPlan, batch: int = 32, task: "AnyTask | None" = None) -> None:
        if batch < 1:
            raise BadRequest(f"Invalid batch {batch}. Give at least 1.")
        self.engine, self.plan, self.batch = engine, plan, batch
        self.task = task or plan.make_task()

    def make(self, number: int, done: Callable[[int], object] = lambda count: None) -> Content:
        """The content of one shard. Calls `done` with the number of examples just finished."""
        return self.rows_of(self.plan.indices(number), done)

    def rows_of(
        self,
        indices: Sequence[int],
        done: Callable[[int], object] = lambda count: None,
        change: Callable[[Result], Result] = lambda result: result,
    ) -> Content:
        """The rows of any examples of the plan. `change` may replace a result before its rows are read."""
        results: list[Result] = []
        with self.engine.forest.quiet():  # the dump is its own record, and a trace must not grow with it
            for first in range(0, len(indices), self.batch):
                some = [self.task.example(index) for index in indices[first : first + self.batch]]
                results += self._replay(some)
                # captured rows are always computed, so cached prefixes of their prompts would never be used
                self.engine.lock.alone(self.engine.prefix.clear)
                done(len(some))
            return assemble(self.engine, self.plan, [change(result) for result in results])

    @property
    def wanted(self) -> list[str]:
        """The sites to capture: the stored ones, those that the lens reads, and the model's output for probabilities."""
        streams = self.plan.lens.sites if self.plan.lens is not None else ()
        final = self.engine.sites.per_layer("S")[-1:] if self.plan.probabilities else []
        encoded = [stored.site for stored in self.plan.features]
        return [*self.plan.sites, *streams, *final, *encoded]

    @property
    def edits(self) -> list[Edit]:
        """The plan's edits, to apply to each prompt."""
        return [Edit.from_json(edit) for edit in self.plan.edits]

    def _replay(self, examples: list[Example]) -> list[Result]:
        plan = self.plan
        return replay_examples(
            self.engine,
            examples,
            ReplayOptions(
                sites=self.wanted,
                drafter=plan.drafter,
                window=plan.window,
                sampling=plan.sampling,
                edits=self.edits,
                max_new=plan.max_new,
                rejected=plan.rejected,
            ),
            self.batch,
        )

    def sites(self, content: Content) -> dict[str, SiteEntry]:
        return describe_sites(self.engine, content)


def describe_sites(engine: Core, content: Content) -> dict[str, SiteEntry]:
    """The manifest entry of each stored tensor."""
    letters = {name: letter for letter in "STC" for name in engine.sites.per_layer(letter)}
    found = {}
    for name in content.tensors:
        x = pieces_of(content.tensors, name)[0]
        aliases = () if name.startswith(("Z.", PREFIX)) else engine.sites.sites[name].aliases
        letter = "Z" if name.startswith("Z.") else letters.get(name)
        dtype = str(x.dtype).removeprefix("torch.")
        found[name] = SiteEntry(dtype, tuple(x.shape[1:]), layer_of(name), letter, aliases)
    return found


@modes.plainly
def write_dump(
    engine: Core,
    plan: DumpPlan,
    path: str | Path,
    *,
    batch: int = 32,
    resume: bool = False,
    part: WorkerPart = (0, 1),
    progress: bool = False,
    writers: int = 1,
) -> "Dump | None":
    """Replay the plan's examples into a dump. Returns the finished dump, or None while shards of other writers are missing.

    batch    number of examples replayed together; changes no bit
    resume   continue an unfinished dump; shards with the recorded hash are kept
    part     (i, n): write only every n-th shard, from number i on; n such calls, in any processes, complete the dump
    writers  number of threads that hash and write shards beside the replay; each holds one shard in memory
    """
    maker = ShardMaker(engine, plan, batch)
    writers = whole("writers", writers, 1)
    writer = DumpWriter(path, plan, engine.fingerprint)
    return writer.write(maker.make, maker.sites, resume=resume, part=part, progress=progress, writers=writers)
