"""Run the kernel tests on the device, all files and dtypes at once, then every kernel benchmark, one after the other.

PYTHONPATH=src:. python -m benchmarks.kernels.check_and_time [kernel ...]
"""

import subprocess
import sys
import time

KERNELS = ("matmul", "attention", "norm", "rope", "activation", "sample", "judge", "lens", "grouped", "latent")
DTYPES = ("bf16", "fp16", "fp32", "not bf16 and not fp16 and not fp32")
NOTHING_SELECTED = 5
"""pytest's exit status"""


def test(kernels: tuple[str, ...]) -> bool:
    """Tests in parallel, because compiling is what takes time; the summary line of each, and all of what failed."""
    pytest = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    running = {
        (kernel, dtype): subprocess.Popen(
            [*pytest, f"tests/kernels/test_{kernel}.py", "-k", dtype],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for kernel in kernels
        for dtype in DTYPES
    }
    passed = True
    for (kernel, dtype), process in running.items():
        output = process.communicate()[0]
        good = process.returncode in (0, NOTHING_SELECTED)
        passed &= good
        if process.returncode != NOTHING_SELECTED:
            print(f"{kernel} {dtype}: {output.strip().splitlines()[-1] if good else output}", flush=True)
    return passed


def main() -> None:
    kernels = tuple(sys.argv[1:]) or KERNELS
    begin = time.perf_counter()
    if not test(kernels):
        raise SystemExit("a kernel test failed: nothing is timed")
    print(f"tests passed in {time.perf_counter() - begin:.0f} s", flush=True)
    for kernel in kernels:
        subprocess.run([sys.executable, "-m", f"benchmarks.kernels.{kernel}"], check=False)


if __name__ == "__main__":
    main()
