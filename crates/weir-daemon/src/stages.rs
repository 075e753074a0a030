//! The stages of a daemon's takeover with their times, for one line of the log.

use std::fmt;
use std::time::{Duration, Instant};

/// Stages by name, in order.
#[derive(Debug)]
pub struct Stages {
    took: Vec<(&'static str, Duration)>,
    since: Instant,
}

impl Default for Stages {
    fn default() -> Self {
        Stages::after([])
    }
}

impl Stages {
    /// Begins with stages that an earlier process has timed.
    pub fn after(before: impl IntoIterator<Item = (&'static str, Duration)>) -> Self {
        Stages { took: before.into_iter().collect(), since: Instant::now() }
    }

    /// Ends a stage. Its time leaves out the parts that were [noted](Self::note_all).
    pub fn end(&mut self, name: &'static str) {
        let now = Instant::now();
        self.took.push((name, now - self.since));
        self.since = now;
    }

    /// Notes parts of the present stage with their times.
    pub fn note_all(&mut self, parts: impl IntoIterator<Item = (&'static str, Duration)>) {
        for (name, took) in parts {
            self.took.push((name, took));
            self.since += took.min(self.since.elapsed());
        }
    }

    /// The time of all stages.
    pub fn total(&self) -> Duration {
        self.took.iter().map(|(_, took)| *took).sum()
    }
}

/// The stages as text, such as `driver 160.0 ms, chunks 40.0 ms`.
pub fn line(stages: &[(&'static str, Duration)]) -> String {
    let text: Vec<String> =
        stages.iter().map(|(name, took)| format!("{name} {:.1} ms", took.as_secs_f64() * 1e3)).collect();
    text.join(", ")
}

impl fmt::Display for Stages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&line(&self.took))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_of_a_stage_are_not_counted_twice() {
        let mut stages = Stages::after([("start", Duration::from_millis(20))]);
        let begun = stages.since;
        std::thread::sleep(Duration::from_millis(5));
        stages.note_all([("driver", Duration::from_millis(2)), ("chunks", Duration::from_millis(1))]);
        stages.end("stores");
        assert_eq!(stages.total(), Duration::from_millis(20) + (stages.since - begun));
        let text = stages.to_string();
        assert!(text.starts_with("start 20.0 ms, driver 2.0 ms, chunks 1.0 ms, stores "), "{text}");
    }
}
