/* The rankings of strategies/ that are compiled: what `rank` says of a node and of its rows. Included by _kernels.c.
 *
 * Names are those of Python, where each rule and its source stand. Floats are worked out in the same order there.
 */
#include <math.h>
#include <stdint.h>
#include <stddef.h>

typedef int64_t i64;
typedef uint64_t u64;

enum { WHOLE = 1000000, UNKNOWN = -1, MOST_KEYS = 4, MOST_PARTS = 3, MOST_TABLES = 8 };
/* Of `held`, as in cluster.py. */
enum { CPU_FREE, NODE_MEMORY_FREE, WHOLE_FREE = 3, SHARE_FREE, ROOM = 4, USED = 6, FIRST_ROW = 9, SLOT = 11, MODEL,
       CAPACITY, SHARES = 16 };

typedef struct { /* `Asked` of kernels.py */
    i64 ranked, keys, of_nodes, parts, count, share, device_memory, need[4], taken[3], promises, deadline_us, no_slack,
        unproven;
} Asked;

typedef struct { /* a device that can take the request, or the node for one without gpu */
    double keys[MOST_KEYS], total, parts[MOST_PARTS];
    i64 index, share, group, alike;
    u64 tie, first;
} Row;

typedef struct {
    const Asked *asked;
    const i64 *held; /* of the node that is looked at */
    const i64 *load, *memory_free, *memory_capacity, *promised, *risk, *group, *slack;
    const u64 *tie;
    const char *settled, *known, *admitted, *unproven;
    const Py_buffer *tables;
    double *options;
    Py_ssize_t width, size, rows, loads, missed;
    Row *good;
    i64 *missing;
    double *lines; /* three, as long as the first table */
    char *done; /* nodes */
    i64 then, gained; /* fgd: of the node */
} Work;

static double within(double value) { return value < 0 ? 0 : value > 1 ? 1 : value; }
static double lower(double a, double b) { return a < b ? a : b; }
static double rounded(double value) { return rint(value * 1e9) / 1e9; }
static i64 least(i64 a, i64 b) { return a < b ? a : b; }
static i64 most(i64 a, i64 b) { return a > b ? a : b; }
static i64 floored(i64 a, i64 b) { return a / b - (a % b < 0); } /* b > 0 */
static Py_ssize_t length(const Py_buffer *table) { return table->len / 8; }

/* How many of these, which go up, are not above the value. */
static i64 level(const Py_buffer *table, i64 value) {
    const i64 *sorted = table->buf;
    i64 low = 0, high = length(table);
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (sorted[middle] <= value)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---------------------------------------------------------------------------------------------- strategies */

static double share_after(const Work *w, const Row *row) {
    return w->asked->count ? (double)(row->share - w->asked->share) / WHOLE : 0;
}

static i64 whole_after(const Work *w, const Row *row) {
    return w->asked->count ? w->held[WHOLE_FREE] - (row->share == WHOLE ? w->asked->count : 0) : 0;
}

/* binpack.py: `weighed`. The table: weights. */
static void weighed(const Work *w, Row *node, int packs) {
    const Asked *asked = w->asked;
    const i64 *weights = w->tables[0].buf;
    i64 weight = 0, sum = 0, scores[3];
    for (i64 r = 0; r < asked->parts; r++) {
        i64 capacity = w->held[CAPACITY + r], used = w->held[USED + r] + asked->taken[r];
        scores[r] = (packs ? least(used, capacity) : most(capacity - used, 0)) * 100 / most(capacity, 1) * weights[r];
        weight += capacity > 0 ? weights[r] : 0;
        sum += scores[r];
    }
    weight = most(weight, 1);
    node->total = (double)(sum / weight) / 100;
    for (i64 r = 0; r < asked->parts; r++)
        node->parts[r] = (double)scores[r] / (double)(weight * 100);
    node->keys[0] = -node->total;
}

static void binpack_node(Work *w, Row *node) { weighed(w, node, 1); }

static void binpack_row(const Work *w, Row *row) {
    row->keys[1] = share_after(w, row), row->keys[2] = (double)whole_after(w, row);
}

static void spread_node(Work *w, Row *node) { weighed(w, node, 0); }

static void spread_row(const Work *w, Row *row) {
    row->keys[1] = -share_after(w, row), row->keys[2] = -(double)whole_after(w, row);
}

/* slot.py. The table: the groups, best first. */
static void slot_node(Work *w, Row *node) {
    const i64 *groups = w->tables[0].buf;
    int last = w->asked->count ? 2 : 1;
    i64 capacity = w->held[CAPACITY + last], used = w->held[USED + last] + w->asked->taken[last];
    double order = 0;
    for (Py_ssize_t place = 0; place < length(&w->tables[0]); place++)
        if (groups[place] == w->held[SLOT])
            order = (double)place;
    node->total = node->parts[0] = rounded((double)least(used, capacity) / (double)most(capacity, 1));
    node->keys[0] = 2 * order - node->total;
}

static void slot_row(const Work *w, Row *row) { row->keys[1] = share_after(w, row); }

/* deadline.py. The table: the weights of standing, slack and fragmentation, and of idle devices. */
static void deadline_node(Work *Py_UNUSED(w), Row *Py_UNUSED(node)) {}

static double snug(const Work *w, const Row *row) {
    if (w->asked->count && w->asked->deadline_us) {
        i64 slack = w->slack[w->load[row->index]];
        if (slack != w->asked->no_slack)
            return 1 - within((double)slack / (double)w->asked->deadline_us);
    }
    return !w->asked->count || !w->promised[row->index];
}

static double left(const Work *w, const Row *row) {
    double share = share_after(w, row);
    if (share <= 0 || w->memory_free[row->index] == UNKNOWN)
        return share > 0 ? share : 0;
    double free = (double)(w->memory_free[row->index] - w->asked->device_memory);
    return (share + within(free / (double)most(w->memory_capacity[row->index], 1))) / 2;
}

static void deadline_row(const Work *w, Row *row) {
    const double *weights = w->tables[0].buf, idle = weights[3];
    i64 risk = w->asked->count ? w->risk[row->index] : 0, whole = whole_after(w, row);
    if (!w->asked->promises)
        risk = risk > 1 ? 2 : 0;
    row->parts[0] = weights[0] * (1 - (double)risk / 2);
    row->parts[1] = weights[1] * snug(w, row);
    row->parts[2] = weights[2] * ((1 - left(w, row)) * (1 - idle) + idle / (double)(1 + whole));
    row->total = rounded(within(row->parts[0] + row->parts[1] + row->parts[2]));
    double *key = row->keys;
    if (w->asked->count > 1)
        *key++ = (double)risk, *key++ = -row->total;
    else
        *key++ = 2 * (double)risk - row->total;
    *key = (double)whole;
}

static int partial(const Work *w) { return w->asked->count == 1 && w->asked->share < WHOLE; }

static void scored(Row *row, i64 score, double scale) {
    row->keys[0] = -(double)score, row->total = within((double)score / scale);
}

/* fgd.py, fragmentation.py. The tables: `_shares`, `_cpu`, `_single`, `_several`, steps, and how many models there are
 * and devices a kind asks for. */
static i64 case_of(const Work *w, i64 cpu) {
    i64 models = ((i64 *)w->tables[5].buf)[0], cpus = length(&w->tables[1]) + 1;
    i64 model = least(most(w->held[MODEL], 0), models);
    return (model * cpus + level(&w->tables[1], cpu)) * (length(&w->tables[2]) / ((models + 1) * cpus));
}

static i64 of_device(const Work *w, i64 of_case, i64 free) {
    return ((i64 *)w->tables[2].buf)[of_case + level(&w->tables[0], free)] * free;
}

static i64 of_whole(const Work *w, i64 of_case, i64 count) {
    return ((i64 *)w->tables[3].buf)[of_case + least(most(count, 0), ((i64 *)w->tables[5].buf)[1])] * count;
}

static void fgd_node(Work *w, Row *node) {
    i64 now = case_of(w, w->held[CPU_FREE]), whole = w->held[WHOLE_FREE];
    w->then = case_of(w, w->held[CPU_FREE] - w->asked->taken[0]);
    w->gained = -of_whole(w, now, whole);
    for (Py_ssize_t place = SHARES; place < w->width; place++)
        if (w->held[place])
            w->gained += of_device(w, w->then, w->held[place]) - of_device(w, now, w->held[place]);
    if (partial(w))
        return;
    w->gained += of_whole(w, w->then, whole - w->asked->count) - w->asked->count * of_device(w, w->then, WHOLE);
    scored(node, level(&w->tables[4], w->gained), 100);
}

static void fgd_row(const Work *w, Row *row) {
    if (!partial(w))
        return;
    i64 gained = w->gained + of_whole(w, w->then, whole_after(w, row)) - of_device(w, w->then, row->share) +
                 of_device(w, w->then, row->share - w->asked->share);
    scored(row, level(&w->tables[4], gained), 100);
}

/* laxity.py, worth.py. The tables: `_one`, `_of_device`, `_of_whole`, `_needs`, `_weights`; what is taken, what a point
 * is, GPU and CPU of `_snug` and a step; how many steps make 1. */
static void limits(const Work *w, i64 cpu, i64 memory, double *found) {
    Py_ssize_t columns = length(&w->tables[0]), models = length(&w->tables[3]) / (2 * columns);
    const double *one = w->tables[0].buf, *of_cpu = w->tables[3].buf, *of_memory;
    of_cpu += most(least(w->held[MODEL], models - 1), 0) * columns;
    of_memory = of_cpu + models * columns;
    double cpu_free = fmax((double)((w->held[CPU_FREE] - cpu) * 1000000000), 1e-30);
    double memory_free = fmax((double)((w->held[NODE_MEMORY_FREE] - memory) * 1000000000), 1e-30);
    for (Py_ssize_t column = 0; column < columns; column++) {
        double limit = lower(cpu_free / of_cpu[column], memory_free / of_memory[column]);
        found[column] = limit >= one[column] ? limit : 0;
    }
}

/* A line of `_of_device` or `_of_whole`. */
static const double *offers(const Work *w, int table, i64 at) {
    Py_ssize_t columns = length(&w->tables[0]);
    return (double *)w->tables[table].buf + most(least(at, length(&w->tables[table]) / columns - 1), 0) * columns;
}

static void gain(const Work *w, Row *row) {
    Py_ssize_t columns = length(&w->tables[0]);
    const double *offered = w->lines, *then = offered + columns, *used = then + columns;
    const i64 *weights = w->tables[4].buf, *numbers = w->tables[5].buf;
    i64 share = row->share, points[3] = {numbers[0], numbers[1], numbers[2]};
    i64 whole = w->held[WHOLE_FREE] - (partial(w) ? share == WHOLE : w->asked->count);
    const double *several = length(&w->tables[2]) ? offers(w, 2, whole) : NULL;
    const double *before = offers(w, 1, partial(w) ? share / 1000 : 0);
    const double *after = offers(w, 1, partial(w) ? (share - w->asked->share) / 1000 : 0);
    for (Py_ssize_t column = 0; column < columns; column++) {
        double left = offered[column] + (after[column] - before[column]) + (several ? several[column] : 0);
        i64 uses = (i64)lower(left, then[column]) - (i64)used[column];
        for (int part = 0; part < 3; part++)
            points[part] += uses * weights[3 * column + part];
    }
    i64 score = 0, snug = w->held[SHARE_FREE] * numbers[6] + w->held[CPU_FREE] * numbers[7];
    for (int part = 0; part < 3; part++)
        score += floored(points[part], numbers[3 + part]);
    snug -= w->asked->taken[2] * numbers[6] + w->asked->taken[0] * numbers[7];
    scored(row, floored(score - floored(snug, 1000), numbers[8]), *(double *)w->tables[6].buf);
}

/* Lines: what is offered, with what the request takes of devices that it has to itself; what CPU and memory let be used
 * of it then; and now, as it is used. */
static void laxity_node(Work *w, Row *node) {
    Py_ssize_t columns = length(&w->tables[0]);
    double *offered = w->lines, *then = offered + columns, *used = then + columns;
    for (Py_ssize_t column = 0; column < columns; column++)
        offered[column] = 0;
    for (Py_ssize_t place = SHARES; place < w->width; place++) {
        const double *line = offers(w, 1, w->held[place] / 1000);
        for (Py_ssize_t column = 0; column < columns; column++)
            offered[column] += line[column];
    }
    const double *whole = length(&w->tables[2]) ? offers(w, 2, w->held[WHOLE_FREE]) : NULL, *device = offers(w, 1, 1000);
    double taken = partial(w) ? 0 : (double)w->asked->count;
    limits(w, 0, 0, used);
    limits(w, w->asked->taken[0], w->asked->taken[1], then);
    for (Py_ssize_t column = 0; column < columns; column++) {
        used[column] = lower(offered[column] + (whole ? whole[column] : 0), used[column]);
        offered[column] -= taken * device[column];
    }
    if (!partial(w))
        gain(w, node);
}

static void laxity_row(const Work *w, Row *row) {
    if (partial(w))
        gain(w, row);
}

/* By the numbers in kernels.py. What is said of the node is there when its rows are looked at. */
static const struct {
    void (*node)(Work *, Row *), (*row)(const Work *, Row *);
    Py_ssize_t tables;
} RANKED[] = {
    {binpack_node, binpack_row, 1},
    {spread_node, spread_row, 1},
    {slot_node, slot_row, 1},
    {deadline_node, deadline_row, 1},
    {fgd_node, fgd_row, 6},
    {laxity_node, laxity_row, 7},
};
