//! The address at which a server listens, as people write it: `unix:PATH`, `tcp:HOST:PORT`.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

/// An address to listen on or to connect to.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Address {
    /// A unix socket, by its path in the file system.
    Unix(PathBuf),
    /// A host (name or address) and a port.
    Tcp {
        /// The host, without the brackets of an IPv6 address.
        host: String,
        /// The port, 1 to 65535.
        port: u16,
    },
}

/// The reason why a text is no address.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{text:?} is no address: {problem}; accepted: unix:PATH, tcp:HOST:PORT")]
pub struct AddressError {
    text: String,
    problem: &'static str,
}

/// The most bytes that fit into `sockaddr_un.sun_path` with its final zero (unix(7)).
pub const PATH_MOST: usize = 107;

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let error = |problem| AddressError { text: text.to_owned(), problem };
        match text.split_once(':') {
            Some(("unix", "")) => Err(error("the path is missing")),
            Some(("unix", path)) if path.len() > PATH_MOST => {
                Err(error("a socket's path has at most 107 bytes"))
            }
            Some(("unix", path)) => Ok(Address::Unix(path.into())),
            Some(("tcp", rest)) => {
                let (host, port) = rest.rsplit_once(':').ok_or_else(|| error("the port is missing"))?;
                let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
                match port.parse() {
                    Ok(port) if port > 0 && !host.is_empty() => {
                        Ok(Address::Tcp { host: host.to_owned(), port })
                    }
                    Ok(_) if host.is_empty() => Err(error("the host is missing")),
                    _ => Err(error("a port is a number from 1 to 65535")),
                }
            }
            _ => Err(error("it names no kind of socket")),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Unix(path) => write!(f, "unix:{}", path.display()),
            Address::Tcp { host, port } if host.contains(':') => write!(f, "tcp:[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "tcp:{host}:{port}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_survives_being_shown() {
        for text in ["unix:/run/weir/nbd.sock", "tcp:localhost:10809", "tcp:127.0.0.1:1", "tcp:[::1]:10809"] {
            assert_eq!(text.parse::<Address>().expect(text).to_string(), text);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_reason_and_the_forms() {
        let long = format!("unix:/{}", "x".repeat(107));
        for (text, problem) in [
            ("", "no kind of socket"),
            ("/run/weir.sock", "no kind of socket"),
            ("unix:", "path is missing"),
            (long.as_str(), "at most 107"),
            ("tcp:localhost", "port is missing"),
            ("tcp::10809", "host is missing"),
            ("tcp:localhost:0", "1 to 65535"),
            ("tcp:localhost:nbd", "1 to 65535"),
        ] {
            let error = text.parse::<Address>().expect_err(text).to_string();
            assert!(error.contains(problem) && error.contains("tcp:HOST:PORT"), "{text}: {error}");
        }
    }
}
