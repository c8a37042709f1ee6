"""`shared_gpu`: several processes on one GPU at a time, if NVIDIA's multi-process service works."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared_gpu(wanted: bool) -> Iterator[None]:
    """Within this context, processes run concurrently on the GPU, or take turns if the service fails. Prints which."""
    control, folder = shutil.which("nvidia-cuda-mps-control"), Path("/tmp/mps")
    if not wanted or control is None:
        print("no multi-process service: the runs take turns", flush=True)
        yield
        return
    folder.mkdir(exist_ok=True)
    settings = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in settings.values():
        Path(path).mkdir(exist_ok=True)
    os.environ |= settings
    probe = [sys.executable, "-c", "import torch; x = torch.ones(64, 64, device='cuda'); assert float((x @ x).sum()) == 64**3"]
    try:
        subprocess.run([control, "-d"], check=True, timeout=20)
        subprocess.run(probe, check=True, timeout=60)
        print("multi-process service is on", flush=True)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"the multi-process service does not work here ({error}): the runs take turns", flush=True)
        _quit(control, settings)
    try:
        yield
    finally:
        if os.environ.keys() >= settings.keys():
            _quit(control, settings)


def _quit(control: str, settings: dict[str, str]) -> None:
    try:
        subprocess.run([control], input=b"quit\n", timeout=20, check=False)
    except (subprocess.SubprocessError, OSError) as error:
        print(f"could not end the multi-process service: {error}", flush=True)
    for name in settings:
        del os.environ[name]
