// Products of tiles by four warps at once: Hopper's wgmma, bf16 in and float32 out. A tile is ROWS x WIDE in shared memory, WIDE a multiple of 64:
// panels 64 wide, in which a row is 128 bytes whose 16-byte pieces stand in an order that depends on the row (the 128-byte swizzle).
// Must never run with other than a multiple of 128 threads, each 128 of which have 64 rows, a warp 16; accumulators are held as `mma` holds them.
#pragma once
#include "tile.cuh"

#define ATOM 1024 // bytes of eight rows of a panel: a tile begins at a multiple

// Where the 16-byte piece `c` of row `r` stands, in elements.
template <int ROWS> __device__ __forceinline__ u32 swizzled(u32 r, u32 c) { return c / 8 * ROWS * 64 + r * 64 + (c % 8 ^ r % 8) * 8; }

// What this thread wrote to shared memory is seen by wgmma, and by the card's own copies, after the next barrier.
__device__ __forceinline__ void show_tiles() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A tile as wgmma reads it from element `at` on: eight rows are 1024 bytes, panels `ROWS` times 128.
template <int ROWS> __device__ __forceinline__ u64 tile_at(const act* at) {
    u64 address = (u32)__cvta_generic_to_shared(at);
    return (address & 0x3ffff) >> 4 | (u64)(ROWS * 128 >> 4) << 16 | (u64)(ATOM >> 4) << 32 | (u64)1 << 62;
}

__device__ __forceinline__ void begin_wgmma() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Products that were begun go on by themselves; until they are done.
__device__ __forceinline__ void leave_wgmma() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void await_wgmma() { asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory"); }
__device__ __forceinline__ void end_wgmma() {
    leave_wgmma();
    await_wgmma();
}

#define FOUR(j) "+f"(acc[j][0]), "+f"(acc[j][1]), "+f"(acc[j][2]), "+f"(acc[j][3])
#define THIRTY_TWO(j) FOUR(j), FOUR(j + 1), FOUR(j + 2), FOUR(j + 3), FOUR(j + 4), FOUR(j + 5), FOUR(j + 6), FOUR(j + 7)
#define NAMES_32 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_64 \
    NAMES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// acc (64 x 64, or 64 x 128) = A B^T for 16 inner elements, or += where `more`: both tiles, their rows contiguous.
__device__ __forceinline__ void step_tiles(float (&acc)[8][4], u64 a, u64 b, u32 more) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %34, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, %32, %33, p, 1, 1, 0, 0;\n\t}"
                 : THIRTY_TWO(0) : "l"(a), "l"(b), "r"(more));
}
__device__ __forceinline__ void step_tiles(float (&acc)[16][4], u64 a, u64 b, u32 more) {
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %66, 0;\n\t"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, %64, %65, p, 1, 1, 0, 0;\n\t}"
                 : THIRTY_TWO(0), THIRTY_TWO(8) : "l"(a), "l"(b), "r"(more));
}
// acc (64 x 64, or 64 x 128) += A B for 16 inner elements: A in registers, B a tile's 16 rows.
__device__ __forceinline__ void step_held(float (&acc)[8][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" NAMES_32 "}, {%32,%33,%34,%35}, %36, 1, 1, 1, 1;"
                 : THIRTY_TWO(0) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void step_held(float (&acc)[16][4], const u32 (&a)[4], u64 b) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" NAMES_64 "}, {%64,%65,%66,%67}, %68, 1, 1, 1, 1;"
                 : THIRTY_TWO(0), THIRTY_TWO(8) : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// From a tile, as wgmma reads it, to its inner elements from 16 k on, or to its rows from there on.
template <int ROWS> __device__ __forceinline__ u64 inner(int k) { return k / 4 * (ROWS * 128 >> 4) + k % 4 * (32 >> 4); }
__device__ __forceinline__ u64 rows_on(int k) { return k * (16 * 128 >> 4); }

// From here on they are those of products that are done.
__device__ __forceinline__ void settle(float (&acc)[8][4]) { asm volatile("" : THIRTY_TWO(0)::"memory"); }
__device__ __forceinline__ void settle(float (&acc)[16][4]) { asm volatile("" : THIRTY_TWO(0), THIRTY_TWO(8)::"memory"); }

// s = A B^T, of tiles.
template <int ROWS, int WIDE_> __device__ __forceinline__ void begin_tiles(float (&s)[8][4], u64 a, u64 b) {
#pragma unroll
    for (int k = 0; k < WIDE_ / 16; k++) step_tiles(s, a + inner<ROWS>(k), b + inner<ROWS>(k), k > 0);
}

// acc += P B, P as accumulators hold it, rounded to bf16.
template <int NB> __device__ __forceinline__ void begin_held(float (&acc)[NB][4], const float (&p)[8][4], u64 b) {
    u32 a[4][4];
#pragma unroll
    for (int k = 0; k < 4; k++) {
        a[k][0] = pack(p[2 * k][0], p[2 * k][1]), a[k][1] = pack(p[2 * k][2], p[2 * k][3]);
        a[k][2] = pack(p[2 * k + 1][0], p[2 * k + 1][1]), a[k][3] = pack(p[2 * k + 1][2], p[2 * k + 1][3]);
    }
    begin_wgmma();
#pragma unroll
    for (int k = 0; k < 4; k++) step_held(acc, a[k], b + rows_on(k));
}
