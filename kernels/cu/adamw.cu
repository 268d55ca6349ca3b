// adamw: per item params, grads, moment1, moment2 (length of the item) float32; see AdamWItem in src/device.rs for the arithmetic
//
// adamw_squares: partial sums of squares of grads / divisor over blocks of 4096 elements, in float64.
// adamw_norms:   one block an item adds its partial sums in a fixed order: norms[index] =, and factors[item] = what clipping leaves.
// adamw_update:  params, moments assigned, grads zeroed; an item whose norm is not finite is untouched.
// All items in one launch each; an item's blocks and their order depend on its length alone.
#include "common.cuh"

struct Item {
    float* params;
    float* grads;
    float* moment1;
    float* moment2;
    u64 len;
    float divisor;
    float max_norm; // negative: no clipping
    float learning_rate;
    float beta1;
    float beta2;
    float eps;
    float weight_decay;
    float step_size;   // learning rate / (1 - beta1^t)
    float correction2; // sqrt(1 - beta2^t)
    u32 norm_index;
    u32 first_block;
    u32 blocks;
};

struct AdamW {
    const Item* items;
    const u32* item_of_block;
    double* squares; // a block
    float* factors;  // an item; not finite: leave it alone
    float* norms;
};

#define BLOCK 4096
#define THREADS 256

__device__ double block_sum(double x) {
    __shared__ double parts[THREADS];
    parts[threadIdx.x] = x;
    for (u32 half = THREADS / 2; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.x < half) parts[threadIdx.x] += parts[threadIdx.x + half];
    }
    __syncthreads();
    return parts[0];
}

KERNEL adamw_squares(PARAMS AdamW p) {
    const Item item = p.items[p.item_of_block[blockIdx.x]];
    u64 first = (u64)(blockIdx.x - item.first_block) * BLOCK, end = min(first + BLOCK, item.len);
    double sum = 0;
    for (u64 i = first + threadIdx.x; i < end; i += THREADS) {
        double g = item.grads[i] / item.divisor;
        sum += g * g;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) p.squares[blockIdx.x] = sum;
}

KERNEL adamw_norms(PARAMS AdamW p) {
    const Item item = p.items[blockIdx.x];
    double sum = 0;
    for (u32 i = threadIdx.x; i < item.blocks; i += THREADS) sum += p.squares[item.first_block + i];
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    float norm = (float)sqrt(sum);
    p.norms[item.norm_index] = norm;
    float factor = item.max_norm < 0 ? 1.0f : fminf(1.0f, item.max_norm / (norm + 1e-6f));
    p.factors[blockIdx.x] = fabsf(norm) < INF ? factor : INF;
}

KERNEL adamw_update(PARAMS AdamW p) {
    u32 index = p.item_of_block[blockIdx.x];
    const Item item = p.items[index];
    float factor = p.factors[index];
    if (factor == INF) return;
    u64 first = (u64)(blockIdx.x - item.first_block) * BLOCK, end = min(first + BLOCK, item.len);
    for (u64 i = first + threadIdx.x; i < end; i += THREADS) {
        float g = item.grads[i] / item.divisor * factor;
        float w = item.params[i];
        w -= item.learning_rate * item.weight_decay * w;
        float m = item.beta1 * item.moment1[i] + (1.0f - item.beta1) * g;
        float v = item.beta2 * item.moment2[i] + (1.0f - item.beta2) * g * g;
        w -= item.step_size * m / (sqrtf(v) / item.correction2 + item.eps);
        item.params[i] = w;
        item.moment1[i] = m;
        item.moment2[i] = v;
        item.grads[i] = 0;
    }
}
