"""The machine: its cores, memory and disk as far as this process may use them; and the gate, which compares them with what a
call asks for, before any work."""

import math
import os
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replaylens.engine.errors import BadRequest, UnsupportedModel
from replaylens.engine.terminal import Later

if TYPE_CHECKING:
    import torch

    from replaylens.kernels import gpus
else:
    torch, gpus = Later("torch"), Later("replaylens.kernels.gpus")

# ---- parts ------------------------------------------------------------------------------------------------------------


def optional(name: str, what: str) -> Any:
    """A part of the package that an installation may leave out, by its dotted name. BadRequest without it: `what` needs it."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise
        raise BadRequest(f"{what} needs {name}, which is not installed. Install all of replaylens.") from None


# ---- facts ------------------------------------------------------------------------------------------------------------

GROUPS, OWN_GROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
MEMORY = Path("/proc/meminfo")


def cores() -> int:
    """The cores that this process may use, by its affinity and the quota of its control groups."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [int(quota) / int(period) for quota, period in _limits("cpu.max", "cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")]
    return max(1, min([here, *map(math.ceil, shares)]))


def total_memory() -> int:
    """The bytes of memory that this process may use, by the machine and its control groups."""
    here = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([here, *(int(most) for most, *_ in _limits("memory.max", "memory/memory.limit_in_bytes"))])


def free_memory() -> int:
    """The bytes of memory that this process may take without taking those of others: what nobody uses, or holds copies of files
    only, on the machine and within each control group."""
    free = [total_memory()]
    with suppress(OSError, KeyError):  # not Linux
        free.append(int(_table(MEMORY)["MemAvailable:"]) * 1024)
    names = [(group, "memory.max", "memory.current", "inactive_file") for group in _groups()]
    old = (GROUPS / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for folder, most, used, copies in (*names, old):
        with suppress(OSError, ValueError, KeyError):  # "max" is no limit
            limit, taken = (int((folder / name).read_text(encoding="utf-8")) for name in (most, used))
            free.append(limit - taken + int(_table(folder / "memory.stat")[copies]))
    return max(0, min(free))


def _table(file: Path) -> dict[str, str]:
    """The first two words of each line."""
    return {words[0]: words[1] for line in file.read_text(encoding="utf-8").splitlines() if len(words := line.split()) > 1}


def free_disk(path: str | Path) -> int:
    """The bytes that this user can write in the file system of a path, which need not exist."""
    place = Path(path).absolute()
    found = os.statvfs(next(each for each in (place, *place.parents) if each.exists()))
    return found.f_bavail * found.f_frsize


def _limits(unified: str, *apart: str) -> list[list[str]]:
    """The numbers of a limit of the control groups of this process: in one file of each group, or, in version 1, in `apart`."""
    limits = []
    for files in (*([group / unified] for group in _groups()), [GROUPS / each for each in apart] if OWN_GROUP.exists() else []):
        with suppress(OSError):
            words = [word for file in files for word in file.read_text(encoding="utf-8").split()]
            if words and all(word.isdigit() for word in words):  # "max" and -1 are none
                limits.append(words)
    return limits


def _groups() -> list[Path]:
    """The control group of this process, and those that it is in."""
    try:
        lines = OWN_GROUP.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    own = GROUPS / next((line[3:] for line in lines if line.startswith("0::")), "/").strip("/")
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(GROUPS)]


# ---- gate -------------------------------------------------------------------------------------------------------------
# What a call asks of this machine, compared with what there is before any work: processes, memory, room on the disk.

PER_CORE, FEWEST = 4, 8
"""processes, or threads, on each core, more of which only wait for each other; and on any machine"""
PROCESS_BYTES, EXAMPLE_BYTES = 1 << 28, 500
"""what a process with torch takes of memory, and an example at least"""


def require_room(
    what: str,
    *,
    processes: int = 0,
    threads: int = 0,
    on: int | None = None,
    memory: int = 0,
    disk: int = 0,
    path: str | Path = ".",
    error: type[Exception] = BadRequest,
) -> None:
    """The error if this machine has no room for what an option asks; `what` names it, as in ranks=99. Starts nothing.

    on            the cores of the machines that run the processes; default: those that this process may use
    memory, disk  bytes at least; disk: in the file system of `path`
    """
    if (asked := processes or threads) > 1:
        number = cores() if on is None else on
        most = max(FEWEST, PER_CORE * number)
        if asked > most:
            kind = "processes" if processes else "threads"
            raise error(
                f"{what} asks for {asked:,} {kind}, but there {_are(number, 'core')}, which take at most {most} (the "
                f"larger of {FEWEST} and {PER_CORE} on each core). Give at most {most}."
            )
        memory += processes * PROCESS_BYTES if on is None else 0
    if memory and memory > (held := total_memory()):
        raise error(f"{what} takes about {in_bytes(memory)} of memory, and there are {in_bytes(held)}. Give less.")
    if disk and disk > (free := free_disk(path)):
        raise error(
            f"{what} takes about {in_bytes(disk)}, and {str(path)[:200]} has room for {in_bytes(free)}. Give less, or another "
            "path."
        )


def in_bytes(count: int) -> str:
    """A number of bytes in the largest unit of which there is one."""
    exact = next((i for i in range(6, 0, -1) if count >= 1000**i), 0)
    return f"{count} bytes" if not exact else f"{count / 1000**exact:,.1f} {('', 'kB', 'MB', 'GB', 'TB', 'PB', 'EB')[exact]}"


def _are(count: int, what: str) -> str:
    return f"is {count} {what}" if count == 1 else f"are {count} {what}s"


# ---- a GPU -------------------------------------------------------------------------------------------------------------


def require_gpu(device: "torch.device") -> None:
    """UnsupportedModel for a GPU that no kernel is compiled for, BadRequest if the facts of an unknown one are imposed."""
    try:
        gpu = gpus.gpu_of(device)
    except ValueError as error:
        raise BadRequest(str(error)) from None
    if (reason := unsupported(gpu, torch.version.hip)) is not None:
        least = ".".join(map(str, gpus.OLDEST))
        raise UnsupportedModel(
            f"{reason} Kernels are compiled for NVIDIA GPUs of compute capability {least} and later (A100, RTX 30 and their "
            "successors). Use device='cpu', whose float32 has the same bits everywhere."
        )


def unsupported(gpu: "gpus.Gpu", hip: str | None) -> str | None:
    """Why no kernel runs on a GPU; None if they do."""
    if hip is not None:
        return f"{gpu.name} is an AMD GPU (ROCm {hip}), which is not supported."
    if gpu.capability < gpus.OLDEST:
        return f"{gpu.name} has compute capability {gpu.capability[0]}.{gpu.capability[1]}, which is not supported."
    return None
