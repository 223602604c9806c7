/* What `laxity/records.py` does, compiled: a mark is a few cache lines of code where Python's is dozens.
 *
 * The limited API of 3.11: one build serves every later CPython with a GIL. That is the lock: nothing between the taking
 * of a sequence and the store of the head runs Python, so no thread, signal handler or finalizer comes between.
 * The layout is that of docs/ring-format.md; what a record says stands in records.py and tasks.py.
 */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>
#include <stdint.h>
#include <string.h>
#include <structmember.h>
#include <time.h>

#ifdef Py_GIL_DISABLED
#error "without a GIL tasks are written by records.py, which has a lock"
#endif

#define MAX_DEADLINE_US INT64_C(86400000000)
enum { HEADER = 4096, HEAD = 128 };
enum { BEGUN, ENDED, FAILED }; /* which of a task's words a record has */

typedef struct {
    uint64_t seq, stamp_ns, task, deadline_us;
    char words[24]; /* kind, status and name */
    uint64_t again;
} Record;

typedef struct {
    PyObject_HEAD
    Py_buffer map;
    uint64_t mask, written;
    char closed;
} Writer;

typedef struct {
    PyObject_HEAD
    PyObject *ring, *words; /* ring NULL: None */
    uint64_t deadline_us, seq;
} Mark;

/* Of the one interpreter that may import this. `kind` is NULL while Python makes every task itself. */
static struct {
    PyObject *writer, *kind, *ring, *names, *task, *begin, *deadline_word, *gate_word;
    int64_t deadline_us;
} known;

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * UINT64_C(1000000000) + (uint64_t)now.tv_nsec;
}

static void replace(PyObject **at, PyObject *value) {
    PyObject *old = *at;
    *at = value == Py_None ? NULL : Py_NewRef(value);
    Py_XDECREF(old);
}

static void release(void *self) {
    PyTypeObject *type = Py_TYPE(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* ---------------------------------------------------------------------------------------------- the ring */

static PyObject *writer_detach(Writer *self, PyObject *Py_UNUSED(none)) {
    PyBuffer_Release(&self->map), self->closed = 1;
    Py_RETURN_NONE;
}

static PyObject *writer_attach(Writer *self, PyObject *map) {
    PyBuffer_Release(&self->map);
    if (PyObject_GetBuffer(map, &self->map, PyBUF_WRITABLE))
        return NULL;
    self->mask = ((uint64_t)self->map.len - HEADER) / sizeof(Record) - 1;
    self->written = 0, self->closed = 0;
    if (self->map.len >= HEADER + 64 && !(self->mask & (self->mask + 1)))
        Py_RETURN_NONE;
    PyBuffer_Release(&self->map);
    return PyErr_Format(PyExc_ValueError, "map: allowed: a header and a power of two of records");
}

static void writer_dealloc(Writer *self) {
    PyBuffer_Release(&self->map);
    release(self);
}

static int is_open(PyObject *ring) { return ring && ((Writer *)ring)->map.obj; }

/* ---------------------------------------------------------------------------------------------- a task */

/* The sequence of the record; 0 with an exception where the task has no words. In a begin `begun` and `stamp_ns` are 0:
 * it is stamped as late as possible. */
static uint64_t put(const Mark *self, int which, uint64_t begun, uint64_t stamp_ns) {
    Writer *ring = (Writer *)self->ring;
    uint64_t seq = ring->written + 1;
    Record record = {seq, stamp_ns, begun ? begun : seq, self->deadline_us, "", seq};
    PyObject *words = self->words && PyTuple_Check(self->words) ? PyTuple_GetItem(self->words, which) : NULL;
    char *map = ring->map.buf;
    if (!words || !PyBytes_Check(words) || PyBytes_Size(words) != sizeof record.words) {
        PyErr_SetString(PyExc_TypeError, "words: allowed: three times 24 bytes");
        return 0;
    }
    memcpy(record.words, PyBytes_AsString(words), sizeof record.words);
    if (!stamp_ns)
        record.stamp_ns = now_ns();
    memcpy(map + HEADER + ((seq - 1) & ring->mask) * sizeof record, &record, sizeof record);
    __atomic_store_n((uint64_t *)(void *)(map + HEAD), seq, __ATOMIC_RELEASE);
    return ring->written = seq;
}

static PyObject *mark_ring(Mark *self, void *Py_UNUSED(none)) { return Py_NewRef(self->ring ? self->ring : Py_None); }

static int mark_set_ring(Mark *self, PyObject *ring, void *Py_UNUSED(none)) {
    if (!ring || (ring != Py_None && !PyObject_TypeCheck(ring, (PyTypeObject *)known.writer))) {
        PyErr_SetString(PyExc_TypeError, "ring: allowed: a Ring or None");
        return -1;
    }
    replace(&self->ring, ring);
    return 0;
}

static PyObject *mark_enter(Mark *self, PyObject *Py_UNUSED(none)) {
    if (!self->seq && !is_open(self->ring)) { /* made before there was a ring, or before a fork */
        PyObject *ring = PyObject_CallMethod((PyObject *)self, "_process_ring", NULL);
        int failed = ring ? mark_set_ring(self, ring, NULL) : -1;
        Py_XDECREF(ring);
        if (failed)
            return NULL;
    }
    if (self->seq)
        return PyErr_Format(PyExc_RuntimeError, "this laxity.task is already open: make one for each with statement");
    self->seq = is_open(self->ring) ? put(self, BEGUN, 0, 0) : 1;
    return self->seq ? Py_NewRef((PyObject *)self) : NULL;
}

/* `failed` NULL: it is not; what asks it may run Python, which may end the task. */
static PyObject *finish(Mark *self, PyObject *failed) {
    uint64_t stamp_ns = now_ns(), begun; /* before anything is waited for */
    int has_failed = failed ? PyObject_IsTrue(failed) : 0;
    if (has_failed < 0)
        return NULL;
    begun = self->seq;
    self->seq = 0;
    if (begun && is_open(self->ring) && !put(self, has_failed ? FAILED : ENDED, begun, stamp_ns))
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *mark_exit(Mark *self, PyObject *const *args, Py_ssize_t count) {
    if (count < 1)
        return PyErr_Format(PyExc_TypeError, "__exit__: found no argument, allowed: whether it has failed");
    return finish(self, args[0]);
}

static PyObject *mark_end(Mark *self, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    Py_ssize_t named = names ? PyTuple_Size(names) : 0;
    if (count || named > 1 || (named && PyUnicode_CompareWithASCIIString(PyTuple_GetItem(names, 0), "failed")))
        return PyErr_Format(PyExc_TypeError, "end: allowed: failed, by its name");
    return finish(self, named ? args[0] : NULL);
}

static void mark_dealloc(Mark *self) {
    Py_XDECREF(self->ring);
    Py_XDECREF(self->words);
    release(self);
}

/* ---------------------------------------------------------------------------------------------- the verbs */

/* The task of a usual call; NULL where Python must look itself, whatever exception there is. */
static Mark *make(PyObject *const *args, Py_ssize_t count, PyObject *names) {
    Py_ssize_t named = names ? PyTuple_Size(names) : 0, index;
    int64_t deadline_us = known.deadline_us;
    int overflow = 0;
    PyObject *words;
    Mark *made;
    if (count != 1 || !known.kind || !PyUnicode_CheckExact(args[0]))
        return NULL;
    for (index = 0; index < named; index++) {
        PyObject *word = PyTuple_GetItem(names, index), *value = args[count + index];
        if (word == known.deadline_word && PyLong_CheckExact(value))
            deadline_us = PyLong_AsLongLongAndOverflow(value, &overflow);
        else if (value != Py_None || (word != known.deadline_word && word != known.gate_word))
            return NULL;
    }
    words = PyDict_GetItemWithError(known.names, args[0]);
    if (!words || overflow || deadline_us < 1 || deadline_us > MAX_DEADLINE_US)
        return NULL;
    made = (Mark *)PyType_GenericAlloc((PyTypeObject *)known.kind, 0);
    if (made) {
        made->words = Py_NewRef(words);
        made->deadline_us = (uint64_t)deadline_us;
        made->ring = Py_XNewRef(known.ring);
    }
    return made;
}

static PyObject *in_python(PyObject *function, PyObject *const *args, Py_ssize_t count, PyObject *names) {
    PyObject *given = PyTuple_New(count), *words = PyDict_New(), *result = NULL;
    Py_ssize_t index;
    PyErr_Clear();
    for (index = 0; given && index < count; index++)
        PyTuple_SetItem(given, index, Py_NewRef(args[index]));
    for (index = 0; words && names && index < PyTuple_Size(names); index++)
        PyDict_SetItem(words, PyTuple_GetItem(names, index), args[count + index]);
    if (given && words && !PyErr_Occurred())
        result = PyObject_Call(function, given, words);
    Py_XDECREF(given);
    Py_XDECREF(words);
    return result;
}

static PyObject *task(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *names) {
    Mark *made = make(args, count, names);
    return made ? (PyObject *)made : in_python(known.task, args, count, names);
}

static PyObject *begin(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t count, PyObject *names) {
    Mark *made = make(args, count, names);
    PyObject *begun = made ? mark_enter(made, NULL) : in_python(known.begin, args, count, names);
    Py_XDECREF((PyObject *)made);
    return begun;
}

#define METHOD(function) ((PyCFunction)(void (*)(void))function)
#define QUICK (METH_FASTCALL | METH_KEYWORDS)
#define A_BASE (Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE)
#define SIGNATURE "(name, *, deadline_us=None, gate=None)\n--\n\n"
static PyMethodDef verbs[] = {
    {"task", METHOD(task), QUICK, "task" SIGNATURE "Mark one task; the words of `laxity.tasks.task` hold."},
    {"begin", METHOD(begin), QUICK, "begin" SIGNATURE "Begin a task; the words of `laxity.tasks.begin` hold."}};

static PyObject *quick(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *names, *slow_task, *slow_begin;
    if (!PyArg_ParseTuple(args, "O!OO", &PyDict_Type, &names, &slow_task, &slow_begin))
        return NULL;
    replace(&known.names, names);
    replace(&known.task, slow_task);
    replace(&known.begin, slow_begin);
    return Py_BuildValue("NN", PyCFunction_New(&verbs[0], NULL), PyCFunction_New(&verbs[1], NULL));
}

static PyObject *know(PyObject *Py_UNUSED(module), PyObject *args) {
    PyObject *kind, *ring;
    long long deadline_us;
    if (!PyArg_ParseTuple(args, "OOL", &kind, &ring, &deadline_us))
        return NULL;
    replace(&known.kind, kind);
    replace(&known.ring, ring);
    known.deadline_us = deadline_us;
    Py_RETURN_NONE;
}

/* ---------------------------------------------------------------------------------------------- the module */

static PyMethodDef writer_methods[] = {
    {"attach", METHOD(writer_attach), METH_O, NULL}, {"detach", METHOD(writer_detach), METH_NOARGS, NULL}, {0}};
static PyMemberDef writer_members[] = {
    {"written", T_ULONGLONG, offsetof(Writer, written), READONLY, NULL},
    {"closed", T_BOOL, offsetof(Writer, closed), READONLY, NULL}, {0}};
static PyType_Slot writer_slots[] = {
    {Py_tp_dealloc, writer_dealloc}, {Py_tp_methods, writer_methods}, {Py_tp_members, writer_members}, {0}};
static PyType_Spec writer_spec = {"laxity._fast.Writer", sizeof(Writer), 0, A_BASE, writer_slots};
static PyMethodDef mark_methods[] = {
    {"__enter__", METHOD(mark_enter), METH_NOARGS, NULL},
    {"__exit__", METHOD(mark_exit), METH_FASTCALL, NULL},
    {"end", METHOD(mark_end), QUICK, "end(*, failed=False)\n--\n\nEnd the task; `failed`: it gave no result."},
    {0}};
static PyMemberDef mark_members[] = {
    {"words", T_OBJECT, offsetof(Mark, words), 0, NULL},
    {"deadline_us", T_ULONGLONG, offsetof(Mark, deadline_us), 0, NULL},
    {"seq", T_ULONGLONG, offsetof(Mark, seq), 0, NULL}, {0}};
static PyGetSetDef mark_getset[] = {{"ring", (getter)mark_ring, (setter)mark_set_ring, NULL, NULL}, {0}};
static PyType_Slot mark_slots[] = {{Py_tp_dealloc, mark_dealloc}, {Py_tp_methods, mark_methods},
                                   {Py_tp_members, mark_members}, {Py_tp_getset, mark_getset}, {0}};
static PyType_Spec mark_spec = {"laxity._fast.Mark", sizeof(Mark), 0, A_BASE, mark_slots};

static PyMethodDef functions[] = {{"quick", quick, METH_VARARGS, NULL}, {"know", know, METH_VARARGS, NULL}, {0}};

static int run(PyObject *module) {
    PyObject *mark = PyType_FromSpec(&mark_spec);
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) != 0) { /* `known` is the main interpreter's */
        PyErr_SetString(PyExc_ImportError, "laxity._fast: allowed: the main interpreter");
        return -1;
    }
    known.writer = PyType_FromSpec(&writer_spec);
    known.deadline_word = PyUnicode_InternFromString("deadline_us");
    known.gate_word = PyUnicode_InternFromString("gate");
    if (!mark || !known.writer || !known.deadline_word || !known.gate_word ||
        PyModule_AddObjectRef(module, "Writer", known.writer) || PyModule_AddObjectRef(module, "Mark", mark))
        return -1;
    return PyModule_AddObjectRef(module, "COMPILED", Py_True);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, run}, {0}};
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "laxity._fast", NULL, 0, functions, slots, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__fast(void) { return PyModuleDef_Init(&definition); }
