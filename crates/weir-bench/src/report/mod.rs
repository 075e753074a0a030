//! A benchmark's report: rows of figures beside their controls, with the machine and the time.
//!
//! The JSON form is a contract (`schema` 1). A consumer may rely on every key: it is always there,
//! and `null` if a row has no control or no goal.

mod html;
mod machine;
mod plot;
mod runs;
mod table;

use std::path::Path;

use serde::{Deserialize, Serialize};

pub use machine::Machine;
pub use runs::{Runs, percentile};

/// The version of the JSON form.
pub const SCHEMA: u32 = 1;

/// The outcome of one benchmark on one machine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// The schema's version: [`SCHEMA`] of the program that made the report.
    pub schema: u32,
    /// The benchmark's name, as given after `weir bench`.
    pub bench: String,
    /// The commit that was measured, or "unknown" outside a checkout.
    pub commit: String,
    /// The time when the report was begun: UTC, RFC 3339, to the second.
    pub date: String,
    /// The machine on which the benchmark ran.
    pub machine: Machine,
    /// Number of runs of each row.
    pub runs: usize,
    /// The rows of figures.
    pub rows: Vec<Row>,
}

/// One figure, beside its control; every value is a median over the runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// The scenario: `qd1_read`, `8p`.
    pub id: String,
    /// The figure's name, with its unit last: `p50_us`, `ns_per_item`.
    pub metric: String,
    /// The figure's value.
    pub value: f64,
    /// The name of the control that ran beside the measured program in the same run.
    pub control: Option<String>,
    /// The control's value.
    pub control_value: Option<f64>,
    /// The figure divided by its control: `value / control_value`.
    pub ratio: Option<f64>,
    /// The goal: the promised value.
    pub goal: Option<f64>,
    /// Whether the goal bounds the value or the ratio.
    pub goal_of: Option<GoalOf>,
    /// Whether a lower or a higher figure is better. `null`: neither, as for a count.
    pub better: Option<Better>,
    /// Whether the goal was met; `null` without a goal.
    pub met: Option<bool>,
}

/// Whether a lower or a higher figure is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Lower is better: for times and sizes.
    Lower,
    /// Higher is better: for rates and shares.
    Higher,
}

/// The thing that a goal bounds: a figure, or its ratio to the control.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum GoalOf {
    /// The figure itself.
    Value,
    /// The figure divided by its control.
    Ratio,
}

/// A row's goal: an upper bound if lower is better, else a lower bound.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Goal {
    /// The goal bounds the figure.
    Value(f64),
    /// The goal bounds the figure divided by its control.
    Ratio(f64),
}

/// The reason why a report could not be written or read.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// A file could not be written.
    #[error("{path}: cannot write the report; check the directory and the space left")]
    Write {
        /// The file's path.
        path: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// The text is not a report whose schema is [`SCHEMA`].
    #[error("not a benchmark report of schema {SCHEMA}; write it again with this version's --json")]
    Parse(#[source] serde_json::Error),
    /// The chart could not be drawn.
    #[error("cannot draw the chart of {metric:?}: {reason}")]
    Chart {
        /// The metric that the chart shows.
        metric: String,
        /// The drawing library's error.
        reason: String,
    },
}

impl Report {
    /// Makes an empty report of benchmark `bench`, with this machine, this commit and the time.
    pub fn new(bench: &str, runs: usize) -> Self {
        Report {
            schema: SCHEMA,
            bench: bench.to_owned(),
            commit: machine::commit(),
            date: machine::utc_now(),
            machine: Machine::this(),
            runs,
            rows: Vec::new(),
        }
    }

    /// Whether every row with a goal met it.
    pub fn all_met(&self) -> bool {
        self.rows.iter().all(|row| row.met != Some(false))
    }

    /// The JSON form, indented, with a newline at the end.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("strings and numbers always serialise");
        text.push('\n');
        text
    }

    /// Reads a report that [`Report::to_json`] has written.
    ///
    /// # Errors
    /// Fails with [`ReportError::Parse`] when the text is no report of this schema.
    pub fn from_json(text: &str) -> Result<Self, ReportError> {
        let report: Report = serde_json::from_str(text).map_err(ReportError::Parse)?;
        if report.schema != SCHEMA {
            let wrong = serde::de::Error::custom(format_args!("schema {}", report.schema));
            return Err(ReportError::Parse(wrong));
        }
        Ok(report)
    }

    /// Writes the JSON form to `path`.
    ///
    /// # Errors
    /// Fails with [`ReportError::Write`] when the file cannot be written.
    pub fn write_json(&self, path: &Path) -> Result<(), ReportError> {
        write(path, &self.to_json())
    }

    /// Writes one self-contained page of HTML to `path`: the table, and a chart for each metric.
    ///
    /// # Errors
    /// Fails with [`ReportError::Write`] when the file cannot be written, and with
    /// [`ReportError::Chart`] when a chart cannot be drawn.
    pub fn write_html(&self, path: &Path) -> Result<(), ReportError> {
        write(path, &html::page(self)?)
    }

    /// Writes one picture (SVG) to `path`: how each figure that has a goal compares with its
    /// control.
    ///
    /// # Errors
    /// Fails with [`ReportError::Write`] when the file cannot be written, and with
    /// [`ReportError::Chart`] when nothing can be drawn.
    pub fn write_plot(&self, path: &Path) -> Result<(), ReportError> {
        write(path, &plot::svg(self)?)
    }
}

fn write(path: &Path, text: &str) -> Result<(), ReportError> {
    std::fs::write(path, text)
        .map_err(|source| ReportError::Write { path: path.display().to_string(), source })
}

impl Row {
    /// Makes a row with a figure of which less is better.
    pub fn lower(id: impl Into<String>, metric: impl Into<String>, value: f64) -> Self {
        Row::new(id.into(), metric.into(), value, Better::Lower)
    }

    /// Makes a row with a figure of which more is better.
    pub fn higher(id: impl Into<String>, metric: impl Into<String>, value: f64) -> Self {
        Row::new(id.into(), metric.into(), value, Better::Higher)
    }

    fn new(id: String, metric: String, value: f64, better: Better) -> Self {
        Row {
            id,
            metric,
            value: five_digits(value),
            control: None,
            control_value: None,
            ratio: None,
            goal: None,
            goal_of: None,
            better: Some(better),
            met: None,
        }
    }

    /// Sets the control that ran in the same run. With a control of 0 there is no ratio.
    pub fn beside(mut self, control: impl Into<String>, control_value: f64) -> Self {
        self.control = Some(control.into());
        self.control_value = Some(five_digits(control_value));
        self.ratio = Some(self.value / control_value).filter(|ratio| ratio.is_finite()).map(five_digits);
        self
    }

    /// Sets the goal and checks it; call it after [`Row::beside`]. A missing ratio meets no goal.
    pub fn goal(mut self, goal: Goal) -> Self {
        let (figure, bound, of) = match goal {
            Goal::Value(bound) => (Some(self.value), bound, GoalOf::Value),
            Goal::Ratio(bound) => (self.ratio, bound, GoalOf::Ratio),
        };
        self.met = Some(figure.is_some_and(|figure| match self.better {
            Some(Better::Lower) => figure <= bound,
            Some(Better::Higher) | None => figure >= bound,
        }));
        self.goal = Some(bound);
        self.goal_of = Some(of);
        self
    }
}

/// Rounds to five significant digits: no timing here is more precise, and diffs of committed
/// results stay short.
fn five_digits(value: f64) -> f64 {
    format!("{value:.4e}").parse().expect("a printed number parses")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Report {
        let mut report = Report::new("block", 3);
        report.rows.push(
            Row::lower("qd1_read", "p50_us", 11.8).beside("nbdkit-memory", 17.5).goal(Goal::Value(12.0)),
        );
        report.rows.push(
            Row::higher("4x16_read", "kiops", 300.0).beside("nbdkit-memory", 200.0).goal(Goal::Ratio(1.8)),
        );
        report.rows.push(Row::lower("idle", "cpu_percent", 0.5));
        report
    }

    #[test]
    fn a_goal_is_judged_against_what_it_bounds_and_in_the_right_direction() {
        let report = sample();
        assert_eq!(
            report.rows.iter().map(|row| row.met).collect::<Vec<_>>(),
            [Some(true), Some(false), None]
        );
        assert!(!report.all_met());
        assert_eq!(report.rows[0].ratio, Some(0.67429));
        assert_eq!(report.rows[1].ratio, Some(1.5));
    }

    #[test]
    fn a_ratio_to_nothing_meets_no_goal() {
        let row = Row::lower("x", "us", 1.0).beside("idle", 0.0).goal(Goal::Ratio(2.0));
        assert_eq!((row.ratio, row.met), (None, Some(false)));
    }

    #[test]
    fn json_has_every_key_of_the_contract_and_reads_back() {
        let report = sample();
        let json = report.to_json();
        assert_eq!(Report::from_json(&json).unwrap(), report);
        let value: serde_json::Value = serde_json::from_str(&json).unwrap();
        for key in ["schema", "bench", "commit", "date", "machine", "runs", "rows"] {
            assert!(!value[key].is_null(), "{key}");
        }
        for key in ["cpu", "cores", "kernel", "gpu", "driver"] {
            assert!(value["machine"].get(key).is_some(), "machine.{key}");
        }
        for key in ["id", "metric", "value", "control", "control_value", "ratio", "goal", "better", "met"] {
            assert!(value["rows"][2].get(key).is_some(), "rows.{key}");
        }
        assert_eq!(value["rows"][0]["better"], "lower");
    }

    #[test]
    fn another_schema_is_refused() {
        let json = sample().to_json().replace("\"schema\": 1", "\"schema\": 2");
        assert!(matches!(Report::from_json(&json), Err(ReportError::Parse(_))));
    }

    #[test]
    fn a_report_that_cannot_be_written_names_its_file() {
        let error = sample().write_json(Path::new("/proc/none/r.json")).unwrap_err().to_string();
        assert!(error.contains("/proc/none/r.json"), "{error}");
    }
}
