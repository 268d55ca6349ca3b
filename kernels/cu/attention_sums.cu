// attention_delta:   delta (q rows x heads) float32 = row sums of dout * out. One block a row.
// attention_dkv_sum: dk, dv (kv rows x kv_heads x HEAD_DIM) = the sums of their parts (kv rows x heads x HEAD_DIM, float32), in the order of the heads. One block a
//                    row of a span of keys.
//
// What dq, dk and dv of either attention_backward need before and after. Padding rows are untouched.
#include "attention.cuh"

KERNEL attention_delta(PARAMS Attention p) {
    // Neighbouring threads have a head between them, eight columns each, where that many threads are a power of two; else a warp has it.
    constexpr bool EIGHT = HEAD_DIM % 8 == 0 && (HEAD_DIM / 8 & (HEAD_DIM / 8 - 1)) == 0;
    constexpr u32 TEAM = EIGHT ? HEAD_DIM / 8 : 32, V = EIGHT ? 8 : 1;
    u32 row = blockIdx.x;
    if (p.q_positions[row] == PADDING) return;
    for (u32 item = threadIdx.x; item < p.heads * TEAM; item += blockDim.x) {
        u64 at = (u64)row * p.heads * HEAD_DIM + item / TEAM * HEAD_DIM;
        float sum = 0;
        for (u32 c = item % TEAM * V; c < HEAD_DIM; c += TEAM * V) {
            float a[V], b[V];
            load<V>(p.dout + at + c, a);
            load<V>(p.out + at + c, b);
#pragma unroll
            for (int i = 0; i < V; i++) sum = fmaf(a[i], b[i], sum);
        }
#pragma unroll
        for (u32 offset = TEAM / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(__activemask(), sum, offset);
        if (item % TEAM == 0) ((float*)p.delta)[(u64)row * p.heads + item / TEAM] = sum;
    }
}

KERNEL attention_dkv_sum(PARAMS Attention p) {
    const Span& span = p.keys[blockIdx.x / TILE_ROWS];
    u32 row = span.row + blockIdx.x % TILE_ROWS, group = p.heads / p.kv_heads;
    if (blockIdx.x % TILE_ROWS >= span.valid) return;
    for (u32 i = threadIdx.x; i < p.kv_heads * HEAD_DIM; i += blockDim.x) {
        u64 from = ((u64)row * p.heads + i / HEAD_DIM * group) * HEAD_DIM + i % HEAD_DIM;
        float dk = 0, dv = 0;
        for (u32 head = 0; head < group; head++) {
            dk += p.dk_parts[from + head * HEAD_DIM];
            dv += p.dv_parts[from + head * HEAD_DIM];
        }
        store(p.dk + (u64)row * p.dk_pitch + i, dk);
        store(p.dv + (u64)row * p.dv_pitch + i, dv);
    }
}
