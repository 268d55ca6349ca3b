//! How far two devices' results of one operation are apart.
//!
//! Never compares bits: devices add in different orders and round to different types.

use super::Results;

/// The largest of two measures over all arrays: the norm of the difference over the norm of what is expected, which sees what is a little wrong
/// everywhere, and the largest difference over the largest number expected, which sees one number that is wrong among many. Infinite where arrays differ
/// in number or size, or where anything is no number.
#[must_use]
pub fn difference(found: &Results, expected: &Results) -> f64 {
    let sizes = |results: &Results| results.iter().map(Vec::len).collect::<Vec<_>>();
    if sizes(found) != sizes(expected) {
        return f64::INFINITY;
    }
    found.iter().zip(expected).map(|(found, expected)| of_array(found, expected)).fold(0.0, f64::max)
}

/// What is zero but for rounding (the gradient of a softmax over one key) is compared with numbers of this size instead.
const LEAST: f64 = 0.02;

fn of_array(found: &[f32], expected: &[f32]) -> f64 {
    let (mut squares, mut norm, mut largest, mut furthest) = (0.0, 0.0, LEAST, 0.0_f64);
    for (found, expected) in found.iter().zip(expected) {
        let (expected, apart) = (f64::from(*expected), (f64::from(*found) - f64::from(*expected)).abs());
        if !apart.is_finite() {
            return f64::INFINITY;
        }
        squares += apart * apart;
        norm += expected * expected;
        largest = expected.abs().max(largest);
        furthest = apart.max(furthest);
    }
    let norm = norm.sqrt().max(LEAST * (expected.len() as f64).sqrt());
    (squares.sqrt() / norm.max(f64::MIN_POSITIVE)).max(furthest / largest)
}

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn both_measures_see_what_they_are_for() {
        let expected = vec![vec![1.0; 10_000], vec![0.0; 100]];
        let changed = |change: &dyn Fn(&mut Vec<Vec<f32>>)| {
            let mut found = expected.clone();
            change(&mut found);
            difference(&found, &expected)
        };
        assert_eq!(changed(&|_| {}), 0.0);
        let everywhere = changed(&|found| found[0].iter_mut().for_each(|x| *x += 0.01));
        assert!((everywhere - 0.01).abs() < 1e-6, "{everywhere}");
        let one = changed(&|found| found[0][77] = 0.5);
        assert!((one - 0.5).abs() < 1e-6, "{one}");
        let of_zero = changed(&|found| found[1][3] = 1e-4);
        assert!((of_zero - 5e-3).abs() < 1e-6, "what is zero has a size all the same: {of_zero}");
        assert_eq!(changed(&|found| found[1][3] = f32::NAN), f64::INFINITY);
        assert_eq!(changed(&|found| found[0].truncate(9)), f64::INFINITY);
        assert_eq!(changed(&|found| found.truncate(1)), f64::INFINITY);
    }
}
