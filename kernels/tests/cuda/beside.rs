//! The card at work for two processes at once, under MPS: what a block finds must not depend on how long its neighbours on a multiprocessor make it wait.
//!
//! Never in one process: kernels of two streams of one were not seen to share a multiprocessor in the way that this is about.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::time::Duration;

use nodus_kernels::cuda::{CudaBuffer, CudaDevice, CudaWeight, Precision};
use nodus_kernels::{DType, Device as _, Layout, Numbers, Use};

use super::{open, skip};

const LENGTHS: [usize; 4] = [128; 4];
const WIDTH: usize = 256;
/// Rows by one block, by two, by eight, and by eight with more columns each.
const VOCABULARIES: [usize; 4] = [16_003, 32_000, 128_256, 151_936];

/// The race that this is about showed itself after 1 to 50 of the steps of a job.
const ROUNDS: usize = 150;

/// Everything that the loss of some rows takes.
struct Loss {
    rows: Layout,
    x: CudaBuffer,
    head: CudaWeight,
    targets: Vec<u32>,
    losses: CudaBuffer,
    dx: CudaBuffer,
}

impl Loss {
    fn new(device: &mut CudaDevice, vocabulary: usize) -> Self {
        let positions: Vec<u32> = (0..128).collect();
        let rows = Layout::new(LENGTHS.iter().zip(0..).map(|(length, number)| (number, &positions[..*length])), device.row_align());
        let mut alloc = |usage, width: usize| device.alloc(usage, rows.rows() * width).unwrap();
        let (mut x, losses, dx) = (alloc(Use::Activation, WIDTH), alloc(Use::State, 1), alloc(Use::Activation, WIDTH));
        device.fill_uniform(&mut x, 5, 1.0).unwrap();
        let head = device.random(&[vocabulary, WIDTH], DType::BF16, Numbers { key: 1, centre: 0.0, range: 0.3 }).unwrap();
        let targets = (0..rows.rows()).map(|row| (row * 97 % vocabulary) as u32).collect();
        Self { rows, x, head, targets, losses, dx }
    }

    fn run(&mut self, device: &mut CudaDevice) {
        let weights = vec![0.5; self.rows.rows()];
        device.head_loss(&self.rows, &self.x, &self.head, &self.targets, &weights, &mut self.losses, Some(&mut self.dx)).unwrap();
    }

    fn bits(&mut self, device: &mut CudaDevice) -> Vec<u32> {
        self.run(device);
        let (mut losses, mut dx) = (vec![0.0; self.rows.rows()], vec![0.0; self.rows.rows() * WIDTH]);
        device.download(&self.losses, 0, &mut losses).unwrap();
        device.download(&self.dx, 0, &mut dx).unwrap();
        losses.into_iter().chain(dx).map(f32::to_bits).collect()
    }
}

/// Losses of every vocabulary again and again: one of two processes that do so at the same time.
#[test]
#[ignore = "one of the two processes of the next test"]
fn at_work() {
    let Some(mut device) = open("at_work", Precision::Bf16) else { return };
    let mut losses = VOCABULARIES.map(|vocabulary| Loss::new(&mut device, vocabulary));
    let first: Vec<Vec<u32>> = losses.iter_mut().map(|loss| loss.bits(&mut device)).collect();
    assert!(first.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()));
    let mut unequal = [0; VOCABULARIES.len()];
    for _ in 0..ROUNDS {
        for ((loss, first), unequal) in losses.iter_mut().zip(&first).zip(&mut unequal) {
            // Without a pause, so that the other process meets them.
            (0..3).for_each(|_| loss.run(&mut device));
            *unequal += usize::from(loss.bits(&mut device) != *first);
        }
    }
    assert_eq!(unequal, [0; VOCABULARIES.len()], "of {ROUNDS} each, of vocabularies {VOCABULARIES:?}");
}

/// An MPS daemon in a folder of its own.
struct Daemon(tempfile::TempDir);

impl Daemon {
    const PROGRAM: &str = "nvidia-cuda-mps-control";

    /// None where the driver came without it.
    fn start() -> Option<Self> {
        let daemon = Self(tempfile::tempdir().unwrap());
        daemon.of_it(Self::PROGRAM).arg("-d").status().ok()?.success().then_some(daemon)
    }

    /// A command that is one of its clients, or speaks to it.
    fn of_it(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = Command::new(program);
        command.env("CUDA_MPS_PIPE_DIRECTORY", self.0.path()).env("CUDA_MPS_LOG_DIRECTORY", self.0.path());
        command
    }
}

impl Daemon {
    /// What its control program answers.
    fn ask(&self, words: &str) -> String {
        let mut control = self.of_it(Self::PROGRAM).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        writeln!(control.stdin.take().unwrap(), "{words}").unwrap();
        String::from_utf8(control.wait_with_output().unwrap().stdout).unwrap()
    }

    /// How many processes share the card by it.
    fn clients(&self) -> usize {
        let servers = self.ask("get_server_list");
        servers.lines().map(|server| self.ask(&format!("get_client_list {server}")).lines().count()).sum()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.ask("quit");
    }
}

/// A copy to shared memory that began while the last row's reads were still under way gave one row of some thousands another loss, and only here.
#[test]
fn the_loss_is_the_same_beside_another_process() {
    let name = "the_loss_is_the_same_beside_another_process";
    if open(name, Precision::Bf16).is_none() {
        return;
    }
    let Some(daemon) = Daemon::start() else { return skip(name, "there is no nvidia-cuda-mps-control") };
    let start = || daemon.of_it(std::env::current_exe().unwrap()).args(["beside::at_work", "--exact", "--ignored"]).spawn().unwrap();
    let mut both = [start(), start()];
    // A process that finds no daemon works alone, and says nothing.
    while daemon.clients() < both.len() {
        assert!(both.iter_mut().all(|process| process.try_wait().unwrap().is_none()), "the processes are no clients of the daemon");
        std::thread::sleep(Duration::from_millis(100));
    }
    let ended = both.map(|mut process| process.wait().unwrap().success());
    assert_eq!(ended, [true; 2], "what differed is said above");
}
