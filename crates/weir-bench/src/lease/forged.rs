//! Tests the table with tokens that a connection does not hold, hundreds of millions of them.

use std::collections::HashSet;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::Instant;

use weir_lease::{Geometry, OwnedCounts, Place, Table, Token};

use super::Plan;
use crate::report::{Goal, Report, Row};

/// A hasher of tokens with one multiplication: each trial looks a token up in the set of held ones.
#[derive(Default)]
struct Spread(u64);

impl Hasher for Spread {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u32(u32::from(byte));
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = (self.0 ^ u64::from(value)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(23);
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Held = HashSet<Token, BuildHasherDefault<Spread>>;

const CONNECTIONS: usize = 64;
const QUOTA: u32 = 192;
const PAGES: u32 = 4096;

/// One connection's client: the tokens that it holds, and those that it once held.
struct Client {
    handle: weir_lease::Connection,
    held: Held,
    order: Vec<Token>,
    returned: Vec<Token>,
}

/// The outcome of the trials.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    pub trials: u64,
    pub accepted: u64,
    pub lost: u64,
    pub seconds: f64,
}

/// Presents `trials` tokens that the presenting connection does not hold, between takes and returns
/// of real ones. Some are random numbers, and some are held tokens with one bit changed. Others
/// were returned just now or long ago, or another connection holds them. At the end every real
/// token must still come back, once.
pub fn attack(trials: u64, seed: u64) -> Outcome {
    let geometry =
        Geometry { connections: CONNECTIONS as u32, references: CONNECTIONS as u32 * 256, quota: QUOTA };
    let mut table = Table::new(geometry, OwnedCounts::new(&[PAGES])).expect("a fixed geometry");
    let mut clients: Vec<_> = (0..CONNECTIONS)
        .map(|_| Client {
            handle: table.open(QUOTA).expect("there is one for each"),
            held: Held::default(),
            order: Vec::new(),
            returned: vec![Token(0)],
        })
        .collect();
    let mut random = seed.wrapping_mul(2).wrapping_add(1);
    let mut next = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        random
    };
    let mut outcome = Outcome::default();
    let start = Instant::now();
    while outcome.trials < trials {
        let dice = next();
        let who = (dice >> 8) as usize % CONNECTIONS;
        let other = (dice >> 16) as usize % CONNECTIONS;
        let pick = (dice >> 24) as usize;
        let token = match dice % 8 {
            0 => {
                // Take a reference, which brings a real token. Of three such trials, one also
                // returns a token that the client holds.
                let client = &mut clients[who];
                if let Ok(token) = table.take(&client.handle, Place::page(0, pick as u32 % PAGES)) {
                    assert!(client.held.insert(token), "{token:?} was given out twice");
                    client.order.push(token);
                }
                if !pick.is_multiple_of(3) {
                    continue;
                }
                let at = pick % client.order.len().max(1);
                if client.order.len() <= at {
                    continue;
                }
                let token = client.order.swap_remove(at);
                client.held.remove(&token);
                outcome.lost += u64::from(table.give(&client.handle, token).is_err());
                if client.returned.len() < 4096 {
                    client.returned.push(token);
                } else {
                    client.returned[pick % 4096] = token;
                }
                // This token was given back just above. Give it back a second time.
                token
            }
            1 => Token(next() as u32),
            2 | 3 => {
                let order = &clients[who].order;
                let Some(near) = order.get(pick % order.len().max(1)) else { continue };
                Token(near.0 ^ 1 << (next() % 32))
            }
            4 | 5 => {
                let returned = &clients[who].returned;
                returned[pick % returned.len()]
            }
            _ => {
                let order = &clients[other].order;
                let Some(&token) = order.get(pick % order.len().max(1)) else { continue };
                token
            }
        };
        if clients[who].held.contains(&token) {
            continue;
        }
        outcome.trials += 1;
        outcome.accepted += u64::from(table.give(&clients[who].handle, token).is_ok());
    }
    outcome.seconds = start.elapsed().as_secs_f64();
    for client in clients {
        for token in client.order {
            outcome.lost += u64::from(table.give(&client.handle, token).is_err());
        }
        outcome.lost += u64::from(table.close(client.handle, |_, _| {}));
    }
    outcome
}

/// Adds the rows `forged`: the tokens that were tried, those accepted, and the real tokens lost.
pub fn rows(report: &mut Report, plan: &Plan) {
    let outcome = attack(plan.trials, plan.seed);
    report.rows.push(Row::higher("forged", "trials", outcome.trials as f64));
    report.rows.push(Row::lower("forged", "accepted", outcome.accepted as f64).goal(Goal::Value(0.0)));
    report.rows.push(Row::lower("forged", "real_tokens_lost", outcome.lost as f64).goal(Goal::Value(0.0)));
    report.rows.push(Row::lower("forged", "ns_per_trial", outcome.seconds * 1e9 / outcome.trials as f64));
}
