//! Block formats of ggml to float32, bit for bit as `gguf` (the Python package of ggml) computes them.
//!
//! Every product and every sum rounds once to float32; nothing is fused or reordered. Layouts: ggml's `ggml-common.h`.

use half::{bf16, f16};

/// How a tensor's elements are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[expect(non_camel_case_types, reason = "ggml's own names")]
pub(super) enum Kind {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q4_K,
    Q5_K,
    Q6_K,
}

impl Kind {
    /// The kind of this number in ggml, or the name of one that is not supported.
    pub(super) fn of(number: u32) -> Result<Self, String> {
        const OTHERS: [(u32, &str); 20] = [
            (9, "Q8_1"),
            (10, "Q2_K"),
            (11, "Q3_K"),
            (15, "Q8_K"),
            (16, "IQ2_XXS"),
            (17, "IQ2_XS"),
            (18, "IQ3_XXS"),
            (19, "IQ1_S"),
            (20, "IQ4_NL"),
            (21, "IQ3_S"),
            (22, "IQ2_S"),
            (23, "IQ4_XS"),
            (24, "I8"),
            (26, "I32"),
            (27, "I64"),
            (28, "F64"),
            (29, "IQ1_M"),
            (34, "TQ1_0"),
            (35, "TQ2_0"),
            (39, "MXFP4"),
        ];
        Ok(match number {
            0 => Self::F32,
            1 => Self::F16,
            2 => Self::Q4_0,
            3 => Self::Q4_1,
            6 => Self::Q5_0,
            7 => Self::Q5_1,
            8 => Self::Q8_0,
            12 => Self::Q4_K,
            13 => Self::Q5_K,
            14 => Self::Q6_K,
            30 => Self::BF16,
            n => return Err(OTHERS.iter().find(|(k, _)| *k == n).map_or_else(|| format!("number {n}"), |(_, name)| (*name).to_owned())),
        })
    }

    /// Elements and bytes of a block.
    pub(super) fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::BF16 => (1, 2),
            Self::Q4_0 => (32, 18),
            Self::Q4_1 => (32, 20),
            Self::Q5_0 => (32, 22),
            Self::Q5_1 => (32, 24),
            Self::Q8_0 => (32, 34),
            Self::Q4_K => (256, 144),
            Self::Q5_K => (256, 176),
            Self::Q6_K => (256, 210),
        }
    }
}

/// Appends the elements of whole blocks.
pub(super) fn dequantise(kind: Kind, bytes: &[u8], out: &mut Vec<f32>) {
    match kind {
        Kind::F32 => blocks(bytes, |b: &[u8; 4]| out.push(f32::from_le_bytes(*b))),
        Kind::F16 => blocks(bytes, |b: &[u8; 2]| out.push(f16::from_le_bytes(*b).to_f32())),
        Kind::BF16 => blocks(bytes, |b: &[u8; 2]| out.push(bf16::from_le_bytes(*b).to_f32())),
        Kind::Q4_0 => blocks(bytes, |b| q4_0(b, out)),
        Kind::Q4_1 => blocks(bytes, |b| q4_1(b, out)),
        Kind::Q5_0 => blocks(bytes, |b| q5_0(b, out)),
        Kind::Q5_1 => blocks(bytes, |b| q5_1(b, out)),
        Kind::Q8_0 => blocks(bytes, |b| q8_0(b, out)),
        Kind::Q4_K => blocks(bytes, |b| q4_k(b, out)),
        Kind::Q5_K => blocks(bytes, |b| q5_k(b, out)),
        Kind::Q6_K => blocks(bytes, |b| q6_k(b, out)),
    }
}

fn blocks<const N: usize>(bytes: &[u8], each: impl FnMut(&[u8; N])) {
    bytes.as_chunks::<N>().0.iter().for_each(each);
}

fn half(low: u8, high: u8) -> f32 {
    f16::from_le_bytes([low, high]).to_f32()
}

/// A 4-bit or longer code less its offset.
fn signed(code: u8, offset: i8) -> f32 {
    f32::from(code.cast_signed() - offset)
}

fn q4_0(&[d0, d1, ref q @ ..]: &[u8; 18], out: &mut Vec<f32>) {
    let d = half(d0, d1);
    out.extend(q.iter().map(|q| d * signed(q & 15, 8)));
    out.extend(q.iter().map(|q| d * signed(q >> 4, 8)));
}

fn q4_1(&[d0, d1, m0, m1, ref q @ ..]: &[u8; 20], out: &mut Vec<f32>) {
    let (d, m) = (half(d0, d1), half(m0, m1));
    out.extend(q.iter().map(|q| d * f32::from(q & 15) + m));
    out.extend(q.iter().map(|q| d * f32::from(q >> 4) + m));
}

/// The fifth bit of element i is bit i of `high`.
fn five_bits(q: &[u8; 16], high: u32) -> impl Iterator<Item = u8> + '_ {
    let nibbles = q.iter().map(|q| q & 15).chain(q.iter().map(|q| q >> 4));
    nibbles.enumerate().map(move |(i, low)| low | ((high >> i & 1) as u8) << 4)
}

fn q5_0(&[d0, d1, h0, h1, h2, h3, ref q @ ..]: &[u8; 22], out: &mut Vec<f32>) {
    let d = half(d0, d1);
    out.extend(five_bits(q, u32::from_le_bytes([h0, h1, h2, h3])).map(|q| d * signed(q, 16)));
}

fn q5_1(&[d0, d1, m0, m1, h0, h1, h2, h3, ref q @ ..]: &[u8; 24], out: &mut Vec<f32>) {
    let (d, m) = (half(d0, d1), half(m0, m1));
    out.extend(five_bits(q, u32::from_le_bytes([h0, h1, h2, h3])).map(|q| d * f32::from(q) + m));
}

fn q8_0(&[d0, d1, ref q @ ..]: &[u8; 34], out: &mut Vec<f32>) {
    let d = half(d0, d1);
    out.extend(q.iter().map(|q| f32::from(q.cast_signed()) * d));
}

/// Scales and minima, 6 bits each, of the eight runs of 32 elements in a block: the first four plain, the upper two bits of
/// the last four in the top of the first four.
fn scales(s: [u8; 12]) -> [(u8, u8); 8] {
    let [d0, d1, d2, d3, m0, m1, m2, m3, x0, x1, x2, x3] = s;
    let first = |d: u8, m: u8| (d & 63, m & 63);
    let last = |d: u8, m: u8, x: u8| ((x & 15) | (d >> 2 & 48), (x >> 4) | (m >> 2 & 48));
    [first(d0, m0), first(d1, m1), first(d2, m2), first(d3, m3), last(d0, m0, x0), last(d1, m1, x1), last(d2, m2, x2), last(d3, m3, x3)]
}

fn q4_k(&[d0, d1, m0, m1, ref rest @ ..]: &[u8; 144], out: &mut Vec<f32>) {
    let Some((s, q)) = rest.split_first_chunk::<12>() else { return };
    let (d, min) = (half(d0, d1), half(m0, m1));
    for (q, [low, high]) in q.as_chunks::<32>().0.iter().zip(scales(*s).as_chunks::<2>().0) {
        for ((scale, m), shift) in [(low, 0), (high, 4)] {
            let (d, m) = (d * f32::from(*scale), min * f32::from(*m));
            out.extend(q.iter().map(|q| d * f32::from(q >> shift & 15) - m));
        }
    }
}

fn q5_k(&[d0, d1, m0, m1, ref rest @ ..]: &[u8; 176], out: &mut Vec<f32>) {
    let Some((s, rest)) = rest.split_first_chunk::<12>() else { return };
    let Some((high, q)) = rest.split_first_chunk::<32>() else { return };
    let (d, min) = (half(d0, d1), half(m0, m1));
    for (run, (scale, m)) in scales(*s).into_iter().enumerate() {
        let (d, m) = (d * f32::from(scale), min * f32::from(m));
        let Some(q) = q.as_chunks::<32>().0.get(run / 2) else { return };
        let shift = 4 * (run % 2);
        out.extend(q.iter().zip(high).map(|(q, h)| d * f32::from((q >> shift & 15) | (h >> run & 1) << 4) - m));
    }
}

fn q6_k(block: &[u8; 210], out: &mut Vec<f32>) {
    let Some((low, rest)) = block.split_first_chunk::<128>() else { return };
    let Some((high, rest)) = rest.split_first_chunk::<64>() else { return };
    let Some((scales, &[d0, d1])) = rest.split_first_chunk::<16>() else { return };
    let d = half(d0, d1);
    let scales = scales.as_chunks::<8>().0;
    for ((low, high), scales) in low.as_chunks::<64>().0.iter().zip(high.as_chunks::<32>().0).zip(scales) {
        let [first, second] = low.as_chunks::<32>().0 else { return };
        let runs = [(first, 0), (second, 0), (first, 4), (second, 4)];
        for (run, ((low, shift), scales)) in runs.into_iter().zip(scales.as_chunks::<2>().0).enumerate() {
            // One scale for each half of a run.
            let scale = scales.map(|s| d * f32::from(s.cast_signed()));
            let codes = low.iter().zip(high).map(|(l, h)| (l >> shift & 15) | (h >> (2 * run) & 3) << 4);
            out.extend(codes.enumerate().map(|(i, q)| if i < 16 { scale[0] } else { scale[1] } * signed(q, 32)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made by `fixtures/make_gguf_blocks.py` with the gguf package: for each kind its number, the blocks, and their values.
    const FIXTURE: &str = include_str!("../../tests/fixtures/gguf_blocks.txt");

    fn bytes(hex: &str) -> Vec<u8> {
        hex.as_bytes().chunks(2).map(|b| u8::from_str_radix(std::str::from_utf8(b).unwrap(), 16).unwrap()).collect()
    }

    #[test]
    fn every_kind_equals_ggmls_own_values_bit_for_bit() {
        let mut seen = Vec::new();
        for line in FIXTURE.lines() {
            let [number, blocks, values] = line.split(' ').collect::<Vec<_>>().try_into().unwrap();
            let kind = Kind::of(number.parse().unwrap()).unwrap();
            let mut out = Vec::new();
            dequantise(kind, &bytes(blocks), &mut out);
            let expected: Vec<u32> = bytes(values).chunks(4).map(|b| u32::from_le_bytes(b.try_into().unwrap())).collect();
            assert_eq!(out.iter().map(|x| x.to_bits()).collect::<Vec<_>>(), expected, "{kind:?}");
            let (elements, size) = kind.block();
            assert_eq!(out.len() * size, bytes(blocks).len() * elements, "{kind:?}");
            seen.push(kind);
        }
        seen.sort();
        seen.dedup();
        assert_eq!(seen.len(), 11);
    }

    #[test]
    fn other_kinds_are_refused_by_name() {
        assert_eq!(Kind::of(10).unwrap_err(), "Q2_K");
        assert_eq!(Kind::of(4096).unwrap_err(), "number 4096");
    }
}
