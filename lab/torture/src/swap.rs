//! The use of swap, and how short of memory the kernel was, from /proc.

use std::{fs, io};

/// Swap in use now, in KiB.
///
/// # Errors
/// Fails when /proc/meminfo cannot be read.
pub fn used_kib() -> io::Result<u64> {
    let text = fs::read_to_string("/proc/meminfo")?;
    Ok(number(&text, "SwapTotal:").saturating_sub(number(&text, "SwapFree:")))
}

/// Pages swapped (in, out) since boot.
///
/// # Errors
/// Fails when /proc/vmstat cannot be read.
pub fn pages_moved() -> io::Result<(u64, u64)> {
    let text = fs::read_to_string("/proc/vmstat")?;
    Ok((number(&text, "pswpin"), number(&text, "pswpout")))
}

/// Free memory now, in KiB.
///
/// # Errors
/// Fails when /proc/meminfo cannot be read.
pub fn free_kib() -> io::Result<u64> {
    Ok(number(&fs::read_to_string("/proc/meminfo")?, "MemFree:"))
}

/// Number of times since boot that a program had to reclaim memory itself, because none was free
/// (`allocstall`).
///
/// # Errors
/// Fails when /proc/vmstat cannot be read.
pub fn direct_reclaims() -> io::Result<u64> {
    Ok(stalls(&fs::read_to_string("/proc/vmstat")?))
}

fn stalls(vmstat: &str) -> u64 {
    let of_zones = vmstat.lines().filter(|line| line.starts_with("allocstall"));
    of_zones.filter_map(|line| line.split(' ').nth(1)?.parse::<u64>().ok()).sum()
}

/// The number after a key; 0 if the kernel does not know the key.
fn number(text: &str, key: &str) -> u64 {
    let mut lines = text.lines().map(str::split_whitespace);
    let found = lines.find_map(|mut words| (words.next()? == key).then(|| words.next())?);
    found.and_then(|value| value.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::{number, stalls};

    #[test]
    fn numbers_are_read_in_both_spellings() {
        assert_eq!(number("SwapTotal:    1024 kB\nSwapFree:  24 kB\n", "SwapFree:"), 24);
        assert_eq!(number("pswpin 7\npswpout 9\n", "pswpout"), 9);
        assert_eq!(number("pswpin 7\n", "nothing"), 0);
    }

    #[test]
    fn stalls_are_those_of_all_zones() {
        assert_eq!(stalls("pswpin 7\nallocstall_dma 1\nallocstall_normal 20\ncompact_stall 9\n"), 21);
    }
}
