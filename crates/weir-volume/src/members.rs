//! The members of a store: on which of them each extent lies, and the effects of that member's
//! state.

use crate::Tier;
use crate::records::EXTENT_SLOTS;
use weir_core::Slot;
use weir_store::{State, Store};

/// The member of each extent of a store.
#[derive(Debug)]
pub(crate) struct Members {
    count: u32,
    /// The member of each extent; empty if the store has one member.
    of_extent: Box<[u32]>,
}

/// Stands in place of a member, for an extent that lies on several members. Such an extent has the
/// state of the store's worst member.
const SEVERAL: u32 = u32::MAX;

impl Members {
    pub fn of(store: &dyn Store) -> Self {
        let count = store.members();
        if count == 1 {
            return Members { count, of_extent: Box::default() };
        }
        let slots = store.slots();
        let of_extent = |first: u32| {
            let end = first.saturating_add(EXTENT_SLOTS).min(slots);
            let member = store.member(Slot(first));
            let is_alone = (first..end).all(|slot| store.member(Slot(slot)) == member);
            if is_alone { member } else { SEVERAL }
        };
        Members { count, of_extent: (0..slots).step_by(EXTENT_SLOTS as usize).map(of_extent).collect() }
    }
}

impl Tier {
    /// The state of each member.
    fn states(&self) -> impl Iterator<Item = State> {
        (0..self.members.count).map(|member| self.store.state(member))
    }

    /// The state of the store's worst member.
    pub fn worst_state(&self) -> State {
        self.states().max().unwrap_or(State::Lost)
    }

    /// Whether some member is in `state`.
    #[inline]
    pub fn has_member(&self, state: State) -> bool {
        self.states().any(|it| it == state)
    }

    /// Whether every member is lost.
    pub fn is_lost(&self) -> bool {
        self.states().all(|state| state == State::Lost)
    }

    /// Whether an extent lies on a member in `state`. If the store has one member, the caller has
    /// checked the state with [`has_member`](Tier::has_member).
    #[inline]
    pub fn lies_on(&self, extent: u32, state: State) -> bool {
        self.members.of_extent.is_empty() || self.state_of(extent) == state
    }

    fn state_of(&self, extent: u32) -> State {
        match self.members.of_extent.get(extent as usize) {
            Some(&SEVERAL) => self.worst_state(),
            Some(&member) => self.store.state(member),
            None => self.store.state(0),
        }
    }

    /// Number of slots that the store offers: those in open extents whose members are not lost. An
    /// extent is open unless its chunk is given back or being emptied.
    pub fn open_slots(&self) -> u32 {
        self.records.open_slots(|extent| self.state_of(extent) != State::Lost)
    }

    /// Number of free slots in open extents whose members are online.
    pub fn free_online(&self) -> u32 {
        self.records.open_free(|extent| self.state_of(extent) == State::Online)
    }
}
