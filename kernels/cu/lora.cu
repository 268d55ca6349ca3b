// lora: x (rows x inputs), and for up to three modules, per group A (rank x inputs), B (outputs x rank) float32
//       s (rows x s_width, first rank columns) float32 =, y (rows x outputs) +=: s = dropout(x) A^T, y += scale s B^T
//
// Over a table of tiles, each of up to 128 rows of one segment of one group. Rows in no group, padding rows and the columns of s from
// rank on are untouched. For bf16 A, B, s and the dropped-out x are rounded to bf16 before they are multiplied.
#include "lora.cuh"

KERNEL __launch_bounds__(SHRINK_THREADS) lora_shrink(PARAMS Lora p) { shrink<true, false>(p); }
KERNEL __launch_bounds__(SHRINK_THREADS) lora_shrink_drop(PARAMS Lora p) { shrink<true, true>(p); }

#define SUBS 4 // of 16 rows, of a block

// 64 rows x 128 columns of one module; the modules' blocks of columns follow one another.
KERNEL __launch_bounds__(EXPAND_THREADS) lora_expand(PARAMS Lora p) {
    constexpr u32 ROWS = SUBS * 16;
    Rows tile = p.tiles[blockIdx.x / (TILE_ROWS / ROWS)];
    u32 before = blockIdx.x % (TILE_ROWS / ROWS) * ROWS;
    if (before >= tile.valid) return;
    u32 m = 0, block = blockIdx.y;
    while (block >= (p.modules[m].wide + EXPAND_COLS - 1) / EXPAND_COLS) block -= (p.modules[m].wide + EXPAND_COLS - 1) / EXPAND_COLS, m++;
    const Module& to = p.modules[m];
    const Group& group = p.groups[m * p.count + tile.group];
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, column = block * EXPAND_COLS + threadIdx.x / 32 * 32;
    if (group.rank == 0 || column >= to.wide) return;
    u32 rows = min(tile.valid - before, ROWS);
    u64 row = tile.row + before;
    Eight held[SUBS][2];
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = sub * 16 + g + half * 8, c = column + t * 8;
            hold(held[sub][half], to.y + (row + r) * to.wide + c, to.wide, r < rows && c < to.wide);
        }
    float acc[SUBS][4][4] = {};
    narrow_product<true, SUBS>(acc, group.b, group.rank, to.wide, column, to.s, to.s_width, row, rows);
    u32 c = column + t * 8;
    if (c >= to.wide) return;
    float scale = group.scale;
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = sub * 16 + g + half * 8;
            if (r >= rows) continue;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = acc[sub][i / 2][half * 2 + i % 2] * scale;
            add_eight(to.y + (row + r) * to.wide + c, held[sub][half], c, to.wide, v);
        }
}
