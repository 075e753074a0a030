//! Requests that a kernel (or the holder of its descriptor) may send by FUSE. Every request is
//! parsed or refused, never panics, and refers to a write's data, to names and to lists only within
//! its bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weir_export::fuse::request::{Request, parse};
use weir_export::fuse::wire::InHeader;

fn is_name(name: &[u8]) -> bool {
    !name.is_empty() && !name.contains(&b'/') && !name.contains(&0)
}

fuzz_target!(|data: &[u8]| {
    // Try the bytes as they come, and also with a correct length, which the fuzzer would be slow to
    // find.
    let mut fixed = data.to_vec();
    if let Some(length) = fixed.get_mut(..4) {
        length.copy_from_slice(&(data.len() as u32).to_ne_bytes());
    }
    for bytes in [data, &fixed] {
        match parse(bytes) {
            Err(malformed) => assert!(!malformed.to_string().is_empty()),
            Ok(message) => {
                assert!(bytes.len() >= InHeader::BYTES);
                match message.request {
                    Request::Write { what, data } => assert_eq!(data.len(), what.size as usize),
                    Request::Lookup { name }
                    | Request::Create { name, .. }
                    | Request::Mkdir { name, .. }
                    | Request::Unlink { name } => assert!(is_name(name)),
                    Request::Rename { from, to, .. } => assert!(is_name(from) && is_name(to)),
                    Request::Symlink { name, target } => assert!(is_name(name) && !target.contains(&0)),
                    Request::BatchForget { list } => assert!(list.count() * 16 <= bytes.len()),
                    _ => {}
                }
            }
        }
    }
});
