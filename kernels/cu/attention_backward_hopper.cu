// attention_backward: attention_backward.cu's on Hopper, for heads 64 and 128 wide. q, k, v, lse of attention, dout and its delta        dq =, dk =, dv =
//
// attention_dq:  a block owns a tile of queries of one head and walks over the keys.
// attention_dkv: a block owns a tile of keys for one query head and walks over the queries.
// What is walked over goes in turn through two places. Every result has one owner and one order of additions; nothing is atomic. Padding rows are untouched, and
// meet nothing.
#include "attention_hopper.cuh"

// A block's barriers: its own tiles are there, and those of either place.
struct Barriers {
    u64 own, full[2];
};
__device__ __forceinline__ void begin_barriers(Barriers& barriers) {
    begin_barrier(&barriers.own, 1);
    for (int i = 0; i < 2; i++) begin_barrier(&barriers.full[i], 1);
    show_barriers();
}
// Two tiles that a barrier knows together.
__device__ __forceinline__ void fetch_two(act* a, const TensorMap& x, act* b, const TensorMap& y, u32 row, u32 head, u64* barrier) {
    expect_tiles(barrier, 2);
    fetch_head(a, x, row, head, barrier);
    fetch_head(b, y, row, head, barrier);
}

// s = A B^T and dp = C D^T, of tiles.
__device__ __forceinline__ void multiply_two(float (&s)[TILE / 8][4], u64 a, u64 b, float (&dp)[TILE / 8][4], u64 c, u64 d) {
    begin_wgmma();
    begin_tiles<TILE, WIDE>(s, a, b);
    begin_tiles<TILE, WIDE>(dp, c, d);
    end_wgmma();
    settle(s);
    settle(dp);
}

KERNEL __launch_bounds__(THREADS, WIDE == 64 ? 4 : 2) attention_dq(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Barriers barriers;
    act *q = first_tile(shared), *dout = q + SWIZZLED_SIZE, *k = dout + SWIZZLED_SIZE, *v = k + 2 * SWIZZLED_SIZE;
    Place place = place_of<1, true>(p, p.queries);
    if (place.valid == 0) return;
    bool leads = threadIdx.x == 0;
    u32 kv_head = place.head / (p.heads / p.kv_heads), begin = first_key(p, place);
    auto fetch = [&](u32 n) {
        u32 at = n % 2, row = place.span.other + begin + n * TILE;
        fetch_two(k + at * SWIZZLED_SIZE, p.k_map, v + at * SWIZZLED_SIZE, p.v_map, row, kv_head, &barriers.full[at]);
    };
    if (leads) {
        begin_barriers(barriers);
        fetch_two(q, p.q_map, dout, p.dout_map, place.row, place.head, &barriers.own);
        fetch(0);
    }
    u32 end = last_key(p, place), count = (end - begin + TILE - 1) / TILE;
    if (leads && count > 1) fetch(1);
    __syncthreads();
    u32 lowest = p.q_positions[place.row];
    Queries queries = queries_of(p, place);
    Levels levels = levels_of(p, place, queries);
    float acc[WIDE / 8][4] = {};
    u64 q_at = tile_at<TILE>(q), dout_at = tile_at<TILE>(dout), k_at = tile_at<TILE>(k), v_at = tile_at<TILE>(v);
    await(&barriers.own, 0);
    for (u32 n = 0; n < count; n++) {
        u32 key = begin + n * TILE, at = n % 2;
        await(&barriers.full[at], n / 2 % 2);
        clear_rows(k + at * SWIZZLED_SIZE, place.span.others - key);
        float s[TILE / 8][4], dp[TILE / 8][4];
        multiply_two(s, q_at, k_at + at * TILE_ON, dp, dout_at, v_at + at * TILE_ON);
        gradients(s, dp, levels, p.scale);
        if (key + TILE > lowest + 1 || p.window != 0) hide(s, queries.seen, key, 0.0f);
        begin_held(acc, s, k_at + at * TILE_ON);
        end_wgmma();
        settle(acc);
        if (n + 2 < count) {
            // A warp's wait is for its own rows: all have read what is there.
            meet();
            if (leads) fetch(n + 2);
        }
    }
    float one[2] = {1, 1};
    meet();
    store_rows(p.dq, q, acc, one, place, p.dq_pitch);
}

KERNEL __launch_bounds__(THREADS, WIDE == 64 ? 3 : 2) attention_dkv(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    __shared__ Barriers barriers;
    __shared__ __align__(8) Columns columns[2];
    act *k = first_tile(shared), *v = k + SWIZZLED_SIZE, *q = v + SWIZZLED_SIZE, *dout = q + 2 * SWIZZLED_SIZE;
    Place place = place_of<1, false>(p, p.keys);
    if (place.valid == 0) return;
    const Span& span = place.span;
    bool leads = threadIdx.x == 0;
    u32 group = p.heads / p.kv_heads, kv_head = place.head / group, key = position_of(place);
    // The tile of queries from `first` on, and what else there is to know of it.
    auto fetch = [&](u32 first, u32 at) {
        u32 row = span.other + first;
        if (leads) fetch_two(q + at * SWIZZLED_SIZE, p.q_map, dout + at * SWIZZLED_SIZE, p.dout_map, row, place.head, &barriers.full[at]);
        if (threadIdx.x < TILE) fill_column(columns[at], threadIdx.x, first + threadIdx.x < span.others, p, row + threadIdx.x, place.head);
    };
    if (leads) {
        begin_barriers(barriers);
        fetch_two(k, p.k_map, v, p.v_map, place.row, kv_head, &barriers.own);
    }
    u32 first = next_queries(p, span, key, 0);
    if (first < span.others) fetch(first, 0);
    __syncthreads();
    float dk[WIDE / 8][4] = {}, dv[WIDE / 8][4] = {};
    u64 k_at = tile_at<TILE>(k), v_at = tile_at<TILE>(v), q_at = tile_at<TILE>(q), dout_at = tile_at<TILE>(dout);
    await(&barriers.own, 0);
    for (u32 n = 0; first < span.others; n++) {
        u32 after = next_queries(p, span, key, first + TILE), at = n % 2;
        if (after < span.others) fetch(after, at ^ 1);
        await(&barriers.full[at], n / 2 % 2);
        clear_rows(q + at * SWIZZLED_SIZE, span.others - first);
        clear_rows(dout + at * SWIZZLED_SIZE, span.others - first);
        float s[TILE / 8][4], dp[TILE / 8][4];
        multiply_two(s, k_at, q_at + at * TILE_ON, dp, v_at, dout_at + at * TILE_ON);
        gradients_of_keys(s, dp, columns[at], p, place, span.others - first);
        begin_held(dv, s, dout_at + at * TILE_ON);
        begin_held(dk, dp, q_at + at * TILE_ON);
        end_wgmma();
        settle(dv);
        settle(dk);
        first = after;
        // Everybody is done with this place, and has told of the other's queries.
        __syncthreads();
    }
    if (group > 1) {
        store_parts(p, dk, dv, place);
        return;
    }
    float one[2] = {1, 1};
    store_rows(p.dk, k, dk, one, place, p.dk_pitch);
    store_rows(p.dv, v, dv, one, place, p.dv_pitch);
}
