"""Host memory and seconds of loading a checkpoint of 16 GB, bfloat16 shards, onto a CUDA device and onto the host.

    PYTHONPATH=src:. python -m benchmarks.loading_gpu [--layers 32] [--arms cuda host]

The checkpoint has the tensors of Llama-3.1-8B with random weights. It is written shard by shard to a temporary folder. Every
arm is a process of its own that loads it by `Engine.load` and generates a few tokens; its peak is the kernel's VmHWM, which
counts pages of mapped files that the process has touched. What imports and the CUDA context take is measured before and
subtracted.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.loading_cpu import make_checkpoint
from benchmarks.passes_cpu import status
from benchmarks.table import RESULTS, Table

ARMS = {"cuda": "onto a CUDA device", "host": "onto the host"}
AIM_MB = 2000.0
WRITERS = 8


def arm(where: str, folder: Path) -> dict[str, float]:
    """Load in this process. Memory in MB."""
    import transformers.models.llama.configuration_llama  # noqa: F401  (counted as imports)

    from replaylens import Engine
    from replaylens.engine.model import loading

    if where == "cuda":
        torch.zeros(1, device="cuda")
    base, begin = status("VmRSS"), time.perf_counter()
    if where == "cuda":
        engine = Engine.load(folder, device="cuda", dtype=torch.bfloat16, cache_tokens=256)
        model: torch.nn.Module = engine.model
    else:  # an engine would examine the shapes of its products first, for minutes
        model = loading.load(folder, torch.bfloat16)
    loaded, peak = time.perf_counter() - begin, status("VmHWM")
    held = sum(x.nbytes for x in model.state_dict().values()) / 1e6
    print(f"{where}: loaded in {loaded:.0f} s, peak {peak:.0f} MB", file=sys.stderr, flush=True)
    if where == "cuda":
        assert len(engine.prompt([1, 2, 3]).generate(4).tokens) == 7
    return {"imports_mb": base, "peak_mb": peak, "weights_mb": held, "seconds": loaded}


def run(where: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.loading_gpu", "--arm", where, "--folder", str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)  # errors are shown as they come
    if done.returncode:
        raise SystemExit(f"{where} failed")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(layers: int, arms: list[str], out: Path) -> None:
    device = torch.cuda.get_device_name() if "cuda" in arms else "no GPU"
    table = Table("loading-gpu", f"Loading bfloat16 shards of the Llama-3.1-8B shape, {layers} layers, {device}. MB", out=out)
    with tempfile.TemporaryDirectory() as name:
        folder, begin = Path(name), time.perf_counter()
        make_checkpoint(folder, layers, WRITERS)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e9
        print(f"{size:.2f} GB written in {time.perf_counter() - begin:.0f} s", flush=True)
        for where in arms:
            found = run(where, folder)
            beside = found["peak_mb"] - found["imports_mb"] - (found["weights_mb"] if where == "host" else 0.0)
            what = f"{size:.1f} GB {ARMS[where]}: host memory beside {'the loading' if where == 'host' else 'imports'}"
            table.add(what, aim="<= 2 GB", met=beside <= AIM_MB, beside_mb=beside, checkpoint_gb=size, **found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--arms", choices=list(ARMS), nargs="+", default=list(ARMS))
    parser.add_argument("--out", type=Path, default=RESULTS / "loading-gpu.json")
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(arm(given.arm, given.folder)))
    else:
        main(given.layers, given.arms, given.out)
