//! What wasmtime generates from `wit/`: the world, its types and the traits that the `wit` module implements.
//!
//! Alone in its module, because generated code follows none of the house's rules.

wasmtime::component::bindgen!({
    path: "../../wit",
    world: "training-job",
    imports: {
        // These wait for services or for the engine; all others the sandbox answers itself, without suspending the guest.
        "nodus:gpu/trunk.[static]trunk.open": async | trappable,
        "nodus:gpu/data.[static]dataset.open": async | trappable,
        "nodus:gpu/training.[method]pending-loss.wait": async | trappable,
        "nodus:gpu/training.[method]pending-step.wait": async | trappable,
        "nodus:gpu/training.[static]adapter.create": async | trappable,
        "nodus:gpu/training.[static]adapter.load": async | trappable,
        "nodus:gpu/training.[drop]adapter": async | trappable,
        "nodus:gpu/training.[method]adapter.forward-backward": async | trappable,
        "nodus:gpu/training.[method]adapter.optim-step": async | trappable,
        "nodus:gpu/training.[method]adapter.train-step": async | trappable,
        "nodus:gpu/training.[method]adapter.evaluate": async | trappable,
        "nodus:gpu/training.[method]adapter.save": async | trappable,
        "nodus:gpu/job.should-stop": async | trappable,
        default: trappable,
    },
    exports: { default: async },
    trappable_error_type: { "nodus:gpu/types.error" => crate::wit::Fault },
    with: {
        "nodus:gpu/trunk.trunk": crate::wit::handles::TrunkHandle,
        "nodus:gpu/data.dataset": crate::wit::handles::DatasetHandle,
        "nodus:gpu/data.batch": crate::wit::handles::BatchHandle,
        "nodus:gpu/training.adapter": crate::wit::handles::AdapterHandle,
        "nodus:gpu/training.pending-loss": crate::wit::handles::PendingLoss,
        "nodus:gpu/training.pending-step": crate::wit::handles::PendingStep,
    },
});
