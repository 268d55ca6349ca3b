//! A client and an engine at the two ends of a Unix stream.
#![expect(clippy::unwrap_used, reason = "a panic is how a test fails")]

use std::sync::{Arc, Mutex};

use nodus_protocol::frame::{FrameError, FrameWriter};
use nodus_protocol::wire::{Grants, WireError, connect, serve};
use nodus_protocol::{
    AdapterSlot, Client, Command, EngineError, ErrorKind, JobSlot, LayerSelection, LoraConfig, Module, Reply, SequenceLoss, TrunkSlot,
    channel,
};
use tokio::net::UnixStream;
use tokio::task::JoinHandle;

const BYTES_MAX: u64 = 1 << 16;

type Seen = Arc<Mutex<Vec<Command>>>;

/// An engine that answers exports by an error and everything else by a loss; what it was asked, in order.
fn engine() -> (Client, Seen) {
    let (client, mut inbox) = channel(16);
    let seen = Seen::default();
    let list = seen.clone();
    std::thread::spawn(move || {
        let mut unanswered = Vec::new();
        while let Some(request) = inbox.blocking_recv() {
            list.lock().unwrap().push(request.command.clone());
            match &request.command {
                Command::Export { .. } => request.answer(Err(EngineError::new(ErrorKind::NonFinite, "the loss is NaN"))),
                Command::DropAdapter { .. } => unanswered.push(request),
                _ => {
                    let loss = SequenceLoss { loss_sum: f64::from_bits(0x7ff8_0000_0000_0001), weight_sum: 0.1, labelled: 3 };
                    request.answer(Ok(Reply::Loss(vec![loss])));
                }
            }
        }
    });
    (client, seen)
}

/// A stream whose far end an engine serves for job 3, with trunk 1 and cohort 5.
fn served() -> (UnixStream, JoinHandle<Result<(), WireError>>, Seen) {
    let (near, far) = UnixStream::pair().unwrap();
    let (client, seen) = engine();
    let grants = Grants::default();
    grants.grant(JobSlot(3), client, vec![TrunkSlot(1)], Some(5));
    let (reader, writer) = far.into_split();
    (near, tokio::spawn(serve(reader, writer, grants, BYTES_MAX)), seen)
}

fn slot(job: u32) -> AdapterSlot {
    AdapterSlot { job: JobSlot(job), index: 0 }
}

fn create(trunk: u32, cohort: Option<u64>) -> Command {
    let config = LoraConfig {
        rank: 4,
        alpha: 8.0,
        rslora: false,
        dropout: 0.0,
        targets: vec![Module::QProj],
        layers: LayerSelection::All,
        overrides: Vec::new(),
    };
    Command::CreateAdapter { slot: slot(3), trunk: TrunkSlot(trunk), config, seed: 7, cohort }
}

fn is_drop(command: &Command) -> bool {
    matches!(command, Command::DropJob { job: JobSlot(3) })
}

#[tokio::test]
async fn answers_come_back_bit_for_bit_and_each_to_its_asker() {
    let (near, far, seen) = served();
    let (reader, writer) = near.into_split();
    let (client, work) = connect(reader, writer);
    let work = tokio::spawn(work);
    let refused = client.send(Command::Export { slot: slot(3) }).await.unwrap();
    let Reply::Loss(losses) = client.call(create(1, Some(5))).await.unwrap() else { panic!("no loss") };
    assert_eq!(losses[0].loss_sum.to_bits(), 0x7ff8_0000_0000_0001);
    assert_eq!(refused.await.unwrap_err(), EngineError::new(ErrorKind::NonFinite, "the loss is NaN"));
    drop(client);
    work.await.unwrap().unwrap();
    far.await.unwrap().unwrap();
    assert!(seen.lock().unwrap().last().is_some_and(is_drop), "the job is given up with its connection");
}

#[tokio::test]
async fn a_client_may_name_nothing_that_is_not_its_own() {
    let others = [
        Command::Export { slot: slot(4) },
        Command::DropJob { job: JobSlot(4) },
        Command::Reserve { job: JobSlot(3), adapter_bytes: 0, activation_bytes: 0 },
        Command::Snapshot { job: JobSlot(3) },
        Command::Restore { job: JobSlot(3), trunk: TrunkSlot(1), cohort: Some(5), state: Arc::default() },
        Command::Prioritise { job: JobSlot(3) },
        Command::Bound { bytes: 1 },
        create(0, Some(5)),
        create(1, Some(6)),
        create(1, None),
    ];
    for command in others {
        let (near, far, seen) = served();
        let (reader, writer) = near.into_split();
        let (client, work) = connect(reader, writer);
        let work = tokio::spawn(work);
        assert_eq!(client.call(command.clone()).await.unwrap_err(), EngineError::gone(), "{command:?}");
        assert!(matches!(far.await.unwrap(), Err(WireError::Breach(_))), "{command:?}");
        let seen = seen.lock().unwrap();
        assert!(seen.len() == 1 && is_drop(&seen[0]), "{seen:?}");
        drop(work);
    }
}

#[tokio::test]
async fn what_is_no_command_ends_the_connection() {
    let (near, far, _) = served();
    FrameWriter::new(near).send(&vec![0xffu8; 40]).await.unwrap();
    assert!(matches!(far.await.unwrap(), Err(WireError::Frame(FrameError::Malformed))));
    let (near, far, _) = served();
    // The writer's own end breaks while it writes, perhaps.
    drop(FrameWriter::new(near).send(&vec![0u8; BYTES_MAX as usize + 1]).await);
    assert!(matches!(far.await.unwrap(), Err(WireError::Frame(FrameError::TooLong { .. }))));
}

#[tokio::test]
async fn a_client_that_goes_away_leaves_nothing() {
    let (near, far, seen) = served();
    let (reader, writer) = near.into_split();
    let (client, work) = connect(reader, writer);
    let work = tokio::spawn(work);
    let pending = client.send(Command::DropAdapter { slot: slot(3) }).await.unwrap();
    while seen.lock().unwrap().is_empty() {
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    work.abort();
    assert_eq!(pending.await.unwrap_err(), EngineError::gone());
    far.await.unwrap().unwrap();
    assert!(seen.lock().unwrap().last().is_some_and(is_drop));
}

/// A client of what this client is of, over one stream more.
fn hop(grants: Grants) -> Client {
    let (near, far) = UnixStream::pair().unwrap();
    let (reader, writer) = far.into_split();
    tokio::spawn(serve(reader, writer, grants, BYTES_MAX));
    let (reader, writer) = near.into_split();
    let (client, work) = connect(reader, writer);
    tokio::spawn(work);
    client
}

/// As where guest and engine have processes of their own, and their parent stands between.
#[tokio::test]
async fn a_parent_between_changes_nothing_and_a_job_that_was_cut_off_reaches_the_engine_no_more() {
    let (engine, seen) = engine();
    let parent = hop(Grants::whole(engine));
    let grants = Grants::default();
    grants.grant(JobSlot(3), parent.clone(), vec![TrunkSlot(1)], Some(5));
    let guest = hop(grants.clone());
    parent.call(Command::Reserve { job: JobSlot(3), adapter_bytes: 1, activation_bytes: 2 }).await.unwrap();
    let Reply::Loss(losses) = guest.call(create(1, Some(5))).await.unwrap() else { panic!("no loss") };
    assert_eq!(losses[0].loss_sum.to_bits(), 0x7ff8_0000_0000_0001);
    grants.close(JobSlot(3));
    let unanswered = guest.send(create(1, Some(5))).await.unwrap();
    // The connection lives: what an honest client sends a moment too late is no breach.
    assert!(tokio::time::timeout(std::time::Duration::from_millis(100), unanswered).await.is_err());
    grants.revoke(JobSlot(3));
    assert_eq!(guest.call(create(1, Some(5))).await.unwrap_err(), EngineError::gone());
    assert_eq!(seen.lock().unwrap().iter().filter(|command| matches!(command, Command::CreateAdapter { .. })).count(), 1);
}
