//! The engine on a card: reference runs, the search for a job that is not bit-equal to its solo run, and what a kernel that breaks
//! exactness leads to. Where there is no card, each says in one line that it was skipped.
//!
//! `NODUS_TEST_CASES` is the number of cases of the search (24), `NODUS_TEST_SECONDS` after how long it starts no more.
#![expect(clippy::disallowed_methods, reason = "a test has no main to hand it the environment")]

use std::time::Instant;

use nodus_kernels::cuda::Precision;

use crate::devices::Cuda;
use crate::golden::{self, Limits};
use crate::mix::{models, search};
use crate::snapshot::goes_on;
use crate::support::llama;

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap_or_else(|error| panic!("{name}: {error}")))
}

/// The search in slices, each from a seed of its own, until there were enough cases or the time is up.
fn searched(test: &str, precision: Precision, seed: u64) {
    let Some(devices) = Cuda::new(test, precision, models().to_vec()) else { return };
    let (start, cases, seconds) = (Instant::now(), number("NODUS_TEST_CASES", 24), number("NODUS_TEST_SECONDS", 600));
    let (mut done, mut least) = (0, 0);
    while done < cases && start.elapsed().as_secs() < seconds {
        let slice = (cases - done).min(8);
        match search(&devices, slice as u32, seed + done, 40) {
            Ok(seen) => least += seen.least(),
            Err(difference) => panic!("{test}: {difference}\n{}", devices.report()),
        }
        done += slice;
        // A search that is cut off has said how far it came.
        println!("{test}: {done} of {cases} cases");
    }
    println!("{test}: {done} of {cases} cases, {least} jobs at least of each kind, in {:.1} s", start.elapsed().as_secs_f64());
}

fn seed() -> u64 {
    number("NODUS_TEST_SEED", 1)
}

#[test]
#[cfg_attr(feature = "broken", ignore = "broken on purpose")]
fn every_job_is_what_it_is_alone_in_f32() {
    searched("every_job_is_what_it_is_alone_in_f32", Precision::F32, seed());
}

#[test]
#[cfg_attr(feature = "broken", ignore = "broken on purpose")]
fn every_job_is_what_it_is_alone_in_bf16() {
    searched("every_job_is_what_it_is_alone_in_bf16", Precision::Bf16, seed());
}

/// Among these sets is the one in which two algorithms of one product, for few rows and for more, were found to add in different orders: one result in
/// 100,000 is another in bf16 then, and a job's bits depended on its company.
#[test]
#[cfg_attr(feature = "broken", ignore = "broken on purpose")]
fn products_of_few_rows_and_of_more_are_added_in_one_order() {
    let test = "products_of_few_rows_and_of_more_are_added_in_one_order";
    let Some(devices) = Cuda::new(test, Precision::Bf16, models().to_vec()) else { return };
    if let Err(difference) = search(&devices, 8, 11_104, 0) {
        panic!("{test}: {difference}\n{}", devices.report());
    }
}

#[test]
fn a_job_goes_on_elsewhere_with_the_same_bits_wherever_it_stood() {
    for precision in [Precision::F32, Precision::Bf16] {
        let Some(cuda) = Cuda::new("a_job_goes_on_elsewhere_with_the_same_bits_wherever_it_stood", precision, vec![llama()]) else {
            return;
        };
        goes_on(&cuda);
    }
}

#[test]
#[cfg_attr(feature = "broken", ignore = "broken on purpose")]
fn runs_agree_with_transformers_and_peft_in_f32() {
    golden::on_a_card("runs_agree_with_transformers_and_peft_in_f32", Precision::F32, Limits::F32);
}

#[test]
#[cfg_attr(feature = "broken", ignore = "broken on purpose")]
fn runs_stay_close_to_transformers_and_peft_in_bf16() {
    golden::on_a_card("runs_stay_close_to_transformers_and_peft_in_bf16", Precision::Bf16, Limits::Bf16);
}

/// A kernel that looks at the number of rows: the gate names it, and every job is exact all the same, since it gets passes of its own.
#[cfg(feature = "broken-kernel")]
#[test]
fn jobs_are_exact_beside_a_broken_kernel() {
    for precision in [Precision::F32, Precision::Bf16] {
        let test = "jobs_are_exact_beside_a_broken_kernel";
        let Some(devices) = Cuda::new(test, precision, models().to_vec()) else { return };
        assert_eq!(devices.report().failed(), ["swiglu"], "{}", devices.report());
        searched(test, precision, 1);
    }
}
