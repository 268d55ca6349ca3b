//! The sandbox with real guests. One binary, so that one process has one sandbox and builds its guest once.

mod behaviour;
mod fairness;
mod limits;
mod refusals;
#[cfg(test)]
mod support;
mod training;
#[cfg(test)]
mod wat;
