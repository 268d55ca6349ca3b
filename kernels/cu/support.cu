// Support of the exactness gate, benchmarks and random weights: no operation of a model.
//
// fill_uniform:  out (len) activations = numbers in [centre - range, centre + range) by Philox over the element's index, rounded to `stored`
//                (0 float32, 1 float16, 2 bfloat16) on the way; fill_uniform_state for float32
// fill_cancelling: out (len) activations, in rows of `period`: fill_uniform's numbers in the first `half`, the same or their negatives (where `word`
//                is set) in the next, and zeros in what is left
// fill_word:     out (len 32-bit words) = a word
// count_unequal: count[0] += how many of `len` 32-bit words of a and b differ (an integer: its order does not matter)
// busy:          keeps one multiprocessor's lanes at work for about `rounds` dependent operations
#include "philox.cuh"

struct Fill {
    void* out;
    u64 len;
    u64 key;
    float range;
    float centre;
    u32 word;
    u32 stored;
    u64 period;
    u64 half;
};

__device__ __forceinline__ float as_stored(float x, u32 stored) {
    if (stored == 1) {
        u16 bits;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
        asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    } else if (stored == 2) {
        bf16 narrow;
        store(&narrow, x);
        x = to_float(narrow);
    }
    return x;
}

template <class T> __device__ void fill(const Fill& p) {
    T* out = (T*)p.out;
    for (u64 quad = (u64)blockIdx.x * blockDim.x + threadIdx.x; quad * 4 < p.len; quad += (u64)gridDim.x * blockDim.x) {
        uint4 words = philox(p.key, make_uint4((u32)quad, (u32)(quad >> 32), 0, 1));
        u32 word[4] = {words.x, words.y, words.z, words.w};
        for (u32 i = 0; i < 4 && quad * 4 + i < p.len; i++)
            store(out + quad * 4 + i, as_stored(fmaf(2.0f * uniform(word[i]) - 1.0f, p.range, p.centre), p.stored));
    }
}

KERNEL fill_uniform(PARAMS Fill p) { fill<act>(p); }
KERNEL fill_uniform_state(PARAMS Fill p) { fill<float>(p); }

KERNEL fill_cancelling(PARAMS Fill p) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.len; i += (u64)gridDim.x * blockDim.x) {
        u64 place = i % p.period, at = place < p.half ? i : i - p.half, quad = at / 4;
        uint4 words = philox(p.key, make_uint4((u32)quad, (u32)(quad >> 32), 0, 1));
        u32 word[4] = {words.x, words.y, words.z, words.w};
        float x = (2.0f * uniform(word[at % 4]) - 1.0f) * p.range;
        if (place >= p.half && p.word) x = -x;
        store((act*)p.out + i, place < 2 * p.half ? x : 0.0f);
    }
}

KERNEL fill_word(PARAMS Fill p) {
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.len; i += (u64)gridDim.x * blockDim.x) ((u32*)p.out)[i] = p.word;
}

struct Compare {
    const u32* a;
    const u32* b;
    u32* count;
    u64 len;
};

KERNEL count_unequal(PARAMS Compare p) {
    u32 unequal = 0;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i < p.len; i += (u64)gridDim.x * blockDim.x) unequal += p.a[i] != p.b[i];
    if (unequal) atomicAdd(p.count, unequal);
}

struct Busy {
    float* out; // one element; never written in practice, but the compiler cannot know
    u32 rounds;
};

KERNEL busy(PARAMS Busy p) {
    float x = threadIdx.x;
    for (u32 i = 0; i < p.rounds; i++) x = fmaf(x, 0.999f, 0.5f);
    if (x == -1.0f) *p.out = x;
}
