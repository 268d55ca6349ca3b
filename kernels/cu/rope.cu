// rope: x (rows x heads x 2 half), table (positions x 2 half, cosines then sines) float32        x rotated in place
//
// Llama's half-split form; sign -1 rotates back. Padding rows are untouched.
#include "common.cuh"

struct Rope {
    act* x;
    const float* table;
    const u32* positions;
    u32 heads;
    u32 half;
    float sign;
    u32 pitch; // elements from row to row of x
    u32 each;  // neighbours that a thread has of either half: 8, where rows and halves begin at multiples of 16 bytes, or 1
    u32 items; // threads: rows * heads * half / each
};

// V neighbours of the lower half of a head, and V of the upper. They are fetched before it is known whether the row is one.
template <int V> __device__ __forceinline__ void rotate(const Rope& p, u32 item) {
    u32 each = p.half / V, all = p.heads * each, row = item / all, head = item % all / each, c = item % each * V;
    act *low = p.x + (u64)row * p.pitch + head * 2 * p.half + c, *high = low + p.half;
    float a[V], b[V], cosine[V], sine[V];
    load<V>(low, a);
    load<V>(high, b);
    u32 position = p.positions[row];
    if (position == PADDING) return;
    const float* table = p.table + (u64)position * 2 * p.half + c;
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

// Where everything begins at a multiple of 16 bytes eight at a time; a row's threads follow the last row's.
KERNEL rope(PARAMS Rope p) {
    u32 item = blockIdx.x * blockDim.x + threadIdx.x;
    if (item >= p.items) return;
    if (p.each == 8) rotate<8>(p, item);
    else rotate<1>(p, item);
}
