//! The object that `weir run` preloads into a program: a pager for its large anonymous memory.
//!
//! The pager finds memory by itself, and the kernel tells it of changes. The libc functions that
//! are replaced here do what they always did, and also call the pager. After a large allocation the
//! pager looks for new memory at once. So a program does not fill memory that the pager has not
//! seen. The pager also learns of calls after which the kernel still reads pages of the program. It
//! must not miss any of these calls. If it misses an allocation, it finds the new memory later.
//!
//! All memory of the pager comes from its arena, which was mapped before the pager began. The pager
//! never manages the arena.

mod arena;
#[macro_use]
mod next;
mod threads;

use libc::{c_int, c_void, off_t, size_t, ssize_t};
use rustix::process::{getpid, getppid};
use std::cell::Cell;
use std::ffi::CStr;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd as _, FromRawFd as _};
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, Once, OnceLock};
use std::time::Duration;
use weir_pager::link::{Link, Order, Report};
use weir_pager::{Ledger, Options, Outside, Pager, Scope, ShareStore, Tell, directory};

/// Address space for the pager's tables if they describe 1 TiB: 200 bytes for each 2 MiB, and twice
/// as much again while a table grows.
const TABLES: usize = 512 << 20;
/// The pager's table of single pages in place has a row for each page that may be resident. A row
/// takes up to 48 bytes while the table grows. So one byte for each 64 bytes of the limit is
/// enough.
const SINGLES_SHARE: usize = 64;
/// The pager looks for new mappings each time that the program's allocations of 64 KiB and more
/// have added up to this many bytes.
const LARGE: usize = 4 << 20;
/// Number of bytes by which the heap grows at a time. Many whole blocks of 2 MiB are then mapped
/// before they are touched, so that the kernel can make each a huge page. Growth takes only address
/// space.
const HEAP_STEP: c_int = 64 << 20;

/// The pager of this process, which is never freed. It is null in a child of a fork that has no
/// pager yet.
static PAGER: AtomicPtr<Pager> = AtomicPtr::new(std::ptr::null_mut());
/// Whether the kernel may read pages of the program after a call has returned. A child of a fork
/// may have its parent's pipes and sockets, so it stays set there.
static LENDS: AtomicBool = AtomicBool::new(false);
/// In a child of a fork: the parent's pager. The child's pager manages the memory that the parent's
/// pager managed, and leaves alone the memory that the parent's pager left alone. It stays until
/// the child has a pager, so that a child of this child finds it too.
static BEFORE: AtomicPtr<Pager> = AtomicPtr::new(std::ptr::null_mut());
/// Whether a thread of this child is starting the child's pager.
static IS_STARTING: AtomicBool = AtomicBool::new(false);
/// Number of forks under way that began while this process had no pager. A pager that starts
/// meanwhile manages no memory until they have ended: the children would lack it.
static UNHELD: AtomicUsize = AtomicUsize::new(0);
thread_local! {
    /// For each fork of this thread that is under way, whether it holds the pager's memory: the
    /// lowest bit is the last fork. Another one can begin in a signal handler. In a child, the bit
    /// of the fork that has made it stays.
    static HOLDS: Cell<u32> = const { Cell::new(0) };
}
/// The options of the pager, the run's directory, and the number of connections to its daemon. The
/// program may change its environment, so its children read all of them from here.
static RUN: OnceLock<(Options, PathBuf, u16)> = OnceLock::new();
/// Whether the process has forbidden itself some system calls (seccomp). From then on no pager is
/// started: the kernel could end the process for a call that the pager needs.
static IS_FILTERED: AtomicBool = AtomicBool::new(false);
/// Number of bytes that the program has allocated since the last look for new memory.
static CAME: AtomicUsize = AtomicUsize::new(0);
/// Whether the program has the allocator of libc. Another one may map memory with its locks held,
/// and a thread cannot be started then.
static HAS_LIBC_ALLOCATOR: AtomicBool = AtomicBool::new(false);

/// The pager of this process.
fn pager() -> Option<&'static Pager> {
    // SAFETY: the pointer is null, or points to a pager that is never freed.
    unsafe { PAGER.load(Ordering::SeqCst).as_ref() }
}

/// Makes this the pager of the process, before it manages any memory. From then on each fork holds
/// it. It manages memory once the forks have ended that do not.
fn publish(pager: &Pager) {
    PAGER.store(Box::into_raw(Box::new(pager.clone())), Ordering::SeqCst);
    // A thread that lends pages meanwhile sees the pager, or is seen here.
    if LENDS.load(Ordering::SeqCst) {
        pager.lend();
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let Some(limit) = std::env::var("WEIR_RUN_RESIDENT").ok().and_then(|limit| limit.parse().ok()) else {
        return;
    };
    // Compare the parent's PID before anything that takes time. If the parent ends meanwhile, this
    // process gets another parent.
    let parent = std::env::var("WEIR_RUN_PARENT").ok().and_then(|pid| pid.parse().ok());
    let is_first = getppid().map(|pid| pid.as_raw_nonzero().get()) == parent;
    arena::extend(tables(limit));
    HAS_LIBC_ALLOCATOR.store(has_libc_allocator(), Ordering::Relaxed);
    let directory = std::env::var_os("WEIR_RUN_DIRECTORY").unwrap_or_default().into();
    let spin = std::env::var("WEIR_RUN_SPIN_US").ok().and_then(|spin| spin.parse().ok());
    let spin = Duration::from_micros(spin.unwrap_or(0));
    let connections = std::env::var("WEIR_RUN_THREADS").ok().and_then(|count| count.parse().ok());
    let options = Options { limit, scope: Scope::Process, spin };
    let run = RUN.get_or_init(|| (options, directory, connections.unwrap_or(1)));
    // SAFETY: the functions live as long as the program.
    unsafe { libc::pthread_atfork(Some(before_fork), Some(after_fork), Some(after_fork_in_child)) };
    match Pager::start(options, || outside(run), publish) {
        Ok(_) => {
            // SAFETY: the call only changes a setting of the program's heap.
            unsafe { libc::mallopt(libc::M_TOP_PAD, HEAP_STEP) };
        }
        Err(error) => {
            let what = if is_first { "is not run" } else { "is not bounded" };
            // A program that has changed its user may be denied both. Its user is the cause.
            let ledger = run.1.join(directory::LEDGER);
            let why = match Ledger::open(&ledger) {
                Err(other) if other.kind() == io::ErrorKind::PermissionDenied => not_opened(&ledger, &other),
                _ => in_words(&error),
            };
            say(&format!("weir: process {} {what}: {why}\n", getpid()));
            if is_first {
                // SAFETY: the call ends the process, which has done nothing yet.
                unsafe { libc::_exit(1) };
            }
        }
    }
}

/// Whether the program calls this object's `malloc`, and this object's `malloc` calls libc's.
fn has_libc_allocator() -> bool {
    // SAFETY: the names end with a zero, and dladdr writes to a structure on the stack.
    unsafe {
        let is_ours = libc::dlsym(libc::RTLD_DEFAULT, c"malloc".as_ptr()) == malloc as *mut c_void;
        let object = |name: &CStr| {
            let mut of: libc::Dl_info = std::mem::zeroed();
            let found = libc::dladdr(libc::dlsym(libc::RTLD_NEXT, name.as_ptr()), &raw mut of);
            (found != 0).then_some(of.dli_fbase)
        };
        is_ours && object(c"malloc").is_some() && object(c"malloc") == object(c"gnu_get_libc_version")
    }
}

/// Address space for the pager's tables, for a limit of this many bytes.
fn tables(limit: usize) -> usize {
    TABLES + limit / SINGLES_SHARE
}

/// Starts another pager after `before`, with this limit in bytes. `own` is memory that stays
/// unmanaged. If no pager can be started, prints the reason and returns false.
fn start_again(before: &Pager, limit: usize, own: &[(usize, usize)]) -> bool {
    let Some(run) = RUN.get() else { return false };
    match before.start_again(Options { limit, ..run.0 }, own, || outside(run), publish) {
        Ok(_) => true,
        Err(error) => {
            // The program may have replaced its standard error by another file. So this line goes
            // to `weir run`, if its socket is within reach.
            if let Ok(messages) = messages(&run.1) {
                tell(&messages, &format!("not bounded from here on: {}", in_words(&error)));
            }
            false
        }
    }
}

/// Starts the pager of a child of a fork. A child gets a pager only when it allocates much memory,
/// since most children soon run another program.
#[cold]
fn start_in_child() {
    if IS_FILTERED.load(Ordering::Relaxed) || IS_STARTING.swap(true, Ordering::SeqCst) {
        return;
    }
    // SAFETY: the pointer is null, or points to a pager that is never freed.
    if let Some(before) = unsafe { BEFORE.load(Ordering::SeqCst).as_ref() } {
        start_after(before);
        // A signal handler that runs after the start may have forked. In its child the new pager is
        // the one before.
        let before = std::ptr::from_ref(before).cast_mut();
        let _ = BEFORE.compare_exchange(before, std::ptr::null_mut(), Ordering::SeqCst, Ordering::SeqCst);
    }
    IS_STARTING.store(false, Ordering::SeqCst);
}

/// Starts the pager of a child whose parent had this one.
fn start_after(before: &Pager) {
    let Some((options, ..)) = RUN.get() else { return };
    // SAFETY: libc's location of this thread's error number is valid.
    let errno = unsafe { *libc::__errno_location() };
    // At the fork, the pager's thread in the parent may have been in the middle of an allocation.
    // So give the child an allocator of its own.
    if let Some(own) = arena::renew(tables(options.limit))
        && start_again(before, options.limit, &[own])
        && let Some(pager) = pager()
    {
        // Find the memory that the caller has just allocated, before the caller fills it.
        pager.look();
    }
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
}

/// The text of an error and of its source.
fn in_words(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

/// The socket of a run for lines that people read.
fn messages(run: &Path) -> io::Result<UnixDatagram> {
    let socket = UnixDatagram::unbound()?;
    socket.connect(run.join(directory::MESSAGES))?;
    socket.set_nonblocking(true)?;
    Ok(socket)
}

/// Opens the pager's store and its [`Outside`], on the pager's thread.
fn outside((_, run, connections): &(Options, PathBuf, u16)) -> Result<(ShareStore, Tell), String> {
    let path = run.join(directory::LEDGER);
    let ledger = Ledger::open(&path).map_err(|error| not_opened(&path, &error))?;
    let path = run.join(directory::MESSAGES);
    let messages = Arc::new(messages(run).map_err(|error| not_opened(&path, &error))?);
    let link = Link::to(run.join(directory::PROGRAMS));
    say_last_words(&messages);
    let line = Arc::clone(&messages);
    let path = run.join(directory::SHARE);
    let share = ShareStore::connect(&path, ledger, *connections, move |text| tell(&line, text));
    let share = share.map_err(|error| {
        let text = in_words(&error);
        match text.contains(&format!("(os error {})", libc::EUSERS)) {
            true => "as many processes of this run are bounded as its daemon serves".to_owned(),
            false => text,
        }
    })?;
    Ok((share, Box::new(Run { messages, link })))
}

/// From here on a panic of the pager's thread sends a line to this socket and ends the process.
fn say_last_words(messages: &UnixDatagram) {
    static LAST: AtomicI32 = AtomicI32::new(-1);
    static HOOK: Once = Once::new();
    LAST.store(messages.as_raw_fd(), Ordering::Relaxed);
    // A child of a fork has the hook already.
    HOOK.call_once(|| {
        // Print no backtrace: it takes more memory than the arena has, and writing to standard
        // error may wait.
        std::panic::set_hook(Box::new(|panic| {
            // SAFETY: the descriptor stays open for as long as the pager's thread, which panics.
            let last = unsafe { ManuallyDrop::new(UnixDatagram::from_raw_fd(LAST.load(Ordering::Relaxed))) };
            tell(&last, &format!("a bug in Weir's pager ends it: {panic}"));
            std::process::abort();
        }));
    });
}

/// The pager's [`Outside`] in a program under `weir run`. It prints the pager's lines, and takes
/// the daemon's orders to the pager.
struct Run {
    messages: Arc<UnixDatagram>,
    link: Link,
}

impl Outside for Run {
    fn tell(&mut self, line: &str) {
        tell(&self.messages, line);
    }

    fn order(&mut self) -> Option<Order> {
        self.link.order()
    }

    fn report(&mut self, report: &Report) {
        self.link.report(report);
    }

    fn may_manage(&mut self) -> bool {
        UNHELD.load(Ordering::SeqCst) == 0
    }
}

fn tell(messages: &UnixDatagram, line: &str) {
    // If the socket has no room, the line is dropped, because the program must not wait for it.
    let _ = messages.send(format!("process {}: {line}", getpid()).as_bytes());
}

fn not_opened(path: &Path, error: &io::Error) -> String {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            format!("{path} is another user's; start weir run as the user that the program changes to")
        }
        _ => format!("{path}: {error}"),
    }
}

fn say(line: &str) {
    let _ = rustix::io::write(rustix::stdio::stderr(), line.as_bytes());
}

extern "C" fn before_fork() {
    let pager = pager().or_else(|| {
        // Either this thread sees the pager that is published just now, or the pager's thread sees
        // that this fork is under way.
        UNHELD.fetch_add(1, Ordering::SeqCst);
        pager().inspect(|_| one_unheld_less())
    });
    if let Some(pager) = pager {
        pager.hold();
    }
    HOLDS.set(HOLDS.get() << 1 | u32::from(pager.is_some()));
}

/// In a child that a signal handler has forked, the count may be zero already.
fn one_unheld_less() {
    let _ = UNHELD.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |forks| forks.checked_sub(1));
}

extern "C" fn after_fork() {
    let holds = HOLDS.get();
    HOLDS.set(holds >> 1);
    if holds & 1 == 0 {
        one_unheld_less();
    } else if let Some(pager) = pager() {
        pager.release();
    }
}

extern "C" fn after_fork_in_child() {
    let pager = PAGER.swap(std::ptr::null_mut(), Ordering::AcqRel);
    if !pager.is_null() {
        BEFORE.store(pager, Ordering::SeqCst);
    }
    // The threads that the parent's count is about do not exist here.
    UNHELD.store(0, Ordering::SeqCst);
    IS_STARTING.store(false, Ordering::SeqCst);
    CAME.store(0, Ordering::Relaxed);
}

/// Notes that the program has allocated this many bytes. `may_start` says whether a thread can be
/// started now.
fn came(bytes: usize, may_start: bool) {
    // A small allocation seldom makes the allocator map new memory.
    if bytes >= 64 << 10 && CAME.fetch_add(bytes, Ordering::Relaxed) + bytes >= LARGE {
        CAME.store(0, Ordering::Relaxed);
        match pager() {
            Some(pager) => pager.look(),
            None if may_start => start_in_child(),
            None => {}
        }
    }
}

/// # Safety
/// Does the same as mmap(2), then notes the new memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's arguments are passed on unchanged.
    let mapped =
        unsafe { libc::syscall(libc::SYS_mmap, at, bytes, protection, flags, file, offset) } as *mut c_void;
    if mapped != libc::MAP_FAILED && flags & libc::MAP_ANONYMOUS != 0 && flags & libc::MAP_STACK == 0 {
        came(bytes, HAS_LIBC_ALLOCATOR.load(Ordering::Relaxed));
    }
    mapped
}

/// # Safety
/// Does the same as mmap(2), then notes the new memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    bytes: size_t,
    protection: c_int,
    flags: c_int,
    file: c_int,
    offset: off_t,
) -> *mut c_void {
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { mmap(at, bytes, protection, flags, file, offset) }
}

/// # Safety
/// Does the same as madvise(2), except that it has no pages merged with equal ones (KSM): the
/// kernel does not move merged pages. If a program gives up the content of pages, the kernel tells
/// the pager. For a guard region (Linux 6.13) the kernel does not tell the pager. So this function
/// also gives the advice `MADV_DONTNEED`, of which the kernel does tell the pager. It does so after
/// `MADV_FREE` too: the kernel would keep the pages for as long as it likes, and the pager could
/// not move their blocks out. The pager also learns which memory no child inherits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(at: *mut c_void, bytes: size_t, advice: c_int) -> c_int {
    /// Advice that no available crate defines.
    const GUARD_INSTALL: c_int = 102;
    let pager = pager();
    if advice == libc::MADV_MERGEABLE && pager.is_some() {
        return 0;
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    let advised = unsafe { libc::syscall(libc::SYS_madvise, at, bytes, advice) as c_int };
    // The kernel frees the rest if a part of the range is not mapped.
    let is_freed = advice == libc::MADV_FREE
        && (advised == 0 || io::Error::last_os_error().raw_os_error() == Some(libc::ENOMEM));
    if advised == 0 && advice == GUARD_INSTALL || is_freed && pager.is_some() {
        // SAFETY: the pages of a guard region have no content, and this call does not remove the
        // guards. The kernel may remove freed pages at any time. The call's error is the same.
        unsafe { libc::syscall(libc::SYS_madvise, at, bytes, libc::MADV_DONTNEED) };
    }
    if advised == 0 && matches!(advice, libc::MADV_DONTFORK | libc::MADV_DOFORK) {
        // A pager that starts later would not know of this advice.
        if pager.is_none() && HAS_LIBC_ALLOCATOR.load(Ordering::Relaxed) {
            start_in_child();
        }
        if let Some(pager) = self::pager() {
            pager.inherit(at.addr(), bytes, advice == libc::MADV_DOFORK);
        }
    }
    advised
}

/// # Safety
/// Does the same as vmsplice(2), and tells the pager that the kernel will read pages later.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vmsplice(
    pipe: c_int,
    parts: *const libc::iovec,
    count: size_t,
    flags: libc::c_uint,
) -> ssize_t {
    lend();
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { libc::syscall(libc::SYS_vmsplice, pipe, parts, count, flags) as ssize_t }
}

/// # Safety
/// Does the same as setsockopt(2). Also tells the pager if the option lets the kernel read the
/// program's pages after a call has returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setsockopt(
    socket: c_int,
    level: c_int,
    option: c_int,
    value: *const c_void,
    bytes: libc::socklen_t,
) -> c_int {
    if level == libc::SOL_SOCKET && option == libc::SO_ZEROCOPY {
        lend();
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    unsafe { libc::syscall(libc::SYS_setsockopt, socket, level, option, value, bytes) as c_int }
}

/// Tells the pager that the kernel will read pages of the program later.
fn lend() {
    LENDS.store(true, Ordering::SeqCst);
    if let Some(pager) = pager() {
        pager.lend();
    }
}

/// Replaces a function of the allocator: calls the one that the program would have without this
/// object, then notes the new memory.
macro_rules! allocation {
    ($name:ident($($argument:ident: $kind:ty),*) -> $result:ty, $bytes:expr) => {
        #[doc = "# Safety\nAs the function of this name in libc."]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            let Some(next) = next!($name: unsafe extern "C" fn($($kind),*) -> $result) else {
                say("weir: the program's allocator lacks a function of libc\n");
                std::process::abort();
            };
            // SAFETY: the caller's arguments are passed on unchanged.
            let result = unsafe { next($($argument),*) };
            came($bytes, true);
            result
        }
    };
}

allocation!(malloc(bytes: size_t) -> *mut c_void, bytes);
allocation!(calloc(count: size_t, bytes: size_t) -> *mut c_void, count.saturating_mul(bytes));
allocation!(realloc(at: *mut c_void, bytes: size_t) -> *mut c_void, bytes);
allocation!(memalign(align: size_t, bytes: size_t) -> *mut c_void, bytes);
allocation!(aligned_alloc(align: size_t, bytes: size_t) -> *mut c_void, bytes);
allocation!(
    posix_memalign(to: *mut *mut c_void, align: size_t, bytes: size_t) -> c_int,
    bytes
);
