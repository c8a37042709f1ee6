"""`python -m tests.engine.passes.thread_digests FOLDER [SHAPE...]`: digests that must not depend on threads, as JSON.

A dump of coin stories, the doctor's findings, and models with long sums: rows of a path computed at once, in a batch, and in
chunks between which the number of threads changes.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch

from replaylens import tasks
from replaylens.engine.engine import Engine
from replaylens.engine.model.decoder import Decoder
from replaylens.engine.proof import certificates
from replaylens.kernels import threads
from tests.toy_model import random_model

PATH = [(i * i * 7 + i) % 61 for i in range(75)]
WIDE: dict[str, dict[str, int]] = {
    "as wide as SmolLM2": dict(d_model=576, num_heads=9, num_kv_heads=3, d_head=64, d_mlp=1536),
    "4096 inputs": dict(d_model=4096, num_heads=2, num_kv_heads=1, d_head=32, d_mlp=48, num_layers=1),
    "14336 inputs": dict(d_model=64, d_mlp=14336, num_layers=1),
}


def main(folder: Path, shapes: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"threads": torch.get_num_threads(), "different": []}
    engine = Engine.load("coin-plain")
    found["dump"] = dump(engine, folder)
    found["doctor"] = certificates.examine(engine.model).to_json()
    for name in shapes:
        model = random_model(gain=1.0, **WIDE[name])
        found[name] = rows(model, found["different"])
    return found


def dump(engine: Engine, folder: Path) -> str:
    """A dump as `replaylens demo` writes it, with fewer stories."""
    stories = tasks.get("coin")(flips=(1, 6), rendering="steps").examples(3)
    run = engine.replay(stories, sites="STCZ", drafter="model", window=4, progress=False)
    return str(run.save(folder / "dump").digest)


def rows(model: Decoder, different: list[str]) -> str:
    """The digest of KV, S, T, C and Z of a path. `different` collects what changes under other conditions."""
    truth, before = digest(Engine(model).prompt(PATH, sites="STCZ")), torch.get_num_threads()
    company = Engine(model, max_rows=65).prompts([PATH[::-1], PATH, PATH[:7]], sites="STCZ")[1]
    pieces = Engine(model, page_size=4).prompt(PATH[:20], sites="STCZ")
    for start, end, count in ((20, 55, 2 if before == 1 else 1), (55, 75, before + 1)):
        torch.set_num_threads(count)
        pieces.force(PATH[start:end])
    torch.set_num_threads(before)
    others = {"in company": company, "in pieces": pieces}
    different += [f"{model.config.d_model} x {model.config.d_mlp} {how}" for how, x in others.items() if digest(x) != truth]
    return truth


def digest(branch: Any) -> str:
    found = hashlib.sha256(branch.kv().contiguous().numpy().tobytes())
    for site in branch.activations.sites():
        found.update(branch.activations[site].contiguous().numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    threads.processors = lambda: 255  # also on a machine with fewer
    print(json.dumps(main(Path(sys.argv[1]), sys.argv[2:] or list(WIDE))))
