"""Lines of files: numbered, streamed, decompressed according to their content."""

import gzip
import io
import sys
from pathlib import Path

import pytest
import zstandard

from prefixd.client.lab.trace_file import LineSource, TraceError, open_output

TEXT = "first\n\n  \nfourth\nlast without an end"
LINES = [(1, b"first\n"), (4, b"fourth\n"), (5, b"last without an end")]


@pytest.mark.parametrize("compress", [bytes, gzip.compress, zstandard.compress])
def test_lines_are_numbered_and_blank_ones_left_out(tmp_path: Path, compress: object) -> None:
    assert callable(compress)
    path = tmp_path / "file"
    path.write_bytes(compress(TEXT.encode()))
    source = LineSource(path)
    assert list(source) == LINES
    assert list(source) == LINES  # again, from the start
    assert source.consumed_bytes == source.total_bytes == path.stat().st_size


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("\ufeffa\n\ufeffb\n", encoding="utf-8")
    assert list(LineSource(path)) == [(1, b"a\n"), (2, "\ufeffb\n".encode())]


def test_progress_while_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 99 + b"\n" + b"y\n" * (2 << 20))
    source = LineSource(path)
    lines = iter(source)
    next(lines)
    assert source.total_bytes is not None
    assert 0 < source.consumed_bytes <= source.total_bytes // 2
    del lines  # a reader that stops early closes the file


def test_a_stopped_reader_leaves_no_open_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text(TEXT)
    with LineSource(path).opened() as stream:
        assert stream.readline() == b"first\n"
    assert stream.closed


def test_a_pipe_that_delivers_byte_by_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trickle(io.RawIOBase):
        """A pipe whose writer is slow: one byte at a time."""

        def __init__(self, data: bytes) -> None:
            self._data = data

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
            count = min(1, len(self._data), len(buffer))
            buffer[:count], self._data = self._data[:count], self._data[count:]
            return count

    for data in (TEXT.encode(), gzip.compress(TEXT.encode()), zstandard.compress(TEXT.encode())):
        stdin = io.TextIOWrapper(io.BufferedReader(Trickle(data)))
        monkeypatch.setattr(sys, "stdin", stdin)
        source = LineSource("-")
        assert list(source) == LINES
        assert source.total_bytes is None


def test_where_an_error_is() -> None:
    assert str(TraceError("a.jsonl", 3, "is wrong")) == "a.jsonl:3: is wrong"
    assert str(TraceError("a.jsonl", 0, "is wrong")) == "a.jsonl: is wrong"
    assert str(TraceError("-", 3, "is wrong")) == "standard input:3: is wrong"


def test_a_zstd_bomb_is_expanded_in_small_steps(tmp_path: Path) -> None:
    """A line of a gigabyte in a few kB of file: too long, and never completely in memory."""
    packed = zstandard.ZstdCompressor().compressobj()
    zeros = bytes(1 << 20)
    path = tmp_path / "file"
    with path.open("wb") as file:
        for _ in range(80):
            file.write(packed.compress(zeros))
        file.write(packed.compress(b"\nend\n") + packed.flush())
    assert path.stat().st_size < 20_000
    assert list(LineSource(path)) == [(1, None), (2, b"end\n")]


def write_half(path: Path) -> None:
    with open_output(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt


def test_an_interrupted_write_leaves_the_earlier_file(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text("whole\n")
    link = tmp_path / "link"
    link.symlink_to(path)
    for name in (path, link, tmp_path / "new"):
        with pytest.raises(KeyboardInterrupt):
            write_half(name)
    assert path.read_text() == "whole\n"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["link", "t.jsonl"]
    with open_output(link) as file:
        file.write(b"new")
    assert link.is_symlink()
    assert path.read_text() == "new"
    with open_output("/dev/null") as file:  # no regular file: written as it is
        file.write(b"x")
