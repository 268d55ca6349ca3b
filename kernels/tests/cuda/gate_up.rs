//! Gate, up and SwiGLU in one kernel: to the byte the product and the kernel after it, however many its tiles are; and where the gate takes it.
//!
//! Never beside a tolerance.

use nodus_kernels::cuda::{CudaBuffer, CudaDevice, CudaWeight, GateUp, Precision};
use nodus_kernels::{DType, Device as _, Layout, Numbers, Source, Use};

use super::open;

/// Sequences of one to sixteen tiles of rows: so many that blocks have several tiles of all shapes.
const LENGTHS: [usize; 6] = [150, 5, 2048, 128, 2048, 2048];

/// Inputs and widths: those that tiles divide and that they do not, inner lengths that are no multiple of anything, and of one step and of two.
const SHAPES: [(usize, usize); 6] = [(896, 4864), (2048, 5632), (72, 200), (200, 1096), (64, 384), (128, 640)];

/// Whether this card has the kernel; a line says that it has not, which is no fault of whoever requires a card.
fn has_kernel(test: &str, device: &CudaDevice) -> bool {
    let is_hopper = device.class(&[]).contains(&("architecture".to_owned(), "sm_90a".to_owned()));
    if !is_hopper {
        println!("skipped {test}: the card is no Hopper, whose kernel this is about");
    }
    is_hopper
}

/// What a shape of the list is in a plan: outputs of gate and up, and inputs.
fn planned((inputs, width): (usize, usize)) -> (usize, usize) {
    (2 * width, inputs)
}

fn bits(device: &mut CudaDevice, buffer: &CudaBuffer) -> Vec<u32> {
    let mut values = vec![0.0; device.len(buffer)];
    device.download(buffer, 0, &mut values).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

fn weights(device: &mut CudaDevice, (inputs, width): (usize, usize)) -> Vec<CudaWeight> {
    let shape = [width, inputs];
    let numbers = |key| Source::Random { shape: &shape, dtype: DType::BF16, numbers: Numbers { key, centre: 0.0, range: 0.05 } };
    device.load_together(&[numbers(1), numbers(2)]).unwrap()
}

#[test]
#[cfg_attr(feature = "broken-gate-up", ignore = "broken on purpose")]
fn gate_up_and_swiglu_in_one_are_bit_for_bit_one_after_the_other() {
    let name = "gate_up_and_swiglu_in_one_are_bit_for_bit_one_after_the_other";
    let Some(mut device) = open(name, Precision::Bf16) else { return };
    let all = SHAPES.map(|shape| (shape, weights(&mut device, shape)));
    assert!(device.plan().gate_ups().all(|(_, choice)| choice == GateUp::Apart), "before the gate nothing is shown to be equal");
    if !has_kernel(name, &device) {
        return;
    }
    let report = device.prove(&[]).unwrap().clone();
    let owned: Vec<_> = device.plan().gate_ups().filter(|(_, choice)| *choice == GateUp::Own).map(|(shape, _)| shape).collect();
    assert!(SHAPES.map(planned).iter().all(|shape| owned.contains(shape)), "the gate takes the one kernel for all of them:\n{report}");
    for (shape, weights) in &all {
        compare(&mut device, *shape, [&weights[0], &weights[1]]);
    }
}

/// What each way makes of rows, by the launches of which it is seen that it is that way.
fn compare(device: &mut CudaDevice, (inputs, width): (usize, usize), weights: [&CudaWeight; 2]) {
    let positions: Vec<u32> = (0..2048).collect();
    let all = Layout::new(LENGTHS.iter().zip(0..).map(|(length, number)| (number, &positions[..*length])), device.row_align());
    // Of so many rows, since fewer go by the two kernels; those that are left out stand between two runs.
    for rows in [all.clone(), all.select(|segment| segment != 1), all.select(|segment| segment == 2)] {
        let filled = |device: &mut CudaDevice, width: usize, key| {
            let mut buffer = device.alloc(Use::Activation, all.rows() * width).unwrap();
            device.fill_uniform(&mut buffer, key, 1.0).unwrap();
            buffer
        };
        let x = filled(device, inputs, 3);
        let mut between = device.alloc_together(Use::Activation, all.rows(), &[width, width]).unwrap();
        let results = [GateUp::Own, GateUp::Apart].map(|choice| {
            device.pin_gate_up(planned((inputs, width)), choice);
            let mut out = filled(device, width, 4);
            device.begin_profile();
            device.linear_swiglu(&rows, &x, weights, &mut between, &mut out).unwrap();
            let launched = device.end_profile();
            let has_run = |kernel: &str| launched.keys().any(|name| name.starts_with(kernel));
            let is_own = choice == GateUp::Own;
            assert!(has_run("gate_up ") == is_own && has_run("swiglu ") != is_own, "{choice:?}: {launched:?}");
            bits(device, &out)
        });
        let of_rows = |bits: &[u32]| -> Vec<u32> {
            let segments = rows.segments().iter();
            segments.flat_map(|segment| bits[segment.start * width..(segment.start + segment.rows) * width].to_vec()).collect()
        };
        let [one, other] = results.each_ref().map(|bits| of_rows(bits));
        assert!(one.iter().any(|bits| f32::from_bits(*bits) != 0.0) && one == other, "{inputs} x {width}");
        if rows.segments()[1].rows == 0 {
            let left_out = all.segments()[1].start * width..all.segments()[2].start * width;
            let is_untouched = results[0][left_out.clone()] == results[1][left_out];
            assert!(is_untouched, "rows that the layout leaves out, {inputs} x {width}");
        }
    }
}

/// It is planned where there is a kernel for it, for what may be gate and up, unless inner lengths are longer than it was measured with: apart, until the gate
/// was there. What is taken without it is not shown to be exact.
#[test]
#[cfg_attr(feature = "broken-gate-up", ignore = "broken on purpose")]
fn gate_up_is_planned_by_its_shape() {
    let name = "gate_up_is_planned_by_its_shape";
    let Some(mut device) = open(name, Precision::Bf16) else { return };
    device.plan_matrices(&[(9728, 896), (896, 896), (151_936, 896), (72, 40), (28_672, 4096), (9856, 4104)]).unwrap();
    let planned: Vec<_> = device.plan().gate_ups().collect();
    if !has_kernel(name, &device) {
        return assert_eq!(planned, []);
    }
    assert_eq!(planned, [((9728, 896), GateUp::Apart), ((28_672, 4096), GateUp::Apart)]);
    device.prove(&[]).unwrap();
    assert!(device.plan().gate_ups().all(|(_, choice)| choice == GateUp::Own), "all bytes are the same");
    assert_eq!(device.unproven(), Vec::<String>::new());
    device.pin_gate_up((9728, 896), GateUp::Own);
    assert_eq!(device.unproven(), ["gate-up 9728x896"]);
}

/// In a build whose kernel does not round gate and up before they meet, the gate takes the product and the kernel after it, on every start, and passes: rows of
/// many jobs go on standing in one pass.
#[cfg(feature = "broken-gate-up")]
#[test]
fn a_broken_gate_up_is_not_taken() {
    use nodus_kernels::AttentionShape;
    use nodus_kernels::cuda::{Cache, CudaOptions};
    let name = "a_broken_gate_up_is_not_taken";
    let Some(device) = open(name, Precision::Bf16) else { return };
    if !has_kernel(name, &device) {
        return;
    }
    drop(device);
    let folder = tempfile::tempdir().unwrap();
    let mut found = Vec::new();
    for start in ["the gate runs", "what it found is recalled"] {
        let cache: Box<dyn Cache> = Box::new(super::Folder(folder.path().to_owned()));
        let options = CudaOptions { library_folders: super::folders(), cache: Some(cache), ..CudaOptions::default() };
        let mut device = CudaDevice::open(0, Precision::Bf16, options).unwrap();
        let shapes = SHAPES.map(planned);
        device.plan_matrices(&shapes).unwrap();
        let report = device.prove(&[AttentionShape { heads: 6, kv_heads: 2, head_dim: 64, window: None }]).unwrap().clone();
        println!("{start}\n{report}");
        assert!(report.passed() && device.unproven().is_empty(), "{start}: {report}");
        assert!(report.gate_ups.len() == shapes.len() && report.gate_ups.iter().all(|check| check.unequal > 0), "{start}: {report}");
        assert!(device.plan().gate_ups().all(|(_, choice)| choice == GateUp::Apart), "{start}");
        let class = device.class(&shapes);
        assert!(class.contains(&("gate".to_owned(), "passed".to_owned())), "{class:?}");
        found.push((report, class));
    }
    assert_eq!(found[0], found[1]);
}
