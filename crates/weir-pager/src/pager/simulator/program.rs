//! The simulated program: threads that use memory, change their mappings, and know the content that
//! each page must have.

use super::random::Random;
use super::store::Said;
use super::world::{Area, Entry, OWN, PAGES, World, address, page_of};
use crate::pager::work::WINDOW;
use crate::pager::{BELLS, Shared};
use crate::policy::FRESH;
use crate::uffd::Event;
use crate::{BLOCK, BLOCK_PAGES};
use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};

/// The first page that a program may map.
const FIRST: usize = OWN + BELLS;

/// The properties of one simulated program.
#[derive(Clone, Copy, Debug)]
pub struct Traits {
    pub threads: usize,
    pub accesses: usize,
    /// The limit of resident memory, in blocks.
    pub limit: usize,
    /// Of this many actions of a thread, one changes mappings on average. 0: none does.
    pub changes: u64,
    pub maps: bool,
    /// Number of threads that do nothing but map memory and unmap it again.
    pub churning: usize,
    pub migrates: bool,
    /// Whether it drops pages by `MADV_FREE` too. The kernel may keep such pages for ever.
    pub drops_lazily: bool,
    pub limits: bool,
    /// Whether all resident memory is moved out now and then.
    pub evicts: bool,
    pub is_adopted: bool,
    pub unmaps_at_the_end: bool,
    /// Whether nothing in this history hinders the pager from keeping its limit. Only then the
    /// limit is checked.
    pub keeps_limit: bool,
}

/// Content that a page must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Must {
    Be(u64),
    /// The program gave the page up by MADV_FREE: the kernel may make it zero at any time.
    BeOrZero(u64),
    /// An access to the page got SIGBUS, so no thread uses it any more.
    Nothing,
}

/// A piece of memory that the program mapped, with the content that it must have.
#[derive(Debug)]
struct Object {
    at: usize,
    pages: Vec<Must>,
    /// Number of threads that use the object now.
    users: usize,
    /// Pages that a thread is dropping or moving, so that no other thread may use them now.
    busy: Range<usize>,
    is_readonly: bool,
    /// Number of pages by which the last move enlarged the object. They are the object's last
    /// pages.
    grown: usize,
    /// Whether the object has grown at its present address since it was mapped or moved there.
    has_grown_here: bool,
    /// Whether `mremap` with MREMAP_DONTUNMAP is leaving this mapping behind. Until the call is
    /// over, no other thread changes the mapping.
    is_left: bool,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    /// Read or write a page. The instruction needs the page `also` at the same time.
    Access {
        object: usize,
        page: usize,
        also: usize,
        write: bool,
    },
    /// Unmap pages that belong to no [`Object`].
    Discard {
        from: usize,
        to: usize,
    },
    /// Touch a page that belongs to no [`Object`].
    Touch(usize),
    /// Call `MADV_DONTNEED` or `MADV_FREE` for a range of pages, mapping by mapping.
    Remove {
        from: usize,
        to: usize,
        lazily: bool,
    },
    Zap {
        from: usize,
        to: usize,
        lazily: bool,
    },
    Removed {
        object: usize,
        from: usize,
        to: usize,
        lazily: bool,
    },
    Send(Event),
    /// End a change of the address space: the pager has read the event of the change.
    Done,
    Unmapped(usize),
    Moved(usize),
    Left(usize),
    /// Do not run for this many steps.
    Pause(u64),
    Hold(bool),
    Fork,
    /// The child of a fork ends, or a simulated device stops using pages.
    LetGo,
    Adopt(usize),
    Adopted(usize),
    Stop,
    Ended,
}

/// The way in which a thread chooses its pages.
#[derive(Clone, Copy, Debug)]
enum Habit {
    Stream { at: usize, stride: isize },
    Jump,
    Run { at: usize, left: usize },
    Few(usize),
}

#[derive(Debug)]
pub struct Thread {
    pub waits_for: Option<usize>,
    pub waits_for_event: bool,
    /// The actions that the thread still has to do. The last of them is the next one.
    todo: Vec<Action>,
    object: usize,
    habit: Habit,
    writes: u64,
}

pub struct Program {
    pub threads: Vec<Thread>,
    objects: Vec<Option<Object>>,
    shared: Arc<Shared>,
    said: Arc<Mutex<Said>>,
    traits: Traits,
    /// Whether the program's threads may run. They may once the pager has started.
    pub has_begun: bool,
    /// Number of accesses that the program is still to make.
    budget: usize,
    pub idle_calls: usize,
    next_word: u64,
    bell: usize,
    is_forking: bool,
    is_adopting: bool,
    /// The old place of the memory that moved last. The pager may not have read that move's event
    /// yet.
    left: usize,
    /// The old places of memory that has moved, while the event of the move is not sent yet.
    leaving: Vec<Range<usize>>,
    last: Option<(usize, usize)>,
    sigbus: u64,
}

impl Program {
    pub fn new(random: &mut Random, traits: Traits, shared: Arc<Shared>, said: Arc<Mutex<Said>>) -> Self {
        let thread = |_| Thread {
            waits_for: None,
            waits_for_event: false,
            todo: Vec::new(),
            object: 0,
            habit: Habit::Jump,
            writes: [2, 2, 1, 5, 0][random.below(5) as usize],
        };
        Program {
            threads: (0..traits.threads).map(thread).collect(),
            objects: Vec::new(),
            shared,
            said,
            traits,
            has_begun: false,
            budget: traits.accesses,
            idle_calls: 0,
            next_word: 1,
            bell: 0,
            is_forking: false,
            is_adopting: false,
            left: FIRST,
            leaving: Vec::new(),
            last: None,
            sigbus: 0,
        }
    }

    /// Makes one thread do one action. Returns false if no thread can act.
    pub fn step(&mut self, world: &mut World) -> bool {
        let count = self.threads.len();
        let first = world.random.below(count as u64) as usize;
        for thread in (first..count).chain(0..first) {
            if self.threads[thread].waits_for.is_some() || self.threads[thread].waits_for_event {
                continue;
            }
            match self.threads[thread].todo.pop() {
                Some(action) => {
                    if self.act(world, thread, action) {
                        self.idle_calls = 0;
                    }
                    return true;
                }
                None if self.plan(world, thread) => return true,
                None => {}
            }
        }
        false
    }

    /// Makes a thread do these actions, the last one first, and then nothing.
    fn rest_after(&mut self, thread: usize, actions: &[Action]) {
        let todo = &mut self.threads[thread].todo;
        *todo = vec![Action::Pause(u64::MAX)];
        todo.extend_from_slice(actions);
    }

    /// Makes the first thread do nothing.
    pub fn rest(&mut self) {
        self.rest_after(0, &[]);
    }

    /// Makes the first thread end a change of the address space: it sends this event after a while.
    pub fn end_change(&mut self, event: Event) {
        self.rest_after(0, &[Action::Done, Action::Send(event), Action::Pause(150)]);
    }

    fn object(&mut self, object: usize) -> &mut Object {
        self.objects[object].as_mut().expect("it is in use")
    }

    /// Chooses the next thing that a thread does.
    fn plan(&mut self, world: &mut World, thread: usize) -> bool {
        if self.budget == 0 {
            return self.plan_end(world, thread);
        }
        if thread > 0 && thread + self.traits.churning >= self.threads.len() {
            self.churn(world, thread);
            return true;
        }
        let mapped: usize = self.objects.iter().flatten().map(|object| object.pages.len()).sum();
        let is_wanted =
            mapped < 6 * self.traits.limit * BLOCK_PAGES && self.traits.maps && world.random.one_in(3_000);
        if (mapped < 2 * self.traits.limit * BLOCK_PAGES || is_wanted) && self.map(world, thread) {
            return true;
        }
        if mapped == 0 {
            // No memory is mapped: another thread is still mapping some, or there is no gap for a
            // mapping.
            self.budget = self.budget.saturating_sub(1);
            return true;
        }
        if self.traits.changes > 0 && world.random.one_in(self.traits.changes) {
            self.plan_change(world, thread);
            return true;
        }
        self.background(world);
        self.choose(world, thread);
        let Some(page) = self.next_page(world, thread) else { return true };
        let object = self.threads[thread].object;
        let writes = self.threads[thread].writes;
        let write = !self.object(object).is_readonly && writes > 0 && world.random.one_in(writes);
        let pages = self.object(object).pages.len();
        let also = if world.random.one_in(8) { world.random.below(pages as u64) as usize } else { page };
        self.object(object).users += 1;
        self.budget -= 1;
        self.threads[thread].todo.push(Action::Access { object, page, also, write });
        true
    }

    /// Maps memory that is unmapped again soon. The pager may begin to manage it meanwhile.
    fn churn(&mut self, world: &mut World, thread: usize) {
        self.budget -= 1;
        let pages = 16 + world.random.below(48) as usize;
        let Some(at) = self.gap(world, pages) else { return };
        world.say(at..at + pages, "mapped for a while");
        world.map(at, at + pages);
        let steps = world.random.below(200);
        self.threads[thread].todo.extend([
            Action::Discard { from: at, to: at + pages },
            Action::Pause(steps),
            Action::Touch(at),
        ]);
    }

    /// Plans the end of the history: the first thread reads every page once more, and then stops
    /// the pager.
    fn plan_end(&mut self, world: &mut World, thread: usize) -> bool {
        let others = &self.threads[1..];
        let is_over = others
            .iter()
            .all(|thread| thread.todo.is_empty() && thread.waits_for.is_none() && !thread.waits_for_event);
        if thread != 0 || !is_over {
            return false;
        }
        let (object, page) = self.last.unwrap_or((0, 0));
        if object == self.objects.len() {
            self.threads[0].todo.push(Action::Stop);
            return true;
        }
        let pages = self.objects[object].as_ref().map_or(0, |object| object.pages.len());
        if page >= pages {
            self.last = Some((object + 1, 0));
            if pages > 0 && self.traits.unmaps_at_the_end {
                self.unmap(world, 0, object);
            }
            return true;
        }
        self.last = Some((object, page + 1));
        if self.object(object).pages[page] != Must::Nothing {
            self.object(object).users += 1;
            self.threads[0].todo.push(Action::Access { object, page, also: page, write: false });
        }
        true
    }

    /// Lets the kernel free and migrate pages, and lets devices pin pages. Neither the program nor
    /// the pager gets notice of this.
    fn background(&mut self, world: &mut World) {
        if world.random.one_in(200) {
            let page = FIRST + world.random.below((PAGES - FIRST) as u64) as usize;
            let entry = &mut world.entries[page];
            if entry.is_lazy && entry.is_there {
                world.go(page);
            }
        }
        if self.traits.migrates && world.random.one_in(400) {
            let first = world.random.below(PAGES as u64 - 64) as usize;
            for entry in &mut world.entries[first..first + 64] {
                entry.is_migrating = entry.is_there;
            }
        }
        if self.traits.changes > 0 && world.random.one_in(4_000) {
            let first = FIRST + world.random.below((PAGES - FIRST) as u64 - 32) as usize;
            for entry in &mut world.entries[first..first + 32] {
                entry.is_pinned = entry.is_there;
            }
        }
        if world.random.one_in(8_000) {
            world.entries.iter_mut().for_each(|entry| entry.is_pinned = false);
        }
        if self.traits.evicts && world.random.one_in(2_000) {
            self.shared.evict.store(true, Ordering::SeqCst);
        }
        if self.traits.limits && world.random.one_in(3_000) {
            let limit = 4 + world.random.below(2 * self.traits.limit as u64) as usize;
            self.shared.limit.store(limit, Ordering::Relaxed);
        }
    }

    fn choose(&mut self, world: &mut World, thread: usize) {
        let known: Vec<usize> = (0..self.objects.len()).filter(|&at| self.objects[at].is_some()).collect();
        let has_gone = self.objects.get(self.threads[thread].object).is_none_or(Option::is_none);
        if has_gone || world.random.one_in(600) {
            let object = known[world.random.below(known.len() as u64) as usize];
            let pages = self.object(object).pages.len();
            let at = world.random.below(pages as u64) as usize;
            self.threads[thread].object = object;
            let strides = [1, 1, 7, 64, 512, 512, -512, 1024, -1536, 130, -1];
            self.threads[thread].habit = match world.random.below(8) {
                0..3 => Habit::Stream { at, stride: strides[world.random.below(11) as usize] },
                3..5 => Habit::Jump,
                5..7 => Habit::Run { at, left: 3 },
                _ => Habit::Few(at),
            };
        }
    }

    /// The page that a thread uses next; `None`: another thread is changing that page.
    fn next_page(&mut self, world: &mut World, thread: usize) -> Option<usize> {
        let object = self.threads[thread].object;
        let pages = self.object(object).pages.len();
        let random = &mut world.random;
        let page = match &mut self.threads[thread].habit {
            Habit::Stream { at, stride } => {
                *at = at.wrapping_add_signed(*stride).min(pages * 2) % pages;
                *at
            }
            Habit::Jump => random.below(pages as u64) as usize,
            Habit::Run { at, left } => {
                if *left == 0 {
                    *at = random.below(pages as u64) as usize;
                    *left = random.below(9) as usize + 1;
                }
                *left -= 1;
                *at = (*at + 1) % pages;
                *at
            }
            Habit::Few(at) => (*at + random.below(40) as usize) % pages,
        };
        let object = self.object(object);
        (!object.busy.contains(&page) && object.pages[page] != Must::Nothing).then_some(page)
    }

    /// Finds a gap of `pages` pages that begins at a random page or at a block's boundary.
    fn gap(&self, world: &mut World, pages: usize) -> Option<usize> {
        for _ in 0..40 {
            let mut at = FIRST + world.random.below((PAGES - FIRST - pages) as u64) as usize;
            if world.random.one_in(2) {
                at = at / BLOCK_PAGES * BLOCK_PAGES;
            }
            // Try a place directly behind another mapping, since the kernel often maps there.
            if world.random.one_in(3)
                && let Some((_, area)) = world.areas.range(..at).next_back()
            {
                at = area.end;
            }
            // Try the place that the last move of memory has made free. The pager may not have read
            // the event of that move yet.
            if world.random.one_in(6) {
                at = self.left;
            }
            let is_free = world.area(at).is_none() && world.areas.range(at..at + pages).next().is_none();
            if at >= FIRST && at + pages <= PAGES && is_free {
                return Some(at);
            }
        }
        None
    }

    fn map(&mut self, world: &mut World, thread: usize) -> bool {
        if self.traits.is_adopted && self.is_adopting {
            return false;
        }
        let blocks = 2 + world.random.below(self.traits.limit as u64 * 2) as usize;
        let pages = match world.random.below(3) {
            // Many mappings may lie in one block.
            0 => 16 + world.random.below(3 * BLOCK_PAGES as u64) as usize,
            _ => blocks * BLOCK_PAGES + world.random.below(BLOCK_PAGES as u64) as usize,
        };
        let Some(at) = self.gap(world, pages) else { return false };
        world.say(at..at + pages, "mapped");
        world.map(at, at + pages);
        let object = self.new_object(at, vec![Must::Be(0); pages]);
        if self.traits.is_adopted {
            // A program may not move what it has just asked the pager to manage.
            self.is_adopting = true;
            self.object(object).users += 1;
            self.threads[thread].todo.push(Action::Adopt(object));
        } else if world.random.one_in(2) {
            self.ring(thread);
        }
        true
    }

    fn new_object(&mut self, at: usize, pages: Vec<Must>) -> usize {
        let object = Object {
            at,
            pages,
            users: 0,
            busy: 0..0,
            is_readonly: false,
            grown: 0,
            has_grown_here: false,
            is_left: false,
        };
        match self.objects.iter().position(Option::is_none) {
            Some(free) if self.last.is_none() => {
                self.objects[free] = Some(object);
                free
            }
            _ => {
                self.objects.push(Some(object));
                self.objects.len() - 1
            }
        }
    }

    /// Makes an event that wakes the pager's thread: touches a page and removes it.
    fn ring(&mut self, thread: usize) {
        let page = OWN + self.bell % BELLS;
        self.bell += 1;
        let remove = Action::Remove { from: page, to: page + 1, lazily: false };
        self.threads[thread].todo.extend([Action::Touch(page), remove]);
    }

    fn plan_change(&mut self, world: &mut World, thread: usize) {
        let Some(object) = (0..8).find_map(|_| {
            let at = world.random.below(self.objects.len() as u64) as usize;
            self.objects[at].as_ref().filter(|object| object.busy.is_empty() && !object.is_left).map(|_| at)
        }) else {
            return;
        };
        match world.random.below(20) {
            0..8 => self.give_up(world, thread, object),
            8 => self.unmap(world, thread, object),
            9 => self.cut(world, thread, object),
            10..13 => self.remap(world, thread, object),
            13 => {
                let object = self.object(object);
                let (start, end) = (object.at, object.at + object.pages.len());
                object.is_readonly = !object.is_readonly && object.users == 0;
                let is_readonly = object.is_readonly;
                // Only the second half of the range becomes read-only, so that it becomes a mapping
                // of its own.
                let start = if is_readonly { (start + end) / 2 } else { start };
                world.change(start, end, |area| area.is_readonly = is_readonly);
            }
            14 => {
                let object = self.object(object);
                let at =
                    object.at + world.random.below((object.pages.len() as u64).saturating_sub(16)) as usize;
                let is_locked = world.random.one_in(2);
                let (start, end) = match is_locked {
                    true => (at, (at + 16).min(object.at + object.pages.len())),
                    false => (object.at, object.at + object.pages.len()),
                };
                world.change(start, end, |area| area.is_locked = is_locked);
            }
            15 if !self.is_forking => {
                self.is_forking = true;
                let todo = &mut self.threads[thread].todo;
                todo.extend([Action::Ended, Action::LetGo]);
                todo.push(Action::Hold(false));
                todo.extend([Action::Fork, Action::Hold(true)]);
            }
            16 | 17 => {
                let is_beside = |object: &Option<Object>| {
                    object.as_ref().is_some_and(|object| {
                        object.at + object.pages.len() == self.left
                            && object.busy.is_empty()
                            && !object.is_left
                    })
                };
                let number = self.objects.iter().position(is_beside).unwrap_or(object);
                self.grow(world, thread, number);
            }
            _ => self.ring(thread),
        }
    }

    /// Enlarges an object where it is. The kernel sends no event of that.
    fn grow(&mut self, world: &mut World, thread: usize, number: usize) {
        let is_adopted = self.traits.is_adopted;
        let object = self.object(number);
        let (start, end) = (object.at, object.at + object.pages.len());
        let Some((_, area)) = world.area(start) else { return };
        let next = world.areas.range(end..).next().map_or(PAGES, |(&next, _)| next);
        let is_one = area.end == end && !area.is_locked && !object.is_readonly;
        if is_adopted || object.users > 0 || !is_one || next == end {
            return;
        }
        let pages = 1 + world.random.below((next - end).min(2 * BLOCK_PAGES) as u64) as usize;
        world.say(end..end + pages, "is grown over");
        world.take_areas(start, end);
        world.insert(start, Area { end: end + pages, ..area });
        object.pages.resize(end - start + pages, Must::Be(0));
        object.grown = pages;
        object.has_grown_here = true;
        if world.random.one_in(2) {
            self.change_again(world, thread, number);
        }
    }

    /// Makes a thread change an object again, directly after a change by the same thread. Another
    /// thread may have changed the same place earlier, and may be paused before it sends the event.
    fn change_again(&mut self, world: &mut World, thread: usize, number: usize) {
        match world.random.below(4) {
            0 => self.unmap(world, thread, number),
            1 => self.give_up(world, thread, number),
            2 => self.cut(world, thread, number),
            _ => self.remap(world, thread, number),
        }
    }

    fn give_up(&mut self, world: &mut World, thread: usize, number: usize) {
        let object = self.object(number);
        let pages = object.pages.len();
        let from = world.random.below(pages as u64) as usize;
        let most = [3, 40, 600, 1500][world.random.below(4) as usize];
        let to = (from + 1 + world.random.below(most) as usize).min(pages);
        let (start, end) = (object.at + from, object.at + to);
        let used = self.threads.iter().any(|thread| {
            thread.todo.iter().any(|action| {
                matches!(*action, Action::Access { object, page, .. } if object == number && (from..to).contains(&page))
            })
        });
        let is_locked = world.areas.range(..end).rev().any(|(_, area)| area.end > start && area.is_locked);
        // If the object has grown to a place that other memory is leaving, the pager would confuse
        // the object with the other memory. See the known defects in docs/pager.md.
        let is_leaving = self.leaving.iter().any(|range| range.start < end && start < range.end);
        let lazily = self.traits.drops_lazily && world.random.one_in(3);
        let object = self.object(number);
        if used || is_locked || is_leaving && object.has_grown_here {
            return;
        }
        object.busy = from..to;
        object.users += 1;
        if lazily {
            for must in &mut object.pages[from..to] {
                if let Must::Be(word) = *must {
                    *must = Must::BeOrZero(word);
                }
            }
        }
        self.threads[thread].todo.extend([
            Action::Removed { object: number, from, to, lazily },
            Action::Remove { from: start, to: end, lazily },
        ]);
    }

    fn unmap(&mut self, world: &mut World, thread: usize, number: usize) {
        let object = self.object(number);
        if object.users > 0 || !object.busy.is_empty() {
            return;
        }
        object.users += 1;
        object.busy = 0..object.pages.len();
        let (start, end) = (object.at, object.at + object.pages.len());
        self.threads[thread].todo.push(Action::Unmapped(number));
        self.unmap_range(world, thread, start, end);
    }

    /// Unmaps a range. The kernel first removes its mappings and pages, and then sends the event to
    /// the pager.
    fn unmap_range(&mut self, world: &mut World, thread: usize, start: usize, end: usize) {
        world.say(start..end, "unmapped");
        let areas = world.take_areas(start, end);
        (start..end).for_each(|page| world.go(page));
        if areas.iter().any(|(_, area)| area.is_registered) {
            world.changing += 1;
            let event = Event::Unmap(address(start), address(end));
            self.threads[thread].todo.extend([Action::Done, Action::Send(event)]);
            self.pause(world, thread);
        }
    }

    /// Unmaps a part of an object. The pages behind that part become another object.
    fn cut(&mut self, world: &mut World, thread: usize, number: usize) {
        let object = self.object(number);
        let pages = object.pages.len();
        if object.users > 0 || pages < 8 || object.is_readonly {
            return;
        }
        let mut from = 1 + world.random.below(pages as u64 - 7) as usize;
        let mut to = from + 1 + world.random.below((pages - from - 2).min(698) as u64) as usize;
        // If the object has grown, often unmap all of the object but the new part. No event has
        // told the pager of the new part.
        if object.grown > 0 && world.random.one_in(2) {
            (from, to) = (0, pages - object.grown);
        }
        let at = object.at;
        let behind = object.pages.split_off(to);
        object.grown = 0;
        object.pages.truncate(from);
        if from == 0 {
            object.at = at + to;
            object.pages = behind;
        } else {
            self.new_object(at + to, behind);
        }
        self.unmap_range(world, thread, at + from, at + to);
    }

    fn remap(&mut self, world: &mut World, thread: usize, number: usize) {
        let may_grow = !self.traits.is_adopted;
        let object = self.object(number);
        let pages = object.pages.len();
        if object.users > 0 || object.is_readonly {
            return;
        }
        // Either a part of the object moves, or all of it. If all of it moves, it may also grow.
        let (from, to) = match world.random.one_in(4) && pages > 8 {
            true => {
                let from = world.random.below(pages as u64 / 2) as usize;
                (from, from + 1 + world.random.below((pages - from) as u64 - 1) as usize)
            }
            false => (0, pages),
        };
        let grows = if to - from == pages && may_grow { world.random.below(40) as usize } else { 0 };
        object.grown = 0;
        object.has_grown_here = false;
        let at = object.at;
        let Some(place) = self.gap(world, to - from + grows) else { return };
        let areas = world.take_areas(at + from, at + to);
        // `mremap` moves memory of one mapping only.
        if areas.len() != 1 || areas[0].1.is_locked {
            for (start, area) in areas {
                world.insert(start, area);
            }
            return;
        }
        let area = areas[0].1;
        self.left = at + from;
        if area.is_registered {
            self.leaving.push(at + from..at + to);
        }
        world.say(at + from..at + to, format_args!("moved to {place}"));
        world.say(place..place + (to - from) + grows, format_args!("moved from {}", at + from));
        let entries: Vec<(Entry, u64)> =
            (at + from..at + to).map(|page| (world.entries[page], world.word(page))).collect();
        (at + from..at + to).for_each(|page| world.go(page));
        for (page, (entry, word)) in (place..).zip(entries) {
            world.entries[page] = entry;
            world.set_word(page, word);
        }
        world.insert(place, Area { end: place + (to - from) + grows, ..area });
        // MREMAP_DONTUNMAP leaves a mapping without pages at the old place.
        let stays = grows == 0 && world.random.one_in(4);
        let object = self.object(number);
        let moved = match to - from == pages {
            true => {
                object.at = place;
                object.grown = grows;
                object.pages.resize(pages + grows, Must::Be(0));
                number
            }
            false => {
                let behind = object.pages.split_off(to);
                let part = object.pages.split_off(from);
                if from == 0 {
                    object.at = place;
                    object.pages = part;
                    self.new_object(at + to, behind);
                    number
                } else {
                    self.new_object(at + to, behind);
                    self.new_object(place, part)
                }
            }
        };
        let object = self.object(moved);
        object.users += 1;
        object.busy = 0..object.pages.len();
        let todo = &mut self.threads[thread].todo;
        todo.push(Action::Moved(moved));
        if stays {
            world.say(at + from..at + to, "stays mapped");
            world.insert(at + from, Area { end: at + to, ..area });
            let left = self.new_object(at + from, vec![Must::Be(0); to - from]);
            self.object(left).is_left = true;
            self.threads[thread].todo.push(Action::Left(left));
        }
        let todo = &mut self.threads[thread].todo;
        if area.is_registered && stays {
            world.changing += 1;
            let bytes = (to - from) * weir_core::PAGE_SIZE;
            let event = Event::Remap(address(at + from), address(place), bytes);
            todo.extend([Action::Done, Action::Send(event)]);
            self.pause(world, thread);
        } else if area.is_registered {
            world.changing += 2;
            let bytes = (to - from) * weir_core::PAGE_SIZE;
            let old = address(at + from);
            // The pager gets the event of the move first, and then the one that unmaps the old
            // place. A thread takes its actions from the end of `todo`, so they are pushed in
            // reverse.
            todo.extend([Action::Done, Action::Send(Event::Unmap(old, old + bytes))]);
            self.pause(world, thread);
            let event = Event::Remap(old, address(place), bytes);
            self.threads[thread].todo.extend([Action::Done, Action::Send(event)]);
            self.pause(world, thread);
        }
    }

    /// Lets the kernel stop a thread now and then between a change of the address space and the
    /// event of that change.
    fn pause(&mut self, world: &mut World, thread: usize) {
        if world.random.one_in(5) {
            let steps = world.random.below(300);
            self.threads[thread].todo.push(Action::Pause(steps));
        }
    }

    /// Makes a thread do an action. Returns whether it did more than wait.
    fn act(&mut self, world: &mut World, thread: usize, action: Action) -> bool {
        let todo = &mut self.threads[thread].todo;
        match action {
            Action::Access { object, page, also, write } => {
                let at = self.object(object).at;
                if !self.touch(world, thread, at + also, false, action)
                    || !self.touch(world, thread, at + page, write, action)
                {
                    return false;
                }
                self.accessed(world, object, page, write);
            }
            Action::Discard { from, to } => self.unmap_range(world, thread, from, to),
            Action::Touch(page) => return self.touch(world, thread, page, false, action),
            Action::Remove { from, to, lazily } => {
                if from >= to {
                    return true;
                }
                let Some((_, area)) = world.area(from) else { panic!("page {from} is not mapped") };
                let end = area.end.min(to);
                todo.push(Action::Remove { from: end, to, lazily });
                todo.push(Action::Zap { from, to: end, lazily });
                if area.is_registered {
                    world.changing += 1;
                    let event = Event::Remove(address(from), address(end));
                    todo.extend([Action::Done, Action::Send(event)]);
                }
            }
            Action::Zap { from, to, lazily } => {
                world.say(from..to, if lazily { "may be freed" } else { "is freed" });
                for page in from..to {
                    match lazily {
                        true => world.entries[page].is_lazy = world.entries[page].is_there,
                        false => world.go(page),
                    }
                }
            }
            Action::Removed { object, from, to, lazily } => {
                let object = self.object(object);
                object.busy = 0..0;
                object.users -= 1;
                if !lazily {
                    for must in &mut object.pages[from..to] {
                        if *must != Must::Nothing {
                            *must = Must::Be(0);
                        }
                    }
                }
            }
            Action::Send(event) => {
                if let Event::Remap(from, ..) = event {
                    let said = self.leaving.iter().position(|range| range.start == page_of(from));
                    self.leaving.swap_remove(said.expect("it has moved"));
                }
                world.events.push_back((event, thread));
                self.threads[thread].waits_for_event = true;
            }
            Action::Done => world.changing -= 1,
            Action::Unmapped(object) => self.objects[object] = None,
            Action::Moved(number) => {
                let object = self.object(number);
                object.busy = 0..0;
                object.users -= 1;
                if self.budget > 0 && world.random.one_in(4) {
                    self.change_again(world, thread, number);
                }
            }
            Action::Left(object) => self.object(object).is_left = false,
            Action::Pause(0) => {}
            Action::Pause(steps) => {
                todo.push(Action::Pause(steps - 1));
                return false;
            }
            Action::Hold(true) => {
                self.shared.holds.fetch_add(1, Ordering::SeqCst);
                self.ring(thread);
            }
            Action::Hold(false) => {
                self.shared.holds.fetch_sub(1, Ordering::SeqCst);
                self.ring(thread);
            }
            Action::Fork => {
                world.say(0..PAGES, "fork");
                self.fork(world);
            }
            // The child or the device keeps its pages for a random time.
            Action::LetGo if !world.random.one_in(300) => {
                todo.push(action);
                return false;
            }
            Action::LetGo => world.entries.iter_mut().for_each(|entry| entry.is_shared = false),
            Action::Ended => self.is_forking = false,
            Action::Adopt(object) => {
                let (at, pages) = (self.object(object).at, self.object(object).pages.len());
                self.shared.adopt[0].store(address(at), Ordering::Relaxed);
                self.shared.adopt[1].store(address(at + pages), Ordering::Relaxed);
                self.threads[thread].todo.push(Action::Adopted(object));
                self.ring(thread);
            }
            Action::Adopted(object) => {
                self.object(object).users -= 1;
                self.shared.adopt[1].store(0, Ordering::Relaxed);
                self.is_adopting = false;
            }
            Action::Stop => {
                self.shared.stop.store(true, Ordering::SeqCst);
                self.shared.holds.fetch_add(1, Ordering::SeqCst);
                self.ring(thread);
            }
        }
        true
    }

    /// Touches a page. Returns true if the access succeeded or got SIGBUS, and false if the thread
    /// must wait for the page.
    fn touch(&mut self, world: &mut World, thread: usize, page: usize, write: bool, again: Action) -> bool {
        let entry = &mut world.entries[page];
        if entry.is_poisoned {
            return true;
        }
        if entry.is_there {
            if write {
                entry.is_shared = false;
                entry.is_lazy = false;
            }
            return true;
        }
        self.threads[thread].todo.push(again);
        let (start, area) = world.area(page).expect("a program uses what is mapped");
        if area.is_registered {
            world.say(page..page + 1, "faults");
            self.threads[thread].waits_for = Some(page);
            world.faults.push_back((page, thread));
            return false;
        }
        // The kernel makes a huge page if there is room for one.
        let block = page / BLOCK_PAGES * BLOCK_PAGES;
        let is_huge = start <= block
            && block + BLOCK_PAGES <= area.end
            && world.entries[block..block + BLOCK_PAGES].iter().all(|entry| !entry.is_there);
        let pages = if is_huge { block..block + BLOCK_PAGES } else { page..page + 1 };
        pages.for_each(|page| world.come(page, 0));
        false
    }

    fn accessed(&mut self, world: &mut World, number: usize, page: usize, write: bool) {
        let object = self.object(number);
        let at = object.at + page;
        object.users -= 1;
        if world.entries[at].is_poisoned {
            // Threads that wait for one page get the signal one after the other.
            let is_first = object.pages[page] != Must::Nothing;
            object.pages[page] = Must::Nothing;
            self.sigbus += u64::from(is_first);
            let unreadable = self.said.lock().unwrap().unreadable;
            assert!(unreadable > 0, "page {page} of object {number} is SIGBUS, and every read succeeded");
            return;
        }
        let word = world.word(at);
        self.is_right(number, page, word);
        if write {
            let word = self.next_word;
            self.next_word += 1;
            // Some written words are zero. They make pages of zeros, which the pager marks and must
            // not write to the store. Other words repeat one that was written before.
            let word = if word.is_multiple_of(8) { word / 8 % 3 } else { word };
            world.say(at..at + 1, format_args!("is written: {word:#x}"));
            world.set_word(at, word);
            self.object(number).pages[page] = Must::Be(word);
        }
    }

    fn is_right(&mut self, number: usize, page: usize, word: u64) {
        let object = self.object(number);
        let at = object.at + page;
        match object.pages[page] {
            Must::Be(must) => {
                assert!(word == must, "page {page} of object {number}, at {at}: {word:#x}, not {must:#x}");
            }
            Must::BeOrZero(must) => {
                assert!(word == must || word == 0, "page {page} of {number}: {word:#x}, not {must:#x} or 0");
                if word == 0 {
                    object.pages[page] = Must::Be(0);
                }
            }
            Must::Nothing => {}
        }
    }

    /// Forks. Checks that the child gets all content that the parent has, and lets it share some
    /// pages.
    fn fork(&mut self, world: &mut World) {
        for number in 0..self.objects.len() {
            let Some(object) = &self.objects[number] else { continue };
            let (at, pages) = (object.at, object.pages.len());
            for page in 0..pages {
                let busy = &self.object(number).busy;
                let (_, area) = match world.area(at + page) {
                    Some(area) => area,
                    None if busy.contains(&page) => continue,
                    None => panic!("page {page} of object {number} is not mapped"),
                };
                if busy.contains(&page) || world.entries[at + page].is_poisoned {
                    continue;
                }
                assert!(
                    !area.is_left_out_of_forks,
                    "a child lacks page {page} of object {number} at {:#x}: {area:?} {:?}",
                    address(at),
                    self.threads
                );
                let word = if world.entries[at + page].is_there { world.word(at + page) } else { 0 };
                self.is_right(number, page, word);
                if world.entries[at + page].is_there && !world.random.one_in(4) {
                    world.entries[at + page].is_shared = true;
                }
            }
        }
    }

    /// Checks that resident memory is within the limit, if the pager must keep it in this history.
    /// At its end the pager brings everything, and may wait for the kernel meanwhile.
    pub fn check_limit(&self, world: &World) {
        if !self.traits.keeps_limit || self.shared.stop.load(Ordering::Relaxed) {
            return;
        }
        let count = |pages: Range<usize>| world.entries[pages].iter().filter(|entry| entry.is_there).count();
        let own = count(0..OWN);
        let managed: usize = world
            .areas
            .range(FIRST..)
            .filter(|(_, area)| area.is_registered)
            .map(|(&start, area)| count(start..area.end))
            .sum();
        // Some memory does not count against the limit: the block in which the pager gets new
        // frames (`nursery`), and the pages into which it reads single pages.
        let beside = BLOCK_PAGES + WINDOW;
        // While the kernel migrates pages of all other blocks, the ones that came last stay.
        let stays = if self.traits.migrates { FRESH } else { 0 };
        let limit = (self.shared.limit.load(Ordering::Relaxed) + stays) * BLOCK_PAGES;
        assert!(own + managed <= limit + beside, "{own} + {managed} pages with a limit of {limit}");
    }

    /// Checks that all memory is in place with the right content, after the pager has stopped.
    pub fn check_end(&mut self, world: &World) {
        for number in 0..self.objects.len() {
            let Some(object) = &self.objects[number] else { continue };
            let at = object.at;
            for page in 0..object.pages.len() {
                let entry = world.entries[at + page];
                if !entry.is_poisoned {
                    let word = if entry.is_there { world.word(at + page) } else { 0 };
                    self.is_right(number, page, word);
                }
            }
        }
        let said = self.said.lock().unwrap();
        // Each failed read of the store makes the pages of at most one block give SIGBUS.
        assert!(self.sigbus <= said.unreadable * BLOCK_PAGES as u64);
        assert!(!self.traits.unmaps_at_the_end || said.rooms == 0, "{} rooms are left", said.rooms);
    }
}

const _: () = assert!(BLOCK == BLOCK_PAGES * weir_core::PAGE_SIZE);
