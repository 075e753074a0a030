// A libnvidia-ml.so.1 without a GPU. What it answers stands in the file that FAKE_NVML names (or that
// fake_nvml_file() was told), one line: free bytes, total bytes, whether a display is attached, other processes. It is read
// afresh at every call, so that a test changes the card by writing a file.

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int result;

enum { UNKNOWN = 999 };

struct card {
    unsigned long long free, total;
    int display;
    unsigned others;
};

static char path[512];

void fake_nvml_file(const char *name) { strncpy(path, name, sizeof path - 1); }

static result look(struct card *card) {
    const char *name = path[0] ? path : getenv("FAKE_NVML");
    FILE *file = name ? fopen(name, "r") : NULL;
    if (!file) return UNKNOWN;
    int fields = fscanf(file, "%llu %llu %d %u", &card->free, &card->total, &card->display, &card->others);
    fclose(file);
    return fields == 4 ? 0 : UNKNOWN;
}

result nvmlInit_v2(void) { return 0; }
result nvmlShutdown(void) { return 0; }
result nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) { *handle = path; return 0; }
// Two cards, the second first by PCI address.
result nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
result nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = path + index; return 0; }

struct pci {
    char legacy[16];
    unsigned domain, bus, device, ids[2];
    char text[32];
};

result nvmlDeviceGetPciInfo_v3(void *handle, struct pci *pci) {
    unsigned index = (char *)handle - path;
    memset(pci, 0, sizeof *pci);
    pci->domain = index ? 0 : 0x10000;
    pci->bus = index ? 4 : 0xc1;
    return 0;
}

result nvmlSystemGetDriverVersion(char *text, unsigned length) { snprintf(text, length, "0.fake"); return 0; }

result nvmlDeviceGetMemoryInfo(void *handle, unsigned long long memory[3]) {
    struct card card;
    result code = look(&card);
    if (code) return code;
    memory[0] = card.total;
    memory[1] = card.free;
    memory[2] = card.total - card.free;
    return 0;
}

result nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { *milliwatts = 100000; return 0; }

result nvmlDeviceGetDisplayActive(void *handle, int *active) {
    struct card card;
    result code = look(&card);
    if (!code) *active = card.display;
    return code;
}

struct process {
    unsigned pid;
    unsigned long long used;
    unsigned instance, compute_instance;
};

result nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct process *list) {
    struct card card;
    result code = look(&card);
    if (code) return code;
    unsigned room = *count, listed = 0;
    list[listed++] = (struct process){ .pid = (unsigned)getpid() };
    for (unsigned i = 0; i < card.others && listed < room; i++) list[listed++] = (struct process){ .pid = 1 + i };
    *count = listed;
    return 0;
}

result nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, struct process *list) {
    *count = 0;
    return 0;
}
