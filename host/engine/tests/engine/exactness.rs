//! The exactness contract on random sets of jobs; and that the search would find a breach of it.

use crate::devices::Cpu;
#[cfg(not(feature = "broken"))]
use crate::devices::Leaky;
use crate::mix::search;

/// A new seed every time, unless PROPTEST_RNG_SEED names one.
#[cfg(not(feature = "broken"))]
#[test]
fn every_job_is_what_it_is_alone() {
    use std::hash::{BuildHasher, Hasher, RandomState};

    use proptest::test_runner::RngSeed;

    let cases = if cfg!(feature = "slow") { 5_000 } else { 200 };
    let seed = match proptest::test_runner::Config::default().rng_seed {
        RngSeed::Fixed(seed) => seed,
        RngSeed::Random => RandomState::new().build_hasher().finish(),
    };
    let seen = match search(&Cpu, cases, seed, 300) {
        Ok(seen) => seen,
        Err(difference) => {
            panic!("{difference}\nThe same again: PROPTEST_RNG_SEED={seed} cargo test -p nodus-engine --test engine exactness")
        }
    };
    assert!(seen.least() > u64::from(cases) / 20, "seed {seed} tried too little: {seen:?}");
}

/// A device whose results depend on how many rows a pass has breaks the contract, unless it says so: then each job gets passes of its own.
#[cfg(not(feature = "broken"))]
#[test]
fn jobs_are_exact_on_a_device_that_owns_up_to_a_breach() {
    let difference = search(&Leaky { owns_up: false }, 40, 1, 0).unwrap_err();
    assert!(difference.contains("is another than alone"), "it failed by something else: {difference}");
    search(&Leaky { owns_up: true }, 40, 1, 0).unwrap();
}

/// On a device that is broken on purpose the same search must fail.
#[cfg(feature = "broken")]
#[test]
fn a_broken_device_is_noticed() {
    match search(&Cpu, 40, 1, 0) {
        Ok(seen) => panic!("the search found nothing on a device that is broken on purpose, in {} jobs of each kind", seen.least()),
        Err(difference) => assert!(difference.contains("is another than alone"), "it failed by something else: {difference}"),
    }
}
