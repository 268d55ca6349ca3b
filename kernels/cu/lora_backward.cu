// lora_backward: for up to three modules dy (rows x outputs), and their x (rows x inputs)
//                ds = scale dy B (scratch, rows x s_width, float32), dx += the sum over modules of dropout'(ds A) for groups that want it
//
// Gradients are lora_gradient.cu's. Rows in no group and padding rows are untouched, and read as zero.
#include "lora.cuh"

// 16 rows a block, or 32, which read B half as often: where blocks of 16 would be more than multiprocessors.
KERNEL __launch_bounds__(SHRINK_THREADS, 2) lora_backward_shrink(PARAMS Lora p) { shrink<false, false, 1, 1>(p); }
KERNEL __launch_bounds__(SHRINK_THREADS, 2) lora_backward_shrink_high(PARAMS Lora p) { shrink<false, false, 1, 2>(p); }

#define SUBS 2 // of 16 rows, of a block

// 32 rows x 128 columns of dx.
template <bool DROP> __device__ __forceinline__ void expand(const Lora& p) {
    constexpr u32 ROWS = SUBS * 16;
    u32 part = blockIdx.x / p.columns;
    Rows tile = p.tiles[part / (TILE_ROWS / ROWS)];
    u32 before = part % (TILE_ROWS / ROWS) * ROWS;
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, column = blockIdx.x % p.columns * EXPAND_COLS + threadIdx.x / 32 * 32;
    if (before >= tile.valid || column >= p.wide) return;
    u32 rows = min(tile.valid - before, ROWS), c = column + t * 8;
    u64 row = tile.row + before;
    bool eight = p.wide % 8 == 0;
    // What is there is fetched before anything else is known; where nothing is stored, it is something else.
    Eight held[SUBS][2];
    if (eight) {
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 r = min(sub * 16 + g + half * 8, rows - 1);
                hold(held[sub][half], p.dx + (row + r) * p.wide + min(c, p.wide - 8));
            }
    }
    const Group* groups = p.groups + tile.group;
    if (!groups->wants_dx) return;
    float sum[SUBS][4][4] = {};
    for (u32 m = 0; m < p.used; m++) {
        const Group& group = groups[m * p.count];
        const Module& from = p.modules[m];
        if (group.rank == 0) continue;
        if (!DROP || !(group.probability > 0)) {
            narrow_product<false, SUBS>(sum, group.a, group.rank, p.wide, column, from.ds, from.s_width, row, rows);
            continue;
        }
        float acc[SUBS][4][4] = {};
        narrow_product<false, SUBS>(acc, group.a, group.rank, p.wide, column, from.ds, from.s_width, row, rows);
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 r = sub * 16 + g + half * 8;
                if (r >= rows) continue;
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = acc[sub][i / 2][half * 2 + i % 2];
                dropout<8>(v, group.key, tile.sequence, p.positions[row + r], c, group.probability);
#pragma unroll
                for (int i = 0; i < 8; i++) sum[sub][i / 2][half * 2 + i % 2] += v[i];
            }
    }
    if (c >= p.wide) return;
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = sub * 16 + g + half * 8;
            if (r >= rows) continue;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = sum[sub][i / 2][half * 2 + i % 2];
            add_eight(p.dx + (row + r) * p.wide + c, held[sub][half], eight, p.wide - c, v, 1.0f);
        }
}

KERNEL __launch_bounds__(EXPAND_THREADS, 5) lora_backward_expand(PARAMS Lora p) { expand<false>(p); }
KERNEL __launch_bounds__(EXPAND_THREADS) lora_backward_expand_drop(PARAMS Lora p) { expand<true>(p); }
