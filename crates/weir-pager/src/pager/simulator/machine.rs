//! The simulated kernel, as the pager calls it. The program's threads run whenever the pager makes
//! a request.

use super::program::Program;
use super::world::{BASE, OWN, World, address, page_of};
use crate::kernel::{Kernel, Size};
use crate::maps::Mapping;
use crate::pager::work::PAUSE;
use crate::uffd::{Event, Stopped};
use crate::{BLOCK_PAGES, Error};
use rustix::io::Errno;
use rustix::mm::Advice;
use std::time::Duration;
use weir_core::{PAGE_SIZE, PageBytes};

/// Makes threads that wait for a page in `start..end` try their access again.
fn look_again(world: &mut World, program: &mut Program, start: usize, end: usize) {
    for (number, thread) in program.threads.iter_mut().enumerate() {
        if thread.waits_for.is_some_and(|page| (start..end).contains(&page)) {
            thread.waits_for = None;
            world.faults.retain(|&(_, waits)| waits != number);
        }
    }
}

/// The simulated kernel of the pager: its state (the world), and the program that runs on it.
pub struct Machine {
    pub world: World,
    pub program: Program,
}

impl Machine {
    /// Lets the program's threads run for a while.
    fn pass(&mut self) {
        self.world.now += Duration::from_nanos(500);
        if self.program.has_begun && self.world.random.one_in(3) {
            for _ in 0..self.world.random.below(6) {
                self.step();
            }
        }
        self.program.idle_calls += 1;
        assert!(self.program.idle_calls < 3_000_000, "nothing goes on any more: {:?}", self.program.threads);
    }

    fn step(&mut self) -> bool {
        self.world.now += Duration::from_nanos(200);
        self.program.step(&mut self.world)
    }

    /// Fills the missing pages of a range in order, up to the first page that is not missing.
    fn fill(
        &mut self,
        at: usize,
        bytes: usize,
        mut with: impl FnMut(&mut World, usize),
    ) -> Result<(), Stopped> {
        self.pass();
        let (start, count) = (page_of(at), bytes / PAGE_SIZE);
        self.world.may_fill(start, start + count).map_err(|why| Stopped { done: 0, why })?;
        let (mut done, mut refused) = (0, None);
        while done < count && !self.world.is_something(start + done) {
            refused = self.world.refusal();
            if refused.is_some() {
                break;
            }
            with(&mut self.world, start + done);
            done += 1;
        }
        look_again(&mut self.world, &mut self.program, start, start + done);
        match done {
            _ if done == count => Ok(()),
            0 => Err(Stopped { done: 0, why: refused.unwrap_or(Errno::EXIST) }),
            _ => Err(Stopped { done: done * PAGE_SIZE, why: Errno::AGAIN }),
        }
    }
}

impl Kernel for Machine {
    fn reserve(&mut self, bytes: usize) -> Result<usize, Error> {
        let start = self.world.own_next;
        let end = start + bytes / PAGE_SIZE;
        self.world.own_next = (end + BLOCK_PAGES).next_multiple_of(BLOCK_PAGES);
        assert!(end <= OWN, "the simulated pager has no more memory");
        self.world.map(start, end);
        Ok(address(start))
    }

    fn register(&mut self, start: usize, end: usize) -> Result<(), Errno> {
        self.pass();
        let (start, end) = (page_of(start), page_of(end));
        if self.world.areas.range(..end).next_back().is_none_or(|(_, area)| area.end <= start) {
            return Err(Errno::INVAL);
        }
        self.world.say(start..end, "is registered");
        self.world.change(start, end, |area| area.is_registered = true);
        Ok(())
    }

    fn unregister(&mut self, start: usize, end: usize) -> Result<(), Errno> {
        // Once a process has as many mappings as the kernel allows, the kernel refuses to split
        // one.
        let is_edge = |page: usize| self.world.area(page).is_none_or(|(start, _)| start == page);
        assert!(is_edge(page_of(start)) && is_edge(page_of(end)), "the pager's memory would be split");
        self.world.change(page_of(start), page_of(end), |area| area.is_registered = false);
        look_again(&mut self.world, &mut self.program, page_of(start), page_of(end));
        Ok(())
    }

    fn wake(&mut self, at: usize, bytes: usize) {
        self.pass();
        look_again(&mut self.world, &mut self.program, page_of(at), page_of(at + bytes));
    }

    /// Moves pages as `mm/userfaultfd.c` of Linux 6.18 does, with pages of 4 KiB.
    fn move_pages(&mut self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped> {
        self.pass();
        let Machine { world, program } = self;
        let (to, from, count) = (page_of(to), page_of(from), bytes / PAGE_SIZE);
        let refused = |why| Err(Stopped { done: 0, why });
        if world.changing > 0 {
            return refused(Errno::AGAIN);
        }
        let (Some((_, source)), Some((_, target))) = (world.area(from), world.area(to)) else {
            return refused(Errno::INVAL);
        };
        let are_like = source.is_locked == target.is_locked && !source.is_readonly && !target.is_readonly;
        if from + count > source.end || to + count > target.end || !target.is_registered || !are_like {
            return refused(Errno::INVAL);
        }
        // There may be no memory for a page table.
        if let Some(why) = world.refusal() {
            return refused(why);
        }
        let (mut done, mut why) = (0, None);
        while done < count {
            let (source, target) = (from + done, to + done);
            let entry = world.entries[source];
            why = if world.is_something(target) {
                Some(Errno::EXIST)
            } else if entry.is_poisoned {
                Some(Errno::FAULT)
            } else if !entry.is_there {
                Some(Errno::NOENT)
            } else if entry.is_pinned || entry.is_shared {
                Some(Errno::BUSY)
            } else {
                None
            };
            if why.is_some() {
                break;
            }
            let content = world.word(source);
            world.go(source);
            world.come(target, content);
            world.entries[target].is_lent = entry.is_lent;
            if entry.is_migrating || world.random.one_in(world.migrates) {
                // The real kernel waits for a migrating page and moves it, but does not count it as
                // moved. Then it tries the page again, and finds it at its new place.
                why = Some(Errno::EXIST);
                break;
            }
            done += 1;
        }
        look_again(world, program, to, to + done);
        match why {
            None => Ok(()),
            Some(why) if done == 0 => refused(why),
            Some(_) => Err(Stopped { done: done * PAGE_SIZE, why: Errno::AGAIN }),
        }
    }

    fn copy(&mut self, to: usize, from: usize, bytes: usize) -> Result<(), Stopped> {
        let start = page_of(to);
        let from = page_of(from);
        self.fill(to, bytes, |world, page| {
            let from = from + (page - start);
            assert!(world.entries[from].is_there, "the pager copies what is not there");
            world.come(page, world.word(from));
        })
    }

    fn zero(&mut self, at: usize, bytes: usize) -> Result<(), Stopped> {
        let at = if bytes == 0 { BASE } else { at };
        self.fill(at, bytes, |world, page| world.come(page, 0))
    }

    fn poison(&mut self, at: usize, bytes: usize) -> Result<(), Stopped> {
        self.fill(at, bytes, |world, page| world.entries[page].is_poisoned = true)
    }

    fn is_registered(&mut self, page: usize) -> Result<bool, Errno> {
        self.pass();
        match self.world.changing {
            0 => Ok(self.world.area(page_of(page)).is_some_and(|(_, area)| area.is_registered)),
            _ => Err(Errno::AGAIN),
        }
    }

    fn event(&mut self) -> Option<Event> {
        self.pass();
        // A userfaultfd hands over page faults before other events.
        if let Some((page, thread)) = self.world.faults.pop_front() {
            assert_eq!(self.program.threads[thread].waits_for, Some(page));
            return Some(Event::Fault(address(page) + self.world.random.below(PAGE_SIZE as u64) as usize));
        }
        let (event, thread) = self.world.events.pop_front()?;
        self.program.threads[thread].waits_for_event = false;
        let pages = |start: usize, end: usize| page_of(start)..page_of(end);
        match event {
            Event::Remove(start, end) => self.world.say(pages(start, end), "is heard to be freed"),
            Event::Unmap(start, end) => self.world.say(pages(start, end), "is heard to be unmapped"),
            Event::Remap(from, to, bytes) => {
                self.world.say(pages(from, from + bytes), "is heard to move");
                self.world.say(pages(to, to + bytes), "is heard to be moved to");
            }
            Event::Fault(_) => {}
        }
        Some(event)
    }

    fn wait(&mut self, longest: Option<Duration>) {
        let until = longest.map(|longest| self.world.now + longest);
        // While the address space changes, the pager may wait before it makes room.
        if self.world.changing == 0 || longest.is_none_or(|longest| longest > PAUSE) {
            self.program.check_limit(&self.world);
        }
        while self.world.faults.is_empty() && self.world.events.is_empty() {
            if until.is_some_and(|until| self.world.now >= until) {
                return;
            }
            if self.step() {
                continue;
            }
            self.program.idle_calls += 1_000;
            match until {
                Some(until) => self.world.now = until,
                None => panic!("all wait for ever: {:?}", self.program.threads),
            }
        }
    }

    fn populated(
        &mut self,
        start: usize,
        end: usize,
        mut found: impl FnMut(usize, usize),
    ) -> Result<(), Errno> {
        self.pass();
        let end = page_of(end);
        let mut at = page_of(start);
        while at < end {
            let is_something = |page: &usize| self.world.is_something(*page);
            let Some(first) = (at..end).find(is_something) else { break };
            at = (first..end).find(|page| !is_something(page)).unwrap_or(end);
            found(address(first), address(at));
        }
        Ok(())
    }

    fn advise(&mut self, at: usize, bytes: usize, advice: Advice) -> Result<(), Errno> {
        let (start, end) = (page_of(at), page_of(at + bytes));
        match advice {
            Advice::LinuxDontFork | Advice::LinuxDoFork => {
                self.pass();
                let is_left_out = advice == Advice::LinuxDontFork;
                self.world
                    .say(start..end, if is_left_out { "is left out of forks" } else { "is for children" });
                self.world.change(start, end, |area| area.is_left_out_of_forks = is_left_out);
            }
            Advice::Random => self.world.change(start, end, |area| area.is_random = true),
            Advice::LinuxDontNeed => {
                assert!(end <= OWN, "the pager frees the program's memory");
                let (_, area) = self.world.area(start).expect("its own memory");
                assert!(!area.is_registered, "the pager would wait for itself");
                (start..end).for_each(|page| self.world.go(page));
            }
            _ => {}
        }
        Ok(())
    }

    fn unlock(&mut self, at: usize, bytes: usize) {
        self.world.change(page_of(at), page_of(at + bytes), |area| area.is_locked = false);
    }

    fn read_mappings(&mut self, mappings: &mut Vec<Mapping>) -> bool {
        self.pass();
        self.world.now += self.world.reading;
        mappings.clear();
        mappings.extend(self.world.areas.iter().map(|(&start, area)| Mapping {
            start: address(start),
            end: address(area.end),
            is_plain: !area.is_readonly,
        }));
        self.pass();
        true
    }

    fn size(&mut self) -> Size {
        Size {
            mapped: self.world.areas.iter().map(|(start, area)| area.end - start).sum(),
            anonymous: self.world.entries.iter().filter(|entry| entry.is_there).count(),
        }
    }

    fn pages(&self, at: usize, count: usize) -> &[PageBytes] {
        let start = page_of(at);
        let is_there = self.world.entries[start..start + count].iter().all(|entry| entry.is_there);
        assert!(is_there, "the pager touches memory of its own that is not there");
        &self.world.own[start..start + count]
    }

    fn pages_mut(&mut self, at: usize, count: usize) -> &mut [PageBytes] {
        let start = page_of(at);
        for page in start..start + count {
            if !self.world.entries[page].is_there {
                let (_, area) = self.world.area(page).expect("its own memory");
                assert!(!area.is_registered, "the pager would wait for itself");
                self.world.come(page, 0);
            }
        }
        &mut self.world.own[start..start + count]
    }

    fn call(&mut self, _: [usize; 6]) {}

    fn is_thread(&mut self, thread: i32) -> Option<bool> {
        Some(self.world.threads.contains(&thread))
    }

    fn now(&self) -> Duration {
        self.world.now
    }
}
