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

// What a thread has of a block: pieces of four neighbours, all fetched before any is used.
#define PIECES (BLOCK / THREADS / 4)

// Its piece n begins here; past the end of the item there are fewer than four.
__device__ __forceinline__ u64 piece_at(const Item& item, int n) {
    return (u64)(blockIdx.x - item.first_block) * BLOCK + (n * THREADS + threadIdx.x) * 4;
}

__device__ __forceinline__ float4 fetch(const float* from, u64 at, u64 len) {
    if (at + 4 <= len) return *(const float4*)(from + at);
    return make_float4(at < len ? from[at] : 0, at + 1 < len ? from[at + 1] : 0, at + 2 < len ? from[at + 2] : 0, 0);
}

__device__ __forceinline__ void put(float* to, u64 at, u64 len, float4 x) {
    if (at + 4 <= len) *(float4*)(to + at) = x;
    else {
        if (at < len) to[at] = x.x;
        if (at + 1 < len) to[at + 1] = x.y;
        if (at + 2 < len) to[at + 2] = x.z;
    }
}

KERNEL adamw_squares(PARAMS AdamW p) {
    const Item item = p.items[p.item_of_block[blockIdx.x]];
    float4 all[PIECES];
#pragma unroll
    for (int n = 0; n < PIECES; n++) all[n] = fetch(item.grads, piece_at(item, n), item.len);
    double sum = 0;
#pragma unroll
    for (int n = 0; n < PIECES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            double g = (&all[n].x)[i] / item.divisor;
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

__device__ __forceinline__ void update(const Item& item, float factor, float grad, float& w, float& m, float& v) {
    float g = grad / item.divisor * factor;
    w -= item.learning_rate * item.weight_decay * w;
    m = item.beta1 * m + (1.0f - item.beta1) * g;
    v = item.beta2 * v + (1.0f - item.beta2) * g * g;
    w -= item.step_size * m / (sqrtf(v) / item.correction2 + item.eps);
}

KERNEL __launch_bounds__(THREADS, 4) adamw_update(PARAMS AdamW p) {
    u32 index = p.item_of_block[blockIdx.x];
    const Item item = p.items[index];
    float factor = p.factors[index];
    if (factor == INF) return;
#pragma unroll 2
    for (int n = 0; n < PIECES; n++) {
        u64 at = piece_at(item, n);
        float4 g = fetch(item.grads, at, item.len), w = fetch(item.params, at, item.len);
        float4 m = fetch(item.moment1, at, item.len), v = fetch(item.moment2, at, item.len);
#pragma unroll
        for (int i = 0; i < 4; i++) update(item, factor, (&g.x)[i], (&w.x)[i], (&m.x)[i], (&v.x)[i]);
        put(item.params, at, item.len, w);
        put(item.moment1, at, item.len, m);
        put(item.moment2, at, item.len, v);
        put(item.grads, at, item.len, make_float4(0, 0, 0, 0));
    }
}
