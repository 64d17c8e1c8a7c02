"""A Unix socket of the daemon in the file system: bound without a gap, recognised, and removed only
by the daemon that bound it."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from ...proto.endpoints import BINDING_SUFFIX


class UnixSocket:
    """One path. Not thread-safe."""

    def __init__(self, option: str, path: Path, mode: int) -> None:
        """`option`: what error messages call it. `mode`: who may connect."""
        self.option: Final = option
        self.path: Final = path
        self._mode: Final = mode
        #: Of what was bound: device and inode.
        self._bound: tuple[int, int] | None = None

    def bind(self, listen: Callable[[str], object]) -> None:
        """Have `listen` bind a socket to the path that it is given, and put that in place of what a
        dead daemon left here. Raises OSError, which names the option.

        Under another name first: the socket has its mode when it appears, and gRPC, which removes
        what lies at the path that it bound when it stops, finds nothing there. It could be the
        socket of another daemon.
        """
        binding = Path(self.bound_path)
        try:
            remove_leftover(binding)
            # Until chmod below, only this user may connect.
            before = os.umask(0o177)
            try:
                listen(str(binding))
            finally:
                os.umask(before)
            try:
                binding.chmod(self._mode)
                remove_leftover(self.path)
                status = binding.stat()
                binding.rename(self.path)
            except OSError:
                binding.unlink(missing_ok=True)
                raise
        except (OSError, RuntimeError) as problem:
            why = getattr(problem, "strerror", None) or problem
            raise OSError(f"{self.option}: can't listen on unix:{self.path}: {why}") from None
        self._bound = status.st_dev, status.st_ino

    @property
    def bound_path(self) -> str:
        """The name that the kernel knows the socket by, and its connections."""
        return str(self.path.with_name(f"{self.path.name}{BINDING_SUFFIX}"))

    @property
    def present(self) -> bool:
        """Whether what was bound is what clients find at the path."""
        return self._bound is not None and identity(self.path) == self._bound

    def remove(self) -> None:
        """Remove it, unless it is another one by now. Idempotent."""
        if self.present:
            with suppress(OSError):
                self.path.unlink()
        self._bound = None


def identity(path: Path) -> tuple[int, int] | None:
    """Device and inode of a file; None: it is not there."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def remove_leftover(path: Path) -> None:
    """Remove the socket that a killed daemon left at its path. Raises FileExistsError when
    something else is there, or a socket on which a process listens."""
    if path.is_socket():
        if _in_use(path):
            raise FileExistsError(f"a process listens on {path} already")
        path.unlink(missing_ok=True)
    elif path.exists():
        raise FileExistsError(f"{path} is there and is no socket; it is not replaced")


def _in_use(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as attempt:
        attempt.setblocking(False)
        why = attempt.connect_ex(str(path))
    # EAGAIN: it listens, and takes no more connections at the moment.
    return why not in (errno.ECONNREFUSED, errno.ENOENT)
