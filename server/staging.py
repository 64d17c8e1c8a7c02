"""Staging memory: where clients on this host put the bytes of their saves.

Each session has one memfd of its own, made and sealed against resizing by the daemon, so that
no client can make it fault by shrinking it. The client writes into it whenever it likes; the
daemon only ever copies out of it, and trusts the checksum of its copy, not the memory.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from ..proto.errors import UnknownStaging

_F_SEAL_SEAL = 0x01
_F_SEAL_SHRINK = 0x02
_F_SEAL_GROW = 0x04


class Staging:
    """One session's staging memory. `fd` belongs to it and is passed on as it is."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self.fd = os.memfd_create("prefixd-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, size_bytes)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _F_SEAL_SEAL | _F_SEAL_SHRINK | _F_SEAL_GROW)
            self._mapping = mmap.mmap(self.fd, size_bytes, prot=mmap.PROT_READ)
        except OSError:
            os.close(self.fd)
            raise
        self._view = memoryview(self._mapping)
        self._closed = False

    def view(self, offset_bytes: int, length_bytes: int) -> memoryview:
        """What the client put there. Raises UnknownStaging beyond the end, and after it."""
        if self._closed:
            raise UnknownStaging("the session that this staging memory belonged to is over")
        if offset_bytes + length_bytes > self.size_bytes:
            raise UnknownStaging(
                f"bytes {offset_bytes} to {offset_bytes + length_bytes} of staging memory are "
                f"named, it has {self.size_bytes}"
            )
        return self._view[offset_bytes : offset_bytes + length_bytes]

    def close(self) -> None:
        """Unmap it; a copy that still runs keeps the mapping until it is done. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._view.release()
        with suppress(BufferError):  # then it goes with the last view
            self._mapping.close()
        os.close(self.fd)
