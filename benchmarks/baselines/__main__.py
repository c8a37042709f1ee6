"""The engine against its baselines: decode and prompt passes, capture, mixed load, Hugging Face.

    PYTHONPATH=src python -m benchmarks.baselines --out FILE [--sections decode prompts ...] [--tiny]

On an H200, Llama-3.1-8B shape, random weights, bfloat16: about six minutes. Every section checks what it times before it times
it. The file is written after every line, so that a run that is killed leaves what it measured.
"""

import argparse
import time
import traceback
from pathlib import Path

import torch

from benchmarks.baselines.capture import capture_prices
from benchmarks.baselines.hugging_face import hugging_face_numbers
from benchmarks.baselines.load import mixed_load
from benchmarks.baselines.passes import decode_steps, prompt_passes
from benchmarks.baselines.subject import make_subject
from benchmarks.table import RESULTS, Table

SECTIONS = {
    "decode": decode_steps,
    "prompts": prompt_passes,
    "capture": capture_prices,
    "mixed": mixed_load,
    "hugging-face": hugging_face_numbers,
}
"""in the order in which they run; the one that takes longest comes last"""


def main() -> None:
    """All sections, or those named. One that fails says so, and the others are measured all the same."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, default=RESULTS / "baselines-gpu.json")
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU: shows that everything runs")
    given = parser.parse_args()
    what = "tiny shape, float32, CPU" if given.tiny else f"Llama-3.1-8B shape, bfloat16, {torch.cuda.get_device_name()}"
    table, begin, failed = Table("baselines", f"random weights, {what}", out=given.out), time.monotonic(), []
    subject = make_subject(given.tiny, table)
    certificate = subject.engine.certificate
    print(f"certified: {certificate.certified}; controls that differed: {certificate.has_teeth}", flush=True)
    for name in given.sections:
        print(f"{name}, {time.monotonic() - begin:.0f} s after the start", flush=True)
        try:
            SECTIONS[name](subject)
        except Exception:
            failed.append(name)
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)
    print(f"{time.monotonic() - begin:.0f} s\n")
    table.show()
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
