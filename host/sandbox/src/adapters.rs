//! A job's adapters and its calls to the engine that are on their way.
//!
//! Every answered call is told (as an event) at a point that the guest's program alone determines: when the guest waits for it or
//! for a later call of the same adapter, when the adapter is saved or dropped, when too many are on their way, or at the end.
//! Never when the answer happens to arrive: then the order of events would depend on the machine.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::Arc;

use nodus_protocol::{
    AdapterSlot, Client, Command, EngineError, ErrorKind, JobSlot, LoraConfig, LossSums, ModelConfig, Pending, Reply, StepReport,
};

use crate::charge::Charge;
use crate::services::{Event, Source, Trunk};
use crate::state::State;
use crate::wit::Fault;

/// The adapters alive, the answers not yet fetched, and the engines to tidy up.
pub(crate) struct Adapters {
    pub(crate) cohort: Option<u64>,
    created: u32,
    next_call: u64,
    alive: BTreeMap<u32, Adapter>,
    answers: HashMap<u64, Result<Answer, EngineError>>,
    engines: Engines,
}

/// One adapter alive.
pub(crate) struct Adapter {
    pub(crate) trunk: Trunk,
    pub(crate) config: LoraConfig,
    pub(crate) slot: AdapterSlot,
    /// Number of weights.
    pub(crate) parameters: u64,
    /// Its step count, as far as told.
    pub(crate) steps: u64,
    /// Why it is unusable: what went non-finite.
    pub(crate) poison: Option<String>,
    /// What is accumulated once all calls so far are carried out; none where the engine refused one, since then it alone knows.
    pub(crate) accumulated: Option<Accumulated>,
    calls: VecDeque<Call>,
}

/// What `optim-step` would divide by.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Accumulated {
    pub(crate) sequences: u64,
    pub(crate) labelled: u64,
}

struct Call {
    id: u64,
    kind: Kind,
    /// One for each piece that was sent, in order.
    answers: VecDeque<Pending>,
    /// Pieces that are not yet sent, in order.
    unsent: VecDeque<Command>,
    /// Sequences of all pieces of an evaluation.
    sequences: u64,
    /// Whether the guest may still ask for the answer.
    wanted: bool,
    /// What its batch holds of `batch-bytes`; let go when the call is told.
    _charge: Option<Arc<Charge>>,
}

/// What a call is, as far as its event goes.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Kind {
    ForwardBackward,
    Evaluate { data: Source },
    Step { learning_rate: f32 },
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Loss(LossSums),
    Step(StepReport),
    /// The job was asked to stop before the evaluation was through.
    LeftOff,
}

/// Pieces of one evaluation that are with the engine at the same time: it never waits for the next, and few are left to do after a stop.
const PIECES_SENT_MAX: usize = 2;

/// Bytes of device memory for one weight: itself, its gradient and two moments, float32.
const DEVICE_BYTES_PER_PARAMETER: u64 = 16;

impl Adapters {
    pub(crate) fn new(job: JobSlot, cohort: Option<u64>) -> Self {
        let engines = Engines { job, clients: Vec::new() };
        Self { cohort, created: 0, next_call: 0, alive: BTreeMap::new(), answers: HashMap::new(), engines }
    }

    /// The slot of the next adapter.
    pub(crate) fn next_slot(&self) -> AdapterSlot {
        AdapterSlot { job: self.engines.job, index: self.created }
    }

    pub(crate) fn alive(&self) -> u64 {
        self.alive.len() as u64
    }

    pub(crate) fn device_bytes(&self) -> u64 {
        self.alive.values().map(|adapter| device_bytes(adapter.parameters)).sum()
    }

    /// Remembers that this engine may hold something of the job.
    pub(crate) fn will_use(&mut self, engine: &Client) {
        if !self.engines.clients.iter().any(|known| known.is_same(engine)) {
            self.engines.clients.push(engine.clone());
        }
    }

    /// The engine has filled [`Self::next_slot`].
    pub(crate) fn add(&mut self, trunk: Trunk, config: LoraConfig) -> u32 {
        let slot = self.next_slot();
        let parameters = parameters(&config, &trunk.config);
        let (steps, poison, accumulated, calls) = (0, None, Some(Accumulated::default()), VecDeque::new());
        self.alive.insert(slot.index, Adapter { trunk, config, slot, parameters, steps, poison, accumulated, calls });
        self.created += 1;
        slot.index
    }

    /// # Errors
    /// Ours: a handle names an adapter until the handle is dropped.
    pub(crate) fn get(&self, index: u32) -> Result<&Adapter, Fault> {
        self.alive.get(&index).ok_or_else(|| Fault::internal(format!("adapter {index} is not alive")))
    }

    /// # Errors
    /// As for [`Self::get`].
    pub(crate) fn get_mut(&mut self, index: u32) -> Result<&mut Adapter, Fault> {
        self.alive.get_mut(&index).ok_or_else(|| Fault::internal(format!("adapter {index} is not alive")))
    }

    /// The guest will not ask for this call's answer any more.
    pub(crate) fn forget(&mut self, adapter: u32, call: u64) {
        self.answers.remove(&call);
        let calls = self.alive.get_mut(&adapter).map(|adapter| &mut adapter.calls);
        if let Some(call) = calls.into_iter().flatten().find(|known| known.id == call) {
            call.wanted = false;
        }
    }

    /// Gives up everything of the job on every engine, and waits until that is done.
    pub(crate) async fn drop_job(mut self) {
        let job = self.engines.job;
        while let Some(engine) = self.engines.clients.last() {
            // An engine that is gone holds nothing.
            drop(engine.call(Command::DropJob { job }).await);
            self.engines.clients.pop();
        }
    }
}

/// Number of weights of an adapter.
pub(crate) fn parameters(config: &LoraConfig, model: &ModelConfig) -> u64 {
    let size = |(layer, module)| {
        let width = model.module_in(module) as u64 + model.module_out(module) as u64;
        u64::from(config.rank_of(layer, module)) * width
    };
    config.modules(model).map(size).sum()
}

/// Bytes of device memory for so many weights.
pub(crate) fn device_bytes(parameters: u64) -> u64 {
    parameters.saturating_mul(DEVICE_BYTES_PER_PARAMETER)
}

/// The engines that may hold something of the job. Dropped before its time (the run was cancelled or a host function panicked),
/// it leaves nothing behind.
struct Engines {
    job: JobSlot,
    clients: Vec<Client>,
}

impl Drop for Engines {
    fn drop(&mut self) {
        for engine in &self.clients {
            engine.send_detached(Command::DropJob { job: self.job });
        }
    }
}

impl State {
    /// Sends one call of an adapter, in one or more pieces. Waits for the oldest call where too many are on their way, and for an evaluation
    /// of which not all is sent.
    pub(crate) async fn submit(
        &mut self,
        adapter: u32,
        kind: Kind,
        commands: Vec<Command>,
        charge: Option<Arc<Charge>>,
    ) -> Result<u64, Fault> {
        let is_full = |calls: &VecDeque<Call>, most| calls.len() as u64 >= most || calls.iter().any(|call| !call.unsent.is_empty());
        while is_full(&self.adapters.get(adapter)?.calls, self.limits.calls_in_flight.max(1)) {
            self.settle_oldest(adapter).await?;
        }
        let engine = self.adapters.get(adapter)?.trunk.engine.clone();
        let sequences = commands.iter().map(sequences).sum();
        let (mut answers, mut unsent) = (VecDeque::new(), VecDeque::from(commands));
        while answers.len() < PIECES_SENT_MAX
            && let Some(command) = unsent.pop_front()
        {
            answers.push_back(engine.send(command).await?);
        }
        let id = self.adapters.next_call;
        self.adapters.next_call += 1;
        self.adapters.get_mut(adapter)?.calls.push_back(Call { id, kind, answers, unsent, sequences, wanted: true, _charge: charge });
        Ok(id)
    }

    /// The answer of a call, when it is there and all earlier ones of the same adapter are told.
    pub(crate) async fn wait_for(&mut self, adapter: u32, call: u64) -> Result<Answer, Fault> {
        loop {
            if let Some(answer) = self.adapters.answers.remove(&call) {
                return Ok(answer?);
            }
            if !self.settle_oldest(adapter).await? {
                return Err(Fault::invalid("this answer was already taken by an earlier wait"));
            }
        }
    }

    /// Waits for all calls of one adapter.
    pub(crate) async fn settle(&mut self, adapter: u32) -> Result<(), Fault> {
        while self.settle_oldest(adapter).await? {}
        Ok(())
    }

    /// Waits for all calls of the job, adapter by adapter.
    pub(crate) async fn settle_all(&mut self) -> Result<(), Fault> {
        let adapters: Vec<u32> = self.adapters.alive.keys().copied().collect();
        for adapter in adapters {
            self.settle(adapter).await?;
        }
        Ok(())
    }

    /// The guest dropped its handle: calls on their way are carried out, then the memory is given back.
    pub(crate) async fn drop_adapter(&mut self, index: u32) -> Result<(), Fault> {
        self.settle(index).await?;
        if let Some(adapter) = self.adapters.alive.remove(&index) {
            // An engine that is gone holds nothing.
            drop(adapter.trunk.engine.send(Command::DropAdapter { slot: adapter.slot }).await);
        }
        Ok(())
    }

    async fn settle_oldest(&mut self, adapter: u32) -> Result<bool, Fault> {
        let calls = self.adapters.alive.get_mut(&adapter).map(|adapter| &mut adapter.calls);
        let Some(mut call) = calls.and_then(VecDeque::pop_front) else { return Ok(false) };
        self.tell_log();
        let answer = self.answer(adapter, &mut call).await;
        self.meter.answered();
        let told = self.adapters.get_mut(adapter)?;
        let event = match (&answer, call.kind) {
            (Ok(Answer::Step(report)), Kind::Step { learning_rate }) => {
                told.steps = report.step;
                Some(Event::Step { adapter, report: *report, learning_rate })
            }
            (Ok(Answer::Loss(sums)), Kind::Evaluate { data }) => Some(Event::Evaluation { adapter, step: told.steps, data, sums: *sums }),
            (Ok(_), _) => None,
            (Err(error), _) => {
                match error.kind {
                    ErrorKind::NonFinite if told.poison.is_none() => told.poison = Some(error.message.clone()),
                    // Our own mistake ends the job, whether the guest ever asks for the answer or not.
                    ErrorKind::NotFound | ErrorKind::Internal => return Err(error.clone().into()),
                    _ => told.accumulated = None,
                }
                None
            }
        };
        if let Some(event) = event {
            self.tell(event);
        }
        if call.wanted {
            self.adapters.answers.insert(call.id, answer);
        }
        Ok(true)
    }

    /// Waits for every piece of a call and adds them up, sequence by sequence: equal bits for any split. A job that is to stop gets no
    /// further piece of an evaluation.
    async fn answer(&mut self, adapter: u32, call: &mut Call) -> Result<Answer, EngineError> {
        let engine = self.adapters.alive.get(&adapter).map(|adapter| adapter.trunk.engine.clone());
        let (is_long, total) = (!call.unsent.is_empty(), call.sequences);
        let mut is_left_off = false;
        let mut sums = LossSums::default();
        let mut step = None;
        let mut first_error = None;
        while let Some(piece) = call.answers.pop_front() {
            match piece.await {
                Ok(Reply::Loss(losses)) => losses.iter().for_each(|loss| sums.add(loss)),
                Ok(Reply::Step(report)) => step = Some(report),
                Ok(other) => return Err(EngineError::new(ErrorKind::Internal, format!("{:?} was answered by {other:?}", call.kind))),
                Err(error) => first_error = first_error.or(Some(error)),
            }
            if is_long {
                self.tell(Event::Evaluating { done: sums.sequences, total });
            }
            if !call.unsent.is_empty() {
                let is_to_stop = self.asks_to_stop().await;
                is_left_off |= is_to_stop.map_err(|refusal| EngineError::new(ErrorKind::Internal, refusal.to_string()))?;
            }
            if is_left_off || first_error.is_some() {
                call.unsent.clear();
            }
            if let (Some(command), Some(engine)) = (call.unsent.pop_front(), &engine) {
                call.answers.push_back(engine.send(command).await?);
            }
        }
        if is_left_off && first_error.is_none() { Ok(Answer::LeftOff) } else { finished(call.kind, first_error, step, sums) }
    }
}

/// Sequences of an evaluation's piece.
fn sequences(command: &Command) -> u64 {
    if let Command::Evaluate { batch, .. } = command { batch.sequences.len() as u64 } else { 0 }
}

fn finished(kind: Kind, first_error: Option<EngineError>, step: Option<StepReport>, sums: LossSums) -> Result<Answer, EngineError> {
    match (first_error, kind, step) {
        (Some(error), _, _) => Err(error),
        (None, Kind::Step { .. }, Some(report)) => Ok(Answer::Step(report)),
        (None, Kind::Step { .. }, None) => Err(EngineError::new(ErrorKind::Internal, "a step was answered by a loss")),
        (None, _, _) => Ok(Answer::Loss(sums)),
    }
}
