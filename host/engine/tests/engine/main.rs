//! Tests of the engine on the CPU device, through commands and replies.

#[cfg(test)]
mod adapters;
#[cfg(test)]
mod broken;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod semantics;
#[cfg(test)]
mod sharing;
#[cfg(test)]
mod support;
#[cfg(test)]
mod thread;
#[cfg(test)]
mod trunks;
