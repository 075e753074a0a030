//! Keeps pages of other programs out of core files.

use crate::error::{Error, ErrorKind};
use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};

/// Keeps the kernel from writing this process's memory to a core file, or to a handler's pipe, when
/// the process dies. fs/coredump.c checks whether the process is dumpable before it looks at
/// `core_pattern`, so a death takes no extra time. An exec makes the process dumpable again, so
/// each program must call this.
///
/// # Errors
/// Fails with one line if the system refuses.
pub fn forbid() -> Result<(), Error> {
    let refused = |errno| {
        Error::new(
            ErrorKind::Protection,
            format!("core dumps of pages cannot be switched off: {errno}; see prctl(2), PR_SET_DUMPABLE"),
        )
    };
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(refused)?;
    // The limit also covers child processes, and this process if it becomes dumpable again.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).map_err(refused)
}
