"""The native kernel gives what the pure forms give, bit for bit, in every form of this machine."""

from __future__ import annotations

import ast
import hashlib
import mmap
import os
import random
import shutil
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy
import pytest
from fastcrc import crc32
from hypothesis import given
from hypothesis import strategies as st

from prefixd.proto import index_reader, kernel, tokens
from prefixd.proto.entry import Content
from prefixd.proto.errors import InvalidTokens
from prefixd.proto.index import ROW_BYTES, IndexLayout, IndexRow, pack_header, pack_row
from prefixd.proto.index_reader import IndexReader
from prefixd.proto.keys import Key, Namespace, block_keys
from prefixd.proto.vocabulary import SaveReason, Tier
from prefixd.server.core import journal as journal_module
from prefixd.server.core.entries import EntryState
from prefixd.server.core.journal import Happening, Journal
from tests.support.lengths import times

ROOT = Path(__file__).resolve().parents[2]
NATIVE = ROOT / "proto/native"


def _module() -> Any:
    """The kernel that was built, or the sanitised one that `make kernel-san` names."""
    other = os.environ.get("PREFIXD_KERNEL")
    if other is None:
        return pytest.importorskip(
            "prefixd.proto._native", reason="the native kernel was not built: no C compiler"
        )
    loader = ExtensionFileLoader("prefixd.proto._native", other)
    spec = spec_from_file_location("prefixd.proto._native", other, loader=loader)
    assert spec is not None
    loaded = module_from_spec(spec)
    loader.exec_module(loaded)
    return loaded


_native = _module()
FORMS = [(checksum, hashing) for checksum in _native.forms()[0] for hashing in _native.forms()[1]]
ROOM = st.integers(0, 700)


@pytest.fixture(params=FORMS, ids="-".join)
def form(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _native.form()
    _native.use(*request.param)
    yield
    _native.use(*before)


def noise(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.mark.usefixtures("form")
def test_checksums_and_checked_copies_are_those_of_the_library() -> None:
    for size in [*range(300), 511, 512, 513, 4096, 65_536 + 7, 300_001]:
        data, seed = noise(size, size), size * 7
        expected = crc32.iscsi(data, seed)
        assert _native.crc32c(data, seed) == expected
        room = bytearray(b"\xa5" * (size + 2))
        with memoryview(room) as whole:
            assert _native.copy_crc32c(whole[1 : 1 + size], data, seed) == expected
        assert room == b"\xa5" + data + b"\xa5"


@pytest.mark.usefixtures("form")
def test_digests_and_chains_are_those_of_hashlib() -> None:
    for size in [*range(150), 1000, 4097]:
        head, data = noise(33, size), noise(size, size + 1)
        assert _native.digests(head, [data]) == [hashlib.sha256(head + data).digest()]
    parent = noise(32)
    for block_tokens in (1, 4, 16, 61, 512):
        raw = bytes(byte & 0x7F for byte in noise(4 * 1100 + 2 * block_tokens))
        expected, before = [], parent
        for index in range(len(raw) // (4 * block_tokens)):
            part = raw[index * 4 * block_tokens : (index + 1) * 4 * block_tokens]
            position = (index + 5).to_bytes(4, "little")
            before = hashlib.sha256(before + position + part).digest()
            expected.append(before)
        assert _native.chain_keys(parent, 5, raw[: len(raw) // 4 * 4], block_tokens) == expected


def test_a_chain_refuses_ids_that_are_none() -> None:
    bad = b"\0\0\0\0" * 3 + b"\0\0\0\x80"
    with pytest.raises(ValueError, match="token id"):
        _native.chain_keys(bytes(32), 0, bad, 2)
    assert len(_native.chain_keys(bytes(32), 0, bad, 3)) == 1  # not part of a complete block
    with pytest.raises(ValueError, match="index"):
        _native.chain_keys(bytes(32), 2**32 - 1, bytes(8), 1)
    for wrong in ((bytes(31), 0, bytes(4), 1), (bytes(32), 0, bytes(5), 1), (bytes(32), 0, b"", 0)):
        with pytest.raises(ValueError, match=r"key is|tokens are"):
            _native.chain_keys(*wrong)


class Shrinking(list[Any]):
    """A list that its own item makes shorter."""

    def __index__(self) -> int:
        self.clear()
        return 1


def token_lists() -> Iterator[Any]:
    ids = [0, 1, 2**31 - 1, 7, 255]
    yield from (ids, tuple(ids), [], [True, False], [numpy.int64(5), numpy.uint8(6)], range(5))
    for wrong in (-1, 2**31, 2**32, 2**63, 2**64, -(2**70), 1.0, "1", None):
        yield [1, wrong, 2]
    for code in "bBhHiIlLqQ":
        yield array(code, [0, 1, 100])
        yield array(code, [0, (1 << 8 * array(code).itemsize - 1) - 1])
        if code.islower():
            yield array(code, [0, -1, 5])
        else:
            yield array(code, [5, (1 << 8 * array(code).itemsize) - 1])
    for kind in ("<i4", ">i4", "<u2", ">i8", "<i8", "<f4", "?"):
        yield numpy.array([1, 0, 1], dtype=kind)
    yield numpy.arange(20, dtype="i8")[::3]
    yield memoryview(array("q", range(20)))[::-2]
    yield memoryview(b"")


def test_token_ids_of_any_kind_are_the_same_bytes_in_both_forms(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def read(kernel: Any, given: Any) -> Any:
        monkeypatch.setattr(tokens, "native", kernel)
        try:
            return bytes(tokens.token_bytes(given))
        except InvalidTokens as problem:
            return str(problem)

    for ids in token_lists():
        assert read(_native, ids) == read(None, ids), ids
    assert _native.token_words([1, 2**31 - 1]) == b"\1\0\0\0\xff\xff\xff\x7f"
    shrinking = Shrinking([1, 2])
    shrinking[0] = shrinking
    with pytest.raises(IndexError):
        _native.token_words(shrinking)
    for wrong in ([2**31], [-1], array("b", [-1]), array("q", [2**31]), array("q", [-(2**40)])):
        with pytest.raises(ValueError, match="token id"):
            _native.token_words(wrong)
    for wrong in (numpy.zeros(3), numpy.zeros((2, 2), dtype="i4"), 5, ["1"]):
        with pytest.raises((TypeError, ValueError)):
            _native.token_words(wrong)


@given(st.lists(ROOM, max_size=5), st.lists(ROOM, max_size=5), st.randoms(use_true_random=False))
def test_pieces_on_both_sides_are_one_run_of_bytes(
    rooms: list[int], parts: list[int], chance: random.Random
) -> None:
    targets, data = [bytearray(size) for size in rooms], [chance.randbytes(size) for size in parts]
    joined = b"".join(data)
    if sum(rooms) != len(joined):
        with pytest.raises(ValueError, match="do not fill"):
            _native.copy_crc32c(targets, data)
        targets.append(bytearray(max(0, len(joined) - sum(rooms))))
        data.append(bytes(max(0, sum(rooms) - len(joined))))
        joined = b"".join(data)
    assert _native.copy_crc32c(targets, data, 9) == crc32.iscsi(joined, 9)
    assert b"".join(targets) == joined
    for target in targets:
        target[:] = bytes(len(target))
    _native.copy(tuple(targets), tuple(data))
    assert b"".join(targets) == joined


ENTRIES = st.lists(
    st.tuples(st.integers(0, 4000), st.lists(ROOM, max_size=3), st.booleans()), max_size=5
)


def packed(start: int, extent_bytes: int, crc: int = 0) -> bytes:
    """The row of an entry there, with its number in place of a link."""
    entry = IndexRow(Key(bytes(32)), 1, Content(1, 1), crc, 1, 1, (start, extent_bytes))
    return pack_row(entry, entry.location) + bytes(4)


@given(ENTRIES)
def test_gather_is_a_checked_copy_of_each(entries: list[tuple[int, list[int], bool]]) -> None:
    starts = [start for start, _, _ in entries]
    sources = [[noise(size, size) for size in sizes] for _, sizes, _ in entries]
    limits = [sum(sizes) for _, sizes, _ in entries]
    for around in (False, True):
        room, plain = bytearray(8192), bytearray(8192)
        crcs = _native.gather(room, starts, limits, sources, around)
        for start, pieces in zip(starts, sources, strict=True):
            part = b"".join(pieces)
            plain[start : start + len(part)] = part
        assert room == plain
        assert crcs == [crc32.iscsi(b"".join(pieces)) for pieces in sources]


@pytest.mark.usefixtures("form")
def test_gather_around_the_cache_stores_all_bytes_wherever_they_go() -> None:
    """Whole lines of the cache go around it only from a place where one begins."""
    with mmap.mmap(-1, 20_000) as memory:
        for start in (0, 16, 64, 100):
            for size in (0, 63, 64, 255, 256, 300, 4096 + 7, 16_384):
                data = noise(size, size)
                memory[:] = bytes(20_000)
                crcs = _native.gather(memory, [start], [size], [data], True)
                assert memory[:] == bytes(start) + data + bytes(20_000 - start - size)
                assert crcs == [crc32.iscsi(data)]


@pytest.mark.parametrize("where", ["memory", "file"])
@given(ENTRIES, st.randoms(use_true_random=False))
def test_entries_are_copied_from_where_their_rows_say(
    where: str, entries: list[tuple[int, list[int], bool]], chance: random.Random
) -> None:
    """And compared with the CRC32C of the row, one of which may be wrong."""
    memory = noise(8192)
    rows, expected, wrong = b"", [], []
    for number, (start, sizes, checked) in enumerate(entries):
        data = memory[start : start + sum(sizes)]
        flip = chance.randrange(3) == 0
        rows += packed(start, len(data), crc32.iscsi(data) ^ flip)
        expected.append(data)
        if flip and checked:
            wrong.append(number)
    targets = [[bytearray(size) for size in sizes] for _, sizes, _ in entries]
    check = [checked for _, _, checked in entries]
    if where == "memory":
        assert _native.restore(rows, targets, check, memory) == wrong
    else:
        with tempfile.TemporaryFile() as file:
            file.write(memory)
            file.flush()
            found = _native.read_rows(rows, targets, check, file.fileno(), 2**30)
        assert found == (len(entries), wrong)
    assert [b"".join(pieces) for pieces in targets] == expected


def test_a_file_is_read_up_to_the_first_entry_that_is_not_there() -> None:
    data = noise(700_000)
    sizes = [10, 300_000, 0, 399_000, 1000]
    starts = [0, 10, 5, 300_010, 699_500]
    rows = b"".join(packed(*place) for place in zip(starts, sizes, strict=True))
    targets = [bytearray(size) for size in sizes]
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.flush()
        fd = file.fileno()
        assert _native.read_rows(rows, targets, [True] * 5, fd, 2**30) == (4, [0, 1, 3])
        assert targets[:4] == [data[at : at + n] for at, n in zip(starts, sizes, strict=True)][:4]
        assert _native.read_rows(rows, targets, [False] * 5, fd, 300_000) == (2, [])
        assert _native.read_rows(rows[96 * 4 :], targets[4:], [True], fd, 1) == (0, [])
    assert _native.read_rows(rows, targets, [True] * 5, -1, 2**30) == (0, [])
    with pytest.raises(OSError, match="does not hold"):
        _native.read_rows(packed(2**64 - 5, 10), [bytearray(10)], [True], fd, 1)


def test_nothing_moves_before_everything_was_checked() -> None:
    memory, good, long = noise(100), bytearray(10), bytearray(11)
    for second, target in (
        (packed(90, 11), long),  # beyond the end
        (packed(0, 10), long),  # longer than its extent
        (packed(101, 0), bytearray()),
        (packed(2**64 - 1, 2**64 - 1), long),
    ):
        with pytest.raises(OSError, match="does not hold"):
            _native.restore(packed(0, 10) + second, [good, target], [True, True], memory)
        assert good == bytes(10)
    room = bytearray(100)
    for limits in ([10, 10], [10, 9]):
        with pytest.raises(OSError, match="does not hold"):
            _native.gather(room, [0, 95 if limits[1] == 10 else 0], limits, [b"x" * 10] * 2, True)
        assert room == bytes(100)
    row = packed(0, 10)
    for wrong in (
        (row, [bytes(10)], [True], memory),  # read-only
        (row, [good, good], [True], memory),
        (row, [good], [True, True], memory),
        (row[1:], [good], [True], memory),
        (row, ["text"], [True], memory),
        (row, iter([good]), [True], memory),
        (row, [good], [True], "text"),
        ("text", [good], [True], memory),
    ):
        with pytest.raises((BufferError, ValueError, TypeError, OverflowError)):
            _native.restore(*wrong)
        assert good == bytes(10)
    for fd, most in (("text", 1), (0, -1), (0, "text")):
        with pytest.raises((TypeError, OverflowError)):
            _native.read_rows(row, [good], [True], fd, most)
    for wrong in (
        (bytes(100), [0], [10], [good]),  # read-only
        (room, [0], [10], [good, good]),
        (room, [-1], [10], [good]),
        (room, [2**70], [10], [good]),
        (room, ["0"], [10], [good]),
        (room, [0], [10], ["text"]),
    ):
        with pytest.raises((BufferError, ValueError, TypeError, OverflowError)):
            _native.gather(*wrong, False)
        assert room == bytes(100)


def a_hostile_index(chance: random.Random) -> bytes:
    """A right header, and behind it anything."""
    layout = IndexLayout(max_heads=8, max_rows=chance.randrange(12, 60))
    header = pack_header(layout, bytes(16), chance.getrandbits(128) | 1)
    data = bytearray(chance.randbytes(layout.size_bytes) if chance.random() < 0.5 else b"")
    data = data or bytearray(layout.size_bytes)
    data[: len(header)] = header
    data[128:136] = (0x4556494C_58444E49).to_bytes(8, "little")
    data[136:144] = chance.choice([1, 5, 8, 99, chance.getrandbits(64)]).to_bytes(8, "little")
    rows = range(layout.first_row, layout.end_row)
    for head in range(8):
        number = chance.choice([0, *rows, *rows, 2**32 - 1, chance.getrandbits(32)])
        data[4096 + 4 * head : 4100 + 4 * head] = number.to_bytes(4, "little")
    for number in rows:
        start = number * ROW_BYTES
        row = bytearray(chance.randbytes(88))
        row[:32] = KEYS[chance.randrange(len(KEYS))]
        row[72:80] = chance.choice([row[32:40], row[72:80]])
        row[80:84] = chance.choice([0, 1, 2, 3, 20]).to_bytes(4, "little")
        row[84:88] = chance.choice([*rows, 0, 2**31]).to_bytes(4, "little")
        kind = chance.choice([0x33333333, 0x55555555, 0x66666666])
        checksum = crc32.iscsi(bytes(row)) ^ (kind if chance.random() < 0.9 else 1)
        link = chance.choice([0, *rows, 2**32 - 1])
        row += checksum.to_bytes(4, "little") + link.to_bytes(4, "little")
        data[start : start + ROW_BYTES] = row
    return bytes(data)


KEYS = [noise(32, seed) for seed in range(4)]


class LazyKeys(Sequence[bytes]):
    """A sequence that is looked up in pieces."""

    def __init__(self, keys: list[bytes]) -> None:
        self.keys = keys

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: Any) -> Any:
        return self.keys[index]


@pytest.mark.parametrize("first", range(0, times(300, 3_000), 25))
def test_an_index_of_any_content_is_read_alike(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a hostile daemon's index is read in bounds, and both forms end with the same rows."""

    def read(reader: IndexReader) -> list[Any]:
        found = reader.find(KEYS)
        placed = [each for each in found if each is not None]
        stops = [reader.find(KEYS, stop_at=stop) for stop in (False, True)]
        tiers = [list(reader.tiers(KEYS, stop_at=stop)) for stop in (False, True, None)]
        ones = [reader.tier_of(key) for key in KEYS]
        rows = []
        for keys in (KEYS, LazyKeys(KEYS)):
            for stop in (False, True, None):
                some = reader.find_rows(keys, stop_at=stop)
                rows.append(some and (list(some[0]), list(some[1]), reader.unchanged(some[0])))
        return [
            *(found, stops, tiers, ones, rows),
            reader.unchanged(placed),
            [reader.unchanged([p]) for p in placed],
        ]

    for seed in range(first, first + 25):
        reader = IndexReader(a_hostile_index(random.Random(seed)))
        monkeypatch.setattr(index_reader, "native", _native)
        natively = read(reader)
        monkeypatch.setattr(index_reader, "native", None)
        assert read(reader) == natively, seed
        reader.close()


@pytest.mark.parametrize(("free", "fresh"), [(1, 45), (0, 1), (42, 45), (0, 42)])
def test_header_and_heads_are_no_rows(free: int, fresh: int) -> None:
    """85 rows of 96 bytes, behind 4096 bytes of header and two heads."""
    data = bytearray(8192)
    entry = IndexRow(KEYS[0], 1, Content(1, 1), 1, 1, 1, (0, 4096))
    assert _native.put_rows(data, bytes(16), 2, free, fresh, 85, 5, [entry], 0)[0] == 0
    assert data == bytes(8192)
    for head in (4096, 4100):
        data[head] = free or fresh
    for call, each in ((_native.put_rows, entry), (_native.delete_rows, KEYS[0])):
        before = bytes(data)
        assert call(data, bytes(16), 2, 43, 45, 85, 5, [each], 0)[0] == 0
        assert data == before, "nor is what a chain leads to"


@pytest.mark.parametrize("first", range(0, times(100, 1_000), 25))
def test_an_index_of_any_content_is_written_within_its_bounds(first: int) -> None:
    """A bug of the writer must not become a write elsewhere; the sanitised form sees it."""
    for seed in range(first, first + 25):
        chance = random.Random(seed)
        data = bytearray(a_hostile_index(chance))
        rows = len(data) // ROW_BYTES
        before = bytes(data)
        entry = IndexRow(KEYS[0], 1, Content(1, 1), 1, 1, 1, (0, 4096))
        entries = [entry._replace(key=chance.choice([*KEYS, noise(32, n)])) for n in range(6)]
        for _ in range(4):
            count, secured = chance.randrange(1, 9), chance.randrange(rows + 1)
            state = (chance.randrange(rows), chance.randrange(rows + 1), secured, 5)
            writer = (data, chance.randbytes(16), count, *state)
            at, free, fresh = _native.put_rows(*writer, entries, 0)
            assert 0 <= at <= 6
            assert free < 2**32
            assert fresh <= max(state[1], secured)
            at, listed, *_ = _native.delete_rows(*writer, [entry.key for entry in entries], 0)
            assert 0 <= listed <= at <= 6
        assert len(data) == len(before)
        assert data[:128] == before[:128]
    entry = IndexRow(KEYS[0], 1, Content(1, 1), 1, 1, 1, (0, 4096))
    good = (bytearray(8192), bytes(16), 1, 0, 45, 85, 0)
    for place, wrong in ((0, bytearray(4000)), (1, bytes(15)), (2, 0), (2, 1025), (3, 86), (4, 87)):
        for call, last in ((_native.put_rows, [entry]), (_native.delete_rows, [KEYS[0]])):
            with pytest.raises(ValueError, match="index is not so large"):
                call(*good[:place], wrong, *good[place + 1 :], last, 0)
    with pytest.raises(BufferError):
        _native.put_rows(bytes(8192), *good[1:], [entry], 0)
    assert _native.put_rows(*good, [None, entry], 0)[0] == 0
    assert _native.put_rows(*good, [entry], 1)[0] == 1
    with pytest.raises(ValueError, match="32 bytes"):
        _native.delete_rows(*good, [KEYS[0], bytes(3)], 0)


def test_an_index_has_to_be_as_large_as_it_is_said_to_be() -> None:
    arguments: list[tuple[Any, ...]] = [
        (bytes(4000), 1, 1, bytes(16)),
        (bytes(8192), 0, 1, bytes(16)),
        (bytes(8192), 2000, 1, bytes(16)),
        (bytes(8192), 1, 86, bytes(16)),
        (bytes(8192), 1, 1, bytes(15)),
        (memoryview(bytes(8193))[1:], 1, 1, bytes(16)),
    ]
    for wrong in arguments:
        with pytest.raises(ValueError, match="index is not so large"):
            _native.find(*wrong, [bytes(32)], -1)
        with pytest.raises(ValueError, match="index is not so large"):
            _native.tiers(*wrong, [bytes(32)], -1)
    with pytest.raises(ValueError, match="a key is 32 bytes"):
        _native.find(bytes(8192), 1, 85, bytes(16), [bytes(31)], -1)
    for packed_wrongly in (bytes(95), bytes(97), "text", None):
        with pytest.raises((TypeError, ValueError)):
            _native.moved(bytes(8192), 1, 85, bytes(16), packed_wrongly)


@pytest.mark.parametrize(
    ("variable", "begins"),
    [("1", "pure Python (PREFIXD_PURE"), ("0", "native ("), ("", "native (")],
)
def test_the_form_is_said_in_words(variable: str, begins: str) -> None:
    code = "from prefixd.proto import kernel, payload; print(kernel.FORM); payload.crc32c(b'x')"
    environment = {**os.environ, "PREFIXD_PURE": variable}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(begins)
    assert done.stderr == ""


#: For each `ABI`, what the functions look like. With a change of them the number goes up, also if
#: only what one does has changed.
SIGNATURES = {1: "c97a780154cf87b7", 2: "54fd8d18476e48d1", 3: "8f25f0fcd4e7bcaf"}


def test_a_change_of_the_functions_goes_with_another_number() -> None:
    stub = ast.parse((ROOT / "proto/_native.pyi").read_text())
    functions = [node for node in stub.body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        function.body = [ast.Pass()]
    looks = hashlib.sha256("".join(map(ast.unparse, functions)).encode()).hexdigest()
    assert SIGNATURES[kernel.ABI] == looks[:16]
    assert f"enum {{ KERNEL_ABI = {kernel.ABI} }};" in (NATIVE / "module.c").read_text()


@pytest.mark.parametrize("others", ["", f"ABI = {kernel.ABI + 1}"], ids=["older", "newer"])
def test_a_kernel_of_another_version_is_not_used(others: str) -> None:
    """One that was left by an earlier installation failed saves with a TypeError."""
    code = (
        "import sys, types\n"
        "other = sys.modules['prefixd.proto._native'] = types.ModuleType('other')\n"
        "other.__file__ = '/there/_native.so'\n"
        f"exec({others!r}, vars(other))\n"
        "from prefixd.proto import kernel, payload\n"
        "print(kernel.FORM, payload.crc32c(b'123456789') == 0xE3069283)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PREFIXD_PURE": "0"},
        capture_output=True,
        text=True,
        check=True,
    )
    why = "the native kernel is of another version of prefixd"
    assert done.stdout == f"pure Python ({why}) True\n"
    assert f"{why} and is not used: install prefixd again" in done.stderr
    assert "(/there/_native.so)" in done.stderr


def test_this_process_runs_the_form_that_its_environment_asks_for() -> None:
    pure = os.environ.get("PREFIXD_PURE", "") not in ("", "0")
    assert (kernel.native is None) == pure


def test_both_forms_make_the_same_keys() -> None:
    code = (
        "from prefixd.proto.keys import Key, Namespace, block_keys;"
        "n = Namespace(bytes(32), 'q', bytes(32));"
        "print([k.hex() for k in block_keys(n, list(range(100)), 7, include_partial=True)])"
    )
    expected = block_keys(Namespace(bytes(32), "q", bytes(32)), range(100), 7, include_partial=True)
    for pure in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PREFIXD_PURE": pure},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.strip() == str([key.hex() for key in expected])


def test_the_kernel_holds_without_python(tmp_path: Path) -> None:
    """`make kernel-san` does the same with sanitisers, longer, and for AArch64."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    sources = [str(NATIVE / f"{name}.c") for name in ("crc32c", "sha256", "rows")]
    check = tmp_path / "check"
    flags = ["-O2", "-Wall", "-Wextra", "-Werror"]
    main = str(ROOT / "tests/kernel/check.c")
    subprocess.run([compiler, *flags, main, *sources, "-o", str(check)], check=True)
    done = subprocess.run([str(check), "7", "2000"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("2000 inputs of each kind are right")


def test_a_journal_is_the_same_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Records that overwrite others, chains within a batch, and filters that are exchanged."""
    chance = random.Random(11)
    keys = [Key(chance.randbytes(32)) for _ in range(300)]
    batches = [
        (
            chance.choice(list(Happening)),
            [
                EntryState(
                    chance.choice(keys),
                    *(1, (), chance.choice(list(Tier)), chance.choice(list(SaveReason))),
                    *(1, 0, Content(1, 1), 0),
                )
                for _ in range(chance.randrange(30))
            ],
            chance.randrange(2**63),
            chance.randrange(2**32),
        )
        for _ in range(120)
    ]
    journals = []
    for form in (_native, None):
        monkeypatch.setattr(journal_module, "native", form)
        journals.append(journal := Journal(4000))
        for batch in batches:
            journal.note(*batch)
    one, other = journals
    assert one.written == other.written > 3 * one.most > 3 * len(set(keys)) // 4
    assert (one._ring, one._last) == (other._ring, other._last)
    assert vars(one._left) == vars(other._left)
    assert {key for key in keys if one.fate(key)} >= {e.key for e in batches[-1][1]}


def test_a_record_that_can_not_be_is_refused_before_any_is_written() -> None:
    ring, last, left = bytearray(400), array("I", bytes(16)), bytearray(8)
    entry = EntryState(KEYS[0], 1, (), Tier.RAM, SaveReason.COLD, 1, 0, Content(1, 1), 0)
    good = (ring, last, 0, 1, 0, 1, [entry], left)
    short = EntryState(Key(b"short"), 1, (), Tier.RAM, SaveReason.COLD, 1, 0, Content(1, 1), 0)
    for place, bad, error in (
        (0, bytes(400), BufferError),
        (0, bytearray(39), ValueError),
        (1, array("I", bytes(12)), ValueError),
        (1, bytearray(), ValueError),
        (2, -1, OverflowError),
        (3, 2**63, OverflowError),
        (4, 2**32, ValueError),
        (5, 256, ValueError),
        (6, entry, TypeError),
        (6, [entry, short], ValueError),
        (6, [entry, None], AttributeError),
        (7, bytearray(3), ValueError),
        (7, bytearray(), ValueError),
    ):
        with pytest.raises(error):
            _native.note(*good[:place], bad, *good[place + 1 :])
        assert (ring, last, left) == (bytes(400), array("I", bytes(16)), bytes(8)), bad
    with pytest.raises(TypeError):
        _native.note(*good[:-1])
    _native.note(*good)
    assert ring[:16] == KEYS[0][:16]
