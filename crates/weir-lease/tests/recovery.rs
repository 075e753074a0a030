//! An owner that dies between any two accesses to the image, and memory that is no image.

mod model;

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, set_hook};
use std::sync::atomic::{AtomicU64, Ordering};

use model::{Model, Words, words};
use weir_lease::{Connection, Geometry, ImageError, NoCounts, OwnedCounts, Place, Table, TokenRange};

const PAGES: [u32; 1] = [300];
const GEOMETRY: Geometry = Geometry { connections: 3, references: 5 * 64, quota: 150 };

/// Memory whose owner is killed at its n-th access: the table asks for the memory for each word
/// that it stores.
struct Mortal {
    words: Words,
    accesses_left: Cell<Option<u32>>,
}

impl AsRef<[AtomicU64]> for Mortal {
    fn as_ref(&self) -> &[AtomicU64] {
        if let Some(left) = self.accesses_left.get() {
            assert_ne!(left, 0, "killed");
            self.accesses_left.set(Some(left - 1));
        }
        &self.words
    }
}

type Doomed<'a> = Table<OwnedCounts, &'a Mortal>;

/// Runs `act` on a table that `prepare` has brought into some state, killed after 0, 1, 2, ...
/// accesses, until it survives. Each time `judge` gets the model before `act` and the recovered
/// table.
fn killed_at_every_access<S>(
    prepare: impl Fn(&mut Doomed<'_>, &mut Model) -> S,
    act: impl Fn(&mut Doomed<'_>, S),
    judge: impl Fn(&Model, &Table<OwnedCounts, Words>, &[Connection]),
) -> u32 {
    set_hook(Box::new(|_| {}));
    for accesses in (0..).step_by(if cfg!(miri) { 61 } else { 1 }) {
        let mortal = Mortal { words: words(GEOMETRY), accesses_left: Cell::new(None) };
        let mut model = Model::default();
        let mut table = Table::create(&mortal, GEOMETRY, OwnedCounts::new(&PAGES)).unwrap();
        let state = prepare(&mut table, &mut model);
        mortal.accesses_left.set(Some(accesses));
        let survived = catch_unwind(AssertUnwindSafe(|| act(&mut table, state))).is_ok();
        drop(table);
        let (recovered, open) = Table::recover(mortal.words.clone(), OwnedCounts::new(&PAGES)).unwrap();
        judge(&model, &recovered, &open);
        if survived {
            return accesses;
        }
    }
    unreachable!("an operation ends")
}

fn fill(table: &mut Doomed<'_>, model: &mut Model, connection: &Connection, references: u32) {
    for page in 0..references {
        let place = Place::page(0, page);
        let token = table.take(connection, place).unwrap();
        model.take(connection.index(), token, place);
    }
}

fn held(table: &Table<OwnedCounts, Words>, open: &[Connection]) -> Model {
    let mut held = Model::default();
    for connection in open {
        for (token, place) in table.held(connection) {
            held.take(connection.index(), token, place);
        }
    }
    held.assert_matches(table, open, &PAGES);
    held
}

#[test]
fn a_take_that_is_killed_has_happened_or_not() {
    // With 64 references out, the take needs a second chunk and a directory.
    for references in if cfg!(miri) { &[64][..] } else { &[0, 1, 63, 64, 128] } {
        let steps = killed_at_every_access(
            |table, model| {
                let connection = table.open(150).unwrap();
                fill(table, model, &connection, *references);
                connection
            },
            |table, connection| {
                table.take(&connection, Place::page(0, 299)).unwrap();
            },
            |before, table, open| {
                let mut now = held(table, open);
                now.held.retain(|_, place| place.page != 299);
                assert_eq!(&now, before);
            },
        );
        assert!(steps > 0 || cfg!(miri));
    }
}

#[test]
fn a_batch_that_is_killed_leaves_each_reference_out_or_back() {
    let steps = killed_at_every_access(
        |table, model| {
            let connection = table.open(150).unwrap();
            fill(table, model, &connection, 100);
            let start = model.of(connection.index())[0].0;
            (connection, TokenRange { start, count: 64 })
        },
        |table, (connection, range)| {
            assert_eq!(table.give_batch(&connection, &[range], |_, _| {}).unwrap().references, 64);
        },
        |before, table, open| {
            let now = held(table, open);
            let back = before.held.len() - now.held.len();
            assert!(back <= 64);
            // Returns are done in order, so a prefix of them has come back.
            let expected = before.held.iter().skip(back).map(|(&key, &place)| (key, place)).collect();
            assert_eq!(now, Model { held: expected });
        },
    );
    assert!(steps >= 64 || cfg!(miri), "{steps} accesses for 64 slots");
}

#[test]
fn a_close_that_is_killed_can_be_finished_by_the_next_owner() {
    killed_at_every_access(
        |table, model| {
            let (stays, goes) = (table.open(150).unwrap(), table.open(150).unwrap());
            fill(table, model, &stays, 10);
            fill(table, model, &goes, 70);
            (stays, goes)
        },
        |table, (_stays, goes)| {
            assert_eq!(table.close(goes, |_, _| {}), 70);
        },
        |before, table, open| {
            let now = held(table, open);
            assert!(now.held.iter().all(|(key, place)| before.held.get(key) == Some(place)));
            assert_eq!(now.of(0), before.of(0));
            assert!(open.len() == 2 || now.of(1).is_empty());
        },
    );
}

#[test]
fn a_token_from_before_the_crash_is_valid_and_no_token_after_it_repeats_one() {
    let image = words(GEOMETRY);
    let mut table = Table::create(image.clone(), GEOMETRY, NoCounts).unwrap();
    let mut connection = table.open(64).unwrap();
    let kept = table.take(&connection, Place::page(0, 9)).unwrap();
    let mut seen = std::collections::HashSet::from([kept]);
    for _ in 0..5 {
        for page in 0..100 {
            let token = table.take(&connection, Place::page(0, page)).unwrap();
            assert!(seen.insert(token), "{token:?} came twice");
            table.give(&connection, token).unwrap();
        }
        let (again, mut open) = Table::recover(image.clone(), NoCounts).unwrap();
        table = again;
        connection = open.pop().unwrap();
        assert!(open.is_empty());
    }
    assert_eq!(table.give(&connection, kept).unwrap().place, Place::page(0, 9));
}

#[test]
fn memory_that_is_no_image_is_refused() {
    let image = words(GEOMETRY);
    let recover =
        |image: &Words| Table::recover(image.clone(), OwnedCounts::new(&PAGES)).map(drop).unwrap_err();
    assert_eq!(recover(&image), ImageError::NotAnImage { magic: 0, version: 0 });
    assert_eq!(recover(&Words::from([])), ImageError::NotAnImage { magic: 0, version: 0 });
    let mut table = Table::create(image.clone(), GEOMETRY, OwnedCounts::new(&PAGES)).unwrap();
    let connection = table.open(10).unwrap();
    table.take(&connection, Place::page(0, 0)).unwrap();
    let header: Words = image[..8].iter().map(|word| AtomicU64::new(word.load(Ordering::Relaxed))).collect();
    assert!(matches!(recover(&header), ImageError::TooShort { found: 8, .. }));
    image[1].store(2, Ordering::Relaxed);
    assert_eq!(
        recover(&image),
        ImageError::NotAnImage { magic: u64::from_le_bytes(*b"weirleas"), version: 2 }
    );
}

#[test]
fn an_image_with_any_word_spoilt_is_refused_or_recovered_but_never_panics() {
    let image = words(GEOMETRY);
    let mut table = Table::create(image.clone(), GEOMETRY, OwnedCounts::new(&PAGES)).unwrap();
    let connection = table.open(150).unwrap();
    for page in 0..70 {
        table.take(&connection, Place::page(0, page)).unwrap();
    }
    drop(table);
    let intact: Vec<u64> = image.iter().map(|word| word.load(Ordering::Relaxed)).collect();
    let mut refused = 0;
    // Miri is a thousand times slower.
    for at in (0..image.len()).step_by(if cfg!(miri) { 97 } else { 1 }) {
        for value in [0, 1, u64::MAX, 1 << 63, 1 << 63 | 1 << 32, 1 << 63 | 2 << 32 | 1] {
            // A recovery detaches empty chunks and begins a lap, so restore all words.
            for (word, &value) in image.iter().zip(&intact) {
                word.store(value, Ordering::Relaxed);
            }
            image[at].store(value, Ordering::Relaxed);
            match Table::recover(image.clone(), OwnedCounts::new(&PAGES)) {
                Ok((mut table, open)) => {
                    for connection in open {
                        table.close(connection, |_, _| {});
                    }
                }
                Err(error) => {
                    refused += 1;
                    assert!(error.to_string().contains("make a new table") || at < 8, "word {at}: {error}");
                }
            }
        }
    }
    assert!(refused > if cfg!(miri) { 0 } else { 10 }, "{refused}");
}
