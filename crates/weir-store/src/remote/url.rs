//! `redis://HOST:PORT[,HOST:PORT...]?size=SIZE[&KEY=VALUE...]`, with the keys `copies`, `user`,
//! `password-file` and `check`.

use crate::url::{Exact, Query, UrlProblem, pairs, size, split_query, switch, value};
use std::fmt;
use std::path::PathBuf;
use weir_core::ByteSize;

const KEYS: &[&str] = &["size", "copies", "user", "password-file", "check"];

/// Largest number of copies of a page.
pub(super) const COPIES_MAX: usize = 2;

/// Largest number of nodes.
const NODES_MAX: usize = 64;

/// The nodes of a fleet, and how the store uses them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteUrl {
    /// The nodes, each as `HOST:PORT`.
    pub nodes: Vec<String>,
    /// Room for pages on all nodes together. With two copies, each page counts once.
    pub size: ByteSize,
    /// Number of nodes that keep each page: 1 or 2.
    pub copies: u8,
    /// The user name for the login.
    pub user: Option<String>,
    /// A file whose first line is the password.
    pub password_file: Option<PathBuf>,
    /// Whether the store refuses a node that could drop pages or has too little room. The default
    /// is true.
    pub check: bool,
}

impl RemoteUrl {
    /// A store of `size` bytes on `nodes`, with the default of every other setting.
    pub fn new(nodes: impl IntoIterator<Item = String>, size: ByteSize) -> Self {
        let nodes = nodes.into_iter().collect();
        RemoteUrl { nodes, size, copies: 1, user: None, password_file: None, check: true }
    }

    pub(crate) fn parse(text: &str) -> Result<Self, UrlProblem> {
        let (nodes, query) = split_query(text);
        let wrong = |key, value: &str, expected| UrlProblem::Value { key, value: value.to_owned(), expected };
        let expected = "nodes, each as HOST:PORT, such as redis://10.0.0.1:6379,10.0.0.2:6379?size=8GiB";
        // A password may have a `?` too. No part of it may be in a message.
        if nodes.contains('@') || query.contains('@') && pairs(query, '&', KEYS).is_err() {
            return Err(UrlProblem::Login);
        }
        let list = nodes.strip_prefix("//").ok_or_else(|| wrong("nodes", nodes, expected))?;
        let names: Vec<&str> = list.split(',').collect();
        let is_node = |node: &&str| {
            let parts = node.rsplit_once(':');
            parts.is_some_and(|(host, port)| !host.is_empty() && port.parse().is_ok_and(|port: u16| port > 0))
        };
        if !names.iter().all(is_node) || names.len() > NODES_MAX {
            return Err(wrong("nodes", list, expected));
        }
        for (at, name) in names.iter().enumerate() {
            if names[..at].contains(name) {
                return Err(wrong("nodes", name, "each node once"));
            }
        }
        let mut url = RemoteUrl::new(names.into_iter().map(str::to_owned), ByteSize(0));
        for (key, text) in pairs(query, '&', KEYS)? {
            match key {
                "size" => url.size = size(key, text)?,
                "copies" => {
                    let most = COPIES_MAX.min(url.nodes.len()) as u8;
                    let expected = "1, or 2 where there are two nodes or more";
                    url.copies = value(key, text, expected)?;
                    if !(1..=most).contains(&url.copies) {
                        return Err(wrong(key, text, expected));
                    }
                }
                "user" if text.is_empty() => return Err(wrong(key, text, "a name")),
                "user" => url.user = Some(text.to_owned()),
                "password-file" if text.is_empty() => return Err(wrong(key, text, "a path")),
                "password-file" => url.password_file = Some(text.into()),
                _ => url.check = switch(key, text)?,
            }
        }
        if let (Some(user), None) = (&url.user, &url.password_file) {
            return Err(wrong("user", user, "a name, and password-file=PATH for its password"));
        }
        if url.size.0 == 0 {
            return Err(UrlProblem::NoSize("redis://HOST:PORT?size=8GiB"));
        }
        Ok(url)
    }
}

impl fmt::Display for RemoteUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "redis://{}", self.nodes.join(","))?;
        let mut query = Query::new(f, "?", "&");
        query.pair(true, "size", Exact(self.size))?;
        query.pair(self.copies != 1, "copies", self.copies)?;
        query.pair(self.user.is_some(), "user", self.user.as_deref().unwrap_or_default())?;
        let password = self.password_file.as_deref().unwrap_or("".as_ref());
        query.pair(self.password_file.is_some(), "password-file", password.display())?;
        query.pair(!self.check, "check", "off")
    }
}

#[cfg(test)]
mod tests {
    use crate::StoreUrl;

    fn refused(url: &str) -> String {
        url.parse::<StoreUrl>().unwrap_err().to_string()
    }

    #[test]
    fn a_url_is_read_and_shown_as_it_was() {
        for url in [
            "redis://127.0.0.1:6379?size=8GiB",
            "redis://a:1,b:2,[::1]:3?size=4KiB&copies=2&user=weir&password-file=/etc/weir/key&check=off",
        ] {
            let parsed: StoreUrl = url.parse().unwrap();
            assert_eq!(parsed.to_string(), url);
        }
    }

    #[test]
    fn a_mistake_is_named_with_what_is_accepted() {
        for (url, parts) in [
            ("redis:host:1?size=1M", ["nodes cannot be", "HOST:PORT"]),
            ("redis://host?size=1M", ["\"host\"", "HOST:PORT"]),
            ("redis://host:0?size=1M", ["\"host:0\"", "HOST:PORT"]),
            ("redis://a:1,a:1?size=1M", ["\"a:1\"", "each node once"]),
            ("redis://a:1", ["no size is given", "accepted: redis://HOST:PORT?size=8GiB"]),
            ("redis://a:1?copies=1", ["no size is given", "accepted: redis://HOST:PORT?size=8GiB"]),
            ("redis://a:1?size=1M&copies=2", ["copies cannot be \"2\"", "two nodes"]),
            ("redis://a:1,b:1,c:1?size=1M&copies=3", ["copies cannot be \"3\"", "two nodes"]),
            ("redis://a:1?size=1M&user=bob", ["user cannot be \"bob\"", "password-file"]),
            ("redis://a:1?size=1M&password=x", ["unknown key \"password\"", "password-file"]),
        ] {
            let error = refused(url);
            assert!(parts.iter().all(|part| error.contains(part)), "{url}: {error}");
        }
    }

    #[test]
    fn a_login_in_the_address_is_refused_and_in_no_message() {
        for url in [
            "redis://bob:secret@127.0.0.1:6401?size=1M",
            "redis://:secret@127.0.0.1:6401",
            "redis://a:1,bob:secret@b:1?size=1M",
            "redis://bob:sec?secret@127.0.0.1:6401",
            "redis://bob:s?secret=secret@127.0.0.1:6401",
            "redis:bob:secret@127.0.0.1:6401?size=1M",
        ] {
            let error = refused(url);
            assert!(error.contains("give user=NAME and password-file=PATH"), "{url}: {error}");
            assert!(!error.contains("secret") && error.contains("***@"), "{url}: {error}");
        }
        let file = "redis://a:1?size=1MiB&user=bob@weir&password-file=/etc/weir@here";
        assert_eq!(file.parse::<StoreUrl>().unwrap().to_string(), file);
    }
}
