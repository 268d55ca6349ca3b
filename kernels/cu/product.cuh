// A product of large arrays on Hopper (sm_90a, bf16): x (rows x inner) by a weight (columns x inner), 128 rows by 128 columns at a time. A result's order of
// additions depends on the inner length alone: sixteen elements at a time, in order. Rows are a multiple of 128; what lies past an array's end is zero.
// Must never split the inner dimension, nor let what is beside a tile change how it is added up.
#pragma once
#include "tma.cuh"
#include "wgmma.cuh"

// What a kernel of products takes. Blocks stay and take tiles in turn: one warp fetches, and of two times four warps that multiply each has every second tile.
// So one half's end, whatever is done with its sums, runs beside the other half's products.
struct Product {
    TensorMap x, weight; // tiles of 128 and of 64 rows, 64 elements wide
    u32 steps;           // of 64 along the inner dimension
    u32 row_tiles;       // of 128 rows
    u32 column_tiles;    // of 128 columns
    u32 zero[29];
};

#define STAGES 6 // of x and the weight under way
#define GROUP 16 // tiles of rows that go through all columns before the next
#define SQUARE (64 * 64)
#define PRODUCT_THREADS 384

struct Stage {
    act x[2 * SQUARE];
    act weight[2 * SQUARE];
};

struct Ring {
    Stage stages[STAGES];
    act squares[2][2][SQUARE]; // of each half, for its end
    u64 full[STAGES], empty[STAGES];
    u64 seen[2]; // each warp of a half has seen all stages of its tile
};

// A tile: its first row and column.
struct Place {
    u32 row, column;
};

__device__ __forceinline__ u32 count(const Product& p) { return p.row_tiles * p.column_tiles; }

__device__ __forceinline__ Place place(const Product& p, u32 tile) {
    u32 first = tile / (GROUP * p.column_tiles) * GROUP, rest = tile - first * p.column_tiles, size = min(p.row_tiles - first, (u32)GROUP);
    return {(first + rest % size) * 128, rest / size * 128};
}

// Where in the ring the stage is that has so many before it.
struct Turn {
    u32 stage, parity;
    __device__ __forceinline__ explicit Turn(u32 before) : stage(before % STAGES), parity(before / STAGES % 2) {}
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// One thread.
template <class Kind> __device__ __forceinline__ void fetch(const Product& p, Ring& ring, const Kind& kind) {
    Turn turn(0);
    for (u32 tile = blockIdx.x; tile < count(p); tile += gridDim.x) {
        Place at = place(p, tile);
        for (u32 k = 0; k < p.steps * 64; k += 64, turn.next()) {
            Stage& stage = ring.stages[turn.stage];
            u64* full = &ring.full[turn.stage];
            await(&ring.empty[turn.stage], turn.parity ^ 1);
            expect_bytes(full, sizeof(Stage));
            fetch_tile(stage.x, &p.x, k, at.row, full);
            for (u32 half = 0; half < 2; half++) fetch_tile(stage.weight + half * SQUARE, &p.weight, k, kind.column(at, half), full);
        }
    }
}

// The sums of a tile: of its rows' first half and second, as `mma` holds them, a warp 16 rows.
typedef float Sums[2][16][4];

// One stage, of the first of which nothing is added to.
template <bool FIRST> __device__ __forceinline__ void begin_stage(Sums& sums, Ring& ring, Turn turn) {
    const Stage& stage = ring.stages[turn.stage];
    await(&ring.full[turn.stage], turn.parity);
    u64 a = tile_at<64>(stage.x), b = tile_at<64>(stage.weight);
    begin_wgmma();
    // A step of 16 is 32 bytes on, the second half of x a square.
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) step_tiles(sums[half], a + half * (SQUARE * 2 >> 4) + i * 2, b + i * 2, !FIRST || i > 0);
    leave_wgmma();
}

// The tile that has `n` before it. The halves go through the ring one after the other: a barrier tells a phase from the one before it, not from the one before
// that, so that who waits for its stages too early would take others for them.
__device__ __forceinline__ void multiply(Sums& sums, const Product& p, Ring& ring, u32 n) {
    bool tells = threadIdx.x % 128 == 0;
    Turn turn(n * p.steps);
    if (n > 0) await(&ring.seen[(n + 1) % 2], (n - 1) / 2 % 2);
    begin_stage<true>(sums, ring, turn);
    for (u32 k = 1; k < p.steps; k++) {
        u32 before = turn.stage;
        turn.next();
        begin_stage<false>(sums, ring, turn);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (tells) arrive(&ring.empty[before]);
    }
    if (threadIdx.x % 32 == 0) arrive(&ring.seen[n % 2]);
    await_wgmma();
    settle(sums[0]);
    settle(sums[1]);
    if (tells) arrive(&ring.empty[turn.stage]);
}

// This lane's first row among the 64 of a half.
__device__ __forceinline__ u32 row_of_half() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// This lane's word of block `block` of eight columns of a square, in the lane's first row or the second.
__device__ __forceinline__ u32* word_at(act* square, u32 block, u32 second) {
    return (u32*)(square + swizzled<64>(row_of_half() + second * 8, block)) + threadIdx.x % 4;
}

// The 128 threads of a part meet; what they wrote to their squares is seen by the copies.
__device__ __forceinline__ void meet(u32 part) {
    show_tiles();
    asm volatile("bar.sync %0, 128;" ::"r"(part + 1) : "memory");
}

// All of it. A kind of product says by `column(at, half)` where the first 64 columns of a tile begin and where the others do, and does by
// `finish(sums, at, squares, part)` what is to be done with its sums: each half of the block, `part` says which, with squares of its own, from which copies may
// still be read when it begins.
template <class Kind> __device__ __forceinline__ void product(const Product& p, const Kind& kind) {
    extern __shared__ unsigned char bytes[];
    Ring& ring = *(Ring*)(bytes + (0u - shared_word(bytes)) % ATOM);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            begin_barrier(&ring.full[stage], 1);
            begin_barrier(&ring.empty[stage], 1);
        }
        for (int half = 0; half < 2; half++) begin_barrier(&ring.seen[half], 4);
        show_barriers();
    }
    __syncthreads();
    // A warp that fetches needs few registers, those that multiply many.
    if (threadIdx.x >= 256) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x == 256) fetch(p, ring, kind);
        return;
    }
    asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
    u32 part = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    for (u32 n = part, tile = blockIdx.x + part * gridDim.x; tile < count(p); n += 2, tile += 2 * gridDim.x) {
        Sums sums;
        multiply(sums, p, ring, n);
        kind.finish(sums, place(p, tile), ring.squares[part], part);
    }
    // The block's shared memory is there until the copies have read it.
    if (threadIdx.x % 128 == 0) stores_read();
}
