"""The parts of request records: prompts as bytes to cut into blocks, counts, times, scopes.

`formats` says which format has which of these parts; this module reads them. A bad record is a
ValueError with a sentence that names the field.

Two prompts can share blocks only if they have the same scope: model, adapters, cache salt and
tenant, as far as records name them. Text is taken as its UTF-8 bytes. A chat message is its role, a
line end, its text, a line end; a system prompt beside the messages and tools come before them.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from hashlib import sha256, shake_256
from typing import Any

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .trace_file import MAX_FIELD

Record = dict[str, Any]

TOKEN_FIELDS = ("prompt_token_ids", "token_ids", "input_ids", "input_tokens", "prompt_ids")
TEXT_FIELDS = ("prompt", "text", "text_input", "input_text", "input")
INPUT_LENGTH_FIELDS = (
    "input_length", "input_len", "prompt_len", "num_input_tokens", "num_prompt_tokens",
    "prompt_tokens", "input_tokens", "prompt_token_count", "seq_len", "in",
)  # fmt: skip
#: Prompt tokens that Anthropic doesn't count among `input_tokens`.
_BESIDE_INPUT = ("cache_creation_input_tokens", "cache_read_input_tokens")
OUTPUT_FIELDS = (
    "output_length", "output_len", "num_output_tokens", "output_tokens", "output_token_ids",
    "completion_tokens", "candidates_token_count", "out", "max_completion_tokens",
    "max_output_tokens", "max_tokens", "completion", "response",
)  # fmt: skip
#: Fields with an arrival time, in the order in which they are looked for.
TIME_FIELDS = (
    "timestamp", "ts", "arrival_time", "arrived_at", "arrival_ts", "request_time", "requested_at",
    "received_at", "request_received", "start_time", "startTime", "started_at", "start_timestamp",
    "created_time", "createdTime", "created_at", "createdAt", "created", "date", "datetime",
    "@timestamp", "tstamp", "event_time", "eventTime", "unix_time", "time", "t",
)  # fmt: skip
#: What the end of a field's name says about the unit of its numbers.
UNIT_SUFFIXES = {
    "_unix_ms": "ms", "_ms": "ms", "_millis": "ms", "_us": "us", "_micros": "us", "_ns": "ns",
    "_nanos": "ns", "_s": "s", "_sec": "s", "_seconds": "s",
}  # fmt: skip
MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 0.001, "ns": 0.000001}
#: Fields that separate caches, by what they name. `model` and `tenant` also divide results.
SCOPE_FIELDS = {
    "model": ("model", "model_name", "model_id"),
    "adapter": ("lora", "lora_name", "lora_id", "lora_path", "adapter", "adapter_name",
                "adapter_id", "lora_request"),
    "salt": ("cache_salt", "salt"),
    "tenant": ("tenant", "tenant_id", "organization", "org_id", "team", "team_id", "team_alias"),
}  # fmt: skip
#: Roles of messages that are answers.
ANSWERERS = frozenset({"assistant", "gpt", "chatgpt", "bard", "bing", "model", "bot"})
#: Parts of messages that are images, sounds, videos and files, and where these have their data.
MEDIA_TYPES = frozenset({
    "image_url", "image", "input_image", "input_audio", "audio_url", "audio", "video_url", "video",
    "input_video", "file", "input_file", "document",
})  # fmt: skip
_MEDIA_DATA = ("image_url", "source", "image", "input_audio", "file")
#: Whole numbers from here on are not all different as floats.
_MAX_EXACT_FLOAT = 1 << 53
#: Numbers as text, some of which `datetime.fromisoformat` takes for dates: 1712010112345.
_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?([eE][+-]?\d+)?")
#: Dates without dashes: 20260131.
_SHORT_DATE = re.compile(r"(19|20)\d{6}")


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Settings for what the records do not say.

    `block_tokens` is the size of the blocks to write: None means that of the blocks read, or 512
    for prompts that have no blocks yet. `source_block_tokens` is the block size of records that
    carry block ids (None: from the records or their lengths); `block_tokens` must be a multiple of
    it. `time_unit` is "s", "ms", "us", "ns", or None: from the records. `separate_ids`: block ids
    of different files are different blocks.
    """

    block_tokens: int | None = None
    source_block_tokens: int | None = None
    bytes_per_token: float = 4.0
    requests_per_s: float = 1.0
    time_unit: str | None = None
    first_turn_only: bool = False
    dialogues_in_flight: int = 32
    image_tokens: int = 1024
    separate_ids: bool = False

    def __post_init__(self) -> None:
        if self.block_tokens is not None and self.block_tokens < 1:
            raise ValueError(f"a block must have at least one token, got {self.block_tokens}")
        source = self.source_block_tokens
        if source is not None and (source < 1 or (self.block_tokens or source) % source):
            raise ValueError(
                f"blocks of {self.block_tokens} tokens cannot be made of blocks of {source}"
            )
        if not 1 <= self.bytes_per_token <= 1024:
            raise ValueError(f"bytes per token must be 1 to 1024, got {self.bytes_per_token}")
        if not 0 < self.requests_per_s < math.inf:
            raise ValueError(f"requests per second must be above 0, got {self.requests_per_s}")
        if self.time_unit not in (None, *MS_PER_UNIT):
            raise ValueError(f"the time unit is s, ms, us or ns, not {self.time_unit!r}")
        if self.dialogues_in_flight < 1:
            raise ValueError(
                f"at least one dialogue must be in flight, got {self.dialogues_in_flight}"
            )
        if not 1 <= self.image_tokens <= 1 << 20:
            raise ValueError(f"an image has 1 to {1 << 20:,} tokens, got {self.image_tokens}")

    @property
    def new_block_tokens(self) -> int:
        """Tokens in the blocks that text and token ids are cut into."""
        return self.block_tokens or DEFAULT_BLOCK_TOKENS

    @property
    def text_block_bytes(self) -> int:
        """UTF-8 bytes in a block of text."""
        return round(self.new_block_tokens * self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class Moment:
    """A time as a record says it: in a `unit` that it names, or (None) a bare number, whose unit
    all times together tell. `usual` is the unit of such numbers in this format."""

    value: float
    unit: str | None
    usual: str | None = None


@dataclass(frozen=True, slots=True)
class Scope:
    """What separates the caches of two prompts, whatever their tokens are."""

    model: str = ""
    tenant: str = ""
    rest: str = ""

    def root(self, kind: bytes) -> bytes:
        """What the first block of a prompt is chained to."""
        if self == Scope():
            return kind
        parts = (self.model, self.tenant, self.rest)
        return kind + sha256(json.dumps(parts).encode()).digest()


@dataclass(slots=True)
class Prompt:
    """A prompt as bytes, `block_bytes` to a block. Prompts of different kinds (token ids, text,
    block hashes) are never compared."""

    kind: bytes
    data: bytes
    block_bytes: int
    #: Tokens; None if only the number of blocks and their size say it.
    input_length: int | None
    #: Tokens; None if the record doesn't say.
    output_length: int | None = None
    scope: Scope = field(default_factory=Scope)
    at: Moment | None = None
    #: The block size that the record states for its block ids.
    source_block_tokens: int | None = None
    #: Bytes of text whose tokens the record states, 0 if they are estimated.
    text_bytes: int = 0
    images: int = 0
    #: Whose it is, where that separates no caches.
    label: str = ""

    @property
    def has_ids(self) -> bool:
        """Whether the record has ids of blocks, and no tokens or text."""
        return self.kind == b"hashes"


# ---- counts, times, scopes


def count(field: str, value: object) -> int:
    """A number of tokens; data frames write 12.0, spreadsheets "12"."""
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if type(value) is float and value.is_integer():
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_FIELD:
        raise ValueError(f"{field} is not a number of tokens: {quoted(value)}")
    return value


def stated_size(field: str, value: object) -> int:
    """The tokens of a block, as a record says them."""
    size = count(field, value)
    if not size:
        raise ValueError(f"{field} is 0: a block has at least one token")
    return size


def quoted(value: object) -> str:
    """A value of a record, short enough for a message."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 40 else text[:37] + "..."


def given_input_length(record: Record) -> int | None:
    """The prompt tokens that the record states, if it does."""
    for source in (record, *_usages(record)):
        for name in INPUT_LENGTH_FIELDS:
            value = source.get(name)
            if value is not None and not isinstance(value, list | dict):
                tokens = count(name, value)
                if name == "input_tokens":
                    tokens += sum(count(each, source.get(each) or 0) for each in _BESIDE_INPUT)
                return tokens
    return None


def output_length(record: Record, options: ConvertOptions) -> int | None:
    """Output tokens, from a number, token ids or the answer's text."""
    for source in (*_usages(record), record):
        for name in OUTPUT_FIELDS:
            value = source.get(name)
            if isinstance(value, list) and name != "response":
                return len(value)
            if isinstance(value, str) and name in ("completion", "response"):
                return tokens_of(len(value.encode(errors="surrogatepass")), options)
            if value is not None and not isinstance(value, dict | list):
                return count(name, value)
    return None


def _usages(record: Record) -> Iterator[Record]:
    response = record.get("response")
    body = response.get("body", response) if isinstance(response, dict) else None
    for holder in (record, body):
        if isinstance(holder, dict) and isinstance(usage := holder.get("usage"), dict):
            yield usage


def moment(record: Record, usual: str | None = None) -> Moment | None:
    """The arrival time in the record, by the first field that is known or whose name ends in a unit
    after a known one. `usual` is the usual unit of numbers in fields that name none."""
    for name in TIME_FIELDS:
        if record.get(name) is not None:
            return _moment(name, record[name], None, usual)
    for name, value in record.items():
        for suffix, named in UNIT_SUFFIXES.items():
            if value is not None and name.endswith(suffix):
                if name.removesuffix(suffix) in TIME_FIELDS:
                    return _moment(name, value, named)
                break
    return None


def _moment(name: str, value: object, unit: str | None, usual: str | None = None) -> Moment:
    if isinstance(value, str):
        value = value.strip()
        date = value if _SHORT_DATE.fullmatch(value) or not _NUMBER.fullmatch(value) else ""
        with suppress(ValueError, OverflowError):
            when = datetime.fromisoformat(date)
            in_zone = when if when.tzinfo else when.replace(tzinfo=UTC)
            return Moment(in_zone.timestamp() * 1000, "ms")
        try:
            value = float(value)
        except ValueError:
            raise ValueError(f"{name} is no time: {quoted(value)}") from None
    if type(value) not in (int, float) or not abs(value) <= MAX_FIELD:  # type: ignore[arg-type]
        raise ValueError(f"{name} is no time: {quoted(value)}")
    return Moment(float(value), unit, usual)  # type: ignore[arg-type]


def scope_of(record: Record, extra: str = "") -> Scope:
    """What separates this record's cache from others'. `extra`: a session whose ids are its own."""
    found: dict[str, str] = {}
    for what, names in SCOPE_FIELDS.items():
        for name in names:
            value = record.get(name)
            if value not in (None, "", [], {}):
                text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
                found[what] = text
                break
    rest = [found.get("adapter", ""), found.get("salt", ""), extra]
    return Scope(
        found.get("model", ""), found.get("tenant", ""), json.dumps(rest) if any(rest) else ""
    )


# ---- prompts


def hash_prompt(ids: object, name: str, length: int | None) -> Prompt:
    """A prompt whose record has ids of its blocks. Ids that are whole floats are integers."""
    if not isinstance(ids, list):
        raise ValueError(f"{name} is not a list of block ids: {quoted(ids)}")
    for index, block in enumerate(ids):
        if type(block) is float and block.is_integer():
            if abs(block) >= _MAX_EXACT_FLOAT:
                raise ValueError(f"{name}[{index}] is the float {block!r}: ids of 64 bits don't "
                                 "fit into floats, so several may have become one")  # fmt: skip
            ids[index] = int(block)
        elif type(block) not in (int, str):
            raise ValueError(f"{name}[{index}] is no block id, a whole number or a text: "
                             f"{quoted(block)}")  # fmt: skip
    data = b"".join(sha256(str(block).encode()).digest() for block in ids)
    return Prompt(b"hashes", data, 32, length)


def token_prompt(tokens: object, name: str, options: ConvertOptions) -> Prompt:
    """A prompt of token ids."""
    if isinstance(tokens, list) and len(tokens) == 1 and isinstance(tokens[0], list):
        tokens = tokens[0]  # a batch of one
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise ValueError(f"{name} is not a list of token ids")
    try:
        packed = array("i", tokens)
    except OverflowError:
        raise ValueError(f"{name} has a token id beyond 32 bits") from None
    block_bytes = options.new_block_tokens * packed.itemsize
    return Prompt(b"tokens", packed.tobytes(), block_bytes, len(tokens))


def text_prompt(text: bytes, options: ConvertOptions, images: int = 0) -> Prompt:
    """A prompt of text."""
    length = tokens_of(len(text), options)
    prompt = Prompt(b"text", text, options.text_block_bytes, length)
    prompt.images = images
    return prompt


def tokens_of(text_bytes: int, options: ConvertOptions) -> int:
    """The estimated tokens of that much text."""
    return math.ceil(text_bytes / options.bytes_per_token)


class MessageText:
    """The text of messages, with images and other media of a fixed size in it. Counts these."""

    def __init__(self, options: ConvertOptions) -> None:
        self.options = options
        self.images = 0

    def message(self, message: Mapping[str, Any]) -> bytes:
        """A message with its role."""
        head = f"{role(message)}\n".encode(errors="surrogatepass")
        return head + self.content(message) + b"\n"

    def content(self, message: Mapping[str, Any]) -> bytes:
        """A message's text. Other parts than text and images, and tool calls, are JSON."""
        content = message.get("content", message.get("value", message.get("text")))
        if content is None and "output" in message:  # of a tool, in the Responses API
            content = message["output"]
        text = self.parts(content)
        if content is None and "role" not in message and "from" not in message:
            text += _as_json(message)  # an item that is no message: a call of a tool
        for name in ("tool_calls", "function_call"):
            if message.get(name):
                text += _as_json(message[name])
        return text

    def parts(self, content: object) -> bytes:
        """A text, or the parts of one."""
        parts: Sequence[object] = content if isinstance(content, list) else [content]
        return b"".join(self._part(part) for part in parts if part is not None)

    def _part(self, part: object) -> bytes:
        if isinstance(part, str):
            return part.encode(errors="surrogatepass")
        if isinstance(part, dict):
            if isinstance(part.get("text"), str):
                return str(part["text"]).encode(errors="surrogatepass")
            if str(part.get("type")) in MEDIA_TYPES:
                return self._medium(part)
        return _as_json(part)

    def _medium(self, part: Record) -> bytes:
        """As many bytes as its tokens count for, which follow from what it is or where it lies. A
        document may be a text."""
        source = next((part[name] for name in _MEDIA_DATA if name in part), part)
        if isinstance(source, dict) and source.get("type") == "text":
            return self.parts(source.get("data"))
        self.images += 1
        size = round(self.options.image_tokens * self.options.bytes_per_token)
        return shake_256(_as_json(source)).digest(size)


def _as_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode(errors="surrogatepass")


def role(message: Mapping[str, Any]) -> str:
    """Who speaks, in lower case."""
    return str(message.get("role", message.get("from", ""))).lower()


def message_list(value: object, name: str) -> list[Record]:
    """A list of messages that has at least one. Raises ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is not a list of messages: {quoted(value)}")
    for message in value:
        if not isinstance(message, dict):
            raise ValueError(f"{name} has something in it that is no message: {quoted(message)}")
    return list(value)


def chat_prompt(record: Record, options: ConvertOptions) -> Prompt:
    """One request of chat messages, with a system prompt and tools beside them. An answer at the
    end is its output."""
    text = MessageText(options)
    messages = message_list(record["messages"], "messages")
    answer = None
    if len(messages) > 1 and role(messages[-1]) in ANSWERERS:
        answer = tokens_of(len(text.content(messages.pop())), options)
        text.images = 0  # of the answer
    parts = [_as_json(record[name]) for name in ("tools", "functions") if record.get(name)]
    parts.append(text.parts(record.get("system")))
    parts += [text.message(message) for message in messages]
    prompt = text_prompt(b"".join(parts), options, text.images)
    prompt.output_length = answer or output_length(record, options)
    return prompt


def responses_prompt(record: Record, options: ConvertOptions) -> Prompt:
    """One request of OpenAI's Responses API."""
    text = MessageText(options)
    parts = [_as_json(record["tools"])] if record.get("tools") else []
    parts.append(text.parts(record.get("instructions")))
    given = record["input"]
    if isinstance(given, str):
        parts.append(text.message({"role": "user", "content": given}))
    else:
        parts += [text.message(item) for item in message_list(given, "input")]
    prompt = text_prompt(b"".join(parts), options, text.images)
    prompt.output_length = output_length(record, options)
    return prompt


def dialogue_prompts(messages: object, name: str, options: ConvertOptions) -> list[Prompt]:
    """A request for every message that is answered, each with everything before it."""
    text = MessageText(options)
    so_far = b""
    found = []
    for message in message_list(messages, name):
        if so_far and role(message) in ANSWERERS:
            prompt = text_prompt(so_far, options, text.images)
            prompt.output_length = tokens_of(len(text.content(message)), options)
            found.append(prompt)
            if options.first_turn_only:
                break
        so_far += text.message(message)
    if not found:
        raise ValueError(f"no message of {name} is answered")
    return found


def turn_prompts(turns: object, options: ConvertOptions) -> list[Prompt]:
    """A request for every user message of a list, each with those before it."""
    if not isinstance(turns, list) or not turns or set(map(type, turns)) != {str}:
        raise ValueError("turns is not a list of texts")
    text = MessageText(options)
    so_far = b""
    found = []
    for turn in turns[:1] if options.first_turn_only else turns:
        so_far += text.message({"role": "user", "content": turn})
        found.append(text_prompt(so_far, options))
    return found
