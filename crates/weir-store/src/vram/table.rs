//! The cost of each path on this machine, and the choice of a path by cost.
//!
//! For each path and direction there are two costs: of the first page of a batch, and of each
//! further one. A third number is the path's limit, however many threads use it. All are measured
//! when the store is opened; the choice is arithmetic on them.

/// A path for pages between host and card.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Path {
    /// The processor's own loads and stores.
    Mapped,
    /// Batches of the copy engine.
    Engine,
    /// The resident kernel.
    Ring,
}

impl Path {
    /// All paths. Of paths with equal cost the first is chosen.
    pub const ALL: [Path; 3] = [Path::Mapped, Path::Ring, Path::Engine];

    /// The path's name in options and reports.
    pub fn name(self) -> &'static str {
        match self {
            Path::Mapped => "mapped",
            Path::Engine => "engine",
            Path::Ring => "ring",
        }
    }
}

/// The direction in which a page moves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Direction {
    /// From the card to the host.
    Read,
    /// From the host to the card.
    Write,
}

/// The costs of one path in one direction, in nanoseconds.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Cost {
    /// The time that a single page takes, from its start to its completion.
    pub first: f64,
    /// The time that each further page of a batch adds, with one thread.
    pub each: f64,
    /// The time that a page adds if its slot follows that of the page before: a copy engine moves
    /// both in one copy.
    pub neighbour: f64,
    /// The time between two pages when many threads use the path: the inverse of its total rate. It
    /// is no shorter than the PCIe link allows. For the copy engines it is the driver's time for a
    /// copy, since the driver makes them one at a time.
    pub shared: f64,
    /// The same as [`shared`](Self::shared), for two pages whose slots are neighbours.
    pub neighbour_shared: f64,
}

/// The batch that is about to be done.
#[derive(Clone, Copy, Debug)]
pub struct BatchShape {
    /// Number of the batch's pages, and of the lane's pages in flight.
    pub pages: usize,
    /// Whether most pages are neighbours.
    pub neighbours: bool,
    /// Number of threads that use the card, with this one.
    pub busy: usize,
    /// Whether the resident kernel is on the card.
    pub ring: bool,
}

impl Cost {
    /// The time that a thread needs for the batch, while `busy` threads have batches of the same
    /// shape.
    pub fn of(self, batch: BatchShape) -> f64 {
        let (pages, busy) = (batch.pages.max(1), batch.busy.max(1) as f64);
        let (each, shared) = match batch.neighbours {
            true => (self.neighbour, self.neighbour_shared),
            false => (self.each, self.shared),
        };
        let each = each.max(shared * busy);
        self.first.max(each) + each * (pages - 1) as f64
    }
}

/// All measured costs; a path that is missing has no cost.
#[derive(Clone, Copy, Default, Debug)]
pub struct Table {
    costs: [[Option<Cost>; 2]; 3],
}

impl Table {
    /// Stores the measured cost of a path in one direction.
    pub fn set(&mut self, path: Path, direction: Direction, cost: Cost) {
        self.costs[path as usize][direction as usize] = Some(cost);
    }

    /// The measured cost, if there is one.
    pub fn get(&self, path: Path, direction: Direction) -> Option<Cost> {
        self.costs[path as usize][direction as usize]
    }

    /// The same costs, without those of paths that the card lacks.
    pub fn only(mut self, has: impl Fn(Path) -> bool) -> Self {
        for path in Path::ALL.into_iter().filter(|&path| !has(path)) {
            self.costs[path as usize] = [None; 2];
        }
        self
    }

    /// The shortest measured time of a page over the PCIe link, on any path. `None` if no path was
    /// measured.
    pub fn link(&self) -> Option<f64> {
        let costs = self.costs.iter().flatten().flatten();
        costs.map(|cost| cost.shared.min(cost.neighbour_shared)).min_by(f64::total_cmp)
    }

    /// The paths that are worth trying for a batch, the cheapest first. They may cost up to four
    /// times as much as the cheapest, since the costs under many threads are hard to measure in
    /// advance.
    pub fn contenders(&self, direction: Direction, batch: BatchShape) -> Vec<Path> {
        const HOPELESS: f64 = 4.0;
        let mut ways: Vec<(Path, f64)> = self.costs_of(direction, batch).collect();
        ways.sort_by(|a, b| a.1.total_cmp(&b.1));
        let best = ways.first().map_or(0.0, |way| way.1);
        ways.into_iter().filter(|way| way.1 <= best * HOPELESS).map(|way| way.0).collect()
    }

    /// The cheapest path for a batch.
    pub fn choose(&self, direction: Direction, batch: BatchShape) -> Option<Path> {
        self.costs_of(direction, batch).min_by(|a, b| a.1.total_cmp(&b.1)).map(|(path, _)| path)
    }

    fn costs_of(&self, direction: Direction, batch: BatchShape) -> impl Iterator<Item = (Path, f64)> + '_ {
        Path::ALL
            .into_iter()
            .filter(move |&path| batch.ring || path != Path::Ring)
            .filter_map(move |path| Some((path, self.get(path, direction)?.of(batch))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use Direction::{Read, Write};

    /// The costs measured on an H200.
    fn h200() -> Table {
        let mut table = Table::default();
        let mut set = |path, direction, first, each, neighbour, shared| {
            let neighbour_shared = f64::min(neighbour, shared);
            table.set(path, direction, Cost { first, each, neighbour, shared, neighbour_shared });
        };
        set(Path::Mapped, Write, 410.0, 345.0, 345.0, 175.0);
        set(Path::Mapped, Read, 5300.0, 5300.0, 5300.0, 330.0);
        set(Path::Engine, Write, 6420.0, 1100.0, 75.0, 1100.0);
        set(Path::Engine, Read, 6530.0, 360.0, 75.0, 360.0);
        set(Path::Ring, Write, 3180.0, 140.0, 140.0, 82.0);
        set(Path::Ring, Read, 3230.0, 137.0, 137.0, 82.0);
        table
    }

    fn random(pages: usize, busy: usize, ring: bool) -> BatchShape {
        BatchShape { pages, neighbours: false, busy, ring }
    }

    #[test]
    fn a_single_write_takes_the_window_and_a_single_read_the_ring_if_it_is_there() {
        let table = h200();
        assert_eq!(table.choose(Write, random(1, 1, true)), Some(Path::Mapped));
        assert_eq!(table.choose(Read, random(1, 1, true)), Some(Path::Ring));
        assert_eq!(table.choose(Read, random(1, 1, false)), Some(Path::Mapped));
    }

    #[test]
    fn batches_of_reads_leave_the_window_early() {
        assert_eq!(h200().choose(Read, random(2, 1, false)), Some(Path::Engine));
        assert_eq!(h200().choose(Read, random(64, 16, true)), Some(Path::Ring));
    }

    #[test]
    fn writes_move_to_the_ring_once_the_window_is_shared_by_many() {
        assert_eq!(h200().choose(Write, random(64, 1, false)), Some(Path::Mapped));
        assert_eq!(h200().choose(Write, random(64, 16, true)), Some(Path::Ring));
        assert_eq!(h200().choose(Write, random(64, 16, false)), Some(Path::Mapped));
    }

    #[test]
    fn neighbours_go_by_the_copy_engine() {
        for busy in [1, 16] {
            let large = BatchShape { neighbours: true, ..random(256, busy, true) };
            assert_eq!(h200().choose(Write, large), Some(Path::Engine), "{busy} threads");
            assert_eq!(h200().choose(Read, large), Some(Path::Engine), "{busy} threads");
        }
    }

    #[test]
    fn what_is_hopeless_is_not_tried() {
        let deep = random(64, 16, true);
        assert_eq!(h200().contenders(Write, deep), [Path::Ring, Path::Mapped]);
        assert_eq!(h200().contenders(Read, deep), [Path::Ring, Path::Mapped]);
        assert_eq!(h200().contenders(Write, BatchShape { ring: false, ..deep }), [Path::Mapped]);
        assert_eq!(h200().contenders(Write, BatchShape { neighbours: true, ..deep })[0], Path::Engine);
    }

    #[test]
    fn without_a_way_there_is_no_choice() {
        assert_eq!(Table::default().choose(Read, random(1, 1, true)), None);
    }
}
