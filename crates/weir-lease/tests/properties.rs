//! Random histories: after each step the table is compared with a model that is a map.

mod model;

use std::collections::HashSet;

use model::{Model, words};
use proptest::prelude::*;
use weir_lease::{Connection, Geometry, OpenError, OwnedCounts, Place, Table, TakeError, Token, TokenRange};

const PAGES: [u32; 2] = [5, 3];

#[derive(Clone, Debug)]
enum Step {
    Open(u32),
    Close(usize),
    Take(usize, u8, u32, u8),
    /// Takes many references at once, so that connections grow past a chunk.
    TakeMany(usize, u32),
    /// Returns the n-th token held by that connection.
    Give(usize, usize),
    GiveRange(usize, usize, u32),
    /// Returns a token of another connection, an old one, or any number.
    GiveOthers(usize, usize),
    GiveOld(usize, usize),
    GiveAny(usize, u32),
    Recover,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let at = 0usize..100;
    let step = prop_oneof![
        2 => (0u32..260).prop_map(Step::Open),
        1 => at.clone().prop_map(Step::Close),
        12 => (at.clone(), 0u8..3, 0u32..6, 0u8..66).prop_map(|(c, r, p, f)| Step::Take(c, r, p, f)),
        3 => (at.clone(), 1u32..if cfg!(miri) { 70 } else { 150 }).prop_map(|(c, n)| Step::TakeMany(c, n)),
        8 => (at.clone(), at.clone()).prop_map(|(c, n)| Step::Give(c, n)),
        4 => (at.clone(), at.clone(), 0u32..100).prop_map(|(c, n, count)| Step::GiveRange(c, n, count)),
        2 => (at.clone(), at.clone()).prop_map(|(c, n)| Step::GiveOthers(c, n)),
        2 => (at.clone(), at.clone()).prop_map(|(c, n)| Step::GiveOld(c, n)),
        1 => (at, any::<u32>()).prop_map(|(c, n)| Step::GiveAny(c, n)),
        1 => Just(Step::Recover),
    ];
    prop::collection::vec(step, 0..if cfg!(miri) { 16 } else { 200 })
}

/// Number of cases in a test: Miri is a thousand times slower.
fn cases() -> ProptestConfig {
    ProptestConfig {
        cases: if cfg!(miri) { 2 } else { 512 },
        failure_persistence: None,
        ..ProptestConfig::default()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_table_does_what_a_map_would(steps in steps()) {
        let geometry = Geometry { connections: 4, references: 6 * 64, quota: 200 };
        let image = words(geometry);
        let mut table = Table::create(image.clone(), geometry, OwnedCounts::new(&PAGES)).unwrap();
        let mut open: Vec<Connection> = Vec::new();
        let mut model = Model::default();
        let mut old = vec![Token(0)];
        let mut refused = 0;
        for step in steps {
            let pick = |n: usize| if open.is_empty() { None } else { Some(n % open.len()) };
            match step {
                Step::Open(quota) => match table.open(quota) {
                    Ok(connection) => {
                        prop_assert!((1..=200).contains(&quota) && open.len() < 4);
                        open.push(connection);
                    }
                    Err(OpenError::Quota { .. }) => prop_assert!(quota == 0 || quota > 200),
                    Err(OpenError::Full { .. }) => prop_assert_eq!(open.len(), 4),
                },
                Step::Close(n) => {
                    let Some(n) = pick(n) else { continue };
                    let connection = open.swap_remove(n);
                    let index = connection.index();
                    let mut returned = Vec::new();
                    let mut lasts = Vec::new();
                    let count = table.close(connection, |place, last| {
                        returned.push(place);
                        if last {
                            lasts.push((place.region, place.page));
                        }
                    });
                    let mut expected = Vec::new();
                    let mut expected_lasts = Vec::new();
                    for (token, _) in model.of(index) {
                        let given = model.give(index, token).unwrap();
                        expected.push(given.place);
                        if given.last {
                            expected_lasts.push((given.place.region, given.place.page));
                        }
                        old.push(token);
                    }
                    for list in [&mut returned, &mut expected] {
                        list.sort();
                    }
                    for list in [&mut lasts, &mut expected_lasts] {
                        list.sort_unstable();
                    }
                    prop_assert_eq!(count as usize, expected.len());
                    prop_assert_eq!(returned, expected);
                    prop_assert_eq!(lasts, expected_lasts);
                }
                Step::Take(n, region, page, fragment) => {
                    let Some(n) = pick(n) else { continue };
                    let place = Place { region, page, fragment };
                    let there = fragment < 64 && PAGES.get(usize::from(region)).is_some_and(|&pages| page < pages);
                    match table.take(&open[n], place) {
                        Ok(token) => {
                            prop_assert!(there);
                            model.take(open[n].index(), token, place);
                            prop_assert_eq!(table.place(&open[n], token), Some(place));
                        }
                        Err(TakeError::Place(bad)) => prop_assert!(bad == place && !there),
                        Err(TakeError::Quota { quota }) => {
                            prop_assert_eq!(model.of(open[n].index()).len(), quota as usize);
                        }
                        // Slots are given to connections 64 at a time: many chunks are partly used.
                        Err(TakeError::Exhausted) => {
                            let chunks: HashSet<_> =
                                model.held.keys().map(|(owner, token)| (*owner, token.0 % 4096 / 64)).collect();
                            prop_assert_eq!(chunks.len(), 6);
                        }
                        Err(other) => prop_assert!(false, "{}", other),
                    }
                }
                Step::TakeMany(n, count) => {
                    let Some(n) = pick(n) else { continue };
                    for i in 0..count {
                        let place = Place { region: 0, page: i % PAGES[0], fragment: (i % 64) as u8 };
                        let Ok(token) = table.take(&open[n], place) else { break };
                        model.take(open[n].index(), token, place);
                    }
                }
                Step::Give(n, at) => {
                    let Some(n) = pick(n) else { continue };
                    let held = model.of(open[n].index());
                    let Some(&(token, _)) = held.get(at % held.len().max(1)) else { continue };
                    prop_assert_eq!(table.give(&open[n], token).ok(), model.give(open[n].index(), token));
                    old.push(token);
                }
                Step::GiveRange(n, at, count) => {
                    let Some(n) = pick(n) else { continue };
                    let held = model.of(open[n].index());
                    let Some(&(start, _)) = held.get(at % held.len().max(1)) else { continue };
                    let mut heard = Vec::new();
                    let range = TokenRange { start, count };
                    let returned = table.give_batch(&open[n], &[range], |place, last| heard.push((place, last))).unwrap();
                    let expected: Vec<_> = (0..count)
                        .filter_map(|i| model.give(open[n].index(), Token(start.0.wrapping_add(i))))
                        .map(|given| (given.place, given.last))
                        .collect();
                    prop_assert_eq!(returned.references + returned.refused, count);
                    prop_assert_eq!(&heard, &expected);
                    refused += u64::from(returned.refused);
                }
                Step::GiveOthers(n, at) => {
                    let Some(n) = pick(n) else { continue };
                    let Some(token) = model.held.keys().map(|key| key.1).nth(at % model.held.len().max(1)) else { continue };
                    let given = table.give(&open[n], token).ok();
                    refused += u64::from(given.is_none());
                    prop_assert_eq!(given, model.give(open[n].index(), token));
                }
                Step::GiveOld(n, at) => {
                    let Some(n) = pick(n) else { continue };
                    let token = old[at % old.len()];
                    let given = table.give(&open[n], token).ok();
                    refused += u64::from(given.is_none());
                    prop_assert_eq!(given, model.give(open[n].index(), token));
                }
                Step::GiveAny(n, value) => {
                    let Some(n) = pick(n) else { continue };
                    let given = table.give(&open[n], Token(value)).ok();
                    refused += u64::from(given.is_none());
                    prop_assert_eq!(given, model.give(open[n].index(), Token(value)));
                }
                Step::Recover => {
                    prop_assert_eq!(table.refusals().total(), refused);
                    refused = 0;
                    let indices: Vec<_> = open.iter().map(Connection::index).collect();
                    let recovered = Table::recover(image.clone(), OwnedCounts::new(&PAGES)).unwrap();
                    table = recovered.0;
                    let mut handles = recovered.1;
                    prop_assert!(handles.is_sorted_by_key(Connection::index));
                    open.clear();
                    for index in indices {
                        let at = handles.iter().position(|handle| handle.index() == index).unwrap();
                        open.push(handles.swap_remove(at));
                    }
                    prop_assert!(handles.is_empty());
                }
            }
            model.assert_matches(&table, &open, &PAGES);
        }
        prop_assert_eq!(table.refusals().total(), refused);
    }
}
