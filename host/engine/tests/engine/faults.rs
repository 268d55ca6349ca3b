//! Faults that public trackers report of other systems, between adapters and in the order of commands; one test each, unless another file has
//! it. Each test says what went wrong there.

use std::sync::Arc;

use nodus_protocol::{AdamW, AdapterSlot, Command, ErrorKind, JobSlot, LayerSelection, Module, ModuleWeights, Normalisation, Reply};

use crate::support::{
    TRUNK, adamw, all_linear, batch, bits, create, done, engine, error, evaluate, flat, forward_backward, llama, lora, losses, optim_step,
    slot, step, train, weighted, weights,
};

fn load(slot: AdapterSlot, weights: nodus_protocol::AdapterWeights) -> Command {
    Command::LoadAdapter { slot, trunk: TRUNK, weights: Arc::new(weights), seed: 7, cohort: None }
}

/// State: after forward-backward on A and B, the step of A took B's gradient for its norm.
#[test]
fn a_step_between_others_gradients_has_its_own_norm() {
    let model = llama();
    let batches = [batch(&model, 1, &[9, 4]), batch(&model, 2, &[17])];
    let alone = |job: usize| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        losses(engine.execute(forward_backward(slot(0), &batches[job])));
        bits(&engine.execute(optim_step(slot(0))))
    };
    let mut engine = engine(&model);
    for job in 0..2 {
        done(engine.execute(create(slot(job), all_linear(), None)));
    }
    for job in 0..2 {
        losses(engine.execute(forward_backward(slot(job), &batches[job as usize])));
    }
    assert_eq!([0, 1].map(|job| bits(&engine.execute(optim_step(slot(job))))), [alone(0), alone(1)]);
}

/// State: a restore of the weights alone left old master weights and moments, and the first step wrote them over the restored ones.
#[test]
fn the_first_step_after_loading_begins_at_the_loaded_weights() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    step(engine.execute(train(slot(0), &batch)));
    let saved = weights(engine.execute(Command::Export { slot: slot(0) }));
    for _ in 0..4 {
        step(engine.execute(train(slot(0), &batch)));
    }
    done(engine.execute(Command::DropAdapter { slot: slot(0) }));
    let after_loading = |engine: &mut nodus_engine::Engine<_>| {
        done(engine.execute(load(slot(0), saved.clone())));
        [train(slot(0), &batch), Command::Export { slot: slot(0) }].map(|command| bits(&engine.execute(command)))
    };
    let restored = after_loading(&mut engine);
    assert_eq!(restored, after_loading(&mut crate::support::engine(&model)));
    // A step of learning rate 0.02 moves no weight by more than about that.
    let moved = weights(engine.execute(Command::Export { slot: slot(0) }));
    let furthest = flat(&moved).iter().zip(flat(&saved)).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(furthest > 0.0 && furthest < 0.03, "{furthest}");
}

/// State: a loss that stayed finite hid a gradient that did not, and the whole slot went NaN with its neighbours.
#[test]
fn a_gradient_that_overflows_ends_its_job_alone() {
    let model = llama();
    let plain = batch(&model, 1, &[9, 4]);
    let huge = nodus_protocol::Batch { sequences: plain.sequences.iter().map(|s| weighted(&model, s, 3e38)).collect() };
    let optimiser = AdamW { normalisation: Normalisation::One, ..adamw() };
    let neighbours = |overflows: bool| {
        let mut engine = engine(&model);
        for job in 0..3 {
            done(engine.execute(create(slot(job), all_linear(), Some(1))));
        }
        let middle = if overflows { &huge } else { &plain };
        let mut all = engine.execute_all(vec![
            train(slot(0), &plain),
            Command::TrainStep { slot: slot(1), batch: middle.clone(), optimiser },
            train(slot(2), &plain),
        ]);
        let middle = all.remove(1);
        assert_eq!(middle.as_ref().err().map(|error| error.kind), overflows.then_some(ErrorKind::NonFinite));
        all.extend(engine.execute_all(vec![Command::Export { slot: slot(0) }, Command::Export { slot: slot(2) }]));
        all.iter().map(bits).collect::<Vec<_>>()
    };
    assert_eq!(neighbours(true), neighbours(false));
}

/// State: an evaluation between forward-backward and step freed the gradient, which the step then used.
#[test]
fn what_comes_between_a_gradient_and_its_step_leaves_it_alone() {
    let model = llama();
    let (a, b) = (batch(&model, 1, &[9, 4]), batch(&model, 2, &[30]));
    let run = |between: bool| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        done(engine.execute(create(slot(1), all_linear(), None)));
        losses(engine.execute(forward_backward(slot(0), &a)));
        if between {
            losses(engine.execute(evaluate(slot(0), &b)));
            weights(engine.execute(Command::Export { slot: slot(0) }));
            step(engine.execute(train(slot(1), &b)));
            done(engine.execute(Command::DropJob { job: JobSlot(1) }));
        }
        [optim_step(slot(0)), Command::Export { slot: slot(0) }].map(|command| bits(&engine.execute(command)))
    };
    assert_eq!(run(true), run(false));
}

/// State: learning rate and step count of one tenant went on where another's had been.
#[test]
fn settings_of_a_step_are_those_of_its_own_job() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let rates = [0.001_f32, 0.05];
    let steps = |engine: &mut nodus_engine::Engine<_>, jobs: &[u32]| {
        let mut replies = Vec::new();
        for _ in 0..3 {
            for job in jobs {
                let optimiser = AdamW { learning_rate: rates[*job as usize], ..adamw() };
                replies.push((*job, bits(&engine.execute(Command::TrainStep { slot: slot(*job), batch: batch.clone(), optimiser }))));
            }
        }
        jobs.iter().for_each(|job| replies.push((*job, bits(&engine.execute(Command::Export { slot: slot(*job) })))));
        replies
    };
    let mut both = engine(&model);
    for job in 0..2 {
        done(both.execute(create(slot(job), all_linear(), None)));
    }
    let together = steps(&mut both, &[0, 1]);
    for job in 0..2 {
        let mut alone = engine(&model);
        done(alone.execute(create(slot(job), all_linear(), None)));
        let own: Vec<_> = together.iter().filter(|(whose, _)| *whose == job).cloned().collect();
        assert_eq!(steps(&mut alone, &[job]), own);
    }
}

/// State: loading a second adapter switched off the training of the first.
#[test]
fn a_second_adapter_of_a_job_leaves_the_first_trainable() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let run = |second: bool| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        step(engine.execute(train(slot(0), &batch)));
        if second {
            let saved = weights(engine.execute(Command::Export { slot: slot(0) }));
            done(engine.execute(load(AdapterSlot { index: 1, ..slot(0) }, saved)));
            step(engine.execute(train(AdapterSlot { index: 1, ..slot(0) }, &batch)));
        }
        [train(slot(0), &batch), Command::Export { slot: slot(0) }].map(|command| bits(&engine.execute(command)))
    };
    assert_eq!(run(true), run(false));
}

/// State: tensors of equal size were told apart by a local order, so that one had two owners and another none.
#[test]
fn tensors_of_equal_size_keep_their_places() {
    let model = llama();
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), lora(4, &Module::ALL, LayerSelection::All), None)));
    let mut marked = weights(engine.execute(Command::Export { slot: slot(0) }));
    let fill = |(number, module): (usize, &mut ModuleWeights)| {
        module.a.iter_mut().for_each(|a| *a = (2 * number) as f32);
        module.b.iter_mut().for_each(|b| *b = (2 * number + 1) as f32);
    };
    marked.modules.iter_mut().enumerate().for_each(fill);
    done(engine.execute(load(slot(1), marked.clone())));
    assert_eq!(weights(engine.execute(Command::Export { slot: slot(1) })), marked);
    // And a gradient is that of its own tensor: where only one module trains, it has the gradient that it has among all.
    let batch = batch(&model, 1, &[9, 4]);
    done(engine.execute(create(slot(2), lora(4, &[Module::GateProj], LayerSelection::Only(vec![3])), None)));
    for job in [0, 2] {
        losses(engine.execute(forward_backward(slot(job), &batch)));
    }
    let (all, one) = (engine.gradients(slot(0)).unwrap(), engine.gradients(slot(2)).unwrap());
    let same = all.modules.iter().find(|module| (module.layer, module.module) == (3, Module::GateProj)).unwrap();
    assert!(same.b.iter().any(|b| *b != 0.0));
    assert_eq!(same.b, one.modules[0].b);
    assert!(same.b != all.modules.iter().find(|module| (module.layer, module.module) == (3, Module::UpProj)).unwrap().b);
}

/// Protocol: the queue [fb 1, step 1, fb 2, step 2] ran step 2 before fb 2.
#[test]
fn commands_of_an_adapter_run_in_the_order_sent() {
    let model = llama();
    let (a, b) = (batch(&model, 1, &[9, 4]), batch(&model, 2, &[17]));
    let queue =
        |slot| vec![forward_backward(slot, &a), optim_step(slot), forward_backward(slot, &b), optim_step(slot), Command::Export { slot }];
    let mut one_by_one = engine(&model);
    done(one_by_one.execute(create(slot(0), all_linear(), None)));
    let expected: Vec<String> = queue(slot(0)).into_iter().map(|command| bits(&one_by_one.execute(command))).collect();
    assert!(expected[3].starts_with("step 2"), "{expected:?}");

    let mut at_once = engine(&model);
    for job in 0..3 {
        done(at_once.execute(create(slot(job), all_linear(), None)));
    }
    let replies = at_once.execute_all((0..3).flat_map(|job| queue(slot(job))).collect());
    for replies in replies.chunks(5) {
        assert_eq!(replies.iter().map(bits).collect::<Vec<_>>(), expected);
    }
    assert_eq!(at_once.counts().passes, 2, "three adapters do not share passes");
}

/// Protocol: a setting of the optimiser was dropped on the way. Each one changes the result.
#[test]
fn every_setting_of_the_optimiser_arrives() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let run = |optimiser: AdamW| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        for _ in 0..2 {
            step(engine.execute(Command::TrainStep { slot: slot(0), batch: batch.clone(), optimiser }));
        }
        bits(&engine.execute(Command::Export { slot: slot(0) }))
    };
    let plain = run(adamw());
    let changed = [
        AdamW { learning_rate: 0.03, ..adamw() },
        AdamW { beta1: 0.5, ..adamw() },
        AdamW { beta2: 0.9, ..adamw() },
        AdamW { eps: 0.1, ..adamw() },
        AdamW { weight_decay: 0.5, ..adamw() },
        AdamW { max_grad_norm: Some(1e-3), eps: 1e-3, ..adamw() },
        AdamW { normalisation: Normalisation::One, eps: 1e-3, ..adamw() },
    ];
    for optimiser in changed {
        assert_ne!(run(optimiser), plain, "{optimiser:?}");
    }
}

/// Protocol: the schedule advanced with every micro-batch, and a warm-up wasted the first step on a learning rate of 0.
#[test]
fn a_step_counts_once_and_uses_the_rate_it_names() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    let start = flat(&weights(engine.execute(Command::Export { slot: slot(0) })));
    for expected in 1..3 {
        for _ in 0..3 {
            losses(engine.execute(forward_backward(slot(0), &batch)));
        }
        let still = AdamW { learning_rate: 0.0, ..adamw() };
        let Ok(Reply::Step(report)) = engine.execute(Command::OptimStep { slot: slot(0), optimiser: still }) else { panic!("no step") };
        assert_eq!((report.step, report.sums.sequences), (expected, 6));
        assert_eq!(flat(&weights(engine.execute(Command::Export { slot: slot(0) }))), start, "a rate of 0 moves");
    }
    // Adam's first step moves every weight that has a gradient by the rate: B does from the first step on.
    done(engine.execute(create(slot(1), all_linear(), None)));
    let optimiser = AdamW { learning_rate: 0.01, weight_decay: 0.0, ..adamw() };
    step(engine.execute(Command::TrainStep { slot: slot(1), batch, optimiser }));
    let moved = weights(engine.execute(Command::Export { slot: slot(1) }));
    assert!(moved.modules.iter().flat_map(|module| &module.b).all(|b| (b.abs() - 0.01).abs() < 1e-4));
}

/// Scheduler: weight decay reached weights that no job owns. The trunk is never written: who comes after sees what who came before saw.
#[test]
fn training_leaves_the_trunk_alone() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let mut engine = engine(&model);
    let mut first_look = || {
        done(engine.execute(create(slot(0), all_linear(), None)));
        let seen = bits(&engine.execute(evaluate(slot(0), &batch)));
        let optimiser = AdamW { weight_decay: 10.0, ..adamw() };
        for _ in 0..3 {
            step(engine.execute(Command::TrainStep { slot: slot(0), batch: batch.clone(), optimiser }));
        }
        done(engine.execute(Command::DropJob { job: JobSlot(0) }));
        assert_eq!(error(engine.execute(evaluate(slot(0), &batch))).kind, ErrorKind::NotFound);
        seen
    };
    assert_eq!(first_look(), first_look());
}

/// Failure inside a pass: at whatever step a job is cancelled or ends in numbers that are not finite, the others' bytes are what they would
/// be without it.
#[test]
fn a_member_that_leaves_at_any_step_leaves_no_trace() {
    let model = llama();
    let batches = [batch(&model, 1, &[9, 4]), batch(&model, 2, &[17]), batch(&model, 3, &[6, 6])];
    let config = |job: u32| lora(2 + job, &[Module::QProj, Module::UpProj], LayerSelection::Last(1 + job));
    // Job 1 leaves at this step, by cancellation or by a rate that makes weights overflow.
    let run = |leaves: Option<(usize, bool)>| {
        let mut engine = engine(&model);
        for job in 0..3 {
            done(engine.execute(create(slot(job), config(job), Some(1))));
        }
        let mut seen = Vec::new();
        for number in 0..6 {
            let batch = &batches[number % 3];
            let mut commands = vec![train(slot(0), batch), train(slot(2), batch)];
            match leaves {
                Some((at, true)) if at == number => commands.insert(1, Command::DropJob { job: JobSlot(1) }),
                Some((at, false)) if at == number => {
                    let optimiser = AdamW { learning_rate: 1e30, ..adamw() };
                    commands.insert(1, Command::TrainStep { slot: slot(1), batch: batch.clone(), optimiser });
                }
                _ => commands.insert(1, train(slot(1), batch)),
            }
            let mut replies = engine.execute_all(commands);
            let own = replies.remove(1);
            if let Some((at, cancelled)) = leaves {
                let failed = own.err().map(|error| error.kind);
                let expected = if cancelled { ErrorKind::NotFound } else { ErrorKind::NonFinite };
                assert_eq!(failed, (number > at).then_some(expected), "step {number}");
            }
            seen.extend(replies.iter().map(bits));
        }
        seen.extend([0, 2].map(|job| bits(&engine.execute(Command::Export { slot: slot(job) }))));
        seen
    };
    let whole = run(None);
    for at in 0..6 {
        assert_eq!(run(Some((at, true))), whole, "cancelled at {at}");
        assert_eq!(run(Some((at, false))), whole, "overflow at {at}");
    }
}
