"""Small devices, which are tmpfs file systems, each in its own mount namespace: they outlive the
daemons that use them, and disappear with the test. And devices that fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

#: Makes the namespace and its file system, reports it on stdout, and keeps both until stdin closes.
_KEEPER: Final = """
import ctypes, sys
place, size = sys.argv[1:]
libc = ctypes.CDLL(None, use_errno=True)
private = 0x44000  # MS_REC | MS_PRIVATE
if (
    libc.unshare(0x00020000)  # CLONE_NEWNS
    or libc.mount(b"none", b"/", None, private, None)
    or libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0, f"size={size},mode=0700".encode())
):
    print("no", flush=True)
    sys.exit()
print("made", flush=True)
sys.stdin.read()
"""
#: A daemon that enters the namespace. `{patch}` is replaced by code that runs before its `main`.
_DAEMON: Final = """
import ctypes, os, sys
if ctypes.CDLL(None).setns(os.open("/proc/{pid}/ns/mnt", os.O_RDONLY), 0x00020000):
    raise OSError("can't enter the namespace")
from prefixd.server import daemon
{patch}
daemon.main(sys.argv[1:])
"""

#: A daemon whose writes to the disk tier fail while a marker file exists, for
#: `DaemonProcess.run_with`.
FAILING_WRITES: Final = """
import os, sys
from prefixd.server import daemon
from prefixd.tiers.arena_stores import DiskStore
from prefixd.tiers.store import StoreError
def failing(write):
    def fail(self, *args):
        if os.path.exists(self.directory.parent / "ill"):
            raise StoreError("a failed write, on purpose")
        write(self, *args)
    return fail
DiskStore.apply, DiskStore.probe = failing(DiskStore.apply), failing(DiskStore.probe)
daemon.main(sys.argv[1:])
"""


class SmallDevice:
    """A small file system, mounted at `place` for the processes in its namespace."""

    def __init__(self, pid: int, place: Path) -> None:
        self.pid = pid
        #: The mounted directory, as processes outside the namespace reach it.
        self.from_outside = Path(f"/proc/{pid}/root{place}")

    def script(self, patch: str = "") -> str:
        """The script of a daemon in the namespace, for `DaemonProcess.run_with`."""
        return _DAEMON.format(pid=self.pid, patch=patch)

    def fill(self, but_bytes: int = 0) -> Path:
        """Fill the device up to `but_bytes` with a file that is not the daemon's. Returns it."""
        filler = self.from_outside / "foreign-file"
        with filler.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                file.truncate(max(0, file.tell() - but_bytes))
        return filler


@contextmanager
def small_device(place: Path, size_bytes: int) -> Iterator[SmallDevice]:
    """A device of this size, mounted at `place`. Skips the test without the permission to mount."""
    place.mkdir(exist_ok=True)
    with subprocess.Popen(
        [sys.executable, "-c", _KEEPER, str(place), str(size_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as keeper:
        assert keeper.stdout is not None
        if keeper.stdout.readline() != "made\n":
            pytest.skip("no permission to mount a tmpfs in a namespace of its own")
        yield SmallDevice(keeper.pid, place)
        assert keeper.stdin is not None
        keeper.stdin.close()
