// Tiles brought to shared memory, and out of it, by the card's own copies (TMA, from compute capability 9.0 on), and the barriers that know when they are
// there. A tile's rows are 128 bytes, its pieces in the order of wgmma.cuh; what of it lies past the end of an array is zero.
// Must never be read before its barrier says so, nor be overwritten before every reader has said that it is done, a copy that takes it out among them.
#pragma once
#include "common.cuh"

// An array as the copies know it; the host has the driver make it.
struct __align__(128) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_word(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void begin_barrier(u64* barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_word(barrier)), "r"(arrivals) : "memory");
}
// Barriers that were begun are seen by the copies.
__device__ __forceinline__ void show_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Arrives, and lets the barrier wait for so many bytes of copies.
__device__ __forceinline__ void expect_bytes(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_word(barrier)), "r"(bytes) : "memory");
}
// Until the barrier's phase of this parity is over.
__device__ __forceinline__ void await(u64* barrier, u32 parity) {
    asm volatile("{\n\t.reg .pred p;\nagain:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@p bra done;\n\tbra again;\ndone:\n\t}"
                 ::"r"(shared_word(barrier)), "r"(parity) : "memory");
}
// Arrives, after what this thread's group has read by its products.
__device__ __forceinline__ void arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_word(barrier)) : "memory");
}

// A tile whose first element is at (row, column), of which the barrier will know.
__device__ __forceinline__ void fetch_tile(void* to, const TensorMap* from, u32 column, u32 row, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 ::"r"(shared_word(to)), "l"(from), "r"(column), "r"(row), "r"(shared_word(barrier)) : "memory");
}

// A tile goes out to (row, column); what lies past the array's end is dropped.
__device__ __forceinline__ void store_tile(const TensorMap* to, const void* from, u32 column, u32 row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];"
                 ::"l"(to), "r"(column), "r"(row), "r"(shared_word(from)) : "memory");
}
// Until all that this thread stores has been read, and may be overwritten.
__device__ __forceinline__ void stores_read() {
    asm volatile("cp.async.bulk.commit_group;\n\tcp.async.bulk.wait_group.read 0;" ::: "memory");
}
