//! One fused pass over the batches of several members: forward, and backward for those that train.
//!
//! Never mixes the rows of two members, and never knows whose they are.

mod backward;
mod forward;
mod join;
pub(crate) mod memory;
pub(crate) mod prepare;

use std::rc::Rc;
use std::sync::Arc;

use nodus_kernels::{Device, DeviceError, Layout, LoraGrads, LoraRows, LoraSite, Use};
use nodus_protocol::{AdapterSlot, Batch, Module, SequenceLoss};

use crate::adapter::Adapter;
use crate::cache::{Key, Slot, TrunkCache};
use crate::engine::Clock;
use crate::pool::{Lent, LentTogether, Pool};
use crate::rows::{Level, RowMap, Source, Stage};
use crate::trunk::Trunk;
use memory::Keep;

/// One adapter with the batch it brings.
pub(crate) struct Member<'a, D: Device> {
    pub(crate) slot: AdapterSlot,
    pub(crate) adapter: &'a mut Adapter<D>,
    pub(crate) batch: &'a Batch,
    pub(crate) cut: Stage,
    pub(crate) trains: bool,
    /// For each sequence its name in the trunk cache; none for those that nobody may share. Empty without a cache.
    pub(crate) keys: Vec<Option<Arc<Key>>>,
    /// For each sequence whether the cache has its rows.
    pub(crate) at_hand: Vec<bool>,
}

impl<D: Device> Member<'_, D> {
    /// What the row map sees of it.
    pub(crate) fn source(&self) -> Source<'_> {
        let Self { batch, cut, trains, at_hand, .. } = self;
        Source { batch, cohort: self.adapter.cohort, cut: *cut, trains: *trains, at_hand }
    }
}

/// What a pass needs on the way.
pub(crate) struct Pass<'a, 'm, D: Device> {
    device: &'a mut D,
    trunk: &'a Trunk<D>,
    map: &'a RowMap,
    members: &'a mut [Member<'m, D>],
    cuts: Cuts<'a, D>,
    clock: &'a Clock,
    /// When everything below the lowest cut was done.
    trunk_end_ns: Option<u64>,
    pool: Pool<D::Buffer>,
}

/// Rows at the members' cuts: those at hand, and where those that a pass computes are to be kept.
pub(crate) struct Cuts<'a, D: Device> {
    pub(crate) cache: &'a TrunkCache<D>,
    pub(crate) slots: &'a mut [Slot<D>],
}

/// What a pass found, and how long it took.
pub(crate) struct Outcome {
    /// The loss of each row of the top level's labelled rows.
    pub(crate) losses: Vec<f32>,
    /// Below every member's cut, in nanoseconds.
    pub(crate) trunk_ns: u64,
    /// From the lowest cut up and back, in nanoseconds.
    pub(crate) above_ns: u64,
}

type Buffer<D> = Lent<<D as Device>::Buffer>;

/// Activations that belong together: what modules that read the same x write.
type Together<D> = LentTogether<<D as Device>::Buffer>;

/// What a LoRA module leaves for its backward pass: s, and how many columns it has.
type Inner<D> = Option<(Buffer<D>, usize)>;

/// Buffers as wide as what q, k and v write: k, v and q together; in the last layer, where q has other rows, k and v.
struct Projected<D: Device> {
    together: Together<D>,
    apart: Option<Buffer<D>>,
}

impl<D: Device> Projected<D> {
    /// q, k, v.
    fn each(&self) -> Result<[&D::Buffer; 3], DeviceError> {
        match (&*self.together, &self.apart) {
            ([k, v, q], None) => Ok([q, k, v]),
            ([k, v], Some(q)) => Ok([q, k, v]),
            _ => Err(no_projection()),
        }
    }

    fn each_mut(&mut self) -> Result<[&mut D::Buffer; 3], DeviceError> {
        match (&mut *self.together, &mut self.apart) {
            ([k, v, q], None) => Ok([q, k, v]),
            ([k, v], Some(q)) => Ok([q, k, v]),
            _ => Err(no_projection()),
        }
    }
}

/// A defect: k, v and q are not where they were put.
fn no_projection() -> DeviceError {
    DeviceError::Failed("k, v and q are neither together nor apart".into())
}

/// What a layer's attention leaves for its backward pass.
struct AttentionTape<D: Device> {
    /// The residual stream that it read, all rows.
    residual: Rc<Buffer<D>>,
    /// Its norm, which k, v and q read; where q has fewer rows, those too. Absent where nobody carries them.
    x: Option<(Buffer<D>, Option<Buffer<D>>)>,
    /// What q, k and v wrote; q and k rotated where they have no norms.
    projected: Projected<D>,
    /// q and k after their norms, rotated.
    normed: Option<(Buffer<D>, Buffer<D>)>,
    out: Buffer<D>,
    lse: Buffer<D>,
    inner: [Inner<D>; 4],
}

/// What a layer's MLP leaves for its backward pass.
struct MlpTape<D: Device> {
    /// The residual stream that it read.
    residual: Rc<Buffer<D>>,
    /// Its norm, which gate and up read, and what down read. Absent where nobody carries them.
    x: Option<Buffer<D>>,
    product: Option<Buffer<D>>,
    /// What gate and up wrote, their adapters' parts among it. Absent where no backward pass reads it.
    gate_up: Option<Together<D>>,
    inner: [Inner<D>; 3],
}

/// What a layer leaves for its backward pass.
enum LayerTape<D: Device> {
    /// Everything that the backward pass will read.
    Whole(Option<Box<AttentionTape<D>>>, Box<MlpTape<D>>),
    /// What it read; the rest is computed again, to the same bits.
    Input(Rc<Buffer<D>>),
}

/// A pass failed.
pub(crate) struct Failure {
    pub(crate) error: DeviceError,
    /// Whether gradients were already being added to, so that they can no longer be trusted.
    pub(crate) torn: bool,
}

impl<'a, 'm, D: Device> Pass<'a, 'm, D> {
    pub(crate) fn new(
        device: &'a mut D,
        trunk: &'a Trunk<D>,
        map: &'a RowMap,
        members: &'a mut [Member<'m, D>],
        cuts: Cuts<'a, D>,
        clock: &'a Clock,
    ) -> Self {
        Self { device, trunk, map, members, cuts, clock, trunk_end_ns: None, pool: Pool::new() }
    }

    /// Runs the pass. Gradients of the members that train are added to.
    pub(crate) fn run(&mut self, keep: &[Keep]) -> Result<Outcome, Failure> {
        let clean = |error| Failure { error, torn: false };
        let torn = |error| Failure { error, torn: true };
        let start_ns = (self.clock)();
        if self.map.weights.is_empty() {
            return Ok(Outcome { losses: Vec::new(), trunk_ns: 0, above_ns: 0 });
        }
        self.device.begin_pass().map_err(clean)?;
        let losses = self.compute(keep);
        let ended = self.device.end_pass();
        let losses = losses?;
        ended.map_err(torn)?;
        let (trunk_end_ns, end_ns) = (self.trunk_end_ns.unwrap_or(start_ns), (self.clock)());
        let by_host = (trunk_end_ns.saturating_sub(start_ns), end_ns.saturating_sub(trunk_end_ns));
        let (trunk_ns, above_ns) = self.device.pass_ns().map_err(torn)?.unwrap_or(by_host);
        Ok(Outcome { losses, trunk_ns, above_ns })
    }

    /// Forward, loss and backward: the loss of each row of the top level's labelled rows.
    fn compute(&mut self, keep: &[Keep]) -> Result<Vec<f32>, Failure> {
        let clean = |error| Failure { error, torn: false };
        let torn = |error| Failure { error, torn: true };
        let (residual, tapes) = self.forward(keep).map_err(clean)?;
        let (losses, gradient) = self.top(residual).map_err(clean)?;
        if let Some(gradient) = gradient {
            self.backward(gradient, tapes).map_err(torn)?;
        }
        let mut values = vec![0.0; self.map.weights.len()];
        self.device.download(&losses, 0, &mut values).map_err(torn)?;
        Ok(values)
    }

    fn buffer(&mut self, usage: Use, rows: &Layout, width: usize) -> Result<Buffer<D>, DeviceError> {
        self.pool.take(self.device, usage, rows.rows() * width)
    }

    fn activation(&mut self, rows: &Layout, width: usize) -> Result<Buffer<D>, DeviceError> {
        self.buffer(Use::Activation, rows, width)
    }

    /// Buffers for what q, k and v write on these rows, `last`: in the last layer.
    fn projected(&mut self, (queries, keys): (&Layout, &Layout), last: bool) -> Result<Projected<D>, DeviceError> {
        if !last {
            return Ok(Projected { together: self.together(keys, &[Module::KProj, Module::VProj, Module::QProj])?, apart: None });
        }
        let q = self.activation(queries, self.trunk.config.module_out(Module::QProj))?;
        Ok(Projected { together: self.together(keys, &[Module::KProj, Module::VProj])?, apart: Some(q) })
    }

    /// One buffer for each of these modules.
    fn together(&mut self, rows: &Layout, modules: &[Module]) -> Result<Together<D>, DeviceError> {
        let widths: Vec<usize> = modules.iter().map(|module| self.trunk.config.module_out(*module)).collect();
        self.pool.take_together(self.device, rows.rows(), &widths)
    }

    /// out\[r\] = x\[index\[r\]\] into a new buffer.
    fn gather(&mut self, rows: &Layout, index: &[u32], width: usize, x: &D::Buffer) -> Result<Buffer<D>, DeviceError> {
        let mut out = self.activation(rows, width)?;
        self.device.gather(rows, index, width, x, &mut out)?;
        Ok(out)
    }

    /// The RMS norm of the residual stream into a new buffer.
    fn norm(&mut self, rows: &Layout, x: &D::Buffer, weight: &D::Weight) -> Result<Buffer<D>, DeviceError> {
        let config = &self.trunk.config;
        let mut out = self.pool.take(self.device, Use::Activation, rows.rows() * config.hidden_size)?;
        self.device.rms_norm(rows, 1, x, weight, config.rms_norm_eps, &mut out)?;
        Ok(out)
    }
}

/// What a member has on some modules of a layer.
fn sites<D: Device>(adapter: &Adapter<D>, layer: usize, modules: &[Module], trains: bool) -> Vec<Option<LoraSite>> {
    let site = |module: &Module| {
        let dropout = if trains { adapter.dropout(layer, *module) } else { None };
        Some(LoraSite { module: adapter.sites.get(layer, *module)?, dropout })
    };
    modules.iter().map(site).collect()
}

/// The rows of a level that carry an adapter on one of these modules, member by member.
fn lora_rows<'x, D: Device>(members: &'x [Member<'_, D>], level: &Level, layer: usize, modules: &[Module]) -> Vec<LoraRows<'x, D::Buffer>> {
    let group = |(number, member): (usize, &'x Member<'_, D>)| {
        let adapter = &*member.adapter;
        let segments = Some(level.segments(number)).filter(|segments| !segments.is_empty())?;
        let sites = sites(adapter, layer, modules, member.trains);
        sites.iter().any(Option::is_some).then_some(LoraRows { segments, sites, params: &adapter.params })
    };
    members.iter().enumerate().filter_map(group).collect()
}

/// The same with gradients, of those members that train; `wants_dx` says of whom the gradient goes on below.
fn lora_grads<'x, D: Device>(
    members: &'x mut [Member<'_, D>],
    level: &Level,
    (layer, modules): (usize, &[Module]),
    wants_dx: impl Fn(usize) -> bool,
) -> Vec<LoraGrads<'x, D::Buffer>> {
    let group = |(number, member): (usize, &'x mut Member<'_, D>)| {
        let segments = Some(level.segments(number)).filter(|segments| !segments.is_empty() && member.trains)?;
        let sites = sites(member.adapter, layer, modules, true);
        let Adapter { params, grads, .. } = &mut *member.adapter;
        let rows = LoraRows { segments, sites, params };
        rows.sites.iter().any(Option::is_some).then_some(LoraGrads { rows, grads, wants_dx: wants_dx(number) })
    };
    members.iter_mut().enumerate().filter_map(group).collect()
}

/// The loss of each sequence of a member's batch: its rows in order, added in float64. A row with a loss that is not finite is named,
/// its sequence counted from `first`.
pub(crate) fn sequence_losses(batch: &Batch, first: usize, losses: impl IntoIterator<Item = f32>) -> Result<Vec<SequenceLoss>, String> {
    let mut losses = losses.into_iter();
    let mut all = Vec::with_capacity(batch.sequences.len());
    for (number, sequence) in (first..).zip(&batch.sequences) {
        let mut sums = SequenceLoss { loss_sum: 0.0, weight_sum: 0.0, labelled: 0 };
        for (row, weight) in sequence.weights().iter().enumerate().filter(|(_, weight)| **weight > 0.0) {
            let loss = losses.next().unwrap_or(f32::NAN);
            if !loss.is_finite() {
                return Err(format!("the loss is {loss} at sequence {number}, row {row}, expected a finite number"));
            }
            sums.loss_sum += f64::from(*weight) * f64::from(loss);
            sums.weight_sum += f64::from(*weight);
            sums.labelled += 1;
        }
        all.push(sums);
    }
    Ok(all)
}
