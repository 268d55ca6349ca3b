// gate_up: x (rows x inner), weight (gate, then up: 2 width x inner)   out (rows x width) = silu(x Wg^T) * (x Wu^T)
//
// Hopper's. gate and up are rounded before they meet, as where each is written. Padding rows are computed like others. Width is a multiple of 8.
#include "product.cuh"
#include "swiglu.cuh"

struct GateUp {
    Product product;
    act* out;
    u32 width;
    u32 zero[29];
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

    // Half of the panels of a tile are gate's.
    __device__ __forceinline__ u32 column(Place at, u32 panel) const {
        u32 mine = at.panels / 2, c = (at.before / 2 + panel % mine) * 32;
        return panel < mine ? c : p.width + c;
    }

    template <int BLOCKS> __device__ __forceinline__ void finish(const float (&acc)[BLOCKS][4], Place at, u32 part) const {
        constexpr int MINE = BLOCKS / 2;
        u32 c = at.before * 16 + threadIdx.x % 4 * 8;
        act* out = p.out + first_row(at, part) * p.width + c;
#pragma unroll
        for (int j = 0; j < MINE; j += 4)
#pragma unroll
            for (int side = 0; side < 2; side++) {
                u32 words[4];
#pragma unroll
                for (int i = 0; i < 4; i++) words[i] = swiglu_of_two(acc[j + i] + side * 2, acc[MINE + j + i] + side * 2);
                trade(words);
                if (c + j * 8 < p.width) *(uint4*)(out + side * 8 * (u64)p.width + j * 8) = make_uint4(words[0], words[1], words[2], words[3]);
            }
    }
};

KERNEL __launch_bounds__(PRODUCT_THREADS, 1) gate_up(PARAMS GateUp p) { product(p.product, GateAndUp{p}); }
