//! The report as one page: self-contained, no script, no outside request.
//!
//! Shows what the report holds and computes nothing but positions on the page.

use super::activity::SAMPLE;
use super::overview;
use super::published;
use super::report::{Measurement, Report, Row};
use super::table::verdict;

const STYLE: &str = "body{font:15px/1.5 system-ui,sans-serif;max-width:84rem;margin:2rem auto;padding:0 1rem;color:#1b1f24;background:#fff}\
h1{font-size:1.4rem}h2{font-size:1.2rem;margin-top:2.5rem}h3{font-size:1rem;margin-top:1.5rem}caption{text-align:left;font-weight:600;padding:.3rem 0}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}\
th,td{padding:.3rem .6rem;border-bottom:1px solid #d8dee4;text-align:right}th:first-child,td:first-child{text-align:left;min-width:9rem}.arms :is(th,td):nth-last-child(-n+2){text-align:left}table+table{margin-top:1.5rem}\
.failed{color:#b42318;font-weight:600}.small{color:#57606a;font-size:.85rem}dt{font-weight:600}dd{margin:0 0 .4rem 1rem}\
pre{overflow-x:auto;background:#f6f8fa;padding:.6rem}\
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}th,td{border-color:#30363d}pre{background:#161b22}.small{color:#9198a1}}";

/// Width of the charts' drawing area.
const WIDTH: f64 = 560.0;
/// Colours of curves, in turn.
const COLOURS: [&str; 6] = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2"];

/// The whole page.
pub(super) fn page(report: &Report) -> String {
    let title = match report.measurements.as_slice() {
        [one] => escape(&one.setting.title),
        several => format!("{} measurements", several.len()),
    };
    let head = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width\">\
         <title>nodus bench: {title}</title><style>{STYLE}</style><h1>nodus bench: {title}</h1>"
    );
    let sections: String = report.measurements.iter().enumerate().map(section).collect();
    head + &overview::tables(report) + &sections + "</html>\n"
}

fn section((number, measured): (usize, &Measurement)) -> String {
    let setting = &measured.setting;
    let head = format!(
        "<section id=\"m{number}\"><h2>{}</h2><p>{}, {}. Unit: {}; {} units in every arm. Comparator of every row: <em>dedicated</em>. Variant: {}. \
         Price of a GPU-hour: {}.</p>",
        escape(&setting.title),
        escape(&setting.host),
        escape(&setting.device),
        escape(&setting.unit),
        setting.units,
        setting.variant.name(),
        setting.price_per_hour,
    );
    let parts = [
        head,
        table(measured),
        bars(measured),
        activity(measured),
        overview::foreground(std::slice::from_ref(measured)),
        proof(measured),
        losses(measured),
        legend(measured),
        details(measured),
    ];
    parts.concat() + "</section>"
}

fn table(measured: &Measurement) -> String {
    let head = "<h3>Arms</h3><table class=\"arms\"><thead><tr><th>arm<th>processes<th>steady s<th>units/s<th>&times; dedicated<th>&times; stock MPS\
                <th>cold s<th>cold &times;<th>all one step ms<th>&times; floor<th>step p50<th>p99 ms<th>SM activity<th>units per price<th>bits<th>audit</thead><tbody>";
    let ratio = |ratio: Option<f64>| ratio.map_or_else(|| "&ndash;".to_owned(), |ratio| format!("{ratio:.2}"));
    let row = |row: &Row| {
        let class = if row.check.passed() { "" } else { " class=\"failed\"" };
        let activity = row.sm_activity.map_or_else(|| "n/a".to_owned(), |part| format!("{:.0} %", 100.0 * part));
        format!(
            "<tr><td>{}<td>{}<td>{:.3}<td>{:.0}<td>{}<td>{}<td>{:.2}<td>{}<td>{:.2}<td>{}<td>{:.2}<td>{:.2}<td>{activity}<td>{:.3e}<td{class}>{}<td>{}</tr>",
            row.arm.name(),
            row.processes,
            row.steady_seconds,
            row.steady_rate,
            ratio(row.ratio),
            ratio(row.ratio_to_stock_mps),
            row.cold_seconds,
            ratio(row.cold_ratio),
            row.round_ms(),
            ratio(row.floor.map(|floor| row.steady_seconds / floor.seconds)),
            row.step_ms.p50,
            row.step_ms.p99,
            row.units_per_price,
            verdict(row),
            escape(&row.audit),
        )
    };
    let rows: String = measured.rows.iter().map(row).collect();
    let published: String = published::beside(&measured.work)
        .map(|published| format!("<tr><td>published<td colspan=\"14\">{} &times; {}<td></tr>", published.ratio, published.comparator))
        .collect();
    let note = "<p class=\"small\">Steady leaves set-up and warm-up steps out, cold counts from the start of a process to its end. Published rows are of technical \
                report 019: other devices, other engines.</p>";
    format!("{head}{rows}{published}</tbody></table>{note}")
}

/// A bar for each arm's throughput, with the bound of reuse where it is known.
fn bars(measured: &Measurement) -> String {
    const BAR: f64 = 26.0;
    let most = measured.rows.iter().map(|row| row.steady_rate).fold(1.0, f64::max);
    let height = BAR * measured.rows.len() as f64;
    let mut svg = format!(
        "<h3>Throughput</h3><svg role=\"img\" aria-label=\"Units a second of each arm\" viewBox=\"0 0 800 {height}\" width=\"100%\">"
    );
    for (number, row) in measured.rows.iter().enumerate() {
        let (top, width) = (BAR * number as f64, WIDTH * row.steady_rate / most);
        let colour = if row.check.passed() { "#2563eb" } else { "#b42318" };
        let ratio = row.ratio.map_or_else(|| "FAILED".to_owned(), |ratio| format!("{:.0}/s, {ratio:.2}\u{d7}", row.steady_rate));
        svg += &format!(
            "<text x=\"0\" y=\"{:.1}\" fill=\"currentColor\" font-size=\"13\">{}</text><rect x=\"160\" y=\"{:.1}\" width=\"{:.1}\" height=\"18\" fill=\"{colour}\"/>\
             <text x=\"{:.1}\" y=\"{:.1}\" fill=\"currentColor\" font-size=\"12\">{ratio}</text>",
            top + 17.0,
            row.arm.name(),
            top + 3.0,
            width * 0.85,
            166.0 + width * 0.85,
            top + 16.0,
        );
    }
    svg + "</svg>"
}

/// How busy the card was in the measured steps of each arm, where it tells.
fn activity(measured: &Measurement) -> String {
    let told: Vec<&Row> = measured.rows.iter().filter(|row| !row.activity.is_empty()).collect();
    let longest = told.iter().map(|row| row.activity.iter().map(|stretch| stretch.seconds).sum()).fold(f64::EPSILON, f64::max);
    let curve = |(row, colour): (&&Row, &&str)| {
        let mut at = 0.0;
        let mut points = String::new();
        for stretch in &row.activity {
            let height = 102.0 - 96.0 * stretch.busy.clamp(0.0, 1.0);
            for time in [at, at + stretch.seconds] {
                points += &format!("{:.1},{height:.1} ", 64.0 + WIDTH * time / longest);
            }
            at += stretch.seconds;
        }
        let mean = row.sm_activity.map_or_else(String::new, |mean| format!("{:.0} %", 100.0 * mean));
        let chart = format!(
            "<svg role=\"img\" aria-label=\"SM activity of {}\" viewBox=\"0 0 640 110\" width=\"60%\"><polyline fill=\"none\" stroke=\"{colour}\" points=\"{points}\"/></svg>",
            row.arm.name()
        );
        format!("<p>{}: mean {mean}</p>{chart}", row.arm.name())
    };
    if told.is_empty() {
        return String::new();
    }
    let curves: String = told.iter().zip(COLOURS.iter().cycle()).map(curve).collect();
    format!(
        "<h3>SM activity over time</h3>{curves}<p class=\"small\">NVML's GPM figure, a sample each {} ms, over at most {longest:.1} s.</p>",
        SAMPLE.as_millis()
    )
}

/// How many losses, norms and adapters were held against the dedicated arm's, and how many differ.
fn proof(measured: &Measurement) -> String {
    let line = |row: &Row| {
        let losses = row.jobs.iter().map(|job| job.loss_bits.len()).sum::<usize>();
        let what = match row.check.tolerance {
            None => format!("{losses} losses, as many gradient norms and {} adapters, bit by bit", row.jobs.len()),
            Some(_) => format!("{losses} losses"),
        };
        format!("<li>{}: {what}: {}</li>", row.arm.name(), verdict(row))
    };
    format!("<h3>Proof</h3><ul>{}</ul>", measured.rows.iter().map(line).collect::<String>())
}

/// Loss curves of the dedicated arm; where all arms are equal they are everybody's.
fn losses(measured: &Measurement) -> String {
    let Some(row) = measured.rows.first() else { return String::new() };
    let value = |bits: &String| u32::from_str_radix(bits, 16).map_or(f32::NAN, f32::from_bits);
    let curves: Vec<Vec<f64>> = row.jobs.iter().map(|job| job.loss_bits.iter().map(|bits| f64::from(value(bits))).collect()).collect();
    let finite = || curves.iter().flatten().copied().filter(|loss| loss.is_finite());
    let (low, high) = finite().fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), loss| (low.min(loss), high.max(loss)));
    if !(high - low).is_finite() {
        return String::new();
    }
    let span = (high - low).max(f64::EPSILON);
    let mut svg = format!(
        "<h3>Losses</h3><svg role=\"img\" aria-label=\"Loss of each job, step by step\" viewBox=\"0 0 640 220\" width=\"100%\">\
         <text x=\"0\" y=\"14\" font-size=\"12\" fill=\"currentColor\">{high:.4}</text><text x=\"0\" y=\"206\" font-size=\"12\" fill=\"currentColor\">{low:.4}</text>"
    );
    for (curve, colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let step = WIDTH / (curve.len().max(2) - 1) as f64;
        let point =
            |(number, loss): (usize, &f64)| format!("{:.1},{:.1}", 64.0 + step * number as f64, 202.0 - 192.0 * (loss - low) / span);
        let points = curve.iter().enumerate().filter(|(_, loss)| loss.is_finite()).map(point).collect::<Vec<_>>().join(" ");
        svg += &format!("<polyline fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.2\" points=\"{points}\"/>");
    }
    svg + "</svg><p class=\"small\">Every step of every job, those of warm-up first, on data of their own.</p>"
}

fn legend(measured: &Measurement) -> String {
    let item = |row: &Row| {
        let bound = row.bound.map_or_else(String::new, |reuse| {
            format!(
                " Bound of reuse (T + P) / (T/(N E) + P) = {:.2}, with T {:.2} ms and P {:.2} ms a batch, N E {:.0}.",
                reuse.bound,
                reuse.trunk_seconds_per_batch * 1e3,
                reuse.own_seconds_per_batch * 1e3,
                reuse.uses
            )
        });
        let floor = row.floor.map_or_else(String::new, |floor| {
            let (tera, rate) = (floor.operations / 1e12, floor.rate / 1e12);
            format!(" Floor: {tera:.1} TFLOP at {rate:.0} TFLOP/s are {:.3} s.", floor.seconds)
        });
        format!("<dt>{}</dt><dd>{}.{bound}{floor}</dd>", row.arm.name(), escape(&row.meaning))
    };
    format!("<h3>What the arms are</h3><dl>{}</dl>", measured.rows.iter().map(item).collect::<String>())
}

fn details(measured: &Measurement) -> String {
    let setting = serde_json::to_string_pretty(&measured.setting).unwrap_or_default();
    format!(
        "<h3>Setting</h3><pre>{}</pre><p class=\"small\">{} {}</p>",
        escape(&setting),
        escape(&measured.command),
        escape(&measured.version)
    )
}

pub(super) fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
