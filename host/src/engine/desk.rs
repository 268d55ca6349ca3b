//! The engine process: loads what it is told, proves the device, then carries out commands until its parent is gone.
//!
//! Never keeps anything of the parent's beyond the folder that it was handed, which it only reads but for compiled kernels.

use std::io;
use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream as StdStream;

use anyhow::{Context as _, bail};
use cap_std::fs::Dir;
use nodus_kernels::cuda::refuses;
use nodus_protocol::frame::{FrameReader, FrameWriter};
use nodus_protocol::wire::{Grants, serve as serve_wire};
use tokio::io::BufReader;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};

use super::words::{Facts, FromEngine, Load, ToEngine, Vitals};
use crate::app::Surroundings;
use crate::cli::DeviceChoice;
use crate::cuda::ALONE;
use crate::error::exit_code;
use crate::process::handover;
use crate::process::socket::{inherited, split};
use crate::process::weights::Link;
use crate::run::choice::choose;
use crate::run::device::{Device, Rig};
use crate::run::inputs::OpenModel;
use crate::store::Store;

type Reader = FrameReader<BufReader<OwnedReadHalf>>;
type Writer = FrameWriter<OwnedWriteHalf>;

/// Serves the parent at standard input (commands) and standard output (all else) until it is gone.
///
/// # Errors
/// Ours: the process cannot be set up, or the parent is not understood.
pub(crate) fn serve(surroundings: &Surroundings) -> anyhow::Result<()> {
    let commands = inherited(io::stdin().as_fd())?;
    let control = StdStream::from(io::stdout().as_fd().try_clone_to_owned()?);
    let handed = handover::take(&control).context("an engine process is started by its parent, which hands it a folder")?;
    let mut handed = handed.into_iter();
    let dir = handed.next().context("an engine process is handed a folder first")?;
    let weights = handed.next().map(|stream| Link::new(stream.into()));
    let store = Store::open_to_read(Dir::from_std_file(dir.into()))?;
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(work((&store, surroundings, weights.as_ref()), commands, control))
}

async fn work(
    (store, surroundings, weights): (&Store, &Surroundings, Option<&Link>),
    commands: StdStream,
    control: StdStream,
) -> anyhow::Result<()> {
    let (reader, writer) = split(control)?;
    let (mut reader, mut writer) = (FrameReader::new(BufReader::new(reader), u64::from(u32::MAX)), FrameWriter::new(writer));
    let Some(ToEngine::Load(load)) = reader.next().await? else { bail!("the parent did not say what to load") };
    // Nothing else goes on in this process until the model is there.
    let (device, facts) = match device(store, surroundings, &load, weights) {
        Ok(loaded) => loaded,
        Err(error) => {
            let (text, is_users) = (format!("{error:#}"), exit_code(&error) == 2);
            return Ok(writer.send(&FromEngine::Refused { text, is_users }).await?);
        }
    };
    let (command_reader, command_writer) = split(commands)?;
    let engine = device.client();
    #[cfg(debug_assertions)]
    let engine = super::planted::planted(engine);
    let serving = serve_wire(command_reader, command_writer, Grants::whole(engine), u64::from(u32::MAX));
    writer.send(&FromEngine::Ready(Box::new(facts))).await?;
    tokio::select! {
        ended = serving => ended.context("serving the parent's commands"),
        ended = answer(&device, &mut reader, &mut writer) => ended,
    }
}

fn device(store: &Store, surroundings: &Surroundings, load: &Load, weights: Option<&Link>) -> anyhow::Result<(Device, Facts)> {
    let surroundings = Surroundings { devices: load.environment.clone(), ..surroundings.clone() };
    if let Some(bytes) = load.limit {
        let more = usize::try_from(bytes)?.saturating_add(1 << 20);
        let is_refused = refuses(ALONE, more).context("trying the process's memory limit")?;
        anyhow::ensure!(is_refused, "the process was given {more} bytes of the card, beyond its limit of {bytes}: the limit has no effect");
    }
    let model = OpenModel::open(store, &load.model)?;
    let here = if load.sees_it_alone { Some(DeviceChoice::Cuda(ALONE)) } else { load.device.device };
    // What it is told of a card by that number would be taken for another card's.
    let known_as = || format!("taking {}", load.device.device.unwrap_or_default());
    let chosen = choose(store, &surroundings, (here, load.device.dtype), std::iter::once(&model)).with_context(known_as)?;
    let chosen = chosen.known_as(load.device.device);
    let rig = Rig { chosen: &chosen, args: load.device, buffer_bytes_max: load.buffer_bytes_max, expected: None, weights };
    let device = Device::start(std::iter::once(&model), rig)?;
    let facts = Facts { slot: device.slot(&model)?, class: device.class(&model), device: chosen.name() };
    Ok((device, facts))
}

/// Answers until the parent is gone.
async fn answer(device: &Device, reader: &mut Reader, writer: &mut Writer) -> anyhow::Result<()> {
    while let Some(words) = reader.next().await? {
        let answer = match words {
            ToEngine::Load(_) => bail!("the parent said twice what to load"),
            ToEngine::Forget(job) => {
                let (bytes, device_ns) = device.handle().take(job);
                FromEngine::Used(job, Box::new(bytes), device_ns)
            }
            ToEngine::Ping => {
                let handle = device.handle();
                let busy_ms = u64::try_from(handle.busy().as_millis()).unwrap_or(u64::MAX);
                FromEngine::Lives(Box::new(Vitals { counts: handle.counts(), busy_ms, device_ns: handle.device_ns() }))
            }
        };
        writer.send(&answer).await?;
    }
    Ok(())
}
