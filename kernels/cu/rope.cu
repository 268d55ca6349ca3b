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
};

KERNEL rope(PARAMS Rope p) {
    u32 row = blockIdx.x, position = p.positions[row];
    if (position == PADDING) return;
    const float* table = p.table + (u64)position * 2 * p.half;
    for (u32 i = threadIdx.x; i < p.heads * p.half; i += blockDim.x) {
        u32 head = i / p.half, c = i % p.half;
        act *low = p.x + ((u64)row * p.heads + head) * 2 * p.half + c, *high = low + p.half;
        float cosine = table[c], sine = p.sign * table[p.half + c];
        float a = to_float(*low), b = to_float(*high);
        store(low, a * cosine - b * sine);
        store(high, b * cosine + a * sine);
    }
}
