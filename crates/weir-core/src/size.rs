//! Sizes as people write them: `512MiB`, `8G`, `4096`. All units are powers of 1024.

use std::fmt;
use std::str::FromStr;

/// A number of bytes that is parsed from and printed as text such as `64GiB`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ByteSize(pub u64);

/// The reason why a text is no size.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{text:?} is not a size: give a number with K, M, G, T or KiB, MiB, GiB, TiB (powers of 1024), such as 512MiB"
)]
pub struct SizeError {
    text: String,
}

const UNITS: [(&str, u64); 4] = [("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)];

impl FromStr for ByteSize {
    type Err = SizeError;

    fn from_str(text: &str) -> Result<Self, SizeError> {
        let error = || SizeError { text: text.to_owned() };
        let digits = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
        let number: u64 = text[..digits].parse().map_err(|_| error())?;
        let unit = match text[digits..].to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "kib" => 1 << 10,
            "m" | "mib" => 1 << 20,
            "g" | "gib" => 1 << 30,
            "t" | "tib" => 1 << 40,
            _ => return Err(error()),
        };
        number.checked_mul(unit).map(ByteSize).ok_or_else(error)
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, scale) = UNITS.into_iter().find(|&(_, scale)| self.0 >= scale).unwrap_or(("B", 1));
        let text = if self.0.is_multiple_of(scale) {
            format!("{}{unit}", self.0 / scale)
        } else {
            format!("{:.1}{unit}", self.0 as f64 / scale as f64)
        };
        f.pad(&text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn sizes_are_powers_of_1024_whatever_the_spelling() {
        for (text, bytes) in [
            ("4096", 4096),
            ("1K", 1024),
            ("1kib", 1024),
            ("3MiB", 3 << 20),
            ("2g", 2 << 30),
            ("1TiB", 1 << 40),
        ] {
            assert_eq!(text.parse(), Ok(ByteSize(bytes)), "{text}");
        }
    }

    #[test]
    fn nonsense_and_overflow_are_refused() {
        for text in ["", "G", "-1G", "1.5G", "1 GiB", "1GB", "99999999999999999999", "99999999TiB"] {
            let error = text.parse::<ByteSize>().unwrap_err().to_string();
            assert!(error.contains(&format!("{text:?}")) && error.contains("512MiB"), "{error}");
        }
    }

    proptest! {
        #[test]
        fn a_whole_size_survives_being_shown(number in 1u64..1024, unit in 0usize..4) {
            let size = ByteSize(number * UNITS[unit].1);
            prop_assert_eq!(size.to_string().parse(), Ok(size));
        }
    }
}
