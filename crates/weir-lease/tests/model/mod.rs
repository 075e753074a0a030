//! A model of a table, written the obvious way.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use weir_lease::{Connection, Geometry, Given, OwnedCounts, Place, Table, Token};

pub type Words = Arc<[AtomicU64]>;

pub fn words(geometry: Geometry) -> Words {
    (0..geometry.image_words()).map(|_| AtomicU64::new(0)).collect()
}

/// The holder and the place of each token.
#[derive(Clone, Default, Debug, PartialEq, Eq)]
pub struct Model {
    pub held: BTreeMap<(u32, Token), Place>,
}

impl Model {
    pub fn out(&self, of: Place) -> usize {
        self.held.values().filter(|place| (place.region, place.page) == (of.region, of.page)).count()
    }

    pub fn take(&mut self, connection: u32, token: Token, place: Place) {
        let before = self.held.insert((connection, token), place);
        assert_eq!(before, None, "{token:?} was given out twice");
    }

    #[allow(dead_code, reason = "each test crate uses its part of the model")]
    pub fn give(&mut self, connection: u32, token: Token) -> Option<Given> {
        let place = self.held.remove(&(connection, token))?;
        Some(Given { place, last: self.out(place) == 0 })
    }

    pub fn of(&self, connection: u32) -> Vec<(Token, Place)> {
        let range = (connection, Token(0))..=(connection, Token(u32::MAX));
        self.held.range(range).map(|(&(_, token), &place)| (token, place)).collect()
    }

    /// Compares every connection's references and every page's count with the table's.
    pub fn assert_matches<M: AsRef<[AtomicU64]>>(
        &self,
        table: &Table<OwnedCounts, M>,
        connections: &[Connection],
        pages: &[u32],
    ) {
        assert_eq!(table.connections() as usize, connections.len());
        for connection in connections {
            let mut held: Vec<_> = table.held(connection).collect();
            held.sort();
            assert_eq!(held, self.of(connection.index()));
            assert_eq!(table.outstanding(connection) as usize, held.len());
        }
        let mut out: Vec<Vec<u64>> = pages.iter().map(|&pages| vec![0; pages as usize]).collect();
        for place in self.held.values() {
            out[usize::from(place.region)][place.page as usize] += 1;
        }
        for (region, counts) in out.iter().enumerate() {
            for (page, &count) in counts.iter().enumerate() {
                let place = Place::page(region as u8, page as u32);
                assert_eq!(table.counts().of(place), Some(count), "{place:?}");
            }
        }
    }
}
