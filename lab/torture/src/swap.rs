//! How much the kernel has swapped, from /proc.

use std::{fs, io};

/// Swap in use now, in KiB.
///
/// # Errors
/// When /proc/meminfo cannot be read.
pub fn used_kib() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    Ok(number(&text, "SwapTotal:").saturating_sub(number(&text, "SwapFree:")))
}

/// Pages swapped (in, out) since boot.
///
/// # Errors
/// When /proc/vmstat cannot be read.
pub fn pages_moved() -> io::Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/vmstat")?;
    Ok((number(&text, "pswpin"), number(&text, "pswpout")))
}

/// The number after a key, 0 where the kernel does not know the key.
fn number(text: &str, key: &str) -> u64 {
    let mut lines = text.lines().map(str::split_whitespace);
    let found = lines.find_map(|mut words| (words.next()? == key).then(|| words.next())?);
    found.and_then(|value| value.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::number;

    #[test]
    fn numbers_are_read_in_both_spellings() {
        assert_eq!(number("SwapTotal:    1024 kB\nSwapFree:  24 kB\n", "SwapFree:"), 24);
        assert_eq!(number("pswpin 7\npswpout 9\n", "pswpout"), 9);
        assert_eq!(number("pswpin 7\n", "nothing"), 0);
    }
}
