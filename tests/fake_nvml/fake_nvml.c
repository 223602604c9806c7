/* A libnvidia-ml.so.1 without a GPU. What it answers stands in the file that $FAKE_NVML names, read at every call.
 *
 * Each line is a row: CALL DEVICE ANSWER.
 *   CALL    the function without "nvml", with ":ARGUMENT" where it has one that chooses: DeviceGetClockInfo:1
 *   DEVICE  0 for a GPU, 0.3 for the MIG device in its slot 3, - where a function has none
 *   ANSWER  what the function hands over, in the order of its arguments or fields, or
 *           error CODE    NVML's number; 13 is what a function answers that the driver does not have
 *           delay MS      first, then the answer of the rows before
 *           hang          until the row is gone
 *           crash
 *           session N ANSWER    the same in the Nth session of a process only, of those that nvmlInit begins
 * CALL and DEVICE may be patterns (fnmatch); the last row that fits counts, none is NOT_SUPPORTED. Numbers may end in
 * MiB. A process is PID:BYTES, -1 where its memory is not told. Profiles of machines: profiles/. */
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define OK 0
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define TIMEOUT 10
#define VERSION_MISMATCH 25
#define MOST_ROWS 2048
#define GPUS 16
#define SLOTS 8

typedef struct { int gpu, slot; } device; /* slot < 0: the whole GPU */
typedef struct { char call[64], on[16], answer[1024]; } row;

static row rows[MOST_ROWS];
static int count, session;
static device gpus[GPUS], slots[GPUS][SLOTS];

/* Read the rows anew if the file has others than before. */
static void load(void) {
    static char now[1 << 17], before[1 << 17];
    FILE *file = getenv("FAKE_NVML") ? fopen(getenv("FAKE_NVML"), "r") : NULL;
    size_t size = file ? fread(now, 1, sizeof now - 1, file) : 0;
    char *line, *rest = before;
    if (file) fclose(file);
    now[size] = 0;
    if (strcmp(now, before) == 0) return;
    strcpy(before, now);
    rest = now;
    for (count = 0; count < MOST_ROWS && (line = strsep(&rest, "\n"));)
        if (*line != '#' && sscanf(line, "%63s %15s %1023[^\n]", rows[count].call, rows[count].on, rows[count].answer) == 3)
            ++count;
}

static int fits(const char *pattern, const char *name) {
    return strcmp(pattern, name) == 0 || (strpbrk(pattern, "*?[") && fnmatch(pattern, name, 0) == 0);
}

/* The answer to a call; `missing` is the code where no row has one. */
static int find(const char *call, const device *d, int missing, const char **answer) {
    char on[16] = "-";
    int i, hangs, code, used;
    if (d) snprintf(on, sizeof on, d->slot < 0 ? "%d" : "%d.%d", d->gpu, d->slot);
    do {
        load();
        hangs = 0;
        for (i = count - 1; i >= 0 && !hangs; --i) {
            if (!fits(rows[i].call, call) || !fits(rows[i].on, on)) continue;
            *answer = rows[i].answer;
            if (sscanf(*answer, "session %d %n", &code, &used) == 1) {
                if (code != session) continue;
                *answer += used;
            }
            if (sscanf(*answer, "error %d", &code) == 1) return code;
            if (strcmp(*answer, "crash") == 0) abort();
            if (sscanf(*answer, "delay %d", &code) == 1) usleep(code * 1000);
            else if (strcmp(*answer, "hang") == 0) hangs = 1;
            else return OK;
        }
        if (hangs) usleep(5000);
    } while (hangs);
    *answer = "";
    return missing;
}

/* The next number of an answer. */
static unsigned long long next(const char **answer) {
    char *end;
    unsigned long long value = strtoull(*answer, &end, 10);
    if (strncmp(end, "MiB", 3) == 0) value <<= 20, end += 3;
    *answer = end;
    return value;
}

/* The same in the 32 bits that a function has for it: the most of them where it is more. */
static unsigned next32(const char **answer) {
    unsigned long long value = next(answer);
    return value > ~0U ? ~0U : value;
}

/* Functions with one number, with one that an argument chooses, and with a text. */
#define NUMBER(name, type) \
    int nvml##name(device *d, type *value) { \
        const char *answer; \
        int code = find(#name, d, NOT_SUPPORTED, &answer); \
        if (code == OK) *value = sizeof *value == 4 ? next32(&answer) : next(&answer); \
        return code; \
    }
#define NUMBER_OF(name, type) \
    int nvml##name(device *d, int which, type *value) { \
        const char *answer; \
        char call[64]; \
        int code; \
        snprintf(call, sizeof call, #name ":%d", which); \
        code = find(call, d, NOT_SUPPORTED, &answer); \
        if (code == OK) *value = sizeof *value == 4 ? next32(&answer) : next(&answer); \
        return code; \
    }
#define TEXT(name) \
    int nvml##name(device *d, char *text, unsigned size) { \
        const char *answer; \
        int code = find(#name, d, NOT_SUPPORTED, &answer); \
        if (code == OK) snprintf(text, size, "%s", answer); \
        return code; \
    }

/* --- the driver as a whole --- */

int nvmlInitWithFlags(unsigned flags) {
    const char *answer;
    (void)flags;
    puts("a driver that prints");
    fflush(stdout);
    ++session;
    return find("InitWithFlags", NULL, OK, &answer);
}

int nvmlShutdown(void) { return OK; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    const char *answer;
    int code = find("SystemGetDriverVersion", NULL, NOT_SUPPORTED, &answer);
    if (code == OK) snprintf(text, size, "%s", answer);
    return code;
}

int nvmlDeviceGetCount_v2(unsigned *found) {
    const char *answer;
    int code = find("DeviceGetCount_v2", NULL, OK, &answer);
    *found = next32(&answer);
    return code;
}

/* --- one GPU, one MIG device --- */

int nvmlDeviceGetHandleByIndex_v2(unsigned index, device **found) {
    const char *answer;
    if (index >= GPUS) return INVALID_ARGUMENT;
    gpus[index] = (device){index, -1};
    *found = &gpus[index];
    return find("DeviceGetHandleByIndex_v2", *found, OK, &answer);
}

TEXT(DeviceGetUUID)
TEXT(DeviceGetName)
NUMBER(DeviceGetComputeMode, int)
NUMBER(DeviceGetPersistenceMode, int)
NUMBER(DeviceGetMaxMigDeviceCount, unsigned)
NUMBER(DeviceGetGpuInstanceId, unsigned)

int nvmlDeviceGetMigMode(device *d, unsigned *current, unsigned *pending) {
    const char *answer;
    int code = find("DeviceGetMigMode", d, NOT_SUPPORTED, &answer);
    if (code == OK) *current = next32(&answer), *pending = next32(&answer);
    return code;
}

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} pci;

/* A row has DOMAIN:BUS:DEVICE.0 in hex. */
static void to_pci(const char *answer, pci *found) {
    memset(found, 0, sizeof *found);
    snprintf(found->id, sizeof found->id, "%.31s", answer);
    snprintf(found->legacy, sizeof found->legacy, "%.15s", strlen(answer) > 4 ? answer + 4 : answer);
    sscanf(answer, "%x:%x:%x", &found->domain, &found->bus, &found->device);
}

int nvmlDeviceGetPciInfo_v3(device *d, pci *found) {
    const char *answer;
    int code = find("DeviceGetPciInfo_v3", d, NOT_SUPPORTED, &answer);
    if (code == OK) to_pci(answer, found);
    return code;
}

/* A slot that no row mentions is empty. */
int nvmlDeviceGetMigDeviceHandleByIndex(device *d, unsigned index, device **found) {
    const char *answer;
    if (index >= SLOTS) return INVALID_ARGUMENT;
    slots[d->gpu][index] = (device){d->gpu, index};
    *found = &slots[d->gpu][index];
    return find("DeviceGetMigDeviceHandleByIndex", *found, NOT_FOUND, &answer);
}

/* --- its memory and who holds it --- */

typedef struct { unsigned long long total, free, used; } memory_v1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory_v2;
typedef struct { unsigned pid; unsigned long long memory; } process_v1;
typedef struct { unsigned pid; unsigned long long memory; unsigned gpu_instance, compute_instance; } process;

int nvmlDeviceGetMemoryInfo(device *d, memory_v1 *m) {
    const char *answer;
    int code = find("DeviceGetMemoryInfo", d, NOT_SUPPORTED, &answer);
    if (code == OK) m->total = next(&answer), m->free = next(&answer), m->used = next(&answer);
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(device *d, memory_v2 *m) {
    const char *answer;
    int code = find("DeviceGetMemoryInfo_v2", d, NOT_SUPPORTED, &answer);
    if (m->version != 0x2000028) return VERSION_MISMATCH;
    if (code == OK)
        m->total = next(&answer), m->reserved = next(&answer), m->free = next(&answer), m->used = next(&answer);
    return code;
}

/* All versions of the list; the first one has smaller entries. As the driver: without room only how many there are. */
static int processes(const char *call, device *d, unsigned *room, void *list, int version) {
    const char *answer, *at;
    unsigned found = 0, pid;
    long long bytes;
    int used, code = find(call, d, OK, &answer);
    if (code != OK) return *room = 0, code;
    for (at = answer; sscanf(at, " %u:%lld%n", &pid, &bytes, &used) == 2; at += used, ++found)
        if (list && found < *room) {
            if (version == 1) ((process_v1 *)list)[found] = (process_v1){pid, bytes};
            else ((process *)list)[found] = (process){pid, bytes, -1, -1};
        }
    code = found && (!list || *room < found) ? INSUFFICIENT_SIZE : OK;
    return *room = found, code;
}
#define PROCESSES(name, version) \
    int nvml##name(device *d, unsigned *room, void *list) { return processes(#name, d, room, list, version); }

PROCESSES(DeviceGetComputeRunningProcesses, 1)
PROCESSES(DeviceGetComputeRunningProcesses_v2, 2)
PROCESSES(DeviceGetComputeRunningProcesses_v3, 3)
PROCESSES(DeviceGetGraphicsRunningProcesses, 1)
PROCESSES(DeviceGetGraphicsRunningProcesses_v2, 2)
PROCESSES(DeviceGetGraphicsRunningProcesses_v3, 3)

/* --- how it is --- */

typedef struct { unsigned gpu, memory; } utilisation;

int nvmlDeviceGetUtilizationRates(device *d, utilisation *u) {
    const char *answer;
    int code = find("DeviceGetUtilizationRates", d, NOT_SUPPORTED, &answer);
    if (code == OK) u->gpu = next32(&answer), u->memory = next32(&answer);
    return code;
}

NUMBER_OF(DeviceGetTemperature, unsigned)
NUMBER_OF(DeviceGetClockInfo, unsigned)
NUMBER(DeviceGetFanSpeed, unsigned)
NUMBER_OF(DeviceGetMaxClockInfo, unsigned)
NUMBER(DeviceGetPowerUsage, unsigned)
NUMBER(DeviceGetTotalEnergyConsumption, unsigned long long)
NUMBER(DeviceGetCurrentClocksEventReasons, unsigned long long)
NUMBER(DeviceGetCurrentClocksThrottleReasons, unsigned long long)

typedef struct { unsigned long long reference_us, violation_ns; } violation;

int nvmlDeviceGetViolationStatus(device *d, int policy, violation *v) {
    const char *answer;
    char call[64];
    int code;
    snprintf(call, sizeof call, "DeviceGetViolationStatus:%d", policy);
    code = find(call, d, NOT_SUPPORTED, &answer);
    if (code == OK) v->reference_us = next(&answer), v->violation_ns = next(&answer);
    return code;
}

int nvmlDeviceGetTotalEccErrors(device *d, int kind, int since, unsigned long long *errors) {
    const char *answer;
    char call[64];
    int code;
    snprintf(call, sizeof call, "DeviceGetTotalEccErrors:%d:%d", kind, since);
    code = find(call, d, NOT_SUPPORTED, &answer);
    if (code == OK) *errors = next(&answer);
    return code;
}

NUMBER(DeviceGetPcieReplayCounter, unsigned)
NUMBER(DeviceGetRetiredPagesPendingStatus, int)

/* A row has how many there are. */
int nvmlDeviceGetRetiredPages(device *d, int cause, unsigned *room, unsigned long long *addresses) {
    const char *answer;
    char call[64];
    unsigned found, i;
    int code;
    snprintf(call, sizeof call, "DeviceGetRetiredPages:%d", cause);
    code = find(call, d, NOT_SUPPORTED, &answer);
    if (code != OK) return code;
    found = next32(&answer);
    for (i = 0; addresses && i < found && i < *room; ++i) addresses[i] = i;
    code = found > *room ? INSUFFICIENT_SIZE : OK;
    return *room = found, code;
}

int nvmlDeviceGetRemappedRows(device *d, unsigned *correctable, unsigned *uncorrectable, unsigned *pending,
                              unsigned *failure) {
    const char *answer;
    int code = find("DeviceGetRemappedRows", d, NOT_SUPPORTED, &answer);
    if (code == OK)
        *correctable = next32(&answer), *uncorrectable = next32(&answer), *pending = next32(&answer),
        *failure = next32(&answer);
    return code;
}

/* --- who computes --- */

typedef struct { unsigned pid; unsigned long long at_us; unsigned sm, memory, encoder, decoder; } sample;

/* A row has PID:PERCENT:AGE_MS of each process's newest sample. As the driver: without room it says that 100 are needed,
 * however many there are, and with nothing newer that nothing was found. */
int nvmlDeviceGetProcessUtilization(device *d, sample *list, unsigned *room, unsigned long long since_us) {
    const char *answer;
    unsigned found = 0, pid, percent;
    int used, age_ms, code = find("DeviceGetProcessUtilization", d, NOT_SUPPORTED, &answer);
    struct timespec now;
    unsigned long long at_us;
    if (code != OK) return code;
    if (!list) return *room = 100, INSUFFICIENT_SIZE;
    clock_gettime(CLOCK_REALTIME, &now);
    for (; sscanf(answer, " %u:%u:%d%n", &pid, &percent, &age_ms, &used) == 3 && found < *room; answer += used) {
        at_us = now.tv_sec * 1000000ULL + now.tv_nsec / 1000 - age_ms * 1000LL;
        if (at_us > since_us) list[found++] = (sample){pid, at_us, percent, 0, 0, 0};
    }
    return *room = found, found ? OK : NOT_FOUND;
}

/* --- what a part of a GPU does --- */

typedef struct { device *d; unsigned instance; } gpm_sample;
typedef struct { unsigned id; int code; double value; const char *info[3]; } gpm_metric;
typedef struct { unsigned version, count; gpm_sample *before, *now; gpm_metric metrics[477]; } gpm_metrics;
typedef struct { unsigned version, supported; } gpm_support;

int nvmlGpmQueryDeviceSupport(device *d, gpm_support *s) {
    const char *answer;
    int code = find("GpmQueryDeviceSupport", d, NOT_SUPPORTED, &answer);
    if (s->version != 1) return VERSION_MISMATCH;
    if (code == OK) s->supported = next32(&answer);
    return code;
}

int nvmlGpmSampleAlloc(gpm_sample **made) {
    *made = calloc(1, sizeof **made);
    return OK;
}

int nvmlGpmSampleFree(gpm_sample *sample) {
    free(sample);
    return OK;
}

int nvmlGpmMigSampleGet(device *d, unsigned instance, gpm_sample *sample) {
    const char *answer;
    char call[64];
    *sample = (gpm_sample){d, instance};
    snprintf(call, sizeof call, "GpmMigSampleGet:%u", instance);
    return find(call, d, OK, &answer);
}

/* A row of the GPU has, by metric and instance, the value between any two samples: GpmMetricsGet:1:5 0 37.5 */
int nvmlGpmMetricsGet(gpm_metrics *asked) {
    const char *answer;
    char call[64];
    unsigned i;
    if (asked->version != 1) return VERSION_MISMATCH;
    for (i = 0; i < asked->count; ++i) {
        snprintf(call, sizeof call, "GpmMetricsGet:%u:%u", asked->metrics[i].id, asked->now->instance);
        asked->metrics[i].code = find(call, asked->now->d, NOT_SUPPORTED, &answer);
        asked->metrics[i].value = strtod(answer, NULL);
    }
    return OK;
}

/* --- what happens to it --- */

typedef struct { device *d; unsigned told; } event_set;
typedef struct { device *d; unsigned long long kind, data; unsigned gpu_instance, compute_instance; } event;

/* The event of that number in a row's list of XID:GPU_INSTANCE, -1 for the whole GPU; 0 where the list ends before. */
static int event_at(const char *answer, unsigned number, unsigned *xid, int *instance) {
    int used;
    for (; sscanf(answer, " %u:%d%n", xid, instance, &used) == 2; answer += used)
        if (number-- == 0) return 1;
    return 0;
}

NUMBER(DeviceGetSupportedEventTypes, unsigned long long)

int nvmlEventSetCreate(event_set **made) {
    *made = calloc(1, sizeof **made);
    return OK;
}

int nvmlEventSetFree(event_set *set) {
    free(set);
    return OK;
}

/* What was in the list before has happened before. */
int nvmlDeviceRegisterEvents(device *d, unsigned long long kinds, event_set *set) {
    const char *answer;
    unsigned xid;
    int instance, code = find("DeviceRegisterEvents", d, OK, &answer);
    (void)kinds;
    if (code != OK) return code;
    set->d = d;
    find("EventSetWait_v2", d, OK, &answer);
    while (event_at(answer, set->told, &xid, &instance)) ++set->told;
    return OK;
}

int nvmlEventSetWait_v2(event_set *set, event *found, unsigned timeout_ms) {
    const char *answer;
    unsigned xid;
    int instance, code = find("EventSetWait_v2", set->d, OK, &answer);
    (void)timeout_ms;
    if (code != OK) return code;
    if (!event_at(answer, set->told, &xid, &instance)) return TIMEOUT;
    ++set->told;
    *found = (event){set->d, 8, xid, instance, instance};
    return OK;
}

/* --- what it is linked to --- */

int nvmlDeviceGetTopologyCommonAncestor(device *d, device *other, int *level) {
    const char *answer;
    char call[64];
    int code;
    snprintf(call, sizeof call, "DeviceGetTopologyCommonAncestor:%d", other->gpu);
    code = find(call, d, NOT_SUPPORTED, &answer);
    if (code == OK) *level = next32(&answer);
    return code;
}

NUMBER_OF(DeviceGetNvLinkState, unsigned)
NUMBER_OF(DeviceGetNvLinkRemoteDeviceType, unsigned)

int nvmlDeviceGetNvLinkRemotePciInfo_v2(device *d, unsigned link, pci *found) {
    const char *answer;
    char call[64];
    int code;
    snprintf(call, sizeof call, "DeviceGetNvLinkRemotePciInfo_v2:%u", link);
    code = find(call, d, NOT_SUPPORTED, &answer);
    if (code == OK) to_pci(answer, found);
    return code;
}
