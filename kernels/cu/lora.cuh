// What LoRA forward and backward share: the tables of groups and tiles, and the two products with a narrow side.
// Must never accumulate across tiles of rows: that is lora_backward.cu's.
#pragma once
#include "philox.cuh"
#include "tile.cuh"

struct Group {
    const float* a; // rank x inputs
    const float* b; // outputs x rank
    float* da;
    float* db;
    u64 key; // of dropout
    float scale;
    float probability; // 0: no dropout
    u32 rank;
    u32 first_tile, end_tile;
    u32 zero;
};

// Up to 128 rows of one segment.
struct Rows {
    u32 row, valid, group, sequence;
};

struct Lora {
    const act* x;   // what is read: x (rows x wide), or dy
    act* y;         // what is added to: y (rows x wide), or dx
    const float* s_in;
    float* s_out;   // rows x s_width
    const Group* groups;
    const Rows* tiles;
    const u32* positions;
    u32 wide; // width of x or y
    u32 s_width;
};

// Both products below keep their operands in registers. A lane holds rows g = lane / 4 and g + 8 of 16; with t = lane % 4 it holds eight
// neighbours: of the inner dimension (shrink: 8 t .. 8 t + 8 of 32) or of the columns (expand: likewise), 16 bytes of bf16. The tensor
// cores take them in that order: which of their inner places or columns an element stands at is ours to choose, if both sides agree.

// W's eight elements (k .. k + 8) of column n, by rows of `inner` (A) or by columns `rank` apart (B^T); zero past either end.
template <bool BY_ROWS> __device__ __forceinline__ void load_narrow(float (&w)[8], const float* from, u32 n, u32 rank, u32 k, u32 inner) {
    if (BY_ROWS && inner % 4 == 0 && (u64)from % 16 == 0 && n < rank && k + 8 <= inner) {
        load<8>(from + (u64)n * inner + k, w);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            w[i] = n < rank && k + i < inner ? from[BY_ROWS ? (u64)n * inner + k + i : (u64)(k + i) * rank + n] : 0.0f;
    }
}

// Chunks whose loads are in flight together. float32 is for correctness: one, and short code.
#if NODUS_BF16
#define UNROLL 4
#else
#define UNROLL 1
#endif

#define SHRINK_ROWS 16
#define SHRINK_RANKS 32
#define SHRINK_THREADS 512

// s_out (16 rows x 32 ranks) = x W, W = A^T (forward, x dropped out), or scale * x W, W = B (backward).
// Sixteen warps take 32 inner elements each in turn; their sums are added in order.
template <bool FORWARD> __device__ __forceinline__ void shrink(const Lora& p) {
    constexpr int WARPS = SHRINK_THREADS / 32, BLOCKS = SHRINK_RANKS / 8;
    __shared__ float sums[WARPS][SHRINK_ROWS][SHRINK_RANKS];
    Rows tile = p.tiles[blockIdx.x / (TILE_ROWS / SHRINK_ROWS)];
    u32 before = blockIdx.x % (TILE_ROWS / SHRINK_ROWS) * SHRINK_ROWS;
    const Group group = p.groups[tile.group];
    u32 rank = blockIdx.y * SHRINK_RANKS;
    if (before >= tile.valid || rank >= group.rank) return;
    u32 rows = min(tile.valid - before, (u32)SHRINK_ROWS), ranks = min(group.rank - rank, (u32)SHRINK_RANKS);
    u64 row = tile.row + before;
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    bool drop = FORWARD && group.probability > 0;
    const float* narrow = FORWARD ? group.a : group.b;
#if NODUS_BF16
    float acc[BLOCKS][4] = {};
#else
    float acc[BLOCKS][2][8] = {};
#endif
#pragma unroll UNROLL
    for (u32 k = warp * 32 + t * 8; k < (p.wide + 31) / 32 * 32; k += WARPS * 32) {
        float x[2][8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = g + half * 8;
            bool real = r < rows;
            if (p.wide % 8 == 0) {
#pragma unroll
                for (int i = 0; i < 8; i++) x[half][i] = 0;
                if (real && k < p.wide) load<8>(p.x + (row + r) * p.wide + k, x[half]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) x[half][i] = real && k + i < p.wide ? to_float(p.x[(row + r) * p.wide + k + i]) : 0.0f;
            }
            if (drop && real) dropout<8>(x[half], group.key, tile.sequence, p.positions[row + r], k, group.probability);
        }
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            if (j * 8 >= ranks) continue;
            float w[8];
            load_narrow<FORWARD>(w, narrow, rank + j * 8 + g, group.rank, k, p.wide);
#if NODUS_BF16
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                u32 a[4] = {pack(x[0][i], x[0][i + 1]), pack(x[1][i], x[1][i + 1]), pack(x[0][i + 2], x[0][i + 3]), pack(x[1][i + 2], x[1][i + 3])};
                u32 b[2] = {pack(w[i], w[i + 1]), pack(w[i + 2], w[i + 3])};
                mma(acc[j], a, b);
            }
#else
            // Column n's elements are with the lanes whose g is n.
#pragma unroll
            for (int n = 0; n < 8; n++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    float value = __shfl_sync(0xffffffffu, w[i], n * 4 + t);
                    acc[j][0][n] = fmaf(x[0][i], value, acc[j][0][n]);
                    acc[j][1][n] = fmaf(x[1][i], value, acc[j][1][n]);
                }
#endif
        }
    }
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
#if NODUS_BF16
#pragma unroll
        for (int i = 0; i < 4; i++) sums[warp][acc_row(i)][j * 8 + acc_col(i)] = acc[j][i];
#else
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int n = 0; n < 8; n++) {
                float value = acc[j][half][n];
                value += __shfl_xor_sync(0xffffffffu, value, 1);
                value += __shfl_xor_sync(0xffffffffu, value, 2);
                if (t == 0) sums[warp][g + half * 8][j * 8 + n] = value;
            }
#endif
    }
    __syncthreads();
    for (u32 i = threadIdx.x; i < rows * ranks; i += SHRINK_THREADS) {
        u32 r = i / ranks, c = i % ranks;
        float sum = 0;
#pragma unroll
        for (int part = 0; part < WARPS; part++) sum += sums[part][r][c];
        p.s_out[(row + r) * p.s_width + rank + c] = FORWARD ? sum : group.scale * sum;
    }
}

#define EXPAND_ROWS 64
#define EXPAND_COLS 128
#define EXPAND_THREADS 128

// y (64 rows x 128 columns) += scale * s W, W = B^T (forward), or dropout'(s W), W = A (backward: s is ds, which has the scale).
template <bool FORWARD> __device__ __forceinline__ void expand(const Lora& p) {
    Rows tile = p.tiles[blockIdx.x / (TILE_ROWS / EXPAND_ROWS)];
    u32 before = blockIdx.x % (TILE_ROWS / EXPAND_ROWS) * EXPAND_ROWS + threadIdx.x / 32 * 16;
    if (before >= tile.valid) return;
    const Group group = p.groups[tile.group];
    u32 rows = min(tile.valid - before, 16u), g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    u64 row = tile.row + before;
    u32 column = blockIdx.y * EXPAND_COLS;
    float acc[EXPAND_COLS / 8][4] = {};
    const float* narrow = FORWARD ? group.b : group.a;
    // Element (k, column c) of W.
    auto element = [&](u32 k, u32 c) { return k < group.rank && c < p.wide ? narrow[FORWARD ? (u64)c * group.rank + k : (u64)k * p.wide + c] : 0.0f; };
    auto inner = [&](u32 r, u32 k) { return r < rows && k < group.rank ? p.s_in[(row + r) * p.s_width + k] : 0.0f; };
#if NODUS_BF16
    for (u32 k = 0; k < group.rank; k += 16) {
        u32 at = k + t * 2;
        u32 a[4] = {pack(inner(g, at), inner(g, at + 1)), pack(inner(g + 8, at), inner(g + 8, at + 1)), 0, 0};
        if (k + 8 < group.rank) {
            a[2] = pack(inner(g, at + 8), inner(g, at + 9));
            a[3] = pack(inner(g + 8, at + 8), inner(g + 8, at + 9));
        }
#pragma unroll
        for (int j = 0; j < EXPAND_COLS / 8; j++) {
            // Block j's column n stands for column 8 (n / 2) + 2 (j % 4) + n % 2 of its 32.
            u32 c = column + j / 4 * 32 + g / 2 * 8 + j % 4 * 2 + g % 2;
            u32 b[2] = {pack(element(at, c), element(at + 1, c)), 0};
            if (k + 8 < group.rank) b[1] = pack(element(at + 8, c), element(at + 9, c));
            mma(acc[j], a, b);
        }
    }
#else
#pragma unroll 1
    for (u32 k = 0; k < group.rank; k++) {
        float low = inner(g, k), high = inner(g + 8, k);
#pragma unroll
        for (int j = 0; j < EXPAND_COLS / 8; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float value = element(k, column + j / 4 * 32 + t * 8 + j % 4 * 2 + i);
                acc[j][i] = fmaf(low, value, acc[j][i]);
                acc[j][2 + i] = fmaf(high, value, acc[j][2 + i]);
            }
    }
#endif
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u32 r = g + half * 8;
        if (r >= rows) continue;
#pragma unroll
        for (int quad = 0; quad < EXPAND_COLS / 32; quad++) {
            u32 c = column + quad * 32 + t * 8;
            if (c >= p.wide) continue;
            float v[8];
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = acc[quad * 4 + i / 2][half * 2 + i % 2] * (FORWARD ? group.scale : 1.0f);
            if (!FORWARD && group.probability > 0) dropout<8>(v, group.key, tile.sequence, p.positions[row + r], c, group.probability);
            act* y = p.y + (row + r) * p.wide + c;
            if (p.wide % 8 == 0) {
                float old[8];
                load<8>(y, old);
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] += old[i];
                save<8>(y, v);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (c + i < p.wide) store(y + i, to_float(y[i]) + v[i]);
            }
        }
    }
}
