//! Exactness: a job's bits do not depend on who shares its passes, on threads, or on what is kept and what computed again.

use nodus_engine::Options;
use nodus_kernels::cpu::CpuDevice;
use nodus_protocol::{Architecture, Batch, Command, LayerSelection, LoraConfig, ModelConfig, Module};
use proptest::prelude::*;

use crate::support::{
    all_linear, batch, bits, create, engine, engine_with, evaluate, forward_backward, lora, model, optim_step, slot, train,
};

/// A job: what it creates, and what it does on each batch.
#[derive(Clone, Debug)]
struct Job {
    config: LoraConfig,
    cohort: Option<u64>,
    batches: Vec<Batch>,
    /// Whether it evaluates before each step, and whether it steps in two calls.
    habits: (bool, bool),
}

impl Job {
    fn commands(&self, number: u32) -> Vec<Command> {
        let slot = slot(number);
        let mut commands = vec![create(slot, self.config.clone(), self.cohort)];
        for batch in &self.batches {
            if self.habits.0 {
                commands.push(evaluate(slot, batch));
            }
            match self.habits.1 {
                true => commands.extend([forward_backward(slot, batch), optim_step(slot)]),
                false => commands.push(train(slot, batch)),
            }
        }
        commands.push(Command::Export { slot });
        commands
    }
}

/// Every reply of every job, as bits, where all jobs send all their commands at once.
fn run(model: &ModelConfig, jobs: &[(u32, &Job)], threads: usize, options: Options) -> (Vec<Vec<String>>, u64) {
    let mut engine = engine_with(model, CpuDevice::new(threads).unwrap(), options);
    let commands: Vec<Vec<Command>> = jobs.iter().map(|(number, job)| job.commands(*number)).collect();
    let counts: Vec<usize> = commands.iter().map(Vec::len).collect();
    let mut replies = engine.execute_all(commands.into_iter().flatten().collect()).into_iter();
    let replies = counts.iter().map(|count| replies.by_ref().take(*count).map(|reply| bits(&reply)).collect()).collect();
    (replies, engine.counts().row_halves_spared)
}

fn check(model: &ModelConfig, jobs: &[Job], threads: usize, options: Options) -> u64 {
    let numbered: Vec<(u32, &Job)> = (0..).zip(jobs).collect();
    let (together, spared) = run(model, &numbered, threads, options);
    for (job, together) in numbered.iter().zip(&together) {
        let (alone, _) = run(model, &[*job], 1, Options::default());
        assert!(alone[0].iter().all(|reply| !reply.starts_with("Err")), "{:?}", alone[0]);
        for (i, (together, alone)) in together.iter().zip(&alone[0]).enumerate() {
            assert_eq!(together, alone, "reply {i} of job {} among {}: {:?}", job.0, jobs.len(), job.1.config);
        }
    }
    spared
}

fn job(config: LoraConfig, cohort: Option<u64>, batches: &[&Batch]) -> Job {
    Job { config, cohort, batches: batches.iter().map(|batch| (*batch).clone()).collect(), habits: (false, false) }
}

#[test]
fn unrelated_jobs_of_all_kinds_are_what_they_are_alone() {
    for architecture in [Architecture::Llama, Architecture::Mistral, Architecture::Qwen2, Architecture::Qwen3] {
        let model = model(architecture);
        let (a, b, c) = (batch(&model, 1, &[9, 4]), batch(&model, 2, &[17]), batch(&model, 3, &[1, 6, 30, 2]));
        let mut dropped = lora(3, &[Module::QProj, Module::UpProj], LayerSelection::Only(vec![1, 3]));
        dropped.dropout = 0.3;
        let jobs = [
            job(all_linear(), None, &[&a, &b, &c]),
            job(lora(2, &[Module::DownProj], LayerSelection::Last(1)), None, &[&c, &c, &a]),
            job(dropped, None, &[&b, &a, &b]),
            job(lora(5, &[Module::OProj], LayerSelection::Last(2)), None, &[&a, &b, &c]),
            job(lora(1, &[Module::GateProj, Module::KProj], LayerSelection::Only(vec![2])), None, &[&c, &a, &a]),
        ];
        assert_eq!(check(&model, &jobs, 1, Options::default()), 0, "jobs without a cohort shared rows");
        check(&model, &jobs, 2, Options { kept_bytes_max: 20_000, ..Options::default() });
    }
}

#[test]
fn a_cohort_shares_rows_below_the_cuts_and_nothing_else() {
    let model = model(Architecture::Llama);
    let (a, b) = (batch(&model, 1, &[9, 4]), batch(&model, 2, &[17]));
    let top = |rank| lora(rank, &[Module::QProj, Module::VProj], LayerSelection::Last(1));
    let jobs: Vec<Job> = (1..5).map(|rank| job(top(rank), Some(1), &[&a, &b])).collect();
    // 3 of 4 members are spared the 6 half layers below the last layer, on as many rows as the last label needs.
    let rows = |batch: &Batch| batch.sequences.iter().map(|s| s.weights().iter().rposition(|w| *w > 0.0).unwrap() as u64 + 1).sum::<u64>();
    assert_eq!(check(&model, &jobs, 1, Options::default()), 3 * 6 * (rows(&a) + rows(&b)));

    // Different cuts, also inside one layer, a member that evaluates, one with its own data, one of another cohort, one of none.
    let mut mixed = vec![
        job(lora(2, &[Module::QProj], LayerSelection::Last(2)), Some(1), &[&a, &b]),
        job(lora(2, &[Module::DownProj], LayerSelection::Last(2)), Some(1), &[&a, &b]),
        job(top(3), Some(1), &[&a, &b]),
        job(top(3), Some(1), &[&b, &b]),
        job(top(3), Some(2), &[&a, &b]),
        job(lora(4, &[Module::UpProj], LayerSelection::Last(1)), Some(1), &[&a, &b]),
        job(all_linear(), Some(1), &[&a, &b]),
        job(top(1), None, &[&a, &b]),
    ];
    mixed[1].habits = (true, false);
    mixed[2].habits = (false, true);
    for kept_bytes_max in [0, 15_000, 1 << 30] {
        for threads in [1, 2] {
            let spared = check(&model, &mixed, threads, Options { kept_bytes_max, ..Options::default() });
            assert!(spared > 0, "nothing was shared");
        }
    }
}

#[test]
fn a_bound_on_rows_splits_passes_without_a_trace() {
    let model = model(Architecture::Llama);
    let a = batch(&model, 1, &[9, 4]);
    let jobs: Vec<Job> = (0..4).map(|_| job(all_linear(), None, &[&a, &a])).collect();
    check(&model, &jobs, 1, Options { rows_max: 30, ..Options::default() });
    check(&model, &jobs, 1, Options { rows_max: 1, ..Options::default() });
}

#[test]
fn keeping_and_computing_again_give_equal_bits_and_so_do_thread_counts() {
    for architecture in [Architecture::Llama, Architecture::Qwen3] {
        let model = model(architecture);
        let mut config = all_linear();
        config.dropout = 0.2;
        let one = job(config, None, &[&batch(&model, 5, &[30, 12, 7]), &batch(&model, 6, &[8])]);
        let mut seen = Vec::new();
        for (threads, kept_bytes_max) in [(1, 1 << 30), (2, 1 << 30), (1, 0), (2, 40_000)] {
            seen.push(run(&model, &[(0, &one)], threads, Options { kept_bytes_max, ..Options::default() }).0);
        }
        assert!(seen.iter().all(|replies| replies == &seen[0]));
    }
}

#[test]
fn an_engine_used_before_gives_what_a_new_one_gives() {
    let model = model(Architecture::Llama);
    let a = batch(&model, 1, &[9, 4]);
    let one = job(all_linear(), None, &[&a, &a]);
    let mut used = engine(&model);
    used.execute_all(job(lora(6, &Module::ALL, LayerSelection::All), None, &[&a, &a]).commands(4));
    used.execute(Command::DropAdapter { slot: slot(4) }).unwrap();
    let second: Vec<String> = used.execute_all(one.commands(0)).iter().map(bits).collect();
    assert_eq!(second, run(&model, &[(0, &one)], 1, Options::default()).0[0]);
}

/// A job whose batches are places in a list.
#[derive(Clone, Debug)]
struct Draft {
    config: LoraConfig,
    cohort: Option<u64>,
    picks: Vec<usize>,
    habits: (bool, bool),
}

fn any_job() -> impl Strategy<Value = Draft> {
    let layers = prop_oneof![
        Just(LayerSelection::All),
        (1..5_u32).prop_map(LayerSelection::Last),
        prop::sample::subsequence(vec![0, 1, 2, 3_u32], 1..4).prop_map(LayerSelection::Only),
    ];
    let targets = prop::sample::subsequence(Module::ALL.to_vec(), 1..7);
    let dropout = prop_oneof![Just(0.0_f32), Just(0.25)];
    let config = (targets, layers, 1..6_u32, dropout).prop_map(|(targets, layers, rank, dropout)| {
        let plain = lora(rank, &targets, layers);
        LoraConfig { dropout, ..plain }
    });
    let cohort = prop_oneof![Just(None), Just(Some(1)), Just(Some(1)), Just(Some(2))];
    let picks = prop::collection::vec(0..3_usize, 1..3);
    (config, cohort, picks, any::<(bool, bool)>()).prop_map(|(config, cohort, picks, habits)| Draft { config, cohort, picks, habits })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    /// Any mix of jobs: every reply of each has the bits it has alone.
    #[test]
    fn any_mix_is_what_its_jobs_are_alone(
        drafts in prop::collection::vec(any_job(), 2..6),
        kept_bytes_max in prop_oneof![Just(0_u64), Just(30_000), Just(1 << 30)],
    ) {
        let model = model(Architecture::Qwen3);
        let batches = [batch(&model, 1, &[9, 4]), batch(&model, 2, &[17]), batch(&model, 3, &[1, 2, 12])];
        let build = |draft: Draft| {
            let picked = draft.picks.iter().map(|pick| batches[*pick].clone()).collect();
            Job { config: draft.config, cohort: draft.cohort, batches: picked, habits: draft.habits }
        };
        let jobs: Vec<Job> = drafts.into_iter().map(build).collect();
        check(&model, &jobs, 2, Options { kept_bytes_max, ..Options::default() });
    }
}
