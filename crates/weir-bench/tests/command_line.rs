//! The command line of the benchmarks as a contract: exit codes, one line for each mistake, and the
//! files that a run writes.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn bench(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weir-bench")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Arguments, and the parts that the one line about them must contain: the key, the value seen, the
/// accepted values.
const MISTAKES: &[(&[&str], &[&str])] = &[
    (&["nosuch"], &["nosuch", "weir bench --help"]),
    (&["lease", "--outstanding", "many"], &["--outstanding", "many"]),
    (&["lease", "--connections", "0"], &["--connections", "0", "1..=1000000"]),
    (&["queue", "1000", "1000", "100000"], &["PRODUCERS", "100000", "1..=1024"]),
    (&["memory", "--size", "64GB"], &["--size", "64GB", "512MiB"]),
];

#[test]
fn a_mistake_is_one_line_that_names_key_value_and_what_is_accepted_and_exits_2() {
    for (arguments, words) in MISTAKES {
        let output = bench(arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {said}");
        assert_eq!(said.lines().count(), 1, "{arguments:?}: {said}");
        assert!(said.starts_with("weir: ") && output.stdout.is_empty(), "{arguments:?}: {said}");
        for word in *words {
            assert!(said.contains(word), "{arguments:?}: {word:?} is not in {said}");
        }
    }
}

#[test]
fn a_table_that_a_full_disk_does_not_take_is_an_error() {
    let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("it is always there");
    let mut command = Command::new(env!("CARGO_BIN_EXE_weir-bench"));
    let output = command.args(["memory", "--size", "64MiB"]).stdout(full).output().expect("it starts");
    let said = text(&output.stderr);
    assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("standard output") && said.contains("No space left"), "{said}");
}

#[test]
fn every_benchmark_has_a_man_page() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("man-bench");
    let output = bench(&["man", directory.to_str().expect("UTF-8")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    for page in ["weir-bench.1", "weir-bench-swap.1"] {
        assert!(fs::read_to_string(directory.join(page)).expect(page).contains(".SH NAME"), "{page}");
    }
}

#[test]
fn a_file_that_a_benchmark_cannot_write_is_said_before_it_runs() {
    for flag in ["--json", "--report"] {
        let output = bench(&["memory", "--size", "64MiB", flag, "/nowhere/figures"]);
        let said = text(&output.stderr);
        assert!(output.status.code() == Some(1) && output.stdout.is_empty(), "{}", text(&output.stdout));
        assert!(said.contains("/nowhere/figures") && said.contains("another file"), "{said}");
    }
}

#[test]
fn the_guide_lists_every_benchmark() {
    let guide = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide.md");
    let guide = fs::read_to_string(guide).expect("it is there");
    let (_, section) = guide.split_once("\n## Benchmarks\n").expect("a section on benchmarks");
    let help = text(&bench(&["--help"]).stdout);
    let listed = help.lines().skip_while(|line| *line != "Commands:").skip(1);
    let names = listed
        .take_while(|line| !line.is_empty())
        .filter_map(|line| line.strip_prefix("  ")?.split(' ').next())
        .filter(|name| !name.is_empty() && *name != "help");
    let mut count = 0;
    for name in names {
        assert!(section.contains(&format!("weir bench {name}")), "weir bench {name} is not in the guide");
        count += 1;
    }
    assert!(count >= 11, "{help}");
}

#[test]
fn a_benchmark_prints_its_table_and_writes_json_and_html() {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let (json, html) = (directory.join("memory.json"), directory.join("memory.html"));
    let files = [json.to_str().expect("UTF-8"), html.to_str().expect("UTF-8")];
    let output = bench(&["memory", "--size", "256MiB", "--json", files[0], "--report", files[1]]);
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
    assert!(text(&output.stdout).contains("bytes_per_page"), "{}", text(&output.stdout));
    let report: serde_json::Value = serde_json::from_slice(&fs::read(&json).expect("written")).expect("JSON");
    assert_eq!((&report["schema"], &report["bench"]), (&1.into(), &"memory".into()));
    assert!(report["rows"].as_array().is_some_and(|rows| !rows.is_empty()));
    assert!(fs::read_to_string(&html).expect("written").contains("<svg"));
}

#[test]
fn the_benchmark_drives_a_daemon_and_finds_every_page() {
    let name = "the_benchmark_drives_a_daemon_and_finds_every_page";
    if !Path::new(env!("CARGO_BIN_EXE_weir-bench")).with_file_name("weir").exists() {
        return println!("\nskipped: {name}: weir is not built (cargo build)");
    }
    let json = Path::new(env!("CARGO_TARGET_TMPDIR")).join("give-back.json");
    let output = bench(&[
        "give-back",
        "--store",
        "sim:size=16MiB,chunk=4MiB",
        "--size",
        "16MiB",
        "--cycles",
        "2",
        "--users",
        "2",
        "--json",
        json.to_str().expect("UTF-8"),
    ]);
    let report = fs::read_to_string(&json).unwrap_or_else(|_| panic!("no report: {}", text(&output.stderr)));
    let report: serde_json::Value = serde_json::from_str(&report).expect("JSON");
    let row = |metric: &str| {
        let rows = report["rows"].as_array().expect("rows");
        rows.iter().find(|row| row["metric"] == metric).map(|row| row["value"].as_f64().expect("a number"))
    };
    assert_eq!(row("mismatches"), Some(0.0), "{report}");
    assert!(row("checked") > Some(4000.0) && row("gb_s") > Some(0.0), "{report}");
    fs::remove_file(&json).expect("removed");
}
