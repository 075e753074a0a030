/* Threads that write, give up, move and fork the same blocks at once. Each chunk of memory belongs
 * to one thread, and each block has chunks of all threads. */
#include "crowd.h"

enum { THREADS = 6, SMALL = 8, SMALLS = 3072, BIG = 1536, CHUNKS = SMALLS + THREADS, COMMON = 2048, ACTS_MIN = 120 };
enum where { HOME, MOVING, AWAY };

static struct chunk {
    char *home;
    int pages;
    volatile enum where where;
    /* By page: it has the second one, or while it is being changed still the first one. */
    volatile unsigned *was, *is;
} chunks[CHUNKS];
static unsigned counts[2][SMALLS * SMALL + THREADS * BIG];
static char *spare[THREADS], *common;
static double end;
static atomic_long forks, moves;

static char *at(const struct chunk *chunk, int page) {
    long number = chunk - chunks;
    return (chunk->where == AWAY ? spare[number % THREADS] : chunk->home) + page * (word)PAGE;
}

static word stamp_of(const struct chunk *chunk, int page, unsigned count) {
    return count ? ((chunk - chunks) * BIG + page) << 32 | count : 0;
}

static void check(const struct chunk *chunk, const char *after) {
    for (int page = 0; page < chunk->pages; page++)
        if (!has(at(chunk, page), stamp_of(chunk, page, chunk->is[page])))
            FAIL("page %d of chunk %ld is wrong after %s", page, chunk - chunks, after);
}

static void write_some(struct chunk *chunk) {
    for (int page = choose(4); page < chunk->pages; page += 1 + choose(4)) {
        unsigned next = (chunk->was[page] > chunk->is[page] ? chunk->was[page] : chunk->is[page]) + 1;
        chunk->was[page] = chunk->is[page];
        chunk->is[page] = next;
        put(at(chunk, page), stamp_of(chunk, page, next));
        chunk->was[page] = next;
    }
}

static void give_up(struct chunk *chunk) {
    int first = choose(chunk->pages), count = 1 + choose(chunk->pages - first);
    for (int page = first; page < first + count; page++) {
        chunk->was[page] = chunk->is[page];
        chunk->is[page] = 0;
    }
    if (madvise(at(chunk, first), count * (word)PAGE, MADV_DONTNEED)) FAIL("DONTNEED: %s", strerror(errno));
    check(chunk, "DONTNEED");
}

static void move(struct chunk *chunk, char *from, char *to, enum where where, int flags) {
    chunk->where = MOVING;
    word bytes = chunk->pages * (word)PAGE;
    if (mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | flags, to) != to)
        FAIL("mremap: %s", strerror(errno));
    if (flags)
        for (int page = 0; page < chunk->pages; page++)
            if (!has(from + page * (word)PAGE, 0)) FAIL("page %d left by mremap is not zeros", page);
    chunk->where = where;
    check(chunk, where == AWAY ? "mremap" : "mremap back");
    moves++;
}

/* Word by word: what is written at the same time may be seen or not. */
static int is_right(const char *page, word was, word is) {
    const volatile word *words = (const word *)page;
    word found[3] = {words[0], words[255], words[511]};
    word before[3] = {was, was ? mix(was + 1) : 0, was ? mix(was) : 0};
    word after[3] = {is, is ? mix(is + 1) : 0, is ? mix(is) : 0};
    for (int at = 0; at < 3; at++)
        if (found[at] != before[at] && found[at] != after[at]) return 0;
    return 1;
}

static void use_common(void) {
    word page = choose(COMMON);
    volatile word *first = (word *)(common + page * PAGE);
    word found = *first;
    if (found && found >> 32 != page + 1) FAIL("common page %lu has %lx", page, found);
    *first = (page + 1) << 32 | choose(1u << 31);
    if (!choose(8)) madvise(common + page / 2 * PAGE, (1 + choose(COMMON / 2)) * PAGE, MADV_DONTNEED);
}

static void fork_one(void) {
    int child = fork(), status;
    if (child < 0) FAIL("fork: %s", strerror(errno));
    if (!child) {
        alarm(60);
        for (struct chunk *chunk = chunks; chunk < chunks + CHUNKS; chunk++)
            for (int page = 0; page < chunk->pages && chunk->where != MOVING; page++)
                if (!is_right(at(chunk, page), stamp_of(chunk, page, chunk->was[page]),
                              stamp_of(chunk, page, chunk->is[page])))
                    FAIL("a child finds page %d of chunk %ld wrong", page, chunk - chunks);
        for (word page = 0; page < COMMON; page++) {
            word found = *(word *)(common + page * PAGE);
            if (found && found >> 32 != page + 1) FAIL("a child finds common page %lu wrong", page);
            memset(common + page * PAGE, 1, PAGE);
        }
        _exit(0);
    }
    if (waitpid(child, &status, 0) < 0) FAIL("waitpid: %s", strerror(errno));
    if (status) FAIL("a child ends with status %x", status);
    forks++;
}

static void *act(void *number) {
    word me = (word)number;
    chance = chance * 31 + me * 2 + 1;
    for (word count = 0; now() < end || count < ACTS_MIN; count++) {
        struct chunk *chunk = &chunks[choose(CHUNKS / THREADS) * THREADS + me];
        if (!choose(200)) chunk = &chunks[SMALLS + (me + THREADS - SMALLS % THREADS) % THREADS];
        check(chunk, "the acts of others");
        switch (choose(8)) {
        case 0:
            give_up(chunk);
            break;
        case 1: {
            int flags = choose(2) ? MREMAP_DONTUNMAP : 0;
            move(chunk, chunk->home, spare[me], AWAY, flags);
            write_some(chunk);
            check(chunk, "writes elsewhere");
            if (choose(2)) give_up(chunk);
            move(chunk, spare[me], chunk->home, HOME, 0);
            break;
        }
        case 2:
            use_common();
            break;
        default:
            write_some(chunk);
        }
        if (count % (me ? 4000 : 40) == 39) fork_one();
    }
    return 0;
}

int main(int argc, char **argv) {
    (void)argc;
    double seconds = begin(argv);
    char *memory = map((SMALLS * (word)SMALL + THREADS * (word)BIG) * PAGE);
    common = map(COMMON * (word)PAGE);
    for (int number = 0, pages = 0; number < CHUNKS; number++) {
        chunks[number].home = memory;
        chunks[number].pages = number < SMALLS ? SMALL : BIG;
        chunks[number].was = counts[0] + pages;
        chunks[number].is = counts[1] + pages;
        pages += chunks[number].pages;
        memory += chunks[number].pages * (word)PAGE;
    }
    be_seen();
    for (int number = 0; number < CHUNKS; number++)
        for (int page = 0; page < chunks[number].pages; page++) {
            chunks[number].was[page] = chunks[number].is[page] = 1;
            put(at(&chunks[number], page), stamp_of(&chunks[number], page, 1));
        }
    word at_first = resident();
    end = now() + seconds;
    pthread_t threads[THREADS];
    for (word me = 0; me < THREADS; me++) {
        spare[me] = mmap(0, BIG * (word)PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (spare[me] == MAP_FAILED) FAIL("no place");
    }
    for (word me = 0; me < THREADS; me++)
        if (pthread_create(&threads[me], 0, act, (void *)me)) FAIL("no thread");
    for (word me = 0; me < THREADS; me++) pthread_join(threads[me], 0);
    for (int number = 0; number < CHUNKS; number++) check(&chunks[number], "everything");
    dprintf(1, "%lu KiB of memory at first, %lu KiB at the end, %ld moves, %ld forks\n", at_first, resident(), moves, forks);
    return 0;
}
