// attention_backward: q, k, v, out, lse of attention, dout (as out)          dq =, dk =, dv =
//
// attention_delta: delta (q rows x heads) float32 = row sums of dout * out.
// attention_dq:    a block owns a tile of queries of one head and walks over the keys.
// attention_dkv:   a block owns a tile of keys for one query head and walks over the queries; where a key head has several query heads, the
//                  parts (kv rows x heads x HEAD_DIM, float32) are then added by attention_dkv_sum, in the order of the heads.
// Every result has one owner and one order of additions; nothing is atomic. Padding rows are untouched, and read as zero.
#include "attention.cuh"

KERNEL attention_delta(PARAMS Attention p) {
    // Neighbouring threads have a head between them, eight columns each, where that many threads are a power of two; else a warp has it.
    constexpr bool EIGHT = HEAD_DIM % 8 == 0 && (HEAD_DIM / 8 & (HEAD_DIM / 8 - 1)) == 0;
    constexpr u32 TEAM = EIGHT ? HEAD_DIM / 8 : 32, V = EIGHT ? 8 : 1;
    u32 row = blockIdx.x;
    if (p.q_positions[row] == PADDING) return;
    for (u32 item = threadIdx.x; item < p.heads * TEAM; item += blockDim.x) {
        u64 at = (u64)row * p.heads * HEAD_DIM + item / TEAM * HEAD_DIM;
        float sum = 0;
        for (u32 c = item % TEAM * V; c < HEAD_DIM; c += TEAM * V) {
            float a[V], b[V];
            load<V>(p.dout + at + c, a);
            load<V>(p.out + at + c, b);
#pragma unroll
            for (int i = 0; i < V; i++) sum = fmaf(a[i], b[i], sum);
        }
#pragma unroll
        for (u32 offset = TEAM / 2; offset > 0; offset /= 2) sum += __shfl_xor_sync(__activemask(), sum, offset);
        if (item % TEAM == 0) ((float*)p.delta)[(u64)row * p.heads + item / TEAM] = sum;
    }
}

#if NODUS_BF16
#include "attention_fast.cuh"

// Tiles in flight: one is filled while the other is used, where shared memory has room.
#define STAGES (WIDE <= 64 || NODUS_WGMMA ? 2 : 1)

KERNEL __launch_bounds__(THREADS, WIDE <= 64 ? 4 : WIDE > 128 ? 1 : STAGES == 1 ? 3 : 2) attention_dq(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *q = first_tile(shared), *dout = q + TILE_SIZE, *k = dout + TILE_SIZE, *v = k + STAGES * TILE_SIZE;
    Place place = place_of<1>(p);
    u32 row = place.row, head = place.head, kv_head = head / (p.heads / p.kv_heads), valid = valid_rows(p.q_tiles, row);
    if (valid == 0) return;
    Segment keys = p.kv_segments[p.q_tiles[row / TILE_ROWS].segment];
    u32 begin, end;
    key_range(p, row, valid, keys.rows, begin, end);
    auto fetch = [&](u32 key, u32 stage) {
        u32 rows = min((u32)TILE, keys.rows - key);
        begin_head<THREADS>(threadIdx.x, k + stage * TILE_SIZE, p.k, keys.start + key, rows, p.k_pitch, kv_head);
        begin_head<THREADS>(threadIdx.x, v + stage * TILE_SIZE, p.v, keys.start + key, rows, p.v_pitch, kv_head);
    };
    begin_head<THREADS>(threadIdx.x, q, p.q, row, valid, p.q_pitch, head);
    begin_head<THREADS>(threadIdx.x, dout, p.dout, row, valid, p.heads * HEAD_DIM, head);
    fetch(begin, 0);
    u32 base = first_row(), lowest = p.q_positions[row], stage = 0;
    Seen seen[2];
    bool real[2];
    float lse[2], delta[2], acc[WIDE / 8][4] = {}, scale = p.scale * LOG2E;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 r = base + acc_row(2 * i);
        real[i] = r < valid;
        seen[i] = seen_keys(p, real[i] ? p.q_positions[row + r] : 0, real[i]);
        lse[i] = real[i] ? p.lse[(u64)(row + r) * p.heads + head] * -LOG2E : 0;
        delta[i] = real[i] ? p.delta[(u64)(row + r) * p.heads + head] : 0;
    }
    for (u32 key = begin; key < end; key += TILE) {
        ready<0>();
        const act *k_now = k + stage * TILE_SIZE, *v_now = v + stage * TILE_SIZE;
        if (STAGES == 2 && key + TILE < end) fetch(key + TILE, stage ^= 1);
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
        scores_of_two(s, q, k_now, dp, dout, v_now);
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                s[j][i] = exp2_fast(fmaf(s[j][i], scale, lse[i / 2])) * (dp[j][i] - delta[i / 2]) * p.scale;
        if (key + TILE > lowest + 1 || p.window != 0) hide(s, seen, key, 0.0f);
        weigh(acc, s, k_now);
        if (STAGES == 1 && key + TILE < end) {
            __syncthreads();
            fetch(key + TILE, 0);
        }
    }
    float one[2] = {1, 1};
    store_head<WIDE / 8>(p.dq, acc, one, real, row + base, p.dq_pitch, head);
}

KERNEL __launch_bounds__(THREADS, WIDE <= 64 ? 3 : WIDE <= 128 ? 2 : 1) attention_dkv(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *k = first_tile(shared), *v = k + TILE_SIZE, *q = v + TILE_SIZE, *dout = q + STAGES * TILE_SIZE;
    __shared__ __align__(8) float lse[STAGES][TILE], delta[STAGES][TILE];
    __shared__ __align__(8) u32 position[STAGES][TILE];
    // The first tiles of a sequence are seen by most queries: they begin first.
    u32 row = blockIdx.x / p.heads * TILE, head = blockIdx.x % p.heads, group = p.heads / p.kv_heads, kv_head = head / group;
    u32 valid = valid_rows(p.kv_tiles, row);
    if (valid == 0) return;
    u32 segment = p.kv_tiles[row / TILE_ROWS].segment;
    Segment queries = p.q_segments[segment], keys = p.kv_segments[segment];
    u32 key = row - keys.start; // position of the tile's first key
    u32 base = threadIdx.x / 32 * 16;
    float dk[WIDE / 8][4] = {}, dv[WIDE / 8][4] = {}, scale = p.scale * LOG2E;

    // The tile of queries from `first` on that sees a key, or the end. Where every position has a query, it is a matter of counting.
    auto next = [&](u32 first) {
        if (queries.rows == keys.rows) {
            first = max(first, key);
            return p.window == 0 || first < key + TILE - 1 + p.window ? first : queries.rows;
        }
        for (; first < queries.rows; first += TILE) {
            u32 rows = min((u32)TILE, queries.rows - first), q_row = queries.start + first;
            bool after = p.q_positions[q_row + rows - 1] >= key;
            if (after && (p.window == 0 || p.q_positions[q_row] < key + TILE - 1 + p.window)) break;
        }
        return first;
    };
    auto fetch = [&](u32 first, u32 stage) {
        u32 rows = min((u32)TILE, queries.rows - first), q_row = queries.start + first;
        begin_head<THREADS>(threadIdx.x, q + stage * TILE_SIZE, p.q, q_row, rows, p.q_pitch, head);
        begin_head<THREADS>(threadIdx.x, dout + stage * TILE_SIZE, p.dout, q_row, rows, p.heads * HEAD_DIM, head);
        for (u32 r = threadIdx.x; r < TILE; r += THREADS) {
            bool real = r < rows;
            position[stage][r] = real ? p.q_positions[q_row + r] : PADDING;
            lse[stage][r] = real ? p.lse[(u64)(q_row + r) * p.heads + head] * -LOG2E : 0;
            delta[stage][r] = real ? p.delta[(u64)(q_row + r) * p.heads + head] : 0;
        }
    };
    begin_head<THREADS>(threadIdx.x, k, p.k, row, valid, p.k_pitch, kv_head);
    begin_head<THREADS>(threadIdx.x, v, p.v, row, valid, p.v_pitch, kv_head);
    u32 first = next(0), stage = 0;
    if (first < queries.rows) fetch(first, 0);
    while (first < queries.rows) {
        u32 after = next(first + TILE), now = stage;
        ready<0>();
        if (STAGES == 2 && after < queries.rows) fetch(after, stage ^= 1);
        const act *q_now = q + now * TILE_SIZE, *dout_now = dout + now * TILE_SIZE;
        // Transposed: rows are keys, columns are queries.
        float s[TILE / 8][4] = {}, dp[TILE / 8][4] = {};
        scores_of_two(s, k, q_now, dp, v, dout_now);
        // Where every query of the tile sees every key, nothing is hidden. Positions ascend.
        bool whole = position[now][0] >= key + TILE - 1 && p.window == 0 && queries.rows - first >= TILE;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) {
            u32 column = j * 8 + acc_col(0);
            float2 level = *(float2*)&lse[now][column], less = *(float2*)&delta[now][column];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                s[j][i] = exp2_fast(fmaf(s[j][i], scale, i % 2 ? level.y : level.x));
                dp[j][i] = s[j][i] * (dp[j][i] - (i % 2 ? less.y : less.x)) * p.scale;
            }
            if (whole) continue;
            uint2 at = *(uint2*)&position[now][column];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                u32 query = i % 2 ? at.y : at.x, place = base + acc_row(i);
                bool seen = place < valid && query != PADDING && sees(p, query, key + place);
                s[j][i] = seen ? s[j][i] : 0.0f;
                dp[j][i] = seen ? dp[j][i] : 0.0f;
            }
        }
        weigh(dv, s, dout_now);
        weigh(dk, dp, q_now);
        if (STAGES == 1 && after < queries.rows) {
            __syncthreads();
            fetch(after, 0);
        }
        first = after;
    }
    bool real[2] = {base + acc_row(0) < valid, base + acc_row(2) < valid};
    if (group == 1) {
        float one[2] = {1, 1};
        store_head<WIDE / 8>(p.dk, dk, one, real, row + base, p.dk_pitch, head);
        store_head<WIDE / 8>(p.dv, dv, one, real, row + base, p.dv_pitch, head);
        return;
    }
    // Two neighbours at a time: four lanes fill 32 bytes.
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        if (!real[i / 2]) continue;
        u64 to = ((u64)(row + base + acc_row(i)) * p.heads + head) * HEAD_DIM;
        store_parts<WIDE / 8>(p.dk_parts + to, dk, i);
        store_parts<WIDE / 8>(p.dv_parts + to, dv, i);
    }
}
#else
KERNEL __launch_bounds__(THREADS) attention_dq(PARAMS Attention p) {
    extern __shared__ __align__(16) char shared[];
    act *q = (act*)shared, *dout = q + TILE * LD, *k = dout + TILE * LD, *v = k + TILE * LD, *ds = v + TILE * LD;
    Place place = place_of<1>(p);
    u32 row = place.row, head = place.head, kv_head = head / (p.heads / p.kv_heads), valid = valid_rows(p.q_tiles, row);
    if (valid == 0) return;
    Segment keys = p.kv_segments[p.q_tiles[row / TILE_ROWS].segment];
    u32 begin, end;
    key_range(p, row, valid, keys.rows, begin, end);

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
        u32 rows = min((u32)TILE, keys.rows - key);
        __syncthreads();
        load_head(k, p.k, keys.start + key, rows, p.k_pitch, kv_head);
        load_head(v, p.v, keys.start + key, rows, p.v_pitch, kv_head);
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
    u32 row = blockIdx.x / p.heads * TILE, head = blockIdx.x % p.heads, group = p.heads / p.kv_heads, kv_head = head / group;
    u32 valid = valid_rows(p.kv_tiles, row);
    if (valid == 0) return;
    u32 segment = p.kv_tiles[row / TILE_ROWS].segment;
    Segment queries = p.q_segments[segment];
    u32 key = row - p.kv_segments[segment].start; // position of the tile's first key
    u32 base = threadIdx.x / 32 * 16;
    float dk[WIDE / 8][4] = {}, dv[WIDE / 8][4] = {};
    load_head(k, p.k, row, valid, p.k_pitch, kv_head);
    load_head(v, p.v, row, valid, p.v_pitch, kv_head);

    for (u32 first = 0; first < queries.rows; first += TILE) {
        u32 rows = min((u32)TILE, queries.rows - first);
        u32 q_row = queries.start + first;
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

KERNEL attention_dkv_sum(PARAMS Attention p) {
    u32 row = blockIdx.x, group = p.heads / p.kv_heads;
    if (row % TILE_ROWS >= p.kv_tiles[row / TILE_ROWS].valid) return;
    for (u32 i = threadIdx.x; i < p.kv_heads * HEAD_DIM; i += blockDim.x) {
        u64 from = ((u64)row * p.heads + i / HEAD_DIM * group) * HEAD_DIM + i % HEAD_DIM;
        float dk = 0, dv = 0;
        for (u32 head = 0; head < group; head++) {
            dk += p.dk_parts[from + head * HEAD_DIM];
            dv += p.dv_parts[from + head * HEAD_DIM];
        }
        store(p.dk + (u64)row * p.dk_pitch + i, dk);
        store(p.dv + (u64)row * p.dv_pitch + i, dv);
    }
}
