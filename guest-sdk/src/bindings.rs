//! What `wit-bindgen` makes of the contract in `wit/`.
//!
//! Never used by a tenant directly, except through [`job!`](crate::job). On a target other than wasm32 every call panics.

wit_bindgen::generate!({
    world: "training-job",
    path: "../wit",
    pub_export_macro: true,
    additional_derives: [PartialEq],
});

pub use nodus::gpu::{data, job, training, trunk, types};
