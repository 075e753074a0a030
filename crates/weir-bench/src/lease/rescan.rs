//! Measures how long it takes to rebuild a table from the memory that a dead owner left.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Instant;

use weir_lease::{Geometry, OwnedCounts, Place, Table};

use super::Plan;
use crate::report::{Goal, Report, Row, Runs};

/// Adds the row `rescan`. It is measured with the plan's largest number of connections, each of
/// which holds all its references.
pub fn row(report: &mut Report, plan: &Plan) {
    let connections = plan.connections.iter().copied().max().unwrap_or(1);
    let pages = (plan.region / 4096) as u32;
    let references = connections * plan.outstanding.next_multiple_of(64);
    let geometry = Geometry { connections, references, quota: plan.outstanding };
    let image: Arc<[AtomicU64]> = (0..geometry.image_words()).map(|_| AtomicU64::new(0)).collect();
    let mut table =
        Table::create(image.clone(), geometry, OwnedCounts::new(&[pages])).expect("the plan was checked");
    let mut page = 0u32;
    for _ in 0..connections {
        let connection = table.open(plan.outstanding).expect("there is one for each");
        for _ in 0..plan.outstanding {
            // Each step multiplies and adds modulo the number of pages. So the steps visit every
            // page once before any page twice, in random order.
            page = (page.wrapping_mul(5).wrapping_add(0x3c6e_f35f)) % pages;
            table.take(&connection, Place::page(0, page)).expect("the quota is what is outstanding");
        }
    }
    drop(table);
    let times: Runs = (0..plan.rounds)
        .map(|_| {
            let counts = OwnedCounts::new(&[pages]);
            let start = Instant::now();
            let (table, open) = Table::recover(image.clone(), counts).expect("the image is whole");
            let elapsed = start.elapsed();
            assert_eq!((open.len(), table.connections()), (connections as usize, connections));
            elapsed.as_secs_f64() * 1e3
        })
        .collect();
    let row = Row::lower("rescan", format!("ms_{connections}x{}", plan.outstanding), times.median());
    report.rows.push(if connections == 10_000 { row.goal(Goal::Value(10.0)) } else { row });
}
