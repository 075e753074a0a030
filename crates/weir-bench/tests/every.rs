//! Each benchmark runs to its end, with little to measure, draws a bar, and writes its figures. A
//! goal may be missed here: other tests run beside it.
//!
//! `WEIR_SCALE=full` also runs those that take more than ten seconds.

use std::fs;
use std::path::Path;
use std::process::{Command, ExitStatus, Stdio};

/// The benchmarks that take a few seconds.
const SHORT: &[&[&str]] = &[
    &["memory", "--size", "256MiB"],
    &["policy", "--room", "10"],
    &["compress", "--size", "16MiB", "--runs", "1"],
    &["store", "--short", "--runs", "1", "--threads", "1", "--store", "host:64MiB"],
    &["restart", "--bytes", "16MiB", "--kills", "1"],
    &["queue", "1000", "1000", "2", "1"],
    &["block", "--size", "64MiB", "--seconds", "1", "--runs", "1", "--only", "qd1_read"],
];

/// The others. `weir bench swap` stands in `weir/tests/interrupted`.
const LONG: &[&[&str]] = &[
    &["lease", "--connections", "1", "--outstanding", "32", "--threads", "1", "--flows", "0"],
    &["give-back", "--store", "host:512MiB", "--size", "512MiB", "--cycles", "1", "--users", "1"],
    &["share", "--rounds", "1"],
    &["disk", "--size", "64MiB", "--runs", "1"],
    &["long", "--size", "64MiB", "--seconds", "1", "--runs", "1"],
    &["fault", "--size", "128MiB", "--limit", "32MiB", "--seconds", "1", "--runs", "1", "--only", "run"],
    &["cache", "--size", "256MiB", "--members", "2", "--time", "1", "--runs", "1"],
];

/// Runs a command with a terminal for its standard error, and a file for its standard output.
/// Returns its end, and what it drew. `None`: the program `script` is not there.
fn on_a_terminal(command: &Command, stdout: &Path) -> Option<(ExitStatus, String)> {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let quoted: Vec<String> = words.map(|word| format!("'{}'", word.to_str().expect("UTF-8"))).collect();
    let line = format!("{} >'{}'", quoted.join(" "), stdout.display());
    let mut script = Command::new("script");
    script.args(["-qec", &line, "/dev/null"]).env("TERM", "xterm").stdin(Stdio::null());
    let output = script.output().ok()?;
    Some((output.status, String::from_utf8_lossy(&output.stdout).into_owned()))
}

/// Whether this is text without control characters but the ends of its lines.
fn is_plain(text: &[u8]) -> bool {
    !text.is_empty() && text.iter().all(|byte| *byte == b'\n' || *byte >= b' ')
}

/// The bars among what was drawn: the part that runs, the share done, and the time left.
fn bars(drawn: &str) -> Vec<&str> {
    let is_bar = |line: &&str| {
        let Some((head, share)) = line.split_once("% in ") else { return false };
        head.starts_with(char::is_alphanumeric) && share.ends_with(" left")
    };
    // A line is cleared before it is drawn again.
    let lines = drawn.split(char::is_control).map(|line| line.trim_start_matches("[2K").trim_end());
    lines.filter(is_bar).collect()
}

#[test]
fn a_bar_is_drawn_on_a_terminal_and_nothing_into_a_pipe() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir-bench"));
    command.args(["compress", "--size", "4MiB", "--runs", "1"]);
    let output = command.output().expect("the program starts");
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
    let table = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bar.txt");
    let Some((status, drawn)) = on_a_terminal(&command, &table) else {
        return println!("\nskipped: a_bar_is_drawn_on_a_terminal: the program script");
    };
    assert!(status.success(), "{drawn}");
    let bars = bars(&drawn);
    for part in ["lz4 ", "zstd ", "zstd, replaced "] {
        assert!(bars.iter().any(|bar| bar.starts_with(part)), "{part}: {drawn:?}");
    }
    assert!(is_plain(&fs::read(&table).expect("the table")));
}

#[test]
fn every_benchmark_ends_draws_a_bar_and_writes_its_figures() {
    let name = "every_benchmark_ends_draws_a_bar_and_writes_its_figures";
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    // `restart` starts `weir`, which another package builds.
    if !Path::new(env!("CARGO_BIN_EXE_weir-bench")).with_file_name("weir").exists() {
        return println!("\nskipped: {name}: weir is not built (cargo build)");
    }
    if !Path::new("/dev/fuse").exists() || !rustix::process::geteuid().is_root() {
        return println!("\nskipped: {name}: not root, or no /dev/fuse");
    }
    let trace = directory.join("every.trace");
    fs::write(&trace, (0..5000).map(|page| format!("{}\n", page * page % 997)).collect::<String>())
        .expect("written");
    let is_full = std::env::var("WEIR_SCALE").is_ok_and(|scale| scale == "full");
    let long = if is_full { LONG } else { &[] };
    let mut files = Vec::new();
    for words in SHORT.iter().chain(long) {
        let json = directory.join(format!("every-{}.json", words[0]));
        let _ = fs::remove_file(&json);
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir-bench"));
        command.args(*words).arg("--json").arg(&json);
        if words[0] == "policy" {
            command.arg("--trace").arg(&trace);
        }
        let table = json.with_extension("txt");
        let Some((status, said)) = on_a_terminal(&command, &table) else {
            return println!("\nskipped: {name}: the program script");
        };
        assert!(status.success() || said.contains("goals missed"), "{words:?}: {said}");
        assert!(!bars(&said).is_empty(), "{words:?}: {said:?}");
        let table = fs::read(&table).expect("standard output");
        assert!(is_plain(&table), "{words:?}: {}", String::from_utf8_lossy(&table));
        let report =
            fs::read_to_string(&json).unwrap_or_else(|_| panic!("{words:?} writes no figures: {said}"));
        let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
        assert_eq!(report["bench"], words[0]);
        let rows = report["rows"].as_array().expect("rows");
        assert!(
            rows.iter().any(|row| row["value"].as_f64().is_some_and(|value| value > 0.0)),
            "{words:?}: {report}"
        );
        files.push(json);
    }
    let shown =
        Command::new(env!("CARGO_BIN_EXE_weir-bench")).arg("show").args(&files).output().expect("it starts");
    let table = String::from_utf8_lossy(&shown.stdout);
    assert!(table.contains("bytes_per_page") && table.contains("qd1_read"), "{table}");
}
