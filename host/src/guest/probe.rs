//! Starts a guest process and ends it again, to see what the kernel grants. Gives it nothing to run.

use std::time::Duration;

use nodus_protocol::Digest;
use nodus_sandbox::Limits;
use nodus_sandbox::limits::GUEST_SILENCE_MS_MAX;

use super::process::Process;
use super::size::Size;

/// What this machine's kernel grants to guest processes, for people.
pub(crate) fn report() -> String {
    let started = || -> anyhow::Result<Vec<String>> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let size = Size::new(1, std::iter::once(Limits::DEFAULT), 0, Duration::from_millis(GUEST_SILENCE_MS_MAX));
            let process = Process::start(Digest::of(b""), size).await?;
            process.end().await;
            Ok(process.missing().to_vec())
        })
    };
    match started() {
        Ok(missing) if missing.is_empty() => {
            "a process of their own, wholly locked down (landlock, seccomp, no privileges, limits)".to_owned()
        }
        Ok(missing) => format!("a process of their own, but the kernel does not grant: {}", missing.join("; ")),
        Err(error) => format!("cannot start: {error:#}"),
    }
}
