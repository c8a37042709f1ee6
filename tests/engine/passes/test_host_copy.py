"""Transfer of captured rows to the host. Without a device, the copy into the ring is an ordinary one; the rest is the same."""

import gc
import threading
import time
from collections.abc import Sequence

import pytest
import torch

from replaylens.engine.errors import InternalError
from replaylens.engine.passes import bursts, transfer
from replaylens.engine.passes.bursts import ENOUGH, BurstRows, StepBlock, step_buffers
from replaylens.engine.passes.runner import SMALLEST_RING
from replaylens.engine.passes.transfer import HostCopy, Memory, PendingRows, RingAllocator
from replaylens.engine.request.capture import Chunk, Recording, picked


def groups(seed: int, rows: int = 5):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(3, rows, 700, generator=generator)
    return [(("a", "b", "c"), wide), (("d",), torch.randint(0, 9, (1, rows, 2), generator=generator, dtype=torch.int32))]


def test_everything_arrives_through_a_ring_that_is_smaller():
    host_copy = HostCopy("cpu", SMALLEST_RING)
    sent = [(host_copy.send(groups(seed)), groups(seed)) for seed in range(40)]
    host_copy.wait()
    assert host_copy.ring.in_use == 0
    for block, truth in sent:
        for names, x in truth:
            assert all(torch.equal(block[name], x[i]) for i, name in enumerate(names))


@pytest.mark.parametrize(("made", "used"), [(True, False), (False, True)])
def test_rows_are_sent_inside_and_outside_inference_mode(made, used):
    """The first rows may come from a decode graph, which runs in inference mode, and the next from a pass, which does not."""
    with torch.inference_mode(made):
        host_copy = HostCopy("cpu", SMALLEST_RING)
        first = host_copy.send(groups(0))
    with torch.inference_mode(used):
        second = host_copy.send(groups(1))
    host_copy.wait()
    for block, seed in ((first, 0), (second, 1)):
        assert all(torch.equal(block[name], x[i]) for names, x in groups(seed) for i, name in enumerate(names))
        assert not any(block[name].is_inference() for names, _ in groups(seed) for name in names)


def test_sending_waits_while_the_ring_is_full(monkeypatch):
    """Back-pressure: while the carriers are held up, at most one ring of rows is in flight, and nothing is lost."""
    go_on = threading.Event()
    carry = transfer._carry
    monkeypatch.setattr(transfer, "_carry", lambda *args: (go_on.wait(), carry(*args)))
    host_copy, sent = HostCopy("cpu", SMALLEST_RING), []
    sender = threading.Thread(target=lambda: sent.extend(host_copy.send(groups(seed)) for seed in range(20)))
    sender.start()
    time.sleep(0.2)
    assert sender.is_alive() and 0 < host_copy.ring.in_use <= SMALLEST_RING and len(sent) < 20
    go_on.set()
    sender.join()
    assert all(torch.equal(block["b"], groups(seed)[0][1][1]) for seed, block in enumerate(sent))


def test_what_goes_wrong_on_the_way_is_raised_where_rows_are_read(monkeypatch):
    def broken(*args):
        raise MemoryError("no room for rows")

    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_carry", broken)
        host_copy = HostCopy("cpu", SMALLEST_RING)
        block = host_copy.send(groups(0))
        with pytest.raises(MemoryError, match="no room for rows"):
            block["a"]
    assert torch.equal(host_copy.send(groups(1))["a"], groups(1)[0][1][0])  # later rows still arrive


def test_the_threads_end_with_the_host_copy():
    host_copy = HostCopy("cpu", SMALLEST_RING)
    threads = host_copy._threads
    host_copy.send(groups(0)).wait()
    del host_copy
    gc.collect()
    for thread in threads:
        thread.join(timeout=5)
    assert not any(thread.is_alive() for thread in threads)


def test_a_few_long_lived_rows_let_go_of_the_others():
    host_copy = HostCopy("cpu", 1 << 20)
    block = host_copy.send(groups(0, rows=100))
    views = [block.view(("a", "d"), i, i + 1) for i in range(100)]
    kept = views[7]
    truth = {site: kept[site].clone() for site in kept}
    views.clear()
    gc.collect()
    host_copy.send(groups(1))
    assert kept._block is None and all(torch.equal(kept[site], truth[site]) for site in ("a", "d"))


def test_a_ring_gives_out_every_place_once():
    ring = RingAllocator(100)
    first, second = ring.take(40), ring.take(40)
    assert (first.start, second.start) == (0, 40)
    waited = threading.Thread(target=lambda: ring.wait(30))
    waited.start()
    ring.give_back(second)  # not free yet: an earlier slot is in use
    waited.join(timeout=0.1)
    assert waited.is_alive() and ring.in_use == 80
    ring.give_back(first)
    waited.join()
    assert ring.in_use == 0 and ring.take(30).start == 0
    with pytest.raises(InternalError):
        ring.wait(101)


def test_memory_is_used_again_up_to_its_limit():
    memory, like = Memory(limit=5 << 21), torch.empty(1 << 21, dtype=torch.uint8)
    first = memory.like(like)
    place = first.data_ptr()
    view = first[10:]
    del first
    assert memory.like(like).data_ptr() != place  # still referenced
    del view
    assert memory.like(like).data_ptr() == place
    many = [memory.like(like) for _ in range(9)]
    many.clear()
    assert memory._kept <= memory.limit


def test_small_groups_travel_together(monkeypatch):
    """Three small groups are one piece; a group beyond the limit travels alone, in as many pieces as it needs."""
    host_copy, sent = HostCopy("cpu", 32 * 4096), []
    send = host_copy._send
    monkeypatch.setattr(host_copy, "_send", lambda block, parts: (sent.append([len(x) for x, _ in parts]), send(block, parts)))
    small = [((name,), torch.full((1, 2, 100), float(i))) for i, name in enumerate("abc")]
    block = host_copy.send([*small, (("d",), torch.arange(2500.0).view(1, 1, -1))])
    assert [block[name].flatten()[0].item() for name in "abc"] == [0, 1, 2]
    assert torch.equal(block["d"], torch.arange(2500.0).view(1, -1))
    assert sent == [[800, 800, 800], [4096], [4096], [1808]]
    sent.clear()
    block = host_copy.send(
        [(("e",), torch.ones(1, 1, 1000)), (("f",), torch.full((1, 1, 8), 2.0)), (("g",), torch.ones(1, 1, 8))]
    )
    assert sent == [[4000, 32], [32]] and block["f"].eq(2).all(), "a tiny one goes with its neighbour, and only one"


def test_its_end_carries_what_was_sent(monkeypatch):
    """As at the end of the process: rows under way arrive, and no thread is left within a call."""
    carry = transfer._carry
    monkeypatch.setattr(transfer, "_carry", lambda *args: (time.sleep(0.02), carry(*args)))
    host_copy = HostCopy("cpu", SMALLEST_RING)
    sent = [host_copy.send(groups(seed)) for seed in range(6)]
    host_copy.end(30.0)
    assert host_copy.ring.in_use == 0 and not any(thread.is_alive() for thread in host_copy._threads)
    assert all(torch.equal(block["b"], groups(seed)[0][1][1]) for seed, block in enumerate(sent))


def test_its_end_does_not_wait_for_ever(monkeypatch):
    stuck = threading.Event()
    monkeypatch.setattr(transfer, "_carry", lambda *args: stuck.wait())
    host_copy = HostCopy("cpu", SMALLEST_RING)
    host_copy.send(groups(0))
    begin = time.monotonic()
    host_copy.end(0.2)
    assert time.monotonic() - begin < 5
    stuck.set()


def test_nothing_is_sent_after_the_end():
    host_copy = HostCopy("cpu", SMALLEST_RING)
    host_copy.end(30.0)
    with pytest.raises(InternalError, match="have ended"):
        host_copy.send(groups(0))


def test_rows_that_are_lost_trouble_their_own_readers_only(monkeypatch):
    """A block of which few rows are left is compacted by the next send, which must not raise what went wrong with it."""

    def broken(*args):
        raise MemoryError("no room for rows")

    host_copy = HostCopy("cpu", 1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(transfer, "_carry", broken)
        block = host_copy.send(groups(0, rows=100))
        views = [block.view(("a",), i, i + 1) for i in range(100)]
        assert block.lost
    kept = views[7]
    views.clear()
    gc.collect()
    assert torch.equal(host_copy.send(groups(1))["a"], groups(1)[0][1][0])
    with pytest.raises(MemoryError, match="no room for rows"):
        kept["a"]


def test_threads_of_a_dropped_engine_end_before_the_process() -> None:
    """The last reference goes at the end of a script: what its threads still do is waited for, or the process aborts."""
    host_copy = HostCopy("cpu", 1 << 16)
    began, free = threading.Event(), threading.Event()

    def slow() -> None:
        began.set()
        free.wait(10)

    place = host_copy.ring.take(256)
    host_copy._pieces.put(transfer._Piece(transfer.PendingRows([], 1, lambda _: None), place, slow, []))
    threads = host_copy._threads
    began.wait(10)
    del host_copy
    gc.collect()
    assert any(thread.is_alive() for thread in threads)
    free.set()
    transfer._end_all()
    assert not any(thread.is_alive() for thread in threads)


# ---- rows of bursts ---------------------------------------------------------------------------------------------------
# Rows of bursts: whole, picked, and after the burst has let go of them.

SITES = ("blocks.0.hook_out", "blocks.1.hook_out")
STEPS = 5


HELD: list[Sequence[int]] = [range(3), range(3), range(3), [1, 2], [1, 2]]
"""three requests in five steps; the last two steps hold the second and third only"""


def burst_of_three(enough: int) -> tuple[BurstRows, torch.Tensor]:
    """A burst whose blocks have at most `enough` bytes, and what is in it: [sites, requests, steps, width]."""
    values = torch.arange(2.0 * 3 * STEPS * 4).view(2, 3, STEPS, 4)
    burst = BurstRows(3, lambda rows: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bursts, "ENOUGH", enough)
        found = step_buffers(HELD, row_bytes=2 * 4 * 4)
    for each in found:
        for step in each.steps:
            assert each.add(step, [(SITES, values[:, :, step])]) == (step == each.steps[-1])
        burst.blocks["host"].append(StepBlock(PendingRows(each.groups, 0), each.held, len(each.steps)))
    return burst, values


def test_steps_with_the_same_requests_travel_together() -> None:
    assert [(p.steps, p.held) for p in step_buffers(HELD, 1)] == [(range(3), range(3)), (range(3, 5), [1, 2])]
    one_by_one = step_buffers(HELD, ENOUGH)
    assert [p.steps for p in one_by_one] == [range(i, i + 1) for i in range(STEPS)]
    assert [p.steps for p in step_buffers([[], [0], [], [0], [0]], 1)] == [range(1, 2), range(3, 5)]
    assert [(p.steps, p.held) for p in step_buffers([[0], [1], [1]], 1)] == [(range(1), [0]), (range(1, 3), [1])]
    assert max(len(p.steps) for p in step_buffers([range(1)] * 99, ENOUGH // 7)) == 7


@pytest.mark.parametrize("enough", [1, 200, ENOUGH])
def test_picked_rows_are_those_of_the_whole(enough: int) -> None:
    burst, values = burst_of_three(enough)
    view = burst.view(2, "host", {site: site for site in SITES})
    for _ in range(2):  # out of the burst, then out of the view's own copy
        for number, site in enumerate(SITES):
            for row in (4, 0, 4):
                block, at, names = view.place(row)
                assert torch.equal(block[site if names is None else names[site]][at], values[number, 2, row])
        assert torch.equal(view[SITES[1]], values[1, 2])


def test_rows_of_several_recordings_are_picked_together() -> None:
    """Requests 0 and 2 of one burst under another name, one recording without a row, one that is not asked, one of its own."""
    burst, values = burst_of_three(ENOUGH)
    recordings: list[Recording | None] = []
    for request in (2, 0):
        recordings.append(Recording(5))
        recordings[-1].add(Chunk(5, 5 + STEPS, range(5, 5 + STEPS), burst.view(request, "host", {"x": SITES[1]})))
    own, third = Recording(5), recordings[1]
    own.append(5, {"x": torch.ones(2, 4)})
    found = picked([*recordings, None, third, own], [[8, 5], [6], [], [], [6, 6]])
    assert torch.equal(found[0]["x"], values[1, 2, [3, 0]]) and torch.equal(found[1]["x"], values[1, 0, 1:2])
    assert found[2] == found[3] == {} and torch.equal(found[4]["x"], torch.ones(2, 4))
    found[0]["x"].zero_()
    assert values[1, 2, 3].any() and not torch.equal(found[0]["x"], burst.view(2, "host", {"x": SITES[1]})["x"][[3, 0]])


def test_a_recording_picks_positions_out_of_all_kinds_of_chunks() -> None:
    burst, values = burst_of_three(ENOUGH)
    recording = Recording(10)
    recording.append(10, {site: values[i, 1, :2] + 1000 for i, site in enumerate(SITES)})
    view = burst.view(1, "host", {site: site for site in SITES})
    recording.add(Chunk(11, 11 + STEPS, range(11, 11 + STEPS), view))  # replaces position 11
    recording.truncate(15)
    for positions in ([10], [14, 10, 12], [12, 12], list(range(10, 15)), []):
        (found,) = picked([recording], [positions])
        assert set(found) == (set(SITES) if positions else set())
        for site, rows in found.items():
            assert torch.equal(rows, recording.peek(site)[[position - 10 for position in positions]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("together", [False, True])
def test_many_rows_of_one_block_are_picked(dtype: torch.dtype, together: bool) -> None:
    whole = torch.randn(60, 3, 5).to(dtype)
    sliced, strided = Recording(), Recording()
    sliced.append(0, {"x": whole, "blocks.0.attn.hook_pattern": whole})
    strided.append(0, {"x": whole.mT.contiguous().mT, "blocks.0.attn.hook_pattern": whole})
    positions = [[p * 7 % 60 for p in range(40)], [59, 3], list(range(20))]
    found = picked([sliced, strided, sliced], positions, together)
    for rows, own in zip(found, positions, strict=True):
        assert torch.equal(rows["x"], whole[own])
        assert torch.equal(rows["blocks.0.attn.hook_pattern"][..., :5], whole[own])
    stores = {rows["x"].untyped_storage().data_ptr() for rows in found}
    assert len(stores) == (1 if together else 3)


def test_keys_are_padded_as_in_the_whole() -> None:
    site = "blocks.0.attn.hook_pattern"
    recording = Recording(0)
    recording.append(0, {site: torch.rand(2, 3, 2)})
    recording.append(2, {site: torch.rand(1, 3, 16)})
    longer = Recording(0)
    longer.append(0, {site: torch.rand(4, 3, 4)})
    found = picked([recording, longer, recording], [[2, 1], [3], [0]])
    assert torch.equal(found[0][site], recording.peek(site)[[2, 1]]) and torch.equal(found[1][site], longer.peek(site)[3:])
    assert found[2][site].shape == (1, 3, 3)


def test_lost_rows_stay_with_their_burst() -> None:
    """When few views are left, the others move out before the next burst; what was lost must not end that one."""
    burst, _ = burst_of_three(ENOUGH)
    lost = PendingRows([(SITES, torch.zeros(2, 2, 4))], 1)
    lost.landed(MemoryError("no room for rows"))
    burst.blocks["host"].append(StepBlock(lost, [1, 2], 1))
    view = burst.view(1, "host", {site: site for site in SITES})
    burst.compact()
    with pytest.raises(MemoryError, match="no room for rows"):
        view.own()
