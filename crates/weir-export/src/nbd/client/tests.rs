use super::*;
use crate::nbd::transmission::{data_chunk, error_chunk, hole_chunk, none_chunk, simple_reply};

/// A client in transmission, with all bytes that its server will ever send.
fn client(structured: bool, server: Vec<u8>) -> Client {
    struct Canned(io::Cursor<Vec<u8>>);
    impl Read for Canned {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }
    impl Write for Canned {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            Ok(buffer.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let stream: Box<dyn Stream> = Box::new(Canned(io::Cursor::new(server)));
    Client {
        stream: BufReader::new(stream),
        terms: Terms { structured, ..Terms::default() },
        output: Vec::new(),
        in_flight: HashMap::new(),
        finished: VecDeque::new(),
        next_cookie: 1,
    }
}

#[test]
fn chunks_of_interleaved_replies_are_put_together() {
    let server = [
        &data_chunk(2, false, 102, 2)[..],
        b"cd",
        &hole_chunk(1, false, 0, 3),
        &data_chunk(2, true, 100, 2),
        b"ab",
        &data_chunk(1, false, 3, 1),
        b"x",
        &none_chunk(1),
    ]
    .concat();
    let mut client = client(true, server);
    client.queue(Operation::read(0, 4));
    client.queue(Operation::read(100, 4));
    client.send().unwrap();
    let replies = [client.receive().unwrap(), client.receive().unwrap()];
    assert_eq!(replies.clone().map(|reply| (reply.cookie, reply.chunks)), [(2, 2), (1, 3)]);
    assert_eq!(replies.map(|reply| reply.data), [b"abcd".to_vec(), b"\0\0\0x".to_vec()]);
}

#[test]
fn an_error_fails_its_request_only() {
    let mut client = client(false, [simple_reply(1, Some(Errno::Io)), simple_reply(2, None)].concat());
    let first = client.perform(Operation::Flush);
    assert!(matches!(first, Err(ClientError::Failed(Errno::Io))));
    client.perform(Operation::Flush).unwrap();
}

#[test]
fn a_server_that_lies_is_found_out() {
    for (structured, server, what) in [
        (true, simple_reply(1, None).to_vec(), "a simple reply to a read"),
        (false, none_chunk(1).to_vec(), "a structured reply"),
        (true, none_chunk(9).to_vec(), "that was not made"),
        (true, none_chunk(1).to_vec(), "answered in part"),
        (true, hole_chunk(1, true, 4096, 4096).to_vec(), "outside"),
        (true, hole_chunk(1, true, u64::MAX, u32::MAX).to_vec(), "outside"),
        (true, data_chunk(1, true, 0, 5000).to_vec(), "outside"),
        (true, vec![1; 20], "out of step"),
        (true, data_chunk(1, true, 0, 0).to_vec(), "a chunk of type 1 and 8 bytes"),
    ] {
        let error = client(structured, server).read(0, 4096).unwrap_err().to_string();
        assert!(error.starts_with("the server breaks the protocol: "), "{error}");
        assert!(error.contains(what), "{error} does not say {what}");
    }
    let error = client(true, error_chunk(1, Errno::Io).to_vec()).read(0, 4096).unwrap_err();
    assert!(matches!(error, ClientError::Failed(Errno::Io)));
    assert!(matches!(client(true, vec![]).read(0, 1), Err(ClientError::Broken(_))));
    let error = client(true, vec![]).receive().unwrap_err();
    assert!(
        matches!(&error, ClientError::Broken(why) if why.to_string() == "no request is in flight"),
        "{error}"
    );
}
