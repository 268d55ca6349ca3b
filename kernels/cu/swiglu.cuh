// The function of SwiGLU and its derivatives. Sums of products are spelt out, so that every kernel has the same bits of them.
// Must never look beyond an element, but in a build that tests make.
#pragma once
#include "common.cuh"

#ifdef NODUS_BROKEN_KERNEL
// In a build that tests make: what a row gets depends on how many there are, by less than rounding explains.
__device__ __forceinline__ float sigmoid(float x) { return (1.0f + 1e-8f * gridDim.x) / (1.0f + expf(-x)); }
#elif NODUS_BF16
// To some units in the last place of float32, far below bf16's: a division and an exponential to the last bit are half of a kernel's instructions.
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
#else
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
#endif

__device__ __forceinline__ float swiglu_of(float gate, float up) { return gate * sigmoid(gate) * up; }

// gate and up become their gradients.
__device__ __forceinline__ void swiglu_gradients(float dy, float& gate, float& up) {
    float s = sigmoid(gate), silu = gate * s;
    float dgate = dy * up * fmaf(silu, 1.0f - s, s);
    up = dy * silu;
    gate = dgate;
}
