"""Reads and writes text files: plain, gzip, zstd, xz, bzip2 or a standard stream.

Reading detects compression by content and numbers the lines. Memory is bounded whatever the file
is: it is streamed, a line has at most `MAX_LINE_BYTES`, and compressed input is expanded a few KiB
at a time. Writing goes to a file beside the named one, which takes its place when it is whole.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import io
import lzma
import os
import stat
import sys
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_hex
from typing import IO, TYPE_CHECKING, Any, TypeAlias, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


STDIN = "-"


#: A request of a million 512-token blocks is a line of about 10 MB.
MAX_LINE_BYTES = 64 << 20


#: Compressed bytes expanded at a time. Zstd expands at most 32,768-fold, the others less, so one
#: step yields at most 128 MiB, even from a malicious file.
STEP_BYTES = 4096


_BUFFER_BYTES = 1 << 20


Stream: TypeAlias = "io.BufferedReader[Any]"


_GZIP_MAGIC = b"\x1f\x8b"


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


_XZ_MAGIC = b"\xfd7zXZ\x00"


_BZIP2_MAGIC = b"BZh"


_UTF8_BOM = b"\xef\xbb\xbf"


#: Fields of requests fit into a signed 64-bit integer.
MAX_FIELD = (1 << 63) - 1


#: Files that a folder is searched for, each also compressed.
_SUFFIXES = (".jsonl", ".json", ".ndjson")
_COMPRESSED = (".gz", ".zst", ".xz", ".bz2")


def display_name(path: str) -> str:
    """A path as messages show it."""
    return "standard input" if path == STDIN else path


def input_files(names: Iterable[str]) -> list[str]:
    """The files that names stand for: files, folders (their JSON files, sorted, also those in
    folders within), globs (sorted) and `-`, in the order of the names.

    Raises `TraceError` for a folder or a glob without files, and for a file that comes twice.
    """
    found: list[str] = []
    for name in names:
        if name == STDIN:
            found.append(name)
        elif Path(name).is_dir():
            inside = [str(p) for p in sorted(Path(name).rglob("*")) if _is_json_file(p)]
            if not inside:
                raise TraceError(name, 0, f"no file in it ends in {', '.join(_SUFFIXES)}")
            found += inside
        elif glob.has_magic(name) and not Path(name).exists():
            # Not Path.glob, which takes no absolute pattern.
            matches = sorted(path for path in glob.glob(name) if Path(path).is_file())  # noqa: PTH207
            if not matches:
                raise TraceError(name, 0, "no file matches it")
            found += matches
        else:
            found.append(name)
    seen: dict[str, str] = {}
    for path in found:
        # A file and its compressed copy beside it are one, too.
        real = path if path == STDIN else _plain_name(os.path.realpath(path))
        if real in seen:
            twice = "the file is named twice" if seen[real] == path else f"{seen[real]} is the same"
            raise TraceError(path, 0, f"{twice}; its requests would count twice")
        seen[real] = path
    return found


def _plain_name(name: str) -> str:
    """A name without what compressed files end in."""
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def _is_json_file(path: Path) -> bool:
    name = _plain_name(path.name)
    return name.endswith(_SUFFIXES) and path.is_file() and not path.name.startswith(".")


class TraceError(ValueError):
    """A trace that cannot be read: the file, the line and the problem.

    `line_number` counts from 1; 0 means the file as a whole.
    """

    def __init__(self, path: Path | str, line_number: int, problem: str) -> None:
        super().__init__(str(path), line_number, problem)  # all three, so that it pickles
        self.path = str(path)
        self.line_number = line_number
        self.problem = problem

    def __str__(self) -> str:
        name = display_name(self.path)
        where = f"{name}:{self.line_number}" if self.line_number else name
        return f"{where}: {self.problem}"


def _buffered(raw: Any) -> Stream:
    return io.BufferedReader(raw, _BUFFER_BYTES)


def _unpacked(frames: _Frames) -> Stream:
    return io.BufferedReader(cast(Any, frames), STEP_BYTES)


class _Frames(io.RawIOBase):
    """The content of one or more zstd frames, or xz or bzip2 streams. Raises EOFError if the last
    one is truncated, OSError for anything else behind them.

    The readers of these packages end silently at the first: a truncated or damaged trace would look
    like a shorter one.
    """

    def __init__(self, raw: Stream, kind: str, new_frame: Callable[[], Any],
                 errors: tuple[type[Exception], ...]) -> None:  # fmt: skip
        self._raw = raw
        self._kind = kind
        self._new_frame = new_frame
        self._errors = errors
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        while not self._ready:
            if not self._expand():
                return 0
        target = memoryview(buffer).cast("B")
        count = min(len(target), len(self._ready))
        target[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _expand(self) -> bool:
        """Decompress one step of input into `_ready`, which may stay empty. False at the end."""
        data = self._raw.read(STEP_BYTES)
        if not data:
            if self._frame is not None:
                raise EOFError(f"the {self._kind} data is cut short")
            return False
        parts: list[bytes] = []
        while data:
            if self._frame is None:
                data = data.lstrip(b"\0")  # between the streams of an xz file
                if not data:
                    break
                self._frame = self._new_frame()
            try:
                parts.append(self._frame.decompress(data))
            except self._errors as error:
                raise OSError(f"damaged {self._kind} data ({error})") from None
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
        self._ready = memoryview(b"".join(parts))
        return True


class LineSource:
    """The lines of one file as `(line_number, bytes)`, without blank ones.

    Iterating again starts over (standard input can be read once). `consumed_bytes` and
    `total_bytes` (None if unknown) count bytes of the stored file, for progress bars.

    Raises `TraceError` for every problem with the file itself. A line that is too long is None, so
    that the caller decides whether to go on.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self.total_bytes: int | None = None
        self.line_number = 0
        self._raw: Stream | None = None
        self._consumed = 0
        if self.path != STDIN:
            with suppress(OSError):  # `open` will report it
                self.total_bytes = Path(self.path).stat().st_size

    @property
    def consumed_bytes(self) -> int:
        """Bytes of the stored file read so far."""
        if self._raw is not None and not self._raw.closed:
            with suppress(OSError, ValueError):  # a pipe has no position
                self._consumed = self._raw.tell()
        return self._consumed

    def __iter__(self) -> Generator[tuple[int, bytes | None], None, None]:
        """Numbered lines with their line ends; None in place of a line that is too long."""
        with self.opened() as stream:
            yield from self.lines(stream)

    def lines(self, stream: Stream) -> Iterator[tuple[int, bytes | None]]:
        """The lines of a stream from `opened`."""
        while True:
            self.line_number += 1
            line: bytes | None = stream.readline(MAX_LINE_BYTES)
            if not line:
                return
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                line = None
                while (rest := stream.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
            elif self.line_number == 1:
                line = line.removeprefix(_UTF8_BOM)
            if line is None or not line.isspace():
                yield self.line_number, line

    @contextmanager
    def opened(self) -> Iterator[Stream]:
        """The decompressed bytes of the file. Errors become a `TraceError` at `line_number`, which
        the caller advances."""
        self.line_number = 0
        raw = self._open_raw()
        try:
            yield self._decompressed(raw)
        except EOFError:
            problem = "the compressed data is cut short"
            raise TraceError(self.path, self.line_number, problem) from None
        except (zlib.error, gzip.BadGzipFile) as error:
            problem = f"damaged gzip data ({error})"
            raise TraceError(self.path, self.line_number, problem) from None
        except OSError as error:
            problem = error.strerror or str(error)
            raise TraceError(self.path, self.line_number, problem) from None
        finally:
            self._consumed = self.consumed_bytes
            if self.path != STDIN:
                raw.close()

    def _open_raw(self) -> Stream:
        if self.path == STDIN:
            stdin = sys.stdin.buffer
            # Standard input may have been replaced by a stream without peek().
            raw: Stream = stdin if isinstance(stdin, io.BufferedReader) else _buffered(stdin)
        else:
            try:
                raw = _buffered(Path(self.path).open("rb", buffering=0))  # noqa: SIM115 (ours to close)
            except OSError as error:
                problem = (error.strerror or str(error)).lower()
                raise TraceError(self.path, 0, f"cannot be opened: {problem}") from None
        self._raw = raw
        return raw

    def _decompressed(self, raw: Stream) -> Stream:
        head = raw.peek(4)[:4]
        # A pipe may have delivered only a part of the magic number. No JSON starts like either.
        if head and _GZIP_MAGIC.startswith(head[:2]):
            # Not buffered again: a large read that meets the end of a truncated file would lose
            # what it had read.
            return cast(Stream, gzip.GzipFile(fileobj=raw))
        # Buffered by little, for the same reason.
        if head and _XZ_MAGIC.startswith(head):
            return _unpacked(_Frames(raw, "xz", lzma.LZMADecompressor, (lzma.LZMAError,)))
        if head[:3] == _BZIP2_MAGIC:
            return _unpacked(_Frames(raw, "bzip2", bz2.BZ2Decompressor, (OSError,)))
        if head and _ZSTD_MAGIC.startswith(head):
            try:
                import zstandard  # an extra: only needed for zstd files
            except ImportError:
                problem = "is zstd-compressed; reading it needs `pip install zstandard`"
                raise TraceError(self.path, 0, problem) from None
            new_frame = zstandard.ZstdDecompressor().decompressobj
            return _unpacked(_Frames(raw, "zstd", new_frame, (zstandard.ZstdError,)))
        return raw


@contextmanager
def open_output(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a file for writing bytes, compressed by its suffix; `-` is standard output.

    The file appears, or changes, when everything is written: an error, or an interruption, leaves
    the earlier one as it was. Raises `TraceError` if it cannot be written.
    """
    if str(path) == STDIN:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with written_aside(Path(path)) as raw, _compressing(raw, Path(path)) as file:
            yield file
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise TraceError(path, 0, f"cannot be written: {problem}") from None


@contextmanager
def written_aside(path: Path) -> Iterator[IO[bytes]]:
    """Write a file beside `path` that takes its place at the end, with its permissions. What is no
    regular file, such as /dev/null or a pipe, is written directly. Raises OSError."""
    target = path.resolve()  # the file that a link names is replaced, not the link
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with target.open("wb") as raw:
            yield raw
        return
    if mode is not None and not os.access(target, os.W_OK):
        raise PermissionError(13, "permission denied", str(target))
    aside = target.with_name(f".{target.name}.{token_hex(6)}.tmp")
    try:
        with aside.open("xb") as raw:
            yield raw
            if mode is not None:
                os.fchmod(raw.fileno(), stat.S_IMODE(mode))
        aside.replace(target)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
        raise


@contextmanager
def _compressing(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        # No name and time in the header, so that the same requests give the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
            yield cast(IO[bytes], packed)
    elif path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            problem = "writing zstd needs `pip install zstandard`"
            raise TraceError(path, 0, problem) from None
        with zstandard.ZstdCompressor().stream_writer(raw, closefd=False) as stream:
            yield stream
    else:
        yield raw
