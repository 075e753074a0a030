//! The limits of the table, and its refusals.

use weir_lease::{
    BatchError, Geometry, ImageError, NoCounts, OpenError, OwnedCounts, Place, REGION_PAGES_MAX, Refusal,
    Refusals, Table, TakeError, Token, TokenRange,
};

const SMALL: Geometry = Geometry { connections: 2, references: 256, quota: 128 };

#[test]
fn every_page_of_256_regions_of_141_gb_can_be_lent() {
    const PAGES: u32 = (141_000_000_000u64 / 4096) as u32;
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    let connection = table.open(4).unwrap();
    for region in 0..=255 {
        for page in [0, PAGES - 1, REGION_PAGES_MAX - 1] {
            let place = Place { region, page, fragment: 63 };
            let token = table.take(&connection, place).unwrap();
            assert_eq!(table.give(&connection, token).map(|given| given.place), Ok(place));
        }
        let beyond = Place::page(region, REGION_PAGES_MAX);
        assert_eq!(table.take(&connection, beyond), Err(TakeError::Place(beyond)));
    }
}

#[test]
fn a_page_may_be_out_more_often_than_there_are_pages() {
    // Miri is a thousand times slower.
    let many = if cfg!(miri) { 4 } else { 100 };
    let geometry = Geometry { connections: many, references: many * 64, quota: 64 };
    let mut table = Table::new(geometry, OwnedCounts::new(&[1])).unwrap();
    let mut connections = Vec::new();
    for _ in 0..many {
        let connection = table.open(64).unwrap();
        for fragment in 0..64 {
            table.take(&connection, Place { region: 0, page: 0, fragment }).unwrap();
        }
        connections.push(connection);
    }
    assert_eq!(table.counts().of(Place::page(0, 0)), Some(u64::from(many) * 64));
    let mut lasts = 0;
    for connection in connections {
        assert_eq!(table.close(connection, |_, last| lasts += u32::from(last)), 64);
    }
    assert_eq!(lasts, 1);
}

#[test]
fn tokens_in_order_are_one_apart_lap_after_lap() {
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    let connection = table.open(64).unwrap();
    for lap in 0..3 {
        let start = table.take(&connection, Place::page(0, 0)).unwrap();
        for next in 1..64 {
            assert_eq!(table.take(&connection, Place::page(0, next)), Ok(Token(start.0 + next)), "lap {lap}");
        }
        let all = TokenRange { start, count: 64 };
        assert_eq!(table.give_batch(&connection, &[all], |_, _| {}).unwrap().references, 64);
    }
}

#[test]
fn a_batch_has_the_kernels_limits_and_a_refused_one_changes_nothing() {
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    let connection = table.open(128).unwrap();
    let token = table.take(&connection, Place::page(0, 0)).unwrap();
    let mut ranges = vec![TokenRange::from(token); 129];
    let mut give = |ranges: &[TokenRange]| table.give_batch(&connection, ranges, |_, _| {});
    assert_eq!(give(&ranges), Err(BatchError::Tokens(129)));
    ranges.truncate(128);
    ranges[1].count = 1024 - 126;
    assert_eq!(give(&ranges), Err(BatchError::References(1025)));
    ranges[1].count = u32::MAX;
    ranges[2].count = u32::MAX;
    assert!(matches!(give(&ranges), Err(BatchError::References(_))));
    ranges.truncate(1);
    ranges[0].count = 1024;
    let returned = give(&ranges).unwrap();
    assert_eq!((returned.references, returned.refused), (1, 1023));
    assert_eq!(table.refusals().total(), 1023);
}

#[test]
fn a_token_is_refused_for_the_right_reason_and_counted() {
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    let (holder, other) = (table.open(128).unwrap(), table.open(128).unwrap());
    let held = table.take(&holder, Place::page(0, 1)).unwrap();
    let token = table.take(&holder, Place::page(0, 2)).unwrap();
    assert_eq!(table.give(&other, token), Err(Refusal::Unknown), "the other has no slots at all");
    table.give(&holder, token).unwrap();
    assert_eq!(table.give(&holder, token), Err(Refusal::Repeated));
    // After one lap of the slots, the same slot is out under another token.
    for page in 0..64 {
        let token = table.take(&holder, Place::page(0, page)).unwrap();
        table.give(&holder, token).unwrap();
    }
    assert_eq!(table.give(&holder, token), Err(Refusal::Stale));
    assert_eq!(table.refusals(), Refusals { repeated: 1, stale: 1, unknown: 1 });
    assert_eq!(table.give(&holder, held).map(|given| given.place), Ok(Place::page(0, 1)));
}

#[test]
fn tokens_of_a_closed_connection_are_not_valid_for_the_next_of_its_number() {
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    let first = table.open(64).unwrap();
    let number = first.index();
    let old: Vec<_> = (0..64).map(|page| table.take(&first, Place::page(0, page)).unwrap()).collect();
    table.close(first, |_, _| {});
    let second = table.open(64).unwrap();
    assert_eq!(second.index(), number);
    for page in 0..64 {
        table.take(&second, Place::page(0, page)).unwrap();
    }
    for token in old {
        assert!(table.give(&second, token).is_err());
    }
    assert_eq!(table.outstanding(&second), 64);
}

#[test]
fn a_connection_that_returned_everything_keeps_no_slots_from_others() {
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    let (first, second) = (table.open(128).unwrap(), table.open(128).unwrap());
    for connection in [&first, &second, &first, &second] {
        let tokens: Vec<_> =
            (0..128).map(|page| table.take(connection, Place::page(0, page)).unwrap()).collect();
        let quota = table.take(connection, Place::page(0, 0));
        assert_eq!(quota, Err(TakeError::Quota { quota: 128 }));
        for token in tokens {
            table.give(connection, token).unwrap();
        }
    }
    assert!(Table::<NoCounts>::bytes_per_idle_connection() <= 64);
}

#[test]
fn a_geometry_or_quota_out_of_range_is_refused() {
    for geometry in [
        Geometry { connections: 0, ..SMALL },
        Geometry { connections: (1 << 24) + 1, ..SMALL },
        Geometry { references: 0, ..SMALL },
        Geometry { quota: 0, ..SMALL },
        Geometry { quota: 4097, ..SMALL },
    ] {
        assert_eq!(Table::new(geometry, NoCounts).map(drop), Err(ImageError::Geometry(geometry)));
    }
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    assert_eq!(table.open(129), Err(OpenError::Quota { asked: 129, limit: 128 }));
    let _both = (table.open(1).unwrap(), table.open(1).unwrap());
    assert_eq!(table.open(1), Err(OpenError::Full { connections: 2 }));
}

#[test]
fn a_foreign_handle_is_an_error_and_not_a_panic() {
    let mut large = Table::new(Geometry { connections: 100, ..SMALL }, NoCounts).unwrap();
    let handles: Vec<_> = (0..100).map(|_| large.open(1).unwrap()).collect();
    let mut table = Table::new(SMALL, NoCounts).unwrap();
    for handle in handles {
        assert_eq!(table.take(&handle, Place::page(0, 0)), Err(TakeError::NotOpen));
        assert_eq!(table.give(&handle, Token(0)), Err(Refusal::Unknown));
        assert_eq!((table.place(&handle, Token(0)), table.held(&handle).count()), (None, 0));
        assert_eq!(table.close(handle, |_, _| {}), 0);
    }
}
