/* The kernel for Python: checks types, sizes and offsets, then works without the GIL.
 *
 * Every function checks all of its arguments before the first byte moves. Buffers are exported for
 * the time of a call. `proto/kernel.py` says what each function returns.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "kernel.h"

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
    uint32_t found;
    if (data.len < 16384) {
        found = kernel_crc32c(crc, data.buf, (size_t)data.len);
    } else {
        Py_BEGIN_ALLOW_THREADS
        found = kernel_crc32c(crc, data.buf, (size_t)data.len);
        Py_END_ALLOW_THREADS
    }
    PyBuffer_Release(&data);
    return PyLong_FromUnsignedLong(found);
}

/* The direction of `move`: out of one memory into many places, or the other way. */
enum { SCATTER, GATHER };

/* scatter(memory, starts, limits, targets, check) and gather(memory, starts, limits, sources,
 * check): copy between `memory[start : start + size]` and each target or source, whose size is at
 * most `limit`. Returns a CRC32C, or None without `check`, for each. */
static PyObject *move(PyObject *const *args, Py_ssize_t count, int direction) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "(memory, starts, limits, buffers, check)");
        return NULL;
    }
    PyObject *result = NULL;
    struct exported all = {NULL, 0, 0};
    struct part *parts = NULL;
    Py_ssize_t many = length_of(args[3]);
    if (many < 0) return NULL;
    for (int i = 1; i < 5; i++) {
        Py_ssize_t length = length_of(args[i]);
        if (length < 0) return NULL;
        if (length != many) {
            PyErr_SetString(PyExc_ValueError, "one list is shorter than the others");
            return NULL;
        }
    }
    Py_buffer *buffer = export(&all, args[0], direction == GATHER);
    if (!buffer) goto done;
    uint8_t *memory = buffer->buf; /* the array of buffers may move */
    size_t memory_bytes = (size_t)buffer->len;
    parts = PyMem_Calloc((size_t)many + 1, sizeof *parts);
    if (!parts) {
        PyErr_NoMemory();
        goto done;
    }
    for (Py_ssize_t i = 0; i < many; i++) {
        struct part *part = parts + i;
        size_t limit;
        if (size_of(item_of(args[1], i), &part->start) || size_of(item_of(args[2], i), &limit))
            goto done;
        if ((part->check = PyObject_IsTrue(item_of(args[4], i))) < 0) goto done;
        if (export_pieces(&all, item_of(args[3], i), direction == SCATTER, part)) goto done;
        if (part->size > limit || part->start > memory_bytes ||
            part->size > memory_bytes - part->start) {
            PyErr_SetString(PyExc_OSError, "the memory does not hold so many bytes");
            goto done;
        }
    }
    Py_BEGIN_ALLOW_THREADS
    for (Py_ssize_t i = 0; i < many; i++) {
        struct part *part = parts + i;
        uint8_t *at = memory + part->start;
        for (Py_ssize_t piece = 0; piece < part->pieces; piece++) {
            Py_buffer *other = all.buffers + part->first + piece;
            size_t size = (size_t)other->len;
            uint8_t *to = direction == SCATTER ? other->buf : at;
            const uint8_t *from = direction == SCATTER ? at : other->buf;
            if (part->check)
                part->crc = kernel_copy_crc32c(part->crc, to, from, size);
            else if (size)
                memcpy(to, from, size);
            at += size;
        }
    }
    Py_END_ALLOW_THREADS
    result = PyList_New(many);
    for (Py_ssize_t i = 0; result && i < many; i++) {
        PyObject *crc = NULL;
        if (parts[i].check) {
            crc = PyLong_FromUnsignedLong(parts[i].crc);
        } else {
            Py_INCREF(Py_None);
            crc = Py_None;
        }
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

static PyObject *scatter(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    return move(args, count, SCATTER);
}

static PyObject *gather(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    return move(args, count, GATHER);
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
    Py_BEGIN_ALLOW_THREADS
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
    Py_END_ALLOW_THREADS
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

/* find(index, max_heads, rows, multiplier, keys, stop_at): the number and the row of each key, or
 * None; with `stop_at` 1 or 0 it ends with the first key that is there or is not; -1: never. */
static PyObject *find(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 6) {
        PyErr_SetString(PyExc_TypeError, "find(index, max_heads, rows, multiplier, keys, stop_at)");
        return NULL;
    }
    Py_ssize_t many = length_of(args[4]);
    long stop_at = PyLong_AsLong(args[5]);
    if (many < 0 || (stop_at == -1 && PyErr_Occurred())) return NULL;
    struct exported all = {NULL, 0, 0};
    struct kernel_index index;
    PyObject *results = NULL;
    uint8_t *row = NULL;
    Py_buffer *buffer = export(&all, args[0], 0);
    if (!buffer || index_of(buffer, args, &index)) goto done;
    row = PyMem_Malloc(LONGEST_ROW_BYTES);
    if (!row) {
        PyErr_NoMemory();
        goto done;
    }
    results = PyList_New(0);
    for (Py_ssize_t i = 0; results && i < many; i++) {
        Py_buffer key;
        size_t row_bytes = 0;
        uint32_t number = 0;
        PyObject *placed = NULL;
        if (!PyObject_GetBuffer(item_of(args[4], i), &key, PyBUF_SIMPLE)) {
            if (key.len == KEY_BYTES)
                number = kernel_index_find(&index, key.buf, row, &row_bytes);
            else
                PyErr_SetString(PyExc_ValueError, "a key is 32 bytes");
            PyBuffer_Release(&key);
        }
        if (!PyErr_Occurred()) {
            if (number) {
                PyObject *bytes = PyBytes_FromStringAndSize((char *)row, (Py_ssize_t)row_bytes);
                PyObject *place = bytes ? PyLong_FromUnsignedLong(number) : NULL;
                placed = place ? PyTuple_Pack(2, place, bytes) : NULL;
                Py_XDECREF(place);
                Py_XDECREF(bytes);
            } else {
                Py_INCREF(Py_None);
                placed = Py_None;
            }
        }
        int added = placed ? PyList_Append(results, placed) : -1;
        Py_XDECREF(placed);
        if (added) {
            Py_DECREF(results);
            results = NULL;
        } else if (stop_at >= 0 && stop_at == (number != 0)) {
            break;
        }
    }
done:
    PyMem_Free(row);
    release(&all);
    return results;
}

/* moved(index, max_heads, rows, multiplier, placed): the positions of those that do not stand in
 * their place any more; None if the index is revoked. */
static PyObject *moved(PyObject *self, PyObject *const *args, Py_ssize_t count) {
    (void)self;
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "moved(index, max_heads, rows, multiplier, placed)");
        return NULL;
    }
    Py_ssize_t many = length_of(args[4]);
    if (many < 0) return NULL;
    struct exported all = {NULL, 0, 0};
    struct kernel_index index;
    PyObject *positions = NULL;
    Py_buffer *buffer = export(&all, args[0], 0);
    if (!buffer || index_of(buffer, args, &index)) goto done;
    positions = PyList_New(0);
    for (Py_ssize_t i = 0; positions && i < many; i++) {
        PyObject *placed = item_of(args[4], i);
        size_t number = 0;
        uint64_t generation = 0;
        char *row;
        Py_ssize_t row_bytes;
        int right = PyTuple_Check(placed) && PyTuple_Size(placed) == 2 &&
                    !size_of(PyTuple_GetItem(placed, 0), &number) &&
                    !PyBytes_AsStringAndSize(PyTuple_GetItem(placed, 1), &row, &row_bytes) &&
                    row_bytes >= CHECKED_BYTES;
        if (!right) {
            if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "a row that was found");
        } else {
            memcpy(&generation, row + KEY_BYTES, sizeof generation);
        }
        int stands = right && number <= 0xffffffff &&
                     kernel_index_stands(&index, (uint32_t)number, generation);
        PyObject *position = right && !stands ? PyLong_FromSsize_t(i) : NULL;
        if (!right || (!stands && (!position || PyList_Append(positions, position)))) {
            Py_DECREF(positions);
            positions = NULL;
        }
        Py_XDECREF(position);
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
    FAST(crc32c),
    FAST(copy),
    FAST(copy_crc32c),
    FAST(scatter),
    FAST(gather),
    FAST(chain_keys),
    FAST(digests),
    FAST(find),
    FAST(moved),
    {"forms", forms, METH_NOARGS, NULL},
    {"form", form, METH_NOARGS, NULL},
    {"use", use, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "prefixd.proto._native", NULL, 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
