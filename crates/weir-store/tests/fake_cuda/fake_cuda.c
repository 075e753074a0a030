// A libcuda.so.1 without a GPU: device memory is host memory, copies happen at once, the resident kernel is a
// thread that does what kernel.cu does. Any call can be made to fail, or to fail from some call on, by
// fake_cuda_fail(); that is what it is for.
//
// Memory exported by Mesa's lavapipe is a memfd whose first page says, in its second word, where the data begins.

#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int result;
typedef uint64_t address;

enum { NOT_READY = 600, INVALID = 1, OUT_OF_MEMORY = 2 };

// --- injected failures ---

static pthread_mutex_t failures_lock = PTHREAD_MUTEX_INITIALIZER;
static struct failure {
    char call[48];
    int skip, times, code;
} failures[16];

// From its `skip`-th call on, `call` answers `code` for `times` calls (or for good, if negative).
void fake_cuda_fail(const char *call, int skip, int times, int code) {
    pthread_mutex_lock(&failures_lock);
    for (int i = 0; i < 16; i++) {
        if (failures[i].times == 0) {
            strncpy(failures[i].call, call, sizeof failures[i].call - 1);
            failures[i].skip = skip;
            failures[i].times = times;
            failures[i].code = code;
            break;
        }
    }
    pthread_mutex_unlock(&failures_lock);
}

// --- calls that take long ---

static char held[48];

// From now on `call` does not return; until it is called with "".
void fake_cuda_hold(const char *call) {
    pthread_mutex_lock(&failures_lock);
    strncpy(held, call, sizeof held - 1);
    pthread_mutex_unlock(&failures_lock);
}

// For other processes: the call that FAKE_CUDA_HOLDS names does not return while the file FAKE_CUDA_HELD is there.
static int is_held(const char *call) {
    const char *name = getenv("FAKE_CUDA_HOLDS"), *file = getenv("FAKE_CUDA_HELD");
    pthread_mutex_lock(&failures_lock);
    int is = strcmp(held, call) == 0;
    pthread_mutex_unlock(&failures_lock);
    return is || (name && file && strcmp(name, call) == 0 && access(file, F_OK) == 0);
}

// --- a context that dies ---

// The answer of every call once the context is dead; 0 while it lives.
static result dead_code;
// Whether releasing the context makes room for one that lives.
static int is_final;
static result dead(void) {
    return __atomic_load_n(&dead_code, __ATOMIC_ACQUIRE);
}
static void die(result code) {
    __atomic_store_n(&dead_code, code, __ATOMIC_RELEASE);
}
// Kernels that run, and how often a context was released: a kernel does not outlive its own.
static int kernels, releases;
static result release(void) {
    __atomic_fetch_add(&releases, 1, __ATOMIC_ACQ_REL);
    while (__atomic_load_n(&kernels, __ATOMIC_ACQUIRE)) usleep(100);
    die(0);
    return 0;
}
// From now on every call answers `code`; with `final`, also those of the next context.
void fake_cuda_die(result code, int final) {
    is_final = final;
    die(code);
}

// For other processes: once the file that FAKE_CUDA_DIES names is there it is removed, and the context dies as its first letter says: of a
// launch failure (l), of one that no new context survives (f), by a fault in the driver's code (s).
static void die_if_told(void) {
    static const char *file;
    static int asked;
    if (!asked) file = getenv("FAKE_CUDA_DIES"), asked = 1;
    if (!file || access(file, F_OK) != 0) return;
    char how = 0;
    int fd = open(file, O_RDONLY);
    if (fd < 0) return;
    ssize_t got = read(fd, &how, 1);
    close(fd);
    if (got != 1 || unlink(file) != 0) return;
    if (how == 's') *(volatile int *)8 = 1;
    fake_cuda_die(719, how == 'f');
}

static result injected(const char *call) {
    result code = 0;
    die_if_told();
    int is_release = strncmp(call, "cuDevicePrimaryCtxRe", 20) == 0;
    if (dead() && strcmp(call, "serve") != 0 && (is_final || !is_release)) return dead();
    while (is_held(call)) usleep(1000);
    pthread_mutex_lock(&failures_lock);
    for (int i = 0; i < 16; i++) {
        struct failure *f = &failures[i];
        if (f->times == 0 || strcmp(f->call, call) != 0) continue;
        if (f->skip > 0) {
            f->skip--;
            continue;
        }
        if (f->times > 0) f->times--;
        code = f->code;
        break;
    }
    pthread_mutex_unlock(&failures_lock);
    return code;
}

#define CALL                              \
    do {                                  \
        result code = injected(__func__); \
        if (code) return code;            \
    } while (0)

// How many calls of each kind the copies took: 0 single copies, 1 batches, 2 copies inside batches.
static int copies[3];
int fake_cuda_copies(int which) {
    return __atomic_load_n(&copies[which], __ATOMIC_RELAXED);
}
static void count(int which, int by) {
    __atomic_fetch_add(&copies[which], by, __ATOMIC_RELAXED);
}

// --- device and context ---

result cuInit(unsigned flags) { CALL; return 0; }
// Two, for stores striped over several. As CUDA counts unless told otherwise: the fast one first, though its slot is the second.
result cuDeviceGetCount(int *count) { CALL; *count = 2; return 0; }
result cuDeviceGet(int *device, int index) { CALL; *device = index; return 0; }
// lavapipe's own: what Vulkan says, CUDA must say too.
result cuDeviceGetUuid(unsigned char *uuid, int device) {
    CALL;
    memcpy(uuid, "mesa22.3.6\0\0\0\0\0\0", 16);
    return 0;
}
result cuDeviceGetName(char *name, int length, int device) {
    CALL;
    strncpy(name, device == 0 ? "Fast Fake GPU" : "Slow Fake GPU", length);
    return 0;
}
result cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALL;
    int domain = 50, bus = 33, slot = 34, major = 75, minor = 76;
    if (attribute == bus) *value = 2 - device;
    else if (attribute == domain || attribute == slot || attribute == minor) *value = 0;
    else *value = attribute == major ? 9 : 4;
    return 0;
}
result cuDevicePrimaryCtxRetain(void **context, int device) { CALL; *context = &copies; return 0; }
result cuDevicePrimaryCtxRelease_v2(int device) { CALL; return release(); }
result cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) { CALL; return 0; }
result cuCtxSetCurrent(void *context) { CALL; return 0; }
result cuMemGetInfo_v2(size_t *free, size_t *total) { CALL; *free = 1ull << 31; *total = 1ull << 32; return 0; }

// --- memory ---

struct imported {
    void *base;
    size_t length, offset;
};

struct handle_desc {
    int kind;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
    } handle;
    unsigned long long size;
    unsigned flags, reserved[16];
};

result cuImportExternalMemory(void **out, const struct handle_desc *desc) {
    CALL;
    struct stat stat;
    size_t words[2];
    if (fstat(desc->handle.fd, &stat) != 0 || pread(desc->handle.fd, words, sizeof words, 0) != sizeof words) return INVALID;
    struct imported *it = malloc(sizeof *it);
    it->length = stat.st_size;
    it->offset = words[1];
    it->base = mmap(0, it->length, PROT_READ | PROT_WRITE, MAP_SHARED, desc->handle.fd, 0);
    close(desc->handle.fd); // A successful import owns the descriptor.
    if (it->base == MAP_FAILED || it->offset + desc->size > it->length) return INVALID;
    *out = it;
    return 0;
}
result cuExternalMemoryGetMappedBuffer(address *out, struct imported *it, const void *desc) {
    CALL;
    *out = (address)it->base + it->offset;
    return 0;
}
result cuMemFree_v2(address at) { CALL; return 0; } // The mapping goes with its external memory.
result cuDestroyExternalMemory(struct imported *it) {
    CALL;
    munmap(it->base, it->length);
    free(it);
    return 0;
}
result cuMemCreate(uint64_t *handle, size_t size, const void *prop, uint64_t flags) {
    CALL;
    int fd = memfd_create("fake-vram", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, size) != 0) return OUT_OF_MEMORY;
    *handle = fd;
    return 0;
}
result cuMemRelease(uint64_t handle) { CALL; close(handle); return 0; }
// One behind another, as the driver's are; never used twice.
result cuMemAddressReserve(address *out, size_t size, size_t alignment, address at, uint64_t flags) {
    CALL;
    static address next, end;
    static const size_t arena = 64ull << 30;
    pthread_mutex_lock(&failures_lock);
    if (!next) {
        void *p = mmap(0, arena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p != MAP_FAILED) next = (address)p, end = next + arena;
    }
    int fits = next && next + size <= end;
    if (fits) *out = next, next += size;
    pthread_mutex_unlock(&failures_lock);
    return fits ? 0 : OUT_OF_MEMORY;
}
result cuMemAddressFree(address at, size_t size) { CALL; return 0; }
result cuMemMap(address at, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
    CALL;
    void *p = mmap((void *)at, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, handle, 0);
    return p == MAP_FAILED ? INVALID : 0;
}
result cuMemUnmap(address at, size_t size) {
    CALL;
    mmap((void *)at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return 0;
}
result cuMemSetAccess(address at, size_t size, const void *desc, size_t count) { CALL; return 0; }
result cuMemExportToShareableHandle(int *fd, uint64_t handle, int kind, uint64_t flags) {
    CALL;
    *fd = dup(handle);
    return 0;
}
result cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int kind) {
    CALL;
    *handle = dup((int)(intptr_t)fd);
    return 0;
}
result cuMemHostAlloc(void **out, size_t size, unsigned flags) {
    CALL;
    *out = aligned_alloc(4096, (size + 4095) & ~4095ull);
    return *out ? 0 : OUT_OF_MEMORY;
}
result cuMemFreeHost(void *at) { CALL; free(at); return 0; }

// --- streams, copies, events ---

struct stream {
    pthread_t thread;
    int running; // a kernel: 1 while it runs, 2 once it has ended and was not joined
};

result cuStreamCreateWithPriority(struct stream **out, unsigned flags, int priority) {
    CALL;
    *out = calloc(1, sizeof **out);
    return 0;
}
static void join(struct stream *stream) {
    if (stream->running) pthread_join(stream->thread, 0);
    stream->running = 0;
}
result cuStreamDestroy_v2(struct stream *stream) { CALL; join(stream); free(stream); return 0; }
result cuStreamSynchronize(struct stream *stream) { CALL; join(stream); return 0; }
result cuStreamQuery(struct stream *stream) {
    CALL;
    if (__atomic_load_n(&stream->running, __ATOMIC_ACQUIRE) == 1) return NOT_READY;
    join(stream);
    return 0;
}
result cuMemcpyHtoDAsync_v2(address to, const void *from, size_t bytes, void *stream) {
    CALL;
    count(0, 1);
    memcpy((void *)to, from, bytes);
    return 0;
}
result cuMemcpyDtoHAsync_v2(void *to, address from, size_t bytes, void *stream) {
    CALL;
    count(0, 1);
    memcpy(to, (void *)from, bytes);
    return 0;
}
result cuMemsetD8Async(address at, unsigned char value, size_t bytes, void *stream) {
    CALL;
    memset((void *)at, value, bytes);
    return 0;
}
// The most copies that a call has named, and how many it may name: one more and the channel dies, as a driver's does.
static int batch_largest, batch_limit = 1024;
void fake_cuda_batch_limit(int limit) {
    __atomic_store_n(&batch_limit, limit, __ATOMIC_RELAXED);
}
int fake_cuda_batch_largest(void) {
    return __atomic_load_n(&batch_largest, __ATOMIC_RELAXED);
}
static result batch(const address *to, const address *from, const size_t *sizes, size_t n) {
    count(1, 1);
    count(2, n);
    if ((int)n > fake_cuda_batch_largest()) __atomic_store_n(&batch_largest, (int)n, __ATOMIC_RELAXED);
    if ((int)n > __atomic_load_n(&batch_limit, __ATOMIC_RELAXED)) die(719);
    if (dead()) return dead();
    for (size_t i = 0; i < n; i++) memcpy((void *)to[i], (void *)from[i], sizes[i]);
    return 0;
}
#ifdef BATCH_12
result cuMemcpyBatchAsync(const address *to, const address *from, const size_t *sizes, size_t n, const void *attributes,
                          const size_t *indices, size_t attribute_count, size_t *failed, void *stream) {
    CALL;
    return batch(to, from, sizes, n);
}
#endif
#ifdef BATCH_13
result cuMemcpyBatchAsync_v2(const address *to, const address *from, const size_t *sizes, size_t n,
                             const void *attributes, const size_t *indices, size_t attribute_count, void *stream) {
    CALL;
    return batch(to, from, sizes, n);
}
#endif

struct event {
    int queries; // how often it still says that it is not ready
};
result cuEventCreate(struct event **out, unsigned flags) { CALL; *out = calloc(1, sizeof **out); return 0; }
result cuEventRecord(struct event *event, void *stream) { CALL; event->queries = 3; return 0; }
result cuEventQuery(struct event *event) {
    CALL;
    return event->queries-- > 0 ? NOT_READY : 0;
}
result cuEventDestroy_v2(struct event *event) { CALL; free(event); return 0; }

// --- the kernel ---

struct lane {
    address ring, done;
    uint32_t head, depth, unused[2];
};
struct control {
    uint32_t stop, blocks, unused[14];
    struct lane lanes[32];
};
struct launch {
    struct control *control;
    unsigned grid;
    struct stream *stream;
    int release;
};

static void *resident(void *argument) {
    struct launch launch = *(struct launch *)argument;
    free(argument);
    struct control *control = launch.control;
    unsigned blocks = control->blocks;
    uint32_t *seq = calloc(launch.grid, sizeof *seq);
    for (unsigned index = 0; index < launch.grid; index++) {
        uint32_t head = control->lanes[index / blocks].head;
        seq[index] = head + ((index - head) & (blocks - 1));
    }
    while (!dead() && __atomic_load_n(&releases, __ATOMIC_ACQUIRE) == launch.release &&
           !__atomic_load_n(&control->stop, __ATOMIC_ACQUIRE)) {
        int idle = 1;
        for (unsigned index = 0; index < launch.grid; index++) {
            struct lane *lane = &control->lanes[index / blocks];
            uint32_t slot = seq[index] & (lane->depth - 1);
            uint32_t *line = (uint32_t *)(lane->ring + 64ull * slot);
            if (__atomic_load_n(&line[0], __ATOMIC_ACQUIRE) != seq[index] ||
                __atomic_load_n(&line[4], __ATOMIC_ACQUIRE) != seq[index] || injected("serve"))
                continue;
            memcpy((void *)*(uint64_t *)(line + 6), (void *)*(uint64_t *)(line + 2), 4096);
            __atomic_store_n((uint32_t *)(lane->done + 4ull * slot), seq[index], __ATOMIC_RELEASE);
            seq[index] += blocks;
            idle = 0;
        }
        if (idle) usleep(20);
    }
    free(seq);
    __atomic_store_n(&launch.stream->running, 2, __ATOMIC_RELEASE);
    __atomic_fetch_sub(&kernels, 1, __ATOMIC_ACQ_REL);
    return 0;
}

result cuModuleLoadData(void **module, const void *image) {
    CALL;
    *module = module;
    return strstr(image, ".entry weir_ring") ? 0 : 218;
}
result cuModuleUnload(void *module) { CALL; return 0; }
result cuModuleGetFunction(void **function, void *module, const char *name) { CALL; *function = module; return 0; }
result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, struct stream *stream, void **arguments, void **extra) {
    CALL;
    if (bx != 256) return INVALID;
    join(stream);
    struct launch *launch = malloc(sizeof *launch);
    launch->control = (struct control *)*(address *)arguments[0];
    launch->grid = gx;
    launch->stream = stream;
    launch->release = __atomic_load_n(&releases, __ATOMIC_ACQUIRE);
    stream->running = 1;
    __atomic_fetch_add(&kernels, 1, __ATOMIC_ACQ_REL);
    return pthread_create(&stream->thread, 0, resident, launch) ? OUT_OF_MEMORY : 0;
}
