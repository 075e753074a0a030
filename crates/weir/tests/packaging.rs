//! What the package's scripts decide, with a `weir` that only notes what it was asked.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

struct Laptop(PathBuf);

impl Laptop {
    fn new(name: &str) -> Self {
        let root = std::env::temp_dir().join(format!("weir-laptop-{}-{name}", std::process::id()));
        fs::create_dir_all(root.join("bin")).unwrap();
        let program = root.join("bin/weir");
        fs::write(&program, format!("#!/bin/sh\necho \"$@\" >>{}/asked\n", root.display())).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        Laptop(root)
    }

    fn supply(&self, name: &str, files: &[(&str, &str)]) {
        let directory = self.0.join("supplies").join(name);
        fs::create_dir_all(&directory).unwrap();
        for (file, text) in files {
            fs::write(directory.join(file), text).unwrap();
        }
    }

    /// What weir was asked to do on this occasion.
    fn event(&self, below_percent: &str) -> String {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/power");
        let status = Command::new(script)
            .env("PATH", format!("{}:/usr/bin:/bin", self.0.join("bin").display()))
            .env("SUPPLIES", self.0.join("supplies"))
            .env("MARK", self.0.join("mark"))
            .env("WEIR_BATTERY_OFF", below_percent)
            .env("WEIR_ON", "--size 4GiB")
            .status()
            .unwrap();
        assert!(status.success());
        let asked = fs::read_to_string(self.0.join("asked")).unwrap_or_default();
        let _ = fs::remove_file(self.0.join("asked"));
        asked.trim().to_owned()
    }
}

impl Drop for Laptop {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[test]
fn swap_goes_off_on_a_low_battery_and_on_again_on_mains_and_only_then() {
    let laptop = Laptop::new("policy");
    laptop.supply("AC", &[("type", "Mains"), ("online", "0")]);
    laptop.supply("BAT0", &[("type", "Battery"), ("capacity", "41")]);
    laptop.supply("mouse", &[("type", "Battery"), ("capacity", "3"), ("scope", "Device")]);
    assert_eq!(laptop.event(""), "", "never, unless asked for");
    assert_eq!(laptop.event("20"), "", "41 % is enough");
    laptop.supply("BAT0", &[("capacity", "19")]);
    assert_eq!(laptop.event("20"), "off");
    assert_eq!(laptop.event("20"), "", "once");
    laptop.supply("AC", &[("online", "1")]);
    assert_eq!(laptop.event("20"), "on --size 4GiB");
    assert_eq!(laptop.event("20"), "", "only what it turned off itself");
}
