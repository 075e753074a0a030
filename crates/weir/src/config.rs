//! The daemon's configuration file: TOML whose keys are the names of the flags.
//!
//! ```toml
//! size = "8GiB"
//! store = ["vram:0", "file:/var/lib/weir/backing?size=8GiB"]
//! nbd = "unix:/run/weir/nbd.sock"
//! swap = true
//! ```
//!
//! The file's keys become flags, which are parsed as the command line is. So file and command line
//! know the same names, take the same values and print the same errors.

use crate::cli::ServeOptions;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args as _, Command, FromArgMatches as _};
use std::fs;
use std::io;
use std::path::Path;
use toml::{Table, Value};
use weir_cli::failure::{Failure, complaint};

/// Reads the options of `weir serve` from a file.
pub fn read(path: &Path) -> Result<ServeOptions, Failure> {
    let usage = |problem: String| Failure::Usage(format!("{}: {problem}", path.display()));
    let text = fs::read_to_string(path).map_err(|error| {
        let shown = path.display();
        match error.kind() {
            io::ErrorKind::InvalidData => usage("it is no text (UTF-8); save it as UTF-8".into()),
            _ => Failure::Failed(format!(
                "cannot read the configuration {shown}: {error}; --config names a TOML file that this user may read"
            )),
        }
    })?;
    let table: Table = text.parse().map_err(|error: toml::de::Error| {
        let line = error.span().map_or(1, |span| text[..span.start].lines().count().max(1));
        usage(format!("line {line} is not TOML: {}", error.message()))
    })?;
    let flags = flags(&table).map_err(usage)?;
    parse(flags).map_err(|error| usage(missing(&error).unwrap_or_else(|| complaint(&error))))
}

/// The missing keys, if the error is about missing flags. Clap's own message would name the flags.
fn missing(error: &clap::Error) -> Option<String> {
    let Some(ContextValue::Strings(flags)) = error.get(ContextKind::InvalidArg) else { return None };
    let keys = flags.iter().filter_map(|flag| flag.strip_prefix("--")?.split([' ', '=']).next());
    let keys = keys.collect::<Vec<_>>().join(", ");
    (error.kind() == ErrorKind::MissingRequiredArgument)
        .then(|| format!("these keys are missing: {keys}; weir serve --help has an example of each"))
}

fn parse(flags: Vec<String>) -> Result<ServeOptions, clap::Error> {
    ServeOptions::from_arg_matches(&command().no_binary_name(true).try_get_matches_from(flags)?)
}

fn command() -> Command {
    ServeOptions::augment_args(Command::new("weir"))
}

/// Turns the table into flags: `key = value` is `--key=value`, an array repeats the flag, `true` is
/// the flag alone.
fn flags(table: &Table) -> Result<Vec<String>, String> {
    let command = command();
    let known =
        |key: &str| command.get_arguments().find(|flag| flag.get_long() == Some(key) && key != "config");
    let mut flags = Vec::new();
    for (key, value) in table {
        let Some(flag) = known(key) else {
            let keys =
                command.get_arguments().filter_map(|flag| flag.get_long()).filter(|key| *key != "config");
            return Err(format!(
                "unknown key {key} = {value}; accepted: {}",
                keys.collect::<Vec<_>>().join(", ")
            ));
        };
        match (value, flag.get_action().takes_values()) {
            (Value::Boolean(true), false) => flags.push(format!("--{key}")),
            (Value::Boolean(false), false) => {}
            (value, false) => return Err(format!("{key} cannot be {value}; accepted: true, false")),
            (Value::Array(values), true) => {
                for value in values {
                    flags.push(format!("--{key}={}", scalar(key, value)?));
                }
            }
            (value, true) => flags.push(format!("--{key}={}", scalar(key, value)?)),
        }
    }
    Ok(flags)
}

fn scalar(key: &str, value: &Value) -> Result<String, String> {
    match value {
        Value::String(text) => Ok(text.clone()),
        Value::Integer(number) => Ok(number.to_string()),
        _ => Err(format!(
            "{key} cannot be {value}; accepted: a text in quotes, a whole number, or an array of them"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(text: &str) -> Result<ServeOptions, String> {
        let table: Table = text.parse().expect("TOML");
        parse(flags(&table)?).map_err(|error| complaint(&error))
    }

    #[test]
    fn a_file_means_what_the_same_flags_mean() {
        let file = options(
            "size = '1GiB'\nstore = ['host:512MiB', 'host:512MiB']\nnbd = 'unix:/run/x'\nswap = true\nconnections = 4",
        );
        let flags = [
            "--size=1GiB",
            "--store=host:512MiB",
            "--store=host:512MiB",
            "--nbd=unix:/run/x",
            "--swap",
            "--connections=4",
        ];
        let flags = parse(flags.map(String::from).to_vec()).expect("flags");
        assert_eq!(file, Ok(flags));
    }

    #[test]
    fn the_packaged_configuration_is_one() {
        let options = options(include_str!("../../../packaging/weir.toml")).expect("the example is right");
        assert!(options.swap && options.nbd.nbd.len() == 1 && options.store.len() == 1);
    }

    #[test]
    fn what_is_false_or_absent_is_the_default() {
        let written = options("store = 'host:1GiB'\nswap = false");
        assert_eq!(written, options("store = 'host:1GiB'"));
    }

    #[test]
    fn a_wrong_key_value_or_type_is_named_with_what_is_accepted() {
        for (text, words) in [
            ("stor = 'host:1GiB'", ["stor", "host:1GiB", "store, "]),
            ("config = 'other.toml'", ["config", "other.toml", "store, "]),
            ("store = 'host:1GB'", ["--store", "1GB", "such as 8GiB"]),
            ("store = 'host:1GiB'\nsize = '10X'", ["--size", "10X", "KiB, MiB"]),
            ("store = 'host:1GiB'\nswap = 'yes'", ["swap", "yes", "true, false"]),
            ("store = 'host:1GiB'\nsize = 1.5", ["size", "1.5", "whole number"]),
            ("store = { host = '1GiB' }", ["store", "1GiB", "a text in quotes"]),
            ("store = 'host:1GiB'\nconnections = -1", ["--connections", "-1", "1.."]),
        ] {
            let error = options(text).expect_err(text);
            assert!(words.iter().all(|word| error.contains(word)), "{text}: {error}");
        }
    }
}
