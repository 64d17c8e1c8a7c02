"""Request traces in the Mooncake format: one JSON object per line, in order of arrival.

    {"timestamp": 27, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 7]}

`timestamp` is the arrival in milliseconds, the lengths are tokens, and `hash_ids` has one id
per block of the prompt, the last of which may be partial. An id stands for its block *and
everything before it*: two prompts that share ids share that prefix. A trace has no prompt text.

More fields may be there: `block_size`, the tokens of a block, the same in all requests; `model` and
`tenant`, by which results are divided; and `label`, by which they are, too, but which separates no
caches. `trace convert` writes them where it knows them. The ids of two models or tenants are
different ones.
"""

from __future__ import annotations

import json
import math
import mmap
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, NamedTuple, TypeAlias

from msgspec import Meta, MsgspecError, Struct
from msgspec.json import Decoder

from .formats import check_head, recognise
from .inference import BlockSize, epoch_unit
from .request_parts import SCOPE_FIELDS, quoted
from .trace_file import MAX_FIELD, LineSource, TraceError, display_name, open_output

#: Requests from which the size of blocks is inferred, and their ids. A few dozen requests suffice
#: for most traces.
_HEAD_REQUESTS = 2_048
_HEAD_IDS = 8_192
_FIELDS = ("timestamp", "input_length", "output_length", "hash_ids")
_OPTIONAL_FIELDS = ("block_size", "model", "tenant", "label")


class Request(NamedTuple):
    """One request: when it arrived, its lengths in tokens, its prompt's block ids in order, and
    whose it is, if that is known. A tuple, because a frozen data class takes five times as long to
    make."""

    timestamp_ms: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    model: str = ""
    tenant: str = ""
    label: str = ""


#: A request and the number of its line.
_Numbered: TypeAlias = tuple[int, Request]


class RequestReader:
    """The base of readers of request files. Counts requests and bad pieces."""

    #: The name of one bad piece of the file.
    UNIT: ClassVar[str]

    def __init__(
        self, path: Path | str, sources: Sequence[LineSource], limit: int | None, skip_bad: bool
    ) -> None:
        if limit is not None and limit < 0:
            raise ValueError(f"the limit must not be negative, got {limit}")
        self.path = str(path)
        self._sources = sources
        sizes = [source.total_bytes for source in sources]
        #: Of the files, as stored; None if unknown.
        self.total_bytes = None if None in sizes else sum(size or 0 for size in sizes)
        self.limit = limit
        self.skip_bad = skip_bad
        self.requests = 0
        #: Pieces skipped because of `skip_bad`, and the error that the first would have raised.
        self.bad = 0
        self.first_bad: TraceError | None = None

    @property
    def consumed_bytes(self) -> int:
        """Bytes of the files (as stored, compressed or not) read so far."""
        return sum(source.consumed_bytes for source in self._sources)

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the requests."""
        raise NotImplementedError

    def assumptions(self) -> list[str]:
        """How the input was understood, one sentence each."""
        raise NotImplementedError

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

    The file may be compressed, which is detected by content; `-` is standard input. Reads at most
    `limit` requests. `skip_bad` counts bad lines instead of raising `TraceError`.

    `block_tokens` is the size of the blocks. If it is not given, the records say it or, by the
    lengths of the first prompts, `inference.BlockSize`; `assumptions()` says which.

    Iterating counts, from zero each time:

    - `requests`: the requests yielded;
    - `bad`: lines skipped because of `skip_bad` (a truncated compressed file counts as one);
      `first_bad` is the error that the first of them would have raised;
    - `length_mismatches`: requests whose number of ids is not that of the blocks that their
      `input_length` fills. Legal; `warnings()` mentions it once.

    Raises `TraceError` at the first bad line unless `skip_bad`, and always when the file
    cannot be opened, holds no request at all, or contradicts the given block size, and at a request
    that is earlier than the one before.
    """

    UNIT = "line"

    def __init__(
        self,
        path: Path | str,
        *,
        limit: int | None = None,
        skip_bad: bool = False,
        block_tokens: int | None = None,
    ) -> None:
        self._source = LineSource(path)
        super().__init__(path, [self._source], limit, skip_bad)
        if block_tokens is not None and block_tokens < 1:
            raise ValueError(f"a block must have at least one token, got {block_tokens}")
        self._given_block_tokens = block_tokens
        self._block_tokens: int | None = None
        self._known_by = ""
        #: The first requests, which were read to learn the block size, and the rest.
        self._begun: tuple[list[_Numbered], Generator[_Numbered, None, None]] | None = None
        self.length_mismatches = 0
        self._first_mismatch = 0

    @property
    def block_tokens(self) -> int:
        """Tokens per block. Reads the beginning of the file, if need be."""
        if self._block_tokens is None:
            self._begin()
        assert self._block_tokens is not None
        return self._block_tokens

    def assumptions(self) -> list[str]:
        """How the numbers were understood, one sentence each."""
        name = display_name(self.path)
        return [f"{name}: blocks of {self.block_tokens:,} tokens, {self._known_by}; times in ms"]

    def warnings(self) -> list[str]:
        notes = super().warnings()
        if self.length_mismatches:
            notes.append(
                f"{display_name(self.path)}: input_length disagrees with the number of ids at "
                f"{self.block_tokens} tokens a block in {self.length_mismatches:,} of "
                f"{self.requests:,} requests, first in line {self._first_mismatch:,}; hit tokens "
                "are capped at input_length"
            )
        return notes

    def _begin(self) -> None:
        """Set the counts to zero, and read the first requests to learn the block size; nothing if
        that was done and the rest was not read."""
        if self._begun is not None:
            return
        super()._begin()
        self.length_mismatches = self._first_mismatch = 0
        self._stated: int | None = None
        size = BlockSize()
        lines = self._parsed()
        head: list[_Numbered] = []
        ids = 0
        most = _HEAD_REQUESTS if self.limit is None else min(self.limit, _HEAD_REQUESTS)
        while len(head) < most and ids < _HEAD_IDS and (numbered := next(lines, None)) is not None:
            number, request = numbered
            head.append(numbered)
            size.add(request.input_length, len(request.hash_ids), f"line {number}")
            ids += len(request.hash_ids)
        try:
            found = size.resolve(self._given_block_tokens, self._stated)
        except ValueError as error:
            raise TraceError(self.path, 0, str(error)) from None
        if head:
            unit = epoch_unit(min(request.timestamp_ms for _, request in head))
            if unit not in (None, "ms"):
                problem = f"timestamp is a time since 1970 in {unit}, not in milliseconds"
                raise TraceError(self.path, head[0][0], f"{problem}; {convert_hint(self.path)}")
        self._block_tokens, self._known_by = found
        self._begun = head, lines

    def _read(self) -> Generator[Request, None, None]:
        assert self._begun is not None
        head, rest = self._begun
        self._begun = None
        block_tokens = self.block_tokens
        last_ms = -math.inf
        with closing(rest):
            for number, request in chain(head, rest):
                if -(-request.input_length // block_tokens) != len(request.hash_ids):
                    self.length_mismatches += 1
                    self._first_mismatch = self._first_mismatch or number
                if request.timestamp_ms < last_ms:
                    problem = (
                        f"timestamp is {request.timestamp_ms}, before {last_ms} of the request "
                        f"above it: the requests are not in order of arrival; "
                        f"{convert_hint(self.path, 'sorts them')}"
                    )
                    raise TraceError(self.path, number, problem)
                last_ms = request.timestamp_ms
                yield request

    def _parsed(self) -> Generator[_Numbered, None, None]:
        """The requests with their line numbers."""
        parser = _Parser()
        # `opened` closes the file as soon as a line is bad, not when the error is forgotten.
        try:
            with self._source.opened() as stream:
                self._source.line_number = 1
                check_head(self.path, stream.peek(4096)[:4096])
                self._source.line_number = 0
                for number, line in self._source.lines(stream):
                    try:
                        request = parser.parse(line)
                    except _OtherFormat as error:
                        problem = f"{error}; {convert_hint(self.path)}"
                        self._bad(TraceError(self.path, number, problem))
                        continue
                    except ValueError as error:
                        self._bad(TraceError(self.path, number, str(error)))
                        continue
                    self._stated = parser.block_tokens
                    if self._block_tokens not in (None, self._stated or self._block_tokens):
                        problem = (
                            f"block_size is {self._stated}, and the requests before it have blocks "
                            f"of {self._block_tokens} tokens, {self._known_by}"
                        )
                        raise TraceError(self.path, number, problem)
                    yield number, request
        except TraceError as error:
            if not error.line_number:
                raise
            # Damaged compression: the lines before it are whole, nothing follows.
            self._bad(error)


def convert_hint(path: str, does: str = "reads it") -> str:
    """The command that reads a file that is no trace."""
    return f"`prefixctl trace convert {path} -o trace.jsonl` {does}"


class _OtherFormat(ValueError):
    """A record that `trace convert` can read."""


def write_trace(
    path: Path | str, requests: Iterable[Request], block_tokens: int | None = None
) -> int:
    """Write requests as a trace and return how many; `-` is standard output.

    A name that ends in `.gz` or `.zst` is compressed. The same requests give the same bytes. Each
    request says `block_tokens`, unless that is None. Raises `TraceError` when the file cannot be
    written; then an earlier file of that name is as it was.
    """
    count = 0
    with open_output(path) as file:
        for request in requests:
            file.write(format_request(request, block_tokens))
            count += 1
    return count


def format_request(request: Request, block_tokens: int | None = None) -> bytes:
    """One line of a trace, with its line end."""
    ids = ", ".join(map(str, request.hash_ids))
    more = "" if block_tokens is None else f', "block_size": {block_tokens}'
    if request.model:
        more += f', "model": {json.dumps(request.model)}'
    if request.tenant:
        more += f', "tenant": {json.dumps(request.tenant)}'
    if request.label:
        more += f', "label": {json.dumps(request.label)}'
    return (
        f'{{"timestamp": {request.timestamp_ms}, "input_length": {request.input_length}, '
        f'"output_length": {request.output_length}, "hash_ids": [{ids}]{more}}}\n'
    ).encode()


class _Parser:
    """Lines as requests, all with the same block size."""

    def __init__(self) -> None:
        self.block_tokens: int | None = None
        #: Sets of fields that were seen to be those of traces.
        self._known_fields: set[tuple[str, ...]] = {_FIELDS}
        self._owners: dict[int, tuple[str, str]] = {}

    def parse(self, line: bytes | None) -> Request:
        """One line as a request; ValueError with a sentence about what is wrong with it."""
        # Nearly all have nothing but whole numbers in them. json, and a check of each field by
        # itself, would take several times as long; what this doesn't read is for them. (Before
        # msgspec 0.21, its errors are no ValueErrors.)
        try:
            plain = _decode(line) if line is not None else None
        except (MsgspecError, ValueError, RecursionError):
            plain = None
        if plain is not None and plain.block_size in (None, self.block_tokens):
            return Request(plain.timestamp, plain.input_length, plain.output_length, plain.hash_ids)
        record = _object(line)
        fields = tuple(record)
        if fields not in self._known_fields:
            self._check_fields(record)
            self._known_fields.add(fields)
        ids = _field(record, "hash_ids")
        if not isinstance(ids, list):
            raise _OtherFormat("hash_ids is not a list")
        if not _ONLY_INT.issuperset(map(type, ids)):
            index, value = next((i, v) for i, v in enumerate(ids) if type(v) is not int)
            raise _OtherFormat(f"hash_ids[{index}] is not an integer: {quoted(value)}")
        request = Request(
            _milliseconds(record),
            _count(record, "input_length"),
            _count(record, "output_length"),
            tuple(ids),
        )
        return request if len(record) == len(_FIELDS) else self._with_more(request, record)

    def _check_fields(self, record: dict[str, Any]) -> None:
        """Raise `_OtherFormat` for records that another format has, or that lack a field."""
        try:
            row = recognise(record)
        except ValueError:
            row = None
        missing = next((name for name in reversed(_FIELDS) if name not in record), None)
        what = f"{missing} is missing" if missing else "this is no trace"
        if row is None:
            return
        if row.read is None:
            raise ValueError(f"{what}: {row.about}: {row.refusal}")
        if row.name != "mooncake":
            raise _OtherFormat(f"{what}: the record has the format {row.name}")

    def _with_more(self, request: Request, record: dict[str, Any]) -> Request:
        stated = record.get("block_size")
        if stated is not None:
            if type(stated) is not int or stated < 1:
                raise ValueError(f"block_size is no number of tokens: {quoted(stated)}")
            if self.block_tokens not in (None, stated):
                raise ValueError(
                    f"block_size is {stated}, and {self.block_tokens} in earlier requests"
                )
            self.block_tokens = stated
        other = [name for name in record if name in _SEPARATING and record[name]]
        if other:
            raise _OtherFormat(f"{other[0]} separates caches, which the ids of a trace don't say")
        model, tenant, label = (
            str(record.get(name) or "") for name in ("model", "tenant", "label")
        )
        if (model or tenant) and request.hash_ids:
            owner = self._owners.setdefault(request.hash_ids[0], (model, tenant))
            if owner != (model, tenant):
                raise _OtherFormat(
                    f"hash_ids[0] is {request.hash_ids[0]}, which another model or tenant has, too"
                )
        return request._replace(model=model, tenant=tenant, label=label)


#: Fields by which caches are apart, but for those that the ids of a trace follow.
_SEPARATING = frozenset(chain.from_iterable(SCOPE_FIELDS.values())) - {*_OPTIONAL_FIELDS}


_Whole: TypeAlias = Annotated[int, Meta(ge=0, le=MAX_FIELD)]


class _Plain(Struct, forbid_unknown_fields=True):
    """A line that has the fields of every trace, and at most the size of its blocks."""

    timestamp: _Whole
    input_length: _Whole
    output_length: _Whole
    hash_ids: tuple[int, ...]
    block_size: int | None = None


_decode: Final = Decoder(_Plain).decode
#: The types of the ids of a trace.
_ONLY_INT = frozenset((int,))


def _object(line: bytes | None) -> dict[str, Any]:
    if line is None:
        raise ValueError("the line is too long to be a request")
    try:
        record = json.loads(line.rstrip().decode())
    except UnicodeDecodeError:
        raise ValueError("the line is not UTF-8 text") from None
    except json.JSONDecodeError as error:
        problem = f"the line is not JSON ({error.msg} at column {error.pos + 1})"
        if line.rstrip()[-1:] in (b"{", b"["):
            raise _OtherFormat(f"{problem}: the file may be JSON in several lines") from None
        raise ValueError(problem) from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the line is not usable JSON ({error})") from None
    if isinstance(record, list):
        raise _OtherFormat("the line is not a JSON object but an array")
    if not isinstance(record, dict):
        raise ValueError("the line is not a JSON object")
    return record


def _field(record: dict[str, Any], name: str) -> Any:
    if name not in record:
        raise ValueError(f"{name} is missing")
    return record[name]


def _count(record: dict[str, Any], name: str) -> int:
    value = _field(record, name)
    if type(value) is not int:  # not isinstance: bool is an int, and no count
        raise _OtherFormat(f"{name} is not an integer: {quoted(value)}")
    _check_range(name, value)
    return value


def _milliseconds(record: dict[str, Any]) -> float:
    value = _field(record, "timestamp")
    # Some exporters write fractions of a millisecond. Infinity and NaN are refused.
    if type(value) is not int and not (type(value) is float and math.isfinite(value)):
        raise _OtherFormat(f"timestamp is not a number of milliseconds: {quoted(value)}")
    _check_range("timestamp", value)
    return int(value) if value == int(value) else float(value)


def _check_range(name: str, value: float) -> None:
    if not 0 <= value <= MAX_FIELD:
        raise ValueError(f"{name} is {'negative' if value < 0 else 'too large'}: {value}")


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


class PrefixTree:
    """Checks that blocks stand for whole prefixes, in little time: of each request, only the last
    block that was known. Blocks are numbered by first appearance."""

    def __init__(self) -> None:
        #: Of each block, the one before it plus 1; 0: none.
        self._parents = array("I")
        self.collisions = 0

    def add(self, blocks: Sequence[int], known: int, now_known: int) -> None:
        """A request. `known` and `now_known` count the different blocks before and after it."""
        parents, new = self._parents, now_known - known
        if new:
            # All its new blocks, in order, if they come after all others.
            first_new = len(blocks) - new
            in_order = blocks[first_new] == known
            parents.append(blocks[first_new - 1] + 1 if in_order and first_new else 0)
            parents.extend(range(known + 1, now_known))
        else:
            first_new, in_order = len(blocks), True
        if not in_order:
            self.collisions += 1
        elif first_new and new and blocks[first_new - 1] >= known:
            self.collisions += 1  # it names a block twice
        elif first_new:
            before = blocks[first_new - 2] + 1 if first_new > 1 else 0
            self.collisions += parents[blocks[first_new - 1]] != before


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TraceColumns:
    """The part of a trace that replays need, in columns; immutable.

    4 bytes for each block reference and 20 for each request. Block ids are renumbered 0, 1, 2, ...
    by first appearance, so they may be any integers (fewer than 2**32 different ones), and a block
    is new to a request if its number is not below the number of blocks seen before.
    """

    #: The block numbers of all requests, one after the other.
    references: _Column
    #: Where each request ends in `references`.
    ends: _Column
    #: Prompt tokens of each request.
    lengths: _Column
    #: Blocks of each request before the first that is new: what a cache without limits hits.
    hits: _Column
    unique_blocks: int
    #: Requests that cannot be of one tree of prefixes with those before them: a known block comes
    #: after another block than before, or after a new one.
    collisions: int = 0

    @classmethod
    def load(cls, requests: Iterable[Request]) -> TraceColumns:
        """Pack a stream of requests. Needs memory for the columns and a table of different ids."""
        #: Ids by number; None as long as every id is its own number, which most traces keep to:
        #: the table is the largest part of the memory.
        numbers: dict[int, int] | None = None
        blocks, ends, lengths, hits = array("I"), array("Q"), array("q"), array("I")
        tree = PrefixTree()
        known = 0
        for request in requests:
            found: Sequence[int] = request.hash_ids
            if numbers is None:
                now_known = _numbered_already(request.hash_ids, known)
                if now_known is None:
                    numbers = {number: number for number in range(known)}
                else:  # new blocks are the end
                    hits.append(len(found) - (now_known - known))
            if numbers is not None:
                found = [numbers.setdefault(id_, len(numbers)) for id_ in found]
                now_known = len(numbers)
                hits.append(found.index(known) if now_known > known else len(found))
            assert now_known is not None
            tree.add(found, known, now_known)
            known = now_known
            blocks.extend(found)
            ends.append(len(blocks))
            lengths.append(request.input_length)
        return cls(blocks, ends, lengths, hits, known, tree.collisions)

    def __len__(self) -> int:
        """Requests."""
        return len(self.ends)

    @property
    def blocks(self) -> int:
        """Block references, repeats included."""
        return len(self.references)

    @property
    def prompt_tokens(self) -> int:
        return sum(self.lengths)

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        """The requests in order: (block numbers in a new list, prompt tokens)."""
        blocks, start = self.references, 0
        for end, length in zip(self.ends, self.lengths, strict=True):
            yield blocks[start:end].tolist(), length
            start = end

    def reversed_blocks(self) -> Iterator[list[int]]:
        """The block numbers of the requests, from the last request to the first."""
        ends = self.ends
        for index in range(len(ends) - 1, -1, -1):
            yield self.references[ends[index - 1] if index else 0 : ends[index]].tolist()

    def summary(self, block_tokens: int) -> TraceSummary:
        """Count everything, and the hits of a cache without limits."""
        hit_tokens = sum(
            min(hits * block_tokens, length)
            for hits, length in zip(self.hits, self.lengths, strict=True)
        )
        return TraceSummary(
            len(self), self.blocks, self.unique_blocks, self.prompt_tokens, hit_tokens
        )

    def save(self, folder: Path) -> None:
        """Write the columns into a folder, for `map` in another process."""
        (folder / "blocks").write_bytes(self.references)
        (folder / "ends").write_bytes(self.ends)
        (folder / "lengths").write_bytes(self.lengths)
        (folder / "hits").write_bytes(self.hits)
        (folder / "unique_blocks").write_text(str(self.unique_blocks))

    @classmethod
    def map(cls, folder: Path) -> TraceColumns:
        """The columns in a folder, mapped: processes share one copy in the page cache."""
        return cls(
            _mapped(folder / "blocks").cast("I"),
            _mapped(folder / "ends").cast("Q"),
            _mapped(folder / "lengths").cast("q"),
            _mapped(folder / "hits").cast("I"),
            int((folder / "unique_blocks").read_text()),
        )


def _numbered_already(ids: tuple[int, ...], known: int) -> int | None:
    """How many ids are known after a request, if ids 0, 1, 2, ... come by first appearance and
    `known` of them came before; None if these don't go on so."""
    if not ids:
        return known
    new = max(ids) - known + 1
    if min(ids) < 0 or new > len(ids):
        return None
    if new <= 0:
        return known
    # New blocks are the end of a prompt. (They may also stand between others, or come twice; such
    # traces are numbered anew.)
    first_new = len(ids) - new
    if first_new and max(ids[:first_new]) >= known:
        return None
    in_order = ids[first_new:] == tuple(range(known, known + new))
    return known + new if in_order else None


def _mapped(path: Path) -> memoryview:
    if not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        # The view keeps the mapping alive; both go when the columns go.
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
