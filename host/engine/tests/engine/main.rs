//! Tests of the engine on the CPU device and, where there is one, on a card, through commands and replies.

#[cfg(test)]
mod adapters;
#[cfg(test)]
mod apart;
#[cfg(test)]
mod broken;
#[cfg(test)]
mod cache;
#[cfg(test)]
mod cuda;
#[cfg(test)]
mod devices;
#[cfg(all(test, not(feature = "broken-kernel")))]
mod exactness;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod golden;
#[cfg(test)]
mod jobs;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod mix;
#[cfg(test)]
mod semantics;
#[cfg(test)]
mod sharing;
#[cfg(test)]
mod snapshot;
#[cfg(test)]
mod support;
#[cfg(test)]
mod thread;
#[cfg(test)]
mod trunks;
