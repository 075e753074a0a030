//! The priority of Weir's swap device among the others.

use weir_system::swaps::Swap;

/// The priority of Weir's device among the others, and the reason in words.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Priority {
    /// The priority, from 0 to 32767.
    pub priority: i32,
    /// The reason for the priority, in one line.
    pub why: String,
}

/// The usual priority of Weir's device. It leaves room above for devices that must come first.
const USUAL: i32 = 100;
const MOST: i32 = 32_767;

/// Finds a priority below every zram device, since compressed RAM is faster, and above all disks.
/// Every device but zram counts as a disk. If zram stands below a disk, or has no priority of its
/// own, only the disks count.
pub fn place(others: &[Swap], asked: Option<i32>) -> Priority {
    let names = |zram: bool| {
        let names = others.iter().filter(|swap| swap.is_zram() == zram);
        names.map(|swap| format!("{} ({})", swap.path, swap.priority)).collect::<Vec<_>>().join(", ")
    };
    if let Some(priority) = asked {
        return Priority { priority, why: "as asked".to_owned() };
    }
    let zram = others.iter().filter(|swap| swap.is_zram()).map(|swap| swap.priority).min();
    let disk = others.iter().filter(|swap| !swap.is_zram()).map(|swap| swap.priority).max().unwrap_or(-1);
    let above = (disk + 1).clamp(0, MOST);
    match zram {
        Some(zram) if zram > above => Priority {
            priority: (zram - 1).min(USUAL.max(above)),
            why: match names(false) {
                disks if disks.is_empty() => format!("after {}, which compresses in RAM", names(true)),
                disks => format!("after {}, which compresses in RAM, and before {disks}", names(true)),
            },
        },
        Some(_) => Priority {
            priority: USUAL.max(above),
            why: format!(
                "before {} too: for zram to be filled first give it a higher priority, or --priority a lower one here",
                names(true)
            ),
        },
        None if others.is_empty() => Priority { priority: USUAL, why: "the only swap".to_owned() },
        None => Priority { priority: USUAL.max(above), why: format!("before {}", names(false)) },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_core::ByteSize;

    fn swap(path: &str, priority: i32) -> Swap {
        Swap { path: path.to_owned(), size: ByteSize(1 << 30), used: ByteSize(0), priority }
    }

    #[test]
    fn alone_it_gets_the_usual_priority() {
        assert_eq!(place(&[], None).priority, USUAL);
    }

    #[test]
    fn it_comes_before_disks_and_after_zram() {
        for (others, priority) in [
            (vec![swap("/dev/sda2", -2)], 100),
            (vec![swap("/swapfile", 500)], 501),
            (vec![swap("/dev/zram0", 100), swap("/dev/sda2", -2)], 99),
            (vec![swap("/dev/zram0", 5), swap("/dev/zram1", 32_767)], 4),
            (vec![swap("/dev/zram0", 32_767), swap("/dev/sda2", 10)], 100),
            (vec![swap("/dev/zram0", 32_767), swap("/dev/sda2", 200)], 201),
            (vec![swap("/dev/zram0", -2)], 100),
            (vec![swap("/dev/sda2", 32_767)], 32_767),
        ] {
            let place = place(&others, None);
            assert_eq!(place.priority, priority, "{others:?}: {}", place.why);
        }
    }

    #[test]
    fn zram_that_would_be_filled_after_it_is_explained() {
        assert!(place(&[swap("/dev/zram0", -2)], None).why.contains("higher priority"));
        assert!(place(&[swap("/dev/zram0", 100)], None).why.contains("after /dev/zram0 (100)"));
    }

    #[test]
    fn what_was_asked_for_is_taken() {
        assert_eq!(place(&[swap("/dev/zram0", 100)], Some(7)).priority, 7);
    }
}
