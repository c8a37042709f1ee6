"""Graphs are recorded while no garbage is collected, which may hold memory that must not be freed then."""

import gc
import signal
import threading
from collections import OrderedDict
from contextlib import nullcontext, suppress
from types import SimpleNamespace

import pytest
import torch

from replaylens.engine import terminal
from replaylens.engine.passes import graphs as module
from replaylens.engine.passes.graphs import kept, recorded
from replaylens.engine.terminal import held_collector


def test_the_collector_is_as_before_afterwards() -> None:
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError), held_collector():
        with held_collector():
            assert not gc.isenabled()
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
    gc.disable()
    try:
        with held_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_threads_whose_recordings_overlap() -> None:
    """The one that began first ends first: it must leave the collector off for the other, which turns it on again."""
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    seen = []

    def first() -> None:
        with held_collector():
            first_in.set()
            second_in.wait()
        seen.append(gc.isenabled())
        first_out.set()

    def second() -> None:
        first_in.wait()
        with held_collector():
            second_in.set()
            first_out.wait()

    threads = [threading.Thread(target=work) for work in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [False] and gc.isenabled()


def test_ctrl_c_leaves_the_collector_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pressed while the collector is being switched off: the block still runs as a whole, and the interrupt comes after it."""
    disable = gc.disable

    def pressed() -> None:
        disable()
        signal.raise_signal(signal.SIGINT)

    ran, before = [], signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a background job
    monkeypatch.setattr(gc, "disable", pressed)
    try:
        with pytest.raises(KeyboardInterrupt), held_collector():
            ran.append(True)
    finally:
        signal.signal(signal.SIGINT, before)
    monkeypatch.undo()
    assert ran and gc.isenabled() and not terminal._holders


def test_graphs_share_memory_and_the_least_recently_used_goes() -> None:
    class Fake:
        def __init__(self, pool: object) -> None:
            self.given, self.graph = pool, SimpleNamespace(pool=lambda: "shared")

    graphs: OrderedDict[str, Fake] = OrderedDict()
    a, b = (kept(graphs, key, Fake, 2) for key in "ab")
    assert (a.given, b.given) == (None, "shared") and kept(graphs, "a", Fake, 2) is a
    kept(graphs, "c", Fake, 2)
    assert list(graphs) == ["a", "c"], "b was not used since"
    with pytest.raises(ZeroDivisionError):
        kept(graphs, "d", lambda pool: 1 / 0, 2)
    assert list(graphs) == ["a", "c"]


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", [True, False])
def test_garbage_does_not_break_a_recording(mechanism: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: with the collector on, what it frees ends the recording."""

    class Part:
        """In a cycle with itself, as an engine's parts may be. Its end calls the driver, as the end of a graph does."""

        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            with suppress(RuntimeError):
                torch.cuda.synchronize()

    if not mechanism:
        monkeypatch.setattr(module, "held_collector", nullcontext)
    x, before = torch.zeros(4, device="cuda"), gc.get_threshold()

    def step() -> torch.Tensor:
        y = x + 1
        for _ in range(50 if torch.cuda.is_current_stream_capturing() else 0):
            Part()
            [[] for _ in range(9)]
        return y

    Part()
    gc.set_threshold(3)
    try:
        if mechanism:
            graph, y = recorded(step, runs=1)
            graph.replay()
            assert torch.equal(y, torch.ones(4, device="cuda"))
        else:
            with pytest.raises(RuntimeError, match="captur"):
                recorded(step, runs=1)
    finally:
        gc.set_threshold(*before)
        gc.collect()
        torch.cuda.synchronize()
