import pytest
import torch

from replaylens.kernels import reference
from replaylens.kernels.capture import CaptureRing


def test_rows_arrive_as_they_were(case, same):
    width = 3000 if case.gpu else 70
    ring = CaptureRing(sites=2, rows=4, width=width, dtype=case.dtype, device=case.device)
    x, y, rows = case.randn(20, width), case.randn(3, width, seed=1), case.tensor([5, 3, 19])
    ring.host.fill_(float("nan"))
    ring.begin()
    ring.gather(0, x, rows)
    ring.gather(1, y)
    ticket = ring.commit(3)
    got = ring.read(ticket)
    same(got[0], reference.gather(x, rows).cpu())
    same(got[1], y.cpu())


def test_slots_are_used_in_turn_and_never_overwritten(case, same):
    ring = CaptureRing(sites=1, rows=2, width=8, dtype=case.dtype, device=case.device, slots=2)
    passes = [case.randn(2, 8, seed=i) for i in range(5)]
    tickets = []
    for i, x in enumerate(passes):
        if i >= 2:
            same(ring.read(tickets[i - 2])[0], passes[i - 2].cpu())
            ring.release(tickets[i - 2])
        ring.begin()
        ring.gather(0, x)
        tickets.append(ring.commit(2))
    with pytest.raises(RuntimeError, match="all 2 capture slots hold unread rows"):
        ring.begin()
    same(ring.read(tickets[4])[0], passes[4].cpu())
    ring.release(tickets[4])
    with pytest.raises(ValueError, match="released before"):
        ring.release(tickets[4])


def test_errors_say_what_is_wrong(case):
    ring = CaptureRing(1, 2, 8, case.dtype, case.device)
    with pytest.raises(ValueError, match="call begin first"):
        ring.commit(1)
    with pytest.raises(ValueError, match="3 rows do not fit"):
        ring.gather(0, case.randn(3, 8))
    with pytest.raises(ValueError, match="x has shape"):
        ring.gather(0, case.randn(2, 9))
    with pytest.raises(ValueError, match="site 1 of 1"):
        ring.gather(1, case.randn(2, 8))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_one_graph_serves_every_slot():
    ring = CaptureRing(1, 4, 64, torch.bfloat16, "cuda", slots=3)
    x = torch.randn(4, 64, device="cuda").bfloat16()
    ring.gather(0, x)  # compile before capturing
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ring.gather(0, x)
    for seed in range(3):
        x.copy_(torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)))
        ring.begin()
        graph.replay()
        ticket = ring.commit(4)
        want = torch.randn(4, 64, generator=torch.Generator().manual_seed(seed)).bfloat16()
        assert torch.equal(ring.read(ticket)[0], want)
