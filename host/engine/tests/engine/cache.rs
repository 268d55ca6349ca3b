//! The trunk cache: later epochs skip the trunk, with the same bits; nothing crosses cohorts; jobs come before it.

use nodus_engine::{CacheCounts, Engine, Options};
use nodus_kernels::Device;
use nodus_kernels::cpu::CpuDevice;
use nodus_protocol::{Architecture, Batch, Command, LayerSelection, LoraConfig, Module, TrunkSlot};

use crate::apart::Apart;
use crate::support::{
    TRUNK, adamw, all_linear, batch, bits, create, done, engine, engine_with, evaluate, llama, lora, losses, model, slot, step, tensors,
    train,
};

fn cached(trunk_cache_bytes: u64) -> Options {
    Options { trunk_cache_bytes, trunk_cache_host_bytes: 0, ..Options::default() }
}

fn top(rank: u32) -> LoraConfig {
    lora(rank, &[Module::QProj, Module::VProj], LayerSelection::Last(1))
}

/// Two epochs over four sequences, in pairs that the second epoch draws anew.
fn epochs() -> [Batch; 4] {
    let all = batch(&llama(), 1, &[9, 4, 17, 6]).sequences;
    let pair = |a: usize, b: usize| Batch { sequences: vec![all[a].clone(), all[b].clone()] };
    [pair(0, 1), pair(2, 3), pair(3, 0), pair(1, 2)]
}

/// Trains jobs of these configurations and cohorts side by side on some batches: every reply, and what the cache did.
fn run<D: Device>(mut engine: Engine<D>, jobs: &[(LoraConfig, Option<u64>)], batches: &[Batch]) -> (Vec<String>, CacheCounts, u64) {
    let numbered = || (0..).zip(jobs);
    let mut replies = Vec::new();
    engine.execute_all(numbered().map(|(job, (config, cohort))| create(slot(job), config.clone(), *cohort)).collect());
    for batch in batches {
        replies.extend(engine.execute_all(numbered().map(|(job, _)| train(slot(job), batch)).collect()));
        replies.extend(engine.execute_all(numbered().map(|(job, _)| evaluate(slot(job), batch)).collect()));
    }
    replies.extend(engine.execute_all(numbered().map(|(job, _)| Command::Export { slot: slot(job) }).collect()));
    assert!(replies.iter().all(Result::is_ok), "{replies:?}");
    let counts = engine.counts();
    (replies.iter().map(bits).collect(), counts.trunk_cache, counts.row_halves)
}

fn on_cpu(options: Options) -> Engine<CpuDevice> {
    engine_with(&llama(), CpuDevice::new(1).unwrap(), options)
}

#[test]
fn a_later_epoch_skips_the_trunk_also_in_other_batches() {
    let jobs = [(top(2), Some(1)), (top(3), Some(1)), (top(4), Some(1))];
    let (with, counts, computed) = run(on_cpu(cached(1 << 20)), &jobs, &epochs());
    let (without, nothing, everything) = run(on_cpu(cached(0)), &jobs, &epochs());
    assert_eq!(with, without);
    assert_eq!(nothing, CacheCounts::default());
    // Each sequence is computed once, for three members, four visits and as many evaluations.
    assert_eq!((counts.misses, counts.hits, counts.evicted), (4, 12, 0));
    let rows: u64 = epochs()[..2]
        .iter()
        .flat_map(|batch| &batch.sequences)
        .map(|s| s.weights().iter().rposition(|w| *w > 0.0).unwrap() as u64 + 1)
        .sum();
    assert_eq!(counts.device_bytes, rows * 24 * 4);
    // Six of eight half layers lie below the cut, and are shared in any case.
    assert_eq!(everything - computed, 3 * 6 * rows);
}

#[test]
fn one_member_alone_uses_it_and_a_job_without_a_cohort_does_not() {
    let (with, counts, _) = run(on_cpu(cached(1 << 20)), &[(top(2), Some(1))], &epochs());
    assert_eq!((counts.misses, counts.hits), (4, 12));
    let (without, counts, _) = run(on_cpu(cached(1 << 20)), &[(top(2), None)], &epochs());
    assert_eq!(counts, CacheCounts::default());
    assert_eq!(with, without);
}

/// Different cuts, within a layer and above the last keys, partial hits, dropout, activations kept or computed again, a bound too small,
/// and one that holds nothing.
#[test]
fn every_kind_of_hit_gives_the_same_bits() {
    let mut dropped = lora(2, &[Module::OProj], LayerSelection::Last(2));
    dropped.dropout = 0.3;
    let jobs = [
        (top(2), Some(1)),
        (lora(2, &[Module::DownProj], LayerSelection::Last(1)), Some(1)),
        (lora(3, &[Module::GateProj], LayerSelection::Last(1)), Some(1)),
        (lora(3, &[Module::UpProj], LayerSelection::Last(3)), Some(1)),
        (dropped, Some(1)),
        (all_linear(), Some(1)),
        (top(2), Some(2)),
        (top(2), None),
    ];
    let (expected, _, _) = run(on_cpu(cached(0)), &jobs, &epochs());
    for (trunk_cache_bytes, some_hits, some_evicted) in
        [(1 << 20, true, false), (9_000, true, true), (3_000, false, true), (100, false, false)]
    {
        let mut seen = CacheCounts::default();
        for kept_bytes_max in [1 << 30, 10_000, 0] {
            for rows_max in [8192, 100, 1] {
                let options = Options { kept_bytes_max, rows_max, ..cached(trunk_cache_bytes) };
                let (found, counts, _) = run(on_cpu(options), &jobs, &epochs());
                assert_eq!(found, expected);
                assert!(counts.device_bytes <= trunk_cache_bytes, "{counts:?}");
                (seen.hits, seen.evicted) = (seen.hits + counts.hits, seen.evicted + counts.evicted);
            }
        }
        assert!(seen.hits > 0 || !some_hits, "{trunk_cache_bytes} bytes: {seen:?}");
        assert_eq!(seen.evicted > 0, some_evicted, "{trunk_cache_bytes} bytes: {seen:?}");
    }
}

/// What has no room on the device goes to the host, where the two are apart; also with segments aligned.
#[test]
fn the_host_keeps_what_the_device_cannot() {
    let jobs = [(top(2), Some(1)), (lora(2, &[Module::DownProj], LayerSelection::Last(1)), Some(1)), (top(3), None)];
    let apart = |device_bytes, host_bytes| {
        let options = Options { trunk_cache_bytes: device_bytes, trunk_cache_host_bytes: host_bytes, ..Options::default() };
        run(engine_with(&llama(), Apart::new(CpuDevice::new(1).unwrap()), options), &jobs, &epochs())
    };
    let (expected, _, everything) = apart(0, 1 << 20);
    let (on_the_cpu, _, _) = run(on_cpu(cached(0)), &jobs, &epochs());
    assert_eq!(expected, on_the_cpu, "the alignment shows");
    let (found, counts, computed) = apart(4_000, 1 << 20);
    assert_eq!(found, expected);
    // Both cuts have each sequence once.
    assert_eq!((counts.misses, counts.hits, counts.evicted), (8, 24, 0));
    assert!(counts.host_bytes > 0 && counts.device_bytes <= 4_000, "{counts:?}");
    assert!(computed < everything);
    let (found, counts, _) = apart(4_000, 1_000);
    assert_eq!(found, expected);
    assert!(counts.host_bytes <= 1_000 && counts.evicted > 0, "{counts:?}");
}

#[test]
fn nothing_crosses_cohorts_trunks_or_cuts() {
    let model = llama();
    let mut engine = on_cpu(cached(1 << 20));
    let second = engine.add_trunk(&model, &tensors(&model)).unwrap();
    assert_eq!(second, TrunkSlot(1));
    let batch = batch(&model, 1, &[9, 4]);
    let mut misses = 0;
    let visit = |engine: &mut Engine<CpuDevice>, job: u32, trunk: TrunkSlot, config: LoraConfig, cohort: u64| {
        done(engine.execute(Command::CreateAdapter { slot: slot(job), trunk, config, seed: 7, cohort: Some(cohort) }));
        losses(engine.execute(evaluate(slot(job), &batch)));
        engine.counts().trunk_cache
    };
    for (job, (trunk, layers, cohort)) in (0..).zip([(TRUNK, 1, 1), (TRUNK, 1, 2), (second, 1, 1), (TRUNK, 2, 1)]) {
        misses += 2;
        let counts = visit(&mut engine, job, trunk, lora(2, &[Module::KProj], LayerSelection::Last(layers)), cohort);
        assert_eq!((counts.hits, counts.misses), (0, misses), "job {job} was served with another's rows");
    }
    let counts = visit(&mut engine, 9, TRUNK, lora(5, &[Module::VProj], LayerSelection::Last(1)), 2);
    assert_eq!((counts.hits, counts.misses), (2, misses));
}

/// Where the last label stands decides how many rows are computed, and with them the shape of every product: that is another entry.
#[test]
fn a_sequence_with_other_labels_is_at_hand_if_it_needs_the_same_rows() {
    let model = llama();
    let mut engine = on_cpu(cached(1 << 20));
    done(engine.execute(create(slot(0), top(2), Some(1))));
    done(engine.execute(create(slot(1), lora(2, &[Module::DownProj], LayerSelection::Last(1)), Some(1))));
    let plain = &batch(&model, 1, &[9]).sequences[0];
    let labelled = |rows: &[usize]| {
        let weights = (0..9).map(|row| f32::from(rows.contains(&row))).collect();
        let sequence = nodus_protocol::Sequence::new(&model, plain.tokens().into(), plain.targets().into(), weights).unwrap();
        Batch { sequences: vec![sequence.into()] }
    };
    let mut visit = |job: u32, rows: &[usize]| {
        losses(engine.execute(evaluate(slot(job), &labelled(rows))));
        let counts = engine.counts().trunk_cache;
        (counts.hits, counts.misses)
    };
    assert_eq!(visit(0, &[2, 5]), (0, 1));
    assert_eq!(visit(0, &[5]), (1, 1), "below the last keys all rows up to the last label are kept");
    assert_eq!(visit(0, &[2, 6]), (1, 2));
    assert_eq!(visit(1, &[2, 5]), (1, 3), "above them only the labelled ones");
    assert_eq!(visit(1, &[3, 5]), (1, 4));
    assert_eq!(visit(1, &[2, 5]), (2, 4));
}

#[test]
fn the_last_adapter_of_a_cohort_takes_its_entries_along() {
    let model = llama();
    let mut engine = on_cpu(cached(1 << 20));
    let empty = engine.counts().allocated_bytes;
    for (job, cohort) in [(0, 1), (1, 1), (2, 2)] {
        done(engine.execute(create(slot(job), top(2), Some(cohort))));
        step(engine.execute(train(slot(job), &batch(&model, 1, &[9, 4]))));
    }
    let cached = |engine: &Engine<CpuDevice>| engine.counts().trunk_cache.device_bytes;
    let both = cached(&engine);
    done(engine.execute(Command::DropAdapter { slot: slot(0) }));
    assert_eq!(cached(&engine), both);
    done(engine.execute(Command::DropJob { job: slot(1).job }));
    assert_eq!(cached(&engine), both / 2);
    done(engine.execute(Command::DropAdapter { slot: slot(2) }));
    assert_eq!((cached(&engine), engine.counts().allocated_bytes), (0, empty));
}

/// With little memory a job is granted or refused what it would be granted or refused without the cache.
#[test]
fn jobs_come_before_the_cache() {
    let model = model(Architecture::Llama);
    let (short, long) = (batch(&model, 1, &[20, 20]), batch(&model, 2, &[60, 40]));
    let run = |limit_bytes: u64, trunk_cache_bytes: u64| {
        let mut engine = engine_with(&model, CpuDevice::with_memory_limit(1, limit_bytes).unwrap(), cached(trunk_cache_bytes));
        let mut replies = vec![engine.execute(create(slot(0), top(2), Some(1)))];
        replies.extend(engine.execute_all(vec![train(slot(0), &short), train(slot(0), &long), evaluate(slot(0), &short)]));
        replies.push(engine.execute(create(slot(1), all_linear(), None)));
        replies.extend(engine.execute_all(vec![train(slot(0), &short), train(slot(1), &short), train(slot(1), &long)]));
        let optimiser = adamw();
        replies.push(engine.execute(Command::OptimStep { slot: slot(0), optimiser }));
        // How many bytes are free is another matter.
        let text =
            |reply: &Result<_, nodus_protocol::EngineError>| reply.as_ref().map_or_else(|e| format!("{:?}", e.kind), |_| bits(reply));
        (replies.iter().map(text).collect::<Vec<_>>(), engine.counts().trunk_cache)
    };
    let (mut refused, mut hits) = (0, 0);
    for kilobytes in (40..1200).step_by(20) {
        let ((with, counts), (without, _)) = (run(kilobytes * 1024, 1 << 30), run(kilobytes * 1024, 0));
        assert_eq!(with, without, "{kilobytes} KiB");
        refused += with.iter().filter(|reply| *reply == "QuotaExceeded").count();
        hits += counts.hits;
    }
    assert!(refused > 20 && hits > 20, "{refused} refused, {hits} hits");
}

#[test]
fn an_engine_has_a_cache_unless_told_otherwise() {
    let (_, counts, _) = run(engine(&llama()), &[(top(2), Some(1))], &epochs());
    assert_eq!((counts.misses, counts.hits), (4, 12));
}
