// swiglu:          gate, up (rows x width)                                    out = silu(gate) * up
// swiglu_backward: dy, gate, up                                              dgate =, dup =
//
// Rows of gate and up, and of dgate and dup, may stand beside one another. Padding rows are untouched. Blocks of a row: blockIdx.x the row,
// blockIdx.y a part of its columns.
#include "swiglu.cuh"

struct Swiglu {
    const act* dy;
    const act* gate;
    const act* up;
    act* out;
    act* dgate;
    act* dup;
    const u32* positions;
    u32 width;
    u32 pitch; // elements from row to row of gate and up
    u32 grad_pitch; // of dgate and dup
};

template <int V> __device__ void forward(const Swiglu& p, u64 row) {
    for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < p.width; c += gridDim.y * blockDim.x * V) {
        u64 at = row * p.pitch + c;
        float gate[V], up[V];
        load<V>(p.gate + at, gate);
        load<V>(p.up + at, up);
#pragma unroll
        for (int i = 0; i < V; i++) up[i] = swiglu_of(gate[i], up[i]);
        save<V>(p.out + row * p.width + c, up);
    }
}

template <int V> __device__ void backward(const Swiglu& p, u64 row) {
    for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < p.width; c += gridDim.y * blockDim.x * V) {
        u64 at = row * p.pitch + c, to = row * p.grad_pitch + c;
        float dy[V], gate[V], up[V];
        load<V>(p.dy + row * p.width + c, dy);
        load<V>(p.gate + at, gate);
        load<V>(p.up + at, up);
#pragma unroll
        for (int i = 0; i < V; i++) swiglu_gradients(dy[i], gate[i], up[i]);
        save<V>(p.dgate + to, gate);
        save<V>(p.dup + to, up);
    }
}

KERNEL swiglu(PARAMS Swiglu p) {
    if (p.positions[blockIdx.x] == PADDING) return;
    if (p.width % 8 == 0) forward<8>(p, blockIdx.x);
    else forward<1>(p, blockIdx.x);
}

KERNEL swiglu_backward(PARAMS Swiglu p) {
    if (p.positions[blockIdx.x] == PADDING) return;
    if (p.width % 8 == 0) backward<8>(p, blockIdx.x);
    else backward<1>(p, blockIdx.x);
}
