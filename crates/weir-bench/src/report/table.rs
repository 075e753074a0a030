//! A report as plain text: a line for each row, with aligned columns.

use std::fmt;

use super::{Better, GoalOf, Report, Row};

const HEADINGS: [&str; 8] = ["id", "metric", "value", "control", "its value", "ratio", "goal", "met"];
/// Whether each column holds numbers, which are set flush right.
const NUMBERS: [bool; 8] = [false, false, true, false, true, true, true, false];

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let machine = &self.machine;
        writeln!(f, "{}: median of {} runs, commit {}, {}", self.bench, self.runs, self.commit, self.date)?;
        writeln!(f, "{}, {} cores, Linux {}", machine.cpu, machine.cores, machine.kernel)?;
        if machine.gpu != "none" {
            writeln!(f, "{}, driver {}", machine.gpu, machine.driver)?;
        }
        let mut lines = vec![HEADINGS.map(str::to_owned)];
        lines.extend(self.rows.iter().map(cells));
        let mut widths = [0; HEADINGS.len()];
        for line in &lines {
            for (width, cell) in widths.iter_mut().zip(line) {
                *width = (*width).max(cell.chars().count());
            }
        }
        for line in &lines {
            let mut text = String::new();
            for ((cell, width), number) in line.iter().zip(widths).zip(NUMBERS) {
                let padded = if number { format!("{cell:>width$}") } else { format!("{cell:<width$}") };
                text.push_str(&padded);
                text.push_str("  ");
            }
            writeln!(f, "{}", text.trim_end())?;
        }
        Ok(())
    }
}

/// A row as text, in the order of the headings.
pub(super) fn cells(row: &Row) -> [String; 8] {
    let or_blank = |value: Option<f64>| value.map(number).unwrap_or_default();
    let goal = match (row.goal, row.goal_of) {
        (Some(goal), of) => {
            let sign = if row.better == Some(Better::Lower) { "<=" } else { ">=" };
            let unit = if of == Some(GoalOf::Ratio) { "x" } else { "" };
            format!("{sign} {}{unit}", number(goal))
        }
        (None, _) => String::new(),
    };
    let met = match row.met {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "",
    };
    [
        row.id.clone(),
        row.metric.clone(),
        number(row.value),
        row.control.clone().unwrap_or_default(),
        or_blank(row.control_value),
        row.ratio.map(|ratio| format!("{}x", number(ratio))).unwrap_or_default(),
        goal,
        met.to_owned(),
    ]
}

pub(super) fn headings() -> [&'static str; 8] {
    HEADINGS
}

/// Formats a number with about four digits: decimals for small numbers, none for large ones.
pub(super) fn number(value: f64) -> String {
    let decimals = match value.abs() {
        v if v >= 1000.0 => 0,
        v if v >= 100.0 => 1,
        v if v >= 1.0 => 2,
        0.0 => 0,
        _ => 3,
    };
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use super::super::Goal;
    use super::*;

    #[test]
    fn a_missed_goal_stands_out_and_columns_align() {
        let mut report = Report::new("store", 5);
        report.rows.push(Row::lower("qd1_write", "p50_us", 0.41).goal(Goal::Value(0.5)));
        report.rows.push(Row::higher("deep", "m_per_s", 9.0).beside("engine", 4.5).goal(Goal::Ratio(4.0)));
        let text = report.to_string();
        let lines: Vec<&str> = text.lines().rev().take(3).collect();
        assert!(lines[1].ends_with("<= 0.500  yes"), "{text}");
        assert!(lines[0].ends_with("2.00x  >= 4.00x  NO"), "{text}");
        let column = lines[2].find("control").unwrap();
        assert_eq!(lines[0].find("engine"), Some(column), "{text}");
    }
}
