//! The thread that keeps memory within its limit.

mod blocks;
mod endings;
mod helpers;
mod queues;
#[cfg(test)]
mod simulator;
mod work;

use crate::kernel::{System, reserve};
use crate::{BLOCK, Error, Store, Tell};
use endings::Endings;
use helpers::{AbortOnPanic, Helpers};
use rustix::process::{Pid, getpid};
use std::mem::ManuallyDrop;
use std::ops::Range;
use std::os::fd::IntoRawFd as _;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;
use weir_core::PAGE_SIZE;
use work::Work;

/// The smallest limit that a pager accepts, in blocks.
const LIMIT_MIN: usize = 16;
/// Number of the pager's own pages by which threads call it. A page fault on such a page is a call.
const BELLS: usize = 4096;
/// Largest number of helpers.
const HELPERS_MOST: usize = weir_share::THREADS_MOST as usize - 1;

/// `MADV_DONTNEED` for memory that may be locked (Linux 5.18), which no available crate defines.
pub(crate) const MADV_DONTNEED_LOCKED: i32 = 24;

/// The choice of the memory that the pager manages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Large private anonymous memory that this process maps from now on, by any system call.
    Process,
    /// Only memory that [`Pager::adopt`] is called for.
    Adopted,
}

/// The options of a new pager.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Bytes of managed memory that may be resident.
    pub limit: usize,
    /// The memory that the pager manages.
    pub scope: Scope,
    /// Time for which the pager's thread looks for the next page fault after each one, before it
    /// sleeps. It sleeps at once if other threads need its processor.
    pub spin: Duration,
}

/// A pager's counts since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Number of page faults that the pager has resolved.
    pub faults: u64,
    /// Number of blocks read from the store because a thread waited for them.
    pub reads: u64,
    /// Number of blocks prefetched from the store.
    pub ahead: u64,
    /// Number of prefetched blocks that the program then used.
    pub prefetched: u64,
    /// Nanoseconds for which threads have waited for the pager. Time before the pager read their
    /// page fault is not counted.
    pub waited_ns: u64,
    /// Number of evictions that have ended.
    pub evictions: u64,
    /// Number of page faults on a block that was being written. The pager put such a block back in
    /// place without waiting for the write.
    pub taken_back: u64,
    /// Number of blocks written to the store.
    pub writes: u64,
    /// Number of pages of zeros in written blocks. They took no room in the store.
    pub zero_pages: u64,
    /// Number of pages that were moved out and not written, since the store had their content.
    pub clean_pages: u64,
    /// Number of single pages read from the store.
    pub singles: u64,
    /// Number of single pages written to the store.
    pub singles_written: u64,
    /// Number of blocks that could not be read back.
    pub lost: u64,
    /// Number of times that a block exceeded the limit, because no other block could be moved out.
    pub beyond_limit: u64,
}

/// A counter for each field of [`Stats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub faults: AtomicU64,
    pub reads: AtomicU64,
    pub ahead: AtomicU64,
    pub prefetched: AtomicU64,
    pub waited_ns: AtomicU64,
    pub evictions: AtomicU64,
    pub taken_back: AtomicU64,
    pub writes: AtomicU64,
    pub zero_pages: AtomicU64,
    pub clean_pages: AtomicU64,
    pub singles: AtomicU64,
    pub singles_written: AtomicU64,
    pub lost: AtomicU64,
    pub beyond_limit: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

/// The state that the pager's thread shares with the other threads.
#[derive(Debug)]
pub(crate) struct Shared {
    /// The limit of resident memory, in blocks.
    limit: AtomicUsize,
    /// Number of calls of [`Pager::hold`] that were not released yet. While it is above zero, every
    /// block stays resident.
    holds: AtomicU32,
    stop: AtomicBool,
    /// Whether a thread has asked for an eviction.
    evict: AtomicBool,
    /// Whether the kernel may still read pages of the program after the pager has moved them out.
    lends: AtomicBool,
    bells: Bells,
    endings: Endings,
    counters: Counters,
    /// A range to adopt: its first byte, and the byte after its last. A thread that holds the lock
    /// `adopting` writes it; the pager reads it without the lock.
    adopt: [AtomicUsize; 2],
    /// A system call that the pager's thread is to make too: its number, and its arguments. The
    /// number 0 means none. Threads write and read this field in the same way as `adopt`.
    call: [AtomicUsize; 6],
    /// A range that no child inherits any more, or that children inherit again if `is_inherited` is
    /// true. Written and read as `adopt` is.
    inherit: [AtomicUsize; 2],
    is_inherited: AtomicBool,
    adopting: Mutex<()>,
    process: Pid,
    /// The memory that the pager never manages. It is set when the pager starts.
    excluded: OnceLock<Vec<(usize, usize)>>,
    /// The thread IDs (TIDs) of the pager's thread and of its helpers, or 0.
    threads: [AtomicI32; 1 + HELPERS_MOST],
}

impl Shared {
    fn new(limit: usize, bells: Bells) -> Self {
        Shared {
            limit: AtomicUsize::new(limit),
            holds: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            evict: AtomicBool::new(false),
            lends: AtomicBool::new(false),
            bells,
            endings: Endings::new(),
            counters: Counters::default(),
            adopt: [const { AtomicUsize::new(0) }; 2],
            call: [const { AtomicUsize::new(0) }; 6],
            inherit: [const { AtomicUsize::new(0) }; 2],
            is_inherited: AtomicBool::new(false),
            adopting: Mutex::new(()),
            process: getpid(),
            excluded: OnceLock::new(),
            threads: [const { AtomicI32::new(0) }; 1 + HELPERS_MOST],
        }
    }
}

/// Registered pages by which threads call the pager. A thread that touches one waits until the
/// pager has handled the page fault. Such a call needs no lock, and no descriptor that the program
/// might close.
#[derive(Debug)]
pub(crate) struct Bells {
    base: usize,
    next: AtomicU32,
}

impl Bells {
    fn new() -> Result<Self, Error> {
        Ok(Bells { base: reserve(BELLS * PAGE_SIZE)?, next: AtomicU32::new(0) })
    }

    fn is_one(&self, address: usize) -> bool {
        (self.base..self.base + BELLS * PAGE_SIZE).contains(&address)
    }

    fn ring(&self) {
        let number = self.next.fetch_add(1, Ordering::Relaxed) as usize % BELLS;
        let page = std::ptr::with_exposed_provenance_mut::<u8>(self.base + number * PAGE_SIZE);
        // SAFETY: a page of the pager's own, which the pager fills with zeros.
        unsafe {
            // Drop the page before it is touched, so that the touch is a page fault. The program's
            // mlockall() may have made the page resident.
            libc::madvise(page.cast(), PAGE_SIZE, MADV_DONTNEED_LOCKED);
            page.read_volatile();
        }
    }
}

/// Gives this thread its own table of descriptors, without those of the program. With a shared
/// table, this thread would keep a pipe open after the program has closed it. Also gives this
/// thread a root and a working directory of its own. So it finds the next daemon's socket even
/// after the program has changed the program's own directories.
fn own_descriptors() -> Result<(), Error> {
    // SAFETY: the first call gives this thread a descriptor table and directories of its own. The
    // second closes descriptors in that table alone.
    let closed = unsafe {
        libc::unshare(libc::CLONE_FILES | libc::CLONE_FS) == 0
            && libc::syscall(libc::SYS_close_range, 0, libc::c_uint::MAX, 0) == 0
    };
    if !closed {
        return Err(Error::Forbidden(std::io::Error::last_os_error()));
    }
    // Fill descriptors 0 to 2. Otherwise a file that is opened later could get number 2, and a
    // panic's message would go into that file.
    for _ in 0..3 {
        let _ = std::fs::File::options().read(true).write(true).open("/dev/null")?.into_raw_fd();
    }
    Ok(())
}

/// A pager that starts looks so often for signals that may end its process meanwhile.
const LOOKS_AFTER: Duration = Duration::from_secs(1);

/// Blocks all signals of the calling thread until it is dropped. A thread that is started meanwhile
/// keeps them blocked, so the program's signal handlers do not run there.
struct Masked {
    before: libc::sigset_t,
}

impl Masked {
    fn new() -> Self {
        // SAFETY: both sets of signals are on the stack.
        unsafe {
            let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&raw mut all);
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
            Masked { before }
        }
    }

    /// Lets just those signals through for which the program has no handler now, if they were not
    /// blocked before: they end or stop the process. A handler could fork or jump away.
    fn let_end(&self) {
        // SAFETY: the set and the structure are on the stack, and no action is changed.
        unsafe {
            let mut others: libc::sigset_t = std::mem::zeroed();
            libc::sigfillset(&raw mut others);
            for signal in 1..=libc::SIGRTMAX() {
                let mut action: libc::sigaction = std::mem::zeroed();
                if libc::sigismember(&raw const self.before, signal) == 0
                    && libc::sigaction(signal, std::ptr::null(), &raw mut action) == 0
                    && action.sa_sigaction == libc::SIG_DFL
                {
                    libc::sigdelset(&raw mut others, signal);
                }
            }
            libc::pthread_sigmask(libc::SIG_SETMASK, &raw const others, std::ptr::null_mut());
        }
    }
}

impl Drop for Masked {
    fn drop(&mut self) {
        // SAFETY: restores this thread's mask.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.before, std::ptr::null_mut()) };
    }
}

/// A pager: a thread that runs for as long as the process, or until [`stop`](Pager::stop).
#[derive(Clone, Debug)]
pub struct Pager(Arc<Shared>);

/// Memory that [`Pager::keep`] keeps in place until this is dropped.
#[derive(Debug)]
pub struct Kept<'a> {
    endings: &'a Endings,
    thread: i32,
    place: Range<usize>,
}

impl Drop for Kept<'_> {
    fn drop(&mut self) {
        self.endings.forget(self.thread, &self.place);
    }
}

impl Pager {
    /// Starts a pager. `store` is called on the pager's thread, which has descriptors of its own.
    /// If the program closes all of its descriptors, those of the thread stay open. The thread
    /// keeps none of the program's descriptors open. `ready` is called on that thread too, once
    /// nothing can fail any more and before the pager manages any memory. It must not wait for a
    /// thread that may wait for the pager.
    ///
    /// # Errors
    /// Fails when userfaultfd is denied or too old, the limit is too small, or the store cannot be
    /// opened.
    pub fn start<S: Store>(
        options: Options,
        store: impl FnOnce() -> Result<(S, Tell), String> + Send + 'static,
        ready: impl FnOnce(&Pager) + Send + 'static,
    ) -> Result<Self, Error> {
        Self::begin(options, None, store, ready)
    }

    /// Starts a pager for memory that an earlier pager has managed. The earlier pager has stopped,
    /// or has stayed behind in the parent process. `own` is more memory that the caller needs for
    /// the pager's thread. Like the memory that the earlier pager has excluded, it stays unmanaged.
    ///
    /// # Errors
    /// Fails as [`start`](Self::start) does.
    pub fn start_again<S: Store>(
        &self,
        options: Options,
        own: &[(usize, usize)],
        store: impl FnOnce() -> Result<(S, Tell), String> + Send + 'static,
        ready: impl FnOnce(&Pager) + Send + 'static,
    ) -> Result<Self, Error> {
        let before = self.0.excluded.get().map_or(&[][..], Vec::as_slice);
        Self::begin(options, Some([before, own].concat()), store, ready)
    }

    fn begin<S: Store>(
        options: Options,
        excluded: Option<Vec<(usize, usize)>>,
        store: impl FnOnce() -> Result<(S, Tell), String> + Send + 'static,
        ready: impl FnOnce(&Pager) + Send + 'static,
    ) -> Result<Self, Error> {
        let Options { limit, scope, spin } = options;
        if limit / BLOCK < LIMIT_MIN {
            return Err(Error::Limit { bytes: limit });
        }
        let masked = Masked::new();
        let shared = Arc::new(Shared::new(limit / BLOCK, Bells::new()?));
        let (say, hear) = sync_channel(1);
        let pager = Pager(Arc::clone(&shared));
        let own = pager.clone();
        std::thread::Builder::new().name("weir-pager".into()).stack_size(256 << 10).spawn(move || {
            let _abort = AbortOnPanic;
            shared.threads[0].store(rustix::thread::gettid().as_raw_nonzero().get(), Ordering::Relaxed);
            weir_share::first_turns();
            let opened = own_descriptors()
                .and_then(|()| System::open(spin))
                .and_then(|system| Ok((system, store().map_err(Error::Store)?)))
                .and_then(|(system, (mut store, tell))| {
                    // The helpers get this thread's descriptors, and begin before the pager looks
                    // which memory it must not manage.
                    let lanes = store.lanes().into_iter().take(HELPERS_MOST);
                    let helpers = Helpers::start(lanes, spin, system.waker())?;
                    for (thread, &id) in shared.threads[1..].iter().zip(helpers.ids()) {
                        thread.store(id, Ordering::Relaxed);
                    }
                    Work::new(system, store, helpers, tell, scope, excluded, shared)
                });
            match opened {
                Ok(mut work) => {
                    ready(&own);
                    drop(own);
                    let _ = say.send(Ok(()));
                    drop(say);
                    work.run();
                }
                Err(error) => drop(say.send(Err(error))),
            }
        })?;
        loop {
            match hear.recv_timeout(LOOKS_AFTER) {
                Ok(started) => return started.map(|()| pager),
                // The store takes long to open.
                Err(RecvTimeoutError::Timeout) => masked.let_end(),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::System(std::io::ErrorKind::UnexpectedEof.into()));
                }
            }
        }
    }

    /// Manages also the `bytes` bytes of memory from `start` on. They must be private, anonymous
    /// memory of this process.
    pub fn adopt(&self, start: usize, bytes: usize) {
        let _adopting = self.0.adopting.lock().expect("nothing panics under it");
        self.0.adopt[0].store(start, Ordering::Relaxed);
        self.0.adopt[1].store(start + bytes, Ordering::Relaxed);
        self.ask(&self.0.adopt[1]);
    }

    /// Notes that the program leaves memory out of its forks (`MADV_DONTFORK`), or includes it
    /// again. Memory that is left out need not be resident for a fork. Does nothing in a child
    /// process.
    pub fn inherit(&self, start: usize, bytes: usize, is_inherited: bool) {
        // In a child the lock may be held by a thread that only the parent has.
        if !self.is_of_this_process() {
            return;
        }
        let _adopting = self.0.adopting.lock().expect("nothing panics under it");
        self.0.is_inherited.store(is_inherited, Ordering::Relaxed);
        self.0.inherit[0].store(start, Ordering::Relaxed);
        self.0.inherit[1].store((start + bytes).next_multiple_of(PAGE_SIZE), Ordering::Release);
        self.ask(&self.0.inherit[1]);
    }

    /// Has the pager heed what the calling thread has written for it, and then withdraws that by a
    /// 0 in `word`. The call of another thread may have the pager read it too, at any time until
    /// then. Once the pager has answered the second call here, it has no old copy any more.
    fn ask(&self, word: &AtomicUsize) {
        self.look();
        word.store(0, Ordering::Relaxed);
        self.look();
    }

    /// Returns once the pager has looked for new memory.
    pub fn look(&self) {
        self.0.bells.ring();
    }

    /// Notes that the calling thread is about to end, and that the kernel then needs its memory in
    /// these `bytes` bytes from `start` on. What the thread touches there after this call stays in
    /// place until the thread is gone. Under a seccomp filter the pager has room for 512 such
    /// places at most. A further thread goes unprotected: it must not wait for ever.
    pub fn ends(&self, start: usize, bytes: usize) {
        let _ = ManuallyDrop::new(self.note(start, bytes, Endings::note));
    }

    /// Keeps the memory in place that the calling thread touches in these `bytes` bytes from
    /// `start` on, from this call until the result is dropped, or the thread is gone. The room is
    /// that of [`ends`](Self::ends).
    pub fn keep(&self, start: usize, bytes: usize) -> Kept<'_> {
        self.note(start, bytes, Endings::keep)
    }

    fn note(&self, start: usize, bytes: usize, note: fn(&Endings, i32, Range<usize>) -> bool) -> Kept<'_> {
        let (thread, place) = (rustix::thread::gettid().as_raw_nonzero().get(), start..start + bytes);
        while !note(&self.0.endings, thread, place.clone()) && !self.0.endings.is_blind() {
            // The pager forgets threads that are gone.
            self.look();
        }
        Kept { endings: &self.0.endings, thread, place }
    }

    /// Whether this is the pager of the calling process. A child of `vfork` has its parent's
    /// memory, and in it the parent's pager.
    pub fn is_of_this_process(&self) -> bool {
        getpid() == self.0.process
    }

    /// The present limit, in bytes.
    pub fn limit(&self) -> usize {
        self.0.limit.load(Ordering::Relaxed) * BLOCK
    }

    /// Whether the calling thread is one of the pager's.
    pub fn is_this_thread(&self) -> bool {
        let me = rustix::thread::gettid().as_raw_nonzero().get();
        self.0.threads.iter().any(|thread| thread.load(Ordering::Relaxed) == me)
    }

    /// Number of the pager's threads.
    pub fn threads(&self) -> usize {
        self.0.threads.iter().filter(|thread| thread.load(Ordering::Relaxed) != 0).count()
    }

    /// Makes the pager's threads repeat a system call that this thread has made. Some calls change
    /// the rights of one thread alone (`capset`, `prctl`). `setuid` and similar calls change the
    /// rights of all threads. If such a call succeeds in one thread and fails in another, libc ends
    /// the process.
    ///
    /// # Safety
    /// The call changes only its thread's rights. Memory that it reads is not managed.
    pub unsafe fn also(&self, number: i64, arguments: [usize; 5]) {
        let _adopting = self.0.adopting.lock().expect("nothing panics under it");
        let words = [number as usize].into_iter().chain(arguments);
        self.0.call.iter().zip(words).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
        self.ask(&self.0.call[0]);
    }

    /// Changes the limit, in bytes. If the new limit is lower, the pager moves blocks out in the
    /// background until it keeps that limit.
    ///
    /// # Errors
    /// Fails with [`Error::Limit`].
    pub fn set_limit(&self, bytes: usize) -> Result<(), Error> {
        if bytes / BLOCK < LIMIT_MIN {
            return Err(Error::Limit { bytes });
        }
        self.0.limit.store(bytes / BLOCK, Ordering::Relaxed);
        Ok(())
    }

    /// Moves all memory out that is resident at the time of the call, in the background. Memory
    /// that the program uses meanwhile comes back. A call during an eviction begins a new one.
    pub fn evict(&self) {
        self.0.evict.store(true, Ordering::SeqCst);
        self.look();
    }

    /// Makes every block resident for a fork, since a child has no pager. No block is moved out
    /// until [`release`](Self::release) has been called as often as `hold`.
    pub fn hold(&self) {
        self.0.holds.fetch_add(1, Ordering::SeqCst);
        self.look();
    }

    /// Ends one [`hold`](Self::hold). Does nothing in a child process, or without a hold: the one
    /// that ends may have been of an earlier pager.
    pub fn release(&self) {
        let _ = self.0.holds.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |holds| holds.checked_sub(1));
        self.look();
    }

    /// Tells the pager that from now on the kernel may read pages of the program after the
    /// program's call has returned, as for `vmsplice` and `MSG_ZEROCOPY`. The kernel does not pin
    /// such pages, so the pager may move them out meanwhile. Therefore the pager frees the memory
    /// of pages that were moved out, and does not use it for other pages.
    pub fn lend(&self) {
        self.0.lends.store(true, Ordering::SeqCst);
    }

    /// Makes every block resident and ends the thread. Returns once the thread has ended, if
    /// `/proc` shows the threads.
    pub fn stop(self) {
        // In this order: the pager ends at any call that sees `stop`, and brings all blocks before
        // only if they are held.
        self.0.holds.fetch_add(1, Ordering::SeqCst);
        self.0.stop.store(true, Ordering::SeqCst);
        self.look();
        let thread = format!("/proc/self/task/{}", self.0.threads[0].load(Ordering::Relaxed));
        while std::path::Path::new(&thread).exists() {
            std::thread::sleep(Duration::from_micros(100));
        }
    }

    /// The pager's counts.
    pub fn stats(&self) -> Stats {
        let counters = &self.0.counters;
        let of = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            faults: of(&counters.faults),
            reads: of(&counters.reads),
            ahead: of(&counters.ahead),
            prefetched: of(&counters.prefetched),
            waited_ns: of(&counters.waited_ns),
            evictions: of(&counters.evictions),
            taken_back: of(&counters.taken_back),
            writes: of(&counters.writes),
            zero_pages: of(&counters.zero_pages),
            clean_pages: of(&counters.clean_pages),
            singles: of(&counters.singles),
            singles_written: of(&counters.singles_written),
            lost: of(&counters.lost),
            beyond_limit: of(&counters.beyond_limit),
        }
    }
}
