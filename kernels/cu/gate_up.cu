// gate_up: x (rows x inner), weight (gate, then up: 2 width x inner)   out (rows x width) = silu(x Wg^T) * (x Wu^T)
//
// Hopper's. gate and up are rounded before they meet, as where each is written. Padding rows are computed like others. Width is a multiple of 8.
#include "product.cuh"
#include "swiglu.cuh"

struct GateUp {
    Product product;
    TensorMap out; // tiles of 64 rows
    u32 width;
    u32 zero[31];
};

#ifdef NODUS_BROKEN_GATE_UP
// In a build that tests make: they meet before they are rounded.
__device__ __forceinline__ u32 swiglu_of_two(const float* gate, const float* up) { return pack(swiglu_of(gate[0], up[0]), swiglu_of(gate[1], up[1])); }
#else
// silu(gate) * up of two neighbours, which are rounded first.
__device__ __forceinline__ u32 swiglu_of_two(const float* gate, const float* up) {
    u32 g = pack(gate[0], gate[1]), u = pack(up[0], up[1]);
    float low = swiglu_of(__uint_as_float(g << 16), __uint_as_float(u << 16));
    return pack(low, swiglu_of(__uint_as_float(g & 0xffff0000u), __uint_as_float(u & 0xffff0000u)));
}
#endif

struct GateAndUp {
    const GateUp& p;

    // The columns of a tile are 64 of gate, then the same of up.
    __device__ __forceinline__ u32 column(Place at, u32 half) const { return at.column / 2 + half * p.width; }

    __device__ __forceinline__ void finish(const Sums& sums, Place at, act (&squares)[2][SQUARE], u32 part) const {
        bool tells = threadIdx.x % 128 == 0;
        if (tells) stores_read();
        meet(part);
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int second = 0; second < 2; second++)
                    *word_at(squares[half], i, second) = swiglu_of_two(sums[half][i] + second * 2, sums[half][8 + i] + second * 2);
        meet(part);
        if (tells)
            for (u32 half = 0; half < 2; half++) store_tile(&p.out, squares[half], at.column / 2, at.row + half * 64);
    }
};

KERNEL __launch_bounds__(PRODUCT_THREADS, 1) gate_up(PARAMS GateUp p) { product(p.product, GateAndUp{p}); }
