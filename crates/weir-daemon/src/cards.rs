//! Asks the cards' drivers in a separate process. A driver that crashes or never answers harms only
//! that process.

use serde::{Deserialize, Serialize};
use std::io::{Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use weir_store::StoreUrl;
use weir_store::vram::{self, Target, VramUrl};

/// Time limit for the drivers. To open one card takes half a second to a second.
const LIMIT: Duration = Duration::from_secs(8);
/// Directories in which the Vulkan loader looks for files that name drivers.
pub const DRIVER_FILES: [&str; 2] = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"];

/// The result of asking the drivers.
#[derive(Clone, PartialEq, Debug)]
pub enum Looked {
    /// The drivers answered.
    Seen(Seen),
    /// The drivers did not answer within this many seconds.
    NoAnswer(u64),
    /// The process that asked the drivers failed; the text says how.
    Died(String),
}

/// The drivers' answers.
#[derive(Clone, PartialEq, Default, Debug, Serialize, Deserialize)]
pub struct Seen {
    /// The cards that the drivers know.
    pub cards: Vec<Card>,
    /// The reason why the drivers know no card.
    pub refused: Option<String>,
    /// Vulkan drivers that cannot be loaded.
    pub broken: Vec<Broken>,
}

/// A card, as its drivers describe it.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Card {
    /// The card's name.
    pub name: String,
    /// The paths to the card's memory that work.
    pub ways: Vec<String>,
    /// Each path that does not work, with the reason.
    pub missing: Vec<(String, String)>,
}

/// A Vulkan driver that cannot be loaded.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Broken {
    /// The file that names the driver to the Vulkan loader.
    pub file: String,
    /// The dynamic loader's error.
    pub why: String,
}

impl Card {
    /// Whether this path to the card's memory works.
    pub fn has(&self, way: &str) -> bool {
        self.ways.iter().any(|it| it == way)
    }
}

/// Looks at the cards that `store` names, in a process of its own.
pub fn look(store: &VramUrl) -> Looked {
    let url = StoreUrl::Vram(store.clone()).to_string();
    let mut command = Command::new("/proc/self/exe");
    command.args(["look-at-cards", "--store", &url]);
    ask(command, LIMIT)
}

/// Runs the process that asks the drivers, within the time limit.
fn ask(mut command: Command, limit: Duration) -> Looked {
    let child = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null()).spawn();
    let mut child = match child {
        Ok(child) => child,
        Err(error) => return Looked::Died(format!("it could not be started: {error}")),
    };
    let until = Instant::now() + limit;
    let status = loop {
        match child.try_wait() {
            Ok(Some(status)) => break status,
            Ok(None) if Instant::now() < until => std::thread::sleep(Duration::from_millis(10)),
            Ok(None) => {
                // The process may hang in the kernel, waiting for its card. So do not wait for its
                // end.
                let _ = child.kill();
                return Looked::NoAnswer(limit.as_secs());
            }
            Err(error) => return Looked::Died(error.to_string()),
        }
    };
    let mut said = String::new();
    let read = child.stdout.take().map(|mut stdout| stdout.read_to_string(&mut said));
    match (status.success(), read, serde_json::from_str(&said)) {
        (true, Some(Ok(_)), Ok(seen)) => Looked::Seen(seen),
        _ => Looked::Died(format!("{status}")),
    }
}

/// Does the work of the separate process: prints a [`Seen`].
pub fn run(store: &StoreUrl) {
    let StoreUrl::Vram(url) = store else { return };
    let mut seen = Seen { broken: broken(), ..Seen::default() };
    match vram::look(url) {
        Ok(cards) => {
            seen.cards = cards
                .into_iter()
                .map(|card| Card {
                    name: card.name,
                    ways: card.ways.into_iter().map(str::to_owned).collect(),
                    missing: card.missing.into_iter().map(|(way, why)| (way.to_owned(), why)).collect(),
                })
                .collect();
        }
        Err(why) => seen.refused = Some(why),
    }
    let said = serde_json::to_string(&seen).expect("strings always serialise");
    // The process that reads the answer may have given up.
    let _ = writeln!(std::io::stdout(), "{said}");
}

fn broken() -> Vec<Broken> {
    let named = std::env::var_os("VK_DRIVER_FILES").or_else(|| std::env::var_os("VK_ICD_FILENAMES"));
    let files: Vec<PathBuf> = match named {
        Some(files) => std::env::split_paths(&files).collect(),
        None => DRIVER_FILES
            .into_iter()
            .filter_map(|directory| std::fs::read_dir(directory).ok())
            .flat_map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())))
            .filter(|path| path.extension().is_some_and(|extension| extension == "json"))
            .collect(),
    };
    files
        .into_iter()
        .filter_map(|file| Some(Broken { why: why_broken(&file)?, file: file.display().to_string() }))
        .collect()
}

fn why_broken(file: &Path) -> Option<String> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return Some(error.to_string()),
    };
    let json: serde_json::Value = serde_json::from_str(&text).ok()?;
    let library = Path::new(json.get("ICD")?.get("library_path")?.as_str()?);
    // A `library_path` with a directory is relative to the directory of the JSON file. For a bare
    // name the dynamic loader searches the system's directories.
    let library = match library.components().count() {
        1 => library.to_owned(),
        _ => file.parent().unwrap_or(Path::new("/")).join(library),
    };
    vram::why_not_loaded(&library)
}

/// A URL that names every card.
pub fn all() -> VramUrl {
    VramUrl::new(Target::All)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_driver_that_hangs_crashes_or_talks_nonsense_costs_the_process_that_asks() {
        assert_eq!(ask(shell("sleep 1000"), Duration::from_secs(1)), Looked::NoAnswer(1));
        let Looked::Died(how) = ask(shell("kill -SEGV $$"), LIMIT) else { panic!("it died") };
        assert!(how.contains("SIGSEGV"), "{how}");
        assert!(matches!(ask(shell("echo nonsense"), LIMIT), Looked::Died(_)));
        let nothing = r#"echo '{"cards":[],"refused":"none","broken":[]}'"#;
        let Looked::Seen(seen) = ask(shell(nothing), LIMIT) else { panic!("it answered") };
        assert_eq!(seen.refused.as_deref(), Some("none"));
    }
}
