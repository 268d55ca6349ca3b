// Attention in bf16: what is done with scores, whichever way tiles are multiplied, and products of tiles by a warp.
// Must never be included where activations are float32.
#pragma once
#include "attention.cuh"

#define TILE_SIZE (TILE * LD) // elements from tile to tile, where a warp multiplies

#define LOG2E 1.4426950408889634f

__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// acc (16 x 8 NB) += A B for 16 inner elements: A in registers, B (16 x 8 NB) by columns (element (k, n) at b[n ldb + k]), or by rows where BT.
template <bool BT, int NB> __device__ __forceinline__ void step_mma(float (&acc)[NB][4], const u32 (&a)[4], const act* b, u32 ldb) {
    u32 lane = threadIdx.x % 32;
    const act* from = BT ? b + lane % 16 * ldb + lane / 16 * 8 : b + (lane % 8 + lane / 16 * 8) * ldb + lane / 8 % 2 * 8;
#pragma unroll
    for (int j = 0; j < NB; j += 2) {
        u32 both[4];
        fragment_a<BT>(both, BT ? from + j * 8 : from + j * 8 * ldb);
        u32 first[2] = {both[0], both[1]}, second[2] = {both[2], both[3]};
        mma(acc[j], a, first);
        mma(acc[j + 1], a, second);
    }
}

// A (16 x K, by rows in shared memory) as step_mma wants it.
template <int K> __device__ __forceinline__ void load_fragments(u32 (&a)[K / 16][4], const act* from, u32 ld) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) fragment_a<false>(a[k / 16], from + lane % 16 * ld + lane / 16 * 8 + k);
}

// acc (16 x 8 NB) += A B, A (16 x K) by rows and B by columns in shared memory.
template <int NB, int K> __device__ __forceinline__ void shared_mma(float (&acc)[NB][4], const act* a, u32 lda, const act* b, u32 ldb) {
    u32 lane = threadIdx.x % 32;
#pragma unroll
    for (int k = 0; k < K; k += 16) {
        u32 fa[4];
        fragment_a<false>(fa, a + lane % 16 * lda + lane / 16 * 8 + k);
        step_mma<false, NB>(acc, fa, b + k, ldb);
    }
}

// acc (16 x 8 NB) += P B, with P (16 x 8 KB) where accumulators hold it, rounded to bf16; B by rows.
template <int NB, int KB> __device__ __forceinline__ void held_mma(float (&acc)[NB][4], const float (&p)[KB][4], const act* b, u32 ldb) {
#pragma unroll
    for (int k = 0; k < KB; k += 2) {
        u32 a[4] = {pack(p[k][0], p[k][1]), pack(p[k][2], p[k][3]), pack(p[k + 1][0], p[k + 1][1]), pack(p[k + 1][2], p[k + 1][3])};
        step_mma<true, NB>(acc, a, b + k * 8 * ldb, ldb);
    }
}

// load_head without waiting: what lies past `rows` or the head is zero. Ends with `ready`.
__device__ __forceinline__ void begin_head(act* tile, const act* x, u64 row, u32 rows, u32 pitch, u32 head) {
    // Rows hold whole heads, so where a head is a multiple of 16 bytes everything begins at one.
    begin_tile<TILE, WIDE, THREADS, HEAD_DIM % 8 == 0>(threadIdx.x, tile, LD, x + row * pitch + head * HEAD_DIM, pitch, rows, HEAD_DIM);
}

// The first of this warp's 16 rows of a tile: THREADS threads have one between them.
__device__ __forceinline__ u32 first_row() { return threadIdx.x % THREADS / 32 * 16; }

// Waits until all but the latest PENDING groups of copies of every thread have arrived, and every thread has.
template <int PENDING> __device__ __forceinline__ void ready() {
    arrived<PENDING>();
    __syncthreads();
}

// s (this warp's 16 rows x TILE) = A B^T, of fragments and a tile.
__device__ __forceinline__ void scores(float (&s)[TILE / 8][4], const u32 (&a)[WIDE / 16][4], const act* b) {
#pragma unroll
    for (int d = 0; d < WIDE; d += 16) step_mma<false, TILE / 8>(s, a[d / 16], b + d, LD);
}
// s = A B^T, of tiles.
__device__ __forceinline__ void scores(float (&s)[TILE / 8][4], const act* a, const act* b) {
    shared_mma<TILE / 8, WIDE>(s, a + first_row() * LD, LD, b, LD);
}
// acc (this warp's 16 rows x WIDE) += P B, P (16 x TILE) where accumulators hold it, rounded to bf16.
__device__ __forceinline__ void weigh(float (&acc)[WIDE / 8][4], const float (&p)[TILE / 8][4], const act* b) {
    held_mma<WIDE / 8, TILE / 8>(acc, p, b, LD);
}

// The keys that a query sees: key - first < count, in numbers that wrap. Nothing for a row that is padding.
struct Seen {
    u32 first, count;
};
__device__ __forceinline__ Seen seen_keys(const Attention& p, u32 position, bool real) {
    u32 first = p.window != 0 && position + 1 > p.window ? position + 1 - p.window : 0;
    return {first, real ? position + 1 - first : 0};
}

// s (rows of queries, 16 x 8 NB columns of keys from `key` on) becomes `hidden` where a query does not see a key.
template <int NB> __device__ __forceinline__ void hide(float (&s)[NB][4], const Seen (&seen)[2], u32 key, float hidden) {
    u32 at[2] = {key + acc_col(0) - seen[0].first, key + acc_col(0) - seen[1].first};
#pragma unroll
    for (int j = 0; j < NB; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) s[j][i] = at[i / 2] + (j * 8 + i % 2) < seen[i / 2].count ? s[j][i] : hidden;
}

// Whether each of a lane's two rows is real, and the keys that it sees.
struct Queries {
    bool real[2];
    Seen seen[2];
};
__device__ __forceinline__ Queries queries_of(const Attention& p, const Place& place) {
    Queries queries;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u32 r = first_row() + acc_row(2 * i);
        queries.real[i] = r < place.valid;
        queries.seen[i] = seen_keys(p, queries.real[i] ? p.q_positions[place.row + r] : 0, queries.real[i]);
    }
    return queries;
}

// The largest score of each of a lane's two rows so far, and this lane's part of the sum of their powers.
struct Softmax {
    float top[2] = {-INF, -INF}, sum[2] = {0, 0};
};

// Scores become powers beside the largest so far; what went before is brought to its level. `scale` is of powers of two.
__device__ __forceinline__ void soften(float (&s)[TILE / 8][4], float (&acc)[WIDE / 8][4], Softmax& now, float scale) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float peak = now.top[i];
#pragma unroll
        for (int j = 0; j < TILE / 8; j++) peak = fmaxf(peak, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 1));
        peak = fmaxf(peak, __shfl_xor_sync(0xffffffffu, peak, 2));
        // Where nothing has been seen yet the peak is -infinity, and so is every score: their powers are zero beside any number.
        float level = peak == -INF ? 0.0f : peak * scale, shrink = exp2_fast(fmaf(now.top[i], scale, -level));
        now.top[i] = peak;
        now.sum[i] *= shrink;
#pragma unroll
        for (int j = 0; j < WIDE / 8; j++) acc[j][2 * i] *= shrink, acc[j][2 * i + 1] *= shrink;
#pragma unroll
        for (int j = 0; j < TILE / 8; j++)
#pragma unroll
            for (int c = 2 * i; c < 2 * i + 2; c++) {
                s[j][c] = exp2_fast(fmaf(s[j][c], scale, -level));
                now.sum[i] += s[j][c];
            }
    }
}

// The end of it: what each row's accumulators are to be multiplied by. Writes lse.
__device__ __forceinline__ void finish(float (&share)[2], Softmax& now, const Attention& p, const Place& place, const Queries& queries) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float& sum = now.sum[i];
        sum += __shfl_xor_sync(0xffffffffu, sum, 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        share[i] = 1.0f / sum;
        u64 at = (u64)(place.row + first_row() + acc_row(2 * i)) * p.heads + place.head;
        if (queries.real[i] && threadIdx.x % 4 == 0) ((float*)p.lse)[at] = now.top[i] * p.scale + logf(sum);
    }
}

// lse and delta of a lane's two rows, lse for powers of two and turned round.
struct Levels {
    float lse[2], delta[2];
};
__device__ __forceinline__ Levels levels_of(const Attention& p, const Place& place, const Queries& queries) {
    Levels levels;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        u64 at = (u64)(place.row + first_row() + acc_row(2 * i)) * p.heads + place.head;
        levels.lse[i] = queries.real[i] ? p.lse[at] * -LOG2E : 0;
        levels.delta[i] = queries.real[i] ? p.delta[at] : 0;
    }
    return levels;
}

// Scores, and the gradients of their probabilities, become the scores' gradients.
__device__ __forceinline__ void gradients(float (&s)[TILE / 8][4], const float (&dp)[TILE / 8][4], const Levels& levels, float scale) {
#pragma unroll
    for (int j = 0; j < TILE / 8; j++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            s[j][i] = exp2_fast(fmaf(s[j][i], scale * LOG2E, levels.lse[i / 2])) * (dp[j][i] - levels.delta[i / 2]) * scale;
}

// The queries that a tile of keys meets.
struct Columns {
    float lse[TILE], delta[TILE]; // lse for powers of two and turned round
    u32 position[TILE];
};
// A row of it, or one that is not there.
__device__ __forceinline__ void fill_column(Columns& columns, u32 r, bool real, const Attention& p, u32 row, u32 head) {
    columns.position[r] = real ? p.q_positions[row] : PADDING;
    columns.lse[r] = real ? p.lse[(u64)row * p.heads + head] * -LOG2E : 0;
    columns.delta[r] = real ? p.delta[(u64)row * p.heads + head] : 0;
}

// Rows are a tile of keys, columns of queries, of which so many are left. Scores become probabilities, dp the scores' gradients.
__device__ __forceinline__ void gradients_of_keys(
    float (&s)[TILE / 8][4], float (&dp)[TILE / 8][4], const Columns& columns, const Attention& p, const Place& place, u32 left) {
    u32 key = position_of(place);
    // Where every query of the tile sees every key, nothing is hidden. Positions ascend.
    bool whole = columns.position[0] >= key + TILE - 1 && p.window == 0 && left >= TILE;
#pragma unroll
    for (int j = 0; j < TILE / 8; j++) {
        u32 column = j * 8 + acc_col(0);
        float2 level = *(float2*)&columns.lse[column], less = *(float2*)&columns.delta[column];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            s[j][i] = exp2_fast(fmaf(s[j][i], p.scale * LOG2E, i % 2 ? level.y : level.x));
            dp[j][i] = s[j][i] * (dp[j][i] - (i % 2 ? less.y : less.x)) * p.scale;
        }
        if (whole) continue;
        uint2 at = *(uint2*)&columns.position[column];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 query = i % 2 ? at.y : at.x, row = first_row() + acc_row(i);
            bool seen = row < place.valid && query != PADDING && sees(p, query, key + row);
            s[j][i] = seen ? s[j][i] : 0.0f;
            dp[j][i] = seen ? dp[j][i] : 0.0f;
        }
    }
}

// The tile of a sequence's queries from `first` on that sees a key of a tile of keys, or the end. Where every position has a query, it is a matter of counting.
__device__ __forceinline__ u32 next_queries(const Attention& p, const Span& span, u32 key, u32 first) {
    if (span.others == span.rows) {
        first = max(first, key);
        return p.window == 0 || first < key + TILE - 1 + p.window ? first : span.others;
    }
    for (; first < span.others; first += TILE) {
        u32 rows = min((u32)TILE, span.others - first), q_row = span.other + first;
        bool after = p.q_positions[q_row + rows - 1] >= key;
        if (after && (p.window == 0 || p.q_positions[q_row] < key + TILE - 1 + p.window)) break;
    }
    return first;
}

// What a warp accumulated for 16 rows of a head, each row times its factor, to where it belongs. Rows that are not real are untouched.
__device__ __forceinline__ void store_head(act* to, const float (&acc)[WIDE / 8][4], const float (&factor)[2], const Place& place, u32 pitch) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 r = first_row() + acc_row(i);
        if (r >= place.valid) continue;
        act* from = to + (u64)(place.row + r) * pitch + place.head * HEAD_DIM;
#pragma unroll
        for (int j = 0; j < WIDE / 8; j++) {
            u32 column = j * 8 + acc_col(i);
            float first = acc[j][i] * factor[i / 2], second = acc[j][i + 1] * factor[i / 2];
            if (HEAD_DIM % 8 == 0) {
                if (j * 8 < HEAD_DIM) *(u32*)(from + column) = pack(first, second);
            } else {
                if (column < HEAD_DIM) store(from + column, first);
                if (column + 1 < HEAD_DIM) store(from + column + 1, second);
            }
        }
    }
}

// Of a row of dk or dv, accumulators `i` and `i + 1`.
__device__ __forceinline__ void store_part(float* to, const float (&acc)[WIDE / 8][4], int i) {
#pragma unroll
    for (int j = 0; j < WIDE / 8; j++) {
        u32 column = j * 8 + acc_col(i);
        if (HEAD_DIM % 2 == 0) {
            if (column < HEAD_DIM) *(float2*)(to + column) = make_float2(acc[j][i], acc[j][i + 1]);
        } else {
            if (column < HEAD_DIM) to[column] = acc[j][i];
            if (column + 1 < HEAD_DIM) to[column + 1] = acc[j][i + 1];
        }
    }
}
// What a warp accumulated of dk and dv for 16 rows and one query head, in float32. Two neighbours at a time: four lanes fill 32 bytes.
__device__ __forceinline__ void store_parts(const Attention& p, const float (&dk)[WIDE / 8][4], const float (&dv)[WIDE / 8][4], const Place& place) {
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        u32 r = first_row() + acc_row(i);
        if (r >= place.valid) continue;
        u64 at = ((u64)(place.row + r) * p.heads + place.head) * HEAD_DIM;
        store_part(p.dk_parts + at, dk, i);
        store_part(p.dv_parts + at, dv, i);
    }
}
