//! How the launches of a pass reach the card: at its best, or with one of its means taken away, to measure what that one is worth.
//!
//! Changes no result: the same launches in an order that keeps what each needs.

/// A way to launch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Launching {
    /// Pieces met before are graphs whose launches wait only for what they need; the host goes on while the card works.
    #[default]
    Best,
    /// No graphs: one launch after another on one stream.
    NoGraphs,
    /// Graphs whose launches stand in one line, as on one stream: none beside another.
    OneStream,
    /// The host waits for the card after each piece, so that neither copies nor recording run beside the card's work.
    NoOverlap,
}
