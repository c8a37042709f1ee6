"""Tensor parallel: the products of a model over several processes, with the bits of one.

Rank 0 is the engine: it has scheduler, pages, attention, sampling, edits and captured rows. The other ranks hold columns of
the weights and multiply: rank 0 sends rows, every rank computes its columns, rank 0 puts them side by side. A column of a
product is a sum of its own, so that no sum crosses ranks and no bit depends on their number. Followers keep nothing of a pass:
one that dies costs the pass, never a token.

`python -m replaylens.extras.ranks` is a follower. It takes its weights from rank 0, whatever they were read from.
"""

import argparse
import json
import os
import shutil
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from replaylens.engine.errors import BadRequest, FingerprintMismatch, RankFailed
from replaylens.engine.model import modes
from replaylens.engine.model.config import Activation
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.model.layers import Elsewhere, Experts, Linear, Packable
from replaylens.engine.model.ops import RowOps
from replaylens.engine.proof.doctor import Finding, numbers, require
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.request.values import as_float, as_int, as_processes
from replaylens.engine.terminal import defer_interrupt
from replaylens.extras.wire import START, Followers, Wire, identity, launched, of_torchrun, started

# ---- shares ----------------------------------------------------------------------------------------------------------
# Which columns of a weight a rank has.

UNIT = 16
"""columns that stay together; a weight of fewer columns stays on rank 0"""
TIMEOUT = 60.0
"""seconds to wait for an answer"""
OTHERS = "The source holds other weights than when it was loaded. Load a new engine."


def share(columns: int, rank: int, ranks: int) -> slice:
    """The columns of a rank, in whole units, possibly none."""
    each = -(-columns // (ranks * UNIT)) * UNIT
    return slice(min(columns, rank * each), min(columns, (rank + 1) * each))


def cut(weight: Tensor, blocks: int, rank: int, ranks: int) -> Tensor:
    """A rank's columns of a weight [..., inputs, blocks * columns], of each block in turn: [..., inputs, blocks * share]"""
    by_block = weight.unflatten(-1, (blocks, -1))
    return by_block[..., share(by_block.shape[-1], rank, ranks)].flatten(-2).contiguous()


class Slice(Packable):
    """The columns that one rank has of a product, in the place of a `Linear` or of `Experts`."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gated = gated
        self.bias = self.up_bias = self.down_bias = None

    def put(self, leaf: str, tensor: Tensor) -> None:
        """Mutates: takes a weight or a bias."""
        for held in (self.__dict__, self.panels, self._parameters):
            held.pop(leaf, None)
        self.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
        if "bias" not in leaf and tensor.dtype == torch.float32:
            self.pack(leaf)

    def stored(self, name: str = "weight") -> Tensor:
        """As a GPU's products read it. A rank may have columns of `down` alone: plans count experts by either."""
        known = name in self.panels or name in self._parameters
        return super().stored(name if known else "down")


class SplitWeight(Elsewhere):
    """A weight of which every rank has some columns. Stands among a module's packed weights."""

    def __init__(self, ranks: "Ranks", number: int, leaf: str, weight: Tensor, blocks: int, own: Slice) -> None:
        """weight  [..., inputs, outputs], of which nothing is kept"""
        self.ranks, self.number, self.leaf, self.blocks, self.own = ranks, number, leaf, blocks, own
        self.shape, self.dtype, self.device = tuple(weight.shape), weight.dtype, ranks.device

    def ops(self, kind: Any, fast: bool) -> Any:
        """A class of ops that asks the other ranks."""
        return split_ops(kind, fast)

    def __deepcopy__(self, memo: object) -> "SplitWeight":
        """A copy of a model has the same weights, on the same ranks."""
        return self

    def weight(self, turned: bool = False) -> Tensor:
        """The weight again, from all ranks."""
        return torch.cat([piece.flatten() for piece in self.pieces(turned)]).view(self.shape).to(self.device)

    def pieces(self, turned: bool = False) -> Iterator[Tensor]:
        """The rows of `weight`, some at a time, on the host."""
        assert not turned  # only an embedding is, which is not divided
        held, several = getattr(self.own, self.leaf).cpu(), len(self.shape) > 2
        for index in range(self.shape[0] if several else 1):
            own = held[index] if several else held
            for rows in range(0, self.shape[-2], _FETCHED):
                some = own[rows : rows + _FETCHED]
                words = [FETCH, self.number, LEAVES.index(self.leaf), index if several else -1, rows, rows + len(some)]
                yield self.join({**self.ranks.ask(words, [], self, (len(some),), self.dtype, None), 0: some})

    def columns(self, rank: int, activated: bool = False) -> int:
        """How many columns the answer of a rank has."""
        some = share(self.shape[-1] // self.blocks, rank, self.ranks.size)
        return (some.stop - some.start) * (1 if activated else self.blocks)

    def width(self, activated: bool) -> int:
        """How many columns all answers have."""
        return self.shape[-1] // (self.blocks if activated else 1)

    def join(self, parts: Mapping[int, Tensor], activated: bool = False) -> Tensor:
        """The columns of all ranks, [..., columns] each, side by side."""
        blocks, width = 1 if activated else self.blocks, self.shape[-1] // self.blocks
        first = parts[0]  # on the device, if there is one
        out = first.new_empty(*first.shape[:-1], blocks, width)
        for rank, part in parts.items():
            out[..., share(width, rank, self.ranks.size)] = part.to(out.device).unflatten(-1, (blocks, -1))
        return out.flatten(-2)


# ---- messages --------------------------------------------------------------------------------------------------------
# A message is HEADER integers, then tensors whose shapes they say. The answer is one tensor, whose shape rank 0 knows.

HEADER = 16
LINEAR, HIDDEN, OUT, FETCH, PUT = range(5)
LEAVES = ("weight", "bias", "up", "up_bias", "down", "down_bias")
KINDS: tuple[Activation | None, ...] = (None, "silu", "gelu", "gelu_tanh", "relu", "relu2", "clamped_swiglu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)
_FETCHED = 512
"""rows of a weight that are fetched together"""


# ---- rank 0 ----------------------------------------------------------------------------------------------------------


class Ranks:
    """The followers of an engine."""

    def __init__(self, size: int, device: str, dtype: torch.dtype, timeout: float = TIMEOUT) -> None:
        """Starts them, unless torchrun did. timeout: seconds to wait for an answer"""
        if timeout <= 0:
            raise BadRequest(f"Invalid rank_timeout={timeout:g}. Give seconds, more than 0.")
        self.size, self.timeout, self.dtype = size, timeout, dtype
        self.device = torch.device("cuda", torch.cuda.current_device()) if device == "cuda" else torch.device("cpu")
        self.reload: Callable[[Ranks], None] | None = None
        """sends all weights again; holds neither these ranks nor the model, which would keep each other"""
        self.answers = self.sent_bytes = self.received_bytes = 0
        self._lock = threading.RLock()
        self._numbers: dict[str, int] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._failed: str | None = None
        self._followers: Followers
        self._ready = False
        self._start()

    @property
    def limit(self) -> float:
        """Seconds to wait for an answer now."""
        return self.timeout if self._ready else max(self.timeout, START)

    def __repr__(self) -> str:
        return f"Ranks({self.size}, {'failed: ' + self._failed if self._failed else 'ready'})"

    def _start(self) -> None:
        self._followers = Followers(self.size, self.device, self.dtype, self.timeout)
        self._failed = None
        self._owner = os.getpid()
        self._end = weakref.finalize(self, Followers.end, self._followers, self._owner)

    def restart(self) -> None:
        """Start new followers and send them the weights again, from the model's source. All branches go on where they are.

        FingerprintMismatch, or another error of loading, if the source is no longer what it was.
        """
        if self.reload is None or self._followers.by_torchrun:
            raise RankFailed("These ranks were started by torchrun. Start the program again; resume=True continues a dump.")
        self._ready = False
        with self.closed_by_errors():  # ranks with other weights would compute other bits
            self._end()
            self._start()
            self.reload(self)
        self._ready = True

    def ready(self, reload: "Callable[[Ranks], None]") -> None:
        """Mutates: all weights are sent, and `reload` sends them again. From now on answers must come within the timeout."""
        self.reload, self._ready = reload, True

    def close(self) -> None:
        """End the followers. The engine computes no longer."""
        self._failed = "closed"
        self._end()

    @contextmanager
    def closed_by_errors(self) -> Iterator[None]:
        """An error within ends the followers: in a notebook, it would keep them."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    # ---- weights

    def split(self, name: str, module: Packable, leaf: str, weight: Tensor) -> bool:
        """Mutates: sends every rank its columns of a weight, which the module then holds as a `SplitWeight`. False: the weight
        is too narrow, and stays."""
        given = module.as_multiplied(leaf, weight.detach()).cpu()
        path, gated = name.rpartition(".")[0], bool(getattr(module, "gated", False))
        blocks = 2 if leaf == "up" and gated else 1
        if isinstance(module, Linear) and path.endswith((".mlp.up", ".shared.up")) and given.shape[-1] % 2 == 0:
            blocks = 2  # gate | up: a rank has both of a neuron
        others = [x for x in ("up", "down") if isinstance(module, Experts)]  # both or neither: plans are for both
        narrow = [module._parameters[x] for x in others if x in module._parameters]
        if any(x is not None and x.shape[-1] <= 2 * UNIT for x in [given, *narrow]):
            return False
        held = module.panels.get("down" if leaf == "up" else "up")
        own = held.own if isinstance(held, SplitWeight) else Slice(gated)
        if self._shapes.setdefault(name, given.shape) != given.shape:
            raise FingerprintMismatch(
                f"{name} has the shape {tuple(given.shape)} now, not {tuple(self._shapes[name])}. {OTHERS}"
            )
        split = SplitWeight(self, self._numbers.setdefault(path, len(self._numbers)), leaf, given, blocks, own)
        self._put(split, leaf, given, gated)
        module.panels[leaf] = split
        module._parameters.pop(leaf, None)
        return True

    def take(self, model: Decoder) -> Decoder:
        """Mutates: divides the weights that are still whole, and gives every rank the biases of its columns."""
        self.divide(self.packable(model))
        return model

    def divide(self, found: Mapping[str, tuple[Packable, str]]) -> None:
        """Mutates the modules: each weight, (module, name within it), and the bias that belongs to it are divided."""
        for name, (module, leaf) in found.items():
            if leaf not in module.panels:
                self.split(name, module, leaf, getattr(module, leaf))
            held, bias_name = module.panels.get(leaf), "bias" if leaf == "weight" else f"{leaf}_bias"
            if isinstance(held, SplitWeight) and (bias := getattr(module, bias_name, None)) is not None:
                self._put(held, bias_name, bias.detach().cpu(), held.own.gated)

    def ops(self, divided: bool) -> Any:
        """Canonical ops of single rows on rank 0; divided: with products over ranks."""
        return row_ops(self.device.type, False, divided)

    def packable(self, model: Decoder) -> dict[str, tuple[Packable, str]]:
        """The weights to divide. The embedding stays on rank 0, which looks rows up; on a GPU so does the unembedding, which
        the logit lens reads."""
        whole = ("embed",) if self.device.type == "cpu" else ("embed", "unembed.weight")
        return {name: found for name, found in model.packable("cuda").items() if name not in whole}

    def _put(self, split: SplitWeight, leaf: str, tensor: Tensor, gated: bool) -> None:
        for rank in range(self.size):
            piece = cut(tensor.to(split.dtype), split.blocks, rank, self.size)
            if not rank:
                split.own.put(leaf, piece.to(self.device))
            elif piece.numel():
                shape = [*piece.shape, *[0] * (3 - piece.dim())]
                words = [PUT, split.number, LEAVES.index(leaf), int(gated), DTYPES.index(piece.dtype), piece.dim(), *shape]
                self.ask(words, [piece], split, None, torch.int64, None, only=rank)

    # ---- products

    def ask(
        self,
        words: list[int],
        tensors: list[Tensor],
        split: SplitWeight,
        leading: tuple[int, ...] | None,
        dtype: torch.dtype,
        own: Callable[[], Tensor] | None,
        activated: bool = False,
        only: int | None = None,
    ) -> dict[int, Tensor]:
        """The answers by rank to a message. RankFailed if one does not come in time.

        leading  the shape of an answer but for its columns; None: it is one number
        own      what rank 0 computes meanwhile
        only     the rank that is asked; default: all that have columns
        """
        if os.getpid() != self._owner:  # both would take each other's answers
            raise RankFailed(
                "These ranks belong to the process that started them, and this is a fork of it. Load an engine here."
            )
        if self._failed is not None:
            raise RankFailed(self._explained())
        asked = [only] if only is not None else [r for r in range(1, self.size) if split.columns(r)]
        header = torch.tensor(words + [0] * (HEADER - len(words)), dtype=torch.int64)
        wire, rank = self._followers.wire, 0
        payload = [header, *(wire.placed(x) for x in tensors)]
        with self._lock, defer_interrupt():  # an answer that nobody takes would be the next one's
            try:
                sends = [(rank := r, wire.send(x, r)) for r in asked for x in payload]
                shapes = {r: (1,) if leading is None else (*leading, split.columns(r, activated)) for r in asked}
                waiting = {(rank := r): wire.receive(shape, dtype, r) for r, shape in shapes.items()}
                found, trouble = self._own(own)
                for rank, (work, _) in waiting.items():
                    wire.wait(work, self.limit, partial(self._followers.gone, rank))
                for rank, work in sends:  # noqa: B007 (the handler names it)
                    work.wait(timedelta(seconds=self.limit))
                found |= {r: out for r, (_, out) in waiting.items()}
            except BaseException as error:
                self._failed = f"rank {rank} of {self.size} {self._followers.reason(rank, error, self.limit)}"
                self._followers.end(self._followers, os.getpid())
                if isinstance(error, RuntimeError):
                    raise RankFailed(self._explained()) from error
                raise
        if trouble is not None:
            raise trouble
        self.answers += len(asked)
        self.sent_bytes += len(asked) * sum(x.nbytes for x in payload)
        self.received_bytes += sum(x.nbytes for r, x in found.items() if r)
        return found

    @staticmethod
    def _own(compute: Callable[[], Tensor] | None) -> tuple[dict[int, Tensor], Exception | None]:
        """What rank 0 computes; an error of it must not keep others from being heard."""
        try:
            return ({} if compute is None else {0: compute()}), None
        except Exception as error:
            return {}, error

    def _explained(self) -> str:
        again = "Start the program again" if self._followers.by_torchrun else "Call engine.ranks.restart()"
        if self._failed == "closed":
            return f"The ranks of this engine were closed; all branches are as after their last token. {again} to go on."
        return (
            f"A product was not computed: {self._failed}. Nothing of this pass was committed; all branches are as after their "
            f"last token. {again}, and repeat the request; resume=True continues a dump, --resume a command."
        )


# ---- Engine.load -----------------------------------------------------------------------------------------------------


def joined(ranks: Any, where: Any, device: str) -> bool:
    """Whether a model is divided over several ranks. Other ranks than 0 that torchrun started serve here, and end with it."""
    ranks = as_int("ranks", ranks, 1) if launched() else as_processes("ranks", ranks)
    if ranks == 1:
        return False
    if not isinstance(where, str):
        raise BadRequest(f"Both devices={list(where)} and ranks={ranks} were given. Give one of them.")
    if (place := launched(ranks)) is not None and place[0]:
        follow(device)
    return True


def divided(
    ranks: int,
    device: str,
    dtype: torch.dtype,
    timeout: Any,
    read: Callable[..., Any],
    make: Callable[..., Any],
    check: bool,
    with_text: bool,
) -> Any:
    """The engine that `make` makes of the model that `read` reads, with its products over ranks.

    NotCertified if they do not have the bits of one. From then on they can be restarted.
    """
    group = Ranks(ranks, device, dtype, as_float("rank_timeout", timeout))
    with group.closed_by_errors():
        model, text = read(check=check, packed=group, with_text=with_text)
        engine = make(group.take(model), text)
        found = examine_ranks(group)
        engine.certificate = require(replace(engine.certificate, findings=(*engine.certificate.findings, *found)))
        again = partial(read, check=False, with_text=False)
        weights, held = engine.fingerprint.weights, weakref.ref(engine.model)

        def reload(ranks: Ranks) -> None:
            ranks.take(again(packed=ranks)[0])
            if (model := held()) is not None and weights_hash(model) != weights:
                raise FingerprintMismatch(OTHERS)

        group.ready(reload)
        engine.ranks = group
    return engine


# ---- the doctor -----------------------------------------------------------------------------------------------------------


@torch.inference_mode()
def examine_ranks(ranks: "Ranks") -> tuple[Finding, ...]:
    """Products over ranks against the same on rank 0 alone. In the control every rank has a part of the inputs, and an
    all-reduce adds their sums."""
    there = partial(torch.Tensor.to, device=ranks.device, dtype=ranks.dtype)
    x, op = there(numbers(1, 70, 577)), f"over {ranks.size} ranks"
    plain = _product_with(there(numbers(2, 577, 100)), there(numbers(3, 100)))
    experts = Experts(5, 577, 50, gated=True, bias=False)
    experts.up = nn.Parameter(there(numbers(4, 5, 577, 100)), False)
    experts.down = nn.Parameter(there(numbers(5, 5, 50, 80)), False)
    chosen = torch.arange(140, device=ranks.device).view(70, 2) % 5
    cases: dict[str, Callable[[RowOps], Tensor]] = {
        "product": lambda ops: ops.linear(x, plain),
        "experts": lambda ops: ops.experts_out(ops.experts_hidden(x, chosen, experts, "silu"), chosen, experts),
    }
    with modes.canonical():
        whole = {name: case(ranks.ops(divided=False)) for name, case in cases.items()}
        summed = sum_over_ranks(x, plain, ranks)
        ranks.divide({"doctor.product.weight": (plain, "weight")})
        ranks.divide({f"doctor.experts.{leaf}": (experts, leaf) for leaf in ("up", "down")})
        split = {name: case(ranks.ops(divided=True)) for name, case in cases.items()}
    found = [Finding(name, op, "as on one", torch.equal(split[name], whole[name])) for name in cases]
    equal = torch.equal(summed, whole["product"])
    return (*found, Finding("product", op, "control: parts of the inputs, added over ranks", equal, control=True))


def _product_with(weight: Tensor, bias: Tensor | None = None) -> Linear:
    made = Linear(len(weight), weight.shape[1], bias is not None)
    made.weight = nn.Parameter(weight.contiguous(), False)
    made.bias = None if bias is None else nn.Parameter(bias, False)
    return made


def sum_over_ranks(x: Tensor, linear: Linear, ranks: "Ranks") -> Tensor:
    """The product as an all-reduce computes it: each rank has a part of the inputs, and their sums are added in any order."""
    parts = zip(x.tensor_split(ranks.size, 1), linear.weight.detach().tensor_split(ranks.size), strict=True)
    found = torch.stack([ranks.ops(False).linear(some.contiguous(), _product_with(rows)) for some, rows in parts]).sum(0)
    return found if linear.bias is None else found + linear.bias


# ---- ops -------------------------------------------------------------------------------------------------------------


class SplitOps:
    """Ops whose products are divided over ranks where the weight is. Mixed into the ops of a device by `split_ops`."""

    fast = False
    """whether the ops are those of the fast path"""

    def linear(self, x: Tensor, linear: Linear) -> Tensor:
        """[rows, inputs] -> [rows, outputs]"""
        held = linear.panels.get("weight")
        return self._linear(x, held) if isinstance(held, SplitWeight) else self._base().linear(x, linear)

    def linear_add(self, x: Tensor, linear: Linear, residual: Tensor) -> Tensor:
        """residual + linear(x)"""
        held = linear.panels.get("weight")
        return (
            residual + self._linear(x, held) if isinstance(held, SplitWeight) else self._base().linear_add(x, linear, residual)
        )

    def linear_activate(self, x: Tensor, linear: Linear, kind: Activation, gated: bool) -> Tensor:
        """activate(linear(x))"""
        held = linear.panels.get("weight")
        if not isinstance(held, SplitWeight):
            return self._base().linear_activate(x, linear, kind, gated)
        if held.blocks != (2 if gated else 1):
            return self._base().activate(self._linear(x, held), kind, gated)
        return self._linear(x, held, kind, gated)

    def unembed(self, x: Tensor, table: Any) -> Tensor:
        """[rows, d] -> [rows, vocab]"""
        return self._linear(x, table) if isinstance(table, SplitWeight) else self._base().unembed(x, table)

    def experts_hidden(self, x: Tensor, chosen: Tensor, experts: Experts, kind: Activation) -> Tensor:
        """[rows, d_model] -> [rows, top, d_expert]"""
        held = experts.panels.get("up")
        if not isinstance(held, SplitWeight):
            return self._base().experts_hidden(x, chosen, experts, kind)
        own = lambda: self._base().experts_hidden(x, chosen, held.own, kind)  # noqa: E731
        return self._asked(HIDDEN, held, x, chosen, own, kind, experts.gated, activated=True)

    def experts_out(self, hidden: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """[rows, top, d_expert] -> [rows, top, d_model]"""
        held = experts.panels.get("down")
        if not isinstance(held, SplitWeight):
            return self._base().experts_out(hidden, chosen, experts)
        own = lambda: self._base().experts_out(hidden, chosen, held.own)  # noqa: E731
        return self._asked(OUT, held, hidden, chosen, own, None, False, activated=False)

    def _base(self) -> Any:
        """The ops of the device, on this object."""
        return super()

    def _linear(self, x: Tensor, held: SplitWeight, kind: Activation | None = None, gated: bool = False) -> Tensor:
        own = lambda: _linear(self._base(), x, held.own, kind, gated)  # noqa: E731
        return self._asked(LINEAR, held, x, None, own, kind, gated, activated=kind is not None)

    def _asked(
        self,
        op: int,
        held: SplitWeight,
        x: Tensor,
        chosen: Tensor | None,
        own: Callable[[], Tensor],
        kind: Activation | None,
        gated: bool,
        activated: bool,
    ) -> Tensor:
        if not len(x):
            return x.new_empty(*(x.shape[:1] if chosen is None else chosen.shape), held.width(activated))
        rows, top = len(x), 0 if chosen is None else chosen.shape[1]
        middle = [0] if x.dim() == 2 else [x.shape[1]]
        words = [op, held.number, KINDS.index(kind), int(gated), int(self.fast), DTYPES.index(x.dtype)]
        words += [rows, *middle, x.shape[-1], top]
        leading = (rows,) if chosen is None else (rows, top)
        given = [x] if chosen is None else [x, chosen.long()]
        return held.join(held.ranks.ask(words, given, held, leading, x.dtype, own, activated), activated)


def _linear(ops: Any, x: Tensor, linear: Any, kind: Activation | None, gated: bool) -> Tensor:
    out: Tensor = ops.linear(x, linear) if kind is None else ops.linear_activate(x, linear, kind, gated)
    return out


@cache
def split_ops(kind: Any, fast: bool) -> Any:
    """A class of ops, divided over ranks. fast: those of the fast path"""
    return type(f"SplitWeight{kind.__name__}", (SplitOps, kind), {"fast": fast})


# ---- followers -------------------------------------------------------------------------------------------------------


class Follower:
    """Ranks 1, 2, ...: computes what it is asked, until rank 0 is gone."""

    def __init__(self, wire: Wire, device: torch.device) -> None:
        self.wire, self.device = wire, device
        self.slices: dict[int, Slice] = {}
        self._ops = cache(partial(row_ops, device.type))

    def serve(self) -> None:
        """Returns when rank 0 ends, or closes the connection."""
        with suppress(RuntimeError):
            word = json.loads(bytes(self._take((128,), torch.uint8, words=True).tolist()))
            dtype = getattr(torch, word["dtype"])
            self._warm(dtype)
            own = identity(self.device, dtype).encode()
            self._answer(torch.tensor([*own, *[32] * (256 - len(own))], dtype=torch.uint8))
            if word["nccl"]:
                self.wire.use_nccl(self.device)
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode())
            stack.enter_context(modes.canonical() if self.device.type == "cpu" else torch.cuda.device(self.device))
            while True:
                try:
                    words = self._take((HEADER,), torch.int64, words=True).tolist()
                except RuntimeError:  # the connection is closed
                    return self.wire.close()
                self._answer(self._computed(words))

    def _warm(self, dtype: torch.dtype) -> None:
        """Loads or compiles the kernels, which would make a first answer late."""
        piece, x = Slice(gated=False), torch.zeros(2, 32, dtype=dtype, device=self.device)
        piece.put("weight", torch.zeros(32, 32, dtype=dtype, device=self.device))
        self._ops(False).linear_activate(x, piece, "silu", gated=True)

    def _take(self, shape: tuple[int, ...], dtype: torch.dtype, words: bool = False) -> Tensor:
        work, out = self.wire.receive(shape, dtype, 0, words)
        if out.is_cuda:
            work.wait()  # for the stream, not the host
        else:
            work.wait(timedelta(days=1000))  # a notebook may rest
        return out

    def _answer(self, x: Tensor) -> None:
        held = self.wire.placed(x)
        self.wire.send(held, 0).wait()

    def _computed(self, words: list[int]) -> Tensor:
        op, number, *more = words
        if op == PUT:
            return self._put(number, *more)
        piece = self.slices[number]
        if op == FETCH:
            leaf, index, first, end, *_ = more
            held = getattr(piece, LEAVES[leaf])
            return (held if index < 0 else held[index])[first:end]
        kind, gated, fast, dtype, rows, middle, width, top, *_ = more
        x = self._take((rows, width) if not middle else (rows, middle, width), DTYPES[dtype]).to(self.device)
        chosen = self._take((rows, top), torch.int64).to(self.device) if top else None
        ops = self._ops(bool(fast))
        if op == HIDDEN:
            return ops.experts_hidden(x, chosen, piece, KINDS[kind])
        if op == OUT:
            return ops.experts_out(x, chosen, piece)
        return _linear(ops, x, piece, KINDS[kind], bool(gated))

    def _put(self, number: int, leaf: int, gated: int, dtype: int, dims: int, *shape: int) -> Tensor:
        given = self._take(shape[:dims], DTYPES[dtype])
        self.slices.setdefault(number, Slice(bool(gated))).put(LEAVES[leaf], given.to(self.device))
        return torch.tensor([number])


def row_ops(device: str, fast: bool, divided: bool = False) -> Any:
    """The ops of single rows on a device; divided: over ranks. They keep the weights that they have packed."""
    if device == "cpu":
        from replaylens.engine.passes.cpu import CpuRowOps, Products

        return (split_ops(CpuRowOps, fast) if divided else CpuRowOps)(Products(parts=1) if fast else Products())
    from replaylens.engine.passes import cuda

    kind = cuda.FastHeadOps if fast else cuda.HeadOps
    return (split_ops(kind, fast) if divided else kind)()


def follow(device: str) -> None:
    """Under torchrun: serve rank 0, then end this process."""
    number = int(os.environ.get("LOCAL_RANK", "0")) % max(1, torch.cuda.device_count())
    Follower(Wire(*of_torchrun(), 600.0), torch.device(f"cuda:{number}" if device == "cuda" else "cpu")).serve()
    raise SystemExit(0)


def main() -> None:
    """A follower on this machine, connected through the loopback device."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    for name, kind in (("rank", int), ("ranks", int), ("store", str), ("device", str), ("threads", int)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    started(Path(given.store).parent, given.rank).touch()
    wire = Wire(dist.FileStore(given.store, given.ranks), given.rank, given.ranks, "127.0.0.1", 600.0)
    Follower(wire, torch.device(given.device)).serve()
    shutil.rmtree(Path(given.store).parent, ignore_errors=True)  # rank 0 may have been killed


if __name__ == "__main__":
    main()
