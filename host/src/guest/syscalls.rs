//! The system calls that a locked-down process is left with.
//!
//! No call on the list opens, creates, connects, executes, traces or starts a process: what is open stays, and nothing is added.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule, TargetArch,
    apply_filter_all_threads,
};

type Rules = BTreeMap<i64, Vec<SeccompRule>>;
type Error = Box<dyn std::error::Error>;

/// What reads, writes, waits, and manages memory and threads of the process itself.
const ALLOWED: &[i64] = &[
    libc::SYS_read,
    libc::SYS_write,
    libc::SYS_readv,
    libc::SYS_writev,
    libc::SYS_recvfrom,
    libc::SYS_sendto,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_shutdown,
    libc::SYS_close,
    libc::SYS_fcntl,
    libc::SYS_ppoll,
    libc::SYS_epoll_create1,
    libc::SYS_epoll_ctl,
    libc::SYS_epoll_pwait,
    libc::SYS_eventfd2,
    libc::SYS_futex,
    libc::SYS_nanosleep,
    libc::SYS_clock_nanosleep,
    libc::SYS_clock_gettime,
    libc::SYS_clock_getres,
    libc::SYS_gettimeofday,
    libc::SYS_sched_yield,
    libc::SYS_sched_getaffinity,
    libc::SYS_getcpu,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_brk,
    libc::SYS_membarrier,
    libc::SYS_rt_sigaction,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sigaltstack,
    libc::SYS_restart_syscall,
    libc::SYS_set_robust_list,
    libc::SYS_rseq,
    libc::SYS_gettid,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_exit,
    libc::SYS_exit_group,
];

/// Those that only x86-64 has.
#[cfg(target_arch = "x86_64")]
const ALLOWED_HERE: &[i64] = &[libc::SYS_epoll_wait, libc::SYS_poll];
#[cfg(not(target_arch = "x86_64"))]
const ALLOWED_HERE: &[i64] = &[];

/// What libraries try and do without: answered as a machine would that has no such file.
const REFUSED: &[i64] = &[
    libc::SYS_openat,
    libc::SYS_newfstatat,
    libc::SYS_statx,
    libc::SYS_fstat,
    libc::SYS_readlinkat,
    libc::SYS_faccessat,
    libc::SYS_faccessat2,
    libc::SYS_ioctl,
    libc::SYS_prlimit64,
    libc::SYS_memfd_create,
    libc::SYS_uname,
];

#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[i64] = &[libc::SYS_open, libc::SYS_stat, libc::SYS_readlink, libc::SYS_access];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[i64] = &[];

/// Reads the vector of values that the kernel gave the process at its start; `libc` has no name for it.
const PR_GET_AUXV: u64 = 0x4155_5856;

/// Restricts every thread of the process, for ever.
pub(super) fn restrict() -> Result<(), Error> {
    // Where several filters stand, the sternest answer counts: ending the process, then an error, then leave.
    for program in [without_clone3()?, without_files()?, allowed()?] {
        apply_filter_all_threads(&program)?;
    }
    Ok(())
}

/// `clone3` takes its arguments from memory, where no filter sees them; libc then takes `clone`.
fn without_clone3() -> Result<BpfProgram, Error> {
    program(all(&[libc::SYS_clone3]), SeccompAction::Allow, SeccompAction::Errno(errno(libc::ENOSYS)))
}

fn without_files() -> Result<BpfProgram, Error> {
    let mut rules = all(REFUSED);
    rules.extend(all(REFUSED_HERE));
    program(rules, SeccompAction::Allow, SeccompAction::Errno(errno(libc::EACCES)))
}

fn allowed() -> Result<BpfProgram, Error> {
    let mut rules = Rules::new();
    for calls in [ALLOWED, ALLOWED_HERE, REFUSED, REFUSED_HERE, &[libc::SYS_clone3]] {
        rules.extend(all(calls));
    }
    // Threads only.
    let thread = u64::try_from(libc::CLONE_THREAD | libc::CLONE_VM | libc::CLONE_SIGHAND)?;
    rules.insert(libc::SYS_clone, vec![rule(0, SeccompCmpOp::MaskedEq(thread), thread)?]);
    // A thread's name, and where the kernel's own functions for clocks are; nothing else of a process's settings.
    let settings = [u64::try_from(libc::PR_SET_NAME)?, PR_GET_AUXV];
    let settings = settings.into_iter().map(|setting| rule(0, SeccompCmpOp::Eq, setting)).collect::<Result<_, _>>()?;
    rules.insert(libc::SYS_prctl, settings);
    // `abort`, and no signal to anybody else.
    rules.insert(libc::SYS_tgkill, vec![rule(0, SeccompCmpOp::Eq, u64::from(std::process::id()))?]);
    program(rules, SeccompAction::KillProcess, SeccompAction::Allow)
}

fn all(calls: &[i64]) -> Rules {
    calls.iter().map(|call| (*call, Vec::new())).collect()
}

fn rule(argument: u8, compare: SeccompCmpOp, value: u64) -> Result<SeccompRule, Error> {
    Ok(SeccompRule::new(vec![SeccompCondition::new(argument, SeccompCmpArgLen::Dword, compare, value)?])?)
}

fn program(rules: Rules, otherwise: SeccompAction, matched: SeccompAction) -> Result<BpfProgram, Error> {
    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    Ok(SeccompFilter::new(rules, otherwise, matched, arch)?.try_into()?)
}

fn errno(number: i32) -> u32 {
    number.unsigned_abs()
}
