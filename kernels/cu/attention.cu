// attention: q (q rows x heads x HEAD_DIM), k, v (kv rows x kv_heads x HEAD_DIM), grouped queries, causal by position, within a segment
//            out (q rows x heads x HEAD_DIM) =, lse (q rows x heads) float32 =
//
// A block owns a tile of queries of HEADS heads and walks over the tiles of keys in order with a running softmax (Dao, FlashAttention-2).
// Which keys share a tile depends on the sequence alone. Padding rows are untouched, and read as zero.
#include "attention.cuh"

#if NODUS_BF16
#include "attention_fast.cuh"

// Key and value tiles go in turn through two places, so that one is filled while the other is used. Probabilities stay in registers. So do queries,
// which come by way of the second place; Hopper's products have them in places of their own.
#define BLOCKS (HEADS == 2 ? 2 : WIDE <= 64 ? 4 : WIDE > 128 ? 1 : 3 - NODUS_WGMMA)
KERNEL __launch_bounds__(HEADS * THREADS, BLOCKS) attention(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *k = first_tile(shared), *v = k + TILE_SIZE; // and again two tiles on
    act* q = k + (NODUS_WGMMA ? 4 + threadIdx.x / THREADS : 2) * TILE_SIZE;
    Place place = place_of<HEADS>(p);
    u32 row = place.row, head = place.head, kv_head = head / (p.heads / p.kv_heads), valid = valid_rows(p.q_tiles, row);
    if (valid == 0) return;
    Segment keys = p.kv_segments[p.q_tiles[row / TILE_ROWS].segment];
    u32 begin, end;
    key_range(p, row, valid, keys.rows, begin, end);
    u32 base = first_row(), lowest = p.q_positions[row];
    auto fetch = [&](u32 key, u32 stage) {
        u32 rows = min((u32)TILE, keys.rows - key);
        begin_head<HEADS * THREADS>(threadIdx.x, k + stage * 2 * TILE_SIZE, p.k, keys.start + key, rows, p.k_pitch, kv_head);
        begin_head<HEADS * THREADS>(threadIdx.x, v + stage * 2 * TILE_SIZE, p.v, keys.start + key, rows, p.v_pitch, kv_head);
    };
    begin_head<THREADS>(threadIdx.x % THREADS, q, p.q, row, valid, p.q_pitch, head);
    fetch(begin, 0);
    Seen seen[2];
    bool real[2];
    float top[2] = {-INF, -INF}, sum[2] = {0, 0}, acc[WIDE / 8][4] = {}, scale = p.scale * LOG2E;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 r = base + acc_row(2 * i);
        real[i] = r < valid;
        seen[i] = seen_keys(p, real[i] ? p.q_positions[row + r] : 0, real[i]);
    }
    Queries queries = hold_queries(q);
    u32 stage = 0;
    for (u32 key = begin; key < end; key += TILE, stage ^= 1) {
        ready<0>();
        // Everybody is done with the other place.
        if (key + TILE < end) fetch(key + TILE, stage ^ 1);
        float s[TILE / 8][4] = {};
        scores(s, queries, k + stage * 2 * TILE_SIZE);
        // Where every row of the tile sees every key, nothing is hidden.
        if (key + TILE > lowest + 1 || p.window != 0) hide(s, seen, key, -INF);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float peak = top[i];
#pragma unroll
            for (int j = 0; j < TILE / 8; j++) peak = fmaxf(peak, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
            peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
            // Where nothing has been seen yet the peak is -infinity, and so is every score: their powers are zero beside any number.
            float level = peak == -INF ? 0.0f : peak * scale, shrink = exp2_fast(fmaf(top[i], scale, -level));
            top[i] = peak;
            sum[i] *= shrink;
#pragma unroll
            for (int j = 0; j < WIDE / 8; j++) acc[j][2 * i] *= shrink, acc[j][2 * i + 1] *= shrink;
#pragma unroll
            for (int j = 0; j < TILE / 8; j++)
#pragma unroll
                for (int c = 2 * i; c < 2 * i + 2; c++) {
                    s[j][c] = exp2_fast(fmaf(s[j][c], scale, -level));
                    sum[i] += s[j][c];
                }
        }
        weigh(acc, s, v + stage * 2 * TILE_SIZE);
    }
    float share[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        share[i] = 1.0f / sum[i];
        u64 at = (u64)(row + base + acc_row(2 * i)) * p.heads + head;
        if (real[i] && threadIdx.x % 4 == 0) ((float*)p.lse)[at] = top[i] * p.scale + logf(sum[i]);
    }
    store_head<WIDE / 8>((act*)p.out, acc, share, real, row + base, p.heads * HEAD_DIM, head);
}
#else
KERNEL __launch_bounds__(THREADS) attention(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *q = (act*)shared, *k = q + TILE * LD, *v = k + TILE * LD, *probs = v + TILE * LD;
    Place place = place_of<HEADS>(p);
    u32 row = place.row, head = place.head, kv_head = head / (p.heads / p.kv_heads), valid = valid_rows(p.q_tiles, row);
    if (valid == 0) return;
    Segment keys = p.kv_segments[p.q_tiles[row / TILE_ROWS].segment];
    u32 begin, end;
    key_range(p, row, valid, keys.rows, begin, end);

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
        u32 rows = min((u32)TILE, keys.rows - key);
        __syncthreads();
        load_head(k, p.k, keys.start + key, rows, p.k_pitch, kv_head);
        load_head(v, p.v, keys.start + key, rows, p.v_pitch, kv_head);
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
