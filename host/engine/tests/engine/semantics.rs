//! What a command means: normalisation, labels, padding, LoRA scale. Each test names the fault it guards against.

use std::sync::Arc;

use nodus_protocol::{AdapterWeights, Architecture, Batch, Command, LayerSelection, Module, Normalisation, Sequence};

use crate::support::{
    TRUNK, adamw, all_linear, batch, create, done, engine, evaluate, flat, forward_backward, llama, lora, losses, model, optim_step,
    relative, sequence, slot, step, train, weighted, weights,
};

/// Loss scale: K micro-batches of different lengths must equal one batch of all their sequences, in gradient, norm and loss.
#[test]
fn accumulated_micro_batches_equal_one_batch() {
    let model = llama();
    let whole = batch(&model, 1, &[9, 4, 30, 2]);
    let mut one = engine(&model);
    let mut several = engine(&model);
    for engine in [&mut one, &mut several] {
        done(engine.execute(create(slot(0), all_linear(), None)));
        step(engine.execute(train(slot(0), &whole)));
    }
    losses(one.execute(forward_backward(slot(0), &whole)));
    for sequence in &whole.sequences {
        losses(several.execute(forward_backward(slot(0), &Batch { sequences: vec![sequence.clone()] })));
    }
    let (a, b) = (flat(&one.gradients(slot(0)).unwrap()), flat(&several.gradients(slot(0)).unwrap()));
    assert!(relative(&a, &b) < 1e-6, "{}", relative(&a, &b));
    let (a, b) = (step(one.execute(optim_step(slot(0)))), step(several.execute(optim_step(slot(0)))));
    assert_eq!(a.sums, b.sums);
    assert_eq!(a.loss.to_bits(), b.loss.to_bits());
    assert!((a.grad_norm / b.grad_norm - 1.0).abs() < 1e-6, "{} and {}", a.grad_norm, b.grad_norm);
}

/// Loss scale: what `forward-backward` accumulates is the gradient of the sum, and the step divides by what it says.
#[test]
fn normalisation_divides_the_sum_at_the_step() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let norm = |normalisation| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        let mut optimiser = adamw();
        optimiser.normalisation = normalisation;
        step(engine.execute(Command::TrainStep { slot: slot(0), batch: batch.clone(), optimiser }))
    };
    let sum = norm(Normalisation::One);
    assert_eq!((sum.sums.weight_sum, sum.sums.sequences, sum.sums.labelled), (9.0, 2, 9));
    assert!((norm(Normalisation::WeightSum).grad_norm * 9.0 / sum.grad_norm - 1.0).abs() < 1e-6);
    assert!((norm(Normalisation::Sequences).grad_norm * 2.0 / sum.grad_norm - 1.0).abs() < 1e-6);
}

/// Loss scale: weights weigh loss and gradient alike, and leave the mean alone.
#[test]
fn doubled_weights_double_sum_and_gradient_and_keep_the_mean() {
    let model = llama();
    let plain = sequence(&model, 3, 11);
    let run = |weight: f32| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        let batch = Batch { sequences: vec![weighted(&model, &plain, weight)] };
        let loss = losses(engine.execute(forward_backward(slot(0), &batch)))[0];
        (loss, flat(&engine.gradients(slot(0)).unwrap()), step(engine.execute(optim_step(slot(0)))))
    };
    let ((one, gradient, report), (two, doubled, report_of_two)) = (run(1.0), run(2.0));
    assert_eq!((two.loss_sum, two.weight_sum), (2.0 * one.loss_sum, 2.0 * one.weight_sum));
    assert!(gradient.iter().zip(&doubled).all(|(a, b)| 2.0 * a == *b));
    assert_eq!(report.loss.to_bits(), report_of_two.loss.to_bits());
    assert_eq!(report.grad_norm.to_bits(), report_of_two.grad_norm.to_bits());
}

/// Labels: no target and no attention crosses a sequence. Packed equals unpacked, for each sequence.
#[test]
fn no_target_crosses_a_sequence() {
    let model = llama();
    let packed = batch(&model, 1, &[9, 1, 14]);
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), all_linear(), None)));
    step(engine.execute(train(slot(0), &packed)));
    let together = losses(engine.execute(evaluate(slot(0), &packed)));
    for (sequence, packed) in packed.sequences.iter().zip(&together) {
        let alone = losses(engine.execute(evaluate(slot(0), &Batch { sequences: vec![sequence.clone()] })));
        assert_eq!(&alone[0], packed);
    }
}

/// Labels: row i is asked for target i. A shift inside the engine would change which target a label counts.
#[test]
fn a_row_is_asked_for_its_own_target() {
    let model = llama();
    let plain = sequence(&model, 3, 6);
    let only = |row: usize, change: Option<usize>| {
        let mut targets = plain.targets().to_vec();
        if let Some(at) = change {
            targets[at] = (targets[at] + 1) % 50;
        }
        let weights = (0..6).map(|i| f32::from(i == row)).collect();
        let sequence = Arc::new(Sequence::new(&model, plain.tokens().into(), targets, weights).unwrap());
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        losses(engine.execute(evaluate(slot(0), &Batch { sequences: vec![sequence] })))[0].loss_sum
    };
    for row in 0..6 {
        for change in 0..6 {
            assert_eq!(only(row, None) == only(row, Some(change)), row != change, "row {row}, target {change}");
        }
    }
}

/// Padding: an unlabelled sequence contributes nothing, counts as a sequence, and keeps its number, by which dropout draws.
#[test]
fn an_unlabelled_sequence_counts_and_keeps_its_number() {
    let model = llama();
    let (first, second) = (sequence(&model, 1, 9), sequence(&model, 2, 8));
    let blank = weighted(&model, &first, 0.0);
    let mut config = all_linear();
    config.dropout = 0.4;
    let run = |sequences: &[&Arc<Sequence>]| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), config.clone(), None)));
        step(engine.execute(train(slot(0), &batch(&model, 7, &[10]))));
        let batch = Batch { sequences: sequences.iter().map(|s| (*s).clone()).collect() };
        losses(engine.execute(forward_backward(slot(0), &batch)))
    };
    let (with_label, without) = (run(&[&first, &second]), run(&[&blank, &second]));
    assert_eq!(with_label[1], without[1]);
    assert_ne!(run(&[&second])[0], without[1], "dropout does not draw by the sequence's number");
    assert_eq!((without[0].loss_sum, without[0].weight_sum, without[0].labelled), (0.0, 0.0, 0));

    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), config, None)));
    let mut optimiser = adamw();
    optimiser.normalisation = Normalisation::Sequences;
    let report = step(engine.execute(Command::TrainStep { slot: slot(0), batch: Batch { sequences: vec![blank, second] }, optimiser }));
    assert_eq!(report.sums.sequences, 2);
}

/// LoRA scale: alpha / sqrt(r) with rsLoRA, alpha / r without, also after export and load.
#[test]
fn rslora_scales_by_the_root_of_the_rank() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let run = |alpha: f32, rslora: bool| {
        let mut config = lora(16, &Module::ALL, LayerSelection::All);
        (config.alpha, config.rslora) = (alpha, rslora);
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), config, None)));
        step(engine.execute(train(slot(0), &batch)));
        let weights = weights(engine.execute(Command::Export { slot: slot(0) }));
        done(engine.execute(Command::LoadAdapter { slot: slot(1), trunk: TRUNK, weights: Arc::new(weights), seed: 7, cohort: None }));
        [slot(0), slot(1)].map(|slot| losses(engine.execute(evaluate(slot, &batch)))[0].loss_sum)
    };
    let rslora = run(16.0, true);
    assert_eq!(rslora[0].to_bits(), rslora[1].to_bits(), "the scale was lost on load");
    assert_eq!(rslora, run(64.0, false), "16 / sqrt(16) is 64 / 16");
    assert_ne!(rslora, run(16.0, false));
}

/// LoRA scale: rank and alpha of an override hold for its module alone.
#[test]
fn an_override_changes_its_module_alone() {
    let model = llama();
    let mut config = all_linear();
    config.overrides = vec![nodus_protocol::ModuleOverride { module: "layers.2.self_attn.v_proj".into(), rank: Some(2), alpha: Some(4.0) }];
    let mut engine = engine(&model);
    done(engine.execute(create(slot(0), config, None)));
    step(engine.execute(train(slot(0), &batch(&model, 1, &[9]))));
    for module in weights(engine.execute(Command::Export { slot: slot(0) })).modules {
        let overridden = (module.layer, module.module) == (2, Module::VProj);
        assert_eq!(module.rank, if overridden { 2 } else { 4 });
        assert_eq!(module.a.len(), module.rank * model.module_in(module.module));
    }
}

/// Adapter files: every targeted tensor is trained. B changes at the first step, A at the second (its gradient is zero while B is).
#[test]
fn every_targeted_tensor_changes() {
    for architecture in [Architecture::Llama, Architecture::Qwen3] {
        let model = model(architecture);
        let mut engine = engine(&model);
        let mut config = all_linear();
        config.layers = LayerSelection::Only(vec![0, 2, 3]);
        done(engine.execute(create(slot(0), config, None)));
        let mut optimiser = adamw();
        optimiser.weight_decay = 0.0;
        let mut seen = vec![weights(engine.execute(Command::Export { slot: slot(0) }))];
        for _ in 0..2 {
            step(engine.execute(Command::TrainStep { slot: slot(0), batch: batch(&model, 1, &[9, 4]), optimiser }));
            seen.push(weights(engine.execute(Command::Export { slot: slot(0) })));
        }
        assert_eq!(seen[0].modules.len(), 21);
        for ((start, first), second) in seen[0].modules.iter().zip(&seen[1].modules).zip(&seen[2].modules) {
            let name = format!("layer {} {}", start.layer, start.module);
            let bound = 1.0 / (model.module_in(start.module) as f32).sqrt();
            assert!(start.a.iter().all(|a| a.abs() <= bound) && start.a.iter().any(|a| a.abs() > 0.8 * bound), "{name}: A's start");
            assert!(start.b.iter().all(|b| *b == 0.0), "{name}: B's start");
            assert_eq!(start.a, first.a, "{name}: A's gradient is not zero at the first step");
            assert!(first.b.iter().all(|b| *b != 0.0), "{name}: B at the first step");
            assert!(second.a.iter().zip(&first.a).all(|(a, b)| a != b), "{name}: A at the second step");
        }
    }
}

/// Dropout: the gradient is that of the loss that was computed, mask included, and of all rows that the loss depends on. Along the
/// gradient the loss must change by the gradient's norm.
#[test]
fn the_gradient_is_that_of_the_loss_with_its_dropout() {
    for (architecture, dropout) in
        [(Architecture::Llama, 0.5), (Architecture::Qwen3, 0.3), (Architecture::Mistral, 0.0), (Architecture::Qwen2, 0.2)]
    {
        let model = model(architecture);
        let batch = batch(&model, 1, &[13, 6]);
        let mut config = all_linear();
        config.dropout = dropout;
        let mut start = engine(&model);
        done(start.execute(create(slot(0), config, None)));
        for _ in 0..3 {
            step(start.execute(train(slot(0), &batch)));
        }
        let start = weights(start.execute(Command::Export { slot: slot(0) }));
        let run = |weights: &AdapterWeights| {
            let mut engine = engine(&model);
            done(engine.execute(Command::LoadAdapter {
                slot: slot(0),
                trunk: TRUNK,
                weights: Arc::new(weights.clone()),
                seed: 7,
                cohort: None,
            }));
            let loss: f64 = losses(engine.execute(forward_backward(slot(0), &batch))).iter().map(|l| l.loss_sum).sum();
            (loss, engine.gradients(slot(0)).unwrap())
        };
        let (_, gradient) = run(&start);
        let norm = flat(&gradient).iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let moved = |by: f64| {
            let mut weights = start.clone();
            for (module, gradient) in weights.modules.iter_mut().zip(&gradient.modules) {
                let values = module.a.iter_mut().chain(&mut module.b);
                for (value, g) in values.zip(gradient.a.iter().chain(&gradient.b)) {
                    *value += (by * f64::from(*g) / norm) as f32;
                }
            }
            run(&weights).0
        };
        let h = 2e-3;
        let slope = (moved(h) - moved(-h)) / (2.0 * h);
        assert!((slope / norm - 1.0).abs() < 5e-3, "{architecture:?}: the loss changes by {slope}, the gradient's norm is {norm}");
    }
}

/// A learning rate of the first step is applied as given; clipping scales by the norm that is reported.
#[test]
fn clipping_uses_the_whole_adapters_norm_and_reports_it_unclipped() {
    let model = llama();
    let batch = batch(&model, 1, &[9, 4]);
    let run = |max_grad_norm| {
        let mut engine = engine(&model);
        done(engine.execute(create(slot(0), all_linear(), None)));
        let mut optimiser = adamw();
        // With a huge eps the first update is proportional to the gradient, so that clipping shows.
        (optimiser.max_grad_norm, optimiser.eps, optimiser.weight_decay) = (max_grad_norm, 1e6, 0.0);
        let report = step(engine.execute(Command::TrainStep { slot: slot(0), batch: batch.clone(), optimiser }));
        let moved = weights(engine.execute(Command::Export { slot: slot(0) }));
        (report.grad_norm, moved.modules.iter().flat_map(|m| m.b.clone()).collect::<Vec<f32>>())
    };
    let (norm, free) = run(None);
    let (reported, clipped) = run(Some(norm / 4.0));
    assert_eq!(reported.to_bits(), norm.to_bits());
    let scaled: Vec<f32> = free.iter().map(|x| x / 4.0).collect();
    assert!(relative(&clipped, &scaled) < 1e-5, "{}", relative(&clipped, &scaled));
}
