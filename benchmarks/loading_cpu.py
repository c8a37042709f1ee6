"""Peak memory and CPU seconds of loading a checkpoint of bfloat16 shards: ours, an older checkout, and Hugging Face.

    python -m benchmarks.loading_cpu                    # makes a checkpoint of 3.8 GB in a temporary folder
    python -m benchmarks.loading_cpu --before FOLDER    # also an older checkout of this repository

The checkpoint has the tensors of Llama-3.1-8B (the largest, embedding and head, have a gigabyte each) with fewer layers.
What loading needs beside the weights does not depend on the number of layers, so it is what the whole model needs.

Every arm is a process of its own. Its peak is the kernel's VmHWM, which counts pages of mapped files that the process has
touched; pages of files that the system caches after a read do not count. `getrusage` would start from the parent's memory.
The first run on a machine also examines the shapes of the model (`replaylens doctor`), so the CPU seconds of a second count.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.passes_cpu import status
from benchmarks.table import Table

HERE = Path(__file__).parent.parent
OURS, NARROW, BEFORE, HUGGING_FACE = "replaylens", "replaylens, bfloat16", "before", "Hugging Face"
D_MODEL, D_MLP, D_KV, VOCAB = 4096, 14336, 1024, 128256
Numbers = dict[str, float]


def make_checkpoint(folder: Path, layers: int, writers: int = 1) -> None:
    """A Llama with random weights, one shard per layer, and one each for embedding and head. Holds a shard per writer."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=D_MODEL,
        intermediate_size=D_MLP,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )
    config.save_pretrained(folder)
    some = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def filled(*shape: int) -> torch.Tensor:
        numbers = torch.Size(shape).numel()
        return some.repeat(-(-numbers // len(some)))[:numbers].view(shape)

    one = {
        "self_attn.q_proj": (D_MODEL, D_MODEL),
        "self_attn.k_proj": (D_KV, D_MODEL),
        "self_attn.v_proj": (D_KV, D_MODEL),
        "self_attn.o_proj": (D_MODEL, D_MODEL),
        "mlp.gate_proj": (D_MLP, D_MODEL),
        "mlp.up_proj": (D_MLP, D_MODEL),
        "mlp.down_proj": (D_MODEL, D_MLP),
        "input_layernorm": (D_MODEL,),
        "post_attention_layernorm": (D_MODEL,),
    }
    shards = [{f"model.layers.{i}.{name}.weight": shape for name, shape in one.items()} for i in range(layers)]
    shards += [{"model.embed_tokens.weight": (VOCAB, D_MODEL)}]
    shards += [{"lm_head.weight": (VOCAB, D_MODEL), "model.norm.weight": (D_MODEL,)}]
    files = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    weight_map = {name: file for shard, file in zip(shards, files, strict=True) for name in shard}

    def write(shard: dict[str, tuple[int, ...]], file: str) -> None:
        save_file({name: filled(*shape) for name, shape in shard.items()}, folder / file)

    with ThreadPoolExecutor(writers) as pool:
        list(pool.map(write, shards, files))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measured(load: Callable[[], torch.nn.Module]) -> Numbers:
    """All in MB, but `cpu_s`."""
    base, begin = status("VmRSS"), time.process_time()
    model = load()
    seconds = time.process_time() - begin
    weights = sum(x.nbytes for x in model.state_dict().values()) / 1e6
    return {"peak": status("VmHWM"), "imports": base, "weights": weights, "cpu_s": seconds}


def ours(folder: Path) -> Numbers:
    from transformers import AutoConfig  # noqa: F401  (counted as imports, as below)

    from replaylens import Engine

    kept = []

    def load() -> torch.nn.Module:
        kept.append(Engine.load(folder, cache_tokens=256))
        model: torch.nn.Module = kept[0].model
        return model

    return measured(load)


def narrow(folder: Path) -> Numbers:
    """What the host needs for a model that goes to another device, if its weights were there."""
    from transformers import AutoConfig  # noqa: F401

    from replaylens.engine.model import loading as weights

    return measured(lambda: weights.load(folder, torch.bfloat16))


def hugging_face(folder: Path) -> Numbers:
    from transformers import AutoModelForCausalLM

    return measured(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


ARMS: dict[str, Callable[[Path], Numbers]] = {OURS: ours, NARROW: narrow, HUGGING_FACE: hugging_face}


def run(arm: str, folder: Path, before: Path | None) -> Numbers:
    source = before if arm == BEFORE else HERE
    environment = {**os.environ, "PYTHONPATH": f"{source}/src{os.pathsep}{HERE}", "OMP_NUM_THREADS": "1"}
    shown = OURS if arm == BEFORE else arm
    command = [sys.executable, "-m", "benchmarks.loading_cpu", "--arm", shown, "--folder", str(folder)]
    done = subprocess.run(command, env=environment, cwd=HERE, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{arm} failed: {done.stderr[-2000:]}")
    found: Numbers = json.loads(done.stdout.splitlines()[-1])
    return found


def main(layers: int, arms: list[str], before: Path | None) -> None:
    about = "Loading bfloat16 shards on one thread. Memory in MB, as VmHWM says. Ratio: peak over imports and weights"
    table = Table("loading-cpu", about)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_checkpoint(folder, layers)
        size = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
        for arm in (*arms, *([BEFORE] if before else [])):
            found = run(arm, folder, before)
            extra = found["peak"] - found["imports"] - found["weights"]
            numbers = {"checkpoint_mb": size, "beside_the_weights_mb": extra}
            numbers |= {f"{what}_mb" if what != "cpu_s" else what: value for what, value in found.items()}
            aim = {"aim": "<= +2 GB", "met": extra <= 2000} if arm == OURS else {}
            table.add(
                f"{size / 1e3:.1f} GB: {arm}", ratio=found["peak"] / (found["imports"] + found["weights"]), **aim, **numbers
            )
    table.save(beside=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--arms", choices=list(ARMS), nargs="+", default=list(ARMS))
    parser.add_argument("--arm", choices=list(ARMS))
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.arm:
        print(json.dumps(ARMS[given.arm](given.folder)))
    else:
        main(given.layers, given.arms, given.before)
