/* What the tests of laxity.h run: `marks WORD [COUNT]`; also compiled as C++. */
#ifndef LAXITY_IMPLEMENTATION
#define LAXITY_IMPLEMENTATION
#endif
#ifdef FIXED_CLOCK
static unsigned long long fixed_ns = 1000;
#define LAXITY_NOW_NS() (fixed_ns += 7)
#endif
#include "laxity.h"

#include <sys/wait.h>

static int count = 1000;

static void mark(const char *name, int times) {
    int index;
    for (index = 0; index < times; index++) {
        laxity_task task = laxity_begin(name, 50000);
        if (index % 3 == 2)
            laxity_fail(&task);
        else
            laxity_end(&task);
    }
}

static void *in_thread(void *name) {
    mark((const char *)name, count);
    return NULL;
}

static void golden(void) {
    laxity_task outer = laxity_begin("outer", 50000), inner = laxity_begin("inn\xc3\xa9r that is far too lo\xc3\xa9ng", 0);
    laxity_end(&inner);
    laxity_fail(&outer);
    laxity_end(&outer); /* it has ended */
    mark("again", 12);
}

static int threads(void) {
    static const char *names[] = {"a", "b", "c", "d"};
    pthread_t started[4];
    int index;
    for (index = 0; index < 4; index++)
        if (pthread_create(&started[index], NULL, in_thread, (void *)(uintptr_t)names[index]))
            return 1;
    for (index = 0; index < 4; index++)
        pthread_join(started[index], NULL);
    return 0;
}

static int forks(void) {
    laxity_task parents = laxity_begin("parent", 50000);
    pid_t child = fork();
    int status = 0;
    if (!child) {
        laxity_end(&parents); /* it is the parent's */
        mark("child", 3);
        _exit(0);
    }
    waitpid(child, &status, 0);
    laxity_end(&parents);
    return status;
}

static void wrong(void) {
    laxity_task task = laxity_begin("", 50000);
    laxity_end(&task);
    task = laxity_begin("late", LAXITY_MAX_DEADLINE_US + 1);
    laxity_end(&task);
    mark("right", 1);
}

static void late(void) {
    laxity_task task = laxity_begin("late", 50000);
    struct timespec pause = {0, 200 * 1000 * 1000};
    nanosleep(&pause, NULL);
    laxity_end(&task);
}

static void bench(void) {
    uint64_t began_ns = laxity_now_ns_();
    mark("bench", count);
    printf("%.1f\n", (double)(laxity_now_ns_() - began_ns) / count);
}

int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    if (argc > 2)
        count = atoi(argv[2]);
    if (!strcmp(word, "golden"))
        golden();
    else if (!strcmp(word, "threads"))
        return threads();
    else if (!strcmp(word, "fork"))
        return forks();
    else if (!strcmp(word, "wrong"))
        wrong();
    else if (!strcmp(word, "late"))
        late();
    else if (!strcmp(word, "bench"))
        bench();
    else if (!strcmp(word, "endless"))
        for (;;)
            mark("endless", 1);
    else
        return laxity_enabled() ? 0 : 3;
    return 0;
}
