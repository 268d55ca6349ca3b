// attention: attention.cu's on Hopper, for heads 64 and 128 wide.
//            q (q rows x heads x HEAD_DIM), k, v (kv rows x kv_heads x HEAD_DIM)        out (q rows x heads x HEAD_DIM) =, lse (q rows x heads) float32 =
//
// A block owns a tile of queries of HEADS heads, four warps a head, and walks over the tiles of keys in order with a running softmax (Dao, FlashAttention-2).
// Keys and values go in turn through two places, which the block's first thread has filled again once all warps are done with one. Padding rows are untouched,
// and meet nothing.
#include "attention_hopper.cuh"

#define BLOCKS (HEADS == 1 && WIDE == 64 ? 4 : 2)

KERNEL __launch_bounds__(HEADS * THREADS, BLOCKS) attention(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    __shared__ u64 full_q, full_k[2], full_v[2], empty[2];
    act *k = first_tile(shared), *v = k + 2 * SWIZZLED_SIZE, *q = v + 2 * SWIZZLED_SIZE;
    Place place = place_of<HEADS, true>(p, p.queries);
    if (place.valid == 0) return;
    bool leads = threadIdx.x == 0;
    u32 kv_head = place.head / (p.heads / p.kv_heads), begin = first_key(p, place);
    auto fetch = [&](u32 n) {
        u32 at = n % 2, row = place.span.other + begin + n * TILE;
        expect_tiles(&full_k[at], 1);
        fetch_head(k + at * SWIZZLED_SIZE, p.k_map, row, kv_head, &full_k[at]);
        expect_tiles(&full_v[at], 1);
        fetch_head(v + at * SWIZZLED_SIZE, p.v_map, row, kv_head, &full_v[at]);
    };
    if (leads) {
        begin_barrier(&full_q, 1);
        for (int i = 0; i < 2; i++) begin_barrier(&full_k[i], 1), begin_barrier(&full_v[i], 1), begin_barrier(&empty[i], HEADS * THREADS / 32);
        show_barriers();
        expect_tiles(&full_q, HEADS);
        for (u32 head = 0; head < HEADS; head++) fetch_head(q + head * SWIZZLED_SIZE, p.q_map, place.row, place.head + head, &full_q);
        fetch(0);
    }
    u32 end = last_key(p, place), count = (end - begin + TILE - 1) / TILE;
    if (leads && count > 1) fetch(1);
    __syncthreads();
    u32 lowest = p.q_positions[place.row], team = HEADS == 1 ? 0 : __shfl_sync(0xffffffffu, threadIdx.x / THREADS, 0);
    Queries queries = queries_of(p, place);
    Softmax softmax;
    float acc[WIDE / 8][4] = {};
    u64 q_at = tile_at<TILE>(q) + team * TILE_ON, k_at = tile_at<TILE>(k), v_at = tile_at<TILE>(v);
    await(&full_q, 0);
    for (u32 n = 0; n < count; n++) {
        u32 key = begin + n * TILE, at = n % 2, parity = n / 2 % 2;
        float s[TILE / 8][4];
        await(&full_k[at], parity);
        begin_wgmma();
        begin_tiles<TILE, WIDE>(s, q_at, k_at + at * TILE_ON);
        leave_wgmma();
        // Everybody is done with the other place.
        if (leads && n > 0 && n + 1 < count) {
            await(&empty[(n - 1) % 2], (n - 1) / 2 % 2);
            fetch(n + 1);
        }
        await_wgmma();
        settle(s);
        // Where every row of the tile sees every key, nothing is hidden.
        if (key + TILE > lowest + 1 || p.window != 0) hide(s, queries.seen, key, -INF);
        soften(s, acc, softmax, p.scale * LOG2E);
        await(&full_v[at], parity);
        clear_rows(v + at * SWIZZLED_SIZE, place.span.others - key);
        begin_held(acc, s, v_at + at * TILE_ON);
        end_wgmma();
        settle(acc);
        // A warp's wait is for its own rows.
        if (threadIdx.x % 32 == 0) arrive(&empty[at]);
    }
    float share[2];
    finish(share, softmax, p, place, queries);
    meet();
    store_rows((act*)p.out, q + team * SWIZZLED_SIZE, acc, share, place, p.heads * HEAD_DIM);
}
