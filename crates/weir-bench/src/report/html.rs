//! A report as one page of HTML that needs no other file: the table, and bars for each metric.

use std::fmt::Write;

use plotters::prelude::*;

use super::{Better, Report, ReportError, Row, table};

/// On a narrow screen each row of the table becomes a block, whose cells carry their headings.
const STYLE: &str = ":root{color-scheme:light dark;--line:#ddd;--bad:#b00}\
@media(prefers-color-scheme:dark){:root{--line:#444;--bad:#f66}}\
body{font:15px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em}\
table{border-collapse:collapse}td,th{padding:.2em .7em;border-bottom:1px solid var(--line);text-align:left}\
td.n{text-align:right;font-variant-numeric:tabular-nums}td.NO{color:var(--bad);font-weight:bold}\
div{overflow-x:auto}svg{min-width:40em;max-width:100%;height:auto}svg text{fill:currentColor}\
@media(max-width:45em){tr:first-child{display:none}tr{display:flex;flex-wrap:wrap;column-gap:1em;padding:.5em 0;\
border-bottom:1px solid var(--line)}td{padding:0;border:0}td:empty{display:none}td:first-child{font-weight:bold}\
td:nth-child(n+4)::before{content:attr(data-of)' ';opacity:.6}}";

const OURS: RGBColor = RGBColor(0x1f, 0x6f, 0xb4);
const CONTROL: RGBColor = RGBColor(0xb8, 0xbd, 0xc4);
const WIDTH: u32 = 860;
const BAR: u32 = 22;
/// Pixels for labels at the left and for figures at the right of the bars.
const LABELS: i32 = 300;
const FIGURES: i32 = 90;

pub(super) fn page(report: &Report) -> Result<String, ReportError> {
    let machine = &report.machine;
    let title = escape(&format!("weir bench {}", report.bench));
    let place = escape(&format!(
        "Median of {} runs, commit {}, {}. {}, {} cores, Linux {}; GPU: {}, driver {}.",
        report.runs,
        report.commit,
        report.date,
        machine.cpu,
        machine.cores,
        machine.kernel,
        machine.gpu,
        machine.driver
    ));
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{title}</title><style>{STYLE}</style>\n\
         <h1>{title}</h1>\n<p>{place}</p>\n<table>\n<tr>"
    );
    for heading in table::headings() {
        let _ = write!(html, "<th>{heading}</th>");
    }
    html.push_str("</tr>\n");
    for row in &report.rows {
        html.push_str("<tr>");
        let classes = ["", "", "n", "", "n", "n", "n", "met"];
        for ((cell, class), of) in table::cells(row).iter().zip(classes).zip(table::headings()) {
            let class = if class == "met" { cell.as_str() } else { class };
            let _ = write!(html, "<td class=\"{class}\" data-of=\"{of}\">{}</td>", escape(cell));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</table>\n");
    let mut metrics: Vec<(&str, Option<Better>)> = Vec::new();
    for row in &report.rows {
        if !metrics.contains(&(&row.metric, row.better)) {
            metrics.push((&row.metric, row.better));
        }
    }
    for (metric, better) in metrics {
        let direction = match better {
            Some(Better::Lower) => " (lower is better)",
            Some(Better::Higher) => " (higher is better)",
            None => "",
        };
        let rows: Vec<&Row> = report.rows.iter().filter(|row| row.metric == metric).collect();
        let chart =
            chart(&rows).map_err(|reason| ReportError::Chart { metric: metric.to_owned(), reason })?;
        let _ = write!(html, "<h2>{}{direction}</h2>\n<div>{chart}</div>\n", escape(metric));
    }
    html.push_str("</html>\n");
    Ok(html)
}

/// Bars of one metric: each scenario's own figure first, then its controls'.
fn chart(rows: &[&Row]) -> Result<String, String> {
    let mut bars: Vec<(String, f64, RGBColor)> = Vec::new();
    let mut drawn: Option<(&str, f64)> = None;
    for row in rows {
        if drawn != Some((&row.id, row.value)) {
            bars.push((row.id.clone(), row.value, OURS));
            drawn = Some((&row.id, row.value));
        }
        if let (Some(control), Some(value)) = (&row.control, row.control_value) {
            bars.push((format!("{} {control}", row.id), value, CONTROL));
        }
    }
    let greatest = bars.iter().map(|bar| bar.1).fold(0.0, f64::max);
    let scale = if greatest > 0.0 { f64::from(WIDTH as i32 - LABELS - FIGURES) / greatest } else { 0.0 };
    let mut svg = String::new();
    {
        let area =
            SVGBackend::with_string(&mut svg, (WIDTH, BAR * bars.len() as u32 + 4)).into_drawing_area();
        for (at, (label, value, colour)) in bars.iter().enumerate() {
            let top = at as i32 * BAR as i32 + 4;
            let right = LABELS + ((value * scale) as i32).max(1);
            let bar = Rectangle::new([(LABELS, top), (right, top + BAR as i32 - 6)], colour.filled());
            area.draw(&bar).map_err(|error| error.to_string())?;
            for (text, left) in [(label.as_str(), 0), (&format!("{value}"), right + 6)] {
                let style = ("sans-serif", 13).into_font();
                area.draw(&Text::new(text.to_owned(), (left, top + 2), style))
                    .map_err(|error| error.to_string())?;
            }
        }
        area.present().map_err(|error| error.to_string())?;
    }
    Ok(svg)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::super::Goal;
    use super::*;

    #[test]
    fn every_figure_has_its_bar_and_names_cannot_break_the_page() {
        let mut report = Report::new("queue", 3);
        let row = || Row::lower("8p", "ns_per_item", 13.2);
        report.rows.push(row().beside("semaphore", 120.0).goal(Goal::Ratio(0.125)));
        report.rows.push(row().beside("a<b>\"&", 18.6));
        report.rows.push(Row::higher("8p", "batch_p50", 512.0));
        let html = page(&report).unwrap();
        assert_eq!(html.matches("<svg").count(), 2, "{html}");
        assert_eq!(html.matches("#1F6FB4").count(), 2, "{html}");
        assert_eq!(html.matches("#B8BDC4").count(), 2, "{html}");
        assert!(html.contains("120") && html.contains("18.6") && html.contains("512"));
        assert!(!html.contains("a<b>"), "{html}");
        for phone_and_dark in
            ["name=\"viewport\"", "data-of=\"control\">semaphore<", "prefers-color-scheme:dark"]
        {
            assert!(html.contains(phone_and_dark), "{html}");
        }
    }
}
