// head_loss_N: as head_loss of head_loss.cu, rows by N blocks, a cluster, each of which has its piece of a row
//
// For bf16 on cards with clusters and bulk copies (compute capability 9.0 on). Logits are read once: a copy brings the piece of the next row to
// shared memory while the blocks, from registers, do theirs of this one. A block has `piece` neighbouring columns; the order of sums depends on
// the vocabulary alone: a thread's columns, the threads of a warp, then the warps of the cluster in order of their columns, lane by lane.
#include "head_loss.cuh"

#define ROWS 4 // rows of a cluster, one after another
#define WARPS (THREADS / 32)

// Until every thread of the cluster has arrived; what each wrote before is seen by all after.
template <u32 BLOCKS> __device__ __forceinline__ void meet() {
    if constexpr (BLOCKS == 1)
        __syncthreads();
    else
        asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

__device__ __forceinline__ u32 shared_word(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// Two numbers to where `to` stands in a block of the cluster.
__device__ __forceinline__ void tell(float2* to, u32 block, float2 x) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_word(to)), "r"(block));
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(there), "f"(x.x), "f"(x.y) : "memory");
}

// A copy of whole 16 bytes under way, of which `full` will know.
__device__ __forceinline__ void begin_copy(float* to, const float* from, u32 bytes, u64* full) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_word(full)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared_word(to)), "l"(from),
                 "r"(bytes), "r"(shared_word(full)) : "memory");
}
__device__ __forceinline__ void await_copy(u64* full, u32 phase) {
    u32 done;
    do {
        asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                     : "=r"(done) : "r"(shared_word(full)), "r"(phase) : "memory");
    } while (!done);
}

// What this thread read of shared memory so far is read before any copy that begins after the next barrier writes there.
__device__ __forceinline__ void finish_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

__device__ __forceinline__ float warp_peak(float x) {
#pragma unroll
    for (int offset = 16; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, offset));
    return x;
}

// Two units in the last place of float32 off, far below bf16's.
#define EXP __expf

// HELD: fours of neighbouring columns of a thread.
template <u32 BLOCKS, int HELD> __device__ __forceinline__ void loss_of_rows(const HeadLoss& p) {
    extern __shared__ __align__(128) float piece[];
    __shared__ __align__(8) u64 full;
    __shared__ __align__(8) float2 found[2][BLOCKS * WARPS]; // of every warp of the cluster: its peak, and its sum less that
    constexpr int EACH = (BLOCKS * WARPS + 31) / 32;
    u32 lane = threadIdx.x % 32, block = blockIdx.x % BLOCKS, first = block * p.piece;
    u32 count = first < p.pitch ? min(p.piece, p.pitch - first) : 0, real = first < p.vocabulary ? min(count, p.vocabulary - first) : 0;
    u32 begin = blockIdx.x / BLOCKS * ROWS, end = min(begin + ROWS, p.rows), turn = 0;
    auto fetch = [&](u32 at) {
        if (threadIdx.x == 0 && count > 0) begin_copy(piece, p.logits + (u64)at * p.pitch + first, count * 4, &full);
    };
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_word(&full)) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    // Nobody tells a block anything before it is there.
    meet<BLOCKS>();
    fetch(begin);
#pragma unroll 1
    for (u32 at = begin; at < end; at++) {
        u32 row = p.first_row + at, target = p.targets[row] - first;
        bool is_row = p.positions[row] != PADDING;
        float weight = p.weights[row], aim = 0, peak = -INF, sum = 0;
        if (count > 0) await_copy(&full, (at - begin) % 2);
        float4 x[HELD];
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            u32 c = (n * THREADS + threadIdx.x) * 4;
            x[n] = c < real ? *(const float4*)(piece + c) : make_float4(-INF, -INF, -INF, -INF);
            // Past the vocabulary: whatever is there.
            if (c + 4 > real) x[n] = make_float4(x[n].x, c + 1 < real ? x[n].y : -INF, c + 2 < real ? x[n].z : -INF, -INF);
            peak = fmaxf(peak, fmaxf(fmaxf(x[n].x, x[n].y), fmaxf(x[n].z, x[n].w)));
        }
        if (threadIdx.x == 0 && target < real) aim = piece[target];
        // The barrier alone lets a read that is under way, on a multiprocessor that others keep busy, find what the next copy brings.
        finish_reads();
        __syncthreads();
        if (at + 1 < end) fetch(at + 1);
        act* dlogits = p.dlogits ? p.dlogits + (u64)at * p.pitch + first : 0;
        if (!is_row) {
            if (dlogits)
                for (u32 c = threadIdx.x * 4; c < count; c += THREADS * 4) *(uint2*)(dlogits + c) = make_uint2(0, 0);
            continue;
        }
        peak = warp_peak(peak);
        // A warp without columns has nothing to add: -infinity less itself is no number.
        float level = peak == -INF ? 0.0f : peak;
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            x[n] = make_float4(EXP(x[n].x - level), EXP(x[n].y - level), EXP(x[n].z - level), EXP(x[n].w - level));
            sum += (x[n].x + x[n].y) + (x[n].z + x[n].w);
        }
        sum = warp_sum(sum);
        // In turn to two places: who is told again has long met the others after it read what it was told before.
        float2* told = found[turn];
        turn ^= 1;
        float2* mine = told + block * WARPS + threadIdx.x / 32;
        if constexpr (BLOCKS == 1) {
            if (lane == 0) *mine = make_float2(peak, sum);
        } else {
            if (lane < BLOCKS) tell(mine, lane, make_float2(peak, sum));
        }
        meet<BLOCKS>();
        float2 parts[EACH];
        peak = -INF, sum = 0;
#pragma unroll
        for (int n = 0; n < EACH; n++) {
            parts[n] = n * 32 + lane < BLOCKS * WARPS ? told[n * 32 + lane] : make_float2(-INF, 0.0f);
            peak = fmaxf(peak, parts[n].x);
        }
        peak = warp_peak(peak);
#pragma unroll
        for (int n = 0; n < EACH; n++) sum += parts[n].y * EXP(parts[n].x - peak);
        sum = warp_sum(sum);
        if (threadIdx.x == 0 && target < real) p.losses[row] = logf(sum) + (peak - aim);
        if (!dlogits) continue;
        float share = weight * EXP(level - peak) / sum;
#pragma unroll
        for (int n = 0; n < HELD; n++) {
            u32 c = (n * THREADS + threadIdx.x) * 4;
            if (c >= count) continue;
            float g[4] = {x[n].x, x[n].y, x[n].z, x[n].w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // A row of weight zero has gradient zero, whatever its logits.
                g[i] = weight == 0 ? 0.0f : g[i] * share;
                if (c + i == target) g[i] -= weight;
            }
            *(uint2*)(dlogits + c) = make_uint2(pack(g[0], g[1]), pack(g[2], g[3]));
        }
    }
}

KERNEL __launch_bounds__(THREADS, 2) head_loss_1(PARAMS HeadLoss p) { loss_of_rows<1, 8>(p); }
KERNEL __cluster_dims__(2, 1, 1) __launch_bounds__(THREADS, 2) head_loss_2(PARAMS HeadLoss p) { loss_of_rows<2, 8>(p); }
KERNEL __cluster_dims__(4, 1, 1) __launch_bounds__(THREADS, 2) head_loss_4(PARAMS HeadLoss p) { loss_of_rows<4, 8>(p); }
KERNEL __cluster_dims__(8, 1, 1) __launch_bounds__(THREADS, 2) head_loss_8(PARAMS HeadLoss p) { loss_of_rows<8, 8>(p); }
KERNEL __cluster_dims__(8, 1, 1) __launch_bounds__(THREADS, 2) head_loss_8_wide(PARAMS HeadLoss p) { loss_of_rows<8, 10>(p); }
