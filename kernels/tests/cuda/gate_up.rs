//! Gate, up and SwiGLU in one kernel: to the byte the product and the kernel after it, however the product is cut into tiles.
//!
//! Never beside a tolerance.

use nodus_kernels::cuda::{Choice, CudaBuffer, CudaDevice, Key, Precision, Product};
use nodus_kernels::{DType, Device as _, Layout, Numbers, Source, Use};

use super::open;

/// Sequences of one to sixteen tiles: cuts of whole and of narrow tiles, of one row of tiles and of many.
const LENGTHS: [usize; 4] = [150, 5, 2048, 128];

fn bits(device: &mut CudaDevice, buffer: &CudaBuffer) -> Vec<u32> {
    let mut values = vec![0.0; device.len(buffer)];
    device.download(buffer, 0, &mut values).unwrap();
    values.into_iter().map(f32::to_bits).collect()
}

#[test]
fn gate_up_and_swiglu_in_one_are_bit_for_bit_one_after_the_other() {
    let name = "gate_up_and_swiglu_in_one_are_bit_for_bit_one_after_the_other";
    let Some(mut device) = open(name, Precision::Bf16) else { return };
    let positions: Vec<u32> = (0..2048).collect();
    let all = Layout::new(LENGTHS.iter().zip(0..).map(|(length, number)| (number, &positions[..*length])), device.row_align());
    // Widths that tiles divide and that they do not, and an inner length that is no multiple of anything.
    for (inputs, width) in [(896, 4864), (2048, 5632), (72, 200), (200, 1096)] {
        let shape = [width, inputs];
        let numbers = |key| Source::Random { shape: &shape, dtype: DType::BF16, numbers: Numbers { key, centre: 0.0, range: 0.05 } };
        let weights = device.load_together(&[numbers(1), numbers(2)]).unwrap();
        let weights = [&weights[0], &weights[1]];
        let key = Key { product: Product::LinearSwiglu, outputs: 2 * width, inputs };
        // Of so many rows, since fewer go by the two kernels; those that are left out stand between two runs.
        for rows in [all.clone(), all.select(|segment| segment != 1), all.select(|segment| segment == 2)] {
            let filled = |device: &mut CudaDevice, width: usize, key| {
                let mut buffer = device.alloc(Use::Activation, all.rows() * width).unwrap();
                device.fill_uniform(&mut buffer, key, 1.0).unwrap();
                buffer
            };
            let x = filled(&mut device, inputs, 3);
            let mut between = device.alloc_together(Use::Activation, all.rows(), &[width, width]).unwrap();
            let results = [Choice::Own, Choice::Apart].map(|choice| {
                if device.plan().get(key).is_some() {
                    device.pin(key, choice);
                }
                let mut out = filled(&mut device, width, 4);
                device.linear_swiglu(&rows, &x, weights, &mut between, &mut out).unwrap();
                bits(&mut device, &out)
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
}

/// It is planned where there is a kernel for it, for what may be gate and up, unless inner lengths are so long that it gains nothing.
#[test]
fn gate_up_is_planned_by_its_shape() {
    let Some(mut device) = open("gate_up_is_planned_by_its_shape", Precision::Bf16) else { return };
    device.plan_matrices(&[(9728, 896), (896, 896), (151_936, 896), (72, 40), (28_672, 4096)]).unwrap();
    let own: Vec<_> = device.plan().choices().filter(|(key, _)| key.product == Product::LinearSwiglu).collect();
    let is_hopper = device.class(&[]).contains(&("architecture".to_owned(), "sm_90a".to_owned()));
    let key = Key { product: Product::LinearSwiglu, outputs: 9728, inputs: 896 };
    assert_eq!(own, if is_hopper { vec![(key, Choice::Own)] } else { Vec::new() });
}
