/* Records all changes of the files below a directory: writes with their bytes, syncs, and changes
 * of names. Preloaded into the daemon and inherited by its processes.
 *
 *     PREFIXD_POWER_ROOT  the directory, absolute
 *     PREFIXD_POWER_LOG   the file that gets the records
 *
 * One record is appended before a call begins, and one after it has ended. The call's number joins
 * the two. Each record is one write in append mode, so the log has a consistent order over all
 * threads and processes. tests/power/recording.py reads it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITE = 1, RESIZE, EXTEND, PUNCH, SYNC, CREATE, RENAME, UNLINK, MKDIR, RMDIR, END };

struct record {
    uint32_t magic, kind;
    uint64_t number, inode;
    int64_t offset, result;
    uint64_t length; /* of the data that follows: written bytes, or names */
};

static char root[4096];
static size_t root_length;
static int log_fd = -1;
static atomic_uint_fast32_t count;

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name)
{
    void *found = dlsym(RTLD_NEXT, name);
    if (!found)
        abort();
    return found;
}

static void emit(int kind, uint64_t number, uint64_t inode, int64_t offset, int64_t result,
                 const void *data, size_t length)
{
    struct record record = {0x504c5750, (uint32_t)kind, number, inode, offset, result, length};
    struct iovec parts[2] = {{&record, sizeof record}, {(void *)data, length}};
    int before = errno;
    if (REAL(writev)(log_fd, parts, length ? 2 : 1) != (ssize_t)(sizeof record + length))
        abort(); /* with a missing record, every verdict would be worthless */
    errno = before;
}

static uint64_t next_number(void)
{
    return (uint64_t)getpid() << 32 | (uint32_t)atomic_fetch_add(&count, 1);
}

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("PREFIXD_POWER_LOG"), *below = getenv("PREFIXD_POWER_ROOT");
    if (!path || !below || strlen(below) + 2 > sizeof root)
        return;
    snprintf(root, sizeof root, "%s/", below);
    root_length = strlen(root);
    log_fd = REAL(open)(path, O_WRONLY | O_APPEND | O_CLOEXEC);
}

/* The path of a descriptor relative to the root. NULL: it is outside the root. */
static const char *below_root(int fd, char *room, size_t length)
{
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t found = readlink(link, room, length - 1);
    if (found < 0)
        return NULL;
    room[found] = 0;
    if (!strncmp(room, root, root_length))
        return room + root_length;
    /* the root itself */
    if ((size_t)found == root_length - 1 && !strncmp(room, root, root_length - 1))
        return "";
    return NULL;
}

/* The inode of a recorded file or directory. 0: it is not recorded. */
static uint64_t recorded(int fd)
{
    struct stat found;
    char room[4096];
    int before = errno;
    uint64_t inode = 0;
    if (log_fd >= 0 && fd != log_fd && !fstat(fd, &found) &&
        (S_ISREG(found.st_mode) || S_ISDIR(found.st_mode)) && below_root(fd, room, sizeof room))
        inode = found.st_ino;
    errno = before;
    return inode;
}

/* A path relative to the root. NULL: it is outside the root. */
static const char *named(int at, const char *path, char *room, size_t length)
{
    if (log_fd < 0 || !path)
        return NULL;
    if (path[0] != '/') {
        char base[4096];
        if (at == AT_FDCWD) {
            if (!getcwd(base, sizeof base))
                return NULL;
        } else {
            char link[64];
            snprintf(link, sizeof link, "/proc/self/fd/%d", at);
            ssize_t found = readlink(link, base, sizeof base - 1);
            if (found < 0)
                return NULL;
            base[found] = 0;
        }
        if ((size_t)snprintf(room, length, "%s/%s", base, path) >= length)
            return NULL;
    } else if ((size_t)snprintf(room, length, "%s", path) >= length)
        return NULL;
    return strncmp(room, root, root_length) ? NULL : room + root_length;
}

/* ---- bytes */

#define BEGUN(kind, inode, offset, result, data, length) \
    uint64_t number = next_number();                     \
    emit(kind, number, inode, offset, result, data, length)
#define ENDED(result)                                    \
    emit(END, number, inode, 0, result, NULL, 0)

#define PWRITE(name, offset_type)                                                \
    ssize_t name(int fd, const void *data, size_t length, offset_type offset)    \
    {                                                                            \
        uint64_t inode = recorded(fd);                                           \
        if (!inode)                                                              \
            return REAL(name)(fd, data, length, offset);                         \
        BEGUN(WRITE, inode, offset, 0, data, length);                            \
        ssize_t result = REAL(name)(fd, data, length, offset);                   \
        ENDED(result);                                                           \
        return result;                                                           \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

static int64_t position(int fd)
{
    if (fcntl(fd, F_GETFL) & O_APPEND) {
        struct stat found;
        return fstat(fd, &found) ? 0 : found.st_size;
    }
    return lseek(fd, 0, SEEK_CUR);
}

ssize_t write(int fd, const void *data, size_t length)
{
    uint64_t inode = recorded(fd);
    if (!inode)
        return REAL(write)(fd, data, length);
    BEGUN(WRITE, inode, position(fd), 0, data, length);
    ssize_t result = REAL(write)(fd, data, length);
    ENDED(result);
    return result;
}

static void *joined(const struct iovec *parts, int many, size_t *length)
{
    *length = 0;
    for (int i = 0; i < many; i++)
        *length += parts[i].iov_len;
    char *data = malloc(*length + 1), *end = data;
    if (!data)
        abort();
    for (int i = 0; i < many; i++)
        end = mempcpy(end, parts[i].iov_base, parts[i].iov_len);
    return data;
}

ssize_t writev(int fd, const struct iovec *parts, int many)
{
    uint64_t inode = recorded(fd);
    if (!inode)
        return REAL(writev)(fd, parts, many);
    size_t length;
    void *data = joined(parts, many, &length);
    BEGUN(WRITE, inode, position(fd), 0, data, length);
    free(data);
    ssize_t result = REAL(writev)(fd, parts, many);
    ENDED(result);
    return result;
}

#define PWRITEV(name, offset_type)                                                    \
    ssize_t name(int fd, const struct iovec *parts, int many, offset_type offset)     \
    {                                                                                 \
        uint64_t inode = recorded(fd);                                                \
        if (!inode)                                                                   \
            return REAL(name)(fd, parts, many, offset);                               \
        size_t length;                                                                \
        void *data = joined(parts, many, &length);                                    \
        BEGUN(WRITE, inode, offset, 0, data, length);                                 \
        free(data);                                                                   \
        ssize_t result = REAL(name)(fd, parts, many, offset);                         \
        ENDED(result);                                                                \
        return result;                                                                \
    }
PWRITEV(pwritev, off_t)
PWRITEV(pwritev64, off64_t)

/* ---- sizes */

#define FTRUNCATE(name, offset_type)                             \
    int name(int fd, offset_type size)                           \
    {                                                            \
        uint64_t inode = recorded(fd);                           \
        if (!inode)                                              \
            return REAL(name)(fd, size);                         \
        BEGUN(RESIZE, inode, size, 0, NULL, 0);                  \
        int result = REAL(name)(fd, size);                       \
        ENDED(result);                                           \
        return result;                                           \
    }
FTRUNCATE(ftruncate, off_t)
FTRUNCATE(ftruncate64, off64_t)

#define POSIX_FALLOCATE(name, offset_type)                       \
    int name(int fd, offset_type start, offset_type length)      \
    {                                                            \
        uint64_t inode = recorded(fd);                           \
        if (!inode)                                              \
            return REAL(name)(fd, start, length);                \
        BEGUN(EXTEND, inode, start, length, NULL, 0);            \
        int result = REAL(name)(fd, start, length);              \
        ENDED(result ? -1 : 0);                                  \
        return result;                                           \
    }
POSIX_FALLOCATE(posix_fallocate, off_t)
POSIX_FALLOCATE(posix_fallocate64, off64_t)

#define FALLOCATE(name, offset_type)                                                      \
    int name(int fd, int mode, offset_type start, offset_type length)                     \
    {                                                                                     \
        uint64_t inode = recorded(fd);                                                    \
        if (!inode)                                                                       \
            return REAL(name)(fd, mode, start, length);                                   \
        if (mode && mode != (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE))                 \
            abort(); /* the reader does not know this mode */                        \
        BEGUN(mode ? PUNCH : EXTEND, inode, start, length, NULL, 0);                      \
        int result = REAL(name)(fd, mode, start, length);                                 \
        ENDED(result);                                                                    \
        return result;                                                                    \
    }
FALLOCATE(fallocate, off_t)
FALLOCATE(fallocate64, off64_t)

/* ---- syncs */

#define SYNCING(name)                                            \
    int name(int fd)                                             \
    {                                                            \
        uint64_t inode = recorded(fd);                           \
        if (!inode)                                              \
            return REAL(name)(fd);                               \
        char room[4096];                                         \
        const char *path = below_root(fd, room, sizeof room);    \
        BEGUN(SYNC, inode, 0, 0, path, path ? strlen(path) : 0); \
        int result = REAL(name)(fd);                             \
        ENDED(result);                                           \
        return result;                                           \
    }
SYNCING(fsync)
SYNCING(fdatasync)

/* ---- names */

static void opened(int fd, int flags, const char *name, int existed)
{
    struct stat found;
    if (fd < 0 || !name || fstat(fd, &found) || !S_ISREG(found.st_mode))
        return;
    uint64_t inode = found.st_ino;
    if (!existed) {
        BEGUN(CREATE, inode, 0, 0, name, strlen(name));
        ENDED(0);
    } else if (flags & O_TRUNC) {
        BEGUN(RESIZE, inode, 0, 0, NULL, 0);
        ENDED(0);
    }
}

#define OPENAT(name)                                                               \
    int name(int at, const char *path, int flags, ...)                             \
    {                                                                              \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                              \
        char room[8192];                                                           \
        const char *found = NULL;                                                  \
        int existed = 0;                                                           \
        if (flags & (O_CREAT | O_TRUNC) && (found = named(at, path, room, sizeof room))) \
            existed = !faccessat(at, path, F_OK, AT_SYMLINK_NOFOLLOW);             \
        int fd = REAL(name)(at, path, flags, mode);                                \
        int before = errno;                                                        \
        opened(fd, flags, found, existed);                                         \
        errno = before;                                                            \
        return fd;                                                                 \
    }
OPENAT(openat)
OPENAT(openat64)

#define OPEN(name)                                                                 \
    int name(const char *path, int flags, ...)                                     \
    {                                                                              \
        va_list rest;                                                              \
        va_start(rest, flags);                                                     \
        mode_t mode = flags & (O_CREAT | O_TMPFILE) ? va_arg(rest, mode_t) : 0;    \
        va_end(rest);                                                              \
        return openat(AT_FDCWD, path, flags, mode);                                \
    }
OPEN(open)
OPEN(open64)

int renameat(int from_at, const char *from, int to_at, const char *to)
{
    char rooms[2][8192], both[16384];
    const char *before = named(from_at, from, rooms[0], sizeof rooms[0]);
    const char *after = named(to_at, to, rooms[1], sizeof rooms[1]);
    if (!before && !after)
        return REAL(renameat)(from_at, from, to_at, to);
    if (!before || !after)
        abort(); /* the reader would not know the bytes of a file from outside the root */
    size_t length = strlen(before) + 1 + strlen(after);
    memcpy(both, before, strlen(before) + 1);
    memcpy(both + strlen(before) + 1, after, strlen(after));
    uint64_t inode = 0;
    BEGUN(RENAME, inode, 0, 0, both, length);
    int result = REAL(renameat)(from_at, from, to_at, to);
    ENDED(result);
    return result;
}

int rename(const char *from, const char *to)
{
    return renameat(AT_FDCWD, from, AT_FDCWD, to);
}

#define NAMING(kind, call, at, path)                             \
    char room[8192];                                             \
    const char *found = named(at, path, room, sizeof room);      \
    if (!found)                                                  \
        return call;                                             \
    uint64_t inode = 0;                                          \
    BEGUN(kind, inode, 0, 0, found, strlen(found));              \
    int result = call;                                           \
    ENDED(result);                                               \
    return result

int unlinkat(int at, const char *path, int flags)
{
    NAMING(flags & AT_REMOVEDIR ? RMDIR : UNLINK, REAL(unlinkat)(at, path, flags), at, path);
}

int unlink(const char *path)
{
    return unlinkat(AT_FDCWD, path, 0);
}

int rmdir(const char *path)
{
    return unlinkat(AT_FDCWD, path, AT_REMOVEDIR);
}

int mkdirat(int at, const char *path, mode_t mode)
{
    NAMING(MKDIR, REAL(mkdirat)(at, path, mode), at, path);
}

int mkdir(const char *path, mode_t mode)
{
    return mkdirat(AT_FDCWD, path, mode);
}
