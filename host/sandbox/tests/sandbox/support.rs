//! A guest, an engine and services to test with. The engine computes nothing: its answers are fixed functions of what it is sent.

use std::collections::HashMap;
use std::process::Command as Process;
use std::sync::{Arc, Mutex, OnceLock};

use async_trait::async_trait;
use nodus_protocol::wire::{Grants, connect, serve as serve_wire};
use nodus_protocol::{
    AdapterWeights, Architecture, Client, Command, Digest, EngineError, ErrorKind, Inbox, JobSlot, LossSums, ModelConfig, ModuleWeights,
    Reply, Request, Sequence, SequenceLoss, StepReport, TrunkSlot, channel,
};
use nodus_sandbox::services::{Dataset, Event, Level, Refusal, Services, Text, Trunk};
use nodus_sandbox::{JobEnd, JobSpec, Limits, Sandbox, SandboxOptions, StopFlag, ValidComponent};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// The process's one sandbox.
pub(crate) fn sandbox() -> &'static Sandbox {
    static SANDBOX: OnceLock<Sandbox> = OnceLock::new();
    SANDBOX.get_or_init(|| Sandbox::new(SandboxOptions::default()).unwrap())
}

/// The guest of `tests/guest`, built once.
pub(crate) fn guest() -> &'static ValidComponent {
    static GUEST: OnceLock<ValidComponent> = OnceLock::new();
    GUEST.get_or_init(|| sandbox().validate(&guest_bytes()).unwrap())
}

#[expect(clippy::disallowed_methods, reason = "a test reads what it built")]
fn guest_bytes() -> Vec<u8> {
    let target = concat!(env!("CARGO_TARGET_TMPDIR"), "/sandbox-guest");
    let manifest = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/guest/Cargo.toml");
    let mut cargo = Process::new(env!("CARGO"));
    cargo.args(["build", "--quiet", "--release", "--target", "wasm32-wasip2", "--manifest-path", manifest, "--target-dir", target]);
    assert!(cargo.status().unwrap().success(), "the guest does not build; `rustup target add wasm32-wasip2` may be missing");
    std::fs::read(format!("{target}/wasm32-wasip2/release/sandbox_guest.wasm")).unwrap()
}

/// How the engine behaves.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Engine {
    /// Answers at once.
    Prompt,
    /// Never answers a step or a loss.
    Silent,
    /// The first step goes non-finite.
    NonFinite,
    /// Answers every loss by a defect of its own.
    Defective,
    /// Answers after everybody has begun to wait, as the services do then too.
    Late,
}

/// A run that is set up.
pub(crate) struct Job {
    pub(crate) spec: JobSpec,
    pub(crate) services: Fake,
    /// What the engine was asked, in order.
    pub(crate) commands: Arc<Mutex<Vec<String>>>,
    pub(crate) events: Arc<Mutex<Vec<Event>>>,
    threads: Vec<oneshot::Sender<()>>,
}

/// A run that ended.
#[derive(Debug)]
pub(crate) struct Ran {
    pub(crate) end: JobEnd,
    pub(crate) events: Vec<Event>,
    pub(crate) commands: Vec<String>,
    /// The questions at which it was noted that the job is to stop.
    pub(crate) noted: Vec<u64>,
}

impl Job {
    pub(crate) fn new(params: &str) -> Self {
        Self::on(Engine::Prompt, params)
    }

    pub(crate) fn on(engine: Engine, params: &str) -> Self {
        let (client, inbox) = channel(16);
        let commands = Arc::new(Mutex::new(Vec::new()));
        let seen = commands.clone();
        std::thread::spawn(move || serve(engine, inbox, &seen));
        let events = Arc::new(Mutex::new(Vec::new()));
        let services = Fake {
            engine: client,
            events: events.clone(),
            artifacts: HashMap::new(),
            is_late: engine == Engine::Late,
            noted: Arc::default(),
        };
        let (limits, stop) = (Limits { wall_ms: 60_000, ..Limits::DEFAULT }, StopFlag::default());
        let spec = JobSpec { params: params.to_owned(), seed: 7, job: JobSlot(3), limits, stop, stop_at: None, cohort: None };
        Self { spec, services, commands, events, threads: Vec::new() }
    }

    /// The same with the engine behind a socket, each end on a thread of its own, as for a guest process.
    pub(crate) fn over_a_socket(mut self) -> Self {
        let [guest, engine] = self.threads();
        let grants = Grants::default();
        grants.grant(self.spec.job, self.services.engine.clone(), vec![TrunkSlot(0)], self.spec.cohort);
        self.services.engine = behind_a_socket(&guest, &engine, grants);
        self
    }

    /// The same with a parent between that passes on: the engine behind two sockets, as where all three have processes of their own.
    pub(crate) fn over_two_sockets(mut self) -> Self {
        let [guest, parent, engine] = self.threads();
        let grants = Grants::default();
        let passed_on = behind_a_socket(&parent, &engine, Grants::whole(self.services.engine.clone()));
        grants.grant(self.spec.job, passed_on, vec![TrunkSlot(0)], self.spec.cohort);
        self.services.engine = behind_a_socket(&guest, &parent, grants);
        self
    }

    /// Threads that carry what they are given as long as the job lives.
    fn threads<const N: usize>(&mut self) -> [Handle; N] {
        std::array::from_fn(|_| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().unwrap();
            let handle = runtime.handle().clone();
            let (lives, ended) = oneshot::channel();
            self.threads.push(lives);
            std::thread::spawn(move || drop(runtime.block_on(ended)));
            handle
        })
    }

    /// The same with other limits.
    pub(crate) fn limits(mut self, change: impl FnOnce(&mut Limits)) -> Self {
        change(&mut self.spec.limits);
        self
    }

    pub(crate) async fn run(self) -> Ran {
        self.run_component(guest()).await
    }

    pub(crate) async fn run_component(self, component: &ValidComponent) -> Ran {
        let noted = self.services.noted.clone();
        let end = component.run(sandbox(), self.spec, Box::new(self.services)).await;
        let events = std::mem::take(&mut *self.events.lock().unwrap());
        let commands = self.commands.lock().unwrap().clone();
        let noted = noted.lock().unwrap().clone();
        Ran { end, events, commands, noted }
    }
}

/// A client on one thread, of an engine that is served on another.
fn behind_a_socket(near: &Handle, far: &Handle, grants: Grants) -> Client {
    let split = |thread: &Handle, stream: std::os::unix::net::UnixStream| {
        stream.set_nonblocking(true).unwrap();
        let _entered = thread.enter();
        tokio::net::UnixStream::from_std(stream).unwrap().into_split()
    };
    let (here, there) = std::os::unix::net::UnixStream::pair().unwrap();
    let (reader, writer) = split(near, here);
    let (client, carrying) = connect(reader, writer);
    // Either end goes first when the job is over, and the other says that it is gone.
    near.spawn(async { drop(carrying.await) });
    let (reader, writer) = split(far, there);
    far.spawn(async { drop(serve_wire(reader, writer, grants, 1 << 20).await) });
    client
}

impl Ran {
    /// Lines of the log, each with its level.
    pub(crate) fn log(&self) -> Vec<(Level, &str)> {
        let line = |event: &'_ Event| matches!(event, Event::Log { .. });
        let lines = self.events.iter().filter(|event| line(event));
        lines.map(|event| if let Event::Log { level, message } = event { (*level, message.as_str()) } else { unreachable!() }).collect()
    }

    /// The values of a metric, in order.
    pub(crate) fn metric(&self, wanted: &str) -> Vec<f64> {
        let value = |event: &Event| match event {
            Event::Metric { name, value, .. } if name == wanted => Some(*value),
            _ => None,
        };
        self.events.iter().filter_map(value).collect()
    }

    /// The message the guest returned as its error.
    pub(crate) fn returned(&self) -> &str {
        match &self.end.outcome {
            nodus_sandbox::Outcome::Failed(nodus_sandbox::Failure::Returned(text)) => text,
            other => panic!("expected the guest's own error, found {other:?}"),
        }
    }

    pub(crate) fn completed(&self) {
        assert!(matches!(self.end.outcome, nodus_sandbox::Outcome::Completed), "{:?}", self.end);
    }
}

/// Answers until every client is gone.
fn serve(engine: Engine, mut inbox: Inbox, seen: &Mutex<Vec<String>>) {
    let mut steps: HashMap<u32, u64> = HashMap::new();
    let mut configs = HashMap::new();
    let mut unanswered: Vec<Request> = Vec::new();
    while let Some(request) = inbox.blocking_recv() {
        if engine == Engine::Late {
            std::thread::sleep(std::time::Duration::from_millis(2));
        }
        let see = |text: String| seen.lock().unwrap().push(text);
        let reply = match &request.command {
            Command::CreateAdapter { slot, config, .. } => {
                see(format!("create {}", slot.index));
                configs.insert(slot.index, config.clone());
                Ok(Reply::Done)
            }
            Command::LoadAdapter { slot, weights, .. } => {
                see(format!("load {}", slot.index));
                configs.insert(slot.index, weights.config.clone());
                Ok(Reply::Done)
            }
            Command::ForwardBackward { slot, batch } => {
                see(format!("forward-backward {}", slot.index));
                Ok(Reply::Loss(batch.sequences.iter().map(|sequence| loss(sequence)).collect()))
            }
            Command::Evaluate { slot, batch, first } => {
                see(format!("evaluate {} {}", slot.index, batch.rows()));
                if *first > 0 {
                    see(format!("from {first}"));
                }
                Ok(Reply::Loss(batch.sequences.iter().map(|sequence| loss(sequence)).collect()))
            }
            Command::OptimStep { slot, .. } | Command::TrainStep { slot, .. } => {
                see(format!("step {}", slot.index));
                let step = steps.entry(slot.index).or_default();
                *step += 1;
                let sums = LossSums { loss_sum: 1.0 / *step as f64, weight_sum: 1.0, labelled: 1, sequences: 1 };
                Ok(Reply::Step(StepReport { step: *step, sums, loss: sums.mean(), grad_norm: 1.0 }))
            }
            Command::Export { slot } => {
                see(format!("export {}", slot.index));
                Ok(Reply::Weights(Box::new(weights(&configs[&slot.index]))))
            }
            Command::DropAdapter { slot } => {
                see(format!("drop-adapter {}", slot.index));
                Ok(Reply::Done)
            }
            Command::Reserve { job, .. } => {
                see(format!("reserve {}", job.0));
                Ok(Reply::Done)
            }
            Command::Snapshot { .. } | Command::Restore { .. } | Command::Bound { .. } => panic!("a guest asked for {:?}", request.command),
            Command::Prioritise { job } => {
                see(format!("prioritise {}", job.0));
                Ok(Reply::Done)
            }
            Command::DropJob { job } => {
                see(format!("drop-job {}", job.0));
                Ok(Reply::Done)
            }
        };
        match (engine, &reply) {
            (Engine::Silent, Ok(Reply::Loss(_) | Reply::Step(_))) => unanswered.push(request),
            (Engine::NonFinite, Ok(Reply::Step(_))) => {
                request.answer(Err(EngineError::new(ErrorKind::NonFinite, "the loss is NaN at step 1")));
            }
            (Engine::Defective, Ok(Reply::Loss(_))) => {
                request.answer(Err(EngineError::new(ErrorKind::Internal, "slot table out of order")));
            }
            _ => request.answer(reply),
        }
    }
}

/// A loss whose sum over sequences depends on the order of additions.
fn loss(sequence: &Sequence) -> SequenceLoss {
    let rows = sequence.rows() as f64;
    SequenceLoss { loss_sum: 1.0 / (rows + 2.0), weight_sum: rows, labelled: sequence.labelled() as u64 }
}

fn weights(config: &nodus_protocol::LoraConfig) -> AdapterWeights {
    let model = model();
    let modules = config.modules(&model).map(|(layer, module)| {
        let rank = config.rank_of(layer, module) as usize;
        let (a, b) = (vec![0.5; rank * model.module_in(module)], vec![0.0; rank * model.module_out(module)]);
        ModuleWeights { layer, module, rank, a, b }
    });
    AdapterWeights { config: config.clone(), modules: modules.collect() }
}

pub(crate) fn model() -> ModelConfig {
    ModelConfig {
        architecture: Architecture::Llama,
        hidden_size: 8,
        intermediate_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 4,
        vocab_size: 100,
        max_position_embeddings: 128,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: None,
        sliding_window: None,
        qkv_bias: false,
        tie_word_embeddings: true,
        eos_token_id: Some(2),
        bos_token_id: None,
    }
}

/// Services that keep everything in memory.
pub(crate) struct Fake {
    engine: Client,
    events: Arc<Mutex<Vec<Event>>>,
    artifacts: HashMap<Digest, Arc<AdapterWeights>>,
    is_late: bool,
    noted: Arc<Mutex<Vec<u64>>>,
}

impl Fake {
    async fn wait(&self) {
        if self.is_late {
            tokio::task::yield_now().await;
        }
    }
}

#[async_trait]
impl Services for Fake {
    async fn open_trunk(&mut self, name: &str) -> Result<Trunk, Refusal> {
        self.wait().await;
        assert!(name != "defect", "a defect of the host's own code");
        if name == "broken" {
            return Err(Refusal::Internal("/var/lib/nodus/blobs: input/output error".into()));
        }
        if name != "model" {
            return Err(Refusal::NotFound(format!("trunk `{name}`")));
        }
        let (config, digest) = (Arc::new(model()), Digest::of(b"trunk"));
        Ok(Trunk { config, digest, engine: self.engine.clone(), slot: TrunkSlot(0), text: Some(Arc::new(Bytes)) })
    }

    async fn open_dataset(&mut self, name: &str, trunk: &Trunk, max_length: usize) -> Result<Dataset, Refusal> {
        self.wait().await;
        if name != "train" {
            return Err(Refusal::NotFound(format!("data set `{name}`")));
        }
        let example = |i: usize| {
            let rows = (i + 1).min(max_length - 1);
            Arc::new(Sequence::new(&trunk.config, vec![1; rows], vec![2; rows], vec![1.0; rows]).unwrap())
        };
        Ok(Dataset { examples: Arc::new((0..10).map(example).collect()), truncated: 0, digest: Digest::of(b"train") })
    }

    async fn load_artifact(&mut self, _: &Trunk, digest: Digest) -> Result<Arc<AdapterWeights>, Refusal> {
        self.wait().await;
        self.artifacts.get(&digest).cloned().ok_or_else(|| Refusal::NotFound(digest.to_string()))
    }

    async fn save_artifact(&mut self, _: &Trunk, name: &str, weights: &AdapterWeights) -> Result<Digest, Refusal> {
        self.wait().await;
        let digest = Digest::of(format!("{name} {weights:?}").as_bytes());
        self.artifacts.insert(digest, Arc::new(weights.clone()));
        Ok(digest)
    }

    async fn stopping(&mut self, question: u64) -> Result<(), Refusal> {
        self.wait().await;
        self.noted.lock().unwrap().push(question);
        Ok(())
    }

    fn event(&mut self, event: Event) {
        self.events.lock().unwrap().push(event);
    }
}

/// One token for each byte.
struct Bytes;

impl Text for Bytes {
    fn encode(&self, text: &str) -> Result<Vec<u32>, Refusal> {
        Ok(text.bytes().map(u32::from).collect())
    }

    fn decode(&self, tokens: &[u32]) -> Result<String, Refusal> {
        Ok(tokens.iter().filter_map(|token| char::from_u32(*token)).collect())
    }

    fn apply_chat_template(&self, _: &[(String, String)], _: bool) -> Result<String, Refusal> {
        Err(Refusal::Unsupported("this model has no chat template".into()))
    }
}
