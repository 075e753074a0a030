//! The machine's GPUs, for the choice of a store's size: memory, free memory, and whether a display
//! is connected.
//!
//! `vram:1` must mean the same card in this list and when a store is opened. So the store's own
//! search names the cards. Other sources add the figures that this search does not give, or gives
//! less exactly.

use super::mapped::{self, Listed};
use super::{Drivers, nvml};
use weir_core::ByteSize;
use weir_system::Machine;

/// A card before anybody opens it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct GpuMemory {
    /// The card's PCI address as the kernel writes it: `0000:03:00.0`.
    pub address: String,
    /// The card's memory, all of it.
    pub total: ByteSize,
    /// The card's free memory; `None` if unknown.
    pub free: Option<ByteSize>,
    /// Whether a display is connected to the card.
    pub display: bool,
    /// Whether a store would open the card. Other cards are listed only so that a refusal can name
    /// them.
    pub is_usable: bool,
}

/// All cards that the store would open, in its order. If there are none, the list has AMD's cards
/// that Vulkan does not reach.
pub fn inventory(machine: &Machine, drivers: &Drivers) -> Vec<GpuMemory> {
    let known = |it: nvml::Told| GpuMemory {
        address: it.address,
        total: ByteSize(it.memory.total),
        free: Some(ByteSize(it.memory.free)),
        display: it.display,
        is_usable: true,
    };
    let nvidia: Vec<_> = nvml::all(&drivers.nvml).into_iter().map(known).collect();
    of_store(machine, &mapped::list(), &nvidia)
}

/// Lists the cards that Vulkan lists, with the figures of their drivers. If Vulkan lists none,
/// returns `nvidia`, which are CUDA's cards by PCI address. If that is empty too, lists AMD's
/// cards, so that a refusal can name them.
fn of_store(machine: &Machine, listed: &[Listed], nvidia: &[GpuMemory]) -> Vec<GpuMemory> {
    let told = |card: &Listed| {
        let device = format!("/sys/bus/pci/devices/{}", card.address);
        let by_nvidia = nvidia.iter().find(|it| it.address == card.address).cloned();
        by_nvidia.or_else(|| by_sysfs(machine, &device, &card.address)).unwrap_or_else(|| GpuMemory {
            address: card.address.clone(),
            total: ByteSize(card.total),
            free: card.free.map(ByteSize),
            display: has_display(machine, &device),
            is_usable: true,
        })
    };
    match (listed, nvidia) {
        ([], []) => amd(machine),
        ([], nvidia) => nvidia.to_vec(),
        (listed, _) => listed.iter().map(told).collect(),
    }
}

/// AMD's cards by sysfs alone, in the order of their PCI addresses. The part of the RAM that an
/// integrated GPU has for its own counts as a card's memory.
fn amd(machine: &Machine) -> Vec<GpuMemory> {
    let is_card = |name: &str| {
        name.strip_prefix("card").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let mut devices: Vec<(String, String)> = machine
        .names("/sys/class/drm", is_card)
        .iter()
        .map(|name| format!("/sys/class/drm/{name}/device"))
        .map(|device| (slot(machine, &device).unwrap_or_default(), device))
        .collect();
    devices.sort();
    let card = |(address, device): &(String, String)| by_sysfs(machine, device, address);
    devices.iter().filter_map(card).map(|card| GpuMemory { is_usable: false, ..card }).collect()
}

/// The device's PCI address.
fn slot(machine: &Machine, device: &str) -> Option<String> {
    let uevent = machine.text(&format!("{device}/uevent"))?;
    uevent.lines().find_map(|line| line.strip_prefix("PCI_SLOT_NAME=")).map(str::to_owned)
}

/// The card as AMD's driver describes it. `None` for Intel's, whose driver does not report how much
/// memory there is.
fn by_sysfs(machine: &Machine, device: &str, address: &str) -> Option<GpuMemory> {
    let number = |file: &str| machine.text(&format!("{device}/{file}"))?.parse::<u64>().ok();
    let total = number("mem_info_vram_total")?;
    let free = number("mem_info_vram_used").map(|used| ByteSize(total.saturating_sub(used)));
    Some(GpuMemory {
        address: address.to_owned(),
        total: ByteSize(total),
        free,
        display: has_display(machine, device),
        is_usable: true,
    })
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
    use weir_system::fixture::Fixture;

    fn card(address: &str, total: u64, free: u64, display: bool) -> GpuMemory {
        let (total, free) = (ByteSize(total << 20), Some(ByteSize(free << 20)));
        GpuMemory { address: address.to_owned(), total, free, display, is_usable: true }
    }

    /// Adds a card of AMD's driver below `device`, with 1 GiB of its memory in use.
    fn with_amd(fixture: Fixture, device: &str, address: &str, mib: u64) -> Fixture {
        fixture
            .with(&format!("{device}/uevent"), &format!("DRIVER=amdgpu\nPCI_SLOT_NAME={address}\n"))
            .with(&format!("{device}/mem_info_vram_total"), &format!("{}\n", mib << 20))
            .with(&format!("{device}/mem_info_vram_used"), &format!("{}\n", 1024u64.min(mib) << 20))
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
        let nvidia = [card("0000:04:00.0", 8192, 7900, false)];
        let listed = [
            listed("0000:03:00.0", None),
            listed("0000:04:00.0", None),
            listed("0000:05:00.0", Some(5 << 30)),
        ];
        let seen = of_store(&fixture.machine(), &listed, &nvidia);
        assert_eq!(
            seen,
            [
                card("0000:03:00.0", 16384, 15360, true),
                card("0000:04:00.0", 8192, 7900, false),
                card("0000:05:00.0", 6144, 5120, true)
            ]
        );
        let seen = of_store(&fixture.machine(), &[], &nvidia);
        assert_eq!(seen, nvidia, "as the store counts without Vulkan");
    }

    #[test]
    fn without_vulkan_sysfs_tells_of_amd_s_cards_which_no_store_opens() {
        let device = |card: u32| format!("/sys/class/drm/card{card}/device");
        let fixture = with_amd(Fixture::new("apu"), &device(0), "0000:08:00.0", 2048);
        let fixture = with_amd(fixture, &device(1), "0000:0c:00.0", 8192);
        let fixture = with_amd(fixture, &device(2), "0000:03:00.0", 16384)
            .with(&format!("{}/drm/card0/card0-eDP-1/status", device(0)), "connected\n")
            .with(&format!("{}/drm/card1/card1-DP-1/status", device(1)), "connected\n")
            .with(&format!("{}/drm/card2/card2-DP-2/status", device(2)), "disconnected\n");
        let seen = of_store(&fixture.machine(), &[], &[]);
        let cards = [
            card("0000:03:00.0", 16384, 15360, false),
            card("0000:08:00.0", 2048, 1024, true),
            card("0000:0c:00.0", 8192, 7168, true),
        ];
        assert_eq!(seen, cards.map(|card| GpuMemory { is_usable: false, ..card }), "by PCI address");
    }
}
