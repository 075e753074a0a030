// The resident kernel: pages between the card's memory and the host's, without a launch or a copy engine.
//
// Compiled to PTX by build-kernel.sh with plain clang, no CUDA toolkit; see there. The host's side of what is
// laid out here is protocol.rs, and a test holds the two against each other.
//
// Each block of 256 threads owns every `blocks`-th slot of one lane's ring and serves them in turn. Every warp
// polls for itself, so that no barrier stands between a descriptor's arrival and the first load. A descriptor
// repeats its sequence number in both of its 16-byte quarters: whatever order the bus delivers the quarters in,
// a descriptor is taken only whole.
//
// Loads are volatile: both sides are written by others (the processor through the window, copy engines, other
// blocks), and an SM's L1 would go on showing what it has. Volatile loads are served by L2, where all meet.

#define __global__ __attribute__((global))
#define __device__ __attribute__((device))

typedef unsigned int u32;
typedef unsigned long long u64;

struct lane {
    u64 ring;  // descriptors: `depth` of 64 bytes, in the card's memory
    u64 done;  // sequence numbers served: `depth` u32, in the host's memory
    u32 head;  // the first sequence number to serve
    u32 depth; // a power of two, and a multiple of `blocks`
    u32 unused[2];
};

struct control {
    u32 stop;   // anything but 0: leave
    u32 blocks; // a lane's, a power of two
    u32 unused[14];
    struct lane lanes[32];
};

struct words {
    u32 x, y, z, w;
};

static __device__ inline struct words load(u64 address) {
    struct words v;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

static __device__ inline void store(u64 address, struct words v) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

static __device__ inline u32 load_word(const u32 *address) {
    u32 v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}

// The value that thread `from` of the warp has.
static __device__ inline u32 shuffle(u32 value, u32 from) {
    u32 v;
    asm volatile("shfl.sync.idx.b32 %0, %1, %2, 31, 0xffffffff;" : "=r"(v) : "r"(value), "r"(from));
    return v;
}

static __device__ inline u32 all(u32 condition) {
    u32 v;
    asm volatile("{ .reg .pred p, q; setp.ne.u32 p, %1, 0; vote.sync.all.pred q, p, 0xffffffff;"
                 " selp.u32 %0, 1, 0, q; }"
                 : "=r"(v)
                 : "r"(condition));
    return v;
}

static __device__ inline void barrier(void) {
    asm volatile("bar.sync 0;" ::: "memory");
}

extern "C" __global__ void weir_ring(struct control *control) {
    const u32 thread = __nvvm_read_ptx_sreg_tid_x();
    const u32 blocks = control->blocks;
    const u32 index = __nvvm_read_ptx_sreg_ctaid_x();
    const u32 block = index & (blocks - 1);
    const struct lane lane = control->lanes[index / blocks];
    // The first number from the head on that is this block's.
    u32 seq = lane.head + ((block - lane.head) & (blocks - 1));
    for (;;) {
        const u32 slot = seq & (lane.depth - 1);
        const u64 descriptor = lane.ring + 64ull * slot;
        struct words half;
        for (u32 polls = 1;; polls++) {
            // Even threads read the first quarter, odd ones the second: one 32-byte sector a warp.
            half = load(descriptor + 16 * (thread & 1));
            if (all(half.x == seq)) break;
            if ((polls & 15) == 0) {
                if (all(load_word(&control->stop) != 0)) return;
                // A lane that has been quiet for some 100 us is polled less often, which saves power.
                if (polls >= 256) asm volatile("nanosleep.u32 400;");
            }
        }
        const u64 from = (u64)shuffle(half.w, 0) << 32 | shuffle(half.z, 0);
        const u64 to = (u64)shuffle(half.w, 1) << 32 | shuffle(half.z, 1);
        store(to + 16 * thread, load(from + 16 * thread));
        // The barrier orders every thread's store before the first thread's release, and the release orders them
        // all before the number for whoever sees it (PTX memory model: causality is transitive).
        barrier();
        if (thread == 0) {
            asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(lane.done + 4ull * slot), "r"(seq) : "memory");
        }
        seq += blocks;
    }
}
