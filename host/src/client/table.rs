//! Tables for people: columns as wide as what stands in them.
//!
//! Escapes every cell: a service's words may hold anything.

use std::io::{self, Write};

use crate::text::escape;

/// Writes rows under a heading.
pub(super) fn write<const N: usize>(out: &mut dyn Write, heading: [&str; N], rows: &[[String; N]]) -> io::Result<()> {
    let rows: Vec<[String; N]> = rows.iter().map(|row| row.each_ref().map(|cell| escape(cell))).collect();
    let heading = heading.map(str::to_owned);
    let lines = || std::iter::once(&heading).chain(&rows);
    let mut widths = [0; N];
    for line in lines() {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = cell.chars().count().max(*width);
        }
    }
    for line in lines() {
        let cells: Vec<String> = line.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        writeln!(out, "{}", cells.join("  ").trim_end())?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::write;

    #[test]
    fn columns_line_up_and_nothing_moves_the_cursor() {
        let mut out = Vec::new();
        write(&mut out, ["ID", "STATE"], &[["1".into(), "queued".into()], ["22222".into(), "a\u{1b}[2J".into()]]).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "ID     STATE\n1      queued\n22222  a\\u{1b}[2J\n");
    }
}
