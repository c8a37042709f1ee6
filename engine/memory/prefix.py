"""`PrefixIndex`: finds the KV pages that an earlier request computed for the same prefix.

Within an engine, the bits of a page depend on all tokens and all edits up to its end. A page may be shared if these are equal.
Its key is chained over the pages before it:

    key_0 = 0        key_{i+1} = H(key_i, tokens of page i, edit key of page i)

The key only finds an entry. The tokens, the edit key and the entry of the previous page are then compared, which by
induction compares the whole path. Two paths with equal hashes are never confused.

The index holds one reference to each of its pages until `evict` or `clear`. Until then, a table that writes there gets a
private copy from `PagePool.reserve`, so an indexed page never changes.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from struct import pack

from replaylens.engine.errors import BadRange, IntegrityError
from replaylens.engine.memory.pages import PagePool, PageTable

ROOT_KEY = bytes(32)
"""key_0: before the first page"""


def chain_key(parent_key: bytes, tokens: Sequence[int], edit_key: bytes) -> bytes:
    """The key of the page after `parent_key`. Only the last part varies in length, so the encoding is unambiguous."""
    return blake2b(parent_key + pack(f"<{len(tokens)}q", *tokens) + edit_key, digest_size=32).digest()


@dataclass(slots=True, eq=False)
class PrefixEntry:
    """One shared page. Entries compare by identity: each entry stands for one path."""

    key: bytes
    page: int
    tokens: tuple[int, ...]
    edit_key: bytes
    parent: "PrefixEntry | None"
    last_used: int
    num_children: int = 0
    listed: bool = False
    """whether it is in the heap of those that can be evicted"""


@dataclass(slots=True, eq=False)
class Trail:
    """Where an offer of a path ended: its first `num_pages` pages are indexed, the last of them as `entry`."""

    entry: PrefixEntry | None = None
    num_pages: int = 0

    def upto(self, num_pages: int) -> "Trail":
        """The trail of the path's first pages, as many of these as are indexed. Takes a step for every page that is cut off."""
        entry = self.entry
        for _ in range(self.num_pages - num_pages):
            entry = entry.parent if entry is not None else None
        return Trail(entry, min(self.num_pages, num_pages))


@dataclass(frozen=True)
class IndexNumbers:
    """The counts of `PrefixIndex.check_integrity`."""

    num_entries: int
    num_leaves: int
    num_evictable: int

    def __str__(self) -> str:
        return (
            f"prefix index: {self.num_entries} pages on {self.num_leaves} paths, {self.num_evictable} not used elsewhere, "
            f"{self.num_entries - self.num_evictable} shared with tables"
        )


class PrefixIndex:
    """The pages of committed prefixes by chained key.

    The parameter `edit_keys` holds, for each page, the content hash of the edits on it (b"": none). It must cover every
    whole page of the range. None means no edits.
    """

    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self._entries: dict[bytes, PrefixEntry] = {}
        self._by_page: dict[int, PrefixEntry] = {}
        self._leaves: list[tuple[int, int, bytes]] = []
        """a heap of the ranks of entries that could be evicted when they were listed; a rank may have grown since"""
        self._inner: set[int] = set()
        """pages that only the index had when it last looked, before pages of others"""
        self._clock = 0  # counts uses instead of seconds, so that evictions can be replayed

    def __len__(self) -> int:
        return len(self._entries)

    def match(self, tokens: Sequence[int], edit_keys: Sequence[bytes] | None = None, limit: int | None = None) -> list[int]:
        """The pages of the longest indexed prefix of `tokens`: whole pages within `limit` positions.

        Changes nothing and adds no reference: the pages are valid until the next `evict` or `clear`.
        """
        return [entry.page for entry in self._walk(tokens, edit_keys, limit)]

    def adopt(self, tokens: Sequence[int], edit_keys: Sequence[bytes] | None = None, limit: int | None = None) -> PageTable:
        """A new table that shares the pages of `match`, empty if nothing matches. The caller releases it.

        Marks these pages as recently used. Pass limit = len(tokens) - 1 to get the logits of the last token, which must
        be computed.
        """
        entries = self._walk(tokens, edit_keys, limit)
        self._touch(entries)
        return self.pool.share([entry.page for entry in entries], len(entries) * self.pool.page_size)

    def offer(
        self,
        table: PageTable,
        tokens: Sequence[int],
        upto: int,
        edit_keys: Sequence[bytes] | None = None,
        trail: Trail | None = None,
    ) -> int:
        """Index the whole pages of the first `upto` positions and return how many were new.

        trail  where an earlier offer of the same path ended, with the same edit keys: pages before it are not read again.
               Mutated: it ends where this offer ends

        Precondition: these positions hold the canonical KV of `tokens` under `edit_keys`. The table is not changed
        and still belongs to the caller. Pages whose path is indexed already are skipped (the bits are the same), as are
        all pages from a hash collision on.
        """
        if not 0 <= upto <= min(table.length, len(tokens)):
            raise BadRange(f"Cannot offer {upto} positions of a table of {table.length} with {len(tokens)} tokens.")
        trail = Trail() if trail is None else trail
        known = trail.entry is not None and self._entries.get(trail.entry.key) is trail.entry
        if not known or trail.num_pages > upto // self.pool.page_size:
            trail.entry, trail.num_pages = None, 0
        path, num_new = [] if trail.entry is None else [trail.entry], 0
        for key, page_tokens, edit_key, parent in self._steps(tokens, edit_keys, upto, path, trail.num_pages):
            entry = self._entries.get(key)
            if entry is None:
                entry = self._insert(key, table.pages[trail.num_pages], page_tokens, edit_key, parent)
                num_new += 1
            elif not _is(entry, page_tokens, edit_key, parent):
                break
            path.append(entry)
            trail.entry, trail.num_pages = entry, trail.num_pages + 1
        self._touch(path)
        return num_new

    def evict(self, num_pages: int) -> int:
        """Free `num_pages` pages if possible, least recently used first, and return how many became free.

        Only entries without a child entry and without other references to their page are removed: others would free
        nothing. Takes time in proportion to what is freed, and to what others let go of since the last call.
        """
        self._look()
        num_freed = 0
        while self._leaves and num_freed < num_pages:
            rank = heapq.heappop(self._leaves)
            entry = self._entries.get(rank[-1])
            if entry is None or not entry.listed:
                continue
            entry.listed = False
            if self._evictable(entry) and self._rank(entry) != rank:  # used since
                self._list(entry)
            elif self._evictable(entry):
                self._remove(entry)
                num_freed += 1
                if entry.parent is not None and self._evictable(entry.parent):
                    self._list(entry.parent)
        return num_freed

    def clear(self) -> None:
        """Remove all entries and drop their references."""
        entries = list(self._entries.values())
        for each in (self._entries, self._by_page, self._leaves, self._inner):
            each.clear()
        for entry in entries:
            self.pool.unkeep(entry.page)

    def has_inner(self) -> bool:
        """Whether pages that only the index has lie before pages of others, so that `evict` cannot free them."""
        self._look()
        while self._inner:
            entry = self._by_page.get(page := next(iter(self._inner)))
            if entry is not None and self.pool.refcount(page) == 1:
                return True
            self._inner.discard(page)
        return False

    def pages(self) -> list[int]:
        """The indexed pages, once per reference: `retained` for `PagePool.check_integrity`."""
        return [entry.page for entry in self._entries.values()]

    def check_integrity(self) -> IndexNumbers:
        """Check every entry and link. Raises IntegrityError with the first fault; changes nothing."""
        num_children = Counter(entry.parent.key for entry in self._entries.values() if entry.parent is not None)
        owners: dict[int, bytes] = {}
        for key, entry in self._entries.items():
            name = f"Prefix entry {key.hex()[:8]} (page {entry.page})"
            parent = entry.parent
            if parent is not None and self._entries.get(parent.key) is not parent:
                raise IntegrityError(f"{name}: the entry before it, {parent.key.hex()[:8]}, is gone.")
            parent_key = ROOT_KEY if parent is None else parent.key
            if key != entry.key or key != chain_key(parent_key, entry.tokens, entry.edit_key):
                raise IntegrityError(f"{name}: its tokens and edits do not hash to its key (stale).")
            if entry.num_children != num_children[key]:
                raise IntegrityError(f"{name}: {entry.num_children} children counted, {num_children[key]} found.")
            if len(entry.tokens) != self.pool.page_size:
                raise IntegrityError(f"{name}: {len(entry.tokens)} tokens on a page of {self.pool.page_size}.")
            if self.pool.refcount(entry.page) < 1:
                raise IntegrityError(f"{name}: its page is not in use.")
            if entry.page in owners:
                raise IntegrityError(f"{name}: its page also belongs to entry {owners[entry.page].hex()[:8]}.")
            owners[entry.page] = key
        entries = self._entries.values()
        num_leaves = sum(entry.num_children == 0 for entry in entries)
        return IndexNumbers(len(entries), num_leaves, sum(self.pool.refcount(entry.page) == 1 for entry in entries))

    def _steps(
        self,
        tokens: Sequence[int],
        edit_keys: Sequence[bytes] | None,
        upto: int,
        path: list[PrefixEntry],
        first: int = 0,
    ) -> Iterator[tuple[bytes, tuple[int, ...], bytes, PrefixEntry | None]]:
        """(key, tokens, edit key, previous entry) of each whole page from `first` on. The caller appends the entries to
        `path`, which holds the entry before `first`."""
        size = self.pool.page_size
        num_pages = upto // size
        if edit_keys is not None and len(edit_keys) < num_pages:
            raise BadRange(f'{len(edit_keys)} edit keys for {num_pages} whole pages. Give one per page, b"" for no edit.')
        key = path[-1].key if path else ROOT_KEY
        for index in range(first, num_pages):
            page_tokens = tuple(tokens[index * size : (index + 1) * size])
            edit_key = b"" if edit_keys is None else edit_keys[index]
            key = chain_key(key, page_tokens, edit_key)
            yield key, page_tokens, edit_key, path[-1] if path else None

    def _walk(self, tokens: Sequence[int], edit_keys: Sequence[bytes] | None, limit: int | None) -> list[PrefixEntry]:
        if limit is not None and limit < 0:
            raise BadRange(f"limit is {limit}. It must not be negative.")
        upto = len(tokens) if limit is None else min(limit, len(tokens))
        path: list[PrefixEntry] = []
        for key, page_tokens, edit_key, parent in self._steps(tokens, edit_keys, upto, path):
            entry = self._entries.get(key)
            if entry is None or not _is(entry, page_tokens, edit_key, parent):
                break
            path.append(entry)
        return path

    def _insert(
        self, key: bytes, page: int, tokens: tuple[int, ...], edit_key: bytes, parent: PrefixEntry | None
    ) -> PrefixEntry:
        self.pool.keep(page)
        entry = PrefixEntry(key, page, tokens, edit_key, parent, self._clock)
        self._entries[key] = self._by_page[page] = entry
        if parent is not None:
            parent.num_children += 1
        return entry

    def _remove(self, entry: PrefixEntry) -> None:
        del self._entries[entry.key], self._by_page[entry.page]
        if entry.parent is not None:
            entry.parent.num_children -= 1
            entry.parent.last_used = max(entry.parent.last_used, entry.last_used)
        self.pool.unkeep(entry.page)

    def _touch(self, path: list[PrefixEntry]) -> None:
        """Mark a path as used now. Entries before its last one take over the time when the ones after them are removed: until
        then they cannot be evicted."""
        self._clock += 1
        if path:
            path[-1].last_used = self._clock

    def _look(self) -> None:
        """Mutates: takes up the pages that everybody else let go of since the last look."""
        while self.pool.left:
            entry = self._by_page.get(page := self.pool.left.pop())
            if entry is None or self.pool.refcount(page) > 1:
                continue
            if entry.num_children:
                self._inner.add(page)
            elif not entry.listed:
                self._list(entry)

    def _list(self, entry: PrefixEntry) -> None:
        entry.listed = True
        heapq.heappush(self._leaves, self._rank(entry))

    def _evictable(self, entry: PrefixEntry) -> bool:
        return entry.num_children == 0 and self.pool.refcount(entry.page) == 1

    def _rank(self, entry: PrefixEntry) -> tuple[int, int, bytes]:
        """Eviction order. Entries last used together lie on one path, so the page id only breaks ties."""
        return entry.last_used, entry.page, entry.key


def _is(entry: PrefixEntry, tokens: tuple[int, ...], edit_key: bytes, parent: PrefixEntry | None) -> bool:
    return entry.parent is parent and entry.tokens == tokens and entry.edit_key == edit_key
