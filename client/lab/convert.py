"""Request files of any format in `formats.FORMATS` as one trace in the Mooncake format.

Reads records from JSONL, JSON over several lines, or one JSON array; compressed or not; from one
file or several. A block's id is its chained hash, SHA-256(the hash of the block before || its
bytes), so that it stands for exactly the whole prefix; the first is chained to what separates
caches: the model, adapters, the cache salt, the tenant (`request_parts.Scope`). Hashes become small
integers in order of appearance.

Text is hashed without a tokeniser, its UTF-8 bytes in blocks of `block_tokens * bytes_per_token`
bytes. Lengths in tokens are the records' own or else bytes / bytes_per_token, rounded up. So shared
prefixes are exact to the byte, while the number of tokens is an estimate (four bytes a token fits
English in the usual vocabularies; code and other languages have fewer).

Requests are sorted by their times, which count from the first; requests without times keep their
order and arrive evenly, `requests_per_s`. Dialogues without times take turns,
`dialogues_in_flight` at once: one after the other, they would hit in the smallest cache.

Nothing is assumed in silence: `assumptions()` has a sentence for each thing that the records did
not say. Memory is 4 bytes for each block reference, 40 for each request and about 150 for each
different block.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import re
from array import array
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

from .formats import FileState, check_head, prompts
from .inference import BlockSize, time_unit
from .request_parts import MS_PER_UNIT, ConvertOptions, Moment, Prompt
from .trace import Request, RequestReader
from .trace_file import MAX_LINE_BYTES, LineSource, Stream, TraceError, display_name, input_files

_READ_CHARACTERS = 1 << 20
_BETWEEN_ITEMS = re.compile(r"[\s,]*")
_UNKNOWN = -1
#: How far the tokens that records state may be from those of their blocks without a word.
_NEARLY = 0.1


class ChainedIds:
    """Small integers for chained block hashes, in order of first appearance."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}

    def of(self, prompt: Prompt) -> list[int]:
        """Ids of a prompt's blocks, the last of which may be partial."""
        ids = []
        parent = prompt.scope.root(prompt.kind)
        data = memoryview(prompt.data)
        for start in range(0, len(data), prompt.block_bytes):
            digest = sha256(parent)
            digest.update(data[start : start + prompt.block_bytes])
            parent = digest.digest()
            ids.append(self._ids.setdefault(parent, len(self._ids)))
        return ids


@dataclass(slots=True)
class _Columns:
    """What was read, request by request."""

    times: array[float] = field(default_factory=lambda: array("d"))
    input_lengths: array[int] = field(default_factory=lambda: array("q"))
    output_lengths: array[int] = field(default_factory=lambda: array("q"))
    owners: array[int] = field(default_factory=lambda: array("I"))
    ends: array[int] = field(default_factory=lambda: array("Q"))
    blocks: array[int] = field(default_factory=lambda: array("I"))

    def __len__(self) -> int:
        return len(self.ends)

    def blocks_of(self, index: int) -> array[int]:
        return self.blocks[self.ends[index - 1] if index else 0 : self.ends[index]]


class Converter(RequestReader):
    """The requests of files in other formats, in order of arrival.

    `names` are files, folders, globs or `-`. Iterating reads everything, then yields. It counts,
    from zero each time: `requests`; `bad` (with `first_bad`) if `skip_bad`; `formats`, records by
    the name of their format.

    Raises `TraceError` like `TraceReader`, and for records that don't go together: with ids of
    blocks and without, with times and without, with blocks of two sizes.
    """

    UNIT = "record"

    def __init__(
        self,
        names: Path | str | Sequence[Path | str],
        options: ConvertOptions | None = None,
        *,
        limit: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        given = [str(names)] if isinstance(names, Path | str) else [str(name) for name in names]
        sources = [LineSource(path) for path in input_files(given)]
        super().__init__(", ".join(given), sources, limit, skip_bad)
        self.options = options or ConvertOptions()
        self._begin()

    @property
    def files(self) -> list[str]:
        """The files that are read."""
        return [source.path for source in self._sources]

    @property
    def block_tokens(self) -> int:
        """Tokens per block of the requests, once these were read."""
        assert self._block_tokens is not None, "read the requests first"
        return self._block_tokens

    def assumptions(self) -> list[str]:
        """How the records were understood, one sentence each, once they were read."""
        return list(self._assumptions)

    def _begin(self) -> None:
        super()._begin()
        self.formats: Counter[str] = Counter()
        self._assumptions: dict[str, None] = {}
        self._block_tokens: int | None = None
        self._columns = _Columns()
        self._owners: dict[tuple[str, str, str], int] = {}
        self._ids = ChainedIds()
        self._size = BlockSize("--source-block-tokens")
        #: What all records must have in common: what the first has, and where it is.
        self._agreed: dict[str, tuple[str, str]] = {}
        self._stated: int | None = None
        self._usual_unit: str | None = None
        self._texts = self._images = self._stated_tokens = self._stated_bytes = 0
        self._parents: dict[bytes, bytes] = {}
        self._collisions = 0

    def _read(self) -> Generator[Request, None, None]:
        for where, prompt in self._in_turns():
            self._take(where, prompt)
            if len(self._columns) == self.limit:
                break
        columns = self._columns
        if not len(columns):
            return
        join = self._resolve_blocks()
        times = self._resolve_times()
        silent = sum(length == _UNKNOWN for length in columns.input_lengths)
        if silent:
            self._assume(f"{silent:,} of {len(columns):,} requests have no input length; they "
                         "count as whole blocks")  # fmt: skip
        silent = sum(length == _UNKNOWN for length in columns.output_lengths)
        if silent:
            self._assume(
                f"{silent:,} of {len(columns):,} requests have no output length; it counts as 0"
            )
        owners = list(self._owners)
        numbers: dict[int, int] = {}
        for index in sorted(range(len(columns)), key=times.__getitem__):
            blocks = columns.blocks_of(index)
            length = columns.input_lengths[index]
            if length == _UNKNOWN:
                length = len(blocks) * self.block_tokens // join
            at_ms = round(times[index], 3)
            yield Request(
                int(at_ms) if at_ms == int(at_ms) else at_ms,
                length,
                max(columns.output_lengths[index], 0),
                tuple([numbers.setdefault(b, len(numbers)) for b in _joined(blocks, join)]),
                *owners[columns.owners[index]],
            )

    # ---- reading

    def _take(self, where: str, prompt: Prompt) -> None:
        """Add one request to the columns."""
        columns = self._columns
        if prompt.has_ids:
            self._size.add(prompt.input_length or 0, len(prompt.data) // 32, where)
            self._note_collisions(prompt)
        columns.blocks.extend(self._ids.of(prompt))
        columns.ends.append(len(columns.blocks))
        columns.times.append(math.nan if prompt.at is None else self._raw_time(prompt.at))
        known = prompt.input_length
        columns.input_lengths.append(_UNKNOWN if known is None else known)
        known = prompt.output_length
        columns.output_lengths.append(_UNKNOWN if known is None else known)
        owner = (prompt.scope.model, prompt.scope.tenant, prompt.label)
        columns.owners.append(self._owners.setdefault(owner, len(self._owners)))
        self._images += prompt.images
        if prompt.kind == b"text":
            self._texts += not prompt.text_bytes
            self._stated_bytes += prompt.text_bytes
            self._stated_tokens += (prompt.input_length or 0) if prompt.text_bytes else 0

    def _note_collisions(self, prompt: Prompt) -> None:
        """Count blocks that follow another block than before: an id stands for its whole prefix."""
        data, parent = prompt.data, prompt.scope.root(b"")
        root = parent
        for start in range(0, len(data), 32):
            block = data[start : start + 32]
            if root:
                block = sha256(root + block).digest()
            if self._parents.setdefault(block, parent) != parent:
                self._collisions += 1
                return
            parent = block

    def _raw_time(self, at: Moment) -> float:
        return at.value if at.unit is None else at.value * MS_PER_UNIT[at.unit]

    def _check(self, where: str, prompt: Prompt) -> None:
        """Raise ValueError if this record does not go with those before it."""
        at, stated = prompt.at, prompt.source_block_tokens
        given = self.options.source_block_tokens
        if stated is not None and given not in (None, stated):
            raise ValueError(f"--source-block-tokens {given} contradicts the record, which has "
                             f"blocks of {stated} tokens")  # fmt: skip
        for what, value in (
            ("prompt", "ids of blocks" if prompt.has_ids else "tokens or text"),
            ("block size", stated and f"blocks of {stated} tokens"),
            ("time", "no time" if at is None else "a time"),
            ("time unit", at and ("a time with a unit or a date" if at.unit else
                                  f"a time in {at.usual or 'an unknown unit'}")),
        ):  # fmt: skip
            if not value:
                continue
            earlier, earlier_at = self._agreed.setdefault(what, (value, where))
            if earlier != value:
                raise ValueError(
                    f"the record has {value}, and {earlier_at} has {earlier}; convert them apart, "
                    "or leave out this kind with --skip-bad"
                )
        if stated is not None:
            self._stated = stated
        if at is not None and at.unit is None:
            self._usual_unit = at.usual

    def _in_turns(self) -> Iterator[tuple[str, Prompt]]:
        """Every prompt with its place; dialogues without times take turns."""
        waiting: deque[deque[tuple[str, Prompt]]] = deque()
        for where, found in self._prompts():
            if found and found[0].at is not None:
                yield from ((where, prompt) for prompt in found)
                continue
            if found:
                waiting.append(deque((where, prompt) for prompt in found))
            while len(waiting) >= self.options.dialogues_in_flight:
                yield _next_turn(waiting)
        while waiting:
            yield _next_turn(waiting)

    def _prompts(self) -> Iterator[tuple[str, list[Prompt]]]:
        for source in self._sources:
            separate = self.options.separate_ids
            state = FileState(self.options, scope=source.path if separate else "")
            for number, item, record in self._records(source):
                try:
                    row, found = prompts(record, state)
                    where = f"{display_name(source.path)}:{number}"
                    for prompt in found:
                        self._check(where, prompt)
                except (ValueError, OverflowError, RecursionError) as error:
                    what = "nested too deeply" if isinstance(error, RecursionError) else error
                    self._bad(TraceError(source.path, number, f"{_nth(item)}{what}"))
                    continue
                self.formats[row.name] += 1
                yield where, found
            try:
                found = state.finish()
                for prompt in found:
                    self._check(source.path, prompt)
            except ValueError as error:
                raise TraceError(source.path, 0, str(error)) from None
            for prompt in found:
                yield source.path, [prompt]
            self._assumptions |= state.notes

    # ---- what the records do not say

    def _resolve_blocks(self) -> int:
        """Settle the block size; returns how many of the blocks that were read make one."""
        options = self.options
        if self._agreed["prompt"][0] != "ids of blocks":
            self._block_tokens = options.new_block_tokens
            size = f"blocks of {self._block_tokens:,} tokens"
            if options.block_tokens is None:
                size += " (--block-tokens)"
            self._assume(size)
            return self._assume_text()
        try:
            source, why = self._size.resolve(options.source_block_tokens, self._stated)
        except ValueError as error:
            raise TraceError(self.path, 0, str(error)) from None
        wanted = options.block_tokens or source
        if wanted % source:
            raise TraceError(
                self.path,
                0,
                f"blocks of {wanted} tokens (--block-tokens) cannot be made of blocks of {source} "
                f"({why})",
            )
        self._block_tokens = wanted
        joined = "" if wanted == source else f", joined to {wanted:,}"
        self._assume(f"blocks of {source:,} tokens, {why}{joined}")
        if self._collisions:
            self._assume(
                f"{self._collisions:,} requests have an id after another id than before, which a "
                "trace of prefixes cannot have: if these are several traces with ids of their own, "
                "their hits are not real; --separate-ids keeps the ids of files apart"
            )
        return wanted // source

    def _assume_text(self) -> int:
        options = self.options
        if self._texts:
            self._assume(
                f"the tokens of {self._texts:,} prompts are estimated, {options.bytes_per_token:g} "
                "bytes of text each (--text-bytes-per-token)"
            )
        if self._stated_tokens:
            measured = self._stated_bytes / self._stated_tokens
            sentence = (
                f"prompts have the tokens that their records state, {measured:.2f} bytes of text "
                f"each; blocks are cut at {options.bytes_per_token:g} (--text-bytes-per-token)"
            )
            if abs(measured / options.bytes_per_token - 1) > _NEARLY:
                wrong = "large" if measured > options.bytes_per_token else "small"
                sentence += (
                    f", which makes hits of a part of a prompt look too {wrong}: convert again "
                    f"with --text-bytes-per-token {measured:.2f}"
                )
            self._assume(sentence)
        if self._images:
            self._assume(f"{self._images:,} images and other media count as "
                         f"{options.image_tokens:,} tokens each (--image-tokens)")  # fmt: skip
        return 1

    def _resolve_times(self) -> list[float]:
        """Milliseconds from the first request, by request."""
        times = self._columns.times
        if self._agreed["time"][0] == "no time":
            rate = self.options.requests_per_s
            self._assume(f"no record has a time that is known: requests arrive evenly, {rate:g} a "
                         "second (--requests-per-s)")  # fmt: skip
            return [float(int(index * 1000 / rate)) for index in range(len(times))]
        factor = 1.0
        kind, where = self._agreed["time unit"]
        if kind != "a time with a unit or a date":
            try:
                unit, why = time_unit(times, self.options.time_unit, self._usual_unit)
            except ValueError as error:
                raise TraceError(self.path, 0, str(error)) from None
            self._assume(
                f"times in {unit} {why}" if why.startswith("since") else f"times in {unit}, {why}"
            )
            factor = MS_PER_UNIT[unit]
        elif self.options.time_unit is not None:
            raise TraceError(
                self.path,
                0,
                f"--time-unit {self.options.time_unit} contradicts {where}, whose time has a "
                "unit or a date",
            )
        first = min(times)
        unsorted = sum(b < a for a, b in pairwise(times))
        if unsorted:
            self._assume(
                f"{unsorted:,} of {len(times):,} requests have an earlier time than the one before "
                "them; they are sorted by time"
            )
        return [(at - first) * factor for at in times]

    def _assume(self, sentence: str) -> None:
        self._assumptions[sentence] = None

    # ---- records

    def _records(self, source: LineSource) -> Iterator[tuple[int, int, object]]:
        """Parsed records with their line numbers, and with their own numbers where several may be
        in a line (else 0): from JSONL, JSON over several lines, or one JSON array."""
        try:
            with source.opened() as stream:
                source.line_number = 1
                head = stream.peek(4096)[:4096]
                check_head(source.path, head)
                source.line_number = 0
                first = head.removeprefix(codecs.BOM_UTF8).lstrip()
                line = first.split(b"\n", 1)[0].rstrip()
                if first[:1] == b"[" and not _is_event_batch(line):
                    yield from self._values(source, stream, array_of=True)
                elif line[-1:] in (b"{", b"[", b","):
                    yield from self._values(source, stream, array_of=False)
                else:
                    yield from self._line_records(source, stream)
        except TraceError as error:
            if not error.line_number:
                raise
            self._bad(error)  # the records before the damage are good

    def _line_records(
        self, source: LineSource, stream: Stream
    ) -> Iterator[tuple[int, int, object]]:
        for number, line in source.lines(stream):
            try:
                if line is None:
                    raise ValueError("the line is too long to be a record")
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                self._bad(TraceError(source.path, number, f"the line is not JSON ({error})"))
            else:
                yield number, 0, record

    def _values(
        self, source: LineSource, stream: Stream, *, array_of: bool
    ) -> Iterator[tuple[int, int, object]]:
        """JSON values one after the other, or the items of an array, one at a time: the whole is
        never in memory."""
        what = "array" if array_of else "file"
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        decode = json.JSONDecoder().raw_decode
        source.line_number = 1
        item = 0

        def error(problem: str) -> TraceError:
            return TraceError(source.path, source.line_number, problem)

        try:
            buffer = text.read(_READ_CHARACTERS)
            position = buffer.index("[") + 1 if array_of else 0
            while True:
                start = _BETWEEN_ITEMS.match(buffer, position).end()  # type: ignore[union-attr]
                source.line_number += buffer.count("\n", position, start)
                position = start
                if array_of and buffer.startswith("]", position):
                    return
                try:
                    value, end = decode(buffer, position)
                except RecursionError:
                    raise error(f"an item of the {what} is nested too deeply") from None
                except json.JSONDecodeError as problem:
                    more = text.read(max(_READ_CHARACTERS, len(buffer) - position))
                    if not more and position == len(buffer) and not array_of:
                        return
                    if not more or len(buffer) - position > MAX_LINE_BYTES:
                        source.line_number += buffer.count("\n", position, problem.pos)
                        raise error(f"the {what} is not JSON ({problem.msg})") from None
                    buffer, position = buffer[position:] + more, 0
                    continue
                item += 1
                yield source.line_number, item, value
                source.line_number += buffer.count("\n", position, end)
                position = end
        except UnicodeDecodeError:
            raise error(f"the {what} is not UTF-8 text") from None
        finally:
            text.detach()  # the caller closes the stream


def _is_event_batch(line: bytes) -> bool:
    """Whether a line is one batch of KV events: [time, [...], rank]."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return len(value) > 1 and isinstance(value[0], int | float) and isinstance(value[1], list)


def _nth(item: int) -> str:
    return f"record {item}: " if item else ""


def _joined(blocks: array[int], count: int) -> array[int]:
    """Chained blocks joined, `count` to one: a chained id stands for everything up to it."""
    if count == 1:
        return blocks
    whole = blocks[count - 1 :: count]
    return whole + blocks[-1:] if len(blocks) % count else whole


def _next_turn(waiting: deque[deque[tuple[str, Prompt]]]) -> tuple[str, Prompt]:
    turns = waiting.popleft()
    turn = turns.popleft()
    if turns:
        waiting.append(turns)
    return turn
