/* What a table of options does with arrays, compiled: node after node and row after row.
 *
 * Each rule stands in Python too, which is the form to read: sieve.py (`passing`), strategies/ (`rank`), options.py and
 * table.py (`best`). Names are the same. A property test says that both decide alike. Arrays come by the buffer
 * protocol, and nothing is kept between calls. The limited API of 3.11: one build serves every later CPython.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdlib.h>
#include "_rankings.h"

/* The arguments of `refresh`, one after the other, and how large an element of each is; then the strategy's tables. */
enum { ASKED, NODES, HELD, OPEN, SETTLED, LOAD, MEMORY_FREE, MEMORY_CAPACITY, PROMISED, RISK, GROUP, TIE, KNOWN, ADMITTED,
       SLACK, UNPROVEN, OPTIONS, ARRAYS };
static const char SIZES[ARRAYS] = {8, 8, 8, 1, 1, 8, 8, 8, 8, 8, 8, 8, 1, 1, 8, 1, 8};

/* ------------------------------------------------------------------------------------------------- options */

static int before(const Work *w, const Row *a, const Row *b) {
    for (i64 key = w->asked->of_nodes; key < w->asked->keys; key++)
        if (a->keys[key] != b->keys[key])
            return a->keys[key] < b->keys[key];
    return a->tie < b->tie;
}

/* `chosen` are as many rows as there are devices, `option` is what is said of them; NULL: no set, no split. */
static void keep(const Work *w, i64 node, const Row *option, const Row *chosen, const i64 *split) {
    double *at = w->options + node;
    int unproven = 0;
    if (split)
        *at = (double)*split, at += w->size;
    for (i64 key = 0; key < w->asked->keys; key++, at += w->size)
        *at = option->keys[key];
    *at = option->total, at += w->size;
    for (i64 part = 0; part < w->asked->parts; part++, at += w->size)
        *at = option->parts[part];
    for (i64 device = 0; device < w->asked->count; device++, at += w->size) {
        *at = (double)chosen[device].index;
        unproven |= w->unproven[w->load[chosen[device].index]];
    }
    if (w->asked->unproven)
        *at = unproven;
}

/* options.py: `_groups`. */
static void groups(const Work *w, i64 found) {
    for (Row *row = w->good; row < w->good + found; row++) {
        row->group = w->group[row->index], row->alike = 0, row->first = UINT64_MAX;
        for (const Row *other = w->good; other < w->good + found; other++)
            if (w->group[other->index] == row->group) {
                row->alike++;
                row->first = other->tie < row->first ? other->tie : row->first;
            }
    }
}

/* Groups with enough devices come first, the smaller ones before the larger ones; then those with more of too few. */
static int nearer(const Work *w, const Row *a, const Row *b) {
    int a_has = a->alike >= w->asked->count, b_has = b->alike >= w->asked->count;
    if (a_has != b_has)
        return a_has;
    if (a->alike != b->alike)
        return a_has == (a->alike < b->alike);
    return a->first != b->first ? a->first < b->first : before(w, a, b);
}

static void mean(Row *option, const Row *good, const Asked *asked) {
    for (i64 device = 1; device < asked->count; device++) {
        option->total += good[device].total;
        for (i64 part = 0; part < asked->parts; part++)
            option->parts[part] += good[device].parts[part];
    }
    option->total /= (double)asked->count;
    for (i64 part = 0; part < asked->parts; part++)
        option->parts[part] /= (double)asked->count;
}

/* options.py: `_sets`. */
static void set(const Work *w, i64 node, i64 found) {
    const Asked *asked = w->asked;
    Row *good = w->good, option;
    groups(w, found);
    for (i64 end = 1; end < found; end++) { /* a node has few devices: sorted by moving each to its place */
        Row row = good[end];
        i64 place = end;
        for (; place && nearer(w, &row, &good[place - 1]); place--)
            good[place] = good[place - 1];
        good[place] = row;
    }
    option = good[0];
    i64 split = option.alike < asked->count;
    for (i64 device = 1; device < asked->count; device++)
        for (i64 key = asked->of_nodes; key < asked->keys; key++)
            option.keys[key] = fmax(option.keys[key], good[device].keys[key]);
    if (!asked->of_nodes)
        mean(&option, good, asked);
    option.total = rounded(option.total);
    keep(w, node, &option, good, &split);
}

/* sieve.py: `passing`, of one node: how many rows can take the request; -1: a row is none. Of a request for one device
 * only the best is kept. */
static i64 passing(Work *w, const Row *of_node) {
    const Asked *asked = w->asked;
    i64 found = 0;
    for (i64 place = 0; place < w->width - SHARES; place++) {
        i64 share = w->held[SHARES + place], index = w->held[FIRST_ROW] + place;
        if (share < asked->share)
            continue;
        if (index < 0 || index >= w->rows || w->load[index] < 0 || w->load[index] >= w->loads)
            return -1;
        i64 load = w->load[index], memory = w->memory_free[index];
        if (w->settled && w->settled[index] >= 0)
            continue;
        if (!w->known[load]) {
            w->missing[w->missed++] = load;
            continue;
        }
        if (!w->admitted[load] || (asked->device_memory && memory < asked->device_memory)) /* known, as facts say */
            continue;
        Row *row = &w->good[found];
        *row = *of_node;
        row->index = index, row->share = share, row->tie = w->tie[index];
        RANKED[asked->ranked].row(w, row);
        if (asked->count > 1 || !found)
            found++;
        else if (before(w, row, &w->good[0]))
            w->good[0] = *row;
    }
    return found;
}

static int refreshed(Work *w, i64 node, int open) {
    const Asked *asked = w->asked;
    Row of_node = {0};
    w->options[node] = INFINITY;
    for (int need = 0; need < ROOM; need++)
        if (w->held[need] < asked->need[need])
            return 0;
    if (!open)
        return 0;
    RANKED[asked->ranked].node(w, &of_node);
    if (!asked->count) {
        RANKED[asked->ranked].row(w, &of_node);
        keep(w, node, &of_node, NULL, NULL);
        return 0;
    }
    i64 found = passing(w, &of_node);
    if (found < 0 || found < asked->count)
        return found < 0 ? -1 : 0;
    if (asked->count > 1)
        set(w, node, found);
    else
        keep(w, node, &w->good[0], &w->good[0], NULL);
    return 0;
}

/* -------------------------------------------------------------------------------------------------- module */

static void release(Py_buffer *views, Py_ssize_t number) {
    while (number--)
        PyBuffer_Release(&views[number]);
}

/* The buffers of arrays, whose elements have these sizes; NULL: of 8 bytes. */
static int look(PyObject *const *arrays, Py_ssize_t number, const char *sizes, Py_buffer *views) {
    for (Py_ssize_t i = 0; i < number; i++) {
        if (PyObject_GetBuffer(arrays[i], &views[i], PyBUF_ND)) {
            release(views, i);
            return -1;
        }
        int size = sizes ? sizes[i] : 8;
        if (views[i].itemsize != size) {
            PyErr_Format(PyExc_TypeError, "array %zd: found elements of %zd bytes, allowed: %d", i, views[i].itemsize, size);
            release(views, i + 1);
            return -1;
        }
    }
    return 0;
}

static int wrong(const Py_buffer *v, const Work *w, Py_ssize_t tables) {
    const Asked *asked = w->asked;
    return v[ASKED].len != sizeof(Asked) || v[HELD].ndim != 2 || v[OPTIONS].ndim != 2 || w->width <= SHARES ||
           asked->ranked < 0 || asked->ranked >= (i64)(sizeof RANKED / sizeof *RANKED) || asked->keys > MOST_KEYS ||
           asked->parts > MOST_PARTS || tables != RANKED[asked->ranked].tables ||
           v[OPTIONS].shape[0] != (asked->count > 1) + asked->keys + 1 + asked->parts + asked->count + asked->unproven;
}

static Work work(const Py_buffer *v) {
    Work w = {.asked = v[ASKED].buf, .load = v[LOAD].buf, .memory_free = v[MEMORY_FREE].buf,
              .memory_capacity = v[MEMORY_CAPACITY].buf, .promised = v[PROMISED].buf, .risk = v[RISK].buf,
              .group = v[GROUP].buf, .slack = v[SLACK].buf, .tie = v[TIE].buf,
              .settled = v[SETTLED].len ? v[SETTLED].buf : NULL, .known = v[KNOWN].buf, .admitted = v[ADMITTED].buf,
              .unproven = v[UNPROVEN].buf, .tables = v + ARRAYS, .options = v[OPTIONS].buf, .width = v[HELD].shape[1],
              .size = v[OPTIONS].shape[v[OPTIONS].ndim - 1], .rows = v[LOAD].shape[0], .loads = v[KNOWN].shape[0]};
    for (int column = LOAD; column <= TIE; column++)
        w.rows = least(w.rows, v[column].shape[0]);
    if (w.settled)
        w.rows = least(w.rows, v[SETTLED].shape[0]);
    return w;
}

static int all(Work *w, const Py_buffer *v) {
    const i64 *nodes = v[NODES].buf, *held = v[HELD].buf;
    const char *open = v[OPEN].buf;
    for (Py_ssize_t i = 0; i < v[NODES].shape[0]; i++) {
        i64 node = nodes[i];
        if (node < 0 || node >= v[HELD].shape[0] || node >= v[OPEN].shape[0] || node >= w->size)
            return -1;
        if (w->done[node]) /* some are named more than once */
            continue;
        w->done[node] = 1;
        w->held = held + node * w->width;
        if (refreshed(w, node, open[node]))
            return -1;
    }
    return 0;
}

static PyObject *refresh(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t given) {
    Py_buffer v[ARRAYS + MOST_TABLES];
    PyObject *found = NULL;
    if (given < ARRAYS || given > ARRAYS + MOST_TABLES)
        return PyErr_Format(PyExc_TypeError, "refresh: found %zd arrays, allowed: %d and tables", given, ARRAYS);
    if (look(args, ARRAYS, SIZES, v))
        return NULL;
    if (look(args + ARRAYS, given - ARRAYS, NULL, v + ARRAYS)) {
        release(v, ARRAYS);
        return NULL;
    }
    Work w = work(v);
    if (wrong(v, &w, given - ARRAYS)) {
        PyErr_SetString(PyExc_ValueError, "refresh: found arrays of other shapes than the request has");
    } else {
        w.good = malloc(sizeof(Row) * (size_t)(w.width - SHARES));
        w.missing = malloc(sizeof(i64) * (size_t)(v[NODES].shape[0] * (w.width - SHARES) + 1));
        w.lines = malloc(3 * (size_t)(given > ARRAYS ? v[ARRAYS].len : 0) + 1);
        w.done = calloc((size_t)w.size + 1, 1);
        if (!w.good || !w.missing || !w.lines || !w.done)
            PyErr_NoMemory();
        else if (all(&w, v))
            PyErr_SetString(PyExc_IndexError, "refresh: found a node, a device or a load that is none");
        else
            found = PyBytes_FromStringAndSize((char *)w.missing, w.missed * (Py_ssize_t)sizeof(i64));
        free(w.good), free(w.missing), free(w.lines), free(w.done);
    }
    release(v, given);
    return found;
}

typedef struct {
    const double *options, *device; /* the first device of each option; NULL: none is asked for */
    const u64 *ties;
    Py_ssize_t keys, size;
} Field;

static int better(const Field *f, Py_ssize_t a, Py_ssize_t b) {
    for (Py_ssize_t key = 0; key < f->keys; key++) {
        double mine = f->options[key * f->size + a], other = f->options[key * f->size + b];
        if (mine != other)
            return mine < other;
    }
    return f->ties[f->device ? (i64)f->device[a] : a] < f->ties[f->device ? (i64)f->device[b] : b];
}

static PyObject *best(PyObject *Py_UNUSED(self), PyObject *const *args, Py_ssize_t given) {
    Py_buffer v[2];
    if (given != 4)
        return PyErr_Format(PyExc_TypeError, "best: found %zd arguments, allowed: 4", given);
    Py_ssize_t keys = PyLong_AsSsize_t(args[2]), device = PyLong_AsSsize_t(args[3]), one = -1, two = -1;
    if (PyErr_Occurred() || look(args, 2, NULL, v))
        return NULL;
    Field f = {.options = v[0].buf, .ties = v[1].buf, .keys = keys, .size = v[0].shape[v[0].ndim - 1]};
    f.device = device ? f.options + device * f.size : NULL;
    double bar = INFINITY; /* the first key of the second best */
    for (Py_ssize_t node = 0; node < f.size; node++) {
        double key = f.options[node];
        if (key > bar || key == INFINITY)
            continue;
        if (one < 0 || better(&f, node, one))
            two = one, one = node;
        else if (two < 0 || better(&f, node, two))
            two = node;
        if (two >= 0)
            bar = f.options[two];
    }
    release(v, 2);
    return Py_BuildValue("nn", one, two);
}

static PyMethodDef METHODS[] = {
    {"refresh", (PyCFunction)(void (*)(void))refresh, METH_FASTCALL, NULL},
    {"best", (PyCFunction)(void (*)(void))best, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef MODULE = {PyModuleDef_HEAD_INIT, .m_name = "_kernels", .m_methods = METHODS};

PyMODINIT_FUNC PyInit__kernels(void) { return PyModuleDef_Init(&MODULE); }
