// add:         x, y (rows x width)                                            y += x
// gather:      x (any rows x width), index (rows)                             out (rows x width) = x[index]
// scatter_add: x (rows x width), index (rows), none twice                     y[index] += x
//
// For activations and for float32 (the names that end in _state). Padding rows of the layout are neither read nor written. Blocks of a
// row: blockIdx.x the row, blockIdx.y a part of its columns.
#include "common.cuh"

struct Rows {
    const void* x;
    void* y;
    const u32* index; // null: the row itself
    const u32* positions;
    u32 width;
    u32 x_pitch; // elements from row to row
    u32 y_pitch;
};

enum Kind { ADD, GATHER, SCATTER };

template <Kind KIND, class T, int V> __device__ void move(const Rows& p, u32 row) {
    u64 other = p.index ? p.index[row] : row;
    const T* x = (const T*)p.x + (KIND == GATHER ? other : row) * p.x_pitch;
    T* y = (T*)p.y + (KIND == GATHER ? row : other) * p.y_pitch;
    for (u32 c = (blockIdx.y * blockDim.x + threadIdx.x) * V; c < p.width; c += gridDim.y * blockDim.x * V) {
        float a[V], b[V];
        load<V>(x + c, a);
        if constexpr (KIND != GATHER) {
            load<V>(y + c, b);
#pragma unroll
            for (int i = 0; i < V; i++) a[i] += b[i];
        }
        save<V>(y + c, a);
    }
}

template <Kind KIND, class T> __device__ void start(const Rows& p) {
    if (p.positions[blockIdx.x] == PADDING) return;
    if (p.width % 8 == 0 && p.x_pitch % 8 == 0 && p.y_pitch % 8 == 0 && ((u64)p.x | (u64)p.y) % 16 == 0) move<KIND, T, 8>(p, blockIdx.x);
    else move<KIND, T, 1>(p, blockIdx.x);
}

KERNEL add(PARAMS Rows p) { start<ADD, act>(p); }
KERNEL gather(PARAMS Rows p) { start<GATHER, act>(p); }
KERNEL scatter_add(PARAMS Rows p) { start<SCATTER, act>(p); }
KERNEL add_state(PARAMS Rows p) { start<ADD, float>(p); }
KERNEL gather_state(PARAMS Rows p) { start<GATHER, float>(p); }
KERNEL scatter_add_state(PARAMS Rows p) { start<SCATTER, float>(p); }
