"""Slot files of real servers: read, cut, put together again; and whatever is not one is refused.

`tests/golden/llama_server/` has files that three builds wrote, of tiny models: versions 2, 3 and 4.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from prefixd.client.llama_server.slot_file import (
    BadSlotFile,
    SlotFile,
    SlotLayout,
    SlotSection,
    UnknownVersion,
    _Reader,
    _section,
    common_tokens,
)

GOLDEN = Path(__file__).resolve().parents[2] / "golden/llama_server"
FILES = sorted(GOLDEN.glob("*.bin"))
PLAIN = [path for path in FILES if not path.stem.endswith(("windows", "recurrent"))]
WINDOWS = [path for path in FILES if path.stem.endswith("windows")]


def read(path: Path) -> SlotFile:
    return SlotFile(memoryview(path.read_bytes()))


def base(file: SlotFile) -> SlotSection:
    assert file.base is not None
    return file.base


def put_together(file: SlotFile, cuts: list[int]) -> bytes:
    """The file made anew from its blocks, as after a restore."""
    layout, count = file.layout, len(file.tokens)
    made = memoryview(bytearray(layout.file_bytes(count)))
    layout.write_frame(made, file.tokens)
    for first, last in zip([0, *cuts], [*cuts, count], strict=True):
        block = b"".join(bytes(piece) for piece in file.block(first, last))
        assert len(block) == (last - first) * layout.token_bytes
        if layout.transposed:
            layout.fill(made, count, first, memoryview(block))
            continue
        for place in layout.rows(made, count, first, last):
            place[:], block = block[: len(place)], block[len(place) :]
    return bytes(made)


def test_every_version_is_there() -> None:
    assert {read(path).version for path in FILES} == {2, 3, 4}
    assert len(FILES) == 20


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_blocks_make_the_file_again(path: Path) -> None:
    file = read(path)
    assert len(file.remainder) == 0
    file = file.sorted()
    count = len(file.tokens)
    for cuts in ([], [1, count // 2], list(range(1, count))):
        made = put_together(file, cuts)
        again = SlotFile(memoryview(made))
        assert again.layout == file.layout
        assert list(again.tokens) == list(file.tokens)
        assert [bytes(p) for p in again.block(0, count)] == [bytes(p) for p in file.block(0, count)]
    if base(file).stream == 0:
        rebuilt, original = np.frombuffer(made, np.uint8), np.frombuffer(file.memory, np.uint8)
        # The sequence's number is not in it; a slot reads it as its own.
        assert (rebuilt != original).sum() <= count


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_a_prefix_of_the_blocks_is_a_shorter_file(path: Path) -> None:
    file = read(path).sorted()
    layout, count = file.layout, len(file.tokens) // 2
    made = memoryview(bytearray(layout.file_bytes(count)))
    layout.write_frame(made, file.tokens[:count])
    layout.fill(made, count, 0, memoryview(b"".join(map(bytes, file.block(0, count)))))
    shorter = SlotFile(made)
    assert shorter.layout == layout
    assert list(map(bytes, shorter.block(0, count))) == list(map(bytes, file.block(0, count)))


def test_cells_in_any_order_are_sorted() -> None:
    file = unsorted = read(next(GOLDEN.glob("b11434-unified-out-of-order.bin")))
    # As a slot leaves them that evaluates tokens beside others.
    memory = bytearray(unsorted.memory)
    section = base(unsorted)
    cells = section.start + 4 * (2 + section.stream)
    second, third = memory[cells + 12 : cells + 24], memory[cells + 24 : cells + 36]
    memory[cells + 12 : cells + 36] = third + second
    file = SlotFile(memoryview(memory))
    section = base(file)
    order = list(section.positions)
    assert order != sorted(order)
    ordered = file.sorted()
    assert list(base(ordered).positions) == sorted(order)
    for cell, position in enumerate(order):
        size = section.layout.regions[0].token_bytes
        start = section.offsets[0] + cell * size
        assert bytes(ordered.block(position, position + 1)[0]) == file.memory[start : start + size]


def test_the_number_of_slots_says_nothing_about_the_bytes() -> None:
    plain, four = read(GOLDEN / "b10434-plain.bin"), read(GOLDEN / "b10434-four-streams.bin")
    assert (plain.layout.streams, four.layout.streams) == (1, 4)
    assert plain.layout == four.layout


def test_what_is_behind_the_first_section_is_the_remainder() -> None:
    for path in WINDOWS:
        file = read(path)
        assert file.base is not None
        assert bytes(file.remainder) == bytes(file.memory[file.base.end :])
        assert len(file.remainder) > 0
        blocks = b"".join(map(bytes, file.block(0, len(file.tokens))))
        assert len(blocks) == len(file.tokens) * file.layout.token_bytes
    for path in GOLDEN.glob("*recurrent.bin"):
        file = read(path)
        assert file.base is None
        assert len(file.tokens) > 20
        assert len(file.remainder) > 0
        with pytest.raises(BadSlotFile, match="no keys and values"):
            _ = file.layout


def window_of(file: SlotFile) -> SlotSection:
    reader = _Reader(file.memory, base(file).end)
    window = _section(reader, file.version, file.packed)
    assert reader.at == len(file.memory)
    return window


@pytest.mark.parametrize("path", WINDOWS, ids=lambda path: path.stem)
def test_a_window_gets_one_cell_of_zeros_before_it(path: Path) -> None:
    file = read(path)
    window = window_of(file)
    oldest = int(window.positions.min())
    longer = SlotFile(memoryview(b"".join(file.with_an_older_cell() or [])))
    added = window_of(longer)
    assert list(added.positions) == [oldest - 1, *window.positions]
    assert list(longer.tokens) == list(file.tokens)
    assert longer.memory[: base(longer).end] == file.memory[: base(file).end]
    regions = window.layout.regions
    for region, here, there in zip(regions, window.offsets, added.offsets, strict=True):
        size, count = region.token_bytes, len(window.positions)
        assert not region.rows
        assert bytes(longer.memory[there : there + size]) == bytes(size)
        assert (
            longer.memory[there + size : there + (count + 1) * size]
            == file.memory[here : here + count * size]
        )
    assert longer.with_an_older_cell() is not None, "the window is still not at the first token"


@pytest.mark.parametrize("path", PLAIN + WINDOWS, ids=lambda path: path.stem)
def test_every_other_length_is_noticed(path: Path) -> None:
    whole = path.read_bytes()
    expected = read(path)
    size = len(expected.remainder)
    for data in (*(whole[:end] for end in range(len(whole))), whole + b"\0", whole + whole):
        try:
            file = SlotFile(memoryview(data))
        except BadSlotFile:
            continue
        assert file.base is None or len(file.remainder) != size


@pytest.mark.parametrize("path", PLAIN, ids=lambda path: path.stem)
def test_every_flip_outside_the_rows_is_noticed(path: Path) -> None:
    """Flips in the rows are for the daemon's checksums to notice."""
    whole = path.read_bytes()
    expected = read(path)
    section = base(expected)
    rows = {
        at
        for region, offset in zip(section.layout.regions, section.offsets, strict=True)
        for at in range(offset, offset + region.token_bytes * len(section.positions))
    }
    cells = section.start + 4 * (2 + section.stream)
    sequences = {
        cells + 12 * cell + 8 + byte for cell in range(len(section.positions)) for byte in range(4)
    }
    for at in range(len(whole)):
        if at in rows or at in sequences:
            continue
        for bit in range(8):
            data = bytearray(whole)
            data[at] ^= 1 << bit
            assert not _same(bytes(data), expected.layout, expected), (at, bit)


def _same(data: bytes, layout: SlotLayout, expected: SlotFile) -> bool:
    try:
        file = SlotFile(memoryview(data))
        return (
            file.layout == layout
            and file.layout.streams == layout.streams
            and list(file.tokens) == list(expected.tokens)
            and len(file.remainder) == 0
            and list(base(file).positions) == list(base(expected).positions)
        )
    except BadSlotFile:
        return False


def test_unknown_versions_are_told_from_what_is_no_slot_file() -> None:
    data = bytearray((GOLDEN / "b11434-plain.bin").read_bytes())
    data[4] = 5
    with pytest.raises(UnknownVersion, match="version 5"):
        SlotFile(memoryview(data))
    data[0] ^= 1
    with pytest.raises(BadSlotFile, match="does not begin"):
        SlotFile(memoryview(data))


def test_common_tokens() -> None:
    assert common_tokens([], [1]) == 0
    assert common_tokens([1, 2, 3], [1, 2]) == 2
    assert common_tokens([1, 2, 3], [1, 5, 3]) == 1
    assert common_tokens(np.array([4], "<i4"), [1]) == 0
