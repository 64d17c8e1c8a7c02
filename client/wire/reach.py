"""Finds a daemon, and checks whose it is before anything is sent to it.

The kernel says which user listens on a Unix socket (SO_PEERCRED), but only to the process that
connects, and gRPC connects by itself. So the socket's inode is opened first: this check and gRPC
then both connect through the descriptor, to the same socket, whatever becomes of its name.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ...proto.endpoints import UNIX_SCHEME, socket_path
from ...proto.errors import DaemonUnavailable
from ...proto.trust import peer_uid, why_no_place, why_no_server

_TIMEVAL: Final = struct.Struct("@ll")
#: Words in the reasons, for those who give advice.
DENIED: Final = "permission denied"
NOT_RELIED_ON: Final = "its server is not relied on"
_WHY: Final = {
    errno.ENOENT: "there is no such socket",
    errno.ENOTDIR: "there is no such socket",
    errno.ECONNREFUSED: "no process listens there",
    errno.EACCES: f"{DENIED}: its mode or its directory does not admit this user",
    errno.EPERM: DENIED,
    errno.EAGAIN: "it takes no connection",
    errno.ETIMEDOUT: "it takes no connection",
}


def what_to_do(why: str) -> str:
    """The next step of a user whose client found no daemon."""
    if DENIED in why:
        return "Run this as the daemon's user, or set its option server.socket_mode"
    if NOT_RELIED_ON in why:
        return "Run this as that user"
    return "Start one with `prefixd`, or say where it is: Client(address), or $PREFIXD_ADDRESS"


class Reached:
    """A daemon's address that gRPC may connect to until it is closed."""

    def __init__(self, address: str, fd: int = -1) -> None:
        self.address: Final = address
        self._fd = fd

    @property
    def target(self) -> str:
        """What gRPC is given in place of the address."""
        return self.address if self._fd < 0 else f"{UNIX_SCHEME}/proc/self/fd/{self._fd}"

    @property
    def there(self) -> bool:
        """Whether it is still what is at its address: a daemon that starts makes other sockets."""
        path = socket_path(self.address)
        if path is None:
            return True
        try:
            return self._fd >= 0 and os.path.samestat(path.stat(), os.fstat(self._fd))
        except OSError:
            return False

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def reach(addresses: Sequence[str], within_s: float) -> Reached:
    """The first address at which a daemon listens that this process may rely on. An address of TCP
    is taken as it is. With several addresses, whose places nobody named, those are checked too.

    Raises DaemonUnavailable, which says why for each.
    """
    problems = []
    for address in addresses:
        path = socket_path(address)
        if path is None:
            return Reached(address)
        why = why_no_place(path.parent) if len(addresses) > 1 else ""
        if not why:
            try:
                return Reached(address, _checked(path, within_s))
            except OSError as problem:
                why = why_not(problem)
        problems.append(f"{address}: {why}")
    if len(problems) == 1:
        raise DaemonUnavailable(f"no daemon at {problems[0]}")
    raise DaemonUnavailable(f"no daemon at any of the default addresses: {'; '.join(problems)}")


def connect(path: str | Path, within_s: float) -> socket.socket:
    """A connection to a Unix socket whose server this process may rely on. Raises OSError; a
    PermissionError if it may not."""
    return _connected(str(path), Path(path), within_s)


def _connected(name: str, path: Path, within_s: float) -> socket.socket:
    """Connect to `name`, which is another name of `path` or the same."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not `settimeout`: without blocking, connecting to a busy server fails at once.
        whole_s = int(within_s)
        limit = _TIMEVAL.pack(whole_s, max(1, int((within_s - whole_s) * 1e6)))
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        connected.connect(name)
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(0, 0))
        if why := why_no_server(path, peer_uid(connected)):
            raise PermissionError(f"{NOT_RELIED_ON}: {why}")
    except BaseException:
        connected.close()
        raise
    return connected


def why_not(problem: OSError) -> str:
    """Why there is no connection, in words."""
    return _WHY.get(problem.errno or 0) or problem.strerror or str(problem)


def _checked(path: Path, within_s: float) -> int:
    """A descriptor of the socket's inode. Raises OSError."""
    # Without O_PATH a socket can't be opened.
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        _connected(f"/proc/self/fd/{fd}", path, within_s).close()
    except BaseException:
        os.close(fd)
        raise
    return fd
