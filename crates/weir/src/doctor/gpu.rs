//! GPUs and the libraries that reach their memory.

use super::Finding;
use super::machine::Machine;

pub fn check(machine: &Machine) -> Vec<Finding> {
    let nvidia = nvidia(machine);
    let render = machine.names("/dev/dri", |name| name.starts_with("renderD"));
    let card = nvidia.is_some() || !render.is_empty();
    let mut findings = vec![match (nvidia, render.is_empty()) {
        (Some(seen), _) => Finding::ok("gpu", seen),
        (None, false) => {
            let cards: Vec<String> = render.iter().map(|name| with_driver(machine, name)).collect();
            Finding::ok("gpu", cards.join(", "))
        }
        (None, true) => Finding::warn(
            "gpu",
            "none: neither /dev/nvidia0 nor a render node in /dev/dri",
            "pages can still go to host memory and files: --store host:SIZE, --store file:PATH?size=SIZE",
        ),
    }];
    findings.push(vulkan(machine, card));
    if machine.has("/dev/nvidia0") || machine.has("/dev/nvidiactl") {
        findings.push(library(machine, "cuda", "libcuda.so.1", "the copy engine and the ring path need it"));
        findings.push(library(
            machine,
            "nvml",
            "libnvidia-ml.so.1",
            "give-back on demand watches memory use by it",
        ));
    }
    findings
}

/// `/dev/dri/renderD128 (amdgpu)`.
fn with_driver(machine: &Machine, name: &str) -> String {
    let uevent = machine.text(&format!("/sys/class/drm/{name}/device/uevent")).unwrap_or_default();
    match uevent.lines().find_map(|line| line.strip_prefix("DRIVER=")) {
        Some(driver) => format!("/dev/dri/{name} ({driver})"),
        None => format!("/dev/dri/{name}"),
    }
}

fn nvidia(machine: &Machine) -> Option<String> {
    let cards = machine.names("/dev", |name| {
        name.strip_prefix("nvidia")
            .is_some_and(|digits| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit()))
    });
    if cards.is_empty() {
        return None;
    }
    let version = machine.text("/proc/driver/nvidia/version");
    // "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build ..."
    let driver = version
        .iter()
        .flat_map(|text| text.split_whitespace())
        .find(|word| word.contains('.') && word.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit()));
    Some(format!("/dev/{}, driver {}", cards.join(", /dev/"), driver.unwrap_or("unknown")))
}

fn vulkan(machine: &Machine, card: bool) -> Finding {
    let drivers: Vec<String> = ["/usr/share/vulkan/icd.d", "/etc/vulkan/icd.d"]
        .into_iter()
        .flat_map(|directory| machine.names(directory, |name| name.ends_with(".json")))
        .collect();
    let next = "install the Vulkan loader and the GPU's Vulkan driver (Debian: libvulkan1 with mesa-vulkan-drivers or \
                nvidia-vulkan-icd)";
    match (machine.library("libvulkan.so.1"), drivers.is_empty()) {
        (Some(_), false) => Finding::ok("vulkan", format!("loader, and drivers {}", drivers.join(", "))),
        (Some(_), true) => Finding::warn("vulkan", "loader, but no driver in /usr/share/vulkan/icd.d", next),
        (None, _) if card => Finding::warn("vulkan", "no libvulkan.so.1: GPU memory cannot be mapped", next),
        (None, _) => Finding::warn("vulkan", "no libvulkan.so.1; it matters only with a GPU", next),
    }
}

fn library(machine: &Machine, id: &'static str, name: &str, why: &str) -> Finding {
    match machine.library(name) {
        Some(path) => Finding::ok(id, path),
        None => Finding::warn(
            id,
            format!("no {name}: {why}"),
            format!("install the driver package that has {name} (Debian: libcuda1, libnvidia-ml1)"),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::super::machine::Fixture;
    use super::*;

    #[test]
    fn an_nvidia_card_is_named_with_its_driver() {
        let fixture = Fixture::new("nvidia")
            .with("/dev/nvidia0", "")
            .with("/dev/nvidiactl", "")
            .with(
                "/proc/driver/nvidia/version",
                "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04  Release Build\nGCC version: 12",
            )
            .with("/usr/lib64/libcuda.so.1", "");
        let findings = check(&fixture.machine());
        assert_eq!(findings[0].seen, "/dev/nvidia0, driver 580.159.04");
        let level = |id| findings.iter().find(|finding| finding.id == id).unwrap().level;
        assert_eq!((level("cuda"), level("nvml"), level("vulkan")), (Level::Ok, Level::Warn, Level::Warn));
    }

    #[test]
    fn every_card_is_named_with_its_driver() {
        let fixture = Fixture::new("two-cards")
            .with("/dev/dri/renderD128", "")
            .with("/dev/dri/renderD129", "")
            .with("/sys/class/drm/renderD128/device/uevent", "DRIVER=amdgpu\nPCI_CLASS=30000\n");
        assert_eq!(check(&fixture.machine())[0].seen, "/dev/dri/renderD128 (amdgpu), /dev/dri/renderD129");
    }
}
