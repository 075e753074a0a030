//! `weir battery`: turns Weir off when the battery runs low, and on again with mains. A timer and a
//! udev rule on power_supply call the command (`weir-power.service` of the package). The command
//! checks the battery, does the action that is due, and exits.

use super::again;
use super::options::{BatteryOptions, OffOptions};
use super::state::{self, Phase};
use weir_cli::failure::Failure;
use weir_system::Machine;

/// The machine's source of power.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Power {
    /// Whether mains or a charger is connected.
    mains: bool,
    /// The charge of the machine's fullest battery, in per cent; `None` without a battery.
    percent: Option<u8>,
}

/// The action that is due now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Verdict {
    Stay,
    Off,
    On,
}

impl Power {
    fn of(machine: &Machine, supplies: &str) -> Self {
        let value = |name: &str, key: &str| machine.text(&format!("{supplies}/{name}/{key}"));
        let mut power = Power { mains: false, percent: None };
        for name in machine.names(supplies, |_| true) {
            match value(&name, "type").as_deref() {
                // The scope `Device` tells that this is the battery of a device such as a mouse.
                Some("Battery") if value(&name, "scope").as_deref() != Some("Device") => {
                    let percent = value(&name, "capacity").and_then(|text| text.parse().ok());
                    power.percent = power.percent.max(percent);
                }
                Some("Battery") | None => {}
                Some(_) => power.mains |= value(&name, "online").as_deref() == Some("1"),
            }
        }
        power
    }

    /// Decides which action is due. Below `threshold` percent and without mains, Weir is to be
    /// turned off. With mains, Weir is to be turned on again, unless the user turned it off. A
    /// machine without a battery needs no action.
    fn verdict(self, threshold: u8, is_on: bool, went_off: bool) -> Verdict {
        match (self.percent, is_on) {
            (Some(percent), true) if !self.mains && percent < threshold => Verdict::Off,
            (_, false) if went_off && self.mains => Verdict::On,
            _ => Verdict::Stay,
        }
    }
}

/// Looks at the battery, and turns Weir off or on if that is due. After turning Weir off, looks
/// again. Turning off takes so long that a user may have connected the charger meanwhile, and
/// systemd starts no second run while this one goes on.
pub fn run(options: &BatteryOptions) -> Result<(), Failure> {
    while look(options)? == Verdict::Off {}
    Ok(())
}

fn look(options: &BatteryOptions) -> Result<Verdict, Failure> {
    let note = again::note(&options.runtime, "battery");
    let state = state::read(&options.runtime)?;
    let is_on = state.is_some_and(|state| state.phase == Phase::On);
    let verdict = Power::of(&Machine::this(), &options.supplies).verdict(options.below, is_on, note.exists());
    match verdict {
        Verdict::Stay => {}
        Verdict::Off => {
            println!("on battery and below {} %: turning off", options.below);
            super::off(&OffOptions {
                runtime: options.runtime.clone(),
                swapoff: None,
                remember: Some(note),
            })?;
        }
        Verdict::On => {
            println!("mains is back: turning on again");
            again::turn_on(&note)?;
        }
    }
    Ok(verdict)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_system::fixture::Fixture;

    #[test]
    fn supplies_are_told_apart_and_a_mouse_does_not_count() {
        let at = |name: &str, key: &str| format!("/sys/class/power_supply/{name}/{key}");
        let fixture = Fixture::new("power")
            .with(&at("AC", "type"), "Mains\n")
            .with(&at("AC", "online"), "0\n")
            .with(&at("BAT0", "type"), "Battery\n")
            .with(&at("BAT0", "capacity"), "20\n")
            .with(&at("hid-1", "type"), "Battery\n")
            .with(&at("hid-1", "scope"), "Device\n")
            .with(&at("hid-1", "capacity"), "90\n");
        assert_eq!(
            Power::of(&fixture.machine(), "/sys/class/power_supply"),
            Power { mains: false, percent: Some(20) }
        );
        let none = Power::of(&Fixture::new("no-power").machine(), "/sys/class/power_supply");
        assert_eq!(none, Power { mains: false, percent: None });
    }

    #[test]
    fn it_goes_off_when_low_and_comes_back_only_with_mains_and_only_if_it_went_so() {
        let power = |mains, percent| Power { mains, percent };
        for (power, is_on, went_off, due) in [
            (power(false, Some(20)), true, false, Verdict::Off),
            (power(false, Some(30)), true, false, Verdict::Stay),
            (power(true, Some(5)), true, false, Verdict::Stay),
            (power(false, None), true, false, Verdict::Stay),
            (power(true, Some(20)), false, true, Verdict::On),
            (power(false, Some(90)), false, true, Verdict::Stay),
            (power(true, Some(90)), false, false, Verdict::Stay),
        ] {
            assert_eq!(power.verdict(30, is_on, went_off), due, "{power:?} {is_on} {went_off}");
        }
    }
}
