//! The conformance suite: the duties of every store, as tests that one line runs for any store.
//!
//! ```
//! use weir_store::open;
//!
//! weir_store::conformance!(host: open(&"host:1MiB".parse().unwrap()).unwrap());
//! # fn main() {}
//! ```
//!
//! This call of the macro expands to a module `host` with a test for each claim below. Each test
//! evaluates the expression once, which must give a fresh `Arc<dyn Store>` that injects no faults.
//! The largest test is a property: any order of operations on several lanes agrees with a model. It
//! runs 64 cases (`PROPTEST_CASES` sets another number), and stores the seeds of failures beside
//! the test that found them.

mod claims;
mod content;
mod harness;
mod history;
mod interleaving;
mod shelf;

pub use claims::{
    a_lane_has_room_for_its_depth, a_lane_may_be_dropped_with_operations_in_flight,
    a_lane_may_move_to_another_thread, a_released_chunk_faults_and_comes_back_empty,
    a_run_is_one_operation_and_comes_back_in_order, a_slot_outside_the_store_is_a_fault,
    pages_written_past_the_caches_are_there_once_settled,
    threads_with_lanes_of_their_own_do_not_disturb_one_another,
    waiting_on_the_wake_fd_finds_every_completion,
};
pub use content::content;
pub use history::{Chance, History, Race, Write, repeated};
pub use interleaving::any_interleaving_agrees_with_the_model;
pub use shelf::Shelf;

/// Runs the conformance suite for a store: `conformance!(name: expression)`, where the expression
/// gives an `Arc<dyn Store>`.
#[macro_export]
macro_rules! conformance {
    ($name:ident: $open:expr) => {
        mod $name {
            use super::*;
            $crate::conformance!(@claims $open;
                a_lane_has_room_for_its_depth,
                a_lane_may_be_dropped_with_operations_in_flight,
                a_lane_may_move_to_another_thread,
                a_released_chunk_faults_and_comes_back_empty,
                a_run_is_one_operation_and_comes_back_in_order,
                a_slot_outside_the_store_is_a_fault,
                pages_written_past_the_caches_are_there_once_settled,
                threads_with_lanes_of_their_own_do_not_disturb_one_another,
                waiting_on_the_wake_fd_finds_every_completion,
            );

            #[test]
            fn any_interleaving_agrees_with_the_model() {
                $crate::conformance::any_interleaving_agrees_with_the_model(&*$open, file!());
            }
        }
    };
    (@claims $open:expr; $($claim:ident,)+) => {
        $(
            #[test]
            fn $claim() {
                $crate::conformance::$claim(&*$open);
            }
        )+
    };
}
