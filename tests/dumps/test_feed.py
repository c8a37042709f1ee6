"""The feed: every row once per epoch, in an order of the seed alone, resumed to the bit; a sparse autoencoder on it."""

import json
import math
import pickle
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from replaylens.dumps import feed as feeds
from replaylens.dumps import feed as orders
from replaylens.dumps.feed import RowOrder, permuted
from replaylens.dumps.reader import Dump
from replaylens.dumps.store import Store
from replaylens.engine.errors import BadRequest
from tests.devices import swept

SITE, OTHER = "blocks.1.hook_in", "blocks.0.mlp.hook_out"


@pytest.fixture(scope="module")
def remote(reference: Dump) -> Dump:
    store = Store("memory://feed")
    for name in reference.files.store.sizes():
        store.write(name, reference.files.store.read(name, 1 << 30))
    return Dump.open("memory://feed")


@pytest.fixture(params=["disk", "memory"])
def dump(request: pytest.FixtureRequest, reference: Dump, remote: Dump) -> Dump:
    return reference if request.param == "disk" else remote


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sizes at which a few hundred rows have many blocks, pools and reads."""
    monkeypatch.setattr(orders, "BLOCK_ROWS", 8)
    monkeypatch.setattr(orders, "POOL_BLOCKS", 4)
    monkeypatch.setattr(feeds, "_READ_BYTES", 5000)
    orders._chunk.cache_clear()
    yield
    orders._chunk.cache_clear()


def rows_of(batches: Iterable[dict[str, Tensor]]) -> list[int]:
    return [row for batch in batches for row in batch["row"].tolist()]


def same(mine: list[dict[str, Tensor]], yours: list[dict[str, Tensor]]) -> bool:
    return len(mine) == len(yours) and all(
        a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in zip(mine, yours, strict=True)
    )


# ---- the order ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["rows", "blocks", None])
@pytest.mark.parametrize("count", swept([1, 2, 7, 8, 9, 33, 200, 1001], 1, 8, 33))
def test_every_row_once_per_epoch(shuffle: str | None, count: int) -> None:
    order = RowOrder(count, seed=5, shuffle=shuffle)
    whole = order.rows(0, 3 * count)
    epochs = whole.reshape(3, count)
    assert (np.sort(epochs, axis=1) == np.arange(count)).all()
    pieces = [order.rows(first, min(first + 13, 3 * count)) for first in range(0, 3 * count, 13)]
    assert np.array_equal(np.concatenate(pieces), whole), "any part of it can be asked for"
    if count > 30:
        assert (shuffle is None) == np.array_equal(epochs[0], epochs[1]) == np.array_equal(epochs[0], np.arange(count))
        assert shuffle is None or not np.array_equal(whole, RowOrder(count, seed=6, shuffle=shuffle).rows(0, 3 * count))


def test_the_order_is_fixed_for_ever() -> None:
    """Integer arithmetic alone: these numbers hold on every machine and with every version."""
    assert RowOrder(1000, seed=0, shuffle="rows").rows(0, 8).tolist() == [47, 225, 604, 543, 20, 749, 461, 519]
    assert RowOrder(1000, seed=1, shuffle="rows").rows(1000, 1008).tolist() == [363, 623, 707, 139, 715, 794, 350, 25]


def test_orders_are_as_good_as_random() -> None:
    """Every row comes to every place equally often, and keeps no trace of its neighbours."""
    drawn = np.stack([RowOrder(40, seed, "rows").rows(0, 40) for seed in range(400)])
    table = np.stack([np.bincount(column, minlength=40) for column in drawn.T])  # [place, row]: 10 expected
    assert ((table - 10) ** 2 / 10).sum() < 1692  # chi-squared, 39 x 39 degrees of freedom, p = 0.001
    many = np.stack([RowOrder(500, seed, "rows").rows(0, 500) for seed in range(100)]).astype(float)
    place = np.mean([np.corrcoef(np.arange(500), each)[0, 1] for each in many])
    neighbour = np.mean([np.corrcoef(each[:-1], each[1:])[0, 1] for each in many])
    assert abs(place) < 4 / 500**0.5 / 10 and abs(neighbour) < 4 / 500**0.5 / 10


def test_a_weaker_network_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the test above: two rounds are not enough."""
    monkeypatch.setattr(orders, "_ROUNDS", 2)
    with pytest.raises(AssertionError):
        test_orders_are_as_good_as_random()


def test_blocks_stay_within_their_pools() -> None:
    """The rows of one pool come from a few whole blocks, so that they can be read together."""
    order = RowOrder(320, seed=3, shuffle="blocks")
    for first in range(0, 320, 32):
        rows = order.rows(first, first + 32)
        assert len(set(rows // 8)) == 4 and sorted(rows) != rows.tolist()
    assert len(set(RowOrder(320, seed=3, shuffle="rows").rows(0, 32) // 8)) > 8


def test_permutations_of_large_ranges() -> None:
    count = (1 << 40) + 12345
    found = permuted(np.arange(1000, dtype=np.uint64), count, key=7)
    assert len(set(found.tolist())) == 1000 and found.max() < count and found.max() > count // 2


# ---- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["rows", "blocks", None])
def test_batches_hold_the_rows_they_name(dump: Dump, shuffle: str | None) -> None:
    batches = list(dump.feed([("S", 1), "blocks.0.mlp.hook_out", ("Z.kl", 1)], batch_size=17, seed=4, shuffle=shuffle))
    assert sorted(rows_of(batches)) == list(range(len(dump)))
    assert {len(batch["row"]) for batch in batches[:-1]} == {17} and list(batches[0]) == ["row", SITE, OTHER, "Z.kl.1"]
    wanted = {SITE: dump.to_torch("S", 1), OTHER: dump.to_torch(OTHER), "Z.kl.1": dump.to_torch("Z.kl", 1)}
    for batch in batches:
        assert all(torch.equal(batch[name], x[batch["row"]]) for name, x in wanted.items())


@pytest.mark.parametrize("shuffle", ["rows", "blocks", None])
def test_the_row_sequence_depends_on_the_seed_alone(dump: Dump, shuffle: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on batch size, sites, rows read at a time, or the store; another seed gives another sequence."""
    first = rows_of(dump.feed("S", batch_size=17, seed=4, shuffle=shuffle))
    for size in (1, 16, 10**6):
        assert rows_of(dump.feed(SITE, batch_size=size, seed=4, shuffle=shuffle)) == first
    monkeypatch.setattr(feeds, "_READ_BYTES", 1 << 20)
    assert rows_of(dump.feed(SITE, batch_size=17, seed=4, shuffle=shuffle)) == first
    assert (rows_of(dump.feed(SITE, batch_size=17, seed=5, shuffle=shuffle)) == first) == (shuffle is None)


def test_epochs(reference: Dump) -> None:
    """Each in an order of its own. Batches run on from one into the next; a later iteration goes on with the next epoch."""
    count = len(reference)
    both = rows_of(reference.feed(SITE, batch_size=17, seed=4, epochs=2))
    feed = reference.feed(SITE, batch_size=16, seed=4)
    assert (
        rows_of(feed) + rows_of(feed) == both and sorted(both[:count]) == sorted(both[count:]) != both[:count] != both[count:]
    )
    feed.set_epoch(1)
    assert rows_of(feed) == both[count:] and len(feed) == len(list(feed)) == -(-count // 16)
    endless = reference.feed(SITE, batch_size=17, seed=4, epochs=None)
    drawn = list(islice(endless, 3 * count // 17))
    assert all(len(batch["row"]) == 17 for batch in drawn) and rows_of(drawn)[: 2 * count] == both
    with pytest.raises(TypeError, match="no end"):
        len(endless)


def test_drop_last(reference: Dump) -> None:
    feed = reference.feed(SITE, batch_size=17, seed=4, drop_last=True)
    whole = rows_of(reference.feed(SITE, batch_size=17, seed=4))
    assert rows_of(feed) == whole[: len(feed) * 17] and len(reference) % 17
    assert feed.state_dict()["position"] == len(reference), "the rest is passed, not kept for the next epoch"


def test_filtered_rows(dump: Dump) -> None:
    """Rows are numbered as in the view's own index."""
    view = dump.where(accepted=False)
    batches = list(view.feed(SITE, batch_size=9, seed=1))
    assert sorted(rows_of(batches)) == list(range(len(view)))
    assert all(torch.equal(batch[SITE], view.to_torch(SITE)[batch["row"]]) for batch in batches)


def test_batches_are_the_caller_s_own(reference: Dump) -> None:
    feed = reference.feed(SITE, batch_size=9, seed=1)
    for batch in feed:
        batch[SITE].zero_()
    assert all(batch[SITE].any() for batch in feed)


# ---- workers --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_workers_give_the_same_batches(reference: Dump, workers: int) -> None:
    """Each row once over all workers, in the same batches and the same order as one process; also from torch's own loader."""
    alone = list(reference.feed(["S", OTHER], batch_size=17, seed=4))
    feed = reference.feed(["S", OTHER], batch_size=17, seed=4)
    assert same(list(feed.loader(workers=workers)), alone)
    assert feed.state_dict()["position"] == len(reference), "the loader counts what was handed out"
    fresh = reference.feed(["S", OTHER], batch_size=17, seed=4)
    assert same(list(DataLoader(fresh, batch_size=None, num_workers=workers)), alone)


def test_resumed_with_workers(reference: Dump) -> None:
    """What the workers have read ahead is not lost: the state says what was handed out."""
    whole = list(reference.feed(SITE, batch_size=17, seed=4))
    feed = reference.feed(SITE, batch_size=17, seed=4)
    batches = feed.loader(workers=2)
    begin = [next(batches) for _ in range(3)]
    state = feed.state_dict()
    batches.close()
    after = reference.feed(SITE, batch_size=17, seed=4)
    after.load_state_dict(state)
    assert same(begin + list(after.loader(workers=1)), whole)


def test_sent_to_another_process(remote: Dump, reference: Dump) -> None:
    """As a worker that is spawned gets it; filters may be functions."""
    feed = reference.where(lambda f: f.position > 3).feed(SITE, batch_size=17, seed=4)
    sent = pickle.loads(pickle.dumps(feed))  # noqa: S301
    assert same(list(sent), list(feed))


# ---- resuming -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", ["rows", "blocks", None])
@pytest.mark.parametrize("done", swept([0, 1, 5, -1], 0, 5))
def test_resumed_to_the_bit(dump: Dump, shuffle: str | None, done: int) -> None:
    """The state goes through JSON; the remaining batches are those of the run that was not interrupted."""
    options: dict[str, Any] = {"batch_size": 17, "seed": 4, "shuffle": shuffle, "epochs": 2}
    whole = list(dump.feed(SITE, **options))
    feed = dump.feed(SITE, **options)
    begin = list(islice(feed, done % len(whole)))
    state = json.loads(json.dumps(feed.state_dict()))
    after = dump.feed(SITE, **options)
    after.load_state_dict(state)
    assert same(begin + list(after), whole)


def test_resumed_with_another_batch_size(reference: Dump) -> None:
    """Batch sizes only cut the sequence."""
    feed = reference.feed(SITE, batch_size=17, seed=4)
    begin = list(islice(feed, 4))
    after = reference.feed(SITE, batch_size=50, seed=4)
    after.load_state_dict(feed.state_dict())
    assert rows_of(begin) + rows_of(after) == rows_of(reference.feed(SITE, seed=4))


def test_a_state_of_another_order_is_refused(reference: Dump) -> None:
    feed = reference.feed(SITE, seed=4)
    state = feed.state_dict()
    for other in (
        reference.feed(SITE, seed=5),
        reference.feed(SITE, seed=4, shuffle="blocks"),
        reference.where(accepted=True).feed(SITE, seed=4),
    ):
        with pytest.raises(BadRequest, match="another order of rows"):
            other.load_state_dict(state)
    for wrong in ({}, None, {**state, "more": 1}):
        with pytest.raises(BadRequest, match="state_dict"):
            feed.load_state_dict(wrong)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="position"):
        feed.load_state_dict({**state, "position": -1})


def test_invalid_options(reference: Dump) -> None:
    for options in ({"batch_size": 0}, {"seed": -1}, {"shuffle": "wild"}, {"epochs": 0}, {"drop_last": "no"}):
        with pytest.raises(BadRequest, match=next(iter(options))):
            reference.feed(SITE, **options)  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="nothing to feed"):
        reference.where(example=10**6).feed(SITE)
    with pytest.raises(BadRequest, match="Invalid site"):
        reference.feed("S").activations()


# ---- a sparse autoencoder -------------------------------------------------------------------------------------------


class SparseAutoencoder:
    """A tiny one, with Adam; its state is all that training depends on besides the batches."""

    def __init__(self, width: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(width, 48, generator=draw) / 6, torch.zeros(48), torch.randn(48, width, generator=draw) / 6]
        self.weights = [w.requires_grad_() for w in self.weights]
        self.adam = torch.optim.Adam(self.weights, lr=3e-3)

    def loss(self, x: Tensor) -> Tensor:
        encoder, bias, decoder = self.weights
        code = (x @ encoder + bias).relu()
        return (code @ decoder - x).square().sum(-1).mean() + 0.01 * code.abs().sum(-1).mean()

    def train(self, batches: Iterable[Tensor], steps: int) -> "SparseAutoencoder":
        for _, x in zip(range(steps), batches, strict=False):
            self.adam.zero_grad()
            self.loss(x).backward()
            self.adam.step()
        return self

    def state(self) -> dict[str, Any]:
        return {"weights": [w.detach().clone() for w in self.weights], "adam": self.adam.state_dict()}

    def load(self, state: dict[str, Any]) -> "SparseAutoencoder":
        with torch.no_grad():
            for mine, saved in zip(self.weights, state["weights"], strict=True):
                mine.copy_(saved)
        self.adam.load_state_dict(state["adam"])
        return self

    def equals(self, other: "SparseAutoencoder") -> bool:
        return all(torch.equal(a, b) for a, b in zip(self.weights, other.weights, strict=True))


@pytest.mark.slow
def test_a_sparse_autoencoder_trained_from_the_feed(reference: Dump, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal bits without an interruption and with one, from one process and from workers, and however much is read at a time.
    Another seed gives other bits. And it learns."""
    make = dict(batch_size=32, seed=4, epochs=None)
    rows = reference.to_torch(SITE)
    with torch.no_grad():
        before = float(SparseAutoencoder(32, 0).loss(rows))
    whole = SparseAutoencoder(32, 0).train(reference.feed(SITE, **make).activations(), 40)  # type: ignore[arg-type]
    with torch.no_grad():
        assert float(whole.loss(rows)) < before / 2
    feed = reference.feed(SITE, **make)  # type: ignore[arg-type]
    half = SparseAutoencoder(32, 0).train(feed.activations(), 23)
    saved, state = half.state(), feed.state_dict()
    again = reference.feed(SITE, **make)  # type: ignore[arg-type]
    again.load_state_dict(state)
    assert SparseAutoencoder(32, 1).load(saved).train(again.activations(), 17).equals(whole)
    monkeypatch.setattr(feeds, "_READ_BYTES", 1 << 22)
    loader = reference.feed(SITE, **make).loader(workers=2)  # type: ignore[arg-type]
    assert SparseAutoencoder(32, 0).train((batch[SITE] for batch in loader), 40).equals(whole)
    loader.close()
    other = reference.feed(SITE, batch_size=32, seed=5, epochs=None)
    assert not SparseAutoencoder(32, 0).train(other.activations(), 40).equals(whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int32])
@pytest.mark.parametrize("shape", [(3,), (3, 2), (2, 3, 2)])
def test_arrow_has_the_numbers_of_a_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Without loss, also of numbers that a half cannot hold."""
    x = (torch.arange(math.prod(shape)).reshape(shape) * 10_000 + 3).to(dtype)
    if dtype is torch.bfloat16:
        x[..., 0] = 1e30
    if dtype is not torch.float16:
        assert feeds._arrow(x).to_pylist() == x.tolist()
    else:
        assert [np.array(row, dtype=np.float64).tolist() for row in feeds._arrow(x).to_pylist()] == x.double().tolist()
