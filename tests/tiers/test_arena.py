"""Arenas: who may write, that pages are allocated, and where an entry's bytes are."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefixd.tiers import arena as arena_module
from prefixd.tiers.arena import SEALS, Arena, check_slab, whole_slabs
from prefixd.tiers.store import Damaged, StoreError

PAGE = 4096
SIZE = 64 * PAGE
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def anonymous() -> Iterator[Arena]:
    arena = Arena.anonymous(SIZE)
    yield arena
    arena.close()


@pytest.fixture
def shm() -> Iterator[Path]:
    directory = Path(tempfile.mkdtemp(prefix="prefixd-test-", dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def refused(action: Callable[[], object]) -> str:
    """The name of the error that an action raises, or its result."""
    try:
        return f"done: {action()}"
    except OSError as problem:
        return errno.errorcode[problem.errno or 0]


# ---- one writer, kept by the kernel


def writes_through(fd: int) -> dict[str, str]:
    """Every way to change the arena's bytes that a holder of `fd` could try."""

    def reopened(flags: int) -> object:
        again = os.open(f"/proc/self/fd/{fd}", flags)
        try:
            return os.pwrite(again, b"x", 0)
        finally:
            os.close(again)

    def mapped_again() -> object:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        try:
            return mmap.mmap(again, SIZE)
        finally:
            os.close(again)

    def protected() -> object:
        mapping = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
        address = ctypes.c_void_p(mapping_address(mapping))
        if libc.mprotect(address, SIZE, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        return "writable"

    def punched() -> object:
        keep_size_and_punch = 0x01 | 0x02
        if libc.fallocate(fd, keep_size_and_punch, ctypes.c_long(0), ctypes.c_long(PAGE)):
            raise OSError(ctypes.get_errno(), "fallocate")
        return "punched"

    return {
        "mmap": refused(lambda: mmap.mmap(fd, SIZE)),
        "mmap again": refused(mapped_again),
        "mprotect": refused(protected),
        "pwrite": refused(lambda: os.pwrite(fd, b"x", 0)),
        "re-open and write": refused(lambda: reopened(os.O_RDWR)),
        "re-open and truncate": refused(lambda: reopened(os.O_WRONLY | os.O_TRUNC)),
        "shrink": refused(lambda: os.ftruncate(fd, PAGE)),
        "grow": refused(lambda: os.ftruncate(fd, 2 * SIZE)),
        "punch a hole": refused(punched),
        "add a seal": refused(lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)),
    }


def mapping_address(mapping: mmap.mmap) -> int:
    with arena_module.address_of(mapping) as address:
        return address


def test_only_the_daemons_own_mapping_writes_an_anonymous_arena(anonymous: Arena) -> None:
    assert fcntl.fcntl(anonymous.fd, fcntl.F_GET_SEALS) == SEALS
    anonymous.writable(0, 5)[:] = b"first"
    tried = writes_through(anonymous.fd)
    # mprotect refuses to make this mapping writable with EACCES.
    assert tried == {name: "EACCES" if name == "mprotect" else "EPERM" for name in tried}
    assert len(tried) == 10
    anonymous.writable(0, 5)[:] = b"again"
    assert anonymous.gather((0, PAGE), 0, 5) == b"again"


def test_a_readers_descriptor_is_refused_as_well(anonymous: Arena) -> None:
    anonymous.writable(0, 5)[:] = b"bytes"
    fd = anonymous.open_reader()
    tried = writes_through(fd)
    # Either reason may come first: the read-only descriptor, or the seal.
    assert set(tried.values()) <= {"EPERM", "EACCES", "EBADF", "EINVAL"}
    with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ) as mapping:
        assert mapping[:5] == b"bytes"
    os.close(fd)


def test_a_readers_descriptor_of_a_file_can_only_read(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE)
    arena.writable(0, 5)[:] = b"bytes"
    fd = arena.open_reader()
    assert refused(lambda: mmap.mmap(fd, SIZE)) == "EACCES"
    assert refused(lambda: os.pwrite(fd, b"x", 0)) == "EBADF"
    assert refused(lambda: os.ftruncate(fd, PAGE)) == "EINVAL"
    with mmap.mmap(fd, SIZE, prot=mmap.PROT_READ) as mapping:
        assert mapping[:5] == b"bytes"
    os.close(fd)
    arena.close()


def test_another_process_reads_what_the_daemon_writes(anonymous: Arena) -> None:
    reader = (
        "import mmap, sys\n"
        f"mapping = mmap.mmap(int(sys.argv[1]), {SIZE}, prot=mmap.PROT_READ)\n"
        "sys.stdin.readline()\n"
        "print(mapping[9:14].decode())\n"
    )
    fd = anonymous.open_reader()
    child = subprocess.Popen(
        [sys.executable, "-c", reader, str(fd)],
        pass_fds=[fd],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    os.close(fd)
    anonymous.writable(9, 5)[:] = b"hello"
    assert child.communicate("now\n")[0] == "hello\n"
    assert child.returncode == 0


# ---- pages


@pytest.mark.parametrize("populate", [arena_module._MADV_POPULATE_WRITE, 9999])
def test_pages_are_secured_step_by_step(
    anonymous: Arena, monkeypatch: pytest.MonkeyPatch, populate: int
) -> None:
    """9999 stands for a kernel that does not know the advice."""
    monkeypatch.setattr(arena_module, "_MADV_POPULATE_WRITE", populate)
    assert anonymous.secured_bytes == 0
    steps = []
    for secured_bytes in anonymous.secure_segments(20 * PAGE):
        assert anonymous.secured_bytes == secured_bytes
        assert os.fstat(anonymous.fd).st_blocks * 512 >= secured_bytes
        steps.append(secured_bytes)
    assert steps == [20 * PAGE, 40 * PAGE, 60 * PAGE, SIZE]


def test_a_secured_arena_has_no_first_touch(anonymous: Arena) -> None:
    for _ in anonymous.secure_segments(20 * PAGE):
        pass
    smaps = Path("/proc/self/smaps").read_text().split("\n")
    # Other tests may have arenas of that name.
    mapped = f" {os.fstat(anonymous.fd).st_ino} "
    start = next(
        i for i, line in enumerate(smaps) if "memfd:prefixd-ram" in line and mapped in line
    )
    resident = next(line for line in smaps[start:] if line.startswith("Rss:"))
    assert int(resident.split()[1]) * 1024 == SIZE


def test_securing_keeps_what_is_there(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE)
    arena.secure()
    arena.writable(SIZE - 4, 4)[:] = b"tail"
    arena.secure()
    assert arena.gather((0, SIZE), SIZE - 4, 4) == b"tail"
    arena.close()


FULL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x00020000) or libc.mount(b"none", b"/", None, 0x44000, None):
    sys.exit(77)
if libc.mount(b"tmpfs", sys.argv[1].encode(), b"tmpfs", 0, b"size=64k"):
    sys.exit(77)
from pathlib import Path
from prefixd.tiers.arena import Arena
from prefixd.tiers.store import StoreFull
arena = Arena.file(Path(sys.argv[1]) / "arena", 256 * 4096)
steps = []
try:
    for secured in arena.secure_segments(4 * 4096):
        steps.append(secured)
except StoreFull as problem:
    print(steps, arena.secured_bytes, problem)
arena.writable(arena.secured_bytes - 4096, 4096)[:] = b"x" * 4096
"""


def test_a_full_device_is_an_answer(tmp_path: Path) -> None:
    """In a mount namespace with a tmpfs of 64 KiB, which ends with the process."""
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=False
    )
    if done.returncode == 77:
        pytest.skip("no permission to mount a tmpfs in a namespace of its own")
    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "[16384, 32768, 49152, 65536] 65536 "
        "can't secure more than 65536 of the 1048576 bytes of an arena: "
        "[Errno 28] No space left on device\n"
    )


# ---- files


def test_a_file_is_found_again_with_its_bytes(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE)
    assert (arena.found_bytes, arena.secured_bytes) == (0, 0)
    list(arena.secure_segments(8 * PAGE))
    arena.writable(PAGE, 5)[:] = b"hello"
    arena.close()
    again = Arena.file(shm / "arena", 2 * SIZE)
    assert (again.found_bytes, again.secured_bytes, again.size_bytes) == (SIZE, SIZE, 2 * SIZE)
    assert again.gather((PAGE, PAGE), 0, 5) == b"hello"
    again.close()


def test_what_was_not_secured_is_not_taken_for_memory(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE)
    next(arena.secure_segments(8 * PAGE))
    arena.close()
    again = Arena.file(shm / "arena", SIZE)
    assert again.secured_bytes == 8 * PAGE
    assert list(again.secure_segments(4 * PAGE))[:3] == [8 * PAGE, 8 * PAGE, 12 * PAGE]
    again.close()


def test_a_larger_file_is_found_as_large_as_it_is(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE)
    arena.secure()
    arena.writable(SIZE - 4, 4)[:] = b"tail"
    fd = arena.open_reader()
    reader = mmap.mmap(fd, SIZE, prot=mmap.PROT_READ)
    os.close(fd)
    arena.close()
    smaller = Arena.file(shm / "arena", SIZE // 2)
    assert (smaller.found_bytes, smaller.size_bytes, smaller.max_bytes) == (SIZE, SIZE, SIZE)
    assert smaller.gather((SIZE - PAGE, PAGE), PAGE - 4, 4) == b"tail"
    assert reader[-4:] == b"tail", "a reader of the earlier start keeps what it has mapped"
    reader.close()
    smaller.close()


def test_the_length_of_a_file_that_could_grow_is_not_its_size(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE, max_bytes=4 * SIZE)
    next(arena.secure_segments(8 * PAGE))
    arena.close()
    again = Arena.file(shm / "arena", SIZE, max_bytes=2 * SIZE)
    assert (again.found_bytes, again.size_bytes, again.max_bytes) == (8 * PAGE, SIZE, 2 * SIZE)
    assert os.fstat(again.fd).st_size == 2 * SIZE
    again.close()


def test_room_is_given_back_at_a_start_only_and_taken_again(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE)
    arena.secure()
    held_bytes = os.fstat(arena.fd).st_blocks * 512
    middle = (2 * PAGE, 4 * PAGE, 8 * PAGE, PAGE)
    assert not arena.give_back(middle, at_start=False)
    assert arena.hole_bytes == 0
    assert arena.give_back(middle, at_start=True)
    assert arena.hole_bytes == 5 * PAGE
    assert held_bytes - os.fstat(arena.fd).st_blocks * 512 == 5 * PAGE
    arena.take_back((2 * PAGE, PAGE))
    assert arena.holes == {3 * PAGE: 3 * PAGE, 8 * PAGE: PAGE}
    arena.close()
    again = Arena.file(shm / "arena", SIZE)
    assert list(again.find_holes()) == [(3 * PAGE, 3 * PAGE), (8 * PAGE, PAGE)]
    again.close()


def test_securing_leaves_out_what_was_given_back(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE)
    arena.secure()
    arena.give_back((PAGE, PAGE, 7 * PAGE, 2 * PAGE, 12 * PAGE, PAGE), at_start=True)
    arena.close()
    again = Arena.file(shm / "arena", SIZE)
    for start, length_bytes in list(again.find_holes()):
        again.give_back((start, length_bytes), at_start=True)
    held_bytes = os.fstat(again.fd).st_blocks * 512
    list(again.secure_segments(8 * PAGE))
    assert os.fstat(again.fd).st_blocks * 512 == held_bytes == SIZE - 4 * PAGE
    again.close()


def test_securing_takes_what_lies_before_between_and_behind_holes(
    monkeypatch: pytest.MonkeyPatch, shm: Path
) -> None:
    secured: list[tuple[int, int]] = []
    monkeypatch.setattr(
        arena_module, "secure_range", lambda _, start, length, __: secured.append((start, length))
    )
    arena = Arena.file(shm / "arena", SIZE)
    arena.holes = {PAGE: PAGE, 7 * PAGE: 2 * PAGE}
    next(arena.secure_segments(10 * PAGE))
    assert secured == [(0, PAGE), (2 * PAGE, 5 * PAGE), (9 * PAGE, PAGE)]
    arena.close()


def test_a_file_has_the_mode_that_was_asked_for(shm: Path) -> None:
    arena = Arena.file(shm / "arena", SIZE, mode=0o644)
    assert (shm / "arena").stat().st_mode & 0o777 == 0o444
    arena.close()


@pytest.fixture
def nobody(shm: Path) -> Iterator[int]:
    """A user for whom the kernel enforces the modes of files, as it does not for root."""
    user = os.geteuid() or 65534
    os.chown(shm, user, -1)
    os.seteuid(user)
    yield user
    os.seteuid(os.getuid())


@pytest.mark.usefixtures("nobody")
def test_a_file_cannot_be_opened_anew_for_writing_and_is_found_again(shm: Path) -> None:
    for written in (b"first", b"again"):
        arena = Arena.file(shm / "arena", SIZE, mode=0o600)
        arena.secure()
        arena.writable(0, 5)[:] = written
        reader = arena.open_reader()
        tried = writes_through(reader)
        assert set(tried.values()) <= {"EPERM", "EACCES", "EBADF", "EINVAL"}
        assert {tried["mmap again"], tried["re-open and write"]} == {"EACCES"}
        with pytest.raises(PermissionError):
            (shm / "arena").open("r+b")
        os.close(reader)
        assert arena.gather((0, 5), 0, 5) == written
        assert bool(arena.found_bytes) == (written == b"again")
        arena.close()


def test_what_is_no_file_of_ours_is_refused(shm: Path) -> None:
    (shm / "directory").mkdir()
    (shm / "victim").write_bytes(b"do not touch")
    (shm / "link").symlink_to(shm / "victim")
    os.mkfifo(shm / "pipe")
    for name in ("directory", "link", "pipe", "missing/arena"):
        with pytest.raises(StoreError, match=name):
            Arena.file(shm / name, SIZE)
    assert (shm / "victim").read_bytes() == b"do not touch"


@pytest.mark.parametrize("size_bytes", [0, -PAGE, 1, PAGE + 1])
def test_an_arena_has_whole_pages(shm: Path, size_bytes: int) -> None:
    for make in (Arena.anonymous, lambda size: Arena.file(shm / "arena", size)):
        with pytest.raises(StoreError, match="whole pages"):
            make(size_bytes)


# ---- views


def test_views_follow_the_extents(anonymous: Arena) -> None:
    location = (3 * PAGE, PAGE, 0, 2 * PAGE)
    anonymous.writable(3 * PAGE, PAGE)[:] = b"a" * PAGE
    anonymous.writable(0, 2 * PAGE)[:] = b"b" * 2 * PAGE
    assert anonymous.gather(location, 0, 3 * PAGE) == b"a" * PAGE + b"b" * 2 * PAGE
    assert anonymous.gather(location, PAGE - 1, 2) == b"ab"
    assert anonymous.gather(location, PAGE, 1) == b"b"
    assert [len(view) for view in anonymous.views(location, PAGE - 1, PAGE)] == [1, PAGE - 1]
    assert anonymous.views(location, 0, 0) == []
    for offset, length in ((0, 3 * PAGE + 1), (3 * PAGE, 1), (9 * PAGE, 1)):
        with pytest.raises(Damaged, match="beyond"):
            anonymous.views(location, offset, length)


def test_a_view_is_the_arena_itself(anonymous: Arena) -> None:
    (view,) = anonymous.views((PAGE, PAGE), 10, 3)
    anonymous.writable(PAGE + 10, 3)[:] = b"new"
    assert view == b"new"
    assert view.readonly


def test_a_view_outlives_a_closed_arena() -> None:
    arena = Arena.anonymous(SIZE)
    arena.writable(0, 4)[:] = b"held"
    (view,) = arena.views((0, PAGE), 0, 4)
    fd = arena.fd
    arena.close()
    arena.close()
    assert view == b"held"
    assert refused(lambda: os.fstat(fd)) == "EBADF"


# ---- slabs


@pytest.mark.parametrize("slab_bytes", [0, 1, 2048, 4097, 3 * 4096])
def test_slabs_are_powers_of_two_of_at_least_a_page(slab_bytes: int) -> None:
    with pytest.raises(ValueError, match="power of two"):
        check_slab(slab_bytes)


def test_lengths_are_rounded_up_to_slabs() -> None:
    check_slab(4096)
    assert [whole_slabs(n, 4096) for n in (0, 1, 4096, 4097)] == [0, 4096, 4096, 8192]
