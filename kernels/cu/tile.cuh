// Products of small matrices in shared memory by one warp: tensor cores for bf16, plain float32 otherwise. The order in which a
// result's terms are added depends on the inner length alone.
// Must never know what the matrices mean.
#pragma once
#include "common.cuh"

// Elements added to each row of a tile in shared memory: 16 bytes, so that rows stay aligned and fall into different banks.
#if NODUS_BF16
#define PAD 8
#else
#define PAD 4
#endif

// Which accumulator a lane holds: acc[j][i] is row acc_row(i), column 8 j + acc_col(i) of the warp's 16 x 8 j tile.
__device__ __forceinline__ u32 acc_row(int i) { return threadIdx.x % 32 / 4 + (i / 2) * 8; }
__device__ __forceinline__ u32 acc_col(int i) { return threadIdx.x % 4 * 2 + i % 2; }

#if NODUS_BF16
__device__ __forceinline__ u32 shared_address(const act* p) { return (u32)__cvta_generic_to_shared(p); }
template <bool TRANSPOSE> __device__ __forceinline__ void fragment_a(u32 (&r)[4], const act* p) {
    if constexpr (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(shared_address(p)) : "memory");
}
template <bool TRANSPOSE> __device__ __forceinline__ void fragment_b(u32 (&r)[2], const act* p) {
    if constexpr (TRANSPOSE)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(p)) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                     : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(p)) : "memory");
}
__device__ __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif

// acc (16 x 8 NB, of which the first `blocks` columns of 8) += A B, with A 16 x K and B K x 8 NB; K is a multiple of 16.
// A is stored by rows, or by columns where AT (element (m, k) at a[k lda + m]); B by columns (element (k, n) at b[n ldb + k]), or
// by rows where BT (b[k ldb + n]). All 32 lanes must call.
template <bool AT, bool BT, int NB>
__device__ __forceinline__ void warp_mma(float (&acc)[NB][4], const act* a, u32 lda, const act* b, u32 ldb, u32 K, int blocks = NB) {
    u32 lane = threadIdx.x % 32;
#if NODUS_BF16
    const act* pa = AT ? a + (lane % 8 + lane / 16 * 8) * lda + lane / 8 % 2 * 8 : a + lane % 16 * lda + lane / 16 * 8;
    const act* pb = BT ? b + lane % 16 * ldb : b + lane % 8 * ldb + lane / 8 % 2 * 8;
    for (u32 k = 0; k < K; k += 16) {
        u32 fa[4];
        fragment_a<AT>(fa, AT ? pa + k * lda : pa + k);
#pragma unroll
        for (int j = 0; j < NB; j++) {
            if (j < blocks) {
                u32 fb[2];
                fragment_b<BT>(fb, BT ? pb + k * ldb + j * 8 : pb + j * 8 * ldb + k);
                mma(acc[j], fa, fb);
            }
        }
    }
#else
    u32 row = lane / 4, col = lane % 4 * 2;
    for (u32 k = 0; k < K; k++) {
        float a0 = AT ? a[k * lda + row] : a[row * lda + k];
        float a1 = AT ? a[k * lda + row + 8] : a[(row + 8) * lda + k];
#pragma unroll
        for (int j = 0; j < NB; j++) {
            if (j < blocks) {
                u32 n = j * 8 + col;
                float b0 = BT ? b[k * ldb + n] : b[n * ldb + k];
                float b1 = BT ? b[k * ldb + n + 1] : b[(n + 1) * ldb + k];
                acc[j][0] = fmaf(a0, b0, acc[j][0]);
                acc[j][1] = fmaf(a0, b1, acc[j][1]);
                acc[j][2] = fmaf(a1, b0, acc[j][2]);
                acc[j][3] = fmaf(a1, b1, acc[j][3]);
            }
        }
    }
#endif
}

// 16 bytes from device memory to shared memory without waiting, or zeros.
__device__ __forceinline__ void copy_16(act* to, const act* from, bool real) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from), "r"(real ? 16 : 0) : "memory");
}
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until all but the latest PENDING of this thread's groups have arrived.
template <int PENDING> __device__ __forceinline__ void arrived() { asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory"); }

// ROWS x COLS of shared memory (COLS a multiple of 8) from an array with `pitch` elements a row; what lies past `rows` or `cols` is zero.
template <int ROWS, int COLS>
__device__ __forceinline__ void load_tile(act* tile, u32 ld, const act* from, u64 pitch, u32 rows, u32 cols) {
    if (pitch % 8 == 0 && cols % 8 == 0 && (u64)from % 16 == 0) {
        for (u32 i = threadIdx.x; i < ROWS * COLS / 8; i += blockDim.x) {
            u32 r = i / (COLS / 8), c = i % (COLS / 8) * 8;
            constexpr int WORDS = 8 * sizeof(act) / 16;
            uint4 words[WORDS];
#pragma unroll
            for (int w = 0; w < WORDS; w++)
                words[w] = r < rows && c < cols ? ((const uint4*)(from + r * pitch + c))[w] : make_uint4(0, 0, 0, 0);
#pragma unroll
            for (int w = 0; w < WORDS; w++) ((uint4*)(tile + r * ld + c))[w] = words[w];
        }
    } else {
        for (u32 i = threadIdx.x; i < ROWS * COLS; i += blockDim.x) {
            u32 r = i / COLS, c = i % COLS;
            store(tile + r * ld + c, r < rows && c < cols ? to_float(from[r * pitch + c]) : 0.0f);
        }
    }
}

// load_tile as one group of copies, to be waited for with `arrived`; by BLOCK threads, of which this is number `thread`. Where rows are not aligned,
// it does not wait to be waited for; ALIGNED says that they are known to be.
template <int ROWS, int COLS, int BLOCK, bool ALIGNED = false>
__device__ __forceinline__ void begin_tile(u32 thread, act* tile, u32 ld, const act* from, u64 pitch, u32 rows, u32 cols) {
    constexpr u32 EACH = 16 / sizeof(act);
    if (ALIGNED || (pitch % EACH == 0 && cols % EACH == 0 && (u64)from % 16 == 0)) {
        constexpr u32 ALL = ROWS * COLS / EACH;
#pragma unroll
        for (u32 n = 0; n < (ALL + BLOCK - 1) / BLOCK; n++) {
            u32 i = n * BLOCK + thread;
            // Every thread has as many where the tile divides: nothing to ask.
            if (ALL % BLOCK != 0 && i >= ALL) continue;
            u32 r = i / (COLS / EACH), c = i % (COLS / EACH) * EACH;
            bool real = r < rows && c < cols;
            copy_16(tile + r * ld + c, real ? from + r * pitch + c : from, real);
        }
    } else {
        load_tile<ROWS, COLS>(tile, ld, from, pitch, rows, cols);
    }
    commit_copies();
}
