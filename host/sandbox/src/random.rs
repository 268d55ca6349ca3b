//! The guest's random sources: ChaCha20 keyed by the job's seed.
//!
//! Never the system's randomness, so that a job's results are a function of what it was given.

use chacha20::ChaCha20Rng;
use chacha20::rand_core::{Rng, SeedableRng};
use wasmtime_wasi::p2::bindings::random::{insecure, insecure_seed, random};

use crate::failure::Stop;
use crate::state::State;

/// The sources of one job. Each is a stream of its own, so that reading one does not move another.
pub(crate) struct Random {
    secure: ChaCha20Rng,
    insecure: ChaCha20Rng,
    seed: (u64, u64),
}

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        let mut start = source(seed, 2);
        Self { secure: source(seed, 0), insecure: source(seed, 1), seed: (start.next_u64(), start.next_u64()) }
    }
}

fn source(seed: u64, stream: u64) -> ChaCha20Rng {
    let mut key = *b"........ nodus sandbox random v1";
    for (to, from) in key.iter_mut().zip(seed.to_le_bytes()) {
        *to = from;
    }
    let mut source = ChaCha20Rng::from_seed(key);
    source.set_stream(stream);
    source
}

fn bytes(source: &mut ChaCha20Rng, needed: u64, allowed: u64) -> wasmtime::Result<Vec<u8>> {
    let length = usize::try_from(needed).ok().filter(|_| needed <= allowed).ok_or(Stop::RandomBytes { needed })?;
    let mut bytes = vec![0; length];
    source.fill_bytes(&mut bytes);
    Ok(bytes)
}

impl random::Host for State {
    fn get_random_bytes(&mut self, length: u64) -> wasmtime::Result<Vec<u8>> {
        bytes(&mut self.random.secure, length, self.limits.random_bytes)
    }

    fn get_random_u64(&mut self) -> wasmtime::Result<u64> {
        Ok(self.random.secure.next_u64())
    }
}

impl insecure::Host for State {
    fn get_insecure_random_bytes(&mut self, length: u64) -> wasmtime::Result<Vec<u8>> {
        bytes(&mut self.random.insecure, length, self.limits.random_bytes)
    }

    fn get_insecure_random_u64(&mut self) -> wasmtime::Result<u64> {
        Ok(self.random.insecure.next_u64())
    }
}

impl insecure_seed::Host for State {
    fn insecure_seed(&mut self) -> wasmtime::Result<(u64, u64)> {
        Ok(self.random.seed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_depend_on_the_seed_and_not_on_each_other() {
        let (mut a, mut b, mut other) = (Random::new(7), Random::new(7), Random::new(8));
        b.insecure.next_u64();
        let (first, again) = (a.secure.next_u64(), b.secure.next_u64());
        assert_eq!(first, again);
        assert_ne!(first, a.insecure.next_u64());
        assert_ne!(first, other.secure.next_u64());
        assert_eq!(a.seed, b.seed);
        assert!(bytes(&mut a.secure, 9, 8).is_err());
    }
}
