//! GPUs and the libraries that reach their memory.

use super::finding::Finding;
use weir_daemon::cards::{Broken, Card, DRIVER_FILES, Looked};
use weir_system::Machine;

/// The processor's own path to a card's memory.
const WINDOW: &str = "mapped";
/// The next step for a card whose memory the processor cannot map. The usual reason is that
/// libraries are missing.
const LIBRARIES: &str = "install the libraries of the card's Vulkan driver; NVIDIA's needs libGLX and libEGL too, without a display (Debian: libvulkan1 libglx0 \
                         libegl1 libgl1 libglvnd0; in a container NVIDIA_DRIVER_CAPABILITIES=all)";

pub fn check(machine: &Machine, looked: &Looked) -> Vec<Finding> {
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
    findings.push(vulkan(machine, card, looked));
    findings.extend(cards(card, looked));
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

/// The device file with its driver, such as `/dev/dri/renderD128 (amdgpu)`.
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
    // The file's text begins "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.159.04
    // Release Build ...".
    let driver = version
        .iter()
        .flat_map(|text| text.split_whitespace())
        .find(|word| word.contains('.') && word.bytes().all(|byte| byte == b'.' || byte.is_ascii_digit()));
    Some(format!("/dev/{}, driver {}", cards.join(", /dev/"), driver.unwrap_or("unknown")))
}

/// A finding for each card, or one finding with the reason why no card can be reached.
fn cards(card: bool, looked: &Looked) -> Vec<Finding> {
    /// The names of the report's lines about cards. Further cards have no line of their own.
    const IDS: [&str; 8] = ["card0", "card1", "card2", "card3", "card4", "card5", "card6", "card7"];
    let seen = match looked {
        Looked::Seen(seen) => seen,
        Looked::NoAnswer(seconds) => {
            return vec![Finding::fail(
                "cards",
                format!("the drivers did not answer in {seconds} s, and weir serve would wait for them too"),
                "look for the driver's lines in the kernel's log (dmesg), end what hangs on the card, or restart the machine",
            )];
        }
        Looked::Died(how) => {
            return vec![Finding::fail(
                "cards",
                format!("the drivers ended the process that opened them ({how}), and would end weir serve"),
                "install the driver and its libraries in one version, and look for its lines in the kernel's log (dmesg)",
            )];
        }
    };
    if let (true, true, Some(why)) = (card, seen.cards.is_empty(), &seen.refused) {
        return vec![Finding::fail("cards", format!("no driver opens the card: {why}"), LIBRARIES)];
    }
    let line = |(id, card): (&'static str, &Card)| {
        let missing: Vec<String> =
            card.missing.iter().map(|(way, why)| format!("; not by {way}: {why}")).collect();
        let seen = format!("{}: by {}{}", card.name, card.ways.join(" and "), missing.concat());
        match card.has(WINDOW) {
            true => Finding::ok(id, seen),
            false => Finding::warn(id, format!("{seen}; a write costs some 7 us instead of 0.2"), LIBRARIES),
        }
    };
    IDS.into_iter().zip(&seen.cards).map(line).collect()
}

fn vulkan(machine: &Machine, card: bool, looked: &Looked) -> Finding {
    let drivers: Vec<String> = DRIVER_FILES
        .into_iter()
        .flat_map(|directory| machine.names(directory, |name| name.ends_with(".json")))
        .collect();
    let next = "install the Vulkan loader and the GPU's Vulkan driver (Debian: libvulkan1 with mesa-vulkan-drivers or \
                nvidia-vulkan-icd)";
    match (machine.library("libvulkan.so.1"), drivers.is_empty()) {
        (Some(_), false) => opened(card, looked, &drivers.join(", ")),
        (Some(_), true) => Finding::warn("vulkan", "loader, but no driver in /usr/share/vulkan/icd.d", next),
        (None, _) if card => Finding::warn("vulkan", "no libvulkan.so.1: GPU memory cannot be mapped", next),
        (None, _) => Finding::warn("vulkan", "no libvulkan.so.1; it matters only with a GPU", next),
    }
}

/// The finding about Vulkan: whether its loader and drivers open a card.
fn opened(card: bool, looked: &Looked, drivers: &str) -> Finding {
    let Looked::Seen(seen) = looked else {
        return Finding::ok("vulkan", format!("loader, and drivers {drivers}; what they open is said below"));
    };
    let of = |way: &str| seen.cards.iter().flat_map(|card| &card.missing).find(|(it, _)| it == way);
    match (seen.cards.iter().any(|card| card.has(WINDOW)), seen.broken.first()) {
        (true, _) => Finding::ok("vulkan", format!("loader, and drivers {drivers}")),
        (false, Some(Broken { file, why })) => Finding::fail(
            "vulkan",
            format!("loader, but the driver of {file} cannot be loaded: {why}"),
            LIBRARIES,
        ),
        (false, None) if card || !seen.cards.is_empty() => {
            let why = of(WINDOW).map(|(_, why)| why).or(seen.refused.as_ref());
            let why = why.map_or("it does not say why", String::as_str);
            Finding::fail(
                "vulkan",
                format!("loader, and drivers {drivers}, but none opens the card: {why}"),
                LIBRARIES,
            )
        }
        (false, None) => {
            Finding::ok("vulkan", format!("loader, and drivers {drivers}; no GPU for them here"))
        }
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

/// The drivers' answer on a machine without a card.
#[cfg(test)]
pub fn no_cards() -> Looked {
    use weir_daemon::cards::Seen;
    Looked::Seen(Seen { refused: Some("no GPU".to_owned()), ..Seen::default() })
}

#[cfg(test)]
mod tests {
    use super::super::finding::Level;
    use super::*;
    use weir_daemon::cards::Seen;
    use weir_system::fixture::Fixture;

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
        let findings = check(&fixture.machine(), &no_cards());
        assert_eq!(findings[0].seen, "/dev/nvidia0, driver 580.159.04");
        let level = |id| findings.iter().find(|finding| finding.id == id).unwrap().level;
        assert_eq!((level("cuda"), level("nvml"), level("vulkan")), (Level::Ok, Level::Warn, Level::Warn));
    }

    fn seen(ways: &[&str], missing: &[(&str, &str)]) -> Looked {
        let own = |(way, why): &(&str, &str)| ((*way).to_owned(), (*why).to_owned());
        let card = Card {
            name: "NVIDIA H200".to_owned(),
            ways: ways.iter().map(|&way| way.to_owned()).collect(),
            missing: missing.iter().map(own).collect(),
        };
        Looked::Seen(Seen { cards: vec![card], ..Seen::default() })
    }

    /// Looks at a machine with a card's device file, Vulkan's loader and a driver's file; `looked`
    /// is what the drivers answered.
    fn with_loader(name: &str, card: bool, looked: &Looked) -> Vec<Finding> {
        let mut fixture = Fixture::new(name)
            .with("/usr/lib64/libvulkan.so.1", "")
            .with("/usr/share/vulkan/icd.d/nvidia_icd.json", "{}");
        if card {
            fixture = fixture.with("/dev/nvidia0", "");
        }
        check(&fixture.machine(), looked)
    }

    fn of<'a>(findings: &'a [Finding], id: &str) -> &'a Finding {
        findings.iter().find(|finding| finding.id == id).unwrap_or_else(|| panic!("{id}: {findings:?}"))
    }

    #[test]
    fn a_card_is_reported_by_the_ways_that_it_has_once_it_was_opened() {
        let whole = with_loader("whole", true, &seen(&["mapped", "engine", "ring"], &[]));
        assert_eq!(of(&whole, "card0").seen, "NVIDIA H200: by mapped and engine and ring");
        assert_eq!((of(&whole, "vulkan").level, of(&whole, "card0").level), (Level::Ok, Level::Ok));
        let why = "vkCreateInstance answered ERROR_INCOMPATIBLE_DRIVER";
        let alone = with_loader("alone", true, &seen(&["engine"], &[("mapped", why)]));
        for (id, level) in [("vulkan", Level::Fail), ("card0", Level::Warn)] {
            let finding = of(&alone, id);
            assert_eq!(finding.level, level, "{finding}");
            assert!(
                finding.seen.contains(why) && finding.next.as_ref().unwrap().contains("libglx0"),
                "{finding}"
            );
        }
    }

    #[test]
    fn a_driver_s_file_without_its_library_fails_with_the_step() {
        let broken = Broken {
            file: "/usr/share/vulkan/icd.d/nvidia_icd.json".to_owned(),
            why: "libGLX_nvidia.so.0: cannot open shared object file".to_owned(),
        };
        let looked = Seen { refused: Some("none".to_owned()), broken: vec![broken], ..Seen::default() };
        let findings = with_loader("broken", false, &Looked::Seen(looked));
        let vulkan = of(&findings, "vulkan");
        assert_eq!(vulkan.level, Level::Fail);
        assert!(vulkan.seen.contains("libGLX_nvidia.so.0") && vulkan.next.is_some(), "{vulkan}");
    }

    #[test]
    fn a_driver_that_hangs_or_crashes_is_a_line_that_fails() {
        let hangs = with_loader("hangs", true, &Looked::NoAnswer(8));
        assert_eq!(of(&hangs, "cards").level, Level::Fail);
        assert!(of(&hangs, "cards").seen.contains("did not answer in 8 s"));
        let dies = with_loader("dies", true, &Looked::Died("signal: 11 (SIGSEGV)".to_owned()));
        assert_eq!(of(&dies, "cards").level, Level::Fail);
    }

    #[test]
    fn a_software_renderer_alone_is_no_card_and_no_failure() {
        let none =
            Seen { refused: Some("Vulkan: llvmpipe is a software renderer".to_owned()), ..Seen::default() };
        let findings = with_loader("software", false, &Looked::Seen(none));
        assert_eq!(of(&findings, "vulkan").level, Level::Ok);
        assert!(of(&findings, "vulkan").seen.contains("no GPU"));
        assert!(!findings.iter().any(|finding| finding.id.starts_with("card")));
    }

    #[test]
    fn every_card_is_named_with_its_driver() {
        let fixture = Fixture::new("two-cards")
            .with("/dev/dri/renderD128", "")
            .with("/dev/dri/renderD129", "")
            .with("/sys/class/drm/renderD128/device/uevent", "DRIVER=amdgpu\nPCI_CLASS=30000\n");
        assert_eq!(
            check(&fixture.machine(), &no_cards())[0].seen,
            "/dev/dri/renderD128 (amdgpu), /dev/dri/renderD129"
        );
    }
}
