/* 10,000 mappings of 1 to 64 pages that are unmapped, cut, moved, grown and protected at random. */
#include "crowd.h"

enum { REGIONS = 10000, MOST = 64, ACTS_MIN = 300 };

static struct region {
    char *at;
    int pages;
    unsigned stamps[MOST];
} regions[REGIONS];
static unsigned stamps;

static word some_pages(void) {
    return choose(16) ? 1 + choose(3) : 1 + choose(MOST);
}

static void check(const struct region *region, const char *after) {
    for (int page = 0; page < region->pages; page++)
        if (!has(region->at + page * PAGE, region->stamps[page]))
            FAIL("page %d of mapping %ld is wrong after %s", page, region - regions, after);
}

static void write_some(struct region *region, word one_of) {
    for (int page = 0; page < region->pages; page++)
        if (!choose(one_of)) put(region->at + page * PAGE, region->stamps[page] = ++stamps);
}

static void must(int failed, const char *what) {
    if (failed) FAIL("%s: %s", what, strerror(errno));
}

static void drop(struct region *region) {
    must(munmap(region->at, region->pages * PAGE), "munmap");
    region->pages = 0;
}

static void create(struct region *region, char *place) {
    region->pages = some_pages();
    region->at = mmap(place, region->pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    must(region->at == MAP_FAILED, "mmap");
    memset(region->stamps, 0, sizeof region->stamps);
}

static void move(struct region *region, int pages, int flags, const char *what) {
    char *place = 0;
    if (flags & MREMAP_FIXED) {
        place = mmap(0, pages * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        must(place == MAP_FAILED, "mmap of a place");
    }
    char *to = mremap(region->at, region->pages * PAGE, pages * PAGE, flags, place);
    must(to == MAP_FAILED, what);
    region->at = to;
    for (int page = region->pages; page < pages; page++) region->stamps[page] = 0;
    region->pages = pages;
    check(region, what);
}

static void act(void) {
    struct region *region = &regions[choose(REGIONS)], *other;
    do other = &regions[choose(REGIONS)]; while (other == region);
    int pages = region->pages, first = choose(pages), count = 1 + choose(pages - first);
    check(region, "other calls");
    switch (choose(12)) {
    case 0: {
        char *place = region->at;
        drop(region);
        create(region, choose(2) ? place : 0);
        check(region, "munmap and mmap");
        break;
    }
    case 1: /* A part at one of its ends. */
        if (pages == count) break;
        if (choose(2)) {
            must(munmap(region->at, count * PAGE), "munmap of the head");
            region->at += count * PAGE;
            memmove(region->stamps, region->stamps + count, (pages - count) * sizeof *region->stamps);
        } else {
            must(munmap(region->at + (pages - count) * PAGE, count * PAGE), "munmap of the tail");
        }
        region->pages -= count;
        break;
    case 2: /* A part in the middle: the end is another mapping. */
        if (first == 0 || first + count >= pages) break;
        drop(other);
        must(munmap(region->at + first * PAGE, count * PAGE), "munmap of the middle");
        other->at = region->at + (first + count) * PAGE;
        other->pages = pages - first - count;
        memcpy(other->stamps, region->stamps + first + count, other->pages * sizeof *other->stamps);
        region->pages = first;
        check(other, "munmap before it");
        break;
    case 3:
        move(region, some_pages(), MREMAP_MAYMOVE, "mremap to another size");
        break;
    case 4:
        move(region, some_pages(), MREMAP_MAYMOVE | MREMAP_FIXED, "mremap to a place");
        break;
    case 5: /* What stays at the old place is zeros. */
        drop(other);
        other->at = region->at;
        other->pages = pages;
        memset(other->stamps, 0, sizeof other->stamps);
        move(region, pages, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, "mremap that leaves zeros");
        check(other, "mremap that leaves zeros");
        break;
    case 6:
    case 7: {
        char *at = region->at + first * PAGE;
        int is_closed = choose(2);
        must(mprotect(at, count * PAGE, is_closed ? PROT_NONE : PROT_READ), "mprotect");
        if (!is_closed) check(region, "mprotect");
        check(other, "mprotect of another");
        write_some(other, 2);
        must(mprotect(at, count * PAGE, PROT_READ | PROT_WRITE), "mprotect back");
        break;
    }
    case 8:
        must(madvise(region->at + first * PAGE, count * PAGE, MADV_DONTNEED), "DONTNEED");
        memset(region->stamps + first, 0, count * sizeof *region->stamps);
        break;
    default:
        write_some(region, 2);
    }
    check(region, "its call");
    write_some(region, 4);
}

/* Leaves of a mapping only the pages by which it grew. No event tells the pager of them. */
static void grow_and_cut(struct region *region) {
    int before = region->pages;
    if (before + 2 > MOST) return;
    move(region, before + 2, MREMAP_MAYMOVE, "mremap to a larger size");
    must(munmap(region->at, before * PAGE), "munmap of what was there before");
    region->at += before * PAGE;
    memmove(region->stamps, region->stamps + before, 2 * sizeof *region->stamps);
    region->pages = 2;
    write_some(region, 1);
    check(region, "growth");
}

int main(int argc, char **argv) {
    (void)argc;
    double seconds = begin(argv);
    for (int at = 0; at < REGIONS; at++) create(&regions[at], 0);
    be_seen();
    /* Each is a mapping of its own then: the kernel merges only what has equal flags. */
    for (int at = 1; at < REGIONS; at += 2)
        must(madvise(regions[at].at, regions[at].pages * PAGE, MADV_DONTDUMP), "DONTDUMP");
    word pages = 0;
    for (int at = 0; at < REGIONS; at++) {
        write_some(&regions[at], 1);
        pages += regions[at].pages;
    }
    for (int at = 0; at < REGIONS; at++) check(&regions[at], "the first writes");
    word at_first = resident(), acts = 0;
    for (double end = now() + seconds; now() < end || acts < ACTS_MIN; acts++) act();
    for (int at = 0; at < REGIONS; at++) check(&regions[at], "everything");
    for (int at = 0; at < REGIONS / 10; at++) grow_and_cut(&regions[choose(REGIONS)]);
    int child = fork(), status;
    if (child < 0) FAIL("fork: %s", strerror(errno));
    for (int at = 0; !child && at < REGIONS; at++) check(&regions[at], "a fork");
    if (!child) _exit(0);
    if (waitpid(child, &status, 0) != child || status) FAIL("a child ends with status %x", status);
    dprintf(1, "%lu KiB of memory at first of %lu KiB, %lu acts\n", at_first, pages * 4, acts);
    return 0;
}
