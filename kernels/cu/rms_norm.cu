// rms_norm:          x (rows x groups x width), weight (width) float32        out = x / sqrt(mean(x^2) + eps) * weight
// rms_norm_backward: dy, x, weight                                            dx = or += (accumulate) its gradient
//
// Each of the groups of a row by itself; rows of others may stand between those of an array. Padding rows are untouched. A warp a group up to
// 512 wide, 128 threads up to 1024, else 256: the order of a sum depends on the width alone.
#include "common.cuh"

struct RmsNorm {
    const act* x;
    const act* dy;
    const float* weight;
    act* out;
    const u32* positions;
    u32 items; // rows * groups
    u32 groups;
    u32 width;
    float eps;
    u32 accumulate;
    u32 x_pitch; // elements from row to row
    u32 dy_pitch;
    u32 out_pitch;
};

// Where a group's elements begin.
__device__ __forceinline__ u64 begin(const RmsNorm& p, u32 item, u32 pitch) { return (u64)(item / p.groups) * pitch + item % p.groups * p.width; }


// What a thread has of a row: pieces of V, the first HELD of which stay in registers between the two times that they are needed.
#define HELD 1

// Whether what is needed only after the sum is fetched before it: narrow rows wait for memory, wide ones for registers.
#define AHEAD (T <= 128)

template <int T, int V> __device__ void forward(const RmsNorm& p, u32 item) {
    const act* x = p.x + begin(p, item, p.x_pitch);
    act* out = p.out + begin(p, item, p.out_pitch);
    u32 first = threadIdx.x % T * V;
    float held[HELD][V] = {}, weight[HELD][V] = {}, sum[1] = {};
#pragma unroll
    for (u32 n = 0; n < HELD; n++)
        if (first + n * T * V < p.width) {
            load<V>(x + first + n * T * V, held[n]);
            if (AHEAD) load<V>(p.weight + first + n * T * V, weight[n]);
        }
#pragma unroll
    for (u32 n = 0; n < HELD; n++)
#pragma unroll
        for (int i = 0; i < V; i++) sum[0] = fmaf(held[n][i], held[n][i], sum[0]);
    for (u32 c = first + HELD * T * V; c < p.width; c += T * V) {
        float v[V];
        load<V>(x + c, v);
#pragma unroll
        for (int i = 0; i < V; i++) sum[0] = fmaf(v[i], v[i], sum[0]);
    }
    team_sums<T>(sum);
    float r = 1.0f / sqrtf(sum[0] / (float)p.width + p.eps);
    auto finish = [&](u32 c, float(&v)[V], const float(&w)[V]) {
#pragma unroll
        for (int i = 0; i < V; i++) v[i] = v[i] * r * w[i];
        save<V>(out + c, v);
    };
#pragma unroll
    for (u32 n = 0; n < HELD; n++)
        if (first + n * T * V < p.width) {
            if (!AHEAD) load<V>(p.weight + first + n * T * V, weight[n]);
            finish(first + n * T * V, held[n], weight[n]);
        }
    for (u32 c = first + HELD * T * V; c < p.width; c += T * V) {
        float v[V], w[V];
        load<V>(x + c, v);
        load<V>(p.weight + c, w);
        finish(c, v, w);
    }
}

template <int T, int V> __device__ void backward(const RmsNorm& p, u32 item) {
    const act *x = p.x + begin(p, item, p.x_pitch), *dy = p.dy + begin(p, item, p.dy_pitch);
    act* dx = p.out + begin(p, item, p.out_pitch);
    u32 first = threadIdx.x % T * V;
    float held_x[HELD][V] = {}, held_d[HELD][V] = {}, held_before[HELD][V] = {}, sums[2] = {}; // of squares, and of d x
    auto fetch = [&](u32 c, float(&v)[V], float(&d)[V]) {
        float w[V];
        load<V>(x + c, v);
        load<V>(dy + c, d);
        load<V>(p.weight + c, w);
#pragma unroll
        for (int i = 0; i < V; i++) d[i] *= w[i];
    };
    auto add = [&](const float(&v)[V], const float(&d)[V]) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            sums[0] = fmaf(v[i], v[i], sums[0]);
            sums[1] = fmaf(d[i], v[i], sums[1]);
        }
    };
#pragma unroll
    for (u32 n = 0; n < HELD; n++)
        if (first + n * T * V < p.width) {
            fetch(first + n * T * V, held_x[n], held_d[n]);
            if (AHEAD && p.accumulate) load<V>(dx + first + n * T * V, held_before[n]);
        }
#pragma unroll
    for (u32 n = 0; n < HELD; n++) add(held_x[n], held_d[n]);
    for (u32 c = first + HELD * T * V; c < p.width; c += T * V) {
        float v[V], d[V];
        fetch(c, v, d);
        add(v, d);
    }
    team_sums<T>(sums);
    float r = 1.0f / sqrtf(sums[0] / (float)p.width + p.eps);
    float factor = r * r * r / (float)p.width * sums[1];
    auto finish = [&](u32 c, const float(&v)[V], float(&d)[V], const float(&before)[V]) {
#pragma unroll
        for (int i = 0; i < V; i++) {
            float g = r * d[i] - v[i] * factor;
            d[i] = p.accumulate ? before[i] + g : g;
        }
        save<V>(dx + c, d);
    };
#pragma unroll
    for (u32 n = 0; n < HELD; n++)
        if (first + n * T * V < p.width) {
            if (!AHEAD && p.accumulate) load<V>(dx + first + n * T * V, held_before[n]);
            finish(first + n * T * V, held_x[n], held_d[n], held_before[n]);
        }
    for (u32 c = first + HELD * T * V; c < p.width; c += T * V) {
        float v[V], d[V], before[V] = {};
        fetch(c, v, d);
        if (p.accumulate) load<V>(dx + c, before);
        finish(c, v, d, before);
    }
}

// Whether every group begins at a multiple of 16 bytes and is one long.
__device__ __forceinline__ bool whole(const RmsNorm& p) {
    return (p.width | p.x_pitch | p.dy_pitch | p.out_pitch) % 8 == 0 && ((u64)p.x | (u64)p.dy | (u64)p.out) % 16 == 0;
}

// One team of T threads a group; a block of BLOCK threads holds several.
#define FOR_TEAM(T, BLOCK, BODY)                                           \
    u32 item = blockIdx.x * (BLOCK / T) + threadIdx.x / T;                 \
    if (item >= p.items || p.positions[item / p.groups] == PADDING) return; \
    if (whole(p)) BODY<T, 8>(p, item);                                     \
    else BODY<T, 1>(p, item);

KERNEL rms_norm_32(PARAMS RmsNorm p) { FOR_TEAM(32, 256, forward) }
KERNEL rms_norm_128(PARAMS RmsNorm p) { FOR_TEAM(128, 128, forward) }
KERNEL rms_norm_256(PARAMS RmsNorm p) { FOR_TEAM(256, 256, forward) }
KERNEL rms_norm_backward_32(PARAMS RmsNorm p) { FOR_TEAM(32, 256, backward) }
KERNEL rms_norm_backward_128(PARAMS RmsNorm p) { FOR_TEAM(128, 128, backward) }
KERNEL rms_norm_backward_256(PARAMS RmsNorm p) { FOR_TEAM(256, 256, backward) }
