// Attention's products in bf16, on tiles in shared memory that are filled by asynchronous copies: by a warp, or by four at a time on Hopper.
// Must never be included where activations are float32.
#pragma once
#include "attention.cuh"
#if NODUS_WGMMA
#include "wgmma.cuh"
#define TILE_SIZE (TILE * WIDE) // elements from tile to tile
#else
#define TILE_SIZE (TILE * LD)
#endif

#define LOG2E 1.4426950408889634f

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// acc (16 x 8 NB) += A B for 16 inner elements: A in registers, B (16 x 8 NB) by columns (element (k, n) at b[n ldb + k]), or by rows where BT.
template <bool BT, int NB> __device__ __forceinline__ void step_mma(float (&acc)[NB][4], const u32 (&a)[4], const act* b, u32 ldb) {
    u32 lane = threadIdx.x % 32;
    const act* from = BT ? b + lane % 16 * ldb + lane / 16 * 8 : b + (lane % 8 + lane / 16 * 8) * ldb + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < NB; j += 2) {
        u32 both[4];
        fragment_a<BT>(both, BT ? from + j * 8 : from + j * 8 * ldb);
        u32 first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
        mma(acc[j], a, first);
        mma(acc[j + 1], a, second);
    }
}

// A (16 x K, by rows in shared memory) as step_mma wants it.
template <int K> __device__ __forceinline__ void load_fragments(u32 (&a)[K / 16][4], const act* from, u32 ld) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) fragment_a<false>(a[k / 16], from + lane % 16 * ld + lane / 16 * 8 + k);
}

// acc (16 x 8 NB) += A B, A (16 x K) by rows and B by columns in shared memory.
template <int NB, int K> __device__ __forceinline__ void shared_mma(float (&acc)[NB][4], const act* a, u32 lda, const act* b, u32 ldb) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 fa[4];
        fragment_a<false>(fa, a + lane % 16 * lda + lane / 16 * 8 + k);
        step_mma<false, NB>(acc, fa, b + k, ldb);
    }
}

// acc (16 x 8 NB) += P B, with P (16 x 8 KB) where accumulators hold it, rounded to bf16; B by rows.
template <int NB, int KB> __device__ __forceinline__ void held_mma(float (&acc)[NB][4], const float (&p)[KB][4], const act* b, u32 ldb) {
#pragma unroll
    for (int k = 0; k < KB; k += 2) {
        u32 a[4] = {pack(p[k][0], p[k][1]), pack(p[k][2], p[k][3]), pack(p[k + 1][0], p[k + 1][1]), pack(p[k + 1][2], p[k + 1][3])};
        step_mma<true, NB>(acc, a, b + k * 8 * ldb, ldb);
    }
}

// load_head by so many threads, of which this is number `thread`, without waiting: what lies past `rows` or the head is zero. Ends with `ready`.
template <u32 BLOCK> __device__ __forceinline__ void begin_head(u32 thread, act* tile, const act* x, u64 row, u32 rows, u32 pitch, u32 head) {
#if NODUS_WGMMA
    begin_swizzled<TILE, WIDE, BLOCK>(thread, tile, x + row * pitch + head * HEAD_DIM, pitch, rows);
#else
    // Rows hold whole heads, so where a head is a multiple of 16 bytes everything begins at one.
    begin_tile<TILE, WIDE, BLOCK, HEAD_DIM % 8 == 0>(thread, tile, LD, x + row * pitch + head * HEAD_DIM, pitch, rows, HEAD_DIM);
#endif
}

// The first of this warp's 16 rows of a tile: THREADS threads have one between them.
__device__ __forceinline__ u32 first_row() { return threadIdx.x % THREADS / 32 * 16; }

// Waits until all but the latest PENDING groups of copies of every thread have arrived, and every thread has.
template <int PENDING> __device__ __forceinline__ void ready() {
    arrived<PENDING>();
#if NODUS_WGMMA
    show_tiles();
#endif
    __syncthreads();
}

// The block's dynamic shared memory, where tiles begin.
__device__ __forceinline__ act* first_tile(char* shared) {
#if NODUS_WGMMA
    return (act*)(shared + (ATOM - (u32)__cvta_generic_to_shared(shared) % ATOM) % ATOM);
#else
    return (act*)shared;
#endif
}

// A tile of queries as `scores` takes it, where all but the latest two groups of copies have arrived: in registers, or where it is. (Hopper's
// products take rows in registers too; a compiler was seen to reuse those that a loop needs again.)
#if NODUS_WGMMA
typedef const act* Queries;
__device__ __forceinline__ Queries hold_queries(const act* tile) { return tile; }
#else
struct Queries {
    u32 rows[WIDE / 16][4];
};
__device__ __forceinline__ Queries hold_queries(const act* tile) {
    Queries queries;
    ready<2>();
    load_fragments<WIDE>(queries.rows, tile + first_row() * LD, LD);
    return queries;
}
#endif

// s (this warp's 16 rows x TILE) = A B^T, of queries and a tile.
__device__ __forceinline__ void scores(float (&s)[TILE / 8][4], const Queries& a, const act* b) {
#if NODUS_WGMMA
    wgmma_tiles<TILE, WIDE>(s, a, b);
#else
#pragma unroll
    for (int d = 0; d < WIDE; d += 16) step_mma<false, TILE / 8>(s, a.rows[d / 16], b + d, LD);
#endif
}
// The same twice, of tiles.
__device__ __forceinline__ void scores_of_two(
    float (&s)[TILE / 8][4], const act* a, const act* b, float (&s2)[TILE / 8][4], const act* a2, const act* b2) {
#if NODUS_WGMMA
    wgmma_tiles<TILE, WIDE>(s, a, b, s2, a2, b2);
#else
    u32 base = first_row();
    shared_mma<TILE / 8, WIDE>(s, a + base * LD, LD, b, LD);
    shared_mma<TILE / 8, WIDE>(s2, a2 + base * LD, LD, b2, LD);
#endif
}
// acc (this warp's 16 rows x WIDE) += P B, P (16 x TILE) where accumulators hold it, rounded to bf16.
__device__ __forceinline__ void weigh(float (&acc)[WIDE / 8][4], const float (&p)[TILE / 8][4], const act* b) {
#if NODUS_WGMMA
    wgmma_held<TILE, WIDE>(acc, p, b);
#else
    held_mma<WIDE / 8, TILE / 8>(acc, p, b, LD);
#endif
}

// The keys that a query sees: key - first < count, in numbers that wrap. Nothing for a row that is padding.
struct Seen {
    u32 first, count;
};
__device__ __forceinline__ Seen seen_keys(const Attention& p, u32 position, bool real) {
    u32 first = p.window != 0 && position + 1 > p.window ? position + 1 - p.window : 0;
    return {first, real ? position + 1 - first : 0};
}

// s (rows of queries, 16 x 8 NB columns of keys from `key` on) becomes `hidden` where a query does not see a key.
template <int NB> __device__ __forceinline__ void hide(float (&s)[NB][4], const Seen (&seen)[2], u32 key, float hidden) {
    u32 at[2] = {key + acc_col(0) - seen[0].first, key + acc_col(0) - seen[1].first};
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] = at[i / 2] + (j * 8 + i % 2) < seen[i / 2].count ? s[j][i] : hidden;
}

// What a warp accumulated for 16 rows of a head, each row times its factor, to where it belongs. Rows that are not real are untouched.
template <int NB>
__device__ __forceinline__ void store_head(
    act* to, const float (&acc)[NB][4], const float (&factor)[2], const bool (&real)[2], u64 row, u32 pitch, u32 head) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        if (!real[i / 2]) continue;
        act* from = to + (row + acc_row(i)) * pitch + head * HEAD_DIM;
#pragma unroll
        for (int j = 0; j < NB; j++) {
            u32 column = j * 8 + acc_col(i);
            float first = acc[j][i] * factor[i / 2], second = acc[j][i + 1] * factor[i / 2];
            if (HEAD_DIM % 8 == 0) {
                if (j * 8 < HEAD_DIM) *(u32*)(from + column) = pack(first, second);
            } else {
                if (column < HEAD_DIM) store(from + column, first);
                if (column + 1 < HEAD_DIM) store(from + column + 1, second);
            }
        }
    }
}

// Of what a warp accumulated for 16 rows of a head, that row's of accumulators `i` and `i + 1`, in float32.
template <int NB> __device__ __forceinline__ void store_parts(float* to, const float (&acc)[NB][4], int i) {
#pragma unroll
    for (int j = 0; j < NB; j++) {
        u32 column = j * 8 + acc_col(i);
        if (HEAD_DIM % 2 == 0) {
            if (column < HEAD_DIM) *(float2*)(to + column) = make_float2(acc[j][i], acc[j][i + 1]);
        } else {
            if (column < HEAD_DIM) to[column] = acc[j][i];
            if (column + 1 < HEAD_DIM) to[column + 1] = acc[j][i + 1];
        }
    }
}
