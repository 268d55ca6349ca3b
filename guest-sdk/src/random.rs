//! A small seeded random source: SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).
//!
//! Never draws on anything but its seed, so equal seeds give equal numbers in every run and on every machine.

/// Added at each draw: 2^64 divided by the golden ratio, made odd.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;

/// A stream of random numbers. Not for secrets.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// The stream that SplitMix64 gives for this seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// One of many unrelated streams of one seed, for example one for each epoch.
    #[must_use]
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self { state: mix(mix(seed).wrapping_add(stream.wrapping_mul(GAMMA))) }
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(GAMMA);
        mix(self.state)
    }

    /// A number from 0 to below 1, a multiple of 2^-53.
    pub fn uniform(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A number below `bound`, each equally likely (Lemire, "Fast random integer generation in an interval", 2019: the
    /// products that would favour some numbers are drawn again). 0 for a bound of 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        let unfair = bound.wrapping_neg().checked_rem(bound).unwrap_or(0);
        loop {
            let product = u128::from(self.next_u64()) * u128::from(bound);
            if product as u64 >= unfair {
                return (product >> 64) as u64;
            }
        }
    }

    /// Brings a list into random order, each order equally likely (Fisher and Yates).
    pub fn shuffle<T>(&mut self, list: &mut [T]) {
        for last in (1..list.len()).rev() {
            list.swap(last, self.below(last as u64 + 1) as usize);
        }
    }
}

/// The output function of SplitMix64.
fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_are_those_of_the_published_algorithm() {
        let mut rng = Rng::new(1_234_567);
        let drawn: [u64; 5] = std::array::from_fn(|_| rng.next_u64());
        let known = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(drawn, known);
    }

    #[test]
    fn below_keeps_its_bound_and_favours_nobody() {
        let mut rng = Rng::new(7);
        let mut counts = [0_u32; 6];
        for _ in 0..60_000 {
            counts[rng.below(6) as usize] += 1;
        }
        // Standard deviation of each count: sqrt(60000 * 1/6 * 5/6) = 91.
        assert!(counts.iter().all(|&n| n.abs_diff(10_000) < 400), "{counts:?}");
        assert_eq!(rng.below(1), 0);
        assert_eq!(rng.below(0), 0);
        // With a bound of 3/4 of the range, plain multiplication would hit a third of the numbers twice as often.
        let bound = 3 << 62;
        let low = (0..30_000).filter(|_| rng.below(bound).is_multiple_of(3)).count();
        assert!(low.abs_diff(10_000) < 400, "{low}");
    }

    #[test]
    fn every_order_of_four_is_equally_likely() {
        let mut rng = Rng::new(1);
        let mut counts = std::collections::BTreeMap::new();
        for _ in 0..24_000 {
            let mut list = [0_u8, 1, 2, 3];
            rng.shuffle(&mut list);
            *counts.entry(list).or_insert(0_u32) += 1;
        }
        assert_eq!(counts.len(), 24);
        let chi: f64 = counts.values().map(|&n| (f64::from(n) - 1000.0).powi(2) / 1000.0).sum();
        assert!(chi < 49.7, "chi-squared {chi}, 23 degrees of freedom: above 49.7 once in a thousand");
    }

    #[test]
    fn streams_of_one_seed_differ() {
        let first: std::collections::BTreeSet<u64> = (0..1000).map(|stream| Rng::stream(5, stream).next_u64()).collect();
        assert_eq!(first.len(), 1000);
        assert_ne!(Rng::stream(5, 0).next_u64(), Rng::stream(6, 0).next_u64());
    }

    #[test]
    fn uniform_stays_below_one() {
        let mut rng = Rng::new(3);
        let drawn: Vec<f64> = (0..10_000).map(|_| rng.uniform()).collect();
        assert!(drawn.iter().all(|x| (0.0..1.0).contains(x)));
        let mean = drawn.iter().sum::<f64>() / 10_000.0;
        assert!((mean - 0.5).abs() < 0.015, "{mean}");
    }
}
