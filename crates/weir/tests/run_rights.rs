//! `weir run` with programs that meet the pager's thread: by a fork, by calls for processes with
//! one thread, and by calls that change the rights of one thread.

mod common;

use common::WEIR;
use common::bounded::{Scratch, can_run, compiled};
use std::process::{Command, Output, Stdio};

fn weir(arguments: &[&str]) -> Output {
    let run = ["run", "--threads", "3", "--resident", "48MiB", "--store", "host:1GiB", "--"];
    Command::new(WEIR).args(run).args(arguments).stdin(Stdio::null()).output().expect("it runs")
}

/// Compiles a C program and runs it bounded. Returns its exit code, its output, and the lines on
/// standard error.
fn bounded(name: &str, source: &str) -> Option<(Option<i32>, String, String)> {
    if !can_run(name) {
        return None;
    }
    let scratch = Scratch::new(name);
    let program = compiled(name, &scratch.file("program.c", &[PRELUDE, source].concat()), &scratch)?;
    let output = weir(&[program.to_str().expect("text")]);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Some((output.status.code(), text(&output.stdout), text(&output.stderr)))
}

const PRELUDE: &str = r#"
#define _GNU_SOURCE
#include <grp.h>
#include <linux/capability.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
enum { SIZE = 160 << 20 };
static char *filled(int seed) {
    char *memory = mmap(0, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) exit(90);
    for (long at = 0; at < SIZE; at += 4096) *(long *)(memory + at) = at ^ seed;
    return memory;
}
static int is_whole(char *memory, int seed) {
    for (long at = 0; at < SIZE; at += 4096) if (*(long *)(memory + at) != (at ^ seed)) return 0;
    return 1;
}
static int code_of(pid_t child) {
    int status;
    if (child <= 0 || waitpid(child, &status, 0) != child) return 91;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
/* Anonymous memory in MiB. */
static long resident(void) {
    char line[256];
    long found = -1;
    FILE *status = fopen("/proc/self/status", "r");
    while (fgets(line, sizeof line, status)) sscanf(line, "RssAnon: %ld", &found);
    fclose(status);
    return found >> 10;
}
"#;

#[test]
fn a_child_of_a_fork_is_bounded_once_it_takes_much_memory_and_so_is_its_child() {
    let source = r#"
static int in_child(int depth) {
    char *own = filled(depth);
    /* The pager may be slow on a busy machine. What the child has in common with its parent stays. */
    int tries = 0;
    while (resident() > 48 + 32 + (SIZE >> 20) && tries++ < 60000) usleep(1000);
    int code = tries >= 60000 ? 1 : !is_whole(own, depth) ? 2 : 0;
    if (!code && depth < 3) {
        pid_t child = fork();
        if (child == 0) {
            munmap(own, SIZE);
            _exit(in_child(depth + 1));
        }
        code = code_of(child);
    }
    return code ? code : is_whole(own, depth) ? 0 : 3;
}
int main(void) {
    char *memory = filled(9);
    pid_t child = fork();
    if (child == 0) _exit(is_whole(memory, 9) ? in_child(1) : 4);
    printf("%d %d\n", code_of(child), is_whole(memory, 9));
}
"#;
    let Some(found) = bounded("a_child_of_a_fork_is_bounded", source) else { return };
    assert_eq!(found, (Some(0), "0 1\n".into(), String::new()));
}

#[test]
fn a_child_that_is_made_without_fork_has_its_memory() {
    let source = r#"
static char *memory;
static int look(void *seed) { return is_whole(memory, *(int *)seed) ? 7 : 1; }
int main(void) {
    static char stack[65536];
    int seed = 5;
    memory = filled(seed);
    int by_clone = code_of(clone(look, stack + sizeof stack, SIGCHLD, &seed));
    pid_t child = syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) _exit(look(&seed));
    int by_number = code_of(child);
    printf("%d %d %d\n", by_clone, by_number, is_whole(memory, seed));
}
"#;
    let Some(found) = bounded("a_child_that_is_made_without_fork", source) else { return };
    assert_eq!(found, (Some(0), "7 7 1\n".into(), String::new()));
}

#[test]
fn a_child_that_forbids_itself_system_calls_is_left_alone() {
    // In strict mode the system ends a process at any call but four.
    let source = r#"
int main(void) {
    pid_t child = fork();
    if (child == 0) {
        char *memory = filled(0);
        munmap(memory, SIZE);
        pid_t below = fork();
        if (below == 0) {
            void *blocks[3];
            blocks[0] = malloc(60 << 10);
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT);
            /* Each of these is from the heap, and together they are much. */
            for (int at = 0; at < 100; at++) { free(blocks[0]); blocks[0] = malloc(70 << 10); }
            syscall(SYS_exit, 5);
        }
        _exit(code_of(below));
    }
    printf("%d\n", code_of(child));
}
"#
    .replace("int main", "#include <linux/seccomp.h>\nint main");
    let Some(found) = bounded("a_child_that_forbids_itself", &source) else { return };
    assert_eq!(found, (Some(0), "5\n".into(), String::new()));
}

#[test]
fn a_program_enters_a_user_namespace_as_it_does_alone() {
    let source = r#"
int main(void) {
    char *memory = filled(3);
    if (unshare(CLONE_NEWUSER)) { perror("unshare"); return 77; }
    printf("%d\n", is_whole(memory, 3));
}
"#;
    let name = "a_program_enters_a_user_namespace";
    let Some((code, out, said)) = bounded(name, source) else { return };
    if code == Some(77) && !said.contains("Invalid argument") {
        println!("skipped: {name}: {}", said.trim());
        return;
    }
    assert_eq!((code, out.as_str()), (Some(0), "1\n"), "{said}");
    // In the namespace it may be denied a pager.
    assert!(said.is_empty() || said.contains("not bounded from here on: "), "{said}");
}

#[test]
fn a_program_with_threads_is_refused_a_user_namespace_as_it_is_alone() {
    let source = r#"
#include <errno.h>
#include <pthread.h>
static void *wait_for_ever(void *unused) { pause(); return unused; }
int main(void) {
    char *memory = filled(6);
    pthread_t thread;
    if (pthread_create(&thread, NULL, wait_for_ever, NULL)) return 1;
    errno = 0;
    int refused = unshare(CLONE_NEWUSER);
    printf("%d %d %d\n", refused, errno == EINVAL, is_whole(memory, 6));
}
"#;
    let Some(found) = bounded("a_program_with_threads", source) else { return };
    assert_eq!(found, (Some(0), "-1 1 1\n".into(), String::new()));
}

/// A child of vfork(2) has its parent's memory until it runs another program. Its calls must not
/// end its parent's pager.
#[test]
fn what_a_child_of_vfork_is_refused_does_not_concern_its_parents_pager() {
    let source = r#"
#include <errno.h>
#include <fcntl.h>
int main(void) {
    char *memory = filled(8);
    static volatile int refused;
    int own = open("/proc/self/ns/user", O_RDONLY);
    pid_t child = vfork();
    if (child == 0) {
        /* Nobody may enter the user namespace that it is in. */
        refused = setns(own, CLONE_NEWUSER) == -1 && errno == EINVAL;
        execl("/bin/sleep", "sleep", "0.2", NULL);
        _exit(1);
    }
    int code = code_of(child), is_whole_then = is_whole(memory, 8);
    char *other = filled(9);
    printf("%d %d %d %d %d\n", refused, code, is_whole_then, is_whole(other, 9), resident() < 64);
}
"#;
    let Some(found) = bounded("what_a_child_of_vfork", source) else { return };
    assert_eq!(found, (Some(0), "1 0 1 1 1\n".into(), String::new()));
}

/// The pager keeps a row for each thread that is about to end. Under a filter it cannot find out
/// who has ended.
#[test]
fn under_a_filter_any_number_of_threads_can_end() {
    let source = r#"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
enum { THREADS = 600 };
static void *nothing(void *unused) { return unused; }
int main(void) {
    alarm(100);
    char *memory = filled(2);
    struct sock_filter steps[] = {BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {1, steps};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return 77;
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &filter)) return 77;
    /* Each has a stack of its own, so that no control block is where another one was. */
    char *stacks = mmap(0, THREADS * (64L << 10), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (long at = 0; at < THREADS; at++) {
        pthread_t thread;
        pthread_attr_t attributes;
        pthread_attr_init(&attributes);
        pthread_attr_setstack(&attributes, stacks + at * (64 << 10), 64 << 10);
        if (pthread_create(&thread, &attributes, nothing, NULL)) return 2;
        pthread_join(thread, NULL);
    }
    /* And as many whose stacks libc uses again. */
    for (long at = 0; at < THREADS; at++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, nothing, NULL)) return 3;
        pthread_join(thread, NULL);
    }
    printf("%d\n", is_whole(memory, 2));
}
"#;
    let name = "under_a_filter_any_number";
    let Some((code, out, said)) = bounded(name, source) else { return };
    if code == Some(77) {
        return println!("skipped: {name}: no filter: {}", said.trim());
    }
    assert_eq!((code, out.as_str(), said.as_str()), (Some(0), "1\n", ""));
}

#[test]
fn a_program_that_keeps_a_capability_when_it_changes_its_user_goes_on() {
    let source = r#"
int main(void) {
    if (geteuid() != 0) return 77;
    struct __user_cap_header_struct header = {_LINUX_CAPABILITY_VERSION_3, 0};
    struct __user_cap_data_struct data[2] = {{0}};
    data[0].effective = data[0].permitted = 1 << CAP_SETGID;
    char *memory = filled(4);
    gid_t group = 65534;
    /* libc ends the process if a call succeeds in one thread and fails in another. */
    if (prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0) || setresuid(65534, 65534, 65534)) return 1;
    if (syscall(SYS_capset, &header, data) || setgroups(1, &group)) return 2;
    printf("%d\n", is_whole(memory, 4));
}
"#;
    let name = "a_program_that_keeps_a_capability";
    let Some((code, out, said)) = bounded(name, source) else { return };
    if code == Some(77) {
        println!("skipped: {name}: needs root");
        return;
    }
    assert_eq!((code, out.as_str(), said.as_str()), (Some(0), "1\n", ""));
}

/// libc makes these calls in the pager's threads too, by a signal. The handler reads from the stack
/// of the thread that calls, and the kernel reads the list of groups there.
#[test]
fn threads_change_the_user_of_the_process_while_their_stacks_and_lists_move_out() {
    let source = r#"
#include <grp.h>
#include <pthread.h>
#include <pwd.h>
static volatile int is_over;
static gid_t *groups;
static void *change(void *way) {
    for (long round = 0; !is_over; round++) {
        int result = 0;
        switch ((long)way) {
            case 0: result = setresuid(0, 0, 0) || setresgid(0, 0, 0); break;
            case 1: result = setuid(0) || setgid(0) || seteuid(0) || setegid(0); break;
            case 2: result = setreuid(0, 0) || setregid(0, 0); break;
            default: result = setgroups(20000, groups) || initgroups("root", 0);
        }
        if (result) return "failed";
        if (round % 16 == 0) usleep(1000);
    }
    return NULL;
}
int main(void) {
    if (geteuid() != 0) return 77;
    alarm(60);
    groups = mmap(0, 1 << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int at = 0; at < 20000; at++) groups[at] = at + 1;
    /* The last two pass the same list. */
    pthread_t threads[5];
    for (long way = 0; way < 5; way++) pthread_create(threads + way, NULL, change, (void *)(way < 4 ? way : 3));
    char *memory = filled(5);
    int is_right = 1;
    /* In order, and by jumps, so that whole blocks go, and single pages. */
    for (int round = 0; round < 2; round++) {
        is_right &= is_whole(memory, 5);
        unsigned long chance = round;
        for (int touch = 0; touch < 20000; touch++) {
            chance = chance * 6364136223846793005 + 1442695040888963407;
            long at = (chance >> 33) % (SIZE / 4096) * 4096;
            is_right &= *(long *)(memory + at) == (at ^ 5);
        }
    }
    /* A child has no pager, and its parent's threads may have had locks. */
    for (int round = 0; round < 4; round++) {
        pid_t child = fork();
        if (child == 0) _exit(initgroups("root", 0) || setuid(0) ? 4 : 0);
        if (code_of(child)) return 5;
    }
    is_over = 1;
    for (int way = 0; way < 5; way++) {
        void *failed;
        pthread_join(threads[way], &failed);
        if (failed) printf("%d %s\n", way, (char *)failed);
    }
    if (setgroups(20000, (gid_t *)4096) != -1 || setgroups(70000, groups) != -1) return 3;
    printf("%d\n", is_right);
}
"#;
    let name = "threads_change_the_user";
    let Some((code, out, said)) = bounded(name, source) else { return };
    if code == Some(77) {
        println!("skipped: {name}: needs root");
        return;
    }
    assert_eq!((code, out.as_str(), said.as_str()), (Some(0), "1\n", ""));
}

#[test]
fn a_program_that_changes_its_user_at_its_start_is_told_that_its_user_is_the_cause() {
    let name = "a_program_that_changes_its_user_at_its_start";
    if !can_run(name) {
        return;
    }
    if !rustix::process::geteuid().is_root() || common::bounded::program("setpriv").is_none() {
        return println!("skipped: {name}: needs root, and setpriv (package util-linux)");
    }
    let output = weir(&["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups", "/bin/true"]);
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    let why = "ledger is another user's; start weir run as the user that the program changes to";
    assert!(said.contains(why) && !said.contains("chmod"), "{said}");
}

/// A program whose filter refuses unshare(2), as that of man(1) does. The filter stays when another
/// program runs.
const FILTERED: &str = r#"
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
int main(void) {
    struct sock_filter steps[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_unshare, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {4, steps};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) return 77;
    pid_t child = fork();
    if (child == 0) execl("/bin/echo", "echo", "it runs", NULL);
    return code_of(child);
}
"#;

#[test]
fn a_program_whose_filter_forbids_the_pager_says_so() {
    let Some((code, out, said)) = bounded("a_program_whose_filter", FILTERED) else { return };
    assert_eq!((code, out.as_str()), (Some(0), "it runs\n"), "{said}");
    let why = "is not bounded: a system call that the pager needs is forbidden here, as by a seccomp filter";
    assert!(said.contains(why), "{said}");
}

/// The kernel reports no page fault of a thread that ends. If the page with its control block were
/// out then, the thread that joins it would wait for ever.
#[test]
fn a_thread_can_be_joined_though_all_other_memory_has_moved_out_while_it_ended() {
    let source = r#"
#include <fcntl.h>
#include <pthread.h>
#include <sys/rseq.h>
#include <unistd.h>

enum { BYTES = 192 << 20, PAGE = 4096 };
static volatile int is_ending, may_end, number;

// Runs after the destructor of Weir's key, since this key is younger.
static void ends(void *value) {
    (void)value;
    // Else the kernel writes to the control block whenever it interrupts the thread.
    syscall(SYS_rseq, (char *)__builtin_thread_pointer() + __rseq_offset, 32, 1, RSEQ_SIG);
    is_ending = 1;
    while (!may_end) ;
    // Ends without a touch of any memory.
    __asm__ volatile("syscall" : : "a"(SYS_exit), "D"(0) : "rcx", "r11", "memory");
}

static void *begins(void *nothing) {
    pthread_key_t key;
    pthread_key_create(&key, ends);
    pthread_setspecific(key, &number);
    number = syscall(SYS_gettid);
    return nothing;
}

static int is_there(unsigned long at) {
    unsigned long word = 0;
    int file = open("/proc/self/pagemap", O_RDONLY);
    if (pread(file, &word, 8, at / PAGE * 8) != 8) return 1;
    close(file);
    return word >> 63;
}

int main(void) {
    alarm(60);
    unsigned char *memory = mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    memset(memory, 7, BYTES);
    pthread_t thread;
    pthread_create(&thread, 0, begins, 0);
    while (!is_ending) usleep(1000);
    unsigned long at = 1;
    for (int rounds = 0; rounds < 4 && is_there((unsigned long)thread); rounds++) {
        for (long page = 0; page < BYTES; page += PAGE) memory[page]++;
        for (int touch = 0; touch < 20000; touch++) {
            at = at * 6364136223846793005 + 1442695040888963407;
            memory[(at >> 20) % BYTES]++;
        }
    }
    may_end = 1;
    char task[64];
    sprintf(task, "/proc/self/task/%d", number);
    while (access(task, F_OK) == 0) usleep(1000);
    pthread_join(thread, 0);
    puts("joined");
}
"#;
    if !cfg!(target_arch = "x86_64") {
        return println!("skipped: a_thread_can_be_joined: x86-64");
    }
    let Some((code, said, lines)) = bounded("a_thread_can_be_joined", source) else { return };
    assert_eq!((code, said.as_str()), (Some(0), "joined\n"), "{lines}");
}
