// What LoRA forward and backward share: the tables of groups and tiles, and the two products with a narrow side.
// Must never accumulate across tiles of rows: that is lora_backward.cu's.
#pragma once
#include "philox.cuh"
#include "tile.cuh"

// An adapter's part of one module; rank 0: it has none there.
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
    u32 first_part, parts; // pieces of its rows whose gradients are added up by themselves
    u32 wants_dx;
};

// Up to 128 rows of one segment.
struct Rows {
    u32 row, valid, group, sequence;
};

// A module of a call.
struct Module {
    act* y;       // rows x wide: what is added to, or dy
    float* s;     // rows x s_width: s, written forward and read backward
    float* ds;    // the same of ds
    u32 wide;     // of y
    u32 s_width;
    u32 blocks;   // of 8 ranks, of the largest rank
    u32 zero;
};

#define MODULES 3

struct Lora {
    const act* x; // rows x wide
    act* dx;
    const Group* groups; // modules x count
    const Rows* tiles;
    const u32* positions;
    float* parts; // of gradients
    Module modules[MODULES];
    u32 wide; // of x
    u32 count; // of groups
    u32 used;  // modules
    u32 ranks; // of a patch of gradients: the largest rank, rounded up to 8
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

// Chunks whose loads are in flight together. float32 is for correctness: one, and short code. So it is with dropout, whose code is long: the
// kernels that know it are apart, and run where any group of a call drops anything.
#if NODUS_BF16
#define UNROLL(DROP) (DROP ? 1 : 4)
#else
#define UNROLL(DROP) 1
#endif

#define SHRINK_ROWS 16
#define SHRINK_BLOCKS 4 // of 8 ranks, of any modules
#define SHRINK_THREADS 512

// Forward: s (16 rows x 8 ranks, for four blocks of ranks of any modules) = x A^T, x dropped out. Backward: ds = scale * dy B, of one module.
// Sixteen warps take 32 inner elements each in turn; their sums are added in order.
template <bool FORWARD, bool DROP> __device__ __forceinline__ void shrink(const Lora& p) {
    constexpr int WARPS = SHRINK_THREADS / 32, BLOCKS = SHRINK_BLOCKS;
    __shared__ float sums[WARPS][SHRINK_ROWS][BLOCKS * 8];
    Rows tile = p.tiles[blockIdx.x / (TILE_ROWS / SHRINK_ROWS)];
    u32 before = blockIdx.x % (TILE_ROWS / SHRINK_ROWS) * SHRINK_ROWS;
    if (before >= tile.valid) return;
    u32 rows = min(tile.valid - before, (u32)SHRINK_ROWS);
    u64 row = tile.row + before;
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

    // Which module and which of its ranks each block is.
    u32 module[BLOCKS], first[BLOCKS];
    bool any = false;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        u32 m = FORWARD ? 0 : blockIdx.z, block = blockIdx.y * BLOCKS + j;
        if (FORWARD)
            while (m < p.used && block >= p.modules[m].blocks) block -= p.modules[m].blocks, m++;
        bool real = m < p.used && block < p.modules[m].blocks && block * 8 < p.groups[m * p.count + tile.group].rank;
        module[j] = real ? m : MODULES;
        first[j] = block * 8;
        any |= real;
    }
    if (!any) return;
    const Group* groups = p.groups + tile.group;
    const act* x_rows = FORWARD ? p.x : p.modules[blockIdx.z].y;
    u32 wide = FORWARD ? p.wide : p.modules[blockIdx.z].wide;
#if NODUS_BF16
    float acc[BLOCKS][4] = {};
#else
    float acc[BLOCKS][2][8] = {};
#endif
    const float* narrow[BLOCKS];
    u32 ranks[BLOCKS];
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        const Group* group = groups + (module[j] < MODULES ? module[j] : 0) * p.count;
        narrow[j] = FORWARD ? group->a : group->b;
        ranks[j] = module[j] < MODULES ? group->rank : 0;
    }
#pragma unroll UNROLL(DROP)
    for (u32 k = warp * 32 + t * 8; k < (wide + 31) / 32 * 32; k += WARPS * 32) {
        float x[2][8];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = g + half * 8;
            bool real = r < rows;
            if (wide % 8 == 0) {
#pragma unroll
                for (int i = 0; i < 8; i++) x[half][i] = 0;
                if (real && k < wide) load<8>(x_rows + (row + r) * wide + k, x[half]);
            } else {
#pragma unroll
                for (int i = 0; i < 8; i++) x[half][i] = real && k + i < wide ? to_float(x_rows[(row + r) * wide + k + i]) : 0.0f;
            }
        }
#pragma unroll
        for (int j = 0; j < BLOCKS; j++) {
            if (ranks[j] == 0) continue;
            float w[8];
            load_narrow<FORWARD>(w, narrow[j], first[j] + g, ranks[j], k, wide);
            float d[2][8];
#pragma unroll
            for (int half = 0; half < 2; half++) {
#pragma unroll
                for (int i = 0; i < 8; i++) d[half][i] = x[half][i];
                if constexpr (DROP) {
                    const Group* group = groups + module[j] * p.count;
                    u32 r = g + half * 8;
                    if (r < rows && group->probability > 0)
                        dropout<8>(d[half], group->key, tile.sequence, p.positions[row + r], k, group->probability);
                }
            }
#if NODUS_BF16
#pragma unroll
            for (int i = 0; i < 8; i += 4) {
                u32 a[4] = {pack(d[0][i], d[0][i + 1]), pack(d[1][i], d[1][i + 1]), pack(d[0][i + 2], d[0][i + 3]), pack(d[1][i + 2], d[1][i + 3])};
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
                    acc[j][0][n] = fmaf(d[0][i], value, acc[j][0][n]);
                    acc[j][1][n] = fmaf(d[1][i], value, acc[j][1][n]);
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
    // A thread a sum: 16 rows of 32.
    u32 r = threadIdx.x / (BLOCKS * 8), c = threadIdx.x % (BLOCKS * 8), n = c % 8;
    if (r >= rows) return;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        if (c / 8 != j || first[j] + n >= ranks[j]) continue;
        float sum = 0;
#pragma unroll
        for (int part = 0; part < WARPS; part++) sum += sums[part][r][c];
        const Module& to = p.modules[module[j]];
        float* s = FORWARD ? to.s : to.ds;
        s[(row + r) * to.s_width + first[j] + n] = FORWARD ? sum : groups[module[j] * p.count].scale * sum;
    }
}

#define EXPAND_COLS 128
#define EXPAND_THREADS 128

// One warp's 16 SUBS rows x 32 columns of s W; W (rank x wide) is B^T, or A where TRANSPOSED is not set: element (k, c) at a[k wide + c].
// Lane t of a row holds columns 8 t .. 8 t + 8: acc[sub][i / 2][half * 2 + i % 2] is column i of them.
template <bool TRANSPOSED, int SUBS>
__device__ __forceinline__ void narrow_product(
    float (&acc)[SUBS][4][4], const float* narrow, u32 rank, u32 wide, u32 column, const float* s, u32 s_width, u64 row, u32 rows) {
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    auto element = [&](u32 k, u32 c) { return k < rank && c < wide ? narrow[TRANSPOSED ? (u64)c * rank + k : (u64)k * wide + c] : 0.0f; };
    auto inner = [&](u32 r, u32 k) { return r < rows && k < rank ? s[(row + r) * s_width + k] : 0.0f; };
#if NODUS_BF16
    for (u32 k = 0; k < rank; k += 16) {
        u32 at = k + t * 2, b[4][2];
        bool high = k + 8 < rank;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Block j's column n stands for column 8 (n / 2) + 2 j + n % 2.
            u32 c = column + g / 2 * 8 + j * 2 + g % 2;
            b[j][0] = pack(element(at, c), element(at + 1, c));
            b[j][1] = high ? pack(element(at + 8, c), element(at + 9, c)) : 0;
        }
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++) {
            u32 r = sub * 16 + g;
            u32 a[4] = {pack(inner(r, at), inner(r, at + 1)), pack(inner(r + 8, at), inner(r + 8, at + 1)), 0, 0};
            if (high) {
                a[2] = pack(inner(r, at + 8), inner(r, at + 9));
                a[3] = pack(inner(r + 8, at + 8), inner(r + 8, at + 9));
            }
#pragma unroll
            for (int j = 0; j < 4; j++) mma(acc[sub][j], a, b[j]);
        }
    }
#else
#pragma unroll 1
    for (u32 k = 0; k < rank; k++) {
        float w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = element(k, column + t * 8 + i);
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++) {
            float low = inner(sub * 16 + g, k), high = inner(sub * 16 + g + 8, k);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                acc[sub][i / 2][i % 2] = fmaf(low, w[i], acc[sub][i / 2][i % 2]);
                acc[sub][i / 2][2 + i % 2] = fmaf(high, w[i], acc[sub][i / 2][2 + i % 2]);
            }
        }
    }
#endif
}

// Eight elements of y as they are stored: fetched before the product that is added to them, so that both are under way at once.
struct Eight {
    uint4 words[sizeof(act) / 2];
};
__device__ __forceinline__ void hold(Eight& held, const act* y, u32 wide, bool real) {
#pragma unroll
    for (int i = 0; i < sizeof(act) / 2; i++) held.words[i] = real && wide % 8 == 0 ? ((const uint4*)y)[i] : make_uint4(0, 0, 0, 0);
}

// y (eight columns from `column` on) += v
__device__ __forceinline__ void add_eight(act* y, const Eight& held, u32 column, u32 wide, float (&v)[8]) {
    if (wide % 8 == 0) {
        float old[8];
        load<8>((const act*)&held, old);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] += old[i];
        save<8>(y, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (column + i < wide) store(y + i, to_float(y[i]) + v[i]);
    }
}
