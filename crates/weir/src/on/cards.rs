//! The machine's GPUs, as the sizing asks for them: how much memory, how much of it free, whether with a display.

use super::sizing::Card;
use crate::doctor::Machine;
use std::process::{Command, Stdio};
use weir_core::ByteSize;

/// All cards whose memory the driver tells: NVIDIA's by `nvidia-smi`, which comes with the driver, AMD's by sysfs. Intel's
/// driver tells no total.
pub fn all(machine: &Machine) -> Vec<Card> {
    let smi = Command::new("nvidia-smi")
        .args(["--query-gpu=memory.total,memory.free,display_active", "--format=csv,noheader,nounits"])
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    let nvidia = smi.ok().filter(|output| output.status.success());
    let nvidia = nvidia.map(|output| parse_smi(&String::from_utf8_lossy(&output.stdout))).unwrap_or_default();
    if nvidia.is_empty() { amd(machine) } else { nvidia }
}

/// Lines of `8192, 7900, Enabled`, sizes in MiB.
fn parse_smi(text: &str) -> Vec<Card> {
    let line = |line: &str| {
        let mut columns = line.split(',').map(str::trim);
        let mut mebibytes = || Some(ByteSize(columns.next()?.parse::<u64>().ok()? << 20));
        let (total, free) = (mebibytes()?, mebibytes()?);
        Some(Card { total, free: Some(free), display: columns.next()? == "Enabled" })
    };
    text.lines().filter_map(line).collect()
}

fn amd(machine: &Machine) -> Vec<Card> {
    let is_card = |name: &str| {
        name.strip_prefix("card").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_digit()))
    };
    let cards = machine.names("/sys/class/drm", is_card);
    let card = |name: &String| {
        let number =
            |file: &str| machine.text(&format!("/sys/class/drm/{name}/device/{file}"))?.parse::<u64>().ok();
        let total = number("mem_info_vram_total")?;
        let free = number("mem_info_vram_used").map(|used| ByteSize(total.saturating_sub(used)));
        let outputs = machine.names("/sys/class/drm", |output| output.starts_with(&format!("{name}-")));
        let connected = |output: &String| {
            machine.text(&format!("/sys/class/drm/{output}/status")).as_deref() == Some("connected")
        };
        Some(Card { total: ByteSize(total), free, display: outputs.iter().any(connected) })
    };
    cards.iter().filter_map(card).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::Fixture;

    #[test]
    fn what_nvidia_smi_says_is_read_line_by_line() {
        let cards = parse_smi("8192, 7900, Enabled\n143771, 143000, Disabled\n[N/A], 1, Disabled\n");
        let card = |total: u64, free: u64, display| Card {
            total: ByteSize(total << 20),
            free: Some(ByteSize(free << 20)),
            display,
        };
        assert_eq!(cards, [card(8192, 7900, true), card(143_771, 143_000, false)]);
    }

    #[test]
    fn an_amd_card_tells_its_memory_and_displays_by_sysfs() {
        let fixture = Fixture::new("amd")
            .with("/sys/class/drm/card1/device/mem_info_vram_total", "8573157376\n")
            .with("/sys/class/drm/card1/device/mem_info_vram_used", "73157376\n")
            .with("/sys/class/drm/card1-DP-1/status", "connected\n");
        let cards = amd(&fixture.machine());
        assert_eq!(
            cards,
            [Card { total: ByteSize(8_573_157_376), free: Some(ByteSize(8_500_000_000)), display: true }]
        );
    }
}
