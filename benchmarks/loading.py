"""Loading a checkpoint of bfloat16 shards with the tensors of Llama-3.1-8B: peak memory and seconds.

Every arm is a process of its own. Its peak is the kernel's VmHWM, which counts pages of mapped files that the process has
touched; pages of files that the system caches after a read do not count.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.harness import Line, Lines, case, in_process, memory_mb, random_tokens

D_MODEL, D_MLP, D_KV, VOCAB = 4096, 14336, 1024, 128256
Numbers = dict[str, float]


def make_checkpoint(folder: Path, layers: int, writers: int = 1) -> None:
    """A Llama with random weights, one shard per layer, and one each for embedding and head. Holds a shard per writer."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=VOCAB, hidden_size=D_MODEL, intermediate_size=D_MLP, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
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
    """All in MB, but `cpu_s` and `seconds`."""
    base, begin, wall = memory_mb("VmRSS"), time.process_time(), time.perf_counter()
    model = load()
    taken = {"cpu_s": time.process_time() - begin, "seconds": time.perf_counter() - wall}
    weights = sum(x.nbytes for x in model.state_dict().values()) / 1e6
    return {"peak": memory_mb("VmHWM"), "imports": base, "weights": weights, **taken}


def ours(folder: str) -> Numbers:
    from transformers import AutoConfig  # noqa: F401  (counted as imports, as below)

    from replaylens import Engine

    kept = []

    def load() -> torch.nn.Module:
        kept.append(Engine.load(Path(folder), cache_tokens=256))
        model: torch.nn.Module = kept[0].model
        return model

    return measured(load)


def narrow(folder: str) -> Numbers:
    """What the host needs for a model that goes to another device, if its weights were there. An engine would examine the
    shapes of its products first, for minutes."""
    from transformers import AutoConfig  # noqa: F401

    from replaylens.engine.model import loading as weights

    return measured(lambda: weights.load(Path(folder), torch.bfloat16))


def hugging_face(folder: str) -> Numbers:
    from transformers import AutoModelForCausalLM

    return measured(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def on_device(folder: str) -> Numbers:
    """Loads onto a CUDA device and generates a few tokens. What imports and the CUDA context take is measured before."""
    import transformers.models.llama.configuration_llama  # noqa: F401  (counted as imports)

    from replaylens import Engine

    torch.zeros(1, device="cuda")
    kept = []

    def load() -> torch.nn.Module:
        kept.append(Engine.load(Path(folder), device="cuda", dtype=torch.bfloat16, cache_tokens=256))
        model: torch.nn.Module = kept[0].model
        return model

    found = measured(load)
    assert len(kept[0].prompt([1, 2, 3]).generate(4).tokens) == 7
    return found


@contextmanager
def checkpoint(layers: int, writers: int = 1) -> Iterator[tuple[str, float]]:
    """(a temporary folder with a checkpoint, its size in GB)."""
    with tempfile.TemporaryDirectory() as name:
        make_checkpoint(Path(name), layers, writers)
        yield name, sum(file.stat().st_size for file in Path(name).glob("*.safetensors")) / 1e9


def numbers(found: Numbers, size: float) -> dict[str, float]:
    named = {f"{what}_mb" if what in ("peak", "imports", "weights") else what: value for what, value in found.items()}
    return {"checkpoint_gb": size, "beside_the_weights_mb": found["peak"] - found["imports"] - found["weights"], **named}


@case("loading-cpu.large", quick={"layers": 1})
def loading_cpu(layers: int = 4, before: str | None = None) -> Lines:
    """Peak memory and CPU seconds of loading 3.8 GB (embedding and head have a gigabyte each) on one thread: ours, an older
    checkout (`--set before=FOLDER`), Hugging Face. Ratio: peak over imports and weights. What loading needs beside the weights
    does not depend on the number of layers. The first run on a machine also examines the shapes of the model (`replaylens
    doctor`), so the CPU seconds of a second count."""
    arms: dict[str, tuple[Callable[[str], Numbers], str | None]] = {
        "replaylens": (ours, None),
        "replaylens, bfloat16": (narrow, None),
        "Hugging Face": (hugging_face, None),
        **({"before": (ours, before)} if before else {}),
    }
    with checkpoint(layers) as (folder, size):
        for arm, (work, source) in arms.items():
            found: Numbers = in_process(work, folder, source=source)
            told = numbers(found, size)
            aim, met = ("<= +2 GB", told["beside_the_weights_mb"] <= 2000) if arm == "replaylens" else ("", None)
            ratio = found["peak"] / (found["imports"] + found["weights"])
            yield Line(f"{size:.1f} GB: {arm}", ratio=ratio, aim=aim, met=met, numbers=told)


# ---- SmolLM2-135M ----------------------------------------------------------------------------------------------------

TEXT = "The capital of France is"


def our_first_result() -> Numbers:
    """CPU seconds of this process up to the first token, and its memory."""
    from replaylens import Engine

    imported = time.process_time()
    engine = Engine.load("smollm2")
    loaded, held = time.process_time(), memory_mb("VmRSS")
    assert engine.prompt(TEXT).generate(1).generated
    taken = {"cpu_s": time.process_time(), "imports_s": imported, "load_s": loaded - imported, "loaded_mb": held}
    first = memory_mb("VmRSS")
    engine.prompts(random_tokens(8, 64, 40000), sites="S")
    return {**taken, "after_one_token_mb": first, "peak_mb": memory_mb("VmHWM")}


@torch.inference_mode()
def first_result_of_hugging_face() -> Numbers:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from replaylens.engine.model import hub

    folder = hub.fetched_folder()
    imported = time.process_time()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded, held = time.process_time(), memory_mb("VmRSS")
    assert model.generate(**tokenizer(TEXT, return_tensors="pt"), max_new_tokens=1, do_sample=False).numel()
    taken = {"cpu_s": time.process_time(), "imports_s": imported, "load_s": loaded - imported, "loaded_mb": held}
    first = memory_mb("VmRSS")
    model(torch.tensor(random_tokens(8, 64, 40000)), logits_to_keep=1, output_hidden_states=True)
    return {**taken, "after_one_token_mb": first, "peak_mb": memory_mb("VmHWM")}


@case(
    "loading-cpu.first", ours="replaylens", baseline="Hugging Face", aim="<= 1.1", needs="smollm2", unit="s", best=True,
    cost=True, quick={"turns": 1},
)  # fmt: skip
def first_result(turns: int = 2) -> Lines:
    """The first token of SmolLM2-135M in a new process, and its memory: imports, loading, checks and one token, CPU seconds of
    one thread; MB when it is loaded, after that token, and at the peak of capturing S of 8 x 64 tokens. Ratio: ours over
    theirs. The best of two turns counts, so that kernels are compiled and on disk."""
    works = {"replaylens": our_first_result, "Hugging Face": first_result_of_hugging_face}
    found: dict[str, list[Numbers]] = {arm: [] for arm in works}
    for _ in range(turns):
        for arm, work in works.items():
            found[arm].append(in_process(work))
    parts = {
        f"{arm}: {part}": min(each[part] for each in own) for arm, own in found.items() for part in ("imports_s", "load_s")
    }
    yield Line("first token", times={arm: [each["cpu_s"] for each in own] for arm, own in found.items()}, numbers=parts)
    for part in ("loaded_mb", "after_one_token_mb", "peak_mb"):
        mine, theirs = (max(each[part] for each in found[arm]) for arm in works)
        what = f"memory, {part.removesuffix('_mb').replace('_', ' ')}"
        yield Line(what, ratio=mine / theirs, aim="<= 1.4", numbers={"replaylens_mb": mine, "hugging_face_mb": theirs})


@case("loading-gpu", needs="gpu")
def loading_gpu(layers: int = 32) -> Lines:
    """Host memory and seconds of loading 16 GB of bfloat16 shards onto a CUDA device and onto the host."""
    with checkpoint(layers, writers=8) as (folder, size):
        for work, what in ((on_device, "onto a CUDA device"), (narrow, "onto the host")):
            found: Numbers = in_process(work, folder)
            print(f"{what}: {found}", file=sys.stderr, flush=True)
            host = work is narrow
            beside = found["peak"] - found["imports"] - (found["weights"] if host else 0.0)
            line = f"{size:.1f} GB {what}: host memory beside {'the weights' if host else 'imports'}"
            yield Line(line, aim="<= 2 GB", met=beside <= 2000, numbers={**numbers(found, size), "beside_mb": beside})
