//! The engine's socket, from both ends: what a guest process sends, and what its parent answers.
#![no_main]

use libfuzzer_sys::fuzz_target;
use nodus_protocol::wire::{Grants, connect, serve};
use nodus_protocol::{Command, EngineError, ErrorKind, Inbox, JobSlot, TrunkSlot, channel};
use tokio::runtime::Builder;

/// Refuses everything; what a client without rights asks must never reach it.
async fn engine(mut inbox: Inbox) {
    while let Some(request) = inbox.recv().await {
        if let Command::CreateAdapter { slot, trunk, cohort, .. } | Command::LoadAdapter { slot, trunk, cohort, .. } = &request.command {
            assert!(slot.job == JobSlot(3) && *trunk == TrunkSlot(1) && *cohort == Some(5), "{:?}", request.command);
        }
        let is_hosts = matches!(
            request.command,
            Command::Reserve { .. } | Command::Prioritise { .. } | Command::Snapshot { .. } | Command::Restore { .. }
        );
        assert!(!is_hosts, "a client asked what only the host may");
        request.answer(Err(EngineError::new(ErrorKind::NonFinite, "no")));
    }
}

fuzz_target!(|data: &[u8]| {
    let runtime = Builder::new_current_thread().build().expect("a runtime");
    runtime.block_on(async {
        let (client, inbox) = channel(16);
        let engine = tokio::spawn(engine(inbox));
        let grants = Grants::default();
        grants.grant(JobSlot(3), client, vec![TrunkSlot(1)], Some(5));
        drop(serve(data, tokio::io::sink(), grants.clone(), 1 << 16).await);
        // The engine ends with its last client.
        grants.revoke(JobSlot(3));
        engine.await.expect("the engine heard what it must not");

        let (client, work) = connect(data, tokio::io::sink());
        let asked = tokio::spawn(async move { client.call(Command::DropJob { job: JobSlot(3) }).await });
        drop(work.await);
        drop(asked.await);
    });
});
