//! The state as its users see it: through its public functions, on a real disk.
#![expect(clippy::unwrap_used, clippy::indexing_slicing, reason = "a panic is how a test fails")]
#![expect(clippy::disallowed_methods, reason = "looks at the folder from outside")]

mod apart;
mod delete;
mod disk;
mod events;
mod freed;
mod machine;
mod partial;
mod replay;
mod submit;
mod support;
mod tokens;
