//! Memory is planned: what a job needs is known before it runs, what is reserved is kept for it, and every byte is counted.

use std::sync::Arc;

use nodus_engine::plan::{BatchSize, needs};
use nodus_engine::{AdapterBytes, Engine, JobBytes, Options};
use nodus_kernels::cpu::CpuDevice;
use nodus_protocol::{Architecture, Batch, Command, ErrorKind, JobSlot, LayerSelection, LoraConfig, Module};

use crate::support::{
    TRUNK, all_linear, batch, bits, create, done, engine, engine_with, error, evaluate, flat, forward_backward, llama, lora, losses, model,
    slot, step, train, weights,
};

fn size(batch: &Batch) -> BatchSize {
    batch.sequences.iter().map(|sequence| BatchSize::of(sequence, 1)).sum()
}

fn limited(limit_bytes: u64) -> Engine<CpuDevice> {
    engine_with(&llama(), CpuDevice::with_memory_limit(1, limit_bytes).unwrap(), Options::default())
}

/// Bytes of an engine with nothing but its trunk.
fn empty() -> u64 {
    limited(u64::MAX).counts().allocated_bytes
}

fn reserve(job: u32, adapter_bytes: u64, activation_bytes: u64) -> Command {
    Command::Reserve { job: JobSlot(job), adapter_bytes, activation_bytes }
}

/// With the bytes that the plan names a step runs and has its bits; with one less it is refused, with the numbers.
#[test]
fn a_job_needs_what_the_plan_says() {
    let configs: [(Architecture, LoraConfig); 4] = [
        (Architecture::Llama, all_linear()),
        (Architecture::Qwen3, lora(7, &[Module::VProj, Module::DownProj], LayerSelection::Last(2))),
        (Architecture::Mistral, lora(3, &[Module::DownProj], LayerSelection::Last(1))),
        (Architecture::Qwen2, lora(1, &[Module::QProj], LayerSelection::Only(vec![1]))),
    ];
    for (architecture, config) in configs {
        let model = model(architecture);
        // Each ends in a labelled row.
        let batch = batch(&model, 1, &[30, 4, 13]);
        let needs = needs(&model, &config, size(&batch));
        let run = |adapter_bytes: u64, activation_bytes: u64| {
            let empty = engine(&model).counts().allocated_bytes;
            let device = CpuDevice::with_memory_limit(1, empty + adapter_bytes + activation_bytes).unwrap();
            let mut engine = engine_with(&model, device, Options::default());
            engine.execute(create(slot(0), config.clone(), None))?;
            assert_eq!(engine.counts().allocated_bytes - empty, needs.adapter_bytes);
            engine.execute(train(slot(0), &batch))
        };
        assert_eq!(bits(&run(needs.adapter_bytes, needs.activation_bytes)), bits(&run(1 << 30, 1 << 30)));
        let refused = error(run(needs.adapter_bytes, needs.activation_bytes - 1));
        assert_eq!(refused.kind, ErrorKind::QuotaExceeded);
        assert!(
            refused.message.contains(&format!("{} bytes asked for, {} free", needs.activation_bytes, needs.activation_bytes - 1)),
            "{refused}"
        );
        let refused = error(run(needs.adapter_bytes - 1, 0));
        let says = format!("device memory: the adapter needs {} bytes, {} are free", needs.adapter_bytes, needs.adapter_bytes - 1);
        assert!(refused.kind == ErrorKind::QuotaExceeded && refused.message.contains(&says), "{refused}");
    }
}

#[test]
fn every_byte_of_a_job_is_counted_and_comes_back() {
    let (model, config) = (llama(), all_linear());
    let batch = batch(&model, 1, &[9, 4]);
    let needs = needs(&model, &config, size(&batch));
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), config.clone(), None)));
    done(engine.execute(create(slot(1), config, None)));
    let made = AdapterBytes { granted: needs.adapter_bytes, written: needs.adapter_bytes / 4, ..AdapterBytes::default() };
    let held = JobBytes {
        allocated_bytes: needs.adapter_bytes,
        peak_bytes: needs.adapter_bytes,
        adapters: [(0, made)].into(),
        ..JobBytes::default()
    };
    assert_eq!(engine.jobs()[&JobSlot(0)], held);
    losses(engine.execute(evaluate(slot(0), &batch)));
    let evaluated = engine.jobs()[&JobSlot(0)].peak_bytes;
    step(engine.execute(train(slot(0), &batch)));
    let passed = JobBytes { peak_bytes: needs.adapter_bytes + needs.activation_bytes, ..held.clone() };
    assert_eq!(engine.jobs()[&JobSlot(0)], passed, "activations are let go after the pass, and counted in the peak");
    assert!(evaluated > held.peak_bytes && evaluated < passed.peak_bytes);

    let exported = Arc::new(weights(engine.execute(Command::Export { slot: slot(0) })));
    let second = nodus_protocol::AdapterSlot { index: 1, ..slot(0) };
    done(engine.execute(Command::LoadAdapter { slot: second, trunk: TRUNK, weights: exported, seed: 7, cohort: None }));
    done(engine.execute(Command::DropAdapter { slot: slot(0) }));
    let exported = AdapterBytes { exported: needs.adapter_bytes / 4, zeroed: needs.adapter_bytes, ..made };
    let moved = JobBytes {
        peak_bytes: passed.peak_bytes.max(2 * needs.adapter_bytes),
        adapters: [(0, exported), (1, made)].into(),
        ..held.clone()
    };
    assert_eq!(engine.jobs()[&JobSlot(0)], moved, "each adapter has an account of its own");
    done(engine.execute(Command::DropJob { job: JobSlot(0) }));
    let dropped = AdapterBytes { zeroed: needs.adapter_bytes, ..made };
    let ended = JobBytes { allocated_bytes: 0, adapters: [(0, exported), (1, dropped)].into(), ..moved };
    assert_eq!(engine.jobs()[&JobSlot(0)], ended);
    assert_eq!(engine.jobs()[&JobSlot(1)], held, "a neighbour's figures");
}

/// What is reserved is there when it is wanted, whatever others ask for meanwhile.
#[test]
fn a_reservation_holds_against_everybody() {
    let (model, config) = (llama(), all_linear());
    let batch = batch(&model, 1, &[30, 4, 13]);
    let needs = needs(&model, &config, size(&batch));
    let (adapter, activation) = (needs.adapter_bytes, needs.activation_bytes);
    let mut engine = limited(empty() + 2 * adapter + activation);
    done(engine.execute(reserve(0, adapter, activation)));
    done(engine.execute(create(slot(1), config.clone(), None)));
    let refused = error(engine.execute(create(slot(2), lora(1, &[Module::QProj], LayerSelection::Last(1)), None)));
    assert_eq!(refused.kind, ErrorKind::QuotaExceeded);
    assert!(refused.message.contains("bytes, 0 are free on the device"), "{refused}");
    let refused = error(engine.execute(reserve(3, 1, 0)));
    assert!(refused.message.contains("the job needs 1 bytes for adapters and 0 for activations"), "{refused}");
    done(engine.execute(create(slot(0), config.clone(), None)));
    step(engine.execute(train(slot(0), &batch)));
    // Activations are needed by one at a time; who needs no more than the largest has them too.
    done(engine.execute(reserve(3, 0, activation)));
    assert_eq!(error(engine.execute(reserve(3, 0, activation + 1))).kind, ErrorKind::QuotaExceeded);
    step(engine.execute(train(slot(1), &batch)));

    // With the job its reservation ends.
    done(engine.execute(Command::DropJob { job: JobSlot(0) }));
    done(engine.execute(create(slot(2), config, None)));
}

/// A job with a reservation is refused by its own numbers, the same however much is free.
#[test]
fn a_job_with_a_reservation_sees_no_neighbour() {
    let (model, config) = (llama(), all_linear());
    let (small, large) = (batch(&model, 1, &[9, 4]), batch(&model, 1, &[9, 40]));
    let needs = needs(&model, &config, size(&small));
    let run = |mut engine: Engine<CpuDevice>, neighbours: u32| {
        done(engine.execute(reserve(0, needs.adapter_bytes, needs.activation_bytes)));
        for job in 1..=neighbours {
            done(engine.execute(create(slot(job), all_linear(), None)));
        }
        let second = nodus_protocol::AdapterSlot { index: 1, ..slot(0) };
        let commands = vec![
            create(slot(0), config.clone(), None),
            create(second, config.clone(), None),
            train(slot(0), &small),
            train(slot(0), &large),
            evaluate(slot(0), &small),
        ];
        engine.execute_all(commands).iter().map(bits).collect::<Vec<_>>()
    };
    let alone = run(limited(u64::MAX), 0);
    let crowded = run(limited(empty() + 4 * needs.adapter_bytes + needs.activation_bytes), 3);
    assert_eq!(alone, crowded);
    let own = needs.adapter_bytes;
    assert!(alone[1].contains(&format!("the adapter needs {own} bytes, 0 of the job's {own} are left")), "{}", alone[1]);
    assert!(alone[3].contains(&format!("of activations, expected at most the job's {}", needs.activation_bytes)), "{}", alone[3]);
    assert!(alone[2].starts_with("step 1") && !alone[4].contains("Err"), "{alone:?}");
}

/// Memory that held a job's numbers holds none of them when the next job gets it: read back, every gradient and every B is zero.
#[test]
fn the_next_job_reads_zeros() {
    let model = llama();
    let mut engine = engine(&model);
    for job in 0..20 {
        done(engine.execute(create(slot(job), all_linear(), None)));
        assert!(flat(&engine.gradients(slot(job)).unwrap()).iter().all(|value| value.to_bits() == 0), "job {job} reads another's gradient");
        let fresh = weights(engine.execute(Command::Export { slot: slot(job) }));
        assert!(fresh.modules.iter().flat_map(|module| &module.b).all(|value| value.to_bits() == 0), "job {job} reads another's weights");
        step(engine.execute(train(slot(job), &batch(&model, u64::from(job), &[9, 4]))));
        losses(engine.execute(forward_backward(slot(job), &batch(&model, 50, &[12]))));
        assert!(flat(&engine.gradients(slot(job)).unwrap()).iter().any(|value| *value != 0.0));
        done(engine.execute(Command::DropJob { job: JobSlot(job) }));
    }
}

/// What an engine may have changes while it works; what lives stays, and a job that would be beyond it is refused.
#[test]
fn a_bound_holds_from_when_it_is_said() {
    let mut engine = Engine::new(CpuDevice::new(1).unwrap(), Options::default());
    engine.execute(Command::Bound { bytes: 1000 }).unwrap();
    engine.execute(reserve(1, 600, 100)).unwrap();
    let refused = engine.execute(reserve(2, 600, 0)).unwrap_err();
    assert!(refused.message.contains("free on the device"), "{refused}");
    engine.execute(Command::Bound { bytes: 2000 }).unwrap();
    engine.execute(reserve(2, 600, 0)).unwrap();
}
