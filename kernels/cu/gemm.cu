// gemm: x (rows x inner), weight (columns x inner), or (inner x columns) where it is transposed (gemm_transposed)
//       out (rows x columns) = or += (accumulate) x W + bias + added
//
// The fixed-tile product that stands in where cuBLASLt's pinned algorithm cannot be used: a result's order of additions depends on the
// inner length alone. Rows are a multiple of 64; padding rows are computed like others and reach no other row.
#include "tile.cuh"

struct Gemm {
    const act* x;
    const act* weight;
    const act* bias; // columns, or null
    const act* added; // of out's shape, or null; not where wide_out
    void* out;       // activations, or float32 where wide_out
    u32 inner;
    u32 columns;
    u32 x_pitch;   // elements from row to row
    u32 out_pitch;
    u32 accumulate;
    u32 wide_out;
};

#define DEPTH 32

template <bool TRANSPOSED> __device__ __forceinline__ void product(const Gemm& p) {
    constexpr int LDX = DEPTH + PAD, LDW = TRANSPOSED ? 64 + PAD : DEPTH + PAD;
    __shared__ __align__(16) act x[64 * LDX];
    __shared__ __align__(16) act w[(TRANSPOSED ? DEPTH : 64) * LDW];
    u64 row = (u64)blockIdx.x * 64;
    u32 column = blockIdx.y * 64, columns = min(p.columns - column, 64u);
    u32 base = threadIdx.x / 32 * 16;
    float acc[8][4] = {};
    for (u32 k = 0; k < p.inner; k += DEPTH) {
        u32 depth = min(p.inner - k, (u32)DEPTH);
        __syncthreads();
        load_tile<64, DEPTH>(x, LDX, p.x + row * p.x_pitch + k, p.x_pitch, 64, depth);
        if (TRANSPOSED) load_tile<DEPTH, 64>(w, LDW, p.weight + (u64)k * p.columns + column, p.columns, depth, columns);
        else load_tile<64, DEPTH>(w, LDW, p.weight + (u64)column * p.inner + k, p.inner, columns, depth);
        __syncthreads();
        warp_mma<false, TRANSPOSED>(acc, x + base * LDX, LDX, w, LDW, DEPTH);
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 c = column + j * 8 + acc_col(i);
            if (c >= p.columns) continue;
            u64 at = (row + base + acc_row(i)) * p.out_pitch + c;
            float value = acc[j][i] + (p.bias ? to_float(p.bias[c]) : 0.0f);
            if (p.wide_out) {
                float* out = (float*)p.out + at;
                *out = p.accumulate ? *out + value : value;
            } else {
                act* out = (act*)p.out + at;
                if (p.added) value += to_float(p.added[at]);
                store(out, p.accumulate ? to_float(*out) + value : value);
            }
        }
}

KERNEL __launch_bounds__(128) gemm(PARAMS Gemm p) { product<false>(p); }
KERNEL __launch_bounds__(128) gemm_transposed(PARAMS Gemm p) { product<true>(p); }
