//! The weir-lease table, with the common interface of the designs.

use weir_lease::{
    Connection, Geometry, NoCounts, OwnedCounts, PageCounts, Place, SharedCounts, Table, Token,
};

use super::design::Design;

/// A table with the handles of its connections, for one thread.
pub struct Lease<C> {
    table: Table<C>,
    connections: Vec<Connection>,
    counts_bytes: usize,
    shared_bytes: usize,
}

/// Bytes that a connection without references takes: its bytes in the table, and the handle by
/// which its owner knows it.
pub fn idle_connection_bytes() -> usize {
    Table::<NoCounts>::bytes_per_idle_connection() + size_of::<Connection>()
}

impl<C: PageCounts> Lease<C> {
    fn over(connections: u32, outstanding: u32, counts: C) -> Self {
        // A connection's slots are allocated 64 at a time.
        let references = connections * outstanding.next_multiple_of(64);
        let geometry = Geometry { connections, references, quota: outstanding };
        let mut table = Table::new(geometry, counts).expect("the plan was checked");
        let connections =
            (0..connections).map(|_| table.open(outstanding).expect("there is one for each")).collect();
        Lease { table, connections, counts_bytes: 0, shared_bytes: 0 }
    }
}

impl Lease<NoCounts> {
    pub fn uncounted(connections: u32, outstanding: u32) -> Self {
        Self::over(connections, outstanding, NoCounts)
    }
}

impl Lease<OwnedCounts> {
    pub fn owned(connections: u32, outstanding: u32, pages: u32) -> Self {
        let counts = OwnedCounts::new(&[pages]);
        let counts_bytes = counts.bytes();
        Lease { counts_bytes, ..Self::over(connections, outstanding, counts) }
    }
}

impl Lease<SharedCounts> {
    pub fn shared(connections: u32, outstanding: u32, counts: SharedCounts) -> Self {
        let shared_bytes = counts.bytes();
        Lease { shared_bytes, ..Self::over(connections, outstanding, counts) }
    }
}

impl<C: PageCounts + Send> Design for Lease<C> {
    const NAME: &'static str = "weir-lease";

    fn take(&mut self, connection: u32, pages: &[Place], tokens: &mut [Token]) {
        let handle = &self.connections[connection as usize];
        let count = self.table.take_batch(handle, pages, tokens).expect("the quota is what is outstanding");
        assert_eq!(count, pages.len(), "there is a slot for each");
    }

    fn give(&mut self, connection: u32, tokens: &[Token]) -> u32 {
        let handle = &self.connections[connection as usize];
        let mut lasts = 0;
        let returned = self.table.give_tokens(handle, tokens, |_, last| lasts += u32::from(last));
        let refused = returned.expect("a burst is at most a batch").refused;
        assert_eq!(refused, 0, "the harness gives back only what is out");
        lasts
    }

    fn give_pages(&mut self, connection: u32, tokens: &[Token], back: &mut Vec<u32>) {
        let handle = &self.connections[connection as usize];
        let returned = self.table.give_tokens(handle, tokens, |place, _| back.push(place.page));
        assert_eq!(returned.expect("at most a batch").refused, 0, "the client gives back what it holds");
    }

    fn bytes(&self) -> usize {
        self.table.bytes() + self.connections.len() * size_of::<Connection>() + self.counts_bytes
    }

    fn shared_bytes(&self) -> usize {
        self.shared_bytes
    }
}
