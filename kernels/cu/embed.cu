// embed: table (vocabulary x width), tokens (rows)                                    out (rows x width) = table[tokens]
//
// Padding rows are untouched. One block a row.
#include "common.cuh"

struct Embed {
    const act* table;
    act* out;
    const u32* tokens;
    const u32* positions;
    u32 width;
};

template <int V> __device__ void copy(const Embed& p, u32 row) {
    const act* from = p.table + (u64)p.tokens[row] * p.width;
    act* to = p.out + (u64)row * p.width;
    for (u32 c = threadIdx.x * V; c < p.width; c += blockDim.x * V) {
        float x[V];
        load<V>(from + c, x);
        save<V>(to + c, x);
    }
}

KERNEL embed(PARAMS Embed p) {
    u32 row = blockIdx.x;
    if (p.positions[row] == PADDING) return;
    if (p.width % 8 == 0) copy<8>(p, row);
    else copy<1>(p, row);
}
