/* One mapping that is split until the kernel allows no more mappings, and used at that. */
#include "crowd.h"

enum { PAGES = 72 << 10 };

static unsigned stamps[PAGES];

int main(int argc, char **argv) {
    (void)argc;
    double end = now() + begin(argv);
    char *memory = map(PAGES * (word)PAGE);
    unsigned stamp = 0, splits = 0, sweeps = 0;
    for (unsigned page = 0; page < PAGES; page++) put(memory + page * (word)PAGE, stamps[page] = ++stamp);
    word at_first = resident();
    for (unsigned page = 1; page < PAGES && !madvise(memory + page * (word)PAGE, PAGE, MADV_DONTDUMP); page += 2)
        splits++;
    if (splits > PAGES / 2 - 2) {
        dprintf(1, "skipped: the kernel allows more mappings than there are pages\n");
        return 0;
    }
    do {
        /* In order, and at random. */
        for (unsigned at = 0; at < PAGES; at++) {
            unsigned page = sweeps % 2 ? choose(PAGES) : at;
            char *place = memory + page * (word)PAGE;
            if (!has(place, stamps[page])) FAIL("page %u is wrong in sweep %u", page, sweeps);
            if (choose(16) == 0) put(place, stamps[page] = ++stamp);
            if (choose(256) == 0 && !madvise(place, PAGE, MADV_DONTNEED)) stamps[page] = 0;
            if (at % 4096 == 0 && sweeps && now() > end) break;
        }
        sweeps++;
    } while (now() < end);
    word at_last = resident();
    int child = fork(), status;
    for (unsigned page = 0; page < PAGES; page++)
        if (!has(memory + page * (word)PAGE, stamps[page])) FAIL("page %u is wrong after a fork", page);
    if (!child) _exit(0);
    if (waitpid(child, &status, 0) != child || status) FAIL("a child ends with status %x", status);
    dprintf(1, "%lu KiB of memory at first of %u KiB, %lu KiB at the end, %u splits, %u sweeps\n", at_first, PAGES * 4, at_last, splits, sweeps);
    return 0;
}
