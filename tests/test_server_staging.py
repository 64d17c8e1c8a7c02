"""Staging memory: the client's to write, the daemon's to copy from, nobody's to resize."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixd.proto.errors import UnknownStaging
from prefixd.server.staging import Staging

SIZE = 4 * 4096


@pytest.fixture
def staging() -> Iterator[Staging]:
    made = Staging(SIZE)
    yield made
    made.close()


def test_what_a_client_writes_is_seen_at_once(staging: Staging) -> None:
    with mmap.mmap(staging.fd, SIZE) as theirs:
        theirs[100:105] = b"hello"
        assert bytes(staging.view(100, 5)) == b"hello"
        theirs[100:105] = b"again"
        assert bytes(staging.view(99, 7)) == b"\0again\0"


def test_views_can_only_be_read(staging: Staging) -> None:
    view = staging.view(0, 4)
    assert view.readonly
    with pytest.raises(TypeError):
        view[0] = 1


@pytest.mark.parametrize(
    ("offset", "length"), [(SIZE, 1), (0, SIZE + 1), (SIZE - 1, 2), (2**63, 2**63), (2**64 - 1, 1)]
)
def test_what_is_beyond_it_is_refused(staging: Staging, offset: int, length: int) -> None:
    with pytest.raises(UnknownStaging, match=f"it has {SIZE}"):
        staging.view(offset, length)


def test_its_last_byte_is_part_of_it(staging: Staging) -> None:
    assert len(staging.view(0, SIZE)) == SIZE
    assert bytes(staging.view(SIZE - 1, 1)) == b"\0"
    assert bytes(staging.view(SIZE, 0)) == b""


@pytest.mark.parametrize("size", [0, SIZE - 1, SIZE + 1])
def test_no_client_can_resize_it_and_make_the_daemon_fault(staging: Staging, size: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(staging.fd, size)
    assert os.fstat(staging.fd).st_size == SIZE


def test_after_its_end_it_is_an_answer_and_views_in_use_stay_good(staging: Staging) -> None:
    with mmap.mmap(staging.fd, SIZE) as theirs:
        theirs[:4] = b"data"
    view = staging.view(0, 4)
    staging.close()
    assert bytes(view) == b"data", "a copy that still runs"
    with pytest.raises(UnknownStaging, match="is over"):
        staging.view(0, 4)


def test_memory_that_there_is_none_of_is_an_error_and_leaks_nothing() -> None:
    before = set(Path("/proc/self/fd").iterdir())
    with pytest.raises((OSError, OverflowError)):
        Staging(2**62)
    assert set(Path("/proc/self/fd").iterdir()) == before
