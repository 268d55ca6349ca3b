// rope: x (rows x heads x 2 half), table (positions x 2 half, cosines then sines) float32        x rotated in place
//
// Llama's half-split form; sign -1 rotates back. Padding rows are untouched. One block a row.
#include "common.cuh"

struct Rope {
    act* x;
    const float* table;
    const u32* positions;
    u32 heads;
    u32 half;
    float sign;
    u32 pitch; // elements from row to row of x
};

// V neighbours of the lower half of a head, and V of the upper.
template <int V> __device__ __forceinline__ void rotate(const Rope& p, u32 row, u32 item) {
    u32 each = p.half / V, head = item / each, c = item % each * V;
    act *low = p.x + (u64)row * p.pitch + head * 2 * p.half + c, *high = low + p.half;
    const float* table = p.table + (u64)p.positions[row] * 2 * p.half + c;
    float a[V], b[V], cosine[V], sine[V];
    load<V>(low, a);
    load<V>(high, b);
    load<V>(table, cosine);
    load<V>(table + p.half, sine);
#pragma unroll
    for (int i = 0; i < V; i++) {
        float s = p.sign * sine[i], x = a[i];
        a[i] = x * cosine[i] - b[i] * s;
        b[i] = b[i] * cosine[i] + x * s;
    }
    save<V>(low, a);
    save<V>(high, b);
}

KERNEL rope(PARAMS Rope p) {
    u32 row = blockIdx.x;
    if (p.positions[row] == PADDING) return;
    bool eight = p.half % 8 == 0 && p.pitch % 8 == 0 && (u64)p.x % 16 == 0;
    for (u32 i = threadIdx.x; i < p.heads * p.half / (eight ? 8 : 1); i += blockDim.x) {
        if (eight) rotate<8>(p, row, i);
        else rotate<1>(p, row, i);
    }
}
