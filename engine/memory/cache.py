"""`KVCache`: the key and value tensors that page tables refer to."""

import hashlib
import math
import mmap
import sys
from bisect import bisect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, IntegrityError
from replaylens.engine.machine import free_memory, total_memory
from replaylens.engine.memory.pages import PageCopy, PagePool, PageTable
from replaylens.engine.model.config import ModelConfig
from replaylens.engine.terminal import Later
from replaylens.kernels.definition import CHUNK
from replaylens.kernels.gpus import gpu_of

if TYPE_CHECKING:
    from replaylens.engine.memory import rooms
else:  # most models need none
    rooms = Later("replaylens.engine.memory.rooms")

_WORTH_SHARING = {"cpu": 1 << 20, "cuda": 16 << 20}
_COPIED_AT_ONCE = 64
"""pages: what they hold lies in memory twice meanwhile"""
_MIX = 0x5851F42D4C957F2D  # odd multiplier of a 64-bit congruential generator


class KVCache:
    """Keys and values of every layer in slots. A page is `page_size` consecutive slots; page 0 stays zero.

    The layout on a CPU is [layers, 2, kv_heads, slots, d_head]: a gather of slots gives each head a contiguous block. On CUDA,
    or wherever `kernels` run, it is [layers, 2, slots, kv_heads, d_head]: they read the entries of a page in place. With latent
    attention there is one vector per slot, [layers, 1, 1, slots, rank + rotary_dim], which is both key and value.

    A hybrid has keys and values of its layers with attention only. Of the recurrent ones, `entries` holds what a position
    leaves for later rows, [layers, slots of rooms, columns], and `states` the state after a page that ends a chunk: [layers,
    rooms, heads, d_key, d_value]. Every page has a room of either kind (`entry_of`, `state_of`), or only some have (`rooms`).

    With `canary=True`, every slot also has a hash chained over (token, position, previous slot's hash) and a hash of its
    bytes. `check` recomputes both and reports the first slot that does not hold what its branch expects.
    """

    def __init__(
        self,
        config: ModelConfig,
        pool: PagePool,
        dtype: torch.dtype,
        device: str = "cpu",
        canary: bool = False,
        kernels: bool = False,
        state_tokens: int | None = None,
        layers: range | None = None,
    ) -> None:
        """
        state_tokens  positions of a hybrid whose entries are held at once; None: all
        layers        those it is for; default: all
        """
        slots, by_slot = (pool.num_pages + 1) * pool.page_size, kernels or device != "cpu"
        own = range(config.num_layers) if layers is None else layers
        self.slot_dim = 2 if by_slot else 3
        planes, heads, width = config.kv_shape
        inner = (slots, heads) if by_slot else (heads, slots)
        self.pool, self.num_heads = pool, config.num_heads
        self.value_width = width if config.latent is None else config.latent.rank
        """columns of a value"""
        self.index = {layer: i for i, layer in enumerate(x for x in config.layers_with("attn") if x in own)}
        """layer -> its place in `data`"""
        self.data = _zeros((len(self.index), planes, *inner, width), dtype, device)
        mixer, recurrent = config.mixer, [x for x in config.layers_with("mixer") if x in own]
        require_page_size(config, pool.page_size)
        self.mixer, self.mixed = mixer, {layer: i for i, layer in enumerate(recurrent)}
        """recurrent layer -> its place in `entries` and `states`"""
        plan = RoomPlan.of(config, pool.num_pages, pool.page_size, dtype, state_tokens)
        self.entries = _zeros((len(recurrent), (plan.entries + 1) * pool.page_size, plan.columns), torch.float32, device)
        states = (len(recurrent), plan.states + 1, *(mixer.state_shape if mixer else ()))
        self.states = _zeros(states, torch.float32, device)  # in any dtype of the model: errors of a state add up
        self.tails = _zeros((len(recurrent), plan.states + 1, *plan.tail), torch.float32, device)
        self.rooms = rooms.Rooms(pool, plan.entries, plan.states, plan.tail[0]) if plan.chosen else None
        """which pages of a hybrid have rooms; None: every page has its own"""
        every = torch.arange(pool.num_pages + 1, dtype=torch.int32)
        self.entry_of = (every if self.rooms is None else torch.from_numpy(self.rooms.entries.of)).to(device)
        """page -> room of its entries; 0: none. On a CPU the very numbers of `rooms`, on CUDA a copy"""
        self.state_of = (every if self.rooms is None else torch.from_numpy(self.rooms.states.of)).to(device)
        self.worth_sharing = _WORTH_SHARING[torch.device(device).type]
        """bytes of keys and values per layer that reading shared pages once must save, or every row reads its own; below,
        dividing the rows takes as long. Moves no bit"""
        self._waiting: dict[int, PageCopy] | None = None
        """target -> a copy to be made; none reads or writes what an earlier one writes. None: copies are made at once"""
        self.chain: dict[int, int] | None = {} if canary else None
        self.digest: dict[int, tuple[bytes, ...]] = {}
        """slot -> of its KV, of its entries, and of the state after it; empty: it has none"""

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.data, self.entries, self.states, self.tails))

    def known(self, table: PageTable, length: int) -> int:
        """The last position up to `length` at which a row of the table can be computed: of a hybrid perhaps an earlier one."""
        return length if self.rooms is None else self.rooms.known(table, length)

    def begin(self) -> None:
        """Mutates: a step begins, and rooms of recurrent layers that the last one needed may be taken."""
        if self.rooms is not None:
            self.rooms.begin()

    def reserve(self, table: PageTable, start: int, end: int) -> None:
        """Make [start, end) of `table` writable and copy shared pages. Mutates table, pool and cache, or raises OutOfPages."""
        if self.rooms is None:
            return self.copy(self.pool.reserve(table, start, end))
        self.rooms.prepare(table, start, end)
        copies = self.pool.reserve(table, start, end)
        moves = self.rooms.take(table, start, end, copies)
        size, tail = self.pool.page_size, self.tails.shape[2:]
        for move in moves:
            if move.kind == "copy":
                source, target = move.source * size, move.target * size
                self.entries[:, target : target + move.slots] = self.entries[:, source : source + move.slots]
            elif move.kind == "save":
                last = (move.source + 1) * size
                self.tails[:, move.target] = self.entries[:, last - tail[0] : last, : tail[1]]
            else:
                last = (move.target + 1) * size
                self.entries[:, last - tail[0] : last, : tail[1]] = self.tails[:, move.source]
        self.copy(copies)
        for shelf, there in ((self.rooms.entries, self.entry_of), (self.rooms.states, self.state_of)):
            if shelf.changed and there.is_cuda:
                there.copy_(torch.from_numpy(shelf.of), non_blocking=True)
            shelf.changed = False

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of all slots in place, [slots, kv_heads, width] each, as kernels read them. Latents, which are
        both, come twice: values are the first columns of keys."""
        held = self.data[self.index[layer]]
        return held[0], held[-1, ..., : self.value_width]

    @contextmanager
    def copying_together(self) -> Iterator[None]:
        """Page copies within the block are made when it ends, all in a few operations: a thousand forks of one branch begin
        with as many copies. Precondition: within, pages are reserved and freed, but nobody reads or writes what they hold."""
        if self.rooms is not None:  # whose moves are made at once, in order with these
            yield
            return
        self._waiting = {}
        try:
            yield
        finally:
            waiting, self._waiting = self._waiting, None
            self._make(list(waiting.values()))

    def copy(self, copies: list[PageCopy]) -> None:
        """Make the page copies that `PagePool.reserve` returned. Mutates the cache."""
        if self._waiting is None:
            return self._make(copies)
        for copy in copies:
            # a table may fork within the block, and a page that is freed is taken again
            if copy.source in self._waiting or copy.target in self._waiting:
                self._make(list(self._waiting.values()))
                self._waiting.clear()
            self._waiting[copy.target] = copy

    def _make(self, copies: Sequence[PageCopy]) -> None:
        size, held = self.pool.page_size, [(self.data, self.slot_dim)]
        if self.mixer is not None and self.rooms is None:
            held.append((self.entries, 1))
        for first in range(0, len(copies), _COPIED_AT_ONCE):
            some = copies[first : first + _COPIED_AT_ONCE]
            pairs = [(x.source * size + i, x.target * size + i) for x in some for i in range(x.num_slots)]
            if len(some) == 1:  # neighbours, and by far the most often
                (here, there), count = pairs[0], len(pairs)
                for x, dim in held:
                    x.narrow(dim, there, count).copy_(x.narrow(dim, here, count))
            else:
                source, target = torch.tensor(pairs, dtype=torch.int64).T.to(self.data.device, non_blocking=True)
                for x, dim in held:
                    x.index_copy_(dim, target, x.index_select(dim, source))
            if self.chain is not None:
                for here, there in pairs:
                    self.chain[there] = self.chain[here]
                    self.digest[there] = self.digest[here]

    def rows(self, slots: list[int]) -> Tensor:
        """A copy of the keys and values in `slots`: [rows, layers, *config.kv_shape]."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.data.device)
        return self.data.index_select(self.slot_dim, index).movedim(self.slot_dim, 0).contiguous()

    def mixed_rows(self, slots: list[int]) -> Tensor:
        """A copy of what recurrent layers hold of `slots`, whose pages have rooms: [rows, layers, columns]."""
        at = torch.tensor(slots, dtype=torch.int64, device=self.entry_of.device)
        return self.entries[:, self.entry_slots(at)].movedim(1, 0).contiguous()

    def entry_slots(self, slots: Tensor) -> Tensor:
        """Slots of pages -> slots of the rooms of their entries."""
        size = self.pool.page_size
        return slots if self.rooms is None else self.entry_of[slots // size] * size + slots % size

    def seal(self, tokens: list[int], slots: list[int], start: int) -> None:
        """Record what positions [start, len(tokens)) now hold. Mutates the canary; no-op without one."""
        if self.chain is None:
            return
        link = self.chain[slots[start - 1]] if start else 0
        for position in range(start, len(tokens)):
            link = _next_link(link, tokens[position], position)
            self.chain[slots[position]] = link
            self.digest[slots[position]] = self._bytes_digest(slots[position], position)

    def check(self, tokens: list[int], slots: list[int]) -> None:
        """Raise IntegrityError unless the slots hold this path. No-op without a canary."""
        if self.chain is None:
            return
        link = 0
        for position, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
            link = _next_link(link, token, position)
            if self.chain.get(slot) != link:
                raise IntegrityError(
                    f"Slot {slot} (page {slot // self.pool.page_size}) does not hold position {position}, token {token} "
                    "of this path. A page-table entry, a rollback or a prefix entry is wrong."
                )
            now = self._bytes_digest(slot, position)
            if any(new and old != new for old, new in zip(self.digest[slot], now, strict=True)):  # what is lost is empty
                raise IntegrityError(
                    f"The bytes of slot {slot} (page {slot // self.pool.page_size}), position {position}, token {token} "
                    "changed after they were committed."
                )

    def _bytes_digest(self, slot: int, position: int) -> tuple[bytes, ...]:
        page, at = divmod(slot, self.pool.page_size)
        entry, state = (int(of[page]) if self.mixer is not None else 0 for of in (self.entry_of, self.state_of))
        whole = self.rooms is None or bool(self.rooms.whole[page])
        held = [self.data.select(self.slot_dim, slot), self.entries[:, entry * self.pool.page_size + at], self.states[:, state]]
        there = True, bool(entry) and whole, bool(state) and (position + 1) % CHUNK == 0
        return tuple(_digest(x) if is_there else b"" for x, is_there in zip(held, there, strict=True))


def _digest(x: Tensor) -> bytes:
    return hashlib.blake2b(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes(), digest_size=8).digest()


class PlacedCache:
    """The caches of layers on several devices. They hold the same pages of one pool."""

    def __init__(self, parts: Sequence[KVCache]) -> None:
        self.parts, self.pool = list(parts), parts[0].pool

    @property
    def chain(self) -> dict[int, int] | None:
        """The canary of the first; each has its own."""
        return self.parts[0].chain

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    rooms = None
    """every page of a hybrid has its own: parts with different rooms would know different positions"""

    def known(self, table: PageTable, length: int) -> int:
        """As `KVCache.known`."""
        return length

    def begin(self) -> None:
        """As `KVCache.begin`: nothing is taken from a page."""

    def reserve(self, table: PageTable, start: int, end: int) -> None:
        """As `KVCache.reserve`."""
        self.copy(self.pool.reserve(table, start, end))

    @contextmanager
    def copying_together(self) -> Iterator[None]:
        """As `KVCache.copying_together`."""
        with ExitStack() as parts:
            for part in self.parts:
                parts.enter_context(part.copying_together())
            yield

    def copy(self, copies: list[PageCopy]) -> None:
        """As `KVCache.copy`."""
        for part in self.parts:
            part.copy(copies)

    def rows(self, slots: list[int]) -> Tensor:
        """As `KVCache.rows`, on the first device."""
        found = [part.rows(slots) for part in self.parts]
        return torch.cat([x.to(found[0].device) for x in found], dim=1)

    def mixed_rows(self, slots: list[int]) -> Tensor:
        """As `KVCache.mixed_rows`, on the first device."""
        found = [part.mixed_rows(slots) for part in self.parts]
        return torch.cat([x.to(found[0].device) for x in found], dim=1)

    def seal(self, tokens: list[int], slots: list[int], start: int) -> None:
        """As `KVCache.seal`."""
        for part in self.parts:
            part.seal(tokens, slots, start)

    def check(self, tokens: list[int], slots: list[int]) -> None:
        """As `KVCache.check`."""
        for part in self.parts:
            part.check(tokens, slots)


def _next_link(previous: int, token: int, position: int) -> int:
    return ((previous ^ (token + 1)) * _MIX + position + 1) & (2**64 - 1)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """Zeros. On a CPU they take memory only where something is written; `torch.zeros` writes all of them."""
    if device != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):  # each head has slots of its own, so the first token would touch every huge page
        pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


def require_page_size(config: ModelConfig, page_size: int, what: str = "a hybrid") -> None:
    """Raise BadRequest if the model cannot have pages of this size."""
    if config.mixer is not None and CHUNK % page_size:
        raise BadRequest(
            f"page_size={page_size} does not fit {what}: {CHUNK} positions, after which a state is kept, must be whole pages. "
            f"Give a divisor of {CHUNK}."
        )


@dataclass(frozen=True)
class RoomPlan:
    """How many pages of a hybrid have rooms."""

    entries: int
    states: int
    columns: int = 0
    tail: tuple[int, int] = (0, 0)
    """inputs of a convolution that are kept with a state, and their width"""
    chosen: bool = False
    """whether fewer pages have rooms than there are"""

    @classmethod
    def of(
        cls, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, state_tokens: int | None
    ) -> "RoomPlan":
        """One state for every open chunk, and further states that take no more memory than the KV of all positions."""
        mixer = config.mixer
        if mixer is None:
            return cls(0, 0)
        tail = (mixer.taps - 1, mixer.channels)
        if state_tokens is None or state_tokens >= num_pages * page_size or page_size < tail[0]:
            return cls(num_pages, num_pages, mixer.columns[-1], tail)
        kv = num_pages * page_size * kv_bytes(config, dtype)
        state = len(config.layers_with("mixer")) * max(1, math.prod(mixer.state_shape)) * torch.float32.itemsize
        states = min(num_pages, state_tokens // CHUNK + kv // state)
        return cls(state_tokens // page_size, states, mixer.columns[-1], tail, chosen=True)


def kv_bytes(config: ModelConfig, dtype: torch.dtype) -> int:
    """Of a position."""
    return len(config.layers_with("attn")) * math.prod(config.kv_shape) * dtype.itemsize


def cache_bytes(config: ModelConfig, num_tokens: int, page_size: int, dtype: torch.dtype, state_tokens: int | None) -> int:
    """Of a cache of `num_tokens` positions."""
    found = num_tokens * kv_bytes(config, dtype)
    if (mixer := config.mixer) is not None:  # in float32, whatever the model's dtype
        plan = RoomPlan.of(config, num_tokens // page_size, page_size, dtype, state_tokens)
        floats = plan.entries * page_size * plan.columns + plan.states * (math.prod(mixer.state_shape) + math.prod(plan.tail))
        found += len(config.layers_with("mixer")) * floats * torch.float32.itemsize
    return found


MOST_TOKENS, USUAL_TOKENS = 1 << 20, 1 << 13
"""of a cache whose size is chosen: at most, and even if it then may take more than its part of the free memory"""
_PART, _NAMES = {"cpu": 16, "cuda": 8}, {16: "a sixteenth", 8: "an eighth"}
"""one part in so many of the free memory: several engines have room, and what they capture. On a CPU a cache takes memory only
where something was written"""


def chosen_tokens(
    needs: Callable[[int], int], page_size: int, places: Mapping[torch.device, float], beside: int = 0
) -> tuple[int, str]:
    """Positions for a cache on this machine now, a power of two, and why so many. No bit depends on it.

    needs   positions -> bytes
    places  where it will be, and the part of the layers that is there
    beside  bytes that passes take of each GPU
    """
    rooms = [(free_on(place), _PART[place.type], part) for place, part in places.items() if part]
    free, of, part = min(rooms, key=lambda each: each[0] / (each[1] * each[2]))
    room, tokens = free / (of * part), MOST_TOKENS
    while tokens > USUAL_TOKENS and needs(tokens) > room:
        tokens //= 2
    most = _held(places) if of == _PART["cpu"] else (free - beside) / part
    while tokens > page_size and needs(tokens) > most:
        tokens //= 2
    tokens = max(tokens, page_size)
    holds = "fewer" if needs(tokens) > room else "more" if needs(2 * tokens) <= room else "no more"
    return tokens, f"{_NAMES[of]} of the {free / 2**30:.1f} GiB of free memory holds {holds}"


def free_on(place: torch.device) -> int:
    """The bytes that this process may still take of a device; of a GPU as much as its facts leave, which may be imposed."""
    if place.type == "cpu":
        return free_memory()
    allocated = torch.cuda.memory_allocated(place)
    unused = torch.cuda.memory_reserved(place) - allocated  # torch keeps what it freed
    return max(0, min(torch.cuda.mem_get_info(place)[0] + unused, gpu_of(place).memory - allocated))


def _held(places: Collection[torch.device]) -> int:
    host = total_memory()
    return sum(host if x.type == "cpu" else gpu_of(x).memory for x in places)


def require_memory(
    config: ModelConfig,
    num_tokens: int,
    page_size: int,
    dtype: torch.dtype,
    devices: Collection[torch.device],
    state_tokens: int | None = None,
) -> None:
    """Raise BadRequest if the KV of `num_tokens` tokens exceeds the total memory of the machine or its devices."""
    there = _held(devices)
    needs = lambda tokens: cache_bytes(config, tokens, page_size, dtype, state_tokens)  # noqa: E731
    if needs(num_tokens) <= there:
        return
    most = bisect(range(min(num_tokens, sys.maxsize)), there, key=needs) - 1
    what = "KV" if config.mixer is None else f"KV and recurrent states in pages of {page_size}"
    hint = ""
    if config.mixer is not None:
        smaller = f"page_size={CHUNK}: each page has room for a state" if page_size < CHUNK else "a smaller state_tokens"
        hint = f", or {smaller}"
    raise BadRequest(
        f"cache_tokens={num_tokens} needs {needs(num_tokens) / 2**30:,.0f} GiB for {what}, but there are only "
        f"{there / 2**30:,.0f} GiB of memory. Give at most {most}{hint}."
    )
