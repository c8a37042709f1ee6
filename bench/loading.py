"""Loading a checkpoint of bfloat16 shards with the tensors of Llama-3.1-8B: peak memory and seconds.

Every arm is a process of its own. Its peak is the kernel's VmHWM, which counts pages of mapped files that the process has
touched; pages of files that the system caches after a read do not count.
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.harness import Line, Lines, case, in_process, memory_mb, random_tokens

Numbers = dict[str, float]


def make_checkpoint(folder: Path, layers: int, writers: int = 1) -> None:
    """A Llama with random weights, one shard per layer, and one each for embedding and head. Holds a shard per writer."""
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 5e5},
    )  # fmt: skip
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: x.shape for name, x in transformers.LlamaForCausalLM(config).state_dict().items()}
    shards: dict[str, list[str]] = {}
    for name in shapes:
        part = name.split(".")[2] if ".layers." in name else "embedding" if "embed" in name else "head"
        shards.setdefault(f"model-{part}.safetensors", []).append(name)
    some = torch.randn(1 << 22, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def filled(shape: torch.Size) -> torch.Tensor:
        return some.repeat(-(-shape.numel() // len(some)))[: shape.numel()].view(shape)

    with ThreadPoolExecutor(writers) as pool:
        write = lambda file: save_file({name: filled(shapes[name]) for name in shards[file]}, folder / file)  # noqa: E731
        list(pool.map(write, shards))
    weight_map = {name: file for file, names in shards.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def measured(load: Callable[[], Any], check: Callable[[Any], Any] = lambda made: None) -> Numbers:
    """All in MB, but `cpu_s` and `seconds`. load: returns an engine or a model, which `check` gets"""
    base, begin, wall = memory_mb("VmRSS"), time.process_time(), time.perf_counter()
    made = load()
    taken = {"cpu_s": time.process_time() - begin, "seconds": time.perf_counter() - wall}
    model = made if isinstance(made, torch.nn.Module) else made.model
    found = {"peak": memory_mb("VmHWM"), "imports": base, "weights": sum(x.nbytes for x in model.state_dict().values()) / 1e6}
    check(made)
    return {**found, **taken}


def ours(folder: str) -> Numbers:
    from transformers import AutoConfig  # noqa: F401  (counted as imports, as below)

    from replaylens import Engine

    return measured(lambda: Engine.load(Path(folder), cache_tokens=256))


def narrow(folder: str) -> Numbers:
    """What the host needs for a model that goes to another device, if its weights were there. An engine would examine the
    shapes of its products first, for minutes."""
    from transformers import AutoConfig  # noqa: F401

    from replaylens.weights import loading as weights

    return measured(lambda: weights.load(Path(folder), torch.bfloat16))


def hugging_face(folder: str) -> Numbers:
    from transformers import AutoModelForCausalLM

    return measured(lambda: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32))


def on_device(folder: str) -> Numbers:
    """Loads onto a CUDA device and generates a few tokens. What imports and the CUDA context take is measured before."""
    import transformers.models.llama.configuration_llama  # noqa: F401  (counted as imports)

    from replaylens import Engine

    torch.zeros(1, device="cuda")

    def check(engine: Any) -> None:
        assert len(engine.prompt([1, 2, 3]).generate(4).tokens) == 7

    return measured(lambda: Engine.load(Path(folder), device="cuda", dtype=torch.bfloat16, cache_tokens=256), check)


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
    checkout (`--set before=FOLDER`), Hugging Face. Ratio: peak over imports and weights. The first run on a machine also
    examines the shapes of the model (`replaylens doctor`), so the CPU seconds of a second count."""
    arms = {"replaylens": ours, "replaylens, bfloat16": narrow, "Hugging Face": hugging_face}
    with checkpoint(layers) as (folder, size):
        for arm, work in (*arms.items(), *((("before", ours),) if before else ())):
            found: Numbers = in_process(work, folder, source=before if arm == "before" else None)
            told = numbers(found, size)
            aim, met = ("<= +2 GB", told["beside_the_weights_mb"] <= 2000) if arm == "replaylens" else ("", None)
            ratio = found["peak"] / (found["imports"] + found["weights"])
            yield Line(f"{size:.1f} GB: {arm}", ratio=ratio, aim=aim, met=met, numbers=told)


# ---- SmolLM2-135M ----------------------------------------------------------------------------------------------------

TEXT = "The capital of France is"


def first_token(load: Callable[[], Any], token: Callable[[Any], Any], capture: Callable[[Any], Any]) -> Numbers:
    """CPU seconds of this process, whose imports are done, up to the first token, and its memory."""
    imported = time.process_time()
    made = load()
    loaded, held = time.process_time(), memory_mb("VmRSS")
    assert token(made)
    taken = {"cpu_s": time.process_time(), "imports_s": imported, "load_s": loaded - imported, "loaded_mb": held}
    first = memory_mb("VmRSS")
    capture(made)
    return {**taken, "after_one_token_mb": first, "peak_mb": memory_mb("VmHWM")}


def our_first_result() -> Numbers:
    from replaylens import Engine

    return first_token(
        lambda: Engine.load("smollm2"),
        lambda engine: engine.prompt(TEXT).generate(1).generated,
        lambda engine: engine.prompts(random_tokens(8, 64, 40000), sites="S"),
    )


@torch.inference_mode()
def first_result_of_hugging_face() -> Numbers:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from replaylens.weights import hub

    folder = hub.fetched_folder()
    asked = lambda both: both[0](TEXT, return_tensors="pt")  # noqa: E731
    return first_token(
        lambda: (AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)),
        lambda both: both[1].generate(**asked(both), max_new_tokens=1, do_sample=False).numel(),
        lambda both: both[1](torch.tensor(random_tokens(8, 64, 40000)), logits_to_keep=1, output_hidden_states=True),
    )


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


def held_by(arm: str, folder: str, in_memory: bool) -> Numbers:
    """Memory of this process: a model is loaded from a folder, or made, loaded and deleted; then it generates eight tokens."""
    from replaylens import Engine

    model: Any = Path(folder)
    if in_memory or arm != "replaylens":
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)) if in_memory else model
    if arm == "replaylens":
        model = Engine.load(model)
        gc.collect()  # what was loaded from memory is nowhere else, and has cycles
        loaded = memory_mb("VmRSS")
        model.prompt([1, 2, 3]).generate(8)
    else:
        model = model if in_memory else AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        loaded = memory_mb("VmRSS")
        model.generate(torch.tensor([[1, 2, 3]]), min_new_tokens=8, max_new_tokens=8, do_sample=False, pad_token_id=0)
    return {"loaded": loaded, "after eight tokens": memory_mb("VmRSS"), "peak": memory_mb("VmHWM")}


@case("loading-cpu.held", quick={"layers": 1})
def held(layers: int = 30) -> Lines:
    """Memory of a new process with a random model of SmolLM2-135M's shape (538 MB in float32), from a folder, and from a
    transformers model in memory, made there, compared with and deleted: MB once it is loaded, after eight tokens, and at
    the peak. transformers' arm loads the folder, or keeps the model that it made; its folder is mapped, and counts once it was
    read. Ratio: ours over theirs."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=layers, num_attention_heads=9,
        num_key_value_heads=3, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        LlamaForCausalLM(config).save_pretrained(folder)
        in_process(held_by, "replaylens", folder, False)  # kernels are compiled, the config is kept, shapes are examined
        for source in ("a folder", "memory"):
            mine, theirs = (in_process(held_by, arm, folder, source == "memory") for arm in ("replaylens", "Hugging Face"))
            for part in mine:
                numbers = {"replaylens_mb": mine[part], "hugging_face_mb": theirs[part]}
                mapped = source == "a folder" and part == "loaded"
                yield Line(
                    f"from {source}, {part}", ratio=mine[part] / theirs[part], aim="" if mapped else "<= 1.1", numbers=numbers
                )


def started(tiny: bool, kernels: str) -> Numbers:
    """Seconds of a process with a model on its device: its imports, and up to the first token. kernels: Triton's cache"""
    os.environ["TRITON_CACHE_DIR"] = kernels
    begin = time.perf_counter()
    from bench.subjects import random_decoder, where
    from replaylens.engine.engine import Engine

    imported = time.perf_counter()
    shape, device, dtype = where(tiny)
    model = random_decoder(shape, device, dtype)
    made = time.perf_counter()
    engine = Engine(model, cache_tokens=2**14)
    built = time.perf_counter()
    engine.prompt(random_tokens(1, min(512, shape.max_positions - 1), shape.vocab_size)[0]).generate(1)
    done = time.perf_counter()
    _ = engine.fingerprint  # the weights are hashed when somebody asks for it
    found = {"imports_s": imported - begin, "engine_s": built - made, "first_token_s": done - built, "seconds": done - made}
    return {**found, "fingerprint_s": time.perf_counter() - done}


@case("loading-gpu.start", needs="gpu", quick={"tiny": True})
def start(tiny: bool = False) -> Lines:
    """Seconds from weights of the 8B shape on the device to the first token after a prompt of 512, examination included: in a
    process that compiles all kernels, and in the next one. The hash of the weights comes later, if something needs it."""
    with tempfile.TemporaryDirectory() as kernels:
        for what, most in (("no kernel compiled before", 30.0), ("kernels compiled before", 8.0)):
            found: Numbers = in_process(started, tiny, kernels)
            yield Line(f"first token, {what}", aim=f"<= {most:g} s", met=found["seconds"] <= most, numbers=found)


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
