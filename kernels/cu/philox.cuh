// Counter-based random numbers (Philox4x32-10, Salmon et al. 2011) and dropout by them; the twin of src/random.rs.
// Must never keep a state.
#pragma once
#include "common.cuh"

__device__ __forceinline__ uint4 philox(u64 key, uint4 c) {
    u32 k0 = (u32)key, k1 = (u32)(key >> 32);
#pragma unroll
    for (int round = 0; round < 10; round++) {
        u32 h0 = __umulhi(0xD2511F53u, c.x), l0 = 0xD2511F53u * c.x;
        u32 h1 = __umulhi(0xCD9E8D57u, c.z), l1 = 0xCD9E8D57u * c.z;
        c = make_uint4(h1 ^ c.y ^ k0, l1, h0 ^ c.w ^ k1, l0);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return c;
}

__device__ __forceinline__ float uniform(u32 word) { return (float)(word >> 8) * (1.0f / 16777216.0f); }

// x[i] = kept ? x[i] / (1 - probability) : 0, for features feature .. feature + V of a row; feature is a multiple of V.
template <int V>
__device__ __forceinline__ void dropout(float (&x)[V], u64 key, u32 sequence, u32 position, u32 feature, float probability) {
    if constexpr (V == 8) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            uint4 words = philox(key, make_uint4(feature / 4 + half, position, sequence, 0));
            u32 word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
            for (int i = 0; i < 4; i++) {
                float& value = x[half * 4 + i];
                value = uniform(word[i]) >= probability ? __fdiv_rn(value, 1.0f - probability) : 0.0f;
            }
        }
    } else {
        uint4 words = philox(key, make_uint4(feature / 4, position, sequence, 0));
        u32 i = feature % 4;
        u32 word = i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
        x[0] = uniform(word) >= probability ? __fdiv_rn(x[0], 1.0f - probability) : 0.0f;
    }
}
