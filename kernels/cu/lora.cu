// lora: x (rows x inputs), and for up to three modules, per group A (rank x inputs), B (outputs x rank) float32
//       s (rows x s_width, first rank columns) float32 =, y (rows x outputs) +=: s = dropout(x) A^T, y += scale s B^T
//
// Over a table of tiles, each of up to 128 rows of one segment of one group. Rows in no group, padding rows and the columns of s from
// rank on are untouched. For bf16 A, B, s and the dropped-out x are rounded to bf16 before they are multiplied.
#include "lora.cuh"

KERNEL __launch_bounds__(SHRINK_THREADS, 2) lora_shrink(PARAMS Lora p) { shrink<true, false, SHRINK_BLOCKS, 1>(p); }
KERNEL __launch_bounds__(SHRINK_THREADS) lora_shrink_drop(PARAMS Lora p) { shrink<true, true, SHRINK_BLOCKS, 1>(p); }

#define SUBS 1 // of 16 rows, of a block
#define STEPS 4 // of 128 columns, of a block

// 16 rows x 512 columns of one module; the modules' blocks of columns follow one another.
KERNEL __launch_bounds__(EXPAND_THREADS, 5) lora_expand(PARAMS Lora p) {
    constexpr u32 ROWS = SUBS * 16, COLS = STEPS * EXPAND_COLS;
    u32 m = 0, block = blockIdx.x % p.columns, part = blockIdx.x / p.columns;
    Rows tile = p.tiles[part / (TILE_ROWS / ROWS)];
    u32 before = part % (TILE_ROWS / ROWS) * ROWS;
    if (before >= tile.valid) return;
    while (block >= (p.modules[m].wide + COLS - 1) / COLS) block -= (p.modules[m].wide + COLS - 1) / COLS, m++;
    const Module& to = p.modules[m];
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, column = block * COLS + threadIdx.x / 32 * 32;
    u32 rows = min(tile.valid - before, ROWS);
    u64 row = tile.row + before;
    act* y = to.y + row * to.pitch;
    bool eight = to.wide % 8 == 0 && to.pitch % 8 == 0 && (u64)to.y % 16 == 0;
    // What is there is fetched before anything else is known; where nothing is stored, it is something else.
    Eight held[STEPS][SUBS][2];
    if (eight) {
#pragma unroll
        for (int step = 0; step < STEPS; step++)
#pragma unroll
            for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    u32 r = min(sub * 16 + g + half * 8, rows - 1), c = min(column + t * 8 + step * EXPAND_COLS, to.wide - 8);
                    hold(held[step][sub][half], y + (u64)r * to.pitch + c);
                }
    }
    const Group& group = p.groups[m * p.count + tile.group];
    u32 rank = group.rank;
    if (rank == 0) return;
    float scale = group.scale;
#pragma unroll
    for (int step = 0; step < STEPS; step++) {
        u32 first = column + step * EXPAND_COLS, c = first + t * 8;
        if (first >= to.wide) return;
        float acc[SUBS][4][4] = {};
        narrow_product<true, SUBS>(acc, group.b, rank, to.wide, first, to.s, to.s_width, row, rows);
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                u32 r = sub * 16 + g + half * 8;
                if (r >= rows || c >= to.wide) continue;
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = acc[sub][i / 2][half * 2 + i % 2];
                add_eight(y + (u64)r * to.pitch + c, held[step][sub][half], eight, to.wide - c, v, scale);
            }
    }
}
