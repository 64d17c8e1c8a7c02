"""Makes the calls of `tiers.file_calls`: the process that it starts.

It may wait for a device for ever, inside a call that nothing interrupts. So it holds nothing but
the files of calls that are under way, and imports little. It ends when the daemon has.

Arguments: the descriptor of the shared memory, and that of a socket for each thread. A request is
the name of a call and its arguments (`marshal`), with the descriptor that it is for, and that of
its lock, if it has one, to be held during the call. The answer is the result, or None, and the
number of the error, or 0. One of `open` carries the new descriptor.
"""

import _thread
import array
import fcntl
import marshal
import mmap
import os
import signal
import socket
import sys

_DESCRIPTOR_BYTES = array.array("i").itemsize
_MAX_REQUEST_BYTES = 8192


class Files:
    """The calls. Each takes the descriptor that came with the request, or -1."""

    fsync, fdatasync, ftruncate, fchmod = os.fsync, os.fdatasync, os.ftruncate, os.fchmod
    posix_fallocate = os.posix_fallocate

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def open(self, _: int, path: bytes, flags: int, mode: int) -> int:
        return os.open(path, flags, mode)

    def unlink(self, _: int, path: bytes) -> None:
        os.unlink(path)

    def pwrite(self, fd: int, start: int, length: int, offset: int) -> int:
        written = 0
        while written < length:
            piece = self._memory[start + written : start + length]
            written += os.pwrite(fd, piece, offset + written)
        return written

    def pwrite_all(self, fd: int, start: int, lengths: list[int], offsets: list[int]) -> None:
        for length, offset in zip(lengths, offsets, strict=True):
            self.pwrite(fd, start, length, offset)
            start += length

    def preadv(self, fd: int, start: int, length: int, offset: int) -> int:
        return os.preadv(fd, [self._memory[start : start + length]], offset)

    def drop_cached(self, fd: int, start: int, length: int) -> None:
        os.posix_fadvise(fd, start, length, os.POSIX_FADV_DONTNEED)

    def punch_hole(self, fd: int, mode: int, start: int, length: int) -> None:
        import ctypes  # rarely needed

        libc = ctypes.CDLL(None, use_errno=True)
        libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
        if libc.fallocate(fd, mode, start, length):
            raise OSError(ctypes.get_errno(), "")

    def flock(self, fd: int) -> None:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def answer(files: Files, connection: socket.socket) -> bool:
    """Answer one request. False: the daemon has ended."""
    request, got, _, _ = connection.recvmsg(
        _MAX_REQUEST_BYTES, socket.CMSG_SPACE(2 * _DESCRIPTOR_BYTES)
    )
    if not request:
        return False
    fds = array.array("i", b"".join(data for _, _, data in got))
    name, *arguments = marshal.loads(request)
    result = error = None
    opened = []
    try:
        result = getattr(files, name)(fds[0] if fds else -1, *arguments)
        if name == "open":
            opened = [result]
    except OSError as problem:
        error = problem.errno
    finally:
        for fd in fds:
            os.close(fd)
    carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", opened))] if opened else []
    connection.sendmsg([marshal.dumps((result, error or 0))], carried)
    for fd in opened:
        os.close(fd)
    return True


def serve(files: Files, connection: socket.socket) -> None:
    """Ends the process with the daemon. Calls that are under way then are no longer needed."""
    try:
        while answer(files, connection):
            pass
    finally:
        os._exit(0)


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # These are for the daemon, which still has to write.
        signal.signal(number, signal.SIG_IGN)
    memory_fd, first, *others = map(int, sys.argv[1:])
    files = Files(memoryview(mmap.mmap(memory_fd, os.fstat(memory_fd).st_size)))
    for fd in others:
        _thread.start_new_thread(serve, (files, socket.socket(fileno=fd)))
    serve(files, socket.socket(fileno=first))


if __name__ == "__main__":
    main()
