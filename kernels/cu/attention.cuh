// What attention forward and backward share: tile sizes, arguments, which keys a row sees.
// Must never write to device memory.
#pragma once
#include "tile.cuh"

// HEAD_DIM, TILE (rows of a tile of queries or keys; a divisor of 128 and a multiple of 16) and HEADS (heads that a block of the forward kernel has, all
// of one key head) are set when this is compiled.
#define WIDE ((HEAD_DIM + 15) / 16 * 16)
#define LD (WIDE + PAD)
#define LDP (TILE + PAD)
#define THREADS (TILE * 2) // of a head

struct Attention {
    const act* q;
    const act* k;
    const act* v;
    const act* out;   // forward: written
    const float* lse; // forward: written
    const act* dout;
    const float* delta; // backward: row sums of dout * out; written by attention_delta
    act* dq;
    act* dk;
    act* dv;
    float* dk_parts; // kv rows x heads x HEAD_DIM, where a key head has several query heads
    float* dv_parts;
    const u32* q_positions;
    const Tile* q_tiles;
    const Segment* q_segments;
    const Tile* kv_tiles;
    const Segment* kv_segments;
    u32 heads;
    u32 kv_heads;
    u32 window; // 0: none
    float scale;
    // Elements from row to row: rows of q, k and v, and of their gradients, may stand beside one another.
    u32 q_pitch;
    u32 k_pitch;
    u32 v_pitch;
    u32 dq_pitch;
    u32 dk_pitch;
    u32 dv_pitch;
};

// Whether a query at `position` sees `key`. A padding query is at PADDING and its key numbers never reach that far: it is told apart by `valid`.
__device__ __forceinline__ bool sees(const Attention& p, u32 position, u32 key) {
    return key <= position && (p.window == 0 || position - key < p.window);
}

// Rows of a tile of TILE rows from `row` on that are not padding.
__device__ __forceinline__ u32 valid_rows(const Tile* tiles, u32 row) {
    u32 valid = tiles[row / TILE_ROWS].valid, before = row % TILE_ROWS;
    return valid <= before ? 0 : min(valid - before, (u32)TILE);
}

__device__ __forceinline__ void load_head(act* tile, const act* x, u64 row, u32 rows, u32 pitch, u32 head) {
    load_tile<TILE, WIDE>(tile, LD, x + row * pitch + head * HEAD_DIM, pitch, rows, HEAD_DIM);
}

// The keys that the queries of a tile see between them: [begin, end), begin rounded down to a tile.
__device__ __forceinline__ void key_range(const Attention& p, u32 row, u32 valid, u32 keys, u32& begin, u32& end) {
    u32 first = p.q_positions[row], last = p.q_positions[row + valid - 1];
    end = min(last + 1, keys);
    begin = p.window != 0 && first + 1 > p.window ? (first + 1 - p.window) / TILE * TILE : 0;
}

// The tile of a block of so many heads, and the head of a thread. Heads of one tile are neighbours, and the last tiles, which see most keys, begin first.
struct Place {
    u32 row, head;
};
template <u32 EACH> __device__ __forceinline__ Place place_of(const Attention& p) {
    u32 blocks = p.heads / EACH, tile = gridDim.x / blocks - 1 - blockIdx.x / blocks;
    return {tile * TILE, blockIdx.x % blocks * EACH + threadIdx.x / THREADS};
}
