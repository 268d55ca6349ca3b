//! Times of whole training steps on a card, at the shapes of the table in kernels/NOTES.md, through the engine.
//!
//! Never measures what it has not checked, where `--check` is given: each job's losses and adapter bytes against its solo run.
//!
//! `steps [--only TEXT] [--steps N] [--check] [--beside] [--profile] [--plan] [--kept FOLDER]`; `NODUS_CUDA_LIBRARIES` names folders of
//! NVRTC and cuBLASLt. FOLDER keeps what the device keeps between starts: an empty one shows what the first start takes.
#![expect(clippy::disallowed_methods, reason = "an example has no host to hand it the environment")]
#![expect(clippy::print_stdout, reason = "a table for people")]
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a measurement that goes wrong stops")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use nodus_engine::plan::{matrices, widest};
use nodus_engine::{Engine, Options};
use nodus_kernels::cuda::{Cache, CudaDevice, CudaOptions, Launching, Precision, rows_max};
use nodus_kernels::{AttentionShape, DType, philox};
use nodus_protocol::{
    AdamW, AdapterSlot, Architecture, Batch, Command, EngineError, JobSlot, LayerSelection, LoraConfig, ModelConfig, Module, Normalisation,
    Reply, Sequence, TrunkSlot,
};

/// One row of the table.
struct Row {
    trunk: &'static str,
    layers: LayerSelection,
    jobs: u32,
    sequences: usize,
    length: usize,
    /// Members of one sweep, with one trunk below their cuts; else strangers.
    sweep: bool,
    reach_ms: Option<f64>,
    floor_ms: Option<f64>,
}

fn rows() -> Vec<Row> {
    // Short rows of a trunk first: one that follows a row of seconds finds the card's clock low.
    let (all, top) = (LayerSelection::All, LayerSelection::Last(1));
    let row = |trunk, layers: &LayerSelection, jobs, (sequences, length), reach_ms, floor_ms| Row {
        trunk,
        layers: layers.clone(),
        jobs,
        sequences,
        length,
        sweep: *layers != LayerSelection::All,
        reach_ms,
        floor_ms,
    };
    vec![
        row("qwen2.5-0.5b", &all, 1, (1, 128), Some(4.5), None),
        row("qwen2.5-0.5b", &all, 16, (1, 128), Some(10.0), Some(5.5)),
        row("llama-1.1b", &top, 1, (1, 256), Some(2.2), None),
        row("llama-1.1b", &top, 16, (1, 256), Some(5.0), Some(3.2)),
        row("llama-1.1b", &top, 1, (4, 512), Some(8.5), Some(6.3)),
        row("llama-1.1b", &top, 16, (4, 512), Some(32.0), Some(25.0)),
        row("llama-1.1b", &top, 32, (4, 512), None, None),
        row("llama-8b", &top, 1, (1, 256), Some(9.5), Some(5.8)),
        row("llama-8b", &top, 16, (1, 256), Some(30.0), Some(22.0)),
        row("llama-8b", &top, 1, (4, 512), Some(54.0), Some(46.0)),
        row("llama-8b", &top, 16, (4, 512), Some(205.0), Some(165.0)),
        row("llama-8b", &top, 32, (4, 512), None, None),
    ]
}

/// A trunk of a published shape.
fn model(name: &str) -> ModelConfig {
    let llama = |hidden, intermediate, layers, (heads, kv_heads, head_dim), vocabulary, rope_theta| ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: hidden,
        intermediate_size: intermediate,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: kv_heads,
        head_dim,
        vocab_size: vocabulary,
        max_position_embeddings: 2048,
        rms_norm_eps: 1e-5,
        rope_theta,
        rope_scaling: None,
        sliding_window: None,
        qkv_bias: false,
        tie_word_embeddings: false,
        eos_token_id: None,
        bos_token_id: None,
    };
    match name {
        "qwen2.5-0.5b" => ModelConfig {
            architecture: Architecture::Qwen2,
            qkv_bias: true,
            tie_word_embeddings: true,
            ..llama(896, 4864, 24, (14, 2, 64), 151_936, 1e6)
        },
        "llama-1.1b" => llama(2048, 5632, 22, (32, 4, 64), 32_000, 1e4),
        "llama-8b" => llama(4096, 14_336, 32, (32, 8, 128), 128_256, 5e5),
        other => panic!("no trunk {other}"),
    }
}

fn optimiser() -> AdamW {
    AdamW {
        learning_rate: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        max_grad_norm: Some(1.0),
        normalisation: Normalisation::WeightSum,
    }
}

fn slot(job: u32) -> AdapterSlot {
    AdapterSlot { job: JobSlot(job), index: 0 }
}

impl Row {
    fn name(&self) -> String {
        let layers = if self.layers == LayerSelection::All { "all layers" } else { "top layer" };
        format!("{}, {layers}, {}x{}, {} job{}", self.trunk, self.sequences, self.length, self.jobs, if self.jobs == 1 { "" } else { "s" })
    }

    /// What a job trains on at a step. Members of a sweep have the same.
    fn batch(&self, model: &ModelConfig, job: u32, step: u32) -> Batch {
        let job = if self.sweep { 0 } else { job };
        let sequence = |number: usize| {
            let token = |i: usize| philox(11, [i as u32, number as u32, job, step])[0] % model.vocab_size as u32;
            let ids: Vec<u32> = (0..=self.length).map(token).collect();
            let sequence = Sequence::new(model, ids[..self.length].into(), ids[1..].into(), vec![1.0; self.length]);
            Arc::new(sequence.unwrap())
        };
        Batch { sequences: (0..self.sequences).map(sequence).collect() }
    }

    fn create(&self, job: u32) -> Command {
        let config = LoraConfig {
            rank: 8,
            alpha: 16.0,
            rslora: false,
            dropout: 0.0,
            targets: Module::ALL.into(),
            layers: self.layers.clone(),
            overrides: Vec::new(),
        };
        let cohort = self.sweep.then_some(1);
        Command::CreateAdapter { slot: slot(job), trunk: TrunkSlot(0), config, seed: u64::from(job), cohort }
    }

    fn step(&self, model: &ModelConfig, jobs: impl Iterator<Item = u32>, step: u32) -> Vec<Command> {
        jobs.map(|job| Command::TrainStep { slot: slot(job), batch: self.batch(model, job, step), optimiser: optimiser() }).collect()
    }
}

/// A reply's numbers as bits.
fn bits(reply: &Result<Reply, EngineError>) -> Vec<u64> {
    match reply.as_ref().unwrap() {
        Reply::Step(report) => vec![report.loss.to_bits().into(), report.grad_norm.to_bits().into()],
        Reply::Weights(weights) => {
            weights.modules.iter().flat_map(|module| module.a.iter().chain(&module.b)).map(|value| u64::from(value.to_bits())).collect()
        }
        _ => Vec::new(),
    }
}

/// Steps that are compared with solo runs.
const CHECKED_STEPS: u32 = 4;

struct Bench {
    engine: Engine<CudaDevice>,
    model: ModelConfig,
}

impl Bench {
    /// Everything that these jobs answer in their first steps, and their adapters then.
    fn answers(&mut self, row: &Row, jobs: &[u32]) -> Vec<Vec<u64>> {
        let mut answers = vec![Vec::new(); jobs.len()];
        self.engine.execute_all(jobs.iter().map(|job| row.create(*job)).collect());
        for step in 0..CHECKED_STEPS {
            let replies = self.engine.execute_all(row.step(&self.model, jobs.iter().copied(), step));
            answers.iter_mut().zip(&replies).for_each(|(answers, reply)| answers.extend(bits(reply)));
        }
        for (job, answers) in jobs.iter().zip(&mut answers) {
            answers.extend(bits(&self.engine.execute(Command::Export { slot: slot(*job) })));
            self.engine.execute(Command::DropJob { job: JobSlot(*job) }).unwrap();
        }
        answers
    }

    fn check(&mut self, row: &Row) -> &'static str {
        let jobs: Vec<u32> = (0..row.jobs).collect();
        let together = self.answers(row, &jobs);
        let equal = jobs.iter().zip(&together).all(|(job, answers)| self.answers(row, &[*job])[0] == *answers);
        if equal { "equal" } else { "DIFFERENT" }
    }

    fn time(&mut self, row: &Row, steps: u32) -> Times {
        let (start, counts) = (self.engine.device().launches(), self.engine.counts());
        for job in 0..row.jobs {
            self.engine.execute(row.create(job)).unwrap();
        }
        let (mut wall, mut host) = (Vec::new(), Vec::new());
        for step in 0..steps + 4 {
            let commands = row.step(&self.model, 0..row.jobs, step);
            let (begin, waited_ns) = (Instant::now(), self.engine.device().waited_ns());
            let replies = self.engine.execute_all(commands);
            let wall_ms = begin.elapsed().as_secs_f64() * 1e3;
            let waited_ms = (self.engine.device().waited_ns() - waited_ns) as f64 / 1e6;
            assert!(replies.iter().all(Result::is_ok), "{replies:?}");
            // The first are made ready: algorithms, memory, graphs.
            if step >= 4 {
                wall.push(wall_ms);
                host.push(wall_ms - waited_ms);
            }
        }
        for job in 0..row.jobs {
            self.engine.execute(Command::DropJob { job: JobSlot(job) }).unwrap();
        }
        let middle = |times: &mut Vec<f64>| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        };
        let (end, end_counts) = (self.engine.device().launches(), self.engine.counts());
        let per_step = |ns: u64| ns as f64 / 1e6 / f64::from(steps + 4);
        Times {
            wall_ms: middle(&mut wall),
            host_ms: middle(&mut host),
            record_ms: per_step(end.record_ns - start.record_ns),
            launch_ms: per_step(end.launch_ns - start.launch_ns),
            forming_ms: per_step(end_counts.forming_ns - counts.forming_ns),
            optimiser_ms: per_step(end_counts.step_ns - counts.step_ns),
            launches: (end.all - start.all) / u64::from(steps + 4),
        }
    }

    /// One line of the table, and where `beside` asks for it the same step as the library likes its products, and without graphs.
    fn line(&mut self, row: &Row, steps: u32, beside: bool) -> String {
        let times = self.time(row, steps);
        let (mut unpinned, mut single) = ("-".to_owned(), "-".to_owned());
        if beside {
            self.engine.device_mut().unpin(true);
            unpinned = format!("{:.2}", self.time(row, steps).wall_ms);
            self.engine.device_mut().unpin(false);
            self.engine.device_mut().launch_by(Launching::NoGraphs);
            single = format!("{:.2}", self.time(row, steps).wall_ms);
            self.engine.device_mut().launch_by(Launching::Best);
        }
        let [reach, floor] = [row.reach_ms, row.floor_ms].map(|ms| ms.map_or("-".to_owned(), |ms| ms.to_string()));
        let Times { wall_ms, host_ms, record_ms, launch_ms, forming_ms, optimiser_ms, launches } = times;
        let parts = [host_ms, record_ms, launch_ms, forming_ms, optimiser_ms].map(|ms| format!("{ms:.2}")).join(" | ");
        let name = row.name();
        format!("| {name} | {wall_ms:.2} | {reach} | {floor} | {unpinned} | {single} | {parts} | {launches} |")
    }
}

/// Milliseconds of a step: medians of the whole and of what the host does while the card is not waited for; means of the parts, in which the
/// first steps are counted too.
struct Times {
    wall_ms: f64,
    host_ms: f64,
    record_ms: f64,
    launch_ms: f64,
    forming_ms: f64,
    optimiser_ms: f64,
    launches: u64,
}

/// A folder of what a device keeps.
struct Folder(PathBuf);

impl Cache for Folder {
    fn get(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    fn put(&self, name: &str, bytes: &[u8]) {
        std::fs::write(self.0.join(name), bytes).unwrap();
    }
}

fn bench(name: &str, options: CudaOptions) -> Bench {
    let model = model(name);
    let engine = |device| {
        let options = Options {
            rows_max: rows_max(widest(&model), model.num_attention_heads * model.head_dim),
            kept_bytes_max: 100 << 30,
            trunk_cache_bytes: 0,
            trunk_cache_host_bytes: 0,
            ..Options::default()
        };
        let start = Instant::now();
        let mut engine = Engine::new(device, options).with_clock(move || u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        engine.add_random_trunk(&model, DType::BF16, 1).unwrap();
        engine
    };
    let start = Instant::now();
    let mut device = CudaDevice::open(0, Precision::Bf16, options).unwrap();
    device.plan_matrices(&matrices(&model)).unwrap();
    let opened = start.elapsed().as_secs_f64();
    let mut device = engine(device).into_device();
    let loaded = start.elapsed().as_secs_f64();
    let heads =
        AttentionShape { heads: model.num_attention_heads, kv_heads: model.num_key_value_heads, head_dim: model.head_dim, window: None };
    let report = device.prove(&[heads]).unwrap();
    println!(
        "{name}: opened and planned in {opened:.2} s, weights in {:.2} s, gate in {:.2} s",
        loaded - opened,
        start.elapsed().as_secs_f64() - loaded
    );
    if !report.passed() {
        println!("{report}");
    }
    Bench { engine: engine(device), model }
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has = |name: &str| arguments.iter().any(|argument| argument == name);
    let value = |name: &str| arguments.iter().position(|argument| argument == name).and_then(|at| arguments.get(at + 1));
    let only = value("--only").map_or("", String::as_str);
    let steps = value("--steps").map_or(20, |text| text.parse().unwrap());
    let mut rows: Vec<Row> = rows().into_iter().filter(|row| row.name().contains(only)).collect();
    let columns = [
        "work",
        "ms",
        "reach",
        "floor",
        "unpinned",
        "without graphs",
        "host",
        "recording",
        "launching",
        "forming",
        "optimiser",
        "launches",
    ];
    println!("| {} |\n|{}", columns.join(" | "), "---|".repeat(columns.len()));
    while let Some(name) = rows.first().map(|row| row.trunk) {
        let (these, others) = rows.into_iter().partition(|row| row.trunk == name);
        rows = others;
        let library_folders = std::env::var("NODUS_CUDA_LIBRARIES").map(|text| text.split(':').map(str::to_owned).collect());
        let cache = value("--kept").map(|folder| Box::new(Folder(folder.into())) as Box<dyn Cache>);
        let options = CudaOptions { library_folders: library_folders.unwrap_or_default(), cache, ..CudaOptions::default() };
        let mut bench = bench(name, options);
        for row in &these {
            if has("--check") {
                println!("{}: {} to solo", row.name(), bench.check(row));
            }
            println!("{}", bench.line(row, steps, has("--beside")));
            if has("--profile") {
                bench.engine.device_mut().begin_profile();
                bench.time(row, 2);
                let mut profile: Vec<_> = bench.engine.device_mut().end_profile().into_iter().collect();
                profile.sort_by(|(_, (_, a)), (_, (_, b))| b.total_cmp(a));
                for (name, (count, ms)) in profile.iter().take(40) {
                    println!("{:>8.3} ms {:>6.1} us x {:<4} {name}", ms / 6.0, ms / *count as f64 * 1e3, count / 6);
                }
            }
        }
        if has("--plan") {
            print!("{}", bench.engine.device().described_products());
        }
    }
}
