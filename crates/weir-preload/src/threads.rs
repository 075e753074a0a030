//! Calls that a program with one thread may make, and that the pager's threads would make fail.
//!
//! The pager's threads are further threads of the process. The kernel lets only a process with one
//! thread enter a user namespace. Some calls change the rights of one thread. If the threads of a
//! process have different rights when the process changes its user, libc ends the process. A
//! process may also be copied without libc's knowledge.

use super::{IS_FILTERED, PAGER, after_fork, after_fork_in_child, before_fork, pager, start_again};
use libc::{c_int, c_long, c_ulong, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::sync::OnceLock;
use std::sync::atomic::Ordering;
use std::time::Duration;
use weir_pager::Pager;

/// Longest wait for the kernel to notice that a thread has ended.
const TRIES: usize = 50;

/// Makes a system call as libc does: a failure is -1 and an error number.
unsafe fn call(number: c_long, arguments: [c_ulong; 6]) -> c_long {
    let [first, second, third, fourth, fifth, sixth] = arguments;
    let result: c_long;
    // SAFETY: the caller answers for the call. The kernel changes these registers alone.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") first, in("rsi") second, in("rdx") third,
            in("r10") fourth, in("r8") fifth, in("r9") sixth,
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    // SAFETY: as above.
    #[cfg(target_arch = "aarch64")]
    unsafe {
        std::arch::asm!(
            "svc 0",
            in("x8") number,
            inlateout("x0") first => result,
            in("x1") second, in("x2") third, in("x3") fourth, in("x4") fifth, in("x5") sixth,
            options(nostack),
        );
    }
    if (-4095..0).contains(&result) {
        // SAFETY: libc's location of this thread's error number is valid.
        unsafe { *libc::__errno_location() = -result as c_int };
        return -1;
    }
    result
}

/// The pager of this process, for a thread of the program. On the pager's own threads this is
/// `None`: they make some of the calls below themselves, and must not wait for themselves. It is
/// `None` too in a child that shares its parent's memory (`vfork`): the pager is the parent's.
fn others_pager() -> Option<&'static Pager> {
    pager().filter(|pager| pager.is_of_this_process() && !pager.is_this_thread())
}

/// Whether the program has other threads than the calling one. The pager's threads are not of the
/// program.
fn has_other_threads(pager: &Pager) -> bool {
    std::fs::read_dir("/proc/self/task").is_ok_and(|threads| threads.count() > 1 + pager.threads())
}

/// Makes a call that needs a process with one thread. If it fails, makes it again without the
/// pager's threads. After that the process has another pager.
fn alone(call: impl Fn() -> c_long) -> c_long {
    let failed =
        |result: c_long| result == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
    let first = call();
    if !failed(first) {
        return first;
    }
    let before = others_pager().filter(|pager| !has_other_threads(pager));
    let Some(before) = before else {
        // The count of the threads may have changed the error number.
        // SAFETY: libc's location of this thread's error number is valid.
        unsafe { *libc::__errno_location() = libc::EINVAL };
        return first;
    };
    // A signal handler may fork until the pager has stopped. It must find this pager, and wait for
    // all memory.
    before.clone().stop();
    PAGER.store(std::ptr::null_mut(), Ordering::Release);
    let mut result = call();
    for _ in 0..TRIES {
        if !failed(result) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
        result = call();
    }
    // SAFETY: libc's location of this thread's error number is valid.
    let errno = unsafe { *libc::__errno_location() };
    // It has the last limit that the program got (`weir limit`).
    start_again(before, before.limit(), &[]);
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    result
}

/// # Safety
/// Does the same as unshare(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unshare(flags: c_int) -> c_int {
    // SAFETY: the caller's argument is passed on unchanged.
    let unshare = || unsafe { call(libc::SYS_unshare, [flags as c_ulong, 0, 0, 0, 0, 0]) };
    alone(unshare) as c_int
}

/// # Safety
/// Does the same as setns(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setns(file: c_int, kind: c_int) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let setns = || unsafe { call(libc::SYS_setns, [file as c_ulong, kind as c_ulong, 0, 0, 0, 0]) };
    alone(setns) as c_int
}

/// # Safety
/// Does the same as capset(2), in the pager's threads too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn capset(header: *mut [u32; 2], data: *const [u32; 6]) -> c_int {
    const VERSION_1: u32 = 0x1998_0330;
    // SAFETY: the caller's arguments are passed on unchanged.
    let result = unsafe {
        call(
            libc::SYS_capset,
            [header.expose_provenance() as u64, data.expose_provenance() as u64, 0, 0, 0, 0],
        )
    };
    if result == 0
        && let Some(pager) = others_pager()
    {
        // SAFETY: the kernel has just read both. The first version has half as many words.
        let ([version, thread], data) = unsafe {
            let mut own = [0; 6];
            let words = if (*header)[0] == VERSION_1 { 3 } else { 6 };
            std::ptr::copy_nonoverlapping(data.cast::<u32>(), own.as_mut_ptr(), words);
            (*header, own)
        };
        // SAFETY: the call has no arguments and no effects.
        let me = unsafe { call(libc::SYS_gettid, [0; 6]) };
        if thread == 0 || c_long::from(thread) == me {
            // The pager's thread must not touch the program's memory, so it reads copies.
            let copies = Box::new(([version, 0_u32], data));
            let [header, data] = [(&raw const copies.0).addr(), (&raw const copies.1).addr()];
            // SAFETY: the call changes the rights of one thread, and the copies outlive it.
            unsafe { pager.also(libc::SYS_capset, [header, data, 0, 0, 0]) };
        }
    }
    result as c_int
}

/// # Safety
/// Does the same as prctl(2). Rights that it changes are changed in the pager's threads too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn prctl(
    option: c_int,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
) -> c_int {
    // SAFETY: the caller's arguments are passed on unchanged.
    let result = unsafe { call(libc::SYS_prctl, [option as c_ulong, second, third, fourth, fifth, 0]) };
    if option == libc::PR_SET_SECCOMP {
        IS_FILTERED.store(true, Ordering::Relaxed);
    }
    let is_about_rights = matches!(
        option,
        libc::PR_SET_KEEPCAPS | libc::PR_SET_SECUREBITS | libc::PR_CAPBSET_DROP | libc::PR_CAP_AMBIENT
    );
    if result >= 0
        && is_about_rights
        && let Some(pager) = others_pager()
    {
        let arguments = [option as c_ulong, second, third, fourth, fifth].map(|word| word as usize);
        // SAFETY: these options change the rights of one thread, and have no pointers.
        unsafe { pager.also(libc::SYS_prctl, arguments) };
    }
    result as c_int
}

/// Bytes of a page.
const PAGE: usize = 4096;
/// Largest number of groups of a process (`NGROUPS_MAX`).
const GROUPS_MOST: usize = 65_536;
/// Bytes of the caller's stack that libc may use for a call in all threads.
const OF_CALL: usize = 16 << 10;

/// Makes a call that libc makes in each thread of the process. In the pager's threads too a signal
/// handler of libc reads the arguments, and they lie on the stack of the calling thread. If that
/// were out, the pager's thread would wait for itself. A thread's stack is managed memory.
fn in_all_threads(call: impl FnOnce() -> c_int) -> c_int {
    let here = 0_u8;
    let above = (&raw const here).addr() + 1;
    let kept = others_pager().map(|pager| pager.keep(above - OF_CALL, OF_CALL));
    let result = call();
    drop(kept);
    result
}

/// Functions of libc that change the user or the groups of all threads.
macro_rules! in_all_threads {
    ($($name:ident($($argument:ident: $type:ty),*);)*) => {$(
        /// # Safety
        /// Does the same as the function of libc with this name.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> c_int {
            let Some(next) = next!($name: unsafe extern "C" fn($($type),*) -> c_int) else {
                return lacking();
            };
            // SAFETY: the caller's arguments are passed on unchanged.
            in_all_threads(|| unsafe { next($($argument),*) })
        }
    )*};
}

in_all_threads! {
    setuid(user: libc::uid_t);
    setgid(group: libc::gid_t);
    seteuid(user: libc::uid_t);
    setegid(group: libc::gid_t);
    setreuid(real: libc::uid_t, effective: libc::uid_t);
    setregid(real: libc::gid_t, effective: libc::gid_t);
    setresuid(real: libc::uid_t, effective: libc::uid_t, saved: libc::uid_t);
    setresgid(real: libc::gid_t, effective: libc::gid_t, saved: libc::gid_t);
}

/// # Safety
/// Does the same as setgroups(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn setgroups(count: usize, groups: *const libc::gid_t) -> c_int {
    type SetGroups = unsafe extern "C" fn(usize, *const libc::gid_t) -> c_int;
    let Some(next) = next!(setgroups: SetGroups) else { return lacking() };
    // The kernel reads the groups in the pager's thread too, so they stay in place as well. It
    // refuses more than the most.
    let (at, bytes) = (groups.addr(), count.min(GROUPS_MOST) * size_of::<libc::gid_t>());
    let kept = others_pager().filter(|_| bytes > 0).map(|pager| pager.keep(at, bytes));
    if kept.is_some() {
        let first = at - at % PAGE;
        let pages = std::ptr::with_exposed_provenance_mut(first);
        // SAFETY: the call only brings these pages into memory. Where there are none it fails, and
        // so does the caller's call.
        unsafe { libc::madvise(pages, at + bytes - first, libc::MADV_POPULATE_READ) };
    }
    // SAFETY: the caller's arguments are passed on unchanged.
    in_all_threads(|| unsafe { next(count, groups) })
}

/// # Safety
/// Does the same as initgroups(3). libc's function calls its own `setgroups`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn initgroups(user: *const libc::c_char, group: libc::gid_t) -> c_int {
    // The list is in libc's memory: in a child of a fork this object's allocator may be locked.
    let (mut list, mut room) = (std::ptr::null_mut::<libc::gid_t>(), 64);
    let mut count = loop {
        // SAFETY: the list is null, or libc's.
        let grown = unsafe { libc::realloc(list.cast(), room * size_of::<libc::gid_t>()) };
        let mut count = room as c_int;
        // SAFETY: the caller's name ends with a zero, and the list has room for so many.
        let is_whole =
            !grown.is_null() && unsafe { libc::getgrouplist(user, group, grown.cast(), &raw mut count) } >= 0;
        let needed = usize::try_from(count).unwrap_or(0);
        if !grown.is_null() {
            list = grown.cast();
        }
        if is_whole {
            break needed.min(GROUPS_MOST);
        }
        // If it asks for no more room, it had no memory of its own.
        if grown.is_null() || needed <= room {
            // SAFETY: the list is null, or libc's. libc's location of the error number is valid.
            unsafe {
                libc::free(list.cast());
                *libc::__errno_location() = libc::ENOMEM;
            }
            return -1;
        }
        room = needed;
    };
    // As libc does: the kernel may take fewer.
    let result = loop {
        // SAFETY: the list has as many elements.
        let result = unsafe { setgroups(count, list) };
        let is_refused = result == -1 && io::Error::last_os_error().raw_os_error() == Some(libc::EINVAL);
        count = count.saturating_sub(1);
        if !is_refused || count == 0 {
            break result;
        }
    };
    // SAFETY: the list is libc's. Its `free` keeps the error number.
    unsafe { libc::free(list.cast()) };
    result
}

/// Makes a call that copies the process. Before the call, all memory of the process is brought into
/// place.
fn copied(copy: impl FnOnce() -> c_long) -> c_long {
    before_fork();
    match copy() {
        0 => {
            after_fork_in_child();
            0
        }
        result => {
            // SAFETY: libc's location of this thread's error number is valid.
            let errno = unsafe { *libc::__errno_location() };
            after_fork();
            // SAFETY: as above.
            unsafe { *libc::__errno_location() = errno };
            result
        }
    }
}

/// # Safety
/// Does the same as _Fork(3), which runs no handlers of forks.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn _Fork() -> libc::pid_t {
    let Some(next) = next!(_Fork: unsafe extern "C" fn() -> libc::pid_t) else { return lacking() };
    // SAFETY: it has no arguments.
    copied(|| unsafe { next() }.into()) as libc::pid_t
}

/// The result of a function that libc lacks.
fn lacking() -> c_int {
    // SAFETY: libc's location of this thread's error number is valid.
    unsafe { *libc::__errno_location() = libc::ENOSYS };
    -1
}

/// # Safety
/// Does the same as syscall(2). A call that concerns the pager is passed to the function in this
/// file that replaces it.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    first: c_ulong,
    second: c_ulong,
    third: c_ulong,
    fourth: c_ulong,
    fifth: c_ulong,
    sixth: c_ulong,
) -> c_long {
    let is_shared = |flags: c_ulong| flags & libc::CLONE_VM as c_ulong != 0;
    // SAFETY: the caller's arguments are passed on unchanged.
    let pass = || unsafe { call(number, [first, second, third, fourth, fifth, sixth]) };
    match number {
        libc::SYS_fork => copied(pass),
        // If the caller gives the child a new stack, the child cannot return into this function,
        // whose frame is on the old stack. Such a call does not use `copied`.
        libc::SYS_clone if !is_shared(first) && second == 0 => copied(pass),
        libc::SYS_clone3 if first != 0 => {
            let arguments = std::ptr::with_exposed_provenance::<c_ulong>(first as usize);
            // SAFETY: the caller's structure begins with the flags, and has its stack at word 5.
            let [flags, stack] = unsafe { [0, 5].map(|word| arguments.add(word).read()) };
            if is_shared(flags) || stack != 0 { pass() } else { copied(pass) }
        }
        // SAFETY: the caller's arguments are passed on unchanged.
        libc::SYS_unshare => unsafe { unshare(first as c_int).into() },
        // SAFETY: as above.
        libc::SYS_setns => unsafe { setns(first as c_int, second as c_int).into() },
        libc::SYS_capset => {
            let [header, data] = [first, second].map(|at| at as usize);
            let header = std::ptr::with_exposed_provenance_mut(header);
            // SAFETY: as above.
            unsafe { capset(header, std::ptr::with_exposed_provenance(data)).into() }
        }
        // SAFETY: as above.
        libc::SYS_prctl => unsafe { prctl(first as c_int, second, third, fourth, fifth).into() },
        libc::SYS_seccomp => {
            IS_FILTERED.store(true, Ordering::Relaxed);
            pass()
        }
        _ => pass(),
    }
}

type Begin = extern "C-unwind" fn(*mut c_void) -> *mut c_void;

/// Bytes of a thread's control block that the kernel writes when the thread ends.
const CONTROL: usize = 4096;

#[used]
#[unsafe(link_section = ".init_array")]
static MAKE_KEY: extern "C" fn() = make_key;

/// Makes the key before the program can fork. Otherwise a fork while another thread makes it would
/// leave the child a key that is being made for ever.
extern "C" fn make_key() {
    key();
}

/// A key whose destructor runs when a thread is about to end. `None` if there is no key left.
fn key() -> Option<libc::pthread_key_t> {
    static KEY: OnceLock<Option<libc::pthread_key_t>> = OnceLock::new();
    extern "C" fn ends(_: *mut c_void) {
        if let Some(pager) = others_pager() {
            // SAFETY: the call has no effects. In glibc the thread's name is the address of its
            // control block.
            pager.ends(unsafe { libc::pthread_self() } as usize, CONTROL);
        }
    }
    *KEY.get_or_init(|| {
        let mut key = 0;
        // SAFETY: the key is on the stack, and the function lives as long as the program.
        let made = unsafe { libc::pthread_key_create(&raw mut key, Some(ends)) };
        (made == 0).then_some(key)
    })
}

/// # Safety
/// Does the same as pthread_create(3). When the thread is about to end, the pager is told.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn pthread_create(
    thread: *mut libc::pthread_t,
    attributes: *const libc::pthread_attr_t,
    begin: Begin,
    argument: *mut c_void,
) -> c_int {
    type Create =
        unsafe extern "C" fn(*mut libc::pthread_t, *const libc::pthread_attr_t, Begin, *mut c_void) -> c_int;
    // The thread may be cancelled, or end itself: that unwinds through this function.
    extern "C-unwind" fn in_thread(both: *mut c_void) -> *mut c_void {
        // SAFETY: the caller below has written both, for this thread alone.
        let (begin, argument) = unsafe {
            let both = both.cast::<(Begin, *mut c_void)>();
            let copy = *both;
            libc::free(both.cast());
            copy
        };
        if let Some(key) = key() {
            // SAFETY: the key exists. Any value but null lets its destructor run.
            unsafe { libc::pthread_setspecific(key, std::ptr::dangling()) };
        }
        begin(argument)
    }
    let Some(next) = next!(pthread_create: Create) else { return libc::EAGAIN };
    // SAFETY: the size is that of what is written there.
    let both = unsafe { libc::malloc(size_of::<(Begin, *mut c_void)>()) }.cast::<(Begin, *mut c_void)>();
    if both.is_null() {
        return libc::EAGAIN;
    }
    // SAFETY: the new thread frees what it gets, or this
    // thread does if there is none. The caller answers for the other arguments.
    unsafe {
        both.write((begin, argument));
        let result = next(thread, attributes, in_thread, both.cast());
        if result != 0 {
            libc::free(both.cast());
        }
        result
    }
}

type Main = extern "C" fn(*mut c_void) -> c_int;

/// # Safety
/// Does the same as clone(2).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn clone(
    main: Option<Main>,
    stack: *mut c_void,
    flags: c_int,
    argument: *mut c_void,
    parent: *mut c_int,
    tls: *mut c_void,
    child: *mut c_int,
) -> c_int {
    type Clone = unsafe extern "C" fn(
        Option<Main>,
        *mut c_void,
        c_int,
        *mut c_void,
        *mut c_int,
        *mut c_void,
        *mut c_int,
    ) -> c_int;
    extern "C" fn in_child(both: *mut c_void) -> c_int {
        after_fork_in_child();
        // SAFETY: the caller below has written both, and this process has a copy of them.
        let (main, argument) = unsafe { *both.cast::<(Main, *mut c_void)>() };
        main(argument)
    }
    let Some(next) = next!(clone: Clone) else { return lacking() };
    match main {
        Some(main) if flags & libc::CLONE_VM == 0 => {
            let mut both = MaybeUninit::new((main, argument));
            let both = both.as_mut_ptr().cast();
            before_fork();
            // SAFETY: the caller's arguments, but for the function, which calls the caller's.
            let result = unsafe { next(Some(in_child), stack, flags, both, parent, tls, child) };
            after_fork();
            result
        }
        // SAFETY: the caller's arguments are passed on unchanged.
        main => unsafe { next(main, stack, flags, argument, parent, tls, child) },
    }
}
