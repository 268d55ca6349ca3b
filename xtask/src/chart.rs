//! A curve as a small chart of characters.
//!
//! Numbers in, text out.

/// Eighths of a block, from low to high.
const LEVELS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Values from left to right as a chart of `rows` lines and at most `columns` columns, with the highest and the lowest value at
/// its left. A column is the mean of the values that fall into it. Values that are not finite are left out.
pub(crate) fn chart(values: &[f64], columns: usize, rows: usize) -> String {
    let means = means(values, columns);
    let (low, high) = means.iter().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), v| (low.min(*v), high.max(*v)));
    if means.is_empty() || rows == 0 {
        return String::new();
    }
    let mut text = String::new();
    for row in (0..rows).rev() {
        let label = match row {
            0 => format!("{low:.2}"),
            _ if row + 1 == rows => format!("{high:.2}"),
            _ => String::new(),
        };
        let line: String = means.iter().map(|value| cell(*value, low, high, row, rows)).collect();
        text.push_str(&format!("{label:>8} │{}\n", line.trim_end()));
    }
    text
}

/// What one column shows in one row, counted from the bottom: at least one eighth, so that the lowest value is seen too.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a handful of eighths")]
fn cell(value: f64, low: f64, high: f64, row: usize, rows: usize) -> char {
    let share = if high > low { (value - low) / (high - low) } else { 1.0 };
    let eighths = (share * (rows * 8 - 1) as f64).round() as usize + 1;
    match eighths.saturating_sub(row * 8) {
        0 => ' ',
        n => LEVELS.get(n - 1).copied().unwrap_or('█'),
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of values")]
fn means(values: &[f64], columns: usize) -> Vec<f64> {
    let finite: Vec<f64> = values.iter().copied().filter(|v| v.is_finite()).collect();
    let columns = columns.min(finite.len());
    let bounds = |column: usize| column * finite.len() / columns.max(1);
    let parts = (0..columns).filter_map(|column| finite.get(bounds(column)..bounds(column + 1)));
    parts.map(|part| part.iter().sum::<f64>() / part.len() as f64).collect()
}

#[cfg(test)]
mod tests {
    use super::chart;

    #[test]
    fn a_falling_curve_falls() {
        assert_eq!(chart(&[4.0, 3.0, 2.0, 1.0], 10, 2), "    4.00 │█▃\n    1.00 │██▆▁\n");
    }

    #[test]
    fn many_values_are_averaged_into_the_columns_and_a_flat_curve_is_full() {
        let values: Vec<f64> = (0..100).map(f64::from).collect();
        let lines: Vec<usize> = chart(&values, 10, 3).lines().map(|line| line.chars().count()).collect();
        assert_eq!(lines.iter().max(), Some(&20));
        assert_eq!(chart(&[2.0, f64::NAN, 2.0], 10, 1), "    2.00 │██\n");
        assert_eq!(chart(&[], 10, 3), "");
    }
}
