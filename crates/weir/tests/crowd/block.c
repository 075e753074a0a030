/* 64 threads that use all pages of one block, round after round. One more thread goes through other
 * memory, so that the block goes. It ends after its time, once standard input is at its end. */
#include "crowd.h"
#include <poll.h>

enum { THREADS = 64, PAGES = 40 << 10 };

static char *block, *other;
static pthread_barrier_t barrier;
static atomic_int has_ended;
static double end;

/* Each thread has 64 bytes of each page. */
static void *use(void *number) {
    word me = (word)number;
    chance = me * 2 + 1;
    struct pollfd input = {.fd = 0, .events = POLLIN};
    for (word round = 0;; round++) {
        if (!me && now() > end && poll(&input, 1, 0) > 0) has_ended = 1;
        pthread_barrier_wait(&barrier);
        if (has_ended) return (void *)round;
        word page = choose(BLOCK_PAGES), step = choose(BLOCK_PAGES) | 1;
        for (int at = 0; at < BLOCK_PAGES; at++, page = (page + step) % BLOCK_PAGES) {
            volatile word *own = (word *)(block + page * PAGE + me * 64);
            word right = round ? mix(round * THREADS + me) + page : 0;
            if (own[0] != right || own[7] != right)
                FAIL("page %lu is wrong for thread %lu in round %lu", page, me, round);
            own[0] = own[7] = mix((round + 1) * THREADS + me) + page;
        }
        /* Nobody writes the block now. */
        pthread_barrier_wait(&barrier);
    }
}

static void *sweep(void *unused) {
    for (word round = 0; !has_ended; round++)
        for (word page = 0; page < PAGES && !has_ended; page++) {
            if (!has(other + page * PAGE, round ? round * PAGES + page : 0)) FAIL("page %lu is wrong", page);
            put(other + page * PAGE, (round + 1) * PAGES + page);
        }
    return unused;
}

int main(int argc, char **argv) {
    (void)argc;
    end = now() + begin(argv);
    char *memory = map(PAGES * (word)PAGE + 4 * BLOCK);
    block = (char *)(((word)memory + 2 * BLOCK - 1) / BLOCK * BLOCK);
    other = block + 2 * BLOCK;
    pthread_t threads[THREADS], sweeper;
    pthread_barrier_init(&barrier, 0, THREADS);
    if (pthread_create(&sweeper, 0, sweep, 0)) FAIL("no thread");
    for (word me = 0; me < THREADS; me++)
        if (pthread_create(&threads[me], 0, use, (void *)me)) FAIL("no thread");
    void *rounds;
    for (word me = 0; me < THREADS; me++) pthread_join(threads[me], &rounds);
    pthread_join(sweeper, 0);
    dprintf(1, "%lu rounds\n", (word)rounds);
    return 0;
}
