"""Whom a process relies on: the server of a Unix socket, the file that it reads back.

Root and the process's own user may be anybody they like, so they are always relied on. Another user
is where nobody else can have put its socket.
"""

from __future__ import annotations

import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Final = 0
_UCRED: Final = struct.Struct("3i")
#: As in the kernel.
_MAX_LINKS: Final = 40


def peer_uid(connected: socket.socket) -> int:
    """The user whose process listens at the other end of a Unix socket, as the kernel knows it."""
    raw = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    _, uid, _ = _UCRED.unpack(raw)
    return int(uid)


def why_no_server(path: Path, server_uid: int, own_uid: int | None = None) -> str:
    """Why a server of this user at this socket can't be relied on; empty: it can be.

    A server of a third user can, if nobody else can have put it there: the directories that lead to
    the socket belong to root, to this user or to the server's user, and not every user can write to
    one of them. Then the address says whose server it is. So a daemon with a user of its own is
    good in /run, and a stranger's in /tmp is not, whether the address was given or is a default.
    """
    own_uid = os.geteuid() if own_uid is None else own_uid
    trusted = {_ROOT, own_uid}
    if server_uid in trusted:
        return ""
    try:
        directories = list(_directories_to(path.parent))
    except OSError as problem:
        return f"it runs as the user {server_uid}, and {problem.filename}: {problem.strerror}"
    for directory, status in directories:
        if status.st_uid not in trusted | {server_uid}:
            return f"it runs as the user {server_uid}, in {directory} of the user {status.st_uid}"
        if status.st_mode & stat.S_IWOTH:
            return f"it runs as the user {server_uid}, and every user can write to {directory}"
    return ""


def why_no_place(directory: Path, own_uid: int | None = None) -> str:
    """Why sockets must not be looked for, or made, in a directory that nobody named; empty: they
    may be, or there is no such directory.

    It has to belong to this user, to root, or to a user to whom root gave it, and only its owner
    and its group may write to it.
    """
    own_uid = os.geteuid() if own_uid is None else own_uid
    try:
        directories = list(_directories_to(directory))
    except FileNotFoundError:
        return ""
    except OSError as problem:
        return f"{problem.filename}: {problem.strerror}"
    last, status = directories[-1]
    if status.st_mode & stat.S_IWOTH:
        return f"every user can write to {last}"
    if status.st_uid in (_ROOT, own_uid):
        return ""
    for _, above in directories[:-1]:
        if above.st_mode & stat.S_IWOTH or above.st_uid not in (_ROOT, own_uid):
            return f"{directory} belongs to the user {status.st_uid}"
    return ""


def _directories_to(directory: Path) -> Iterator[tuple[Path, os.stat_result]]:
    """Each directory in which a name is looked up on the way to this one, symbolic links included,
    and this one at the end. Raises OSError."""
    names = list(reversed(directory.absolute().parts[1:]))
    place, links = Path("/"), 0
    while names:
        yield place, place.stat()
        name = names.pop()
        found = place.parent if name == ".." else place / name
        if not stat.S_ISLNK(found.lstat().st_mode):
            place = found
            continue
        links += 1
        if links > _MAX_LINKS:
            raise OSError(40, "too many symbolic links", str(directory))
        target = found.readlink()
        names += [name for name in reversed(target.parts) if name != "/"]
        place = Path("/") if target.is_absolute() else place
    yield place, place.stat()


def why_no_secret(status: os.stat_result, own_groups: set[int] | None = None) -> str:
    """Why a file is no place for a secret, given its `fstat`; empty: it is one.

    It has to be for its owner alone, who is this user or root. A group of this process may read a
    file of root: that is how orchestrators mount secrets (Kubernetes: root, the group `fsGroup`,
    mode 0440), and the administrator who chose the group gave it to this process.
    """
    if status.st_uid not in (_ROOT, os.geteuid()):
        return f"it belongs to the user {status.st_uid}"
    if status.st_mode & stat.S_IRWXO or status.st_mode & (stat.S_IWGRP | stat.S_IXGRP):
        return "others than its owner may use it: chmod 600 it"
    if status.st_mode & stat.S_IRGRP:
        own_groups = {os.getegid(), *os.getgroups()} if own_groups is None else own_groups
        if status.st_uid != _ROOT:
            return "a group may read it: chmod 600 it, or give it to root"
        if status.st_gid not in own_groups:
            return f"the group {status.st_gid} may read it, and this process is not in that group"
    return ""


def why_no_source(status: os.stat_result) -> str:
    """Why a file that this process is to read back is not believed; empty: only this user and root
    can have written it."""
    if status.st_uid not in (_ROOT, os.geteuid()):
        return f"it belongs to the user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "others than its owner can write to it"
    return ""
