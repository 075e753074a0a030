//! `weir top`: shows a daemon at work, anew each second, until the key `q`.

use super::options::TopOptions;
use crate::failure;
use crate::run::{all, first_control};
use ratatui::crossterm::event::{self, Event, KeyCode, KeyModifiers};
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Style, Stylize as _};
use ratatui::widgets::{Cell, Gauge, Paragraph, RenderDirection, Row, Sparkline, Table, Wrap};
use ratatui::{DefaultTerminal, Frame};
use std::collections::VecDeque;
use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use weir_cli::failure::Failure;
use weir_core::{ByteSize, PAGE_SIZE};
use weir_daemon::control::{self, Chunks, Status, Traffic};

/// Runs `weir top` until the user ends it.
pub fn run(options: &TopOptions) -> Result<(), Failure> {
    let source = Source::new(options.control.as_deref());
    let path = &source.path;
    let every = Duration::from_millis(options.interval_ms.into());
    let first = source.with_programs(control::status(path).map_err(failure::of)?);
    if options.once {
        std::thread::sleep(every);
        let now = source.with_programs(control::status(path).map_err(failure::of)?);
        print!("{}", plain(&Seen::between(&first, now, every)));
        return Ok(());
    }
    if !std::io::stdout().is_terminal() {
        return Err(Failure::Usage("weir top draws on a terminal; accepted elsewhere: --once".to_owned()));
    }
    let mut terminal = ratatui::try_init().map_err(Failure::failed)?;
    let outcome = watch(&mut terminal, &source, first, every);
    ratatui::restore();
    outcome
}

/// The daemon that is watched.
struct Source {
    path: PathBuf,
    /// Whether the user named the daemon. Then no other daemon's programs are shown.
    is_named: bool,
}

impl Source {
    /// The daemon at `control`. `None`: the daemon that [`control::find`] names, or else the daemon
    /// of a bounded program.
    fn new(control: Option<&Path>) -> Self {
        let found = || {
            let path = control::find();
            if path.exists() { path } else { first_control().unwrap_or(path) }
        };
        Source { path: control.map_or_else(found, Path::to_owned), is_named: control.is_some() }
    }

    /// Adds the programs of `weir run`, each of which has another daemon. `weir status` adds them
    /// too.
    fn with_programs(&self, mut status: Status) -> Status {
        if !self.is_named {
            status.programs.extend(all());
            status.programs.sort_by_key(|program| program.pid);
            status.programs.dedup_by_key(|program| program.pid);
        }
        status
    }
}

fn watch(
    terminal: &mut DefaultTerminal,
    source: &Source,
    mut last: Status,
    every: Duration,
) -> Result<(), Failure> {
    let mut minutes = Minutes::default();
    let mut seen = Seen::between(&last, last.clone(), every);
    let mut at = Instant::now();
    loop {
        terminal.draw(|frame| draw(frame, &seen, &minutes)).map_err(Failure::failed)?;
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
        match control::status(&source.path) {
            Ok(now) => {
                let now = source.with_programs(now);
                seen = Seen::between(&last, now.clone(), at.elapsed());
                minutes.add(&seen);
                last = now;
            }
            // Another daemon is about to take over, or Weir is off by now. The next look shows
            // which.
            Err(_) => {
                seen.away = true;
                minutes.add_nothing();
            }
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
}

impl Seen {
    fn between(then: &Status, now: Status, elapsed: Duration) -> Self {
        let rate = |count: u64| count as f64 / elapsed.as_secs_f64();
        // A new daemon counts from zero.
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
        }
    }

    fn title(&self) -> String {
        let Status { version, pid, uptime_s, volume, .. } = &self.now;
        let away = if self.away { ": it does not answer" } else { "" };
        format!(
            "weir {version}, process {pid}, up {uptime_s} s, device {}: {} in use, {} of one value{away}",
            ByteSize(volume.bytes),
            size(volume.stored),
            size(volume.filled)
        )
    }

    /// For each direction: its name, rate, latency quantiles since the last look, and failures
    /// since the start.
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
            // "In" and "out" are said from the side of a kernel that swaps: pages that it reads
            // come in, and pages that it writes go out.
            row("in (read)", self.read_rate, &self.read, self.now.read.faults),
            row("out (write)", self.write_rate, &self.write, self.now.write.faults),
        ]
    }
}

/// The rates at the last looks, the newest first, which the sparklines show.
#[derive(Default)]
struct Minutes {
    read: VecDeque<u64>,
    written: VecDeque<u64>,
}

impl Minutes {
    /// Number of looks that are stored. One look a second makes one column, and no terminal has so
    /// many columns.
    const LOOKS: usize = 600;

    fn add(&mut self, seen: &Seen) {
        self.push(seen.read_rate as u64, seen.write_rate as u64);
    }

    /// Stores a gap for a look that the daemon did not answer.
    fn add_nothing(&mut self) {
        self.push(0, 0);
    }

    fn push(&mut self, read: u64, written: u64) {
        for (row, rate) in [(&mut self.read, read), (&mut self.written, written)] {
            row.truncate(Self::LOOKS - 1);
            row.push_front(rate);
        }
    }

    /// The highest rate among the newest `columns` looks.
    fn highest(row: &VecDeque<u64>, columns: u16) -> u64 {
        row.iter().take(columns.into()).copied().max().unwrap_or(0)
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
    seen.now.programs.iter().for_each(|program| text += &program.to_string());
    text
}

/// The chunks of a store by their state. A state that no chunk has is left out, but `held` is
/// always there.
fn chunk_states(chunks: &Chunks) -> String {
    let rare =
        [(chunks.reserve, "reserve"), (chunks.emptying, "emptying"), (chunks.given_back, "given back")];
    let rare = rare.iter().filter(|(count, _)| *count > 0).map(|(count, state)| format!(", {count} {state}"));
    format!("{} held{}", chunks.held, rare.collect::<String>())
}

/// Draws the rates of reads or of writes in the last minutes: name and highest rate at the left,
/// then a column for each look, the newest at the right.
fn draw_minutes(frame: &mut Frame<'_>, name: &str, row: &VecDeque<u64>, area: Rect) {
    let [label, line] = Layout::horizontal([Constraint::Length(22), Constraint::Min(1)]).areas(area);
    let highest = Minutes::highest(row, line.width);
    let rate = highest as f64 * PAGE_SIZE as f64 / f64::from(1 << 20);
    frame.render_widget(Paragraph::new(format!("{name}\nat most {rate:.1} MiB/s")).dim(), label);
    let looks: Vec<u64> = row.iter().take(line.width.into()).copied().collect();
    let sparkline = Sparkline::default().direction(RenderDirection::RightToLeft).max(highest.max(1));
    frame.render_widget(sparkline.data(&looks).cyan(), line);
}

fn draw(frame: &mut Frame<'_>, seen: &Seen, minutes: &Minutes) {
    let stores = seen.now.stores.len() as u16;
    let programs: Vec<String> = seen.now.programs.iter().map(ToString::to_string).collect();
    let programs = programs.concat();
    let parts = Layout::vertical([
        Constraint::Length(3),
        Constraint::Length(4),
        Constraint::Length(3 * stores),
        Constraint::Length(seen.now.exports.len() as u16 + 1),
        Constraint::Length(programs.lines().count() as u16 + u16::from(!programs.is_empty())),
        Constraint::Min(0),
        Constraint::Length(1),
    ])
    .split(frame.area());
    let title = Paragraph::new(seen.title()).wrap(Wrap { trim: true }).bold();
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
        let line = format!("{} {}; chunks: {}", store.url, store.state, chunk_states(&store.chunks));
        frame.render_widget(Paragraph::new(line), name);
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
    frame.render_widget(Paragraph::new(programs), parts[4]);
    // Reads and writes each get half of the rows that are left. With less than two rows each,
    // neither is drawn.
    let rows = parts[5].height / 2;
    if rows >= 2 {
        let areas = Layout::vertical([Constraint::Length(rows); 2]).spacing(0).split(parts[5]);
        draw_minutes(frame, "in, last minutes", &minutes.read, areas[0]);
        draw_minutes(frame, "out, last minutes", &minutes.written, areas[1]);
    }
    frame.render_widget(Paragraph::new("q ends").dim(), parts[6]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratatui::Terminal;
    use ratatui::backend::TestBackend;
    use weir_daemon::control::Program;

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
        let mut seen = Seen::between(&Status::example(0), Status::example(2560), Duration::from_secs(1));
        let mut terminal = Terminal::new(TestBackend::new(100, 24)).expect("a terminal");
        terminal.draw(|frame| draw(frame, &seen, &Minutes::default())).expect("drawn");
        let screen = terminal.backend().to_string();
        for text in [plain(&seen), screen] {
            for words in ["2560", "10.0", "1.5", "2 given back", "256KiB of 1MiB", "unix:/x"] {
                assert!(text.contains(words), "{words} is missing in\n{text}");
            }
        }
        seen.now.programs = vec![Program { pid: 4711, name: "python3".to_owned(), ..Program::default() }];
        terminal.draw(|frame| draw(frame, &seen, &Minutes::default())).expect("drawn");
        for text in [plain(&seen), terminal.backend().to_string()] {
            assert!(text.contains("4711 python3: ") && text.contains("resident"), "{text}");
        }
    }

    /// Ninety seconds of rates: a burst of reads a minute ago, then a ramp of writes.
    fn a_minute() -> Minutes {
        let mut minutes = Minutes::default();
        for second in 0..90_u64 {
            let read = if (20..30).contains(&second) { 4096 } else { 64 };
            minutes.push(read, second.saturating_sub(45) * 100);
        }
        minutes
    }

    fn screen(columns: u16, rows: u16) -> String {
        let seen = Seen::between(&Status::example(0), Status::example(2560), Duration::from_secs(1));
        let mut terminal = Terminal::new(TestBackend::new(columns, rows)).expect("a terminal");
        terminal.draw(|frame| draw(frame, &seen, &a_minute())).expect("drawn");
        let buffer = terminal.backend().buffer();
        let line = |row: u16| -> String { (0..columns).map(|at| buffer[(at, row)].symbol()).collect() };
        (0..rows).map(|row| line(row).trim_end().to_owned() + "\n").collect()
    }

    #[test]
    fn the_last_minutes_are_drawn_with_the_newest_look_at_the_right() {
        for (columns, rows) in [(80, 24), (200, 60)] {
            let text = screen(columns, rows);
            assert!(text.contains("in, last minutes") && text.contains("out, last minutes"), "{text}");
            // The burst of 4096 pages a second is 16 MiB/s. After the burst, the test took 60 looks
            // at the daemon. A terminal of 80 columns shows only the last 58 looks, so the burst is
            // not visible there. The ramp ends at 17.2 MiB/s, after 44 looks.
            let highest = if columns == 80 { "at most 0.2 MiB/s" } else { "at most 16.0 MiB/s" };
            assert!(text.contains(highest) && text.contains("at most 17.2 MiB/s"), "{text}");
            let full: Vec<&str> =
                text.lines().filter(|line| line.chars().count() == usize::from(columns)).collect();
            assert!(full.iter().any(|line| line.ends_with('█')), "the ramp ends at the edge: {text}");
        }
    }

    #[test]
    fn more_looks_than_are_kept_push_the_oldest_out() {
        let mut minutes = Minutes::default();
        for look in 0..2000 {
            minutes.push(look, 0);
        }
        assert_eq!((minutes.read.len(), minutes.read[0]), (Minutes::LOOKS, 1999));
        minutes.add_nothing();
        assert_eq!((minutes.read[0], minutes.read[1]), (0, 1999), "a daemon that is away is a gap");
    }
}
