/* A tree of processes: 205 in three generations, at most so many at once. Each reads all memory that
 * it has inherited, and writes some. */
#include "crowd.h"

enum { PAGES = 24 << 10, BUSY = 16 << 10, GENERATIONS = 3, CHILDREN = 205 };

static const int children_of[GENERATIONS] = {5, 5, 7};
static char *memory, *busy;
/* Who wrote each page last. Static arrays are not managed. */
static unsigned writer[PAGES];
static atomic_int *forks;
static atomic_int has_ended;

static void check(unsigned me) {
    for (word page = 0; page < PAGES; page++)
        if (!has(memory + page * PAGE, writer[page] * (word)PAGES + page))
            FAIL("process %u finds page %lu wrong", me, page);
}

static void live(unsigned me, int generation);

static int fork_one(int generation) {
    int child = fork();
    if (child < 0) FAIL("fork: %s", strerror(errno));
    if (!child) {
        unsigned me = atomic_fetch_add(forks, 1) + 2;
        if (me > CHILDREN + 1) FAIL("too many forks");
        live(me, generation);
        _exit(0);
    }
    return child;
}

static void live(unsigned me, int generation) {
    check(me);
    for (word page = me % 64; page < PAGES; page += 64) {
        writer[page] = me;
        put(memory + page * PAGE, me * (word)PAGES + page);
    }
    char *own = map(4 * BLOCK);
    for (word page = 0; page < 4 * BLOCK_PAGES; page += 16) put(own + page * PAGE, me + page);
    int count = generation < GENERATIONS ? children_of[generation] : 0, children[8];
    for (int child = 0; child < count; child++) children[child] = fork_one(generation + 1);
    for (int child = 0; child < count; child++) {
        int status;
        if (waitpid(children[child], &status, 0) < 0) FAIL("waitpid: %s", strerror(errno));
        if (status) FAIL("a child of process %u ends with status %x", me, status);
    }
    check(me);
    for (word page = 0; page < 4 * BLOCK_PAGES; page += 16)
        if (!has(own + page * PAGE, me + page)) FAIL("process %u finds its own page %lu wrong", me, page);
    munmap(own, 4 * BLOCK);
}

static void *sweep(void *unused) {
    for (word round = 0; !has_ended; round++)
        for (word page = 0; page < BUSY && !has_ended; page++) {
            if (!has(busy + page * PAGE, round ? round * BUSY + page : 0)) FAIL("busy page %lu is wrong", page);
            put(busy + page * PAGE, (round + 1) * BUSY + page);
        }
    return unused;
}

static int look(int child) {
    int status;
    if (!child) {
        signal(SIGSEGV, SIG_DFL);
        for (word page = 0; page < PAGES; page += BLOCK_PAGES)
            if (!has(memory + page * PAGE, writer[page] * (word)PAGES + page)) _exit(1);
        _exit(0);
    }
    if (waitpid(child, &status, 0) < 0) FAIL("waitpid: %s", strerror(errno));
    return status;
}

/* A child that no function of libc has made has no bounded memory. It must not see zeros. */
static void fork_behind_libc(void) {
    int status = look(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    if (status) FAIL("a child by its number: status %x", status);
#ifdef __x86_64__
    long child;
    register long last __asm__("r10") = 0;
    __asm__ volatile("syscall" : "=a"(child) : "a"(SYS_clone), "D"(SIGCHLD), "S"(0), "d"(0), "r"(last) : "rcx", "r11", "memory");
    status = look(child);
    if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGSEGV) FAIL("a child behind libc: status %x", status);
#endif
}

int main(int argc, char **argv) {
    (void)argc;
    double end = now() + begin(argv);
    forks = mmap(0, PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    memory = map(PAGES * (word)PAGE);
    busy = map(BUSY * (word)PAGE);
    for (word page = 0; page < PAGES; page++) put(memory + page * PAGE, writer[page] * (word)PAGES + page);
    pthread_t sweeper;
    if (pthread_create(&sweeper, 0, sweep, 0)) FAIL("no thread");
    int bombs = 0;
    do {
        *forks = 0;
        live(1, 0);
        if (*forks != CHILDREN) FAIL("%d forks", *forks);
        fork_behind_libc();
        bombs++;
    } while (now() < end);
    has_ended = 1;
    pthread_join(sweeper, 0);
    dprintf(1, "%d bombs of %d processes\n", bombs, CHILDREN);
    return 0;
}
