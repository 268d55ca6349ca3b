// Attention's tiles on Hopper: brought by the card's own copies, multiplied by four warps at a time.
// Must never be included where activations are float32, or heads other than 64 or 128 wide.
#pragma once
#include "attention_fast.cuh"
#include "wgmma.cuh"

#define SWIZZLED_SIZE (TILE * WIDE) // elements of a tile
#define TILE_ON ((u64)(SWIZZLED_SIZE * 2 >> 4)) // from a tile, as wgmma reads it, to the next

// The block's dynamic shared memory, where tiles begin.
__device__ __forceinline__ act* first_tile(char* shared) { return (act*)(shared + (0u - shared_word(shared)) % ATOM); }

// Lets a barrier wait for so many tiles.
__device__ __forceinline__ void expect_tiles(u64* barrier, u32 count) { expect_bytes(barrier, count * SWIZZLED_SIZE * 2); }

// A tile of a head from `row` on, for a barrier that expects it. Rows past the sequence are whatever is there.
__device__ __forceinline__ void fetch_head(act* tile, const TensorMap& x, u32 row, u32 head, u64* barrier) {
#pragma unroll
    for (u32 c = 0; c < WIDE; c += 64) fetch_tile(tile + c * TILE, &x, head * HEAD_DIM + c, row, barrier);
}

// The four warps of a head meet.
__device__ __forceinline__ void meet() { asm volatile("bar.sync %0, 128;" ::"r"(threadIdx.x / THREADS + 1) : "memory"); }

// Where a sequence ends within a tile, after so many rows, the others become zero, for the four warps that call: what is there is not the sequence's, and zero
// times anything need not be zero. Nothing else is brought to this place afterwards: it is the sequence's last tile. Two heads both write the same zeros.
__device__ __forceinline__ void clear_rows(act* tile, u32 rows) {
    if (rows >= TILE) return;
    for (u32 i = threadIdx.x % THREADS; i < (TILE - rows) * (WIDE / 8); i += THREADS)
        *(uint4*)(tile + swizzled<TILE>(rows + i / (WIDE / 8), i % (WIDE / 8))) = make_uint4(0, 0, 0, 0);
    show_tiles();
    meet();
}

// What a warp accumulated for 16 rows of a head, each row times its factor, by way of a tile that its four warps are done with. Rows that are not real are
// untouched.
__device__ __forceinline__ void store_rows(act* to, act* tile, const float (&acc)[WIDE / 8][4], const float (&factor)[2], const Place& place, u32 pitch) {
    constexpr u32 PIECES = WIDE / 8, AT_ONCE = 32 / PIECES;
    u32 base = first_row(), lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            *(u32*)(tile + swizzled<TILE>(base + acc_row(i), j) + acc_col(0)) = pack(acc[j][i] * factor[i / 2], acc[j][i + 1] * factor[i / 2]);
    __syncwarp();
    act* from = to + (u64)place.row * pitch + place.head * HEAD_DIM + lane % PIECES * 8;
#pragma unroll
    for (u32 n = 0; n < 16 / AT_ONCE; n++) {
        u32 r = base + n * AT_ONCE + lane / PIECES;
        if (r < place.valid) *(uint4*)(from + (u64)r * pitch) = *(const uint4*)(tile + swizzled<TILE>(r, lane % PIECES));
    }
}
