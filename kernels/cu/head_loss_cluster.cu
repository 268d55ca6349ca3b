// head_loss_N: as head_loss of head_loss.cu, a row by N blocks, a cluster, each of which keeps its piece of the row in registers
//
// For bf16 on cards with clusters (compute capability 9.0 on). Logits are read once. A block has `piece` neighbouring columns; the order of sums depends
// on the vocabulary alone: a thread's columns, the threads of a block, then the blocks in order.
#include "head_loss.cuh"

#define HELD 8 // fours of neighbouring columns of a thread

// Until every thread of the cluster has arrived; what each wrote before is seen by all after.
__device__ __forceinline__ void arrive_cluster() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
__device__ __forceinline__ void wait_cluster() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// A number of another block of the cluster, which stands there where `mine` stands here.
__device__ __forceinline__ float of_block(const float* mine, u32 block) {
    u32 here = (u32)__cvta_generic_to_shared(mine), there;
    float value;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(here), "r"(block));
    asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(there) : "memory");
    return value;
}

// Two units in the last place of float32 off, far below bf16's.
#define EXP __expf

template <u32 BLOCKS> __device__ __forceinline__ void loss_of_row(const HeadLoss& p) {
    __shared__ float peaks[THREADS / 32], sums[THREADS / 32], whole[2];
    u32 chunk_row = blockIdx.x / BLOCKS, row = p.first_row + chunk_row, first = blockIdx.x % BLOCKS * p.piece;
    u32 end = min(first + p.piece, p.pitch), count = first < end ? end - first : 0;
    const float* logits = p.logits + (u64)chunk_row * p.pitch;
    act* dlogits = p.dlogits ? p.dlogits + (u64)chunk_row * p.pitch + first : 0;
    if (p.positions[row] == PADDING) {
        if (dlogits)
            for (u32 c = threadIdx.x; c < count; c += THREADS) store(dlogits + c, 0.0f);
        return;
    }
    float4 x[HELD];
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        u32 c = (n * THREADS + threadIdx.x) * 4;
        x[n] = c < count ? *(const float4*)(logits + first + c) : make_float4(-INF, -INF, -INF, -INF);
    }
    u32 target = p.targets[row];
    float weight = p.weights[row], aim = logits[target], mine = -INF;
    u32 real = first < p.vocabulary ? p.vocabulary - first : 0; // columns of this block that are no padding, or more than it has
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        u32 c = (n * THREADS + threadIdx.x) * 4;
        // Past the vocabulary: whatever is there.
        if (c + 4 > real) x[n] = make_float4(c < real ? x[n].x : -INF, c + 1 < real ? x[n].y : -INF, c + 2 < real ? x[n].z : -INF, -INF);
        mine = fmaxf(mine, fmaxf(fmaxf(x[n].x, x[n].y), fmaxf(x[n].z, x[n].w)));
    }
    // A thread without columns has nothing to add: -infinity less itself is no number.
    float level = mine == -INF ? 0.0f : mine, peak = mine, sum = 0;
#pragma unroll
    for (int n = 0; n < HELD; n++) {
        x[n] = make_float4(EXP(x[n].x - level), EXP(x[n].y - level), EXP(x[n].z - level), EXP(x[n].w - level));
        sum += (x[n].x + x[n].y) + (x[n].z + x[n].w);
    }
    merge_block(peak, sum, peaks, sums);
    if constexpr (BLOCKS > 1) {
        if (threadIdx.x == 0) whole[0] = peak, whole[1] = sum;
        arrive_cluster();
        wait_cluster();
        peak = of_block(whole, 0), sum = of_block(whole + 1, 0);
#pragma unroll 1
        for (u32 block = 1; block < BLOCKS; block++) merge(peak, sum, of_block(whole, block), of_block(whole + 1, block));
        arrive_cluster();
    }
    if (blockIdx.x % BLOCKS == 0 && threadIdx.x == 0) p.losses[row] = logf(sum) + (peak - aim);
    if (dlogits) {
        float share = weight == 0 ? 0.0f : weight * expf(level - peak) / sum;
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            u32 c = (n * THREADS + threadIdx.x) * 4;
            if (c >= count) continue;
            float g[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // A row of weight zero has gradient zero, whatever its logits.
                g[i] = weight == 0 ? 0.0f : g[i] * share;
                if (first + c + i == target) g[i] -= weight;
            }
            *(uint2*)(dlogits + c) = make_uint2(pack(g[0], g[1]), pack(g[2], g[3]));
        }
    }
    // No block goes while another may read what it found.
    if constexpr (BLOCKS > 1) wait_cluster();
}

KERNEL __launch_bounds__(THREADS, 2) head_loss_1(PARAMS HeadLoss p) { loss_of_row<1>(p); }
KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 2) head_loss_2(PARAMS HeadLoss p) { loss_of_row<2>(p); }
