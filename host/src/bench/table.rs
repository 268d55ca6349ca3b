//! The table on the terminal.
//!
//! Shows what the report holds and computes nothing.

use super::published;
use super::report::{Measurement, Row};

/// Lines for people.
pub(super) fn lines(measured: &Measurement) -> Vec<String> {
    let setting = &measured.setting;
    let mut lines = vec![
        format!("{}: {}", setting.host, setting.title),
        format!(
            "{}; unit: {}; {} units; comparator: dedicated; set-up: steady without it, cold with it",
            setting.device, setting.unit, setting.units
        ),
    ];
    lines.extend(grid(&measured.rows.iter().map(cells).collect::<Vec<_>>()));
    lines.extend(measured.rows.iter().filter_map(|row| {
        let reuse = row.bound?;
        let reached = row.ratio.map_or_else(String::new, |ratio| format!(", reached {:.1} %", 100.0 * ratio / reuse.bound));
        Some(format!(
            "{}: T {:.2} ms, P {:.2} ms a batch, N*E {:.0}: bound {:.2}{reached}",
            row.arm.name(),
            reuse.trunk_seconds_per_batch * 1e3,
            reuse.own_seconds_per_batch * 1e3,
            reuse.uses,
            reuse.bound
        ))
    }));
    lines.extend(measured.rows.iter().filter_map(|row| {
        let foreground = row.foreground?;
        let (alone, beside) = (foreground.alone_ms, foreground.beside_ms);
        Some(format!(
            "{}, a foreground job beside: step p50 {:.2} ms, p95 {:.2} ms; alone {:.2} and {:.2}: {:.2} times as long",
            row.arm.name(),
            beside.p50,
            beside.p95,
            alone.p50,
            alone.p95,
            foreground.slowdown()
        ))
    }));
    lines.extend(measured.rows.iter().map(|row| format!("{}: {}", row.arm.name(), row.meaning)));
    lines.extend(
        published::beside(&measured.work)
            .map(|published| format!("published (technical report 019): {} against {}", published.ratio, published.comparator)),
    );
    lines
}

const HEAD: [&str; 13] = [
    "arm",
    "steady s",
    "units/s",
    "x dedicated",
    "x stock MPS",
    "cold s",
    "cold x",
    "all one step ms",
    "x floor",
    "step p50 ms",
    "p95 ms",
    "SM activity",
    "bits",
];

fn cells(row: &Row) -> [String; 13] {
    let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}"));
    let activity = row.sm_activity.map_or_else(|| "n/a".to_owned(), |part| format!("{:.0} %", 100.0 * part));
    [
        row.arm.name().to_owned(),
        format!("{:.3}", row.steady_seconds),
        format!("{:.0}", row.steady_rate),
        ratio(row.ratio),
        ratio(row.ratio_to_stock_mps),
        format!("{:.2}", row.cold_seconds),
        ratio(row.cold_ratio),
        format!("{:.2}", row.round_ms()),
        ratio(row.floor.map(|floor| row.steady_seconds / floor.seconds)),
        format!("{:.2}", row.step_ms.p50),
        format!("{:.2}", row.step_ms.p95),
        activity,
        verdict(row),
    ]
}

/// What the check found.
pub(super) fn verdict(row: &Row) -> String {
    match (row.check.same_class, row.check.different.as_slice()) {
        (true, different) if row.check.tolerance.is_some() => {
            let (difference, tolerance) = (row.check.difference.unwrap_or(f64::INFINITY), row.check.tolerance.unwrap_or_default());
            let verdict = if different.is_empty() { "close" } else { "FAILED" };
            format!("{verdict} (losses within {difference:.1e}, at most {tolerance:.0e})")
        }
        (true, []) if row.arm == row.comparator => "the reference".to_owned(),
        (true, []) => format!("equal ({} of {})", row.jobs.len(), row.jobs.len()),
        (true, different) => format!("FAILED ({} different)", different.len()),
        (false, _) => "FAILED (other device class)".to_owned(),
    }
}

fn grid(rows: &[[String; 13]]) -> Vec<String> {
    let head = HEAD.map(str::to_owned);
    let all = || std::iter::once(&head).chain(rows);
    let mut widths = [0; 13];
    for row in all() {
        widths.iter_mut().zip(row).for_each(|(width, cell)| *width = (*width).max(cell.chars().count()));
    }
    let line = |row: &[String; 13]| {
        let cells = row.iter().zip(widths).enumerate().map(|(i, (cell, width))| match i {
            // Names stand to the left, numbers to the right.
            0 | 12 => format!("{cell:<width$}"),
            _ => format!("{cell:>width$}"),
        });
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    all().map(line).collect()
}
