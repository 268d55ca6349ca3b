//! The sandbox with real guests. One binary, so that one process has one sandbox and builds its guest once.

mod behaviour;
#[cfg(test)]
mod cancel;
#[cfg(test)]
mod fairness;
mod limits;
mod refusals;
#[cfg(test)]
mod support;
mod training;
#[cfg(test)]
mod wat;
