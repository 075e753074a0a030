//! The command line as a contract: exit codes, one line for each mistake, help, man pages and
//! completions.

use std::fs;
use std::process::{Command, Output};

fn weir(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weir")).args(arguments).output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Arguments, and the parts that the one line about them must contain: the key, the value seen, the
/// accepted values.
const MISTAKES: &[(&[&str], &[&str])] = &[
    (&["bogus"], &["bogus"]),
    (&["doctor", "--jsn"], &["--jsn", "--json"]),
    (&["doctor", "extra"], &["extra", "weir doctor --help"]),
    (&["-5"], &["-5", "weir --help"]),
    (&["serve", "-5"], &["-5", "weir serve --help"]),
    (&["serve", "--store", "host"], &["--store", "host", "host:8GiB"]),
    (&["serve", "--store", "host:1MiB", "--fuse", "/x", "--name", ".."], &["--name", "..", "accepted"]),
    (&["serve", "--store", "host:1MiB", "--fuse", "/x", "--name", "."], &["--name", "\".\"", "accepted"]),
    (&["serve", "--store", "host:1MiB", "--fuse", "/x", "--name", "a/b"], &["--name", "a/b", "accepted"]),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "unix:/x", "--name", "a\nb"],
        &["--name", "control characters"],
    ),
    (&["completions", "basic"], &["SHELL", "basic", "bash", "zsh", "fish"]),
    (&["completions"], &["SHELL"]),
    (&["man"], &["DIRECTORY"]),
    (&["serve"], &["--store"]),
    (&["serve", "--store", "host:1GB"], &["--store", "host:1GB", "such as 8GiB"]),
    (&["serve", "--store", "disk:/dev/sda"], &["--store", "disk", "host:8GiB, vram:, file:PATH"]),
    (&["serve", "--store", "sim:oops=1"], &["--store", "oops", "seed, size"]),
    (&["serve", "--store", "host:1MiB"], &["--nbd", "--ublk", "unix:PATH", "tcp:HOST:PORT"]),
    (&["serve", "--store", "host:1MiB", "--ublk", "--queues", "0"], &["--queues", "0", "1..=256"]),
    (&["serve", "--store", "host:1MiB", "--ublk", "--depth", "2000"], &["--depth", "2000", "1..=1024"]),
    (&["serve", "--store", "host:1MiB", "--size", "8X"], &["--size", "8X", "512MiB"]),
    (&["serve", "--store", "host:1MiB", "--nbd", "unix:/x", "--size", "5000"], &["--size", "5000", "4KiB"]),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "unix:/x", "--size", "8TiB"],
        &["--size", "8TiB", "8TiB less 32MiB"],
    ),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "unix:/x", "--size", "17TiB"],
        &["--size", "17TiB", "8TiB less 32MiB"],
    ),
    (&["serve", "--store", "host:1MiB", "--nbd", "unix:/x", "--queues", "2"], &["--queues", "--ublk"]),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "unix:/x", "--insecure"],
        &["--insecure", "--nbd tcp:HOST:PORT"],
    ),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "unix:/x", "--tls", "/y"],
        &["--tls", "--nbd tcp:HOST:PORT"],
    ),
    (&["serve", "--store", "host:1MiB", "--nbd", "/tmp/x"], &["--nbd", "/tmp/x", "unix:PATH"]),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "tcp:localhost:0"],
        &["--nbd", "tcp:localhost:0", "1 to 65535"],
    ),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "tcp:localhost:9"],
        &["--nbd", "tcp:localhost:9", "--insecure"],
    ),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "tcp:0.0.0.0:10809", "--insecure"],
        &["--insecure", "tcp:0.0.0.0:10809", "127.0.0.1"],
    ),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "tcp:127.0.0.1:9", "--tls", "/x", "--swap"],
        &["--swap", "tcp:127.0.0.1:9", "--tls", "unix:PATH"],
    ),
    (
        &["serve", "--store", "host:1MiB", "--nbd", "tcp:127.0.0.1:9", "--insecure", "--swap"],
        &["--swap", "tcp:127.0.0.1:9", "every user", "unix:PATH"],
    ),
    (&["serve", "--store", "host:1MiB", "--connections", "0"], &["--connections", "0", "1..=1024"]),
    (&["serve", "--store", "host:1MiB", "--log", "loud"], &["--log", "loud", "warn, info"]),
    (&["serve", "--store", "host:1MiB", "--unsafe-no-flusher"], &["--swap"]),
    (&["serve", "--config", "x.toml", "--store", "host:1MiB"], &["--config"]),
    (&["try", "--seconds", "ten"], &["--seconds", "ten"]),
    (&["try", "--size", "0"], &["--size", "0", "4KiB"]),
    (&["mount", "m", "--size", "0"], &["--size", "0", "4KiB"]),
    (&["mount", "m", "--size", "5000"], &["--size", "5000", "4KiB"]),
    (&["mount", "m", "--store", "hots"], &["--store", "hots", "host:8GiB"]),
    (&["status", "--control"], &["--control", "PATH"]),
    (&["attach"], &["ADDRESS"]),
    (&["attach", "nbd.sock"], &["ADDRESS", "nbd.sock", "unix:PATH"]),
    (&["attach", "unix:/x", "--reconnect"], &["--device"]),
    (&["attach", "unix:/x", "--device", "/dev/sda"], &["--device", "/dev/sda", "/dev/nbd0"]),
    (&["detach", "/dev/sda"], &["/dev/sda", "/dev/nbd0"]),
];

#[test]
fn without_its_driver_ublk_is_refused_with_the_next_step() {
    if std::path::Path::new("/dev/ublk-control").exists() {
        println!("skipped: this kernel has a ublk driver; lab/ublk-swap uses it");
        return;
    }
    let control = format!("{}/ublk-refused.sock", env!("CARGO_TARGET_TMPDIR"));
    let output = weir(&["serve", "--store", "host:1MiB", "--ublk", "--queues", "1", "--control", &control]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("weir: --ublk: ") && said.contains("modprobe ublk_drv"), "{said}");
}

#[test]
fn a_mistake_is_one_line_that_names_key_value_and_what_is_accepted_and_exits_2() {
    for (arguments, words) in MISTAKES {
        let output = weir(arguments);
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
fn a_mistake_in_the_configuration_is_one_line_too() {
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    for (name, toml, words) in [
        ("key", "stoer = 'host:1MiB'", ["stoer", "host:1MiB", "store, "]),
        ("value", "store = 'host:1MB'", ["--store", "host:1MB", "such as 8GiB"]),
        ("type", "store = 'host:1MiB'\nswap = 1", ["swap", "1", "true, false"]),
        ("syntax", "store = 'host:1MiB'\n\nnbd = [", ["line 3", "TOML", "syntax.toml"]),
        ("empty", "", ["empty.toml", "missing: store", "weir serve --help"]),
        ("needs", "store = 'host:1MiB'\nunsafe-no-flusher = true", ["needs.toml", "missing: swap", "--help"]),
    ] {
        let file = directory.join(format!("{name}.toml"));
        fs::write(&file, toml).expect("writable");
        let output = weir(&["serve", "--config", file.to_str().expect("UTF-8")]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(2), 1), "{name}: {said}");
        assert!(words.iter().all(|word| said.contains(word)), "{name}: {said}");
    }
    let file = directory.join("latin-1.toml");
    fs::write(&file, b"name = '\xe9'").expect("writable");
    let output = weir(&["serve", "--config", file.to_str().expect("UTF-8")]);
    let said = text(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("save it as UTF-8"), "{said}");
    let absent = weir(&["serve", "--config", "/nowhere/weir.toml"]);
    assert_eq!(absent.status.code(), Some(1));
    assert!(text(&absent.stderr).contains("/nowhere/weir.toml"));
}

#[test]
fn output_that_nobody_reads_on_is_no_error_and_a_full_disk_is() {
    for arguments in [&["doctor"][..], &["doctor", "--json"], &["completions", "bash"], &["--help"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        let output = command.args(arguments).stdout(writer).output().expect("the program starts");
        let said = text(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)) && said.is_empty(), "{arguments:?}: {said}");
    }
    for arguments in [&["doctor"][..], &["doctor", "--json"], &["completions", "zsh"]] {
        let full = fs::OpenOptions::new().write(true).open("/dev/full").expect("it is always there");
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        let output = command.args(arguments).stdout(full).output().expect("it starts");
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{arguments:?}: {said}");
        assert!(said.contains("standard output") && said.contains("No space left"), "{arguments:?}: {said}");
    }
}

#[test]
fn what_is_short_or_in_the_way_is_named_with_the_next_step() {
    let directory = env!("CARGO_TARGET_TMPDIR");
    let limited = |arguments: &str| {
        let script = format!("ulimit -n 4; exec {} {arguments}", env!("CARGO_BIN_EXE_weir"));
        Command::new("sh").args(["-c", &script]).output().expect("a shell")
    };
    let file = |path: &str| weir(&["serve", "--store", path, "--nbd", "unix:/nowhere/x"]);
    let server = std::path::Path::new(directory).join("no-daemon.sock");
    let _ = fs::remove_file(&server);
    let listener = std::os::unix::net::UnixListener::bind(&server).expect("a socket");
    std::thread::spawn(move || {
        use std::io::{Read as _, Write as _};
        for mut client in listener.incoming().flatten() {
            let _ = client.read(&mut [0; 4096]);
            // Send the greeting of an NBD server, and a line's end, so that neither side waits.
            let _ = client.write_all(b"NBDMAGICIHAVEOPT\n");
        }
    });
    for (output, words) in [
        (limited("serve --store host:1MiB --nbd unix:/nowhere/x"), ["open files", "raise the limit"]),
        (
            file("file:/dev/null?size=1MiB"),
            ["/dev/null is a character device", "give a file or a block device"],
        ),
        (file(&format!("file:{directory}?size=1MiB")), ["is a directory", "give a file or a block device"]),
        (weir(&["status", "--control", server.to_str().expect("UTF-8")]), ["no status from ", "--control"]),
    ] {
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.lines().count()), (Some(1), 1), "{said}");
        assert!(words.iter().all(|word| said.contains(word)), "{words:?}: {said}");
    }
}

#[test]
fn no_directory_is_made_above_the_one_that_was_named() {
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    let missing = directory.join("not-there");
    let _ = fs::remove_dir_all(&missing);
    let inside = |name: &str| missing.join(name).to_str().expect("UTF-8").to_owned();
    let nbd = format!("unix:{}", directory.join("not-there.sock").display());
    for arguments in [
        &["man", &inside("man")][..],
        &["serve", "--store", "host:1MiB", "--nbd", &nbd, "--control", &inside("control.sock")],
    ] {
        // A daemon that starts by mistake would stay.
        let mut command = Command::new("timeout");
        let output = command.arg("60").arg(env!("CARGO_BIN_EXE_weir")).args(arguments).output();
        let output = output.expect("coreutils");
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said}");
        let last = said.lines().last().expect("a line");
        assert!(last.contains("not-there/") && !missing.exists(), "{said}");
        let step = if arguments[0] == "man" {
            "make the directory above"
        } else {
            "is its directory there, and writable?"
        };
        assert!(last.contains(step), "{said}");
    }
}

#[test]
fn nothing_to_do_is_a_usage_error_and_help_is_not() {
    assert_eq!(weir(&[]).status.code(), Some(2));
    let help = weir(&["--help"]);
    assert_eq!(help.status.code(), Some(0));
    assert!(text(&help.stdout).contains("Exit codes: 0 done, 1 failed, 2 usage"));
}

#[test]
fn every_command_has_a_man_page() {
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("man");
    let output = weir(&["man", directory.to_str().expect("UTF-8")]);
    assert!(output.status.success(), "{}", text(&output.stderr));
    let help = text(&weir(&["--help"]).stdout);
    let listed =
        help.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
    // A command's line is indented by two; the wrapped lines of its description are indented by
    // more.
    let names = listed.filter_map(|line| line.strip_prefix("  ")?.split(' ').next());
    let mut count = 0;
    for command in names.filter(|name| !name.is_empty() && *name != "help") {
        let page = fs::read_to_string(directory.join(format!("weir-{command}.1"))).expect(command);
        assert!(page.contains(".SH NAME") && page.contains(command), "{command}");
        assert!(page.contains(".SH EXAMPLES\n.TP\n\\fBweir"), "{command} has no example: {page}");
        count += 1;
    }
    assert!(count >= 8, "{help}");
}

#[test]
fn man_pages_cannot_be_written_where_a_file_is() {
    let file = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("a-file");
    fs::write(&file, "").expect("writable");
    let output = weir(&["man", file.to_str().expect("UTF-8")]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cannot write man pages to "));
}

#[test]
fn completions_of_bash_know_stores_and_their_keys() {
    let script = text(&weir(&["completions", "bash"]).stdout);
    let completed = |line: &str| {
        let ask = format!(
            "{script}\nCOMP_LINE='{line}' COMP_POINT=${{#COMP_LINE}}; _weir_values weir; echo \"${{COMPREPLY[*]}}\""
        );
        let output =
            std::process::Command::new("bash").args(["--norc", "-c", &ask]).output().expect("bash runs");
        text(&output.stdout).trim().to_owned()
    };
    assert_eq!(completed("weir serve --store "), "host: vram: file: stripe: sim:");
    assert_eq!(completed("weir try --store v"), "vram:");
    assert_eq!(completed("weir on --store file:/proc/versio"), "/proc/version");
    assert_eq!(completed("weir serve --store vram:0?si"), "0?size=");
    assert_eq!(completed("weir detach /dev/nowhere"), "");
    for shell in ["zsh", "fish"] {
        assert!(text(&weir(&["completions", shell]).stdout).contains("_weir_stores"), "{shell}");
    }
}

#[test]
fn completions_know_the_commands() {
    for shell in ["bash", "zsh", "fish"] {
        let output = weir(&["completions", shell]);
        assert!(output.status.success() && text(&output.stdout).contains("doctor"), "{shell}");
    }
}

#[test]
fn a_benchmark_is_the_program_beside_this_one_with_all_its_arguments_and_its_exit_code() {
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR")).join("beside");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir(&directory).expect("made");
    let here = directory.join("weir");
    fs::hard_link(env!("CARGO_BIN_EXE_weir"), &here).expect("linked");
    let bench = |arguments: &[&str]| {
        Command::new(&here).arg("bench").args(arguments).output().expect("the program starts")
    };
    let alone = bench(&["memory"]);
    let said = text(&alone.stderr);
    assert_eq!((alone.status.code(), said.lines().count()), (Some(1), 1), "{said}");
    assert!(said.contains("beside/weir-bench is not there; build it"), "{said}");
    let other = directory.join("weir-bench");
    // A process of its own writes the script. A child that another test starts meanwhile would
    // inherit the open file, which then is busy.
    let script = r#"printf '#!/bin/sh\nfor word; do echo "$word"; done\nexit 7\n' >"$0" && chmod 755 "$0""#;
    let written = Command::new("sh").args(["-c", script]).arg(&other).status().expect("a shell");
    assert!(written.success());
    for arguments in [&["--help"][..], &["-h", "--version"], &["swap", "--only", "a b", "--", "-x"]] {
        let output = bench(arguments);
        assert_eq!(output.status.code(), Some(7), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout).lines().collect::<Vec<_>>(), arguments);
    }
    fs::remove_dir_all(&directory).expect("removed");
}

#[test]
fn doctor_prints_one_json_object_of_schema_1() {
    let output = weir(&["doctor", "--json"]);
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(report["schema"], 1);
    let checks = report["checks"].as_array().expect("an array");
    for id in [
        "gpu",
        "kernel",
        "front-end",
        "nbd",
        "ublk",
        "cgroup",
        "io-flusher",
        "memlock",
        "userfaultfd",
        "memory",
    ] {
        assert!(checks.iter().any(|check| check["id"] == id), "{id} is not in {report}");
    }
    let worst = report["worst"].as_str().expect("a level");
    assert_eq!(output.status.code(), Some(i32::from(worst == "fail")));
    let lines = text(&weir(&["doctor"]).stdout);
    assert!(checks.iter().all(|check| lines.contains(check["id"].as_str().expect("a name"))), "{lines}");
}
