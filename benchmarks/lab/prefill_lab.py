"""Variants of prefill attention on Hopper: bits against today's kernel, then times in turns with it and SDPA.

python -m benchmarks.lab.prefill_lab check NAME | time NAME... | all
"""

import json, os, statistics, subprocess, sys, time
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from benchmarks.lab.hopper_lab import prefill_kernel
from replaylens.kernels.attention import PagedRows, attention, plan_tiles

V = {
    "A": dict(PIPE=1, OUTER=1, STAGES=3),
    "B": dict(PIPE=1, OUTER=0, STAGES=4),
    "C": dict(PIPE=1, OUTER=1, STAGES=3, QREG=True),
    "D": dict(PIPE=1, OUTER=1, STAGES=3, PING=True),
    "E": dict(PIPE=1, OUTER=1, STAGES=3, QREG=True, PING=True),
    "F": dict(PIPE=0, OUTER=1, STAGES=3),
    "G": dict(PIPE=1, OUTER=0, STAGES=4, PING=True),
    "B3": dict(PIPE=1, OUTER=0, STAGES=3),
    "B5": dict(PIPE=1, OUTER=0, STAGES=5),
    "Bh": dict(PIPE=1, OUTER=0, STAGES=4, HEADS_FIRST=True),
    "Ah": dict(PIPE=1, OUTER=1, STAGES=3, HEADS_FIRST=True),
}
FULL = ("A", "B")
PAGE = 16
DEFAULT = dict(HEADS_FIRST=False, QREG=False, PING=False, REGS=216, PREGS=72)


def new(name, q, k, v, rows, scale, softcap=0.0, window=0, out=None):
    log2e = 1.4426950408889634
    group, d = q.shape[1] // k.shape[1], q.shape[2]
    c = DEFAULT | V[name]
    scale, softcap = (2 * log2e * scale / softcap if softcap else log2e * scale), softcap * log2e
    out = torch.full_like(q, float("nan")) if out is None else out
    grid = (len(rows.tiles), k.shape[1])
    kernel = prefill_kernel[grid[::-1] if c["HEADS_FIRST"] else grid](
        q,
        k,
        v,
        out,
        rows.tiles,
        rows.sequence,
        rows.position,
        rows.page_table,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        k.stride(1),
        out.stride(0),
        out.stride(1),
        rows.page_table.stride(0),
        scale,
        softcap,
        window,
        GROUP=group,
        HEAD=d,
        PAGE=PAGE,
        BLOCK=64,
        SPLIT=512,
        CAPPED=softcap > 0,
        WINDOWED=window > 0,
        num_warps=4,
        enable_fp_fusion=False,
        **c,
    )
    return out, kernel


def make(lengths, heads, kv_heads, d, dtype, chosen=None, seed=0, stale=False):
    g = torch.Generator(device="cuda").manual_seed(seed)
    pages = [-(-n // PAGE) for n in lengths]
    free = (torch.randperm(sum(pages), device="cuda", generator=g) + 1).to(torch.int32)
    table = torch.zeros(len(lengths), max(pages) + 1, dtype=torch.int32, device="cuda")
    at = 0
    for s, n in enumerate(pages):
        table[s, :n] = free[at : at + n]
        at += n
    k = torch.randn((sum(pages) + 1) * PAGE, kv_heads, d, device="cuda", dtype=dtype, generator=g)
    v = torch.randn(k.shape, device="cuda", dtype=dtype, generator=g)
    k[:PAGE], v[:PAGE] = 0, 0
    seq = [s for s, n in enumerate(lengths) for _ in range(n)]
    pos = [p for n in lengths for p in range(n)]
    if stale:
        for s, n in enumerate(lengths):
            j = torch.arange(n, pages[s] * PAGE, device="cuda")
            slot = table[s, j // PAGE].long() * PAGE + j % PAGE
            k[slot], v[slot] = float("nan"), float("nan")
    if chosen is not None:
        seq, pos = [seq[i] for i in chosen], [pos[i] for i in chosen]
    per_tile = 128 // (heads // kv_heads)
    rows = PagedRows(
        torch.tensor(seq, dtype=torch.int32, device="cuda"),
        torch.tensor(pos, dtype=torch.int32, device="cuda"),
        table,
        plan_tiles(seq, per_tile).cuda(),
        max(pos) + 1,
        per_tile,
    )
    q = 2 * torch.randn(len(seq), heads, d, device="cuda", dtype=torch.float32, generator=g)
    return q.to(dtype), k, v, rows


def cases(full):
    b, h = torch.bfloat16, torch.float16
    yield "300", ([300], 32, 8, 128, b), {}
    yield "2048", ([2048], 32, 8, 128, b), {}
    yield "4099 stale NaN", ([4099], 32, 8, 128, b), dict(stale=True)
    yield "1300+9+600+1+64", ([1300, 9, 600, 1, 64], 32, 8, 128, b), {}
    yield "prefix 1000", ([1701], 32, 8, 128, b), dict(chosen=range(1000, 1701))
    yield "prefix 3333, 40 rows", ([3373], 32, 8, 128, b), dict(chosen=range(3333, 3373))
    yield "window 600", ([2777], 32, 8, 128, b), dict(window=600)
    if full:
        yield "window 37", ([1500], 32, 8, 128, b), dict(window=37)
        yield "softcap 5", ([1100], 32, 8, 128, b), dict(softcap=5.0)
        yield "softcap 5 window 700", ([1800], 32, 8, 128, b), dict(softcap=5.0, window=700)
        yield "fp16", ([1100, 77], 32, 8, 128, h), {}
        yield "head 64, group 7", ([1100, 300], 14, 2, 64, b), {}
        yield "head 64, group 3", ([1100, 300], 9, 3, 64, b), {}
        yield "group 1", ([1100, 300], 4, 4, 128, b), {}
        yield "group 8", ([1100, 300], 16, 2, 128, b), {}


def check(name):
    bad = 0
    for what, args, more in cases(name in FULL):
        more = dict(more)
        options = {k: more.pop(k) for k in ("window", "softcap") if k in more}
        q, k, v, rows = make(*args, **more)
        scale = args[3] ** -0.5
        want = attention(q, k, v, rows, scale, out=torch.full_like(q, float("nan")), split=False, **options)
        begin = time.perf_counter()
        got, kernel = new(name, q, k, v, rows, scale, **options)
        again, _ = new(name, q, k, v, rows, scale, **options)
        torch.cuda.synchronize()
        same = torch.equal(got, want) and not got.isnan().any() and torch.equal(got, again)
        bad += not same
        print(
            f"{name} {what}: {'equal' if same else 'DIFFERENT'} {(got != want).sum().item()} of {got.numel()}, worst "
            f"{(got.float() - want.float()).abs().max().item():.2e}, nan {got.isnan().sum().item()}, today nan {want.isnan().sum().item()}; "
            f"regs {kernel.n_regs} spills {kernel.n_spills} smem {kernel.metadata.shared} {time.perf_counter() - begin:.1f}s",
            flush=True,
        )
    print(f"{name}: {'ALL EQUAL' if not bad else 'FAILED'}", flush=True)
    raise SystemExit(bool(bad))


def timing(names):
    def replay(graph):
        a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        a.record()
        graph.replay()
        b.record()
        b.synchronize()
        return a.elapsed_time(b)

    table = []
    for length, new_rows, calls in (
        (2048, 2048, 8),
        (4096, 4096, 6),
        (8192, 8192, 4),
        (32768, 32768, 1),
        (8192, 1024, 8),
        (32768, 1024, 4),
    ):
        q, k, v, rows = make([length], 32, 8, 128, torch.bfloat16, chosen=range(length - new_rows, length))
        out = torch.empty_like(q)
        scale = 128**-0.5
        flat = q.view(1, new_rows, 32, 128).transpose(1, 2).contiguous()
        index = rows.page_table[0, : length // PAGE].long()
        dense = [x.view(-1, PAGE, 8, 128)[index].reshape(1, length, 8, 128).transpose(1, 2).contiguous() for x in (k, v)]
        mask = None if new_rows == length else causal_lower_right(new_rows, length)

        def sdpa():
            if mask is None:
                return F.scaled_dot_product_attention(flat, *dense, is_causal=True, enable_gqa=True)
            return F.scaled_dot_product_attention(flat, *wide, attn_mask=mask)

        wide = [x.repeat_interleave(4, 1) for x in dense] if mask is not None else dense
        arms = {"sdpa": sdpa}
        for label, backend in (("sdpa flash", SDPBackend.FLASH_ATTENTION), ("sdpa cudnn", SDPBackend.CUDNN_ATTENTION)):

            def one(backend=backend):
                with sdpa_kernel(backend):
                    return sdpa()

            try:
                one()
                arms[label] = one
            except Exception as problem:
                print(label, str(problem)[:200])
        if new_rows == 1024:
            arms["today serial"] = lambda: attention(q, k, v, rows, scale, out=out, split=False)
        arms["today"] = lambda: attention(q, k, v, rows, scale, out=out, specialised=False)
        arms["engine"] = lambda: attention(q, k, v, rows, scale, out=out, specialised=True)
        for n in names:
            arms[n] = lambda n=n: new(n, q, k, v, rows, scale, out=out)
        graphs = {}
        for n, call in arms.items():
            call()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    call()
            graphs[n] = graph
        for graph in graphs.values():
            replay(graph)
        times = {n: [] for n in arms}
        for _ in range(7):
            for n, graph in graphs.items():
                times[n].append(replay(graph) * 1e3 / calls)
        base = statistics.median(times["sdpa"])
        flop = 4 * new_rows * (length - new_rows / 2 + 0.5) * 32 * 128
        for n in arms:
            t = statistics.median(times[n])
            table.append(
                dict(rows=new_rows, keys=length, arm=n, us=round(t, 1), ratio=round(base / t, 3), tflops=round(flop / t / 1e6))
            )
            print(
                f"{new_rows:6d} of {length:6d} {n:12s} {t:9.1f} us  {base / t:5.2f} of SDPA  {flop / t / 1e6:5.0f} TFLOP/s  best {min(times[n]):.1f}",
                flush=True,
            )
    if "OUT" in os.environ:
        open(os.environ["OUT"] + "/prefill-lab.json", "w").write(json.dumps(table, indent=1))


def main():
    if sys.argv[1] == "check":
        check(sys.argv[2])
    elif sys.argv[1] == "time":
        timing(sys.argv[2:])
    else:
        names = sys.argv[2:] or list(V)
        begin = time.perf_counter()
        running = {
            n: subprocess.Popen(
                [sys.executable, "-m", "benchmarks.lab.prefill_lab", "check", n],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for n in names
        }
        good = []
        for n, process in running.items():
            try:
                text, _ = process.communicate(timeout=max(1, 75 - (time.perf_counter() - begin)))
            except subprocess.TimeoutExpired:
                process.kill()
                text = process.communicate()[0] + f"\n{n}: HUNG"
            print(text[-2500:], flush=True)
            if process.returncode == 0:
                good.append(n)
        print(f"checks took {time.perf_counter() - begin:.0f} s; good: {good}", flush=True)
        done = subprocess.run([sys.executable, "-m", "benchmarks.lab.prefill_lab", "time", *good], timeout=60, check=False)
        print("timing", done.returncode)


if __name__ == "__main__":
    main()
