// lora_backward: for up to three modules dy (rows x outputs), s (rows x s_width) of lora, and their x (rows x inputs)
//                ds = scale dy B (scratch, rows x s_width, float32), dx += the sum over modules of dropout'(ds A) for groups that want it,
//                dB += scale dy^T s, dA += ds^T dropout(x)
//
// Gradients of one group have one owner a patch (64 of the wide side x up to 64 ranks) and piece of the group's rows (256 of them, counted
// within the group), which walks over its rows in order; the pieces' sums are then added in order. Rows in no group and padding rows are
// untouched, and read as zero.
#include "lora.cuh"

KERNEL __launch_bounds__(SHRINK_THREADS) lora_backward_shrink(PARAMS Lora p) { shrink<false, false, 1>(p); }

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
            add_eight(p.dx + (row + r) * p.wide + c, held[sub][half], eight, p.wide - c, v);
        }
}

KERNEL __launch_bounds__(EXPAND_THREADS, 5) lora_backward_expand(PARAMS Lora p) { expand<false>(p); }
KERNEL __launch_bounds__(EXPAND_THREADS) lora_backward_expand_drop(PARAMS Lora p) { expand<true>(p); }

#define DEPTH (NODUS_BF16 ? TILE_ROWS : 64) // rows at a time
#define CHUNK 64 // ranks at a time
#define PART_TILES 2 // tiles of rows of a piece
#define THREADS 128

// ROWS x COLS of x from (row, column) on, rows `pitch` apart, dropped out where the group says so; past `rows` or the width: zero. Ends with `arrived`.
template <int ROWS, int COLS>
__device__ __forceinline__ void load_dropped(
    act* tile, u32 ld, const act* x, u32 wide, u32 pitch, const u32* positions, const Group& group, u64 row, u32 sequence, u32 rows, u32 column, bool drop) {
    if (!drop) {
        begin_tile<ROWS, COLS, THREADS>(tile, ld, x + row * pitch + column, pitch, rows, min((u32)COLS, wide - column));
    } else if (wide % 8 == 0) {
        for (u32 i = threadIdx.x; i < ROWS * COLS / 8; i += THREADS) {
            u32 r = i / (COLS / 8), c = i % (COLS / 8) * 8;
            float v[8] = {};
            if (r < rows && column + c < wide) {
                load<8>(x + (row + r) * wide + column + c, v);
                dropout<8>(v, group.key, sequence, positions[row + r], column + c, group.probability);
            }
            save<8>(tile + r * ld + c, v);
        }
    } else {
        for (u32 i = threadIdx.x; i < ROWS * COLS; i += THREADS) {
            u32 r = i / COLS, c = i % COLS;
            float v[1] = {};
            if (r < rows && column + c < wide) {
                load<1>(x + (row + r) * wide + column + c, v);
                dropout<1>(v, group.key, sequence, positions[row + r], column + c, group.probability);
            }
            store(tile + r * ld + c, v[0]);
        }
    }
}

// A patch of the gradients of a call: of dA or dB of one module, 64 of its wide side. Those of a module follow one another, dA before dB.
struct Patch {
    u32 module, column, wide;
    bool a;
};

__device__ __forceinline__ Patch patch_of(const Lora& p, u32 slot) {
    u32 m = 0, a = (p.wide + 63) / 64;
    for (;; m++) {
        u32 b = (p.modules[m].wide + 63) / 64;
        if (slot < a + b) break;
        slot -= a + b;
    }
    bool is_a = slot < a;
    return {m, (is_a ? slot : slot - a) * 64, is_a ? p.wide : p.modules[m].wide, is_a};
}

__device__ __forceinline__ float* part_at(const Lora& p, u32 part, u32 slot, u32 slots) { return p.parts + ((u64)part * slots + slot) * p.ranks * 64; }

// Where element (rank c, wide w) of a gradient stands.
__device__ __forceinline__ float* gradient_at(const Group& group, const Patch& patch, u32 c, u32 w) {
    return patch.a ? group.da + (u64)c * patch.wide + w : group.db + (u64)w * group.rank + c;
}

// Grid: patches, pieces of rows (of any groups; a piece's group is that of its tile), chunks of ranks.
template <bool DROP> __device__ __forceinline__ void gradient(const Lora& p) {
    constexpr int LDX = 64 + PAD, LDS = CHUNK + PAD;
    __shared__ __align__(16) act x[DEPTH * LDX];
    __shared__ __align__(16) act s[DEPTH * LDS];
    // The group of this piece: groups have their pieces in order.
    u32 low = 0, high = p.count;
    while (high - low > 1) {
        u32 middle = (low + high) / 2;
        if (p.groups[middle].first_part <= blockIdx.y) low = middle;
        else high = middle;
    }
    Patch patch = patch_of(p, blockIdx.x);
    const Module& module = p.modules[patch.module];
    const Group group = p.groups[patch.module * p.count + low];
    u32 rank = blockIdx.z * CHUNK;
    if (rank >= group.rank) return;
    u32 first = group.first_tile + (blockIdx.y - group.first_part) * PART_TILES, end = min(first + PART_TILES, group.end_tile);
    u32 ranks = min(group.rank - rank, (u32)CHUNK), blocks = (ranks + 7) / 8;
    u32 base = threadIdx.x / 32 * 16;
    const act* wide_side = patch.a ? p.x : module.y;
    const float* narrow_side = patch.a ? module.ds : module.s;
    float acc[CHUNK / 8][4] = {};
    u32 pitch = patch.a ? p.wide : module.pitch;
    for (u32 t = first; t < end; t++) {
        Rows tile = p.tiles[t];
        for (u32 before = 0; before < tile.valid; before += DEPTH) {
            u32 rows = min(tile.valid - before, (u32)DEPTH);
            u64 row = tile.row + before;
            __syncthreads();
            load_dropped<DEPTH, 64>(
                x, LDX, wide_side, patch.wide, pitch, p.positions, group, row, tile.sequence, rows, patch.column, DROP && patch.a && group.probability > 0);
            for (u32 block = 0; block < blocks; block++)
#pragma unroll
                for (u32 i = 0; i < DEPTH * 8 / THREADS; i++) {
                    u32 r = i * (THREADS / 8) + threadIdx.x / 8, c = block * 8 + threadIdx.x % 8;
                    store(s + r * LDS + c, r < rows && c < ranks ? narrow_side[(row + r) * module.s_width + rank + c] : 0.0f);
                }
            arrived<0>();
            __syncthreads();
            warp_mma<true, true>(acc, x + base, LDX, s, LDS, DEPTH, blocks);
        }
    }
    float scale = patch.a ? 1.0f : group.scale;
    float* part = part_at(p, blockIdx.y, blockIdx.x, gridDim.x);
#pragma unroll
    for (int j = 0; j < CHUNK / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 w = base + acc_row(i), c = j * 8 + acc_col(i);
            if (patch.column + w >= patch.wide || c >= ranks) continue;
            if (group.parts == 1) {
                float* to = gradient_at(group, patch, rank + c, patch.column + w);
                *to = fmaf(scale, acc[j][i], *to);
            } else {
                part[(rank + c) * 64 + w] = acc[j][i];
            }
        }
}

KERNEL __launch_bounds__(THREADS, 6) lora_gradient(PARAMS Lora p) { gradient<false>(p); }
KERNEL __launch_bounds__(THREADS) lora_gradient_drop(PARAMS Lora p) { gradient<true>(p); }

// Grid: patches, groups.
KERNEL lora_gradient_sum(PARAMS Lora p) {
    Patch patch = patch_of(p, blockIdx.x);
    const Group group = p.groups[patch.module * p.count + blockIdx.y];
    if (group.parts <= 1) return;
    u32 wide = min(patch.wide - patch.column, 64u);
    float scale = patch.a ? 1.0f : group.scale;
    for (u32 i = threadIdx.x; i < group.rank * 64; i += blockDim.x) {
        // Neighbours in the gradient are neighbours among the threads.
        u32 c = patch.a ? i / 64 : i % group.rank, w = patch.a ? i % 64 : i / group.rank;
        if (w >= wide) continue;
        float sum = 0;
        for (u32 part = 0; part < group.parts; part++) sum += part_at(p, group.first_part + part, blockIdx.x, gridDim.x)[c * 64 + w];
        float* to = gradient_at(group, patch, c, patch.column + w);
        *to = fmaf(scale, sum, *to);
    }
}
