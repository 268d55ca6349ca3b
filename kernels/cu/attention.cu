// attention: q (q rows x heads x HEAD_DIM), k, v (kv rows x kv_heads x HEAD_DIM), grouped queries, causal by position, within a segment
//            out (q rows x heads x HEAD_DIM) =, lse (q rows x heads) float32 =
//
// A block owns a tile of queries of a head and walks over the tiles of keys in order with a running softmax (Dao, FlashAttention-2).
// Which keys share a tile depends on the sequence alone. Padding rows are untouched, and read as zero.
#include "attention.cuh"

#if NODUS_BF16
#include "attention_fast.cuh"

// Key and value tiles go in turn through two places, so that one is filled while the other is used. Queries and probabilities stay in registers; queries come by
// way of the second place.
KERNEL __launch_bounds__(THREADS, WIDE <= 64 ? 4 : WIDE > 128 ? 1 : 3) attention(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *k = (act*)shared, *v = k + TILE_SIZE, *q = v + TILE_SIZE; // keys and values again two tiles on
    Place place = place_of<1, true>(p, p.queries);
    if (place.valid == 0) return;
    u32 kv_head = place.head / (p.heads / p.kv_heads), begin = first_key(p, place), end = last_key(p, place), lowest = p.q_positions[place.row];
    auto fetch = [&](u32 key, u32 stage) {
        u32 rows = min((u32)TILE, place.span.others - key);
        begin_head(k + stage * 2 * TILE_SIZE, p.k, place.span.other + key, rows, p.k_pitch, kv_head);
        begin_head(v + stage * 2 * TILE_SIZE, p.v, place.span.other + key, rows, p.v_pitch, kv_head);
    };
    begin_head(q, p.q, place.row, place.valid, p.q_pitch, place.head);
    fetch(begin, 0);
    Queries queries = queries_of(p, place);
    Softmax softmax;
    float acc[WIDE / 8][4] = {};
    u32 held[WIDE / 16][4], stage = 0;
    ready<2>();
    load_fragments<WIDE>(held, q + first_row() * LD, LD);
    for (u32 key = begin; key < end; key += TILE, stage ^= 1) {
        ready<0>();
        // Everybody is done with the other place.
        if (key + TILE < end) fetch(key + TILE, stage ^ 1);
        float s[TILE / 8][4] = {};
        scores(s, held, k + stage * 2 * TILE_SIZE);
        // Where every row of the tile sees every key, nothing is hidden.
        if (key + TILE > lowest + 1 || p.window != 0) hide(s, queries.seen, key, -INF);
        soften(s, acc, softmax, p.scale * LOG2E);
        weigh(acc, s, v + stage * 2 * TILE_SIZE);
    }
    float share[2];
    finish(share, softmax, p, place, queries);
    store_head((act*)p.out, acc, share, place, p.heads * HEAD_DIM);
}
#else
KERNEL __launch_bounds__(THREADS) attention(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *q = (act*)shared, *k = q + TILE * LD, *v = k + TILE * LD, *probs = v + TILE * LD;
    Place place = place_of<1, true>(p, p.queries);
    u32 row = place.row, head = place.head, kv_head = head / (p.heads / p.kv_heads), valid = place.valid;
    if (valid == 0) return;
    u32 begin = first_key(p, place), end = last_key(p, place);

    u32 base = threadIdx.x / 32 * 16; // this warp's 16 rows of the tile
    u32 position[2];
    bool real[2];
    float top[2] = {-INF, -INF}, sum[2] = {0, 0}, acc[WIDE / 8][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 r = base + acc_row(2 * i);
        real[i] = r < valid;
        position[i] = real[i] ? p.q_positions[row + r] : 0;
    }
    load_head(q, p.q, row, valid, p.q_pitch, head);

    for (u32 key = begin; key < end; key += TILE) {
        u32 rows = min((u32)TILE, place.span.others - key);
        __syncthreads();
        load_head(k, p.k, place.span.other + key, rows, p.k_pitch, kv_head);
        load_head(v, p.v, place.span.other + key, rows, p.v_pitch, kv_head);
        __syncthreads();
        float s[TILE / 8][4] = {};
        warp_mma<false, false>(s, q + base * LD, LD, k, LD, WIDE);
        float peak[2] = {-INF, -INF};
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool seen = real[i / 2] && sees(p, position[i / 2], key + j * 8 + acc_col(i));
                s[j][i] = seen ? s[j][i] * p.scale : -INF;
                peak[i / 2] = fmaxf(peak[i / 2], s[j][i]);
            }
        float shrink[2];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            peak[i] = fmaxf(peak[i], __shfl_xor_sync(0xffffffffu, peak[i], 1));
            peak[i] = fmaxf(peak[i], __shfl_xor_sync(0xffffffffu, peak[i], 2));
            peak[i] = fmaxf(peak[i], top[i]);
            shrink[i] = top[i] == peak[i] ? 1.0f : expf(top[i] - peak[i]);
            top[i] = peak[i];
            sum[i] *= shrink[i];
        }
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                // What is not seen is zero even where nothing has been seen yet (its peak is -infinity).
                float e = s[j][i] == -INF ? 0.0f : expf(s[j][i] - top[i / 2]);
                sum[i / 2] += e;
                store(probs + (base + acc_row(i)) * LDP + j * 8 + acc_col(i), e);
            }
#pragma unroll
        for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) acc[j][i] *= shrink[i / 2];
        __syncwarp();
        warp_mma<false, true>(acc, probs + base * LDP, LDP, v, LD, TILE);
        __syncwarp();
    }

#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        u64 at = (u64)(row + base + acc_row(2 * i)) * p.heads + head;
        if (real[i] && threadIdx.x % 4 == 0) ((float*)p.lse)[at] = top[i] + logf(sum[i]);
    }
#pragma unroll
    for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 column = j * 8 + acc_col(i);
            u64 at = (u64)(row + base + acc_row(i)) * p.heads + head;
            if (real[i / 2] && column < HEAD_DIM) store((act*)p.out + at * HEAD_DIM + column, acc[j][i] / sum[i / 2]);
        }
}
#endif
