"""Request traces in the Mooncake format: one JSON object per line.

    {"timestamp": 27, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 7]}

`timestamp` is the arrival in milliseconds, the lengths are tokens, and `hash_ids` has one id
per block of the prompt, the last of which may be partial. An id stands for its block *and
everything before it*: two prompts that share ids share that prefix. No prompt text is in it.
"""

from __future__ import annotations

import gzip
import json
import math
import sys
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .source import STDIN, RequestReader, TraceError, display_name

__all__ = [
    "Request",
    "TraceError",
    "TraceReader",
    "read_trace",
    "write_trace",
]

#: Fields fit into a signed 64-bit integer, like everywhere else.
MAX_FIELD = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it arrived, its lengths in tokens, its prompt's block ids in order."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class TraceReader(RequestReader):
    """The requests of a trace file, streamed: memory does not grow with the file.

    Iterating counts, from zero each time:

    - `requests`: what was yielded;
    - `bad`: lines skipped because of `skip_bad` (a compressed file that is cut short
      counts as one); `first_bad` is the error that the first of them would have raised;
    - `length_mismatches`: requests whose `input_length` does not need exactly as many blocks
      as they have ids. Legal: `warnings()` says it once.

    Raises `TraceError` at the first bad line unless `skip_bad`, and always when the file
    cannot be opened or holds no request at all.
    """

    UNIT = "line"

    def __init__(
        self,
        path: Path | str,
        *,
        limit: int | None = None,
        skip_bad: bool = False,
        block_tokens: int = DEFAULT_BLOCK_TOKENS,
    ) -> None:
        super().__init__(path, limit, skip_bad)
        if block_tokens < 1:
            raise ValueError(f"a block must have at least one token, got {block_tokens}")
        self.block_tokens = block_tokens
        self.length_mismatches = 0

    def __iter__(self) -> Iterator[Request]:
        self._begin()
        self.length_mismatches = 0
        if self.limit == 0:
            return
        block_tokens = self.block_tokens
        with closing(self._parsed()) as parsed:
            for request in parsed:
                self.requests += 1
                if -(-request.input_length // block_tokens) != len(request.hash_ids):
                    self.length_mismatches += 1
                yield request
                if self.requests == self.limit:
                    return
        self._end()

    def warnings(self) -> list[str]:
        notes = super().warnings()
        if self.length_mismatches:
            notes.append(
                f"{display_name(self.path)}: input_length disagrees with the number of ids at "
                f"{self.block_tokens} tokens a block in {self.length_mismatches:,} of "
                f"{self.requests:,} requests; hit tokens are capped at input_length"
            )
        return notes

    def _parsed(self) -> Generator[Request, None, None]:
        # Closed at once when a line is bad, and not when the error is forgotten.
        with closing(iter(self._source)) as lines:
            while True:
                try:
                    number, line = next(lines)
                except StopIteration:
                    return
                except TraceError as error:
                    if not error.line_number:
                        raise
                    # Damaged compression: the lines before it are whole, after it comes nothing.
                    self._bad(error)
                    return
                try:
                    request = _parse(line)
                except ValueError as error:
                    self._bad(TraceError(self.path, number, str(error)))
                else:
                    yield request


def read_trace(
    path: Path | str,
    *,
    limit: int | None = None,
    skip_bad: bool = False,
    block_tokens: int = DEFAULT_BLOCK_TOKENS,
) -> TraceReader:
    """Read a trace: plain, gzip or zstd by content, `-` for standard input.

    At most `limit` requests; `skip_bad` counts bad lines instead of raising `TraceError`;
    `block_tokens` only serves to count lengths that disagree with the ids.
    """
    return TraceReader(path, limit=limit, skip_bad=skip_bad, block_tokens=block_tokens)


def write_trace(path: Path | str, requests: Iterable[Request]) -> int:
    """Write requests as a trace and return how many; `-` is standard output.

    A name that ends in `.gz` or `.zst` is compressed. The same requests give the same bytes.
    Raises `TraceError` when the file cannot be written.
    """
    count = 0
    with open_output(path) as file:
        for request in requests:
            file.write(format_request(request))
            count += 1
    return count


def format_request(request: Request) -> bytes:
    """One line of a trace, with its line end."""
    ids = ", ".join(map(str, request.hash_ids))
    return (
        f'{{"timestamp": {request.timestamp_ms}, "input_length": {request.input_length}, '
        f'"output_length": {request.output_length}, "hash_ids": [{ids}]}}\n'
    ).encode()


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


def _parse(line: bytes | None) -> Request:
    """One line as a request; ValueError with a sentence about what is wrong with it."""
    if line is None:
        raise ValueError("the line is too long to be a request")
    try:
        record = json.loads(line.rstrip().decode())
    except UnicodeDecodeError:
        raise ValueError("the line is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON ({error.msg} at column {error.pos + 1})") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not usable JSON ({error})") from None
    if not isinstance(record, dict):
        raise ValueError("the line is not a JSON object")
    ids = record.get("hash_ids")
    if not isinstance(ids, list):
        _missing(record, "hash_ids")
        raise ValueError("hash_ids is not a list")
    if not set(map(type, ids)) <= {int}:
        index, value = next((i, v) for i, v in enumerate(ids) if type(v) is not int)
        raise ValueError(f"hash_ids[{index}] is not an integer: {_quoted(value)}")
    return Request(
        _milliseconds(record),
        _count(record, "input_length"),
        _count(record, "output_length"),
        tuple(ids),
    )


def _count(record: dict[str, Any], field: str) -> int:
    value = record.get(field)
    if type(value) is not int:  # bool is an int, and no count
        _missing(record, field)
        raise ValueError(f"{field} is not an integer: {_quoted(value)}")
    if not 0 <= value <= MAX_FIELD:
        raise ValueError(f"{field} is {'negative' if value < 0 else 'too large'}: {value}")
    return value


def _milliseconds(record: dict[str, Any]) -> int:
    value = record.get("timestamp")
    # Some exporters write fractions of a millisecond; an infinity and NaN are neither.
    if type(value) is not int and not (type(value) is float and math.isfinite(value)):
        _missing(record, "timestamp")
        raise ValueError(f"timestamp is not a number of milliseconds: {_quoted(value)}")
    if not 0 <= value <= MAX_FIELD:
        raise ValueError(f"timestamp is {'negative' if value < 0 else 'too large'}: {value}")
    return round(value)


def _missing(record: dict[str, Any], field: str) -> None:
    if field not in record:
        raise ValueError(f"{field} is missing")


def _quoted(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
