// attention_backward: q, k, v, lse of attention, dout (as out) and its delta          dq =, dk =, dv =
//
// attention_dq:    a block owns a tile of queries of one head and walks over the keys.
// attention_dkv:   a block owns a tile of keys for one query head and walks over the queries; where a key head has several query heads, it writes
//                  parts (kv rows x heads x HEAD_DIM, float32), which attention_sums.cu adds in the order of the heads.
// Every result has one owner and one order of additions; nothing is atomic. Padding rows are untouched, and read as zero.
#include "attention.cuh"

#if NODUS_BF16
#include "attention_fast.cuh"

// Tiles in flight: one is filled while the other is used, where shared memory has room.
#define STAGES (WIDE <= 64 ? 2 : 1)

KERNEL __launch_bounds__(THREADS, WIDE <= 64 ? 4 : WIDE > 128 ? 1 : 3) attention_dq(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *q = (act*)shared, *dout = q + TILE_SIZE, *k = dout + TILE_SIZE, *v = k + STAGES * TILE_SIZE;
    Place place = place_of<1, true>(p, p.queries);
    if (place.valid == 0) return;
    u32 kv_head = place.head / (p.heads / p.kv_heads), begin = first_key(p, place), end = last_key(p, place);
    auto fetch = [&](u32 key, u32 stage) {
        u32 rows = min((u32)TILE, place.span.others - key);
        begin_head(k + stage * TILE_SIZE, p.k, place.span.other + key, rows, p.k_pitch, kv_head);
        begin_head(v + stage * TILE_SIZE, p.v, place.span.other + key, rows, p.v_pitch, kv_head);
    };
    begin_head(q, p.q, place.row, place.valid, p.q_pitch, place.head);
    begin_head(dout, p.dout, place.row, place.valid, p.heads * HEAD_DIM, place.head);
    fetch(begin, 0);
    u32 lowest = p.q_positions[place.row], stage = 0;
    Queries queries = queries_of(p, place);
    Levels levels = levels_of(p, place, queries);
    float acc[WIDE / 8][4] = {};
    for (u32 key = begin; key < end; key += TILE) {
        ready<0>();
        const act *k_now = k + stage * TILE_SIZE, *v_now = v + stage * TILE_SIZE;
        if (STAGES == 2 && key + TILE < end) fetch(key + TILE, stage ^= 1);
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
        scores(s, q, k_now);
        scores(dp, dout, v_now);
        gradients(s, dp, levels, p.scale);
        if (key + TILE > lowest + 1 || p.window != 0) hide(s, queries.seen, key, 0.0f);
        weigh(acc, s, k_now);
        if (STAGES == 1 && key + TILE < end) {
            __syncthreads();
            fetch(key + TILE, 0);
        }
    }
    float one[2] = {1, 1};
    store_head(p.dq, acc, one, place, p.dq_pitch);
}

KERNEL __launch_bounds__(THREADS, WIDE <= 64 ? 3 : WIDE <= 128 ? 2 : 1) attention_dkv(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *k = (act*)shared, *v = k + TILE_SIZE, *q = v + TILE_SIZE, *dout = q + STAGES * TILE_SIZE;
    __shared__ __align__(8) Columns columns[STAGES];
    Place place = place_of<1, false>(p, p.keys);
    if (place.valid == 0) return;
    const Span& span = place.span;
    u32 group = p.heads / p.kv_heads, kv_head = place.head / group, key = position_of(place);
    float dk[WIDE / 8][4] = {}, dv[WIDE / 8][4] = {};
    auto fetch = [&](u32 first, u32 stage) {
        u32 rows = min((u32)TILE, span.others - first), row = span.other + first;
        begin_head(q + stage * TILE_SIZE, p.q, row, rows, p.q_pitch, place.head);
        begin_head(dout + stage * TILE_SIZE, p.dout, row, rows, p.heads * HEAD_DIM, place.head);
        for (u32 r = threadIdx.x; r < TILE; r += THREADS) fill_column(columns[stage], r, r < rows, p, row + r, place.head);
    };
    begin_head(k, p.k, place.row, place.valid, p.k_pitch, kv_head);
    begin_head(v, p.v, place.row, place.valid, p.v_pitch, kv_head);
    u32 first = next_queries(p, span, key, 0), stage = 0;
    if (first < span.others) fetch(first, 0);
    while (first < span.others) {
        u32 after = next_queries(p, span, key, first + TILE), now = stage;
        ready<0>();
        if (STAGES == 2 && after < span.others) fetch(after, stage ^= 1);
        const act *q_now = q + now * TILE_SIZE, *dout_now = dout + now * TILE_SIZE;
        // Transposed: rows are keys, columns are queries.
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
        scores(s, k, q_now);
        scores(dp, v, dout_now);
        gradients_of_keys(s, dp, columns[now], p, place, span.others - first);
        weigh(dv, s, dout_now);
        weigh(dk, dp, q_now);
        if (STAGES == 1 && after < span.others) {
            __syncthreads();
            fetch(after, 0);
        }
        first = after;
    }
    if (group > 1) {
        store_parts(p, dk, dv, place);
        return;
    }
    float one[2] = {1, 1};
    store_head(p.dk, dk, one, place, p.dk_pitch);
    store_head(p.dv, dv, one, place, p.dv_pitch);
}
#else
KERNEL __launch_bounds__(THREADS) attention_dq(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *q = (act*)shared, *dout = q + TILE * LD, *k = dout + TILE * LD, *v = k + TILE * LD, *ds = v + TILE * LD;
    Place place = place_of<1, true>(p, p.queries);
    u32 row = place.row, head = place.head, kv_head = head / (p.heads / p.kv_heads), valid = place.valid;
    if (valid == 0) return;
    u32 begin = first_key(p, place), end = last_key(p, place);

    u32 base = threadIdx.x / 32 * 16, position[2];
    bool real[2];
    float lse[2], delta[2], acc[WIDE / 8][4] = {};
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 r = base + acc_row(2 * i);
        real[i] = r < valid;
        position[i] = real[i] ? p.q_positions[row + r] : 0;
        lse[i] = real[i] ? p.lse[(u64)(row + r) * p.heads + head] : 0;
        delta[i] = real[i] ? p.delta[(u64)(row + r) * p.heads + head] : 0;
    }
    load_head(q, p.q, row, valid, p.q_pitch, head);
    load_head(dout, p.dout, row, valid, p.heads * HEAD_DIM, head);

    for (u32 key = begin; key < end; key += TILE) {
        u32 rows = min((u32)TILE, place.span.others - key);
        __syncthreads();
        load_head(k, p.k, place.span.other + key, rows, p.k_pitch, kv_head);
        load_head(v, p.v, place.span.other + key, rows, p.v_pitch, kv_head);
        __syncthreads();
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
        warp_mma<false, false>(s, q + base * LD, LD, k, LD, WIDE);
        warp_mma<false, false>(dp, dout + base * LD, LD, v, LD, WIDE);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool seen = real[i / 2] && sees(p, position[i / 2], key + j * 8 + acc_col(i));
                float prob = seen ? expf(s[j][i] * p.scale - lse[i / 2]) : 0.0f;
                float g = seen ? prob * (dp[j][i] - delta[i / 2]) * p.scale : 0.0f;
                store(ds + (base + acc_row(i)) * LDP + j * 8 + acc_col(i), g);
            }
        __syncwarp();
        warp_mma<false, true>(acc, ds + base * LDP, LDP, k, LD, TILE);
        __syncwarp();
    }
#pragma unroll
    for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 column = j * 8 + acc_col(i);
            u64 at = (u64)(row + base + acc_row(i)) * p.dq_pitch + head * HEAD_DIM;
            if (real[i / 2] && column < HEAD_DIM) store(p.dq + at + column, acc[j][i]);
        }
}

KERNEL __launch_bounds__(THREADS) attention_dkv(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *k = (act*)shared, *v = k + TILE * LD, *q = v + TILE * LD, *dout = q + TILE * LD, *probs = dout + TILE * LD;
    __shared__ float lse[TILE], delta[TILE];
    __shared__ u32 position[TILE];
    Place place = place_of<1, false>(p, p.keys);
    u32 row = place.row, head = place.head, group = p.heads / p.kv_heads, kv_head = head / group, valid = place.valid;
    if (valid == 0) return;
    const Span& span = place.span;
    u32 key = position_of(place);
    u32 base = threadIdx.x / 32 * 16;
    float dk[WIDE / 8][4] = {}, dv[WIDE / 8][4] = {};
    load_head(k, p.k, row, valid, p.k_pitch, kv_head);
    load_head(v, p.v, row, valid, p.v_pitch, kv_head);

    for (u32 first = 0; first < span.others; first += TILE) {
        u32 rows = min((u32)TILE, span.others - first);
        u32 q_row = span.other + first;
        if (p.q_positions[q_row + rows - 1] < key) continue;
        if (p.window != 0 && p.q_positions[q_row] >= key + TILE - 1 + p.window) continue;
        __syncthreads();
        load_head(q, p.q, q_row, rows, p.q_pitch, head);
        load_head(dout, p.dout, q_row, rows, p.heads * HEAD_DIM, head);
        for (u32 r = threadIdx.x; r < TILE; r += THREADS) {
            bool real = r < rows;
            position[r] = real ? p.q_positions[q_row + r] : PADDING;
            lse[r] = real ? p.lse[(u64)(q_row + r) * p.heads + head] : 0;
            delta[r] = real ? p.delta[(u64)(q_row + r) * p.heads + head] : 0;
        }
        __syncthreads();
        // Transposed: rows are keys, columns are queries.
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
        warp_mma<false, false>(s, k + base * LD, LD, q, LD, WIDE);
        warp_mma<false, false>(dp, v + base * LD, LD, dout, LD, WIDE);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 column = j * 8 + acc_col(i), at = base + acc_row(i);
                bool seen = at < valid && position[column] != PADDING && sees(p, position[column], key + at);
                float prob = seen ? expf(s[j][i] * p.scale - lse[column]) : 0.0f;
                dp[j][i] = seen ? prob * (dp[j][i] - delta[column]) * p.scale : 0.0f;
                store(probs + at * LDP + column, prob);
            }
        __syncwarp();
        warp_mma<false, true>(dv, probs + base * LDP, LDP, dout, LD, TILE);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) store(probs + (base + acc_row(i)) * LDP + j * 8 + acc_col(i), dp[j][i]);
        __syncwarp();
        warp_mma<false, true>(dk, probs + base * LDP, LDP, q, LD, TILE);
    }
#pragma unroll
    for (int j = 0; j < WIDE / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 column = j * 8 + acc_col(i), at = base + acc_row(i);
            if (at >= valid || column >= HEAD_DIM) continue;
            u64 to = ((u64)(row + at) * p.heads + head) * HEAD_DIM + column;
            if (group == 1) {
                store(p.dk + (u64)(row + at) * p.dk_pitch + head * HEAD_DIM + column, dk[j][i]);
                store(p.dv + (u64)(row + at) * p.dv_pitch + head * HEAD_DIM + column, dv[j][i]);
            } else {
                p.dk_parts[to] = dk[j][i];
                p.dv_parts[to] = dv[j][i];
            }
        }
}
#endif
