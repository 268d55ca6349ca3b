//! A fault that tests plant: an engine that ends in the middle of a job's step. Not in a release build.
//!
//! Never touches a job of another seed.

use std::collections::BTreeMap;

use nodus_protocol::{AdapterSlot, Client, Command, channel};

/// Jobs of seeds from here to 0xffff further end their engine at their first step, or so many later.
const SEED: u64 = 0xfa17_0000;

/// The engine behind its planted fault.
pub(super) fn planted(engine: Client) -> Client {
    let (client, mut inbox) = channel(64);
    tokio::spawn(async move {
        let mut left: BTreeMap<AdapterSlot, u64> = BTreeMap::new();
        while let Some(request) = inbox.recv().await {
            let (command, answer) = request.into_parts();
            match &command {
                Command::CreateAdapter { slot, seed, .. } if *seed & !0xffff == SEED => drop(left.insert(*slot, *seed - SEED)),
                Command::TrainStep { slot, .. } => match left.get_mut(slot) {
                    Some(0) => std::process::abort(),
                    Some(left) => *left -= 1,
                    None => {}
                },
                Command::Restore { job, state, .. } => {
                    let faulty = state.adapters.iter().filter(|adapter| adapter.seed & !0xffff == SEED);
                    let at = |index| AdapterSlot { job: *job, index };
                    left.extend(faulty.map(|adapter| (at(adapter.index), (adapter.seed - SEED).saturating_sub(adapter.steps))));
                }
                _ => {}
            }
            match engine.send(command).await {
                Ok(pending) => drop(tokio::spawn(async move { answer.give(pending.await) })),
                Err(error) => answer.give(Err(error)),
            }
        }
    });
    client
}
