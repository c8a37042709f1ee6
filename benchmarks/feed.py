"""Reading a local dump: whole sites, shuffled batches, hashing. CPU seconds on one core, from the page cache, arms in turns.

    python -m benchmarks.feed

Two dumps of made-up rows: large shards of 4 KB rows, and many small shards of 1 KB rows. The peer is safetensors itself, which
maps a shard's tensor; `torch.cat` then makes one tensor of them.
"""

import argparse
import hashlib
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import safe_open
from torch import Tensor

from benchmarks.table import RESULTS, Table
from replaylens import tasks
from replaylens.engine.dump.content import combine
from replaylens.engine.dump.manifest import INDEX, IndexEntry, Manifest, ShardEntry, SiteEntry, shard_name
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.reader import Dump
from replaylens.engine.dump.shard import write_shard
from replaylens.engine.dump.store import Store
from replaylens.engine.engine import Engine

SITES = ("blocks.0.hook_in", "blocks.1.hook_in")
SHAPES = {"6 shards, rows of 4 KB": (6, 16384, 1024), "300 shards, rows of 1 KB": (300, 1024, 256)}
ROUNDS, BATCH = 3, 4096


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


def rates(works: dict[str, Callable[[], int]]) -> dict[str, float]:
    """GB per CPU second of each, the best of several rounds in turns. A work returns the number of bytes.

    Each runs twice in a row, and the second run counts: on a virtual machine whose host reclaims free pages, taking memory
    that was not used for a while costs up to ten times what the copy does.
    """
    best = dict.fromkeys(works, 0.0)
    for _ in range(ROUNDS):
        for name, work in works.items():
            work()
            begin = time.process_time()
            size = work()
            best[name] = max(best[name], size / (time.process_time() - begin) / 1e9)
    return best


def size(x: Tensor) -> int:
    return x.numel() * x.element_size()


def with_safetensors(folder: Path, num_shards: int, copies: bool = False) -> int:
    """`copies`: each shard's rows are copied before they are put together, as our reader once did."""
    opened = [safe_open(folder / shard_name(number), "pt") for number in range(num_shards)]
    pieces = [shard.get_tensor(SITES[0]) for shard in opened]
    return size(torch.cat([piece.clone() for piece in pieces] if copies else pieces))


def hashed(folder: Path, num_shards: int) -> int:
    total = 0
    for number in range(num_shards):
        with (folder / shard_name(number)).open("rb") as file:
            hashlib.file_digest(file, "sha256")
            total += file.tell()
    return total


def fed(dump: Dump, sites: Any, shuffle: str | None) -> int:
    feed = dump.feed(sites, batch_size=BATCH, seed=1, shuffle=shuffle)
    return sum(size(x) for batch in feed for name, x in batch.items() if name != "row")


def summed(dump: Dump) -> int:
    dump.statistics(SITES[0])
    return len(dump) * dump.sites[SITES[0]].row_bytes


def measure(table: Table, what: str, folder: Path, num_shards: int) -> None:
    kept = Dump.open(folder, check=False)
    found = rates(
        {
            "safetensors": lambda: with_safetensors(folder, num_shards),
            "copies": lambda: with_safetensors(folder, num_shards, copies=True),
            "first": lambda: size(Dump.open(folder, check=False).to_torch(SITES[0])),
            "again": lambda: size(kept.to_torch(SITES[0])),
            "rows": lambda: fed(kept, [SITES[0]], "rows"),
            "two sites": lambda: fed(kept, list(SITES), "rows"),
            "blocks": lambda: fed(kept, [SITES[0]], "blocks"),
            "stored": lambda: fed(kept, [SITES[0]], None),
            "statistics": lambda: summed(kept),
            "sha256": lambda: hashed(folder, num_shards),
        }
    )
    peer = found["safetensors"]
    for name, text in (("first", "whole site, dump just opened"), ("again", "whole site, read before")):
        ratio, aim = found[name] / peer, found[name] >= 5
        table.add(f"{text}: {what}", ratio=ratio, aim=">= 5 GB/s", met=aim, gb_per_cpu_s=found[name], safetensors=peer)
    shuffled = {"rows": "shuffled rows", "two sites": "shuffled rows, two sites", "blocks": "shuffled blocks"}
    for name, text in shuffled.items():
        table.add(f"{text}: {what}", aim=">= 1 GB/s", met=found[name] >= 1, gb_per_cpu_s=found[name])
    table.add(f"whole site, each shard copied first: {what}", ratio=found["copies"] / peer, gb_per_cpu_s=found["copies"])
    for name, text in {"stored": "rows as stored", "statistics": "statistics", "sha256": "SHA-256, once per shard"}.items():
        table.add(f"{text}: {what}", gb_per_cpu_s=found[name])


def main(out: Path) -> None:
    torch.set_num_threads(1)
    table = Table("feed-cpu", f"random float32 rows, batches of {BATCH}, one thread, from the page cache", out=out)
    print(table.about)
    for what, (num_shards, rows, width) in SHAPES.items():
        with tempfile.TemporaryDirectory() as folder:
            measure(table, what, made_up(Path(folder), num_shards, rows, width), num_shards)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "feed-cpu.json")
    main(parser.parse_args().out)
