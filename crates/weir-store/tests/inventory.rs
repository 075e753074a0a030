//! The cards as the driver's management library tells of them.

mod fake_nvml;

use fake_nvml::{Card, FakeNvml};
use weir_core::ByteSize;
use weir_store::vram::{Drivers, GpuMemory, inventory};
use weir_system::Machine;

#[test]
fn cards_of_the_management_library_come_by_pci_address_with_what_is_free_and_a_display() {
    let (total, free) = (8192 << 20, 7900 << 20);
    let fake = FakeNvml::build(Card { free, total, display: true, others: 0 });
    let with = |nvml| Drivers { nvml, ..Drivers::default() };
    let found = inventory(&Machine::this(), &with(fake.path().to_owned()));
    let card = |address: &str| GpuMemory {
        address: address.to_owned(),
        total: ByteSize(total),
        free: Some(ByteSize(free)),
        display: true,
        is_usable: true,
    };
    if found.iter().any(|it| it.address != "0000:04:00.0" && it.address != "10000:c1:00.0") {
        println!("skipped: inventory: this machine has cards of its own, which Vulkan lists first");
        return;
    }
    assert_eq!(found, [card("0000:04:00.0"), card("10000:c1:00.0")]);
    let without = inventory(&Machine::this(), &with("/nowhere/libnvidia-ml.so.1".into()));
    assert!(without.iter().all(|card| !card.is_usable), "{without:?}");
}
