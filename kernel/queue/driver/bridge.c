// SPDX-License-Identifier: GPL-2.0 OR MIT
/*
 * A PCI bus of its own with one device on it: NVIDIA's vendor, class "other bridge", no registers.
 * With it nvidia.ko loads on a machine without a card, as it does on one with an NVSwitch only.
 */
#include <linux/module.h>
#include <linux/pci.h>
#include <asm/pci.h>

#define BUS 0x40
#define VENDOR_AND_DEVICE ((0x0001 << 16) | PCI_VENDOR_ID_NVIDIA)

static struct pci_sysdata place = { .node = NUMA_NO_NODE };
static struct pci_bus *bus;

static int read_config(struct pci_bus *from, unsigned int slot, int where, int size, u32 *value)
{
	u32 word = 0;

	if (slot) {
		*value = ~0;
		return PCIBIOS_DEVICE_NOT_FOUND;
	}
	if (where < 4)
		word = VENDOR_AND_DEVICE;
	else if (where >= PCI_CLASS_REVISION && where < PCI_CLASS_REVISION + 4)
		word = PCI_CLASS_BRIDGE_OTHER << 16;
	*value = word >> 8 * (where & 3);
	if (size < 4)
		*value &= (1u << 8 * size) - 1;
	return PCIBIOS_SUCCESSFUL;
}

static int write_config(struct pci_bus *to, unsigned int slot, int where, int size, u32 value)
{
	return PCIBIOS_SUCCESSFUL;
}

static struct pci_ops config = { .read = read_config, .write = write_config };

static int __init bridge_init(void)
{
	LIST_HEAD(resources);

	pci_lock_rescan_remove();
	bus = pci_scan_root_bus(NULL, BUS, &config, &place, &resources);
	if (bus)
		pci_bus_add_devices(bus);
	pci_unlock_rescan_remove();
	return bus ? 0 : -ENODEV;
}

static void __exit bridge_exit(void)
{
	pci_lock_rescan_remove();
	pci_stop_root_bus(bus);
	pci_remove_root_bus(bus);
	pci_unlock_rescan_remove();
}

module_init(bridge_init);
module_exit(bridge_exit);
MODULE_LICENSE("Dual MIT/GPL");
MODULE_DESCRIPTION("A device that nvidia.ko takes for an NVSwitch");
