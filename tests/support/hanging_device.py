"""A device that stops answering: an ext4 on a loop device, whose file is served by a process here.

While the device hangs, that process keeps the kernel's requests (FUSE). So whatever reads or writes
what is not in the page cache waits inside the kernel, where no signal reaches it, exactly as on a
disk that is gone. It needs root, loop devices and FUSE.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest

from tests.support.devices import SmallDevice

#: Makes a namespace and the file system in it, reports that, and then takes a command a line.
_KEEPER: Final = r"""
import ctypes, os, struct, subprocess, sys, threading

place, image, size = sys.argv[1], sys.argv[2], int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
data = bytearray(size)
answers = threading.Event()
answers.set()


def mount(source, target, kind, flags, options):
    if libc.mount(source.encode(), target.encode(), kind.encode(), flags, options.encode()):
        raise OSError(ctypes.get_errno(), f"can't mount {kind}")


def attributes():
    now = (0, 0, 0, 0, 0, 0)
    return struct.pack("<QII6Q10I", 1, 0, 0, 1, size, size // 512, *now[:3], *now[3:], 0o100600, 1,
                       os.getuid(), os.getgid(), 0, 4096, 0)


def answer(fuse, opcode, body):
    if opcode == 26:  # INIT
        return struct.pack("<4I2HIIHHII6I", 7, 31, 0, 0, 16, 12, 2**17, 1, 0, 0, 0, 0, *[0] * 6)
    if opcode in (3, 4):  # GETATTR, SETATTR
        return attributes()
    if opcode == 14:  # OPEN, past the page cache
        return struct.pack("<QIi", 1, 1, 0)
    if opcode in (15, 16):  # READ, WRITE
        _, offset, length = struct.unpack_from("<QQI", body)
        if opcode == 15:
            return bytes(data[offset : offset + length])
        data[offset : offset + length] = body[40 : 40 + length]
        return struct.pack("<II", length, 0)
    if opcode in (18, 20, 25, 38):  # RELEASE, FSYNC, FLUSH, DESTROY
        return b""
    if opcode == 17:  # STATFS
        return struct.pack("<5Q3I28x", 1, 0, 0, 1, 0, 4096, 255, 4096)
    return 38  # ENOSYS


def serve(fuse):
    while True:
        try:
            request = os.read(fuse, 2**18)
        except OSError:
            return  # unmounted
        length, opcode, number, _ = struct.unpack_from("<IIQQ", request)
        if opcode in (2, 36, 42):  # FORGET, INTERRUPT, BATCH_FORGET
            continue
        answers.wait()
        said = answer(fuse, opcode, request[40:])
        error, said = (-said, b"") if isinstance(said, int) else (0, said)
        try:
            os.write(fuse, struct.pack("<IiQ", 16 + len(said), error, number) + said)
        except OSError:
            pass


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


loop = None
try:
    if libc.unshare(0x00020000):  # CLONE_NEWNS
        raise OSError(ctypes.get_errno(), "no namespace of its own")
    mount("none", "/", "", 0x44000, "")  # MS_REC | MS_PRIVATE
    open(image, "w").close()
    fuse = os.open("/dev/fuse", os.O_RDWR)
    mount("hanging", image, "fuse", 0, f"fd={fuse},rootmode=100600,user_id={os.getuid()},"
          f"group_id={os.getgid()}")
    threading.Thread(target=serve, args=(fuse,), daemon=True).start()
    loop = run("losetup", "--find", "--show", image)
    run("mkfs.ext4", "-q", "-F", "-E", "nodiscard,lazy_itable_init=0", loop)
    mount(loop, place, "ext4", 0, "")
except (OSError, subprocess.CalledProcessError) as problem:
    if loop:
        run("losetup", "--detach", loop)
    print("no", getattr(problem, "stderr", problem), flush=True)
    os._exit(0)
print("made", flush=True)
for line in sys.stdin:
    if line == "hang\n":
        answers.clear()
    else:
        answers.set()
    print("done", flush=True)
answers.set()
subprocess.run(["umount", "--lazy", place])
subprocess.run(["losetup", "--detach", loop])
"""


class HangingDevice(SmallDevice):
    """The device, mounted at `place` for the processes in its namespace."""

    def __init__(self, keeper: subprocess.Popen[str], place: Path) -> None:
        super().__init__(keeper.pid, place)
        self._keeper = keeper

    def hang(self) -> None:
        """Answer nothing until `answer`."""
        self._tell("hang")

    def answer(self) -> None:
        """Answer everything that waits, and what comes."""
        self._tell("answer")

    def _tell(self, what: str) -> None:
        assert self._keeper.stdin is not None
        assert self._keeper.stdout is not None
        self._keeper.stdin.write(f"{what}\n")
        self._keeper.stdin.flush()
        assert self._keeper.stdout.readline() == "done\n"


@contextmanager
def hanging_device(place: Path, size_bytes: int = 64 * 2**20) -> Iterator[HangingDevice]:
    """A device of this size, mounted at `place`. It answers at first, and at the end. Skips the
    test, with the reason, where there can be none."""
    place.mkdir(exist_ok=True)
    image = place.with_name(f"{place.name}.image")
    with subprocess.Popen(
        [sys.executable, "-c", _KEEPER, str(place), str(image), str(size_bytes)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as keeper:
        assert keeper.stdin is not None
        assert keeper.stdout is not None
        said = keeper.stdout.readline()
        if said != "made\n":
            pytest.skip(f"there can be no device that hangs here: {said.strip()}")
        try:
            yield HangingDevice(keeper, place)
        finally:
            with suppress(BrokenPipeError):
                keeper.stdin.close()
