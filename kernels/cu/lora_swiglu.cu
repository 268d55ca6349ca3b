// lora_swiglu:          lora_expand of gate and up (modules 0 and 1), then out = silu(gate) * up of what they are then, rounded
// lora_backward_swiglu: dy (lora.dx) as lora_backward_expand would leave it, then swiglu_backward of it: dgate =, dup =
//
// Over a table of tiles of all rows: those in no group are not added to. What is between the two halves never leaves the registers: dy is not
// written. Padding rows are untouched. Widths and pitches are multiples of 8, and no group drops anything.
#include "lora.cuh"
#include "swiglu.cuh"

// The group of a tile without an adapter.
#define NO_GROUP 0xffffffffu

struct LoraSwiglu {
    Lora lora;
    const Rows* tiles;
    const act* gate;
    const act* up;
    act* out;
    act* dgate;
    act* dup;
    u32 pitch;      // elements from row to row of gate and up
    u32 grad_pitch; // of dgate and dup
};

#define SUBS 2 // of 16 rows, of a block
#define ROWS (SUBS * 16)

// Where a block and a lane are.
struct Lane {
    Rows tile;
    u64 row;
    u32 rows, g, t, column;
};

__device__ __forceinline__ Lane lane_of(const LoraSwiglu& p) {
    u32 part = blockIdx.x / p.lora.columns, before = part % (TILE_ROWS / ROWS) * ROWS;
    Lane at;
    at.tile = p.tiles[part / (TILE_ROWS / ROWS)];
    at.row = at.tile.row + before;
    at.rows = before < at.tile.valid ? min(at.tile.valid - before, (u32)ROWS) : 0;
    at.g = threadIdx.x % 32 / 4, at.t = threadIdx.x % 4;
    at.column = blockIdx.x % p.lora.columns * EXPAND_COLS + threadIdx.x / 32 * 32;
    return at;
}

// A lane's eight elements of each of its rows; where nothing is stored, something else.
struct Held {
    Eight of[SUBS][2];
};

__device__ __forceinline__ void hold_rows(Held& held, const act* from, u32 pitch, u32 wide, const Lane& at) {
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = min(sub * 16 + at.g + half * 8, at.rows - 1), c = min(at.column + at.t * 8, wide - 8);
            hold(held.of[sub][half], from + (at.row + r) * pitch + c);
        }
}

// held += scale acc, rounded.
__device__ __forceinline__ void add_rows(Held& held, const float (&acc)[SUBS][4][4], float scale) {
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            Eight& now = held.of[sub][half];
            float v[8];
            load<8>((const act*)&now, v);
#pragma unroll
            for (int i = 0; i < 8; i++) v[i] = plus(v[i], acc[sub][i / 2][half * 2 + i % 2], scale);
            save<8>((act*)&now, v);
        }
}

// Does something for each row and its elements that are there: what(sub, half, row).
template <class F> __device__ __forceinline__ void for_rows(const Lane& at, u32 wide, F what) {
    if (at.column + at.t * 8 >= wide) return;
#pragma unroll
    for (int sub = 0; sub < SUBS; sub++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            u32 r = sub * 16 + at.g + half * 8;
            if (r < at.rows) what(sub, half, at.row + r);
        }
}

KERNEL __launch_bounds__(EXPAND_THREADS, 4) lora_swiglu(PARAMS LoraSwiglu p) {
    Lane at = lane_of(p);
    u32 wide = p.lora.modules[0].wide, c = at.column + at.t * 8;
    if (at.rows == 0 || at.column >= wide) return;
    Held held[2];
#pragma unroll
    for (int m = 0; m < 2; m++) hold_rows(held[m], p.lora.modules[m].y, p.pitch, wide, at);
    const Group* groups = p.lora.groups + at.tile.group;
#pragma unroll
    for (int m = 0; m < 2; m++) {
        if (at.tile.group == NO_GROUP) continue;
        const Group& group = groups[m * p.lora.count];
        const Module& module = p.lora.modules[m];
        if (group.rank == 0) continue;
        float acc[SUBS][4][4] = {};
        narrow_product<true, SUBS>(acc, group.b, group.rank, wide, at.column, module.s, module.s_width, at.row, at.rows);
        add_rows(held[m], acc, group.scale);
        for_rows(at, wide, [&](int sub, int half, u64 row) {
            float v[8];
            load<8>((const act*)&held[m].of[sub][half], v);
            save<8>(module.y + row * p.pitch + c, v);
        });
    }
    for_rows(at, wide, [&](int sub, int half, u64 row) {
        float gate[8], up[8];
        load<8>((const act*)&held[0].of[sub][half], gate);
        load<8>((const act*)&held[1].of[sub][half], up);
#pragma unroll
        for (int i = 0; i < 8; i++) up[i] = swiglu_of(gate[i], up[i]);
        save<8>(p.out + row * wide + c, up);
    });
}

KERNEL __launch_bounds__(EXPAND_THREADS, 4) lora_backward_swiglu(PARAMS LoraSwiglu p) {
    Lane at = lane_of(p);
    u32 wide = p.lora.wide, c = at.column + at.t * 8;
    if (at.rows == 0 || at.column >= wide) return;
    Held dy, gate, up;
    hold_rows(dy, p.lora.dx, wide, wide, at);
    hold_rows(gate, p.gate, p.pitch, wide, at);
    hold_rows(up, p.up, p.pitch, wide, at);
    if (at.tile.group != NO_GROUP) {
        const Group& group = p.lora.groups[at.tile.group];
        const Module& from = p.lora.modules[0];
        if (group.wants_dx && group.rank > 0) {
            float acc[SUBS][4][4] = {};
            narrow_product<false, SUBS>(acc, group.a, group.rank, wide, at.column, from.ds, from.s_width, at.row, at.rows);
            add_rows(dy, acc, 1.0f);
        }
    }
    for_rows(at, wide, [&](int sub, int half, u64 row) {
        float d[8], v[8], w[8];
        load<8>((const act*)&dy.of[sub][half], d);
        load<8>((const act*)&gate.of[sub][half], v);
        load<8>((const act*)&up.of[sub][half], w);
#pragma unroll
        for (int i = 0; i < 8; i++) swiglu_gradients(d[i], v[i], w[i]);
        u64 to = row * p.grad_pitch + c;
        save<8>(p.dgate + to, v);
        save<8>(p.dup + to, w);
    });
}
