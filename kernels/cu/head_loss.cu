// head_loss: logits (chunk rows x pitch, first `vocabulary` columns) float32, targets, weights (all rows)
//            losses[row] = lse(logits) - logits[target]; where dlogits is given, dlogits = weight (softmax(logits) - onehot(target))
//
// head_gradient: parts (count x len) float32                                  dx (len) = their sum, in order
//
// One block of 512 threads a row: the order of its sums depends on the vocabulary alone. Padding rows: no loss is written, dlogits are
// zero. A row of weight zero has gradient zero, whatever its logits.
#include "head_loss.cuh"

KERNEL __launch_bounds__(THREADS) head_loss(PARAMS HeadLoss p) {
    __shared__ float peaks[THREADS / 32], sums[THREADS / 32];
    u32 row = p.first_row + blockIdx.x;
    const float* logits = p.logits + (u64)blockIdx.x * p.pitch;
    act* dlogits = p.dlogits ? p.dlogits + (u64)blockIdx.x * p.pitch : 0;
    if (p.positions[row] == PADDING) {
        if (dlogits)
            for (u32 c = threadIdx.x; c < p.pitch; c += THREADS) store(dlogits + c, 0.0f);
        return;
    }
    float peak = -INF, sum = 0;
    u32 whole = p.vocabulary / 8 * 8;
    for (u32 c = threadIdx.x * 8; c < whole; c += THREADS * 8) {
        float x[8], top = peak;
        load<8>(logits + c, x);
#pragma unroll
        for (int i = 0; i < 8; i++) top = fmaxf(top, x[i]);
        if (top > peak) sum *= expf(peak - top), peak = top;
#pragma unroll
        for (int i = 0; i < 8; i++) sum += expf(x[i] - peak);
    }
    u32 last = whole + threadIdx.x;
    if (last < p.vocabulary) merge(peak, sum, logits[last], 1.0f);
    merge_block(peak, sum, peaks, sums);
    u32 target = p.targets[row];
    if (threadIdx.x == 0) p.losses[row] = logf(sum) + (peak - logits[target]);
    if (!dlogits) return;
    float weight = p.weights[row], factor = 1.0f / sum;
    for (u32 c = threadIdx.x * 8; c < p.pitch; c += THREADS * 8) {
        float x[8];
        load<8>(logits + c, x);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            float g = weight * (expf(x[i] - peak) * factor - (c + i == target ? 1.0f : 0.0f));
            x[i] = weight == 0 || c + i >= p.vocabulary ? 0.0f : g;
        }
        save<8>(dlogits + c, x);
    }
}

struct HeadGradient {
    const float* parts;
    act* dx;
    u64 len; // a multiple of 128: rows of a chunk times the width
    u32 count;
};

KERNEL head_gradient(PARAMS HeadGradient p) {
    u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= p.len) return;
    float sum[8] = {};
    for (u32 part = 0; part < p.count; part++) {
        float x[8];
        load<8>(p.parts + part * p.len + at, x);
#pragma unroll
        for (int i = 0; i < 8; i++) sum[i] += x[i];
    }
    save<8>(p.dx + at, sum);
}
