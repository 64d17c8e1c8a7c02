/* The kernel for Python: checks types, sizes and offsets, then works, without the GIL where it copies
 * much.
 *
 * Every function checks all of its arguments before the first byte moves. Buffers are exported for
 * the time of a call. `proto/kernel.py` says what each function returns.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <string.h>
#include <sys/uio.h>

#include "kernel.h"

/* What Python expects of this module: `ABI` in `proto/kernel.py` has to be the same. It goes up with
 * every change of what a function takes, gives, or does. */
enum { KERNEL_ABI = 3 };

/* ---- buffers */

/* Some exported buffers, which `release` gives back. */
struct exported {
    Py_buffer *buffers;
    Py_ssize_t count, room;
};

static void release(struct exported *all) {
    for (Py_ssize_t i = 0; i < all->count; i++) PyBuffer_Release(all->buffers + i);
    PyMem_Free(all->buffers);
}

static Py_buffer *export(struct exported *all, PyObject *object, int writable) {
    if (all->count == all->room) {
        Py_ssize_t room = 2 * all->room + 16;
        Py_buffer *more = PyMem_Realloc(all->buffers, (size_t)room * sizeof *more);
        if (!more) return (Py_buffer *)PyErr_NoMemory();
        all->buffers = more, all->room = room;
    }
    Py_buffer *buffer = all->buffers + all->count;
    if (PyObject_GetBuffer(object, buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE)) return NULL;
    all->count++;
    return buffer;
}

/* A list or a tuple, whose items are borrowed. */
static Py_ssize_t length_of(PyObject *sequence) {
    if (PyList_Check(sequence)) return PyList_Size(sequence);
    if (PyTuple_Check(sequence)) return PyTuple_Size(sequence);
    PyErr_SetString(PyExc_TypeError, "a list or a tuple is needed");
    return -1;
}

static PyObject *item_of(PyObject *sequence, Py_ssize_t number) {
    return PyList_Check(sequence) ? PyList_GetItem(sequence, number)
                                  : PyTuple_GetItem(sequence, number);
}

/* One place that bytes are copied between: `pieces` buffers from number `first` on. */
struct part {
    Py_ssize_t first, pieces;
    size_t start, size;
    int check;
    uint32_t crc;
};

/* Export a buffer, or each buffer of a list or tuple of them. */
static int export_pieces(struct exported *all, PyObject *object, int writable, struct part *part) {
    part->first = all->count, part->size = 0;
    if (PyList_Check(object) || PyTuple_Check(object)) {
        Py_ssize_t count = length_of(object);
        for (Py_ssize_t i = 0; i < count; i++) {
            Py_buffer *buffer = export(all, item_of(object, i), writable);
            if (!buffer) return -1;
            part->size += (size_t)buffer->len;
        }
    } else {
        Py_buffer *buffer = export(all, object, writable);
        if (!buffer) return -1;
        part->size = (size_t)buffer->len;
    }
    part->pieces = all->count - part->first;
    return 0;
}

static int size_of(PyObject *number, size_t *size) {
    *size = PyLong_AsSize_t(number);
    return *size == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* From so many bytes on, copies let other threads run. Those that wait for the GIL are woken when it
 * is released, which costs as much as copying some 64 KiB. */
enum { RELEASE_BYTES = 256 * 1024 };

static PyThreadState *let_others_run(size_t bytes) {
    return bytes < RELEASE_BYTES ? NULL : PyEval_SaveThread();
}

static void go_on(PyThreadState *state) {
    if (state) PyEval_RestoreThread(state);
}

/* flat(buffers, writable): are all of them memoryviews of flat unsigned bytes, none empty? */
static PyObject *flat(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "flat(buffers, writable)");
        return NULL;
    }
    Py_ssize_t many = length_of(args[0]);
    int writable = PyObject_IsTrue(args[1]);
    if (many < 0 || writable < 0) return NULL;
    int flags = PyBUF_ND | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
    int all = 1;
    for (Py_ssize_t i = 0; all && i < many; i++) {
        PyObject *object = item_of(args[0], i);
        Py_buffer view;
        all = Py_IS_TYPE(object, &PyMemoryView_Type);
        if (!all) break;
        if (PyObject_GetBuffer(object, &view, flags)) {
            /* Not writable, not contiguous, or released: whoever looks closer says what is wrong. */
            if (!PyErr_ExceptionMatches(PyExc_BufferError) &&
                !PyErr_ExceptionMatches(PyExc_ValueError))
                return NULL;
            PyErr_Clear();
            all = 0;
            break;
        }
        all = view.ndim == 1 && view.len && view.format && !strcmp(view.format, "B");
        PyBuffer_Release(&view);
    }
    return PyBool_FromLong(all);
}

/* ---- checksums and copies */

static int crc_of(PyObject *number, uint32_t *crc) {
    unsigned long found = PyLong_AsUnsignedLong(number);
    if (found == (unsigned long)-1 && PyErr_Occurred()) return -1;
    if (found > 0xffffffff) {
        PyErr_SetString(PyExc_OverflowError, "a CRC32C has 32 bits");
        return -1;
    }
    *crc = (uint32_t)found;
    return 0;
}

static PyObject *crc32c(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    Py_buffer data;
    uint32_t crc = 0;
    if (count < 1 || count > 2) {
        PyErr_SetString(PyExc_TypeError, "crc32c(data, crc=0)");
        return NULL;
    }
    if (count == 2 && crc_of(args[1], &crc)) return NULL;
    if (PyObject_GetBuffer(args[0], &data, PyBUF_SIMPLE)) return NULL;
    PyThreadState *state = let_others_run((size_t)data.len);
    uint32_t found = kernel_crc32c(crc, data.buf, (size_t)data.len);
    go_on(state);
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(found);
}

/* gather(memory, starts, limits, sources, around): copy each source, whose size is at most `limit`,
 * to `memory[start:]`. Returns the CRC32C of each. */
static PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "gather(memory, starts, limits, sources, around)");
        return NULL;
    }
    PyObject *result = NULL;
    struct exported all = {NULL, 0, 0};
    struct part *parts = NULL;
    Py_ssize_t many = length_of(args[3]);
    int around = PyObject_IsTrue(args[4]);
    if (many < 0 || around < 0) return NULL;
    uint32_t (*copy)(uint32_t, uint8_t *, const uint8_t *, size_t) =
        around ? kernel_store_crc32c : kernel_copy_crc32c;
    for (int i = 1; i < 3; i++) {
        Py_ssize_t length = length_of(args[i]);
        if (length < 0) return NULL;
        if (length != many) {
            PyErr_SetString(PyExc_ValueError, "one list is shorter than the others");
            return NULL;
        }
    }
    Py_buffer *buffer = export(&all, args[0], 1);
    if (!buffer) goto done;
    uint8_t *memory = buffer->buf; /* the array of buffers may move */
    size_t memory_bytes = (size_t)buffer->len;
    parts = PyMem_Calloc((size_t)many + 1, sizeof *parts);
    if (!parts) {
        PyErr_NoMemory();
        goto done;
    }
    size_t all_bytes = 0;
    for (Py_ssize_t i = 0; i < many; i++) {
        struct part *part = parts + i;
        size_t limit;
        if (size_of(item_of(args[1], i), &part->start) || size_of(item_of(args[2], i), &limit))
            goto done;
        if (export_pieces(&all, item_of(args[3], i), 0, part)) goto done;
        if (part->size > limit || part->start > memory_bytes ||
            part->size > memory_bytes - part->start) {
            PyErr_SetString(PyExc_OSError, "the memory does not hold so many bytes");
            goto done;
        }
        all_bytes += part->size;
    }
    PyThreadState *state = let_others_run(all_bytes);
    for (Py_ssize_t i = 0; i < many; i++) {
        struct part *part = parts + i;
        uint8_t *to = memory + part->start;
        for (Py_ssize_t piece = 0; piece < part->pieces; piece++) {
            Py_buffer *from = all.buffers + part->first + piece;
            part->crc = copy(part->crc, to, from->buf, (size_t)from->len);
            to += from->len;
        }
    }
    go_on(state);
    result = PyList_New(many);
    for (Py_ssize_t i = 0; result && i < many; i++) {
        PyObject *crc = PyLong_FromUnsignedLong(parts[i].crc);
        if (!crc || PyList_SetItem(result, i, crc)) {
            Py_DECREF(result);
            result = NULL;
        }
    }
done:
    PyMem_Free(parts);
    release(&all);
    return result;
}

/* Copy between buffers, or lists or tuples of them, of equal size. Returns -1 with an error. */
static int copy_pieces(PyObject *to_object, PyObject *from_object, int check, uint32_t *crc) {
    int result = -1;
    struct exported all = {NULL, 0, 0};
    struct part target, source;
    if (export_pieces(&all, to_object, 1, &target) || export_pieces(&all, from_object, 0, &source))
        goto done;
    if (target.size != source.size) {
        PyErr_Format(PyExc_ValueError, "%zd bytes do not fill %zd", (Py_ssize_t)source.size,
                     (Py_ssize_t)target.size);
        goto done;
    }
    result = 0;
    PyThreadState *state = let_others_run(target.size);
    Py_buffer *to = all.buffers + target.first, *from = all.buffers + source.first;
    size_t to_used = 0, from_used = 0;
    for (size_t left = target.size; left;) {
        size_t room = (size_t)to->len - to_used, there = (size_t)from->len - from_used;
        size_t size = room < there ? room : there;
        uint8_t *into = (uint8_t *)to->buf + to_used;
        const uint8_t *out_of = (const uint8_t *)from->buf + from_used;
        if (check)
            *crc = kernel_copy_crc32c(*crc, into, out_of, size);
        else if (size)
            memcpy(into, out_of, size);
        left -= size, to_used += size, from_used += size;
        if (to_used == (size_t)to->len) to++, to_used = 0;
        if (from_used == (size_t)from->len) from++, from_used = 0;
    }
    go_on(state);
done:
    release(&all);
    return result;
}

/* copy(target, source) */
static PyObject *copy(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "copy(target, source)");
        return NULL;
    }
    if (copy_pieces(args[0], args[1], 0, NULL)) return NULL;
    Py_RETURN_NONE;
}

/* copy_crc32c(target, source, crc=0) */
static PyObject *copy_crc32c(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count < 2 || count > 3) {
        PyErr_SetString(PyExc_TypeError, "copy_crc32c(target, source, crc=0)");
        return NULL;
    }
    uint32_t crc = 0;
    if (count == 3 && crc_of(args[2], &crc)) return NULL;
    if (copy_pieces(args[0], args[1], 1, &crc)) return NULL;
    return PyLong_FromUnsignedLong(crc);
}

/* ---- keys */

enum { KEY_BYTES = 32 };

static PyObject *keys_of(const uint8_t *digests, Py_ssize_t count) {
    PyObject *keys = PyList_New(count);
    for (Py_ssize_t i = 0; keys && i < count; i++) {
        PyObject *key = PyBytes_FromStringAndSize((const char *)digests + KEY_BYTES * i, KEY_BYTES);
        if (!key || PyList_SetItem(keys, i, key)) {
            Py_DECREF(keys);
            return NULL;
        }
    }
    return keys;
}

/* The largest token id. */
enum { MOST_ID = 0x7fffffff };

/* Whether a buffer's items are integers in this processor's order, and whether they have a sign.
 * Returns 0 for anything else. */
static int are_integers(const Py_buffer *buffer, int *is_signed) {
    const char *format = buffer->format ? buffer->format : "B";
    if (*format == '@' || *format == '<') format++;
    if (!*format || format[1] || buffer->ndim > 1) return 0;
    *is_signed = strchr("bhilqn", *format) != NULL;
    return *is_signed || strchr("BHILQN", *format) != NULL;
}

/* token_words(tokens): token ids as 32-bit integers: those of a list, a tuple or a buffer. */
static PyObject *token_words(PyObject *self, PyObject *tokens) {
    (void)self;
    PyObject *result = NULL;
    uint32_t *words = NULL;
    uint64_t beyond = 0;
    if (PyList_Check(tokens) || PyTuple_Check(tokens)) {
        Py_ssize_t count = length_of(tokens);
        words = PyMem_Malloc((size_t)count * sizeof *words + 1);
        if (!words) return PyErr_NoMemory();
        /* An item's `__index__` may make the list shorter, which is an error then. */
        PyObject *(*item)(PyObject *, Py_ssize_t) =
            PyList_Check(tokens) ? PyList_GetItem : PyTuple_GetItem;
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *token = item(tokens, i);
            long id = token ? PyLong_AsLong(token) : -1;
            if (id == -1 && PyErr_Occurred()) goto done;
            beyond |= (uint64_t)id & ~(uint64_t)MOST_ID;
            words[i] = (uint32_t)id;
        }
        if (!beyond)
            result = PyBytes_FromStringAndSize((char *)words, count * (Py_ssize_t)sizeof *words);
    } else {
        Py_buffer buffer;
        int is_signed;
        if (PyObject_GetBuffer(tokens, &buffer, PyBUF_CONTIG_RO | PyBUF_FORMAT)) return NULL;
        Py_ssize_t size = buffer.itemsize, count = size ? buffer.len / size : 0;
        int known = are_integers(&buffer, &is_signed) &&
                    (size == 1 || size == 2 || size == 4 || size == 8);
        words = known ? PyMem_Malloc((size_t)count * sizeof *words + 1) : NULL;
        if (words) {
            const uint8_t *at = buffer.buf;
            for (Py_ssize_t i = 0; i < count; i++, at += size) {
                uint64_t id = 0;
                memcpy(&id, at, (size_t)size);
                /* A negative id has its top bit set, which is none of an id's 31. */
                if (is_signed && size < 4 && id >> (8 * size - 1)) beyond = 1;
                beyond |= id & ~(uint64_t)MOST_ID;
                words[i] = (uint32_t)id;
            }
        }
        PyBuffer_Release(&buffer);
        if (!known)
            PyErr_SetString(PyExc_TypeError, "token ids are integers");
        else if (!words)
            PyErr_NoMemory();
        else if (!beyond)
            result = PyBytes_FromStringAndSize((char *)words, count * (Py_ssize_t)sizeof *words);
    }
    if (beyond && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "a token id is in 0 ... 2^31 - 1");
done:
    PyMem_Free(words);
    return result;
}

/* chain_keys(parent, index, tokens, block_tokens): the keys of the complete blocks. */
static PyObject *chain_keys(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "chain_keys(parent, index, tokens, block_tokens)");
        return NULL;
    }
    PyObject *result = NULL;
    uint8_t *digests = NULL;
    struct exported all = {NULL, 0, 0};
    size_t index, block_tokens;
    if (size_of(args[1], &index) || size_of(args[3], &block_tokens)) return NULL;
    Py_buffer *parent = export(&all, args[0], 0);
    if (!parent) goto done;
    const uint8_t *root = parent->buf;
    if (parent->len != KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key is 32 bytes");
        goto done;
    }
    Py_buffer *tokens = export(&all, args[2], 0);
    if (!tokens) goto done;
    const uint8_t *ids = tokens->buf;
    size_t bytes = (size_t)tokens->len;
    if (!block_tokens || block_tokens > (size_t)1 << 40 || bytes % 4) {
        PyErr_SetString(PyExc_ValueError, "tokens are 32-bit integers in blocks of at least one");
        goto done;
    }
    size_t block_bytes = 4 * block_tokens, blocks = bytes / block_bytes;
    if (index > 0xffffffff || blocks > 0x100000000 - index) {
        PyErr_SetString(PyExc_ValueError, "a block index is in 0 ... 2^32 - 1");
        goto done;
    }
    /* The sign of every token that is hashed: an id has 31 bits. */
    uint8_t signs = 0;
    digests = PyMem_Malloc(blocks * KEY_BYTES + 1);
    if (!digests) {
        PyErr_NoMemory();
        goto done;
    }
    Py_BEGIN_ALLOW_THREADS
    for (size_t at = 3; at < blocks * block_bytes; at += 4) signs |= ids[at];
    if (!(signs & 0x80)) kernel_chain(root, (uint32_t)index, ids, block_bytes, blocks, digests);
    Py_END_ALLOW_THREADS
    if (signs & 0x80)
        PyErr_SetString(PyExc_ValueError, "a token id is in 0 ... 2^31 - 1");
    else
        result = keys_of(digests, (Py_ssize_t)blocks);
done:
    PyMem_Free(digests);
    release(&all);
    return result;
}

/* digests(head, ids): SHA-256(head || id) of each. `head` has at most 63 bytes. */
static PyObject *digests(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "digests(head, ids)");
        return NULL;
    }
    Py_ssize_t many = length_of(args[1]);
    if (many < 0) return NULL;
    Py_buffer head;
    if (PyObject_GetBuffer(args[0], &head, PyBUF_SIMPLE)) return NULL;
    PyObject *keys = NULL;
    if (head.len > 63) {
        PyErr_SetString(PyExc_ValueError, "a head has at most 63 bytes");
    } else {
        keys = PyList_New(many);
    }
    for (Py_ssize_t i = 0; keys && i < many; i++) {
        Py_buffer id;
        uint8_t digest[KEY_BYTES];
        PyObject *key = NULL;
        if (!PyObject_GetBuffer(item_of(args[1], i), &id, PyBUF_SIMPLE)) {
            kernel_sha256(head.buf, (size_t)head.len, id.buf, (size_t)id.len, digest);
            PyBuffer_Release(&id);
            key = PyBytes_FromStringAndSize((const char *)digest, KEY_BYTES);
        }
        if (!key || PyList_SetItem(keys, i, key)) {
            Py_DECREF(keys);
            keys = NULL;
        }
    }
    PyBuffer_Release(&head);
    return keys;
}

/* ---- index */

/* The index in an exported buffer: (index, max_heads, rows, multiplier as 16 bytes). */
static int index_of(Py_buffer *buffer, PyObject *const *args, struct kernel_index *index) {
    size_t max_heads, rows;
    Py_buffer multiplier;
    if (size_of(args[1], &max_heads) || size_of(args[2], &rows)) return -1;
    if (PyObject_GetBuffer(args[3], &multiplier, PyBUF_SIMPLE)) return -1;
    int sixteen = multiplier.len == sizeof index->multiplier;
    if (sixteen) memcpy(index->multiplier, multiplier.buf, sizeof index->multiplier);
    PyBuffer_Release(&multiplier);
    size_t size = (size_t)buffer->len;
    if (!sixteen || (uintptr_t)buffer->buf % 8 || !max_heads || size < 4096 ||
        max_heads > (size - 4096) / 4 || max_heads > 0xffffffff || rows > size / ROW_BYTES ||
        rows > 0xffffffff) {
        PyErr_SetString(PyExc_ValueError, "the index is not so large, or lies at an odd address");
        return -1;
    }
    index->data = buffer->buf;
    index->max_heads = (uint32_t)max_heads;
    index->rows = (uint32_t)rows;
    return 0;
}

/* The key in a list or tuple. Borrowed; NULL with an error. */
static const uint8_t *key_of(PyObject *keys, Py_ssize_t i) {
    char *key;
    Py_ssize_t bytes;
    if (PyBytes_AsStringAndSize(item_of(keys, i), &key, &bytes)) return NULL;
    if (bytes != KEY_BYTES) {
        PyErr_SetString(PyExc_ValueError, "a key is 32 bytes");
        return NULL;
    }
    return (const uint8_t *)key;
}

/* What looks some keys up: their index, and room for a row. */
struct search {
    struct exported all;
    struct kernel_index index;
    Py_ssize_t many;
    long stop_at;
    uint8_t *row;
};

/* Begin with the arguments of `find`. `end_search` has to follow, also after -1. */
static int begin_search(struct search *search, PyObject *const *args, Py_ssize_t count) {
    memset(search, 0, sizeof *search);
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "(index, max_heads, rows, multiplier, keys, stop_at)");
        return -1;
    }
    search->many = length_of(args[4]);
    search->stop_at = PyLong_AsLong(args[5]);
    if (search->many < 0 || (search->stop_at == -1 && PyErr_Occurred())) return -1;
    Py_buffer *buffer = export(&search->all, args[0], 0);
    if (!buffer || index_of(buffer, args, &search->index)) return -1;
    search->row = PyMem_Malloc(LONGEST_ROW_BYTES);
    if (!search->row) PyErr_NoMemory();
    return search->row ? 0 : -1;
}

static void end_search(struct search *search) {
    PyMem_Free(search->row);
    release(&search->all);
}

/* find(index, max_heads, rows, multiplier, keys, stop_at): the number and the row of each key, or
 * None; with `stop_at` 1 or 0 it ends with the first key that is there or is not; -1: never. */
static PyObject *find(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    struct search search;
    PyObject *results = begin_search(&search, args, count) ? NULL : PyList_New(0);
    for (Py_ssize_t i = 0; results && i < search.many; i++) {
        const uint8_t *key = key_of(args[4], i);
        size_t row_bytes = 0;
        uint32_t number = key ? kernel_index_find(&search.index, key, search.row, &row_bytes) : 0;
        PyObject *placed = NULL;
        if (number) {
            placed = Py_BuildValue("ky#", (unsigned long)number, search.row, (Py_ssize_t)row_bytes);
        } else if (key) {
            Py_INCREF(Py_None);
            placed = Py_None;
        }
        int added = placed ? PyList_Append(results, placed) : -1;
        Py_XDECREF(placed);
        if (added) {
            Py_DECREF(results);
            results = NULL;
        } else if (search.stop_at >= 0 && search.stop_at == (number != 0)) {
            break;
        }
    }
    end_search(&search);
    return results;
}

/* find_rows(index, max_heads, rows, multiplier, keys, stop_at): the rows that `find` finds, packed:
 * ROW_BYTES each, with the number of the row in place of its link; and the positions of
 * their keys, or None if they are those of the first keys. None in place of both: a row has not
 * exactly one extent. */
static PyObject *find_rows(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    struct search search;
    uint8_t *packed = NULL;
    Py_ssize_t *positions = NULL, found = 0, taken = 0;
    PyObject *result = NULL, *places = NULL, *bytes = NULL;
    if (begin_search(&search, args, count)) goto done;
    packed = PyMem_Malloc((size_t)search.many * ROW_BYTES + 1);
    positions = PyMem_Malloc((size_t)search.many * sizeof *positions + 1);
    if (!packed || !positions) {
        PyErr_NoMemory();
        goto done;
    }
    while (taken < search.many) {
        const uint8_t *key = key_of(args[4], taken);
        size_t row_bytes = 0;
        uint32_t extents;
        if (!key) goto done;
        uint32_t number = kernel_index_find(&search.index, key, search.row, &row_bytes);
        if (number) {
            memcpy(&extents, search.row + EXTENTS_OFFSET, sizeof extents);
            if (extents != 1) {
                Py_INCREF(Py_None);
                result = Py_None;
                goto done;
            }
            uint8_t *room = packed + found * ROW_BYTES;
            memcpy(room, search.row, CHECKED_BYTES);
            memcpy(room + CHECKED_BYTES, &number, sizeof number);
            positions[found++] = taken;
        }
        taken++;
        if (search.stop_at >= 0 && search.stop_at == (number != 0)) break;
    }
    if (found && positions[found - 1] != found - 1) {
        places = PyList_New(found);
        for (Py_ssize_t i = 0; places && i < found; i++) {
            PyObject *position = PyLong_FromSsize_t(positions[i]);
            if (!position || PyList_SetItem(places, i, position)) {
                Py_DECREF(places);
                places = NULL;
            }
        }
        if (!places) goto done;
    }
    bytes = PyBytes_FromStringAndSize((char *)packed, found * ROW_BYTES);
    if (bytes) result = Py_BuildValue("OO", bytes, places ? places : Py_None);
done:
    Py_XDECREF(bytes);
    Py_XDECREF(places);
    PyMem_Free(positions);
    PyMem_Free(packed);
    end_search(&search);
    return result;
}

/* tiers(index, max_heads, rows, multiplier, keys, stop_at): for each key that `find` looks up, the
 * tier in which it is, as a byte; 0: it is not there. */
static PyObject *tiers(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    struct search search;
    uint8_t *numbers = NULL;
    Py_ssize_t taken = 0;
    PyObject *result = NULL;
    if (begin_search(&search, args, count)) goto done;
    numbers = PyMem_Malloc((size_t)search.many + 1);
    if (!numbers) {
        PyErr_NoMemory();
        goto done;
    }
    while (taken < search.many) {
        const uint8_t *key = key_of(args[4], taken);
        size_t row_bytes = 0;
        if (!key) goto done;
        int there = kernel_index_find(&search.index, key, search.row, &row_bytes) != 0;
        numbers[taken++] = there ? search.row[TIER_OFFSET] : 0;
        if (search.stop_at >= 0 && search.stop_at == there) break;
    }
    result = PyBytes_FromStringAndSize((char *)numbers, taken);
done:
    PyMem_Free(numbers);
    end_search(&search);
    return result;
}

/* Rows as `find_rows` returns them, exported. -1 with an error. */
static Py_ssize_t packed_of(struct exported *all, PyObject *object, const uint8_t **rows) {
    Py_buffer *buffer = export(all, object, 0);
    if (!buffer) return -1;
    if (buffer->len % ROW_BYTES) {
        PyErr_SetString(PyExc_ValueError, "packed rows have 96 bytes each");
        return -1;
    }
    *rows = buffer->buf;
    return buffer->len / ROW_BYTES;
}

static uint64_t u64_at(const uint8_t *row, size_t at) {
    uint64_t word;
    memcpy(&word, row + at, sizeof word);
    return word;
}

static uint32_t u32_at(const uint8_t *row, size_t at) {
    uint32_t word;
    memcpy(&word, row + at, sizeof word);
    return word;
}

static int append_number(PyObject *list, Py_ssize_t number) {
    PyObject *object = PyLong_FromSsize_t(number);
    int added = object ? PyList_Append(list, object) : -1;
    Py_XDECREF(object);
    return added;
}

/* moved(index, max_heads, rows, multiplier, packed): the positions of those rows that do not stand
 * in their place any more; None if the index is revoked. */
static PyObject *moved(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "moved(index, max_heads, rows, multiplier, packed)");
        return NULL;
    }
    struct exported all = {NULL, 0, 0};
    struct kernel_index index;
    PyObject *positions = NULL;
    const uint8_t *row;
    Py_buffer *buffer = export(&all, args[0], 0);
    if (!buffer || index_of(buffer, args, &index)) goto done;
    Py_ssize_t many = packed_of(&all, args[4], &row);
    if (many < 0) goto done;
    positions = PyList_New(0);
    for (Py_ssize_t i = 0; positions && i < many; i++, row += ROW_BYTES) {
        uint32_t number = u32_at(row, CHECKED_BYTES);
        if (!kernel_index_stands(&index, number, u64_at(row, KEY_BYTES)) &&
            append_number(positions, i)) {
            Py_DECREF(positions);
            positions = NULL;
        }
    }
    if (positions && !kernel_index_live(&index)) {
        Py_DECREF(positions);
        Py_INCREF(Py_None);
        positions = Py_None;
    }
done:
    release(&all);
    return positions;
}

/* A writer: (index, multiplier, count, free_row, fresh_row, secured_row, shape). */
static int writer_of(struct exported *all, PyObject *const *args, struct kernel_writer *writer) {
    size_t count, free_row, fresh_row, secured_row, shape;
    Py_buffer multiplier;
    Py_buffer *buffer = export(all, args[0], 1);
    if (!buffer || PyObject_GetBuffer(args[1], &multiplier, PyBUF_SIMPLE)) return -1;
    int right = multiplier.len == sizeof writer->multiplier;
    if (right) memcpy(writer->multiplier, multiplier.buf, sizeof writer->multiplier);
    PyBuffer_Release(&multiplier);
    if (size_of(args[2], &count) || size_of(args[3], &free_row) || size_of(args[4], &fresh_row) ||
        size_of(args[5], &secured_row) || size_of(args[6], &shape))
        return -1;
    size_t size = (size_t)buffer->len, rows = size / ROW_BYTES;
    if (!right || (uintptr_t)buffer->buf % 8 || size < 4096 || !count ||
        count > (size - 4096) / 4 || rows > 0xffffffff || free_row >= rows || fresh_row > rows ||
        secured_row > rows) {
        PyErr_SetString(PyExc_ValueError, "the index is not so large, or lies at an odd address");
        return -1;
    }
    writer->data = buffer->buf, writer->rows = (uint32_t)rows, writer->count = (uint32_t)count;
    writer->free_row = (uint32_t)free_row, writer->fresh_row = (uint32_t)fresh_row;
    writer->secured_row = (uint32_t)secured_row, writer->shape = shape;
    return 0;
}

/* Where a number of an entry goes in its row, and how many bytes it has there. */
static const struct field {
    const char *name;
    uint8_t offset, bytes;
} fields[] = {
    {"generation", GENERATION_OFFSET, 8},
    {"payload_crc32c", CRC_OFFSET, 4},
    {"tier", TIER_OFFSET, 1},
    {"reason", REASON_OFFSET, 1},
};
/* The same of the fields of its content (proto/entry.py), which is a tuple of these. */
static const struct field content_fields[] = {
    {"payload_bytes", PAYLOAD_OFFSET, 8},
    {"token_count", TOKENS_OFFSET, 4},
    {"token_ids_bytes", IDS_OFFSET, 4},
    {"layer_count", LAYERS_OFFSET, 2},
};
enum {
    TIER_FIELD = 2,
    REASON_FIELD = 3,
    FIELDS = sizeof fields / sizeof *fields,
    CONTENT_FIELDS = sizeof content_fields / sizeof *content_fields,
};
/* The names of the fields, of the key, of the location and of the content. */
static PyObject *field_names[FIELDS + 3];

/* Write a number to a row. -1: it does not fit; there may be an error. */
static int put_number(PyObject *number, uint8_t *at, int bytes) {
    unsigned long long word = number ? PyLong_AsUnsignedLongLong(number) : 0;
    if (!number || (word == (unsigned long long)-1 && PyErr_Occurred())) return -1;
    if (bytes < 8 && word >> 8 * bytes) return -1;
    memcpy(at, &word, (size_t)bytes); /* the first bytes: little-endian */
    return 0;
}

/* The row of an entry with one extent. -1: it is none, or a number does not fit. */
static int row_of(PyObject *entry, uint8_t *row) {
    char *key;
    Py_ssize_t key_bytes;
    int right = 0;
    PyObject *name = PyObject_GetAttr(entry, field_names[FIELDS]);
    PyObject *location = PyObject_GetAttr(entry, field_names[FIELDS + 1]);
    PyObject *content = PyObject_GetAttr(entry, field_names[FIELDS + 2]);
    memset(row, 0, CHECKED_BYTES);
    if (name && location && content && PyTuple_Check(location) && PyTuple_Size(location) == 2 &&
        PyTuple_Check(content) && PyTuple_Size(content) == CONTENT_FIELDS &&
        !PyBytes_AsStringAndSize(name, &key, &key_bytes) && key_bytes == KEY_BYTES &&
        !put_number(PyTuple_GetItem(location, 0), row + OFFSET_OFFSET, 8) &&
        !put_number(PyTuple_GetItem(location, 1), row + LENGTH_OFFSET, 8)) {
        memcpy(row, key, KEY_BYTES);
        row[EXTENTS_OFFSET] = 1;
        right = 1;
        for (int i = 0; right && i < FIELDS; i++) {
            PyObject *number = PyObject_GetAttr(entry, field_names[i]);
            right = !put_number(number, row + fields[i].offset, fields[i].bytes);
            Py_XDECREF(number);
        }
        for (int i = 0; right && i < CONTENT_FIELDS; i++)
            right = !put_number(PyTuple_GetItem(content, i), row + content_fields[i].offset,
                                content_fields[i].bytes);
    }
    Py_XDECREF(name);
    Py_XDECREF(location);
    Py_XDECREF(content);
    return right ? 0 : -1;
}

/* put_rows(*writer, entries, at): list entries from position `at` on. Returns the position of the
 * first that was not listed, and the writer's free and fresh row. */
static PyObject *put_rows(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 9) {
        PyErr_SetString(PyExc_TypeError, "put_rows(*writer, entries, at)");
        return NULL;
    }
    struct exported all = {NULL, 0, 0};
    struct kernel_writer writer;
    PyObject *result = NULL;
    Py_ssize_t many = length_of(args[7]), at = PyLong_AsSsize_t(args[8]);
    if (many < 0 || (at == -1 && PyErr_Occurred()) || writer_of(&all, args, &writer)) goto done;
    for (; at >= 0 && at < many; at++) {
        uint8_t row[CHECKED_BYTES];
        if (row_of(item_of(args[7], at), row)) {
            /* What it is, or why it is none, the caller finds out. */
            PyErr_Clear();
            break;
        }
        if (kernel_index_put(&writer, row) != PUT_DONE) break;
    }
    kernel_index_published();
    result = Py_BuildValue("nkk", at, (unsigned long)writer.free_row,
                           (unsigned long)writer.fresh_row);
done:
    release(&all);
    return result;
}

/* delete_rows(*writer, keys, at): remove the rows of keys from position `at` on. Returns the
 * position of the first that was not dealt with, how many were listed, and the writer's free row
 * and shape. */
static PyObject *delete_rows(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 9) {
        PyErr_SetString(PyExc_TypeError, "delete_rows(*writer, keys, at)");
        return NULL;
    }
    struct exported all = {NULL, 0, 0};
    struct kernel_writer writer;
    PyObject *result = NULL;
    Py_ssize_t listed = 0, many = length_of(args[7]), at = PyLong_AsSsize_t(args[8]);
    if (many < 0 || (at == -1 && PyErr_Occurred()) || writer_of(&all, args, &writer)) goto done;
    for (Py_ssize_t i = at; i >= 0 && i < many; i++)
        if (!key_of(args[7], i)) goto done;
    for (; at >= 0 && at < many; at++) {
        int done = kernel_index_delete(&writer, key_of(args[7], at));
        if (done == DELETE_OTHERWISE) break;
        listed += done == DELETE_DONE;
    }
    kernel_index_published();
    result = Py_BuildValue("nnkK", at, listed, (unsigned long)writer.free_row,
                           (unsigned long long)writer.shape);
done:
    release(&all);
    return result;
}

/* ---- the journal (`server/core/journal.py` has the layout of a record) */

enum { RECORD_BYTES = 40, RECORD_KEY_BYTES = 16, RECORD_AT = 16, RECORD_SESSION = 24,
       RECORD_PREVIOUS = 28, RECORD_WHAT = 32, RECORD_TIER = 33, RECORD_REASON = 34 };

struct noted {
    uint64_t hash;
    uint8_t key[RECORD_KEY_BYTES], tier, reason;
};

/* What is noted of an entry. -1, with an error: it is none. */
static int noted_of(PyObject *entry, struct noted *noted) {
    char *key;
    Py_ssize_t key_bytes;
    PyObject *name = PyObject_GetAttr(entry, field_names[FIELDS]);
    PyObject *tier = PyObject_GetAttr(entry, field_names[TIER_FIELD]);
    PyObject *reason = PyObject_GetAttr(entry, field_names[REASON_FIELD]);
    int right = 0;
    if (name && tier && reason && !PyBytes_AsStringAndSize(name, &key, &key_bytes)) {
        Py_hash_t hash = PyObject_Hash(name);
        right = key_bytes >= RECORD_KEY_BYTES && (hash != -1 || !PyErr_Occurred()) &&
                !put_number(tier, &noted->tier, 1) && !put_number(reason, &noted->reason, 1);
        noted->hash = (uint64_t)hash;
        if (right) memcpy(noted->key, key, RECORD_KEY_BYTES);
    }
    Py_XDECREF(name);
    Py_XDECREF(tier);
    Py_XDECREF(reason);
    if (!right && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "an entry has another key, tier or reason");
    return right ? 0 : -1;
}

static void mark(uint8_t *bits, uint64_t bit) {
    bits[bit >> 3] |= (uint8_t)(1 << (bit & 7));
}

/* note(ring, last, number, now_ns, session, what, entries, left): write a record of each entry, the
 * first one as record `number`, and mark its key in the Bloom filter `left` unless that is None. */
static PyObject *note(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError,
                        "note(ring, last, number, now_ns, session, what, entries, left)");
        return NULL;
    }
    struct exported all = {NULL, 0, 0};
    struct noted *noted = NULL;
    PyObject *result = NULL;
    uint8_t start[RECORD_BYTES] = {0};
    uint64_t number = PyLong_AsUnsignedLongLong(args[2]);
    int64_t now_ns = PyLong_AsLongLong(args[3]);
    Py_ssize_t many = PyErr_Occurred() ? -1 : length_of(args[6]);
    /* Exported all at once, as more room for them would move the first ones. */
    if (many < 0 || !export(&all, args[0], 1) || !export(&all, args[1], 1) ||
        (args[7] != Py_None && !export(&all, args[7], 1)))
        goto done;
    uint64_t records = (uint64_t)all.buffers[0].len / RECORD_BYTES;
    uint64_t buckets = (uint64_t)all.buffers[1].len / 4;
    uint8_t *ring = all.buffers[0].buf, *last = all.buffers[1].buf, *left = NULL;
    uint64_t bits = 0;
    if (all.count == 3) left = all.buffers[2].buf, bits = 8 * (uint64_t)all.buffers[2].len;
    if (!records || !buckets || buckets & (buckets - 1) || bits & (bits - 1) || (left && !bits) ||
        put_number(args[4], start + RECORD_SESSION, 4) ||
        put_number(args[5], start + RECORD_WHAT, 1)) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_ValueError, "a number does not fit, or a table has an odd size");
        goto done;
    }
    memcpy(start + RECORD_AT, &now_ns, 8);
    noted = PyMem_Malloc(((size_t)many + 1) * sizeof *noted);
    if (!noted) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < many; i++)
        if (noted_of(item_of(args[6], i), noted + i)) goto done;
    for (Py_ssize_t i = 0; i < many; i++) {
        const struct noted *one = noted + i;
        uint8_t *record = ring + number % records * RECORD_BYTES;
        uint8_t *bucket = last + 4 * (one->hash & (buckets - 1));
        uint32_t next = (uint32_t)++number;
        memcpy(record, start, RECORD_BYTES);
        memcpy(record, one->key, RECORD_KEY_BYTES);
        memcpy(record + RECORD_PREVIOUS, bucket, 4);
        record[RECORD_TIER] = one->tier, record[RECORD_REASON] = one->reason;
        memcpy(bucket, &next, 4);
        if (left) {
            mark(left, one->hash & (bits - 1));
            mark(left, one->hash >> 32 & (bits - 1));
        }
    }
    result = Py_None;
    Py_INCREF(result);
done:
    PyMem_Free(noted);
    release(&all);
    return result;
}

/* ---- entries, by their rows */

/* An entry that is copied: where it lies, and how much of it was. */
struct copied {
    struct part part;
    uint32_t expected;
    size_t done;
};

/* Pair packed rows with their targets, exported for writing, and with whether to check each. Every
 * target has to fit into the extent of its row. Returns their number, -1 with an error. */
static Py_ssize_t targets_of(struct exported *all, PyObject *const *args, struct copied **copies) {
    const uint8_t *row;
    Py_ssize_t many = packed_of(all, args[0], &row);
    if (many < 0) return -1;
    Py_ssize_t targets = length_of(args[1]), checks = length_of(args[2]);
    if (targets < 0 || checks < 0) return -1;
    if (targets != many || checks != many) {
        PyErr_SetString(PyExc_ValueError, "there are not as many targets as rows");
        return -1;
    }
    *copies = PyMem_Calloc((size_t)many + 1, sizeof **copies);
    if (!*copies) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t i = 0; i < many; i++, row += ROW_BYTES) {
        struct part *part = &(*copies)[i].part;
        if ((part->check = PyObject_IsTrue(item_of(args[2], i))) < 0) return -1;
        if (export_pieces(all, item_of(args[1], i), 1, part)) return -1;
        part->start = (size_t)u64_at(row, OFFSET_OFFSET);
        (*copies)[i].expected = u32_at(row, CRC_OFFSET);
        if (part->size > u64_at(row, LENGTH_OFFSET)) {
            PyErr_SetString(PyExc_OSError, "an extent does not hold so many bytes");
            return -1;
        }
    }
    return many;
}

/* restore(rows, targets, check, memory): fill each target with the bytes of its row's extent in
 * `memory`. Returns the positions of those with `check` whose CRC32C is not that of the row. */
static PyObject *restore(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 4) {
        PyErr_SetString(PyExc_TypeError, "restore(rows, targets, check, memory)");
        return NULL;
    }
    struct exported all = {NULL, 0, 0};
    struct copied *copies = NULL;
    PyObject *wrong = NULL;
    Py_ssize_t many = targets_of(&all, args, &copies);
    Py_buffer *buffer = many < 0 ? NULL : export(&all, args[3], 0);
    if (!buffer) goto done;
    const uint8_t *memory = buffer->buf;
    size_t memory_bytes = (size_t)buffer->len, all_bytes = 0;
    for (Py_ssize_t i = 0; i < many; i++) {
        struct part *part = &copies[i].part;
        if (part->start > memory_bytes || part->size > memory_bytes - part->start) {
            PyErr_SetString(PyExc_OSError, "the memory does not hold so many bytes");
            goto done;
        }
        all_bytes += part->size;
    }
    PyThreadState *state = let_others_run(all_bytes);
    for (Py_ssize_t i = 0; i < many; i++) {
        struct part *part = &copies[i].part;
        const uint8_t *from = memory + part->start;
        for (Py_ssize_t piece = 0; piece < part->pieces; piece++) {
            Py_buffer *to = all.buffers + part->first + piece;
            size_t size = (size_t)to->len;
            if (part->check)
                part->crc = kernel_copy_crc32c(part->crc, to->buf, from, size);
            else if (size)
                memcpy(to->buf, from, size);
            from += size;
        }
    }
    go_on(state);
    wrong = PyList_New(0);
    for (Py_ssize_t i = 0; wrong && i < many; i++) {
        int right = !copies[i].part.check || copies[i].part.crc == copies[i].expected;
        if (!right && append_number(wrong, i)) {
            Py_DECREF(wrong);
            wrong = NULL;
        }
    }
done:
    PyMem_Free(copies);
    release(&all);
    return wrong;
}

/* Read at once, so that the checksum finds its bytes in the processor's cache. */
enum { READ_BYTES = 256 * 1024, READ_PIECES = 64 };

/* Read what the page cache has of a file, from `offset` on, into the pieces of a part. Returns the
 * number of bytes up to the first that it lacks; their CRC32C, if it is wanted, goes on in `crc`. */
static size_t read_cached(int fd, const Py_buffer *pieces, struct part *part) {
    size_t done = 0;
#ifdef RWF_NOWAIT
    Py_ssize_t piece = 0;
    size_t used = 0; /* of that piece */
    while (done < part->size) {
        struct iovec places[READ_PIECES];
        int count = 0;
        size_t wanted = 0, from = used;
        for (Py_ssize_t i = piece; i < part->pieces && count < READ_PIECES && wanted < READ_BYTES;
             i++, from = 0) {
            size_t there = (size_t)pieces[i].len - from, most = READ_BYTES - wanted;
            if (!there) continue;
            places[count].iov_base = (uint8_t *)pieces[i].buf + from;
            places[count].iov_len = there < most ? there : most;
            wanted += places[count++].iov_len;
        }
        ssize_t got = preadv2(fd, places, count, (off_t)(part->start + done), RWF_NOWAIT);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) break; /* not cached, or an error that whoever waits for the device reports */
        done += (size_t)got;
        for (size_t left = (size_t)got; left;) {
            size_t there = (size_t)pieces[piece].len - used, size = left < there ? left : there;
            const uint8_t *at = (const uint8_t *)pieces[piece].buf + used;
            if (part->check) part->crc = kernel_crc32c(part->crc, at, size);
            left -= size, used += size;
            if (used == (size_t)pieces[piece].len) piece++, used = 0;
        }
    }
#else
    (void)fd, (void)pieces, (void)part;
#endif
    return done;
}

/* read_rows(rows, targets, check, fd, most_bytes): fill targets from the file, in this order, as far
 * as its page cache has them, and no further than `most_bytes` and the rest of one target. Never
 * waits for the device. Returns how many were filled, and the positions among them of those with
 * `check` whose CRC32C is not that of the row. The next one may be filled in part. */
static PyObject *read_rows(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "read_rows(rows, targets, check, fd, most_bytes)");
        return NULL;
    }
    struct exported all = {NULL, 0, 0};
    struct copied *copies = NULL;
    PyObject *wrong = NULL, *result = NULL;
    size_t most, total = 0;
    long fd = PyLong_AsLong(args[3]);
    if ((fd == -1 && PyErr_Occurred()) || size_of(args[4], &most)) return NULL;
    Py_ssize_t done = 0, many = targets_of(&all, args, &copies);
    if (many < 0) goto done;
    for (Py_ssize_t i = 0; i < many; i++) {
        if (copies[i].part.start > (size_t)PY_SSIZE_T_MAX - copies[i].part.size) {
            PyErr_SetString(PyExc_OSError, "a file does not hold so many bytes");
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    while (done < many && total < most) {
        struct part *part = &copies[done].part;
        if (read_cached((int)fd, all.buffers + part->first, part) < part->size) break;
        total += part->size, done++;
    }
    Py_END_ALLOW_THREADS
    wrong = PyList_New(0);
    for (Py_ssize_t i = 0; wrong && i < done; i++) {
        int right = !copies[i].part.check || copies[i].part.crc == copies[i].expected;
        if (!right && append_number(wrong, i)) goto done;
    }
    if (wrong) result = Py_BuildValue("nO", done, wrong);
done:
    Py_XDECREF(wrong);
    PyMem_Free(copies);
    release(&all);
    return result;
}

/* ---- forms */

static PyObject *named(const char *const *names) {
    PyObject *list = PyList_New(0);
    for (; list && *names; names++) {
        PyObject *name = PyUnicode_FromString(*names);
        if (!name || PyList_Append(list, name)) {
            Py_DECREF(list);
            list = NULL;
        }
        Py_XDECREF(name);
    }
    return list;
}

static PyObject *forms(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *checksums = named(kernel_checksum_forms()), *hashes = named(kernel_hash_forms());
    PyObject *both = checksums && hashes ? PyTuple_Pack(2, checksums, hashes) : NULL;
    Py_XDECREF(checksums);
    Py_XDECREF(hashes);
    return both;
}

static PyObject *form(PyObject *self, PyObject *none) {
    (void)self, (void)none;
    PyObject *checksum = PyUnicode_FromString(kernel_checksum_form());
    PyObject *hash = PyUnicode_FromString(kernel_hash_form());
    PyObject *both = checksum && hash ? PyTuple_Pack(2, checksum, hash) : NULL;
    Py_XDECREF(checksum);
    Py_XDECREF(hash);
    return both;
}

static PyObject *use(PyObject *self, PyObject *args) {
    (void)self;
    const char *checksum, *hash;
    if (!PyArg_ParseTuple(args, "ss", &checksum, &hash)) return NULL;
    if (!kernel_use_checksum(checksum) || !kernel_use_hash(hash)) {
        PyErr_SetString(PyExc_ValueError, "this form does not run on this processor");
        return NULL;
    }
    Py_RETURN_NONE;
}

#define FAST(function) {#function, (PyCFunction)(void (*)(void))function, METH_FASTCALL, NULL}

static PyMethodDef methods[] = {
    FAST(flat),
    FAST(crc32c),
    FAST(copy),
    FAST(copy_crc32c),
    FAST(gather),
    {"token_words", token_words, METH_O, NULL},
    FAST(chain_keys),
    FAST(digests),
    FAST(find),
    FAST(find_rows),
    FAST(tiers),
    FAST(moved),
    FAST(put_rows),
    FAST(delete_rows),
    FAST(note),
    FAST(restore),
    FAST(read_rows),
    {"forms", forms, METH_NOARGS, NULL},
    {"form", form, METH_NOARGS, NULL},
    {"use", use, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int begin(PyObject *module) {
    static const char *const others[] = {"key", "location", "content"};
    for (int i = 0; i < FIELDS + 3; i++) {
        const char *name = i < FIELDS ? fields[i].name : others[i - FIELDS];
        if (!field_names[i]) field_names[i] = PyUnicode_InternFromString(name);
        if (!field_names[i]) return -1;
    }
    return PyModule_AddIntConstant(module, "ABI", KERNEL_ABI);
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, begin}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "prefixd.proto._native", NULL, 0, methods, slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
