"""`make bench`: runs every CPU benchmark in its own process, so that none warms up the next."""

import subprocess
import sys

BENCHMARKS = ("engine", "generate_cpu", "hostwork", "dump", "feed", "probes", "thinking", "gradients")


def main() -> None:
    failed = [
        name for name in BENCHMARKS if subprocess.run([sys.executable, "-m", f"benchmarks.{name}"], check=False).returncode
    ]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
