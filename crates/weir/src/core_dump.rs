//! Pages of other programs never reach a core file.

use rustix::process::{DumpableBehavior, Resource, Rlimit, set_dumpable_behavior, setrlimit};
use weir_cli::failure::Failure;

/// Keeps the kernel from writing this process's memory anywhere when it dies, to a file or to a
/// handler's pipe (fs/coredump.c looks at this before `core_pattern`). So a death costs no time
/// either. Each program that is started begins anew: call it in each.
///
/// # Errors
/// In one line, if the system refuses.
pub fn forbid() -> Result<(), Failure> {
    let refused = |errno| {
        Failure::Failed(format!(
            "core dumps of pages cannot be switched off: {errno}; see prctl(2), PR_SET_DUMPABLE"
        ))
    };
    set_dumpable_behavior(DumpableBehavior::NotDumpable).map_err(refused)?;
    // For what this process starts, and for whoever makes it dumpable again.
    setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }).map_err(refused)
}
