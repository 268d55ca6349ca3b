// What attention forward and backward share: tile sizes, arguments, which keys a row sees.
// Must never write to device memory.
#pragma once
#include "tile.cuh"
#include "tma.cuh"

// HEAD_DIM, TILE (rows of a tile of queries or keys; a divisor of 128 and a multiple of 16) and HEADS (heads that a block of the forward kernel has, all
// of one key head) are set when this is compiled.
#define WIDE ((HEAD_DIM + 15) / 16 * 16)
#define LD (WIDE + PAD)
#define LDP (TILE + PAD)
#define THREADS (TILE * 2) // of a head

// Up to 128 rows of a sequence's queries or keys, and its rows of the other kind. Those of a layout stand in a list, first those that have most to do; at its
// end there may be some without rows.
struct __align__(16) Span {
    u32 row, valid;    // the first, a multiple of 128, and how many
    u32 before, rows;  // rows of the same kind before it, and in all
    u32 other, others; // of the other kind: the first, and how many
    u32 zero[2];
};

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
    const Span* queries;
    const Span* keys;
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
    u32 zero[24];
    // Where tiles are brought by the card's own copies.
    TensorMap q_map, k_map, v_map, dout_map;
};

// Whether a query at `position` sees `key`. A padding query is at PADDING and its key numbers never reach that far: it is told apart by `valid`.
__device__ __forceinline__ bool sees(const Attention& p, u32 position, u32 key) {
    return key <= position && (p.window == 0 || position - key < p.window);
}

__device__ __forceinline__ void load_head(act* tile, const act* x, u64 row, u32 rows, u32 pitch, u32 head) {
    load_tile<TILE, WIDE>(tile, LD, x + row * pitch + head * HEAD_DIM, pitch, rows, HEAD_DIM);
}

// The tile of a block of so many heads, and the head of a thread. Heads of a tile are neighbours. Of a span's tiles the last sees most keys, and the first is
// seen by most queries: with LAST the last begins.
struct Place {
    Span span;
    u32 row, valid, head; // `valid` rows are not padding
};
template <u32 EACH, bool LAST> __device__ __forceinline__ Place place_of(const Attention& p, const Span* spans) {
    constexpr u32 PARTS = TILE_ROWS / TILE;
    u32 blocks = p.heads / EACH, tile = blockIdx.x / blocks, part = LAST ? PARTS - 1 - tile % PARTS : tile % PARTS, before = part * TILE;
    Span span = spans[tile / PARTS];
    u32 valid = span.valid > before ? min(span.valid - before, (u32)TILE) : 0;
    return {span, span.row + before, valid, blockIdx.x % blocks * EACH + threadIdx.x / THREADS};
}

// The place of a tile's first row in its sequence's rows: of keys its position.
__device__ __forceinline__ u32 position_of(const Place& place) { return place.span.before + (place.row - place.span.row); }

// The keys that the queries of a tile see between them: from the first, rounded down to a tile, to the last.
__device__ __forceinline__ u32 first_key(const Attention& p, const Place& place) {
    if (p.window == 0) return 0;
    u32 position = p.q_positions[place.row];
    return position + 1 > p.window ? (position + 1 - p.window) / TILE * TILE : 0;
}
__device__ __forceinline__ u32 last_key(const Attention& p, const Place& place) {
    return min(p.q_positions[place.row + place.valid - 1] + 1, place.span.others);
}
