//! TLS for TCP.

/// A server's certificate and key.
#[derive(Debug)]
pub struct Identity {}
