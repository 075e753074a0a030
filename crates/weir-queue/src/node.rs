//! NUMA nodes: which processors are near a node's memory.

use std::io;

use crate::StartError;

/// The processors of one NUMA node.
pub(crate) struct Processors {
    node: u32,
    #[cfg(feature = "numa")]
    set: rustix::thread::CpuSet,
}

#[cfg(feature = "numa")]
impl Processors {
    /// Reads the list of processors of `node`.
    pub(crate) fn of(node: u32) -> Result<Self, StartError> {
        let path = format!("/sys/devices/system/node/node{node}/cpulist");
        let list = std::fs::read_to_string(path).map_err(|error| StartError::Node(node, error))?;
        let mut set = rustix::thread::CpuSet::new();
        for processor in processors(&list) {
            if processor < rustix::thread::CpuSet::MAX_CPU {
                set.set(processor);
            }
        }
        if set.count() == 0 {
            return Err(StartError::Node(node, io::Error::from(io::ErrorKind::NotFound)));
        }
        Ok(Processors { node, set })
    }

    /// Pins the calling thread to these processors.
    pub(crate) fn keep(&self) -> Result<(), StartError> {
        rustix::thread::sched_setaffinity(None, &self.set)
            .map_err(|error| StartError::Node(self.node, error.into()))
    }
}

#[cfg(not(feature = "numa"))]
impl Processors {
    pub(crate) fn of(node: u32) -> Result<Self, StartError> {
        Err(StartError::Node(node, io::Error::from(io::ErrorKind::Unsupported)))
    }

    pub(crate) fn keep(&self) -> Result<(), StartError> {
        Processors::of(self.node).map(drop)
    }
}

/// The numbers in a kernel list such as `0-3,8,10-11`.
#[cfg(feature = "numa")]
fn processors(list: &str) -> impl Iterator<Item = usize> {
    list.trim()
        .split(',')
        .filter_map(|range| {
            let (first, last) = range.split_once('-').unwrap_or((range, range));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .flatten()
}

#[cfg(all(test, feature = "numa"))]
mod tests {
    use super::*;

    #[test]
    fn kernel_lists_are_read_as_the_kernel_writes_them() {
        assert_eq!(processors("0-3,8,10-11\n").collect::<Vec<_>>(), [0, 1, 2, 3, 8, 10, 11]);
        assert_eq!(processors("5").collect::<Vec<_>>(), [5]);
        assert_eq!(processors("\n").count(), 0);
    }
}
