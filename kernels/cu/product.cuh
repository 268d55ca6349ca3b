// A product of large arrays on Hopper (sm_90a, bf16): x (rows x inner) by a weight (columns x inner), 128 rows by up to 256 columns at a time. A result's order
// of additions depends on the inner length alone: sixteen elements at a time, in order. Rows are a multiple of 128; what lies past an array's end is zero.
// Must never split the inner dimension, nor let what is beside a tile, or how wide it is, change how it is added up.
#pragma once
#include "tma.cuh"
#include "wgmma.cuh"

// What a kernel of products takes. Blocks stay and take tiles in turn: one warp fetches, eight multiply. The last columns are in narrower tiles, as many as
// let the blocks end together.
struct Product {
    TensorMap x, weight; // tiles of 128 and of 32 rows, 64 elements wide
    u32 steps;           // of 64 along the inner dimension
    u32 row_tiles;       // of 128 rows
    u32 whole;           // columns of tiles that are eight panels of the weight wide
    u32 narrow;          // and of those that are `panels` wide
    u32 panels;          // six or four
    u32 zero[27];
};

#define STAGES 4 // of x and the weight under way
#define GROUP 16 // tiles of rows that go through all columns before the next
#define PANEL (32 * 64)
#define PRODUCT_THREADS 384

struct Stage {
    act x[4 * PANEL];
    act weight[8 * PANEL];
};

struct Ring {
    Stage stages[STAGES];
    u64 full[STAGES], empty[STAGES];
};

// A tile: its first row, the panels of the weight before it, and those in it.
struct Place {
    u32 row, before, panels;
};

__device__ __forceinline__ u32 count(const Product& p) { return p.row_tiles * (p.whole + p.narrow); }

__device__ __forceinline__ Place place(const Product& p, u32 turn) {
    u32 wholes = p.row_tiles * p.whole;
    if (turn >= wholes) return {(turn - wholes) % p.row_tiles * 128, p.whole * 8 + (turn - wholes) / p.row_tiles * p.panels, p.panels};
    u32 first = turn / (GROUP * p.whole) * GROUP, rest = turn - first * p.whole, size = min(p.row_tiles - first, (u32)GROUP);
    return {(first + rest % size) * 128, rest / size * 8, 8};
}

// Where in the ring.
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// One thread.
template <class Kind> __device__ __forceinline__ void fetch(const Product& p, Ring& ring, const Kind& kind) {
    Turn turn;
    for (u32 tile = blockIdx.x; tile < count(p); tile += gridDim.x) {
        Place at = place(p, tile);
        for (u32 k = 0; k < p.steps; k++, turn.next()) {
            Stage& stage = ring.stages[turn.stage];
            u64* full = &ring.full[turn.stage];
            await(&ring.empty[turn.stage], turn.parity ^ 1);
            expect_bytes(full, (4 + at.panels) * PANEL * sizeof(act));
            fetch_tile(stage.x, &p.x, k * 64, at.row, full);
            for (u32 panel = 0; panel < at.panels; panel++)
                fetch_tile(stage.weight + panel * PANEL, &p.weight, k * 64, kind.column(at, panel), full);
        }
    }
}

// 64 rows of a tile by 128 threads, `part` says which: one stage, of the first of which nothing is added to.
template <bool FIRST, int BLOCKS> __device__ __forceinline__ void begin_stage(float (&acc)[BLOCKS][4], Ring& ring, Turn turn, u32 part) {
    const Stage& stage = ring.stages[turn.stage];
    await(&ring.full[turn.stage], turn.parity);
    u64 a = tile_at<64>(stage.x + part * 2 * PANEL), b = tile_at<64>(stage.weight);
    begin_wgmma();
    // A step of 16 is 32 bytes on.
#pragma unroll
    for (int i = 0; i < 4; i++) step_tiles(acc, a + i * 2, b + i * 2, !FIRST || i > 0);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int BLOCKS>
__device__ __forceinline__ void multiply(float (&acc)[BLOCKS][4], const Product& p, Ring& ring, Turn& turn, u32 part) {
    bool tells = threadIdx.x % 128 == 0;
    begin_stage<true>(acc, ring, turn, part);
    for (u32 k = 1; k < p.steps; k++) {
        u32 before = turn.stage;
        turn.next();
        begin_stage<false>(acc, ring, turn, part);
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        if (tells) arrive(&ring.empty[before]);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    // From here on they are those of a product that is done.
#pragma unroll
    for (int j = 0; j < BLOCKS; j += 8) asm volatile("" : THIRTY_TWO(j)::"memory");
    if (tells) arrive(&ring.empty[turn.stage]);
    turn.next();
}

template <int BLOCKS, class Kind>
__device__ __forceinline__ void do_tile(const Product& p, Ring& ring, Turn& turn, u32 part, Place at, const Kind& kind) {
    float acc[BLOCKS][4];
    multiply(acc, p, ring, turn, part);
    kind.finish(acc, at, part);
}

// All of it. A kind of product says by `column(at, panel)` where a panel of the weight begins, and does by `finish(acc, at, part)` what is to be done with the
// sums of 64 rows, part 0 or 1 of a tile, which are held as `mma` holds them.
template <class Kind> __device__ __forceinline__ void product(const Product& p, const Kind& kind) {
    extern __shared__ unsigned char bytes[];
    Ring& ring = *(Ring*)(bytes + (0u - shared_word(bytes)) % ATOM);
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            begin_barrier(&ring.full[stage], 1);
            begin_barrier(&ring.empty[stage], 2);
        }
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
    Turn turn;
    for (u32 tile = blockIdx.x; tile < count(p); tile += gridDim.x) {
        Place at = place(p, tile);
        if (at.panels == 8) do_tile<32>(p, ring, turn, part, at, kind);
        else if (at.panels == 6) do_tile<24>(p, ring, turn, part, at, kind);
        else do_tile<16>(p, ring, turn, part, at, kind);
    }
}

// A thread's row of the first of the two that it has of a part.
__device__ __forceinline__ u64 first_row(Place at, u32 part) { return at.row + part * 64 + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

// words[i] of lane t of four becomes word t of lane i: what lanes hold of four neighbouring blocks of eight columns becomes all that one has of one.
__device__ __forceinline__ void trade(u32 (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        bool high = threadIdx.x & bit;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if (i & bit) continue;
            u32 got = __shfl_xor_sync(0xffffffffu, high ? words[i] : words[i + bit], bit);
            words[i] = high ? got : words[i];
            words[i + bit] = high ? words[i + bit] : got;
        }
    }
}
