/* laxity.h: marks the begin and end of each task of a container that has deadlines, from C99, C++11 and CUDA host code.
 *
 *     #define LAXITY_IMPLEMENTATION   // in exactly one source file, before anything else is included
 *     #include "laxity.h"
 *
 *     laxity_task task = laxity_begin("infer", 50000);   // deadline in microseconds; 0 takes LAXITY_DEADLINE_US
 *     ... launch, and wait until the result is there ...
 *     laxity_end(&task);                                  // or laxity_fail(&task): it gave no result
 *
 * Linux, little-endian, GCC or Clang; link with -pthread. Without LAXITY_RING_DIR in the environment all of it does
 * nothing. A task that cannot be recorded (a deadline outside 1 to 86400000000, an empty name) is said once on stderr
 * and has seq 0. Any thread may begin and end tasks, each task once; after a fork the child writes a ring of its own and
 * the tasks that it inherited are its parent's. Both calls take one lock that no reader takes and never wait for one.
 * The format is described byte by byte in docs/ring-format.md of the repository.
 */
#ifndef LAXITY_H
#define LAXITY_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define LAXITY_MAX_DEADLINE_US UINT64_C(86400000000)
#define LAXITY_NAME_SIZE 22

/* An open task. seq 0: it is not recorded, or has ended. */
typedef struct {
    uint64_t seq;
    uint64_t deadline_us;
    uint32_t ring; /* of which ring of this process and its parents: not one of before a fork */
    char name[LAXITY_NAME_SIZE];
} laxity_task;

/* Begins a task; it is stamped as late as possible. `name` is UTF-8, kept up to 22 bytes. */
laxity_task laxity_begin(const char *name, uint64_t deadline_us);
/* Ends it with a result; it is stamped at once. The second end of a task does nothing. */
void laxity_end(laxity_task *task);
/* Ends it without a result. */
void laxity_fail(laxity_task *task);
/* Whether tasks of this process are recorded. */
int laxity_enabled(void);

#ifdef __cplusplus
}
#endif

#endif /* LAXITY_H */

#if defined(LAXITY_IMPLEMENTATION) && !defined(LAXITY_IMPLEMENTED)
#define LAXITY_IMPLEMENTED

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "laxity.h: rings are little-endian"
#endif
#ifndef LAXITY_NOW_NS /* tests give a clock of their own */
#define LAXITY_NOW_NS() laxity_now_ns_()
#endif

enum { LAXITY_HEADER_ = 4096, LAXITY_RECORD_ = 64, LAXITY_HEAD_ = 128, LAXITY_BEGIN_ = 1, LAXITY_END_ = 2 };

typedef struct {
    uint64_t seq, stamp_ns, task, deadline_us;
    uint8_t kind, status;
    char name[LAXITY_NAME_SIZE];
    uint64_t again;
} laxity_record_;

typedef struct {
    char magic[8];
    uint32_t version, header, record, capacity;
    uint8_t ring_id[16], boot_id[16];
    uint32_t pid, zero;
    uint64_t started_ticks, created_ns;
} laxity_header_;

typedef char laxity_record_has_64_bytes_[sizeof(laxity_record_) == 64 ? 1 : -1];
typedef char laxity_header_has_80_bytes_[sizeof(laxity_header_) == 80 ? 1 : -1];

static struct {
    pthread_mutex_t lock; /* re-entrant: a signal handler may mark a task while its thread is marking one */
    int opened, descriptor;
    uint32_t ring;
    char *map;
    size_t size;
    uint64_t mask, sequence, default_deadline_us;
} laxity_;
static pthread_once_t laxity_once_ = PTHREAD_ONCE_INIT;

static uint64_t laxity_now_ns_(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

/* The number that a text is, 0 where it is none above 0. */
static uint64_t laxity_number_(const char *text) {
    uint64_t value = 0;
    if (!text || !*text || strlen(text) > 19)
        return 0;
    for (; *text; text++) {
        if (*text < '0' || *text > '9')
            return 0;
        value = value * 10 + (uint64_t)(*text - '0');
    }
    return value;
}

static void laxity_lock_init_(void) {
    pthread_mutexattr_t how;
    pthread_mutexattr_init(&how);
    pthread_mutexattr_settype(&how, PTHREAD_MUTEX_RECURSIVE);
    pthread_mutex_init(&laxity_.lock, &how);
    pthread_mutexattr_destroy(&how);
}

/* In a child: its ring and its lock are its own. What it inherited is let go of, not unlocked. */
static void laxity_forked_(void) {
    if (laxity_.map) {
        munmap(laxity_.map, laxity_.size);
        close(laxity_.descriptor);
    }
    laxity_.map = NULL;
    laxity_.opened = 0;
    laxity_.sequence = 0;
    laxity_lock_init_(); /* another thread of the parent may have held it at the fork */
}

static void laxity_first_(void) {
    laxity_lock_init_();
    pthread_atfork(NULL, NULL, laxity_forked_);
}

static int laxity_read_(const char *path, char *into, size_t size) {
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t got = descriptor < 0 ? -1 : read(descriptor, into, size - 1);
    if (descriptor >= 0)
        close(descriptor);
    into[got > 0 ? got : 0] = 0;
    return got > 0;
}

static int laxity_boot_id_(uint8_t *into) {
    char text[64];
    int digits = 0;
    const char *at;
    if (!laxity_read_("/proc/sys/kernel/random/boot_id", text, sizeof text))
        return 0;
    memset(into, 0, 16);
    for (at = text; *at && digits < 32; at++) {
        int digit = *at >= '0' && *at <= '9' ? *at - '0' : *at >= 'a' && *at <= 'f' ? *at - 'a' + 10 : -1;
        if (digit >= 0) {
            into[digits / 2] = (uint8_t)(into[digits / 2] << 4 | digit);
            digits++;
        }
    }
    return digits == 32;
}

/* When this process started, in clock ticks since boot: field 22 of its stat, counted behind the command's name. */
static uint64_t laxity_start_ticks_(void) {
    char text[1024], *at;
    int field;
    if (!laxity_read_("/proc/self/stat", text, sizeof text) || !(at = strrchr(text, ')')))
        return 0;
    for (field = 2; field < 22 && at; field++)
        at = strchr(at + 1, ' ');
    return at ? strtoull(at + 1, NULL, 10) : 0;
}

static uint64_t laxity_capacity_(void) {
    const char *text = getenv("LAXITY_RING_RECORDS");
    uint64_t records = laxity_number_(text);
    if (!text || !*text)
        return 4096;
    if (records >= 16 && records <= (1u << 20) && (records & (records - 1)) == 0)
        return records;
    fprintf(stderr, "laxity: LAXITY_RING_RECORDS: found '%s', allowed: a power of two from 16 to 1048576; 4096 is used\n",
            text);
    return 4096;
}

/* The file is complete before it has its name. errno where it cannot be made. */
static int laxity_make_(const char *directory) {
    laxity_header_ header;
    char name[40] = "", *path, *temporary;
    uint64_t capacity = laxity_capacity_();
    size_t room = strlen(directory) + 64;
    int source = open("/dev/urandom", O_RDONLY | O_CLOEXEC), index, failed;
    memset(&header, 0, sizeof header);
    failed = source < 0 || read(source, header.ring_id, 16) != 16 || !laxity_boot_id_(header.boot_id);
    if (source >= 0)
        close(source);
    path = (char *)malloc(2 * room);
    if (failed || !path) {
        free(path);
        return ENODATA;
    }
    temporary = path + room;
    for (index = 0; index < 16; index++)
        snprintf(name + 2 * index, 3, "%02x", header.ring_id[index]);
    snprintf(path, room, "%s/ring-%s.ring", directory, name);
    snprintf(temporary, room, "%s/.new-%s", directory, name);
    memcpy(header.magic, "LAXRING", 8);
    header.version = 1, header.header = LAXITY_HEADER_, header.record = LAXITY_RECORD_;
    header.capacity = (uint32_t)capacity, header.pid = (uint32_t)getpid();
    header.started_ticks = laxity_start_ticks_(), header.created_ns = LAXITY_NOW_NS();
    laxity_.size = LAXITY_HEADER_ + (size_t)capacity * LAXITY_RECORD_;
    laxity_.descriptor = open(temporary, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    failed = laxity_.descriptor < 0 ? errno : 0;
    if (!failed) {
        fchmod(laxity_.descriptor, 0644); /* the monitor may be another user, whatever our umask says */
        failed = flock(laxity_.descriptor, LOCK_EX | LOCK_NB) ? errno : 0;
        if (!failed) /* a full disk is an error here, not a SIGBUS at some later record */
            failed = posix_fallocate(laxity_.descriptor, 0, (off_t)laxity_.size);
        if (!failed) {
            void *map = mmap(NULL, laxity_.size, PROT_READ | PROT_WRITE, MAP_SHARED, laxity_.descriptor, 0);
            failed = map == MAP_FAILED ? errno : 0;
            laxity_.map = failed ? NULL : (char *)map;
        }
        if (!failed) {
            memcpy(laxity_.map, &header, sizeof header);
            failed = rename(temporary, path) ? errno : 0;
        }
        if (failed) {
            if (laxity_.map)
                munmap(laxity_.map, laxity_.size);
            laxity_.map = NULL;
            close(laxity_.descriptor);
            unlink(temporary);
        }
    }
    laxity_.mask = capacity - 1;
    free(path);
    return failed;
}

/* With the lock held: this process's ring, made at the first task. */
static int laxity_open_(void) {
    const char *directory = getenv("LAXITY_RING_DIR");
    int failed;
    if (laxity_.opened)
        return laxity_.map != NULL;
    laxity_.opened = 1;
    laxity_.ring++;
    laxity_.default_deadline_us = laxity_number_(getenv("LAXITY_DEADLINE_US"));
    if (!directory || !*directory)
        return 0;
    failed = laxity_make_(directory);
    if (failed)
        fprintf(stderr, "laxity: no ring in LAXITY_RING_DIR=%s: %s; tasks are not recorded\n", directory,
                strerror(failed));
    return !failed;
}

/* With the lock held. The head is stored last, with release order, and never goes back. */
static uint64_t laxity_write_(const laxity_task *task, uint64_t stamp_ns, int kind, int status) {
    uint64_t *head = (uint64_t *)(void *)(laxity_.map + LAXITY_HEAD_), seq = ++laxity_.sequence;
    laxity_record_ record;
    record.seq = record.again = seq;
    record.stamp_ns = stamp_ns ? stamp_ns : LAXITY_NOW_NS();
    record.task = kind == LAXITY_BEGIN_ ? seq : task->seq;
    record.deadline_us = task->deadline_us;
    record.kind = (uint8_t)kind, record.status = (uint8_t)status;
    memcpy(record.name, task->name, LAXITY_NAME_SIZE);
    memcpy(laxity_.map + LAXITY_HEADER_ + ((seq - 1) & laxity_.mask) * LAXITY_RECORD_, &record, sizeof record);
    if (seq > *head)
        __atomic_store_n(head, seq, __ATOMIC_RELEASE);
    return seq;
}

static void laxity_say_wrong_(const char *name, uint64_t deadline_us) {
    static int said;
    if (!__atomic_exchange_n(&said, 1, __ATOMIC_RELAXED))
        fprintf(stderr, "laxity: task '%s', deadline_us: found %llu, allowed: a name that is not empty, and 1 to %llu or "
                "LAXITY_DEADLINE_US; it is not recorded\n", name ? name : "", (unsigned long long)deadline_us,
                (unsigned long long)LAXITY_MAX_DEADLINE_US);
}

laxity_task laxity_begin(const char *name, uint64_t deadline_us) {
    laxity_task task;
    size_t size = name ? strlen(name) : 0;
    memset(&task, 0, sizeof task);
    if (size > LAXITY_NAME_SIZE) /* cut at a character */
        for (size = LAXITY_NAME_SIZE; size && ((unsigned char)name[size] & 0xC0) == 0x80; size--)
            ;
    if (size)
        memcpy(task.name, name, size);
    pthread_once(&laxity_once_, laxity_first_);
    pthread_mutex_lock(&laxity_.lock);
    if (laxity_open_()) {
        task.deadline_us = deadline_us ? deadline_us : laxity_.default_deadline_us;
        task.ring = laxity_.ring;
        if (size && task.deadline_us >= 1 && task.deadline_us <= LAXITY_MAX_DEADLINE_US)
            task.seq = laxity_write_(&task, 0, LAXITY_BEGIN_, 0);
        else
            laxity_say_wrong_(name, task.deadline_us);
    }
    pthread_mutex_unlock(&laxity_.lock);
    return task;
}

static void laxity_finish_(laxity_task *task, int status) {
    uint64_t stamp_ns = LAXITY_NOW_NS(); /* before anything is waited for */
    pthread_once(&laxity_once_, laxity_first_);
    pthread_mutex_lock(&laxity_.lock);
    if (laxity_.map && task->seq && task->ring == laxity_.ring)
        laxity_write_(task, stamp_ns, LAXITY_END_, status);
    task->seq = 0;
    pthread_mutex_unlock(&laxity_.lock);
}

void laxity_end(laxity_task *task) { laxity_finish_(task, 0); }

void laxity_fail(laxity_task *task) { laxity_finish_(task, 1); }

int laxity_enabled(void) {
    int yes;
    pthread_once(&laxity_once_, laxity_first_);
    pthread_mutex_lock(&laxity_.lock);
    yes = laxity_open_();
    pthread_mutex_unlock(&laxity_.lock);
    return yes;
}

#endif /* LAXITY_IMPLEMENTATION */
