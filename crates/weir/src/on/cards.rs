//! The machine's GPUs, as the sizing needs them: memory, free memory, and whether a display is
//! connected.
//!
//! `vram:1` must mean the same card here and in the store, so the store says which cards it would
//! open. The drivers add the figures that the store does not know, or knows less well.

use super::sizing::Card;
use std::process::{Command, Stdio};
use weir_core::ByteSize;
use weir_store::vram::{self, Listed};
use weir_system::Machine;

/// A card, and its PCI address as the kernel writes it.
type Addressed = (String, Card);

/// All cards that the store would open, in its order.
pub fn all(machine: &Machine) -> Vec<Card> {
    of_store(machine, &vram::list(), &nvidia())
}

/// The cards that Vulkan lists, with their drivers' figures. Without Vulkan the store takes CUDA's
/// cards by PCI address, as `nvidia` has them. AMD's cards are listed even then, so that a refusal
/// can name them.
fn of_store(machine: &Machine, listed: &[Listed], nvidia: &[Addressed]) -> Vec<Card> {
    let told = |card: &Listed| {
        let device = format!("/sys/bus/pci/devices/{}", card.address);
        let by_nvidia = nvidia.iter().find(|(address, _)| *address == card.address).map(|(_, card)| *card);
        by_nvidia.or_else(|| by_sysfs(machine, &device)).unwrap_or_else(|| Card {
            total: ByteSize(card.total),
            free: card.free.map(ByteSize),
            display: has_display(machine, &device),
        })
    };
    match (listed, nvidia) {
        ([], []) => amd(machine),
        ([], nvidia) => nvidia.iter().map(|(_, card)| *card).collect(),
        (listed, _) => listed.iter().map(told).collect(),
    }
}

/// NVIDIA's cards, from `nvidia-smi`, which comes with the driver.
fn nvidia() -> Vec<Addressed> {
    let smi = Command::new("nvidia-smi")
        .args([
            "--query-gpu=pci.bus_id,memory.total,memory.free,display_active",
            "--format=csv,noheader,nounits",
        ])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let output = smi.ok().filter(|output| output.status.success());
    output.map(|output| parse_smi(&String::from_utf8_lossy(&output.stdout))).unwrap_or_default()
}

/// Parses lines of `00000000:01:00.0, 8192, 7900, Enabled`, with sizes in MiB. Sorts by PCI
/// address, an order that `nvidia-smi` does not promise.
fn parse_smi(text: &str) -> Vec<Addressed> {
    let line = |line: &str| {
        let mut columns = line.split(',').map(str::trim);
        let (domain, rest) = columns.next()?.split_once(':')?;
        let domain = u32::from_str_radix(domain, 16).ok()?;
        let mut mebibytes = || Some(ByteSize(columns.next()?.parse::<u64>().ok()? << 20));
        let (total, free) = (mebibytes()?, mebibytes()?);
        let card = Card { total, free: Some(free), display: columns.next()? == "Enabled" };
        Some((format!("{domain:04x}:{}", rest.to_ascii_lowercase()), card))
    };
    let mut lines: Vec<&str> = text.lines().collect();
    lines.sort_unstable();
    lines.into_iter().filter_map(line).collect()
}

/// AMD's cards from sysfs alone, in the order of their PCI addresses. An integrated GPU reports its
/// own part of RAM as a card's memory. This skips a GPU with no more memory than a card's other
/// users are left.
fn amd(machine: &Machine) -> Vec<Card> {
    let is_card = |name: &str| {
        name.strip_prefix("card").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let mut devices: Vec<(Option<String>, String)> = machine
        .names("/sys/class/drm", is_card)
        .iter()
        .map(|name| format!("/sys/class/drm/{name}/device"))
        .map(|device| (slot(machine, &device), device))
        .collect();
    devices.sort();
    let cards = devices.iter().filter_map(|(_, device)| by_sysfs(machine, device));
    cards.filter(|card| card.total > card.headroom()).collect()
}

/// The device's PCI address.
fn slot(machine: &Machine, device: &str) -> Option<String> {
    let uevent = machine.text(&format!("{device}/uevent"))?;
    uevent.lines().find_map(|line| line.strip_prefix("PCI_SLOT_NAME=")).map(str::to_owned)
}

/// The card as AMD's driver describes it; Intel's driver reports no total.
fn by_sysfs(machine: &Machine, device: &str) -> Option<Card> {
    let number = |file: &str| machine.text(&format!("{device}/{file}"))?.parse::<u64>().ok();
    let total = number("mem_info_vram_total")?;
    let free = number("mem_info_vram_used").map(|used| ByteSize(total.saturating_sub(used)));
    Some(Card { total: ByteSize(total), free, display: has_display(machine, device) })
}

/// Whether one of a device's outputs is connected: `drm/card1/card1-DP-1/status`.
fn has_display(machine: &Machine, device: &str) -> bool {
    machine.names(&format!("{device}/drm"), |name| name.starts_with("card")).iter().any(|card| {
        let directory = format!("{device}/drm/{card}");
        let outputs = machine.names(&directory, |output| output.starts_with(&format!("{card}-")));
        let status = |output: &String| machine.text(&format!("{directory}/{output}/status"));
        outputs.iter().any(|output| status(output).as_deref() == Some("connected"))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Fixture;

    fn card(total: u64, free: u64, display: bool) -> Card {
        Card { total: ByteSize(total << 20), free: Some(ByteSize(free << 20)), display }
    }

    /// Adds a card of AMD's driver below `device`, with 1 GiB of its memory in use.
    fn with_amd(fixture: Fixture, device: &str, address: &str, mib: u64) -> Fixture {
        fixture
            .with(&format!("{device}/uevent"), &format!("DRIVER=amdgpu\nPCI_SLOT_NAME={address}\n"))
            .with(&format!("{device}/mem_info_vram_total"), &format!("{}\n", mib << 20))
            .with(&format!("{device}/mem_info_vram_used"), &format!("{}\n", 1024u64.min(mib) << 20))
    }

    #[test]
    fn what_nvidia_smi_says_is_read_line_by_line_and_put_in_the_order_of_addresses() {
        let cards = parse_smi(
            "00010000:C1:00.0, 143771, 143000, Disabled\n00000000:01:00.0, 8192, 7900, Enabled\n00000000:02:00.0, [N/A], 1, Disabled\n",
        );
        let there = |address: &str, card| (address.to_owned(), card);
        assert_eq!(
            cards,
            [
                there("0000:01:00.0", card(8192, 7900, true)),
                there("10000:c1:00.0", card(143_771, 143_000, false))
            ]
        );
    }

    #[test]
    fn cards_are_those_of_the_store_in_its_order_each_as_its_driver_tells() {
        let listed = |address: &str, free| Listed { address: address.to_owned(), total: 6 << 30, free };
        // The machine has an APU and a card of AMD's, a card of NVIDIA's and one of Intel's; the
        // store does not list the APU.
        let pci = |address: &str| format!("/sys/bus/pci/devices/{address}");
        let fixture = with_amd(Fixture::new("mixed"), &pci("0000:08:00.0"), "0000:08:00.0", 512);
        let fixture = with_amd(fixture, &pci("0000:03:00.0"), "0000:03:00.0", 16384)
            .with("/sys/class/drm/card0/device/mem_info_vram_total", "536870912\n")
            .with(&format!("{}/drm/card1/card1-DP-1/status", pci("0000:03:00.0")), "connected\n")
            .with(&format!("{}/drm/card2/card2-DP-2/status", pci("0000:05:00.0")), "connected\n");
        let nvidia = parse_smi("00000000:04:00.0, 8192, 7900, Disabled\n");
        let listed = [
            listed("0000:03:00.0", None),
            listed("0000:04:00.0", None),
            listed("0000:05:00.0", Some(5 << 30)),
        ];
        let seen = of_store(&fixture.machine(), &listed, &nvidia);
        assert_eq!(seen, [card(16384, 15360, true), card(8192, 7900, false), card(6144, 5120, true)]);
        let seen = of_store(&fixture.machine(), &[], &nvidia);
        assert_eq!(seen, [card(8192, 7900, false)], "as the store counts without Vulkan");
    }

    #[test]
    fn without_vulkan_sysfs_tells_of_amd_s_cards_and_what_an_apu_has_of_the_ram_is_none() {
        let device = |card: u32| format!("/sys/class/drm/card{card}/device");
        let fixture = with_amd(Fixture::new("apu"), &device(0), "0000:08:00.0", 2048);
        let fixture = with_amd(fixture, &device(1), "0000:0c:00.0", 8192);
        let fixture = with_amd(fixture, &device(2), "0000:03:00.0", 16384)
            .with(&format!("{}/drm/card0/card0-eDP-1/status", device(0)), "connected\n")
            .with(&format!("{}/drm/card1/card1-DP-1/status", device(1)), "connected\n")
            .with(&format!("{}/drm/card2/card2-DP-2/status", device(2)), "disconnected\n");
        let seen = of_store(&fixture.machine(), &[], &[]);
        assert_eq!(seen, [card(16384, 15360, false), card(8192, 7168, true)], "by PCI address");
    }
}
