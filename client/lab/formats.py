"""The formats of request files, as one table: the code, the help, errors and docs/lab.md follow it.

`recognise` says which format a record has, by the fields that it has; the first row that fits wins.
`Format.read` turns a record into prompts. A few formats are recognised to say why they cannot be
read (`refusal`), and `check_head` does the same for files that hold no JSON.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from . import request_parts
from .request_parts import ConvertOptions, Moment, Prompt, Record, Scope
from .trace_file import TraceError

#: A reader of one record, which may have any number of prompts.
Read: TypeAlias = "Callable[[Record, FileState], list[Prompt]]"


@dataclass(slots=True)
class FileState:
    """What earlier records of the same file said about later ones."""

    options: ConvertOptions
    #: Separates the ids of this file from those of others; empty if they are the same.
    scope: str = ""
    block_tokens: int | None = None
    local_ids: bool = False
    #: Arrival of each request that later ones wait for.
    arrivals_ms: dict[str, float] = field(default_factory=dict)
    kv_events: _KvEvents | None = None
    #: Sentences about assumptions that a format makes.
    notes: dict[str, None] = field(default_factory=dict)

    def finish(self) -> list[Prompt]:
        """Prompts that are known only at the end of the file."""
        return [] if self.kv_events is None else self.kv_events.prompts()


@dataclass(frozen=True, slots=True)
class Format:
    """One row of the table.

    A record has this format if it has all `needs` of one alternative, and `where` agrees.
    """

    name: str
    about: str
    needs: tuple[str, ...]
    read: Read | None
    example: str
    where: Callable[[Record], bool] = lambda _record: True
    #: Why it cannot be read, and what to do.
    refusal: str = ""

    def fits(self, record: Record) -> bool:
        """Whether a record has this format."""
        return any(all(map(record.__contains__, need.split())) for need in self.needs) and (
            self.where(record)
        )


def recognise(record: object) -> Format:
    """The format of a record. Raises ValueError if it has none."""
    if not isinstance(record, dict):
        raise ValueError(f"the record is not a JSON object: {request_parts.quoted(record)}")
    for row in FORMATS:
        if row.fits(record):
            return row
    names = ", ".join(list(record)[:8]) or "none"
    raise ValueError(
        f"the record has no prompt that is known (its fields: {names}); `prefixctl trace formats` "
        "lists what can be read"
    )


def prompts(record: object, state: FileState) -> tuple[Format, list[Prompt]]:
    """A record's format and its prompts. Raises ValueError."""
    if isinstance(record, list):
        record = _batch_of_events(record)
    row = recognise(record)
    assert isinstance(record, dict)
    if row.read is None:
        raise ValueError(f"{row.about}: {row.refusal}")
    return row, row.read(record, state)


#: Beginnings of files that are no JSON, what they are, and what to do.
FILE_KINDS: tuple[tuple[bytes, str, str], ...] = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself", "`git lfs pull` gets it"),
    (b"\xff\xfe", "UTF-16 text", "`iconv -f UTF-16 -t UTF-8` makes it UTF-8"),
    (b"\xfe\xff", "UTF-16 text", "`iconv -f UTF-16 -t UTF-8` makes it UTF-8"),
    (b"PAR1", "a Parquet file", "write its rows as JSON lines, such as with pandas' "
                                "to_json(orient='records', lines=True)"),
    (b"PK\x03\x04", "a zip archive", "unpack it first"),
    (b"\x80\x04", "a Python pickle, which may run code when it is read", "dump JSON lines instead"),
    (b"\x80\x05", "a Python pickle, which may run code when it is read", "dump JSON lines instead"),
    (b"ARROW1", "an Arrow file", "write its rows as JSON lines"),
    (b"SQLite format 3", "an SQLite database", "write its rows as JSON lines"),
    (b"<", "no JSON but a page of HTML or XML", "download the file itself"),
)  # fmt: skip
_NO_CONTENT = (
    "it has the lengths of requests and not what their prompts share, so no cache can be replayed; "
    "a trace needs block ids, token ids or text"
)
#: Words in the first line of a table, in lower case, and what the table is.
TABLES: tuple[tuple[tuple[str, ...], str, str], ...] = (
    (("contexttokens", "generatedtokens"), "Azure's trace of lengths", _NO_CONTENT),
    (("request tokens", "response tokens"), "BurstGPT", _NO_CONTENT),
    (("time", "id", "size"), "a libCacheSim trace of objects", "its objects are no blocks of "
     "prompts: there is no prefix in it"),
)  # fmt: skip


def check_head(path: str, head: bytes) -> None:
    """Raise `TraceError` for a file whose first bytes say that it cannot be JSON."""
    for magic, what, advice in FILE_KINDS:
        if head.startswith(magic):
            raise TraceError(path, 1, f"the file is {what}: {advice}")
    text = head.removeprefix(codecs.BOM_UTF8).lstrip()
    line = text.split(b"\n", 1)[0].decode(errors="replace").strip()
    if line[:1] not in ("{", "[", "") and ("," in line or "\t" in line):
        words = [word.strip().strip('"').lower() for word in line.replace("\t", ",").split(",")]
        for needed, what, advice in TABLES:
            if set(needed) <= set(words):
                raise TraceError(path, 1, f"the file is {what}: {advice}")
        if not any(word.replace(".", "").isdigit() for word in words):
            raise TraceError(
                path, 1, "the file is a table, such as CSV, and not JSON lines; if it has prompts, "
                "token ids or block ids, write its rows as JSON"
            )  # fmt: skip


# ---- readers


def _with(prompt: Prompt, record: Record, state: FileState, unit: str | None, extra: str = "",
          model: str = "") -> Prompt:  # fmt: skip
    """Add time and scope."""
    prompt.at = prompt.at or request_parts.moment(record, unit)
    scope = request_parts.scope_of(record, extra + (state.scope if prompt.has_ids else ""))
    prompt.scope = Scope(model, scope.tenant, scope.rest) if model else scope
    return prompt


def _ids(record: Record, state: FileState, ids: str = "hash_ids", size: str = "block_size",
         unit: str | None = "ms") -> list[Prompt]:  # fmt: skip
    prompt = request_parts.hash_prompt(
        record.get(ids), ids, request_parts.given_input_length(record)
    )
    stated = record.get(size, state.block_tokens)
    if stated is not None:
        stated = request_parts.stated_size(size, stated)
    prompt.source_block_tokens = stated
    prompt.output_length = request_parts.output_length(record, state.options)
    session = str(record.get("session_id", "")) if state.local_ids else ""
    return [_with(prompt, record, state, unit, session)]


def _mooncake(record: Record, state: FileState) -> list[Prompt]:
    found = _ids(record, state)
    if isinstance(label := record.get("label"), str):
        found[0].label = label
    return found


def _agentic_header(record: Record, state: FileState) -> list[Prompt]:
    if record.get("block_size") is not None:
        state.block_tokens = request_parts.stated_size("block_size", record["block_size"])
    state.local_ids = record.get("hash_id_scope") == "local"
    return []


def _agentic(record: Record, state: FileState) -> list[Prompt]:
    """A request that may wait for others: it comes `delay` ms after the last of them came, or after
    the one before it in its session."""
    found = _ids(record, state)
    waits = record.get("wait_for") or []
    if not isinstance(waits, list):
        raise ValueError(f"wait_for is not a list of requests: {request_parts.quoted(waits)}")
    (prompt,) = found
    before = f"the last of {record.get('session_id')}"
    if prompt.at is None and not waits and before in state.arrivals_ms:
        waits = [before]
    if prompt.at is None and waits:
        unknown = [name for name in waits if str(name) not in state.arrivals_ms]
        if unknown:
            raise ValueError(f"wait_for names a request that did not come before: {unknown[0]!r}")
        delay = request_parts.moment({"t": record.get("delay") or 0})
        assert delay is not None
        at_ms = max(state.arrivals_ms[str(name)] for name in waits) + delay.value
        prompt.at = Moment(at_ms, None, "ms")
        state.notes["requests that wait for others come `delay` after those came: how long the "
                    "others ran is not in the file"] = None  # fmt: skip
    if prompt.at is not None:
        state.arrivals_ms[before] = prompt.at.value
        state.arrivals_ms[str(record.get("request_id"))] = prompt.at.value
    return found


def _dynamo(record: Record, state: FileState) -> list[Prompt]:
    if record["event_type"] != "request_end":
        return []
    request = record.get("request")
    if not isinstance(request, dict):
        raise ValueError("request is missing")
    replay = request.get("replay")
    if not isinstance(replay, dict):
        raise ValueError("request.replay is missing: the trace was written without block hashes")
    merged = {**request, **replay}
    found = _ids(merged, state, "input_sequence_hashes", "trace_block_size")
    if request.get("request_received_ms") is not None:
        at = request_parts.moment({"t_ms": request["request_received_ms"]})
    else:
        at = request_parts.moment({"t_ms": record.get("event_time_unix_ms")})
    found[0].at = at
    return found


def _weka(record: Record, state: FileState) -> list[Prompt]:
    """All requests of a session, whose ids and times may be its own."""
    local = record.get("hash_id_scope", "local") == "local"
    session = str(record.get("id", "")) if local else ""
    found: list[Prompt] = []

    def add(requests: object, start: float) -> None:
        if not isinstance(requests, list):
            raise ValueError(f"requests is not a list: {request_parts.quoted(requests)}")
        for request in requests:
            if not isinstance(request, dict):
                raise ValueError(f"requests has something in it that is no request: "
                                 f"{request_parts.quoted(request)}")  # fmt: skip
            at = request_parts.moment({"t": request.get("t") or 0})
            assert at is not None
            at_s = at.value * request_parts.MS_PER_UNIT[at.unit or "s"] / 1000
            if "requests" in request:
                add(request["requests"], start + at_s)
                continue
            if "hash_ids" not in request:
                continue  # a step that asks no model
            prompt = request_parts.hash_prompt(
                request["hash_ids"], "hash_ids", request_parts.given_input_length(request)
            )
            stated = request.get("block_size", record.get("block_size"))
            if stated is not None:
                prompt.source_block_tokens = request_parts.stated_size("block_size", stated)
            prompt.output_length = request_parts.output_length(request, state.options)
            prompt.at = Moment(start + at_s, "s")
            found.append(_with(prompt, {**record, **request}, state, "s", session))

    add(record["requests"], 0.0)
    if local:
        state.notes["every session begins at 0 s: their times count from their own beginnings"] = (
            None
        )
    return found


def _tokens(record: Record, state: FileState) -> list[Prompt]:
    name = next(n for n in request_parts.TOKEN_FIELDS if isinstance(record.get(n), list))
    return _counted(request_parts.token_prompt(record[name], name, state.options), record, state)


def _counted(prompt: Prompt, record: Record, state: FileState, unit: str | None = None
             ) -> list[Prompt]:  # fmt: skip
    """Add what the record says beside its prompt."""
    if prompt.kind == b"text":
        given = request_parts.given_input_length(record)
        if given is not None:
            prompt.input_length, prompt.text_bytes = given, len(prompt.data)
    if prompt.output_length is None:
        prompt.output_length = request_parts.output_length(record, state.options)
    return [_with(prompt, record, state, unit)]


def _chat(record: Record, state: FileState) -> list[Prompt]:
    if isinstance(record["messages"], str):  # as some logs write them
        try:
            record = {**record, "messages": json.loads(record["messages"])}
        except ValueError:
            raise ValueError("messages is not a list of messages, nor one as JSON") from None
    metadata = record.get("metadata")
    if isinstance(metadata, dict) and "tenant" not in record:
        team = metadata.get("user_api_key_team_id") or metadata.get("user_api_key_org_id")
        record = {**record, "tenant": team} if team else record
    return _counted(request_parts.chat_prompt(record, state.options), record, state)


def _aiperf(record: Record, state: FileState) -> list[Prompt]:
    if "messages" in record:
        prompt = request_parts.chat_prompt(record, state.options)
    else:
        prompt = _text(record, "text_input", state)
    return _counted(prompt, record, state, "ms")


def _text(record: Record, name: str, state: FileState) -> Prompt:
    value = record[name]
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text: {request_parts.quoted(value)}")
    return request_parts.text_prompt(value.encode(errors="surrogatepass"), state.options)


def _responses(record: Record, state: FileState) -> list[Prompt]:
    if record.get("previous_response_id"):
        state.notes["requests that name a previous response miss what came before it: their "
                    "prompts are longer than this says"] = None  # fmt: skip
    return _counted(request_parts.responses_prompt(record, state.options), record, state)


_ENVELOPES = ("body", "request_body", "requestBody", "request", "proxy_server_request", "kwargs")


def _inner(record: Record) -> Record | None:
    """The request inside a line of a batch file or of a gateway's log."""
    for name in _ENVELOPES:
        inner = record.get(name)
        if isinstance(inner, str):
            try:
                inner = json.loads(inner)
            except (ValueError, RecursionError):
                continue
        if isinstance(inner, dict):
            merged = {**{k: v for k, v in record.items() if k != name}, **inner}
            if any(row.fits(merged) for row in FORMATS if row.read and row.name != "envelope"):
                return merged
            if isinstance(inner.get("body"), dict):  # method, url, headers, body
                return {**{k: v for k, v in record.items() if k != name}, **inner["body"]}
    return None


def _envelope(record: Record, state: FileState) -> list[Prompt]:
    inner = _inner(record)
    assert inner is not None
    return prompts(inner, state)[1]


def _dialogue(record: Record, state: FileState) -> list[Prompt]:
    name = "conversations" if "conversations" in record else "conversation"
    found = request_parts.dialogue_prompts(record[name], name, state.options)
    return _together(found, record, state)


def _together(found: list[Prompt], record: Record, state: FileState) -> list[Prompt]:
    for prompt in found:
        _with(prompt, record, state, None)
    if len(found) > 1 and found[0].at is not None:
        state.notes[
            "all turns of a dialogue come at its time: when each came is not in the file"
        ] = None
    return found


def _turns(record: Record, state: FileState) -> list[Prompt]:
    found = request_parts.turn_prompts(record["turns"], state.options)
    for prompt in found:
        prompt.output_length = request_parts.output_length(record, state.options)
    return _together(found, record, state)


def _plain(record: Record, state: FileState) -> list[Prompt]:
    name = next(n for n in request_parts.TEXT_FIELDS if n in record)
    value = record[name]
    found: list[Prompt]
    if isinstance(value, str):
        return _counted(_text(record, name, state), record, state)
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        # Several prompts in one call of a completions API.
        found = [request_parts.text_prompt(part.encode(errors="surrogatepass"), state.options)
                 for part in value]  # fmt: skip
    elif isinstance(value, list) and len(value) > 1 and all(isinstance(p, list) for p in value):
        found = [request_parts.token_prompt(part, name, state.options) for part in value]
    elif isinstance(value, list):
        return _counted(request_parts.token_prompt(value, name, state.options), record, state)
    else:
        raise ValueError(
            f"{name} is no text and no list of token ids: {request_parts.quoted(value)}"
        )
    for prompt in found:
        # Lengths in the record are those of all its prompts together.
        prompt.output_length = request_parts.output_length(record, state.options)
        _with(prompt, record, state, None)
    return found


class _KvEvents:
    """The requests that a stream of stored blocks shows.

    A run of blocks that goes on at the end of an earlier run belongs to that request: it is the
    next part of a long prompt, or what was decoded. (It may be the next turn of a dialogue; that
    looks the same.) A run that begins at a root or branches off is a request that hit the blocks
    before it.
    """

    def __init__(self) -> None:
        self._parents: dict[object, object] = {}
        #: The last block of each request -> its number.
        self._ends: dict[object, int] = {}
        self._requests: list[tuple[list[object], int, Moment | None, Scope]] = []

    def stored(self, event: Record, at: Moment | None) -> None:
        """Take one event."""
        blocks, parent = event.get("block_hashes"), event.get("parent_block_hash")
        if not isinstance(blocks, list) or not blocks:
            raise ValueError(
                f"block_hashes is not a list of blocks: {request_parts.quoted(blocks)}"
            )
        size = request_parts.stated_size("block_size", event.get("block_size"))
        for block in blocks:
            if type(block) not in (int, str):
                raise ValueError(
                    f"block_hashes has no block hash in it: {request_parts.quoted(block)}"
                )
        if parent is not None and type(parent) not in (int, str):
            raise ValueError(f"parent_block_hash is no block hash: {request_parts.quoted(parent)}")
        number = self._ends.pop(parent, None) if parent is not None else None
        before = parent
        for block in blocks:
            self._parents[block] = before
            before = block
        if number is None:
            number = len(self._requests)
            chain = self._chain(parent) + blocks
            self._requests.append((chain, size, at, request_parts.scope_of(event)))
        else:
            self._requests[number][0].extend(blocks)
        self._ends[blocks[-1]] = number

    def _chain(self, block: object) -> list[object]:
        chain = []
        seen = set()
        while block is not None and block not in seen:
            seen.add(block)
            chain.append(block)
            block = self._parents.get(block)
        return chain[::-1]

    def prompts(self) -> list[Prompt]:
        found = []
        for chain, size, at, scope in self._requests:
            prompt = request_parts.hash_prompt(chain, "block_hashes", len(chain) * size)
            prompt.source_block_tokens, prompt.at, prompt.scope = size, at, scope
            found.append(prompt)
        return found


def _batch_of_events(batch: Sequence[Any]) -> Record:
    """vLLM's events as it sends them: [time, [event, ...], rank]."""
    if len(batch) < 2 or not isinstance(batch[1], list):
        raise ValueError(f"the record is not a JSON object: {request_parts.quoted(list(batch))}")
    return {"ts": batch[0], "events": batch[1]}


_EVENT_FIELDS = ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id")


def _kv_events(record: Record, state: FileState) -> list[Prompt]:
    events = record.get("events", [record])
    if not isinstance(events, list):
        raise ValueError(f"events is not a list: {request_parts.quoted(events)}")
    state.kv_events = state.kv_events or _KvEvents()
    state.notes["a stream of KV events shows the blocks that were stored, and no request that found "
                "all its blocks: the requests and the hits are a lower bound"] = None  # fmt: skip
    for event in events:
        if isinstance(event, list) and event:
            event = {"type": event[0], **dict(zip(_EVENT_FIELDS, event[1:], strict=False))}
        if not isinstance(event, dict):
            raise ValueError(f"an event is not a JSON object: {request_parts.quoted(event)}")
        kind = event.get("type", event.get("event_type", "BlockStored"))
        if kind in ("BlockStored", "stored"):
            state.kv_events.stored(event, request_parts.moment({**record, **event}, "s"))
    return []


def _schema_is(beginning: str) -> Callable[[Record], bool]:
    return lambda record: str(record["schema"]).startswith(beginning)


def _is_agentic(record: Record) -> bool:
    return isinstance(record.get("hash_ids"), list)


def _has_turns_of_text(record: Record) -> bool:
    turns = record["turns"]
    return not (isinstance(turns, list) and turns and isinstance(turns[0], dict))


def _has_token_list(record: Record) -> bool:
    return any(isinstance(record.get(name), list) for name in request_parts.TOKEN_FIELDS)


def _is_responses(record: Record) -> bool:
    given = record["input"]
    if isinstance(given, list):
        return bool(given) and isinstance(given[0], dict)
    return any(name in record for name in ("instructions", "previous_response_id"))


#: The table. Rows that need more fields come before those that need fewer.
FORMATS: tuple[Format, ...] = (
    Format(
        "dynamo-request-trace", "Dynamo's request trace (also its shards, .jsonl.gz)",
        ("schema event_type",), _dynamo,
        '{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {"request_received_ms": 1777312800000, "output_tokens": 16, "replay": {"trace_block_size": 64, "input_length": 128, "input_sequence_hashes": [11, 22]}}}\n'
        '{"schema": "dynamo.request.trace.v1", "event_type": "request_end", "request": {"request_received_ms": 1777312800100, "output_tokens": 16, "replay": {"trace_block_size": 64, "input_length": 190, "input_sequence_hashes": [11, 22, 33]}}}',
        _schema_is("dynamo.request.trace"),
    ),
    Format(
        "dynamo-agentic", "Dynamo's agentic Mooncake traces: a header, requests that wait for others",
        ("schema hash_id_scope",), _agentic_header,
        '{"schema": "dynamo.agentic_mooncake", "version": 2, "block_size": 64, "hash_id_scope": "local"}\n'
        '{"request_id": "r0", "session_id": "p", "input_length": 128, "output_length": 4, "hash_ids": [1, 2], "timestamp": 0.0}\n'
        '{"request_id": "r1", "session_id": "p", "input_length": 192, "output_length": 4, "hash_ids": [1, 2, 3], "wait_for": ["r0"], "delay": 5.0}',
        _schema_is("dynamo.agentic"),
    ),
    Format(
        "dynamo-agentic", "a request of it",
        ("hash_ids request_id session_id", "hash_ids wait_for", "hash_ids delay"), _agentic, "",
        _is_agentic,
    ),
    Format(
        "lmcache-lookups", "LMCache's log of look-ups by chunk hashes",
        ("chunk_hashes chunk_size",), partial(_ids, ids="chunk_hashes", size="chunk_size", unit="s"),
        '{"timestamp": 1711929600.123, "model_name": "DeepSeek-V3", "chunk_size": 256, "seq_len": 600, "chunk_hashes": ["0xabcd", "0xef56"]}\n'
        '{"timestamp": 1711929601.123, "model_name": "DeepSeek-V3", "chunk_size": 256, "seq_len": 800, "chunk_hashes": ["0xabcd", "0xef56", "0x11"]}',
    ),
    Format(
        "weka", "Weka's agent traces: a session a record, ids local to it",
        ("requests block_size", "requests hash_id_scope"), _weka,
        '{"id": "trace_0001", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "model": "c", "in": 128, "out": 9, "hash_ids": [1, 2]}, {"t": 4.5, "model": "c", "in": 190, "out": 9, "hash_ids": [1, 2, 3]}]}\n'
        '{"id": "trace_0002", "block_size": 64, "hash_id_scope": "local", "requests": [{"t": 0.0, "model": "c", "in": 128, "out": 9, "hash_ids": [1, 2]}]}',
    ),
    Format(
        "vllm-kv-events", "vLLM's KV cache events as JSON, one event or one batch a line",
        ("block_hashes", "events"), _kv_events,
        '{"ts": 1711929600.0, "events": [{"type": "BlockStored", "block_hashes": [11, 22], "parent_block_hash": null, "block_size": 16}]}\n'
        '{"ts": 1711929605.0, "events": [{"type": "BlockStored", "block_hashes": [33], "parent_block_hash": 11, "block_size": 16}]}',
    ),
    Format(
        "bailian", "Bailian's and Qwen's traces: blocks of 16 tokens, times in seconds",
        ("hash_ids chat_id", "hash_ids parent_chat_id", "hash_ids turn type"), partial(_ids, unit="s"),
        '{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 41, "output_length": 13, "type": "text", "turn": 1, "hash_ids": [0, 1, 2]}\n'
        '{"chat_id": 160, "parent_chat_id": 159, "timestamp": 75.5, "input_length": 60, "output_length": 10, "type": "text", "turn": 2, "hash_ids": [0, 1, 7, 8]}',
    ),
    Format(
        "mooncake", "Mooncake's traces, which all commands read",
        ("timestamp input_length hash_ids",), _mooncake,
        '{"timestamp": 0, "input_length": 1100, "output_length": 40, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 2700, "input_length": 1300, "output_length": 7, "hash_ids": [0, 1, 3]}',
    ),
    Format(
        "kvcache-simulator", "kvcache-simulator's dialect: the block size in each record",
        ("hash_ids block_size",), _mooncake,
        '{"block_size": 64, "hash_ids": [1, 2], "input_length": 128}\n'
        '{"block_size": 64, "hash_ids": [1, 2, 3], "input_length": 190}',
    ),
    Format(
        "dynamo-mooncake", "Dynamo's and AIPerf's names for Mooncake's fields",
        ("hash_ids created_time", "hash_ids input_tokens"), _mooncake,
        '{"created_time": 0.0, "input_tokens": 1000, "output_tokens": 5, "hash_ids": [0, 1]}\n'
        '{"created_time": 12.5, "input_tokens": 1100, "output_tokens": 5, "hash_ids": [0, 1, 2]}',
        lambda record: not isinstance(record.get("input_tokens"), list),
    ),
    Format(
        "block-ids", "any record with hash_ids, such as a gateway's log",
        ("hash_ids",), partial(_ids, unit=None),
        '{"ts": 0, "hash_ids": ["9f3a", "01bc"]}\n'
        '{"ts": 3, "hash_ids": ["9f3a", "77aa"]}',
    ),
    Format(
        "token-ids", "token ids: vLLM's and SGLang's token traces and dumps",
        request_parts.TOKEN_FIELDS, _tokens,
        '{"prompt_token_ids": [1, 2, 3], "output_tokens": 2}\n'
        '{"prompt_token_ids": [1, 2, 4], "output_tokens": 7}',
        _has_token_list,
    ),
    Format(
        "aiperf", "AIPerf's Mooncake traces with text or messages in place of ids",
        ("timestamp text_input", "messages timestamp output_length", "text_input output_length"),
        _aiperf,
        '{"timestamp": 0, "text_input": "Once upon a time", "output_length": 52}\n'
        '{"timestamp": 1000, "text_input": "Once upon a midnight", "output_length": 26}',
    ),
    Format(
        "litellm", "LiteLLM's logs",
        ("messages startTime",), _chat,
        '{"startTime": "2026-01-01T00:00:05", "model": "m", "messages": [{"role": "user", "content": "hi"}], "prompt_tokens": 8}\n'
        '{"startTime": "2026-01-01T00:00:09", "model": "m", "messages": [{"role": "user", "content": "ho"}], "prompt_tokens": 8}',
    ),
    Format(
        "anthropic", "Anthropic's messages, with a system prompt beside them",
        ("messages system",), _chat,
        '{"model": "claude", "system": "Be brief.", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 10}\n'
        '{"model": "claude", "system": "Be brief.", "messages": [{"role": "user", "content": "ho"}], "max_tokens": 10}',
    ),
    Format(
        "openai-chat", "chat completions: requests and logs",
        ("messages",), _chat,
        '{"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}], "max_tokens": 9}\n'
        '{"model": "m", "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "ho"}], "max_tokens": 9}',
    ),
    Format(
        "openai-responses", "OpenAI's responses: requests and logs",
        ("input",), _responses,
        '{"model": "m", "instructions": "Be brief.", "input": "hi"}\n'
        '{"model": "m", "instructions": "Be brief.", "input": [{"role": "user", "content": [{"type": "input_text", "text": "ho"}]}]}',
        _is_responses,
    ),
    Format(
        "wildchat", "WildChat: dialogues with a time",
        ("conversation conversation_hash",), _dialogue,
        '{"conversation_hash": "h", "model": "gpt-4", "timestamp": "2023-04-09T00:02:53+00:00", "conversation": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'
        '{"conversation_hash": "i", "model": "gpt-4", "timestamp": "2023-04-09T00:03:10+00:00", "conversation": [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "hello"}]}',
    ),
    Format(
        "lmsys", "LMSYS: dialogues",
        ("conversation",), _dialogue,
        '{"conversation_id": "c", "model": "vicuna", "conversation": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}\n'
        '{"conversation_id": "d", "model": "vicuna", "conversation": [{"role": "user", "content": "ho"}, {"role": "assistant", "content": "hello"}]}',
    ),
    Format(
        "sharegpt", "ShareGPT: dialogues",
        ("conversations",), _dialogue,
        '{"id": "x", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]}\n'
        '{"id": "y", "conversations": [{"from": "human", "value": "ho"}, {"from": "gpt", "value": "hello"}]}',
    ),
    Format(
        "copilot", "a log of turns with counts of tokens", ("turns",), None, "",
        lambda record: not _has_turns_of_text(record), _NO_CONTENT,
    ),
    Format(
        "turns", "user messages alone: Spec-Bench, MT-Bench",
        ("turns",), _turns,
        '{"question_id": 81, "turns": ["Write a haiku.", "Make it rhyme."]}\n'
        '{"question_id": 82, "turns": ["Write a haiku."]}',
    ),
    Format(
        "envelope", "a request inside a record: OpenAI's batch files, logs of gateways",
        _ENVELOPES, _envelope,
        '{"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}}\n'
        '{"custom_id": "2", "method": "POST", "url": "/v1/chat/completions", "body": {"model": "m", "messages": [{"role": "user", "content": "ho"}], "max_tokens": 5}}',
        lambda record: _inner(record) is not None,
    ),
    Format(
        "text", "one prompt as text: vLLM's custom data set, SGLang's, completions",
        request_parts.TEXT_FIELDS, _plain,
        '{"prompt": "Once upon a time", "output_tokens": 20}\n'
        '{"prompt": "Once upon a midnight", "output_tokens": 20}',
    ),
    Format(
        "openai-batch-output", "the output of a batch", ("custom_id response",), None, "",
        refusal="its prompts are in the batch's input file",
    ),
    Format(
        "lengths", "a trace of lengths", request_parts.INPUT_LENGTH_FIELDS[:-1], None, "",
        refusal=_NO_CONTENT,
    ),
)  # fmt: skip


def readable() -> list[Format]:
    """The rows that a person may want to read about: each format once."""
    return [row for row in FORMATS if row.read is not None and row.example]
