// The first and only process of a guest. It keeps a number in each page of a large area, from which
// every word of that page follows, and does what the lines of its serial port say:
//
//   have MIB     makes the area, and writes all of it
//   check        verifies all of it
//   churn N      N times: a page at random is verified, or written anew
//   kernel       a hash of the kernel's own list of its symbols, from the kernel's own pages
//
// After each line it prints "done", the command, and the number of wrong words, or the hash.

#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { WORDS = 512 };
static uint64_t (*area)[WORDS];
static uint32_t *numbers;
static size_t pages;

static uint64_t mix(uint64_t value) {
    value = (value ^ value >> 31) * 0x9e3779b97f4a7c15;
    return value ^ value >> 29;
}

static uint64_t word(size_t page, size_t at) {
    return mix(((uint64_t)page << 32 | numbers[page]) * WORDS + at);
}

static void put(size_t page, uint32_t number) {
    numbers[page] = number;
    for (size_t at = 0; at < WORDS; at++) area[page][at] = word(page, at);
}

static uint64_t wrong(size_t page) {
    uint64_t count = 0;
    for (size_t at = 0; at < WORDS; at++) count += area[page][at] != word(page, at);
    if (count) printf("page %zu has %lu wrong words\n", page, count);
    return count;
}

static void have(size_t mib) {
    pages = mib << 8;
    area = mmap(0, mib << 20, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    numbers = calloc(pages, sizeof *numbers);
    if (area == MAP_FAILED || !numbers) {
        printf("no memory\n");
        return;
    }
    for (size_t page = 0; page < pages; page++) put(page, 1);
}

static uint64_t churn(uint64_t count) {
    static uint64_t seed;
    uint64_t bad = 0;
    while (count--) {
        seed = mix(seed + count + 1);
        size_t page = seed % pages;
        if (seed >> 60 & 1)
            put(page, numbers[page] + 1);
        else
            bad += wrong(page);
    }
    return bad;
}

static uint64_t kernel(void) {
    static unsigned char text[1 << 16];
    uint64_t hash = 0;
    int file = open("/proc/kallsyms", O_RDONLY);
    for (ssize_t bytes; (bytes = read(file, text, sizeof text)) > 0;)
        for (ssize_t at = 0; at < bytes; at++) hash = (hash ^ text[at]) * 1099511628211;
    close(file);
    return hash;
}

int main(void) {
    char name[256], path[300], line[256];
    mkdir("/proc", 0755);
    mount("proc", "/proc", "proc", 0, 0);
    FILE *order = fopen("/modules/order", "r");
    while (order && fscanf(order, "%255s", name) == 1) {
        snprintf(path, sizeof path, "/modules/%s", name);
        int file = open(path, O_RDONLY);
        if (syscall(SYS_finit_module, file, "", 0)) perror(path);
        close(file);
    }
    setvbuf(stdout, 0, _IOLBF, 0);
    printf("done up 0\n");
    while (fgets(line, sizeof line, stdin)) {
        unsigned long number = 0;
        uint64_t said = 0;
        if (sscanf(line, "%255s %lu", name, &number) < 1) continue;
        if (!strcmp(name, "have")) have(number);
        else if (!strcmp(name, "check")) for (size_t page = 0; page < pages; page++) said += wrong(page);
        else if (!strcmp(name, "churn")) said = churn(number);
        else if (!strcmp(name, "kernel")) said = kernel();
        printf("done %s %lu\n", name, said);
    }
    for (;;) pause();
}
