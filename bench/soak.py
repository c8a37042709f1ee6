"""`python -m bench.soak` (`make soak`): the contract machines for hours, in many processes. Exit 1 at the first difference.

Every process has its own seed, number of threads and model. They are printed before it starts, so that a failure can be
reproduced with `--seed SEED --only NUMBER`. Each process recomputes the paths of the one before it from scratch, with another
number of threads and other pages.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from replaylens.engine.engine import Engine
from tests.engine import test_machine
from tests.engine.reference import random_decoder
from tests.engine.test_certified import Certified, CertifiedStates, CertifiedThoughts
from tests.engine.test_machine import CONFIG, Sessions
from tests.engine.test_tree_machine import Trees
from tests.thinking.test_replay import Thinkers

ROOT = Path(__file__).parents[1]
THREADS = (1, 2, 3, 8, 16, 4)
COUNTS = ("operations", "preemptions")
KEPT = 64
"""paths that a process hands to the next one with the same model"""


class Small(Sessions):
    """The model of the short test."""

    sessions, steps = 20, 50


class AsWideAsSmolLM2(Sessions):
    """Products of 576 and 1536 terms."""

    config = replace(CONFIG, d_model=576, num_heads=9, num_kv_heads=3, d_head=64, rotary_dim=64, d_mlp=1536)
    sessions, steps = 6, 30


class Inputs4096(Sessions):
    """A slice of a product with 4096 inputs."""

    config = replace(CONFIG, d_model=4096, num_heads=2, num_kv_heads=1, d_head=32, rotary_dim=32, num_layers=1, windows=(0,))
    sessions, steps = 6, 30


class Inputs14336(Sessions):
    """A slice of a product with 14336 inputs."""

    config = replace(CONFIG, d_mlp=14336, num_layers=1, windows=(9,))
    sessions, steps = 6, 30


def longer(machine: type[Sessions]) -> type[Sessions]:
    """The short test's machine, with more sessions."""
    return type(machine.__name__, (machine,), {"sessions": 20, "steps": 40})


Experts, Latents = longer(test_machine.Experts), longer(test_machine.Latents)
HYBRIDS = tuple(longer(machine) for machine in test_machine.HYBRIDS)
"""recurrent layers; paths cross the end of a chunk"""
MACHINES: dict[str, Any] = {
    cls.__name__: cls
    for cls in (
        *(Small, AsWideAsSmolLM2, Inputs4096, Inputs14336, Experts, Latents, *HYBRIDS),
        *(Thinkers, Trees, Certified, CertifiedThoughts, CertifiedStates),
    )
}
ORDER = (
    "Small",
    "Experts",
    "Thinkers",
    "Latents",
    "AsWideAsSmolLM2",
    "Trees",
    "Small",
    "Inputs4096",
    "Inputs14336",
    "Small",
    "Latents",
    *(machine.__name__ for machine in HYBRIDS),
    "DeltaNets",
    "CertifiedStates",
    "Certified",
    "CertifiedThoughts",
)
"""no common factor with the number of `THREADS`, so that each machine meets every number of threads"""
LEAST = 2
"""preemptions per session: below, the cache no longer presses, and the soak shows less than it says"""


# ---- one process -------------------------------------------------------------------------------------------------------


def work(name: str, number: int, folder: Path, device: str) -> tuple[int, int]:
    """Check the paths of the last process with this model, then run sessions. Returns (operations, preemptions)."""
    machine, ledger = type(name, (MACHINES[name],), {"device": device}), folder / f"{name}.json"
    known: dict[str, str] = json.loads(ledger.read_text()) if ledger.exists() else {}
    check(machine, known)
    left: dict[str, str] = {}

    class Noted(machine):  # type: ignore[misc, valid-type]
        """Notes what branches hold when their session ends."""

        operations = preemptions = 0

        def teardown(self) -> None:
            for one in self.known if len(left) < KEPT else ():
                if one.exact and one.branch.lane.computed == len(one.path):
                    left[json.dumps(one.path)] = digest(one.branch.kv())
            super().teardown()

    run_state_machine_as_test(seed(number)(Noted), settings=how(machine))
    ledger.write_text(json.dumps(left))
    if not issubclass(machine, Trees | Certified):  # whose caches have room, or which serve one request at a time
        assert Noted.preemptions >= LEAST * machine.sessions, (
            f"only {Noted.preemptions} preemptions in {machine.sessions} sessions"
        )
    return int(Noted.operations) + len(known), int(Noted.preemptions)


def check(machine: Any, known: dict[str, str]) -> None:
    """Recompute every path in pages of 5 or 8 tokens and two rounds of rows, and compare with an earlier process."""
    if not known:
        return
    size = 5 if machine.config.mixer is None else 8
    engine = Engine(random_decoder(machine.config).to(machine.device), page_size=size, max_rows=33, cache_tokens=2000)
    for path, kv in known.items():
        tokens = json.loads(path)
        branch = engine.prompt(tokens)
        assert digest(branch.kv()) == kv, f"after a restart, the KV of {tokens} differs"
        branch.release()


def digest(kv: Any) -> str:
    return hashlib.sha256(kv.cpu().contiguous().numpy().tobytes()).hexdigest()


def how(machine: Any) -> settings:
    return settings(
        max_examples=machine.sessions,
        stateful_step_count=machine.steps,
        database=None,
        deadline=None,
        phases=[Phase.generate],  # a failure is printed as found: shrinking it takes hours
        suppress_health_check=list(HealthCheck),
    )


# ---- all processes -----------------------------------------------------------------------------------------------------


def main(given: list[str] | None = None) -> int:
    options = arguments(given)
    if options.worker:
        counts = work(options.worker, options.seed, Path(options.folder), options.device)
        print(json.dumps(dict(zip(COUNTS, counts, strict=True))))
        return 0
    began, operations, preemptions, number = time.monotonic(), 0, 0, options.only or 0
    order = [name for name in ORDER if not options.machines or name in options.machines]
    with tempfile.TemporaryDirectory() as folder:
        while operations < options.operations:
            name, threads, own = order[number % len(order)], THREADS[number % len(THREADS)], options.seed + number
            print(f"process {number}: {name}, seed {own}, {threads} threads", flush=True)
            words = ["--worker", name, "--seed", str(own), "--folder", folder, "--device", options.device]
            done = subprocess.run(
                [sys.executable, "-m", "bench.soak", *words],
                cwd=ROOT,
                env=environment(threads, folder),
                capture_output=True,
                text=True,
            )
            if done.returncode:
                print(done.stdout, done.stderr, sep="\n")
                print(f"FAILED in process {number}: `python -m bench.soak --seed {options.seed} --only {number}` runs it again")
                return 1
            found = json.loads(done.stdout.splitlines()[-1])
            operations, preemptions = operations + found["operations"], preemptions + found["preemptions"]
            seconds = time.monotonic() - began
            print(f"  {operations} operations, {preemptions} preemptions, 0 differences, {seconds:.0f} s", flush=True)
            if options.only is not None:
                break
            number += 1
    print(f"{operations} operations from seed {options.seed} on, {preemptions} preemptions: 0 differences")
    return 0


def environment(threads: int, folder: str) -> dict[str, str]:
    count = str(threads)
    own = {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count, "MKL_DYNAMIC": "FALSE", "REPLAYLENS_CACHE": folder}
    return {**os.environ, **own, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), *sys.path]))}


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operations", type=int, default=100_000, help="stop after so many (default: %(default)s)")
    parser.add_argument(
        "--seed", type=int, default=0, help="of the first process, counted up for the next ones (default: %(default)s)"
    )
    parser.add_argument("machines", nargs="*", help=f"of {', '.join(MACHINES)} (default: all)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--only", type=int, help="run this process alone")
    parser.add_argument("--worker", choices=sorted(MACHINES), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    return parser.parse_args(given)


if __name__ == "__main__":
    sys.exit(main())
