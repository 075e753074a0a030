//! Answers of a node of a fleet, sealed pages, and `redis://` URLs, of any bytes. Reading them
//! never panics, and only what the store sealed for a slot opens there. No page is older than asked
//! for, and no text of a node changes a terminal. The checks are in
//! `crates/weir-store/src/remote/fuzz.rs`.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| weir_store::fuzz::remote(bytes));
