//! A process gives up everything that it could do: privileges, files, network, other processes, system calls.
//!
//! Cannot be taken back, and must come before any byte of a stranger is looked at.

/// What a process may use of the machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ration {
    /// Memory that it writes to.
    pub(super) data_bytes: Option<u64>,
    /// Addresses, used or not.
    pub(super) address_bytes: Option<u64>,
    /// CPU time of all its threads.
    pub(super) cpu_seconds: u64,
}

#[cfg(target_os = "linux")]
pub(super) use linux::{close_the_door, give_up};

/// Elsewhere than on Linux there is nothing of it.
#[cfg(not(target_os = "linux"))]
pub(super) fn give_up(_: Ration) -> Vec<String> {
    vec!["this system has neither landlock nor seccomp".to_owned()]
}

/// Elsewhere than on Linux there is nothing of it.
#[cfg(not(target_os = "linux"))]
pub(super) fn close_the_door() -> Vec<String> {
    Vec::new()
}

#[cfg(target_os = "linux")]
mod linux {
    use landlock::{ABI, Access as _, AccessFs, AccessNet, CompatLevel, Compatible as _, Ruleset, RulesetAttr as _, RulesetStatus, Scope};
    use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
    use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities, set_no_new_privs};

    use super::Ration;
    use crate::guest::syscalls;

    /// Descriptors that a process may have open: its sockets, and what its runtimes wait with.
    const FILES_MAX: u64 = 64;

    /// The first half, for a process of one thread; threads that it starts later are born so. Answers what the kernel did not grant.
    pub(crate) fn give_up(ration: Ration) -> Vec<String> {
        let mut missing = Vec::new();
        let mut grant = |what: &str, result: Result<(), String>| {
            if let Err(why) = result {
                missing.push(format!("{what}: {why}"));
            }
        };
        let said = |error: rustix::io::Errno| error.to_string();
        grant("no new privileges", set_no_new_privs(true).map_err(said));
        grant("landlock", landlock());
        let none = CapabilitySet::empty();
        let capabilities = CapabilitySets { effective: none, permitted: none, inheritable: none };
        grant("no capabilities", set_capabilities(None, capabilities).map_err(said));
        // Neither a debugger nor /proc/PID/mem of the same user reaches it, and it leaves no core file.
        grant("not dumpable", set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(said));
        let limits = [
            (Resource::Core, Some(0)),
            (Resource::Fsize, Some(0)),
            (Resource::Memlock, Some(0)),
            (Resource::Msgqueue, Some(0)),
            (Resource::Nofile, Some(FILES_MAX)),
            (Resource::Data, ration.data_bytes),
            (Resource::As, ration.address_bytes),
            (Resource::Cpu, Some(ration.cpu_seconds)),
        ];
        // Where a limit on time is the last one, the kernel kills as it does for others' sake; so that it is told apart, a signal of its own comes before.
        let last = |resource, most: u64| if matches!(resource, Resource::Cpu) { most.saturating_add(1) } else { most };
        for (resource, most) in limits.into_iter().filter(|(_, most)| most.is_some()) {
            grant(
                &format!("a limit on {resource:?}"),
                setrlimit(resource, Rlimit { current: most, maximum: most.map(|most| last(resource, most)) }).map_err(said),
            );
        }
        missing
    }

    /// The second half, for all threads that there are: from here on a system call that is not on the list ends the process.
    pub(crate) fn close_the_door() -> Vec<String> {
        syscalls::restrict().err().map(|why| format!("seccomp: {why}")).into_iter().collect()
    }

    /// No path, no port, no signal and no abstract socket outside: everything that landlock knows is forbidden, and no rule allows any.
    fn landlock() -> Result<(), String> {
        let abi = ABI::V6;
        let restrict = || {
            let rules = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
            let rules =
                rules.handle_access(AccessFs::from_all(abi))?.handle_access(AccessNet::from_all(abi))?.scope(Scope::from_all(abi))?;
            rules.create()?.restrict_self()
        };
        match restrict().map_err(|error: landlock::RulesetError| error.to_string())?.ruleset {
            RulesetStatus::FullyEnforced => Ok(()),
            RulesetStatus::PartiallyEnforced => Err("the kernel knows a part of it only (all of it: Linux 6.12)".to_owned()),
            RulesetStatus::NotEnforced => Err("the kernel does not have it".to_owned()),
        }
    }
}
