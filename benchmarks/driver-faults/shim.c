// A libcuda.so.1 that passes everything on to the driver's own, and has that one fail when a file says so:
//
//     b   while the file is there each batch of copies names 2,048, its own ones again and again: some drivers' channel dies of that.
//         Copies to the card are in batches where the URL says engine_batch= alone.
//     k   once: a kernel writes where nothing is, and the context dies of it (Xid 31)
//
// FAULT names the file. The driver's library is linked as libcuda-real.so, by whoever builds this (benchmarks/driver-faults/run).

#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

typedef uint64_t address;
enum { COPIES = 2048 };

static const char *PTX = ".version 7.0\n.target sm_70\n.address_size 64\n"
                         ".visible .entry bad(.param .u64 p) { .reg .u64 %a; ld.param.u64 %a, [p]; st.global.u32 [%a], 1; ret; }\n";

static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

static char fault(void) {
    static const char *file;
    static int asked;
    if (!asked) file = getenv("FAULT"), asked = 1;
    char how = 0;
    int fd = file ? open(file, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0) return 0;
    if (read(fd, &how, 1) != 1) how = 0;
    close(fd);
    if (how == 'k' && unlink(file) != 0) return 0; // Another thread was first.
    return how;
}

static void kill_context(void *stream) {
    int (*load)(void **, const void *) = real("cuModuleLoadData");
    int (*get)(void **, void *, const char *) = real("cuModuleGetFunction");
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **) =
        real("cuLaunchKernel");
    void *module, *function;
    address nowhere = 16;
    void *arguments[] = {&nowhere};
    if (load(&module, PTX) == 0 && get(&function, module, "bad") == 0)
        launch(function, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0);
}

int cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    static int (*copy)(address, const void *, size_t, void *);
    if (!copy) copy = real("cuMemcpyHtoDAsync_v2");
    if (fault() == 'k') kill_context(stream);
    return copy(to, from, bytes, stream);
}

int cuMemcpyBatchAsync_v2(const address *to, const address *from, const size_t *sizes, size_t count, const void *attributes,
                          const size_t *indices, size_t attribute_count, void *stream) {
    static int (*copy)(const address *, const address *, const size_t *, size_t, const void *, const size_t *, size_t, void *);
    if (!copy) copy = real("cuMemcpyBatchAsync_v2");
    char how = fault();
    if (how == 'k') kill_context(stream);
    if (how == 'b') {
        address to_all[COPIES], from_all[COPIES];
        size_t size_all[COPIES];
        for (size_t i = 0; i < COPIES; i++) to_all[i] = to[i % count], from_all[i] = from[i % count], size_all[i] = sizes[i % count];
        return copy(to_all, from_all, size_all, COPIES, attributes, indices, attribute_count, stream);
    }
    return copy(to, from, sizes, count, attributes, indices, attribute_count, stream);
}
