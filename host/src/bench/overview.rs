//! What several measurements show together: one table for each question, ours beside what was published.
//!
//! Shows what the report holds; a ratio between two measurements is taken only where work, device and class are the same.

use super::arm::Arm;
use super::html::escape;
use super::published;
use super::report::{Measurement, Report, Row};
use super::variant::Variant;
use super::work::{Kind, Work};

/// The tables that the measurements have something for.
pub(super) fn tables(report: &Report) -> String {
    let all = report.measurements.as_slice();
    if all.len() < 2 {
        return String::new();
    }
    let of = |kind: Kind| all.iter().filter(move |measured| measured.work.kind == kind && measured.setting.variant == Variant::Base);
    [
        table("1. Shared trunk: members of one sweep", SWEEP, of(Kind::Sweep).map(sweep)),
        table("2. Reuse: what was reached of what the work allows", REUSE, of(Kind::Sweep).flat_map(reuse)),
        table("3. Mean SM activity", &activity_head(), all.iter().filter_map(activity)),
        table("4. Unrelated tenants", TENANTS, of(Kind::Tenants).map(tenants)),
        table(
            "5. What graphs, streams and overlap bring",
            ABLATION,
            all.iter().filter(|measured| measured.setting.variant != Variant::Base).flat_map(|off| ablation(all, off)),
        ),
        foreground(all),
        table("6. Against PyTorch and PEFT", PEER, all.iter().flat_map(peers)),
    ]
    .concat()
}

/// A table, or nothing where it has no row. The first cell of a row may be a link.
fn table(caption: &str, head: &[&str], rows: impl Iterator<Item = Vec<String>>) -> String {
    let rows: Vec<Vec<String>> = rows.collect();
    if rows.is_empty() {
        return String::new();
    }
    let head: String = head.iter().map(|cell| format!("<th>{cell}")).collect();
    let line = |row: &Vec<String>| format!("<tr>{}</tr>", row.iter().map(|cell| format!("<td>{cell}")).collect::<String>());
    let body: String = rows.iter().map(line).collect();
    format!("<table><caption>{caption}</caption><thead><tr>{head}</thead><tbody>{body}</tbody></table>")
}

const SWEEP: &[&str] = &[
    "work",
    "dedicated ms",
    "stock MPS ms",
    "packed ms",
    "fused ms",
    "fused, cache ms",
    "fused &times; dedicated",
    "fused &times; stock MPS",
    "cache &times; dedicated",
    "published &times; dedicated",
    "published &times; stock MPS",
];

fn sweep(measured: &Measurement) -> Vec<String> {
    let ms = |arm| measured.passed(arm).map_or_else(dash, |row| format!("{:.2}", row.round_ms()));
    let mut cells = vec![escape(&measured.setting.title)];
    cells.extend([Arm::Dedicated, Arm::StockMps, Arm::Packed, Arm::Fused, Arm::FusedCache].map(ms));
    cells.push(number(measured.passed(Arm::Fused).and_then(|row| row.ratio)));
    cells.push(number(measured.passed(Arm::Fused).and_then(|row| row.ratio_to_stock_mps)));
    cells.push(number(measured.passed(Arm::FusedCache).and_then(|row| row.ratio)));
    cells.extend(["dedicated", "stock MPS"].map(|comparator| number(was_published(&measured.work, comparator))));
    cells
}

const REUSE: &[&str] = &["work", "arm", "T ms", "P ms", "N E", "bound", "reached", "of the bound", "&times; floor"];

fn reuse(measured: &Measurement) -> impl Iterator<Item = Vec<String>> {
    measured.rows.iter().filter(|row| row.check.passed()).filter_map(|row| {
        let (bound, ratio) = (row.bound?, row.ratio?);
        Some(vec![
            escape(&measured.setting.title),
            row.arm.name().to_owned(),
            format!("{:.2}", bound.trunk_seconds_per_batch * 1e3),
            format!("{:.2}", bound.own_seconds_per_batch * 1e3),
            format!("{:.0}", bound.uses),
            format!("{:.2}", bound.bound),
            format!("{ratio:.2}"),
            format!("{:.1} %", 100.0 * ratio / bound.bound),
            number(row.floor.map(|floor| row.steady_seconds / floor.seconds)),
        ])
    })
}

fn activity_head() -> Vec<&'static str> {
    std::iter::once("work").chain(Arm::OURS.into_iter().chain(Arm::PEERS).map(Arm::name)).collect()
}

fn activity(measured: &Measurement) -> Option<Vec<String>> {
    let cell = |arm| measured.row(arm).and_then(|row| row.sm_activity).map_or_else(dash, |part| format!("{:.0} %", 100.0 * part));
    let cells: Vec<String> = Arm::OURS.into_iter().chain(Arm::PEERS).map(cell).collect();
    let tells = measured.rows.iter().any(|row| row.sm_activity.is_some());
    tells.then(|| std::iter::once(escape(&measured.setting.title)).chain(cells).collect())
}

const TENANTS: &[&str] = &[
    "work",
    "solo ms",
    "stock MPS ms",
    "MPS100 ms",
    "packed ms",
    "packed &times; solo, steady",
    "cold",
    "published, steady",
    "published, cold",
];

fn tenants(measured: &Measurement) -> Vec<String> {
    let ms = |arm| measured.passed(arm).map_or_else(dash, |row| format!("{:.2}", row.round_ms()));
    let packed = measured.passed(Arm::Packed);
    let mut cells = vec![escape(&measured.setting.title)];
    cells.extend([Arm::Dedicated, Arm::StockMps, Arm::Mps100, Arm::Packed].map(ms));
    cells.push(number(packed.and_then(|row| row.ratio)));
    cells.push(number(packed.and_then(|row| row.cold_ratio)));
    cells.extend(["solo, steady", "solo, cold"].map(|comparator| number(was_published(&measured.work, comparator))));
    cells
}

const ABLATION: &[&str] = &["work", "arm", "variant", "base ms", "variant ms", "what it lacks brings"];

fn ablation<'a>(all: &'a [Measurement], off: &'a Measurement) -> impl Iterator<Item = Vec<String>> {
    let with = all
        .iter()
        .find(|on| on.setting.variant == Variant::Base && on.work == off.work && on.setting.device_class == off.setting.device_class);
    with.into_iter().flat_map(|on| {
        off.rows.iter().filter(|row| row.check.passed() && row.arm.peer().is_none()).filter_map(|without| {
            let with = on.passed(without.arm)?;
            let gain = 100.0 * (without.steady_seconds / with.steady_seconds - 1.0);
            let times = [with.round_ms(), without.round_ms()].map(|ms| format!("{ms:.2}"));
            let cells =
                [escape(&off.setting.title), without.arm.name().to_owned(), off.setting.variant.name().to_owned()].into_iter().chain(times);
            Some(cells.chain([format!("{gain:+.1} %")]).collect())
        })
    })
}

const FOREGROUND: &[&str] = &["work", "arm", "step alone, p50 ms", "p95", "step beside, p50 ms", "p95", "times as long"];

/// How a job of high priority fares beside the jobs of each arm.
pub(super) fn foreground(all: &[Measurement]) -> String {
    table("A foreground job beside each arm", FOREGROUND, all.iter().flat_map(beside))
}

fn beside(measured: &Measurement) -> impl Iterator<Item = Vec<String>> {
    measured.rows.iter().filter_map(|row| {
        let found = row.foreground?;
        let (alone, beside) = (found.alone_ms, found.beside_ms);
        let times = [alone.p50, alone.p95, beside.p50, beside.p95, found.slowdown()].map(|number| format!("{number:.2}"));
        Some([escape(&measured.setting.title), row.arm.name().to_owned()].into_iter().chain(times).collect())
    })
}

const PEER: &[&str] =
    &["work", "PyTorch", "its ms", "its steady seconds / ours fused", "/ ours packed", "/ ours dedicated", "losses within"];

fn peers(measured: &Measurement) -> impl Iterator<Item = Vec<String>> {
    measured.rows.iter().filter(|row| row.arm.peer().is_some() && row.check.passed()).map(|row| {
        let against = |arm| number(measured.passed(arm).map(|ours| row.steady_seconds / ours.steady_seconds));
        vec![
            escape(&measured.setting.title),
            row.arm.name().to_owned(),
            format!("{:.2}", row.round_ms()),
            against(Arm::Fused),
            against(Arm::Packed),
            against(Arm::Dedicated),
            row.check.difference.map_or_else(dash, |difference| format!("{difference:.1e}")),
        ]
    })
}

fn was_published(work: &Work, comparator: &str) -> Option<f64> {
    // The published sweeps are of one epoch and 512 tokens.
    let is_theirs = work.epochs == 1 && (work.kind == Kind::Tenants || work.length == 512);
    published::beside(work).find(|published| is_theirs && published.comparator == comparator).map(|published| published.ratio)
}

fn number(value: Option<f64>) -> String {
    value.map_or_else(dash, |value| format!("{value:.2}"))
}

fn dash() -> String {
    "&ndash;".to_owned()
}

impl Measurement {
    fn row(&self, arm: Arm) -> Option<&Row> {
        self.rows.iter().find(|row| row.arm == arm)
    }

    /// An arm's row, where its check passed.
    fn passed(&self, arm: Arm) -> Option<&Row> {
        self.row(arm).filter(|row| row.check.passed())
    }
}
