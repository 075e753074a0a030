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
