/* One page of each block of far more address space than there is memory. */
#include "crowd.h"

int main(int argc, char **argv) {
    (void)argc;
    word bytes = (begin(argv) < 60 ? 8ul : 200ul) << 30, blocks = 0;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    char *memory = mmap(0, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED) {
        dprintf(1, "skipped: %lu GiB of address space: %s\n", bytes >> 30, strerror(errno));
        return 0;
    }
    for (word at = 0; at < bytes; at += BLOCK, blocks++)
        if (!has(memory + at, 0)) FAIL("block %lu is not zeros", blocks);
    put(memory, 1);
    if (!has(memory, 1)) FAIL("the first page is wrong");
    dprintf(1, "%lu KiB of memory at the end, %lu blocks\n", resident(), blocks);
    return 0;
}
