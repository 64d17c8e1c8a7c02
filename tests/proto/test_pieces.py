"""Bytes in several places: what slices, copies and checksums make of them."""

from __future__ import annotations

import random

import pytest

from prefixd.proto.copying import copy, copy_crc32c, crc32c_of
from prefixd.proto.layout import crc32c
from prefixd.proto.pieces import Pieces, pairs, views_of

DATA = bytes(random.Random(1).randbytes(1_000))


def pieces(data: bytes, *cuts: int) -> Pieces:
    ends = [*cuts, len(data)]
    return Pieces(
        [memoryview(bytearray(data[a:b])) for a, b in zip([0, *ends[:-1]], ends, strict=True)]
    )


def test_every_slice_is_that_of_the_whole() -> None:
    data = DATA[:20]
    whole = pieces(data, 1, 7, 8, 15)
    for start in range(21):
        for stop in range(21):
            part = whole[start:stop]
            assert part.tobytes() == data[start:stop]
            assert len(part) == len(data[start:stop])
    assert whole[:].tobytes() == data
    assert isinstance(whole[1:7], memoryview)
    with pytest.raises(ValueError, match="steps"):
        whole[::2]


def test_nothing_is_copied() -> None:
    whole = pieces(DATA, 500)
    part = whole[400:600]
    assert isinstance(part, Pieces)
    part.views[1][0] = DATA[500] ^ 1
    assert whole.tobytes()[500] == DATA[500] ^ 1
    assert not whole.readonly
    assert Pieces([memoryview(b"a")]).readonly


@pytest.mark.parametrize("source", [DATA, memoryview(DATA), pieces(DATA, 1, 2, 333)], ids=type)
@pytest.mark.parametrize("cuts", [(), (100,), tuple(range(1, 999))])
def test_copies_and_checksums_cross_every_seam(source: object, cuts: tuple[int, ...]) -> None:
    for copying in (copy, copy_crc32c):
        target = pieces(bytes(1_000), *cuts)
        result = copying(target, source)  # type: ignore[arg-type, operator]
        assert target.tobytes() == DATA
        assert result in (None, crc32c(DATA))
    assert crc32c_of(target) == crc32c(DATA)
    flat = bytearray(1_000)
    copy(memoryview(flat), target)
    assert flat == DATA


def test_another_length_is_refused_before_anything_is_copied() -> None:
    target = pieces(bytes(10), 5)
    for source in (DATA[:9], pieces(DATA[:11], 5)):
        with pytest.raises(ValueError, match="do not fill"):
            copy(target, source)
    assert target.tobytes() == bytes(10)


def test_views_are_those_it_is_made_of() -> None:
    whole = pieces(DATA, 5)
    assert views_of(whole) == whole.views
    flat = memoryview(DATA)
    assert list(views_of(flat)) == [flat]
    assert list(pairs(flat, flat)) == [(flat, flat)]
    copy(memoryview(bytearray()), b"")
