//! The numbers that make a history, a list for each step. A failing history is cut by its lists.

use weir_store::conformance::Chance;

/// Largest number of histories that are played to cut one.
const TRIES: u32 = 4000;

pub type Lists = Vec<Vec<u32>>;

/// Numbers drawn from a seed, or from lists. After a list's end each number is 0.
#[derive(Debug)]
pub struct Draws {
    chance: Chance,
    lists: Option<Lists>,
    /// The numbers drawn so far, of 31 bits each. The first list is for the settings.
    pub drawn: Lists,
    has_ended: bool,
}

impl Draws {
    pub fn of_seed(seed: u64) -> Self {
        Draws { chance: Chance(seed ^ 0x5ee_d0f5), lists: None, drawn: vec![Vec::new()], has_ended: false }
    }

    pub fn of(lists: Lists) -> Self {
        Draws { lists: Some(lists), ..Draws::of_seed(0) }
    }

    /// The next number, less than `below`. A smaller number of the list never gives a larger one.
    pub fn below(&mut self, below: u32) -> u32 {
        if self.has_ended {
            return 0;
        }
        let step = self.drawn.len() - 1;
        let bits = match &self.lists {
            Some(lists) => {
                lists.get(step).and_then(|list| list.get(self.drawn[step].len())).copied().unwrap_or(0)
            }
            None => self.chance.below(1 << 31) as u32,
        };
        self.drawn[step].push(bits);
        ((u64::from(bits) * u64::from(below)) >> 31) as u32
    }

    /// Begins another step. Returns whether there is one, if the numbers come from lists.
    pub fn step(&mut self) -> bool {
        self.drawn.push(Vec::new());
        self.lists.as_ref().is_none_or(|lists| self.drawn.len() <= lists.len())
    }

    /// All numbers from here on are 0.
    pub fn end(&mut self) {
        self.has_ended = true;
    }
}

/// Cuts a history for which `fails` is true, while it stays true. Steps are left out, halves first.
/// Then single numbers are set to 0.
pub fn shrink(mut lists: Lists, mut fails: impl FnMut(&Lists) -> bool) -> Lists {
    let mut tries = 0;
    let mut may = |lists: &Lists| {
        tries += 1;
        tries <= TRIES && fails(lists)
    };
    let mut part = lists.len().div_ceil(2);
    while part > 0 {
        let mut at = 1;
        while at < lists.len() {
            let mut cut = lists.clone();
            cut.drain(at..(at + part).min(lists.len()));
            if may(&cut) {
                lists = cut;
            } else {
                at += part;
            }
        }
        part /= 2;
    }
    for step in 0..lists.len() {
        for at in 0..lists[step].len() {
            let was = std::mem::take(&mut lists[step][at]);
            if was > 0 && !may(&lists) {
                lists[step][at] = was;
            }
        }
        while lists[step].last() == Some(&0) {
            lists[step].pop();
        }
    }
    lists
}

#[test]
fn a_failing_history_is_cut_to_what_makes_it_fail() {
    let lists: Lists = (0..1000).map(|number| vec![number, 1]).collect();
    // It fails if 700 comes somewhere behind a number of at least 300.
    let fails = |lists: &Lists| {
        let at = lists.iter().position(|list| list.first() == Some(&700));
        at.is_some_and(|at| lists[..at].iter().any(|list| list.first() >= Some(&300)))
    };
    let cut = shrink(lists, fails);
    assert!(cut.len() == 3 && cut[0].is_empty() && cut[1][0] >= 300 && cut[2] == [700], "{cut:?}");
}
