//! `weir top`: a daemon at work, once a second, until `q`.

use super::options::TopOptions;
use super::parts;
use crate::control::{self, Status, Traffic};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout};
use ratatui::style::{Style, Stylize as _};
use ratatui::widgets::{Cell, Gauge, Paragraph, Row, Table};
use ratatui::{DefaultTerminal, Frame};
use std::io::IsTerminal as _;
use std::path::Path;
use std::time::{Duration, Instant};
use weir_cli::failure::Failure;
use weir_core::{ByteSize, PAGE_SIZE};

/// Shows it.
pub fn run(options: &TopOptions) -> Result<(), Failure> {
    let path = options.control.clone().unwrap_or_else(parts::find);
    let every = Duration::from_millis(options.interval_ms.into());
    let first = parts::status(&path)?;
    if options.once {
        std::thread::sleep(every);
        let now = control::status(&path)?;
        print!("{}", plain(&Seen { parts: parts::count(&path), ..Seen::between(&first, now, every) }));
        return Ok(());
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::Usage("weir top draws on a terminal; accepted elsewhere: --once".to_owned()));
    }
    let mut terminal = ratatui::try_init().map_err(Failure::failed)?;
    let outcome = watch(&mut terminal, &path, first, every);
    ratatui::restore();
    outcome
}

fn watch(
    terminal: &mut DefaultTerminal,
    path: &Path,
    mut last: Status,
    every: Duration,
) -> Result<(), Failure> {
    let parts = parts::count(path);
    let mut seen = Seen { parts, ..Seen::between(&last, last.clone(), every) };
    let mut at = Instant::now();
    loop {
        terminal.draw(|frame| draw(frame, &seen)).map_err(Failure::failed)?;
        if event::poll(every.saturating_sub(at.elapsed())).map_err(Failure::failed)? {
            match event::read().map_err(Failure::failed)? {
                Event::Key(key) if matches!(key.code, KeyCode::Char('q') | KeyCode::Esc) => return Ok(()),
                Event::Key(key)
                    if key.code == KeyCode::Char('c') && key.modifiers.contains(KeyModifiers::CONTROL) =>
                {
                    return Ok(());
                }
                _ => continue,
            }
        }
        match control::status(path) {
            Ok(now) => {
                seen = Seen { parts, ..Seen::between(&last, now.clone(), at.elapsed()) };
                last = now;
            }
            // Another daemon is about to take over, or weir is off by now; the next look says more.
            Err(_) => seen.away = true,
        }
        at = Instant::now();
    }
}

/// Two looks at a daemon, and the time between them.
struct Seen {
    now: Status,
    read: Traffic,
    write: Traffic,
    read_rate: f64,
    write_rate: f64,
    request_rate: f64,
    away: bool,
    /// Of so many this daemon's device is the first.
    parts: u8,
}

impl Seen {
    fn between(then: &Status, now: Status, elapsed: Duration) -> Self {
        let rate = |count: u64| count as f64 / elapsed.as_secs_f64();
        // Another daemon counts from zero.
        let then = (then.pid == now.pid).then_some(then);
        let between = |of: fn(&Status) -> &Traffic| match then {
            Some(then) => of(&now).since(of(then)),
            None => of(&now).clone(),
        };
        let (read, write) = (between(|status| &status.read.traffic), between(|status| &status.write.traffic));
        let requests = |status: &Status| -> u64 { status.exports.iter().map(|export| export.requests).sum() };
        Seen {
            read_rate: rate(read.pages),
            write_rate: rate(write.pages),
            request_rate: rate(requests(&now).saturating_sub(then.map_or(0, requests))),
            read,
            write,
            now,
            away: false,
            parts: 0,
        }
    }

    fn title(&self) -> String {
        let Status { version, pid, uptime_s, volume, .. } = &self.now;
        let away = if self.away { ": it does not answer" } else { "" };
        let device = match self.parts {
            0 | 1 => "device".to_owned(),
            parts => format!("part 1 of {parts} (weir status lists them)"),
        };
        format!(
            "weir {version}, process {pid}, up {uptime_s} s, {device} {}: {} in use, {} of one value{away}",
            ByteSize(volume.bytes),
            size(volume.stored),
            size(volume.filled)
        )
    }

    /// Direction, rate, quantiles of what came since the last look, failures since the start.
    fn directions(&self) -> [[String; 7]; 2] {
        let row = |name: &str, rate: f64, between: &Traffic, faults: u64| {
            let quantile = |us: Option<f64>| us.map_or("-".to_owned(), |us| format!("{us:.1}"));
            [
                name.to_owned(),
                format!("{rate:.0}"),
                format!("{:.1}", rate * PAGE_SIZE as f64 / f64::from(1 << 20)),
                quantile(between.p50_us),
                quantile(between.p99_us),
                quantile(between.p999_us),
                format!("{faults}"),
            ]
        };
        [
            // As the kernel's user sees them: what is read comes in, what is written goes out.
            row("in (read)", self.read_rate, &self.read, self.now.read.faults),
            row("out (write)", self.write_rate, &self.write, self.now.write.faults),
        ]
    }
}

const COLUMNS: [&str; 7] = ["", "pages/s", "MiB/s", "p50 us", "p99 us", "p99.9 us", "failed"];

fn size(pages: u64) -> ByteSize {
    ByteSize(pages * PAGE_SIZE as u64)
}

fn plain(seen: &Seen) -> String {
    let mut text = seen.title() + "\n";
    let line = |cells: &[String]| {
        let cells: Vec<String> = cells
            .iter()
            .enumerate()
            .map(|(at, cell)| if at == 0 { format!("{cell:<12}") } else { format!("{cell:>10}") })
            .collect();
        cells.concat() + "\n"
    };
    text += &line(&COLUMNS.map(String::from));
    for row in seen.directions() {
        text += &line(&row);
    }
    for store in &seen.now.stores {
        let chunks = store.chunks;
        text += &format!(
            "{} {}: {} of {}; chunks of {}: {} held, {} reserve, {} emptying, {} given back\n",
            store.url,
            store.state,
            size(store.slots_used),
            size(store.slots),
            ByteSize(store.chunk_bytes),
            chunks.held,
            chunks.reserve,
            chunks.emptying,
            chunks.given_back
        );
    }
    for export in &seen.now.exports {
        text += &format!(
            "{} {}: {:.0} requests/s, {} failed\n",
            export.kind, export.address, seen.request_rate, export.errors
        );
    }
    text
}

fn draw(frame: &mut Frame<'_>, seen: &Seen) {
    let stores = seen.now.stores.len() as u16;
    let parts = Layout::vertical([
        Constraint::Length(2),
        Constraint::Length(4),
        Constraint::Length(3 * stores),
        Constraint::Length(seen.now.exports.len() as u16 + 1),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .split(frame.area());
    let title = Paragraph::new(seen.title()).bold();
    frame.render_widget(if seen.away { title.red() } else { title }, parts[0]);

    let rows = seen.directions().map(|row| Row::new(row.map(Cell::from)));
    let table = Table::new(rows, [Constraint::Length(12); 7])
        .header(Row::new(COLUMNS.map(Cell::from)).style(Style::new().dim()));
    frame.render_widget(table, parts[1]);

    for (store, area) in seen
        .now
        .stores
        .iter()
        .zip(Layout::vertical(vec![Constraint::Length(3); stores.into()]).split(parts[2]).iter())
    {
        let [name, bar, _] =
            Layout::vertical([Constraint::Length(1), Constraint::Length(1), Constraint::Length(1)])
                .areas(*area);
        let chunks = store.chunks;
        frame.render_widget(
            Paragraph::new(format!(
                "{} {}; chunks: {} held, {} reserve, {} emptying, {} given back",
                store.url, store.state, chunks.held, chunks.reserve, chunks.emptying, chunks.given_back
            )),
            name,
        );
        let ratio = store.slots_used as f64 / store.slots.max(1) as f64;
        let label = format!("{} of {}", size(store.slots_used), size(store.slots));
        frame.render_widget(Gauge::default().ratio(ratio.clamp(0.0, 1.0)).label(label), bar);
    }
    let exports: Vec<String> = seen
        .now
        .exports
        .iter()
        .map(|export| {
            format!(
                "{} {}: {} of {} connections, {} requests, {} failed",
                export.kind,
                export.address,
                export.connections,
                export.connections_most,
                export.requests,
                export.errors
            )
        })
        .collect();
    frame.render_widget(Paragraph::new(exports.join("\n")), parts[3]);
    frame.render_widget(Paragraph::new("q ends").dim(), parts[5]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;

    #[test]
    fn a_rate_is_what_came_since_the_last_look_and_a_new_daemon_counts_from_zero() {
        let seen = Seen::between(&Status::example(1000), Status::example(3000), Duration::from_secs(2));
        assert_eq!(seen.read_rate, 1000.0);
        assert_eq!(seen.read.p999_us, Some(1.5), "the slow one was before");
        let another = Status { pid: 8, ..Status::example(1500) };
        let after_restart = Seen::between(&Status::example(1000), another, Duration::from_secs(1));
        assert_eq!((after_restart.read_rate, after_restart.read.p999_us), (1500.0, Some(9.0)));
    }

    #[test]
    fn lines_and_screen_show_rates_latencies_and_chunks() {
        let seen = Seen::between(&Status::example(0), Status::example(2560), Duration::from_secs(1));
        let mut terminal = Terminal::new(TestBackend::new(100, 24)).expect("a terminal");
        terminal.draw(|frame| draw(frame, &seen)).expect("drawn");
        let screen = terminal.backend().to_string();
        for text in [plain(&seen), screen] {
            for words in ["2560", "10.0", "1.5", "2 given back", "256KiB of 1MiB", "unix:/x"] {
                assert!(text.contains(words), "{words} is missing in\n{text}");
            }
        }
        let title = Seen { parts: 3, ..seen }.title();
        assert!(title.contains("part 1 of 3 (weir status lists them) 1MiB:"), "{title}");
    }
}
