//! Greetings and ring entries of any bytes: decoding never panics, and every accepted message
//! encodes to the same bytes.
#![no_main]

use libfuzzer_sys::fuzz_target;
use weir_share::wire::{Completed, Hello, Submission, Welcome};

fuzz_target!(|bytes: &[u8]| {
    if let Some(hello) = Hello::decode(bytes) {
        assert_eq!(hello.encode(), bytes);
    }
    if let Some(welcome) = Welcome::decode(bytes) {
        assert_eq!(welcome.encode()[..40], bytes[..40]);
    }
    for entry in bytes.chunks_exact(32) {
        let words: [u64; 4] =
            std::array::from_fn(|at| u64::from_le_bytes(entry[at * 8..][..8].try_into().expect("8 of 32 bytes")));
        if let Some(submission) = Submission::decode(words) {
            assert_eq!(submission.encode(), words);
        }
        let completed = Completed::decode(words);
        assert_eq!(completed.encode()[..2], words[..2]);
        assert_eq!(Completed::decode(completed.encode()), completed);
    }
});
