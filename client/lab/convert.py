"""Other people's request files as traces in the Mooncake format.

Reads records from JSONL or one JSON array, plain, gzip or zstd. The first of these fields that a
record has decides how it is read:

    hash_ids                     block ids, integers or text (Mooncake, Bailian, gateway logs);
                                 small blocks are joined to `block_tokens`
    prompt_token_ids, token_ids, token ids (vLLM, SGLang and their token traces); `prompt` may
    input_ids, input_tokens,     be a list of token ids too
    prompt_ids
    messages                     chat messages (OpenAI requests, also as the `body` of a batch
                                 file's line): one request; a trailing answer is its output
    conversations, conversation  whole dialogues (ShareGPT): a request for every message that
                                 is answered, each with everything before it
    turns                        user messages only (Spec-Bench, MT-Bench), growing likewise
    prompt, text, text_input,    one prompt as text
    input_text, input

A block's id is its chained hash, SHA-256(the hash of the block before || its bytes), so that it
stands for exactly the whole prefix. Hashes become small integers in order of appearance.

Text is hashed without a tokeniser, its UTF-8 bytes in blocks of `block_tokens * bytes_per_token`
bytes. Lengths in tokens are bytes / bytes_per_token, rounded up. So shared prefixes are exact to
the byte, while the number of tokens is an estimate (four bytes a token fits English in the usual
vocabularies; code and other languages have fewer). A chat message is its role, a line end, its
text, a line end.

Times count from the first request; requests without a time arrive evenly, `requests_per_s`.
Dialogues without times take turns, `dialogues_in_flight` at once: one after the other, they would
hit in the smallest cache. Memory grows with the number of different blocks (about 150 bytes each),
not with the file.
"""

from __future__ import annotations

import codecs
import io
import json
import re
from collections import Counter, deque
from collections.abc import Generator, Iterator
from hashlib import sha256
from pathlib import Path

from .records import ConvertOptions, Prompt, prompts, time_ms
from .trace import Request, RequestReader
from .trace_file import MAX_LINE_BYTES, Stream, TraceError, display_name

_READ_CHARACTERS = 1 << 20
_BETWEEN_ITEMS = re.compile(r"[\s,]*")


class ChainedIds:
    """Small integers for chained block hashes, in order of first appearance."""

    def __init__(self) -> None:
        self._ids: dict[bytes, int] = {}

    def of(self, prompt: Prompt) -> tuple[int, ...]:
        """Ids of a prompt's blocks, the last of which may be partial."""
        ids = []
        parent = prompt.kind
        data = memoryview(prompt.data)
        for start in range(0, len(data), prompt.block_bytes):
            digest = sha256(parent)
            digest.update(data[start : start + prompt.block_bytes])
            parent = digest.digest()
            ids.append(self._ids.setdefault(parent, len(self._ids)))
        return tuple(ids)


class Converter(RequestReader):
    """The requests of a file in another format, streamed.

    Iterating counts, from zero each time: `requests`; `bad` (with `first_bad`) if `skip_bad`;
    `shapes`, records by the field that their prompts came from; `backwards`, requests whose time
    is before an earlier request's, which they get instead.

    Raises `TraceError` like `TraceReader`.
    """

    UNIT = "record"

    def __init__(
        self,
        path: Path | str,
        options: ConvertOptions | None = None,
        *,
        limit: int | None = None,
        skip_bad: bool = False,
    ) -> None:
        super().__init__(path, limit, skip_bad)
        self.options = options or ConvertOptions()
        self._begin()

    def _begin(self) -> None:
        super()._begin()
        self.backwards = 0
        self.shapes: Counter[str] = Counter()
        self._ids = ChainedIds()
        self._start_ms: float | None = None
        self._last_ms = 0

    def warnings(self) -> list[str]:
        notes = super().warnings()
        if self.backwards:
            notes.append(
                f"{display_name(self.path)}: {self.backwards:,} of {self.requests:,} requests "
                "have a time before an earlier request's; they keep their place and get its time"
            )
        return notes

    def _read(self) -> Generator[Request, None, None]:
        for at_ms, prompt in self._in_turns():
            arrival = self._arrival_ms(at_ms)
            ids = self._ids.of(prompt)
            yield Request(arrival, prompt.input_length, prompt.output_length, ids)

    def _in_turns(self) -> Iterator[tuple[float | None, Prompt]]:
        """Every prompt with its record's time; dialogues without times take turns."""
        waiting: deque[deque[Prompt]] = deque()
        for at_ms, found in self._prompts():
            if at_ms is not None:
                yield from ((at_ms, prompt) for prompt in found)
                continue
            waiting.append(deque(found))
            while len(waiting) >= self.options.dialogues_in_flight:
                yield None, _next_turn(waiting)
        while waiting:
            yield None, _next_turn(waiting)

    def _arrival_ms(self, at_ms: float | None) -> int:
        """Milliseconds since the first request, never less than that of the request before."""
        if at_ms is None:
            arrival = int(self.requests * 1000 / self.options.requests_per_s)
        else:
            self._start_ms = at_ms if self._start_ms is None else self._start_ms
            arrival = round(at_ms - self._start_ms)
        self.backwards += arrival < self._last_ms
        self._last_ms = max(self._last_ms, arrival)
        return self._last_ms

    def _prompts(self) -> Iterator[tuple[float | None, list[Prompt]]]:
        for number, record in self._records():
            try:
                field, found = prompts(record, self.options)
                assert isinstance(record, dict)
                at_ms = time_ms(record, self.options)
            except ValueError as error:
                self._bad(TraceError(self.path, number, str(error)))
            else:
                self.shapes[field] += 1
                yield at_ms, found

    def _records(self) -> Iterator[tuple[int, object]]:
        """Parsed records with their line numbers, from JSONL or from one JSON array."""
        try:
            with self._source.opened() as stream:
                if stream.peek(64).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
                    yield from self._array_records(stream)
                else:
                    yield from self._line_records(stream)
        except TraceError as error:
            if not error.line_number:
                raise
            self._bad(error)  # the records before the damage are good

    def _line_records(self, stream: Stream) -> Iterator[tuple[int, object]]:
        for number, line in self._source.lines(stream):
            try:
                if line is None:
                    raise ValueError("the line is too long to be a record")
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                self._bad(TraceError(self.path, number, f"the line is not JSON ({error})"))
            else:
                yield number, record

    def _array_records(self, stream: Stream) -> Iterator[tuple[int, object]]:
        """The items of a JSON array, one at a time: the array is never whole in memory."""
        text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
        decode = json.JSONDecoder().raw_decode
        self._source.line_number = 1
        try:
            buffer = text.read(_READ_CHARACTERS)
            position = buffer.index("[") + 1
            while True:
                start = _BETWEEN_ITEMS.match(buffer, position).end()  # type: ignore[union-attr]
                self._source.line_number += buffer.count("\n", position, start)
                position = start
                if buffer.startswith("]", position):
                    return
                try:
                    item, end = decode(buffer, position)
                except RecursionError:
                    problem = "an item of the array is nested too deeply"
                    raise TraceError(self.path, self._source.line_number, problem) from None
                except json.JSONDecodeError as error:
                    more = text.read(max(_READ_CHARACTERS, len(buffer) - position))
                    if not more or len(buffer) - position > MAX_LINE_BYTES:
                        self._source.line_number += buffer.count("\n", position, error.pos)
                        problem = f"the array is not JSON ({error.msg})"
                        raise TraceError(self.path, self._source.line_number, problem) from None
                    buffer, position = buffer[position:] + more, 0
                    continue
                yield self._source.line_number, item
                self._source.line_number += buffer.count("\n", position, end)
                position = end
        except UnicodeDecodeError:
            problem = "the array is not UTF-8 text"
            raise TraceError(self.path, self._source.line_number, problem) from None
        finally:
            text.detach()  # the caller closes the stream


def _next_turn(waiting: deque[deque[Prompt]]) -> Prompt:
    turns = waiting.popleft()
    prompt = turns.popleft()
    if turns:
        waiting.append(turns)
    return prompt
