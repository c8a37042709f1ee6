"""The processes of an engine with ranks: how they start and end, and how they send each other tensors."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import replaylens
from replaylens.engine.errors import BadRequest, FingerprintMismatch, RankFailed

# ---- connections -----------------------------------------------------------------------------------------------------

START = 60.0
"""seconds that a process has at least until it answers"""


class Wire:
    """The connections of a rank to the others. Integers that say what comes go by gloo. Tensors go by NCCL, from GPU to GPU, if
    every rank has a GPU of its own, and otherwise by gloo through the host. Copies: no bit depends on the way."""

    def __init__(self, store: Any, rank: int, ranks: int, host: str, timeout: float) -> None:
        """A group of its own: an engine may be one of several, and others may use torch's default group."""
        gloo: Any = dist.ProcessGroupGloo
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname=host) if host else gloo.create_default_device()]
        options._timeout = timedelta(seconds=timeout)
        self.gloo = gloo(store, rank, ranks, options)
        self.device = torch.device("cpu")
        """where tensors are sent from"""
        self._nccl: Any = None
        self._new: Callable[[Any], Any] = lambda kind: kind(dist.PrefixStore("nccl", store), rank, ranks, kind.Options())

    def use_nccl(self, device: torch.device) -> None:
        """Mutates: tensors go from GPU to GPU from now on. All ranks must call it."""
        held = os.environ.get(_HANDLING)
        os.environ[_HANDLING] = "0"  # by default NCCL ends the process, here a notebook, when another rank is late
        try:
            self._nccl, self.device = self._new(dist.ProcessGroupNCCL), device
        finally:
            os.environ.pop(_HANDLING) if held is None else os.environ.update({_HANDLING: held})

    def placed(self, tensor: Tensor) -> Tensor:
        """A tensor as `send` takes it."""
        return tensor.detach().to(self.device).contiguous()

    def send(self, tensor: Tensor, rank: int) -> Any:
        """The work that sends a tensor; it must stay alive until the work is done."""
        group = self.gloo if tensor.device.type == "cpu" else self._nccl
        return group.send([tensor.view(-1).view(torch.uint8)], rank, 0)

    def receive(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int, words: bool = False) -> tuple[Any, Tensor]:
        """The work that receives a tensor, and the tensor. words: it says what comes, and is on the host"""
        out = torch.empty(shape, dtype=dtype, device="cpu" if words else self.device)
        group = self.gloo if out.device.type == "cpu" else self._nccl
        return group.recv([out.view(-1).view(torch.uint8)], rank, 0), out

    def wait(self, work: Any, seconds: float, gone: Callable[[], bool]) -> None:
        """Returns when a tensor is received. RuntimeError if it is not in time, or if the other process is gone."""
        if self._nccl is not None:  # its `wait` is for streams, or looks every 10 ms; gloo's works cannot be polled
            _poll(work, seconds, gone)
        work.wait(timedelta(seconds=seconds))

    def close(self) -> None:
        """End what is under way: a GPU would wait for a rank that is gone."""
        self.gloo, nccl, self._nccl = None, self._nccl, None
        if nccl is not None:
            ending = threading.Thread(target=_abort, args=([nccl],), daemon=True)  # which has the last reference
            del nccl
            ending.start()
            ending.join(_ABORTED)


_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_ABORTED = 5.0
"""seconds until a group is left that does not end"""


def _abort(held: list[Any]) -> None:
    with suppress(RuntimeError):
        held.pop().abort()


def _poll(work: Any, seconds: float, gone: Callable[[], bool]) -> None:
    """Returns when a work is done, or RuntimeError."""
    start = looked = time.monotonic()
    while not work.is_completed():
        now = time.monotonic()
        if now > start + seconds:
            raise RuntimeError("Timed out")
        if now > looked + 0.1:
            looked = now
            if gone():
                raise RuntimeError("The process ended.")
        if now > start + 0.01:  # a product takes less
            time.sleep(0.0001)


def own_gpus(ranks: int) -> bool:
    """Whether every rank has a GPU of its own, seen from rank 0."""
    here = int(os.environ["LOCAL_WORLD_SIZE"]) if launched() else ranks
    return dist.is_nccl_available() and here <= torch.cuda.device_count()


# ---- processes -------------------------------------------------------------------------------------------------------


def identity(device: torch.device, dtype: torch.dtype) -> str:
    """What must be the same on all ranks, besides weights. In float32, the machine does not matter."""
    parts = [replaylens.__version__, str(dtype)]
    if device.type == "cuda" and dtype != torch.float32:
        from importlib.metadata import version

        parts += [torch.cuda.get_device_name(device), torch.__version__, version("triton")]
    return ", ".join(parts)


_TAKEN: set[int] = set()
"""this process, once its followers by torchrun have an engine"""


class Followers:
    """The processes of ranks 1, 2, ... and the group of all ranks."""

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype, timeout: float) -> None:
        self.by_torchrun = launched() is not None
        if self.by_torchrun and _TAKEN:
            raise BadRequest("The processes that torchrun started serve one engine, which was loaded before. Use that one.")
        self.processes: list[subprocess.Popen[bytes]] = []
        self.folder = tempfile.TemporaryDirectory(prefix="replaylens-ranks-")  # for this user alone
        wait = max(timeout, START)
        try:
            if self.by_torchrun:
                _TAKEN.add(os.getpid())
                self.wire = Wire(*of_torchrun(), wait)
            else:
                path = str(Path(self.folder.name, "store"))
                for rank in range(1, size):
                    self._spawn(rank, size, path, device)
                self._await_start(wait)
                self.wire = Wire(dist.FileStore(path, size), 0, size, "127.0.0.1", wait)
            self._greet(size, device, dtype, wait)
        except BaseException as error:
            bad = [i + 1 for i, process in enumerate(self.processes) if process.poll() is not None] or [1]
            reason = self.reason(bad[0], error, wait)
            self.end(self, os.getpid())
            if isinstance(error, RuntimeError):
                raise RankFailed(f"The {size} ranks did not start: rank {bad[0]} {reason}. Nothing is left of them.") from error
            raise

    def _spawn(self, rank: int, size: int, store: str, device: torch.device) -> None:
        where = f"cuda:{((device.index or 0) + rank) % torch.cuda.device_count()}" if device.type == "cuda" else "cpu"
        threads = max(1, torch.get_num_threads() // size)
        given = ["--rank", rank, "--ranks", size, "--store", store, "--device", where, "--threads", threads]
        root = str(Path(replaylens.__file__).parents[1])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self._log(rank), "wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-P", "-m", "replaylens.extras.ranks", *map(str, given)],
                    env={**os.environ, "PYTHONPATH": paths},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for rank 0
                )
            )

    def _await_start(self, wait: float) -> None:
        """Returns once all have started; a group would wait in vain for one that cannot."""
        end, signs = time.monotonic() + wait, [started(self.folder.name, i + 1) for i in range(len(self.processes))]
        while not all(sign.exists() for sign in signs):
            if any(process.poll() is not None for process in self.processes):
                raise RuntimeError("A process ended.")
            if time.monotonic() > end:
                raise RuntimeError("Timed out")
            time.sleep(0.02)

    def _greet(self, size: int, device: torch.device, dtype: torch.dtype, wait: float) -> None:
        """All ranks compute alike, or FingerprintMismatch. They hear how tensors will be sent."""
        nccl, own = device.type == "cuda" and own_gpus(size), identity(device, dtype)
        word = json.dumps({"dtype": str(dtype).removeprefix("torch."), "nccl": nccl}).encode()
        hello = torch.tensor([*word, *[32] * (128 - len(word))], dtype=torch.uint8)
        sends = [self.wire.send(hello, rank) for rank in range(1, size)]  # all load their kernels at a time
        for rank in range(1, size):
            work, answer = self.wire.receive((256,), torch.uint8, rank, words=True)
            work.wait(timedelta(seconds=wait))
            sends[rank - 1].wait(timedelta(seconds=wait))
            theirs = bytes(answer.tolist()).decode().strip()
            if theirs != own:
                raise FingerprintMismatch(f"Rank {rank} would compute other bits: it has {theirs}, rank 0 {own}.")
        if nccl:
            self.wire.use_nccl(device)

    def gone(self, rank: int) -> bool:
        """Whether a process that was started here has ended."""
        return 0 < rank <= len(self.processes) and self.processes[rank - 1].poll() is not None

    def _log(self, rank: int) -> Path:
        return Path(self.folder.name, f"rank{rank}.log")

    def reason(self, rank: int, error: BaseException, limit: float) -> str:
        """Why a rank failed, as far as it can be known."""
        code = None
        if 0 < rank <= len(self.processes):
            with suppress(subprocess.TimeoutExpired):
                code = self.processes[rank - 1].wait(0.0 if "Timed out" in str(error) else 2.0)
        if code is not None:
            said = (
                self._log(rank).read_text(encoding="utf-8", errors="replace").strip().splitlines()
                if self._log(rank).exists()
                else []
            )
            return f"ended with exit code {code}{': ' + said[-1][:200] if said else ''}"
        if "Timed out" in str(error):
            return f"did not answer within {limit:g} s ({len(self.processes) + 1} processes on {os.cpu_count()} cores)"
        return f"failed ({type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''})"

    @staticmethod
    def end(followers: "Followers", owner: int) -> None:
        """End the processes that `owner` started. A copy of it, made by a fork, leaves them alone."""
        if os.getpid() != owner:
            return
        for process in followers.processes:
            process.kill()
            process.wait()
        if (wire := getattr(followers, "wire", None)) is not None:
            wire.close()  # under torchrun, followers end when their connection does
        with suppress(OSError):
            followers.folder.cleanup()


def started(folder: str | Path, rank: int) -> Path:
    """The file by which a follower says that its process runs."""
    return Path(folder, f"started{rank}")


def launched(wanted: int = 0) -> tuple[int, int] | None:
    """(rank, ranks) of a process that torchrun started; None: it did not. BadRequest unless it started as many as `wanted`."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if wanted and ranks != wanted:
        raise BadRequest(f"ranks={wanted} was given, and torchrun started {ranks} processes. Give ranks={ranks}.")
    return rank, ranks


def of_torchrun() -> tuple[Any, int, int, str]:
    from torch.distributed.rendezvous import rendezvous

    store, rank, ranks = next(iter(rendezvous("env://")))
    near = os.environ.get("MASTER_ADDR") in ("localhost", "127.0.0.1")
    return dist.PrefixStore("replaylens", store), rank, ranks, "127.0.0.1" if near else ""
