"""Lines of a text file, numbered: plain, gzip or zstd (told apart by content), or standard input.

Memory is bounded whatever the file is: the file is streamed, a line may have at most
`MAX_LINE_BYTES`, and compressed input is expanded a few KiB at a time.
"""

from __future__ import annotations

import gzip
import io
import sys
import zlib
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, ClassVar, Protocol, TypeAlias, cast

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer


STDIN = "-"


#: A request of a million 512-token blocks is a line of about 10 MB.
MAX_LINE_BYTES = 64 << 20


#: Compressed bytes handed to zstd at a time: a frame expands at most 32,768-fold, so that one
#: step yields at most 128 MiB, even from a file made to hurt.
ZSTD_STEP_BYTES = 4096


_BUFFER_BYTES = 1 << 20


Stream: TypeAlias = "io.BufferedReader[Any]"


_GZIP_MAGIC = b"\x1f\x8b"


_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


_UTF8_BOM = b"\xef\xbb\xbf"


def display_name(path: str) -> str:
    """A path as sentences have it."""
    return "standard input" if path == STDIN else path


class TraceError(ValueError):
    """A trace that cannot be read: which file, which line, what is wrong with it.

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


class _Decompressor(Protocol):
    """What is used of `zstandard`'s decompression object."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes) -> bytes: ...


class _ZstdStream(io.RawIOBase):
    """The content of one or more zstd frames; EOFError where the last one is cut short.

    `zstandard.stream_reader` ends quietly in the middle of a frame, which would pass a
    truncated trace off as a shorter one.
    """

    def __init__(self, raw: Stream) -> None:
        import zstandard  # an extra: only needed for zstd files

        self._raw = raw
        self._new_frame = zstandard.ZstdDecompressor().decompressobj
        self._error: type[Exception] = zstandard.ZstdError
        self._frame: _Decompressor | None = None
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
        """Decompress one step of input into `_ready` (maybe nothing yet); False at the end."""
        data = self._raw.read(ZSTD_STEP_BYTES)
        if not data:
            if self._frame is not None:
                raise EOFError("the zstd frame is cut short")
            return False
        parts: list[bytes] = []
        while data:
            if self._frame is None:
                self._frame = self._new_frame()
            try:
                parts.append(self._frame.decompress(data))
            except self._error as error:
                raise OSError(f"damaged zstd data ({error})") from None
            data = b""
            if self._frame.eof:
                data, self._frame = self._frame.unused_data, None
        self._ready = memoryview(b"".join(parts))
        return True


class LineSource:
    """The lines of one file as `(line_number, bytes)`, without blank ones.

    Iterating again starts again (standard input can be read once). `consumed_bytes` and
    `total_bytes` (None where unknown) are in bytes of the file as stored, for progress bars.

    Raises `TraceError` for everything that can be wrong with the file itself; a line that is
    too long comes as None, so that the caller decides whether to go on.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = str(path)
        self.total_bytes: int | None = None
        self.line_number = 0
        self._raw: Stream | None = None
        self._consumed = 0
        if self.path != STDIN:
            with suppress(OSError):  # reported by the open that follows
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
        """What iterating yields, of a stream that `opened` gave."""
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
        """The decompressed bytes of the file; what goes wrong with it is a `TraceError` that
        names `line_number`, which is the reader's to move."""
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
        # A pipe may have delivered less than a whole magic number: no JSON starts like either.
        if head and _GZIP_MAGIC.startswith(head[:2]):
            # Not buffered once more: a large read that meets the end of a truncated file
            # would take what it had read with it.
            return cast(Stream, gzip.GzipFile(fileobj=raw))
        if head and _ZSTD_MAGIC.startswith(head):
            try:
                return _buffered(_ZstdStream(raw))
            except ImportError:
                problem = "is zstd-compressed; reading it needs `pip install 'prefixd[zstd]'`"
                raise TraceError(self.path, 0, problem) from None
        return raw


class RequestReader:
    """What the readers of request files have in common: how far they are, and what was bad."""

    #: what one bad piece of the file is called
    UNIT: ClassVar[str]

    def __init__(self, path: Path | str, limit: int | None, skip_bad: bool) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"the limit must not be negative, got {limit}")
        self.path = str(path)
        self.limit = limit
        self.skip_bad = skip_bad
        self.requests = 0
        #: pieces skipped because of `skip_bad`, and what the first of them would have raised
        self.bad = 0
        self.first_bad: TraceError | None = None
        self._source = LineSource(path)

    @property
    def consumed_bytes(self) -> int:
        """Bytes of the file (as stored, compressed or not) read so far."""
        return self._source.consumed_bytes

    @property
    def total_bytes(self) -> int | None:
        """Size of the file as stored; None for standard input."""
        return self._source.total_bytes

    def warnings(self) -> list[str]:
        """What a user of the result should know about the input, one sentence each."""
        if self.first_bad is None:
            return []
        units = self.UNIT if self.bad == 1 else f"{self.UNIT}s"
        return [f"{self.bad:,} bad {units} skipped; the first: {self.first_bad}"]

    def _begin(self) -> None:
        self.requests = self.bad = 0
        self.first_bad = None

    def _end(self) -> None:
        """Raises TraceError for a file without any request."""
        if not self.requests:
            problem = "no request in it"
            if self.first_bad is not None:
                problem += f", all {self.UNIT}s are bad; the first: {self.first_bad}"
            raise TraceError(self.path, 0, problem)

    def _bad(self, error: TraceError) -> None:
        if not self.skip_bad:
            raise error
        self.bad += 1
        self.first_bad = self.first_bad or error


@contextmanager
def open_output(path: Path | str) -> Iterator[IO[bytes]]:
    """Open a file for writing bytes, compressed by its suffix; `-` is standard output."""
    if str(path) == STDIN:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    try:
        with Path(path).open("wb") as raw, _compressing(raw, Path(path)) as file:
            yield file
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
        raise TraceError(path, 0, f"cannot be written: {problem}") from None


@contextmanager
def _compressing(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    if path.suffix == ".gz":
        # No name and no time in the header: the same requests give the same bytes.
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as packed:
            yield cast(IO[bytes], packed)
    elif path.suffix == ".zst":
        try:
            import zstandard
        except ImportError:
            problem = "writing zstd needs `pip install 'prefixd[zstd]'`"
            raise TraceError(path, 0, problem) from None
        with zstandard.ZstdCompressor().stream_writer(raw, closefd=False) as stream:
            yield stream
    else:
        yield raw
