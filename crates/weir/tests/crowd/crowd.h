/* Shared by the programs of ../run_crowd.rs. Each ends with 1 at the first page that is wrong. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long word;

enum { PAGE = 4096, BLOCK = 2 << 20, BLOCK_PAGES = BLOCK / PAGE };

#define FAIL(...) do { dprintf(2, __VA_ARGS__); dprintf(2, "\n"); _exit(1); } while (0)

/* The seed of a thread's choices. */
static __thread word chance = 1;

static word choose(word below) {
    chance ^= chance << 13;
    chance ^= chance >> 7;
    chance ^= chance << 17;
    return (chance * 0x9e3779b97f4a7c15 >> 32) % below;
}

static word mix(word value) {
    value = (value ^ value >> 31) * 0x9e3779b97f4a7c15;
    return value ^ value >> 29;
}

/* Writes a page's content, which follows from its stamp. Stamp 0 means zeros. */
static void put(char *page, word stamp) {
    volatile word *words = (word *)page;
    words[511] = mix(stamp);
    words[255] = stamp ? mix(stamp + 1) : 0;
    words[0] = stamp;
}

static int has(const char *page, word stamp) {
    const volatile word *words = (const word *)page;
    if (!stamp) return !words[0] && !words[255] && !words[511];
    return words[0] == stamp && words[255] == mix(stamp + 1) && words[511] == mix(stamp);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

static char *map(word bytes) {
    char *at = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) FAIL("mmap of %lu bytes: %s", bytes, strerror(errno));
    return at;
}

/* Has the pager look for new memory now: it does after an allocation of 4 MiB. */
static void be_seen(void) {
    munmap(map(8ul << 20), 8ul << 20);
}

/* Anonymous memory of this process that is resident, in KiB. */
static word resident(void) {
    char text[4096];
    word found = 0;
    FILE *file = fopen("/proc/self/status", "r");
    while (file && fgets(text, sizeof text, file)) sscanf(text, "RssAnon: %lu", &found);
    if (file) fclose(file);
    return found;
}

/* Begins a program, and returns for how many seconds it is to run. One that hangs ends by SIGALRM. */
static double begin(char **argv) {
    struct rlimit no_core = {0, 0};
    setrlimit(RLIMIT_CORE, &no_core);
    double seconds = atof(argv[1]);
    chance = strtoul(argv[2], 0, 10) * 2 + 1;
    alarm(150 + 3 * seconds);
    dprintf(1, "%d\n", getpid());
    return seconds;
}
