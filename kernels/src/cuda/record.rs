//! The launches of a pass: recorded, then carried out piece by piece; a piece that was met before is one graph.
//!
//! Never launches a graph for a piece that differs from what was captured in one byte: a kernel, a size, an address or their order.
#![expect(unsafe_code, reason = "launches what was recorded")]

use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

use super::blas::Operands;
use super::device::CudaDevice;
use super::driver::{Address, Kernel};
use super::graph::{Capture, Graph, Node};
use super::launching::Launching;
use super::linear;
use super::plan::Key;
use crate::DeviceError;

/// Launches of a piece. Small enough that the card is at work on one while the host records the next; the first of a pass is smaller still.
const PIECE: usize = 160;
const FIRST_PIECE: usize = 32;

/// Pieces that are remembered, the latest met last. A piece is captured when it is met for the second time: most shapes come only once.
const KEPT: usize = 192;

/// What a launch reads and writes of memory that other launches of a pass write: where each buffer begins. Weights, tables and adapters are
/// written by none, gradients by one launch a module; nobody need name those.
#[derive(Clone, Copy, Debug)]
pub(super) struct Access<'a> {
    pub(super) reads: &'a [Address],
    pub(super) writes: &'a [Address],
}

/// What is launched.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Work {
    Kernel { kernel: Kernel, grid: [u32; 3], threads: u32, shared: u32 },
    Product { key: Key, rows: usize, operands: Operands },
    Copy { from: Address, to: Address, bytes: usize },
}

/// A launch; the ends of its parts in the lists of its piece.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Command {
    work: Work,
    parameters: usize,
    reads: usize,
    writes: usize,
}

/// Launches that follow one another.
#[derive(Debug, Default, PartialEq)]
struct Piece {
    commands: Vec<Command>,
    /// The parameters of kernels, in whole words.
    parameters: Vec<u64>,
    reads: Vec<Address>,
    writes: Vec<Address>,
}

/// What has been launched so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Launches {
    /// Kernels, products and copies.
    pub all: u64,
    /// Those of them that went as part of a graph.
    pub in_graphs: u64,
    /// Graphs made.
    pub captures: u64,
    /// Nanoseconds of the host in launching, which may have to wait for the card to take more.
    pub launch_ns: u64,
    /// Nanoseconds from the beginning of passes to the first wait for their results.
    pub record_ns: u64,
}

/// How often each launch was made, and the milliseconds of all of them, by name and size.
pub type Profile = BTreeMap<String, (u64, f64)>;

/// The pass that is being recorded, and the pieces that are remembered.
#[derive(Debug)]
pub(super) struct Recorder {
    open: bool,
    /// Whether nothing of the pass was launched yet.
    first: bool,
    launching: Launching,
    piece: Piece,
    kept: Vec<(Piece, Option<Graph>)>,
    launches: Launches,
    profile: Option<Profile>,
    began: Option<Instant>,
}

impl Recorder {
    pub(super) fn new() -> Self {
        Self {
            open: false,
            first: true,
            launching: Launching::Best,
            piece: Piece::default(),
            kept: Vec::new(),
            launches: Launches::default(),
            profile: None,
            began: None,
        }
    }

    pub(super) fn is_open(&self) -> bool {
        self.open
    }

    fn push(&mut self, work: Work, parameters: &[u8], access: Access<'_>) {
        let piece = &mut self.piece;
        let words = parameters.chunks(8).map(|bytes| {
            let mut word = [0; 8];
            word[..bytes.len()].copy_from_slice(bytes);
            u64::from_ne_bytes(word)
        });
        piece.parameters.extend(words);
        piece.reads.extend(access.reads.iter().filter(|address| **address != 0));
        piece.writes.extend(access.writes.iter().filter(|address| **address != 0));
        let (parameters, reads, writes) = (piece.parameters.len(), piece.reads.len(), piece.writes.len());
        piece.commands.push(Command { work, parameters, reads, writes });
    }
}

impl Piece {
    /// Each command with its parameters, reads and writes.
    fn commands(&self) -> impl Iterator<Item = (Work, &[u64], &[Address], &[Address])> {
        let mut from = [0; 3];
        self.commands.iter().map(move |command| {
            let [parameters, reads, writes] = from;
            from = [command.parameters, command.reads, command.writes];
            (
                command.work,
                &self.parameters[parameters..command.parameters],
                &self.reads[reads..command.reads],
                &self.writes[writes..command.writes],
            )
        })
    }
}

/// Who wrote a buffer last, and who has read it since.
#[derive(Default)]
struct Users {
    writer: Vec<Node>,
    readers: Vec<Node>,
}

/// The order among launches: a reader waits for the last writer, a writer for the last writer and for everybody who has read since.
#[derive(Default)]
struct Order {
    users: HashMap<Address, Users>,
}

impl Order {
    fn before(&self, reads: &[Address], writes: &[Address]) -> Vec<Node> {
        let mut nodes = Vec::new();
        for address in reads {
            nodes.extend(self.users.get(address).into_iter().flat_map(|users| &users.writer));
        }
        for address in writes {
            nodes.extend(self.users.get(address).into_iter().flat_map(|users| users.writer.iter().chain(&users.readers)));
        }
        nodes.sort_unstable();
        nodes.dedup();
        nodes
    }

    fn took_place(&mut self, nodes: &[Node], reads: &[Address], writes: &[Address]) {
        for address in reads {
            self.users.entry(*address).or_default().readers.extend(nodes);
        }
        for address in writes {
            self.users.insert(*address, Users { writer: nodes.to_vec(), readers: Vec::new() });
        }
    }
}

impl CudaDevice {
    /// Launches a kernel whose one parameter is a struct: at once, or within a pass by its end at the latest.
    ///
    /// # Safety
    /// `A` has the fields of the kernel's struct in its order; every address in it begins a live allocation as large as the kernel's header
    /// box says for these sizes, and lives until the pass ends; `access` names every buffer of the pass that it reads or writes.
    pub(super) unsafe fn launch<A: bytemuck::NoUninit>(
        &mut self,
        kernel: Kernel,
        grid: [usize; 3],
        threads: u32,
        shared: u32,
        arguments: &A,
        access: Access<'_>,
    ) -> Result<(), DeviceError> {
        if grid.contains(&0) {
            return Ok(());
        }
        assert_eq!(size_of::<A>(), kernel.parameter_bytes, "the parameters of a kernel and their twin differ in size");
        let grid = grid.map(|n| u32::try_from(n).unwrap_or(u32::MAX));
        self.carry_out(Work::Kernel { kernel, grid, threads, shared }, bytemuck::bytes_of(arguments), access)
    }

    /// The same of a product with its pinned algorithm.
    ///
    /// # Safety
    /// As `launch`, for `operands` of the sizes that `key` and `rows` say; the product is prepared.
    pub(super) unsafe fn launch_product(
        &mut self,
        key: Key,
        rows: usize,
        operands: Operands,
        access: Access<'_>,
    ) -> Result<(), DeviceError> {
        self.carry_out(Work::Product { key, rows, operands }, &[], access)
    }

    /// The same of a copy on the card.
    ///
    /// # Safety
    /// As `launch`, for `bytes` from each address on, which do not overlap.
    pub(super) unsafe fn launch_copy(&mut self, from: Address, to: Address, bytes: usize, access: Access<'_>) -> Result<(), DeviceError> {
        self.carry_out(Work::Copy { from, to, bytes }, &[], access)
    }

    fn carry_out(&mut self, work: Work, parameters: &[u8], access: Access<'_>) -> Result<(), DeviceError> {
        self.recorder.push(work, parameters, access);
        let most = if self.recorder.first { FIRST_PIECE } else { PIECE };
        if !self.recorder.open || self.recorder.piece.commands.len() >= most {
            return self.flush();
        }
        Ok(())
    }

    /// Begins to record. What an earlier pass, which failed, left is forgotten.
    pub(super) fn begin_recording(&mut self) {
        self.recorder.piece = Piece::default();
        (self.recorder.open, self.recorder.first) = (true, true);
        self.recorder.began = Some(Instant::now());
    }

    /// The host is going to wait for what was launched.
    pub(super) fn end_launching(&mut self) -> Result<(), DeviceError> {
        self.flush()?;
        if let Some(began) = self.recorder.began.take() {
            self.recorder.launches.record_ns += u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
            self.marks.end()?;
        }
        Ok(())
    }

    /// Ends recording; what is left is carried out.
    pub(super) fn end_recording(&mut self) -> Result<(), DeviceError> {
        let flushed = self.flush();
        self.recorder.open = false;
        flushed
    }

    /// Carries out what has been recorded; does not wait for it.
    pub(super) fn flush(&mut self) -> Result<(), DeviceError> {
        if self.recorder.piece.commands.is_empty() {
            return Ok(());
        }
        let start = Instant::now();
        let mut launched = self.launch_piece();
        if self.recorder.launching == Launching::NoOverlap {
            launched = launched.and_then(|()| self.gpu.synchronize());
        }
        self.recorder.launches.launch_ns += u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX);
        launched
    }

    fn launch_piece(&mut self) -> Result<(), DeviceError> {
        self.staging.send_tables()?;
        self.recorder.first = false;
        let mut piece = std::mem::take(&mut self.recorder.piece);
        let count = piece.commands.len() as u64;
        self.recorder.launches.all += count;
        if !self.recorder.open || self.recorder.launching == Launching::NoGraphs || self.recorder.profile.is_some() {
            return self.run_all(&piece);
        }
        let Some(found) = self.recorder.kept.iter().position(|(kept, _)| *kept == piece) else {
            self.run_all(&piece)?;
            if self.recorder.kept.len() >= KEPT {
                self.recorder.kept.remove(0);
            }
            self.recorder.kept.push((piece, None));
            return Ok(());
        };
        // What was recorded is known; its memory is used again.
        piece.commands.clear();
        [&mut piece.reads, &mut piece.writes].into_iter().for_each(Vec::clear);
        piece.parameters.clear();
        self.recorder.piece = piece;
        let (piece, graph) = self.recorder.kept.remove(found);
        let graph = match graph {
            Some(graph) => graph,
            None => self.capture(&piece)?,
        };
        self.recorder.launches.in_graphs += count;
        // SAFETY: the piece is byte for byte what was captured, and its launches' callers uphold that its addresses are live.
        let launched = unsafe { graph.launch() };
        self.recorder.kept.push((piece, Some(graph)));
        launched
    }

    fn run_all(&mut self, piece: &Piece) -> Result<(), DeviceError> {
        let Some(mut profile) = self.recorder.profile.take() else {
            return piece.commands().try_for_each(|(work, parameters, ..)| self.run(work, parameters));
        };
        for (work, parameters, ..) in piece.commands() {
            let ms = self.milliseconds(|device| device.run(work, parameters))?;
            let name = match work {
                Work::Kernel { kernel, grid, .. } => format!("{} {grid:?}", self.kernels.name(kernel)),
                Work::Product { key, rows, .. } => format!("{} {} x {} on {rows} rows", key.product.name(), key.outputs, key.inputs),
                Work::Copy { .. } => "copy".to_owned(),
            };
            let entry = profile.entry(name).or_default();
            *entry = (entry.0 + 1, entry.1 + f64::from(ms));
        }
        self.recorder.profile = Some(profile);
        Ok(())
    }

    /// From here on every launch is timed by itself, each waited for and none in a graph. For measurements.
    pub fn begin_profile(&mut self) {
        self.recorder.profile = Some(Profile::new());
    }

    /// Ends it: what was found.
    pub fn end_profile(&mut self) -> Profile {
        self.recorder.profile.take().unwrap_or_default()
    }

    fn capture(&mut self, piece: &Piece) -> Result<Graph, DeviceError> {
        let gpu = std::sync::Arc::clone(&self.gpu);
        let (mut capture, mut order) = (Capture::begin(&gpu)?, Order::default());
        for (work, parameters, reads, writes) in piece.commands() {
            if self.recorder.launching != Launching::OneStream {
                capture.after(&mut order.before(reads, writes))?;
            }
            self.run(work, parameters)?;
            order.took_place(&capture.last()?, reads, writes);
        }
        self.recorder.launches.captures += 1;
        capture.end()
    }

    /// Launches on the stream, which may be capturing.
    fn run(&mut self, work: Work, parameters: &[u64]) -> Result<(), DeviceError> {
        match work {
            // SAFETY: what `launch` was given, whose caller upholds it.
            Work::Kernel { kernel, grid, threads, shared } => unsafe { self.gpu.launch_words(kernel, grid, threads, shared, parameters) },
            // SAFETY: what `launch_product` was given, whose caller upholds it.
            Work::Product { key, rows, operands } => unsafe { linear::run(self, key, rows, operands) },
            // SAFETY: what `launch_copy` was given, whose caller upholds it.
            Work::Copy { from, to, bytes } => unsafe { self.gpu.copy_within(from, to, bytes) },
        }
    }

    /// How passes are launched from here on. For measuring what each means is worth.
    #[doc(hidden)]
    pub fn launch_by(&mut self, launching: Launching) {
        self.recorder.launching = launching;
        self.forget_graphs();
    }

    /// Forgets pieces and graphs: products are going to run by other algorithms.
    pub(super) fn forget_graphs(&mut self) {
        self.recorder.kept.clear();
    }

    /// What has been launched so far.
    #[must_use]
    pub fn launches(&self) -> Launches {
        self.recorder.launches
    }
}

#[cfg(test)]
mod tests {
    use super::{Node, Order};

    fn node(number: usize) -> Node {
        std::ptr::without_provenance_mut(number)
    }

    #[test]
    fn readers_wait_for_writers_and_writers_for_both() {
        let mut order = Order::default();
        assert!(order.before(&[1], &[2]).is_empty());
        order.took_place(&[node(10)], &[1], &[2]);
        assert_eq!(order.before(&[2], &[3]), [node(10)], "reads what 10 wrote");
        order.took_place(&[node(11)], &[2], &[3]);
        assert_eq!(order.before(&[2], &[4]), [node(10)], "readers do not wait for each other");
        assert_eq!(order.before(&[], &[2]), [node(10), node(11)], "a writer waits for readers");
        assert_eq!(order.before(&[3], &[1]), [node(10), node(11)], "1 was read by 10, 3 written by 11");
        order.took_place(&[node(12)], &[], &[2]);
        assert_eq!(order.before(&[2], &[]), [node(12)]);
    }
}
