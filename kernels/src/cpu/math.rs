//! Elementary functions and sums whose bits are the same on every machine.
//!
//! Never calls the system's libm, never reassociates a sum, never fuses a multiplication into an addition.

/// Evaluates an expression, its loops compiled for the widest vectors this CPU has. Vector width never changes bits here: the compiler
/// neither reassociates nor contracts float arithmetic, so every instruction set computes what the source says.
macro_rules! wide {
    ($body:expr) => {
        pulp::Arch::new().dispatch(
            // Inlined, or it would be compiled for the narrowest.
            #[inline(always)]
            || $body,
        )
    };
}
pub(super) use wide;

/// Adding and subtracting this rounds a float32 below 2^22 in magnitude to the nearest integer, ties to even.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has few enough bits that its product with an exponent is exact.
const LN2_HIGH: f32 = 0.693_359_4;
const LN2_LOW: f32 = -2.121_944_4e-4;

/// e^x in float32; within 1 unit in the last place over the whole range (a test measures it).
///
/// Range reduction and polynomial of `expf` in the Cephes library. Below the range the result is 0, with subnormals on the way; above it
/// infinity; NaN stays NaN. Free of branches (overflow checks are some, hence `wrapping`), so that loops over it vectorise.
#[inline(always)]
pub(super) fn exp(x: f32) -> f32 {
    let x = if x > 89.0 { 89.0 } else { x };
    let x = if x < -104.0 { -104.0 } else { x };
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = x - n * LN2_HIGH;
    let r = r - n * LN2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_2e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let p = (p * (r * r) + r) + 1.0;
    // 2^n in two factors: n may lie outside the exponents of normal numbers.
    let n = (shifted.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
    let half = n >> 1;
    p * power_of_two(half) * power_of_two(n.wrapping_sub(half))
}

/// 2^n for n in -126..=127.
#[inline(always)]
fn power_of_two(n: i32) -> f32 {
    f32::from_bits((n.wrapping_add(127) << 23) as u32)
}

/// Natural logarithm.
pub(super) fn ln(x: f32) -> f32 {
    libm::logf(x)
}

const LANES: usize = 16;
const BLOCK: usize = 512;

/// Sum of f(x) in a fixed order: 16 float32 lanes over 512 elements, the lanes added as a tree, the blocks added in float64. A function
/// of the values and their number alone.
#[inline(always)]
pub(super) fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f64 {
    sum3(x, x, x, |x, _, _| f(x))
}

/// Sum of f(x, y), in the order of [`sum`].
#[inline(always)]
pub(super) fn sum2(x: &[f32], y: &[f32], f: impl Fn(f32, f32) -> f32) -> f64 {
    sum3(x, y, x, |x, y, _| f(x, y))
}

/// Sum of f(x, y, z), in the order of [`sum`].
#[inline(always)]
pub(super) fn sum3(x: &[f32], y: &[f32], z: &[f32], f: impl Fn(f32, f32, f32) -> f32) -> f64 {
    let mut total = 0.0;
    for ((x, y), z) in x.chunks(BLOCK).zip(y.chunks(BLOCK)).zip(z.chunks(BLOCK)) {
        let mut lanes = [0.0_f32; LANES];
        let ((x, x_rest), (y, y_rest), (z, z_rest)) = (x.as_chunks::<LANES>(), y.as_chunks::<LANES>(), z.as_chunks::<LANES>());
        for ((x, y), z) in x.iter().zip(y).zip(z) {
            for lane in 0..LANES {
                lanes[lane] += f(x[lane], y[lane], z[lane]);
            }
        }
        for (lane, ((x, y), z)) in x_rest.iter().zip(y_rest).zip(z_rest).enumerate() {
            lanes[lane] += f(*x, *y, *z);
        }
        let mut width = LANES / 2;
        while width > 0 {
            for lane in 0..width {
                lanes[lane] += lanes[lane + width];
            }
            width /= 2;
        }
        total += f64::from(lanes[0]);
    }
    total
}

/// The largest element, NaN ignored; minus infinity where there is none.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    let (x, rest) = x.as_chunks::<LANES>();
    for x in x {
        for lane in 0..LANES {
            lanes[lane] = if x[lane] > lanes[lane] { x[lane] } else { lanes[lane] };
        }
    }
    rest.iter().chain(&lanes).fold(f32::NEG_INFINITY, |m, x| if *x > m { *x } else { m })
}

#[cfg(test)]
mod tests {
    use super::{BLOCK, exp, max, sum, sum3};

    /// Distance of a float32 from the true value, in units of the last place of the true value's float32.
    fn units_off(got: f32, want: f64) -> f64 {
        let near = want as f32;
        let unit = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
        (f64::from(got) - want).abs() / unit
    }

    #[test]
    fn exp_is_within_a_unit_in_the_last_place() {
        let mut worst = 0.0_f64;
        for bits in (0..=u32::MAX).step_by(1021) {
            let x = f32::from_bits(bits);
            let (got, want) = (exp(x), libm::exp(f64::from(x)));
            if x.is_nan() {
                assert!(got.is_nan(), "exp({x}) = {got}");
            } else if want as f32 == f32::INFINITY || want as f32 == 0.0 {
                assert_eq!(got, want as f32, "exp({x})");
            } else {
                worst = worst.max(units_off(got, want));
            }
        }
        assert!(worst < 1.0, "worst {worst}");
    }

    #[test]
    fn exp_at_the_edges() {
        assert_eq!(exp(0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp(-0.0).to_bits(), 1.0_f32.to_bits());
        assert_eq!(exp(f32::INFINITY), f32::INFINITY);
        assert_eq!(exp(f32::NEG_INFINITY).to_bits(), 0);
        assert_eq!(exp(f32::MAX), f32::INFINITY);
        assert_eq!(exp(88.722_84), f32::INFINITY);
        assert!(exp(88.722_83).is_finite());
        assert!(exp(-103.97) > 0.0 && exp(-103.98) == 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[inline(always)]
    fn loops(x: &[f32]) -> (Vec<u32>, [u64; 2], f32) {
        let exps = x.iter().map(|x| exp(*x).to_bits()).collect();
        (exps, [sum(x, |x| x * x), sum3(x, x, x, |x, y, z| x * y + z)].map(f64::to_bits), max(x))
    }

    /// The bits of a loop do not depend on how wide its vectors are.
    #[test]
    fn wide_loops_give_the_bits_of_narrow_ones() {
        let x: Vec<f32> = (0..5000_u32).map(|i| (i as f32 * 0.037).fract() * 200.0 - 100.0).collect();
        assert_eq!(wide!(loops(&x)), loops(&x));
    }

    #[test]
    fn sums_reach_every_element() {
        for len in [0, 1, 15, 16, 17, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 33] {
            let x: Vec<f32> = (0..len).map(|i| i as f32).collect();
            assert_eq!(sum(&x, |x| x), (len * len.saturating_sub(1) / 2) as f64, "{len}");
            assert_eq!(max(&x), if len == 0 { f32::NEG_INFINITY } else { (len - 1) as f32 });
        }
    }
}
