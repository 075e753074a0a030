//! The loans of the share server, in one token table. Loans of frames are counted here. Loans of
//! stores' slots are counted by the volume's [`Lender`].

use weir_core::Slot;
use weir_lease::{OwnedCounts, PageCounts, Place};
use weir_volume::Lender;

/// The region of the token table that stands for frames. The regions of windows come after it.
pub(super) const FRAMES: u8 = 0;

pub(super) struct Loans {
    frames: OwnedCounts,
    pub lender: Option<Lender>,
    /// For each window, the index of its store.
    stores: Vec<usize>,
}

impl Loans {
    pub fn new(frames: u32, lender: Option<Lender>, stores: Vec<usize>) -> Self {
        Loans { frames: OwnedCounts::new(&[frames]), lender, stores }
    }

    /// The region of the token table that stands for the window of a store. That store must have a
    /// window.
    #[inline]
    pub fn window(&self, store: usize) -> u8 {
        let window =
            self.stores.iter().position(|&at| at == store).expect("only stores with windows are lent of");
        window as u8 + 1
    }

    /// Takes back a slot that the lender lent for a client, but that the client did not get.
    pub fn never_lent(&mut self, place: Place) {
        self.give(place);
    }
}

impl PageCounts for Loans {
    #[inline]
    fn take(&mut self, place: Place) -> bool {
        // The lender counts its own loans, so only frames are counted here.
        place.region != FRAMES || self.frames.take(place)
    }

    #[inline]
    fn give(&mut self, place: Place) -> bool {
        match (place.region, &mut self.lender) {
            (FRAMES, _) => self.frames.give(place),
            (window, Some(lender)) => lender.give(self.stores[usize::from(window) - 1], Slot(place.page)),
            (_, None) => false,
        }
    }
}
