"""Request traces in the Mooncake format: one JSON object per line.

    {"timestamp": 27, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 7]}

`timestamp` is the arrival in milliseconds, the lengths are tokens, and `hash_ids` has one id
per block of the prompt, the last of which may be partial. An id stands for its block *and
everything before it*: two prompts that share ids share that prefix. A trace has no prompt text.
"""

from __future__ import annotations

import json
import math
import mmap
from array import array
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .trace_file import LineSource, TraceError, display_name, open_output

#: Fields fit into a signed 64-bit integer.
MAX_FIELD = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Request:
    """One request: when it arrived, its lengths in tokens, its prompt's block ids in order."""

    timestamp_ms: int
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class RequestReader:
    """The base of readers of request files, which are streamed. Counts requests and bad pieces."""

    #: The name of one bad piece of the file.
    UNIT: ClassVar[str]

    def __init__(self, path: Path | str, limit: int | None, skip_bad: bool) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"the limit must not be negative, got {limit}")
        self.path = str(path)
        self.limit = limit
        self.skip_bad = skip_bad
        self.requests = 0
        #: Pieces skipped because of `skip_bad`, and the error that the first would have raised.
        self.bad = 0
        self.first_bad: TraceError | None = None
        self._source = LineSource(path)
        self.total_bytes = self._source.total_bytes

    @property
    def consumed_bytes(self) -> int:
        """Bytes of the file (as stored, compressed or not) read so far."""
        return self._source.consumed_bytes

    def warnings(self) -> list[str]:
        """What a user of the result should know about the input, one sentence each."""
        if self.first_bad is None:
            return []
        units = self.UNIT if self.bad == 1 else f"{self.UNIT}s"
        return [f"{self.bad:,} bad {units} skipped; the first: {self.first_bad}"]

    def __iter__(self) -> Iterator[Request]:
        self._begin()
        if self.limit == 0:
            return
        with closing(self._read()) as requests:
            for request in requests:
                self.requests += 1
                yield request
                if self.requests == self.limit:
                    return
        if not self.requests:
            problem = "no request in it"
            if self.first_bad is not None:
                problem += f", all {self.UNIT}s are bad; the first: {self.first_bad}"
            raise TraceError(self.path, 0, problem)

    def _read(self) -> Generator[Request, None, None]:
        """All requests of the file. Calls `_bad` for each bad piece."""
        raise NotImplementedError

    def _begin(self) -> None:
        self.requests = self.bad = 0
        self.first_bad = None

    def _bad(self, error: TraceError) -> None:
        if not self.skip_bad:
            raise error
        self.bad += 1
        self.first_bad = self.first_bad or error


class TraceReader(RequestReader):
    """The requests of a trace file, streamed: memory does not grow with the file.

    The file is plain, gzip or zstd, detected by content; `-` is standard input. Reads at most
    `limit` requests. `skip_bad` counts bad lines instead of raising `TraceError`. `block_tokens`
    only serves to count lengths that disagree with the ids.

    Iterating counts, from zero each time:

    - `requests`: the requests yielded;
    - `bad`: lines skipped because of `skip_bad` (a truncated compressed file counts as one);
      `first_bad` is the error that the first of them would have raised;
    - `length_mismatches`: requests whose number of ids is not that of the blocks that their
      `input_length` fills. Legal; `warnings()` mentions it once.

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

    def warnings(self) -> list[str]:
        notes = super().warnings()
        if self.length_mismatches:
            notes.append(
                f"{display_name(self.path)}: input_length disagrees with the number of ids at "
                f"{self.block_tokens} tokens a block in {self.length_mismatches:,} of "
                f"{self.requests:,} requests; hit tokens are capped at input_length"
            )
        return notes

    def _begin(self) -> None:
        super()._begin()
        self.length_mismatches = 0

    def _read(self) -> Generator[Request, None, None]:
        block_tokens = self.block_tokens
        # `closing` closes the file as soon as a line is bad, not when the error is forgotten.
        with closing(iter(self._source)) as lines:
            try:
                for number, line in lines:
                    try:
                        request = _parse(line)
                    except ValueError as error:
                        self._bad(TraceError(self.path, number, str(error)))
                        continue
                    if -(-request.input_length // block_tokens) != len(request.hash_ids):
                        self.length_mismatches += 1
                    yield request
            except TraceError as error:
                if not error.line_number:
                    raise
                # Damaged compression: the lines before it are whole, nothing follows.
                self._bad(error)


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
    ids = _field(record, "hash_ids")
    if not isinstance(ids, list):
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


def _field(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"{name} is missing")
    return record[name]


def _count(record: dict[str, Any], name: str) -> int:
    value = _field(record, name)
    if type(value) is not int:  # not isinstance: bool is an int, and no count
        raise ValueError(f"{name} is not an integer: {_quoted(value)}")
    _check_range(name, value)
    return value


def _milliseconds(record: dict[str, Any]) -> int:
    value = _field(record, "timestamp")
    # Some exporters write fractions of a millisecond. Infinity and NaN are refused.
    if type(value) is not int and not (type(value) is float and math.isfinite(value)):
        raise ValueError(f"timestamp is not a number of milliseconds: {_quoted(value)}")
    _check_range("timestamp", value)
    return round(value)


def _check_range(name: str, value: float) -> None:
    if not 0 <= value <= MAX_FIELD:
        raise ValueError(f"{name} is {'negative' if value < 0 else 'too large'}: {value}")


def _quoted(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


_Column: TypeAlias = "array[int] | memoryview[int]"


def tokens_of_blocks(blocks: int, input_length: int, block_tokens: int) -> list[int]:
    """The tokens of each block of a prompt; the last ones may have fewer, or none."""
    full, rest = divmod(input_length, block_tokens)
    if blocks <= full:
        return [block_tokens] * blocks
    return [block_tokens] * full + [rest] + [0] * (blocks - full - 1)


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """A trace in numbers. `infinite_hit_tokens` is what a cache without limits would hit."""

    requests: int
    blocks: int
    unique_blocks: int
    prompt_tokens: int
    infinite_hit_tokens: int

    @property
    def infinite_hit_rate(self) -> float:
        return self.infinite_hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "infinite_hit_rate": self.infinite_hit_rate}


class TraceColumns:
    """The part of a trace that replays need, in columns; immutable.

    4 bytes for each block reference and 16 for each request. Block ids are renumbered 0, 1, 2, ...
    by first appearance, so they may be any integers (at most 2**32 different ones), and a block is
    new to a request if its number is not below the number of blocks seen before.
    """

    def __init__(
        self, blocks: _Column, ends: _Column, lengths: _Column, unique_blocks: int
    ) -> None:
        #: Block numbers of all requests, one after the other.
        self._blocks = blocks
        #: Where each request ends in `_blocks`.
        self._ends = ends
        #: Prompt tokens of each request.
        self._lengths = lengths
        self.unique_blocks = unique_blocks

    @classmethod
    def load(cls, requests: Iterable[Request]) -> TraceColumns:
        """Pack a stream of requests. Needs memory for the columns and a table of different ids."""
        numbers: dict[int, int] = {}
        blocks, ends, lengths = array("I"), array("Q"), array("q")
        for request in requests:
            blocks.extend([numbers.setdefault(id_, len(numbers)) for id_ in request.hash_ids])
            ends.append(len(blocks))
            lengths.append(request.input_length)
        return cls(blocks, ends, lengths, len(numbers))

    def __len__(self) -> int:
        """Requests."""
        return len(self._ends)

    @property
    def blocks(self) -> int:
        """Block references, repeats included."""
        return len(self._blocks)

    @property
    def prompt_tokens(self) -> int:
        return sum(self._lengths)

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        """The requests in order: (block numbers in a new list, prompt tokens)."""
        blocks, start = self._blocks, 0
        for end, length in zip(self._ends, self._lengths, strict=True):
            yield blocks[start:end].tolist(), length
            start = end

    def summary(self, block_tokens: int) -> TraceSummary:
        """Count everything, and the hits of a cache without limits."""
        hit_tokens = known = 0
        for blocks, length in self:
            hits = 0
            for block in blocks:
                if block >= known:
                    break
                hits += 1
            hit_tokens += min(hits * block_tokens, length)
            known = max(known, max(blocks, default=-1) + 1)
        return TraceSummary(
            len(self), self.blocks, self.unique_blocks, self.prompt_tokens, hit_tokens
        )

    def save(self, folder: Path) -> None:
        """Write the columns into a folder, for `map` in another process."""
        (folder / "blocks").write_bytes(self._blocks)
        (folder / "ends").write_bytes(self._ends)
        (folder / "lengths").write_bytes(self._lengths)
        (folder / "unique_blocks").write_text(str(self.unique_blocks))

    @classmethod
    def map(cls, folder: Path) -> TraceColumns:
        """The columns in a folder, mapped: processes share one copy in the page cache."""
        return cls(
            _mapped(folder / "blocks").cast("I"),
            _mapped(folder / "ends").cast("Q"),
            _mapped(folder / "lengths").cast("q"),
            int((folder / "unique_blocks").read_text()),
        )


def _mapped(path: Path) -> memoryview:
    if not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        # The view keeps the mapping alive; both go when the columns go.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
