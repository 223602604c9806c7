/* A libnvidia-ml.so.1 without a GPU: the functions that the monitor's probe calls, with the answers of known machines.
 *
 * $FAKE_NVML names a file, read at every call: its first word is the profile, after it lines "GPU PID MIB" for the
 * processes that hold memory, -1 where it is not told. Profiles: h100, h200-mig, geforce, gb10, gb10-zero, no-memory,
 * old, hidden, lost, gone, unreachable, no-permission, exclusive, prohibited, garbage, hung, slow, crash, mismatch,
 * notloaded, empty. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define OK 0
#define NOT_SUPPORTED 3
#define NO_PERMISSION 4
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define FUNCTION_NOT_FOUND 13
#define GPU_IS_LOST 15
#define MISMATCH 18
#define UNKNOWN 999
#define MIB (1ULL << 20)
#define SLOTS 7

typedef struct { int gpu, slot; } device; /* slot < 0: the whole GPU */
typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process;
typedef struct { unsigned gpu, memory; } utilisation;

static device gpus[2] = {{0, -1}, {1, -1}};
static device slots[2][SLOTS];

static void control(char *profile, process *held, int gpu, unsigned *count) {
    FILE *file = getenv("FAKE_NVML") ? fopen(getenv("FAKE_NVML"), "r") : NULL;
    int on, pid;
    long long mib;
    strcpy(profile, "h100");
    if (count) *count = 0;
    if (!file) return;
    if (fscanf(file, "%31s", profile) != 1) strcpy(profile, "h100");
    while (count && fscanf(file, "%d %d %lld", &on, &pid, &mib) == 3)
        if (on == gpu && *count < 16) {
            held[*count].pid = pid;
            held[*count].memory = mib < 0 ? ~0ULL : mib * MIB;
            held[*count].gpu_instance = held[*count].compute_instance = -1;
            ++*count;
        }
    fclose(file);
}

static int is(const char *wanted) {
    char profile[32];
    control(profile, NULL, 0, NULL);
    return strcmp(profile, wanted) == 0;
}

static int one(void) { return is("geforce") || is("gb10") || is("gb10-zero"); }
static int lost(device *d) { return is("lost") && d->gpu == 1; }

int nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    if (is("slow")) usleep(400000);
    puts("a driver that prints");
    fflush(stdout);
    return is("mismatch") ? MISMATCH : is("notloaded") ? DRIVER_NOT_LOADED : OK;
}

int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = is("empty") ? 0 : one() ? 1 : 2;
    return OK;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **found) {
    *found = &gpus[index];
    return is("gone") && index == 1 ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetUUID(device *d, char *uuid, unsigned size) {
    if (d->slot < 0) snprintf(uuid, size, "GPU-fake0000-0000-0000-0000-00000000000%d", d->gpu);
    else snprintf(uuid, size, "MIG-fake0000-0000-0000-000%d-00000000000%d", d->gpu, d->slot);
    return OK;
}

int nvmlDeviceGetName(device *d, char *name, unsigned size) {
    const char *model = is("geforce") ? "NVIDIA GeForce RTX 4080 SUPER" : one() ? "NVIDIA GB10"
                        : is("h200-mig") ? "NVIDIA H200" : "NVIDIA H100 80GB HBM3";
    snprintf(name, size, d->slot < 0 ? "%s" : "%s MIG 1g.18gb", model);
    return OK;
}

static int memory(device *d, memory_v2 *m) {
    unsigned long long total = d->slot >= 0 ? 16384 : is("h200-mig") ? 143771 : is("geforce") ? 16376 : 81559;
    unsigned long long reserved = d->slot >= 0 ? 0 : is("h200-mig") ? 614 : is("geforce") ? 300 : 551, used = 4;
    process held[16];
    char profile[32];
    unsigned count;
    while (is("hung")) usleep(5000);
    if (is("crash")) abort();
    if (lost(d)) return GPU_IS_LOST;
    if (is("unreachable") && d->gpu == 1) return UNKNOWN;
    if (is("gb10") || is("no-memory")) return NOT_SUPPORTED;
    control(profile, held, d->gpu, &count);
    while (count--) used += held[count].memory == ~0ULL ? 0 : held[count].memory / MIB;
    if (is("hidden")) used += 5000;
    if (is("gb10-zero")) total = reserved = used = 0;
    m->total = total * MIB, m->reserved = reserved * MIB, m->used = used * MIB;
    m->free = m->total - m->reserved - m->used;
    return OK;
}

int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *m) {
    if (m->version != 0x2000028) return 25;
    return is("old") ? FUNCTION_NOT_FOUND : memory(d, m);
}

int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *m) {
    memory_v2 told = {0};
    int code = memory(d, &told);
    m->total = told.total, m->free = told.free, m->used = told.used + told.reserved;
    return code;
}

int nvmlDeviceGetUtilizationRates(device *d, utilisation *u) {
    if (lost(d)) return GPU_IS_LOST;
    if (d->slot >= 0 || is("geforce") || is("h200-mig")) return NOT_SUPPORTED;
    u->gpu = is("garbage") && d->gpu == 1 ? 4294967295u : 25, u->memory = 10;
    return OK;
}

int nvmlDeviceGetTemperature(device *d, int sensor, unsigned *celsius) {
    (void)sensor;
    *celsius = 41;
    return lost(d) ? GPU_IS_LOST : d->slot >= 0 ? NOT_SUPPORTED : OK;
}

int nvmlDeviceGetPowerUsage(device *d, unsigned *mw) {
    *mw = is("garbage") && d->gpu == 1 ? 4294967295u : 118000;
    return lost(d) ? GPU_IS_LOST : d->slot >= 0 ? NOT_SUPPORTED : OK;
}

/* Only the older of the two names is there, and nothing else of a card's health. */
int nvmlDeviceGetCurrentClocksThrottleReasons(device *d, unsigned long long *reasons) {
    *reasons = 4;
    return lost(d) ? GPU_IS_LOST : OK;
}

int nvmlDeviceGetComputeMode(device *d, int *mode) {
    *mode = is("prohibited") && d->gpu == 1 ? 2 : is("exclusive") && d->gpu == 1 ? 3 : 0;
    return OK;
}

/* The second H200 is not split; of the first one two slots hold a device. */
int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    if (one()) return NOT_SUPPORTED;
    *current = *pending = (is("h200-mig") || is("no-permission")) && d->gpu == 0;
    return OK;
}

int nvmlDeviceGetMaxMigDeviceCount(device *d, unsigned *count) {
    (void)d;
    *count = SLOTS;
    return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **found) {
    if (is("no-permission")) return NO_PERMISSION;
    if (index != 0 && index != 3) return NOT_FOUND;
    slots[d->gpu][index].gpu = d->gpu, slots[d->gpu][index].slot = index;
    *found = &slots[d->gpu][index];
    return OK;
}

static int processes(device *d, unsigned *room, process *list) {
    process held[16];
    char profile[32];
    unsigned count;
    if (lost(d)) return GPU_IS_LOST;
    control(profile, held, d->gpu, &count);
    if (count == 0) return *room = 0, OK;
    if (list == NULL || *room < count) return *room = count, INSUFFICIENT_SIZE;
    memcpy(list, held, count * sizeof *held);
    return *room = count, OK;
}

int nvmlDeviceGetComputeRunningProcesses_v3(device *d, unsigned *room, process *list) {
    return is("old") ? FUNCTION_NOT_FOUND : processes(d, room, list);
}

int nvmlDeviceGetComputeRunningProcesses_v2(device *d, unsigned *room, process *list) {
    return processes(d, room, list);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(device *d, unsigned *room, process *list) {
    (void)list;
    *room = 0;
    return d->slot >= 0 ? NOT_SUPPORTED : OK;
}
