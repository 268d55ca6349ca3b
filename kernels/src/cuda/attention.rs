//! Attention: the launches of attention.cu, attention_backward.cu, their twins on Hopper, and attention_sums.cu.
//!
//! Never splits a sequence by how many stand beside it.
#![expect(unsafe_code, reason = "launches kernels")]

use super::device::{CudaBuffer, CudaDevice};
use super::driver::Address;
use super::programs::{Heads, Tiling};
use super::record::Access;
use super::tiles::TensorMap;
use crate::{AttentionShape, DeviceError, Layout, Use};

/// The parameters of attention.cuh.
#[repr(C)]
#[derive(Clone, Copy, Default, bytemuck::NoUninit)]
struct Arguments {
    q: Address,
    k: Address,
    v: Address,
    out: Address,
    lse: Address,
    dout: Address,
    delta: Address,
    dq: Address,
    dk: Address,
    dv: Address,
    dk_parts: Address,
    dv_parts: Address,
    q_positions: Address,
    queries: Address,
    keys: Address,
    heads: u32,
    kv_heads: u32,
    window: u32,
    scale: f32,
    q_pitch: u32,
    k_pitch: u32,
    v_pitch: u32,
    dq_pitch: u32,
    dk_pitch: u32,
    dv_pitch: u32,
    zero: [u32; 24],
    q_map: TensorMap,
    k_map: TensorMap,
    v_map: TensorMap,
    dout_map: TensorMap,
}

fn heads_of(shape: AttentionShape) -> Heads {
    Heads { head_dim: shape.head_dim, group: shape.heads / shape.kv_heads }
}

/// Checks shapes, makes the kernels ready and fills in what both passes share.
fn prepare(
    device: &mut CudaDevice,
    q_rows: &Layout,
    kv_rows: &Layout,
    shape: AttentionShape,
    [q, k, v]: [&CudaBuffer; 3],
) -> Result<(Tiling, Arguments), DeviceError> {
    let AttentionShape { heads, kv_heads, head_dim, window } = shape;
    assert!(heads > 0 && kv_heads > 0 && heads.is_multiple_of(kv_heads), "no attention: {shape:?}");
    assert!(window != Some(0), "a window holds at least the row itself");
    assert!(q.len == q_rows.rows() * heads * head_dim, "q is not of its layout and shape");
    assert!([k.len, v.len] == [kv_rows.rows() * kv_heads * head_dim; 2], "k or v is not of its layout and shape");
    assert!(q_rows.segments().len() == kv_rows.segments().len(), "queries and keys are not of the same sequences");
    for (q, kv) in q_rows.segments().iter().zip(kv_rows.segments()) {
        let last = q.rows.checked_sub(1).map(|last| q_rows.positions()[q.start + last] as usize);
        assert!(last.is_none_or(|last| last < kv.rows), "a query at position {last:?} has no key: there are {}", kv.rows);
    }
    let tiling = device.kernels.prepare_attention(heads_of(shape))?;
    let spans = device.spans(q_rows, kv_rows)?;
    let pitches = [q.pitch(heads * head_dim), k.pitch(kv_heads * head_dim), v.pitch(kv_heads * head_dim)];
    let mut arguments = Arguments {
        q: device.read_rows("q", q, Use::Activation),
        k: device.read_rows("k", k, Use::Activation),
        v: device.read_rows("v", v, Use::Activation),
        q_positions: device.positions(q_rows)?,
        queries: spans.queries,
        keys: spans.keys,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        // Kernels add positions to it: there are fewer than 2^31.
        window: window.map_or(0, |window| window.min(1 << 31) as u32),
        scale: 1.0 / (head_dim as f32).sqrt(),
        q_pitch: pitches[0] as u32,
        k_pitch: pitches[1] as u32,
        v_pitch: pitches[2] as u32,
        ..Arguments::default()
    };
    if tiling.wgmma {
        let map =
            |address, rows: &Layout, heads, pitch| TensorMap::new(address, [rows.rows().max(1), heads * head_dim], pitch, tiling.tile);
        arguments.q_map = map(arguments.q, q_rows, heads, pitches[0])?;
        arguments.k_map = map(arguments.k, kv_rows, kv_heads, pitches[1])?;
        arguments.v_map = map(arguments.v, kv_rows, kv_heads, pitches[2])?;
    }
    Ok((tiling, arguments))
}

#[expect(clippy::too_many_arguments, reason = "one argument an operand")]
pub(super) fn forward(
    device: &mut CudaDevice,
    q_rows: &Layout,
    kv_rows: &Layout,
    shape: AttentionShape,
    q: &CudaBuffer,
    k: &CudaBuffer,
    v: &CudaBuffer,
    out: &mut CudaBuffer,
    lse: &mut CudaBuffer,
) -> Result<(), DeviceError> {
    assert!(out.len == q.len && lse.len == q_rows.rows() * shape.heads, "out or lse is not of its layout and shape");
    let (tiling, mut arguments) = prepare(device, q_rows, kv_rows, shape, [q, k, v])?;
    arguments.out = device.read("out", out, Use::Activation);
    arguments.lse = device.read("lse", lse, Use::State);
    let kernel = device.kernels.attention(heads_of(shape), "attention");
    let grid = [q_rows.rows() / tiling.tile * shape.heads / tiling.heads, 1, 1];
    let access = Access { reads: &[arguments.q, arguments.k, arguments.v], writes: &[arguments.out, arguments.lse] };
    // SAFETY: `Arguments` is attention.cuh's struct; blocks cover tiles x heads with the threads and shared memory it was compiled for; sizes
    // and positions were checked; out and lse are the only buffers written.
    unsafe { device.launch(kernel, grid, tiling.threads() * tiling.heads as u32, tiling.forward_bytes, &arguments, access) }
}

pub(super) fn backward(
    device: &mut CudaDevice,
    q_rows: &Layout,
    kv_rows: &Layout,
    shape: AttentionShape,
    qkv: [&CudaBuffer; 3],
    [out, lse, dout]: [&CudaBuffer; 3],
    [dq, dk, dv]: [&mut CudaBuffer; 3],
) -> Result<(), DeviceError> {
    let (q, k) = (qkv[0].len, qkv[1].len);
    assert!([out.len, dout.len, dq.len] == [q; 3] && [dk.len, dv.len] == [k; 2], "a gradient is not of its array's size");
    assert!(lse.len == q_rows.rows() * shape.heads, "lse is not of its layout and shape");
    let (tiling, mut arguments) = prepare(device, q_rows, kv_rows, shape, qkv)?;
    arguments.out = device.read("out", out, Use::Activation);
    arguments.lse = device.read("lse", lse, Use::State);
    arguments.dout = device.read("dout", dout, Use::Activation);
    arguments.dq = device.read_rows("dq", dq, Use::Activation);
    arguments.dk = device.read_rows("dk", dk, Use::Activation);
    arguments.dv = device.read_rows("dv", dv, Use::Activation);
    arguments.dq_pitch = dq.pitch(shape.heads * shape.head_dim) as u32;
    arguments.dk_pitch = dk.pitch(shape.kv_heads * shape.head_dim) as u32;
    arguments.dv_pitch = dv.pitch(shape.kv_heads * shape.head_dim) as u32;
    if tiling.wgmma {
        let width = shape.heads * shape.head_dim;
        let rows = [(arguments.dq, arguments.dq_pitch), (arguments.dk, arguments.dk_pitch), (arguments.dv, arguments.dv_pitch)];
        let is_even = rows.iter().all(|(address, pitch)| address.is_multiple_of(16) && pitch.is_multiple_of(8));
        assert!(is_even, "rows of dq, dk or dv begin at no multiple of 16 bytes");
        arguments.dout_map = TensorMap::new(arguments.dout, [q_rows.rows().max(1), width], width, tiling.tile)?;
    }
    arguments.delta = device.scratch("attention delta", lse.len * 4)?;
    let parts = shape.heads > shape.kv_heads;
    if parts {
        let bytes = kv_rows.rows() * shape.heads * shape.head_dim * 4;
        arguments.dk_parts = device.scratch("attention dk", bytes)?;
        arguments.dv_parts = device.scratch("attention dv", bytes)?;
    }
    let Arguments { q, k, v, out, lse, dout, delta, dq, dk, dv, dk_parts, dv_parts, .. } = arguments;
    let [delta_kernel, dq_kernel, dkv_kernel, sum_kernel] = ["attention_delta", "attention_dq", "attention_dkv", "attention_dkv_sum"]
        .map(|name| device.kernels.attention(heads_of(shape), name));
    let access = Access { reads: &[out, dout], writes: &[delta] };
    // SAFETY: as in `forward`; one block a row; the scratch holds a number a row and head.
    unsafe { device.launch(delta_kernel, [q_rows.rows(), 1, 1], 256, 0, &arguments, access) }?;
    let grid = [q_rows.rows() / tiling.tile * shape.heads, 1, 1];
    let access = Access { reads: &[q, k, v, lse, dout, delta], writes: &[dq] };
    // SAFETY: as in `forward`; dq is the only buffer written.
    unsafe { device.launch(dq_kernel, grid, tiling.threads(), tiling.backward_bytes, &arguments, access) }?;
    let grid = [kv_rows.rows() / tiling.tile * shape.heads, 1, 1];
    let written = if parts { [dk_parts, dv_parts] } else { [dk, dv] };
    let access = Access { reads: &[q, k, v, lse, dout, delta], writes: &written };
    // SAFETY: as in `forward`; dk and dv, or the scratch for a part a query head, are the only memory written.
    unsafe { device.launch(dkv_kernel, grid, tiling.threads(), tiling.backward_bytes, &arguments, access) }?;
    if parts {
        let access = Access { reads: &written, writes: &[dk, dv] };
        // SAFETY: as above; one block a row; dk and dv are the only buffers written.
        unsafe { device.launch(sum_kernel, [kv_rows.rows(), 1, 1], 256, 0, &arguments, access) }?;
    }
    Ok(())
}
