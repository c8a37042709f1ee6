"""`recorded`: what a function launches on a CUDA device, as a graph to replay; `kept`: such graphs by key, up to a number."""

import gc
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from replaylens.engine.interrupts import held_interrupt
from replaylens.kernels import launch

T = TypeVar("T")
K = TypeVar("K")
G = TypeVar("G", bound="Holder")

_lock = threading.Lock()
_holders = 0
_was_on = False


@contextmanager
def held_collector() -> Iterator[None]:
    """No cycles are collected within, in any thread. Afterwards the collector is as it was.

    Tensors, graphs and pinned memory of an engine that is gone may wait in a cycle. The driver refuses to free them while
    this thread records, and drops the recording.
    """
    global _holders, _was_on
    with held_interrupt():  # half of this would leave the collector off for good
        with _lock:
            if not _holders:
                _was_on = gc.isenabled()
                gc.disable()
            _holders += 1
        try:
            yield
        finally:
            with _lock:
                _holders -= 1
                if not _holders and _was_on:
                    gc.enable()


class Holder(Protocol):
    """What holds a recorded graph."""

    graph: torch.cuda.CUDAGraph


def kept(graphs: OrderedDict[K, G], key: K, make: Callable[[Any], G], most: int) -> G:
    """What is kept under a key. Mutates: made at first use, `make(pool)`, in the memory of the others; beyond `most`, the least
    recently used one is dropped."""
    if key not in graphs:
        graphs[key] = make(next(iter(graphs.values())).graph.pool() if graphs else None)
        if len(graphs) > most:
            graphs.popitem(last=False)
    graphs.move_to_end(key)
    return graphs[key]


def recorded(step: Callable[[], T], runs: int, pool: Any = None) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of what `step` launches, and what it returns: tensors that every replay writes.

    runs  of the step beforehand, which compile its kernels
    pool  torch's handle to the memory of other graphs, to share
    """
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # the inputs are being written there
    with launch.in_graph():
        with torch.cuda.stream(stream):
            for _ in range(runs):
                step()
        stream.synchronize()
        # thread_local: other threads wait for captured rows meanwhile, which a global recording would take for an error
        with held_collector(), torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            found = step()
    return graph, found
