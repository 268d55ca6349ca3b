// lora_backward: dy (rows x outputs), x (rows x inputs), s (rows x s_width) of lora
//                ds = scale dy B (scratch, rows x s_width, float32), dx += dropout'(ds A), dB += scale dy^T s, dA += ds^T dropout(x)
//
// Gradients of one group have one owner a patch (64 of the wide side x up to 64 ranks), which walks over the group's tiles of rows in
// order. Rows in no group and padding rows are untouched, and read as zero.
#include "lora.cuh"

KERNEL __launch_bounds__(SHRINK_THREADS) lora_backward_shrink(PARAMS Lora p) { shrink<false>(p); }
KERNEL __launch_bounds__(EXPAND_THREADS) lora_backward_expand(PARAMS Lora p) { expand<false>(p); }

#define DEPTH 64 // rows at a time
#define CHUNK 64 // ranks at a time
#define THREADS 128

// ROWS x COLS of x from (row, column) on, dropped out where the group says so; past `rows` or the width: zero.
template <int ROWS, int COLS>
__device__ __forceinline__ void load_dropped(act* tile, u32 ld, const Lora& p, const Group& group, u64 row, u32 sequence, u32 rows, u32 column, bool drop) {
    if (!drop) {
        load_tile<ROWS, COLS>(tile, ld, p.x + row * p.wide + column, p.wide, rows, min((u32)COLS, p.wide - column));
    } else if (p.wide % 8 == 0) {
        for (u32 i = threadIdx.x; i < ROWS * COLS / 8; i += THREADS) {
            u32 r = i / (COLS / 8), c = i % (COLS / 8) * 8;
            float v[8] = {};
            if (r < rows && column + c < p.wide) {
                load<8>(p.x + (row + r) * p.wide + column + c, v);
                dropout<8>(v, group.key, sequence, p.positions[row + r], column + c, group.probability);
            }
            save<8>(tile + r * ld + c, v);
        }
    } else {
        for (u32 i = threadIdx.x; i < ROWS * COLS; i += THREADS) {
            u32 r = i / COLS, c = i % COLS;
            float v[1] = {};
            if (r < rows && column + c < p.wide) {
                load<1>(p.x + (row + r) * p.wide + column + c, v);
                dropout<1>(v, group.key, sequence, p.positions[row + r], column + c, group.probability);
            }
            store(tile + r * ld + c, v[0]);
        }
    }
}

// Patch (64 wide columns x CHUNK ranks) of x^T s over the rows of a group: dA where A, else dB.
template <bool A> __device__ __forceinline__ void gradient(const Lora& p) {
    constexpr int LDX = 64 + PAD, LDS = CHUNK + PAD;
    __shared__ __align__(16) act x[DEPTH * LDX];
    __shared__ __align__(16) act s[DEPTH * LDS];
    u32 column = blockIdx.x * 64, rank = blockIdx.z * CHUNK;
    const Group group = p.groups[blockIdx.y];
    if (rank >= group.rank) return;
    u32 ranks = min(group.rank - rank, (u32)CHUNK), blocks = (ranks + 7) / 8, padded = blocks * 8;
    u32 base = threadIdx.x / 32 * 16;
    float acc[CHUNK / 8][4] = {};
    for (u32 t = group.first_tile; t < group.end_tile; t++) {
        Rows tile = p.tiles[t];
        for (u32 before = 0; before < tile.valid; before += DEPTH) {
            u32 rows = min(tile.valid - before, (u32)DEPTH);
            u64 row = tile.row + before;
            __syncthreads();
            load_dropped<DEPTH, 64>(x, LDX, p, group, row, tile.sequence, rows, column, A && group.probability > 0);
            for (u32 i = threadIdx.x; i < DEPTH * padded; i += THREADS) {
                u32 r = i / padded, c = i % padded;
                store(s + r * LDS + c, r < rows && c < ranks ? p.s_in[(row + r) * p.s_width + rank + c] : 0.0f);
            }
            __syncthreads();
            warp_mma<true, true>(acc, x + base, LDX, s, LDS, DEPTH, blocks);
        }
    }
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 wide = column + base + acc_row(i), c = j * 8 + acc_col(i);
            if (wide >= p.wide || c >= ranks) continue;
            if (A) group.da[(u64)(rank + c) * p.wide + wide] += acc[j][i];
            else group.db[(u64)wide * group.rank + rank + c] += group.scale * acc[j][i];
        }
}

KERNEL __launch_bounds__(THREADS) lora_gradient_a(PARAMS Lora p) { gradient<true>(p); }
KERNEL __launch_bounds__(THREADS) lora_gradient_b(PARAMS Lora p) { gradient<false>(p); }
