"""`KVCache`: the key and value tensors that page tables refer to."""

import hashlib
import math
import mmap
import os
from collections.abc import Sequence

import torch
from torch import Tensor

from replaylens.engine.errors import BadRequest, KVCorruption
from replaylens.engine.memory.pages import PageCopy, PagePool
from replaylens.engine.model.config import ModelConfig
from replaylens.kernels.definition import CHUNK

_WORTH_SHARING = {"cpu": 1 << 20, "cuda": 16 << 20}
_MIX = 0x5851F42D4C957F2D  # odd multiplier of a 64-bit congruential generator


class KVCache:
    """Keys and values of every layer in slots. A page is `page_size` consecutive slots; page 0 stays zero.

    The layout on a CPU is [layers, 2, kv_heads, slots, d_head]: a gather of slots gives each head a contiguous block. On CUDA,
    or wherever `kernels` run, it is [layers, 2, slots, kv_heads, d_head]: they read the entries of a page in place. With latent
    attention there is one vector per slot, [layers, 1, 1, slots, rank + rotary_dim], which is both key and value.

    A hybrid has keys and values of its layers with attention only. Of the recurrent ones, `entries` holds what a position
    leaves for later rows, [layers, slots, columns], and `states` the state after the position of a page that ends a chunk, if
    one does: [layers, pages, heads, d_key, d_value]. So whoever shares or copies pages has their states.

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
        layers: range | None = None,
    ) -> None:
        """layers  those it is for; default: all"""
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
        if mixer is not None and pool.page_size > CHUNK:
            raise BadRequest(
                f"page_size={pool.page_size} is too large for a hybrid: a page holds one state at most. Give at most {CHUNK}."
            )
        self.mixer, self.mixed = mixer, {layer: i for i, layer in enumerate(recurrent)}
        """recurrent layer -> its place in `entries` and `states`"""
        states = (len(recurrent), pool.num_pages + 1, *(mixer.state_shape if mixer else ()))
        self.entries = _zeros((len(recurrent), slots, mixer.columns[-1] if mixer else 0), torch.float32, device)
        self.states = _zeros(states, torch.float32, device)  # in any dtype of the model: errors of a state add up
        self.worth_sharing = _WORTH_SHARING[torch.device(device).type]
        """bytes of keys and values per layer that reading shared pages once must save, or every row reads its own; below,
        dividing the rows takes as long. Moves no bit"""
        self.chain: dict[int, int] | None = {} if canary else None
        self.digest: dict[int, bytes] = {}

    @property
    def num_bytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.data, self.entries, self.states))

    def planes(self, layer: int) -> tuple[Tensor, Tensor]:
        """The keys and values of all slots in place, [slots, kv_heads, width] each, as kernels read them. Latents, which are
        both, come twice: values are the first columns of keys."""
        held = self.data[self.index[layer]]
        return held[0], held[-1, ..., : self.value_width]

    def copy(self, copies: list[PageCopy]) -> None:
        """Make the page copies that `PagePool.reserve` returned. Mutates the cache."""
        size = self.pool.page_size
        for copy in copies:
            source, target, n = copy.source * size, copy.target * size, copy.num_slots
            self.data.narrow(self.slot_dim, target, n).copy_(self.data.narrow(self.slot_dim, source, n))
            if self.mixer is not None:
                self.entries[:, target : target + n] = self.entries[:, source : source + n]
                if (copy.first + n) // CHUNK > copy.first // CHUNK:  # a chunk ends among them
                    self.states[:, copy.target] = self.states[:, copy.source]
            if self.chain is not None:
                for i in range(n):
                    self.chain[target + i] = self.chain[source + i]
                    self.digest[target + i] = self.digest[source + i]

    def rows(self, slots: list[int]) -> Tensor:
        """A copy of the keys and values in `slots`: [rows, layers, *config.kv_shape]."""
        index = torch.tensor(slots, dtype=torch.int64, device=self.data.device)
        return self.data.index_select(self.slot_dim, index).movedim(self.slot_dim, 0).contiguous()

    def mixed_rows(self, slots: list[int]) -> Tensor:
        """A copy of what recurrent layers hold in `slots`: [rows, layers, columns]."""
        return self.entries[:, slots].movedim(1, 0).contiguous()

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
        """Raise KVCorruption unless the slots hold this path. No-op without a canary."""
        if self.chain is None:
            return
        link = 0
        for position, (token, slot) in enumerate(zip(tokens, slots, strict=True)):
            link = _next_link(link, token, position)
            if self.chain.get(slot) != link:
                raise KVCorruption(
                    f"Slot {slot} (page {slot // self.pool.page_size}) does not hold position {position}, token {token} "
                    "of this path. A page-table entry, a rollback or a prefix entry is wrong."
                )
            if self.digest[slot] != self._bytes_digest(slot, position):
                raise KVCorruption(
                    f"The bytes of slot {slot} (page {slot // self.pool.page_size}), position {position}, token {token} "
                    "changed after they were committed."
                )

    def _bytes_digest(self, slot: int, position: int) -> bytes:
        held = [self.data.select(self.slot_dim, slot)]
        if self.mixer is not None:
            held.append(self.entries[:, slot])
            held += [self.states[:, slot // self.pool.page_size]] * ((position + 1) % CHUNK == 0)
        found = hashlib.blake2b(digest_size=8)
        for x in held:
            found.update(x.contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes())
        return found.digest()


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


def require_memory(config: ModelConfig, num_tokens: int, page_size: int, dtype: torch.dtype, *devices: torch.device) -> None:
    """Raise BadRequest if the KV of `num_tokens` tokens exceeds the total memory of the machine or its devices."""
    wanted = num_tokens * len(config.layers_with("attn")) * math.prod(config.kv_shape) * dtype.itemsize
    what, hint = "KV", ""
    if (mixer := config.mixer) is not None:  # in float32, whatever the model's dtype
        floats = num_tokens * mixer.columns[-1] + num_tokens // page_size * math.prod(mixer.state_shape)
        wanted += len(config.layers_with("mixer")) * floats * torch.float32.itemsize
        what = f"KV and states in pages of {page_size}"
        hint = f", or page_size={CHUNK}: each page has room for a state" if page_size < CHUNK else ""
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    there = sum(host if x.type == "cpu" else torch.cuda.get_device_properties(x).total_memory for x in devices)
    if wanted > there:
        raise BadRequest(
            f"cache_tokens={num_tokens} needs {wanted / 2**30:,.0f} GiB for {what}, but there are only "
            f"{there / 2**30:,.0f} GiB of memory. Give at most {num_tokens * there // wanted}{hint}."
        )
