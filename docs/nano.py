"""replaylens in one file: decode, verify, roll back and capture, with the same bits whatever else happens.

    python docs/nano.py

A small Llama-like decoder serves several branches together: prompts, forks, edits, rollbacks, speculative drafts. It captures
the residual stream (S), attention output (T) and MLP output (C) of every layer and token, and the logit lens (Z).

The promise: every committed token, KV entry and activation is bit for bit a function of weights, token path and edits alone
(a sampled token also of temperature and seed). Three rules keep it:

1. Only the canonical pass commits. The order of its sums depends on shapes of weights and on the row's own position, never on
   the batch, the chunks of a prompt or the layout of pages (`rowwise`, `attend`).
2. A draft is a guess. It is accepted if the canonical pass chooses the same token, otherwise rolled back (`Engine.commit`).
3. A KV page with several owners is never written. Whoever writes gets a copy (`PagePool.reserve`).

The engine keeps these rules at full speed (docs/architecture.md). tests/engine/test_contract.py holds both to one contract.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

torch.set_num_threads(1)  # on several threads, a library may split a sum between them


# ---- the model: functions of single rows -----------------------------------------------------------------------------
@dataclass(frozen=True)
class Config:
    num_layers: int = 3
    d_model: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    d_head: int = 32
    d_mlp: int = 384
    vocab_size: int = 97
    max_positions: int = 256


def random_weights(config: Config, seed: int = 0) -> dict[str, Tensor]:
    """Weights [inputs, outputs], a function of the seed. Names are the engine's."""
    c, generator = config, torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator) * shape[0] ** -0.5  # noqa: E731
    weights = {"embed": draw(c.vocab_size, c.d_model) * c.vocab_size**0.5, "unembed.weight": draw(c.d_model, c.vocab_size)}
    for block in (f"blocks.{layer}." for layer in range(c.num_layers)):
        weights[block + "attn.qkv.weight"] = draw(c.d_model, (c.num_heads + 2 * c.num_kv_heads) * c.d_head)  # [q | k | v]
        weights[block + "attn.o.weight"] = draw(c.num_heads * c.d_head, c.d_model) / 2
        weights[block + "mlp.up.weight"] = draw(c.d_model, 2 * c.d_mlp)  # [gate | up]
        weights[block + "mlp.down.weight"] = draw(c.d_mlp, c.d_model) / 2
        weights |= {block + "ln1.weight": torch.ones(c.d_model), block + "ln2.weight": torch.ones(c.d_model)}
    return weights | {"ln_final.weight": torch.ones(c.d_model)}


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight  # RMSNorm


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)  # rotary positions: x [rows, heads, d_head]; cos and sin [rows, 1, d_head / 2]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Model:
    """The parts of a decoder that are functions of single rows. Attention, where rows meet, is below."""

    def __init__(self, config: Config, weights: dict[str, Tensor]) -> None:
        self.config, self.weights = config, weights
        frequency = 1 / 1e4 ** (torch.arange(0, config.d_head, 2) / config.d_head)
        angle = torch.arange(config.max_positions)[:, None] * frequency  # [positions, d_head / 2]
        self.cos, self.sin = angle.double().cos().float(), angle.double().sin().float()

    def heads(self, x: Tensor, layer: int) -> Tensor:  # [rows, d_model] -> [rows, (heads + 2 kv_heads) * d_head]
        return norm(x, self.of(layer, "ln1")) @ self.of(layer, "attn.qkv")

    def attn_out(self, z: Tensor, layer: int) -> Tensor:  # [rows, heads * d_head] -> T [rows, d_model]
        return z @ self.of(layer, "attn.o")

    def mlp_out(self, x: Tensor, layer: int) -> Tensor:  # [rows, d_model] -> C [rows, d_model]
        gate, up = (norm(x, self.of(layer, "ln2")) @ self.of(layer, "mlp.up")).chunk(2, dim=-1)
        return (gate / (1 + (-gate).exp()) * up) @ self.of(layer, "mlp.down")  # SwiGLU

    def lens(self, x: Tensor) -> Tensor:  # [rows, d_model] -> log-probabilities [rows, vocab]
        return (norm(x, self.weights["ln_final.weight"]) @ self.weights["unembed.weight"]).log_softmax(-1)

    def of(self, layer: int, name: str) -> Tensor:
        return self.weights[f"blocks.{layer}.{name}.weight"]


# ---- canonical arithmetic: one order for every sum -------------------------------------------------------------------
TILE = 16  # rows of every canonical product


def rowwise(canonical: bool, function: Callable[..., Tensor], x: Tensor, *layer: int) -> Tensor:
    """`function` of every row of x [rows, inputs] -> [rows, outputs].

    A plain x @ w breaks the promise: its entries are sums, rounded after each addition, in an order that the library picks by
    the number of rows. A token decoded alone then differs in its last bits from the same token in a batch or a prompt.
    Canonical: always TILE rows, padded with zeros.
    """
    if not canonical:
        return function(x, *layer)
    tiles = pad(x, (0, 0, 0, -len(x) % TILE)).split(TILE)
    return torch.cat([function(tile, *layer) for tile in tiles])[: len(x)]


def check_tiles(model: Model) -> None:
    """A row must have the same bits at every index of a tile. Tested on this machine, because no library promises it."""
    for weight in (w for name, w in model.weights.items() if w.dim() == 2 and name != "embed"):
        x = torch.randn(TILE, len(weight), generator=torch.Generator().manual_seed(0))
        if not all(torch.equal((x.roll(i, 0) @ weight).roll(-i, 0), x @ weight) for i in range(TILE)):
            raise RuntimeError(f"A product {list(weight.shape)} depends on a row's index in its tile. Try another TILE.")


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Softmax attention of one row: q [heads, d_head] over k and v [keys, kv_heads, d_head] -> [heads * d_head].

    One row at a time over its keys in order, whatever their pages: the shapes, and with them the sums, depend on the row's
    position alone. The engine takes many rows at once, and so has to sum over fixed blocks of keys.
    """
    q = q.view(k.shape[1], -1, q.shape[1]) * q.shape[1] ** -0.5  # [kv_heads, group, d_head]: a group shares its keys
    pattern = (q @ k.permute(1, 2, 0)).softmax(-1)  # [kv_heads, group, keys]
    return (pattern @ v.transpose(0, 1)).flatten()


# ---- the KV cache: pages that branches share -------------------------------------------------------------------------
class PagePool:
    """KV pages and the number of owners of each. A branch has a list of pages: position p is in the one at p // page_size."""

    def __init__(self, config: Config, num_pages: int, page_size: int) -> None:
        self.kv = torch.zeros(config.num_layers, 2, num_pages, page_size, config.num_kv_heads, config.d_head)
        self.by_slot = self.kv.flatten(2, 3)  # a view [layers, 2, slots, kv_heads, d_head]; slot = page * page_size + offset
        self.owners, self.page_size = [0] * num_pages, page_size

    def slots(self, pages: list[int], positions: Iterable[int]) -> list[int]:
        return [pages[p // self.page_size] * self.page_size + p % self.page_size for p in positions]

    def share(self, pages: list[int], length: int) -> list[int]:
        """The pages of the first `length` positions, with one more owner: all that a fork costs."""
        for page in (shared := pages[: ceil(length / self.page_size)]):
            self.owners[page] += 1
        return shared

    def drop(self, pages: list[int], length: int = 0) -> None:
        """Give up the pages beyond the first `length` positions. Mutates `pages`."""
        for page in pages[ceil(length / self.page_size) :]:
            self.owners[page] -= 1
        del pages[ceil(length / self.page_size) :]

    def reserve(self, pages: list[int], start: int, end: int) -> None:
        """Make positions [start, end) writable. Mutates `pages`: missing ones are added, shared ones replaced by copies."""
        for index in range(start // self.page_size, ceil(end / self.page_size)):
            old = pages[index] if index < len(pages) else None
            if old is not None and self.owners[old] == 1:
                continue
            if 0 not in self.owners:
                raise RuntimeError(f"All {len(self.owners)} pages are in use. Release branches, or give the engine more.")
            new = self.owners.index(0)
            self.owners[new] = 1
            pages[index : index + 1] = [new]
            if old is not None:  # copy on write
                self.kv[:, :, new] = self.kv[:, :, old]
                self.owners[old] -= 1


# ---- branches: token paths that are forked, edited and rolled back ---------------------------------------------------
Captured = dict[str, Tensor]
"""of one token: S [layers + 1, d_model], T and C [layers, d_model], Z [layers + 1, vocab]; the last Z is the model's output"""


@dataclass(frozen=True, eq=False)
class Edit:
    """Adds a vector at one layer and position, or replaces what is there. It is data, so every pass can apply it again."""

    site: str  # S (of layer l: what enters block l), T or C
    layer: int
    position: int
    vector: Tensor  # [d_model]
    replace: bool = False


class Branch:
    """A token path. Its first len(rows) tokens have KV and activations. Others are pending: to force tokens, add them."""

    def __init__(self, engine: Engine, tokens: Sequence[int], edits: Sequence[Edit] = ()) -> None:
        self.engine, self.tokens, self.edits = engine, list(tokens), tuple(edits)
        self.rows, self.pages, self.rejected = list[Captured](), list[int](), list[Branch]()
        self.num_accepted = self.num_rejected = 0  # drafts
        if any(edit.site not in ("S", "T", "C") or edit.position < 0 for edit in edits):
            raise ValueError(f"Bad edits: {edits}. A site is S, T or C, and positions count from 0.")

    def fork(self, at: int | None = None, edits: Sequence[Edit] = ()) -> Branch:
        """A branch of the first `at` tokens (default: all). It shares pages and rows up to its first new edit."""
        child = Branch(self.engine, self.tokens, (*self.edits, *edits)).rollback(len(self.tokens) if at is None else at)
        child.rows = self.rows[: min([len(child.tokens), *(edit.position for edit in edits)])]
        child.pages = self.engine.pool.share(self.pages, len(child.rows))
        return child

    def generate(self, n: int, **options: Any) -> Branch:
        """`n` more tokens; options are those of `Request`. Several branches together: `Engine.serve`."""
        self.engine.serve([Request(self, len(self.tokens) + n, **options)])
        return self

    def rollback(self, to: int) -> Branch:
        """Removes the tokens from position `to` on, with their KV and activations."""
        if not 1 <= to <= len(self.tokens):
            raise ValueError(f"No position {to} in a branch of {len(self.tokens)} tokens. Give 1 to {len(self.tokens)}.")
        del self.tokens[to:], self.rows[to:]
        self.engine.pool.drop(self.pages, len(self.rows))
        return self

    def release(self) -> None:
        """Gives up KV and activations. The tokens are pending again: computed anew, they get the same bits."""
        self.rows.clear()
        self.engine.pool.drop(self.pages)

    def kv(self) -> Tensor:
        """[tokens, layers, 2, kv_heads, d_head]"""
        pool = self.generate(0).engine.pool
        return pool.by_slot[:, :, pool.slots(self.pages, range(len(self.rows)))].movedim(2, 0).contiguous()

    def activations(self, site: str) -> Tensor:
        """S, T, C or Z: [tokens, layers (+ 1), d_model or vocab]"""
        return torch.stack([row[site] for row in self.generate(0).rows])


# ---- the engine: draft, verify, accept, roll back --------------------------------------------------------------------
Row = tuple[Branch, int, int]  # branch, position, token; a pass takes rows of any branches together


@dataclass(eq=False)
class Request:
    """Generate on a branch until it has `end` tokens."""

    branch: Branch
    end: int
    window: int = 4  # drafts per pass
    drafter: Callable[[Request, int], list[int]] | None = None  # proposes up to so many tokens; None: `Engine.early_exit`
    temperature: float = 0.0
    seed: int = 0
    keep_rejected: bool = False  # as branches

    def choose(self, before: Captured, position: int) -> int:
        """The token at `position`, from the row before it. The noise is a function of seed and position: no state."""
        scores = before["Z"][-1].double()  # [vocab]
        if self.temperature > 0:  # Gumbel-max samples from the softmax
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + position)
            noise = torch.rand(len(scores), generator=generator, dtype=torch.float64)
            scores = scores / self.temperature - (-noise.log()).log()
        return int(scores.argmax())


@dataclass(eq=False)
class Engine:
    model: Model
    num_pages: int = 256
    page_size: int = 16
    chunk: int = 64  # most pending tokens of a branch per pass: a longer prompt takes several
    skipped: int = 1  # last layers that the default drafter leaves out
    canonical: bool = True  # False: the negative control, which commits what plain products compute

    def __post_init__(self) -> None:
        check_tiles(self.model)
        self.pool = PagePool(self.model.config, self.num_pages, self.page_size)

    def prompt(self, tokens: Sequence[int], edits: Sequence[Edit] = ()) -> Branch:
        """A new branch, computed when the first request on it is served."""
        return Branch(self, tokens, edits)

    def serve(self, requests: Sequence[Request]) -> None:
        """All requests together. Afterwards the branches have their new tokens, and every token has its row."""
        assert len({request.branch for request in requests}) == len(requests), "one request per branch at a time"
        while active := [request for request in requests if len(request.branch.rows) < request.end]:
            self.step(active)

    def step(self, requests: Sequence[Request]) -> None:
        # tokens    ... A B C              C is pending: it has no KV yet
        # draft     ... A B C d1 d2 d3     the fast path guesses; its KV is provisional
        # verify            C d1 d2 d3     one canonical pass for all requests, which overwrites that KV
        # chosen            d1 x           row C chooses d1, which is accepted; row d1 chooses x, so d2 and d3 are rolled back
        # tokens    ... A B C d1 x         x is pending in the next step
        batch = [row for request in requests for row in self.draft(request)]
        seen = list(zip(batch, self.forward(batch, self.canonical), strict=True))
        for request in requests:
            self.commit(request, [(token, row) for (branch, _, token), row in seen if branch is request.branch])

    def draft(self, request: Request) -> list[Row]:
        """Pending tokens and guesses of what follows. Mutates the branch: it has a pending token, and pages for all."""
        branch, start = request.branch, len(request.branch.rows)
        if start == len(branch.tokens):
            branch.tokens.append(request.choose(branch.rows[-1], start))
        tokens = branch.tokens[start : start + self.chunk]
        count = min(request.window, request.end - len(branch.tokens)) if start + len(tokens) == len(branch.tokens) else 0
        self.pool.reserve(branch.pages, start, start + len(tokens) + count)
        tokens += (request.drafter or self.early_exit)(request, count)[:count] if count else []
        return [(branch, position, token) for position, token in enumerate(tokens, start)]

    def early_exit(self, request: Request, count: int) -> list[int]:
        """The fast path: plain products, without the last layers, one token at a time. May be wrong; never commits."""
        branch, start, drafts = request.branch, len(request.branch.rows), list[int]()
        while len(drafts) < count:
            path = branch.tokens + drafts
            rows = [(branch, position, path[position]) for position in range(start, len(path))]
            captured = self.forward(rows, canonical=False, skipped=self.skipped)
            drafts.append(request.choose(captured[-1], len(path)))
            start = len(path)
        return drafts

    def commit(self, request: Request, computed: list[tuple[int, Captured]]) -> None:
        """Takes all tokens and rows, then rolls back from the first draft that the row before it did not choose."""
        branch, first = request.branch, len(request.branch.tokens)
        branch.tokens += [token for token, _ in computed[first - len(branch.rows) :]]
        branch.rows += [row for _, row in computed]
        for position in range(first, len(branch.tokens)):
            if request.choose(branch.rows[position - 1], position) != branch.tokens[position]:
                branch.num_rejected += len(branch.tokens) - position
                branch.rejected += [branch.fork()] if request.keep_rejected else []
                branch.rollback(position)
                break
        branch.num_accepted += len(branch.tokens) - first

    def forward(self, batch: Sequence[Row], canonical: bool, skipped: int = 0) -> list[Captured]:
        """One pass over rows of any branches. Writes their KV; returns what is captured of each row."""
        model, c, by_slot = self.model, self.model.config, self.pool.by_slot
        captured: dict[str, list[Tensor]] = {site: [] for site in "STCZ"}  # [rows, ...] per layer

        def tap(site: str, x: Tensor) -> Tensor:  # edits x [rows, d_model] in place, and captures it
            for i, (branch, position, _) in enumerate(batch):
                for edit in branch.edits:
                    if (edit.site, edit.layer, edit.position) == (site, len(captured[site]), position):
                        x[i] = edit.vector if edit.replace else x[i] + edit.vector
            captured[site].append(x)
            return x

        slots = [self.pool.slots(branch.pages, range(position + 1)) for branch, position, _ in batch]  # of all keys of a row
        cos, sin = (table[[position for _, position, _ in batch]][:, None] for table in (model.cos, model.sin))
        x = model.weights["embed"][[token for _, _, token in batch]]
        for layer in range(c.num_layers - skipped):
            x = tap("S", x)
            heads = rowwise(canonical, model.heads, x, layer).view(len(batch), -1, c.d_head)
            q, k, v = heads.split([c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)  # [rows, heads, d_head]
            q, k = rotate(q, cos, sin), rotate(k, cos, sin)
            by_slot[layer][:, [seen[-1] for seen in slots]] = torch.stack([k, v])
            z = torch.stack([attend(q[i], *by_slot[layer][:, seen]) for i, seen in enumerate(slots)])
            x = x + tap("T", rowwise(canonical, model.attn_out, z, layer))
            x = x + tap("C", rowwise(canonical, model.mlp_out, x, layer))
        tap("S", x)
        captured["Z"] = [rowwise(canonical, model.lens, x) for x in captured["S"]]
        stacked = [torch.stack(values, dim=1) for values in captured.values()]  # [rows, layers (+ 1), ...]
        return [dict(zip(captured, row, strict=True)) for row in zip(*stacked, strict=True)]


# ---- what it shows ---------------------------------------------------------------------------------------------------
def differing_bits(one: Branch, other: Branch) -> int:
    """Over KV and activations of two branches with the same tokens."""
    values = [[branch.kv(), *map(branch.activations, "STCZ")] for branch in (one, other)]
    flipped = torch.cat([(a.view(torch.uint8) ^ b.view(torch.uint8)).flatten() for a, b in zip(*values, strict=True)])
    return sum(byte.bit_count() for byte in flipped.tolist())


def main() -> None:
    model = Model(Config(), random_weights(Config()))
    engine = Engine(model, page_size=4)
    root = engine.prompt(range(1, 22)).generate(0)
    edit = Edit("S", layer=1, position=20, vector=torch.ones(model.config.d_model))
    plain, warm, steered = root.fork(), root.fork(), root.fork(edits=[edit])
    print(f"Three forks of {len(root.tokens)} tokens: {sum(n > 1 for n in engine.pool.owners)} pages shared, none copied.")
    engine.serve([Request(plain, 33, keep_rejected=True), Request(warm, 33, 2, temperature=0.8), Request(steered, 33, 8)])
    for branch in (plain, warm, steered):
        print(f"{branch.num_accepted:2} drafts accepted, {branch.num_rejected:2} rejected: {branch.tokens[len(root.tokens) :]}")
    # Every path again in an engine of its own: forced instead of generated, one token per pass, other pages.
    branches = [plain, warm, steered, *plain.rejected]
    alone = [Engine(model, page_size=7, chunk=1).prompt(branch.tokens, branch.edits) for branch in branches]
    bits = sum(map(differing_bits, branches, alone))
    print(f"These branches and {len(plain.rejected)} rejected ones against each path alone: {bits} differing bits.")
    whole, by_token = (Engine(model, canonical=False, chunk=chunk).prompt(plain.tokens) for chunk in (64, 1))
    print(f"Control: plain products, one pass against one token per pass: {differing_bits(whole, by_token)} differing bits.")


if __name__ == "__main__":
    main()
