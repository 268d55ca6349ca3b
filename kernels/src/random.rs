//! Counter-based random numbers: the same on every device, in every order, as often as one asks.
//!
//! Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3" (SC 2011).

/// Four random words for a counter under a key.
#[must_use]
pub fn philox(key: u64, counter: [u32; 4]) -> [u32; 4] {
    const MULTIPLIERS: [u64; 2] = [0xD251_1F53, 0xCD9E_8D57];
    const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
    let [mut k0, mut k1] = [key as u32, (key >> 32) as u32];
    let [mut a, mut b, mut c, mut d] = counter;
    for _ in 0..10 {
        let p0 = MULTIPLIERS[0] * u64::from(a);
        let p1 = MULTIPLIERS[1] * u64::from(c);
        [a, b, c, d] = [(p1 >> 32) as u32 ^ b ^ k0, p1 as u32, (p0 >> 32) as u32 ^ d ^ k1, p0 as u32];
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
    }
    [a, b, c, d]
}

/// A uniform number in [0, 1) with 24 random bits, exact in float32.
#[must_use]
pub fn uniform(word: u32) -> f32 {
    (word >> 8) as f32 / 16_777_216.0
}

/// The key of a stream of random numbers that belongs to a seed and some numbers that name its purpose; for `ids` apart, streams are
/// independent. SHA-256 over the little-endian words, its first 8 bytes.
#[must_use]
pub fn stream_key(seed: u64, ids: &[u64]) -> u64 {
    use sha2::{Digest, Sha256};
    let mut hash = Sha256::new();
    hash.update(seed.to_le_bytes());
    for id in ids {
        hash.update(id.to_le_bytes());
    }
    let mut first = [0; 8];
    first.copy_from_slice(&hash.finalize()[..8]);
    u64::from_le_bytes(first)
}

#[cfg(test)]
mod tests {
    use super::philox;

    /// Known answers of the Random123 distribution (`kat_vectors`, philox4x32 10).
    #[test]
    fn known_answers() {
        assert_eq!(philox(0, [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox(u64::MAX, [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox(0x299f_31d0_a409_3822, [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }
}
