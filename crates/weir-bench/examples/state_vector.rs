//! A quantum simulator: a state vector of 2^QUBITS amplitudes, and a seeded circuit. It knows
//! nothing of Weir. `benchmarks/state-vector` runs it with less memory than it takes.
//!
//! It checks itself: after the circuit it applies the inverse circuit, and each amplitude must be
//! what it was at the start. Its digest of the state between the two has the same value for any
//! number of threads, so that runs can be compared.

use clap::Parser;
use std::f64::consts::TAU;
use std::process::ExitCode;
use std::time::Instant;

/// Applies a seeded circuit and its inverse to a state vector, and prints one JSON object.
#[derive(Parser)]
struct Options {
    /// The state takes 16 bytes for each of 2^QUBITS amplitudes.
    #[arg(value_parser = clap::value_parser!(u32).range(10..=34))]
    qubits: u32,
    /// Layers of the circuit: a rotation of each qubit, then a controlled one of each second pair.
    /// The last qubits come first. Amplitudes that they pair are far apart.
    #[arg(long, default_value_t = 1)]
    layers: u32,
    /// Only so many gates, from the first on.
    #[arg(long)]
    gates: Option<usize>,
    #[arg(long, default_value_t = 26)]
    seed: u64,
    #[arg(long, default_value_t = std::thread::available_parallelism().map_or(1, usize::from), value_parser = threads)]
    threads: usize,
    /// The control: one page gets the content of the page before it. The check must fail.
    #[arg(long)]
    falsify: bool,
}

/// A complex number: its real and its imaginary part.
type Amplitude = [f64; 2];

/// Amplitudes of a page of 4 KiB.
const PAGE: usize = 4096 / size_of::<Amplitude>();
/// An amplitude at the end may differ by this share of what it was.
const TOLERANCE: f64 = 1e-9;

/// A rotation of one qubit, for the amplitudes whose number has all bits of `controls`.
struct Gate {
    qubit: u32,
    controls: usize,
    matrix: [[Amplitude; 2]; 2],
}

impl Gate {
    /// The gate of these three angles in radians.
    fn new(qubit: u32, controls: usize, [theta, phi, lambda]: [f64; 3]) -> Self {
        let (sin, cos) = (theta / 2.0).sin_cos();
        let turned = |by: f64, length: f64| [by.cos() * length, by.sin() * length];
        let matrix = [[[cos, 0.0], turned(lambda, -sin)], [turned(phi, sin), turned(phi + lambda, cos)]];
        Gate { qubit, controls, matrix }
    }

    /// The gate that undoes this one: its matrix, transposed and conjugated.
    fn inverse(&self) -> Self {
        let [[a, b], [c, d]] = self.matrix.map(|row| row.map(|[real, imaginary]| [real, -imaginary]));
        Gate { matrix: [[a, c], [b, d]], ..*self }
    }

    /// Applies the gate to the pairs of two runs of amplitudes, the first with number `at`.
    fn pairs(&self, at: usize, low: &mut [Amplitude], high: &mut [Amplitude]) {
        let [[a, b], [c, d]] = self.matrix;
        for (number, (low, high)) in (at..).zip(low.iter_mut().zip(high)) {
            if number & self.controls == self.controls {
                let (x, y) = (*low, *high);
                *low = sum(product(a, x), product(b, y));
                *high = sum(product(c, x), product(d, y));
            }
        }
    }

    /// Applies the gate to the whole state.
    fn apply(&self, state: &mut [Amplitude], threads: usize) {
        let apart = 1 << self.qubit;
        let blocks = state.len() / (2 * apart);
        std::thread::scope(|scope| {
            if blocks >= threads {
                let each = blocks.div_ceil(threads) * 2 * apart;
                for (part, state) in state.chunks_mut(each).enumerate() {
                    scope.spawn(move || {
                        for (block, state) in state.chunks_exact_mut(2 * apart).enumerate() {
                            let (low, high) = state.split_at_mut(apart);
                            self.pairs(part * each + block * 2 * apart, low, high);
                        }
                    });
                }
                return;
            }
            let each = (blocks * apart).div_ceil(threads);
            for (block, state) in state.chunks_exact_mut(2 * apart).enumerate() {
                let (low, high) = state.split_at_mut(apart);
                for (part, (low, high)) in low.chunks_mut(each).zip(high.chunks_mut(each)).enumerate() {
                    scope.spawn(move || self.pairs(block * 2 * apart + part * each, low, high));
                }
            }
        });
    }
}

fn threads(text: &str) -> Result<usize, String> {
    text.parse().ok().filter(|threads| (1..=1024).contains(threads)).ok_or("accepted: 1 to 1024".to_owned())
}

fn product([a, b]: Amplitude, [c, d]: Amplitude) -> Amplitude {
    [a * c - b * d, a * d + b * c]
}

fn sum([a, b]: Amplitude, [c, d]: Amplitude) -> Amplitude {
    [a + c, b + d]
}

/// A number of 64 bits at each call, by the method of `SplitMix64`.
struct Chance(u64);

impl Chance {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn angle(&mut self) -> f64 {
        self.bits() as f64 / u64::MAX as f64 * TAU
    }
}

fn circuit(options: &Options) -> Vec<Gate> {
    let mut chance = Chance(options.seed);
    let mut angles = || [(); 3].map(|()| chance.angle());
    let mut gates = Vec::new();
    for layer in 0..options.layers {
        gates.extend((0..options.qubits).rev().map(|qubit| Gate::new(qubit, 0, angles())));
        let pairs = (layer % 2..options.qubits - 1).rev().step_by(2);
        gates.extend(pairs.map(|qubit| Gate::new(qubit + 1, 1 << qubit, angles())));
    }
    gates.truncate(options.gates.unwrap_or(usize::MAX));
    gates
}

/// The most memory that the process had at a time, in MiB, as Linux says.
fn most_mib() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find(|line| line.starts_with("VmHWM:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib >> 10)
}

/// The digest of the state after the circuit, and the number of amplitudes that the inverse circuit
/// did not bring back.
fn play(options: &Options) -> (u64, usize) {
    let gates = circuit(options);
    let start = 2f64.powf(f64::from(options.qubits) / -2.0);
    // All states are as likely, so that each page is in use from the start.
    let mut state: Vec<Amplitude> = vec![[start, 0.0]; 1 << options.qubits];
    gates.iter().for_each(|gate| gate.apply(&mut state, options.threads));
    let word = |digest: u64, part: &f64| (digest ^ part.to_bits()).wrapping_mul(0x0100_0000_01b3);
    let digest = state.as_flattened().iter().fold(0xcbf2_9ce4_8422_2325, word);
    if options.falsify {
        let page = state.len() / PAGE / 2;
        state.copy_within((page - 1) * PAGE..page * PAGE, page * PAGE);
    }
    gates.iter().rev().for_each(|gate| gate.inverse().apply(&mut state, options.threads));
    let apart = |[real, imaginary]: &Amplitude| (real - start).hypot(*imaginary) / start;
    // An amplitude that is no number is not right either.
    let right = state.iter().filter(|amplitude| apart(amplitude) <= TOLERANCE).count();
    (digest, state.len() - right)
}

fn main() -> ExitCode {
    let options = Options::parse();
    let begun = Instant::now();
    let (digest, wrong) = play(&options);
    let seconds = begun.elapsed().as_secs_f64();
    let most_mib = most_mib();
    println!(
        "{}",
        serde_json::json!({ "seconds": seconds, "digest": digest, "wrong": wrong, "most_mib": most_mib })
    );
    ExitCode::from(u8::from(wrong > 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options(more: &[&str]) -> Options {
        Options::parse_from(["state_vector", "12"].iter().chain(more))
    }

    #[test]
    fn the_inverse_circuit_brings_each_amplitude_back_and_a_wrong_page_is_noticed() {
        assert_eq!(play(&options(&[])).1, 0);
        assert!(play(&options(&["--falsify"])).1 > 0);
    }

    #[test]
    fn the_state_is_the_same_for_any_number_of_threads_and_another_for_another_seed() {
        let digest = |more: &[&str]| play(&options(more)).0;
        assert_eq!(digest(&["--threads", "1"]), digest(&["--threads", "3"]));
        assert_ne!(digest(&["--seed", "1"]), digest(&["--seed", "2"]));
        assert_ne!(digest(&["--gates", "5"]), digest(&[]));
    }

    #[test]
    fn a_gate_turns_its_own_qubit_and_only_where_its_controls_are_set() {
        // Half a turn about the x axis takes amplitude 0 to 1, with the factor -i.
        let half = Gate::new(1, 0, [TAU / 2.0, TAU / -4.0, TAU / 4.0]);
        let mut state = [[0.0, 0.0]; 8];
        state[4] = [1.0, 0.0];
        half.apply(&mut state, 2);
        let is_at = |state: &[Amplitude], at: usize| state[at][0].hypot(state[at][1]) > 1.0 - TOLERANCE;
        assert!(is_at(&state, 6), "{state:?}");
        Gate { controls: 1, ..half }.apply(&mut state, 2);
        assert!(is_at(&state, 6), "bit 0 is not set: {state:?}");
        Gate { controls: 4, ..half }.apply(&mut state, 2);
        assert!(is_at(&state, 4), "{state:?}");
    }
}
