//! Text that a guest or a file chose, made safe and short to show; numbers made readable.
//!
//! Never passes a control character on.

use std::fmt::Write as _;
use std::time::Duration;

/// The text with every control character (C0, DEL, C1), and every character that reorders or hides text, written as an escape:
/// `\n`, `\t`, `\u{1b}`. A backslash is doubled, so that the escape is never ambiguous. The result is one line.
#[must_use]
pub fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if c.is_control() || is_invisible(c) => drop(write!(out, "\\u{{{:x}}}", u32::from(c))),
            c => out.push(c),
        }
    }
    out
}

/// The text with its control characters, and those that reorder or hide text, written as [`escape`] writes them; a backslash stays as it
/// is, so that a text that was escaped before reads the same.
#[must_use]
pub fn visible(text: &str) -> String {
    text.split('\\').map(escape).collect::<Vec<_>>().join("\\")
}

/// Bidirectional controls, zero-width characters, line separators, tags and the byte-order mark.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e0fff}')
}

/// [`escape`] of at most `max_chars` characters of the text: for messages that a guest ends with.
#[must_use]
pub fn one_line(text: &str, max_chars: usize) -> String {
    let cut: String = text.chars().take(max_chars).collect();
    let mark = if cut.len() < text.len() { " [cut]" } else { "" };
    escape(cut.trim_end()) + mark
}

/// [`visible`], line breaks kept, at most `max_chars` characters of the text: for our own messages.
#[must_use]
pub fn escape_lines(text: &str, max_chars: usize) -> String {
    let cut: String = text.chars().take(max_chars).collect();
    let mark = if cut.len() < text.len() { " [cut]" } else { "" };
    let lines: Vec<String> = cut.lines().map(visible).collect();
    lines.join("\n") + mark
}

/// A count of bytes, for people: `12 B`, `1.3 MB` (decimal).
#[must_use]
#[expect(clippy::cast_precision_loss, reason = "shown with one decimal")]
pub fn bytes(count: u64) -> String {
    let units = ["B", "kB", "MB", "GB", "TB"];
    let mut value = count as f64;
    let mut unit = "B";
    for next in units.into_iter().skip(1) {
        if value < 1000.0 {
            break;
        }
        value /= 1000.0;
        unit = next;
    }
    if unit == "B" { format!("{count} B") } else { format!("{value:.1} {unit}") }
}

/// A number of bytes as it is given on the command line: `4096`, `512MiB`, `2GB`.
///
/// # Errors
/// What would be right.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let expected = || "expected a number of bytes, such as 4096, 512MiB or 2GB".to_owned();
    let (digits, unit) = text.split_at(text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len()));
    let factor: u64 = match unit.trim() {
        "" | "B" => 1,
        "kB" | "KB" => 1_000,
        "MB" => 1_000_000,
        "GB" => 1_000_000_000,
        "KiB" | "kiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        _ => return Err(expected()),
    };
    digits.parse::<u64>().ok().and_then(|number| number.checked_mul(factor)).ok_or_else(expected)
}

/// A time in seconds, above 0, as a person writes it: `30`, `0.5`.
///
/// # Errors
/// What would be right.
pub fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok().filter(|seconds| *seconds > 0.0);
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "expected a number of seconds above 0, such as 30 or 0.5".to_owned())
}

/// The candidate that a mistyped word is closest to, for a message; none is close where most letters differ.
#[must_use]
pub fn nearest<'a>(word: &str, candidates: &[&'a str]) -> Option<&'a str> {
    let distance = |candidate: &&str| strsim::damerau_levenshtein(word, candidate);
    let best = candidates.iter().copied().min_by_key(distance)?;
    (distance(&best) * 2 <= best.chars().count()).then_some(best)
}

/// A time span, for people: `45 s`, `3 min 05 s`, `2 h 10 min`.
#[must_use]
pub fn duration(span: Duration) -> String {
    let seconds = span.as_secs();
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

/// `1 row`, `2 rows`.
#[must_use]
pub fn count(number: u64, singular: &str) -> String {
    if number == 1 { format!("1 {singular}") } else { format!("{number} {singular}s") }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{bytes, duration, escape, escape_lines, nearest, one_line, parse_bytes, parse_seconds};

    #[test]
    fn nothing_that_moves_the_cursor_or_hides_text_gets_through() {
        assert_eq!(escape("ok \u{1b}[2J\u{7f}\u{9b}31m\r\n\tend"), "ok \\u{1b}[2J\\u{7f}\\u{9b}31m\\r\\n\\tend");
        assert_eq!(escape("a\u{202e}b\u{200b}c\u{feff}d\u{2028}e"), "a\\u{202e}b\\u{200b}c\\u{feff}d\\u{2028}e");
        assert_eq!(escape("\\u{1b}"), "\\\\u{1b}");
        assert_eq!(escape("naïve 日本 🦀"), "naïve 日本 🦀");
        for code in (0..=0x9f_u32).filter_map(char::from_u32).filter(|c| c.is_control()) {
            assert!(escape(&code.to_string()).chars().all(|c| !c.is_control()), "{code:?}");
        }
    }

    #[test]
    fn lines_are_kept_and_long_text_is_cut() {
        assert_eq!(escape_lines("a\u{7}\nb", 100), "a\\u{7}\nb");
        assert_eq!(escape_lines("abcdef", 3), "abc [cut]");
        assert_eq!(escape_lines(&escape("a\\b\u{1b}"), 100), "a\\\\b\\u{1b}", "once is enough");
        assert_eq!(one_line("bad\nforged: line\u{1b}[2J\n", 100), "bad\\nforged: line\\u{1b}[2J");
        assert_eq!(one_line("abcdef", 3), "abc [cut]");
    }

    #[test]
    fn seconds_are_above_zero() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["", "0", "-1", "NaN", "inf", "1e300", "5s"] {
            assert!(parse_seconds(bad).unwrap_err().contains("above 0"), "{bad}");
        }
    }

    #[test]
    fn bytes_are_read_with_their_unit_and_nothing_else() {
        for (text, expected) in [("0", 0), ("4096", 4096), ("512MiB", 512 << 20), ("2GB", 2_000_000_000), ("1 KiB", 1024)] {
            assert_eq!(parse_bytes(text), Ok(expected), "{text}");
        }
        for bad in ["", "MiB", "-1", "1.5GiB", "12TiBs", "99999999999GiB"] {
            assert!(parse_bytes(bad).unwrap_err().contains("512MiB"), "{bad}");
        }
    }

    #[test]
    fn the_nearest_word_is_offered_only_where_it_is_near() {
        assert_eq!(nearest("modle", &["model", "data", "seed"]), Some("model"));
        assert_eq!(nearest("hold_out", &["held_out", "data"]), Some("held_out"));
        assert_eq!(nearest("xyzzy", &["model", "data"]), None);
    }

    #[test]
    fn numbers_read_well() {
        assert_eq!(bytes(999), "999 B");
        assert_eq!(bytes(98_362_432), "98.4 MB");
        assert_eq!(duration(Duration::from_secs(185)), "3 min 05 s");
        assert_eq!(duration(Duration::from_secs(7800)), "2 h 10 min");
    }
}
