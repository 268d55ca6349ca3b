// lora_gradient: for up to three modules dy (rows x outputs), s and ds (rows x s_width) and their x (rows x inputs)
//                dB += scale dy^T s, dA += ds^T dropout(x)
//
// Gradients of one group have one owner a patch (64 of the wide side x some ranks) and piece of the group's rows (256 of them, counted within the
// group), which walks over its rows in order; the pieces' sums are then added in order. Rows in no group and padding rows are read as zero.
#include "lora.cuh"

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

#if NODUS_BF16
#define CHUNK 16 // ranks at a time
#define THREADS 64
#define WARPS (THREADS / 32)

// Where a lane's elements of both sides are.
struct Sides {
    const act* wide; // at the patch's first column
    const float* narrow; // at the lane's rank
    u32 pitch, s_width, column, columns, ranks;
    bool drops;
};

// A warp's own part of shared memory: rows of the wide side, 64 columns, whose pieces of eight stand in an order that depends on the row.
struct __align__(16) Wide {
    act of[TILE_ROWS * 64];
};
__device__ __forceinline__ act* piece_at(Wide& wide, u32 r, u32 c) { return wide.of + r * 64 + (c ^ r % 8) * 8; }

// All rows of a tile, and after them zeros up to a multiple of 16. Without dropout, and where rows begin at multiples of 16 bytes, they are under way when this
// ends.
template <bool DROP> __device__ __forceinline__ void fetch_wide(Wide& wide, const Lora& p, const Sides& sides, const Group& group, const Rows& tile) {
    u32 lane = threadIdx.x % 32, c = lane % 8, column = sides.column + c * 8;
    bool even = (sides.columns | sides.pitch) % 8 == 0 && (u64)sides.wide % 16 == 0, drops = DROP && sides.drops;
    const act* from = sides.wide + (u64)tile.row * sides.pitch + c * 8;
    if (even && !drops) {
#pragma unroll 8
        for (u32 r = lane / 8; r < (tile.valid + 15) / 16 * 16; r += 4) {
            bool real = r < tile.valid && column < sides.columns;
            copy_16(piece_at(wide, r, c), real ? from + (u64)r * sides.pitch : sides.wide, real);
        }
        return;
    }
#pragma unroll 2
    for (u32 r = lane / 8; r < (tile.valid + 15) / 16 * 16; r += 4) {
        float v[8] = {};
        if (even) {
            if (r < tile.valid && column < sides.columns) load<8>(from + (u64)r * sides.pitch, v);
        } else {
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = r < tile.valid && column + i < sides.columns ? to_float(from[(u64)r * sides.pitch + i]) : 0.0f;
        }
        if (drops && r < tile.valid) dropout<8>(v, group.key, tile.sequence, p.positions[tile.row + r], column, group.probability);
        save<8>(piece_at(wide, r, c), v);
    }
}

// Ranks g and, of two HALVES of them, g + 8 of 16 rows, as the tensor cores take them: rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
template <int HALVES> __device__ __forceinline__ void fetch_narrow(u32 (&a)[4], const Sides& sides, const Rows& tile, u32 before) {
    u32 g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    float n[2][4] = {};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        u32 r = before + t * 2 + k % 2 + k / 2 * 8;
        const float* s = sides.narrow + (u64)(tile.row + r) * sides.s_width;
        n[0][k] = r < tile.valid && g < sides.ranks ? s[0] : 0.0f;
        if (HALVES == 2) n[1][k] = r < tile.valid && g + 8 < sides.ranks ? s[8] : 0.0f;
    }
    a[0] = pack(n[0][0], n[0][1]), a[1] = pack(n[1][0], n[1][1]), a[2] = pack(n[0][2], n[0][3]), a[3] = pack(n[1][2], n[1][3]);
}

// acc (16 ranks x 64 columns) += the two sides' product over all rows of a piece, sixteen at a time, in order.
template <bool DROP, int HALVES>
__device__ __forceinline__ void walk(float (&acc)[8][4], Wide& wide, const Lora& p, const Sides& sides, const Group& group, const Piece& piece) {
    u32 lane = threadIdx.x % 32;
    for (u32 i = piece.first_tile; i < piece.end_tile; i++) {
        Rows tile = p.tiles[i];
        __syncwarp();
        fetch_wide<DROP>(wide, p, sides, group, tile);
        commit_copies();
        // The other side meanwhile, all of it: nothing waits for memory twice.
        u32 narrow[TILE_ROWS / 16][4];
#pragma unroll
        for (u32 k = 0; k < TILE_ROWS / 16; k++) fetch_narrow<HALVES>(narrow[k], sides, tile, k * 16);
        arrived<0>();
        __syncwarp();
#pragma unroll
        for (u32 k = 0; k < TILE_ROWS / 16; k++) {
            if (k * 16 >= tile.valid) break;
            u32 r = k * 16 + lane % 16;
#pragma unroll
            for (int j = 0; j < 8; j += 2) {
                u32 both[4];
                fragment_a<true>(both, piece_at(wide, r, j + lane / 16));
                u32 first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
                mma(acc[j], narrow[k], first);
                mma(acc[j + 1], narrow[k], second);
            }
        }
    }
}

// A warp a patch.
template <bool DROP> __device__ __forceinline__ void gradient(const Lora& p) {
    __shared__ Wide all_wide[WARPS];
    u32 slot = blockIdx.x * WARPS + threadIdx.x / 32;
    Piece piece = p.pieces[blockIdx.y];
    if (slot >= p.patches) return;
    Patch patch = patch_of(p, slot);
    const Module& module = p.modules[patch.module];
    const Group& group = p.groups[patch.module * p.count + piece.group];
    u32 rank = blockIdx.z * CHUNK, all = group.rank;
    if (rank >= all) return;
    u32 ranks = min(all - rank, (u32)CHUNK), g = threadIdx.x % 32 / 4;
    Sides sides;
    sides.wide = (patch.a ? p.x : module.y) + patch.column;
    sides.narrow = (patch.a ? module.ds : module.s) + rank + g;
    sides.pitch = patch.a ? p.wide : module.pitch;
    sides.s_width = module.s_width, sides.column = patch.column, sides.columns = patch.wide, sides.ranks = ranks;
    sides.drops = patch.a && group.probability > 0;
    float acc[8][4] = {};
    if (ranks <= 8) walk<DROP, 1>(acc, all_wide[threadIdx.x / 32], p, sides, group, piece);
    else walk<DROP, 2>(acc, all_wide[threadIdx.x / 32], p, sides, group, piece);
    bool alone = group.parts == 1;
    float scale = patch.a ? 1.0f : group.scale, *part = part_at(p, blockIdx.y, slot, p.patches);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        u32 c = acc_row(i);
        if (c >= ranks) continue;
        // All that is there is fetched before any of it is written.
        float* to[8];
        float now[8] = {};
#pragma unroll
        for (int j = 0; j < 8; j++) {
            u32 column = j * 8 + acc_col(i), w = min(patch.column + column, patch.wide - 1);
            to[j] = alone ? gradient_at(group, patch, rank + c, w) : part + (rank + c) * 64 + column;
            if (alone) now[j] = *to[j];
        }
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (patch.column + j * 8 + acc_col(i) < patch.wide) *to[j] = alone ? fmaf(scale, acc[j][i], now[j]) : acc[j][i];
    }
}

KERNEL __launch_bounds__(THREADS, 6) lora_gradient(PARAMS Lora p) { gradient<false>(p); }
KERNEL __launch_bounds__(THREADS) lora_gradient_drop(PARAMS Lora p) { gradient<true>(p); }
#else
#define THREADS 128
#define DEPTH 64 // rows at a time
#define CHUNK 16 // ranks at a time

// ROWS x COLS of x from (row, column) on, rows `pitch` apart, dropped out where the group says so; past `rows` or the width: zero. Ends with `arrived`.
template <int ROWS, int COLS>
__device__ __forceinline__ void load_dropped(
    act* tile, u32 ld, const act* x, u32 wide, u32 pitch, const u32* positions, const Group& group, u64 row, u32 sequence, u32 rows, u32 column, bool drop) {
    if (!drop) {
        begin_tile<ROWS, COLS, THREADS>(threadIdx.x, tile, ld, x + row * pitch + column, pitch, rows, min((u32)COLS, wide - column));
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

template <bool DROP> __device__ __forceinline__ void gradient(const Lora& p) {
    constexpr int LDX = 64 + PAD, LDS = CHUNK + PAD;
    __shared__ __align__(16) act x[DEPTH * LDX];
    __shared__ __align__(16) act s[DEPTH * LDS];
    Patch patch = patch_of(p, blockIdx.x);
    const Module& module = p.modules[patch.module];
    Piece piece = p.pieces[blockIdx.y];
    const Group group = p.groups[patch.module * p.count + piece.group];
    u32 rank = blockIdx.z * CHUNK;
    if (rank >= group.rank) return;
    u32 ranks = min(group.rank - rank, (u32)CHUNK), blocks = (ranks + 7) / 8;
    u32 base = threadIdx.x / 32 * 16;
    const act* wide_side = patch.a ? p.x : module.y;
    const float* narrow_side = patch.a ? module.ds : module.s;
    float acc[CHUNK / 8][4] = {};
    u32 pitch = patch.a ? p.wide : module.pitch;
    for (u32 t = piece.first_tile; t < piece.end_tile; t++) {
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
    float* part = part_at(p, blockIdx.y, blockIdx.x, p.patches);
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

KERNEL __launch_bounds__(THREADS) lora_gradient(PARAMS Lora p) { gradient<false>(p); }
KERNEL __launch_bounds__(THREADS) lora_gradient_drop(PARAMS Lora p) { gradient<true>(p); }
#endif

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
        for (u32 part = 0; part < group.parts; part++) sum += part_at(p, group.first_part + part, blockIdx.x, p.patches)[c * 64 + w];
        float* to = gradient_at(group, patch, c, patch.column + w);
        *to = fmaf(scale, sum, *to);
    }
}
