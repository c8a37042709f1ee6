"""The engine on CPU against Hugging Face `generate` and forward, and TransformerLens `run_with_cache`.

Uses SmolLM2-135M if it is fetched, and a random model of the same shape otherwise. The contract tests check the bits; here
the outputs of the engine's code paths are compared once more before they are timed.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from benchmarks.table import Table, in_turns, seconds
from replaylens.engine.engine import Engine
from replaylens.engine.model import hub, loading
from replaylens.engine.request.sampling import Sampling

ENDLESS = Sampling(ignore_eos=True)
PEER_BRANCHES = 32
"""of the 256 sequences, those that TransformerLens computes, as one batch; its time is scaled: no sequence helps another"""


def subject() -> tuple[Any, str]:
    """A Hugging Face model and its description."""
    import transformers as tf

    if hub.is_fetched():
        return tf.AutoModelForCausalLM.from_pretrained(hub.model_folder()).float().eval(), "SmolLM2-135M"
    torch.manual_seed(0)
    config = tf.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    return tf.LlamaForCausalLM(config).eval(), "random model of SmolLM2-135M's shape"


def prompts(count: int, length: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(100, 40000, (count, length), generator=generator).tolist()


def ours(engine: Engine, count: int, n: int, **options: Any) -> tuple[float, list[list[int]]]:
    """Seconds for `count` requests of n tokens after their prefill, and the tokens."""
    branches = engine.prompts(prompts(count, 32))
    begin = time.perf_counter()
    engine.generate(branches, n, sampling=ENDLESS, **options)
    elapsed = time.perf_counter() - begin
    tokens = [branch.generated for branch in branches]
    for branch in branches:
        branch.release()
    return elapsed, tokens


def theirs(model: Any, count: int, n: int) -> float:
    x = torch.tensor(prompts(count, 32))
    more = dict(min_new_tokens=n, max_new_tokens=n, do_sample=False, pad_token_id=0, attention_mask=torch.ones_like(x))
    with torch.inference_mode():
        return seconds(lambda: model.generate(x, **more), repeats=1, warm=0)


def generation(table: Table, engine: Engine, model: Any) -> None:
    for count, n, aim in ((1, 48, 1.25), (16, 24, 1.8)):
        rounds = []
        for _ in range(4):  # in turns, so that changes of the machine's load affect all alike
            (t, tokens), peer = ours(engine, count, n), theirs(model, count, n)
            direct, same = ours(engine, count, n, window=1)
            assert tokens == same, "the planner changed the output"
            rounds.append((t, peer, direct))
        # the first round is a warm-up, in which the planner measures its code paths
        t, peer, direct = (median(times) for times in zip(*rounds[1:], strict=True))
        table.add(
            f"deterministic generation, {count} request(s)",
            ratio=peer / t,
            aim=f">= {aim}",
            met=peer / t >= aim,
            ours_ms=1e3 * t / n,
            hugging_face_ms=1e3 * peer / n,
            direct_ms=1e3 * direct / n,
        )
    rates = {count: count * 16 / ours(engine, count, 16)[0] for count in (1, 4, 16, 64)}
    grows = all(rates[a] < rates[b] for a, b in ((1, 4), (4, 16), (16, 64)))
    table.add(
        "tokens/s grows with 1, 4, 16, 64 requests",
        ratio=rates[64] / rates[1],
        aim="grows",
        met=grows,
        **{str(k): v for k, v in rates.items()},
    )


def prefill(table: Table, engine: Engine, model: Any) -> None:
    for count, length in ((16, 64), (2, 512)):
        some = prompts(count, length)
        x = torch.tensor(some)

        def mine(some: list[list[int]] = some) -> None:
            for branch in engine.prompts(some):
                branch.release()
            engine.prefix.clear()

        def hugging_face(x: torch.Tensor = x) -> None:
            with torch.inference_mode():
                model(x, logits_to_keep=1)

        a, b = in_turns(mine, hugging_face)
        table.add(
            f"canonical prefill, {count} x {length} tokens", ratio=b / a, aim=">= 1.0", met=b >= a, ours_s=a, hugging_face_s=b
        )


def branches(table: Table, engine: Engine, model: Any) -> None:
    """256 branches of 8 tokens from one 64-token prefix, with all S, T, C captured. CPU seconds of all threads."""
    prefix, tails = prompts(1, 64)[0], prompts(256, 8, seed=1)

    def mine() -> None:
        root = engine.prompt(prefix, sites="STC")
        forks = root.fork(len(tails))
        engine.force_all(forks, tails)
        for branch in [*forks, root]:
            branch.release()

    bridge = _bridge(model)
    wanted = lambda name: name.endswith(("hook_in", "attn.hook_out", "mlp.hook_out", "29.hook_out")) and name.count(".") <= 3  # noqa: E731
    x = torch.tensor([prefix + tail for tail in tails])

    def lens() -> None:
        with torch.inference_mode():
            bridge.run_with_cache(x[:PEER_BRANCHES], names_filter=wanted)

    works = (mine, lens)
    times = [[_cpu_seconds(work) for work in works] for _ in range(2)]  # in turns; the best of each counts
    a, some = (min(mine) for mine in zip(*times, strict=True))
    b = some * len(tails) / PEER_BRANCHES
    table.add(
        "256 branches of 8 off a 64-token prefix, captured",
        ratio=b / a,
        aim=">= 10",
        met=b / a >= 10,
        ours_cpu_s=a,
        transformer_lens_cpu_s=b,
        transformer_lens_sequences=PEER_BRANCHES,
        threads=torch.get_num_threads(),
    )


def _cpu_seconds(work: Callable[[], Any]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def _bridge(model: Any) -> Any:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    folder = tempfile.mkdtemp()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    if hub.is_fetched():
        AutoTokenizer.from_pretrained(hub.model_folder()).save_pretrained(folder)
    else:
        from tokenizers import Tokenizer, models

        words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
        PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token="<eos>", bos_token="<eos>", pad_token="<eos>"
        ).save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return TransformerBridge.boot_transformers(folder, hf_model=model, tokenizer=tokenizer, device="cpu", dtype=torch.float32)


def forking(table: Table, engine: Engine) -> None:
    root = engine.prompt(prompts(1, 4000)[0])
    copies_before = engine.runner.pool.num_free
    t = seconds(lambda: root.fork(), repeats=50)
    taken = copies_before - engine.runner.pool.num_free
    table.add("fork of a 4000-token branch", aim="< 1 ms", met=t < 1e-3, ms=1e3 * t, pages_taken=taken)
    root.release()


def memory(table: Table, engine: Engine) -> None:
    pool, size = engine.runner.pool, engine.runner.pool.page_size
    engine.prefix.clear()
    root = engine.prompt(prompts(1, 512)[0])
    before = pool.num_pages - pool.num_free
    forks = root.fork(64)
    engine.force_all(forks, prompts(64, 8, seed=2))
    tails = pool.num_pages - pool.num_free - before
    table.add(
        "64 branches of 8 tokens off 512", aim="prefix+tails", met=tails <= 64, prefix_pages=512 // size, tail_pages=tails
    )
    for branch in [*forks, root]:
        branch.release()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=["branches"], help="measure only this, into branches-cpu.json")
    only = parser.parse_args().only
    model, name = subject()
    table = Table("engine-cpu" if only is None else "branches-cpu", f"{name}, float32, CPU")
    print(table.about, f"{torch.get_num_threads()} threads")
    engine = Engine(loading.load(model), cache_tokens=16384)
    if only is None:
        generation(table, engine, model)
        prefill(table, engine, model)
        forking(table, engine)
        memory(table, engine)
    branches(table, engine, model)
    table.save()


if __name__ == "__main__":
    main()
