//! The card against itself: equal bits from repeated launches, in dirty memory, among neighbours; and a gate that sees a product that breaks them.

use nodus_kernels::cuda::{Cache, Choice, CudaBuffer, CudaDevice, CudaOptions, CudaWeight, Key, Precision, Product};
use nodus_kernels::exercise::{Sequences, Sizes, exercise, names};
use nodus_kernels::{
    AttentionShape, DType, Device, DeviceError, HostTensor, Layout, LoraGrads, LoraIn, LoraModule, LoraOut, LoraRows, LoraSite, Numbers,
    SwigluGrads, Use,
};

use super::{PRECISIONS, open};

const SIZES: Sizes =
    Sizes { attention: AttentionShape { heads: 6, kv_heads: 2, head_dim: 64, window: Some(70) }, vocabulary: 1024, rank: 8, seed: 5 };

const MATRICES: [(usize, usize); 7] = [(896, 896), (128, 896), (4864, 896), (896, 4864), (151_936, 896), (50_257, 640), (1003, 257)];

#[test]
fn the_gate_passes() {
    for precision in PRECISIONS {
        let Some(mut device) = open("the_gate_passes", precision) else { return };
        // The products of a 0.5B model, and one whose sizes divide nothing.
        assert!(!device.unproven().is_empty(), "a device whose gate was not run");
        for (outputs, inputs) in MATRICES {
            drop(weight(&mut device, outputs, inputs).unwrap());
        }
        let before = device.plan().clone();
        let report = device.prove(&[SIZES.attention]).unwrap().clone();
        println!("{precision:?}\n{report}");
        assert!(report.passed(), "{report}");
        assert!(report.furthest().is_some_and(|furthest| furthest.billionths > 0), "{report}");
        assert_eq!(report.products.len(), before.choices().count());
        let plan = device.plan().clone();
        assert!(before.choices().eq(plan.choices()), "no product had to be replaced");
        // The plan survives its text and is taken by a device opened with it.
        assert_eq!(plan.to_string().parse::<nodus_kernels::cuda::Plan>().unwrap(), plan);
        let (class, part) = (device.class(&MATRICES), device.class(&MATRICES[..2]));
        assert!(class.contains(&("plan".to_owned(), plan.digest())) && class.contains(&("gate".to_owned(), "passed".to_owned())));
        assert!(part.contains(&("plan".to_owned(), plan.of(&MATRICES[..2]).digest())) && part != class);
        // What was not there when the gate was run is not shown to be exact by it.
        assert!(device.unproven().is_empty());
        drop(weight(&mut device, 72, 40).unwrap());
        assert_eq!(device.unproven().len(), 5);
    }
}

/// The check beside the CPU device holds at the widths of the largest models that are used here, far from its bound.
#[test]
fn the_check_holds_at_the_widths_of_large_models() {
    for (precision, bound) in [(Precision::F32, 1e-4), (Precision::Bf16, 1.5e-2)] {
        let Some(mut device) = open("the_check_holds_at_the_widths_of_large_models", precision) else { return };
        for (heads, kv_heads, head_dim) in [(32, 4, 64), (32, 8, 128)] {
            let report = device.gate(&[AttentionShape { heads, kv_heads, head_dim, window: None }]).unwrap();
            println!("{precision:?} {heads} heads {head_dim} wide\n{report}");
            assert!(report.passed() && report.furthest().is_some_and(|furthest| furthest.difference() < bound), "{report}");
        }
    }
}

/// What the gate found is recalled, in a blink, by the next device of the class with the same plan and heads; not by another.
#[test]
fn what_the_gate_found_is_recalled() {
    let folder = tempfile::tempdir().unwrap();
    let opened = |matrices: &[(usize, usize)]| {
        let cache: Box<dyn Cache> = Box::new(super::Folder(folder.path().to_owned()));
        let options = CudaOptions { library_folders: super::folders(), cache: Some(cache), ..CudaOptions::default() };
        let mut device = CudaDevice::open(0, Precision::Bf16, options).unwrap();
        device.plan_matrices(matrices).unwrap();
        device
    };
    if open("what_the_gate_found_is_recalled", Precision::Bf16).is_none() {
        return;
    }
    let is_gate = |entry: std::io::Result<std::fs::DirEntry>| entry.unwrap().path().extension().unwrap() == "gate";
    let gates = || std::fs::read_dir(folder.path()).unwrap().filter_map(|entry| is_gate(entry).then_some(())).count();
    let time = |device: &mut CudaDevice| {
        let start = std::time::Instant::now();
        let report = device.prove(&[SIZES.attention]).unwrap().clone();
        (report, start.elapsed().as_secs_f64())
    };
    let (mut one, mut other) = (opened(&MATRICES[..4]), opened(&MATRICES[..4]));
    let ((first, long), (second, short)) = (time(&mut one), time(&mut other));
    assert_eq!(one.plan(), other.plan(), "what is raised or replaced is so on every start");
    println!("the gate takes {long:.2} s, recalling it {:.1} ms", short * 1e3);
    assert_eq!((first, gates()), (second, 1));
    time(&mut opened(&MATRICES[..3]));
    assert_eq!(gates(), 2);
}

/// The product that stands in for cuBLASLt's: exact by the same gate, and close to it.
#[test]
fn the_fixed_tile_kernel_passes_the_gate_and_agrees() {
    for precision in PRECISIONS {
        let Some(mut device) = open("the_fixed_tile_kernel_passes_the_gate_and_agrees", precision) else { return };
        let sizes = Sizes { vocabulary: 20_001, ..SIZES };
        let sequences = Sequences { anchors: &[129, 64], before: &[3], after: &[130] };
        let results = |device: &mut CudaDevice| {
            ["linear", "head_loss"].map(|name| {
                let index = names().iter().position(|other| *other == name).unwrap();
                exercise(device, index, sizes, sequences).unwrap().concat()
            })
        };
        let theirs = results(&mut device);
        let planned: Vec<_> = device.plan().choices().collect();
        assert!(planned.iter().any(|(key, _)| key.product == Product::LogitsBackwardRest));
        for (key, _) in planned {
            device.pin(key, Choice::Own);
        }
        let ours = results(&mut device);
        for (ours, theirs) in ours.iter().zip(&theirs) {
            let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
            let error = norm(&mut ours.iter().zip(theirs).map(|(a, b)| a - b)) / norm(&mut theirs.iter().copied());
            assert!(error <= if precision == Precision::F32 { 1e-5 } else { 5e-3 }, "{error:e} in {precision:?}");
        }
        let report = device.gate(&[SIZES.attention]).unwrap();
        assert!(report.products.iter().all(|check| check.algorithm == "fixed tiles" && check.unequal == 0), "{report}");
    }
}

#[test]
fn repeated_launches_give_equal_bits_in_dirty_memory() {
    for precision in PRECISIONS {
        let Some(mut device) = open("repeated_launches_give_equal_bits_in_dirty_memory", precision) else { return };
        let sequences = Sequences { anchors: &[129, 64], before: &[3], after: &[130] };
        for (index, name) in names().into_iter().enumerate() {
            let bits = |device: &mut CudaDevice, sequences| -> Vec<Vec<u32>> {
                let results = exercise(device, index, SIZES, sequences).unwrap();
                results.into_iter().map(|array| array.into_iter().map(f32::to_bits).collect()).collect()
            };
            let first = bits(&mut device, sequences);
            assert!(first.iter().flatten().all(|bits| f32::from_bits(*bits).is_finite()), "{name}");
            for round in 0..20 {
                // What another shape left in scratch memory, in the ring of tables and in the pool must not matter.
                if round % 5 == 0 {
                    exercise(&mut device, index, Sizes { seed: 9, ..SIZES }, Sequences { anchors: &[300, 1], before: &[], after: &[7] })
                        .unwrap();
                }
                assert_eq!(bits(&mut device, sequences), first, "{name}, round {round}, {precision:?}");
            }
        }
    }
}

/// Rows of segments that a layout leaves out are another's: no operation may touch them.
#[test]
fn rows_left_out_of_a_layout_are_not_touched() {
    let Some(mut device) = open("rows_left_out_of_a_layout_are_not_touched", Precision::Bf16) else { return };
    let positions: Vec<u32> = (0..300).collect();
    let all = Layout::new([(0, &positions[..130]), (1, &positions[..128]), (2, &positions[..300])], device.row_align());
    let some = all.select(|segment| segment != 1);
    let (rows, width) = (all.rows(), 64);
    let matrix = weight(&mut device, width, width).unwrap();
    let fresh = |device: &mut CudaDevice, usage, width: usize| {
        let mut buffer = device.alloc(usage, rows * width).unwrap();
        device.upload(&vec![0.5; rows * width], &mut buffer, 0).unwrap();
        buffer
    };
    let x = fresh(&mut device, Use::Activation, width);
    let [mut out, mut dx, mut act, mut grad, mut gathered] = [(); 5].map(|()| fresh(&mut device, Use::Activation, width));
    let mut losses = fresh(&mut device, Use::State, 1);
    let index: Vec<u32> = (0..rows as u32).collect();
    device.linear(&some, &x, &matrix, None, &mut out).unwrap();
    device.linear_backward(&some, &x, &matrix, &mut dx, false).unwrap();
    device.swiglu(&some, &x, &x, &mut act).unwrap();
    device.gather(&some, &index, width, &out, &mut gathered).unwrap();
    device.head_loss(&some, &x, &matrix, &vec![3; rows], &vec![1.0; rows], &mut losses, Some(&mut grad)).unwrap();
    for (buffer, width) in [(&out, width), (&dx, width), (&act, width), (&gathered, width), (&grad, width), (&losses, 1)] {
        let mut data = vec![0.0; rows * width];
        device.download(buffer, 0, &mut data).unwrap();
        assert!(data[256 * width..384 * width].iter().all(|value| *value == 0.5), "the second sequence's rows");
        assert!(data[..130 * width].iter().all(|value| *value != 0.5), "the first sequence's rows");
        assert!(data[384 * width..684 * width].iter().all(|value| *value != 0.5), "the third sequence's rows");
    }
    let mut copy = device.alloc(Use::Activation, width).unwrap();
    device.copy(&out, 5 * width, &mut copy, 0, width).unwrap();
    let (mut a, mut b) = (vec![0.0; width], vec![0.0; width]);
    device.download(&out, 5 * width, &mut a).unwrap();
    device.download(&copy, 0, &mut b).unwrap();
    assert_eq!(a, b);
}

/// Rows past 2^31 elements.
#[test]
fn offsets_past_two_to_the_31() {
    let Some(mut device) = open("offsets_past_two_to_the_31", Precision::Bf16) else { return };
    let (width, rows) = (17_000, 130_048);
    if device.free_bytes() < 24 << 30 {
        return super::skip("offsets_past_two_to_the_31", "less than 24 GiB are free");
    }
    assert!(width * (rows - 1) > 1 << 31);
    let positions: Vec<u32> = (0..rows as u32).collect();
    let layout = Layout::new([(0, &positions[..])], device.row_align());
    let (mut gate, mut out) = (device.alloc(Use::Activation, rows * width).unwrap(), device.alloc(Use::Activation, rows * width).unwrap());
    device.fill_uniform(&mut gate, 3, 1.0).unwrap();
    device.swiglu(&layout, &gate, &gate, &mut out).unwrap();
    device.add(&layout, &gate, &mut out).unwrap();
    for row in [0, rows / 2, rows - 1] {
        let (mut x, mut y) = (vec![0.0; width], vec![0.0; width]);
        device.download(&gate, row * width, &mut x).unwrap();
        device.download(&out, row * width, &mut y).unwrap();
        for (x, y) in x.iter().zip(y) {
            let expected = x * x / (1.0 + (-x).exp()) + x;
            assert!((y - expected).abs() <= 0.02, "row {row}: {y} for {expected}");
        }
    }
}

/// Which of them a device is asked for depends on what the adapters of a pass carry between them: a row must not see it.
#[test]
fn lora_and_swiglu_in_one_are_bit_for_bit_one_after_the_other() {
    let (inputs, width, rank) = (96, 200, 8);
    let positions: Vec<u32> = (0..200).collect();
    for precision in PRECISIONS {
        let Some(mut device) = open("lora_and_swiglu_in_one_are_bit_for_bit_one_after_the_other", precision) else { return };
        let rows = Layout::new([(0, &positions[..150]), (1, &positions[..200])], device.row_align());
        let filled = |device: &mut CudaDevice, usage, len: usize, key| {
            let mut buffer = device.alloc(usage, len).unwrap();
            device.fill_uniform(&mut buffer, key, 1.0).unwrap();
            buffer
        };
        let params = filled(&mut device, Use::State, 2 * rank * (inputs + width), 1);
        let site = |a, inputs, outputs| {
            let module = LoraModule { a, b: a + rank * inputs, rank, inputs, outputs, scale: 1.7 };
            Some(LoraSite { module, dropout: None })
        };
        let gate_up = vec![site(0, inputs, width), site(rank * (inputs + width), inputs, width)];
        // The second sequence carries nothing.
        let up_rows = [LoraRows { segments: 0..1, sites: gate_up, params: &params }];
        let x = filled(&mut device, Use::Activation, rows.rows() * inputs, 2);
        let [mut results, mut gradients] = [Vec::new(), Vec::new()];
        for in_one in [true, false] {
            let wide = |device: &mut CudaDevice, key| filled(device, Use::Activation, rows.rows() * width, key);
            let [mut gate, mut up, mut out] = [3, 4, 5].map(|key| wide(&mut device, key));
            let [mut s_gate, mut s_up] = [6, 7].map(|key| filled(&mut device, Use::State, rows.rows() * rank, key));
            let mut modules =
                [LoraOut { s: &mut s_gate, s_width: rank, y: &mut gate }, LoraOut { s: &mut s_up, s_width: rank, y: &mut up }];
            if in_one {
                device.lora_swiglu(&rows, &up_rows, &x, modules, &mut out).unwrap();
            } else {
                device.lora(&rows, &up_rows, &x, &mut modules).unwrap();
                device.swiglu(&rows, &gate, &up, &mut out).unwrap();
            }
            let mut grads = filled(&mut device, Use::State, 2 * rank * (inputs + width), 8);
            let dy = filled(&mut device, Use::Activation, rows.rows() * inputs, 9);
            let s = filled(&mut device, Use::State, rows.rows() * rank, 10);
            let [mut dx, mut dgate, mut dup] = [11, 12, 13].map(|key| wide(&mut device, key));
            let down = LoraRows { segments: 0..1, sites: vec![site(0, width, inputs)], params: &params };
            let mut groups = [LoraGrads { rows: down, grads: &mut grads, wants_dx: true }];
            let read = [LoraIn { dy: &dy, s: &s, s_width: rank }];
            if in_one {
                let swiglu = SwigluGrads { rows: &rows, gate: &gate, up: &up, dgate: &mut dgate, dup: &mut dup };
                device.lora_backward_swiglu(&rows, &mut groups, &out, &read, &mut dx, swiglu).unwrap();
            } else {
                device.lora_backward(&rows, &mut groups, &out, &read, Some(&mut dx)).unwrap();
                device.swiglu_backward(&rows, &dx, &gate, &up, &mut dgate, &mut dup).unwrap();
            }
            let bits = |device: &mut CudaDevice, buffer: &CudaBuffer| {
                let mut values = vec![0.0; device.len(buffer)];
                device.download(buffer, 0, &mut values).unwrap();
                values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
            };
            results.push([&gate, &up, &out].map(|buffer| bits(&mut device, buffer)));
            gradients.push([&dgate, &dup, &grads].map(|buffer| bits(&mut device, buffer)));
        }
        assert!(results[0] == results[1], "forward, {precision:?}");
        assert!(gradients[0] == gradients[1], "backward, {precision:?}");
    }
}

/// In a build in which one kernel looks at the number of rows, the gate names it, and a device that recalls what was found does too.
#[cfg(feature = "broken-kernel")]
#[test]
fn a_broken_kernel_is_named() {
    for precision in PRECISIONS {
        let Some(mut device) = open("a_broken_kernel_is_named", precision) else { return };
        let report = device.prove(&[SIZES.attention]).unwrap();
        assert_eq!(report.failed(), ["swiglu"], "{report}");
        assert_eq!(device.unproven(), ["swiglu"]);
        assert!(device.class(&[]).contains(&("gate".to_owned(), "one job a pass: swiglu".to_owned())));
    }
}

/// A kernel that is wrong for every row alike passes the gate; beside the CPU device it shows, and the device is refused with the operations' names.
#[cfg(feature = "broken-kernel")]
#[test]
fn a_broken_kernel_that_treats_all_alike_is_named() {
    for precision in PRECISIONS {
        let Some(mut device) = open("a_broken_kernel_that_treats_all_alike_is_named", precision) else { return };
        device.misplace("gather", "scatter_add");
        // What was found of the kernels in their own places is not what is asked for.
        let error = device.gate(&[SIZES.attention]).unwrap_err().to_string();
        assert!(error.contains("add, gather, scatter_add differs by") && !error.contains("rope"), "{error}");
        assert!(device.verdict().is_none() && !device.unproven().is_empty());
    }
}

/// A product pinned to an algorithm of another shape must not slip through: cuBLASLt refuses it, or the gate sees it.
#[test]
fn a_broken_plan_is_caught() {
    let Some(mut device) = open("a_broken_plan_is_caught", Precision::Bf16) else { return };
    drop(weight(&mut device, 896, 4864).unwrap());
    let key = Key { product: Product::Linear, outputs: 896, inputs: 4864 };
    let Some(Choice::CublasLt(mut words)) = device.plan().get(key) else { panic!("{:?}", device.plan().get(key)) };
    // The second word holds tile and split numbers; nonsense there is no algorithm.
    words[0] ^= 0xffff;
    device.pin(key, Choice::CublasLt(words));
    let x = device.alloc(Use::Activation, 128 * 4864).unwrap();
    let mut out = device.alloc(Use::Activation, 128 * 896).unwrap();
    let positions: Vec<u32> = (0..128).collect();
    let layout = Layout::new([(0, &positions[..])], 128);
    let matrix = weight(&mut device, 896, 4864);
    let refused = matrix.and_then(|matrix| device.linear(&layout, &x, &matrix, None, &mut out));
    assert!(refused.is_err(), "an algorithm that is none was taken");
}

fn weight(device: &mut CudaDevice, outputs: usize, inputs: usize) -> Result<CudaWeight, DeviceError> {
    device.random(&[outputs, inputs], DType::BF16, Numbers { key: 1, centre: 0.0, range: 0.05 })
}

/// Seen through `embed`, which copies rows.
#[test]
fn random_weights_are_those_of_the_host() {
    for precision in PRECISIONS {
        let Some(mut device) = open("random_weights_are_those_of_the_host", precision) else { return };
        let (rows, width) = (300, 77);
        let positions: Vec<u32> = (0..rows).collect();
        let layout = Layout::new([(0, &positions[..])], device.row_align());
        let tokens: Vec<u32> = layout.positions().iter().map(|position| if *position == u32::MAX { 0 } else { *position }).collect();
        for dtype in [DType::F32, DType::F16, DType::BF16] {
            let (shape, numbers) = ([rows as usize, width], Numbers { key: 0x1234_5678_9abc, centre: 0.75, range: 0.3 });
            let made = device.random(&shape, dtype, numbers).unwrap();
            let loaded = device.load(&HostTensor::random(&shape, dtype, numbers).unwrap()).unwrap();
            let [made, loaded] = [made, loaded].map(|table| {
                let mut out = device.alloc(Use::Activation, layout.rows() * width).unwrap();
                device.embed(&layout, &tokens, &table, &mut out).unwrap();
                let mut values = vec![0.0; rows as usize * width];
                device.download(&out, 0, &mut values).unwrap();
                values
            });
            assert!(made.iter().any(|value| *value != made[0]));
            assert!(made.iter().zip(&loaded).all(|(a, b)| a.to_bits() == b.to_bits()), "{precision:?} {dtype:?}");
        }
    }
}

/// A pass is recorded, the second time made a graph, then launched as that graph; each gives what single launches give.
#[test]
fn recorded_passes_and_graphs_give_the_bits_of_single_launches() {
    let sizes =
        Sizes { attention: AttentionShape { heads: 6, kv_heads: 3, head_dim: 64, window: Some(37) }, vocabulary: 997, rank: 8, seed: 4 };
    for precision in PRECISIONS {
        let Some(mut device) = open("recorded_passes_and_graphs_give_the_bits_of_single_launches", precision) else { return };
        let sequences = Sequences { anchors: &[129, 300], before: &[5], after: &[128] };
        for (index, name) in names().into_iter().enumerate() {
            let single = exercise(&mut device, index, sizes, sequences).unwrap();
            for round in 0..4 {
                device.begin_pass().unwrap();
                let recorded = exercise(&mut device, index, sizes, sequences).unwrap();
                device.end_pass().unwrap();
                let bits = |results: &[Vec<f32>]| results.iter().flatten().map(|value| value.to_bits()).collect::<Vec<_>>();
                assert!(bits(&single) == bits(&recorded), "{name}, round {round}, {precision:?}");
            }
        }
        let launches = device.launches();
        assert!(launches.captures > 0 && launches.in_graphs > launches.captures, "{launches:?}");
    }
}
