//! The object that `weir run` preloads into a program: a pager for its large anonymous memory.
//!
//! The pager finds memory by itself, and the kernel tells it of changes. The libc functions that
//! are replaced here do what they always did, and also call the pager. After a large allocation the
//! pager looks for new memory at once. So a program does not fill memory that the pager has not
//! seen. The pager also learns of calls after which the kernel still reads pages of the program. It
//! must not miss any of these calls. If it misses an allocation, it finds the new memory later.
//!
//! All memory of the pager is `ALLOCATOR`'s. It was mapped before the pager began, and so is never
//! managed.

use libc::{c_int, c_void, off_t, size_t, ssize_t};
use rustix::process::{getpid, getppid};
use spinning_top::RawSpinlock;
use std::io;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicPtr, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use talc::TalcLock;
use talc::source::Claim;
use weir_pager::link::{Link, Order, Report};
use weir_pager::{Ledger, Options, Outside, Pager, Scope, ShareStore, Tell, directory};

/// Memory of the pager for its start, and for some buffers.
const ARENA: usize = 16 << 20;
/// Address space for the pager's tables if they describe 1 TiB: 200 bytes for each 2 MiB, and twice
/// as much again while a table grows.
const TABLES: usize = 512 << 20;
/// The pager's table of single pages in place has at most one row for each page of the limit. A row
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

#[global_allocator]
static ALLOCATOR: TalcLock<RawSpinlock, Claim> = TalcLock::new({
    static mut MEMORY: [u8; ARENA] = [0; ARENA];
    // SAFETY: only the allocator uses this array.
    unsafe { Claim::array(&raw mut MEMORY) }
});

static PAGER: OnceLock<Pager> = OnceLock::new();

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

extern "C" fn start() {
    let Some(limit) = std::env::var("WEIR_RUN_RESIDENT").ok().and_then(|limit| limit.parse().ok()) else {
        return;
    };
    extend_arena(TABLES + limit / SINGLES_SHARE);
    match bound(limit, std::env::var_os("WEIR_RUN_DIRECTORY").unwrap_or_default().into()) {
        Ok(pager) => {
            let _ = PAGER.set(pager);
            // SAFETY: the functions live as long as the program, and the call only changes a
            // setting of its heap.
            unsafe {
                libc::pthread_atfork(Some(before_fork), Some(after_fork), None);
                libc::mallopt(libc::M_TOP_PAD, HEAP_STEP);
            }
        }
        Err(error) => {
            let parent = std::env::var("WEIR_RUN_PARENT").ok().and_then(|pid| pid.parse().ok());
            let is_first = getppid().map(|pid| pid.as_raw_nonzero().get()) == parent;
            let what = if is_first { "is not run" } else { "is not bounded" };
            say(&format!("weir: process {} {what}: {error}\n", getpid()));
            if is_first {
                // SAFETY: the call ends the process, which has done nothing yet.
                unsafe { libc::_exit(1) };
            }
        }
    }
}

/// Gives the allocator up to `bytes` bytes of address space. They take no memory before they are
/// used. They are mapped before the pager begins, so the pager does not manage them.
fn extend_arena(bytes: usize) {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mut bytes = bytes;
    // If the program's address space is limited, there may be room for fewer bytes only.
    while bytes >= ARENA {
        // SAFETY: a new mapping at an address of the kernel's choice overlaps no other.
        let at = unsafe { libc::syscall(libc::SYS_mmap, 0, bytes, protection, flags, -1, 0) };
        if at > 0 {
            let at = std::ptr::with_exposed_provenance_mut(at as usize);
            // SAFETY: the memory was just mapped, stays mapped, and only the allocator uses it.
            let _ = unsafe { ALLOCATOR.lock().claim(at, bytes) };
            return;
        }
        bytes /= 2;
    }
}

fn bound(limit: usize, run: PathBuf) -> Result<Pager, String> {
    let store = move || {
        let path = run.join(directory::LEDGER);
        let ledger = Ledger::open(&path).map_err(|error| not_opened(&path, &error))?;
        let path = run.join(directory::MESSAGES);
        let messages = UnixDatagram::unbound().and_then(|socket| {
            socket.connect(&path)?;
            socket.set_nonblocking(true)?;
            Ok(socket)
        });
        let messages = Arc::new(messages.map_err(|error| not_opened(&path, &error))?);
        let link = Link::to(run.join(directory::PROGRAMS));
        let last_words = Arc::clone(&messages);
        // Print no backtrace: it takes more memory than [`ARENA`] has, and writing to standard
        // error may wait.
        std::panic::set_hook(Box::new(move |panic| {
            tell(&last_words, &format!("a bug in Weir's pager ends it: {panic}"));
            std::process::abort();
        }));
        let line = Arc::clone(&messages);
        let share = ShareStore::connect(&run.join(directory::SHARE), ledger, move |text| tell(&line, text));
        let share = share.map_err(|error| match std::error::Error::source(&error) {
            Some(source) => format!("{error}: {source}"),
            None => error.to_string(),
        })?;
        Ok((share, Box::new(Run { messages, link }) as Tell))
    };
    // The program's signal handlers must not run on the pager's thread. SAFETY: the sets of signals
    // are on the stack, and this thread's mask is restored below.
    let before = unsafe {
        let (mut all, mut before) = (std::mem::zeroed(), std::mem::zeroed());
        libc::sigfillset(&raw mut all);
        libc::pthread_sigmask(libc::SIG_SETMASK, &raw const all, &raw mut before);
        before
    };
    let pager = Pager::start(Options { limit, scope: Scope::Process }, store);
    // SAFETY: restores this thread's mask from a set on the stack.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const before, std::ptr::null_mut()) };
    pager.map_err(|error| match std::error::Error::source(&error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    })
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
    if let Some(pager) = PAGER.get() {
        pager.hold();
    }
}

extern "C" fn after_fork() {
    if let Some(pager) = PAGER.get() {
        pager.release();
    }
}

/// Notes that the program has allocated this many bytes.
fn came(bytes: usize) {
    static CAME: AtomicUsize = AtomicUsize::new(0);
    // A small allocation seldom makes the allocator map new memory.
    if bytes >= 64 << 10
        && CAME.fetch_add(bytes, Ordering::Relaxed) + bytes >= LARGE
        && let Some(pager) = PAGER.get()
    {
        CAME.store(0, Ordering::Relaxed);
        pager.look();
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
        came(bytes);
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
/// the pager. But it does not if the program turns them into a guard region (Linux 6.13), so this
/// function makes it do so. The pager also learns which memory no child inherits.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn madvise(at: *mut c_void, bytes: size_t, advice: c_int) -> c_int {
    /// Advice that no available crate defines.
    const GUARD_INSTALL: c_int = 102;
    let pager = PAGER.get();
    if advice == libc::MADV_MERGEABLE && pager.is_some() {
        return 0;
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    let advised = unsafe { libc::syscall(libc::SYS_madvise, at, bytes, advice) as c_int };
    if advised == 0 && advice == GUARD_INSTALL {
        // SAFETY: the pages of a guard region have no content, and this call does not remove the
        // guards.
        unsafe { libc::syscall(libc::SYS_madvise, at, bytes, libc::MADV_DONTNEED) };
    }
    if advised == 0
        && matches!(advice, libc::MADV_DONTFORK | libc::MADV_DOFORK)
        && let Some(pager) = pager
    {
        pager.inherit(at.addr(), bytes, advice == libc::MADV_DOFORK);
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
/// Does the same as setsockopt(2), and tells the pager if the kernel will read pages later.
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
    if let Some(pager) = PAGER.get() {
        pager.lend();
    }
}

/// Replaces a function of the allocator: calls the one that the program would have without this
/// object, then notes the new memory.
macro_rules! allocation {
    ($name:ident($($argument:ident: $kind:ty),*) -> $result:ty, $symbol:literal, $bytes:expr) => {
        #[doc = "# Safety\nAs the function of this name in libc."]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> $result {
            static NEXT: AtomicPtr<c_void> = AtomicPtr::new(std::ptr::null_mut());
            let mut next = NEXT.load(Ordering::Relaxed);
            if next.is_null() {
                // SAFETY: the name ends with a zero. dlsym takes no memory if the symbol is found.
                next = unsafe { libc::dlsym(libc::RTLD_NEXT, $symbol.as_ptr()) };
                if next.is_null() {
                    say("weir: the program's allocator lacks a function of libc\n");
                    std::process::abort();
                }
                NEXT.store(next, Ordering::Relaxed);
            }
            // SAFETY: the function of this name has this type.
            let result = unsafe {
                std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($kind),*) -> $result>(next)($($argument),*)
            };
            came($bytes);
            result
        }
    };
}

allocation!(malloc(bytes: size_t) -> *mut c_void, c"malloc", bytes);
allocation!(calloc(count: size_t, bytes: size_t) -> *mut c_void, c"calloc", count.saturating_mul(bytes));
allocation!(realloc(at: *mut c_void, bytes: size_t) -> *mut c_void, c"realloc", bytes);
allocation!(memalign(align: size_t, bytes: size_t) -> *mut c_void, c"memalign", bytes);
allocation!(aligned_alloc(align: size_t, bytes: size_t) -> *mut c_void, c"aligned_alloc", bytes);
allocation!(
    posix_memalign(to: *mut *mut c_void, align: size_t, bytes: size_t) -> c_int,
    c"posix_memalign",
    bytes
);
