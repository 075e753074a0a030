//! A model of md and bcache in memory, in which a test dies after each change.

use super::superblock::{Lack, Superblock};
use super::system::{Backing, Link, System};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::Duration;
use weir_cli::failure::Failure;

/// A registered array or disk.
#[derive(Clone, PartialEq, Debug)]
struct Registered {
    shown: Backing,
    set: Option<String>,
    is_detaching: bool,
}

/// The kernel and its disks, which outlive a process that is killed.
#[derive(Clone, PartialEq, Debug, Default)]
pub struct World {
    modules: BTreeSet<String>,
    arrays: BTreeMap<PathBuf, String>,
    members: BTreeMap<PathBuf, String>,
    superblocks: BTreeMap<PathBuf, Superblock>,
    caches: BTreeSet<PathBuf>,
    backings: BTreeMap<PathBuf, Registered>,
    sets: BTreeMap<String, PathBuf>,
    /// Arrays and disks that bcache has stopped, with the pages that their set still has for them.
    stopped: BTreeMap<PathBuf, Registered>,
    /// Number of superblocks that were made for arrays and disks. Each superblock gets another
    /// identity by this number.
    made: u32,
    /// Whether the model has a udev, which gives each new superblock to bcache later. `appeared`
    /// has the devices that it has not given to bcache yet.
    pub has_udev: bool,
    appeared: BTreeSet<PathBuf>,
    /// The settings that were written.
    pub settings: BTreeMap<String, String>,
    /// The cache's device answers with errors.
    pub is_dead: bool,
    /// Bytes that went home, and bytes that were given up.
    pub home: u64,
    pub given_up: u64,
}

/// A machine whose process may be killed before its next change.
#[derive(Debug)]
pub struct Model {
    pub world: World,
    /// Number of changes until the process is killed; `None`: the process is not killed.
    pub left: Option<u32>,
}

impl Model {
    pub fn new(world: World, left: Option<u32>) -> Self {
        Model { world, left }
    }

    fn spend(&mut self) -> Result<&mut World, Failure> {
        match &mut self.left {
            Some(0) => return Err(Failure::Failed("killed".to_owned())),
            Some(left) => *left -= 1,
            None => {}
        }
        self.world.register_what_appeared();
        Ok(&mut self.world)
    }
}

impl World {
    /// Writes bytes to the device of the stack. Only the cache has these bytes afterwards.
    pub fn write(&mut self, bytes: u64) {
        for (device, backing) in &mut self.backings {
            backing.shown.dirty += bytes;
            backing.shown.link = Link::Dirty;
            self.superblocks.get_mut(device).unwrap().lack = Lack::Dirty;
        }
    }

    fn register_what_appeared(&mut self) {
        for device in std::mem::take(&mut self.appeared) {
            if !self.superblocks.contains_key(&device) {
                continue;
            }
            let shown = Backing { device: Some("bcache0".into()), link: Link::NoCache, dirty: 0 };
            let fresh = Registered { shown, set: None, is_detaching: false };
            self.backings.entry(device).or_insert(fresh);
        }
    }

    /// A udev assembles the disks of an unfinished array, and chooses the array's name itself.
    pub fn assemble(&mut self) {
        if self.arrays.is_empty() {
            self.arrays = self.members.values().map(|uuid| ("/dev/md127".into(), uuid.clone())).collect();
        }
    }

    /// Bcache stops all arrays and disks, as it does after many of their requests failed. The set
    /// stays alive.
    pub fn stop_backings(&mut self) {
        self.stopped.append(&mut self.backings);
    }

    /// The user has bcache serve all arrays and disks without their cache.
    pub fn go_on_without_cache(&mut self) {
        for (device, backing) in &mut self.backings {
            (backing.set, backing.shown.link, backing.shown.dirty) = (None, Link::Inconsistent, 0);
            self.superblocks.get_mut(device).unwrap().lack = Lack::Stale;
        }
    }

    /// The pages that the disks lack, as each superblock says.
    pub fn lacks(&self) -> Vec<Lack> {
        let is_cache = |device: &&PathBuf| self.caches.contains(*device);
        let disks = self.superblocks.iter().filter(|(device, _)| !is_cache(device));
        disks.map(|(_, found)| found.lack).collect()
    }

    /// Another program makes the superblock of a disk.
    pub fn remake(&mut self, device: &Path) {
        self.superblocks.get_mut(device).unwrap().uuid = "another".to_owned();
    }

    /// Whether the kernel has anything of a stack.
    pub fn is_running(&self) -> bool {
        !(self.arrays.is_empty() && self.backings.is_empty() && self.sets.is_empty())
    }

    /// The disks that carry marks of an array.
    pub fn marked(&self) -> usize {
        self.members.len()
    }

    fn go_on(&mut self) {
        for (device, backing) in self.backings.clone() {
            let Some(set) = backing.set.filter(|_| backing.is_detaching) else { continue };
            let found = self.superblocks.get_mut(&device).unwrap();
            if self.is_dead {
                self.sets.remove(&set);
                if backing.shown.dirty > 0 {
                    self.backings.remove(&device);
                }
                continue;
            }
            let here = self.backings.get_mut(&device).unwrap();
            let part = here.shown.dirty.min(4096);
            here.shown.dirty -= part;
            self.home += part;
            if here.shown.dirty == 0 {
                here.shown.link = Link::NoCache;
                (here.set, here.is_detaching, found.lack) = (None, false, Lack::NoCache);
                found.set = "none".to_owned();
            }
        }
    }
}

impl System for Model {
    fn has_module(&self, name: &str) -> bool {
        self.world.modules.contains(name)
    }

    fn array(&self, uuid: &str) -> Option<PathBuf> {
        self.world.arrays.iter().find(|(_, it)| *it == uuid).map(|(path, _)| path.clone())
    }

    fn member(&self, disk: &Path) -> Option<String> {
        self.world.members.get(disk).cloned()
    }

    fn superblock(&self, device: &Path) -> Option<Superblock> {
        let is_readable = !(self.world.is_dead && self.world.caches.contains(device));
        self.world.superblocks.get(device).filter(|_| is_readable).cloned()
    }

    fn backing(&self, device: &Path) -> Option<Backing> {
        Some(self.world.backings.get(device)?.shown.clone())
    }

    fn has_set(&self, uuid: &str) -> bool {
        self.world.sets.contains_key(uuid)
    }

    fn load(&mut self, name: &str) -> Result<(), Failure> {
        self.spend()?.modules.insert(name.to_owned());
        Ok(())
    }

    fn unload(&mut self, name: &str) -> Result<(), Failure> {
        self.spend()?.modules.remove(name);
        Ok(())
    }

    fn make_array(&mut self, path: &Path, uuid: &str, members: &[PathBuf]) -> Result<(), Failure> {
        // mdadm may be killed between two disks.
        for disk in members {
            let before = self.spend()?.members.insert(disk.clone(), uuid.to_owned());
            assert_eq!(before, None, "{} carries an array", disk.display());
        }
        self.spend()?.arrays.insert(path.to_owned(), uuid.to_owned());
        Ok(())
    }

    fn stop_array(&mut self, path: &Path) -> Result<(), Failure> {
        let world = self.spend()?;
        if world.backings.contains_key(path) {
            return Err(Failure::Failed("busy".to_owned()));
        }
        world.arrays.remove(path).expect("it runs");
        Ok(())
    }

    fn erase_member(&mut self, disk: &Path) -> Result<(), Failure> {
        let world = self.spend()?;
        let uuid = world.members.remove(disk).expect("it carries one");
        assert!(!world.arrays.values().any(|it| *it == uuid), "its array runs");
        Ok(())
    }

    fn make_backing(&mut self, device: &Path) -> Result<(), Failure> {
        let world = self.spend()?;
        world.made += 1;
        let uuid = format!("backing {}", world.made);
        let made = Superblock { uuid, set: "none".into(), lack: Lack::NoCache };
        world.appeared.extend(world.has_udev.then(|| device.to_owned()));
        let before = world.superblocks.insert(device.to_owned(), made);
        assert_eq!(before, None, "make-bcache refuses a device that carries a superblock");
        Ok(())
    }

    fn make_set(&mut self, device: &Path, uuid: &str, _bytes: u64) -> Result<(), Failure> {
        let world = self.spend()?;
        let made = Superblock { uuid: "cache".into(), set: uuid.to_owned(), lack: Lack::NoCache };
        world.caches.insert(device.to_owned());
        let before = world.superblocks.insert(device.to_owned(), made);
        assert_eq!(before, None, "make-bcache refuses a device that carries a superblock");
        Ok(())
    }

    fn erase_superblock(&mut self, device: &Path) -> Result<(), Failure> {
        let world = self.spend()?;
        let erased = world.superblocks.remove(device).expect("it carries one");
        world.given_up += u64::from(erased.lack == Lack::Dirty);
        assert!(!world.backings.contains_key(device), "bcache has it");
        assert!(!world.sets.values().any(|it| it == device), "bcache has it");
        world.caches.remove(device);
        Ok(())
    }

    fn erase_marks(&mut self, array: &Path) -> Result<(), Failure> {
        let world = self.spend()?;
        world.superblocks.remove(array);
        assert!(!world.backings.contains_key(array), "bcache has it");
        Ok(())
    }

    fn register(&mut self, device: &Path) -> Result<(), Failure> {
        let world = self.spend()?;
        let found = world.superblocks.get(device).expect("it carries one");
        if world.caches.contains(device) {
            world.sets.insert(found.set.clone(), device.to_owned());
        } else {
            let shown = Backing { device: Some("bcache0".into()), link: Link::NoCache, dirty: 0 };
            let fresh = Registered { shown, set: None, is_detaching: false };
            let has_set = |it: &Registered| it.set.as_ref().is_some_and(|set| world.sets.contains_key(set));
            let again = world.stopped.remove(device).filter(has_set);
            world.backings.entry(device.to_owned()).or_insert(again.unwrap_or(fresh));
        }
        Ok(())
    }

    fn attach(&mut self, backing: &Path, set: &str) -> Result<(), Failure> {
        let world = self.spend()?;
        assert!(world.sets.contains_key(set), "no such set");
        let registered = world.backings.get_mut(backing).expect("registered");
        (registered.set, registered.shown.link) = (Some(set.to_owned()), Link::Clean);
        let found = world.superblocks.get_mut(backing).expect("it carries one");
        (found.lack, found.set) = (Lack::Clean, set.to_owned());
        Ok(())
    }

    fn detach(&mut self, backing: &Path) -> Result<(), Failure> {
        self.spend()?.backings.get_mut(backing).expect("registered").is_detaching = true;
        Ok(())
    }

    fn stop_backing(&mut self, backing: &Path) -> Result<(), Failure> {
        let stopped = self.spend()?.backings.remove(backing).expect("registered");
        assert_eq!(stopped.shown.dirty, 0, "pages are lost");
        Ok(())
    }

    fn unregister(&mut self, set: &str) -> Result<(), Failure> {
        let world = self.spend()?;
        world.sets.remove(set).expect("registered");
        let uses = |it: &Registered| it.set.as_deref() == Some(set);
        assert!(!world.backings.values().chain(world.stopped.values()).any(uses), "pages are lost");
        Ok(())
    }

    fn set_backing(&mut self, _backing: &Path, name: &str, value: &str) -> Result<(), Failure> {
        self.spend()?.settings.insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    fn set_set(&mut self, _set: &str, name: &str, value: &str) -> Result<(), Failure> {
        self.spend()?.settings.insert(name.to_owned(), value.to_owned());
        Ok(())
    }

    fn pause(&mut self, _time: Duration) -> Result<(), Failure> {
        self.spend()?.go_on();
        Ok(())
    }
}

mod tests {
    use super::*;
    use crate::stack::create::{Plan, build};
    use crate::stack::destroy::{Ended, Wish, undo, wait};
    use crate::stack::report::{Condition, condition};
    use crate::stack::state::{Journal, Phase, read};

    fn directory(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("weir-stack-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        path
    }

    fn plan(homes: &[&str]) -> Plan {
        Plan {
            homes: homes.iter().map(PathBuf::from).collect(),
            array: "/dev/md0".into(),
            cache: ("/dev/nbd0".into(), 64 << 20),
            uuids: ("0123456789abcdef0123456789abcdef".into(), "set".into()),
            backing_settings: vec![("cache_mode", "writeback".into())],
            set_settings: vec![("congested_read_threshold_us", "0".into())],
        }
    }

    /// Makes a stack; `left` changes are done before the process is killed.
    fn make(directory: &Path, world: World, plan: &Plan, left: Option<u32>) -> (World, Result<(), Failure>) {
        let mut model = Model::new(world, left);
        let mut journal = Journal::open(directory).expect("a journal");
        let result = build(&mut model, &mut journal, plan, &mut |_| Ok(()));
        (model.world, result)
    }

    /// Undoes what the journal has.
    fn end(directory: &Path, world: World, wish: Wish, left: Option<u32>) -> (World, Result<Ended, Failure>) {
        let mut model = Model::new(world, left);
        let mut journal = Journal::open(directory).expect("a journal");
        let result = undo(&mut model, &mut journal, wish, &mut |_| Ok(()));
        (model.world, result)
    }

    /// Undoes the steps of a journal with this text. The undoing is killed after 0 changes, then in
    /// another run after 1, and so on. After each kill, `meanwhile` changes the world. Then the
    /// stack is undone once more, without a kill. `check` gets the outcome and the number of
    /// changes. Returns the number of kills.
    fn end_killed_anywhere(
        directory: &Path,
        text: &[u8],
        world: &World,
        wish: Wish,
        meanwhile: impl Fn(&mut World),
        check: impl Fn(&World, Ended, u32),
    ) -> u32 {
        let ends = |&left: &u32| {
            std::fs::write(directory.join("state.json"), text).expect("written");
            let (mut half, result) = end(directory, world.clone(), wish, Some(left));
            meanwhile(&mut half);
            let (whole, again) = end(directory, half, wish, None);
            check(&whole, again.expect("undone"), left);
            result.is_ok()
        };
        (0..).find(ends).expect("a number that is enough")
    }

    /// The journal's text, to be put back.
    fn noted(directory: &Path) -> Vec<u8> {
        std::fs::read(directory.join("state.json")).expect("a journal")
    }

    fn settled(mut world: World) -> World {
        world.settings.clear();
        (world.home, world.made) = (0, 0);
        world
    }

    #[test]
    fn a_create_that_is_killed_after_any_change_is_undone_also_by_one_that_is_killed_itself() {
        for homes in [&["/dev/sdb", "/dev/sdc"][..], &["/dev/sdb"]] {
            let directory = directory(&format!("create-{}", homes.len()));
            let mut died = 0;
            for left in 0.. {
                let (world, result) = make(&directory, World::default(), &plan(homes), Some(left));
                if result.is_ok() {
                    break;
                }
                died += 1;
                let text = noted(&directory);
                for until in 0.. {
                    std::fs::write(directory.join("state.json"), &text).expect("written");
                    let (half, result) = end(&directory, world.clone(), Wish::default(), Some(until));
                    let (whole, _) = end(&directory, half, Wish::default(), None);
                    assert_eq!(settled(whole), World::default(), "killed after {left}, then {until}");
                    if result.is_ok() {
                        break;
                    }
                }
                std::fs::remove_dir_all(&directory).expect("removed");
            }
            assert!(died >= 8, "{died} deaths");
            let _ = std::fs::remove_dir_all(&directory);
        }
    }

    #[test]
    fn a_stack_has_its_settings_and_a_destroy_killed_anywhere_brings_every_dirty_byte_home() {
        let directory = directory("destroy");
        let (mut world, result) = make(&directory, World::default(), &plan(&["/dev/sdb", "/dev/sdc"]), None);
        result.expect("made");
        assert_eq!(read(&directory).expect("readable").expect("there").phase, Phase::Up);
        assert_eq!(world.settings["cache_mode"], "writeback");
        assert_eq!(world.settings["congested_read_threshold_us"], "0");
        world.write(20 << 10);
        let text = noted(&directory);
        for wipe in [false, true] {
            let wish = Wish { wipe, ..Wish::default() };
            let check = |whole: &World, _: Ended, left: u32| {
                assert_eq!((whole.home, whole.given_up), (20 << 10, 0), "killed after {left}");
                assert!(!whole.is_running(), "killed after {left}: {whole:?}");
                let kept = if wipe { (0, vec![]) } else { (2, vec![Lack::NoCache]) };
                assert_eq!((whole.marked(), whole.lacks()), kept, "killed after {left}");
            };
            let died = end_killed_anywhere(&directory, &text, &world, wish, |_| {}, check);
            assert!(died >= 10, "{died} deaths");
        }
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn a_cache_that_died_with_dirty_pages_is_told_of_and_nothing_is_touched_until_they_are_given_up() {
        let directory = directory("dead");
        let (mut world, _) = make(&directory, World::default(), &plan(&["/dev/sdb", "/dev/sdc"]), None);
        world.write(12 << 10);
        world.is_dead = true;
        let (mut dead, result) = end(&directory, world, Wish::default(), None);
        let Err(Failure::Failed(said)) = result else { panic!("{result:?}") };
        assert!(
            said.contains("the cache /dev/nbd0 is dead, and about 12KiB that only it had is lost"),
            "{said}"
        );
        for _ in 0..2 {
            let (again, result) = end(&directory, dead.clone(), Wish { wipe: true, ..Wish::default() }, None);
            let Err(Failure::Failed(said)) = result else { panic!("{result:?}") };
            assert!(said.contains("some of its 64MiB that only it had is lost"), "{said}");
            assert_eq!(again.lacks(), [Lack::Dirty]);
            dead = again;
        }
        let wish = Wish { lose_dirty: true, wipe: false };
        let (ended, result) = end(&directory, dead, wish, None);
        assert_eq!(result.expect("given up"), Ended { has_lost: true });
        assert_eq!((ended.given_up, ended.lacks()), (1, vec![Lack::NoCache]));
        assert!(!ended.is_running(), "{ended:?}");
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn pages_of_a_cache_that_lives_come_home_also_when_bcache_has_stopped_the_disks() {
        let directory = directory("stopped");
        let (mut world, _) = make(&directory, World::default(), &plan(&["/dev/sdb", "/dev/sdc"]), None);
        world.write(20 << 10);
        world.stop_backings();
        let state = read(&directory).expect("readable").expect("there");
        assert_eq!(condition(&Model::new(world.clone(), None), &state), Condition::BackingStopped);
        let text = noted(&directory);
        for lose_dirty in [false, true] {
            let wish = Wish { lose_dirty, ..Wish::default() };
            end_killed_anywhere(
                &directory,
                &text,
                &world,
                wish,
                |_| {},
                |whole, ended, left| {
                    assert_eq!(ended, Ended { has_lost: false });
                    assert_eq!((whole.home, whole.given_up), (20 << 10, 0), "killed after {left}");
                    assert_eq!(whole.lacks(), [Lack::NoCache], "killed after {left}");
                    assert!(!whole.is_running(), "killed after {left}: {whole:?}");
                },
            );
        }
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn lost_pages_are_told_of_also_by_the_destroy_that_ends_one_that_was_killed() {
        let directory = directory("told");
        let (mut world, _) = make(&directory, World::default(), &plan(&["/dev/sdb", "/dev/sdc"]), None);
        world.write(12 << 10);
        world.is_dead = true;
        let text = noted(&directory);
        let wish = Wish { lose_dirty: true, ..Wish::default() };
        end_killed_anywhere(
            &directory,
            &text,
            &world,
            wish,
            |_| {},
            |_, ended, left| {
                assert_eq!(ended, Ended { has_lost: true }, "killed after {left}");
            },
        );
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn disks_that_went_on_without_a_cache_that_had_pages_have_lost_them() {
        let directory = directory("stale");
        let (mut world, _) = make(&directory, World::default(), &plan(&["/dev/sdb"]), None);
        world.write(12 << 10);
        world.go_on_without_cache();
        let mut without_bcache = world.clone();
        without_bcache.stop_backings();
        let text = noted(&directory);
        for world in [world, without_bcache] {
            std::fs::write(directory.join("state.json"), &text).expect("written");
            let state = read(&directory).expect("readable").expect("there");
            assert_eq!(condition(&Model::new(world.clone(), None), &state), Condition::PagesLost);
            let (world, result) = end(&directory, world, Wish::default(), Some(1000));
            let Err(Failure::Failed(said)) = result else { panic!("{result:?}") };
            assert!(said.contains("some of its 64MiB that only it had is lost"), "{said}");
            let wish = Wish { lose_dirty: true, ..Wish::default() };
            let (ended, result) = end(&directory, world, wish, Some(1000));
            assert_eq!(result.expect("given up"), Ended { has_lost: true });
            assert_eq!(ended.lacks(), [Lack::NoCache]);
            assert!(!ended.is_running(), "{ended:?}");
        }
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn what_udev_takes_meanwhile_does_not_keep_a_stack_from_its_end() {
        let directory = directory("udev");
        for homes in [&["/dev/sdb", "/dev/sdc"][..], &["/dev/sdb"]] {
            let (mut world, _) = make(&directory, World::default(), &plan(homes), None);
            world.write(12 << 10);
            (world.is_dead, world.has_udev) = (true, true);
            let text = noted(&directory);
            let wish = Wish { lose_dirty: true, ..Wish::default() };
            let udev = World::register_what_appeared;
            end_killed_anywhere(&directory, &text, &world, wish, udev, |whole, ended, left| {
                assert_eq!(ended, Ended { has_lost: true }, "killed after {left}");
                assert_eq!(whole.lacks(), [Lack::NoCache], "killed after {left}");
                assert!(!whole.is_running(), "killed after {left}: {whole:?}");
            });
            std::fs::remove_dir_all(&directory).expect("removed");
        }
    }

    #[test]
    fn an_array_that_udev_has_assembled_at_another_path_is_stopped() {
        let directory = directory("assembled");
        let mut assembled = 0;
        for left in 0.. {
            let homes = ["/dev/sdb", "/dev/sdc"];
            let (mut half, result) = make(&directory, World::default(), &plan(&homes), Some(left));
            if result.is_ok() {
                break;
            }
            half.assemble();
            assembled += u32::from(half.arrays.contains_key(Path::new("/dev/md127")));
            let (whole, again) = end(&directory, half, Wish::default(), None);
            again.expect("undone");
            assert_eq!(settled(whole), World::default(), "killed after {left}");
            std::fs::remove_dir_all(&directory).expect("removed");
        }
        assert!(assembled > 0);
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn a_stack_is_made_again_of_disks_whose_stripe_still_carries_the_one_before() {
        let directory = directory("again");
        let plan = plan(&["/dev/sdb", "/dev/sdc"]);
        let (world, _) = make(&directory, World::default(), &plan, None);
        for is_taken_by_udev in [false, true] {
            let (mut ended, result) = end(&directory, world.clone(), Wish::default(), None);
            result.expect("undone");
            ended.members.clear();
            if is_taken_by_udev {
                let shown = Backing { device: None, link: Link::NoCache, dirty: 0 };
                let taken = Registered { shown, set: None, is_detaching: false };
                ended.backings.insert(plan.array.clone(), taken);
            }
            std::fs::remove_dir_all(&directory).expect("removed");
            let (again, result) = make(&directory, ended, &plan, None);
            result.expect("made");
            assert_eq!(again.lacks(), [Lack::Clean]);
        }
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn a_device_that_does_not_come_is_given_up_after_a_while() {
        let mut model = Model::new(World::default(), None);
        let result = wait(&mut model, &mut |_| Ok(()), "bcache does not take /dev/md0", &|_| false);
        let Err(Failure::Failed(said)) = result else { panic!("{result:?}") };
        assert_eq!(said, "bcache does not take /dev/md0, after 30 s; the kernel's log says why (dmesg)");
    }

    #[test]
    fn a_cache_that_died_clean_costs_nothing() {
        let directory = directory("clean");
        let (mut world, _) = make(&directory, World::default(), &plan(&["/dev/sdb"]), None);
        world.is_dead = true;
        let (ended, result) = end(&directory, world, Wish::default(), None);
        result.expect("nothing is lost");
        assert_eq!((ended.given_up, ended.lacks()), (0, vec![Lack::NoCache]));
        assert!(!ended.is_running(), "{ended:?}");
        std::fs::remove_dir_all(&directory).expect("removed");
    }

    #[test]
    fn a_disk_that_another_program_has_made_its_own_meanwhile_is_left_alone() {
        let directory = directory("other");
        let (world, _) = make(&directory, World::default(), &plan(&["/dev/sdb"]), None);
        let text = noted(&directory);
        let wish = Wish { wipe: true, ..Wish::default() };
        let (mut ended, _) = end(&directory, world, wish, None);
        assert_eq!(ended.lacks(), []);
        std::fs::write(directory.join("state.json"), &text).expect("written");
        let mut model = Model::new(ended, None);
        model.make_backing(Path::new("/dev/sdb")).expect("made");
        model.world.remake(Path::new("/dev/sdb"));
        ended = model.world;
        let (after, result) = end(&directory, ended, wish, None);
        result.expect("nothing to do");
        assert_eq!(after.lacks(), [Lack::NoCache]);
        std::fs::remove_dir_all(&directory).expect("removed");
    }
}
