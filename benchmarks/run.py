"""`make bench`: every CPU benchmark, one after the other, each in a process of its own so that none warms the next one up."""

import subprocess
import sys

BENCHMARKS = ("engine", "dump", "probes", "thinking")


def main() -> None:
    failed = [
        name for name in BENCHMARKS if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
    ]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
