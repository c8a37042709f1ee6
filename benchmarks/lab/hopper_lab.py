"""Canonical prefill attention for Hopper with warp specialisation: one warpgroup loads, two multiply."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


@gluon.jit
def _merge_scales(m, m1):
    top = gl.maximum(m, m1)
    safe = gl.where(top == float("-inf"), 0.0, top)
    return top, gl.exp2(m - safe), gl.exp2(m1 - safe)


@gluon.jit
def _closed(sums, ROWS: gl.constexpr, BLOCK: gl.constexpr, S: gl.constexpr):
    one: gl.constexpr = gl.BlockedLayout([1, BLOCK // 2], [32, 1], [4, 1], [1, 0])
    x = gl.convert_layout(sums, one)
    return gl.convert_layout(gl.sum(x, axis=1), gl.SliceLayout(1, S))


@gluon.jit
def _softmax(
    s,
    m,
    sums,
    position,
    clear,
    top_position,
    start,
    scale,
    softcap,
    window,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    CAPPED: gl.constexpr,
    WINDOWED: gl.constexpr,
    S: gl.constexpr,
):
    s = s * scale
    if CAPPED:
        s = softcap - 2.0 * softcap / (1.0 + gl.exp2(s))
    hidden = start + BLOCK - 1 > clear
    if WINDOWED:
        hidden = hidden | (start <= top_position - window)
    if hidden:
        j = start + gl.arange(0, BLOCK, gl.SliceLayout(0, S))
        seen = j[None, :] <= position[:, None]
        if WINDOWED:
            seen = seen & (j[None, :] > position[:, None] - window)
        s = gl.where(seen, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, axis=1))
    safe = gl.where(top == float("-inf"), 0.0, top)
    shrink = gl.exp2(m - safe)
    p = gl.exp2(s - safe[:, None])
    even, odd = gl.split(gl.reshape(p, [ROWS, BLOCK // 2, 2]))
    pairs = even + odd
    sums = sums * gl.convert_layout(shrink, gl.SliceLayout(1, sums.type.layout))[:, None] + pairs
    return top, sums, shrink, p


@gluon.jit
def _consume(
    WG: gl.constexpr,
    Q,
    OUT,
    POSITION,
    q_buf,
    outer,
    k_buf,
    v_buf,
    k_full,
    k_free,
    v_full,
    v_free,
    first_row,
    num_rows,
    kv_head,
    first,
    end,
    stride_qr,
    stride_qh,
    stride_or,
    stride_oh,
    scale,
    softcap,
    window,
    GROUP: gl.constexpr,
    HEAD: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    CAPPED: gl.constexpr,
    WINDOWED: gl.constexpr,
    PIPE: gl.constexpr,
    OUTER: gl.constexpr,
    QREG: gl.constexpr,
    PING: gl.constexpr,
    turn,
):
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, 2)
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [4, 1], [1, 0])
    RA: gl.constexpr = gl.SliceLayout(1, A)
    # queries into shared memory
    pair = WG * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, L))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, L))
    row = (first_row + pair // GROUP).to(gl.int64)
    valid = pair < num_rows * GROUP
    at = row * stride_qr + (kv_head * GROUP + pair % GROUP) * stride_qh
    q = gl.load(Q + at[:, None] + d[None, :], mask=valid[:, None], other=0.0)
    q_buf.store(q)
    fence_async_shared()
    gl.thread_barrier()
    if QREG:
        qa = q_buf.load(gl.DotOperandLayout(0, S, 2))
    else:
        qa = q_buf

    pair_s = WG * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, S))
    seen_s = pair_s < num_rows * GROUP
    position = gl.load(POSITION + first_row + pair_s // GROUP, mask=seen_s, other=-1)
    clear = gl.min(gl.where(seen_s, position, 2147483647), axis=0)
    top_position = gl.max(position, axis=0)

    m = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
    l = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, S))
    zero_s = gl.full([ROWS, BLOCK], 0.0, gl.float32, S)
    zero_a = gl.full([ROWS, HEAD], 0.0, gl.float32, A)
    none, _ = gl.split(gl.reshape(zero_s, [ROWS, BLOCK // 2, 2]))
    a = zero_a
    if OUTER == 1:
        outer.store(zero_a)
    it = 0
    turns = 0
    for split in range(first // SPLIT, gl.cdiv(end, SPLIT)):
        m1 = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, S))
        sums = none
        begin = gl.maximum(first, split * SPLIT)
        stop = gl.minimum(end, (split + 1) * SPLIT)
        if PIPE == 0:
            acc = warpgroup_mma_init(zero_a)
            p = gl.convert_layout(gl.full([ROWS, BLOCK], 0.0, gl.float32, S).to(v_buf.dtype), P)
            for start in range(begin, stop, BLOCK):
                stage, phase = it % STAGES, (it // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                s = warpgroup_mma(qa, k_buf.index(stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
                s, a1, p = warpgroup_mma_wait(0, deps=(s, acc, p))
                gl.thread_barrier()
                mbarrier.arrive(k_free.index(stage), count=1)
                mbarrier.arrive(v_free.index((it + STAGES - 1) % STAGES), count=1, pred=start > begin)
                m1, sums, shrink, p32 = _softmax(
                    s, m1, sums, position, clear, top_position, start, scale, softcap, window, ROWS, BLOCK, CAPPED, WINDOWED, S
                )
                p = gl.convert_layout(p32.to(v_buf.dtype), P)
                a1 = a1 * gl.convert_layout(shrink, RA)[:, None]
                mbarrier.wait(v_full.index(stage), phase)
                acc = warpgroup_mma(p, v_buf.index(stage), a1, is_async=True)
                it += 1
            a1, p = warpgroup_mma_wait(0, deps=(acc, p))
            gl.thread_barrier()
            mbarrier.arrive(v_free.index((it + STAGES - 1) % STAGES), count=1)
        else:
            stage, phase = it % STAGES, (it // STAGES) & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(qa, k_buf.index(stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=(s,))
            gl.thread_barrier()
            mbarrier.arrive(k_free.index(stage), count=1)
            m1, sums, shrink, p32 = _softmax(
                s, m1, sums, position, clear, top_position, begin, scale, softcap, window, ROWS, BLOCK, CAPPED, WINDOWED, S
            )
            p = gl.convert_layout(p32.to(v_buf.dtype), P)
            a1 = zero_a
            it += 1
            for start in range(begin + BLOCK, stop, BLOCK):
                stage, phase = it % STAGES, (it // STAGES) & 1
                before, phase_before = (it - 1) % STAGES, ((it - 1) // STAGES) & 1
                mbarrier.wait(k_full.index(stage), phase)
                if PING:
                    mbarrier.wait(turn.index(WG), (turns & 1) ^ (1 - WG))
                s = warpgroup_mma(qa, k_buf.index(stage).permute((1, 0)), zero_s, use_acc=False, is_async=True)
                mbarrier.wait(v_full.index(before), phase_before)
                acc = warpgroup_mma(p, v_buf.index(before), a1, is_async=True)
                if PING:
                    mbarrier.arrive(turn.index(1 - WG), count=1)
                    turns += 1
                s = warpgroup_mma_wait(1, deps=(s,))
                m1, sums, shrink, p32 = _softmax(
                    s, m1, sums, position, clear, top_position, start, scale, softcap, window, ROWS, BLOCK, CAPPED, WINDOWED, S
                )
                a1, p = warpgroup_mma_wait(0, deps=(acc, p))
                gl.thread_barrier()
                mbarrier.arrive(k_free.index(stage), count=1)
                mbarrier.arrive(v_free.index(before), count=1)
                p = gl.convert_layout(p32.to(v_buf.dtype), P)
                a1 = a1 * gl.convert_layout(shrink, RA)[:, None]
                it += 1
            stage, phase = (it - 1) % STAGES, ((it - 1) // STAGES) & 1
            mbarrier.wait(v_full.index(stage), phase)
            acc = warpgroup_mma(p, v_buf.index(stage), a1, is_async=True)
            l1 = _closed(sums, ROWS, BLOCK, S)
            a1, p = warpgroup_mma_wait(0, deps=(acc, p))
            gl.thread_barrier()
            mbarrier.arrive(v_free.index(stage), count=1)
        if PIPE == 0:
            l1 = _closed(sums, ROWS, BLOCK, S)
        m, x, x1 = _merge_scales(m, m1)
        l = l * x + l1 * x1
        if OUTER == 1:
            a = outer.load(A)
        a = a * gl.convert_layout(x, RA)[:, None] + a1 * gl.convert_layout(x1, RA)[:, None]
        if OUTER == 1:
            outer.store(a)
    if OUTER == 1:
        a = outer.load(A)
    l = gl.where(seen_s, l, 1.0)
    a = a / gl.convert_layout(l, RA)[:, None]
    pair_a = WG * ROWS + gl.arange(0, ROWS, RA)
    d_a = gl.arange(0, HEAD, gl.SliceLayout(0, A))
    row_a = (first_row + pair_a // GROUP).to(gl.int64)
    at_a = row_a * stride_or + (kv_head * GROUP + pair_a % GROUP) * stride_oh
    gl.store(OUT + at_a[:, None] + d_a[None, :], a.to(OUT.dtype.element_ty), mask=(pair_a < num_rows * GROUP)[:, None])


@gluon.jit
def _slots(TABLE, start, end, r, kv_stride, PAGE: gl.constexpr):
    j = start + r
    page = gl.load(TABLE + j // PAGE, mask=j < end, other=0).to(gl.int64)
    return (page * PAGE + j % PAGE) * kv_stride


@gluon.jit
def _produce(
    K,
    V,
    TABLE,
    k_buf,
    v_buf,
    k_full,
    k_free,
    v_full,
    v_free,
    first,
    end,
    kv_stride,
    HEAD: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS: gl.constexpr,
):
    L: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD, HEAD // 8], [WARPS, 1], [1, 0])
    LAG: gl.constexpr = STAGES - 2  # blocks in flight behind the one being issued
    r = gl.arange(0, BLOCK, gl.SliceLayout(1, L))
    d = gl.arange(0, HEAD, gl.SliceLayout(0, L))
    slot = _slots(TABLE, first, end, r, kv_stride, PAGE)
    it = 0
    for start in range(first, end, BLOCK):
        stage, phase = it % STAGES, (it // STAGES) & 1
        at = slot[:, None] + d[None, :]
        here = (start + r < end)[:, None]
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(k_buf.index(stage), K + at, mask=here)
        async_copy.commit_group()
        slot = _slots(TABLE, start + BLOCK, end, r, kv_stride, PAGE)  # of the next block
        async_copy.wait_group(2 * LAG)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(k_full.index((it + STAGES - LAG) % STAGES), count=1, pred=it >= LAG)
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        async_copy.async_copy_global_to_shared(v_buf.index(stage), V + at, mask=here)
        async_copy.commit_group()
        async_copy.wait_group(2 * LAG)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(v_full.index((it + STAGES - LAG) % STAGES), count=1, pred=it >= LAG)
        it += 1
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()
    for back in gl.static_range(LAG):
        mbarrier.arrive(k_full.index((it + STAGES - LAG + back) % STAGES), count=1, pred=it >= LAG - back)
        mbarrier.arrive(v_full.index((it + STAGES - LAG + back) % STAGES), count=1, pred=it >= LAG - back)


@gluon.jit
def prefill_kernel(
    Q,
    K,
    V,
    OUT,
    TILES,
    SEQUENCE,
    POSITION,
    TABLES,
    stride_qr,
    stride_qh,
    kv_stride,
    head_stride,
    stride_or,
    stride_oh,
    stride_t,
    scale,
    softcap,
    window,
    GROUP: gl.constexpr,
    HEAD: gl.constexpr,
    PAGE: gl.constexpr,
    BLOCK: gl.constexpr,
    SPLIT: gl.constexpr,
    STAGES: gl.constexpr,
    CAPPED: gl.constexpr,
    WINDOWED: gl.constexpr,
    PIPE: gl.constexpr,
    OUTER: gl.constexpr,
    QREG: gl.constexpr,
    PING: gl.constexpr,
    REGS: gl.constexpr,
    PREGS: gl.constexpr,
    HEADS_FIRST: gl.constexpr,
):
    ROWS: gl.constexpr = 64
    if HEADS_FIRST:
        kv_head, tile = gl.program_id(0), gl.program_id(1)
    else:
        tile, kv_head = gl.program_id(0), gl.program_id(1)
    first_row, num_rows = gl.load(TILES + tile * 2), gl.load(TILES + tile * 2 + 1)
    B: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    pair = gl.arange(0, 128, B)
    valid = pair < num_rows * GROUP
    position = gl.load(POSITION + first_row + pair // GROUP, mask=valid, other=-1)
    end = gl.max(position, axis=0) + 1
    first = 0
    if WINDOWED:
        clear = gl.min(gl.where(valid, position, 2147483647), axis=0)
        first = gl.maximum(clear - window + 1, 0) // BLOCK * BLOCK
        first = gl.where(num_rows > 0, first, 0)
    TABLE = TABLES + gl.load(SEQUENCE + first_row).to(gl.int64) * stride_t
    K += kv_head * head_stride
    V += kv_head * head_stride
    KV: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK, HEAD], K.dtype.element_ty)
    QL: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, HEAD], K.dtype.element_ty)
    OL: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 8, [1, 0])
    k_buf = gl.allocate_shared_memory(K.dtype.element_ty, [STAGES, BLOCK, HEAD], KV)
    v_buf = gl.allocate_shared_memory(K.dtype.element_ty, [STAGES, BLOCK, HEAD], KV)
    q_buf = gl.allocate_shared_memory(K.dtype.element_ty, [2, ROWS, HEAD], QL)
    if OUTER == 1:
        outer = gl.allocate_shared_memory(gl.float32, [2, ROWS, HEAD], OL)
    else:
        outer = q_buf
    BL: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], BL)
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], BL)
    mbarrier.init(turn.index(0), count=1)
    mbarrier.init(turn.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)
    gl.thread_barrier()
    gl.warp_specialize(
        [
            (
                _consume,
                (
                    0,
                    Q,
                    OUT,
                    POSITION,
                    q_buf.index(0),
                    outer.index(0),
                    k_buf,
                    v_buf,
                    k_full,
                    k_free,
                    v_full,
                    v_free,
                    first_row,
                    num_rows,
                    kv_head,
                    first,
                    end,
                    stride_qr,
                    stride_qh,
                    stride_or,
                    stride_oh,
                    scale,
                    softcap,
                    window,
                    GROUP,
                    HEAD,
                    ROWS,
                    BLOCK,
                    SPLIT,
                    STAGES,
                    CAPPED,
                    WINDOWED,
                    PIPE,
                    OUTER,
                    QREG,
                    PING,
                    turn,
                ),
            ),
            (
                _consume,
                (
                    1,
                    Q,
                    OUT,
                    POSITION,
                    q_buf.index(1),
                    outer.index(1),
                    k_buf,
                    v_buf,
                    k_full,
                    k_free,
                    v_full,
                    v_free,
                    first_row,
                    num_rows,
                    kv_head,
                    first,
                    end,
                    stride_qr,
                    stride_qh,
                    stride_or,
                    stride_oh,
                    scale,
                    softcap,
                    window,
                    GROUP,
                    HEAD,
                    ROWS,
                    BLOCK,
                    SPLIT,
                    STAGES,
                    CAPPED,
                    WINDOWED,
                    PIPE,
                    OUTER,
                    QREG,
                    PING,
                    turn,
                ),
            ),
            (
                _produce,
                (
                    K,
                    V,
                    TABLE,
                    k_buf,
                    v_buf,
                    k_full,
                    k_free,
                    v_full,
                    v_free,
                    first,
                    end,
                    kv_stride,
                    HEAD,
                    PAGE,
                    BLOCK,
                    STAGES,
                    4,
                ),
            ),
        ],
        [4, 4],
        [REGS, PREGS],
    )
