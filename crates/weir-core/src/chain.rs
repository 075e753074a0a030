//! An error and its causes as one line.

use std::error::Error;

/// The error's text and those of all its sources, as one line for people.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let more = error.to_string();
        // Some errors end with the text of their source already. Do not repeat it.
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_is_said_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot listen: {0}")]
        struct Says(#[source] std::io::Error);
        let error = Says(std::io::ErrorKind::NotFound.into());
        assert_eq!(chain(&error), error.to_string());
    }
}
