// What LoRA forward and backward share: the tables of groups and tiles, and the two products with a narrow side.
// Must never accumulate across tiles of rows: that is lora_gradient.cu's.
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
    u32 first_part, parts; // pieces of its rows whose gradients are added up by themselves
    u32 wants_dx;
};

// Up to 128 rows of one segment.
struct __align__(16) Rows {
    u32 row, valid, group, sequence;
};

// Tiles of one group whose gradients are added up together.
struct __align__(16) Piece {
    u32 group, first_tile, end_tile, zero;
};

// A module of a call.
struct Module {
    act* y;       // rows x wide, `pitch` apart: what is added to, or dy
    float* s;     // rows x s_width: s, written forward and read backward
    float* ds;    // the same of ds
    u32 wide;     // of y
    u32 s_width;
    u32 blocks;   // of 8 ranks, of the largest rank
    u32 pitch;    // elements from row to row of y
};

#define MODULES 3

struct Lora {
    const act* x; // rows x wide
    act* dx;
    const Group* groups; // modules x count
    const Rows* tiles;
    const Piece* pieces;
    const u32* positions;
    float* parts; // of gradients
    Module modules[MODULES];
    u32 wide; // of x
    u32 count; // of groups
    u32 used;  // modules
    u32 ranks; // of a patch of gradients: the largest rank, rounded up to 8
    u32 patches; // of gradients, of all modules
    u32 columns; // blocks of columns: blocks that are neighbours have neighbouring columns of the same rows
};

// Both products below keep their operands in registers. A lane holds rows g = lane / 4 and g + 8 of 16; with t = lane % 4 it holds eight
// neighbours: of the inner dimension (shrink: 8 t .. 8 t + 8 of 32) or of the columns (expand: likewise), 16 bytes of bf16. The tensor
// cores take them in that order: which of their inner places or columns an element stands at is ours to choose, if both sides agree.

// W's eight elements (k .. k + 8) of column n of `count`, by rows of `inner` (A) or by columns `rank` apart (B^T); zero past either end.
template <bool BY_ROWS>
__device__ __forceinline__ void load_narrow(float (&w)[8], const float* from, u32 n, u32 count, u32 rank, u32 k, u32 inner) {
    if (BY_ROWS && inner % 4 == 0 && (u64)from % 16 == 0 && n < count && k + 8 <= inner) {
        load<8>(from + (u64)n * inner + k, w);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            w[i] = n < count && k + i < inner ? from[BY_ROWS ? (u64)n * inner + k + i : (u64)(k + i) * rank + n] : 0.0f;
    }
}

// Eight neighbours as they are stored: what is fetched ahead takes no more registers than bytes.
struct Eight {
    uint4 words[sizeof(act) / 2];
};
__device__ __forceinline__ void hold(Eight& held, const act* from) {
#pragma unroll
    for (int i = 0; i < sizeof(act) / 2; i++) held.words[i] = ((const uint4*)from)[i];
}

// The same where widths are multiples of eight and rows of A begin at multiples of 16 bytes, without a branch.
template <bool BY_ROWS>
__device__ __forceinline__ void load_even(float (&w)[8], const float* from, u32 n, u32 count, u32 rank, u32 k, u32 inner) {
    bool real = n < count && k < inner;
    if (BY_ROWS) {
        const float4* at = (const float4*)(from + (real ? (u64)n * inner + k : 0));
        float4 low = make_float4(0, 0, 0, 0), high = low;
        if (real) low = at[0], high = at[1];
        w[0] = low.x, w[1] = low.y, w[2] = low.z, w[3] = low.w, w[4] = high.x, w[5] = high.y, w[6] = high.z, w[7] = high.w;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = real ? from[(u64)(k + i) * rank + n] : 0.0f;
    }
}

#if NODUS_BF16
// acc (16 rows x 8) += x w for 32 inner elements, of which a lane holds eight of two rows, and of one column of w.
__device__ __forceinline__ void multiply(float (&acc)[4], const Eight (&x)[2], const float (&w)[8]) {
    uint4 low = x[0].words[0], high = x[1].words[0];
    u32 a[2][4] = {{low.x, high.x, low.y, high.y}, {low.z, high.z, low.w, high.w}};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 b[2] = {pack(w[4 * i], w[4 * i + 1]), pack(w[4 * i + 2], w[4 * i + 3])};
        mma(acc, a[i], b);
    }
}
#endif

#define SHRINK_BLOCKS 4 // of 8 ranks, of any modules
#define SHRINK_THREADS 512

// A block of up to 8 ranks of one module.
struct Ranks {
    const float* narrow;
    float* s;
    u32 count; // 0: there is no such block, or the group has none of its ranks
    u32 rank, first, s_width, module;
};

// The block of ranks that is at a place of the list of all modules' blocks, or of one module's where ALONE.
template <bool FORWARD> __device__ __forceinline__ Ranks ranks_at(const Lora& p, const Rows& tile, u32 block) {
    u32 m = FORWARD ? 0 : blockIdx.z;
    if (FORWARD)
        while (m < p.used && block >= p.modules[m].blocks) block -= p.modules[m].blocks, m++;
    Ranks ranks = {};
    if (m >= p.used || block >= p.modules[m].blocks) return ranks;
    const Group& group = p.groups[m * p.count + tile.group];
    const Module& module = p.modules[m];
    u32 first = block * 8, count = group.rank > first ? min(group.rank - first, 8u) : 0;
    return {FORWARD ? group.a : group.b, FORWARD ? module.s : module.ds, count, group.rank, first, module.s_width, m};
}

// Forward: s (16 SUBS rows x 8 ranks, for BLOCKS blocks of ranks of any modules) = x A^T, x dropped out. Backward: ds = scale * dy B, of one
// module. Sixteen warps take 32 inner elements each in turn; their sums are added in order.
template <bool FORWARD, bool DROP, int BLOCKS, int SUBS> __device__ __forceinline__ void shrink(const Lora& p) {
    constexpr int WARPS = SHRINK_THREADS / 32;
    constexpr u32 ROWS = SUBS * 16;
    __shared__ float sums[WARPS][ROWS][BLOCKS * 8];
    __shared__ Ranks all[BLOCKS];
    Rows tile = p.tiles[blockIdx.x / (TILE_ROWS / ROWS)];
    u32 before = blockIdx.x % (TILE_ROWS / ROWS) * ROWS;
    if (before >= tile.valid) return;
    u32 rows = min(tile.valid - before, ROWS);
    u64 row = tile.row + before;
    u32 warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    if (threadIdx.x < BLOCKS) all[threadIdx.x] = ranks_at<FORWARD>(p, tile, blockIdx.y * BLOCKS + threadIdx.x);
    __syncthreads();
    const Group* groups = p.groups + tile.group;
    const act* x_rows = (FORWARD ? p.x : p.modules[blockIdx.z].y) + row * (FORWARD ? p.wide : p.modules[blockIdx.z].pitch);
    u32 wide = FORWARD ? p.wide : p.modules[blockIdx.z].wide, pitch = FORWARD ? p.wide : p.modules[blockIdx.z].pitch;
    const float* narrow[BLOCKS];
    u32 count[BLOCKS], rank[BLOCKS];
    bool any = false, eight = pitch % 8 == 0 && wide % 8 == 0 && (u64)x_rows % 16 == 0, aligned = true;
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
        u32 first = all[j].first;
        count[j] = all[j].count, rank[j] = all[j].rank, any |= count[j] > 0;
        narrow[j] = all[j].narrow + (FORWARD ? (u64)first * wide : first);
        aligned &= !FORWARD || count[j] == 0 || (u64)narrow[j] % 16 == 0;
    }
    if (!any) return;
#if NODUS_BF16
    float acc[BLOCKS][SUBS][4] = {};
#else
    float acc[BLOCKS][2 * SUBS][8] = {};
#endif
    u32 begin = warp * 32 + t * 8;
    constexpr u32 STRIDE = WARPS * 32;
#if NODUS_BF16
    if (!DROP && eight && aligned) {
        // Two chunks' loads are under way together: nothing branches between them. Past the end zeros are added.
        constexpr int AHEAD = 2;
        for (u32 k = begin; k < (wide + 31) / 32 * 32; k += AHEAD * STRIDE) {
            Eight x[AHEAD][SUBS][2];
#pragma unroll
            for (int n = 0; n < AHEAD; n++)
#pragma unroll
                for (int half = 0; half < 2 * SUBS; half++) {
                    Eight& to = x[n][half / 2][half % 2];
                    to = {};
                    if (g + half * 8 < rows && k + n * STRIDE < wide) hold(to, x_rows + (u64)(g + half * 8) * pitch + k + n * STRIDE);
                }
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                if (count[j] == 0) continue;
                float w[AHEAD][8];
#pragma unroll
                for (int n = 0; n < AHEAD; n++) load_even<FORWARD>(w[n], narrow[j], g, count[j], rank[j], k + n * STRIDE, wide);
#pragma unroll
                for (int n = 0; n < AHEAD; n++)
#pragma unroll
                    for (int sub = 0; sub < SUBS; sub++) multiply(acc[j][sub], x[n][sub], w[n]);
            }
        }
    } else
#endif
#pragma unroll 1
        for (u32 k = begin; k < (wide + 31) / 32 * 32; k += STRIDE) {
            Eight x[SUBS][2];
#pragma unroll
            for (int half = 0; half < 2 * SUBS; half++) {
                u32 r = g + half * 8;
                const act* from = x_rows + (u64)r * pitch + k;
                Eight& to = x[half / 2][half % 2];
                to = {};
                if (eight && r < rows && k < wide) hold(to, from);
                if (eight || r >= rows) continue;
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; i++) v[i] = k + i < wide ? to_float(from[i]) : 0.0f;
                save<8>((act*)&to, v);
            }
#pragma unroll
            for (int j = 0; j < BLOCKS; j++) {
                if (count[j] == 0) continue;
                float w[8];
                load_narrow<FORWARD>(w, narrow[j], g, count[j], rank[j], k, wide);
#pragma unroll
                for (int sub = 0; sub < SUBS; sub++) {
                    Eight d[2] = {x[sub][0], x[sub][1]};
                    if constexpr (DROP) {
                        const Group* group = groups + all[j].module * p.count;
#pragma unroll
                        for (int half = 0; half < 2; half++) {
                            u32 r = g + sub * 16 + half * 8;
                            if (r >= rows || !(group->probability > 0)) continue;
                            float v[8];
                            load<8>((const act*)&d[half], v);
                            dropout<8>(v, group->key, tile.sequence, p.positions[row + r], k, group->probability);
                            save<8>((act*)&d[half], v);
                        }
                    }
#if NODUS_BF16
                    multiply(acc[j][sub], d, w);
#else
                    float v[2][8];
                    load<8>((const act*)&d[0], v[0]);
                    load<8>((const act*)&d[1], v[1]);
                    // Column n's elements are with the lanes whose g is n.
#pragma unroll
                    for (int n = 0; n < 8; n++)
#pragma unroll
                        for (int i = 0; i < 8; i++) {
                            float value = __shfl_sync(0xffffffffu, w[i], n * 4 + t);
                            acc[j][2 * sub][n] = fmaf(v[0][i], value, acc[j][2 * sub][n]);
                            acc[j][2 * sub + 1][n] = fmaf(v[1][i], value, acc[j][2 * sub + 1][n]);
                        }
#endif
                }
            }
        }
#pragma unroll
    for (int j = 0; j < BLOCKS; j++) {
#if NODUS_BF16
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
            for (int i = 0; i < 4; i++) sums[warp][sub * 16 + acc_row(i)][j * 8 + acc_col(i)] = acc[j][sub][i];
#else
#pragma unroll
        for (int half = 0; half < 2 * SUBS; half++)
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
    // A thread a sum.
    static_assert(ROWS * BLOCKS * 8 <= SHRINK_THREADS, "more sums than threads");
    u32 r = threadIdx.x / (BLOCKS * 8), c = threadIdx.x % (BLOCKS * 8), n = c % 8;
    const Ranks& to = all[c / 8];
    if (r >= rows || n >= to.count) return;
    float sum = 0;
#pragma unroll
    for (int part = 0; part < WARPS; part++) sum += sums[part][r][c];
    to.s[(row + r) * to.s_width + to.first + n] = FORWARD ? sum : groups[to.module * p.count].scale * sum;
}

#define EXPAND_COLS 128
#define EXPAND_THREADS 128

// One warp's 16 SUBS rows x 32 columns of s W; W (rank x wide) is B^T, or A where TRANSPOSED is not set: element (k, c) at a[k wide + c].
// Lane t of a row holds columns 8 t .. 8 t + 8: acc[sub][i / 2][half * 2 + i % 2] is column i of them.
template <bool TRANSPOSED, int SUBS>
__device__ __forceinline__ void narrow_product(
    float (&acc)[SUBS][4][4], const float* narrow, u32 rank, u32 wide, u32 column, const float* s, u32 s_width, u64 row, u32 rows) {
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    // What lies past the rank is zero on both sides; rows and columns past theirs are others', of results that nobody stores. Loads are not
    // within branches: so all are under way at once.
    auto element = [](const float* from, u64 at, bool real) {
        float value = from[real ? at : 0];
        return real ? value : 0.0f;
    };
    auto weight = [&](u32 k, u32 c) {
        c = min(c, wide - 1);
        return element(narrow, TRANSPOSED ? (u64)c * rank + k : (u64)k * wide + c, k < rank);
    };
    const float* s_rows = s + row * s_width;
    auto inner = [&](u32 r, u32 k) { return element(s_rows, min(r, rows - 1) * s_width + k, k < rank); };
#if NODUS_BF16
    for (u32 k = 0; k < rank; k += 16) {
        u32 at = k + t * 2, b[4][2];
        bool high = k + 8 < rank;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // Block j's column n stands for column 8 (n / 2) + 2 j + n % 2.
            u32 c = column + g / 2 * 8 + j * 2 + g % 2;
            b[j][0] = pack(weight(at, c), weight(at + 1, c));
            b[j][1] = 0;
        }
        u32 a[SUBS][4];
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++) {
            u32 r = sub * 16 + g;
            a[sub][0] = pack(inner(r, at), inner(r, at + 1));
            a[sub][1] = pack(inner(r + 8, at), inner(r + 8, at + 1));
            a[sub][2] = a[sub][3] = 0;
        }
        if (high) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 c = column + g / 2 * 8 + j * 2 + g % 2;
                b[j][1] = pack(weight(at + 8, c), weight(at + 9, c));
            }
#pragma unroll
            for (int sub = 0; sub < SUBS; sub++) {
                u32 r = sub * 16 + g;
                a[sub][2] = pack(inner(r, at + 8), inner(r, at + 9));
                a[sub][3] = pack(inner(r + 8, at + 8), inner(r + 8, at + 9));
            }
        }
#pragma unroll
        for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
            for (int j = 0; j < 4; j++) mma(acc[sub][j], a[sub], b[j]);
    }
#else
#pragma unroll 1
    for (u32 k = 0; k < rank; k++) {
        float w[8];
#pragma unroll
        for (int i = 0; i < 8; i++) w[i] = weight(k, column + t * 8 + i);
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

// What every kernel adds an adapter's part by. Spelt out, since a compiler that fuses a product into a sum here and not there would give a row
// other bits in other company: which kernel adds depends on what the adapters beside it carry.
__device__ __forceinline__ float plus(float old, float part, float scale) { return fmaf(part, scale, old); }

// y (eight columns, or what is left of them) += scale v. `eight`: rows begin at multiples of eight, and what is there is held.
__device__ __forceinline__ void add_eight(act* y, const Eight& held, bool eight, u32 left, float (&v)[8], float scale) {
    if (eight) {
        float old[8];
        load<8>((const act*)&held, old);
#pragma unroll
        for (int i = 0; i < 8; i++) v[i] = plus(old[i], v[i], scale);
        save<8>(y, v);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < left) store(y + i, plus(to_float(y[i]), v[i], scale));
    }
}
