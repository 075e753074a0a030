//! A report as one picture: each figure that has a goal, compared with its control.

use super::{Better, GoalOf, Report, ReportError, Row, table};
use plotters::prelude::*;

const BETTER: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
const WORSE: RGBColor = RGBColor(0xc4, 0x5a, 0x2a);
const INK: RGBColor = RGBColor(0x22, 0x22, 0x22);
const FAINT: RGBColor = RGBColor(0xd5, 0xd8, 0xdc);
const WIDTH: i32 = 900;
const LINE: i32 = 22;
/// Pixels for labels at the left and for figures at the right of the bars, and for the heading and
/// the axis.
const LABELS: i32 = 250;
const FIGURES: i32 = 250;
const HEAD: i32 = 48;
const FOOT: i32 = 24;

/// A row that can be compared: its ratio to the control, and its goal as a ratio.
struct Bar<'a> {
    row: &'a Row,
    control: &'a str,
    control_value: f64,
    ratio: f64,
    goal: Option<f64>,
}

fn bar(row: &Row) -> Option<Bar<'_>> {
    let (control, control_value) = (row.control.as_deref()?, row.control_value?);
    let goal = match row.goal_of {
        Some(GoalOf::Ratio) => row.goal,
        Some(GoalOf::Value) => row.goal.map(|goal| goal / control_value),
        None => None,
    };
    let ratio = row.value / control_value;
    let drawable = ratio.is_finite() && ratio > 0.0;
    drawable.then_some(Bar { row, control, control_value, ratio, goal })
}

/// The rows with a goal; if a report has no goals, all rows.
fn bars(report: &Report) -> Vec<Bar<'_>> {
    let any_goal = report.rows.iter().any(|row| row.goal.is_some() && row.control_value.is_some());
    let wanted = |row: &&Row| !any_goal || row.goal.is_some();
    report.rows.iter().filter(wanted).filter_map(bar).collect()
}

pub(super) fn svg(report: &Report) -> Result<String, ReportError> {
    let bars = bars(report);
    let failed = |reason: String| ReportError::Chart { metric: report.bench.clone(), reason };
    if bars.is_empty() {
        return Err(failed("no figure has a control to be compared with".to_owned()));
    }
    draw(report, &bars).map_err(|error| failed(error.to_string()))
}

/// Draws the bars. The axis is logarithmic: ratios of 1/2 and of 2 lie equally far from 1.
fn draw(report: &Report, bars: &[Bar<'_>]) -> Result<String, Box<dyn std::error::Error>> {
    let ends = bars.iter().flat_map(|bar| [bar.ratio, bar.goal.unwrap_or(1.0), 1.0]).map(f64::log2);
    let (low, high) = ends.fold((-0.5f64, 0.5f64), |(low, high), end| (low.min(end), high.max(end)));
    let (low, high) = (low.floor(), high.ceil());
    let scale = f64::from(WIDTH - LABELS - FIGURES) / (high - low);
    let x = |ratio: f64| LABELS + ((ratio.log2() - low) * scale) as i32;
    let height = HEAD + LINE * bars.len() as i32 + FOOT;
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, (WIDTH as u32, height as u32)).into_drawing_area();
        area.fill(&WHITE)?;
        let text = |text: String, at: (i32, i32), size: i32| {
            Text::new(text, at, ("sans-serif", size).into_font().color(&INK))
        };
        let machine = &report.machine;
        let gpu = if machine.gpu == "none" { String::new() } else { format!(", {}", machine.gpu) };
        area.draw(&text(format!("weir bench {}: times the control's figure", report.bench), (4, 4), 16))?;
        let place = format!(
            "median of {} runs, commit {}, {} cores{gpu}; ",
            report.runs, report.commit, machine.cores
        );
        area.draw(&text(place + "blue: better than the control, |: the goal", (4, 26), 12))?;
        let step = ((high - low) / 8.0).ceil().max(1.0) as usize;
        for power in (low as i32..=high as i32).step_by(step) {
            let at = x(2f64.powi(power));
            area.draw(&PathElement::new([(at, HEAD), (at, height - FOOT)], FAINT))?;
            let label =
                if power < 0 { format!("1/{}", 1u64 << -power) } else { format!("{}", 1u64 << power) };
            area.draw(&text(label, (at - 8, height - FOOT + 4), 12))?;
        }
        for (at, bar) in bars.iter().enumerate() {
            let top = HEAD + at as i32 * LINE;
            let good = (bar.ratio <= 1.0) == (bar.row.better == Some(Better::Lower));
            let (from, to) =
                (x(bar.ratio).min(x(1.0)), x(bar.ratio).max(x(1.0)).max(x(bar.ratio).min(x(1.0)) + 1));
            let colour = if good { BETTER } else { WORSE };
            area.draw(&Rectangle::new([(from, top + 4), (to, top + LINE - 4)], colour.filled()))?;
            if let Some(goal) = bar.goal {
                area.draw(&PathElement::new(
                    [(x(goal), top + 1), (x(goal), top + LINE - 1)],
                    INK.stroke_width(2),
                ))?;
            }
            area.draw(&text(format!("{} {}", bar.row.id, bar.row.metric), (4, top + 5), 12))?;
            let missed = if bar.row.met == Some(false) { "  missed" } else { "" };
            let (ours, theirs) = (table::number(bar.row.value), table::number(bar.control_value));
            let figures = format!("{ours} beside {theirs} {}{missed}", bar.control);
            area.draw(&text(figures, (WIDTH - FIGURES + 10, top + 5), 12))?;
        }
        area.draw(&PathElement::new([(x(1.0), HEAD), (x(1.0), height - FOOT)], INK))?;
        area.present()?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::super::Goal;
    use super::*;

    #[test]
    fn a_figure_with_a_goal_is_a_bar_blue_where_it_beats_its_control() {
        let mut report = Report::new("queue", 3);
        report.rows.push(Row::lower("8p", "ns", 13.0).beside("semaphore", 120.0).goal(Goal::Ratio(0.125)));
        report.rows.push(Row::higher("8p", "rate", 13.0).beside("semaphore", 120.0).goal(Goal::Value(100.0)));
        report.rows.push(Row::lower("8p", "no_goal", 1.0).beside("semaphore", 2.0));
        report.rows.push(Row::lower("8p", "no_control", 1.0).goal(Goal::Value(2.0)));
        let picture = svg(&report).unwrap();
        assert_eq!(
            (picture.matches("#1F6FB4").count(), picture.matches("#C45A2A").count()),
            (1, 1),
            "{picture}"
        );
        assert!(
            picture.contains("8p rate") && picture.contains("beside 120.0 semaphore  missed"),
            "{picture}"
        );
        assert!(!picture.contains("no_goal") && !picture.contains("no_control"));
    }

    #[test]
    fn a_report_without_controls_says_that_there_is_nothing_to_draw() {
        let mut report = Report::new("memory", 1);
        report.rows.push(Row::lower("map", "bytes", 8.0));
        assert!(svg(&report).unwrap_err().to_string().contains("memory"));
    }
}
