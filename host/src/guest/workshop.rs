//! Where components become machine code: in a process of their own, once, kept in the data folder under this host's seal.
//!
//! Never loads what it did not seal itself, and never trusts a file for its name.

use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::process::ExitStatus;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::time::Duration;

use anyhow::{Context as _, bail, ensure};
use cap_std::fs::{Dir, OpenOptions, OpenOptionsExt as _, PermissionsExt as _};
use nodus_protocol::Digest;
use nodus_protocol::frame::decode;
use nodus_sandbox::{ComponentRefusal, Limits, Precompiled, Sandbox, SealKey};

use super::compile::Compiled;
use super::process::fresh_key;
use super::size::{OS_SANDBOX, Terms};
use crate::error::refusal;
use crate::process::rank::Rank;
use crate::process::spawn::{Ends, how, is_killed, lines, spawn};
use crate::store::{Store, write_synced};
use crate::text::escape_lines;

/// The folder of machine code, in the data folder.
const FOLDER: &str = "compiled";
const KEY: &str = "seal.key";
/// Numbers the files that are being written.
static PARTIAL: AtomicU64 = AtomicU64::new(0);
/// Pieces of machine code that are kept.
const KEPT_MAX: usize = 256;
/// How many times its CPU time a process may take by the clock, behind others as it may stand, before it counts as one that hangs.
const PATIENCE: u32 = 5;
/// Longest machine code that is taken from the process.
const CODE_BYTES_MAX: u64 = 1 << 30;

/// Compiles, and remembers.
pub(crate) struct Workshop {
    dir: Dir,
    key: SealKey,
    settings: Digest,
    limits: Limits,
    terms: Terms,
    /// Where its processes stand for the processor, where that is not with whoever asks.
    rank: Option<Rank>,
    is_warned: AtomicBool,
}

impl Workshop {
    /// The workshop of a data folder, for components within the limits that the sandbox has for uploads.
    ///
    /// # Errors
    /// Ours: the folder refuses, or others may read the key.
    pub(crate) fn open(store: &Store, sandbox: &Sandbox, terms: Terms) -> anyhow::Result<Self> {
        let whole = store.dir()?;
        whole.create_dir_all(FOLDER).context("making the folder of compiled components")?;
        let dir = whole.open_dir(FOLDER).context("opening the folder of compiled components")?;
        let key = own_key(&dir)?;
        Ok(Self {
            dir,
            key,
            settings: sandbox.settings(),
            limits: sandbox.upload_limits(),
            terms,
            rank: None,
            is_warned: AtomicBool::new(false),
        })
    }

    /// The same, whose processes stand there.
    pub(crate) fn standing(self, rank: Rank) -> Self {
        Self { rank: Some(rank), ..self }
    }

    /// A component's machine code.
    ///
    /// # Errors
    /// Ours: no process can be started, it hangs or is killed from outside, or the data folder refuses. The user's: the kernel locks down less than was demanded. Inside: why the
    /// component is no training job.
    pub(crate) fn compiled(&self, bytes: &[u8]) -> anyhow::Result<Result<Precompiled, ComponentRefusal>> {
        let component = Digest::of(bytes);
        let name = format!("{}-{}", component.hex(), self.settings.hex());
        if let Ok(sealed) = self.dir.read(&name) {
            if let Some(code) = Precompiled::open(&self.key, component, self.settings, &sealed) {
                return Ok(Ok(code));
            }
            tracing::warn!("{FOLDER}/{name} of the data folder was changed by somebody; the component is compiled again");
        }
        let code = match self.compile(bytes)? {
            Ok(code) => code,
            Err(refusal) => return Ok(Err(refusal)),
        };
        let sealed = self.key.seal(component, self.settings, &code);
        self.keep(&name, &sealed).context("keeping a compiled component")?;
        Precompiled::open(&self.key, component, self.settings, &sealed).map(Ok).context("a seal does not hold that was just made")
    }

    fn compile(&self, bytes: &[u8]) -> anyhow::Result<Result<Vec<u8>, ComponentRefusal>> {
        let said = match in_a_process(bytes.to_vec(), &self.limits, self.rank)? {
            Ok(said) => said,
            Err(how) => {
                return Ok(Err(ComponentRefusal::Compiler { how, ms: self.limits.compile_ms, bytes: self.limits.compile_memory_bytes }));
            }
        };
        let Compiled { missing, code } = said;
        if let Some(first) = missing.first() {
            if self.terms.require_os_sandbox {
                let text = format!("--require-os-sandbox: the kernel does not lock the compiler down wholly: {first}");
                return Err(refusal(OS_SANDBOX, text));
            }
            if !self.is_warned.swap(true, Relaxed) {
                tracing::warn!("the kernel does not lock the compiler down wholly: {}", missing.join("; "));
            }
        }
        Ok(code.map(serde_bytes::ByteBuf::into_vec))
    }

    /// Puts machine code in place, and removes the oldest beyond what is kept.
    fn keep(&self, name: &str, sealed: &[u8]) -> anyhow::Result<()> {
        // Two may compile the same at once, in this process too.
        let partial = format!(".{name}.{}.{}", std::process::id(), PARTIAL.fetch_add(1, Relaxed));
        if self.dir.exists(&partial) {
            self.dir.remove_file(&partial)?;
        }
        write_synced(&self.dir, &partial, sealed)?;
        self.dir.rename(&partial, &self.dir, name)?;
        let mut kept = Vec::new();
        for entry in self.dir.entries()? {
            let entry = entry?;
            if entry.file_name() != KEY {
                kept.push((entry.metadata()?.modified()?.into_std(), entry.file_name()));
            }
        }
        kept.sort();
        for (_, oldest) in kept.iter().take(kept.len().saturating_sub(KEPT_MAX)) {
            // Another process may have been quicker.
            drop(self.dir.remove_file(oldest));
        }
        Ok(())
    }
}

/// The key of this data folder's seals; at the first start, a new one.
fn own_key(dir: &Dir) -> anyhow::Result<SealKey> {
    if !dir.exists(KEY) {
        let partial = format!(".{KEY}.{}", std::process::id());
        let mut file = dir.open_with(&partial, OpenOptions::new().write(true).create(true).truncate(true).mode(0o600))?;
        file.write_all(fresh_key()?.as_bytes()).and_then(|()| file.sync_all()).context("writing the key of compiled components")?;
        // Whoever links first has made the key.
        match dir.hard_link(&partial, dir, KEY) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).context("making the key of compiled components");
            }
            _ => dir.remove_file(&partial)?,
        }
    }
    let mut file = dir.open(KEY).context("opening the key of compiled components")?;
    let mode = file.metadata()?.permissions().mode() & 0o777;
    ensure!(mode & !0o600 == 0, "{FOLDER}/{KEY} of the data folder has mode {mode:o}, expected 600: others could have any code run");
    let mut bytes = [0; SealKey::BYTES];
    file.read_exact(&mut bytes).context("reading the key of compiled components")?;
    Ok(SealKey::new(bytes))
}

/// Has a process compile this. Inside: how it died of it.
fn in_a_process(bytes: Vec<u8>, limits: &Limits, rank: Option<Rank>) -> anyhow::Result<Result<Compiled, String>> {
    let (input, mut feed) = io::pipe().context("making a pipe")?;
    let (result, output) = io::pipe().context("making a pipe")?;
    let ends = Ends { input: OwnedFd::from(input), output: OwnedFd::from(output) };
    let arguments = [("limits", serde_json::to_string(limits)?)];
    let start = move || {
        rank.into_iter().for_each(Rank::take);
        spawn("compile", &arguments, &[], ends)
    };
    // On a thread of its own, since whoever asks stays where it stands.
    let started = std::thread::spawn(start).join().map_err(|_| anyhow::anyhow!("a thread of the host panicked"))?;
    let mut child = started.context("starting the process that compiles")?;
    let complaints = child.stderr.take();
    let (sender, receiver) = channel();
    let read = std::thread::scope(|scope| {
        // A process that dies early does not take all of it.
        scope.spawn(move || drop(feed.write_all(&bytes)));
        scope.spawn(move || {
            let mut said = Vec::new();
            let read = result.take(CODE_BYTES_MAX).read_to_end(&mut said).map(|_| said);
            drop(sender.send(read));
        });
        scope.spawn(move || {
            let log = |line: &str| tracing::warn!("the process that compiles: {}", escape_lines(line, 2000));
            if let Some(complaints) = complaints {
                lines(complaints, log);
            }
        });
        let read = receiver.recv_timeout(PATIENCE * Duration::from_millis(limits.compile_ms));
        if read.is_err() {
            drop(child.kill());
        }
        read
    });
    judged(read.ok(), child.wait())
}

/// What came of it: the component is to blame for what it has the process do, and not for what the process is not let do.
fn judged(said: Option<io::Result<Vec<u8>>>, status: io::Result<ExitStatus>) -> anyhow::Result<Result<Compiled, String>> {
    let said = said.context("the process that compiles had not used up its CPU time and took too long all the same; it was ended")?;
    let said = said.context("reading from the process that compiles")?;
    match decode(&said) {
        Ok(compiled) if status.as_ref().is_ok_and(ExitStatus::success) => Ok(Ok(compiled)),
        _ if is_killed(&status) => bail!("the process that compiles {}", how(status)),
        _ => Ok(Err(how(status))),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::ExitStatus;

    use super::judged;

    #[test]
    fn a_component_is_to_blame_for_what_it_makes_the_compiler_do_and_for_nothing_else() {
        let ended = |signal| judged(Some(Ok(Vec::new())), Ok(ExitStatus::from_raw(signal)));
        assert!(ended(libc::SIGXCPU).unwrap().unwrap_err().contains("more CPU time than it may"));
        assert!(ended(libc::SIGSEGV).unwrap().unwrap_err().contains("SIGSEGV"));
        assert!(ended(libc::SIGKILL).unwrap_err().to_string().contains("killed from outside"));
        for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT] {
            assert!(ended(signal).unwrap_err().to_string().contains("was killed by signal"));
        }
        assert!(judged(Some(Ok(Vec::new())), Err(std::io::Error::other("gone"))).unwrap_err().to_string().contains("was lost"));
        let hung = judged(None, Ok(ExitStatus::from_raw(libc::SIGKILL))).unwrap_err();
        assert!(hung.to_string().contains("took too long all the same"), "{hung}");
    }
}
