//! A pager over memory of this process, with a store in its heap. Every read must return what was
//! written, whatever the program does to its mappings meanwhile.

use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags};
use std::collections::{BTreeMap, HashSet};
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::ThreadId;
use std::time::{Duration, Instant};
use weir_core::{PAGE_SIZE, PageBytes};
use weir_pager::{BLOCK, BLOCK_PAGES, Error, OpenLane, Options, Pager, Scope, Store, Tell};

const LIMIT: usize = 32 << 20;
const SIZE: usize = 128 << 20;
const PAGES: usize = SIZE / PAGE_SIZE;

#[derive(Default)]
struct Faulty {
    reads_fail: AtomicBool,
    writes_fail: AtomicBool,
    rooms: AtomicUsize,
    /// The threads that have written.
    carriers: Mutex<HashSet<ThreadId>>,
}

/// A store that keeps pages in the heap. It has two further lanes.
#[derive(Clone)]
struct Heap {
    pages: Arc<Mutex<BTreeMap<u64, Box<PageBytes>>>>,
    free: Vec<u64>,
    faulty: Arc<Faulty>,
}

impl Store for Heap {
    fn lanes(&mut self) -> Vec<OpenLane> {
        let lane = |_| {
            let heap = Heap { free: Vec::new(), ..self.clone() };
            Box::new(move || Some(Box::new(heap.clone()) as Box<dyn Store>)) as OpenLane
        };
        (0..2).map(lane).collect()
    }

    fn claim(&mut self) -> Option<u64> {
        let room = self.free.pop()?;
        self.faulty.rooms.fetch_add(1, Ordering::Relaxed);
        Some(room)
    }

    fn release(&mut self, first: u64) {
        self.faulty.rooms.fetch_sub(1, Ordering::Relaxed);
        self.free.push(first);
    }

    fn write(&mut self, first: u64, pages: &[PageBytes]) -> io::Result<()> {
        if self.faulty.writes_fail.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.faulty.carriers.lock().unwrap().insert(std::thread::current().id());
        self.pages.lock().unwrap().extend((first..).zip(pages.iter().map(|page| Box::new(*page))));
        Ok(())
    }

    fn settle(&mut self) -> io::Result<()> {
        Ok(())
    }

    fn read(&mut self, first: u64, out: &mut [PageBytes]) -> io::Result<()> {
        if self.faulty.reads_fail.load(Ordering::Relaxed) {
            return Err(io::ErrorKind::InvalidData.into());
        }
        let pages = self.pages.lock().unwrap();
        for (page, out) in (first..).zip(out) {
            *out = **pages.get(&page).ok_or(io::ErrorKind::NotFound)?;
        }
        Ok(())
    }
}

/// Memory with a pager; one test at a time has it, since all of its pages are counted.
struct Memory {
    base: *mut u8,
    pager: Pager,
    faulty: Arc<Faulty>,
    _turn: MutexGuard<'static, ()>,
}

fn map(bytes: usize) -> *mut u8 {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping overlaps no other.
    unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, protection, MapFlags::PRIVATE) }
        .expect("address space")
        .cast()
}

impl Memory {
    /// Maps the memory; `None` if the machine has no such userfaultfd.
    fn new(name: &str, blocks: usize) -> Option<Self> {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let faulty = Arc::new(Faulty::default());
        let heap = Heap {
            pages: Arc::default(),
            free: (0..blocks as u64).map(|block| block * BLOCK_PAGES as u64).collect(),
            faulty: Arc::clone(&faulty),
        };
        let options = Options { limit: LIMIT, scope: Scope::Adopted, spin: Duration::ZERO };
        let pager = match Pager::start(options, move || Ok((heap, Box::new(|_: &str| {}) as Tell)), |_| {}) {
            Ok(pager) => pager,
            Err(error @ (Error::Denied(_) | Error::Kernel(_))) => {
                println!("skipped: {name}: {error}");
                return None;
            }
            Err(error) => panic!("{error}"),
        };
        let base = map(SIZE);
        pager.adopt(base.expose_provenance(), SIZE);
        Some(Memory { base, pager, faulty, _turn: turn })
    }

    fn word(&self, page: usize) -> *mut u64 {
        self.base.wrapping_add(page * PAGE_SIZE + 8).cast()
    }

    fn write(&self, page: usize, value: u64) {
        // SAFETY: the word is within the mapping.
        unsafe { self.word(page).write_volatile(value) }
    }

    fn read(&self, page: usize) -> u64 {
        // SAFETY: the word is within the mapping.
        unsafe { self.word(page).read_volatile() }
    }

    fn fill(&self) {
        (0..PAGES).for_each(|page| self.write(page, content(page)));
    }

    fn check(&self, pages: impl Iterator<Item = usize>) {
        for page in pages {
            assert_eq!(self.read(page), content(page), "page {page}");
        }
    }

    fn resident(&self) -> usize {
        resident(self.base, SIZE)
    }

    /// Waits until no more memory than the limit is resident.
    fn comes_down(&self) {
        let begun = Instant::now();
        while self.resident() > LIMIT {
            assert!(begun.elapsed() < Duration::from_secs(60), "{}", self.resident());
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn content(page: usize) -> u64 {
    (page as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn resident(base: *mut u8, bytes: usize) -> usize {
    let mut pages = vec![0_u8; bytes / PAGE_SIZE];
    // SAFETY: the buffer has one byte for each page of the mapping.
    assert_eq!(unsafe { libc::mincore(base.cast(), bytes, pages.as_mut_ptr()) }, 0);
    pages.iter().filter(|page| **page & 1 != 0).count() * PAGE_SIZE
}

#[test]
fn what_was_written_comes_back_and_no_more_than_the_limit_is_resident() {
    let Some(memory) = Memory::new("what_was_written_comes_back", 256) else { return };
    let mut most = 0;
    for round in 0..3 {
        if round == 0 {
            memory.fill();
        }
        for page in 0..PAGES {
            assert_eq!(memory.read(page), content(page), "page {page} in round {round}");
            if page % BLOCK_PAGES == 7 {
                most = most.max(memory.resident());
            }
        }
    }
    assert!(most <= LIMIT, "{most} resident");
    let stats = memory.pager.stats();
    assert!(stats.writes > 48 && stats.reads > 0 && stats.prefetched > 0, "{stats:?}");
    assert_eq!((stats.lost, stats.beyond_limit), (0, 0));
    assert!(memory.faulty.carriers.lock().unwrap().len() > 1, "one thread has carried all blocks");
    assert!(
        (PAGES / BLOCK_PAGES - LIMIT / BLOCK..=PAGES / BLOCK_PAGES)
            .contains(&memory.faulty.rooms.load(Ordering::Relaxed))
    );
}

#[test]
fn threads_that_write_at_random_find_what_they_wrote() {
    let Some(memory) = Memory::new("threads_that_write_at_random", 256) else { return };
    let memory = &memory;
    let base = memory.base.expose_provenance();
    std::thread::scope(|scope| {
        for thread in 0..4_usize {
            scope.spawn(move || {
                let mut state = content(thread + 77);
                let mut shadow = vec![0_u64; PAGES / 4];
                for _ in 0..6000 {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    let at = (state >> 33) as usize % shadow.len();
                    // Threads share blocks, but no page.
                    let word = base + (at * 4 + thread) * PAGE_SIZE + 64;
                    let word = std::ptr::with_exposed_provenance_mut::<u64>(word);
                    // SAFETY: the word is within the mapping, in this thread's page.
                    unsafe {
                        assert_eq!(word.read_volatile(), shadow[at]);
                        word.write_volatile(state);
                    }
                    shadow[at] = state;
                }
            });
        }
    });
    let stats = memory.pager.stats();
    assert!(stats.reads + stats.singles > 100, "{stats:?}");
}

/// Page numbers in random order.
fn jumps(seed: u64) -> impl Iterator<Item = usize> {
    let mut state = seed;
    std::iter::repeat_with(move || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) as usize % PAGES
    })
}

#[test]
fn a_program_that_jumps_gets_single_pages_and_keeps_its_limit() {
    let Some(memory) = Memory::new("a_program_that_jumps", 256) else { return };
    memory.fill();
    let before = memory.pager.stats();
    for (count, page) in jumps(1).take(40_000).enumerate() {
        assert!(memory.read(page) == content(page), "page {page}");
        memory.write(page, content(page));
        if count % 1000 == 0 {
            let resident = memory.resident();
            assert!(resident <= LIMIT, "{resident} resident after {count}");
        }
    }
    let stats = memory.pager.stats();
    let (singles, blocks) = (stats.singles - before.singles, stats.reads - before.reads);
    assert!(singles > 20_000, "{stats:?}");
    assert!(stats.singles_written > 20_000, "{stats:?}");
    // Without single pages there would be as many blocks as that.
    assert!(blocks < 400, "{blocks} blocks for {singles} pages");
    assert_eq!((stats.lost, stats.beyond_limit), (0, 0), "{stats:?}");
    // The program goes through all of it again, and now whole blocks come.
    memory.check(0..PAGES);
    memory.check((0..PAGES).rev());
    let after = memory.pager.stats();
    assert!(after.singles - stats.singles < 2000, "{after:?}");
    assert!(memory.resident() <= LIMIT);
}

#[test]
fn whatever_a_program_does_between_jumps_each_page_is_what_it_must_be() {
    let Some(mut memory) = Memory::new("whatever_a_program_does_between_jumps", 256) else { return };
    memory.fill();
    let places = [map(SIZE + BLOCK).wrapping_add(5 * PAGE_SIZE), map(SIZE + BLOCK)];
    let mut expected: Vec<u64> = (0..PAGES).map(content).collect();
    for round in 0..12_usize {
        for (page, seed) in jumps(round as u64 + 2).take(3_000).zip(1..) {
            assert!(memory.read(page) == expected[page], "page {page} in round {round}");
            if seed % 3 == 0 {
                expected[page] = content(page) ^ seed;
                memory.write(page, expected[page]);
            }
        }
        let first = jumps(round as u64 + 99).next().expect("endless") / 2;
        let count = 1 + (round * 397) % 1500;
        let at = memory.base.wrapping_add(first * PAGE_SIZE);
        match round % 4 {
            0 => {
                // SAFETY: the memory is this test's own.
                unsafe { rustix::mm::madvise(at.cast(), count * PAGE_SIZE, Advice::LinuxDontNeed) }.unwrap();
                expected[first..first + count].fill(0);
            }
            1 => {
                let to = places[round / 4 % 2];
                // SAFETY: the memory is this test's own, and moves to a free address.
                memory.base = unsafe {
                    let from = memory.base.cast();
                    rustix::mm::mremap_fixed(from, SIZE, SIZE, MremapFlags::MAYMOVE, to.cast())
                        .expect("moved")
                        .cast()
                };
            }
            2 => (first..first + count).for_each(|page| {
                assert!(memory.read(page) == expected[page], "page {page} in order, round {round}");
            }),
            _ => {
                memory.pager.hold();
                assert!((0..PAGES).all(|page| memory.read(page) == expected[page]), "held, round {round}");
                memory.pager.release();
            }
        }
    }
    assert!((0..PAGES).all(|page| memory.read(page) == expected[page]));
    assert_eq!(memory.pager.stats().lost, 0);
}

#[test]
fn single_pages_survive_a_store_that_fails_as_they_go() {
    let Some(memory) = Memory::new("single_pages_survive_a_store", 256) else { return };
    memory.fill();
    jumps(5).take(12_000).for_each(|page| memory.write(page, !content(page)));
    memory.faulty.writes_fail.store(true, Ordering::Relaxed);
    let mut is_new = vec![false; PAGES];
    jumps(5).take(12_000).for_each(|page| is_new[page] = true);
    for page in jumps(6).take(12_000).chain(0..PAGES) {
        let expected = if is_new[page] { !content(page) } else { content(page) };
        assert!(memory.read(page) == expected, "page {page}");
    }
    assert!(memory.pager.stats().singles_written > 0);
    assert_eq!(memory.pager.stats().lost, 0);
}

#[test]
fn content_that_was_given_up_reads_as_zeros_and_the_rest_is_kept() {
    let Some(memory) = Memory::new("content_that_was_given_up", 256) else { return };
    memory.fill();
    // The ranges are parts of blocks and whole ones, resident and not.
    for (first, count) in
        [(100, 30), (1024, 512), (3 * 512 + 500, 1200), (PAGES - 600, 600), (PAGES - 3000, 10)]
    {
        let at = memory.base.wrapping_add(first * PAGE_SIZE);
        // SAFETY: the memory is this test's own.
        unsafe { rustix::mm::madvise(at.cast(), count * PAGE_SIZE, Advice::LinuxDontNeed) }.unwrap();
        for page in first..first + count {
            assert_eq!(memory.read(page), 0, "page {page}");
            memory.write(page, content(page));
        }
    }
    memory.check(0..PAGES);
    memory.check(0..PAGES);
}

#[test]
fn memory_that_moves_keeps_its_content_wherever_its_blocks_come_to_lie() {
    let Some(mut memory) = Memory::new("memory_that_moves", 256) else { return };
    memory.fill();
    // At the new address the memory's blocks are aligned differently.
    let to = map(SIZE + BLOCK).wrapping_add(5 * PAGE_SIZE);
    // SAFETY: the memory is this test's own.
    memory.base = unsafe {
        rustix::mm::mremap_fixed(memory.base.cast(), SIZE, SIZE, MremapFlags::MAYMOVE, to.cast())
            .expect("moved")
            .cast()
    };
    memory.check(0..PAGES);
    memory.check((0..PAGES).rev());
    assert!(memory.resident() <= LIMIT + 2 * BLOCK);
    // Move a part of a block to another address.
    let (first, count) = (700, 1000);
    let from = memory.base.wrapping_add(first * PAGE_SIZE);
    let to = map(count * PAGE_SIZE);
    // SAFETY: the memory is this test's own.
    let part: *mut u64 = unsafe {
        rustix::mm::mremap_fixed(
            from.cast(),
            count * PAGE_SIZE,
            count * PAGE_SIZE,
            MremapFlags::MAYMOVE,
            to.cast(),
        )
        .expect("moved")
        .cast()
    };
    for page in 0..count {
        // SAFETY: the word is within the moved range.
        let word = unsafe { part.wrapping_byte_add(page * PAGE_SIZE + 8).read_volatile() };
        assert_eq!(word, content(first + page), "page {page} of the part");
    }
    memory.check((0..first).chain(first + count..PAGES));
}

/// Ends the other thread, even if the test fails: it would be waited for.
struct Ends<'a>(&'a AtomicBool);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn pages_that_the_kernel_moves_meanwhile_are_kept() {
    let name = "pages_that_the_kernel_moves_meanwhile";
    let compact = "/proc/sys/vm/compact_memory";
    if std::fs::write(compact, "1").is_err() {
        println!("skipped: {name}: {compact} cannot be written");
        return;
    }
    let Some(mut memory) = Memory::new(name, 256) else { return };
    memory.fill();
    // At this address no block can be a huge page. Huge pages move as one, whatever the kernel does
    // with them.
    let to = map(SIZE + BLOCK).wrapping_add(5 * PAGE_SIZE);
    // SAFETY: the memory is this test's own.
    memory.base = unsafe {
        rustix::mm::mremap_fixed(memory.base.cast(), SIZE, SIZE, MremapFlags::MAYMOVE, to.cast())
            .expect("moved")
            .cast()
    };
    let has_ended = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                let _ = std::fs::write(compact, "1");
            }
        });
        let _end = Ends(&has_ended);
        for _ in 0..24 {
            memory.check(0..PAGES);
            memory.fill();
        }
        memory.check((0..PAGES).rev());
    });
}

#[test]
fn room_is_free_again_when_memory_is_unmapped() {
    let Some(memory) = Memory::new("room_is_free_again", 256) else { return };
    memory.fill();
    assert!(memory.faulty.rooms.load(Ordering::Relaxed) >= 48);
    // SAFETY: the memory is this test's own, and is not used any more.
    unsafe { rustix::mm::munmap(memory.base.cast(), SIZE) }.unwrap();
    // The pager looks only after it has handled that event.
    memory.pager.look();
    assert_eq!(memory.faulty.rooms.load(Ordering::Relaxed), 0);
}

#[test]
fn a_lower_limit_is_kept_soon_and_a_higher_one_is_used() {
    let Some(memory) = Memory::new("a_lower_limit", 256) else { return };
    memory.pager.set_limit(96 << 20).unwrap();
    memory.fill();
    assert!(memory.resident() > 80 << 20, "{}", memory.resident());
    memory.pager.set_limit(LIMIT).unwrap();
    memory.pager.look();
    memory.comes_down();
    memory.check(0..PAGES);
    assert!(matches!(memory.pager.set_limit(1 << 20), Err(Error::Limit { .. })));
}

/// Asks for an eviction, and waits until it has ended.
fn evict(memory: &Memory) {
    let before = memory.pager.stats().evictions;
    memory.pager.evict();
    let begun = Instant::now();
    while memory.pager.stats().evictions == before {
        assert!(begun.elapsed() < Duration::from_secs(60), "the eviction does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn an_eviction_moves_everything_out_and_ends_whatever_the_program_and_the_store_do() {
    let Some(memory) = Memory::new("an_eviction", 256) else { return };
    memory.fill();
    memory.check(jumps(7).take(2_000));
    evict(&memory);
    // The parts at both ends that make no whole block.
    assert!(memory.resident() <= BLOCK, "{}", memory.resident());
    memory.check(0..PAGES);
    // It ends though the program brings everything back meanwhile.
    let has_ended = AtomicBool::new(false);
    let first = memory.word(0).expose_provenance();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !has_ended.load(Ordering::Relaxed) {
                for page in (0..PAGES).step_by(3) {
                    let word = std::ptr::with_exposed_provenance::<u64>(first + page * PAGE_SIZE);
                    // SAFETY: the word is within the mapping.
                    assert_eq!(unsafe { word.read_volatile() }, content(page), "page {page}");
                }
            }
        });
        (0..5).for_each(|_| evict(&memory));
        has_ended.store(true, Ordering::Relaxed);
    });
    memory.faulty.writes_fail.store(true, Ordering::Relaxed);
    evict(&memory);
    memory.check(0..PAGES);
}

#[test]
fn pages_that_may_not_be_written_any_more_come_back_to_be_read() {
    let Some(memory) = Memory::new("pages_that_may_not_be_written", 256) else { return };
    memory.fill();
    // SAFETY: the memory is this test's own.
    unsafe { libc::mprotect(memory.base.cast(), SIZE / 2 + 3 * PAGE_SIZE, libc::PROT_READ) };
    memory.check(0..PAGES);
    // SAFETY: the memory is this test's own.
    unsafe { libc::mprotect(memory.base.cast(), SIZE, libc::PROT_READ | libc::PROT_WRITE) };
    memory.fill();
    memory.check(0..PAGES);
}

#[test]
fn a_child_of_a_fork_has_all_of_it_and_the_parent_is_bounded_again() {
    let Some(memory) = Memory::new("a_child_of_a_fork", 256) else { return };
    memory.fill();
    memory.pager.hold();
    assert_eq!(memory.resident(), SIZE);
    // SAFETY: the child reads memory and exits.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let is_right = (0..PAGES).all(|page| memory.read(page) == content(page));
        // SAFETY: ends the child.
        unsafe { libc::_exit(i32::from(!is_right)) };
    }
    memory.pager.release();
    let mut status = -1;
    // SAFETY: waits for the child.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child found something else");
    memory.fill();
    memory.comes_down();
    memory.check(0..PAGES);
}

#[test]
fn what_cannot_be_had_back_is_sigbus_and_never_zeros() {
    let Some(memory) = Memory::new("what_cannot_be_had_back", 256) else { return };
    memory.fill();
    memory.faulty.reads_fail.store(true, Ordering::Relaxed);
    // A system call returns EFAULT where a load gets SIGBUS.
    let null = std::fs::File::options().read(true).write(true).open("/dev/null").unwrap();
    let (mut reader, mut writer) = (0, 0);
    drop(null);
    let mut fds = [0; 2];
    // SAFETY: the array has room for two descriptors.
    assert_eq!(unsafe { libc::pipe(fds.as_mut_ptr()) }, 0);
    for page in 0..PAGES {
        // SAFETY: the bytes are within a page of the mapping.
        let written = unsafe { libc::write(fds[1], memory.word(page).cast(), 8) };
        if written < 0 {
            reader += 1;
            continue;
        }
        let mut value = 0_u64;
        // SAFETY: eight bytes fit into the number.
        assert_eq!(unsafe { libc::read(fds[0], (&raw mut value).cast(), 8) }, 8);
        assert_eq!(value, content(page));
        writer += 1;
    }
    assert!(reader > 0 && writer > 0, "{reader} lost, {writer} there");
    assert_eq!(memory.pager.stats().lost as usize * BLOCK_PAGES, reader);
}

#[test]
fn a_store_that_is_full_or_fails_costs_the_limit_and_no_page() {
    for blocks in [8, 256] {
        let Some(memory) = Memory::new("a_store_that_is_full_or_fails", blocks) else { return };
        memory.fill();
        memory.faulty.writes_fail.store(true, Ordering::Relaxed);
        memory.check(0..PAGES);
        memory.check(0..PAGES);
        assert!(memory.pager.stats().beyond_limit > 0);
        assert_eq!(memory.pager.stats().lost, 0);
    }
}

#[test]
fn pages_of_zeros_take_no_room_in_the_store() {
    let Some(memory) = Memory::new("pages_of_zeros", 256) else { return };
    (0..PAGES).step_by(8).for_each(|page| memory.write(page, content(page)));
    for page in 0..PAGES {
        assert_eq!(memory.read(page), if page % 8 == 0 { content(page) } else { 0 });
    }
    let stats = memory.pager.stats();
    // A block that goes out while the program still fills it has more pages of zeros.
    assert!(stats.zero_pages >= stats.writes * (BLOCK_PAGES as u64) * 7 / 8, "{stats:?}");
    assert!(stats.writes > 0, "{stats:?}");
}

impl Drop for Memory {
    fn drop(&mut self) {
        if !self.faulty.reads_fail.load(Ordering::Relaxed) {
            self.pager.clone().stop();
        }
    }
}

#[test]
fn a_pipe_of_which_the_program_has_closed_its_end_has_ended() {
    let (reader, writer) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    let Some(memory) = Memory::new("a_pipe_of_which", 64) else { return };
    drop(writer);
    let mut byte = [0];
    assert_eq!(rustix::io::read(&reader, &mut byte), Ok(0), "the pager has it open still");
    drop(memory);
}
