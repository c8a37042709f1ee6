"""Reading a local dump: whole sites, shuffled batches, hashing. CPU seconds on one thread, from the page cache."""

import hashlib
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open

from bench.harness import Line, Lines, case
from replaylens import tasks
from replaylens.dumps.content import combine
from replaylens.dumps.manifest import INDEX, IndexEntry, Manifest, ShardEntry, SiteEntry, shard_name
from replaylens.dumps.plan import DumpPlan
from replaylens.dumps.reader import Dump
from replaylens.dumps.shard import write_shard
from replaylens.dumps.store import Store
from replaylens.engine.engine import Engine

SITES = ("blocks.0.hook_in", "blocks.1.hook_in")
SHAPES = {
    "6 shards, rows of 4 KB": (6, 16384, 1024), "300 shards, rows of 1 KB": (300, 1024, 256),
    "2 shards, rows of 1 KB": (2, 64, 256),
}  # fmt: skip
"""name -> shards, rows of each, width of a row"""
BATCH = 4096
FIRST, AGAIN, PEER = "whole site, dump just opened", "whole site, read before", "safetensors"
AIMS = {
    FIRST: 5.0, AGAIN: 5.0, "shuffled rows": 1.0, "shuffled blocks": 1.0, "rows as stored": None, "statistics": None,
    "SHA-256, once per shard": None,
}  # fmt: skip
"""arm -> least GB per CPU second"""


def made_up(folder: Path, num_shards: int, rows: int, width: int) -> Path:
    """A dump of random float32 rows at two sites, with the index lines of one real row."""
    examples = tasks.get("coin")(flips=2).examples(1)
    with tempfile.TemporaryDirectory() as other:
        real = Engine.load("coin-plain").replay(examples, sites="S").save(Path(other) / "one")
        lines = real.files.lines(0, real.columns).take(pa.array([0] * rows))
        manifest = real.manifest
    store, none, draw = Store(folder), combine([]), torch.Generator().manual_seed(0)
    shards = []
    for number in range(num_shards):
        with store.writing(shard_name(number)) as file:
            write_shard(file, {name: torch.randn(rows, width, generator=draw) for name in SITES})
        shards.append(ShardEntry(shard_name(number), number, number, rows, rows, file.num_bytes, file.sha256, none, none))
    with store.writing(INDEX) as file, pq.ParquetWriter(file, lines.schema) as writer:
        for _ in range(num_shards):
            writer.write_table(lines, row_group_size=rows)
    few = {"examples": {"start": 0, "stop": num_shards}, "sites": list(SITES), "examples_per_shard": 1, "lens": None}
    plan = DumpPlan.from_json({**manifest.plan.to_json(), **few})
    sites = {name: SiteEntry("float32", (width,), layer, "S", ()) for layer, name in enumerate(SITES)}
    index = IndexEntry(num_shards * rows, file.num_bytes, file.sha256)
    whole = Manifest(plan, manifest.fingerprint, sites, dict(manifest.labels), index, tuple(shards))
    (folder / "manifest.json").write_bytes(whole.to_bytes())
    return folder


def with_safetensors(folder: Path, num_shards: int) -> int:
    opened = [safe_open(folder / shard_name(number), "pt") for number in range(num_shards)]
    return torch.cat([shard.get_tensor(SITES[0]) for shard in opened]).nbytes


def hashed(folder: Path, num_shards: int) -> int:
    total = 0
    for number in range(num_shards):
        with (folder / shard_name(number)).open("rb") as file:
            hashlib.file_digest(file, "sha256")
            total += file.tell()
    return total


def fed(dump: Dump, shuffle: str | None) -> int:
    feed = dump.feed([SITES[0]], batch_size=BATCH, seed=1, shuffle=shuffle)
    return sum(x.nbytes for batch in feed for name, x in batch.items() if name != "row")


def summed(dump: Dump) -> int:
    dump.statistics(SITES[0])
    return len(dump) * dump.sites[SITES[0]].row_bytes


@case(
    "feed-cpu", ours=FIRST, baseline=PEER, others=tuple(AIMS)[1:], best=True, rounds=3, warm=0, threads=1,
    quick={"shapes": ("2 shards, rows of 1 KB",)},
)  # fmt: skip
def feed(shapes: tuple[str, ...] = tuple(SHAPES)[:2]) -> Lines:
    """Reading random float32 rows of a dump in GB per CPU second, on one thread, from the page cache. The peer is safetensors
    itself, which maps a shard's tensor, and `torch.cat`. Each work runs twice, and the second run counts: on some machines,
    taking memory that was not used for a while costs up to ten times what the copy does."""
    for what in shapes:
        num_shards, rows, width = SHAPES[what]
        with tempfile.TemporaryDirectory() as name:
            folder = made_up(Path(name), num_shards, rows, width)
            kept = Dump.open(folder, check=False)
            arms: dict[str, Callable[[], int]] = {
                FIRST: lambda: Dump.open(folder, check=False).to_torch(SITES[0]).nbytes,
                PEER: partial(with_safetensors, folder, num_shards),
                AGAIN: lambda: kept.to_torch(SITES[0]).nbytes,
                "shuffled rows": partial(fed, kept, "rows"),
                "shuffled blocks": partial(fed, kept, "blocks"),
                "rows as stored": partial(fed, kept, None),
                "statistics": partial(summed, kept),
                "SHA-256, once per shard": partial(hashed, folder, num_shards),
            }
            found = yield Line(f"{PEER} over ours: {what}", dict(arms), before=lambda arm: arms[arm]() and None)
            rates = {arm: found.results[arm] / taken / 1e9 for arm, taken in found.values.items()}
            for arm, aim in AIMS.items():
                numbers = {"gb_per_cpu_s": rates[arm], "safetensors": rates[PEER]}
                met = None if aim is None else rates[arm] >= aim
                ratio = rates[arm] / rates[PEER] if arm.startswith("whole") else None
                yield Line(f"{arm}: {what}", ratio=ratio, aim=f">= {aim:g} GB/s" if aim else "", met=met, numbers=numbers)
