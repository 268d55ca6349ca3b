//! Starts this program once more, in another of its roles: with two sockets and nothing else.
//!
//! Hands on no environment but what is named, no folder, no descriptor but those three of standard input, output and error.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};

/// Standard input and output of a process.
pub(crate) struct Ends {
    pub(crate) input: OwnedFd,
    pub(crate) output: OwnedFd,
}

/// Starts the verb with these arguments. Its standard error is for the host's log.
pub(crate) fn spawn(verb: &str, arguments: &[(&str, String)], environment: &[(String, String)], ends: Ends) -> io::Result<Child> {
    // Whoever started this program may have left descriptors open that its children would inherit.
    close_fds::set_fds_cloexec_threadsafe(3, &[]);
    let mut command = Command::new(program()?);
    command.arg(verb);
    for (name, value) in arguments {
        command.arg(format!("--{name}={value}"));
    }
    // Of its own group: Ctrl-C is for this process, which tells the others.
    command.arg0("nodus-host").env_clear().envs(environment.iter().cloned()).current_dir("/").process_group(0);
    command.stdin(Stdio::from(ends.input)).stdout(Stdio::from(ends.output)).stderr(Stdio::piped()).spawn()
}

/// This program, also where its file was replaced meanwhile.
pub(crate) fn program() -> io::Result<PathBuf> {
    if cfg!(target_os = "linux") { Ok(PathBuf::from("/proc/self/exe")) } else { std::env::current_exe() }
}

/// Signals that a process gets for what it does itself.
const ITS_OWN: [i32; 8] =
    [libc::SIGXCPU, libc::SIGSYS, libc::SIGABRT, libc::SIGSEGV, libc::SIGBUS, libc::SIGILL, libc::SIGFPE, libc::SIGTRAP];

/// Whether it was not the process that brought about its end: somebody sent it a signal (the operator, the kernel where the machine's memory runs out), or
/// how it ended cannot be told.
pub(crate) fn is_killed(status: &io::Result<ExitStatus>) -> bool {
    status.as_ref().map_or(true, |status| status.signal().is_some_and(|signal| !ITS_OWN.contains(&signal)))
}

/// How a process ended, to stand after its name.
pub(crate) fn how(status: io::Result<ExitStatus>) -> String {
    let status = match status {
        Ok(status) => status,
        Err(error) => return format!("was lost: {error}"),
    };
    match (status.signal(), status.code()) {
        (Some(libc::SIGSYS), _) => "was ended by the kernel: it made a system call that it may not make".to_owned(),
        (Some(libc::SIGXCPU), _) => "was ended by the kernel: it used more CPU time than it may".to_owned(),
        (Some(libc::SIGKILL), _) => "was killed from outside (SIGKILL), as the kernel does where the machine runs out of memory".to_owned(),
        (Some(signal), _) => format!("was killed by signal {signal}{}", signal_name(signal)),
        (None, code) => format!("ended with exit code {}", code.unwrap_or_default()),
    }
}

fn signal_name(signal: i32) -> &'static str {
    match signal {
        libc::SIGSEGV => " (SIGSEGV)",
        libc::SIGABRT => " (SIGABRT)",
        libc::SIGBUS => " (SIGBUS)",
        libc::SIGILL => " (SIGILL)",
        libc::SIGTERM => " (SIGTERM)",
        _ => "",
    }
}

/// Hands on the lines of a stream, each cut to a length that memory bears.
pub(crate) fn lines(mut stream: impl io::Read, mut line: impl FnMut(&str)) {
    const LINE_BYTES_MAX: usize = 4096;
    const LINES_MAX: usize = 1000;
    let (mut buffer, mut unfinished, mut count) = ([0; LINE_BYTES_MAX], Vec::new(), 0);
    loop {
        let read = stream.read(&mut buffer).unwrap_or(0);
        for byte in buffer.iter().take(read) {
            if *byte != b'\n' && unfinished.len() < LINE_BYTES_MAX {
                unfinished.push(*byte);
                continue;
            }
            count += 1;
            if count <= LINES_MAX {
                line(&String::from_utf8_lossy(&unfinished));
            }
            unfinished.clear();
        }
        if read == 0 {
            break;
        }
    }
    if !unfinished.is_empty() && count < LINES_MAX {
        line(&String::from_utf8_lossy(&unfinished));
    }
}
