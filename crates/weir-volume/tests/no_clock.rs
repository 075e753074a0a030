//! Nothing in this crate sleeps, spins, yields or reads a clock.

use std::fs;
use std::path::Path;

const FORBIDDEN: [&str; 8] = [
    "Instant::now",
    "SystemTime::now",
    ".elapsed()",
    "thread::sleep",
    "yield_now",
    "spin_loop",
    "park_timeout",
    "recv_timeout",
];

/// The production part of a source file: the lines before its tests, without comments.
fn production(source: &str) -> impl Iterator<Item = (usize, &str)> {
    let end = source.find("#[cfg(all(test").or(source.find("#[cfg(test")).unwrap_or(source.len());
    source[..end].lines().enumerate().filter(|(_, line)| !line.trim_start().starts_with("//"))
}

fn hits(directory: &Path, found: &mut Vec<String>, files: &mut u32) {
    for entry in fs::read_dir(directory).expect("a directory of sources") {
        let path = entry.expect("a source").path();
        if path.is_dir() {
            hits(&path, found, files);
            continue;
        }
        *files += 1;
        let source = fs::read_to_string(&path).expect("text");
        let lines = production(&source).filter(|(_, line)| FORBIDDEN.iter().any(|word| line.contains(word)));
        found.extend(lines.map(|(at, line)| format!("{}:{}: {line}", path.display(), at + 1)));
    }
}

#[test]
fn nothing_in_the_volume_sleeps_spins_or_reads_a_clock() {
    let (mut found, mut files) = (Vec::new(), 0);
    hits(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut found, &mut files);
    assert!(files > 20, "only {files} sources were looked at");
    assert!(
        found.is_empty(),
        "time comes in by poll(now), and a lane's owner decides how to wait:\n{}",
        found.join("\n")
    );
}

#[test]
fn a_sleep_in_production_is_found_and_one_in_a_test_or_a_comment_is_not() {
    let source = "// yield_now\nfn nap() { std::thread::sleep(NAP) }\n#[cfg(test)]\nmod tests { fn x() { spin_loop() } }";
    let found: Vec<_> =
        production(source).filter(|(_, line)| FORBIDDEN.iter().any(|word| line.contains(word))).collect();
    assert_eq!(found, [(1, "fn nap() { std::thread::sleep(NAP) }")]);
}
