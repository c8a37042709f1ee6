"""Dropped engines give their device memory back at once; graphs keep what they read, and are dropped beyond a number."""

import copy
import gc
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from replaylens.engine.engine import Engine
from replaylens.engine.proof.fingerprint import weights_hash
from replaylens.engine.request.sampling import Sampling
from replaylens.weights import loading
from tests.families import hugging_face

pytestmark = pytest.mark.gpu


def test_a_dropped_engine_leaves_no_memory() -> None:
    gc.collect()
    gc.disable()
    try:
        torch.zeros(1, device="cuda")
        before = torch.cuda.memory_allocated()
        engine = Engine(loading.load(hugging_face("llama"), torch.bfloat16).to("cuda"), cache_tokens=1 << 16)
        engine.runner.graphs.worth = 1
        branches = engine.prompts([[1, 2, 3], [4, 5, 6, 7]], sites="STC")
        engine.generate(branches, 12, drafter="ngram", window=4)
        engine.generate(branches, 12)
        assert branches[0].activations["blocks.0.hook_out"].shape[0] == branches[0].length - 1
        assert engine.runner.graphs.graphs and torch.cuda.memory_allocated() > before + (1 << 20)
        del branches, engine
        torch._C._cuda_clearCublasWorkspaces()  # the library's own memory
        assert torch.cuda.memory_allocated() <= before + (1 << 16)
    finally:
        gc.enable()


def test_a_graph_keeps_what_it_reads() -> None:
    """The targets of a lens are read at every replay, however many other lenses there were since."""
    engine = Engine(loading.load(hugging_face("llama"), torch.bfloat16).to("cuda"), cache_tokens=1 << 12)

    def targets(wanted: list[int]) -> torch.Tensor:
        with engine.prompt([1, 2, 3], sites="Z", targets=wanted) as branch:
            return branch.generate(8, final=True).activations["Z.targets"].clone()

    first = targets([5, 7])
    for number in range(70):
        engine.prompt([1, 2, 3], sites="Z", targets=[number % 50, 50]).release()
    junk = [torch.full((64,), 3, device="cuda") for _ in range(2000)]
    assert torch.equal(targets([5, 7]), first) and junk
    assert not torch.equal(targets([7, 5]), first)


def test_decode_graphs_are_dropped_beyond_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    from replaylens.engine.passes import bursts  # imports triton, which must not happen before tests/kernels is collected

    monkeypatch.setattr(bursts, "MAX_GRAPHS", 2)
    engine = Engine(loading.load(hugging_face("llama"), torch.bfloat16).to("cuda"), cache_tokens=1 << 12)
    truth: dict[int, list[int]] = {}
    for count in (1, 2, 4, 8, 1, 2):  # every number of requests has a graph of its own, and those of the first ones are gone
        branches = engine.prompts([[i + 1, 2, 3] for i in range(count)])
        engine.generate(branches, 8, sampling=Sampling(ignore_eos=True))
        for number, branch in enumerate(branches):
            assert truth.setdefault(number, branch.tokens) == branch.tokens
        assert engine.loop.bursts is not None and len(engine.loop.bursts._graphs) <= 2


# ---- loading cuda -----------------------------------------------------------------------------------------------------
# Weights go from files to a CUDA device one by one: the bits of a model that the host loaded, and little host memory.

PEAK = """
import sys, torch
from pathlib import Path
from replaylens.weights import loading
def peak():
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) * 1024
torch.zeros(1, device="cuda")
import transformers.models.llama.configuration_llama
before = peak()
model = loading.load(sys.argv[1], torch.bfloat16, device="cuda")
print(peak() - before, sum(x.nbytes for x in model.state_dict().values()))
"""


@pytest.mark.parametrize("name", ["llama", "llama3", "gpt2", "gemma2"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_streamed_weights_are_those_of_the_host(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    hugging_face(name).save_pretrained(tmp_path, max_shard_size="20KB")
    there, here = loading.load(tmp_path, dtype, device="cuda"), loading.load(tmp_path, dtype)
    assert there.config == here.config and weights_hash(there) == weights_hash(here)
    assert {x.device.type for x in (*there.parameters(), *there.buffers())} == {"cuda"}
    engine = Engine.load(tmp_path, device="cuda", dtype=dtype)
    moved = Engine(here.to("cuda"))
    assert engine.fingerprint == moved.fingerprint
    assert engine.prompt([1, 2, 3]).generate(8).tokens == moved.prompt([1, 2, 3]).generate(8).tokens


def test_the_host_holds_a_small_part_of_the_weights(tmp_path: Path) -> None:
    from bench.loading import make_checkpoint

    make_checkpoint(tmp_path, layers=4)
    done = subprocess.run([sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True)
    host, held = map(int, done.stdout.split()[-2:])
    print(f"host {host / 1e9:.2f} GB for {held / 1e9:.2f} GB of weights on the device")
    assert held > 3.8e9 and host < 2e9


def test_float32_weights_are_stored_in_bfloat16_where_that_loses_nothing(tmp_path: Path) -> None:
    model = copy.deepcopy(hugging_face("llama")).bfloat16()  # the other tests share that one
    model.model.layers[0].mlp.down_proj.weight.data[0, 0] = 1.0
    wide = model.float()
    wide.model.layers[0].mlp.down_proj.weight.data[0, 0] += 2**-20  # one number that bfloat16 has not
    wide.save_pretrained(tmp_path)
    there, here = Engine.load(tmp_path, device="cuda", dtype=torch.float32), Engine.load(tmp_path)
    first, second = there.model.blocks[0].mlp.down, there.model.blocks[1].mlp.down
    assert first.stored().dtype == torch.float32 and second.stored().dtype == torch.bfloat16
    assert there.fingerprint.weights == here.fingerprint.weights
    ours, theirs = (engine.prompt([1, 2, 3], sites="STC") for engine in (there, here))
    assert ours.generate(8).tokens == theirs.generate(8).tokens
    for site in theirs.activations.sites():
        assert torch.equal(ours.activations[site].cpu(), theirs.activations[site])
