"""Request records of other formats: their prompts, as bytes to cut into blocks, and their times.

The field names are those of vLLM's and SGLang's benchmark data sets and token traces, OpenAI
requests and batch files, ShareGPT dialogues, Spec-Bench, Mooncake, Bailian and gateway logs.
A bad record is a ValueError with a sentence.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any

from ...proto.limits import DEFAULT_BLOCK_TOKENS
from .trace import MAX_FIELD

Record = dict[str, Any]

HASH_FIELD = "hash_ids"
TOKEN_FIELDS = ("prompt_token_ids", "token_ids", "input_ids", "input_tokens", "prompt_ids")
TEXT_FIELDS = ("prompt", "text", "text_input", "input_text", "input")
DIALOGUE_FIELDS = ("conversations", "conversation")
INPUT_LENGTH_FIELDS = ("input_length", "input_len", "prompt_len", "num_input_tokens")
OUTPUT_FIELDS = (
    "output_length",
    "output_len",
    "num_output_tokens",
    "output_tokens",
    "output_token_ids",
    "completion_tokens",
    "max_completion_tokens",
    "max_tokens",
    "completion",
    "response",
)
#: Fields with an arrival time, and the unit if the name implies it.
TIME_FIELDS = {
    "timestamp": None,
    "ts": None,
    "arrival_time": None,
    "arrived_at": None,
    "created": None,
    "timestamp_ms": "ms",
    "arrival_time_ms": "ms",
}
MS_PER_UNIT = {"s": 1000.0, "ms": 1.0, "us": 0.001}
#: Roles of messages that are answers.
ANSWERERS = frozenset({"assistant", "gpt", "chatgpt", "bard", "bing", "model", "bot"})
#: Bailian traces have blocks of 16 tokens and times in seconds. These fields tell them from
#: Mooncake's.
BAILIAN_FIELDS = ("chat_id", "parent_chat_id")
BAILIAN_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """Settings for what the records do not say.

    `source_block_tokens` is the block size of records that carry `hash_ids` (None: 16 for
    Bailian's, else `block_tokens`); `block_tokens` must be a multiple of it. `time_unit` is
    "s", "ms", "us" or None: milliseconds for records like Mooncake's, seconds for all others.
    """

    block_tokens: int = DEFAULT_BLOCK_TOKENS
    source_block_tokens: int | None = None
    bytes_per_token: float = 4.0
    requests_per_s: float = 1.0
    time_unit: str | None = None
    first_turn_only: bool = False
    dialogues_in_flight: int = 32

    def __post_init__(self) -> None:
        if self.block_tokens < 1:
            raise ValueError(f"a block must have at least one token, got {self.block_tokens}")
        source = self.source_block_tokens
        if source is not None and (source < 1 or self.block_tokens % source):
            raise ValueError(
                f"blocks of {self.block_tokens} tokens cannot be made of blocks of {source}"
            )
        if not 1 <= self.bytes_per_token <= 1024:
            raise ValueError(f"bytes per token must be 1 to 1024, got {self.bytes_per_token}")
        if not 0 < self.requests_per_s < math.inf:
            raise ValueError(f"requests per second must be above 0, got {self.requests_per_s}")
        if self.time_unit not in (None, *MS_PER_UNIT):
            raise ValueError(f"the time unit is s, ms or us, not {self.time_unit!r}")
        if self.dialogues_in_flight < 1:
            raise ValueError(
                f"at least one dialogue must be in flight, got {self.dialogues_in_flight}"
            )

    @property
    def text_block_bytes(self) -> int:
        """UTF-8 bytes in a block of text."""
        return round(self.block_tokens * self.bytes_per_token)


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as bytes, `block_bytes` to a block. Prompts of different kinds (token ids, text,
    block hashes) are never compared."""

    kind: bytes
    data: bytes
    block_bytes: int
    input_length: int
    output_length: int


def prompts(record: object, options: ConvertOptions) -> tuple[str, list[Prompt]]:
    """The field that a record's prompts come from, and the prompts: one, or for a dialogue one per
    answered message."""
    if not isinstance(record, dict):
        raise ValueError("the record is not a JSON object")
    body = record.get("body")
    if isinstance(body, dict):  # a line of a batch file
        record = body
    if HASH_FIELD in record:
        return HASH_FIELD, [_from_hashes(record, options)]
    for field in TOKEN_FIELDS:
        if field in record:
            return field, [_from_tokens(record, field, options)]
    if "messages" in record:
        return "messages", [_from_messages(record, options)]
    for field in DIALOGUE_FIELDS:
        if field in record:
            return field, _from_dialogue(record, field, options)
    if "turns" in record:
        return "turns", _from_turns(record, options)
    for field in TEXT_FIELDS:
        if isinstance(record.get(field), str):
            text = record[field].encode(errors="surrogatepass")
            return field, [_text_prompt(text, _output_length(record, options), options)]
    if isinstance(record.get("prompt"), list):
        return "prompt", [_from_tokens(record, "prompt", options)]
    raise ValueError("the record has no prompt: none of the known fields is in it")


def time_ms(record: Record, options: ConvertOptions) -> float | None:
    """The arrival time in the record, in milliseconds of the record's own clock."""
    for field, field_unit in TIME_FIELDS.items():
        value = record.get(field)
        if value is None:
            continue
        if isinstance(value, str):
            try:
                moment = datetime.fromisoformat(value)
            except ValueError:
                raise ValueError(f"{field} is no time: {value[:40]!r}") from None
            return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
        if type(value) not in (int, float) or not abs(value) <= MAX_FIELD:
            raise ValueError(f"{field} is no time: {json.dumps(value)[:40]}")
        mooncake = HASH_FIELD in record and not any(name in record for name in BAILIAN_FIELDS)
        unit = options.time_unit or field_unit or ("ms" if mooncake else "s")
        return float(value) * MS_PER_UNIT[unit]
    return None


def _from_hashes(record: Record, options: ConvertOptions) -> Prompt:
    ids = record[HASH_FIELD]
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int, str}:
        raise ValueError("hash_ids is not a list of integers or texts")
    source_tokens = options.source_block_tokens
    if source_tokens is None:
        bailian = any(name in record for name in BAILIAN_FIELDS)
        source_tokens = BAILIAN_BLOCK_TOKENS if bailian else options.block_tokens
    if options.block_tokens % source_tokens:
        raise ValueError(
            f"blocks of {options.block_tokens} tokens cannot be made of blocks of {source_tokens}"
        )
    data = b"".join(sha256(str(block).encode()).digest() for block in ids)
    lengths = (
        _count(field, record[field])
        for field in INPUT_LENGTH_FIELDS
        if record.get(field) is not None
    )
    return Prompt(
        b"hashes",
        data,
        32 * (options.block_tokens // source_tokens),
        next(lengths, len(ids) * source_tokens),
        _output_length(record, options),
    )


def _from_tokens(record: Record, field: str, options: ConvertOptions) -> Prompt:
    tokens = record[field]
    if isinstance(tokens, list) and len(tokens) == 1 and isinstance(tokens[0], list):
        tokens = tokens[0]  # a batch of one
    if not isinstance(tokens, list) or not set(map(type, tokens)) <= {int}:
        raise ValueError(f"{field} is not a list of token ids")
    try:
        packed = array("i", tokens)
    except OverflowError:
        raise ValueError(f"{field} has a token id beyond 32 bits") from None
    block_bytes = options.block_tokens * packed.itemsize
    output = _output_length(record, options)
    return Prompt(b"tokens", packed.tobytes(), block_bytes, len(tokens), output)


def _from_messages(record: Record, options: ConvertOptions) -> Prompt:
    messages = _message_list(record, "messages")
    answer = 0
    if len(messages) > 1 and _role(messages[-1]) in ANSWERERS:
        answer = _tokens(len(_message_text(messages.pop())), options)
    parts = [_message_bytes(message) for message in messages]
    if record.get("tools"):  # chat templates put them first
        parts.insert(0, json.dumps(record["tools"], sort_keys=True).encode())
    return _text_prompt(b"".join(parts), answer or _output_length(record, options), options)


def _from_dialogue(record: Record, field: str, options: ConvertOptions) -> list[Prompt]:
    so_far = b""
    found = []
    for message in _message_list(record, field):
        if so_far and _role(message) in ANSWERERS:
            answer = _tokens(len(_message_text(message)), options)
            found.append(_text_prompt(so_far, answer, options))
            if options.first_turn_only:
                break
        so_far += _message_bytes(message)
    if not found:
        raise ValueError(f"no message of {field} is answered")
    return found


def _from_turns(record: Record, options: ConvertOptions) -> list[Prompt]:
    turns = record["turns"]
    if not isinstance(turns, list) or not turns or set(map(type, turns)) != {str}:
        raise ValueError("turns is not a list of texts")
    so_far = b""
    found = []
    for text in turns[:1] if options.first_turn_only else turns:
        so_far += _message_bytes({"role": "user", "content": text})
        found.append(_text_prompt(so_far, _output_length(record, options), options))
    return found


def _text_prompt(text: bytes, output_length: int, options: ConvertOptions) -> Prompt:
    length = _tokens(len(text), options)
    return Prompt(b"text", text, options.text_block_bytes, length, output_length)


def _tokens(text_bytes: int, options: ConvertOptions) -> int:
    return math.ceil(text_bytes / options.bytes_per_token)


def _message_list(record: Record, field: str) -> list[Record]:
    messages = record[field]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"{field} is not a list of messages")
    for message in messages:
        if not isinstance(message, dict):
            raise ValueError(f"{field} has something in it that is no message")
    return list(messages)


def _role(message: Record) -> str:
    return str(message.get("role", message.get("from", ""))).lower()


def _message_bytes(message: Record) -> bytes:
    return f"{_role(message)}\n".encode(errors="surrogatepass") + _message_text(message) + b"\n"


def _message_text(message: Record) -> bytes:
    """A message's text. Parts that are not text, and tool calls, are included as JSON."""
    content = message.get("content", message.get("value", message.get("text")))
    parts: Sequence[object] = content if isinstance(content, list) else [content]
    texts = [_part_text(part) for part in parts if part is not None]
    if message.get("tool_calls"):
        texts.append(json.dumps(message["tool_calls"], sort_keys=True))
    return "".join(texts).encode(errors="surrogatepass")


def _part_text(part: object) -> str:
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    return part if isinstance(part, str) else json.dumps(part, sort_keys=True)


def _output_length(record: Record, options: ConvertOptions) -> int:
    """Output tokens, from a number, token ids or the answer's text."""
    for field in OUTPUT_FIELDS:
        value = record.get(field)
        if isinstance(value, list):
            return len(value)
        if isinstance(value, str):
            return _tokens(len(value.encode(errors="surrogatepass")), options)
        if value is not None:
            return _count(field, value)
    return 0


def _count(field: str, value: object) -> int:
    if type(value) is float and value.is_integer():  # data frames write 12.0
        value = int(value)
    if type(value) is not int or not 0 <= value <= MAX_FIELD:
        raise ValueError(f"{field} is not a number of tokens: {json.dumps(value)[:40]}")
    return value
