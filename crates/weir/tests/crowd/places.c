/* One thread moves its memory away, and another moves its own to the place that has just become free. */
#include "crowd.h"

enum { BLOCKS = 10, PAGES = BLOCKS * BLOCK_PAGES, ROUNDS_MIN = 4 };
static const word BYTES = BLOCKS * (word)BLOCK;

struct owner {
    char *at;
    unsigned stamps[PAGES];
};
static struct owner first, second;
static double end;
static pthread_barrier_t together;
static _Atomic(char *) leaves;
static atomic_int is_over;
static word rounds;

static void use(struct owner *owner, const char *who) {
    for (word page = 0; page < PAGES; page++) {
        word number = (owner == &second) * PAGES + page + 1;
        char *at = owner->at + page * PAGE;
        unsigned *stamp = &owner->stamps[page];
        if (!has(at, *stamp ? number << 32 | *stamp : 0)) FAIL("page %lu of the %s memory is wrong", page, who);
        if (!choose(4)) put(at, number << 32 | ++*stamp);
    }
}

static void *follow(void *nothing) {
    chance = 77;
    for (;;) {
        use(&second, "second");
        pthread_barrier_wait(&together);
        if (is_over) return nothing;
        char *place = leaves;
        /* The kernel allows this once the other thread's memory has left the place. It is a system call of its
         * own, since after libc's `mmap` the pager would look for new memory first. */
        while (syscall(SYS_mmap, place, BYTES, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) == -1)
            if (errno != EEXIST) FAIL("mmap: %s", strerror(errno));
        if (mremap(second.at, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, place) != place)
            FAIL("mremap of the second memory: %s", strerror(errno));
        second.at = place;
        pthread_barrier_wait(&together);
    }
}

int main(int argc, char **argv) {
    (void)argc;
    end = now() + begin(argv);
    first.at = map(BYTES);
    second.at = map(BYTES);
    pthread_t other;
    pthread_barrier_init(&together, 0, 2);
    if (pthread_create(&other, 0, follow, 0)) FAIL("no thread");
    for (; now() < end || rounds < ROUNDS_MIN; rounds++) {
        /* This memory is managed too. So `mremap` tells the pager that it is unmapped, and waits, before it
         * tells of the move. */
        char *target = map(BYTES);
        be_seen();
        use(&first, "first");
        leaves = first.at;
        pthread_barrier_wait(&together);
        if (mremap(first.at, BYTES, BYTES, MREMAP_MAYMOVE | MREMAP_FIXED, target) != target)
            FAIL("mremap of the first memory: %s", strerror(errno));
        first.at = target;
        pthread_barrier_wait(&together);
    }
    use(&first, "first");
    is_over = 1;
    pthread_barrier_wait(&together);
    pthread_join(other, 0);
    dprintf(1, "%lu rounds\n", rounds);
    return 0;
}
