//! The reports of a start, for the program that started the daemon: a file with one object. It says
//! how far the start is, and at the end why it failed, if it did. Only the first daemon writes one.
//! A daemon that takes over writes none, because the file system may wait for the very device that
//! the daemon serves.

use crate::error::{Class, Error};
use crate::start::Bar;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use weir_core::chain;

/// The version of the report.
const SCHEMA: u32 = 1;
/// Time between two reports of progress.
const EVERY: Duration = Duration::from_millis(100);

/// The reason why a daemon does not serve.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StartReport {
    schema: u32,
    /// The class of the error, which a caller decides by.
    pub class: Class,
    /// One line for people, as it is on standard error.
    pub text: String,
}

impl StartReport {
    pub(crate) fn of(error: &Error) -> Self {
        StartReport { schema: SCHEMA, class: error.class(), text: chain(error) }
    }

    /// Writes the report. If that fails, standard error still has the line.
    pub(crate) fn write(&self, path: &Path) {
        let text = serde_json::to_vec(self).expect("strings always serialise");
        let _ = fs::write(path, text);
    }

    /// Reads the report of a daemon of this version, if there is one.
    pub fn read(path: &Path) -> Option<Self> {
        let report: StartReport = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        (report.schema == SCHEMA).then_some(report)
    }
}

/// How far a start is: the store that it opens now, and how much of that store is done.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct StartProgress {
    schema: u32,
    /// The store's name.
    pub store: String,
    /// Number of the store's bytes that are done.
    pub done_bytes: u64,
    /// Number of all bytes of the store.
    pub all_bytes: u64,
}

impl StartProgress {
    /// Reads the progress of a daemon of this version, if its start has come to a store, and has
    /// not failed.
    pub fn read(path: &Path) -> Option<Self> {
        let progress: StartProgress = serde_json::from_slice(&fs::read(path).ok()?).ok()?;
        (progress.schema == SCHEMA).then_some(progress)
    }

    /// Writes the progress of `store` to `path` too, besides showing it by `bar`.
    pub(crate) fn written(path: PathBuf, store: String, mut bar: Bar) -> Bar {
        let mut last = None;
        Box::new(move |done_bytes, all_bytes| {
            let is_due = last.is_none_or(|last: Instant| last.elapsed() >= EVERY);
            if is_due || done_bytes >= all_bytes {
                last = Some(Instant::now());
                let progress = StartProgress { schema: SCHEMA, store: store.clone(), done_bytes, all_bytes };
                let text = serde_json::to_vec(&progress).expect("strings and numbers always serialise");
                // Ignore a failure: no page depends on the report, and the log has the progress
                // too.
                let _ = fs::write(&path, text);
            }
            bar(done_bytes, all_bytes);
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::ErrorKind;
    use weir_store::OpenErrorKind;

    #[test]
    fn a_report_is_read_as_it_was_written_and_what_is_no_report_is_none() {
        let path = std::env::temp_dir().join(format!("weir-start-report-{}", std::process::id()));
        let room = ErrorKind::Store(OpenErrorKind::NoMemory { wanted: 2, had: 1 });
        let report = StartReport::of(&Error::new(room, "store host:1GiB: no memory"));
        report.write(&path);
        let read = StartReport::read(&path);
        fs::write(&path, r#"{"schema":2,"class":"failed","text":""}"#).expect("written");
        let other = StartReport::read(&path);
        fs::remove_file(&path).expect("removed");
        assert_eq!(read, Some(report.clone()));
        assert_eq!((report.class, other, StartReport::read(&path)), (Class::NoRoom, None, None));
    }

    #[test]
    fn the_first_and_the_last_progress_of_a_store_are_written_and_are_no_report_of_a_failure() {
        let path = std::env::temp_dir().join(format!("weir-start-progress-{}", std::process::id()));
        let mut bar = StartProgress::written(path.clone(), "host:3MiB".to_owned(), Box::new(|_, _| ()));
        bar(1, 3);
        let first = StartProgress::read(&path).expect("written");
        let failure = StartReport::read(&path);
        bar(3, 3);
        let last = StartProgress::read(&path).expect("written");
        StartReport::of(&Error::new(ErrorKind::Keeper, "no")).write(&path);
        let failed = StartProgress::read(&path);
        fs::remove_file(&path).expect("removed");
        assert_eq!((first.store.as_str(), first.done_bytes, first.all_bytes), ("host:3MiB", 1, 3));
        assert_eq!((failure, last.done_bytes, failed), (None, 3, None));
    }
}
