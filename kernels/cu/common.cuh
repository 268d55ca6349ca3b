// What every kernel shares: types, conversions, 8-wide access, sums over a team of threads, the row tables.
// Must never include a header: NVRTC is given none, and users have none.
#pragma once

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A kernel takes one struct by value; its twin in Rust has the same fields in the same order.
#define KERNEL extern "C" __global__ void
#define PARAMS const __grid_constant__

// Position of a padding row.
#define PADDING 0xffffffffu
// Rows of a tile of a layout; each sequence starts at a multiple of it.
#define TILE_ROWS 128

#define INF __int_as_float(0x7f800000)

struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
__device__ __forceinline__ void store(float* p, float x) { *p = x; }
// Round to nearest, ties to even.
__device__ __forceinline__ void store(bf16* p, float x) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    p->bits = bits;
}
__device__ __forceinline__ u32 pack(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Activations.
#if NODUS_BF16
typedef bf16 act;
#else
typedef float act;
#endif

// V consecutive elements, V = 1 or 8; 8 of them start at a multiple of 8 elements of an aligned array.
template <int V> __device__ __forceinline__ void load(const float* p, float (&x)[V]) {
    if constexpr (V == 8) {
        float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    } else {
        x[0] = *p;
    }
}
template <int V> __device__ __forceinline__ void load(const bf16* p, float (&x)[V]) {
    if constexpr (V == 8) {
        uint4 w = *(const uint4*)p;
        u32 words[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            x[2 * i] = __uint_as_float(words[i] << 16);
            x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    } else {
        x[0] = to_float(*p);
    }
}
template <int V> __device__ __forceinline__ void save(float* p, const float (&x)[V]) {
    if constexpr (V == 8) {
        *(float4*)p = make_float4(x[0], x[1], x[2], x[3]);
        *(float4*)(p + 4) = make_float4(x[4], x[5], x[6], x[7]);
    } else {
        *p = x[0];
    }
}
template <int V> __device__ __forceinline__ void save(bf16* p, const float (&x)[V]) {
    if constexpr (V == 8) {
        *(uint4*)p = make_uint4(pack(x[0], x[1]), pack(x[2], x[3]), pack(x[4], x[5]), pack(x[6], x[7]));
    } else {
        store(p, x[0]);
    }
}

// Sum over a warp: a butterfly of commutative additions, so that every lane holds the same bits.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
    return x;
}

// N sums over a team of T threads: one warp, or the whole block of T threads. All of them must call, once in a kernel.
template <int T, int N> __device__ __forceinline__ void team_sums(float (&x)[N]) {
#pragma unroll
    for (int n = 0; n < N; n++) x[n] = warp_sum(x[n]);
    if constexpr (T > 32) {
        __shared__ float parts[T / 32][N];
#pragma unroll
        for (int n = 0; n < N; n++)
            if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32][n] = x[n];
        __syncthreads();
#pragma unroll
        for (int n = 0; n < N; n++) {
            x[n] = 0;
#pragma unroll
            for (int i = 0; i < T / 32; i++) x[n] += parts[i][n];
        }
    }
}
