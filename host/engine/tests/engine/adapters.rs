//! State between adapters, failure of one, refusals. Each test names the fault it guards against.

use std::sync::Arc;

use nodus_protocol::{AdapterWeights, Batch, Command, ErrorKind, LossSums, Normalisation, Reply, Sequence};

use crate::support::{
    TRUNK, adamw, all_linear, batch, bits, create, done, engine, error, evaluate, flat, forward_backward, llama, losses, optim_step,
    relative, sequence, slot, step, train, weighted, weights,
};

/// Protocol: a second forward-backward adds to the first; a step clears.
#[test]
fn gradients_add_up_until_a_step_clears_them() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    step(engine.execute(train(slot(0), &batch)));
    assert!(flat(&engine.gradients(slot(0)).unwrap()).iter().all(|g| *g == 0.0), "a step leaves gradients");
    losses(engine.execute(forward_backward(slot(0), &batch)));
    let once = flat(&engine.gradients(slot(0)).unwrap());
    losses(engine.execute(forward_backward(slot(0), &batch)));
    let twice = flat(&engine.gradients(slot(0)).unwrap());
    let doubled: Vec<f32> = once.iter().map(|g| 2.0 * g).collect();
    assert!(relative(&twice, &doubled) < 1e-6, "{}", relative(&twice, &doubled));
    losses(engine.execute(evaluate(slot(0), &batch)));
    assert_eq!(flat(&engine.gradients(slot(0)).unwrap()), twice, "evaluation has an effect");
    assert_eq!(step(engine.execute(optim_step(slot(0)))).sums.sequences, 4);
}

/// State between adapters: a step moves its own adapter and no other, even when both have gradients.
#[test]
fn a_step_moves_its_own_adapter_alone() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let mut engine = engine(&model);
    for job in 0..2 {
        done(engine.execute(create(slot(job), all_linear(), None)));
        losses(engine.execute(forward_backward(slot(job), &batch)));
    }
    let weights_of = |engine: &mut nodus_engine::Engine<_>| bits(&engine.execute(Command::Export { slot: slot(1) }));
    let (before, gradient) = (weights_of(&mut engine), flat(&engine.gradients(slot(1)).unwrap()));
    step(engine.execute(optim_step(slot(0))));
    assert_eq!(before, weights_of(&mut engine));
    assert_eq!(gradient, flat(&engine.gradients(slot(1)).unwrap()));
}

/// State between adapters: the first update of a new adapter is its solo update, after another has trained for long and in its slot.
#[test]
fn the_first_update_of_a_new_adapter_is_its_solo_update() {
    let model = llama();
    let (a, b) = (batch(&model, 1, &[9, 4]), batch(&model, 2, &[6]));
    let first = |engine: &mut nodus_engine::Engine<_>| {
        done(engine.execute(create(slot(1), all_linear(), None)));
        let report = step(engine.execute(train(slot(1), &a)));
        assert_eq!(report.step, 1, "the step count is another adapter's");
        (bits(&Ok(Reply::Step(report))), bits(&engine.execute(Command::Export { slot: slot(1) })))
    };
    let solo = first(&mut engine(&model));
    let mut used = engine(&model);
    for job in 0..2 {
        done(used.execute(create(slot(job), all_linear(), None)));
        for _ in 0..3 {
            step(used.execute(train(slot(job), &b)));
        }
    }
    done(used.execute(Command::DropAdapter { slot: slot(1) }));
    assert_eq!(first(&mut used), solo);
    assert_eq!(step(used.execute(train(slot(0), &b))).step, 4);
}

/// State between adapters: loading twice gives the same adapter twice, and a loaded one begins with fresh moments.
#[test]
fn loading_is_idempotent() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    step(engine.execute(train(slot(0), &batch)));
    let trained = Arc::new(weights(engine.execute(Command::Export { slot: slot(0) })));
    let mut seen = Vec::new();
    for job in 1..3 {
        done(engine.execute(Command::LoadAdapter { slot: slot(job), trunk: TRUNK, weights: trained.clone(), seed: 7, cohort: None }));
        let exported = weights(engine.execute(Command::Export { slot: slot(job) }));
        assert_eq!(&exported, &*trained);
        let report = step(engine.execute(train(slot(job), &batch)));
        assert_eq!(report.step, 1);
        seen.push(bits(&engine.execute(Command::Export { slot: slot(job) })));
    }
    assert_eq!(seen[0], seen[1]);
}

/// Seeds reach the initialiser; adapters of one job start apart; dropout draws anew each time, and not at all in evaluation.
#[test]
fn seed_index_and_count_choose_the_random_numbers() {
    let model = llama();
    let mut engine = engine(&model);
    let mut config = all_linear();
    config.dropout = 0.3;
    let second = nodus_protocol::AdapterSlot { index: 1, ..slot(0) };
    done(engine.execute(create(slot(0), config.clone(), None)));
    done(engine.execute(create(second, config.clone(), None)));
    done(engine.execute(create(slot(1), config.clone(), None)));
    done(engine.execute(Command::CreateAdapter { slot: slot(2), trunk: TRUNK, config, seed: 8, cohort: None }));
    let starts = [slot(0), second, slot(1), slot(2)].map(|slot| bits(&engine.execute(Command::Export { slot })));
    assert_eq!(starts[0], starts[2], "the job's number reached the initialiser");
    assert!(starts[0] != starts[1] && starts[0] != starts[3]);

    let batch = batch(&model, 1, &[9, 4]);
    step(engine.execute(train(slot(0), &batch)));
    let twice = [0, 1].map(|_| losses(engine.execute(forward_backward(slot(0), &batch)))[0].loss_sum);
    assert_ne!(twice[0], twice[1], "dropout is the same every time");
    let evaluated = [0, 1].map(|_| losses(engine.execute(evaluate(slot(0), &batch)))[0].loss_sum);
    assert_eq!(evaluated[0], evaluated[1]);
}

/// Protocol: a step without anything to step on is refused, without effect.
#[test]
fn a_step_on_nothing_is_refused_without_effect() {
    let model = llama();
    let plain = batch(&model, 1, &[9, 4]);
    let blank = Batch { sequences: plain.sequences.iter().map(|s| weighted(&model, s, 0.0)).collect() };
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    let refused = error(engine.execute(optim_step(slot(0))));
    assert_eq!((refused.kind, refused.message.contains("nothing is accumulated")), (ErrorKind::InvalidArgument, true), "{refused}");
    let refused = error(engine.execute(train(slot(0), &blank)));
    assert_eq!((refused.kind, refused.message.contains("sum to 0")), (ErrorKind::InvalidArgument, true), "{refused}");
    assert!(error(engine.execute(optim_step(slot(0)))).message.contains("nothing"), "the refused step had an effect");
    let mut optimiser = adamw();
    optimiser.beta1 = 1.0;
    let refused = error(engine.execute(Command::TrainStep { slot: slot(0), batch: plain.clone(), optimiser }));
    assert!(refused.message.contains("beta1 is 1"), "{refused}");
    assert_eq!(error(engine.execute(train(slot(0), &Batch { sequences: Vec::new() }))).kind, ErrorKind::InvalidArgument);

    // Blank micro-batches beside labelled ones are fine.
    losses(engine.execute(forward_backward(slot(0), &blank)));
    let sums = step(engine.execute(train(slot(0), &plain))).sums;
    let expected = LossSums { sequences: 4, weight_sum: 9.0, labelled: 9, ..sums };
    assert_eq!(sums, expected);
}

/// State between adapters: one job's non-finite numbers end that job, with step and reason, and leave the others' bits alone.
#[test]
fn a_non_finite_job_fails_alone() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let neighbour = |broken: bool| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), Some(1))));
        done(engine.execute(create(slot(1), all_linear(), Some(1))));
        step(engine.execute(train(slot(1), &batch)));
        let mut replies = Vec::new();
        if broken {
            let mut weights = weights(engine.execute(Command::Export { slot: slot(1) }));
            weights.modules.iter_mut().flat_map(|m| m.a.iter_mut().chain(&mut m.b)).for_each(|x| *x = 3e30);
            done(engine.execute(Command::DropAdapter { slot: slot(1) }));
            done(engine.execute(Command::LoadAdapter {
                slot: slot(1),
                trunk: TRUNK,
                weights: Arc::new(weights),
                seed: 7,
                cohort: Some(1),
            }));
        }
        for _ in 0..2 {
            let mut both = engine.execute_all(vec![train(slot(0), &batch), train(slot(1), &batch)]);
            if broken {
                let ended = error(both.pop().unwrap());
                assert_eq!(ended.kind, ErrorKind::NonFinite);
                assert!(ended.message.contains("step 1: the loss is"), "{ended}");
            }
            replies.push(bits(&both[0]));
        }
        if broken {
            for command in [evaluate(slot(1), &batch), optim_step(slot(1)), Command::Export { slot: slot(1) }, train(slot(1), &batch)] {
                assert_eq!(error(engine.execute(command)).kind, ErrorKind::NonFinite);
            }
            done(engine.execute(Command::DropAdapter { slot: slot(1) }));
        }
        replies.push(bits(&engine.execute(Command::Export { slot: slot(0) })));
        replies
    };
    assert_eq!(neighbour(true), neighbour(false));
}

/// A loss that an evaluation finds not finite is laid at the evaluation's door, not at the next step's.
#[test]
fn an_evaluation_that_is_not_finite_says_so() {
    let model = llama();
    let batch = Batch { sequences: vec![sequence(&model, 3, 11)] };
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    step(engine.execute(train(slot(0), &batch)));
    let mut weights = weights(engine.execute(Command::Export { slot: slot(0) }));
    weights.modules.iter_mut().flat_map(|m| m.a.iter_mut().chain(&mut m.b)).for_each(|x| *x = 3e30);
    let weights = Arc::new(weights);
    done(engine.execute(Command::LoadAdapter { slot: slot(1), trunk: TRUNK, weights, seed: 7, cohort: None }));
    // The second piece of an evaluation: its sequence is numbered as its user knows it.
    let ended = error(engine.execute(Command::Evaluate { slot: slot(1), batch, first: 16 }));
    assert_eq!(ended.kind, ErrorKind::NonFinite);
    assert!(ended.message.starts_with("evaluation after step 0: the loss is"), "{ended}");
    assert!(ended.message.contains("at sequence 16, row 0"), "{ended}");
}

/// A gradient that overflows ends the adapter at the step, before it reaches the weights; weights that overflow are never exported.
#[test]
fn overflow_in_gradient_or_weights_ends_the_adapter() {
    let model = llama();
    let plain = sequence(&model, 3, 11);
    let huge = Batch { sequences: vec![weighted(&model, &plain, 3e38)] };
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    let mut optimiser = adamw();
    optimiser.normalisation = Normalisation::One;
    let ended = error(engine.execute(Command::TrainStep { slot: slot(0), batch: huge, optimiser }));
    assert_eq!(ended.kind, ErrorKind::NonFinite);
    assert!(ended.message.contains("step 1: the gradient's norm is"), "{ended}");

    done(engine.execute(create(slot(1), all_linear(), None)));
    (optimiser.learning_rate, optimiser.weight_decay) = (3e38, 3e38);
    step(engine.execute(Command::TrainStep { slot: slot(1), batch: Batch { sequences: vec![plain] }, optimiser }));
    let ended = error(engine.execute(Command::Export { slot: slot(1) }));
    assert_eq!(ended.kind, ErrorKind::NonFinite);
    assert!(ended.message.contains("a weight of layers."), "{ended}");
}

#[test]
fn wrong_slots_and_adapters_that_do_not_fit_are_refused() {
    let model = llama();
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    assert_eq!(error(engine.execute(create(slot(0), all_linear(), None))).kind, ErrorKind::InvalidArgument);
    for command in [
        train(slot(9), &batch(&model, 1, &[3])),
        optim_step(slot(9)),
        Command::Export { slot: slot(9) },
        Command::DropAdapter { slot: slot(9) },
    ] {
        assert_eq!(error(engine.execute(command)).kind, ErrorKind::NotFound);
    }
    let elsewhere =
        Command::CreateAdapter { slot: slot(1), trunk: nodus_protocol::TrunkSlot(3), config: all_linear(), seed: 0, cohort: None };
    assert_eq!(error(engine.execute(elsewhere)).kind, ErrorKind::NotFound);
    let mut zero = all_linear();
    zero.alpha = 0.0;
    assert!(error(engine.execute(create(slot(1), zero, None))).message.contains("alpha is 0"));

    let good = weights(engine.execute(Command::Export { slot: slot(0) }));
    let mut load = |change: &dyn Fn(&mut AdapterWeights), says: &str| {
        let mut weights = good.clone();
        change(&mut weights);
        let refused =
            error(engine.execute(Command::LoadAdapter { slot: slot(1), trunk: TRUNK, weights: Arc::new(weights), seed: 0, cohort: None }));
        assert_eq!(refused.kind, ErrorKind::InvalidArgument);
        assert!(refused.message.contains(says), "{refused}");
    };
    load(&|w| drop(w.modules.pop()), "weights for 27 modules, its configuration names 28");
    load(&|w| w.modules[3].b.truncate(95), "layers.0.self_attn.o_proj: B has 95 numbers, expected 24 x 4");
    load(&|w| w.modules[0].rank = 5, "layers.0.self_attn.q_proj: rank is 5, its configuration says 4");
    load(&|w| w.modules[0].a[7] = f32::NAN, "layers.0.self_attn.q_proj: A holds NaN");
    load(&|w| w.modules.swap(0, 1), "layers.0.self_attn.q_proj: expected here, found layers.0.self_attn.k_proj");

    // A sequence made for a larger vocabulary.
    let mut larger = model.clone();
    larger.vocab_size = 1000;
    let foreign = Sequence::new(&larger, vec![3, 999], vec![1, 2], vec![1.0; 2]).unwrap();
    let refused = error(engine.execute(evaluate(slot(0), &Batch { sequences: vec![Arc::new(foreign)] })));
    assert!(refused.message.contains("sequence 0: tokens[1] is 999"), "{refused}");
}
