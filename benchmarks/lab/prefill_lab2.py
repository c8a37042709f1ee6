"""Second look: the kernel of the engine with other stages and orders of heads, against the first one, today's and SDPA."""

import json
import os
import statistics

import torch
import torch.nn.functional as F
from torch.nn.attention.bias import causal_lower_right

from benchmarks.lab.prefill_lab import PAGE, make, new
from replaylens.kernels.attention import attention
from replaylens.kernels.prefill import _prefill_kernel

LOG2E = 1.4426950408889634


def direct(q, k, v, rows, out, stages, together, window=0):
    kernel = _prefill_kernel[(len(rows.tiles) * k.shape[1],)](
        q, k, v, out, rows.tiles, rows.sequence, rows.position, rows.page_table,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), out.stride(0), out.stride(1), rows.page_table.stride(0),
        LOG2E * q.shape[2] ** -0.5, 0.0, window, len(rows.tiles), together, q.shape[1] // k.shape[1], q.shape[2], PAGE, 64, 512,
        stages, False, window > 0, 216, 72, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    return kernel


def replay(graph):
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    graph.replay()
    b.record()
    b.synchronize()
    return a.elapsed_time(b)


def main():
    table = []
    for lengths, new_rows, calls, window in (
        ([2048], 2048, 8, 0), ([4096], 4096, 6, 0), ([8192], 8192, 4, 0), ([16384], 16384, 2, 0), ([32768], 32768, 1, 0),
        ([8192], 1024, 8, 0), ([32768], 1024, 4, 0), ([512], 512, 16, 0), ([512] * 4, 512, 16, 0),
        ([4096], 512, 12, 0), ([4096], 256, 12, 0),
        ([128] * 64, 128, 16, 0), ([8192], 8192, 4, 1024),
    ):  # fmt: skip
        length, chosen = lengths[0], None
        if new_rows != length:
            chosen = range(length - new_rows, length)
        q, k, v, rows = make(lengths, 32, 8, 128, torch.bfloat16, chosen=chosen)
        out, scale, count = torch.empty_like(q), 128**-0.5, len(lengths)
        flat = q.view(count, new_rows, 32, 128).transpose(1, 2).contiguous()
        index = rows.page_table[:, : length // PAGE].long()
        dense = [x.view(-1, PAGE, 8, 128)[index].reshape(count, length, 8, 128).transpose(1, 2).contiguous() for x in (k, v)]
        arms = {}
        if chosen is not None:
            wide, bias = [x.repeat_interleave(4, 1) for x in dense], causal_lower_right(new_rows, length)
            arms["sdpa"] = lambda: F.scaled_dot_product_attention(flat, *wide, attn_mask=bias)
        else:
            arms["sdpa"] = lambda: F.scaled_dot_product_attention(flat, *dense, is_causal=True, enable_gqa=True)
        arms["today"] = lambda: attention(q, k, v, rows, scale, out=out, specialised=False, window=window)
        arms["today serial"] = lambda: attention(q, k, v, rows, scale, out=out, split=False, window=window)
        arms["engine"] = lambda: attention(q, k, v, rows, scale, out=out, specialised=True, window=window)
        if not window:
            arms["B3"] = lambda: new("B3", q, k, v, rows, scale, out=out)
        for stages in (3, 4):
            for together in (1, 2, 4, 8):
                arms[f"{stages} stages, {together} heads"] = lambda s=stages, t=together: direct(
                    q, k, v, rows, out, s, t, window
                )
        want = attention(q, k, v, rows, scale, specialised=False, window=window)
        graphs = {}
        for n, call in arms.items():
            out.fill_(float("nan"))
            found = call()
            torch.cuda.synchronize()
            if n != "sdpa":
                assert torch.equal(out, want), f"{n} differs"
            if "stages" in n and length == 2048:
                print(n, "regs", found.n_regs, "spills", found.n_spills, "smem", found.metadata.shared)
            graphs[n] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graphs[n]):
                for _ in range(calls):
                    call()
        for graph in graphs.values():
            replay(graph)
        times = {n: [] for n in arms}
        for _ in range(7):
            for n, graph in graphs.items():
                times[n].append(replay(graph) * 1e3 / calls)
        base = statistics.median(times["sdpa"])
        flop = 4 * count * new_rows * (length - new_rows / 2 + 0.5) * 32 * 128
        what = f"{count} x {new_rows} of {length}" + (f" window {window}" if window else "")
        for n in arms:
            t = statistics.median(times[n])
            table.append(dict(what=what, arm=n, us=round(t, 1), ratio=round(base / t, 3), tflops=round(flop / t / 1e6)))
            print(f"{what:28s} {n:20s} {t:9.1f} us  {base / t:5.3f} of SDPA  {flop / t / 1e6:5.0f} TFLOP/s", flush=True)
        if "OUT" in os.environ:
            with open(os.environ["OUT"] + "/prefill-lab2.json", "w") as f:
                f.write(json.dumps(table, indent=1))


if __name__ == "__main__":
    main()
