//! The report of a start that failed, for the program that started the daemon: a file with one
//! object. Only the first daemon writes one. A daemon that takes over writes none, because the file
//! system may wait for the very device that the daemon serves.

use crate::error::{Class, Error};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::Path;
use weir_core::chain;

/// The version of the report.
const SCHEMA: u32 = 1;

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
}
