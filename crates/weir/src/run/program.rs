//! Finds the program that a name means, and checks whether an object can be preloaded into it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use weir_cli::failure::Failure;

/// Largest number of scripts in a chain where each one is the interpreter of the one before.
const SCRIPTS_MAX: usize = 4;
const SETUID: u32 = 0o4000;
const SETGID: u32 = 0o2000;
const PT_INTERP: u32 = 3;

/// The file that the system would run for this name.
pub fn find(name: &OsStr) -> Result<PathBuf, Failure> {
    if name.is_empty() {
        return Err(Failure::Failed(
            "the program's name is empty; give a name or a path behind --".to_owned(),
        ));
    }
    if name.as_bytes().contains(&b'/') {
        return Ok(name.into());
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_program = |file: &PathBuf| {
        file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.mode() & 0o111 != 0)
    };
    std::env::split_paths(&path).map(|directory| directory.join(name)).find(is_program).ok_or_else(|| {
        Failure::Failed(format!("{} is no program in PATH; name it by its path", name.display()))
    })
}

/// Checks whether the program's memory can be bounded.
///
/// # Errors
/// Fails with a line that says why the program's memory cannot be bounded.
pub fn check(path: &Path) -> Result<(), Failure> {
    let mut path = path.to_owned();
    for _ in 0..SCRIPTS_MAX {
        let unreadable =
            |error: io::Error| Failure::Failed(format!("cannot read {}: {error}", path.display()));
        let mut file = File::open(&path).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        // The system would say so only once the stores are made.
        if metadata.mode() & 0o111 == 0 {
            let path = path.display();
            return Err(Failure::Failed(format!("{path} is not executable; chmod +x {path} makes it so")));
        }
        let refused =
            |why: &str| Err(Failure::Failed(format!("{} cannot be bounded: {why}", path.display())));
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let changes_user = metadata.mode() & SETUID != 0 && metadata.uid() != user;
        if changes_user || metadata.mode() & SETGID != 0 && metadata.gid() != group {
            return refused("it is setuid or setgid, and the system preloads nothing into it");
        }
        let mut head = [0; 256];
        let read = file.read(&mut head).map_err(unreadable)?;
        if let Some(script) = head[..read].strip_prefix(b"#!") {
            match interpreter_of_script(script) {
                Some(interpreter) => path = interpreter,
                None => return refused("its first line names no interpreter"),
            }
            continue;
        }
        let own =
            File::open("/proc/self/exe").and_then(|mut own| loader(&mut own)).map_err(Failure::failed)?;
        return match loader(&mut file) {
            Ok(None) => refused("it is linked statically, and nothing can be preloaded into it"),
            Ok(found) if found != own => refused(&format!(
                "it is made for another loader ({}) than weir",
                found.unwrap_or_default().display()
            )),
            Ok(_) => Ok(()),
            Err(_) if is_text(&head[..read]) => refused(&format!(
                "it is a script that does not begin with #!; give its shell (-- sh {})",
                path.display()
            )),
            Err(_) => refused("it is no program of this machine"),
        };
    }
    Err(Failure::Failed(format!("{}: scripts that run scripts, without end", path.display())))
}

/// Whether a file that begins so is text, as far as anyone can tell. A shell takes it for a script.
fn is_text(head: &[u8]) -> bool {
    !head.is_empty() && !head.contains(&0) && !head.starts_with(b"\x7fELF")
}

fn interpreter_of_script(line: &[u8]) -> Option<PathBuf> {
    let line = line.split(|byte| *byte == b'\n').next()?;
    let word = line.split(u8::is_ascii_whitespace).find(|word| !word.is_empty())?;
    Some(PathBuf::from(OsStr::from_bytes(word)))
}

/// The loader that a program names: `None` for a statically linked program.
fn loader(file: &mut File) -> io::Result<Option<OsString>> {
    let mut header = [0; 64];
    file.rewind()?;
    file.read_exact(&mut header)?;
    // The program is ELF, 64 bits, little endian.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let short = |at: usize| u16::from_le_bytes([header[at], header[at + 1]]);
    let table = u64::from_le_bytes(header[32..40].try_into().expect("eight bytes"));
    let (size, count) = (u64::from(short(54)), u64::from(short(56)));
    for entry in 0..count {
        file.seek(SeekFrom::Start(table.saturating_add(entry * size)))?;
        let mut segment = [0; 56];
        file.read_exact(&mut segment)?;
        let long = |at: usize| u64::from_le_bytes(segment[at..at + 8].try_into().expect("eight bytes"));
        if segment[..4] == PT_INTERP.to_le_bytes() {
            let mut name = vec![0; long(32).min(4096) as usize];
            file.seek(SeekFrom::Start(long(8)))?;
            file.read_exact(&mut name)?;
            name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
            return Ok(Some(OsStr::from_bytes(&name).to_owned()));
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn an_interpreter_is_the_first_word_of_a_script() {
        let of = |line: &str| interpreter_of_script(line.as_bytes());
        assert_eq!(of(" /bin/sh -e\ntrue"), Some("/bin/sh".into()));
        assert_eq!(of("/usr/bin/env python3\n"), Some("/usr/bin/env".into()));
        assert_eq!(of(" \n/bin/sh"), None);
    }

    #[test]
    fn a_script_without_an_interpreter_and_an_empty_name_are_refused_with_the_next_step() {
        let script = std::env::temp_dir().join(format!("weir-script-{}", std::process::id()));
        for (content, next) in [
            (
                &b"echo hello\n"[..],
                format!("does not begin with #!; give its shell (-- sh {})", script.display()),
            ),
            (b"\x7fELF\x01\x01", "it is no program of this machine".to_owned()),
            (b"\xcf\xfa\xed\xfe\0", "it is no program of this machine".to_owned()),
        ] {
            std::fs::write(&script, content).unwrap();
            std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).unwrap();
            let refused = check(&script).expect_err("it cannot be bounded");
            assert!(matches!(&refused, Failure::Failed(said) if said.ends_with(&next)), "{refused:?}");
        }
        std::fs::remove_file(&script).unwrap();
        let refused = find("".as_ref()).expect_err("it names nothing");
        assert!(matches!(&refused, Failure::Failed(said) if said.contains("name is empty")), "{refused:?}");
    }
}
