// What the kernels of the loss share: their arguments, and how sums of exponentials are put together.
// Must never sum over the rows.
#pragma once
#include "common.cuh"

#define THREADS 512

struct HeadLoss {
    const float* logits;
    act* dlogits; // or null
    float* losses;
    const u32* targets;
    const float* weights;
    const u32* positions;
    u32 first_row; // of the chunk
    u32 vocabulary;
    u32 pitch; // a multiple of 8
    u32 piece; // columns of a block of a cluster, a multiple of 8
    u32 rows;  // of the chunk
    u32 zero;
};

// (peak, sum of exponentials less the peak) of two sets together.
__device__ __forceinline__ void merge(float& peak, float& sum, float peak2, float sum2) {
    float top = fmaxf(peak, peak2);
    sum = (peak == top ? sum : sum * expf(peak - top)) + (peak2 == top ? sum2 : sum2 * expf(peak2 - top));
    peak = top;
}

// The same of all threads of a block, in one order. All of them must call; `peaks` and `sums` have a place a warp, and are read when they return.
__device__ __forceinline__ void merge_block(float& peak, float& sum, float* peaks, float* sums) {
    // Lane 0 alone holds the result: merging is not commutative to the last bit.
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2)
        merge(peak, sum, __shfl_down_sync(0xffffffffu, peak, offset), __shfl_down_sync(0xffffffffu, sum, offset));
    if (threadIdx.x % 32 == 0) peaks[threadIdx.x / 32] = peak, sums[threadIdx.x / 32] = sum;
    __syncthreads();
    peak = peaks[0], sum = sums[0];
    for (u32 i = 1; i < THREADS / 32; i++) merge(peak, sum, peaks[i], sums[i]);
}
