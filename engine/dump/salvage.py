"""`Salvage`: what a damaged manifest still vouches for. Shards that it does not vouch for are made again.

A manifest is text, and damage rarely reaches all of it. A file is intact if its own entry still contains its SHA-256. A plan is
the dump's if the manifest still contains it. The shards' entries are computed again from the shards and the index. Digests that
are still legible must come out again.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import safetensors.torch
from safetensors import SafetensorError

from replaylens.engine.dump.content import LOCATORS, Content, combine, count_accepted
from replaylens.engine.dump.manifest import INDEX, MANIFEST, ShardEntry, SiteEntry, shard_name
from replaylens.engine.dump.plan import DumpPlan
from replaylens.engine.dump.store import Store
from replaylens.engine.errors import BadDump
from replaylens.engine.proof.fingerprint import Fingerprint

Describe = Callable[[Content], dict[str, SiteEntry]]
_LENS = ("Z.entropy", "Z.kl", "Z.emitted", "Z.top_ids", "Z.top_logprobs", "Z.targets", "Z.full")
Salvaged = tuple[int, ShardEntry, pa.Table, dict[str, SiteEntry]]
"""number, entry, index lines and sites of an intact shard"""


class Salvage:
    """A damaged manifest, compared with the plan and the fingerprint of a writer. BadDump if it does not show that they are
    the dump's: shards of another plan must not be taken for this one's, nor be overwritten."""

    def __init__(self, store: Store, raw: bytes, plan: DumpPlan, fingerprint: Fingerprint) -> None:
        self.store, self.raw, self.plan = store, raw, plan
        for name, value in (("plan", plan.to_json()), ("fingerprint", fingerprint.parts())):
            if not self._states(name, value):
                raise BadDump(
                    f"{store.url}: {MANIFEST} is damaged, and what is left of it does not name this {name}. Resume with the "
                    f"dump's own options and model. To compute all shards again, choose another folder."
                )

    def _states(self, name: str, value: Any) -> bool:
        return json.dumps({name: value}, indent=1)[2:-2].encode() in self.raw

    def _is_intact(self, name: str, entry: bytes) -> bool:
        wanted = _legible("sha256", entry)
        try:
            return wanted is not None and self.store.sha256(name) == wanted
        except FileNotFoundError:
            return False

    @cached_property
    def _entries(self) -> dict[str, bytes]:
        """What is left of the shards' entries, by name. A name that stands twice has none: one of them is another's."""
        found: list[tuple[bytes, bytes]] = re.findall(rb'\{"name": "(shard-\d{5,9}\.safetensors)"([^{}]*)', self.raw)
        times = Counter(name for name, _ in found)
        return {name.decode(): entry for name, entry in found if times[name] == 1}

    def _shard(self, number: int) -> bytes:
        return self._entries.get(shard_name(number), b"")

    def digests(self, intact: dict[int, str]) -> tuple[str | None, dict[int, str]]:
        """The digests of the dump and of its shards, as far as they are known. `intact`: those of intact shards.

        If the dump's contradicts those of its shards, theirs are kept: those of intact shards are computed from the files.
        """
        legible = {number: _legible("digest", self._shard(number)) for number in range(self.plan.num_shards)}
        shards = {number: digest for number, digest in legible.items() if digest is not None} | intact
        if len(shards) == self.plan.num_shards:
            return combine(shards[number] for number in range(self.plan.num_shards)), shards
        head = re.search(rb'^ "digest": [^\n]*', self.raw, re.MULTILINE)
        return _legible("digest", head[0]) if head else None, shards

    def shards(self, describe: Describe) -> Iterator[Salvaged]:
        """The intact shards, one at a time. None if the index is not intact."""
        entry = re.search(rb'^ "index": \{([^{}]*)', self.raw, re.MULTILINE)
        if entry is None or not self._is_intact(INDEX, entry[1]):
            return
        with self.store.open(INDEX) as file:
            index = pq.ParquetFile(file)
            for group in range(index.num_row_groups):
                lines = index.read_row_group(group)
                number = lines.column("shard")[0].as_py()
                if self._is_intact(shard_name(number), self._shard(number)):
                    try:
                        found = self._entry(number, lines, describe)
                    except SafetensorError:  # an edited entry can name the hash of any file
                        continue
                    yield number, *found

    def _entry(self, number: int, lines: pa.Table, describe: Describe) -> tuple[ShardEntry, pa.Table, dict[str, SiteEntry]]:
        name, indices = shard_name(number), self.plan.indices(number)
        with self.store.open(name) as file:
            tensors = safetensors.torch.load(file.read())
        sparse = [name for stored in self.plan.features for name in stored.tensors]
        order = [*self.plan.sites, *_LENS, *sparse, *sorted(tensors)]  # as they were captured; the file has them by name
        tensors = {site: tensors[site] for site in dict.fromkeys(order) if site in tensors}
        content = Content(tensors, lines.drop_columns(list(LOCATORS)))
        digest, accepted_digest = content.digests()
        entry = ShardEntry(
            name=name,
            first_example=indices[0],
            last_example=indices[-1],
            rows=len(content),
            accepted_rows=count_accepted(content.index),
            bytes=self.store.size(name),
            sha256=self.store.sha256(name),
            digest=digest,
            accepted_digest=accepted_digest,
        )
        return entry, lines, describe(content)


def _legible(field: str, entry: bytes) -> str | None:
    """A hash in what is left of an entry."""
    found = re.search(rb'"%b": "([0-9a-f]{64})"' % field.encode(), entry)
    return found[1].decode() if found else None
