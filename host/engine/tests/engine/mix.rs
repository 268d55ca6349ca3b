//! Random sets of jobs in one engine against each of them alone: the exactness contract as one property.

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use nodus_engine::{CacheCounts, Counts, Engine, Options};
use nodus_protocol::{AdamW, Architecture, Batch, Client, Command, JobSlot, LayerSelection, LoraConfig, ModelConfig, Module, Sequence};
use proptest::prelude::*;
use proptest::test_runner::{Config, RngSeed, TestCaseError, TestRunner};

use crate::devices::Devices;
use crate::support::{TRUNK, adamw, bits, engine_with, model, sequence, slot, weighted};

/// Sequences that batches draw from.
const SEQUENCES: usize = 9;

/// A set of jobs, how their commands arrive, and the engine they share.
#[derive(Clone, Debug)]
struct Case {
    model: usize,
    threads: usize,
    /// Through the engine's thread, or in rounds without it.
    thread: bool,
    rows_max: usize,
    kept_bytes_max: u64,
    trunk_cache_bytes: u64,
    /// What jobs without a script of their own do.
    script: Vec<Act>,
    jobs: Vec<Job>,
}

#[derive(Clone, Debug)]
struct Job {
    rank: u32,
    alpha: f32,
    rslora: bool,
    dropout: f32,
    targets: Vec<Module>,
    /// Which layers, as a bit each; without any the top ones.
    layers: u32,
    seed: u64,
    cohort: Option<u64>,
    optimiser: AdamW,
    own_script: Option<Vec<Act>>,
    /// Rounds before its first command, and commands it has under way at once.
    start: usize,
    pace: usize,
    /// After how many commands it is cancelled.
    dies_after: Option<usize>,
}

/// What a job does; batches are places in the list of sequences.
#[derive(Clone, Debug)]
enum Act {
    Train(Vec<usize>),
    /// So many forward-backwards, then a step.
    Accumulate(Vec<Vec<usize>>),
    Evaluate(Vec<usize>),
    Export,
}

/// Three families, in sizes that are multiples of nothing; and two with heads of the widths that a card has products of its own for.
pub(crate) fn models() -> [ModelConfig; 5] {
    let sized = |architecture, layers, hidden, width, (heads, kv_heads, head_dim), vocabulary| {
        let mut model = model(architecture);
        (model.num_hidden_layers, model.hidden_size, model.intermediate_size, model.vocab_size) = (layers, hidden, width, vocabulary);
        (model.num_attention_heads, model.num_key_value_heads, model.head_dim) = (heads, kv_heads, head_dim);
        model.max_position_embeddings = 160;
        model
    };
    [
        sized(Architecture::Llama, 3, 22, 37, (3, 1, 6), 53),
        sized(Architecture::Qwen2, 2, 18, 29, (2, 2, 10), 61),
        sized(Architecture::Qwen3, 4, 26, 31, (4, 2, 4), 47),
        sized(Architecture::Qwen2, 2, 24, 40, (3, 1, 64), 59),
        sized(Architecture::Mistral, 2, 24, 40, (4, 2, 128), 43),
    ]
}

/// Sequences of all lengths, labelled in some rows, all or none.
fn sequences(model: usize) -> &'static [Arc<Sequence>] {
    static ALL: OnceLock<Vec<Vec<Arc<Sequence>>>> = OnceLock::new();
    let build = |model: &ModelConfig| {
        let plain = |(key, rows)| sequence(model, key, rows);
        // Where heads are wide, one and three tiles of keys.
        let [long, longest] = if model.head_dim >= 64 { [70, 140] } else { [9, 23] };
        let mut all: Vec<_> = (0..).zip([1, 2, 5, long, 14, longest, 7, 4]).map(plain).collect();
        all[6] = weighted(model, &all[6], 0.25);
        all[7] = weighted(model, &all[7], 0.0);
        // The tokens of another with other labels, up to the same last one.
        let twin = &all[4];
        let weights = (0..14).map(|row| f32::from([3, 4, 12].contains(&row))).collect();
        all.push(Arc::new(Sequence::new(model, twin.tokens().into(), twin.targets().into(), weights).unwrap()));
        assert_eq!(all.len(), SEQUENCES);
        all
    };
    &ALL.get_or_init(|| models().iter().map(build).collect())[model]
}

fn any_batch() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(0..SEQUENCES, 1..4)
}

fn any_script() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => any_batch().prop_map(Act::Train),
        1 => prop::collection::vec(any_batch(), 1..4).prop_map(Act::Accumulate),
        1 => any_batch().prop_map(Act::Evaluate),
        1 => Just(Act::Export),
    ];
    prop::collection::vec(act, 1..5)
}

fn any_job() -> impl Strategy<Value = Job> {
    let shape = (1..7_u32, prop::sample::select(vec![1.0_f32, 8.0]), any::<bool>(), prop::sample::select(vec![0.0_f32, 0.0, 0.25]));
    let place = (prop::sample::subsequence(Module::ALL.to_vec(), 1..=7), 0..16_u32);
    // The last learning rate makes weights that overflow in the next pass.
    let rates = prop::sample::select(vec![0.02_f32, 0.02, 0.1, 1e30]);
    let optimiser = (rates, prop::option::of(Just(0.5_f32))).prop_map(|(learning_rate, max_grad_norm)| AdamW {
        learning_rate,
        max_grad_norm,
        ..adamw()
    });
    let cohort = prop::sample::select(vec![None, Some(1), Some(1), Some(2)]);
    let own_script = prop::option::weighted(0.4, any_script());
    let times = (0..4_usize, 1..4_usize, prop::option::weighted(0.2, 0..6_usize));
    (shape, place, 0..3_u64, cohort, optimiser, own_script, times).prop_map(
        |((rank, alpha, rslora, dropout), (targets, layers), seed, cohort, optimiser, own_script, (start, pace, dies_after))| Job {
            rank,
            alpha,
            rslora,
            dropout,
            targets,
            layers,
            seed,
            cohort,
            optimiser,
            own_script,
            start,
            pace,
            dies_after,
        },
    )
}

fn any_case() -> impl Strategy<Value = Case> {
    let bounds = (
        prop::sample::select(vec![8192_usize, 40, 1]),
        prop::sample::select(vec![1_u64 << 30, 20_000, 0]),
        prop::sample::select(vec![1_u64 << 20, 6_000, 0]),
    );
    (0..models().len(), 1..3_usize, prop::bool::weighted(0.25), bounds, any_script(), prop::collection::vec(any_job(), 1..=12)).prop_map(
        |(model, threads, thread, (rows_max, kept_bytes_max, trunk_cache_bytes), script, jobs)| Case {
            model,
            threads,
            thread,
            rows_max,
            kept_bytes_max,
            trunk_cache_bytes,
            script,
            jobs,
        },
    )
}

impl Case {
    fn model(&self) -> ModelConfig {
        models()[self.model].clone()
    }

    /// A job's commands, in order.
    fn commands(&self, number: u32) -> Vec<Command> {
        let (job, slot, layers) = (&self.jobs[number as usize], slot(number), self.model().num_hidden_layers as u32);
        let chosen: Vec<u32> = (0..layers).filter(|layer| job.layers >> layer & 1 == 1).collect();
        let config = LoraConfig {
            rank: job.rank,
            alpha: job.alpha,
            rslora: job.rslora,
            dropout: job.dropout,
            targets: job.targets.clone(),
            layers: if chosen.is_empty() { LayerSelection::Last(1) } else { LayerSelection::Only(chosen) },
            overrides: Vec::new(),
        };
        let batch = |places: &Vec<usize>| Batch { sequences: places.iter().map(|place| sequences(self.model)[*place].clone()).collect() };
        let optimiser = job.optimiser;
        let mut commands = vec![Command::CreateAdapter { slot, trunk: TRUNK, config, seed: job.seed, cohort: job.cohort }];
        for act in job.own_script.as_ref().unwrap_or(&self.script) {
            match act {
                Act::Train(places) => commands.push(Command::TrainStep { slot, batch: batch(places), optimiser }),
                Act::Accumulate(batches) => {
                    commands.extend(batches.iter().map(|places| Command::ForwardBackward { slot, batch: batch(places) }));
                    commands.push(Command::OptimStep { slot, optimiser });
                }
                Act::Evaluate(places) => commands.push(Command::Evaluate { slot, batch: batch(places), first: 0 }),
                Act::Export => commands.push(Command::Export { slot }),
            }
        }
        commands.push(Command::Export { slot });
        commands
    }

    /// Every reply of a job that has a new engine to itself.
    fn alone<S: Devices>(&self, devices: &S, number: u32) -> Vec<String> {
        let options = Options { trunk_cache_bytes: 0, ..Options::default() };
        let mut engine = engine_with(&self.model(), devices.open(1), options);
        let replies = engine.execute_all(self.commands(number)).iter().map(bits).collect();
        devices.give_back(engine.into_device());
        replies
    }

    fn engine<S: Devices>(&self, devices: &S) -> Engine<S::Device> {
        let options = Options {
            linger: Duration::from_micros(200),
            rows_max: self.rows_max,
            kept_bytes_max: self.kept_bytes_max,
            trunk_cache_bytes: self.trunk_cache_bytes,
            trunk_cache_host_bytes: 0,
        };
        engine_with(&self.model(), devices.open(self.threads), options)
    }

    /// Every reply of each job, all in one engine without its thread, in rounds of commands that arrive at once.
    fn in_rounds<S: Devices>(&self, devices: &S) -> Result<(Vec<Vec<String>>, Counts), TestCaseError> {
        let mut engine = self.engine(devices);
        let empty = engine.counts().allocated_bytes;
        let mut queues: Vec<VecDeque<Command>> = (0..self.jobs.len() as u32).map(|number| self.commands(number).into()).collect();
        let mut replies = vec![Vec::new(); queues.len()];
        let mut sent = vec![0; queues.len()];
        let mut round = 0;
        while queues.iter().any(|queue| !queue.is_empty()) {
            let mut commands = Vec::new();
            for place in 0..queues.len() {
                // Whose commands come first changes from round to round.
                let number = (place + round) % queues.len();
                let job = &self.jobs[number];
                for _ in 0..if round < job.start { 0 } else { job.pace } {
                    if job.dies_after == Some(sent[number]) && !queues[number].is_empty() {
                        queues[number].clear();
                        commands.push((number, Command::DropJob { job: JobSlot(number as u32) }));
                    }
                    let Some(command) = queues[number].pop_front() else { break };
                    sent[number] += 1;
                    commands.push((number, command));
                }
            }
            let (numbers, commands): (Vec<usize>, Vec<Command>) = commands.into_iter().unzip();
            for (number, reply) in numbers.into_iter().zip(engine.execute_all(commands)) {
                replies[number].push(bits(&reply));
            }
            round += 1;
        }
        let sharing = engine.counts();
        engine.execute_all((0..self.jobs.len() as u32).map(|job| Command::DropJob { job: JobSlot(job) }).collect());
        let counts = engine.counts();
        prop_assert_eq!(counts.allocated_bytes, empty, "bytes are left over");
        let CacheCounts { device_bytes, host_bytes, .. } = counts.trunk_cache;
        prop_assert_eq!((device_bytes, host_bytes), (0, 0), "the trunk cache outlived its cohorts");
        for (job, bytes) in engine.jobs() {
            prop_assert_eq!(bytes.allocated_bytes, 0, "bytes of {:?}", job);
            for (index, adapter) in bytes.adapters {
                prop_assert_eq!(adapter.granted, adapter.zeroed, "bytes of adapter {} of {:?}", index, job);
            }
        }
        devices.give_back(engine.into_device());
        Ok((replies, sharing))
    }

    /// The same through the engine's thread, each job a task of its own.
    fn through_the_thread<S: Devices>(&self, devices: &S) -> (Vec<Vec<String>>, Counts) {
        async fn run(client: Client, number: u32, commands: Vec<Command>, job: Job) -> Vec<String> {
            for _ in 0..job.start * 3 {
                tokio::task::yield_now().await;
            }
            let (mut under_way, mut replies) = (VecDeque::new(), Vec::new());
            for (sent, command) in commands.into_iter().enumerate() {
                if job.dies_after == Some(sent) {
                    drop(client.call(Command::DropJob { job: JobSlot(number) }).await);
                    return replies;
                }
                if under_way.len() == job.pace {
                    replies.push(bits(&under_way.pop_front().unwrap().await));
                }
                under_way.push_back(client.send(command).await.unwrap());
            }
            for pending in under_way {
                replies.push(bits(&pending.await));
            }
            replies
        }
        let (client, handle) = self.engine(devices).spawn(5).unwrap();
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let replies = runtime.block_on(async {
            let start = |(number, job): (u32, &Job)| tokio::spawn(run(client.clone(), number, self.commands(number), job.clone()));
            let tasks: Vec<_> = (0..).zip(&self.jobs).map(start).collect();
            let mut replies = Vec::new();
            for task in tasks {
                replies.push(task.await.unwrap());
            }
            replies
        });
        let counts = handle.counts();
        drop(client);
        handle.join().unwrap();
        (replies, counts)
    }

    /// Every job that was not cancelled has the bits that it has alone.
    fn check<S: Devices>(&self, devices: &S, seen: &Cell<Seen>) -> Result<(), TestCaseError> {
        let (together, counts) = if self.thread { self.through_the_thread(devices) } else { self.in_rounds(devices)? };
        for (number, (job, together)) in (0..).zip(self.jobs.iter().zip(&together)) {
            let alone = self.alone(devices, number);
            seen.set(seen.get().with(&counts, &alone));
            if job.dies_after.is_none_or(|commands| commands >= alone.len()) {
                prop_assert_eq!(together.len(), alone.len());
                for (i, (together, alone)) in together.iter().zip(&alone).enumerate() {
                    prop_assert_eq!(together, alone, "reply {} of job {} is another than alone", i, number);
                }
            }
        }
        Ok(())
    }
}

/// What the cases of a search had in them, so that it is known to have tried what it is for.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Seen {
    jobs: u64,
    not_finite: u64,
    rows_shared: u64,
    cache_hits: u64,
    cache_evicted: u64,
    passes_shared: u64,
}

impl Seen {
    /// Jobs of the rarest kind.
    pub(crate) fn least(&self) -> u64 {
        let Self { jobs, not_finite, rows_shared, cache_hits, cache_evicted, passes_shared } = *self;
        [jobs, not_finite, rows_shared, cache_hits, cache_evicted, passes_shared].into_iter().min().unwrap_or(0)
    }

    fn with(self, counts: &Counts, alone: &[String]) -> Self {
        Self {
            jobs: self.jobs + 1,
            not_finite: self.not_finite + u64::from(alone.iter().any(|reply| reply.contains("NonFinite"))),
            rows_shared: self.rows_shared + u64::from(counts.row_halves_spared > 0),
            cache_hits: self.cache_hits + u64::from(counts.trunk_cache.hits > 0),
            cache_evicted: self.cache_evicted + u64::from(counts.trunk_cache.evicted > 0),
            passes_shared: self.passes_shared + u64::from(counts.members > counts.passes),
        }
    }
}

/// Draws so many cases from a seed; what they had in them.
///
/// # Errors
/// The seed, and the smallest case found in which a job has other bits than alone.
pub(crate) fn search<S: Devices>(devices: &S, cases: u32, seed: u64, max_shrink_iters: u32) -> Result<Seen, String> {
    let config = Config { cases, rng_seed: RngSeed::Fixed(seed), failure_persistence: None, max_shrink_iters, ..Config::default() };
    let seen = Cell::default();
    TestRunner::new(config).run(&any_case(), |case| case.check(devices, &seen)).map_err(|error| format!("seed {seed}: {error}"))?;
    Ok(seen.get())
}
